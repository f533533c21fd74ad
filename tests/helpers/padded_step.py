"""The guided step as its CUDA graphs run it, without a GPU."""

from types import SimpleNamespace

import torch

from lenvm_kernels.step import GuidedStep
from lenvm_kernels.step.graphs import Graphs


class _PaddedGraphs(Graphs):
    """Runs, on the graphs' input buffers, what a graph would replay."""

    def _capture(self, bucket: int) -> tuple[list[SimpleNamespace], torch.Tensor]:
        inputs = [buffer[:bucket] for buffer in self._inputs]
        (max_candidates,) = (buffer.shape[1] for buffer in inputs if buffer.ndim == 2)
        result = torch.empty(bucket, max_candidates, device=inputs[0].device)
        return [SimpleNamespace(replay=lambda: result.copy_(self._score(*inputs)))], result


class PaddedStep(GuidedStep):
    """Pads every batch to the size of its graph."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options, graphs=False)
        self._graphs = _PaddedGraphs(self._score, self._no_request(), self.max_requests, split=False)
