"""Where the values of a guided step come from, and the source that needs no model."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch

from lenvm_kernels.guidance.params import GuidanceParams, check_without_values
from lenvm_kernels.step.rows import StepTensors
from lenvm_kernels.timing import StepRecord
from lenvm_kernels.value_model import ImageTokens


class ValueSource(ABC):
    """A source of value logits. What it has to say is :meth:`value_logits`; all else is for a source that remembers.

    Attributes:
        needs_tokens: it reads the tokens of sequences, which :meth:`extend` and steps have to tell.
    """

    needs_tokens = False

    @abstractmethod
    def value_logits(self, requests: int, nodes: int, record: StepRecord) -> torch.Tensor:
        """Value logits of the candidates of a step.

        Args:
            requests: rows of the step's tensors (:class:`StepTensors`), those of padding included.
            nodes: of each request.
            record: gets the mark ``forward`` before the last part of the work.

        Returns:
            fp32 ``[requests * nodes, K]``; anything where a candidate is not among those scored.
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

    def value_logits(self, requests: int, nodes: int, record: StepRecord) -> torch.Tensor:
        """See :class:`ValueSource`."""
        record.mark("forward")
        return self._of_rows[self._tensors.rows(requests, nodes).nodes.table_rows]
