"""The state of a guided step, and the preallocated tensors that its operators write, at fixed addresses for graphs."""

from __future__ import annotations

from typing import NamedTuple

import torch

from lenvm_kernels.guidance.table import GuidanceTable
from lenvm_kernels.ops.begin_step import empty_requests
from lenvm_kernels.ops.pack_drafts import empty_trees
from lenvm_kernels.ops.topk_candidates import empty_scored
from lenvm_kernels.step.history import History
from lenvm_kernels.step.inputs import SlotTable, StepConfig
from lenvm_kernels.types import CandidateTrees, Drafts, ScoredCandidates, StepRequests


class StepRows(NamedTuple):
    """The first rows of :class:`StepTensors`.

    Attributes:
        sizes: N requests, and nodes per request.
        requests: inputs of the requests and their nodes.
        scored: candidates to score, per node.
        trees: drafts and candidates to score, per request. None without drafts or without a value model.
        states: hidden states of the base model per node. None if the value source reads none.
    """

    sizes: tuple[int, int]
    requests: StepRequests
    scored: ScoredCandidates
    trees: CandidateTrees | None
    states: torch.Tensor | None

    def score_chains(self, tokens: torch.Tensor, counts: torch.Tensor) -> None:
        """Mark the first ``counts [B]`` of ``tokens [B, C]`` to be scored as a chain, each after the previous one.

        The chain follows the sequence; its keys and values are not cached.
        """
        b, columns = tokens.shape
        computed = self.scored if self.trees is None else self.trees
        computed.token_ids.fill_(-1)
        computed.token_ids[:b, :columns] = tokens.int()
        computed.counts.zero_()
        computed.counts[:b] = counts
        computed.positions.copy_(self.requests.lengths)
        if self.trees is not None:
            requests, most = self.trees.parents.shape
            self.trees.parents.copy_(torch.arange(most, device=tokens.device) - 1)
            nodes = len(self.trees.columns) // requests
            self.trees.columns.fill_(-1)
            self.trees.columns[:, 0] = torch.arange(nodes, device=tokens.device).repeat(requests)


class StepTensors:
    """The tensors of the largest step, and slices of them for smaller ones.

    Args:
        max_rows: largest number of requests.
        max_drafts: D, draft tokens per request.
        max_candidates: K, candidates per node.
        device: device of the tensors.
        trees: whether candidates and drafts are scored together, see :func:`pack_drafts`.
        states: :attr:`ValueSource.needs_states`.

    Attributes:
        addresses: int64 ``[4]``; addresses of the scores and the vocabulary mask, see :func:`begin_step`.
        no_drafts: ``[max_rows, D]``; no draft. Constants in place of None avoid further kernel variants.
        all_active: bool ``[max_rows]``; True.
        none_drawn: int64 ``[max_rows * (1 + D)]``; -1.
    """

    def __init__(
        self,
        max_rows: int,
        max_drafts: int,
        max_candidates: int,
        device: torch.device,
        *,
        trees: bool,
        states: tuple[int, torch.dtype] | None,
    ) -> None:
        nodes = max_rows * (1 + max_drafts)
        self._requests = empty_requests(max_rows, device, max_drafts)
        self._scored = empty_scored(nodes, max_candidates, device)
        self._trees = empty_trees(max_rows, max_drafts, max_candidates, device) if trees and max_drafts else None
        self._states = None if states is None else torch.zeros(nodes, states[0], dtype=states[1], device=device)
        self.addresses = torch.zeros(4, dtype=torch.int64, device=device)
        self.no_drafts = Drafts(*(torch.full_like(self._requests.draft_ids, -1) for _ in Drafts._fields))
        self.all_active = torch.ones(max_rows, dtype=torch.bool, device=device)
        self.none_drawn = torch.full((nodes,), -1, dtype=torch.int64, device=device)
        self._rows: dict[tuple[int, int], StepRows] = {}

    def rows(self, requests: int, nodes: int = 1) -> StepRows:
        """The rows of ``requests`` requests with ``nodes`` nodes each. Cached, because slicing takes microseconds."""
        sizes, count = (requests, nodes), requests * nodes
        if sizes not in self._rows:
            drafts, most = nodes - 1, len(self._requests.lengths)
            fields = [x[: requests if len(x) == most else count] for x in self._requests]
            inputs = StepRequests(*fields)
            self._rows[sizes] = StepRows(
                sizes,
                inputs._replace(draft_ids=inputs.draft_ids[:, :drafts], draft_parents=inputs.draft_parents[:, :drafts]),
                ScoredCandidates(*(x[:count] for x in self._scored)),
                self._tree_rows(requests, nodes) if drafts else None,
                None if self._states is None else self._states[:count],
            )
        return self._rows[sizes]

    @property
    def largest(self) -> StepRows:
        """All rows."""
        return self.rows(len(self._requests.lengths), 1 + self._requests.draft_ids.shape[1])

    def _tree_rows(self, requests: int, nodes: int) -> CandidateTrees | None:
        if self._trees is None:
            return None
        trees = CandidateTrees(*(x[:requests] for x in self._trees))
        return trees._replace(columns=self._trees.columns[: requests * nodes])


class StepState(NamedTuple):
    """The state that a guided step shares with its source of values.

    Attributes:
        config: configuration of the step, with its defaults resolved.
        slots: slot table of the requests.
        table: guidance of the requests.
        tensors: tensors that the operators of a step write.
        history: tokens of the requests.
    """

    config: StepConfig
    slots: SlotTable
    table: GuidanceTable
    tensors: StepTensors
    history: History

    @property
    def padding_row(self) -> int:
        """Table row of the dummy requests that pad a batch to its graph's size."""
        return len(self.table) - 1
