"""Per-request inputs of a step, gathered from the tables, in plain PyTorch."""

import math

import torch
from torch import Tensor

from lenvm_kernels.types import GuidanceColumns, Mode, StepHistory, StepRequests


def gather_requests(
    table: GuidanceColumns,  # R requests; only the columns that are read need exist
    tokens: Tensor,  # int64 [B] or [B, N]
    table_rows: Tensor,  # int64 [B]
    lengths: Tensor,  # int32 [B]
    *,
    new_lens: Tensor | None = None,  # int32 [B]
    active: Tensor | None = None,  # bool [B]
    history: StepHistory | None = None,
    padding_row: int = 0,
    out: StepRequests,  # [N]
) -> StepRequests:  # [N]
    """See :func:`lenvm_kernels.ops.gather_requests.gather_requests`."""
    count, device = tokens.shape[0], tokens.device
    tokens = tokens if tokens.dim() == 2 else tokens[:, None]
    new_lens = torch.ones_like(lengths) if new_lens is None else new_lens.clamp(0, tokens.shape[1])
    active = torch.ones(count, dtype=torch.bool, device=device) if active is None else active

    def write(target: Tensor, values: Tensor, padding: float) -> None:
        target[:count] = values
        target[count:] = padding

    has_mode, ended = table.mode[table_rows] != Mode.UNGUIDED, table.span_ended[table_rows]
    guided = active & has_mode & ~ended
    # A request between spans still feeds the value model: when the next span begins, its history must be complete.
    wants_length = active & (
        table.return_values[table_rows] | (has_mode & ended & (table.span_start_bits[table_rows] != 0))
    )
    due = torch.ones_like(active)
    if history is not None:
        told_lens, cached_lens, held = history.told_lens[table_rows], history.cached_lens[table_rows], history.tokens
        is_gap = told_lens < lengths - new_lens
        lost = (guided | wants_length) & (is_gap | (lengths - cached_lens > held.shape[1]))
        table.faults[table_rows] += lost.int()
        guided, wants_length = guided & ~lost, wants_length & ~lost
        due = (history.step - history.uncounted) % table.value_stride[table_rows].clamp(min=1) == 0
        history.told_lens[table_rows] = torch.where(is_gap, told_lens, torch.maximum(told_lens, lengths))
        write(out.cached_lens, cached_lens, 0)
        for i in range(tokens.shape[1]):
            position = lengths - new_lens + i
            known = (i < new_lens) & (position >= 0)
            held[table_rows[known], position[known] % held.shape[1]] = tokens[known, i].int()

    write(out.positions, lengths - 1, -1)
    write(out.table_rows, table_rows, padding_row)
    write(out.guided, guided, False)
    write(out.wants_length, wants_length, False)
    write(out.entropy_threshold, table.entropy_threshold[table_rows], math.nan)
    write(out.generated, lengths - table.prompt_len[table_rows], 0)
    write(out.due, due, False)
    return out
