"""Prefilled fresh memory, to test which elements an operator writes."""

from unittest.mock import patch

import torch

MARGIN = 4096  # elements, more than the largest tile of a row
INTEGER = -77  # initial value of integers; floating-point numbers start as NaN


class GuardedMemory:
    """Calls a function with prefilled fresh memory, surrounded by memory that must not change."""

    def __init__(self):
        self.around = []  # (bytes before or after a tensor, their initial values)
        self.tensors = []  # results of torch.empty

    def call(self, function, *args, **kwargs):
        empty = torch.empty

        def guarded(*shape, dtype, device):
            size = torch.Size(shape[0] if isinstance(shape[0], (tuple, list)) else shape)
            memory = empty(size.numel() + 2 * MARGIN, dtype=dtype, device=device)
            memory.fill_(float("nan") if dtype.is_floating_point else INTEGER)
            for x in (memory[:MARGIN], memory[-MARGIN:]):
                self.around.append((x.view(torch.uint8), x.clone().view(torch.uint8)))
            return memory[MARGIN : MARGIN + size.numel()].view(size)

        def noted(*shape, **options):
            self.tensors.append(guarded(*shape, **options))
            return self.tensors[-1]

        def guarded_new(x, *shape, dtype=None, device=None):
            return guarded(*shape, dtype=dtype or x.dtype, device=device or x.device)

        with patch.object(torch, "empty", noted), patch.object(torch.Tensor, "new_empty", guarded_new):
            return function(*args, **kwargs)

    def assert_kept(self):
        """Assert that the memory around the tensors has not changed."""
        assert all(torch.equal(found, before) for found, before in self.around)
