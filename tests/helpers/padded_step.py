"""The guided step as its CUDA graphs run it, without a GPU."""

from types import SimpleNamespace

import torch

from lenvm_kernels.step import GuidedStep
from lenvm_kernels.step.graphs import Graphs


class PaddedGraphs(Graphs):
    """Pads every batch to the size of its graph, in the graphs' input buffers, and runs what a graph would replay."""

    def _capture(self, bucket):
        inputs = [buffer[:bucket] for buffer in self._inputs]
        _, _, _, _, _, candidate_ids, _ = inputs
        result = torch.empty(candidate_ids.shape, device=candidate_ids.device)
        return [SimpleNamespace(replay=lambda: result.copy_(self._score(*inputs)))], result


class PaddedStep(GuidedStep):
    """A step with these in place of its graphs."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options, graphs=False)
        self._graphs = PaddedGraphs(self._score, self._no_request(), self.max_requests, split=False)
