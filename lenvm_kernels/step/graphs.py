"""CUDA graphs of a step's value forward: one per batch size bucket (powers of two) and number of nodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lenvm_kernels.ops._common import next_power_of_2


def bucket_of(requests: int, max_requests: int) -> int:
    """The batch size of the graph that runs a batch of ``requests``."""
    return min(next_power_of_2(requests), max_requests)


class Graphs:
    """Runs a function through CUDA graphs. The function must read and write tensors at fixed addresses.

    Args:
        score: the function. Takes the number of requests and the number of nodes per request; returns a tensor.
        device: device of the function's tensors.
    """

    def __init__(self, score: Callable[[int, int], torch.Tensor], device: torch.device) -> None:
        self.score, self._device = score, device
        self._pool: Any = None  # memory shared by all graphs: only one runs at a time
        self._captured: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}

    def replay(self, requests: int, nodes: int) -> torch.Tensor:
        """Run the function; the next replay overwrites its result. ``requests`` is a bucket (:func:`bucket_of`)."""
        sizes = requests, nodes
        if sizes not in self._captured:
            # The first call runs eagerly: a capture launches no kernel and must not compile one.
            result = self.score(requests, nodes)
            self._captured[sizes] = self._capture(requests, nodes)
            return result
        graph, result = self._captured[sizes]
        graph.replay()
        return result

    def _capture(self, requests: int, nodes: int) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device), torch.cuda.graph(graph, pool=self._pool):
            result = self.score(requests, nodes)
        return graph, result
