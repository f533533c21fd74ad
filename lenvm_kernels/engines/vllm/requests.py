"""The guidance of a request to vLLM, read by its front end and its workers. Importable without vLLM."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from lenvm_kernels.engines.settings import MAX_SCALED_TOKENS, MAX_STOP_TOKENS, Settings
from lenvm_kernels.guidance import GuidanceParams
from lenvm_kernels.types import Mode

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcRequestState


def guidance_of(params: SamplingParams, settings: Settings) -> GuidanceParams | None:
    """The guidance in a request's ``extra_args`` (``vllm_xargs``), or None without.

    A greedy request is not guided: it has one candidate.

    Raises:
        ValueError: naming the field, what came and what is accepted.
    """
    if not params.extra_args:
        return None
    guidance = settings.parse_request(params.extra_args)
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
