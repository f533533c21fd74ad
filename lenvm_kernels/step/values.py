"""Where the values of a guided step come from, and the sources that need no second model."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from lenvm_kernels.guidance.params import GuidanceParams, check_with_trunk, check_without_values
from lenvm_kernels.guidance.table import GuidanceTable
from lenvm_kernels.ops.candidate_values import num_counters
from lenvm_kernels.step.inputs import StepConfig
from lenvm_kernels.step.rows import StepTensors
from lenvm_kernels.timing import StepRecord
from lenvm_kernels.value_model import ImageTokens, Trunk


class ValueSource(ABC):
    """A source of value logits. What it has to say is :meth:`value_logits`; all else is for a source that remembers.

    Attributes:
        needs_tokens: it reads the tokens of sequences, which :meth:`extend` and steps have to tell.
        needs_states: columns of the base model's states that each step has to tell, and their dtype; None: it reads
            none.
    """

    needs_tokens = False
    needs_states: tuple[int, torch.dtype] | None = None

    @abstractmethod
    def value_logits(
        self, requests: int, nodes: int, record: StepRecord, states: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Value logits of the candidates of a step.

        Args:
            requests: rows of the step's tensors (:class:`StepTensors`), those of padding included.
            nodes: of each request.
            record: gets the mark ``forward`` before the last part of the work.
            states: those of the batch (:class:`StepBatch`).

        Returns:
            fp32 ``[requests * nodes, K]``, those that guide and those that predict lengths; anything where a candidate
            is not among those scored. They are the same tensor unless the source knows a distribution.
        """

    def add_request(self, table_row: int, params: GuidanceParams | None) -> None:  # noqa: B027, most forget nobody
        """A request is in a row. Raises ValueError, naming the field, for guidance that the source cannot give."""

    def flush(self) -> None:  # noqa: B027
        """Send to the device what :meth:`add_request` was told."""

    def extend(  # noqa: B027
        self,
        tokens: torch.Tensor,
        slots: torch.Tensor,
        table_rows: torch.Tensor,
        starts: torch.Tensor,
        ends: torch.Tensor,
        cached_lens: torch.Tensor,
        begins: Sequence[int],
        images: ImageTokens | None,
    ) -> None:
        """Learn the tokens ``starts`` to ``ends`` of prompts, see :meth:`GuidedStep.extend`."""

    def warm_up(self, table_row: int) -> None:  # noqa: B027
        """Compile what :meth:`extend` needs; ``table_row`` is of a request that does not exist."""


class ConstantValues(ValueSource):
    """No value model: whatever the token, as much is to come as the request's target asks for.

    The candidates of a row have the same value but for those that end the sequence or its span, whose value is 0. So
    ``near``, ``ge_near`` and ``le_near`` leave the ratios of all other candidates as they are, but for those that end a
    sentence: ends are held back far before the target, and pushed from where fewer than about ``sqrt(2 target)`` tokens
    are left.

    Args:
        table_rows: R, rows of the table that requests are known by.
        tensors: of the step.
    """

    def __init__(self, table_rows: int, tensors: StepTensors, device: torch.device) -> None:
        self._tensors = tensors
        columns = tensors.scored.token_ids.shape[1]
        self._of_rows = torch.zeros(table_rows, columns, dtype=torch.float32, device=device)
        self._staged: dict[int, float] = {}

    def add_request(self, table_row: int, params: GuidanceParams | None) -> None:
        """See :class:`ValueSource`."""
        params = params or GuidanceParams()
        check_without_values(params)
        # A value of 0 would be that of an end.
        length = max(1.0, (params.target_length or 0.0) + params.answer_length)
        nats = -math.log(params.gamma) * length
        self._staged[table_row] = nats + math.log(-math.expm1(-nats))

    def flush(self) -> None:
        """See :class:`ValueSource`."""
        if not self._staged:
            return
        staged = torch.tensor([[*self._staged], [*self._staged.values()]], dtype=torch.float64)
        staged = (staged.pin_memory() if self._of_rows.is_cuda else staged).to(self._of_rows.device, non_blocking=True)
        self._of_rows[staged[0].long()] = staged[1, :, None].float()
        self._staged.clear()

    def value_logits(
        self, requests: int, nodes: int, record: StepRecord, states: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`ValueSource`."""
        record.mark("forward")
        z = self._of_rows[self._tensors.rows(requests, nodes).nodes.table_rows]
        return z, z


class TrunkValues(ValueSource):
    """A trunk's: from the base model's own states, which every step is given.

    Args:
        trunk: what makes values of them.
        tensors: of the step.
        table: of its requests.
        config: of the step.
    """

    def __init__(self, trunk: Trunk, tensors: StepTensors, table: GuidanceTable, config: StepConfig) -> None:
        self._trunk, self._tensors, self._table = trunk, tensors, table
        rows, columns = tensors.scored.token_ids.shape
        self._options: dict[str, Any] = dict(
            counters=torch.zeros(num_counters(rows, columns), dtype=torch.int32, device=trunk.device),
            backend=config.backend,
        )
        self.needs_states: tuple[int, torch.dtype] = (trunk.config.state_size, trunk.dtype)

    def add_request(self, table_row: int, params: GuidanceParams | None) -> None:
        """See :class:`ValueSource`."""
        if params is not None:
            check_with_trunk(params)

    def value_logits(
        self, requests: int, nodes: int, record: StepRecord, states: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`ValueSource`."""
        assert states is not None
        record.mark("forward")
        rows = self._tensors.rows(requests, nodes)
        return self._trunk.value_logits(
            states,
            rows.scored.token_ids,
            self._table.columns,
            table_rows=rows.nodes.table_rows,
            generated=rows.nodes.generated,
            **self._options,
        )

    def warm_up(self, table_row: int) -> None:
        """See :class:`ValueSource`."""
        scored, known = self._tensors.scored.token_ids, self._tensors.rows(1).nodes
        (size, dtype), device = self.needs_states, scored.device
        for rows in self._trunk.rows_of_every_tile(len(scored)):
            self._trunk.value_logits(
                torch.zeros(rows, size, dtype=dtype, device=device),
                torch.full_like(scored[:rows], -1),
                self._table.columns,
                table_rows=torch.full((rows,), table_row, dtype=known.table_rows.dtype, device=device),
                generated=torch.zeros(rows, dtype=known.generated.dtype, device=device),
                **self._options,
            )
