"""The guided step as its CUDA graphs run it, without a GPU."""

from types import SimpleNamespace

import torch

from lenvm_kernels.step import GuidedStep


class PaddedStep(GuidedStep):
    """Pads every batch to the size of its graph, in the graphs' input buffers, and runs what a graph would replay."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options, graphs=False)
        device = self.value_model.device
        dtypes = (torch.int64, torch.int64, torch.int32, torch.int64, torch.int32, torch.int32, torch.int32)
        shapes = [(self.max_rows,)] * 5 + [(self.max_rows, self.max_candidates), (self.max_rows,)]
        self._inputs = [
            torch.full(shape, value, dtype=dtype, device=device)
            for value, dtype, shape in zip(self._no_row, dtypes, shapes, strict=True)
        ]
        self._captured = {}
        self.graphs = True

    def _capture(self, bucket: int) -> None:
        inputs = [buffer[:bucket] for buffer in self._inputs]
        value_logits = torch.empty(bucket, self.max_candidates, device=self.value_model.device)
        graph = SimpleNamespace(replay=lambda: value_logits.copy_(self._score(*inputs)))
        self._captured[bucket] = [graph], value_logits
