"""State of a guided step at fixed addresses, as CUDA graphs require: tensors, history of requests, and graphs."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import torch

from lenvm_kernels.guidance.table import GuidanceTable
from lenvm_kernels.ops._common import next_power_of_2
from lenvm_kernels.ops.begin_step import empty_history, empty_requests
from lenvm_kernels.ops.pack_drafts import empty_trees
from lenvm_kernels.ops.topk_candidates import empty_scored
from lenvm_kernels.step.inputs import SlotTable, StepConfig
from lenvm_kernels.types import CandidateTrees, Drafts, ScoredCandidates, StepHistory, StepRequests

Result = TypeVar("Result")
States = tuple[int, torch.dtype]  # number of columns and dtype of hidden states


class StepRows(NamedTuple):
    """The first rows of :class:`StepTensors`."""

    sizes: tuple[int, int]  # N requests, and nodes per request
    requests: StepRequests  # inputs of the requests and their nodes
    scored: ScoredCandidates  # candidates to score, per node
    trees: CandidateTrees | None  # drafts and candidates, per request; None without drafts or without a value model
    states: torch.Tensor | None  # hidden states of the base model per node; None if the value source reads none

    def score_chains(self, tokens: torch.Tensor, counts: torch.Tensor) -> None:
        """Mark the first ``counts [B]`` of ``tokens [B, C]`` to be scored as a chain after the sequence.

        The keys and values of the chain are not cached.
        """
        b, columns = tokens.shape
        computed = self.scored if self.trees is None else self.trees
        computed.token_ids.fill_(-1)
        computed.token_ids[:b, :columns] = tokens.int()
        computed.counts.zero_()
        computed.counts[:b] = counts
        if self.trees is not None:
            requests, most = self.trees.parents.shape
            self.trees.parents.copy_(torch.arange(most, device=tokens.device) - 1)
            nodes = len(self.trees.columns) // requests
            self.trees.columns.fill_(-1)
            self.trees.columns[:, 0] = torch.arange(nodes, device=tokens.device).repeat(requests)


class StepTensors:
    """The tensors of the largest step, with ``max_rows`` requests, and slices of them for smaller steps.

    Args:
        trees: whether candidates and drafts are scored together, see :func:`pack_drafts`.
        states: :attr:`ValueSource.needs_states`.
    """

    def __init__(
        self, max_rows: int, config: StepConfig, device: torch.device, *, trees: bool, states: States | None
    ) -> None:
        max_drafts, max_candidates = config.max_drafts, config.max_candidates
        assert max_candidates is not None  # completed
        nodes = max_rows * (1 + max_drafts)
        self._requests = empty_requests(max_rows, device, max_drafts)
        self.scored = empty_scored(nodes, max_candidates, device)
        self._trees = empty_trees(max_rows, max_drafts, max_candidates, device) if trees and max_drafts else None
        self._states = None if states is None else torch.zeros(nodes, states[0], dtype=states[1], device=device)
        self.addresses = torch.zeros(4, dtype=torch.int64, device=device)  # of scores and mask, see begin_step
        # Constants instead of None avoid kernel variants.
        self.no_drafts = Drafts(*(torch.full_like(self._requests.draft_ids, -1) for _ in Drafts._fields))
        self.all_active = torch.ones(max_rows, dtype=torch.bool, device=device)
        self.none_drawn = torch.full((nodes,), -1, dtype=torch.int64, device=device)
        self._rows: dict[tuple[int, int], StepRows] = {}

    def rows(self, requests: int, nodes: int = 1) -> StepRows:
        """The rows of ``requests`` requests with ``nodes`` nodes each. Cached, because slicing takes microseconds."""
        sizes, count = (requests, nodes), requests * nodes
        if sizes not in self._rows:
            drafts, most, trees = nodes - 1, len(self._requests.lengths), None
            inputs = StepRequests(*(x[: requests if len(x) == most else count] for x in self._requests))
            if drafts and self._trees is not None:
                columns = self._trees.columns[:count]
                trees = CandidateTrees(*(x[:requests] for x in self._trees))._replace(columns=columns)
            self._rows[sizes] = StepRows(
                sizes,
                inputs._replace(draft_ids=inputs.draft_ids[:, :drafts], draft_parents=inputs.draft_parents[:, :drafts]),
                ScoredCandidates(*(x[:count] for x in self.scored)),
                trees,
                None if self._states is None else self._states[:count],
            )
        return self._rows[sizes]


class History:
    """The last ``max_delta`` tokens of each request of a slot table, and its number of cached tokens.

    The host reads neither. Unless the value source ``reads_tokens``, tokens are never missing.
    """

    def __init__(self, table_rows: int, max_delta: int, device: torch.device, *, reads_tokens: bool) -> None:
        self._no_lens = 0 if reads_tokens else 2**31 - 1
        # One tensor, so that one operator resets both rows.
        self._lens = torch.full((2, table_rows), self._no_lens, dtype=torch.int32, device=device)
        passed_lens, cached_lens = self._lens
        columns = empty_history(table_rows, max_delta, device)
        self.columns: StepHistory = columns._replace(passed_lens=passed_lens, cached_lens=cached_lens)
        self._forgotten: set[int] = set()

    def forget(self, table_row: int) -> None:
        """Discard the state of a row at the next :meth:`flush`, for a new request."""
        self._forgotten.add(table_row)

    def flush(self) -> None:
        """Discard on the device the rows passed to :meth:`forget`."""
        if self._forgotten:
            rows = torch.tensor(list(self._forgotten))
            rows = (rows.pin_memory() if self._lens.is_cuda else rows).to(self._lens.device, non_blocking=True)
            self._lens.index_fill_(1, rows, self._no_lens)
            self._forgotten.clear()

    def extend(self, table_rows: torch.Tensor, lens: torch.Tensor) -> None:
        """Mark the first ``lens [B]`` tokens of ``table_rows [B]`` as cached. Lengths never decrease."""
        self._lens[:, table_rows] = torch.maximum(self._lens[:, table_rows], lens)


class StepState(NamedTuple):
    """The state that a guided step shares with its value source. The defaults of ``config`` are resolved."""

    config: StepConfig
    slots: SlotTable
    table: GuidanceTable
    tensors: StepTensors
    history: History

    @property
    def padding_row(self) -> int:
        """Table row of the dummy requests that pad a batch to its graph's size."""
        return self.slots.table.shape[0]

    def answer_row(self, table_row: int) -> int:
        """Row of the guidance table with the parameters that apply after the span of a request."""
        return self.padding_row + 1 + table_row


def bucket_of(requests: int, max_requests: int) -> int:
    """The batch size of the graph for a batch of ``requests``: a power of two, or ``max_requests``."""
    return min(next_power_of_2(requests), max_requests)


class Graphs:
    """Runs functions with CUDA graphs, one per key. The functions must use tensors at fixed addresses."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None  # memory shared by all graphs, because only one runs at a time
        self._captured: dict[Hashable, tuple[torch.cuda.CUDAGraph, Any]] = {}

    @staticmethod
    def supports(device: torch.device) -> bool:
        """Whether functions on the device can be captured."""
        return device.type == "cuda"

    def run(self, key: Hashable, function: Callable[[], Result]) -> Result:
        """Run the function captured for ``key``; the next run overwrites its result.

        The first call with a key runs and captures ``function``. Later calls replay the graph and ignore ``function``.
        """
        if key in self._captured:
            graph, result = self._captured[key]
            graph.replay()
            return result
        # The first call runs eagerly, because a capture launches no kernel and must not compile one.
        result = function()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device), torch.cuda.graph(graph, pool=self._pool):
            self._captured[key] = graph, function()
        return result
