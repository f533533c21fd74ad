"""What guided steps did, a JSON line a step in the file of ``LENVM_TRACE``. Importable without an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lenvm_kernels.step import StepOutput

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext


def columns_of(output: StepOutput, at: Any = slice(None)) -> dict[str, list[Any]]:
    """What a step did in these of its rows, a list a column."""
    return dict(
        status=output.candidates.status[at].tolist(),
        token_ids=output.candidates.token_ids[at].tolist(),
        value_logits=output.value_logits[at].tolist(),
        probs=output.probs[at].tolist(),
    )


def write_line(file: Path, columns: dict[str, list[Any]], **of_step: Any) -> None:
    """Append the line of a step: what is said of it, and its ``columns`` row by row."""
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    line = json.dumps(of_step | {"rows": rows}) + "\n"
    with file.open("ab", buffering=0) as trace:  # one write a line: ranks write to the same file
        trace.write(line.encode())


def trace_batch(file: Path, batch: ForwardBatch, output: StepOutput) -> None:
    """A line of a batch of SGLang's, whose tokens the step was told or has drawn."""
    assert output.tokens is not None  # the step was told what the engine has drawn
    columns = dict(
        rid=batch.rids,
        length=batch.seq_lens.tolist(),
        **columns_of(output),
        token=output.tokens.tolist(),
    )
    write_line(file, columns, mode=batch.forward_mode.name)


def trace_drafts(file: Path, batch: ScheduleBatch, output: StepOutput, verified: Any) -> None:
    """The same of a batch with drafts: a row for each node that is on the way."""
    predict, lens, index = (x.tolist() for x in verified)
    nodes = [(i, node) for i, count in enumerate(lens) for node in index[i][:count]]
    lengths = [n + 1 + j for n, count in zip(batch.seq_lens.tolist(), lens, strict=True) for j in range(count)]
    at = [node for _, node in nodes]
    columns = dict(
        rid=[batch.reqs[i].rid for i, _ in nodes],
        length=lengths,
        **columns_of(output, at),
        token=[predict[node] for node in at],
    )
    write_line(file, columns, mode="TARGET_VERIFY")


def trace_nodes(file: Path, all_token_ids: torch.Tensor, ctx: LogitsContext, output: StepOutput, at: Any) -> None:
    """A line of a batch of vLLM's, a row per node: ``tokens`` are the sequence before the draw, drafts included."""
    tokens: list[list[int]] = []
    for slot, position, node, last in zip(
        ctx.expanded_idx_mapping.tolist(),
        ctx.pos.tolist(),
        ctx.expanded_local_pos.tolist(),
        ctx.input_ids.tolist(),
        strict=True,
    ):
        tokens.append([*tokens[-1], last] if node else all_token_ids[slot, : position + 1].tolist())
    write_line(file, dict(tokens=tokens, node=ctx.expanded_local_pos.tolist(), **columns_of(output, at)))
