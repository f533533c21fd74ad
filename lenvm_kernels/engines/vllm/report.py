"""Metrics and predicted lengths of guided steps in vLLM. Importable without vLLM."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lenvm_kernels.engines.report import Metrics, Stopwatch
from lenvm_kernels.step import StepOutput
from lenvm_kernels.types import Status


class Report:
    """Counts the steps of one worker, and writes predicted lengths, without a host-device sync: in a later step.

    Rows are summed on the device.

    Args:
        device: device of the steps.
        slots: slots of the engine.
        metrics: the counters. If None, nothing is counted.
        file: file with a JSON line per request, to which predicted lengths are appended. If None, none are.
        request_ids: the engine's names of requests, by slot.
    """

    def __init__(
        self,
        device: torch.device,
        slots: int,
        metrics: Metrics | None = None,
        file: Path | None = None,
        request_ids: Mapping[int, str] | None = None,
    ) -> None:
        self.metrics, self.file = metrics, file
        self._device, self._slots = device, slots
        self._request_ids = {} if request_ids is None else request_ids  # empty while the server starts
        self._stopwatch = Stopwatch(device)
        # Tensors on their way to the host; each is passed to a function once it has arrived, in order.
        self._waiting: deque[tuple[torch.Tensor, torch.cuda.Event | None, Callable[[torch.Tensor], None]]] = deque()
        self.allocate()

    def allocate(self) -> None:
        """Create the tensors on the device, also after sleep mode has discarded them."""
        # By slot: the length of the sequence at its last step; 0 if that step had no drafts, -1 without guidance.
        self._drafted_at = torch.full((self._slots,), -1, dtype=torch.int32, device=self._device)
        self._faults = torch.zeros_like(self._drafted_at)  # by slot, as of the last step
        statuses = 0 if self.metrics is None else len(self.metrics.rows)
        self._statuses = torch.arange(statuses, dtype=torch.int8, device=self._device)

    def admit(self, slot: int, is_guided: bool) -> None:
        """Record that a request has entered a slot, or has left it."""
        if self.metrics is not None:
            self._drafted_at[slot] = 0 if is_guided else -1
            self._faults[slot] = 0

    def timed(self) -> AbstractContextManager[None]:
        """Times the work that is launched inside."""
        return nullcontext() if self.metrics is None else self._stopwatch.running()

    def note(
        self,
        output: StepOutput,
        faults: torch.Tensor,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        is_drawn: torch.Tensor,
    ) -> None:
        """Record a step of B requests, with N nodes each, that has been launched.

        Args:
            output: result of the step.
            faults: int32 ``[slots]``; how often each request has lost guidance so far.
            slots: int64 ``[B]``; slots of the requests.
            lengths: int32 ``[B]``; lengths of the sequences.
            is_drawn: bool ``[B]``; requests for which a token is drawn.
        """
        if self.metrics is None:
            return
        status, lost_mass = (x.view(len(slots), -1) for x in output.candidates[-2:])
        nodes, status, lost_mass = status.shape[1], status[:, 0], lost_mass[:, 0]
        drafted_at, faults = self._drafted_at[slots], faults[slots]
        broken = faults > self._faults[slots]
        new_lens = torch.where(drafted_at > 0, lengths - drafted_at, 0)
        rows = torch.where(broken, len(self._statuses) - 1, status)[:, None] == self._statuses
        sums = (
            *(rows & is_drawn[:, None]).sum(0),
            torch.where(is_drawn & (status != Status.UNGUIDED), lost_mass, 0.0).sum(),
            (new_lens > 0).sum(),
            new_lens.sum(),
        )
        self._drafted_at[slots] = torch.where(drafted_at < 0, drafted_at, lengths * is_drawn if nodes > 1 else 0)
        self._faults[slots] = faults
        self._copy(torch.stack([x.float() for x in sums]), partial(self._count, self.metrics, self._stopwatch.take()))

    def note_predicted(self, prompts: Mapping[int, int], lengths: torch.Tensor) -> None:
        """Record predicted output ``lengths``, fp32 ``[B]``; ``prompts`` are the lengths of the prompts by slot."""
        lines = [{"request_id": self._request_ids[slot], "prompt_tokens": count} for slot, count in prompts.items()]
        self._copy(lengths, partial(self._write, lines))

    def collect(self) -> None:
        """Use the tensors that have arrived by now."""
        while self._waiting and ((arrived := self._waiting[0][1]) is None or arrived.query()):
            numbers, _, use = self._waiting.popleft()
            use(numbers)

    def _copy(self, tensor: torch.Tensor, use: Callable[[torch.Tensor], None]) -> None:
        """Start the copy of a tensor for ``use``."""
        numbers, arrived = tensor.to("cpu", non_blocking=True), None
        if tensor.is_cuda:
            arrived = torch.cuda.Event()
            arrived.record()
        self._waiting.append((numbers, arrived, use))

    def _count(self, metrics: Metrics, milliseconds: Callable[[], float], sums: torch.Tensor) -> None:
        """Count a step: its rows by status and of broken requests, their lost mass, verifications and their tokens."""
        metrics.guided_steps.inc()
        metrics.value_model_milliseconds.inc(milliseconds())
        drafts = metrics.verifications["yes"], metrics.verified_tokens["yes"]
        for counter, number in zip((*metrics.rows.values(), metrics.lost_mass, *drafts), sums.tolist(), strict=True):
            counter.inc(number)

    def _write(self, lines: list[dict[str, Any]], lengths: torch.Tensor) -> None:
        """Write the lines of the requests that kept their guidance."""
        assert self.file is not None
        for line, number in zip(lines, lengths.tolist(), strict=True):
            if math.isfinite(number):
                line["predicted_output_length"] = round(number, 3)
                with self.file.open("ab", buffering=0) as file:
                    file.write(json.dumps(line).encode() + b"\n")
