"""The inputs of a probe from vLLM's base model: its input embedding, and in every step the inputs of some layers.

The engine passes neither to a logits processor, so they are taken from its model runner.
"""

from __future__ import annotations

import gc
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from lenvm_kernels.engines.settings import Settings
from lenvm_kernels.values import LengthProbe

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcRequestState


def runner_of(req_states: LogitsProcRequestState) -> GPUModelRunner:
    """The model runner that has these requests. No object that is passed to a processor refers to it."""
    for found in gc.get_objects():
        if issubclass(type(found), GPUModelRunner) and found.req_states.all_token_ids is req_states.all_token_ids:
            return found
    raise RuntimeError("LENVM_VALUE_MODEL must not be a probe here: no model runner of vLLM has these requests")


def load_probe(settings: Settings, config: ModelConfig, model: torch.nn.Module) -> LengthProbe:
    """The probe of the settings, for the engine's base model.

    Raises:
        ValueError: as :meth:`Settings.load_probe`, or the base model's input embedding is not available.
    """
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
    return settings.load_probe(config.get_total_num_hidden_layers(), weight)


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

    Args:
        runner: the engine's runner. Its ``sample_tokens``, which computes logits from the states, is wrapped.
        probe: the probe that reads the states.

    Raises:
        ValueError: as :func:`show_layers`.
    """

    def __init__(self, runner: GPUModelRunner, probe: LengthProbe) -> None:
        layers, last = probe.config.layers, probe.config.num_layers
        inner = sorted({*layers} - {last})
        if inner:
            show_layers(runner, inner)
        self._places = [[*inner, last].index(layer) for layer in layers]
        self._step: Any = None
        sample_tokens = runner.sample_tokens

        @wraps(sample_tokens)
        def keeping(*args: Any, **kwargs: Any) -> Any:
            self._step = runner.execute_model_state
            try:
                return sample_tokens(*args, **kwargs)
            finally:
                self._step = None

        runner.sample_tokens = keeping

    def of_rows(self, ctx: LogitsContext) -> torch.Tensor:
        """``[rows, L H]``; states of the rows of a processor's step."""
        step, batch = self._step, self._step.input_batch
        # Drafts may be verified for some requests at a time, which are adjacent and in the order of the batch.
        place = batch.idx_mapping_np.tolist().index(ctx.idx_mapping_np[0])
        first = int(batch.cu_num_logits_np[place])
        at = batch.logits_indices[first : first + len(ctx.pos)]
        states = [*(step.aux_hidden_states or ()), step.hidden_states]
        return torch.cat([states[place][at] for place in self._places], dim=1)
