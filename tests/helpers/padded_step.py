"""Steps with the padding, buffers and frozen arguments of CUDA graphs, without a GPU."""

import torch
from torch.utils._pytree import tree_map

from lenvm_kernels.step import GuidedStep
from lenvm_kernels.step.state import Graphs


class RecordedGraphs(Graphs):
    """Calls the function of the first run with a key, and returns its results at fixed addresses, as graphs do."""

    def __init__(self, device):
        super().__init__(device)
        self.recorded = {}

    @staticmethod
    def supports(device):
        return True

    def run(self, key, function):
        function, written = self.recorded.setdefault(key, (function, []))
        result = function()
        if not written:
            written.append(tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, result))
        return tree_map(lambda x, y: x.copy_(y) if isinstance(x, torch.Tensor) else x, written[0], result)


class PaddedStep(GuidedStep):
    """A step that pads its batches and calls recorded functions, as with CUDA graphs."""

    graphs_class = RecordedGraphs
