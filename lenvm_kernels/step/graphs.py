"""CUDA graphs of the value model's part of a step, one for each power of two of requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from lenvm_kernels.ops._common import next_power_of_2
from lenvm_kernels.timing import StepRecord


def bucket_of(requests: int, max_requests: int) -> int:
    """Requests of the graph that runs so many."""
    return min(next_power_of_2(requests), max_requests)


class Graphs:
    """Runs a function of a batch from CUDA graphs.

    Args:
        score: the function: of tensors whose first dimension is the batch, and of ``before_head``, to be called between
            its two parts. Returns a tensor.
        padding: what the function gets for a request that does not exist, a tensor ``[1, ...]`` an argument.
        max_requests: the largest batch.
        split: capture the two parts apart, so that the time between them can be marked.
    """

    def __init__(
        self, score: Callable[..., torch.Tensor], padding: Sequence[torch.Tensor], max_requests: int, *, split: bool
    ) -> None:
        self._score, self._max_requests, self._split = score, max_requests, split
        self._padding = padding
        self._inputs = [x.repeat_interleave(max_requests, 0) for x in padding]
        self._pool: Any = None  # memory that the graphs share: one runs at a time
        self._captured: dict[int, tuple[list[torch.cuda.CUDAGraph], torch.Tensor]] = {}

    def replay(self, arguments: Sequence[torch.Tensor], record: StepRecord) -> torch.Tensor:
        """The function's result, from the graph of the next power of two of requests."""
        b = len(arguments[0])
        bucket = bucket_of(b, self._max_requests)
        if bucket not in self._captured:
            self._captured[bucket] = self._capture(bucket)
        for buffer, argument, padding in zip(self._inputs, arguments, self._padding, strict=True):
            buffer[:b].copy_(argument)
            if b < bucket:
                buffer[b:bucket].copy_(padding)
        (first, *second), result = self._captured[bucket]
        first.replay()
        record.mark("forward")
        for graph in second:
            graph.replay()
        return result[:b].clone()  # the graphs share their memory

    def _capture(self, bucket: int) -> tuple[list[torch.cuda.CUDAGraph], torch.Tensor]:
        inputs = [buffer[:bucket] for buffer in self._inputs]
        for buffer, padding in zip(inputs, self._padding, strict=True):
            buffer.copy_(padding)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graphs: list[torch.cuda.CUDAGraph] = []
        with torch.cuda.device(inputs[0].device), ExitStack() as capture:
            self._score(*inputs)  # compiles, which a capture cannot

            def next_graph() -> None:
                capture.close()
                graphs.append(torch.cuda.CUDAGraph())
                capture.enter_context(torch.cuda.graph(graphs[-1], pool=self._pool))

            next_graph()
            result = self._score(*inputs, before_head=next_graph if self._split else None)
        return graphs, result
