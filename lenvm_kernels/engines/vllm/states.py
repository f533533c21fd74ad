"""The inputs of a probe from vLLM's base model: its input embedding, and in every step the inputs of some layers.

The engine passes neither to a logits processor, so they are taken from its model runner.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.lora.layers import LogitsProcessorWithLoRA
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from lenvm_kernels.engines.settings import Settings
from lenvm_kernels.values import LengthProbe

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext


def calling_runner() -> GPUModelRunner:
    """The model runner that is creating its processors. It passes them no reference to itself."""
    frame = inspect.currentframe()
    while frame is not None:
        if isinstance(found := frame.f_locals.get("self"), GPUModelRunner):
            return found
        frame = frame.f_back
    raise RuntimeError("no model runner of vLLM is creating its processors")


def load_probe(settings: Settings, runner: GPUModelRunner) -> LengthProbe:
    """The probe of the settings, for the engine's base model.

    Raises:
        ValueError: as :meth:`Settings.load_probe`, or the base model's input embedding is not available.
    """
    model = runner.get_model()
    tables = (m for m in model.modules() if isinstance(m, VocabParallelEmbedding))
    embedding = next((m for m in tables if not isinstance(m, ParallelLMHead)), None)
    weight = getattr(embedding, "weight", None)  # quantized weights may have other names
    if weight is None:
        raise ValueError(
            f"LENVM_VALUE_MODEL must not be a probe with this base model: {type(model).__name__} has no input "
            "embedding that is not quantized"
        )
    weight = weight.detach()
    assert embedding is not None
    if embedding.tp_size > 1:  # each rank has a part, and padding
        if added := embedding.num_added_embeddings:
            raise ValueError(f"the base model's embedding must have no tokens added for LoRA, got {added}")
        weight = get_tp_group().all_gather(weight, dim=0)[: embedding.org_vocab_size]
    return settings.load_probe(runner.model_config.get_total_num_hidden_layers(), weight)


def show_layers(runner: GPUModelRunner, layers: list[int]) -> None:
    """Make the base model return the inputs of these layers in addition to its last states, as for EAGLE-3.

    Raises:
        ValueError: the base model does not support this, or drafts come from a model, which would read these states.
    """
    reason = None
    if not supports_eagle3(runner.model):
        reason = f"{type(runner.model).__name__} shows no others"
    elif isinstance(runner.speculator, DraftModelSpeculator):
        reason = "the model that drafts would be given others, too"
    if reason is not None:
        raise ValueError(
            f"LENVM_VALUE_MODEL must be a probe of the last layer alone here, got one of layers {layers}, too: {reason}"
        )
    runner.model.set_aux_hidden_state_layers(tuple(layers))
    runner.use_aux_hidden_state_outputs = True
    # The outputs are part of the compiled model, which the engine caches by a hash of its configuration.
    runner.vllm_config.additional_config["lenvm_layers"] = layers


class BaseStates:
    """The states of the base model that a probe reads in a step.

    The last states are the input of the base model's layer that computes logits. Only for inner layers, the runner's
    ``sample_tokens`` is wrapped, which holds their states.

    Args:
        runner: the engine's runner.
        probe: the probe that reads the states.

    Raises:
        ValueError: the base model has no such layer; or as :func:`show_layers`.
    """

    def __init__(self, runner: GPUModelRunner, probe: LengthProbe) -> None:
        layers, last = probe.config.layers, probe.config.num_layers
        inner = sorted({*layers} - {last})
        self._places = [[*inner, last].index(layer) for layer in layers]
        self._last, self._inner = torch.empty(0), list[torch.Tensor]()
        # A server with adapters calls the second class, which contains the first.
        kinds = LogitsProcessor, LogitsProcessorWithLoRA
        modules = [m for m in runner.get_model().modules() if isinstance(m, kinds)]
        if not modules:
            raise ValueError(
                f"LENVM_VALUE_MODEL must not be a probe with this base model: {type(runner.model).__name__} computes "
                "its logits without vLLM's LogitsProcessor"
            )
        for module in modules:
            module.register_forward_pre_hook(self._keep_last, with_kwargs=True)
        if inner:
            show_layers(runner, inner)
            self._keep_inner(runner)

    def _keep_last(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        self._last = args[1] if len(args) > 1 else kwargs["hidden_states"]

    def _keep_inner(self, runner: GPUModelRunner) -> None:
        sample_tokens = runner.sample_tokens

        @wraps(sample_tokens)
        def keeping(*args: Any, **kwargs: Any) -> Any:
            if (step := runner.execute_model_state) is not None:
                self._inner = [states[step.input_batch.logits_indices] for states in step.aux_hidden_states or ()]
            return sample_tokens(*args, **kwargs)

        runner.sample_tokens = keeping

    def of_rows(self, ctx: LogitsContext) -> torch.Tensor:
        """``[rows, L H]``; states of the rows of a processor's step."""
        # The engine may verify drafts for some requests at a time, in views of the step's rows.
        first = ctx.pos.storage_offset()
        states = [x[first : first + len(ctx.pos)] for x in (*self._inner, self._last)]
        return torch.cat([states[place] for place in self._places], dim=1)


def after_reload(runner: GPUModelRunner, call: Callable[[], None]) -> None:
    """Call a function whenever the base model's weights have been replaced: the engine then resets its adapters."""
    reset_lora_state = runner.reset_lora_state

    @wraps(reset_lora_state)
    def reset() -> None:
        reset_lora_state()
        call()

    runner.reset_lora_state = reset
