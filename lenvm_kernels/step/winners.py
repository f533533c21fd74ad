"""The candidates of the last step, one of which is usually the token drawn: the winner, which needs no forward."""

import torch

from lenvm_kernels.ops.commit_winner import commit_winner
from lenvm_kernels.types import ScoredCandidates, StepHistory, StepRequests
from lenvm_kernels.value_model import KVCache, ValueModel


class Winners:
    """Keeps the candidates of a step, with keys and values, until the next. Read and written on the device only.

    Args:
        value_model: whose candidates they are.
        table_rows: R, rows of the table that requests are known by.
        max_requests: of a step.
        max_candidates: K.

    Attributes:
        history: where each table row's request was, which says whose the candidates are.
    """

    def __init__(self, value_model: ValueModel, table_rows: int, max_requests: int, max_candidates: int) -> None:
        def full(value: int, *shape: int) -> torch.Tensor:
            return torch.full(shape, value, dtype=torch.int64, device=value_model.device)

        self._cache = KVCache.of_slots(value_model, max_requests * (1 + max_candidates))
        self._candidate_ids = full(-1, max_requests, max_candidates).int()
        self._candidate_rows = full(-1, max_requests, max_candidates)  # of the forward; -1: not computed
        self._positions = full(0, max_requests).int()
        self.history = StepHistory(places=full(-1, table_rows), steps=full(-1, table_rows), step=full(1, 1))
        self._forgotten: set[int] = set()

    def forget(self, table_row: int) -> None:
        """A new request is in this row; the candidates of the one before are not its own. See :meth:`flush`."""
        self._forgotten.add(table_row)

    def flush(self) -> None:
        """Forget on the device what :meth:`forget` named."""
        if self._forgotten:
            rows = torch.tensor(list(self._forgotten))
            steps = self.history.steps
            steps.index_fill_(0, (rows.pin_memory() if steps.is_cuda else rows).to(steps.device, non_blocking=True), -1)
            self._forgotten.clear()

    def commit(self, cache: KVCache, requests: StepRequests, scored: ScoredCandidates, *, backend: str) -> None:
        """Move keys and values of last tokens that were candidates to their slots, and note that they are cached."""
        commit_winner(
            cache.keys,
            cache.values,
            self._cache.keys,
            self._cache.values,
            self._candidate_ids,
            self._candidate_rows,
            self._positions,
            requests.places,
            requests.tokens,
            requests.positions,
            requests.slots,
            key_scales=cache.key_scales,
            value_scales=cache.value_scales,
            delta_lens=scored.delta_lens,
            cached_lens=scored.cached_lens,
            backend=backend,
        )

    def keep(self, scored: ScoredCandidates, candidate_rows: torch.Tensor) -> KVCache:
        """Take the candidates of a step, and return where its forward is to leave the keys and values of its rows."""
        b, k = candidate_rows.shape
        self._candidate_ids[:b].copy_(scored.token_ids)
        self._candidate_rows[:b].copy_(candidate_rows)
        self._positions[:b].copy_(scored.positions)
        token_rows = b * (1 + k)
        return KVCache(self._cache.keys[:, :token_rows], self._cache.values[:, :token_rows])
