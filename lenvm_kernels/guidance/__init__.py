"""Guidance of requests: the fields, their parsed form, and the device table of all requests."""

from typing import TYPE_CHECKING

from lenvm_kernels import imported_on_use

if TYPE_CHECKING:
    from lenvm_kernels.guidance.params import GuidanceParams as GuidanceParams
    from lenvm_kernels.guidance.params import parse_guidance as parse_guidance
    from lenvm_kernels.guidance.sentences import text_breaks_of as text_breaks_of
    from lenvm_kernels.guidance.spans import SpanState as SpanState
    from lenvm_kernels.guidance.spans import Thoughts as Thoughts
    from lenvm_kernels.guidance.table import GuidanceTable as GuidanceTable

# Imported on first use, so that the command line reads the fields without importing torch.
_MODULES = {"params": "GuidanceParams parse_guidance", "spans": "SpanState Thoughts"}
_MODULES |= {"sentences": "text_breaks_of", "table": "GuidanceTable"}
__getattr__ = imported_on_use(__name__, _MODULES)
