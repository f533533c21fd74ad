"""The state of a guided step, and the preallocated tensors that its operators write, at fixed addresses for graphs."""

from __future__ import annotations

from typing import NamedTuple

import torch

from lenvm_kernels.guidance.table import GuidanceTable
from lenvm_kernels.ops.expand_drafts import NODE_FIELDS, empty_nodes
from lenvm_kernels.ops.gather_requests import empty_requests
from lenvm_kernels.ops.pack_drafts import empty_trees
from lenvm_kernels.ops.topk_candidates import empty_scored
from lenvm_kernels.step.graphs import bucket_of
from lenvm_kernels.step.history import History
from lenvm_kernels.step.inputs import SlotTable, StepConfig
from lenvm_kernels.types import CandidateTrees, GuidanceColumns, Mode, ScoredCandidates, SpanNodes, StepRequests


class StepRows(NamedTuple):
    """The first rows of :class:`StepTensors`.

    Attributes:
        sizes: N requests, and nodes per request.
        requests: state of ``N`` requests.
        nodes: state of their ``N * nodes`` nodes; without drafts, the same as ``requests``.
        scored: candidates to score, per node.
        trees: drafts and candidates to score, per request. None without drafts or without a value model.
        all_active: bool ``[N]``; True.
        none_drawn: int32 ``[N * nodes]``; -1.
    """

    sizes: tuple[int, int]
    requests: StepRequests
    nodes: StepRequests
    scored: ScoredCandidates
    trees: CandidateTrees | None
    all_active: torch.Tensor
    none_drawn: torch.Tensor

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
        computed.positions.copy_(self.requests.positions + 1)
        if self.trees is not None:
            requests, most = self.trees.parents.shape
            self.trees.parents.copy_(torch.arange(most, device=tokens.device) - 1)
            nodes = len(self.trees.columns) // requests
            self.trees.columns.fill_(-1)
            self.trees.columns[:, 0] = torch.arange(nodes, device=tokens.device).repeat(requests)


def apply_spans(nodes: StepRequests, spans: SpanNodes, table: GuidanceColumns) -> None:
    """Guide exactly the nodes where a span is open, and count their generated tokens from its start.

    A request between two spans is not guided, but a draft may begin its next span: the nodes after that are guided.
    """
    rows = nodes.table_rows
    may_begin = (table.span_start_bits[rows] != 0) & (table.mode[rows] != Mode.UNGUIDED) & nodes.wants_length
    nodes.guided.logical_or_(may_begin).logical_and_(~spans.ended)
    nodes.generated.copy_(spans.generated)


class StepTensors:
    """The tensors of the largest step, and slices of them for smaller ones.

    Args:
        max_requests: maximum batch size of a step.
        max_drafts: D, draft tokens per request.
        max_candidates: K, candidates per node.
        device: device of the tensors.
        trees: whether candidates and drafts are scored together, see :func:`pack_drafts`.

    Attributes:
        requests, scored, trees: all rows of the fields of :class:`StepRows`.
    """

    def __init__(
        self, max_requests: int, max_drafts: int, max_candidates: int, device: torch.device, *, trees: bool
    ) -> None:
        nodes = 1 + max_drafts
        self.requests = empty_requests(max_requests, device)
        self._nodes = empty_nodes(self.requests, max_drafts) if max_drafts else self.requests
        self.scored = empty_scored(max_requests * nodes, max_candidates, device)
        self.trees: CandidateTrees | None = None
        if trees and max_drafts:
            self.trees = empty_trees(max_requests, max_drafts, max_candidates, device)
        # Passing constants in place of None avoids further kernel variants.
        self._all_active = torch.ones(max_requests, dtype=torch.bool, device=device)
        self._none_drawn = torch.full((max_requests * nodes,), -1, dtype=torch.int32, device=device)
        self._rows: dict[tuple[int, int], StepRows] = {}

    def rows(self, requests: int, nodes: int = 1) -> StepRows:
        """The rows of ``requests`` requests with ``nodes`` nodes each. Cached, because slicing takes microseconds."""
        sizes = requests, nodes
        if sizes not in self._rows:
            first_requests = StepRequests(*(x[:requests] for x in self.requests))
            node_fields = {name: getattr(self._nodes, name)[: requests * nodes] for name in NODE_FIELDS}
            trees = None
            if nodes > 1 and self.trees is not None:
                trees = CandidateTrees(*(x[:requests] for x in self.trees))
                trees = trees._replace(columns=self.trees.columns[: requests * nodes])
            self._rows[sizes] = StepRows(
                sizes,
                first_requests,
                first_requests if nodes == 1 else first_requests._replace(**node_fields),
                ScoredCandidates(*(x[: requests * nodes] for x in self.scored)),
                trees,
                self._all_active[:requests],
                self._none_drawn[: requests * nodes],
            )
        return self._rows[sizes]


class StepState(NamedTuple):
    """The state that a guided step shares with its source of values.

    Attributes:
        config: configuration of the step, with ``max_requests`` and ``graphs`` resolved.
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

    def padded(self, requests: int) -> int:
        """The number of requests of the graph that runs a batch."""
        return bucket_of(requests, self.config.max_requests or 1) if self.config.graphs else requests
