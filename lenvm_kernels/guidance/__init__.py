"""The guidance of requests: the fields, their parsed form, and the table of all requests on the device."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lenvm_kernels.guidance.params import GuidanceParams as GuidanceParams
    from lenvm_kernels.guidance.params import parse_guidance as parse_guidance
    from lenvm_kernels.guidance.sentences import text_breaks_of as text_breaks_of
    from lenvm_kernels.guidance.spans import SpanState as SpanState
    from lenvm_kernels.guidance.spans import Thoughts as Thoughts
    from lenvm_kernels.guidance.table import GuidanceTable as GuidanceTable

# Imported on first use, so that the command line reads the fields without waiting for torch.
_MODULES = {
    "GuidanceParams": "params",
    "parse_guidance": "params",
    "SpanState": "spans",
    "Thoughts": "spans",
    "text_breaks_of": "sentences",
    "GuidanceTable": "table",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
