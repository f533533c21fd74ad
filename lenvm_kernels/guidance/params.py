"""A request's guidance parameters, parsed and validated once, on arrival."""

from __future__ import annotations

import difflib
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

from lenvm_kernels.guidance.fields import BUDGETS, DEFAULT_GAMMA, FIELDS, FP32_MAX, NAMESPACE, TARGETS, read_json
from lenvm_kernels.guidance.spans import (
    MAX_CLOSING_TOKENS,
    MAX_SPAN_TOKENS,
    SpanPatterns,
    SpanState,
    Thoughts,
    TokenSequences,
)
from lenvm_kernels.reference.limit_span import CHARACTER_TOKENS, SENTENCE_TOKENS, WORD_TOKENS
from lenvm_kernels.types import CountFrom, Mode, TextBreak


def _key(name: Any) -> str:
    """A name without case, hyphens and underscores."""
    return str(name).replace("-", "").replace("_", "").lower()


# Main names by key. Short names and common words are not in it.
_NAMES = {_key(name): each.name for each in FIELDS.values() for name in (*each.names, *each.elsewhere.split())}
_SHORT = {_key(name) for each in FIELDS.values() for name in each.names[1:]}
_SHARED = {key: name for key, name in _NAMES.items() if key not in _SHORT}
_DISTINCTIVE = {key for key, name in _SHARED.items() if not FIELDS[name].is_common}
# Limits that other engines have and guidance does not, with what to give instead.
_LIMITS = {
    "maxlength": "target_length with the value_constraint le_near, or the engine's limit of new tokens",
    "minlength": "target_length with the value_constraint ge_near, or the engine's minimum of new tokens",
}
_LIMIT_OF_BUDGET = 1.25
# Share of max_tokens that a thought leaves for the answer, and the share that is the target of a soft max_tokens.
_ANSWER_SHARE, _SOFT_SHARE = 0.2, 0.8
# A less probable end would cut a sentence.
_MIN_END_PROB = 1e-4
# Values boost tokens of any probability, at the cost of text quality. Boosting tokens below this share of the largest
# probability brings lengths no closer to the target (docs/modes-and-parameters.md), so they are not scored.
_LEAST_SHARE = 0.05
# Tokens reserved for the answer after the landing, such as "$18.50." and the end.
_ANSWER_AFTER_LANDING = 8
# Without values, the strength changes only the probability of ends and of the tokens before them.
_STRENGTH_WITHOUT_VALUES = 10.0
# If a request has a budget and a target, the answer drops the first fields and the thought drops the second.
_OF_THOUGHTS = {
    *("thinking_budget", "thinking_budget_total", "end_token_ids", "start_token_ids", "allow_eos", "answer_length"),
    *("hard_limit", "hard_limit_grace", "end_message", "landing", "landing_tokens"),
}
_OF_TARGETS = {*TARGETS, "target_length_mode", "value_constraint", "tolerance"}
# The unit of each target, and the expected tokens per unit.
_UNITS = {
    "target_length": (TextBreak.NONE, 1.0),
    "target_words": (TextBreak.WORD, WORD_TOKENS),
    "target_sentences": (TextBreak.SENTENCE, SENTENCE_TOKENS),
}
NEAR_CONSTRAINTS = (Mode.NEAR, Mode.GE_NEAR, Mode.LE_NEAR)


@dataclass(frozen=True)
class GuidanceParams:
    """A request's validated parameters, as :func:`parse_guidance` returns them.

    The attributes are the request's fields (:data:`FIELDS`), except:

    Attributes:
        mode: how candidates are reweighted; ``Mode.UNGUIDED`` for neutral parameters, a constraint for a target.
        scale: ``value_scale``, or the ``strength`` of a near constraint.
        target_length: tokens, also from a ``target_value`` or a ``thinking_budget``; None without a target.
        counts_down: the generated tokens of the span are subtracted from ``target_length``.
        tolerance: distance in tokens from the target below which near constraints treat lengths as equal.
        least_share: minimum probability of a candidate, as a share of the largest probability.
        entropy_threshold: ``value_entropy_threshold``.
        count_from: where the token count of a span begins.
        unit: the unit in which the answer's target is counted; ``TextBreak.NONE`` for tokens.
        target_units: the target in this unit.
        pause_token_ids: starts of thoughts, which interrupt a span without completing it; the ends of the thoughts are
            ``start_token_ids``. Without ``end_token_ids``, the first span begins with the output.
        call_token_ids: starts of tool calls, which end a span, and are ignored in the prompt.
        end_message: tokens forced before the end; without ``end_token_ids``, a landing, which is forced once.
        answer: parameters after the span, from the target of a request that also has a ``thinking_budget``. If None,
            the request is unguided after the span.
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
    guided_logprobs: bool = False
    value_stride: int | None = None
    end_token_ids: TokenSequences = ()
    start_token_ids: TokenSequences = ()
    pause_token_ids: TokenSequences = ()
    call_token_ids: TokenSequences = ()
    count_from: CountFrom = CountFrom.SPAN
    unit: TextBreak = TextBreak.NONE
    target_units: float = 0.0
    allow_eos: bool = False
    answer_length: float = 0.0
    hard_limit: int | None = None
    hard_limit_grace: int = 0
    end_message: tuple[int, ...] = ()
    answer: GuidanceParams | None = None

    @property
    def needs_step(self) -> bool:
        """Whether guided steps must handle the request: it is guided, predicts lengths, or has a span."""
        return self.mode != Mode.UNGUIDED or self.return_values or self.has_span

    @property
    def has_span(self) -> bool:
        """Whether :func:`limit_span` must read the request: for a span, a landing, a target in words or sentences."""
        return bool(self.end_token_ids or self.pause_token_ids or self.call_token_ids or self.end_message or self.unit)

    @cached_property
    def span_patterns(self) -> SpanPatterns:
        """The sequences that begin and end a span."""
        ends = self.end_token_ids + self.pause_token_ids
        return SpanPatterns.of(ends, self.start_token_ids, self.call_token_ids, begins_open=not self.end_token_ids)

    @property
    def closing_token_ids(self) -> tuple[int, ...]:
        """The tokens that a hard limit forces, in order: ``end_message`` and the first end."""
        return self.end_message + (self.end_token_ids[0] if self.end_token_ids else ())

    def span_state(
        self, prompt: Sequence[int], output: Sequence[int] = (), text_breaks: Sequence[int] = ()
    ) -> SpanState:
        """The state of the request's span after ``output``. Without an end sequence, the whole output is one span.

        ``text_breaks`` are needed to count words or sentences of an output (:func:`text_breaks_of`).
        """
        *_, state = self._span_states(prompt, output)
        return replace(state, units=self._units(output[max(state.begin - len(prompt), 0) :], text_breaks))

    def _units(self, tokens: Sequence[int], text_breaks: Sequence[int]) -> int:
        counted = tokens if self.unit else ()
        return sum(bool(text_breaks[token] & self.unit) for token in counted if token < len(text_breaks))

    def outcome(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        end_tokens: Container[int] = (),
        text_breaks: Sequence[int] = (),
    ) -> dict[str, Any] | None:
        """The ``lenvm`` of a response (docs/modes-and-parameters.md, Responses); None if unguided.

        The last token of ``output`` is not counted if it is one of the ``end_tokens``.
        """
        if self.mode == Mode.UNGUIDED and not self.has_span:
            return None
        output = output[:-1] if len(output) and output[-1] in end_tokens else output
        states, patterns, goal = [*self._span_states(prompt, output)], self.span_patterns, self.answer or self
        last, thought, length = states[-1], 0, 0
        end = last.seen  # of the answer
        for before, after in pairwise(states):
            was_open, tokens = before.end is None, after.seen - before.seen
            if (was_open, before.in_call) != (after.end is None, after.in_call):  # changed by the last tokens
                marks = patterns.end_bits if was_open else patterns.start_bits | patterns.call_bits
                mark = min(tokens, patterns.length_of(after.match & marks))
                tokens, length = tokens - mark, after.used - mark if was_open else length
                end = after.seen - mark if after.in_call else last.seen
            # The span is either a thought, or the answer, which thoughts interrupt and a tool call ends.
            is_thought = was_open if self.end_token_ids else not was_open and not before.in_call
            thought += tokens * is_thought
        if self.count_from == CountFrom.OUTPUT or (last.end is None) == (self.answer is None):
            length = max(end - last.begin, 0)
        elif self.answer is not None:  # the thought has not ended
            length = 0
        has_target, target, unit = goal.target_length is not None and goal.counts_down, goal.target_length, "tokens"
        if goal.unit:
            answer = output[max(last.begin - len(prompt), 0) : max(end - len(prompt), 0)]
            length = self._units(answer if length else (), text_breaks)
            target, unit = goal.target_units, "words" if goal.unit == TextBreak.WORD else "sentences"
        return dict(
            target=target if has_target else None,
            unit=unit,
            constraint=goal.mode.name.lower() if has_target else None,
            length=length,
            thought=thought if self.end_token_ids or self.pause_token_ids else None,
            forced=any(state.closing_from is not None for state in states),
        )

    def _span_states(self, prompt: Sequence[int], output: Sequence[int]) -> Iterator[SpanState]:
        """States after the prompt, after each token at which a span begins or ends or a tool call begins, and after the
        output.

        After the end of a span, ``closing_from`` is the place from which its end was forced.
        """
        patterns, sequence, used = self.span_patterns, [*prompt, *output], 0
        opened = patterns.open_from(prompt)
        begin, end = (len(prompt), len(prompt)) if opened is None else (opened, None)
        match, first = patterns.at_end_of(prompt), begin  # where the span's own tokens begin
        in_call = False
        yield SpanState(len(prompt), begin, end, match)
        for length, token in enumerate(output, len(prompt) + 1):
            match = patterns.after(match, token)
            if end is None and match & patterns.end_bits:
                place = self._closing_from(sequence, begin, first)
                if place is not None and place < length < place + len(self.closing_token_ids):
                    continue  # within a closing that is forced
                place = None if place is None or place >= length else place
                end, used, in_call = length, length - begin, bool(match & patterns.call_bits)
                begin = begin if self.count_from == CountFrom.OUTPUT else length
                yield SpanState(length, begin, end, match, place, used, in_call=in_call)
            elif end is not None and match & patterns.start_bits:
                end, first, in_call = None, length, False
                if self.count_from != CountFrom.OUTPUT:
                    begin = length - (used if self.count_from == CountFrom.SPANS else 0)
                yield SpanState(length, begin, end, match, None, used)
            elif end is not None and match & patterns.call_bits and not in_call:
                in_call = True
                yield SpanState(length, begin, end, match, None, used, in_call=True)
        place = None if end is not None else self._closing_from(sequence, begin, first)
        yield SpanState(len(sequence), begin, end, match, place, used, in_call=in_call)

    def _closing_from(self, sequence: list[int], begin: int, first: int) -> int | None:
        """The place in a sequence at which the hard limit forces the closing of its span, or None.

        The span's own tokens begin at place ``first``; its count begins at ``begin``. The closing begins at the limit
        or at most ``hard_limit_grace`` and ``CHARACTER_TOKENS`` later.
        """
        if self.hard_limit is None:
            return None
        closing, earliest = list(self.closing_token_ids), max(begin + self.hard_limit, first)
        latest = max(begin + self.hard_limit + self.hard_limit_grace, first) + CHARACTER_TOKENS
        for start in range(earliest, min(latest + 1, len(sequence))):
            if sequence[start : start + len(closing)] == closing[: len(sequence) - start]:
                return start
        return None


def parse_guidance(
    custom_params: Mapping[str, Any],
    *,
    thoughts: Thoughts | None = None,
    gamma: float | None = None,
    strength: float | None = None,
    constraint: str = "near",
    has_values: bool = True,
    max_tokens: int | None = None,
) -> GuidanceParams:
    """Validate a request's ``custom_params``.

    Args:
        custom_params: values by name (:func:`read_names`).
        thoughts: the tokenizer's marks of thoughts (:meth:`Thoughts.of`); a ``target_length`` counts from the end of a
            thought. If None, it counts all new tokens; forced texts, and a ``thinking_budget`` without
            ``end_token_ids``, are rejected.
        gamma: default of the field; servers use the value model's (:class:`LenVMConfig`). If None, 0.997.
        strength: default of the field, from the same source. If None, 5.
        constraint: default of ``value_constraint``.
        has_values: whether there is a value model. If False, ``strength`` is 10, and parameters that need values are
            rejected.
        max_tokens: the request's limit of new tokens, of which a thinking budget leaves the ``answer_reserve``. If
            None, there is no limit, and ``soft_max_tokens`` and ``answer_reserve`` are rejected.

    Raises:
        TypeError: ``custom_params`` is not a mapping.
        ValueError: invalid parameters; the message names the field, the value and the accepted values.

    Example:
        >>> parse_guidance({"target_length": 60}).mode.name
        'NEAR'
    """
    thoughts = Thoughts() if thoughts is None else thoughts
    parsed = {name: FIELDS[name].parse(value) for name, value in read_names(custom_params).items()}
    given = _within({name: x for name, x in parsed.items() if x is not None}, thoughts, max_tokens)  # -1: no budget
    has_budget, target = not given.keys().isdisjoint(BUDGETS), _target_fields(given, thoughts)
    if has_budget and target:
        defaults: dict[str, Any] = dict(gamma=gamma, strength=strength, constraint=constraint, has_values=has_values)
        answer = {name: value for name, value in given.items() if name not in _OF_THOUGHTS}
        thought = {name: value for name, value in given.items() if name not in _OF_TARGETS}
        is_total = given.get("target_length_mode") == "total"
        budget = max(given.get(name, 0.0) for name in BUDGETS)
        thought.setdefault("answer_length", max(0.0, target["target_length"] - is_total * budget))
        params = parse_guidance(thought, thoughts=thoughts, **defaults)
        answered = parse_guidance(answer, thoughts=Thoughts(encode=thoughts.encode), **defaults)
        count_from = CountFrom.OUTPUT if is_total else params.count_from
        unit, units = answered.unit, answered.target_units
        return replace(params, answer=answered, count_from=count_from, unit=unit, target_units=units)
    for name in given:
        if FIELDS[name].needs and given.keys().isdisjoint(FIELDS[name].needs[1:]):
            raise ValueError(f"{name} needs {FIELDS[name].needs[0]}")
    strength = strength if has_values else _STRENGTH_WITHOUT_VALUES
    given_defaults = {"gamma": gamma, "strength": strength, "value_constraint": constraint}
    values = {name: field.default for name, field in FIELDS.items()}
    values |= {name: FIELDS[name].parse(default) for name, default in given_defaults.items() if default is not None}
    values |= _budget_fields(given, thoughts) | given | target
    for name in ("end_message", "landing"):
        if isinstance(text := values[name], str):
            if thoughts.encode is None:
                raise ValueError(f"{name} must be a list of token ids without a tokenizer, got {text!r}")
            values[name] = tuple(thoughts.encode(text))
    # A target of all new tokens, or of the tokens after a thought.
    has_total = values["target_value"] is None and values["target_length_mode"] != "remaining"
    has_total &= values["target_length"] is not None and not values["end_token_ids"]
    values |= _landing_fields(values, has_total=has_total)
    # Guidance pauses in a thought, and ends with a tool call.
    if has_total and (thoughts.starts or thoughts.tool_calls):
        is_total = values["target_length_mode"] == "total"
        values |= dict(pause_token_ids=thoughts.starts, start_token_ids=thoughts.ends if thoughts.starts else ())
        values |= dict(call_token_ids=thoughts.tool_calls, allow_eos=True)
        values["count_from"] = CountFrom.OUTPUT if is_total else CountFrom.SPAN
    elif has_budget:
        values["call_token_ids"] = () if "end_token_ids" in given else thoughts.tool_calls
        values["count_from"] = CountFrom.SPANS if "thinking_budget_total" in given else CountFrom.SPAN
    # The device table has MAX_SPAN_TOKENS columns for ends and starts, and MAX_CLOSING_TOKENS for a closing.
    ends, starts, message = values["end_token_ids"], values["start_token_ids"], values["end_message"]
    others = values.get("pause_token_ids", ()) + values.get("call_token_ids", ())
    if (total := sum(map(len, ends + starts))) > (most := MAX_SPAN_TOKENS - sum(map(len, others))):
        accepted = f"at most {most} tokens together"
        raise ValueError(f"end_token_ids and start_token_ids must have {accepted}, got {total}")
    if message and len(message) > (most := MAX_CLOSING_TOKENS - len(ends[0])):
        raise ValueError(f"end_message must have at most {most} tokens, got {len(message)}")

    target_length, counts_down = values["target_length"], values["target_length_mode"] != "remaining"
    if values["target_value"] is not None:  # takes precedence, as in the fork
        target_length = math.log1p(-values["target_value"]) / math.log(values["gamma"])
        counts_down = False
    has_target = target_length is not None
    mode = Mode[values["value_constraint" if has_target else "value_mode"].upper()]
    neutral = 0 if mode in (Mode.CENTERED_EXP, Mode.VALUE_BIAS) else 1
    if not has_target and (values["value_scale"] == neutral or (mode == Mode.MUL and values["value_scale"] <= 0)):
        mode = Mode.UNGUIDED
    is_near = mode in NEAR_CONSTRAINTS
    for name in ("strength", "tolerance"):
        if name in given and not is_near:
            raise ValueError(f"{name} needs value_constraint near, ge_near or le_near")
    if is_near and values["min_end_prob"] is None:
        values["min_end_prob"] = _MIN_END_PROB
    scale = values["strength" if is_near else "value_scale"]
    values |= dict(
        mode=mode,
        scale=scale,
        target_length=target_length,
        counts_down=counts_down and has_target,
        tolerance=min(values["tolerance"] * target_length, FP32_MAX - target_length) if has_target else 0.0,
        least_share=_LEAST_SHARE if has_values and is_near and scale > 0 else 0.0,
        entropy_threshold=values["value_entropy_threshold"],
        token_temperature_scale=_token_divisors(given),
        end_message=values["landing"] or values["end_message"],
    )
    params = GuidanceParams(**{each.name: values[each.name] for each in fields(GuidanceParams) if each.name in values})
    if not has_values:
        check_without_values(params)
    return params


def check_without_values(params: GuidanceParams) -> None:
    """Raise ValueError, naming the field, if guidance of a request needs a value model."""
    if params.answer is not None:
        check_without_values(params.answer)
    name = params.mode.name.lower()
    if params.mode not in (*NEAR_CONSTRAINTS, Mode.UNGUIDED):
        if params.target_length is None:
            raise ValueError(f"value_mode {name} needs a value model; without one, give a target_length")
        accepted = ", ".join(mode.name.lower() for mode in NEAR_CONSTRAINTS)
        raise ValueError(f"value_constraint must be one of {accepted} without a value model, got {name!r}")
    if params.return_values:
        raise ValueError("return_values must not be given without a value model, got True")
    if params.value_min is not None:
        raise ValueError(f"value_min must not be given without a value model, got {params.value_min}")


def check_with_probe(params: GuidanceParams) -> None:
    """Raise ValueError, naming the field, if a probe cannot guide a request."""
    if params.mode in NEAR_CONSTRAINTS and params.value_min is not None:
        # In this mode, the values that guide are not the values that predict lengths.
        name = params.mode.name.lower()
        raise ValueError(f"value_min must be absent with {name} and a probe, got {params.value_min}")


def read_names(
    custom_params: Mapping[str, Any], *, others: Literal["rejected", "ignored", "shared"] = "rejected"
) -> dict[str, Any]:
    """The fields in ``custom_params`` and in its :data:`NAMESPACE`, by main name, with values as given.

    Names are compared without case, hyphens and underscores. A field that is None is ignored.

    Args:
        custom_params: values by name.
        others: handling of names outside the namespace that are no fields. ``ignored``: ignores the names of other
            components, but rejects names that resemble a field and the limits of other engines. ``shared``: also
            ignores short names of fields and common words (``Field.is_common``) if there is no other field outside the
            namespace.

    Raises:
        TypeError: ``custom_params`` is not a mapping.
        ValueError: a name or the namespace is invalid, or a field is given twice.
    """
    if not isinstance(custom_params, Mapping):
        raise TypeError(f"custom_params must be a mapping of field names to values, got {type(custom_params).__name__}")
    flat = dict(custom_params)
    space = {} if (inside := flat.pop(NAMESPACE, None)) is None else read_json(inside)
    if not isinstance(space, Mapping):
        raise ValueError(f"{NAMESPACE} must be an object of guidance parameters, or its JSON text, got {space!r}")
    names = _NAMES
    if others == "shared":
        is_ours = any(x is not None and _key(name) in _DISTINCTIVE | _LIMITS.keys() for name, x in flat.items())
        # A misspelt field is rejected in any case.
        flat = flat if is_ours else {name: x for name, x in flat.items() if _key(name) not in _NAMES}
        names = _SHARED
    given: dict[str, Any] = {}
    for values, accepted in ((flat, names), (space, _NAMES)):
        for name, value in values.items():
            if value is None:
                continue
            main = _main_name(name, accepted, is_known=values is space or others == "rejected")
            if main in given:
                every = ", ".join([*FIELDS[main].names, *FIELDS[main].elsewhere.split()])
                raise ValueError(f"{main} is given twice; give one of {every}")
            if main is not None:
                given[main] = value
    return given


def _main_name(name: Any, names: Mapping[str, str], *, is_known: bool) -> str | None:
    """The main name of a field, looked up in ``names``. None if it is another component's name.

    With ``is_known``, the name cannot be another component's.
    """
    key = _key(name)
    if key in names:
        return names[key]
    if key in _LIMITS:
        raise ValueError(f"{name} is not a guidance parameter: give {_LIMITS[key]}")
    if key in _SHORT:
        raise ValueError(f"{name} must be {_NAMES[key]}, or be inside {NAMESPACE}")
    if close := difflib.get_close_matches(key, names, n=1, cutoff=0.85):
        raise ValueError(f"{name} is not a guidance parameter; did you mean {names[close[0]]}?")
    if is_known:
        raise ValueError(f"{name} is not a guidance parameter; accepted are {', '.join(FIELDS)}")
    return None


def _within(given: Mapping[str, Any], thoughts: Thoughts, max_tokens: int | None) -> dict[str, Any]:
    """Reduce budgets so that an answer fits into ``max_tokens``, and add the target of a soft ``max_tokens``."""
    fields = dict(given)
    is_soft, reserve = fields.pop("soft_max_tokens", False), fields.pop("answer_reserve", None)
    if reserve is not None:
        if not is_soft and fields.keys().isdisjoint(BUDGETS):
            raise ValueError("answer_reserve needs a thinking_budget, a thinking_budget_total or soft_max_tokens")
        if reserve >= (max_tokens or 0):
            raise ValueError(f"answer_reserve must be less than the limit of new tokens, {max_tokens}, got {reserve}")
    if max_tokens is None:
        if is_soft:
            raise ValueError("soft_max_tokens needs a limit of new tokens, such as max_tokens")
        return fields
    reserve = _ANSWER_SHARE * max_tokens if reserve is None else reserve
    most, most_thought = _SOFT_SHARE * max_tokens, (max_tokens - reserve) / _LIMIT_OF_BUDGET
    if is_soft:
        if fields.keys().isdisjoint((*TARGETS, "target_value", "end_token_ids")):
            fields |= dict(target_length=most, target_length_mode="total")
            fields.setdefault("value_constraint", "le_near")
        fields |= {name: min(fields[name], most / _UNITS[name][1]) for name in TARGETS if name in fields}
        if thoughts.ends and fields.keys().isdisjoint((*BUDGETS, "end_token_ids", "landing")):
            fields["thinking_budget_total"] = most_thought
    return fields | {name: min(fields[name], most_thought) for name in BUDGETS if name in fields}


def _target_fields(given: Mapping[str, Any], thoughts: Thoughts) -> dict[str, Any]:
    """The target in tokens, and its unit."""
    names = [name for name in TARGETS if name in given]
    if len(names) > 1:
        raise ValueError(f"give one of {', '.join(TARGETS)}, got {' and '.join(names)}")
    if not names or names == ["target_length"]:
        return {name: given[name] for name in names}
    (name,) = names
    if thoughts.encode is None:
        raise ValueError(f"{name} needs a tokenizer, and none was given")
    others = {"target_value", "landing"} | (set() if given.keys() & set(BUDGETS) else {"end_token_ids"})
    if refused := sorted(others & given.keys()):
        raise ValueError(f"{refused[0]} cannot be combined with {name}")
    if (mode := given.get("target_length_mode", "answer")) != "answer":
        raise ValueError(f"target_length_mode must be answer with {name}, got {mode!r}")
    unit, tokens = _UNITS[name]
    return dict(target_length=given[name] * tokens, unit=unit, target_units=given[name], allow_eos=True)


def _budget_fields(given: Mapping[str, Any], thoughts: Thoughts) -> dict[str, Any]:
    budgets = [given[name] for name in BUDGETS if name in given]
    if not budgets:
        return {}
    if len(budgets) > 1:
        raise ValueError(f"give one of {' and '.join(BUDGETS)}, not both")
    if "target_value" in given or given.get("target_length_mode") == "remaining":
        raise ValueError("thinking_budget is a target; the only other target allowed is a target_length of the answer")
    (budget,) = budgets
    implied = dict(target_length=budget, value_constraint="le_near", hard_limit=math.ceil(_LIMIT_OF_BUDGET * budget))
    if "end_token_ids" in given:
        return implied
    if not thoughts.ends:
        raise ValueError("thinking_budget needs end_token_ids: no token is known to end a thought")
    return implied | dict(end_token_ids=thoughts.ends, start_token_ids=thoughts.starts)


def _landing_fields(values: Mapping[str, Any], *, has_total: bool) -> dict[str, Any]:
    landing, room = values["landing"], values["landing_tokens"]
    if not landing:
        return {}
    if not has_total:
        raise ValueError("landing needs a target_length of all new tokens, and neither end_token_ids nor a budget")
    if len(landing) > MAX_CLOSING_TOKENS:
        raise ValueError(f"landing must have at most {MAX_CLOSING_TOKENS} tokens, got {len(landing)}")
    longest = math.ceil(values["target_length"] * (1 + values["tolerance"]))
    return dict(
        allow_eos=True,
        hard_limit=min(max(1, longest - room), 2**31 - 2),
        hard_limit_grace=max(0, room - len(landing) - _ANSWER_AFTER_LANDING),
    )


def _token_divisors(given: Mapping[str, Any]) -> dict[int, float]:
    """``token_temperature_scale``, also from ``boosted_token_ids`` and ``token_temp_divisor``."""
    ids, divisor = given.get("boosted_token_ids"), given.get("token_temp_divisor")
    if (ids is None) != (divisor is None):
        raise ValueError("boosted_token_ids and token_temp_divisor must be given together")
    if ids is None or divisor is None:
        return given.get("token_temperature_scale", {})
    if "token_temperature_scale" in given:
        raise ValueError("give token_temperature_scale or boosted_token_ids with token_temp_divisor, not both")
    return dict.fromkeys(ids, divisor)
