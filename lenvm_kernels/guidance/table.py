"""The guidance table: the parameters of an engine's requests as device tensors."""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Sequence
from typing import Any

import torch

from lenvm_kernels.guidance.fields import MAX_SPAN_ENDS
from lenvm_kernels.guidance.params import GuidanceParams
from lenvm_kernels.guidance.spans import MAX_CLOSING_TOKENS, MAX_SPAN_TOKENS, SpanState
from lenvm_kernels.types import GUIDANCE_COLUMNS, GuidanceColumns, Mode

# `near` and `le_near` aim early by at most this share of a total.
_EARLY_SHARE = 0.1
# Minimum remaining length of every candidate without a value model. With a length as short as a target of two tokens,
# an end would be hardly more probable than other tokens.
LEAST_TO_COME = 8.0
# With `le_near`, the share of the target that is every candidate's length. SmolLM2 at a limit of 60 tokens, 32 prompts:
# 54 tokens on average and 9 % above 75 with 0.3; 38 tokens and 9 % with 1.
_LIMIT_TO_COME = 0.3
_PACKED = {name: column for name, column in GUIDANCE_COLUMNS.items() if column.is_packed}
_STRUCT_CODES = {torch.int64: "q", torch.int32: "i", torch.float32: "f", torch.bool: "?"}


def _target_logit(params: GuidanceParams) -> float:
    """The value logit of all candidates without a value model: target plus answer, at least ``LEAST_TO_COME`` tokens.

    With ``le_near``, a part of the target is used: only ends would remain if candidates were longer than the rest.
    """
    share = _LIMIT_TO_COME if params.mode == Mode.LE_NEAR else 1.0
    to_come = share * (params.target_length or 0.0) + params.answer_length
    nats = -math.log(params.gamma) * max(LEAST_TO_COME, to_come)
    return min(nats + math.log(-math.expm1(-nats)), torch.finfo(torch.float32).max)


class GuidanceTable:
    """Guidance parameters of ``R`` requests as tensors on a device, indexed by table row.

    Create it from a list of requests (:meth:`from_params`), or empty for requests that come and go
    (:meth:`add_request`). Added requests stay on the host until :attr:`columns` is read. They are then copied to the
    device in one copy, in stream order and without a host-device sync.

    Args:
        rows: R.
        device: device of the table.
        max_eos: maximum number of end-of-sequence ids per request.
        max_scaled_tokens: maximum number of tokens per request with a separate temperature.
        early: tokens by which ``near`` and ``le_near`` aim below a total without ``tolerance``; at most a tenth of it.

    Example:
        >>> from lenvm_kernels import parse_guidance
        >>> table = GuidanceTable(4, "cpu")
        >>> table.add_request(2, parse_guidance({"target_length": 60}), eos_token_ids={0}, prompt_len=7)
        >>> table.columns.target_length
        tensor([ 0.,  0., 60.,  0.])
    """

    def __init__(
        self,
        rows: int,
        device: torch.device | str,
        *,
        max_eos: int = 8,
        max_scaled_tokens: int = 32,
        early: float = 0.0,
    ) -> None:
        self._early = early
        self._sizes = dict.fromkeys(_PACKED, 1) | {
            "eos_token_ids": max_eos,
            "span_end_token_ids": MAX_SPAN_ENDS,
            "span_token_ids": MAX_SPAN_TOKENS,
            "closing_token_ids": MAX_CLOSING_TOKENS,
            "scaled_token_ids": max_scaled_tokens,
            "token_scales": max_scaled_tokens,
        }
        codes = [f"{self._sizes[name]}{_STRUCT_CODES[column.dtype]}" for name, column in _PACKED.items()]
        self._struct = struct.Struct("=" + "".join(codes))
        self._rows = self._packed(GuidanceParams(), (), 0, SpanState(0, 0), None).to(device).repeat(rows, 1)
        self._columns = self._views(torch.zeros(rows, dtype=torch.int32, device=device))
        self._staged: dict[int, torch.Tensor] = {}

    @classmethod
    def from_params(
        cls, params: Sequence[GuidanceParams | None], eos_token_ids: Sequence[set[int]], device: torch.device | str
    ) -> GuidanceTable:
        """Pack requests into a table, one per row, with the ids that end each request's output.

        Raises:
            ValueError: the two lists differ in length.
        """
        if (count := len(eos_token_ids)) != len(params):
            raise ValueError(f"eos_token_ids must have one set per request ({len(params)}), got {count} sets")
        scaled = max([1, *(len(p.token_temperature_scale) for p in params if p)])
        table = cls(len(params), device, max_eos=max([1, *map(len, eos_token_ids)]), max_scaled_tokens=scaled)
        for row, (p, eos) in enumerate(zip(params, eos_token_ids, strict=True)):
            table.add_request(row, p, eos)
        return table

    @property
    def columns(self) -> GuidanceColumns:
        """The tensors, including all added requests. They may be written in place."""
        self.flush()
        return self._columns

    def __len__(self) -> int:
        return len(self._rows)

    def add_request(
        self,
        table_row: int,
        params: GuidanceParams | None,
        eos_token_ids: set[int],
        *,
        prompt_len: int = 0,
        seed: int = 0,
        span: SpanState | None = None,
        answer_row: int | None = None,
    ) -> None:
        """Add a request in a row.

        Args:
            table_row: the row.
            params: the request's parameters. If None, the request is unguided.
            eos_token_ids: the ids that end the output.
            prompt_len: tokens of the sequence that are not generated, for targets that are totals.
            seed: seed of the draws (:func:`draw`), any int64.
            span: state of the span (:meth:`GuidanceParams.span_state`). If None, an open span begins after
                ``prompt_len`` tokens, and nothing has been generated.
            answer_row: row with the parameters that apply after a span. If None, the request is unguided after a span.

        Raises:
            IndexError: there is no such row.
            ValueError: too many end-of-sequence ids or token temperatures, or a column cannot store a number. The
                row is unchanged.
        """
        if not 0 <= table_row < len(self):
            raise IndexError(f"table_row must be in [0, {len(self)}), got {table_row}")
        span = span or SpanState(prompt_len, prompt_len)
        self._staged[table_row] = self._packed(params or GuidanceParams(), eos_token_ids, seed, span, answer_row)

    def _packed(
        self, params: GuidanceParams, eos_token_ids: Collection[int], seed: int, span: SpanState, answer_row: int | None
    ) -> torch.Tensor:
        """A row as int64 words, on the host."""
        patterns, target = params.span_patterns, params.target_length or 0.0
        waits = params.counts_down and params.mode in (Mode.NEAR, Mode.LE_NEAR) and params.tolerance == 0
        scales = sorted(params.token_temperature_scale.items())
        # Columns that differ from the parameter of the same name.
        computed: dict[str, Any] = {
            "seed": seed,
            "scaled_token_ids": [token for token, _ in scales],
            "token_scales": [scale for _, scale in scales],
            "eos_token_ids": sorted(eos_token_ids),
            "span_end_token_ids": [*dict.fromkeys(first for first, *_ in params.end_token_ids)],
            **{
                f"span_{name}": getattr(patterns, name)
                for name in ("token_ids", "first_bits", "end_bits", "start_bits", "call_bits")
            },
            **{f"span_{name}": getattr(span, name) for name in ("seen", "match", "used")},
            "units": span.units,
            "in_call": span.in_call,
            "closing_from": span.closing_from,
            "missing_bytes": 0,  # a forced end may cut a character after a retraction
            "nats_per_token": -math.log(params.gamma),
            "target_length": target - min(self._early, _EARLY_SHARE * target) if waits else target,
            "due_length": target + params.tolerance if params.counts_down else None,
            "target_logit": _target_logit(params),
            "prompt_len": span.begin,
            "answer_row": answer_row,
            "allows_eos": params.allow_eos,
            "span_ended": span.end is not None,
        }
        if len(eos_token_ids) > (most := self._sizes["eos_token_ids"]):
            raise ValueError(f"eos_token_ids must have at most {most} ids, got {len(eos_token_ids)}")
        if len(scales) > (most := self._sizes["token_scales"]):
            raise ValueError(f"token_temperature_scale must have at most {most} tokens, got {len(scales)}")
        if not -(2**63) <= seed < 2**63:
            raise ValueError(f"seed must be an int64, got {seed}")
        numbers: list[Any] = []
        for name, column in _PACKED.items():
            value = computed[name] if name in computed else getattr(params, name)
            if column.is_list:
                numbers += [*value, *[column.default] * (self._sizes[name] - len(value))]
            else:
                numbers.append(column.default if value is None else value)
        try:
            packed = self._struct.pack(*numbers)
        except (struct.error, OverflowError) as error:
            raise ValueError(
                "eos_token_ids and prompt_len must be int32, tokens of token_temperature_scale int64, and numbers of "
                f"params fp32, got {sorted(eos_token_ids)}, {span.begin} and {params}"
            ) from error
        return torch.frombuffer(bytearray(packed + bytes(-len(packed) % 8)), dtype=torch.int64)

    def _views(self, faults: torch.Tensor) -> GuidanceColumns:
        """The columns of all rows, as views."""
        columns, ends, end, row_bytes = {}, {}, 0, self._rows.view(torch.uint8)
        for name, column in _PACKED.items():
            start, end = end, end + self._sizes[name] * column.dtype.itemsize
            view = row_bytes[:, start:end].view(column.dtype)
            columns[name], ends[name] = view if column.is_list else view[:, 0], (start, end)
        first, last = ends["eos_token_ids"][0], ends["span_end_token_ids"][1]  # adjacent columns
        columns["ending_token_ids"] = row_bytes[:, first:last].view(_PACKED["eos_token_ids"].dtype)
        return GuidanceColumns(**columns, faults=faults)

    def flush(self) -> None:
        """Copy the added requests to the device. Reading :attr:`columns` does the same.

        Call it before each replay of a CUDA graph that reads the table.

        Raises:
            RuntimeError: requests were added and a graph is being captured: each replay would add them again.
        """
        if not self._staged:
            return
        on_gpu = self._rows.is_cuda
        if on_gpu and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("requests were added to the table; call flush() before a graph is captured")
        # Each row is stored with its index, so that one asynchronous copy from pinned memory is enough.
        staged = torch.stack(list(self._staged.values()))
        staged = torch.cat([torch.tensor(list(self._staged))[:, None], staged], dim=1)
        staged = (staged.pin_memory() if on_gpu else staged).to(self._rows.device, non_blocking=True)
        table_rows, rows = staged[:, 0], staged[:, 1:]
        self._rows.index_copy_(0, table_rows, rows)
        self._columns.faults.index_fill_(0, table_rows, 0)
        self._staged.clear()

    def remaining_lengths(
        self, table_rows: torch.Tensor, value_logits: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        """fp32, in the shape of ``tokens``: predicted number of tokens after each token; 0 after an end token.

        Args:
            table_rows: int64 ``[B]``.
            value_logits, tokens: ``[B]`` or ``[B, N]``.
        """
        columns, rows = self.columns, table_rows.view(-1, *[1] * (tokens.dim() - 1))
        lengths = torch.nn.functional.softplus(value_logits) / columns.nats_per_token[rows]
        return lengths.masked_fill((columns.eos_token_ids[rows] == tokens[..., None]).any(-1), 0.0)
