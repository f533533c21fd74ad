"""LenVM in unforked vLLM, as a logits processor of its second model runner (entry point ``vllm.logits_processors``).

vLLM loads this module in the front end and in the workers of every server in this environment. It is importable with
any version of vLLM and without Triton. The code of the workers is in :mod:`lenvm_kernels.engines.vllm.guide`.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from lenvm_kernels.engines.vllm.options import is_off, names_guidance, reason_against, take_variables, variables

try:
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor
except ImportError:  # a version of vLLM without the second model runner, which calls the same methods
    LogitsProcessor = object

if TYPE_CHECKING:
    import torch
    from vllm.config import ModelConfig, VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext

    from lenvm_kernels.engines.settings import Settings
    from lenvm_kernels.engines.vllm.guide import Guide

logger = logging.getLogger(f"vllm.{__name__}")  # below the engine's logger, so that it is shown


class LenVMProcessor(LogitsProcessor):
    """Guides the requests with guidance in ``vllm_xargs``. vLLM creates one in each worker while it loads the model.

    Args:
        vllm_config: configuration of the engine.
        req_states: the engine's state of its requests.
        *is_first_runner: passed only by vLLM's first model runner, which is not supported.

    Attributes:
        model_config: configuration of the base model. If None, its tokenizer is not known in this process.
        reason: why the engine of this front end cannot guide requests. If None, it can.

    Raises:
        ValueError: naming a setting or an option of the engine, what came and what is accepted. Without any
            ``LENVM_*`` variable, it is logged.
    """

    model_config: ClassVar[ModelConfig | None] = None
    reason: ClassVar[str | None] = None
    _guide: Guide | None = None

    def __init__(self, vllm_config: VllmConfig, req_states: Any, *is_first_runner: Any) -> None:
        take_variables(vllm_config)
        LenVMProcessor.model_config = vllm_config.model_config
        if is_first_runner:
            if variables() and not is_off():
                raise ValueError(reason_against(vllm_config))
            return
        from vllm.distributed.parallel_state import get_pp_group

        if get_pp_group().is_last_rank:  # the only one that draws tokens
            self._guide = self._new_guide(vllm_config, req_states)

    @classmethod
    def _new_guide(cls, vllm_config: VllmConfig, req_states: Any) -> Guide | None:
        """The guidance of this worker. If None, it is off on all tensor-parallel ranks."""
        reason = "off" if is_off() else reason_against(vllm_config)
        check_equal(reason or str(replace(cls.settings(), trace=None, predictions=None)))
        if is_off():
            return None
        try:
            if reason is not None:
                raise ValueError(reason)
            guide = new_guide(cls.settings(), vllm_config, req_states)
        except Exception as error:
            if variables():
                raise
            logger.warning("LenVM: requests cannot be guided: %s", error)
            guide = None
        check_equal("off" if guide is None else "on")
        return guide

    @classmethod
    def settings(cls) -> Settings:
        """The settings of this process, with the engine's tokenizer."""
        from lenvm_kernels.engines.vllm.requests import settings_of

        return settings_of(cls.model_config)

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Called in the front end when a request arrives; the engine answers a ValueError with status 400."""
        if not sampling_params.extra_args or is_off():
            return
        if cls.reason is not None:
            if names_guidance(sampling_params.extra_args):
                names = ", ".join(sampling_params.extra_args)
                raise ValueError(f"guidance ({names}) must be absent from this server's requests: {cls.reason}")
            return
        from lenvm_kernels.engines.vllm.requests import guidance_of

        guidance_of(sampling_params, cls.settings())

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Admit a request into a slot of the engine. Returns whether its logits may change."""
        return self._guide is not None and self._guide.add_request(req_idx, sampling_params)

    def apply(self, logits: torch.Tensor, ctx: LogitsContext | None = None) -> torch.Tensor:
        """Draw the next tokens of guided rows, and leave only these tokens in the rows."""
        return logits if self._guide is None or ctx is None else self._guide.apply(logits, ctx)

    # Also called by the first model runner, where this processor is disabled.

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: Any) -> None:
        pass


def new_guide(settings: Settings, vllm_config: VllmConfig, req_states: Any) -> Guide:
    """The guidance of one worker by the settings' source of values; for arguments and errors, see :class:`Guide`."""
    if settings.reads_tokens:
        from lenvm_kernels.engines.vllm.model_guide import ModelGuide

        return ModelGuide(settings, vllm_config, req_states)
    from lenvm_kernels.engines.vllm.guide import Guide

    return Guide(settings, vllm_config, req_states)


def check_equal(mine: str) -> None:
    """Raise ValueError unless all tensor-parallel ranks pass the same text: they must draw the same tokens."""
    import torch
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return
    of_ranks = [mine] * group.world_size
    torch.distributed.all_gather_object(of_ranks, mine, group=group.cpu_group)
    if theirs := set(of_ranks) - {mine}:
        raise ValueError(f"LenVM must be set alike on all tensor-parallel ranks, got {mine} and {theirs.pop()}")
