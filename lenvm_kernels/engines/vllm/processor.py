"""LenVM in unforked vLLM, as a logits processor of its second model runner (entry point ``vllm.logits_processors``).

It is on unless ``LENVM_VALUE_MODEL`` is ``off`` (:class:`lenvm_kernels.engines.settings.Settings`). The engine's front
end imports this module to check requests, so it must not need a device. The code of the workers is in
:mod:`lenvm_kernels.engines.vllm.guide`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor

from lenvm_kernels.engines.settings import Settings
from lenvm_kernels.engines.vllm.requests import guidance_of

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext

    from lenvm_kernels.engines.vllm.guide import Guide


class LenVMProcessor(LogitsProcessor):
    """Guides the requests with guidance in ``vllm_xargs``. vLLM creates one in each worker while it loads the model.

    With ``LENVM_VALUE_MODEL=off``, it does nothing.

    Args:
        vllm_config: configuration of the engine.
        req_states: the engine's state of its requests.
        *is_first_runner: passed only by vLLM's first model runner, which is not supported.

    Raises:
        ValueError: naming a setting or an option of the engine, what came and what is accepted.
    """

    _guide: Guide | None = None

    def __init__(self, vllm_config: VllmConfig, req_states: Any, *is_first_runner: Any) -> None:
        if Settings.is_off():
            return
        if is_first_runner:
            raise ValueError(
                "guidance needs vLLM's second model runner: set VLLM_USE_V2_MODEL_RUNNER=1, or LENVM_VALUE_MODEL=off"
            )
        from lenvm_kernels.engines.vllm.guide import Guide

        self._guide = Guide(Settings.current(), vllm_config, req_states)

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Called in the front end when a request arrives; the engine answers a ValueError with status 400."""
        if not Settings.is_off():
            guidance_of(sampling_params, Settings.current())

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Admit a request into a slot of the engine. Returns whether its logits may change."""
        if self._guide is None:
            return False
        return self._guide.add_request(req_idx, sampling_params, guidance_of(sampling_params, self._guide.settings))

    def apply(self, logits: torch.Tensor, ctx: LogitsContext | None = None) -> torch.Tensor:
        """Guide the rows of a step."""
        return logits if self._guide is None or ctx is None else self._guide.apply(logits, ctx)

    # Also called by the first model runner, where this processor is disabled.

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: Any) -> None:
        pass
