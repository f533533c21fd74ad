"""Reports of guided steps: Prometheus metrics, a trace, and predicted lengths in SGLang's responses.

Importable without an engine. A report is an auxiliary output of SGLang: the scheduler copies its tensors to the host
together with the sampled tokens, and reads them after they have arrived. So reports cause no host-device sync.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lenvm_kernels.step import StepOutput
from lenvm_kernels.types import Status, VerifiedTokens

if TYPE_CHECKING:
    from sglang.srt.managers.auxiliary_output import CommittedTokens
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext

_BROKEN = "broken"
# Keys of a response's meta_info.
REMAINING_LENGTHS, OUTPUT_LENGTH, OUTCOME = "predicted_remaining_lengths", "predicted_output_length", "lenvm"


class Metrics:
    """Prometheus metrics of one scheduler process, on the server's ``/metrics``.

    Every metric has the ``labels``. Create it after the engine has set ``PROMETHEUS_MULTIPROC_DIR``, because
    prometheus_client reads it on import.
    """

    def __init__(self, **labels: Any) -> None:
        import prometheus_client as client

        def counter(name: str, text: str) -> Any:
            return client.Counter(f"lenvm:{name}", text, list(labels)).labels(**labels)

        def counters(name: str, text: str, label: str, values: Sequence[str]) -> dict[str, Any]:
            metric = client.Counter(f"lenvm:{name}", text, [*labels, label])
            return {value: metric.labels(**labels, **{label: value}) for value in values}

        self.guided_steps = counter("guided_steps", "Steps in which at least one request has guidance.")
        self.fallbacks = counter("fallbacks", "Failed guided steps and admissions; their requests lost guidance.")
        self.without_room = counter("without_room", "Requests that lost guidance to a full value model cache.")
        self.lora_requests = counter("lora_requests", "Guided requests with a LoRA adapter, which values ignore.")
        self.lost_mass = counter("lost_mass", "Probability cut off by the limit on candidates in guided rows.")
        self.value_model_milliseconds = counter("value_model_milliseconds", "Time of guided steps and of prompts.")
        statuses = [*(status.name.lower() for status in Status), _BROKEN]
        self.rows = counters("rows", "Rows of guided steps, by status.", "status", statuses)
        self.verifications = counters("verifications", "Verifications of drafts.", "guided", ("yes", "no"))
        self.verified_tokens = counters("verified_tokens", "Tokens accepted in verifications.", "guided", ("yes", "no"))
        text = "Memory of the value model's keys and values."
        size = client.Gauge("lenvm:cache_bytes", text, list(labels), multiprocess_mode="mostrecent")
        self.cache_bytes = size.labels(**labels)


class EndMetrics:
    """Prometheus metrics of ended guided requests of one process; for arguments, see :class:`Metrics`."""

    def __init__(self, **labels: Any) -> None:
        import prometheus_client as client

        text = "Distance between length and target, as a share of the target."
        names, buckets = [*labels, "constraint"], (0.05, 0.1, 0.15, 0.2, 0.25, 0.5, 1.0)
        self._labels, self._length_error = labels, client.Histogram("lenvm:length_error", text, names, buckets=buckets)
        text = "Guided requests with an end forced by a hard limit, or a forced landing."
        self._forced_ends = client.Counter("lenvm:forced_ends", text, list(labels)).labels(**labels)
        text = "Ended guided requests, by the engine's reason."
        self._finished = client.Counter("lenvm:finished", text, [*labels, "reason"])

    def count(self, outcome: Mapping[str, Any], reason: str) -> None:
        """Count a request by its :meth:`GuidanceParams.outcome`. An aborted request has no length error."""
        if (target := outcome["target"]) and reason != "abort":
            error = self._length_error.labels(**self._labels, constraint=outcome["constraint"])
            error.observe(abs(outcome["length"] - target) / target)
        self._forced_ends.inc(outcome["forced"])
        self._finished.labels(**self._labels, reason=reason).inc()


def not_finite(steps: int) -> str | None:
    """``lost`` in a response, from the number of steps that lost guidance."""
    return f"scores or values were not finite, number of steps: {steps}" if steps else None


class Stopwatch:
    """Times work on a device without a host-device sync, while ``is_on``."""

    def __init__(self, device: torch.device, *, is_on: bool) -> None:
        self._on_gpu, self.is_on = device.type == "cuda", is_on
        self._spans: list[Callable[[], float]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time the work launched inside."""
        if not self.is_on:
            yield
        elif self._on_gpu:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            end.record()
            self._spans.append(partial(start.elapsed_time, end))
        else:
            seconds = time.perf_counter()
            yield
            self._spans.append(partial(float, 1e3 * (time.perf_counter() - seconds)))

    def take(self) -> Callable[[], float]:
        """Reset, and return a function that returns the milliseconds of the work so far once it is done."""
        spans, self._spans = self._spans, []
        return lambda: sum(span() for span in spans)


# --- the trace: a JSON line per step in the file of LENVM_TRACE ---


def write_line(file: Path, output: StepOutput, at: Any, columns: dict[str, list[Any]], **fields: Any) -> None:
    """Append a line with fields of the step, and per row in ``at`` the ``columns`` and the step's output."""
    candidates = output.candidates
    tensors = dict(
        status=candidates.status,
        token_ids=candidates.token_ids,
        value_logits=output.value_logits,  # None without a value model or probe
        probs=output.probs,
    )
    columns = columns | {name: tensor[at].tolist() for name, tensor in tensors.items() if tensor is not None}
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    line = json.dumps(fields | {"rows": rows}) + "\n"
    with file.open("ab", buffering=0) as trace:  # one write per line: ranks write to the same file
        trace.write(line.encode())


def trace_batch(
    file: Path,
    batch: ForwardBatch | ScheduleBatch,
    lengths: torch.Tensor,
    output: StepOutput,
    drawn: torch.Tensor,
    chosen: VerifiedTokens,
) -> None:
    """Append the line of a batch of SGLang, with a row per new token.

    ``lengths`` are the previous lengths of the sequences, and ``drawn`` the tokens of the step's rows, negative in rows
    drawn by the engine.
    """
    lens, before = chosen.lens.tolist(), lengths.tolist()
    places = [(i, j) for i, n in enumerate(lens) for j in range(n)]
    nodes = [node for row, n in zip(chosen.nodes.tolist(), lens, strict=True) for node in row[:n]]
    columns = dict(
        rid=[batch.lenvm_all[i].rid for i, _ in places],
        length=[before[i] + j for i, j in places],
        token=drawn[nodes].tolist(),
    )
    mode = "TARGET_VERIFY" if chosen.nodes.shape[1] > 1 else batch.forward_mode.name
    write_line(file, output, nodes, columns, mode=mode)


def trace_nodes(
    file: Path, all_token_ids: torch.Tensor, ctx: LogitsContext, output: StepOutput, at: torch.Tensor
) -> None:
    """Append the line of a batch of vLLM, with a row per node; ``tokens`` are the sequence and drafts before the draw.

    ``at [rows]`` are the nodes of the engine's rows, with a larger number for rows without a node.
    """
    rows = (at < len(output.probs)).nonzero().flatten()
    of_rows = ctx.expanded_idx_mapping, ctx.pos, ctx.expanded_local_pos, ctx.input_ids
    slots, positions, nodes, last_tokens = (x[rows].tolist() for x in of_rows)
    tokens: list[list[int]] = []
    for slot, position, node, last in zip(slots, positions, nodes, last_tokens, strict=True):
        tokens.append([*tokens[-1], last] if node else all_token_ids[slot, : position + 1].tolist())
    assert output.tokens is not None
    columns = dict(tokens=tokens, node=nodes, token=output.tokens[at[rows]].tolist())
    write_line(file, output, at[rows], columns)


# --- SGLang's auxiliary output ---


@dataclass(frozen=True)
class StepReport:
    """Report of one step, on the device or already copied to the host. N is more than 1 if drafts were verified."""

    status: torch.Tensor | None  # int8 [B, N], a Status per token; None without metrics
    lost_mass: torch.Tensor | None  # fp32 [B, N], probability cut off by the limit on candidates; None without metrics
    faults: torch.Tensor  # int32 [B], number of steps in which each request lost guidance since it was admitted
    remaining_lengths: torch.Tensor | None  # fp32 [B, N], predicted after each token, NaN where not requested
    prompt_lengths: torch.Tensor | None  # fp32 [B, 1], predicted for each prompt, NaN where not requested
    metrics: Metrics | None  # of the process
    milliseconds: Callable[[], float]  # returns the time of guided steps and prompts

    def copy_to_host(self, copy_tensor: Callable[[torch.Tensor], torch.Tensor]) -> StepReport:
        """See SGLang's ``DeviceAuxiliaryOutput``."""
        copies: dict[str, Any] = {name: copy_tensor(x) for name, x in vars(self).items() if isinstance(x, torch.Tensor)}
        return replace(self, **copies)

    def consume(self, batch: ScheduleBatch, commits: Sequence[CommittedTokens | None]) -> None:
        """See SGLang's ``HostAuxiliaryOutput``. Rows without a commit are not reported."""
        committed = {i: commit for i, commit in enumerate(commits) if commit is not None}
        broken, faults = set(), self.faults.tolist()
        for i in committed:
            req = batch.reqs[i]
            if (steps := req.lenvm_broken_before + faults[i]) > req.lenvm_broken:
                req.lenvm_broken = steps
                broken.add(i)
        if self.metrics is not None:
            self._count(self.metrics, batch, {i: len(commit.token_ids) for i, commit in committed.items()}, broken)
        for lengths, key in ((self.prompt_lengths, OUTPUT_LENGTH), (self.remaining_lengths, REMAINING_LENGTHS)):
            numbers = [] if lengths is None else lengths.tolist()
            for i, commit in committed.items() if numbers else ():
                first = commit.output_index
                for index, number in enumerate(numbers[i][: len(commit.token_ids)], start=first):
                    if math.isfinite(number) and (key == REMAINING_LENGTHS or first == 0):
                        _append(batch.reqs[i], key, index, number)

    def _count(self, metrics: Metrics, batch: ScheduleBatch, committed: dict[int, int], broken: set[int]) -> None:
        """Count the step; ``committed`` is the number of tokens by row, and ``broken`` rows lost guidance."""
        assert self.status is not None and self.lost_mass is not None
        status, lost_mass = self.status.tolist(), self.lost_mass.tolist()
        metrics.value_model_milliseconds.inc(self.milliseconds())
        counts, lost = Counter[str](), 0.0
        for i, count in committed.items():  # summed first, because a Prometheus counter takes microseconds
            for j in range(count):
                counts[_BROKEN if i in broken else Status(status[i][j]).name.lower()] += 1
                lost += lost_mass[i][j] if status[i][j] != Status.UNGUIDED else 0.0
            if len(status[i]) > 1:
                guided = "no" if batch.reqs[i].lenvm_guidance is None else "yes"
                metrics.verifications[guided].inc()
                metrics.verified_tokens[guided].inc(count)
        for name, number in counts.items():
            metrics.rows[name].inc(number)
        metrics.lost_mass.inc(lost)


def _append(req: Req, key: str, index: int, length: float) -> None:
    """Append ``length`` to a request's response for output token ``index``, after None for tokens without one."""
    req.customized_info = req.customized_info or {}
    numbers = req.customized_info.setdefault(key, [])
    numbers.extend([None] * (index - len(numbers)))
    numbers.append(round(length, 3))
