"""The guidance of a request to vLLM, read by its front end and its workers. Importable without vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lenvm_kernels.engines.settings import MAX_END_TOKENS, MAX_SCALED_TOKENS, MAX_STOP_TOKENS, Settings
from lenvm_kernels.engines.tokenizers import load_with
from lenvm_kernels.guidance import GuidanceParams

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.sampling_params import SamplingParams


def settings_of(model_config: ModelConfig | None) -> Settings:
    """The settings of this process, with the tokenizer of the engine, loaded as the engine does."""
    if model_config is None:
        return Settings.current()

    def load() -> object:
        from vllm.tokenizers import cached_tokenizer_from_config

        return cached_tokenizer_from_config(model_config)

    load_with(model_config.tokenizer, load)
    return Settings.current(model_config.tokenizer)


def guidance_of(params: SamplingParams, settings: Settings) -> GuidanceParams | None:
    """The guidance in a request's ``extra_args`` (``vllm_xargs``), or None without.

    Raises:
        ValueError: naming the field, what came and what is accepted.
    """
    if not params.extra_args:
        return None
    guidance = settings.parse_request(params.extra_args)
    if guidance.return_values and settings.predictions is None:
        raise ValueError("return_values must be false in vLLM without LENVM_PREDICTIONS, a file for them, got true")
    if not guidance.needs_step and not guidance.token_temperature_scale:
        return None
    for name, given, most in (
        ("stop_token_ids", params.stop_token_ids or (), MAX_STOP_TOKENS),
        ("token_temperature_scale", guidance.token_temperature_scale, MAX_SCALED_TOKENS),
    ):
        if len(given) > most:
            raise ValueError(f"{name} must be of at most {most} tokens together with guidance, got {len(given)}")
    return guidance


def end_tokens(params: SamplingParams) -> set[int]:
    """The tokens at which the engine ends a request's output.

    With ``ignore_eos`` these are ``stop_token_ids`` alone, although ``all_stop_token_ids`` has the end of sequence.
    """
    tokens = (params.stop_token_ids or ()) if params.ignore_eos else params.all_stop_token_ids
    return set(sorted(tokens)[:MAX_END_TOKENS])
