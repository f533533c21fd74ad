"""Reports of guided steps: Prometheus metrics, a trace, and predicted lengths in SGLang's responses.

Importable without an engine. Reports travel as SGLang's auxiliary output: tensors that the scheduler copies to the host
together with the sampled tokens, and reads after they have arrived. So no report causes a host-device sync.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lenvm_kernels.step import StepOutput
from lenvm_kernels.types import Status

if TYPE_CHECKING:
    from sglang.srt.managers.auxiliary_output import CommittedTokens
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext

_BROKEN = "broken"
# Keys of a response's meta_info.
REMAINING_LENGTHS, OUTPUT_LENGTH = "predicted_remaining_lengths", "predicted_output_length"


class Metrics:
    """Prometheus metrics of one scheduler process, on the server's ``/metrics``.

    Make it after the engine has set ``PROMETHEUS_MULTIPROC_DIR``, which prometheus_client reads when it is imported.

    Args:
        **labels: labels of every metric.
    """

    def __init__(self, **labels: Any) -> None:
        import prometheus_client as client

        def counter(name: str, text: str) -> Any:
            return client.Counter(f"lenvm:{name}", text, list(labels)).labels(**labels)

        def counters(name: str, text: str, label: str, values: Sequence[str]) -> dict[str, Any]:
            metric = client.Counter(f"lenvm:{name}", text, [*labels, label])
            return {value: metric.labels(**labels, **{label: value}) for value in values}

        self.guided_steps = counter("guided_steps", "Steps in which at least one request has guidance.")
        self.fallbacks = counter("fallbacks", "Steps whose guidance failed; their requests lost it.")
        self.without_room = counter(
            "without_room", "Requests that lost their guidance because the value model's cache was full."
        )
        self.lora_requests = counter(
            "lora_requests", "Guided requests with a LoRA adapter, which the source of values does not know."
        )
        self.lost_mass = counter(
            "lost_mass", "Probability that the limit on candidates cut off, summed over guided rows."
        )
        self.value_model_milliseconds = counter(
            "value_model_milliseconds", "Time of guided steps and of prompts in the value model."
        )
        statuses = [*(status.name.lower() for status in Status), _BROKEN]
        self.rows = counters("rows", "Rows of guided steps, by what became of them.", "status", statuses)
        self.verifications = counters("verifications", "Verifications of drafts.", "guided", ("yes", "no"))
        self.verified_tokens = counters("verified_tokens", "Tokens of verifications.", "guided", ("yes", "no"))
        size = client.Gauge(
            "lenvm:cache_bytes",
            "Memory of the value model's keys and values.",
            list(labels),
            multiprocess_mode="mostrecent",
        )
        self.cache_bytes = size.labels(**labels)

    def count_rows(self, rows: Iterable[tuple[float, float, bool]]) -> None:
        """Count the rows of a step: :class:`Status`, cut-off probability, and whether the row lost its guidance."""
        counts, lost_mass = Counter[str](), 0.0
        for status, mass, is_broken in rows:  # summed first: a counter of Prometheus takes microseconds
            counts[_BROKEN if is_broken else Status(int(status)).name.lower()] += 1
            lost_mass += mass if status != Status.UNGUIDED else 0.0
        for name, count in counts.items():
            self.rows[name].inc(count)
        self.lost_mass.inc(lost_mass)

    def count_verified(self, tokens: float, is_guided: bool) -> None:
        """Count a verification of a request's drafts and the tokens that it gave."""
        guided = "yes" if is_guided else "no"
        self.verifications[guided].inc()
        self.verified_tokens[guided].inc(tokens)


class Stopwatch:
    """Times work on a device without a host-device sync."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._spans: list[tuple[Any, Any]] = []

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def running(self) -> Iterator[None]:
        """Times the work that is launched inside."""
        start = self._now()
        yield
        self._spans.append((start, self._now()))

    def take(self) -> Callable[[], float]:
        """Discard the work timed so far. Returns a function that returns its milliseconds once it is done."""
        spans, self._spans = self._spans, []
        if self._on_gpu:
            return lambda: sum(start.elapsed_time(end) for start, end in spans)
        return lambda: 1e3 * sum(end - start for start, end in spans)


# --- the trace: a JSON line per step in the file of LENVM_TRACE ---


def columns_of(output: StepOutput, at: Any = slice(None)) -> dict[str, list[Any]]:
    """Columns of a step's output, restricted to the rows ``at``. No ``value_logits`` without a model or probe."""
    tensors = dict(
        status=output.candidates.status,
        token_ids=output.candidates.token_ids,
        value_logits=output.value_logits,
        probs=output.probs,
    )
    return {name: tensor[at].tolist() for name, tensor in tensors.items() if tensor is not None}


def write_line(file: Path, columns: dict[str, list[Any]], **of_step: Any) -> None:
    """Append a step's line: the fields of the step, and its ``columns`` row by row."""
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    line = json.dumps(of_step | {"rows": rows}) + "\n"
    with file.open("ab", buffering=0) as trace:  # one write per line: ranks write to the same file
        trace.write(line.encode())


def trace_batch(file: Path, batch: ForwardBatch, output: StepOutput) -> None:
    """Append the line of a batch of SGLang. Its tokens were passed to the step or drawn by it."""
    assert output.tokens is not None  # the engine's draws were passed
    lengths = batch.seq_lens.tolist()
    columns = dict(rid=batch.rids, length=lengths, **columns_of(output), token=output.tokens.tolist())
    write_line(file, columns, mode=batch.forward_mode.name)


def trace_drafts(file: Path, batch: ScheduleBatch, output: StepOutput, verified: Any) -> None:
    """Append the line of a batch with drafts, a row for each accepted node."""
    predict, lens, index = (x.tolist() for x in verified)
    nodes = [(i, j, node) for i, count in enumerate(lens) for j, node in enumerate(index[i][:count])]
    seq_lens, at = batch.seq_lens.tolist(), [node for _, _, node in nodes]
    columns = dict(
        rid=[batch.reqs[i].rid for i, _, _ in nodes],
        length=[seq_lens[i] + 1 + j for i, j, _ in nodes],
        **columns_of(output, at),
        token=[predict[node] for node in at],
    )
    write_line(file, columns, mode="TARGET_VERIFY")


# --- SGLang's auxiliary output ---


def trace_nodes(
    file: Path, all_token_ids: torch.Tensor, ctx: LogitsContext, output: StepOutput, at: torch.Tensor
) -> None:
    """A line for a batch of vLLM, a row per node: ``tokens`` are the sequence before the draw, drafts included.

    ``at [rows]`` are the nodes of the engine's rows; other rows have no node.
    """
    rows = (at < len(output.probs)).nonzero().flatten()
    tokens: list[list[int]] = []
    for slot, position, node, last in zip(
        ctx.expanded_idx_mapping[rows].tolist(),
        ctx.pos[rows].tolist(),
        ctx.expanded_local_pos[rows].tolist(),
        ctx.input_ids[rows].tolist(),
        strict=True,
    ):
        tokens.append([*tokens[-1], last] if node else all_token_ids[slot, : position + 1].tolist())
    assert output.tokens is not None  # they are sampled
    columns = dict(tokens=tokens, node=ctx.expanded_local_pos[rows].tolist(), **columns_of(output, at[rows]))
    write_line(file, columns | dict(token=output.tokens[at[rows]].tolist()))


@dataclass(frozen=True)
class StepReport:
    """The report of one step to the host, on the device or already copied.

    Attributes:
        status: int8 ``[B, N]``; a :class:`Status` for each of N tokens.
        lost_mass: fp32 ``[B, N]``; probability that the limit on candidates cut off.
        broken: bool ``[B]``; rows that lost guidance in this step (``faults`` of the table).
        remaining_lengths: fp32 ``[B, N]``; predicted after each token, NaN where not requested; None if not requested.
        prompt_lengths: fp32 ``[B]``; predicted for each prompt, NaN where not requested; None if not requested.
        metrics: metrics of the process, or None.
        milliseconds: gives the time of the value model's work.
        is_verified: the tokens are accepted drafts, and the token after them.
    """

    status: torch.Tensor
    lost_mass: torch.Tensor
    broken: torch.Tensor
    remaining_lengths: torch.Tensor | None
    prompt_lengths: torch.Tensor | None
    metrics: Metrics | None
    milliseconds: Callable[[], float]
    is_verified: bool = False

    def copy_to_host(self, copy_tensor: Callable[[torch.Tensor], torch.Tensor]) -> StepReport:
        """See SGLang's ``DeviceAuxiliaryOutput``."""
        copies: dict[str, Any] = {name: copy_tensor(x) for name, x in vars(self).items() if isinstance(x, torch.Tensor)}
        return replace(self, **copies)

    def consume(self, batch: ScheduleBatch, commits: Sequence[CommittedTokens | None]) -> None:
        """See SGLang's ``HostAuxiliaryOutput``: the tensors have arrived. Rows without a commit are not reported."""
        committed = {i: commit for i, commit in enumerate(commits) if commit is not None}
        if self.metrics is not None:
            self._count(self.metrics, batch, {i: len(commit.token_ids) for i, commit in committed.items()})
        prompt_lengths = None if self.prompt_lengths is None else self.prompt_lengths[:, None]
        for lengths, key in ((prompt_lengths, OUTPUT_LENGTH), (self.remaining_lengths, REMAINING_LENGTHS)):
            if lengths is None:
                continue
            numbers = lengths.tolist()
            for i, commit in committed.items():
                first = commit.output_index
                for j, number in enumerate(numbers[i][: len(commit.token_ids)]):
                    if math.isfinite(number) and (key == REMAINING_LENGTHS or first == 0):
                        _append(batch.reqs[i], key, first + j, number)

    def _count(self, metrics: Metrics, batch: ScheduleBatch, committed: dict[int, int]) -> None:
        status, lost_mass, broken = self.status.tolist(), self.lost_mass.tolist(), self.broken.tolist()
        metrics.value_model_milliseconds.inc(self.milliseconds())
        metrics.count_rows(
            (status[i][j], lost_mass[i][j], broken[i]) for i, count in committed.items() for j in range(count)
        )
        if self.is_verified:
            for i, count in committed.items():
                metrics.count_verified(count, batch.reqs[i].lenvm_guidance is not None)


def _append(req: Req, key: str, index: int, length: float) -> None:
    """Append to a request's response the number of the output token ``index``; earlier tokens without one get None."""
    if req.customized_info is None:
        req.customized_info = {}
    numbers = req.customized_info.setdefault(key, [])
    numbers.extend([None] * (index - len(numbers)))
    numbers.append(round(length, 3))


def without_empty_keys(
    original: Callable,
    manager: Any,
    meta_info: dict[str, Any],
    state: Any,
    customized_info: dict[str, list],
    index: int,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Around ``TokenizerManager.update_request_meta_info``, which gives every request of a batch the keys of all."""

    def is_empty(key: str) -> bool:
        ours = key in (REMAINING_LENGTHS, OUTPUT_LENGTH) and key not in state.customized_info_accumulated
        return ours and all(number is None for number in customized_info[key][index])

    customized_info = {key: values for key, values in customized_info.items() if not is_empty(key)}
    original(manager, meta_info, state, customized_info, index, *args, **kwargs)
