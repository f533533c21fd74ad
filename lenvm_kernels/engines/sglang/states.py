"""Guidance by a probe in SGLang. Imported only with a probe.

The engine can return the hidden states of sampled rows itself (``return_hidden_states_mode``). A probe does not use
them: with EAGLE3 the engine returns the inputs of other layers instead, models with a multi-token predictor return
states before the final norm, and no mode returns inner layers together with the last state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor

from lenvm_kernels.engines.settings import Settings
from lenvm_kernels.engines.sglang.guide import SGLangGuide
from lenvm_kernels.engines.sglang.options import INNER_PROBE_OPTIONS, PROBE_OPTIONS, check_options
from lenvm_kernels.ops._common import FLOAT_DTYPES
from lenvm_kernels.values import LengthProbe

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

_PROCESSOR = "sglang.srt.layers.logits_processor.LogitsProcessor"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"


class ProbeGuide(SGLangGuide):
    """The guidance of one scheduler process with a probe.

    Args:
        settings, device, drafts: as in :class:`SGLangGuide`.
        states: the states of the base model, and the probe that reads them.

    Attributes:
        states: as above.
    """

    def __init__(self, settings: Settings, device: torch.device, states: SampledStates, drafts: int = 0) -> None:
        super().__init__(settings, device, drafts, states.probe)
        self.states = states

    @classmethod
    def load(
        cls, settings: Settings, runner: ModelRunner, options: Any, device: torch.device, drafts: int
    ) -> ProbeGuide:
        """Load the probe, and check the engine's options.

        Raises:
            ValueError: an option that a probe cannot be combined with, or another base model than the probe's.
        """
        check_options(options, PROBE_OPTIONS, "a probe")
        probe = settings.load_probe(runner.model_config.num_hidden_layers, input_embedding(runner.model))
        layers = probe.config.layers
        if set(layers) != {probe.config.num_layers}:
            check_options(options, INNER_PROBE_OPTIONS, f"a probe of layers {list(layers)}")
        guide = cls(settings, device, SampledStates(runner.model, probe), drafts)
        guide.reserve(runner, options.max_running_requests)
        return guide

    @property
    def hooks(self) -> dict[str, tuple[str, Callable]]:
        """Kind and function of further hooks, by target."""
        hooks: dict[str, tuple[str, Callable]] = {
            f"{_PROCESSOR}._get_pruned_states": ("AROUND", self.keep_states),
            f"{_UPDATER}.record_weight_version_after_update": ("AFTER", self.update_probe),
        }
        if self.states.has_inner:
            hooks[f"{_PROCESSOR}.forward"] = "AROUND", self.hide_inner_states
        return hooks

    def num_bytes(self, engine: ModelConfig, requests: int, slots: int = 0) -> int:
        """As in :class:`SGLangGuide`, with the states of each node."""
        return super().num_bytes(engine, requests) + requests * (1 + self.drafts) * self.states.row_bytes

    def take_slots(self, runner: ModelRunner) -> None:
        """As in :class:`SGLangGuide`; the engine has not captured its graphs yet."""
        super().take_slots(runner)
        self.states.allocate(self.step.max_requests * (1 + self.drafts))

    def states_of(self, logits: torch.Tensor) -> torch.Tensor:
        """The states of the base model's last forward."""
        return self.states.of(len(logits))

    def keep_states(self, original: Callable, processor: LogitsProcessor, *args: Any, **kwargs: Any) -> tuple:
        """Around the selection of the states that logits are computed from: keep those that the probe reads."""
        if not self.states.are_of(processor):
            return original(processor, *args, **kwargs)
        return self.states.prune(original, processor, *args, **kwargs)

    def hide_inner_states(self, original: Callable, processor: LogitsProcessor, *args: Any, **kwargs: Any) -> Any:
        """Around the computation of logits from the base model's states: hide inner states from the processor."""
        if not self.states.are_of(processor):
            return original(processor, *args, **kwargs)
        return self.states.hide_inner(original, processor, *args, **kwargs)

    def update_probe(self, *args: Any, **kwargs: Any) -> None:
        """After an update of the base model's weights: project its embedding again.

        If the model is not the probe's any more, further requests with guidance are rejected.
        """
        try:
            self.states.probe.update(input_embedding(self.runner.model))
            self.failure = None
        except ValueError as error:
            self.failure = str(error)
            logger.error("LenVM: requests with guidance are rejected since the weights were updated: %s", error)


def input_embedding(model: Any) -> torch.Tensor:
    """The whole input embedding ``[V, H]`` of a base model, gathered from the tensor-parallel ranks.

    Raises:
        ValueError: the model has no input embedding as a plain tensor, or one with tokens added for LoRA.
    """
    if hasattr(model, "get_input_embeddings"):
        module = model.get_input_embeddings()
    else:
        module = getattr(getattr(model, "model", None), "embed_tokens", None)
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dtype not in FLOAT_DTYPES:
        came = f"{type(module).__name__} in {type(model).__name__}" if weight is None else str(weight.dtype)
        raise ValueError(f"the base model must have an input embedding in float32, bfloat16 or float16, got {came}")
    weight = weight.detach()
    if getattr(module, "tp_size", 1) > 1:
        if added := module.num_added_embeddings:
            raise ValueError(f"the base model's embedding must have no tokens added for LoRA, got {added}")
        weight = module.tp_group.all_gather(weight, dim=0)
    return weight[: getattr(module, "org_vocab_size", len(weight))]  # the rest is padding


class SampledStates:
    """The base model's states in each row of a forward that tokens may be sampled from.

    The engine runs forwards from CUDA graphs, whose replay calls no hook. So :meth:`prune` copies the states to a fixed
    address, and a graph that captured the copy repeats it. The step reads the states on the forward's stream, before
    the next forward.

    Args:
        model: the base model. If the probe reads inner states, before the last one, the model must return the inputs of
            its layers, as it does for EAGLE3.
        probe: the probe that reads the states.

    Attributes:
        probe: as above.
        has_inner: whether the probe reads inner states.
        row_bytes: bytes of the states per row.

    Raises:
        ValueError: the model does not return the inner states.
    """

    def __init__(self, model: torch.nn.Module, probe: LengthProbe) -> None:
        self.probe, layers, last = probe, probe.config.layers, probe.config.num_layers
        inner = sorted({layer for layer in layers if layer < last})
        self.has_inner = bool(inner)
        if inner:
            capture_layers(model, inner)
        self._places = [[*inner, last].index(layer) for layer in layers]
        self.row_bytes = probe.config.state_size * probe.dtype.itemsize
        # A draft model has other processors.
        self._processors = {id(module) for module in model.modules() if isinstance(module, LogitsProcessor)}
        self._inner_states: Any = None
        self._rows: torch.Tensor | None = None

    def are_of(self, processor: LogitsProcessor) -> bool:
        """Whether a processor computes logits from the base model's states."""
        return id(processor) in self._processors

    def allocate(self, rows: int) -> None:
        """Allocate memory for ``rows`` rows; further rows of a forward are padding."""
        probe = self.probe
        self._rows = torch.zeros(rows, probe.config.state_size, dtype=probe.dtype, device=probe.device)

    def hide_inner(
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
        """Around a processor's forward, which would return the inner states as the hidden states of requests."""
        self._inner_states = aux_hidden_states
        try:
            return original(processor, input_ids, hidden_states, lm_head, metadata, None, *args, **kwargs)
        finally:
            self._inner_states = None

    def prune(
        self,
        original: Callable,
        processor: LogitsProcessor,
        hidden_states: torch.Tensor,
        before_norm: torch.Tensor | None,
        aux_hidden_states: Any,
        metadata: Any,
    ) -> tuple:
        """Around a processor's selection of the rows for logits, and of the sampled rows among them."""
        given = self._inner_states if self.has_inner else aux_hidden_states
        pruned = original(processor, hidden_states, before_norm, given, metadata)
        states, _, aux_states, sampled, *_ = pruned
        inner: list[torch.Tensor] = []
        if self.has_inner:
            is_packed = isinstance(aux_states, torch.Tensor)
            inner = list(aux_states.split(states.shape[1], dim=1)) if is_packed else aux_states
            pruned = pruned[0], pruned[1], None, *pruned[3:]
        if self._rows is not None:
            parts = [*inner, states]
            for place, columns in zip(self._places, self._rows.split(states.shape[1], dim=1), strict=True):
                rows = parts[place] if sampled is None else parts[place][sampled]
                count = min(len(rows), len(columns))
                columns[:count].copy_(rows[:count])
        return pruned

    def of(self, rows: int) -> torch.Tensor:
        """``[rows, L H]``; states of the first rows of the last forward."""
        assert self._rows is not None
        return self._rows[:rows]


def capture_layers(model: Any, layers: list[int]) -> None:
    """Make a base model return the inputs of these layers, in their order.

    Raises:
        ValueError: the model does not support this.
    """
    if hasattr(model, "set_eagle3_layers_to_capture"):
        model.set_eagle3_layers_to_capture([layer - 1 for layer in layers])  # numbered by the layer before
    # Models interpret the numbers differently, but all store the layers that read the states.
    kept = [getattr(module, "layers_to_capture", ()) for module in model.modules()]
    if layers not in (sorted(captured) for captured in kept if isinstance(captured, (list, tuple, set))):
        raise ValueError(
            f"LENVM_VALUE_MODEL must be a probe of the last state alone for a {type(model).__name__}, which does not "
            f"hand over what layers read, got one that reads layers {layers}, too"
        )
