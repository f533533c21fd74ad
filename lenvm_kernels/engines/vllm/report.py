"""Metrics and predicted lengths of guided steps in vLLM. Importable without vLLM."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lenvm_kernels.engines.report import Metrics, Stopwatch
from lenvm_kernels.step import StepOutput
from lenvm_kernels.types import Drafts, Status


class Report:
    """Counts the steps of a worker, and writes predicted lengths, in a later step to avoid a host-device sync.

    Args:
        device: device of the steps.
        metrics: the counters. If None, nothing is counted.
        file: file to which a JSON line with predicted lengths is appended per request. If None, nothing is written.
        request_ids: the engine's request ids, by slot.
    """

    def __init__(
        self,
        device: torch.device,
        metrics: Metrics | None = None,
        file: Path | None = None,
        request_ids: Mapping[int, str] | None = None,
    ) -> None:
        self.metrics, self.file = metrics, file
        self._request_ids = {} if request_ids is None else request_ids  # empty while the server starts
        self.stopwatch = Stopwatch(device, is_on=metrics is not None)
        # Tensors being copied to the host, in order; each is passed to a function once it has arrived.
        self._waiting: deque[tuple[torch.Tensor, torch.cuda.Event | None, Callable[[torch.Tensor], None]]] = deque()

    def note(self, output: StepOutput, drafts: Drafts | None, broken: torch.Tensor, is_drawn: torch.Tensor) -> None:
        """Record a launched step of B requests, of which the engine accepts the verified drafts.

        ``broken`` and ``is_drawn``, bool ``[B]``, are the requests that lost guidance, and that have a drawn token.
        """
        if self.metrics is None:
            return
        status, lost_mass = (x.view(len(broken), -1)[:, 0] for x in output.candidates[-2:])
        statuses = torch.arange(len(self.metrics.rows), dtype=torch.int8, device=broken.device)
        rows = torch.where(broken, len(statuses) - 1, status)[:, None] == statuses
        sums = [
            *(rows & is_drawn[:, None]).sum(0),
            torch.where(is_drawn & (status != Status.UNGUIDED), lost_mass, 0.0).sum(),
        ]
        if drafts is not None and output.verified is not None and output.tokens is not None:
            is_verified = is_drawn & (output.tokens.view(len(broken), -1)[:, 0] >= 0) & (drafts.token_ids[:, 0] >= 0)
            sums += [is_verified.sum(), (output.verified.lens * is_verified).sum()]
        self._copy(torch.stack([x.float() for x in sums]), partial(self._count, self.metrics, self.stopwatch.take()))

    def note_predicted(self, prompts: Mapping[int, int], lengths: torch.Tensor) -> None:
        """Record predicted output ``lengths``, fp32 ``[B]``; ``prompts`` are the lengths of the prompts by slot."""
        lines = [{"request_id": self._request_ids[slot], "prompt_tokens": count} for slot, count in prompts.items()]
        self._copy(lengths, partial(self._write, lines))

    def collect(self) -> None:
        """Process the tensors that have arrived."""
        while self._waiting and ((arrived := self._waiting[0][1]) is None or arrived.query()):
            numbers, _, use = self._waiting.popleft()
            use(numbers)

    def _copy(self, tensor: torch.Tensor, use: Callable[[torch.Tensor], None]) -> None:
        """Start to copy a tensor to the host, for ``use``."""
        numbers, arrived = tensor.to("cpu", non_blocking=True), None
        if tensor.is_cuda:
            arrived = torch.cuda.Event()
            arrived.record()
        self._waiting.append((numbers, arrived, use))

    def _count(self, metrics: Metrics, milliseconds: Callable[[], float], sums: torch.Tensor) -> None:
        """Count a step: rows by status, broken rows, lost mass, verifications and verified tokens."""
        metrics.guided_steps.inc()
        metrics.value_model_milliseconds.inc(milliseconds())
        drafts = metrics.verifications["yes"], metrics.verified_tokens["yes"]
        for counter, number in zip((*metrics.rows.values(), metrics.lost_mass, *drafts), sums.tolist(), strict=False):
            counter.inc(number)

    def _write(self, lines: list[dict[str, Any]], lengths: torch.Tensor) -> None:
        """Write the lines of the requests that kept their guidance."""
        assert self.file is not None
        for line, number in zip(lines, lengths.tolist(), strict=True):
            if math.isfinite(number):
                line["predicted_output_length"] = round(number, 3)
                with self.file.open("ab", buffering=0) as file:
                    file.write(json.dumps(line).encode() + b"\n")
