"""What guided steps in vLLM did, counted on the host when the device has done it. Importable without vLLM."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lenvm_kernels.adapters.metrics import BROKEN, STATUS_NAMES, Metrics, Stopwatch
from lenvm_kernels.adapters.vllm_layout import Layout
from lenvm_kernels.step import StepOutput
from lenvm_kernels.types import Status


class Predictions:
    """A file with a JSON line a request: how long its output is predicted to be, once the device has computed it.

    Args:
        file: that is appended to.
        request_ids: the engine's, by slot.
    """

    def __init__(self, file: Path, request_ids: Mapping[int, str]) -> None:
        self._file, self._request_ids = file, request_ids
        self._waiting: deque[tuple[list[dict[str, Any]], torch.Tensor, torch.cuda.Event | None]] = deque()

    def note(self, prompts: Mapping[int, int], lengths: torch.Tensor) -> None:
        """Predicted ``lengths``, fp32 ``[B]``, of the outputs of requests; by slot the lengths of their prompts."""
        lines = [{"request_id": self._request_ids[slot], "prompt_tokens": count} for slot, count in prompts.items()]
        numbers = lengths.to("cpu", non_blocking=True)
        self._waiting.append((lines, numbers, _event(lengths)))

    def collect(self) -> None:
        """Write what has arrived by now; nothing of a request that lost its guidance."""
        while self._waiting and ((arrived := self._waiting[0][2]) is None or arrived.query()):
            lines, numbers, _ = self._waiting.popleft()
            for line, number in zip(lines, numbers.tolist(), strict=True):
                if math.isfinite(number):
                    line["predicted_output_length"] = round(number, 3)
                    with self._file.open("ab", buffering=0) as file:
                        file.write(json.dumps(line).encode() + b"\n")


def _event(tensor: torch.Tensor) -> torch.cuda.Event | None:
    """That is done when what was launched by now is; None: it is."""
    if not tensor.is_cuda:
        return None
    event = torch.cuda.Event()
    event.record()
    return event


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
    """Counts the steps of one worker without waiting for the device: a step is counted during a later one.

    Args:
        metrics: the counters.
        device: device of the steps.
        slots: slots of the engine.
    """

    def __init__(self, metrics: Metrics, device: torch.device, slots: int) -> None:
        self.metrics = metrics
        self._stopwatch = Stopwatch(device)
        self._steps: deque[_Step] = deque()
        # By slot: the length of the sequence at its last step; 0 if that step had no drafts, -1 without guidance.
        self._drafted_at = torch.full((slots,), -1, dtype=torch.int32, device=device)

    def admit(self, slot: int, is_guided: bool) -> None:
        """A request is in a slot, or has lost its guidance."""
        self._drafted_at[slot] = 0 if is_guided else -1

    def timed(self) -> AbstractContextManager[None]:
        """Times what is launched inside."""
        return self._stopwatch.running()

    def note(
        self,
        output: StepOutput,
        layout: Layout,
        broken: torch.Tensor,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        is_drawn: torch.Tensor | None,
    ) -> None:
        """A step of B requests has been launched.

        Args:
            output: result of the step.
            layout: rows of the step.
            broken: bool ``[B]``; requests that lost guidance in this step.
            slots: int64 ``[B]``; slots of the requests.
            lengths: int32 ``[B]``; lengths of the sequences.
            is_drawn: bool ``[B]``; requests for which a token is drawn, the only ones that are counted (None: all).
        """
        drafted_at, first = self._drafted_at[slots], layout.at[layout.first_rows]
        rows = (
            output.candidates.status[first],
            output.candidates.lost_mass[first],
            broken,
            torch.ones_like(broken) if is_drawn is None else is_drawn,
            drafted_at > 0,
            lengths - drafted_at,
        )
        self._drafted_at[slots] = torch.where(drafted_at < 0, drafted_at, lengths if layout.nodes > 1 else 0)
        numbers = torch.stack([x.float() for x in rows]).to("cpu", non_blocking=True)
        self._steps.append(_Step(numbers, _event(lengths), self._stopwatch.take()))

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
