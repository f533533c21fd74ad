"""Metrics and predicted lengths of guided steps in vLLM. Importable without vLLM."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lenvm_kernels.adapters.report import Metrics, Stopwatch


class _Copies:
    """Tensors on their way to the host; each is passed to a function once it has arrived, in order."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[torch.Tensor, torch.cuda.Event | None, Callable[[torch.Tensor], None]]] = deque()

    def add(self, tensor: torch.Tensor, use: Callable[[torch.Tensor], None]) -> None:
        """Start the copy of a tensor for ``use``."""
        numbers, arrived = tensor.to("cpu", non_blocking=True), None
        if tensor.is_cuda:
            arrived = torch.cuda.Event()
            arrived.record()
        self._waiting.append((numbers, arrived, use))

    def collect(self) -> None:
        """Use the tensors that have arrived by now."""
        while self._waiting and ((arrived := self._waiting[0][1]) is None or arrived.query()):
            numbers, _, use = self._waiting.popleft()
            use(numbers)


class Predictions(_Copies):
    """A file with a JSON line per request: the predicted length of its output, once the device has computed it.

    Args:
        file: file that is appended to.
        request_ids: the engine's names of requests, by slot.
    """

    def __init__(self, file: Path, request_ids: Mapping[int, str]) -> None:
        super().__init__()
        self._file, self._request_ids = file, request_ids

    def note(self, prompts: Mapping[int, int], lengths: torch.Tensor) -> None:
        """Predicted ``lengths``, fp32 ``[B]``, of the outputs of requests; by slot the lengths of their prompts."""
        lines = [{"request_id": self._request_ids[slot], "prompt_tokens": count} for slot, count in prompts.items()]
        self.add(lengths, partial(self._write, lines))

    def _write(self, lines: list[dict[str, Any]], lengths: torch.Tensor) -> None:
        """Write the lines of the requests that kept their guidance."""
        for line, number in zip(lines, lengths.tolist(), strict=True):
            if math.isfinite(number):
                line["predicted_output_length"] = round(number, 3)
                with self._file.open("ab", buffering=0) as file:
                    file.write(json.dumps(line).encode() + b"\n")


class Report(_Copies):
    """Counts the steps of one worker without a host-device sync: a step is counted during a later one.

    Args:
        metrics: the counters.
        device: device of the steps.
    """

    def __init__(self, metrics: Metrics, device: torch.device) -> None:
        super().__init__()
        self.metrics = metrics
        self._stopwatch = Stopwatch(device)

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
        self.add(torch.stack([x.float() for x in rows]), partial(self._count, self._stopwatch.take()))

    def _count(self, milliseconds: Callable[[], float], numbers: torch.Tensor) -> None:
        """Count a step whose ``numbers``, fp32 ``[6, B]``, are the arguments of :meth:`note`."""
        self.metrics.guided_steps.inc()
        self.metrics.value_model_milliseconds.inc(milliseconds())
        for status, lost_mass, broken, is_counted, had_drafts, new_lens in numbers.T.tolist():
            if not is_counted:
                continue
            self.metrics.count_row(status, lost_mass, broken)
            if had_drafts and new_lens:
                self.metrics.count_verified(new_lens, is_guided=True)
