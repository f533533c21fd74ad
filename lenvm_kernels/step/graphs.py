"""CUDA graphs of a step's launches: one per batch size bucket (powers of two) and kind of step."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

from lenvm_kernels.ops._common import next_power_of_2

Result = TypeVar("Result")


def bucket_of(requests: int, max_requests: int) -> int:
    """The batch size of the graph that runs a batch of ``requests``."""
    return min(next_power_of_2(requests), max_requests)


class Graphs:
    """Runs functions through CUDA graphs. They must read and write tensors at fixed addresses.

    Args:
        device: device of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None  # memory shared by all graphs: only one runs at a time
        self._captured: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = {}

    @staticmethod
    def supports(device: torch.device) -> bool:
        """Whether functions on the device can be captured."""
        return device.type == "cuda"

    def run(self, key: Hashable, function: Callable[[], Result]) -> Result:
        """Run the function that was captured for ``key``; the next run overwrites its result.

        The first call with a key runs and captures ``function``. Later calls replay the graph and ignore ``function``.
        """
        if key not in self._captured:
            # The first call runs eagerly: a capture launches no kernel and must not compile one.
            result = function()
            self._captured[key] = self._capture(function)
            return result
        graph, result = self._captured[key]
        graph.replay()
        return result

    def _capture(self, function: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device), torch.cuda.graph(graph, pool=self._pool):
            result = function()
        return graph, result
