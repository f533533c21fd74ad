"""State carried from one guided step to the next: the last tokens of each request, and its number of cached tokens."""

import torch

from lenvm_kernels.ops.begin_step import empty_history
from lenvm_kernels.types import StepHistory


class History:
    """The history of all requests in a slot table. It is read and written on the device only.

    Args:
        table_rows: R, rows of the slot table.
        max_delta: M, tokens held per request.
        device: device of the tensors.
        reads_tokens: whether the value source reads tokens. If False, no token is ever missing.

    Attributes:
        columns: :class:`StepHistory`.
    """

    def __init__(self, table_rows: int, max_delta: int, device: torch.device, *, reads_tokens: bool = True) -> None:
        self._no_lens = 0 if reads_tokens else 2**31 - 1
        # One tensor, so that one operator resets both rows.
        self._lens = torch.full((2, table_rows), self._no_lens, dtype=torch.int32, device=device)
        told_lens, cached_lens = self._lens
        columns = empty_history(table_rows, max_delta, device)
        self.columns: StepHistory = columns._replace(told_lens=told_lens, cached_lens=cached_lens)
        self._forgotten: set[int] = set()

    def forget(self, table_row: int) -> None:
        """Discard the state of a row at the next :meth:`flush`, because it belongs to a new request."""
        self._forgotten.add(table_row)

    def flush(self) -> None:
        """Discard on the device the rows passed to :meth:`forget`."""
        if self._forgotten:
            rows = torch.tensor(list(self._forgotten))
            rows = (rows.pin_memory() if self._lens.is_cuda else rows).to(self._lens.device, non_blocking=True)
            self._lens.index_fill_(1, rows, self._no_lens)
            self._forgotten.clear()

    def extend(self, table_rows: torch.Tensor, lens: torch.Tensor) -> None:
        """Record that the first ``lens [B]`` tokens of ``table_rows [B]`` are cached. Lengths never decrease."""
        self._lens[:, table_rows] = torch.maximum(self._lens[:, table_rows], lens)
