"""A request's guidance parameters: parse and validate them once, pack them into a table on the device.

Names and defaults are those of ``custom_params`` in the LenVM fork of SGLang (section Parameters of the specification).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lenvm_kernels.ops.reweight_scatter import Mode

MODES = {
    "mul": Mode.MUL,
    "linear": Mode.LINEAR,
    "exp": Mode.EXP,
    "length_mul": Mode.LENGTH_MUL,
    "centered_exp": Mode.CENTERED_EXP,
    "value_bias": Mode.VALUE_BIAS,
}
CONSTRAINTS = {
    Mode.EQ: ("eq", "=", "==", "equal", "equals"),
    Mode.GE: ("ge", ">=", ">", "gte", "greater_equal"),
    Mode.LE: ("le", "<=", "<", "lte", "less_equal"),
    Mode.EQ_SOFT: ("eq_soft", "soft", "equal_soft"),
}
LENGTH_MODES = {"total": True, "budget": True, "remaining": False}

# Every field and its other names.
FIELDS = {
    "value_mode": ("mode",),
    "value_scale": ("scale",),
    "gamma": ("length_gamma",),
    "value_min": (),
    "target_value": (),
    "target_length": (),
    "target_length_mode": ("length_mode",),
    "value_constraint": ("constraint", "cmp", "op"),
    "value_entropy_threshold": ("entropy_threshold",),
    "token_temperature_scale": (),
    "boosted_token_ids": (),
    "token_temp_divisor": (),
    "return_values": (),
}
_NAMES = {name: main for main, others in FIELDS.items() for name in (main, *others)}
MAX_DIVISOR = 1e6  # so that no logit becomes infinite
_FP32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class GuidanceParams:
    """A request's validated parameters. Make it with :func:`parse_guidance`.

    Attributes:
        mode: how candidates are reweighted; neutral parameters give ``Mode.UNGUIDED``, a target a constraint mode.
        scale: ``value_scale``.
        gamma: discount of the value model, in (0, 1): a value ``v`` is a length of ``ln(1 - v) / ln(gamma)`` tokens.
        value_min: rows whose expected value is below it are left as they are; None: no bound.
        target_length: tokens; None without a target. A ``target_value`` is kept as the length it stands for.
        counts_down: ``target_length`` is a total, from which the tokens generated so far are taken.
        entropy_threshold: in nats; rows whose candidates' entropy is at or below it are skipped; None: never.
        token_temperature_scale: divisor of the temperature of single tokens (their logits are multiplied by it).
        return_values: the request wants to know the lengths that its tokens are predicted to lead to.
    """

    mode: Mode = Mode.UNGUIDED
    scale: float = 1.0
    gamma: float = 0.997
    value_min: float | None = None
    target_length: float | None = None
    counts_down: bool = False
    entropy_threshold: float | None = None
    token_temperature_scale: Mapping[int, float] = field(default_factory=dict)
    return_values: bool = False

    @property
    def needs_value_model(self) -> bool:
        """Whether the value model has to see the request's tokens."""
        return self.mode != Mode.UNGUIDED or self.return_values


def parse_guidance(custom_params: Mapping[str, Any]) -> GuidanceParams:
    """Validate a request's ``custom_params``.

    Keys of other consumers are ignored, but one that looks like a misspelt field of ours is refused. A field that is
    None counts as absent.

    Raises:
        TypeError: not a mapping.
        ValueError: naming the field, what came and what is accepted.

    Example:
        >>> parse_guidance({"target_length": 60, "op": ">="}).mode.name
        'GE'
    """
    if not isinstance(custom_params, Mapping):
        raise TypeError(f"custom_params must be a mapping of field names to values, got {type(custom_params).__name__}")
    given: dict[str, Any] = {}
    for name, value in custom_params.items():
        if value is None:
            continue
        if name not in _NAMES:
            close = difflib.get_close_matches(str(name), _NAMES, n=1, cutoff=0.85)
            if close:
                raise ValueError(f"{name} is not a guidance parameter; did you mean {close[0]}?")
            continue
        main = _NAMES[name]
        if main in given:
            raise ValueError(f"{main} is given twice: accepted is one of {', '.join((main, *FIELDS[main]))}")
        given[main] = value

    mode = MODES[_word(given, "value_mode", MODES, "mul")]
    scale = _number(given, "value_scale", 1.0)
    gamma = _number(given, "gamma", 0.997, above=0.0, below=1.0)
    target_length = _number(given, "target_length", None, least=0.0)
    target_value = _number(given, "target_value", None, least=0.0, below=1.0)
    counts_down = LENGTH_MODES[_word(given, "target_length_mode", LENGTH_MODES, "total")]
    spellings = {spelling: constraint for constraint, all_of_it in CONSTRAINTS.items() for spelling in all_of_it}
    constraint = spellings[_word(given, "value_constraint", spellings, "eq")]
    if target_value is not None:  # takes precedence, as in the fork
        target_length, counts_down = math.log1p(-target_value) / math.log(gamma), False
    if target_length is not None:
        mode = constraint
    elif "value_constraint" in given:
        raise ValueError("value_constraint needs a target: give target_length or target_value as well")
    elif _is_neutral(mode, scale):
        mode = Mode.UNGUIDED
    return GuidanceParams(
        mode=mode,
        scale=scale,
        gamma=gamma,
        value_min=_number(given, "value_min", None),
        target_length=target_length,
        counts_down=counts_down and target_length is not None,
        entropy_threshold=_number(given, "value_entropy_threshold", None, least=0.0),
        token_temperature_scale=_token_divisors(given),
        return_values=_switch(given, "return_values"),
    )


def _is_neutral(mode: Mode, scale: float) -> bool:
    if mode in (Mode.CENTERED_EXP, Mode.VALUE_BIAS):
        return scale == 0
    return scale == 1 or (mode == Mode.MUL and scale <= 0)


def _word(given: dict[str, Any], name: str, accepted: Mapping[str, Any], default: str) -> str:
    word = given.get(name, default)
    if not isinstance(word, str) or word.strip().lower() not in accepted:
        raise ValueError(f"{name} must be one of {', '.join(accepted)}, got {word!r}")
    return word.strip().lower()


def _switch(given: dict[str, Any], name: str) -> bool:
    switch = given.get(name, False)
    if not isinstance(switch, bool):
        raise ValueError(f"{name} must be true or false, got {switch!r}")
    return switch


def _number(
    given: dict[str, Any],
    name: str,
    default: float | None,
    *,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
) -> float | None:
    if name not in given:
        return default
    bounds = [f"{sign} {bound:g}" for sign, bound in ((">", above), (">=", least), ("<", below)) if bound is not None]
    accepted = "a finite number" + (" " + " and ".join(bounds) if bounds else "")
    try:
        number = math.nan if isinstance(given[name], bool) else float(given[name])
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if (
        not abs(number) <= _FP32_MAX  # NaN compares false
        or (above is not None and number <= above)
        or (least is not None and number < least)
        or (below is not None and number >= below)
    ):
        raise ValueError(f"{name} must be {accepted}, got {given[name]!r}")
    return number


def _token_divisors(given: dict[str, Any]) -> dict[int, float]:
    """``token_temperature_scale``, or the short form ``boosted_token_ids`` with ``token_temp_divisor``."""
    ids, divisor = given.get("boosted_token_ids"), given.get("token_temp_divisor")
    if (ids is None) != (divisor is None):
        raise ValueError("boosted_token_ids and token_temp_divisor must be given together")
    name, divisors = "token_temperature_scale", given.get("token_temperature_scale")
    if ids is not None:
        if divisors is not None:
            raise ValueError("give token_temperature_scale or boosted_token_ids with token_temp_divisor, not both")
        if not isinstance(ids, Sequence) or isinstance(ids, str):
            raise ValueError(f"boosted_token_ids must be a list of token ids, got {ids!r}")
        name, divisors = "boosted_token_ids", dict.fromkeys(ids, divisor)
    if divisors is None:
        return {}
    if not isinstance(divisors, Mapping):
        raise ValueError(f"{name} must be a mapping of token id to divisor, got {divisors!r}")
    parsed = {}
    for token, value in divisors.items():
        # JSON makes strings of the keys of an object.
        if isinstance(token, bool) or not str(token).isdecimal():
            raise ValueError(f"{name} must hold token ids >= 0, got {token!r}")
        divisor_name = f"{name}[{token}]" if ids is None else "token_temp_divisor"
        parsed[int(token)] = _number({divisor_name: value}, divisor_name, None, above=0.0, below=MAX_DIVISOR)
    return parsed


# Padding of end-of-sequence ids; -1 is that of candidates.
_NO_EOS = -2


@dataclass
class GuidanceTable:
    """Guidance parameters of ``R`` requests as tensors on one device, indexed by row; read by a decode step's kernels.

    Make it from a list of requests (:meth:`from_params`), or empty (:meth:`empty`) where requests come and go
    (:meth:`set`, :meth:`clear`).

    Attributes:
        mode: int32 ``[R]``; a :class:`Mode`.
        scale: fp32 ``[R]``.
        nats_per_token: fp32 ``[R]``; ``-ln(gamma)``.
        value_min: fp32 ``[R]``; -inf for none.
        target_length: fp32 ``[R]``; tokens, 0 without a target.
        counts_down: bool ``[R]``; ``target_length`` is a total.
        entropy_threshold: fp32 ``[R]``; nats, NaN for none.
        eos_token_ids: int32 ``[R, E]``; -2 pads.
        scaled_token_ids: int64 ``[R, W]``; tokens with a temperature of their own, 0 pads.
        token_scales: fp32 ``[R, W]``; what their logits are multiplied by, 1 pads.
        prompt_len: int32 ``[R]``; tokens of the request that do not count as generated.
        seed: int64 ``[R]``; of the request's draws.
        return_values: bool ``[R]``; predicted lengths are wanted.
        faults: int32 ``[R]``; steps in which the row was broken (see :func:`reweight_scatter`). Reset it at will.
    """

    mode: torch.Tensor
    scale: torch.Tensor
    nats_per_token: torch.Tensor
    value_min: torch.Tensor
    target_length: torch.Tensor
    counts_down: torch.Tensor
    entropy_threshold: torch.Tensor
    eos_token_ids: torch.Tensor
    scaled_token_ids: torch.Tensor
    token_scales: torch.Tensor
    prompt_len: torch.Tensor
    seed: torch.Tensor
    return_values: torch.Tensor
    faults: torch.Tensor

    @property
    def guided(self) -> torch.Tensor:
        """bool ``[R]``: rows with guidance."""
        return self.mode != Mode.UNGUIDED

    @classmethod
    def empty(
        cls, rows: int, device: torch.device | str, *, max_eos: int = 8, max_scaled_tokens: int = 32
    ) -> GuidanceTable:
        """A table of unguided rows.

        Args:
            rows: R.
            device: where the table lies.
            max_eos: end-of-sequence ids a row can have.
            max_scaled_tokens: tokens with a temperature of their own that a row can have.
        """

        def column(value, dtype, *width):
            return torch.full((rows, *width), value, dtype=dtype, device=device)

        neutral = GuidanceParams()
        return cls(
            mode=column(neutral.mode, torch.int32),
            scale=column(neutral.scale, torch.float32),
            nats_per_token=column(-math.log(neutral.gamma), torch.float32),
            value_min=column(-math.inf, torch.float32),
            target_length=column(0.0, torch.float32),
            counts_down=column(False, torch.bool),
            entropy_threshold=column(math.nan, torch.float32),
            eos_token_ids=column(_NO_EOS, torch.int32, max_eos),
            scaled_token_ids=column(0, torch.int64, max_scaled_tokens),
            token_scales=column(1.0, torch.float32, max_scaled_tokens),
            prompt_len=column(0, torch.int32),
            seed=column(0, torch.int64),
            return_values=column(False, torch.bool),
            faults=column(0, torch.int32),
        )

    @classmethod
    def from_params(
        cls,
        params: Sequence[GuidanceParams | None],
        eos_token_ids: Sequence[set[int]],
        device: torch.device | str,
    ) -> GuidanceTable:
        """Pack requests into a table; None is an unguided request.

        Args:
            params: one per row.
            eos_token_ids: the ids that end each row's output; a row may have none.
            device: where the table lies.

        Raises:
            ValueError: the two lists differ in length.
        """
        if len(eos_token_ids) != len(params):
            raise ValueError(
                f"eos_token_ids must have one set per request ({len(params)}), got {len(eos_token_ids)} sets"
            )
        scaled = [len(p.token_temperature_scale) for p in params if p]
        table = cls.empty(
            len(params), "cpu", max_eos=max([1, *map(len, eos_token_ids)]), max_scaled_tokens=max([1, *scaled])
        )
        for row, (p, eos) in enumerate(zip(params, eos_token_ids, strict=True)):
            table.set(row, p, eos)
        return cls(**{name: column.to(device) for name, column in vars(table).items()})

    def set(
        self,
        row: int,
        params: GuidanceParams | None,
        eos_token_ids: set[int],
        *,
        prompt_len: int = 0,
        seed: int = 0,
    ) -> None:
        """Write a request into its row when it arrives, in the order of the device's stream and without waiting for it.

        Args:
            row: the row.
            params: the request's parameters; None: unguided.
            eos_token_ids: the ids that end its output.
            prompt_len: tokens of its sequence that do not count as generated (targets that are totals count the rest).
            seed: of its draws (:func:`sample_candidates`), any int64.

        Raises:
            IndexError: no such row.
            ValueError: more end-of-sequence ids or token temperatures than the table has room for, or a seed that is no
                int64. The row is as it was.
        """
        rows, max_eos, max_scaled = len(self.mode), self.eos_token_ids.shape[1], self.scaled_token_ids.shape[1]
        p = params or GuidanceParams()
        scales = sorted(p.token_temperature_scale.items())
        if not 0 <= row < rows:
            raise IndexError(f"row must be in [0, {rows}), got {row}")
        if len(eos_token_ids) > max_eos:
            raise ValueError(f"eos_token_ids must be at most {max_eos} ids, got {len(eos_token_ids)}")
        if len(scales) > max_scaled:
            raise ValueError(f"token_temperature_scale must be of at most {max_scaled} tokens, got {len(scales)}")
        if not -(2**63) <= seed < 2**63:
            raise ValueError(f"seed must be an int64, got {seed}")
        for column, value in (
            (self.mode, p.mode),
            (self.scale, p.scale),
            (self.nats_per_token, -math.log(p.gamma)),
            (self.value_min, -math.inf if p.value_min is None else p.value_min),
            (self.target_length, p.target_length or 0.0),
            (self.counts_down, p.counts_down),
            (self.entropy_threshold, math.nan if p.entropy_threshold is None else p.entropy_threshold),
            (self.prompt_len, prompt_len),
            (self.seed, seed),
            (self.return_values, p.return_values),
            (self.faults, 0),
        ):
            column[row] = value
        for column, values, padding in (
            (self.eos_token_ids, sorted(eos_token_ids), _NO_EOS),
            (self.scaled_token_ids, [token for token, _ in scales], 0),
            (self.token_scales, [scale for _, scale in scales], 1.0),
        ):
            padded = torch.tensor(values + [padding] * (column.shape[1] - len(values)), dtype=column.dtype)
            # Only a copy from pinned memory leaves the host free to go on.
            column[row].copy_(padded.pin_memory() if column.is_cuda else padded, non_blocking=True)

    def clear(self, row: int) -> None:
        """Make a row unguided when its request leaves."""
        self.set(row, None, set())

    def remaining_lengths(self, rows: torch.Tensor, value_logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """fp32 ``[B]``: tokens that are to follow ``tokens [B]``, by their value logits; 0 after an end of sequence."""
        lengths = torch.nn.functional.softplus(value_logits) / self.nats_per_token[rows]
        return lengths.masked_fill((self.eos_token_ids[rows] == tokens[:, None]).any(1), 0.0)

    def generated(self, rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """int32 ``[B]``: tokens generated so far by the requests in ``rows`` whose sequences are ``lengths`` long."""
        return lengths - self.prompt_len[rows]
