"""Triton kernels for LenVM length-guided decoding (arXiv 2604.27039), with pure-PyTorch references.

The whole step for an engine: :class:`GuidedStep`. Its operators, in the order in which it calls them:
:func:`topk_candidates`, :func:`commit_winner`, :func:`ragged_layout`, :func:`ragged_linear`, :func:`rope_cache`,
:func:`value_tree_attention`, :func:`value_head`, :func:`reweight_scatter`, :func:`sample_candidates`. The parameters of
a request: :func:`parse_guidance`, :class:`GuidanceTable`; the value model: :class:`ValueModel`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lenvm_kernels.guidance import GuidanceTable, parse_guidance
    from lenvm_kernels.ops.commit_winner import commit_winner
    from lenvm_kernels.ops.ragged_layout import ragged_layout
    from lenvm_kernels.ops.ragged_linear import ragged_linear
    from lenvm_kernels.ops.reweight_scatter import reweight_scatter
    from lenvm_kernels.ops.rope_cache import rope_cache
    from lenvm_kernels.ops.sample_candidates import sample_candidates
    from lenvm_kernels.ops.topk_candidates import topk_candidates
    from lenvm_kernels.ops.value_head import value_head
    from lenvm_kernels.ops.value_tree_attention import value_tree_attention
    from lenvm_kernels.paged_slots import PagedSlots
    from lenvm_kernels.step import GuidedStep
    from lenvm_kernels.value_model import ValueModel

__version__ = "0.1.0"
__all__ = [
    "GuidanceTable",
    "GuidedStep",
    "PagedSlots",
    "ValueModel",
    "commit_winner",
    "parse_guidance",
    "ragged_layout",
    "ragged_linear",
    "reweight_scatter",
    "rope_cache",
    "sample_candidates",
    "topk_candidates",
    "value_head",
    "value_tree_attention",
]

# Imported when first used: `lenvm --help` must not wait for torch and transformers.
_MODULES = {
    "GuidanceTable": "lenvm_kernels.guidance",
    "GuidedStep": "lenvm_kernels.step",
    "PagedSlots": "lenvm_kernels.paged_slots",
    "ValueModel": "lenvm_kernels.value_model",
    "commit_winner": "lenvm_kernels.ops.commit_winner",
    "parse_guidance": "lenvm_kernels.guidance",
    "ragged_layout": "lenvm_kernels.ops.ragged_layout",
    "ragged_linear": "lenvm_kernels.ops.ragged_linear",
    "reweight_scatter": "lenvm_kernels.ops.reweight_scatter",
    "rope_cache": "lenvm_kernels.ops.rope_cache",
    "sample_candidates": "lenvm_kernels.ops.sample_candidates",
    "topk_candidates": "lenvm_kernels.ops.topk_candidates",
    "value_head": "lenvm_kernels.ops.value_head",
    "value_tree_attention": "lenvm_kernels.ops.value_tree_attention",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
