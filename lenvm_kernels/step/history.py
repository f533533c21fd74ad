"""What a guided step leaves to the next of each request: where it was, its last tokens, how many of them are cached."""

import torch

from lenvm_kernels.ops.gather_requests import empty_history
from lenvm_kernels.types import StepHistory


class History:
    """The requests of a slot table from step to step. Read and written on the device only.

    Args:
        table_rows: R, rows of the table that requests are known by.
        max_delta: tokens that it holds of each.
        device: where it lies.
        is_told: somebody computes the tokens of sequences and has to be told all of them. Else none is ever missing.

    Attributes:
        columns: what it holds.
    """

    def __init__(self, table_rows: int, max_delta: int, device: torch.device, *, is_told: bool = True) -> None:
        self._no_lens = 0 if is_told else 2**31 - 1
        # Together: one operator forgets both.
        self._lens = torch.full((2, table_rows), self._no_lens, dtype=torch.int32, device=device)
        told_lens, cached_lens = self._lens
        columns = empty_history(table_rows, max_delta, device)
        self.columns: StepHistory = columns._replace(told_lens=told_lens, cached_lens=cached_lens)
        self._forgotten: set[int] = set()

    def forget(self, table_row: int) -> None:
        """A new request is in this row, of which nothing is known. See :meth:`flush`."""
        self._forgotten.add(table_row)

    def flush(self) -> None:
        """Forget on the device what :meth:`forget` named."""
        if self._forgotten:
            rows, steps = torch.tensor(list(self._forgotten)), self.columns.steps
            rows = (rows.pin_memory() if steps.is_cuda else rows).to(steps.device, non_blocking=True)
            steps.index_fill_(0, rows, -1)
            self._lens.index_fill_(1, rows, self._no_lens)
            self._forgotten.clear()

    def extend(self, table_rows: torch.Tensor, lens: torch.Tensor) -> None:
        """The first ``lens [B]`` tokens of the requests in ``table_rows [B]`` are cached; no fewer than were before."""
        self._lens[:, table_rows] = torch.maximum(self._lens[:, table_rows], lens)
