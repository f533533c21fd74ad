"""Whether a server of vLLM can guide its requests, decided equally in its front end and in its workers.

Importable with any version of vLLM, and without Triton.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lenvm_kernels.engines import signatures

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_NOT_TRIED = "not tried"
# Options by part of the engine's configuration, each with the accepted values and the reason.
OPTIONS: dict[tuple[str, str], tuple[tuple[Any, ...], str]] = {
    ("parallel_config", "prefill_context_parallel_size"): ((1,), _NOT_TRIED),
    ("parallel_config", "decode_context_parallel_size"): ((1,), _NOT_TRIED),
    ("parallel_config", "enable_batch_sharded_sampling"): ((False,), _NOT_TRIED),
    ("speculative_config", "enable_adaptive_verification"): ((False,), _NOT_TRIED),
    ("speculative_config", "rejection_sample_method"): (
        ("standard", "block"),
        "others accept drafts that guidance has not drawn",
    ),
    ("model_config", "is_diffusion"): ((False,), "tokens are not drawn one after another"),
    ("model_config", "return_sampling_mask"): ((False,), "guided tokens are not drawn from the mask"),
}
OPTIONS_OF_VALUE_MODEL = {("model_config", "enable_sleep_mode"): ((False,), "the value model would not wake up")}
OPTIONS_OF_PROBE = {("parallel_config", "pipeline_parallel_size"): ((1,), "the last rank has no input embedding")}
# Key of the front end's LENVM_* variables in the engine's additional_config, which reaches every worker.
VARIABLES = "lenvm"


def variables() -> dict[str, str]:
    """The ``LENVM_*`` variables of this process."""
    return {name: text for name, text in os.environ.items() if name.startswith("LENVM_") and text.strip()}


def take_variables(vllm_config: VllmConfig) -> None:
    """Set the variables of the front end in this process: Ray does not copy them to its workers."""
    if isinstance(vllm_config.additional_config, dict):
        os.environ.update(vllm_config.additional_config.get(VARIABLES, {}))


def is_off() -> bool:
    """Whether guidance is turned off."""
    if os.environ.get("LENVM_VALUE_MODEL", "").strip() == "off":
        return True
    try:
        from lenvm_kernels.engines.settings import Settings
    except ImportError:
        return False
    return Settings.is_off()


def reason_against(vllm_config: VllmConfig) -> str | None:
    """Why a server cannot guide requests. If None, it can.

    Raises:
        ValueError: a setting is invalid; the message names it, its value and what is accepted.
    """
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
    options = OPTIONS | (OPTIONS_OF_VALUE_MODEL if settings.reads_tokens else {})
    for (part, option), (accepted, reason) in (options | (OPTIONS_OF_PROBE if settings.has_probe else {})).items():
        given = getattr(getattr(vllm_config, part), option, accepted[0])
        if given not in accepted:
            names = " or ".join(map(str, accepted))
            return f"{option} must be {names} together with guidance, got {given}: {reason}"
    return None


def names_guidance(extra_args: Mapping[str, Any] | None) -> bool:
    """Whether the ``vllm_xargs`` of a request contain guidance, also if it cannot be used here."""
    from lenvm_kernels.guidance.params import parse_guidance, read_names

    try:
        params = parse_guidance(read_names(extra_args or {}, is_shared=True))
    except ValueError:
        return True
    return params.needs_step or bool(params.token_temperature_scale)


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
