"""Cache slots for requests in the transformers adapter and the tests, where the engine assigns none."""

from collections.abc import Sequence

import torch


class OutOfSlots(RuntimeError):
    """Too few pages are free; release a request with :meth:`PagedSlots.free`."""


class PagedSlots:
    """Assigns pages of cache slots to requests, and maintains the slot table that the kernels read.

    Token ``p`` of the request in row ``r`` is stored in slot ``table[r, p // page_size] * page_size + p % page_size``.
    Free pages are tracked on the host; the table is on the device and is written in stream order.

    Args:
        requests: maximum number of concurrent requests: rows of the table.
        max_len: maximum number of tokens per request.
        page_size: slots per page.
        num_pages: total number of pages. If None, enough for every request to reach ``max_len``.
        device: device of the table.

    Attributes:
        table: int32 ``[requests, ceil(max_len / page_size)]``. Entries past a request's pages are arbitrary.
        num_slots: total number of slots, the size of the cache.

    Example:
        >>> slots = PagedSlots(2, 8, page_size=4)
        >>> slots.extend(0, 5)  # two pages
        >>> slots.slots(torch.tensor([0, 0]), torch.tensor([0, 4]))
        tensor([0, 4])
    """

    def __init__(
        self,
        requests: int,
        max_len: int,
        *,
        page_size: int = 1,
        num_pages: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        for name, value in (("requests", requests), ("max_len", max_len), ("page_size", page_size)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        pages = -(-max_len // page_size)
        num_pages = requests * pages if num_pages is None else num_pages
        self.page_size, self.max_len, self.num_slots = page_size, max_len, num_pages * page_size
        self.table = torch.zeros(requests, pages, dtype=torch.int32, device=device)
        self._free = list(range(num_pages))[::-1]
        self._pages: list[list[int]] = [[] for _ in range(requests)]
        self._holders = [0] * num_pages  # number of requests per page

    @property
    def free_pages(self) -> int:
        """Number of pages that belong to no request."""
        return len(self._free)

    def extend(self, table_row: int, length: int) -> None:
        """Extend the request in a row to ``length`` tokens; the pages that it has are kept.

        Raises:
            ValueError: ``length`` exceeds ``max_len``.
            OutOfSlots: too few pages are free; the row is unchanged.
        """
        if length > self.max_len:
            raise ValueError(f"length must be at most max_len = {self.max_len}, got {length}")
        missing = -(-length // self.page_size) - len(self._pages[table_row])
        if missing <= 0:
            return
        if missing > len(self._free):
            raise OutOfSlots(
                f"{length} tokens in table row {table_row} need {missing} more pages, {len(self._free)} are free"
            )
        self._append(table_row, [self._free.pop() for _ in range(missing)])

    def pages(self, table_row: int) -> list[int]:
        """The pages of the request in a row, in the order of its tokens."""
        return list(self._pages[table_row])

    def share(self, table_row: int, pages: Sequence[int]) -> list[int]:
        """Replace a request's pages by ``pages``, which may be shared; returns the pages that became free."""
        before, self._pages[table_row] = self._pages[table_row], []
        self._append(table_row, pages)
        for page in before:
            self._holders[page] -= 1
        free = [page for page in before if not self._holders[page]]
        self._free += free
        return free

    def free(self, table_row: int) -> list[int]:
        """Release all pages of the request in a row; returns the pages that became free."""
        return self.share(table_row, ())

    def _append(self, table_row: int, pages: Sequence[int]) -> None:
        first = len(self._pages[table_row])
        self._pages[table_row] += pages
        for page in pages:
            self._holders[page] += 1
        if not pages:
            return
        new = torch.tensor(pages, dtype=torch.int32)
        new = new.pin_memory() if self.table.is_cuda else new
        self.table[table_row, first : first + len(pages)].copy_(new, non_blocking=True)

    def slots(self, table_rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """int64, the shape of ``positions``: slots of tokens at ``positions`` of the requests in ``table_rows``."""
        page = self.table[table_rows, positions // self.page_size].long()
        return page * self.page_size + positions % self.page_size
