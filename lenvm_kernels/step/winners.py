"""The candidates of the last step, one of which is usually the token drawn: the winner, which needs no forward."""

import torch

from lenvm_kernels.ops.commit_winner import commit_winner
from lenvm_kernels.value_model import KVCache, ValueModel


class Winners:
    """Keeps the candidates of a step, with keys and values, until the next. Read and written on the device only.

    Args:
        value_model: whose candidates they are.
        table_rows: R, rows of the table that requests are known by.
        max_requests: of a step.
        max_candidates: K.
    """

    def __init__(self, value_model: ValueModel, table_rows: int, max_requests: int, max_candidates: int) -> None:
        def full(value: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.full(shape, value, dtype=dtype, device=value_model.device)

        self._cache = KVCache.of_slots(value_model, max_requests * (1 + max_candidates))
        self._candidate_ids = full(-1, torch.int32, max_requests, max_candidates)
        self._candidate_rows = full(-1, torch.int64, max_requests, max_candidates)  # of the forward; -1: not computed
        self._positions = full(0, torch.int32, max_requests)
        self._table_rows = full(-1, torch.int64, max_requests)  # -1: none
        # Each request's place in the last step it was in. That this was the last step at all shows in _table_rows,
        # which is why entries need no clearing when a request sits out a step.
        self._place = full(-1, torch.int64, table_rows)
        self._places = torch.arange(max_requests, device=value_model.device)
        self._forgotten: set[int] = set()

    def forget(self, table_row: int) -> None:
        """A new request is in this row; the candidates of the one before are not its own. See :meth:`flush`."""
        self._forgotten.add(table_row)

    def flush(self) -> None:
        """Forget on the device what :meth:`forget` named."""
        if self._forgotten:
            rows = torch.tensor(list(self._forgotten))
            rows = (rows.pin_memory() if self._place.is_cuda else rows).to(self._place.device, non_blocking=True)
            self._place.index_fill_(0, rows, -1)
            self._forgotten.clear()

    def commit(
        self,
        cache: KVCache,
        tokens: torch.Tensor,
        table_rows: torch.Tensor,
        lengths: torch.Tensor,
        slots: torch.Tensor,
        *,
        backend: str,
    ) -> torch.Tensor:
        """bool ``[B]``: last tokens that were candidates; their keys and values are in their slots now."""
        place = self._place[table_rows]
        return commit_winner(
            cache.keys,
            cache.values,
            self._cache.keys,
            self._cache.values,
            self._candidate_ids,
            self._candidate_rows,
            self._positions,
            torch.where(self._table_rows[place.clamp(min=0)] == table_rows, place, -1),
            tokens,
            lengths - 1,
            slots,
            backend=backend,
        )

    def keep(
        self, table_rows: torch.Tensor, lengths: torch.Tensor, candidate_ids: torch.Tensor, candidate_rows: torch.Tensor
    ) -> KVCache:
        """Take the candidates of a step, and return where its forward is to leave the keys and values of its rows."""
        b, k = candidate_ids.shape
        self._candidate_ids[:b].copy_(candidate_ids)
        self._candidate_rows[:b].copy_(candidate_rows)
        self._positions[:b].copy_(lengths)
        self._table_rows.fill_(-1)
        self._table_rows[:b].copy_(table_rows)
        self._place.index_copy_(0, table_rows, self._places[:b])
        token_rows = b * (1 + k)
        return KVCache(self._cache.keys[:, :token_rows], self._cache.values[:, :token_rows])
