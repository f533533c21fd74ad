"""Triton kernels for LenVM length-guided decoding (arXiv 2604.27039), with pure-PyTorch references.

The operators, in the order of a decode step: :func:`topk_candidates`, :func:`value_tree_attention`,
:func:`value_head`, :func:`reweight_scatter`; the parameters of a request: :func:`parse_guidance`,
:class:`GuidanceTable`; the value model: :class:`ValueModel`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lenvm_kernels.guidance import GuidanceTable, parse_guidance
    from lenvm_kernels.ops.reweight_scatter import reweight_scatter
    from lenvm_kernels.ops.topk_candidates import topk_candidates
    from lenvm_kernels.ops.value_head import value_head
    from lenvm_kernels.ops.value_tree_attention import value_tree_attention
    from lenvm_kernels.value_model import ValueModel

__version__ = "0.1.0"
__all__ = [
    "GuidanceTable",
    "ValueModel",
    "parse_guidance",
    "reweight_scatter",
    "topk_candidates",
    "value_head",
    "value_tree_attention",
]

# Imported when first used: `lenvm --help` must not wait for torch and transformers.
_MODULES = {
    "GuidanceTable": "lenvm_kernels.guidance",
    "ValueModel": "lenvm_kernels.value_model",
    "parse_guidance": "lenvm_kernels.guidance",
    "reweight_scatter": "lenvm_kernels.ops.reweight_scatter",
    "topk_candidates": "lenvm_kernels.ops.topk_candidates",
    "value_head": "lenvm_kernels.ops.value_head",
    "value_tree_attention": "lenvm_kernels.ops.value_tree_attention",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
