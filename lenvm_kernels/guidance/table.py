"""The guidance of all requests of an engine, as tensors that a step's kernels read."""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Sequence
from typing import Any

import torch

from lenvm_kernels.guidance.params import GuidanceParams
from lenvm_kernels.guidance.spans import MAX_CLOSING_TOKENS, MAX_SPAN_ENDS, MAX_SPAN_TOKENS, SpanPatterns, SpanState
from lenvm_kernels.types import GuidanceColumns, Mode

# Padding of token ids; -1 is that of candidates.
_NO_TOKEN = -2
_NO_LIMIT = 2**31 - 1
# The largest share of a total by which `near` and `le_near` aim early.
_EARLY_SHARE = 0.1
# Columns in the order in which they lie in a row, the widest first, so that every one is aligned. What is not here is
# kept apart: kernels write it.
_DTYPES = {
    "seed": torch.int64,
    "scaled_token_ids": torch.int64,
    "token_scales": torch.float32,
    "eos_token_ids": torch.int32,
    "span_end_token_ids": torch.int32,
    "span_token_ids": torch.int32,
    "closing_token_ids": torch.int32,
    "span_first_bits": torch.int32,
    "span_end_bits": torch.int32,
    "span_start_bits": torch.int32,
    "span_seen": torch.int32,
    "span_match": torch.int32,
    "closing_from": torch.int32,
    "mode": torch.int32,
    "scale": torch.float32,
    "nats_per_token": torch.float32,
    "value_min": torch.float32,
    "target_length": torch.float32,
    "tolerance": torch.float32,
    "min_end_prob": torch.float32,
    "least_share": torch.float32,
    "due_length": torch.float32,
    "entropy_threshold": torch.float32,
    "answer_length": torch.float32,
    "prompt_len": torch.int32,
    "hard_limit": torch.int32,
    "hard_limit_grace": torch.int32,
    "value_stride": torch.int32,
    "counts_down": torch.bool,
    "return_values": torch.bool,
    "allows_eos": torch.bool,
    "span_ended": torch.bool,
}
_STRUCT_CODES = {torch.int64: "q", torch.int32: "i", torch.float32: "f", torch.bool: "?"}


class _RowLayout:
    """How the parameters of a request lie in a row of the table: all together, as int64 words."""

    def __init__(self, max_eos: int, max_scaled_tokens: int, early: float) -> None:
        self.max_eos, self.max_scaled_tokens, self._early = max_eos, max_scaled_tokens, early
        # Elements of the columns that are lists; the others have one.
        self._lists = {
            "eos_token_ids": max_eos,
            "span_end_token_ids": MAX_SPAN_ENDS,
            "span_token_ids": MAX_SPAN_TOKENS,
            "closing_token_ids": MAX_CLOSING_TOKENS,
            "scaled_token_ids": max_scaled_tokens,
            "token_scales": max_scaled_tokens,
        }
        codes = [f"{self._lists.get(name, 1)}{_STRUCT_CODES[dtype]}" for name, dtype in _DTYPES.items()]
        self._struct = struct.Struct("=" + "".join(codes))
        self._padding = bytes(-self._struct.size % 8)

    def pack(
        self,
        params: GuidanceParams,
        eos_token_ids: Collection[int],
        *,
        prompt_len: int,
        seed: int,
        span: SpanState | None = None,
    ) -> torch.Tensor:
        """A row, on the host. Raises what :meth:`GuidanceTable.add_request` raises."""
        span = span or SpanState(prompt_len, prompt_len)
        patterns = params.span_patterns or SpanPatterns.of((), ())
        firsts = [i if isinstance(i, int) else i[0] for i in params.end_token_ids]
        scales = sorted(params.token_temperature_scale.items())
        if len(eos_token_ids) > self.max_eos:
            raise ValueError(f"eos_token_ids must be at most {self.max_eos} ids, got {len(eos_token_ids)}")
        if len(scales) > self.max_scaled_tokens:
            raise ValueError(
                f"token_temperature_scale must be of at most {self.max_scaled_tokens} tokens, got {len(scales)}"
            )
        if not -(2**63) <= seed < 2**63:
            raise ValueError(f"seed must be an int64, got {seed}")
        values: dict[str, Any] = {
            "seed": seed,
            "scaled_token_ids": [token for token, _ in scales] + [0] * (self.max_scaled_tokens - len(scales)),
            "token_scales": [scale for _, scale in scales] + [1.0] * (self.max_scaled_tokens - len(scales)),
            "eos_token_ids": _padded(sorted(eos_token_ids), self.max_eos),
            "span_end_token_ids": _padded([*dict.fromkeys(firsts)], MAX_SPAN_ENDS),
            "span_token_ids": _padded(patterns.token_ids, MAX_SPAN_TOKENS),
            "closing_token_ids": _padded(params.closing_token_ids, MAX_CLOSING_TOKENS),
            "span_first_bits": patterns.first_bits,
            "span_end_bits": patterns.end_bits,
            "span_start_bits": patterns.start_bits,
            "span_seen": span.seen,
            "span_match": span.match,
            "closing_from": -1 if span.closing_from is None else span.closing_from,
            "mode": params.mode,
            "scale": params.scale,
            "nats_per_token": -math.log(params.gamma),
            "value_min": -math.inf if params.value_min is None else params.value_min,
            "target_length": self._aimed_at(params),
            "tolerance": params.tolerance,
            "min_end_prob": math.inf if params.min_end_prob is None else params.min_end_prob,
            "least_share": params.least_share,
            "due_length": (params.target_length or 0.0) + params.tolerance if params.counts_down else math.inf,
            "entropy_threshold": math.nan if params.entropy_threshold is None else params.entropy_threshold,
            "answer_length": params.answer_length,
            "prompt_len": span.begin,
            "hard_limit": _NO_LIMIT if params.hard_limit is None else params.hard_limit,
            "hard_limit_grace": params.hard_limit_grace,
            "value_stride": params.value_stride or 1,
            "counts_down": params.counts_down,
            "return_values": params.return_values,
            "allows_eos": params.allow_eos,
            "span_ended": span.end is not None,
        }
        flat = [x for name in _DTYPES for x in (values[name] if name in self._lists else (values[name],))]
        try:
            packed = self._struct.pack(*flat)
        except (struct.error, OverflowError) as error:
            raise ValueError(
                "eos_token_ids and prompt_len must be int32, tokens of token_temperature_scale int64, and numbers of "
                f"params fp32, got {sorted(eos_token_ids)}, {prompt_len} and {params}"
            ) from error
        return torch.frombuffer(bytearray(packed + self._padding), dtype=torch.int64)

    def _aimed_at(self, params: GuidanceParams) -> float:
        target = params.target_length or 0.0
        waits = params.counts_down and params.mode in (Mode.NEAR, Mode.LE_NEAR) and params.tolerance == 0
        return target - min(self._early, _EARLY_SHARE * target) if waits else target

    def columns(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """The columns of rows ``[R, words]``, as views."""
        columns, start, row_bytes = {}, 0, rows.view(torch.uint8)
        for name, dtype in _DTYPES.items():
            size = self._lists.get(name, 1) * dtype.itemsize
            column = row_bytes[:, start : start + size].view(dtype)
            columns[name] = column if name in self._lists else column[:, 0]
            if name == "span_end_token_ids":  # after those that end the sequence
                first = start - self.max_eos * dtype.itemsize
                columns["ending_token_ids"] = row_bytes[:, first : start + size].view(dtype)
            start += size
        return columns


def _padded(token_ids: Sequence[int], size: int) -> list[int]:
    return [*token_ids, *[_NO_TOKEN] * (size - len(token_ids))]


class GuidanceTable:
    """Guidance parameters of ``R`` requests as tensors on one device, indexed by table row.

    Make it from a list of requests (:meth:`from_params`), or empty where requests come and go (:meth:`add_request`,
    :meth:`remove_request`). What is added lies on the host until somebody reads a column: then all of it goes to the
    device in one copy, in the order of the current stream and without waiting for it.

    Args:
        rows: R.
        device: where the table lies.
        max_eos: end-of-sequence ids a request can have.
        max_scaled_tokens: tokens with a temperature of their own that a request can have.
        early: tokens by which ``near`` and ``le_near`` aim below a total, at most a tenth of it. A range
            (``tolerance``) is not shifted.

    Attributes:
        columns: :class:`GuidanceColumns`, whose tensors are attributes of the table, too: ``table.faults``. They may be
            written in place.

    Example:
        >>> from lenvm_kernels import parse_guidance
        >>> table = GuidanceTable(4, "cpu")
        >>> table.add_request(2, parse_guidance({"target_length": 60}), eos_token_ids={0}, prompt_len=7)
        >>> table.target_length
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
        self._layout = _RowLayout(max_eos, max_scaled_tokens, early)
        self._unguided = self._layout.pack(GuidanceParams(), (), prompt_len=0, seed=0)
        self._rows = self._unguided.to(device).repeat(rows, 1)
        faults = torch.zeros(rows, dtype=torch.int32, device=device)
        self._columns = GuidanceColumns(**self._layout.columns(self._rows), faults=faults)
        self._staged: dict[int, torch.Tensor] = {}

    @classmethod
    def from_params(
        cls,
        params: Sequence[GuidanceParams | None],
        eos_token_ids: Sequence[set[int]],
        device: torch.device | str,
    ) -> GuidanceTable:
        """Pack requests into a table; None is an unguided request.

        Args:
            params: one a row.
            eos_token_ids: the ids that end each request's output; a request may have none.
            device: where the table lies.

        Raises:
            ValueError: the two lists differ in length.
        """
        if len(eos_token_ids) != len(params):
            raise ValueError(
                f"eos_token_ids must have one set per request ({len(params)}), got {len(eos_token_ids)} sets"
            )
        scaled = [len(p.token_temperature_scale) for p in params if p]
        most: dict[str, Any] = dict(max_eos=max([1, *map(len, eos_token_ids)]), max_scaled_tokens=max([1, *scaled]))
        table = cls(len(params), device, **most)
        for row, (p, eos) in enumerate(zip(params, eos_token_ids, strict=True)):
            table.add_request(row, p, eos)
        return table

    @property
    def columns(self) -> GuidanceColumns:
        """The tensors, with every request that was added."""
        self.flush()
        return self._columns

    def __getattr__(self, name: str) -> torch.Tensor:
        if name not in GuidanceColumns._fields:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.columns, name)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def guided(self) -> torch.Tensor:
        """bool ``[R]``: requests with guidance."""
        return self.columns.mode != Mode.UNGUIDED

    def add_request(
        self,
        table_row: int,
        params: GuidanceParams | None,
        eos_token_ids: set[int],
        *,
        prompt_len: int = 0,
        seed: int = 0,
        span: SpanState | None = None,
    ) -> None:
        """Write a request into a row when it arrives.

        Args:
            table_row: the row.
            params: the request's parameters; None: unguided.
            eos_token_ids: the ids that end its output.
            prompt_len: tokens of its sequence that do not count as generated (targets that are totals count the rest).
            seed: of its draws (:func:`sample_candidates`), any int64.
            span: where it stands in its span (:meth:`GuidanceParams.span_state`), if it has one; None: one is open that
                begins after ``prompt_len`` tokens, of which nothing has been generated.

        Raises:
            IndexError: no such row.
            ValueError: more end-of-sequence ids or token temperatures than the table has room for, or a number that
                its column cannot hold. The row is as it was.
        """
        if not 0 <= table_row < len(self):
            raise IndexError(f"table_row must be in [0, {len(self)}), got {table_row}")
        self._staged[table_row] = self._layout.pack(
            params or GuidanceParams(), eos_token_ids, prompt_len=prompt_len, seed=seed, span=span
        )

    def remove_request(self, table_row: int) -> None:
        """Make a row unguided when its request leaves."""
        self.add_request(table_row, None, set())

    def flush(self) -> None:
        """Send the requests that were added to the device, as reading a column does.

        Needed before a CUDA graph of one's own that reads the table is replayed.

        Raises:
            RuntimeError: requests were added and a graph is being captured: each of its replays would add them again.
        """
        if not self._staged:
            return
        on_gpu = self._rows.is_cuda
        if on_gpu and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("requests were added to the table: flush() it before a graph is captured")
        # Before each row its number, so that there is one copy. From pinned memory it leaves the host free to go on.
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
        """fp32 ``[B]``: tokens that are to follow ``tokens [B]``, by their value logits; 0 after an end of sequence."""
        columns = self.columns
        lengths = torch.nn.functional.softplus(value_logits) / columns.nats_per_token[table_rows]
        return lengths.masked_fill((columns.eos_token_ids[table_rows] == tokens[:, None]).any(1), 0.0)
