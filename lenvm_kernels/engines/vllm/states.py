"""The rows of a step of vLLM, and the inputs of a probe: the base model's embedding, and inputs of some layers.

Probe inputs are read from the model runner, because the engine does not pass them to a logits processor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.lora.layers import LogitsProcessorWithLoRA
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from lenvm_kernels.engines.settings import Settings
from lenvm_kernels.engines.tensors import to_device, whole_embedding
from lenvm_kernels.types import Drafts
from lenvm_kernels.values import LengthProbe

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext


def calling_runner() -> GPUModelRunner:
    """The model runner that is creating its processors, found on the stack, because it does not pass itself."""
    frame = inspect.currentframe()
    while frame is not None:
        if isinstance(found := frame.f_locals.get("self"), GPUModelRunner):
            return found
        frame = frame.f_back
    raise RuntimeError("no model runner of vLLM is creating its processors")


def load_probe(settings: Settings, runner: GPUModelRunner) -> LengthProbe:
    """:meth:`Settings.load_probe` for the engine's base model.

    Also raises ValueError if the base model has no plain input embedding.
    """
    model = runner.get_model()
    tables = (m for m in model.modules() if isinstance(m, VocabParallelEmbedding))
    embedding = next((m for m in tables if not isinstance(m, ParallelLMHead)), None)
    if getattr(embedding, "weight", None) is None:  # quantized weights may have other names
        raise ValueError(
            f"LENVM_VALUE_MODEL must not be a probe with this base model: {type(model).__name__} has no input "
            "embedding that is not quantized"
        )
    weight = whole_embedding(embedding, lambda part: get_tp_group().all_gather(part, dim=0))
    return settings.load_probe(runner.model_config.get_total_num_hidden_layers(), weight)


class BaseStates:
    """The states of the base model that a probe reads in a step.

    The last states are the input of the base model's logits layer. For inner layers, the runner's ``sample_tokens`` is
    wrapped, which has access to their states.

    Raises:
        ValueError: the base model cannot return the states, or a draft model would read them.
    """

    def __init__(self, runner: GPUModelRunner, probe: LengthProbe) -> None:
        layers, last = probe.config.layers, probe.config.num_layers
        inner = sorted({*layers} - {last})
        self._places = [[*inner, last].index(layer) for layer in layers]
        self._last, self._inner = torch.empty(0), list[torch.Tensor]()
        # With LoRA adapters, the second class wraps the first.
        kinds, name = (LogitsProcessor, LogitsProcessorWithLoRA), type(runner.model).__name__
        modules = [m for m in runner.get_model().modules() if isinstance(m, kinds)]
        if not modules:
            raise ValueError(
                f"LENVM_VALUE_MODEL must not be a probe with this base model: {name} computes its logits without "
                "vLLM's LogitsProcessor"
            )
        for module in modules:
            module.register_forward_pre_hook(self._keep_last, with_kwargs=True)
        if not inner:
            return
        reason = None
        if not supports_eagle3(runner.model):
            reason = f"{name} does not return others"
        elif isinstance(runner.speculator, DraftModelSpeculator):
            reason = "the draft model would read them"
        if reason is not None:
            raise ValueError(
                f"LENVM_VALUE_MODEL must be a probe of the last layer only, got one that also reads layers {inner}: "
                f"{reason}"
            )
        self._keep_inner(runner, inner)

    def _keep_last(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        self._last = args[1] if len(args) > 1 else kwargs["hidden_states"]

    def _keep_inner(self, runner: GPUModelRunner, layers: list[int]) -> None:
        """Make the base model also return the inputs of these layers, as for EAGLE-3."""
        runner.model.set_aux_hidden_state_layers(tuple(layers))
        runner.use_aux_hidden_state_outputs = True
        # Outputs change the compiled model, which the engine caches by a hash of its configuration.
        runner.vllm_config.additional_config["lenvm_layers"] = layers
        sample_tokens = runner.sample_tokens

        @wraps(sample_tokens)
        def keeping(*args: Any, **kwargs: Any) -> Any:
            if (step := runner.execute_model_state) is not None:
                self._inner = [states[step.input_batch.logits_indices] for states in step.aux_hidden_states or ()]
            return sample_tokens(*args, **kwargs)

        runner.sample_tokens = keeping

    def of_rows(self, ctx: LogitsContext) -> torch.Tensor:
        """States ``[rows, L H]`` of the rows of a processor's step."""
        # The engine may verify drafts in parts, in views of the step's rows.
        first = ctx.pos.storage_offset()
        states = [x[first : first + len(ctx.pos)] for x in (*self._inner, self._last)]
        return torch.cat([states[place] for place in self._places], dim=1)


def after_reload(runner: GPUModelRunner, call: Callable[[], None]) -> None:
    """Call a function after the base model's weights are replaced, when the engine resets its LoRA state."""
    reset_lora_state = runner.reset_lora_state

    @wraps(reset_lora_state)
    def reset() -> None:
        reset_lora_state()
        call()

    runner.reset_lora_state = reset


class Part(NamedTuple):
    """``B`` requests of a step, and their rows. The *nodes* of a request are its last token and its drafts.

    Attributes:
        ctx: the engine's description of the step.
        places: int64 ``[B]``, on the host; places of the requests in the batch.
        host_slots, slots: int ``[B]``; slots of the requests, on the host and on the device.
        rows: int64 ``[B, N]``; the engine's row of each node, arbitrary for missing nodes.
        at: int64 ``[rows]``; index of the node of each row, over all requests; ``B N`` for rows of other requests.
        is_whole: whether node ``i`` is row ``i``, because there are no other rows and no missing nodes.
    """

    ctx: LogitsContext
    places: np.ndarray
    host_slots: np.ndarray
    slots: torch.Tensor
    rows: torch.Tensor
    at: torch.Tensor
    is_whole: bool

    @classmethod
    def whole(cls, ctx: LogitsContext, at: torch.Tensor) -> Part:
        """All requests of a step without drafts; ``at`` are the numbers of its rows."""
        places, slots = np.arange(len(ctx.idx_mapping_np)), ctx.idx_mapping.long()
        return cls(ctx, places, ctx.idx_mapping_np, slots, at[:, None], at, True)

    @classmethod
    def of(cls, ctx: LogitsContext, places: np.ndarray, nodes: int) -> Part:
        """The requests at these places of a step with drafts; N is ``nodes``."""
        count, requests, rows, device = len(places), len(ctx.idx_mapping), len(ctx.pos), ctx.pos.device
        of_batch, place = (ctx.expanded_local_pos == 0).cumsum(0) - 1, to_device(places, device)
        request = torch.full((requests,), count, device=device)
        request[place] = torch.arange(count, device=device)
        request = request[of_batch]
        first = torch.searchsorted(of_batch, place)
        of_nodes = (first[:, None] + torch.arange(nodes, device=device)).clamp(max=rows - 1)
        at = torch.where(request < count, request * nodes + ctx.expanded_local_pos, count * nodes)
        is_whole = rows == count * nodes and count == requests
        return cls(ctx, places, ctx.idx_mapping_np[places], ctx.idx_mapping.long()[place], of_nodes, at, is_whole)

    def last(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows [rows]`` at the last token of each request, ``[B]``."""
        return rows if self.is_whole and self.rows.shape[1] == 1 else rows[self.rows[:, 0]]

    def by_node(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows [rows, X]`` by node, ``[B N, X]``."""
        return rows if self.is_whole else rows[self.rows.flatten()]

    def by_row(self, nodes: torch.Tensor, otherwise: torch.Tensor | int) -> torch.Tensor:
        """``nodes [B N, ...]`` by row; rows of other requests are ``otherwise``."""
        if self.is_whole:
            return nodes
        is_ours = (self.at < len(nodes)).view(-1, *[1] * (nodes.dim() - 1))
        return torch.where(is_ours, nodes[self.at.clamp(max=len(nodes) - 1)], otherwise)

    def drafts(self, input_ids: torch.Tensor) -> Drafts | None:
        """The drafts of the requests as chains, from the token of each row, int ``[rows]``; None without drafts."""
        requests, nodes = self.rows.shape
        if nodes == 1:
            return None
        token_ids = torch.full((requests * nodes + 1,), -1, device=input_ids.device)
        token_ids[self.at] = input_ids.long()
        chain = torch.arange(-1, nodes - 2, dtype=torch.int32, device=input_ids.device).repeat(requests, 1)
        return Drafts(token_ids[:-1].view(requests, -1)[:, 1:], chain)
