"""What guided steps in vLLM did, counted on the host when the device has done it. Importable without vLLM."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch

from lenvm_kernels.adapters.metrics import BROKEN, STATUS_NAMES, Metrics, Stopwatch
from lenvm_kernels.types import Status


class _Step(NamedTuple):
    """On its way to the host.

    Attributes:
        numbers: fp32 ``[6, B]``: status, lost mass, whether broken, whether to count it, whether the step before had
            drafts, and how many tokens there are since.
        arrived: is done when they are there; None: they are.
        milliseconds: of the value model's work.
    """

    numbers: torch.Tensor
    arrived: torch.cuda.Event | None
    milliseconds: Callable[[], float]


class Report:
    """Counts the steps of one worker, without waiting for them: a step is counted during a later one.

    Args:
        metrics: what it counts in.
        device: of the steps.
    """

    def __init__(self, metrics: Metrics, device: torch.device) -> None:
        self.metrics = metrics
        self._stopwatch = Stopwatch(device)
        self._steps: deque[_Step] = deque()

    def timed(self) -> AbstractContextManager[None]:
        """Times what is launched inside."""
        return self._stopwatch.running()

    def note(
        self,
        status: torch.Tensor,
        lost_mass: torch.Tensor,
        broken: torch.Tensor,
        is_counted: torch.Tensor,
        had_drafts: torch.Tensor,
        new_lens: torch.Tensor,
    ) -> None:
        """A step of B requests has been launched.

        Args:
            status: int8 ``[B]``; a :class:`Status`.
            lost_mass: fp32 ``[B]``; probability that the limit on candidates cut off.
            broken: bool ``[B]``; rows that lost guidance in this step.
            is_counted: bool ``[B]``; rows after which a token is drawn.
            had_drafts: bool ``[B]``; rows whose last step had drafts, which were verified since.
            new_lens: int ``[B]``; tokens since that step.
        """
        rows = (status, lost_mass, broken, is_counted, had_drafts, new_lens)
        numbers = torch.stack([x.float() for x in rows]).to("cpu", non_blocking=True)
        arrived = torch.cuda.Event() if status.is_cuda else None
        if arrived is not None:
            arrived.record()
        self._steps.append(_Step(numbers, arrived, self._stopwatch.take()))

    def collect(self) -> None:
        """Count the steps that have been done by now."""
        while self._steps and ((arrived := self._steps[0].arrived) is None or arrived.query()):
            step = self._steps.popleft()
            self.metrics.guided_steps.inc()
            self.metrics.value_model_milliseconds.inc(step.milliseconds())
            for status, lost_mass, broken, is_counted, had_drafts, new_lens in step.numbers.T.tolist():
                if not is_counted:
                    continue
                self.metrics.rows[BROKEN if broken else STATUS_NAMES[Status(int(status))]].inc()
                if status != Status.UNGUIDED:
                    self.metrics.lost_mass.inc(lost_mass)
                if had_drafts and new_lens:
                    self.metrics.verifications["yes"].inc()
                    self.metrics.verified_tokens["yes"].inc(new_lens)
