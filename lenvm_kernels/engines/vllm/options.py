"""Options of vLLM that cannot be combined with guidance, rejected by name when the server starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.worker.gpu.spec_decode.rejection_sampler import get_max_chunk_logits

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_NOT_TRIED = "not tried"
# Options by part of the engine's configuration, each with the accepted value and the reason.
OPTIONS: dict[tuple[str, str], tuple[Any, str]] = {
    ("parallel_config", "prefill_context_parallel_size"): (1, _NOT_TRIED),
    ("parallel_config", "decode_context_parallel_size"): (1, _NOT_TRIED),
    ("parallel_config", "enable_batch_sharded_sampling"): (False, _NOT_TRIED),
    ("speculative_config", "enable_adaptive_verification"): (False, _NOT_TRIED),
    ("model_config", "return_sampling_mask"): (False, "guided rows have no mask of filters"),
    ("model_config", "enable_sleep_mode"): (False, "the value model would not wake up"),
    ("", "watermark_config"): (None, "its sampler draws from other logits"),
}


def check_one_part(requests: int, drafts: int, vocab_size: int) -> None:
    """Raise ValueError if vLLM might verify drafts in several parts, each of which would be a separate step."""
    most = get_max_chunk_logits(vocab_size) // (1 + drafts)
    if drafts and requests > most:
        raise ValueError(
            f"max_num_seqs must be at most {most} together with LENVM_VALUE_MODEL and {drafts} drafted tokens, got "
            f"{requests}: vLLM verifies more in several parts"
        )


def check_options(vllm_config: VllmConfig) -> None:
    """Raise ValueError if an option of the engine cannot be combined with guidance."""
    for (part, option), (accepted, reason) in OPTIONS.items():
        given = getattr(getattr(vllm_config, part) if part else vllm_config, option, accepted)
        if given != accepted:
            raise ValueError(f"{option} must be {accepted} together with LENVM_VALUE_MODEL, got {given}: {reason}")
