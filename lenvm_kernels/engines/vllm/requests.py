"""The guidance of a request to vLLM, read by its front end and its workers. Importable without vLLM."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lenvm_kernels.engines.settings import MAX_SCALED_TOKENS, MAX_STOP_TOKENS, Settings
from lenvm_kernels.guidance import GuidanceParams
from lenvm_kernels.types import Mode

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcRequestState

# Fields with objects or nested lists, which ``vllm_xargs`` does not support: they are passed as JSON text.
_AS_TEXT: dict[str, tuple[type, str]] = {
    "token_temperature_scale": (dict, 'object in a text, such as "{\\"13\\": 0.5}"'),
    "end_token_ids": (list, 'list in a text, such as "[[7, 3], 9]"'),
    "start_token_ids": (list, 'list in a text, such as "[[7, 3], 9]"'),
}
# Boolean fields, which vLLM converts to 1 or 0.
_SWITCHES = ("return_values", "allow_eos")


def guidance_of(params: SamplingParams, settings: Settings) -> GuidanceParams | None:
    """The guidance in a request's ``extra_args`` (``vllm_xargs``), or None without.

    A greedy request is not guided: it has one candidate.

    Raises:
        ValueError: naming the field, what came and what is accepted.
    """
    if not params.extra_args:
        return None
    custom_params = {name: _decoded(name, value) for name, value in params.extra_args.items()}
    guidance = settings.parse_request(custom_params)
    if guidance.return_values and settings.predictions is None:
        raise ValueError("return_values must be false in vLLM without LENVM_PREDICTIONS, a file for them, got true")
    if params.temperature == 0 or params.top_k == 1:
        guidance = replace(guidance, mode=Mode.UNGUIDED)
    if not guidance.needs_step and not guidance.token_temperature_scale:
        return None
    for name, given, most in (
        ("stop_token_ids", params.stop_token_ids or (), MAX_STOP_TOKENS),
        ("token_temperature_scale", guidance.token_temperature_scale, MAX_SCALED_TOKENS),
    ):
        if len(given) > most:
            raise ValueError(f"{name} must be of at most {most} tokens together with guidance, got {len(given)}")
    return guidance


def staged_tokens(req_states: LogitsProcRequestState, slot: int) -> list[int]:
    """Tokens of a request that the engine has just added and not copied to the device yet; empty if not found."""
    tokens = req_states.all_token_ids
    for i, row in enumerate(getattr(tokens, "_staged_write_indices", ())):
        if row == slot:
            start = tokens._staged_write_cu_lens[i - 1] if i else 0
            return tokens._staged_write_contents[start : tokens._staged_write_cu_lens[i]]
    return []


def _decoded(name: str, value: Any) -> Any:
    """Convert a field of ``vllm_xargs``, a number, text or list, to its form in ``custom_params``."""
    if name in _SWITCHES and value in (0, 1):
        return bool(value)
    if name not in _AS_TEXT or not isinstance(value, str):
        return value
    kind, accepted = _AS_TEXT[name]
    try:
        decoded = json.loads(value)
    except ValueError:
        decoded = None
    if not isinstance(decoded, kind):
        raise ValueError(f"{name} must be a JSON {accepted}, got {value!r}")
    return decoded
