"""Separate cache slots for a value model in engines that do not share their slots. Makes no host-device sync."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import torch

from lenvm_kernels.engines.tensors import to_device
from lenvm_kernels.paged_slots import OutOfSlots, PagedSlots
from lenvm_kernels.step import GuidedStep
from lenvm_kernels.types import DeltaTokens
from lenvm_kernels.values import ImageTokens, KVCache, ValueModel

PAGE_SIZE = 16
# Returns the token ids of table rows and positions, int64 ``[D]``.
TokenIds = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Room(NamedTuple):
    """Result of :meth:`OwnSlots.reserve`: ``reclaimed`` rows outside the step lost their slots, so their tokens must be
    recomputed; ``refused`` rows of the step do not fit into the cache and hold no slots."""

    reclaimed: list[int]
    refused: list[int]


class PromptPart(NamedTuple):
    """Tokens ``start`` to ``end`` (exclusive) of the request in a row of the slot table."""

    table_row: int
    start: int
    end: int


class OwnSlots:
    """Slots of a value model's cache, by table row.

    Engines do not report when a request leaves, so slots are reclaimed from the least recently used rows. Requests with
    a common prefix share its full pages while one of them holds the pages. For arguments, see :class:`PagedSlots`.
    """

    def __init__(
        self,
        requests: int,
        max_len: int,
        *,
        num_pages: int | None,
        device: torch.device | str = "cpu",
        page_size: int = PAGE_SIZE,
    ) -> None:
        self.slots = PagedSlots(requests, max_len, page_size=page_size, num_pages=num_pages, device=device)
        self._last_used: dict[int, None] = {}  # rows with slots, most recently used last
        self._page_of: dict[bytes, int] = {}  # the last page of each computed prefix
        self._prefix_of: dict[int, bytes] = {}  # its inverse
        self._prefixes: dict[int, list[bytes]] = {}  # per row, a digest per full page of its prompt

    def admit(self, table_row: int, token_ids: Sequence[int], moved: int = 0) -> int:
        """Assign a row to a new request and free the slots of the previous one.

        Args:
            table_row: row of the request.
            token_ids: first tokens of the request; an empty sequence shares nothing. The first token of an image must
                be a number that identifies the image.
            moved: offset of the rotary positions; requests with different offsets share nothing.

        Returns:
            Number of tokens already computed by other requests with the same prefix.
        """
        self._prefixes[table_row] = prefixes = self._digests(token_ids, moved)
        pages = [self._page_of[prefix] for prefix in takewhile(self._page_of.__contains__, prefixes)]
        self._forget(self.slots.share(table_row, pages))
        self._last_used.pop(table_row, None)
        if pages:
            self._last_used[table_row] = None
        return len(pages) * self.slots.page_size

    def release(self, table_row: int) -> None:
        """Free the slots of a row."""
        self._forget(self.slots.free(table_row))
        self._last_used.pop(table_row, None)
        self._prefixes.pop(table_row, None)

    def reserve(self, lengths: Mapping[int, int]) -> Room:
        """Reserve slots for a step; ``lengths`` are the tokens of each row. If the cache is too small, the longest
        requests are refused."""
        by_length = sorted(lengths, key=lengths.__getitem__)
        for row in by_length:  # must not be reclaimed
            self._last_used.pop(row, None)
        room = Room([], [])
        for row in by_length:
            while row not in self._last_used and row not in room.refused:
                try:
                    self.slots.extend(row, lengths[row])
                    self._last_used[row] = None
                except OutOfSlots:
                    oldest = next((r for r in self._last_used if r not in lengths), None)
                    if oldest is not None:
                        room.reclaimed.append(oldest)
                    else:
                        room.refused.append(by_length[-1 - len(room.refused)])
                    self.release(room.refused[-1] if oldest is None else oldest)
        return room

    def computed(self, table_row: int, length: int) -> None:
        """Mark the first ``length`` tokens of a row as computed; their computation must be launched before any read."""
        pages = self.slots.pages(table_row)
        for i, prefix in enumerate(self._prefixes.get(table_row, ())[: length // self.slots.page_size]):
            if prefix not in self._page_of:
                self._page_of[prefix], self._prefix_of[pages[i]] = pages[i], prefix

    def delta(self, parts: Sequence[PromptPart], token_ids: TokenIds) -> tuple[DeltaTokens, list[int]]:
        """The tokens of consecutive parts, on the device, and the index of each part's first token, on the host."""
        table_rows, starts, ends = np.array(parts, dtype=np.int64).T
        lens = ends - starts
        begins = lens.cumsum() - lens
        positions = np.arange(lens.sum()) + np.repeat(starts - begins, lens)
        device = self.slots.table.device
        tokens = token_ids(*to_device(np.stack((np.repeat(table_rows, lens), positions)), device))
        rows, first, count, start = to_device(np.stack((table_rows, begins, lens, starts)), device)
        return DeltaTokens(tokens, first.int(), count.int(), start.int(), rows), begins.tolist()

    def extend(
        self,
        step: GuidedStep,
        parts: Sequence[PromptPart],
        token_ids: TokenIds,
        *,
        lens: torch.Tensor | None = None,
        images: ImageTokens | None = None,
    ) -> None:
        """Compute parts of prompts (:meth:`GuidedStep.extend`) and mark them as computed.

        Args:
            step: the guided step on these slots.
            parts: at most one per request; :meth:`reserve` must have reserved their slots.
            token_ids: the token ids of all parts.
            lens: int32 ``[B]``; number of tokens per part, if the host only has an upper bound. If None, all.
            images: images among the tokens.
        """
        (tokens, starts, all_lens, cached_lens, rows), begins = self.delta(parts, token_ids)
        step.extend(tokens, rows, starts, all_lens if lens is None else lens, cached_lens, begins=begins, images=images)
        for part in parts:
            self.computed(part.table_row, part.end)

    def _digests(self, token_ids: Sequence[int], moved: int) -> list[bytes]:
        """One digest per full page, computed from ``moved`` and all tokens up to the end of the page."""
        size, running, digests = self.slots.page_size, hashlib.blake2b(array("q", [moved]), digest_size=16), []
        for end in range(size, len(token_ids) + 1, size):
            running.update(array("q", token_ids[end - size : end]))
            digests.append(running.digest())
        return digests

    def _forget(self, pages: Sequence[int]) -> None:
        """Forget the prefixes of freed pages."""
        for prefix in [self._prefix_of.pop(page) for page in pages if page in self._prefix_of]:
            del self._page_of[prefix]


def pages_for(value_model: ValueModel, requests: int, max_len: int, num_bytes: float | None) -> int:
    """Number of pages that fit into ``num_bytes``, at most the pages that all requests can fill. None is no limit."""
    most = requests * -(-max_len // PAGE_SIZE)
    page_bytes = KVCache.num_bytes(value_model, PAGE_SIZE)
    return most if num_bytes is None else min(most, int(num_bytes) // page_bytes)
