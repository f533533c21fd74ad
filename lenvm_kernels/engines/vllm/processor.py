"""LenVM in unforked vLLM, as a logits processor of its second model runner (entry point ``vllm.logits_processors``).

vLLM loads this module in the front end and in the workers of every server in this environment. Importable with any
version of vLLM and without Triton. The code of the workers is in :mod:`lenvm_kernels.engines.vllm.guide`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from lenvm_kernels.engines import is_off, signatures, variables

try:
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor
except ImportError:  # without the second model runner, vLLM calls the same methods
    LogitsProcessor = object

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext

    from lenvm_kernels.engines.settings import Settings
    from lenvm_kernels.engines.vllm.guide import Guide
    from lenvm_kernels.guidance import GuidanceParams

logger = logging.getLogger(f"vllm.{__name__}")  # a child of the engine's logger, so that messages are shown

_NOT_TRIED = "not tried"
# Part of the engine's configuration, option, accepted values, reason, and the setting that requires them; None: any.
OPTIONS: tuple[tuple[str, str, tuple[Any, ...], str, str | None], ...] = (
    ("parallel_config", "prefill_context_parallel_size", (1,), _NOT_TRIED, None),
    ("parallel_config", "decode_context_parallel_size", (1,), _NOT_TRIED, None),
    ("parallel_config", "enable_batch_sharded_sampling", (False,), _NOT_TRIED, None),
    ("parallel_config", "pipeline_parallel_size", (1,), "the last rank has no input embedding", "has_probe"),
    ("speculative_config", "enable_adaptive_verification", (False,), _NOT_TRIED, None),
    ("speculative_config", "rejection_sample_method", ("standard", "block"), "others accept undrawn drafts", None),
    ("model_config", "enable_sleep_mode", (False,), "the value model would not wake up", "reads_tokens"),
    ("model_config", "is_diffusion", (False,), "tokens are not drawn one after another", None),
    ("model_config", "return_sampling_mask", (False,), "guided tokens are not drawn from the mask", None),
)
# Key of the LENVM_* variables in the engine's additional_config, which is passed to every worker.
VARIABLES = "lenvm"


class LenVMProcessor(LogitsProcessor):
    """Guides requests with guidance in ``vllm_xargs``. vLLM creates one in each worker while it loads the model.

    Only vLLM's first model runner passes ``is_first_runner``. It is not supported.

    Attributes:
        config: configuration of the engine. If None, this process has no tokenizer of the base model.
        reason: why the engine of this front end cannot guide requests. If None, it can.
        is_checked_later: whether the front end checks each request again, with its prompt.

    Raises:
        ValueError: invalid setting or option of the engine; the message names it, the value and the accepted values.
            Only logged without any ``LENVM_*`` variable.
    """

    config: ClassVar[VllmConfig | None] = None
    reason: ClassVar[str | None] = None
    is_checked_later: ClassVar[bool] = False
    _guide: Guide | None = None

    def __init__(self, vllm_config: VllmConfig, req_states: Any, *is_first_runner: Any) -> None:
        if isinstance(vllm_config.additional_config, dict):  # Ray does not copy variables to workers
            os.environ.update(vllm_config.additional_config.get(VARIABLES, {}))
        LenVMProcessor.config = vllm_config
        if is_first_runner:
            if variables() and not is_off():
                raise ValueError(reason_against(vllm_config))
            return
        from vllm.distributed.parallel_state import get_pp_group

        if get_pp_group().is_last_rank:  # only this rank draws tokens
            self._guide = self._new_guide(vllm_config, req_states)

    @classmethod
    def _new_guide(cls, vllm_config: VllmConfig, req_states: Any) -> Guide | None:
        """The guidance of this worker, or None if it is off, on all tensor-parallel ranks."""
        reason = "off" if is_off() else reason_against(vllm_config)
        check_equal(reason or str(replace(cls.settings(), trace=None, predictions=None)))
        if is_off():
            return None
        guide = None
        try:
            if reason is not None:
                raise ValueError(reason)
            guide = new_guide(cls.settings(), vllm_config, req_states)
        except Exception as error:
            if variables():
                raise
            logger.warning("LenVM: requests cannot be guided: %s", error)
        check_equal("off" if guide is None else "on")
        return guide

    @classmethod
    def settings(cls) -> Settings:
        """The settings of this process, with the engine's tokenizer."""
        from lenvm_kernels.engines.settings import Settings
        from lenvm_kernels.engines.tokenizers import load_with

        if (config := cls.config) is None:
            return Settings.current()
        model, reasoning = config.model_config, getattr(config, "reasoning_config", None)

        def load() -> object:
            from vllm.tokenizers import cached_tokenizer_from_config

            return cached_tokenizer_from_config(model)

        def marks(tokenizer: object) -> tuple[str, str] | None:
            from vllm.reasoning import ReasoningParserManager

            if reasoning is None or not reasoning.reasoning_parser:
                return None
            parser = ReasoningParserManager.get_reasoning_parser(reasoning.reasoning_parser)(tokenizer)
            start, end = parser.reasoning_start_str, parser.reasoning_end_str
            return (start, end) if start and end else None

        load_with(model.tokenizer, load, marks)
        return Settings.current(model.tokenizer)

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Check a new request in the front end. The engine answers a ValueError with status 400."""
        given = sampling_params.extra_args  # requests without parameters are never rejected
        if not given or is_off():
            return
        if cls.reason is not None and names_guidance(given):
            names = ", ".join(given)
            raise ValueError(f"guidance ({names}) must be absent from this server's requests: {cls.reason}")
        if cls.reason is None and not cls.is_checked_later:
            guidance_of(sampling_params, cls.settings())

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Admit a request into a slot of the engine. Returns whether its logits may change."""
        if self._guide is None:
            return False
        try:
            guidance = guidance_of(sampling_params, self._guide.settings)
            return self._guide.add_request(req_idx, sampling_params, guidance)
        except Exception:  # would end the engine
            self._guide.count_failure("a request could not be admitted and is unguided")
            return self._guide.add_request(req_idx, sampling_params, None)

    def apply(self, logits: torch.Tensor, ctx: LogitsContext | None = None) -> torch.Tensor:
        """Draw the next tokens of guided rows, and mask all other tokens in these rows."""
        return logits if self._guide is None or ctx is None else self._guide.apply(logits, ctx)

    # Required by the first model runner, where this processor is disabled.

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: Any) -> None:
        pass


def new_guide(settings: Settings, vllm_config: VllmConfig, req_states: Any) -> Guide:
    """The guidance of a worker, by the source of values; for arguments and errors, see :class:`Guide`."""
    if settings.reads_tokens:
        from lenvm_kernels.engines.vllm.model_guide import ModelGuide

        return ModelGuide(settings, vllm_config, req_states)
    from lenvm_kernels.engines.vllm.guide import Guide

    return Guide(settings, vllm_config, req_states)


def check_equal(mine: str) -> None:
    """Raise ValueError unless all tensor-parallel ranks pass the same text. Ranks must draw the same tokens."""
    import torch
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return
    texts = [mine] * group.world_size
    torch.distributed.all_gather_object(texts, mine, group=group.cpu_group)
    if theirs := set(texts) - {mine}:
        raise ValueError(f"LenVM settings must be equal on all tensor-parallel ranks, got {mine} and {theirs.pop()}")


def reason_against(vllm_config: VllmConfig) -> str | None:
    """Why a server cannot guide requests. If None, it can. Raises ValueError for an invalid setting."""
    import vllm

    tried = dict.fromkeys(_minor(version) for version in signatures.recorded("vllm"))
    if not variables() and _minor(vllm.__version__) not in tried:
        return f"guidance fits vLLM {', '.join(tried)}, got {vllm.__version__}; LENVM_VALUE_MODEL=none tries it"
    if not getattr(vllm_config, "use_v2_model_runner", False):
        return (
            "guidance needs vLLM's second model runner, which VLLM_USE_V2_MODEL_RUNNER=0, a missing Triton or an "
            "option of the server turns off (vLLM's log names the option)"
        )
    try:
        from lenvm_kernels.engines.settings import Settings
    except ImportError as error:
        return f"guidance cannot be imported: {error}"
    settings = Settings.current()
    for part, option, accepted, reason, where in OPTIONS:
        given = getattr(getattr(vllm_config, part), option, accepted[0])
        if given not in accepted and (where is None or getattr(settings, where)):
            names = " or ".join(map(str, accepted))
            return f"{option} must be {names} together with guidance, got {given}: {reason}"
    return None


def names_guidance(extra_args: Mapping[str, Any] | None) -> bool:
    """Whether the ``vllm_xargs`` of a request contain guidance, valid or not."""
    from lenvm_kernels.guidance.params import read_names

    try:
        return bool(read_names(extra_args or {}, others="shared"))
    except ValueError:
        return True


def guidance_of(params: SamplingParams, settings: Settings) -> GuidanceParams | None:
    """The guidance in a request's ``vllm_xargs``, or None without. Raises ValueError for invalid parameters."""
    budget = getattr(params, "thinking_token_budget", None)
    if not params.extra_args and not settings.defaults and budget is None:
        return None
    guidance = settings.parse_request(
        params.extra_args,
        params.stop_token_ids or (),
        max_tokens=params.max_tokens,
        has_schema=params.structured_outputs is not None,
        engine_budget=None if budget is None or budget < 0 else budget,
    )
    if guidance.return_values and settings.predictions is None and settings.is_asked(params.extra_args):
        raise ValueError("return_values must be false in vLLM without LENVM_PREDICTIONS, the output file, got true")
    return guidance if guidance.needs_step or guidance.token_temperature_scale else None


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
