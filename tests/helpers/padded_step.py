"""The guided step as its CUDA graphs run it, without a GPU."""

from types import SimpleNamespace

import torch

from lenvm_kernels.step import GuidedStep
from lenvm_kernels.step.graphs import Graphs


class PaddedGraphs(Graphs):
    """Runs what a graph would replay, on what is where the graph would look for it."""

    def _capture(self, requests, nodes):
        step = self._score.__self__
        result = torch.empty(requests * nodes, step.max_candidates, device=step.value_model.device)
        return [SimpleNamespace(replay=lambda: result.copy_(self._score(requests, nodes)))], result


class PaddedStep(GuidedStep):
    """A step with these in place of its graphs."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options, graphs=False)
        self._graphs = PaddedGraphs(self._score, self.value_model.device, split=False)
