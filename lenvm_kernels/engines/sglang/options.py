"""Options of the engine that guidance cannot be combined with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sglang.srt.configs.hybrid_arch import mambaish_config

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

_NO_SAMPLER = "it never reaches the sampler that guidance is in"
_NOT_TRIED = "not tried"
_FOREIGN_KEYS = "the value model has no keys and values for prompts that come from elsewhere"
_OTHER_SLOTS = "the value model lives in the slots of the engine's own pool"
_OTHER_LAYERS = "it has the base model hand over what other layers read"
# Options of the engine, each with the accepted values and the reason.
EngineOptions = Mapping[str, tuple[tuple[Any, ...], str]]
OPTIONS: EngineOptions = {
    "speculative_algorithm": ((None, "EAGLE", "EAGLE3", "STANDALONE", "NGRAM"), _NOT_TRIED),
    "speculative_adaptive": ((False,), "the step takes a fixed number of drafts"),
    "enable_multi_layer_eagle": ((False,), _NOT_TRIED),
    "dllm_algorithm": ((None,), _NO_SAMPLER),
    "startup_weight_load_mode": (("serial",), "weights are read and graphs captured after the base model is loaded"),
    "attn_cp_size": ((1,), _NOT_TRIED),
    "enable_pdmux": ((False,), "prompts and draws would be computed at the same time"),
}
# Further options with a value model that reads tokens, with a probe, with a probe of inner layers, and with drafts.
VALUE_MODEL_OPTIONS: EngineOptions = {
    "pp_size": ((1,), "not built"),
    "disaggregation_mode": (("null",), "the value model reads the tokens of prompts"),
    "enable_hierarchical_cache": ((False,), _FOREIGN_KEYS),
    "enable_lmcache": ((False,), _FOREIGN_KEYS),
    "enable_flexkv": ((False,), _FOREIGN_KEYS),
    "enable_unified_cache_external_linker": ((False,), _FOREIGN_KEYS),
    "radix_cache_backend": ((None,), _FOREIGN_KEYS),
    "enable_unified_memory": ((False,), _OTHER_SLOTS),
    "enable_hisparse": ((False,), _OTHER_SLOTS),
    "enable_kv_cache_sharding": ((False,), _OTHER_SLOTS),
    "dcp_size": ((1,), _OTHER_SLOTS),
}
PROBE_OPTIONS: EngineOptions = {
    "pp_size": ((1,), "only the last stage has the states of all layers, and only the first the embedding"),
    "enable_torch_compile": ((False,), _NOT_TRIED),
}
INNER_PROBE_OPTIONS: EngineOptions = {
    "speculative_algorithm": ((None, "EAGLE", "STANDALONE", "NGRAM"), _OTHER_LAYERS),
    "enable_return_aux_hidden_states": ((False,), _OTHER_LAYERS),
}
DRAFT_OPTIONS: EngineOptions = {"enable_mixed_chunk": ((False,), _NOT_TRIED)}


def drafts_a_step(options: Any) -> int:
    """Number of draft tokens per request and step of an engine with these options."""
    return (options.speculative_num_draft_tokens or 1) - 1 if options.speculative_algorithm else 0


def check_options(options: Any, accepted_values: EngineOptions, feature: str) -> None:
    """Raise ValueError unless ``feature`` can be combined with each option of the engine."""
    for option, (accepted, reason) in accepted_values.items():
        if (given := getattr(options, option)) not in accepted:
            texts = ", ".join(map(str, accepted))
            one_of = "one of " * (len(accepted) > 1)
            raise ValueError(f"{option} must be {one_of}{texts} together with {feature}, got {given}: {reason}")


def check_pool(runner: ModelRunner) -> None:
    """Raise ValueError unless every layer of the base model stores all keys and values in slots of one pool."""
    kinds = {
        "sliding windows": runner.is_hybrid_swa,
        "layers with a state": mambaish_config(runner.model_config) is not None,
    }
    for kind, is_there in kinds.items():
        if is_there:
            raise ValueError(
                f"LENVM_VALUE_MODEL must be a probe or none with this base model, which has {kind}: {_OTHER_SLOTS}"
            )
