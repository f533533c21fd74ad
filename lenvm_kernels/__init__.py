"""Triton kernels for LenVM length-guided decoding (arXiv 2604.27039), with pure-PyTorch references.

The whole step for an engine: :class:`GuidedStep`. Its operators, in the order in which it calls them:
:func:`limit_span`, :func:`gather_requests`, :func:`expand_drafts`, :func:`topk_candidates`, :func:`select_scored`,
:func:`pack_drafts`, :func:`commit_winner`, :func:`catch_up`, :func:`ragged_layout`, :func:`embed_tokens`,
:func:`ragged_linear`, :func:`rope_cache`, :func:`value_tree_attention`, :func:`value_head`, :func:`reweight_scatter`,
:func:`sample_candidates`, :func:`verify_drafts`. The parameters of a request: :func:`parse_guidance`,
:class:`GuidanceTable`; the value model: :class:`ValueModel`. In ``transformers``, all in one call: :func:`generate`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lenvm_kernels.adapters.transformers import generate
    from lenvm_kernels.guidance.params import GuidanceParams, parse_guidance
    from lenvm_kernels.guidance.sentences import text_breaks_of
    from lenvm_kernels.guidance.table import GuidanceTable
    from lenvm_kernels.ops.catch_up import catch_up
    from lenvm_kernels.ops.commit_winner import commit_winner
    from lenvm_kernels.ops.embed_tokens import embed_tokens
    from lenvm_kernels.ops.expand_drafts import expand_drafts
    from lenvm_kernels.ops.gather_requests import empty_history, gather_requests
    from lenvm_kernels.ops.limit_span import limit_span
    from lenvm_kernels.ops.pack_drafts import pack_drafts
    from lenvm_kernels.ops.ragged_layout import ragged_layout
    from lenvm_kernels.ops.ragged_linear import quantize_weight, ragged_linear
    from lenvm_kernels.ops.reweight_scatter import reweight_scatter
    from lenvm_kernels.ops.rope_cache import rope_cache
    from lenvm_kernels.ops.sample_candidates import sample_candidates
    from lenvm_kernels.ops.select_scored import select_scored
    from lenvm_kernels.ops.topk_candidates import topk_candidates
    from lenvm_kernels.ops.value_head import value_head
    from lenvm_kernels.ops.value_tree_attention import value_tree_attention
    from lenvm_kernels.ops.verify_drafts import verify_drafts
    from lenvm_kernels.paged_slots import OutOfSlots, PagedSlots
    from lenvm_kernels.step import (
        EngineSlots,
        GuidedStep,
        Sampling,
        StepBatch,
        StepConfig,
        StepOutput,
        working_bytes,
    )
    from lenvm_kernels.types import (
        Candidates,
        CandidateTrees,
        DeltaTokens,
        Drafts,
        EmbeddedTokens,
        GuidanceColumns,
        Mode,
        RaggedLayout,
        ScoredCandidates,
        Status,
        StepHistory,
        StepRequests,
        TextBreak,
        VerifiedTokens,
    )
    from lenvm_kernels.value_model import (
        ImageTokens,
        KVCache,
        LenVMConfig,
        RaggedBatch,
        ValueModel,
        ValueModelConfig,
        image_positions,
    )

__version__ = "0.1.0"
__all__ = [
    "CandidateTrees",
    "Candidates",
    "DeltaTokens",
    "Drafts",
    "EmbeddedTokens",
    "EngineSlots",
    "GuidanceColumns",
    "GuidanceParams",
    "GuidanceTable",
    "GuidedStep",
    "ImageTokens",
    "KVCache",
    "LenVMConfig",
    "Mode",
    "OutOfSlots",
    "PagedSlots",
    "RaggedBatch",
    "RaggedLayout",
    "Sampling",
    "ScoredCandidates",
    "Status",
    "StepBatch",
    "StepConfig",
    "StepHistory",
    "StepOutput",
    "StepRequests",
    "TextBreak",
    "ValueModel",
    "ValueModelConfig",
    "VerifiedTokens",
    "catch_up",
    "commit_winner",
    "embed_tokens",
    "empty_history",
    "expand_drafts",
    "gather_requests",
    "generate",
    "image_positions",
    "limit_span",
    "pack_drafts",
    "parse_guidance",
    "quantize_weight",
    "ragged_layout",
    "ragged_linear",
    "reweight_scatter",
    "rope_cache",
    "sample_candidates",
    "select_scored",
    "text_breaks_of",
    "topk_candidates",
    "value_head",
    "value_tree_attention",
    "verify_drafts",
    "working_bytes",
]

# Where they are; an operator is in the file of its own name. Imported when first used: `lenvm --help` must not wait for
# torch and transformers.
_MODULES = {
    "CandidateTrees": "types",
    "Candidates": "types",
    "DeltaTokens": "types",
    "Drafts": "types",
    "EmbeddedTokens": "types",
    "EngineSlots": "step",
    "GuidanceColumns": "types",
    "GuidanceParams": "guidance",
    "GuidanceTable": "guidance",
    "GuidedStep": "step",
    "ImageTokens": "value_model",
    "KVCache": "value_model",
    "LenVMConfig": "value_model",
    "Mode": "types",
    "OutOfSlots": "paged_slots",
    "PagedSlots": "paged_slots",
    "RaggedBatch": "value_model",
    "RaggedLayout": "types",
    "Sampling": "step",
    "ScoredCandidates": "types",
    "Status": "types",
    "StepBatch": "step",
    "StepConfig": "step",
    "StepHistory": "types",
    "StepOutput": "step",
    "StepRequests": "types",
    "TextBreak": "types",
    "ValueModel": "value_model",
    "ValueModelConfig": "value_model",
    "VerifiedTokens": "types",
    "generate": "adapters.transformers",
    "empty_history": "ops.gather_requests",
    "image_positions": "value_model",
    "parse_guidance": "guidance",
    "quantize_weight": "ops.ragged_linear",
    "text_breaks_of": "guidance",
    "working_bytes": "step",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, f'ops.{name}')}"), name)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
