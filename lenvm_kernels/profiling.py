"""Ranges of ``torch.profiler`` around the stages of a guided step."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.autograd import profiler

_NO_RANGE = nullcontext()


def profiler_range(stage: str) -> AbstractContextManager[Any]:
    """A range ``lenvm.<stage>`` while a profiler runs, else nothing: six ranges add a third to the Python of a step."""
    return profiler.record_function(f"lenvm.{stage}") if profiler._is_profiler_enabled else _NO_RANGE
