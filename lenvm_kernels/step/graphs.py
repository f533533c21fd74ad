"""CUDA graphs of the value model's part of a step, one for each power of two of requests, with drafts another."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from lenvm_kernels.ops._common import next_power_of_2
from lenvm_kernels.timing import StepRecord


def bucket_of(requests: int, max_requests: int) -> int:
    """Requests of the graph that runs so many."""
    return min(next_power_of_2(requests), max_requests)


class Graphs:
    """Runs a function of a number of requests from CUDA graphs. What it reads and writes stays where it is.

    Args:
        score: the function: of the number of requests, of how many nodes each has, and of ``before_head``, to be called
            between its two parts. Returns a tensor.
        device: on which it runs.
        split: capture the two parts apart, so that the time between them can be marked.
    """

    def __init__(self, score: Callable[..., torch.Tensor], device: torch.device, *, split: bool) -> None:
        self._score, self._device, self._split = score, device, split
        self._pool: Any = None  # memory that the graphs share: one runs at a time
        self._captured: dict[tuple[int, int], tuple[list[torch.cuda.CUDAGraph], torch.Tensor]] = {}

    def replay(self, requests: int, nodes: int, record: StepRecord) -> torch.Tensor:
        """The function's result for so many requests, see :func:`bucket_of`. The next replay overwrites it."""
        sizes = requests, nodes
        if sizes not in self._captured:
            # As it is, which compiles. A capture cannot, and runs nothing: the function runs once, as it may have to.
            result = self._score(*sizes, before_head=partial(record.mark, "forward"))
            self._captured[sizes] = self._capture(*sizes)
            return result
        (first, *second), result = self._captured[sizes]
        first.replay()
        record.mark("forward")
        for graph in second:
            graph.replay()
        return result

    def _capture(self, requests: int, nodes: int) -> tuple[list[torch.cuda.CUDAGraph], torch.Tensor]:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graphs: list[torch.cuda.CUDAGraph] = []
        with torch.cuda.device(self._device), ExitStack() as capture:

            def next_graph() -> None:
                capture.close()
                graphs.append(torch.cuda.CUDAGraph())
                capture.enter_context(torch.cuda.graph(graphs[-1], pool=self._pool))

            next_graph()
            result = self._score(requests, nodes, before_head=next_graph if self._split else None)
        return graphs, result
