"""The guided step with the padding and buffers of its CUDA graphs, without a GPU."""

from dataclasses import replace
from types import SimpleNamespace

import torch

from lenvm_kernels.step import GuidedStep
from lenvm_kernels.step.graphs import Graphs


class PaddedGraphs(Graphs):
    """Calls the captured function on the inputs that a graph would read."""

    def _capture(self, requests, nodes):
        scored = self._score.__self__._tensors.rows(requests, nodes).scored
        result = torch.empty(scored.token_ids.shape, device=scored.token_ids.device)
        return SimpleNamespace(replay=lambda: result.copy_(self._score(requests, nodes))), result


def pad(step: GuidedStep) -> None:
    """Give a step that was constructed without graphs :class:`PaddedGraphs`."""
    step.values._graphs = PaddedGraphs(step.values._score, step.device)
    step.config = replace(step.config, graphs=True)


class PaddedStep(GuidedStep):
    """A step with :class:`PaddedGraphs`."""

    def __init__(self, value_model, slots, config) -> None:
        super().__init__(value_model, slots, replace(config, graphs=False))
        pad(self)
