"""Cache slots for requests of which nobody says when they leave. On the host."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lenvm_kernels.paged_slots import OutOfSlots, PagedSlots


class Room(NamedTuple):
    """What :meth:`SlotPool.reserve` did.

    Attributes:
        reclaimed: rows whose requests have lost their slots, and with them all that was computed.
        refused: rows of the step that there is no room for; they have no slots left.
    """

    reclaimed: list[int]
    refused: list[int]


class SlotPool:
    """Gives slots to the requests of a step, and takes them from those that have been in none for longest.

    A request whose slots were taken may still be there: it then has to be computed again. Requests that begin with the
    same tokens share the full pages of these, for as long as one of them has its slots.

    Args:
        slots: that it hands out. Nobody else does.
    """

    def __init__(self, slots: PagedSlots) -> None:
        self.slots = slots
        self._last_used: dict[int, None] = {}  # rows that have slots; the one used last is at the end
        self._page_of: dict[bytes, int] = {}  # the page that ends each computed prefix
        self._prefix_of: dict[int, bytes] = {}  # the same, by page
        self._prefixes: dict[int, list[bytes]] = {}  # of each row, one a full page of its known tokens

    def admit(self, table_row: int, token_ids: Sequence[int], moved: int = 0) -> int:
        """A new request is in a row, whose slots are taken back.

        Args:
            table_row: its row.
            token_ids: its first tokens, as far as they are known; an empty sequence shares nothing. An image's first
                is a number that differs where the image does.
            moved: by how much the tokens' rotary positions are moved; requests that differ in it share nothing.

        Returns:
            How many of these the value model has computed already: for requests that begin with them.
        """
        self._prefixes[table_row] = self._prefixes_of(token_ids, moved)
        pages = []
        for prefix in self._prefixes[table_row]:
            if prefix not in self._page_of:
                break
            pages.append(self._page_of[prefix])
        self._forget(self.slots.share(table_row, pages))
        self._last_used.pop(table_row, None)
        if pages:
            self._last_used[table_row] = None
        return len(pages) * self.slots.page_size

    def release(self, table_row: int) -> None:
        """Take back the slots of a row."""
        self._forget(self.slots.free(table_row))
        self._last_used.pop(table_row, None)
        self._prefixes.pop(table_row, None)

    def reserve(self, lengths: Mapping[int, int]) -> Room:
        """Make room for the requests of a step: in each row for so many tokens.

        Where all of them do not fit, those that need the most go without.
        """
        by_need = sorted(lengths, key=lengths.__getitem__)
        for row in by_need:  # none of them is the oldest
            self._last_used.pop(row, None)
        reclaimed: list[int] = []
        refused: list[int] = []
        for row in by_need:
            while row not in self._last_used and row not in refused:
                try:
                    self.slots.extend(row, lengths[row])
                    self._last_used[row] = None
                except OutOfSlots:
                    oldest = next((r for r in self._last_used if r not in lengths), None)
                    if oldest is not None:
                        self.release(oldest)
                        reclaimed.append(oldest)
                    else:
                        refused.append(by_need[-1 - len(refused)])
                        self.release(refused[-1])
        return Room(reclaimed, refused)

    def computed(self, table_row: int, length: int) -> None:
        """The first ``length`` tokens of the request in a row are computed, or will be before whatever comes next."""
        pages = self.slots.pages(table_row)
        for i, prefix in enumerate(self._prefixes.get(table_row, ())[: length // self.slots.page_size]):
            if prefix not in self._page_of:
                self._page_of[prefix], self._prefix_of[pages[i]] = pages[i], prefix

    def _prefixes_of(self, token_ids: Sequence[int], moved: int) -> list[bytes]:
        """A digest of the tokens up to the end of each full page, and of by how much they are moved."""
        size, running, found = self.slots.page_size, hashlib.blake2b(array("q", [moved]), digest_size=16), []
        for end in range(size, len(token_ids) + 1, size):
            running.update(array("q", token_ids[end - size : end]).tobytes())
            found.append(running.digest())
        return found

    def _forget(self, pages: Sequence[int]) -> None:
        """These pages are free."""
        for page in pages:
            prefix = self._prefix_of.pop(page, None)
            if prefix is not None:
                del self._page_of[prefix]
