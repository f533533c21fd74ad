"""The candidates of the last step, one of which is usually the token drawn: the winner, which needs no forward."""

from typing import Any

import torch

from lenvm_kernels.ops.commit_winner import commit_winner
from lenvm_kernels.types import CandidateTrees, ScoredCandidates, StepRequests
from lenvm_kernels.value_model import KVCache, ValueModel


class Winners:
    """Keeps the candidates of a step, with keys and values, until the next. Read and written on the device only.

    Args:
        value_model: whose candidates they are.
        max_requests: of a step.
        columns: candidates of a request, drafts included.
        max_delta: other tokens that a step computes of a request, at most.
        trees: there are drafts, which candidates follow.
    """

    def __init__(
        self, value_model: ValueModel, max_requests: int, columns: int, max_delta: int, *, trees: bool
    ) -> None:
        def full(value: int, *shape: int) -> torch.Tensor:
            return torch.full(shape, value, dtype=torch.int64, device=value_model.device)

        self._max_delta = max_delta
        self._cache = KVCache.of_slots(value_model, max_requests * (max_delta + columns))
        self._candidate_ids = full(-1, max_requests, columns).int()
        self._candidate_rows = full(-1, max_requests, columns)  # of the forward; -1: not computed
        self._parents = full(-1, max_requests, columns).int() if trees else None
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
            candidate_parents=self._parents,
            key_scales=cache.key_scales,
            value_scales=cache.value_scales,
            **options,
        )

    def keep(self, computed: ScoredCandidates | CandidateTrees, candidate_rows: torch.Tensor) -> KVCache:
        """Take the candidates of a step, and return where its forward is to leave the keys and values of its rows."""
        b, columns = candidate_rows.shape
        self._candidate_ids[:b, :columns].copy_(computed.token_ids)
        self._candidate_rows[:b, :columns].copy_(candidate_rows)
        self._positions[:b].copy_(computed.positions)
        if isinstance(computed, CandidateTrees):
            assert self._parents is not None
            self._parents[:b].copy_(computed.parents)
        elif self._parents is not None:
            self._candidate_rows[:b, columns:].fill_(-1)
            self._parents[:b].fill_(-1)
        token_rows = b * (self._max_delta + columns)
        return KVCache(self._cache.keys[:, :token_rows], self._cache.values[:, :token_rows])
