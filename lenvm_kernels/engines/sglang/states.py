"""Guidance by a probe in SGLang. Imported only with a probe.

The engine's ``return_hidden_states_mode`` is not used: with EAGLE3 it returns the inputs of other layers, models with a
multi-token predictor return states before the final norm, and no mode returns inner layers and the last state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor

from lenvm_kernels.engines.settings import Settings
from lenvm_kernels.engines.sglang.guide import NOT_TRIED, EngineOptions, Hooks, SGLangGuide, check_options
from lenvm_kernels.engines.tensors import whole_embedding
from lenvm_kernels.ops._common import FLOAT_DTYPES

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

PROBE_OPTIONS: EngineOptions = {
    "pp_size": ((1,), "the last stage has the states, but only the first has the embedding"),
    "enable_torch_compile": ((False,), NOT_TRIED),
}
_OTHER_LAYERS = "it makes the base model return the inputs of other layers"
INNER_PROBE_OPTIONS: EngineOptions = {
    "speculative_algorithm": ((None, "EAGLE", "STANDALONE", "NGRAM"), _OTHER_LAYERS),
    "enable_return_aux_hidden_states": ((False,), _OTHER_LAYERS),
}
_PROCESSOR = "sglang.srt.layers.logits_processor.LogitsProcessor"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"


class ProbeGuide(SGLangGuide):
    """The guidance of a scheduler process with a probe.

    The replay of a CUDA graph calls no hook. So the base model's states of all rows that may be sampled are copied to a
    fixed address, and captured graphs repeat the copy. The step reads the states on the forward's stream, before the
    next forward. For states before the last one, the base model must return inputs of its layers, as for EAGLE3.

    Raises:
        ValueError: an option cannot be combined with a probe, the probe belongs to another base model, or the base
            model does not return the inner states.
    """

    def __init__(
        self, settings: Settings, device: torch.device, drafts: int, runner: ModelRunner, options: Any
    ) -> None:
        check_options(options, PROBE_OPTIONS, "a probe")
        base: Any = runner.model
        self.probe = probe = settings.load_probe(runner.model_config.num_hidden_layers, input_embedding(base))
        super().__init__(settings, device, drafts, probe)
        layers, last = probe.config.layers, probe.config.num_layers
        inner = sorted({*layers} - {last})
        self._has_inner = bool(inner)
        if inner:
            check_options(options, INNER_PROBE_OPTIONS, f"a probe of layers {list(layers)}")
        if inner and hasattr(base, "set_eagle3_layers_to_capture"):
            base.set_eagle3_layers_to_capture([layer - 1 for layer in inner])  # numbered by the previous layer
        # Models interpret the numbers differently, but store the same layers.
        kept = [getattr(module, "layers_to_capture", ()) for module in base.modules()]
        if inner and inner not in (sorted(found) for found in kept if isinstance(found, (list, tuple, set))):
            raise ValueError(
                f"LENVM_VALUE_MODEL must be a probe of the last state for a {type(base).__name__}, which does not "
                f"return the inputs of its layers, got a probe that also reads layers {inner}"
            )
        self._places = [[*inner, last].index(layer) for layer in layers]
        self.node_bytes = probe.config.state_size * probe.dtype.itemsize
        # Excludes the processors of a draft model.
        self._processors = {id(module) for module in base.modules() if isinstance(module, LogitsProcessor)}
        self._inner_states: Any = None
        self._states: torch.Tensor | None = None

    @property
    def hooks(self) -> Hooks:
        hooks: Hooks = {
            f"{_PROCESSOR}._get_pruned_states": ("AROUND", self.keep_states),
            f"{_UPDATER}.record_weight_version_after_update": ("AFTER", self.update_probe),
        }
        if self._has_inner:
            hooks[f"{_PROCESSOR}.forward"] = "AROUND", self.hide_inner_states
        return super().hooks | hooks

    def take_slots(self, _: Any, runner: ModelRunner, *args: Any, **kwargs: Any) -> None:
        """As in :class:`SGLangGuide`, before the engine captures its graphs."""
        super().take_slots(_, runner, *args, **kwargs)
        if not runner.is_draft_worker:
            self.allocate(self.step.max_requests * (1 + self.drafts))

    def allocate(self, rows: int) -> None:
        """Allocate memory for the states of ``rows`` rows. Further rows of a forward are padding."""
        probe = self.probe
        self._states = torch.zeros(rows, probe.config.state_size, dtype=probe.dtype, device=probe.device)

    def states_of(self, logits: torch.Tensor) -> torch.Tensor:
        """The base model's states of the last forward, ``[rows, L H]``, in the rows of the logits."""
        assert self._states is not None
        return self._states[: len(logits)]

    def hide_inner_states(
        self,
        original: Callable,
        processor: LogitsProcessor,
        input_ids: Any,
        hidden_states: torch.Tensor,
        lm_head: Any,
        metadata: Any,
        aux_hidden_states: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Around a processor's forward, which would return the inner states as a request's hidden states."""
        if id(processor) in self._processors:
            self._inner_states, aux_hidden_states = aux_hidden_states, None
        try:
            return original(processor, input_ids, hidden_states, lm_head, metadata, aux_hidden_states, *args, **kwargs)
        finally:
            self._inner_states = None

    def keep_states(
        self,
        original: Callable,
        processor: LogitsProcessor,
        hidden_states: torch.Tensor,
        before_norm: torch.Tensor | None,
        aux_hidden_states: Any,
        metadata: Any,
    ) -> tuple:
        """Around a processor's selection of rows for logits and of the sampled rows among them: copy their states."""
        is_base = id(processor) in self._processors
        given = self._inner_states if is_base and self._has_inner else aux_hidden_states
        pruned = original(processor, hidden_states, before_norm, given, metadata)
        if not is_base:
            return pruned
        states, _, aux_states, sampled, *_ = pruned
        parts = [states]
        if self._has_inner:
            is_packed = isinstance(aux_states, torch.Tensor)
            parts = [*(aux_states.split(states.shape[1], dim=1) if is_packed else aux_states), states]
            pruned = pruned[0], pruned[1], None, *pruned[3:]
        if self._states is not None:
            for place, columns in zip(self._places, self._states.split(states.shape[1], dim=1), strict=True):
                rows = parts[place] if sampled is None else parts[place][sampled]
                count = min(len(rows), len(columns))
                columns[:count].copy_(rows[:count])
        return pruned

    def update_probe(self, *args: Any, **kwargs: Any) -> None:
        """After an update of the base model's weights: project its embedding again.

        If the model does not fit the probe any more, further requests with guidance are rejected.
        """
        try:
            self.probe.update(input_embedding(self.runner.model))
            self.failure = None
        except ValueError as error:
            self.failure = str(error)
            logger.error("LenVM: requests with guidance are rejected after a weight update: %s", error)


def input_embedding(model: Any) -> torch.Tensor:
    """The input embedding ``[V, H]`` of a base model, gathered from the tensor-parallel ranks.

    Raises ValueError if it is missing, not a plain tensor, or has tokens added for LoRA.
    """
    if hasattr(model, "get_input_embeddings"):
        module = model.get_input_embeddings()
    else:
        module = getattr(getattr(model, "model", None), "embed_tokens", None)
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dtype not in FLOAT_DTYPES:
        came = f"{type(module).__name__} in {type(model).__name__}" if weight is None else str(weight.dtype)
        raise ValueError(f"the base model must have an input embedding in float32, bfloat16 or float16, got {came}")
    return whole_embedding(module, lambda part: module.tp_group.all_gather(part, dim=0))
