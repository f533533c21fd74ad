"""A value model with the padding and buffers of CUDA graphs, without a GPU."""

import torch

from lenvm_kernels.step import ModelValues
from lenvm_kernels.step.graphs import Graphs


class PaddedGraphs(Graphs):
    """Runs the function, and returns its result at a fixed address that the next replay overwrites."""

    def __init__(self, score, device):
        super().__init__(score, device)
        self.results = {}

    def replay(self, requests, nodes):
        result = self.score(requests, nodes)
        return self.results.setdefault((requests, nodes), torch.empty_like(result)).copy_(result)


class PaddedValues(ModelValues):
    """Values of a value model whose step pads its batches, as with CUDA graphs."""

    graphs_class = PaddedGraphs

    def __init__(self, value_model):
        super().__init__(value_model)
        self.can_have_graphs = True
