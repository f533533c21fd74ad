"""The candidates of the last step, one of which is usually the token drawn: the winner, which needs no forward."""

from typing import Any

import torch

from lenvm_kernels.ops.commit_winner import commit_winner
from lenvm_kernels.types import ScoredCandidates, StepRequests
from lenvm_kernels.value_model import KVCache, ValueModel


class Winners:
    """Keeps the candidates of a step, with keys and values, until the next. Read and written on the device only.

    Args:
        value_model: whose candidates they are.
        max_requests: of a step.
        max_candidates: K.
        max_delta: other tokens that a step computes of a request, at most.
    """

    def __init__(self, value_model: ValueModel, max_requests: int, max_candidates: int, max_delta: int) -> None:
        def full(value: int, *shape: int) -> torch.Tensor:
            return torch.full(shape, value, dtype=torch.int64, device=value_model.device)

        self._rows_of_request = max_delta + max_candidates
        self._cache = KVCache.of_slots(value_model, max_requests * self._rows_of_request)
        self._candidate_ids = full(-1, max_requests, max_candidates).int()
        self._candidate_rows = full(-1, max_requests, max_candidates)  # of the forward; -1: not computed
        self._positions = full(0, max_requests).int()

    def commit(self, cache: KVCache, requests: StepRequests, slot_table: torch.Tensor, **options: Any) -> torch.Tensor:
        """Move keys and values of new tokens that were candidates to their slots; of how many, int32 ``[N]``."""
        return commit_winner(
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
            slot_table,
            requests.table_rows,
            new_lens=requests.new_lens,
            key_scales=cache.key_scales,
            value_scales=cache.value_scales,
            **options,
        )

    def keep(self, scored: ScoredCandidates, candidate_rows: torch.Tensor) -> KVCache:
        """Take the candidates of a step, and return where its forward is to leave the keys and values of its rows."""
        b = len(candidate_rows)
        self._candidate_ids[:b].copy_(scored.token_ids)
        self._candidate_rows[:b].copy_(candidate_rows)
        self._positions[:b].copy_(scored.positions)
        token_rows = b * self._rows_of_request
        return KVCache(self._cache.keys[:, :token_rows], self._cache.values[:, :token_rows])
