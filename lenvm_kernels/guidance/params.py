"""A request's guidance parameters, parsed and validated once, when it arrives."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lenvm_kernels.guidance.fields import DEFAULT_GAMMA, FIELDS, Field
from lenvm_kernels.guidance.spans import (
    MAX_CLOSING_TOKENS,
    MAX_SPAN_ENDS,
    MAX_SPAN_TOKENS,
    SpanPatterns,
    SpanState,
    Thoughts,
    TokenSequences,
)
from lenvm_kernels.types import Mode

_NAMES = {name: field.name for field in FIELDS.values() for name in field.names}
_FP32_MAX = (2 - 2**-23) * 2.0**127
_LIMIT_OF_BUDGET = 1.25
# An end less probable than this would cut a sentence in two.
_MIN_END_PROB = 1e-4
# A value lifts tokens of any probability, at the cost of text worth reading. Those below this share of the largest one
# bring a length no nearer to its target (docs/modes-and-parameters.md), and need not be scored.
_LEAST_SHARE = 0.05
# Tokens between the last possible begin of a landing and the target, beside the landing itself: "$18.50." and the end.
_ANSWER_AFTER_LANDING = 8
# Without values the strength moves nothing but ends and what they follow.
_STRENGTH_WITHOUT_VALUES = 10.0
NEAR_CONSTRAINTS = (Mode.NEAR, Mode.GE_NEAR, Mode.LE_NEAR)


@dataclass(frozen=True)
class GuidanceParams:
    """A request's validated parameters. Make it with :func:`parse_guidance`.

    Attributes:
        mode: how candidates are reweighted; neutral parameters give ``Mode.UNGUIDED``, a target a constraint mode.
        scale: ``value_scale``; of the near constraints ``strength``.
        gamma: discount of the value model, in (0, 1): a value ``v`` is a length of ``ln(1 - v) / ln(gamma)`` tokens.
        value_min: rows whose expected value is below it are left as they are; None: no bound.
        target_length: tokens; None without a target. A ``target_value`` is kept as the length it stands for.
        counts_down: ``target_length`` is a total, from which the tokens generated so far are taken.
        tolerance: tokens; the near constraints treat all lengths within it of the target alike.
        min_end_prob: tokens that end the output are candidates from this probability on, whatever the request's
            filters say; None: only as the filters say.
        least_share: tokens below this share of the largest probability are no candidates.
        entropy_threshold: in nats; rows whose candidates' entropy is at or below it are skipped; None: never.
        token_temperature_scale: divisor of the temperature of single tokens (their logits are multiplied by it).
        return_values: the request wants to know the lengths that its tokens are predicted to lead to.
        value_stride: it is guided at steps whose number is a multiple of this, and where it might end; None: as the
            step is told (:class:`GuidedStep`).
        end_token_ids: tokens, or tuples of several, that end what is guided, the *span* of the request; empty: it has
            none. Guidance is off after one of them.
        start_token_ids: likewise, what begins a span, and the next one after it has ended; empty: the span begins with
            the answer, and is the only one.
        allow_eos: the sequence may end while its span is open.
        answer_length: tokens that are to follow the span.
        hard_limit: tokens of a span at which its end is forced, the first of ``end_token_ids``; None: never.
        hard_limit_grace: tokens for which that waits for the end of a line.
        end_message: tokens that are forced before that end; without ``end_token_ids`` they are a landing, forced once.
    """

    mode: Mode = Mode.UNGUIDED
    scale: float = 1.0
    gamma: float = DEFAULT_GAMMA
    value_min: float | None = None
    target_length: float | None = None
    counts_down: bool = False
    tolerance: float = 0.0
    min_end_prob: float | None = None
    least_share: float = 0.0
    entropy_threshold: float | None = None
    token_temperature_scale: Mapping[int, float] = field(default_factory=dict)
    return_values: bool = False
    value_stride: int | None = None
    end_token_ids: tuple[int | tuple[int, ...], ...] = ()
    start_token_ids: tuple[int | tuple[int, ...], ...] = ()
    allow_eos: bool = False
    answer_length: float = 0.0
    hard_limit: int | None = None
    hard_limit_grace: int = 0
    end_message: tuple[int, ...] = ()

    @property
    def needs_step(self) -> bool:
        """Whether the request takes part in guided steps; a span does, whose end they look for."""
        return self.mode != Mode.UNGUIDED or self.return_values or self.has_span

    @property
    def has_span(self) -> bool:
        """Whether :func:`limit_span` has to see the request: for the end of its span, or for its landing."""
        return bool(self.end_token_ids or self.end_message)

    @cached_property
    def span_patterns(self) -> SpanPatterns | None:
        """What begins and ends a span; None: the request has none."""
        if not self.end_token_ids:
            return None
        return SpanPatterns.of(_sequences(self.end_token_ids), _sequences(self.start_token_ids))

    @property
    def closing_token_ids(self) -> tuple[int, ...]:
        """What a hard limit forces, one token after the other: ``end_message``, and the first end."""
        return (*self.end_message, *(token for end in _sequences(self.end_token_ids[:1]) for token in end))

    def span_state(self, prompt: Sequence[int], output: Sequence[int] = ()) -> SpanState:
        """Where the request stands in its span, see :meth:`SpanState.of`."""
        return SpanState.of(
            self.span_patterns,
            prompt,
            output,
            closing=self.closing_token_ids,
            hard_limit=self.hard_limit,
            grace=self.hard_limit_grace,
        )


def parse_guidance(
    custom_params: Mapping[str, Any],
    *,
    thoughts: Thoughts | None = None,
    gamma: float | None = None,
    strength: float | None = None,
    constraint: str = "near",
    has_values: bool = True,
) -> GuidanceParams:
    """Validate a request's ``custom_params``.

    Keys of other consumers are ignored, but one that looks like a misspelt field of ours is refused. A field that is
    None counts as absent.

    Args:
        custom_params: values by name.
        thoughts: what the tokenizer says of thoughts, for a ``thinking_budget`` without ``end_token_ids``, and for an
            ``end_message`` in words (:meth:`Thoughts.of`); None: neither is accepted.
        gamma: that of requests that name none, as the value model has it (:class:`LenVMConfig`); None: 0.997.
        strength: that of near constraints that name none, as the value model has it, likewise; None: 5.
        constraint: the ``value_constraint`` of requests with a target that name none.
        has_values: there is a value model. Else the ``strength`` of requests that name none is 10, and what needs
            values is refused.

    Raises:
        TypeError: not a mapping.
        ValueError: naming the field, what came and what is accepted.

    Example:
        >>> parse_guidance({"target_length": 60}).mode.name
        'NEAR'
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
            raise ValueError(f"{main} is given twice: accepted is one of {', '.join(FIELDS[main].names)}")
        given[main] = value

    mode = Mode[_word(given, "value_mode").upper()]
    scale = _number(given, "value_scale")
    if gamma is not None:
        given.setdefault("gamma", gamma)
    gamma = _number(given, "gamma")
    target_length = _optional_number(given, "target_length")
    target_value = _optional_number(given, "target_value")
    counts_down = _word(given, "target_length_mode") == "total"
    mode_of_target = Mode[_word({"value_constraint": constraint} | given, "value_constraint").upper()]
    budget = _optional_number(given, "thinking_budget")
    if budget is not None:
        if target_length is not None or target_value is not None or not counts_down:
            raise ValueError("thinking_budget is a target_length of its own: give no other target with it")
        target_length, known = budget, thoughts or Thoughts()
        if "end_token_ids" not in given:
            given["end_token_ids"] = known.ends
            given.setdefault("start_token_ids", known.starts)
        if not given["end_token_ids"]:
            raise ValueError("thinking_budget needs end_token_ids: no token is known that ends a thought")
        mode_of_target = mode_of_target if "value_constraint" in given else Mode.LE_NEAR
        given.setdefault("hard_limit", math.ceil(_LIMIT_OF_BUDGET * budget))
    ends, starts = _token_ids(given, "end_token_ids"), _token_ids(given, "start_token_ids", may_be_empty=True)
    for name in ("start_token_ids", "allow_eos", "answer_length", "hard_limit"):
        if name in given and not ends:
            raise ValueError(f"{name} needs end_token_ids, or a thinking_budget")
    for name in ("hard_limit_grace", "end_message"):
        if name in given and "hard_limit" not in given:
            raise ValueError(f"{name} needs a hard_limit, or a thinking_budget")
    total = sum(map(len, _sequences(ends + starts)))
    if total > MAX_SPAN_TOKENS:
        raise ValueError(
            f"end_token_ids and start_token_ids must be of at most {MAX_SPAN_TOKENS} tokens together, got {total}"
        )
    message = _message(given, "end_message", thoughts)
    if message and len(message) + len(_sequences(ends)[0]) > MAX_CLOSING_TOKENS:
        most = MAX_CLOSING_TOKENS - len(_sequences(ends)[0])
        raise ValueError(f"end_message must be of at most {most} tokens, got {len(message)}")
    tolerance = _number(given, "tolerance")
    landing = _message(given, "landing", thoughts)
    if landing:
        if target_length is None or target_value is not None or not counts_down or ends:
            raise ValueError("landing needs a target_length of all new tokens, and neither end_token_ids nor a budget")
        if len(landing) > MAX_CLOSING_TOKENS:
            raise ValueError(f"landing must be of at most {MAX_CLOSING_TOKENS} tokens, got {len(landing)}")
        room = _optional_integer({"landing_tokens": FIELDS["landing_tokens"].default} | given, "landing_tokens") or 0
        message, given["allow_eos"] = landing, True
        given["hard_limit"] = min(max(1, math.ceil(target_length * (1 + tolerance)) - room), 2**31 - 2)
        given["hard_limit_grace"] = max(0, room - len(landing) - _ANSWER_AFTER_LANDING)
    elif "landing_tokens" in given:
        raise ValueError("landing_tokens needs a landing")
    if target_value is not None:  # takes precedence, as in the fork
        target_length, counts_down = math.log1p(-target_value) / math.log(gamma), False
    if target_length is not None:
        mode = mode_of_target
    elif "value_constraint" in given:
        raise ValueError("value_constraint needs a target: give target_length or target_value as well")
    elif _is_neutral(mode, scale):
        mode = Mode.UNGUIDED
    if mode in NEAR_CONSTRAINTS:
        default = strength if has_values else _STRENGTH_WITHOUT_VALUES
        if default is not None:
            given.setdefault("strength", default)
        scale = _number(given, "strength")
    else:
        for name in ("strength", "tolerance"):
            if name in given:
                raise ValueError(f"{name} needs a value_constraint of near, ge_near or le_near")
    min_end_prob = _optional_number(given, "min_end_prob")
    if min_end_prob is not None and target_length is None:
        raise ValueError("min_end_prob needs a target: give target_length or target_value as well")
    if min_end_prob is None and mode in NEAR_CONSTRAINTS:
        min_end_prob = _MIN_END_PROB
    lifts = has_values and mode in NEAR_CONSTRAINTS and scale > 0
    params = GuidanceParams(
        mode=mode,
        scale=scale,
        gamma=gamma,
        value_min=_optional_number(given, "value_min"),
        target_length=target_length,
        counts_down=counts_down and target_length is not None,
        tolerance=0.0 if target_length is None else min(tolerance * target_length, _FP32_MAX - target_length),
        min_end_prob=min_end_prob,
        least_share=_LEAST_SHARE if lifts else 0.0,
        entropy_threshold=_optional_number(given, "value_entropy_threshold"),
        token_temperature_scale=_token_divisors(given),
        return_values=_switch(given, "return_values"),
        value_stride=_optional_integer(given, "value_stride"),
        end_token_ids=ends,
        start_token_ids=starts,
        allow_eos=_switch(given, "allow_eos"),
        answer_length=_number(given, "answer_length"),
        hard_limit=_optional_integer(given, "hard_limit"),
        hard_limit_grace=_optional_integer(given, "hard_limit_grace") or 0,
        end_message=message,
    )
    if not has_values:
        check_without_values(params)
    return params


def check_without_values(params: GuidanceParams) -> None:
    """Raise ValueError, naming the field, unless a request can be guided by its end tokens alone."""
    if params.mode in NEAR_CONSTRAINTS or params.mode == Mode.UNGUIDED:
        wrong = {"return_values": params.return_values, "value_min": params.value_min is not None}
        for name, is_given in wrong.items():
            if is_given:
                raise ValueError(f"{name} must not be given without a value model, got {getattr(params, name)!r}")
        return
    name = params.mode.name.lower()
    if params.target_length is None:
        raise ValueError(f"value_mode {name} needs a value model; without one, give a target_length")
    accepted = ", ".join(mode.name.lower() for mode in NEAR_CONSTRAINTS)
    raise ValueError(f"value_constraint must be one of {accepted} without a value model, got {name!r}")


def check_with_trunk(params: GuidanceParams) -> None:
    """Raise ValueError, naming the field, unless a request can be guided by a trunk's values."""
    if params.mode in NEAR_CONSTRAINTS and params.value_min is not None:
        # What guides there is not what predicts.
        name = params.mode.name.lower()
        raise ValueError(f"value_min must be absent with {name} and a trunk, got {params.value_min}")


def _is_neutral(mode: Mode, scale: float) -> bool:
    if mode in (Mode.CENTERED_EXP, Mode.VALUE_BIAS):
        return scale == 0
    return scale == 1 or (mode == Mode.MUL and scale <= 0)


def _word(given: dict[str, Any], name: str) -> str:
    """The word that a field's word stands for."""
    field = FIELDS[name]
    words, word = field.words or {}, given.get(name, field.default)
    if not isinstance(word, str) or word.strip().lower() not in words:
        raise ValueError(f"{name} must be {field.accepted}, got {word!r}")
    return words[word.strip().lower()]


def _switch(given: dict[str, Any], name: str) -> bool:
    switch = given.get(name, FIELDS[name].default)
    if not isinstance(switch, bool):
        raise ValueError(f"{name} must be true or false, got {switch!r}")
    return switch


def _number(given: dict[str, Any], name: str) -> float:
    field = FIELDS[name]
    return _checked_number(field, name, given.get(name, field.default))


def _optional_number(given: dict[str, Any], name: str) -> float | None:
    """Of a field without default."""
    return _number(given, name) if name in given else None


def _optional_integer(given: dict[str, Any], name: str) -> int | None:
    """Of a field without default."""
    if name not in given:
        return None
    number = _number(given, name)
    if number != int(number):
        raise ValueError(f"{name} must be {FIELDS[name].accepted}, got {given[name]!r}")
    return int(number)


def _checked_number(field: Field, name: str, given: Any) -> float:
    """The number within the field's bounds; ``name`` is what the message calls it."""
    try:
        number = math.nan if isinstance(given, bool) else float(given)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if (
        not abs(number) <= _FP32_MAX  # NaN compares false
        or (field.above is not None and number <= field.above)
        or (field.least is not None and number < field.least)
        or (field.below is not None and number >= field.below)
    ):
        raise ValueError(f"{name} must be {field.accepted}, got {given!r}")
    return number


def _token_ids(given: dict[str, Any], name: str, *, may_be_empty: bool = False) -> tuple[int | tuple[int, ...], ...]:
    """Of a field that lists token ids, and lists of them; empty without. A list of one is that one."""
    ids = given.get(name, ())
    is_list = isinstance(ids, Sequence) and not isinstance(ids, str) and len(ids) <= MAX_SPAN_ENDS
    if not is_list or (name in given and not ids and not may_be_empty):
        least = 0 if may_be_empty else 1
        raise ValueError(f"{name} must be a list of {least} to {MAX_SPAN_ENDS} token ids, got {ids!r}")
    found: list[int | tuple[int, ...]] = []
    for each in ids:
        several = each if isinstance(each, Sequence) and not isinstance(each, str) else [each]
        if not several or not all(map(_is_token_id, several)):
            raise ValueError(f"{name} must hold token ids >= 0, or lists of them, got {ids!r}")
        found.append(several[0] if len(several) == 1 else tuple(several))
    return tuple(dict.fromkeys(found))


def _is_token_id(given: Any) -> bool:
    return isinstance(given, int) and not isinstance(given, bool) and 0 <= given < 2**31


def _sequences(ids: tuple[int | tuple[int, ...], ...]) -> TokenSequences:
    """Each as a tuple."""
    return tuple((i,) if isinstance(i, int) else i for i in ids)


def _message(given: dict[str, Any], name: str, thoughts: Thoughts | None) -> tuple[int, ...]:
    """The tokens of a field that is a text or a list of token ids; none if it is not given."""
    message = given.get(name, ())
    if isinstance(message, str):
        if thoughts is None or thoughts.encode is None:
            raise ValueError(f"{name} must be a list of token ids where no tokenizer is known, got {message!r}")
        message = list(thoughts.encode(message))
    if not isinstance(message, Sequence) or not all(map(_is_token_id, message)):
        raise ValueError(f"{name} must be a text, or a list of token ids >= 0, got {message!r}")
    return tuple(message)


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
        parsed[int(token)] = _checked_number(FIELDS["token_temp_divisor"], divisor_name, value)
    return parsed
