"""What a step has to know of each of its requests, out of the tables, in plain PyTorch."""

import math

import torch
from torch import Tensor

from lenvm_kernels.types import Mode, StepHistory, StepRequests


def gather_requests(
    mode: Tensor,  # int32 [R]
    return_values: Tensor,  # bool [R]
    entropy_threshold: Tensor,  # fp32 [R]
    prompt_len: Tensor,  # int32 [R]
    seed: Tensor,  # int64 [R]
    tokens: Tensor,  # int64 [B]
    table_rows: Tensor,  # int64 [B]
    lengths: Tensor,  # int32 [B]
    slots: Tensor,  # int64 [B]
    *,
    active: Tensor | None = None,  # bool [B]
    history: StepHistory | None = None,
    padding_row: int = 0,
    out: StepRequests,  # [N]
) -> StepRequests:  # [N]
    """See :func:`lenvm_kernels.ops.gather_requests.gather_requests`; the table by the columns that are read."""
    count = tokens.shape[0]
    active = torch.ones_like(tokens, dtype=torch.bool) if active is None else active

    def write(target: Tensor, values: Tensor, padding: float) -> None:
        target[:count] = values
        target[count:] = padding

    write(out.tokens, tokens, 0)
    write(out.positions, lengths - 1, -1)
    write(out.slots, slots, -1)
    write(out.table_rows, table_rows, padding_row)
    write(out.guided, active & (mode[table_rows] != Mode.UNGUIDED), False)
    write(out.wants_length, active & return_values[table_rows], False)
    write(out.entropy_threshold, entropy_threshold[table_rows], math.nan)
    write(out.generated, lengths - prompt_len[table_rows], 0)
    write(out.seeds, seed[table_rows], 0)
    if history is not None:
        was_there = history.steps[table_rows] == history.step - 1
        write(out.places, torch.where(was_there, history.places[table_rows], -1), -1)
        history.places[table_rows] = torch.arange(count, device=tokens.device)
        history.steps[table_rows] = history.step
    return out
