"""A request's guidance parameters, parsed and validated once, when it arrives."""

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
from lenvm_kernels.reference.limit_span import CHARACTER_TOKENS
from lenvm_kernels.types import SENTENCE_TOKENS, WORD_TOKENS, CountFrom, Mode, TextBreak


def _key(name: Any) -> str:
    """A name without case, hyphens and underscores."""
    return str(name).replace("-", "").replace("_", "").lower()


# Main names by key: of all fields, without short names, and without common words.
_NAMES = {_key(name): each.name for each in FIELDS.values() for name in (*each.names, *each.elsewhere.split())}
_SHORT = {_key(name) for each in FIELDS.values() for name in each.names[1:]}
_SHARED = {key: name for key, name in _NAMES.items() if key not in _SHORT}
_DISTINCTIVE = {key for key, name in _SHARED.items() if not FIELDS[name].is_common}
# Limits of other engines, which guidance does not have.
_LIMITS = {
    "maxlength": "target_length with the value_constraint le_near, or the engine's limit of new tokens",
    "minlength": "target_length with the value_constraint ge_near, or the engine's minimum of new tokens",
}
_LIMIT_OF_BUDGET = 1.25
# Share of max_tokens that a thought leaves for the answer, and that a soft max_tokens aims at.
_ANSWER_SHARE, _SOFT_SHARE = 0.2, 0.8
# An end less probable than this would cut a sentence in two.
_MIN_END_PROB = 1e-4
# Values boost tokens of any probability, at the cost of text quality. Tokens below this share of the largest
# probability bring a length no closer to its target (docs/modes-and-parameters.md), and need not be scored.
_LEAST_SHARE = 0.05
# Tokens reserved for the answer after the latest landing, such as "$18.50." and the end.
_ANSWER_AFTER_LANDING = 8
# Without values the strength moves only ends and the tokens before them.
_STRENGTH_WITHOUT_VALUES = 10.0
# If a request has a budget and a target, the answer has none of the first fields, and the thought none of the second.
_OF_THOUGHTS = {
    *("thinking_budget", "thinking_budget_total", "end_token_ids", "start_token_ids", "allow_eos", "answer_length"),
    *("hard_limit", "hard_limit_grace", "end_message", "landing", "landing_tokens"),
}
_OF_TARGETS = {*TARGETS, "target_length_mode", "value_constraint", "tolerance"}
# What a target counts, and the expected tokens of a unit.
_UNITS = {
    "target_length": (TextBreak.NONE, 1.0),
    "target_words": (TextBreak.WORD, WORD_TOKENS),
    "target_sentences": (TextBreak.SENTENCE, SENTENCE_TOKENS),
}
NEAR_CONSTRAINTS = (Mode.NEAR, Mode.GE_NEAR, Mode.LE_NEAR)


@dataclass(frozen=True)
class GuidanceParams:
    """A request's validated parameters, made by :func:`parse_guidance`.

    They are the request's fields (:data:`FIELDS`), except:

    Attributes:
        mode: how candidates are reweighted; ``Mode.UNGUIDED`` for neutral parameters, a constraint for a target.
        scale: ``value_scale``, or the ``strength`` of a near constraint.
        target_length: tokens, also for a ``target_value`` or a ``thinking_budget``. If None, there is no target.
        counts_down: the generated tokens of the span are subtracted from ``target_length``.
        tolerance: tokens; the near constraints treat all lengths within it of the target alike.
        least_share: share of the largest probability below which tokens are no candidates.
        entropy_threshold: ``value_entropy_threshold``.
        count_from: place from which a span counts its tokens.
        unit: the ends or starts that the target of the answer counts; ``TextBreak.NONE`` for tokens.
        target_units: the target in this unit.
        pause_token_ids: sequences that end a span without being its aim: starts of thoughts, whose ends are
            ``start_token_ids``. Without ``end_token_ids``, the first span begins with the output.
        call_token_ids: further ones that are ignored in the prompt: starts of tool calls.
        end_message: tokens forced before the end; without ``end_token_ids``, a landing, which is forced once.
        answer: parameters after the span: the target of a request that also has a ``thinking_budget``. If None, the
            request is unguided there.
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
        """Whether the request takes part in guided steps, which also find the end of a span."""
        return self.mode != Mode.UNGUIDED or self.return_values or self.has_span

    @property
    def has_span(self) -> bool:
        """Whether :func:`limit_span` must read the request: it has a span or a landing, or does not count tokens."""
        return bool(self.end_token_ids or self.pause_token_ids or self.call_token_ids or self.end_message or self.unit)

    @cached_property
    def span_patterns(self) -> SpanPatterns:
        """The sequences that begin and end a span."""
        ends = self.end_token_ids + self.pause_token_ids
        return SpanPatterns.of(ends, self.start_token_ids, self.call_token_ids, begins_open=not self.end_token_ids)

    @property
    def closing_token_ids(self) -> tuple[int, ...]:
        """The tokens that a hard limit forces, in order: ``end_message``, and the first end."""
        return self.end_message + (self.end_token_ids[0] if self.end_token_ids else ())

    def span_state(
        self, prompt: Sequence[int], output: Sequence[int] = (), text_breaks: Sequence[int] = ()
    ) -> SpanState:
        """The state of the request's span, after ``output``. Without an end sequence, the whole output is one span.

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
        """The ``lenvm`` of a response (see Responses in docs/modes-and-parameters.md). If None, there was no guidance.

        If the last token of ``output`` is one of the ``end_tokens`` of outputs, it is not counted.
        """
        if self.mode == Mode.UNGUIDED and not self.has_span:
            return None
        output = output[:-1] if len(output) and output[-1] in end_tokens else output
        states, patterns, goal = [*self._span_states(prompt, output)], self.span_patterns, self.answer or self
        last, thought, length = states[-1], 0, 0
        end = last.seen  # of the answer
        for before, after in pairwise(states):
            was_open, tokens = before.end is None, after.seen - before.seen
            if (was_open, before.in_call) != (after.end is None, after.in_call):  # by the last tokens
                marks = patterns.end_bits if was_open else patterns.start_bits | patterns.call_bits
                mark = min(tokens, patterns.length_of(after.match & marks))
                tokens, length = tokens - mark, after.used - mark if was_open else length
                end = after.seen - mark if after.in_call else last.seen
            # Either the span is a thought, or it is the answer, which thoughts interrupt and a tool call ends.
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
        """The states after the prompt, after each token that ends or begins a span or begins a tool call, and after the
        output.

        After the end of a span, ``closing_from`` is the place from which this end was forced.
        """
        patterns, sequence, used = self.span_patterns, [*prompt, *output], 0
        opened = patterns.open_from(prompt)
        begin, end = (len(prompt), len(prompt)) if opened is None else (opened, None)
        match, first = patterns.at_end_of(prompt), begin  # place of the span's own first token
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
        """The place in a sequence at which the hard limit forces the closing of its span. If None, nowhere.

        The span has its own tokens from place ``first`` on, and counts from ``begin``. The closing begins at the limit,
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
        thoughts: the tokenizer's marks of thoughts (:meth:`Thoughts.of`): a ``target_length`` counts from the end of a
            thought. If None, it counts all new tokens, and a ``thinking_budget`` without ``end_token_ids`` and texts
            that are forced are rejected.
        gamma: default of the field; a server takes it from the value model (:class:`LenVMConfig`). If None, 0.997.
        strength: default of the field, from the same source. If None, 5.
        constraint: default of ``value_constraint``.
        has_values: whether there is a value model. If not, ``strength`` is 10, and values must not be needed.
        max_tokens: the request's limit of new tokens, of which a thinking budget leaves the ``answer_reserve``. If
            None, there is no limit, and ``soft_max_tokens`` and ``answer_reserve`` are rejected.

    Raises:
        TypeError: ``custom_params`` is not a mapping.
        ValueError: naming the field, what came and what is accepted.

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
                raise ValueError(f"{name} must be a list of token ids where no tokenizer is known, got {text!r}")
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
    # A row of the device table has MAX_SPAN_TOKENS columns for ends and starts, and MAX_CLOSING_TOKENS for a closing.
    ends, starts, message = values["end_token_ids"], values["start_token_ids"], values["end_message"]
    others = values.get("pause_token_ids", ()) + values.get("call_token_ids", ())
    if (total := sum(map(len, ends + starts))) > (most := MAX_SPAN_TOKENS - sum(map(len, others))):
        accepted = f"of at most {most} tokens together"
        raise ValueError(f"end_token_ids and start_token_ids must be {accepted}, got {total}")
    if message and len(message) > (most := MAX_CLOSING_TOKENS - len(ends[0])):
        raise ValueError(f"end_message must be of at most {most} tokens, got {len(message)}")

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
            raise ValueError(f"{name} needs a value_constraint of near, ge_near or le_near")
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
    """Raise ValueError, naming the field, unless a request can be guided by its end tokens alone."""
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
    """Raise ValueError, naming the field, unless a request can be guided by a probe's values."""
    if params.mode in NEAR_CONSTRAINTS and params.value_min is not None:
        # There the values that guide are not the values that predict.
        name = params.mode.name.lower()
        raise ValueError(f"value_min must be absent with {name} and a probe, got {params.value_min}")


def read_names(
    custom_params: Mapping[str, Any], *, others: Literal["rejected", "ignored", "shared"] = "rejected"
) -> dict[str, Any]:
    """The given fields of ``custom_params`` and its :data:`NAMESPACE` by their main names, with values as given.

    Case, hyphens and underscores of names are ignored, and so is a field that is None.

    Args:
        custom_params: values by name.
        others: names outside the namespace that are no fields. ``ignored``: names of other components are ignored,
            except names that look like a misspelt field and names that other engines give to limits. ``shared``: in
            addition, short names of fields and common words (``Field.is_common``) are no fields if no other field is
            there.

    Raises:
        TypeError: ``custom_params`` is not a mapping.
        ValueError: a name or the namespace is not accepted, or a field is given twice.
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
                raise ValueError(f"{main} is given twice: accepted is one of {every}")
            if main is not None:
                given[main] = value
    return given


def _main_name(name: Any, names: Mapping[str, str], *, is_known: bool) -> str | None:
    """The main name of a field, by ``names`` that are accepted. If None, another component's name.

    With ``is_known``, there are no other components.
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
    """The fields with budgets that leave room for an answer, and a target if ``max_tokens`` is soft."""
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
    """The target in tokens, and what it counts."""
    names = [name for name in TARGETS if name in given]
    if len(names) > 1:
        raise ValueError(f"give one of {', '.join(TARGETS)}, got {' and '.join(names)}")
    if not names or names == ["target_length"]:
        return {name: given[name] for name in names}
    (name,) = names
    if thoughts.encode is None:
        raise ValueError(f"{name} needs a tokenizer, and none is known")
    others = {"target_value", "landing"} | (set() if given.keys() & set(BUDGETS) else {"end_token_ids"})
    if refused := sorted(others & given.keys()):
        raise ValueError(f"{refused[0]} must not be given together with {name}")
    if (mode := given.get("target_length_mode", "answer")) != "answer":
        raise ValueError(f"target_length_mode must be answer together with {name}, got {mode!r}")
    unit, tokens = _UNITS[name]
    return dict(target_length=given[name] * tokens, unit=unit, target_units=given[name], allow_eos=True)


def _budget_fields(given: Mapping[str, Any], thoughts: Thoughts) -> dict[str, Any]:
    budgets = [given[name] for name in BUDGETS if name in given]
    if not budgets:
        return {}
    if len(budgets) > 1:
        raise ValueError(f"give one of {' and '.join(BUDGETS)}, not both")
    if "target_value" in given or given.get("target_length_mode") == "remaining":
        raise ValueError("thinking_budget is itself a target: the only other one can be a target_length of the answer")
    (budget,) = budgets
    implied = dict(target_length=budget, value_constraint="le_near", hard_limit=math.ceil(_LIMIT_OF_BUDGET * budget))
    if "end_token_ids" in given:
        return implied
    if not thoughts.ends:
        raise ValueError("thinking_budget needs end_token_ids: no token is known that ends a thought")
    return implied | dict(end_token_ids=thoughts.ends, start_token_ids=thoughts.starts)


def _landing_fields(values: Mapping[str, Any], *, has_total: bool) -> dict[str, Any]:
    landing, room = values["landing"], values["landing_tokens"]
    if not landing:
        return {}
    if not has_total:
        raise ValueError("landing needs a target_length of all new tokens, and neither end_token_ids nor a budget")
    if len(landing) > MAX_CLOSING_TOKENS:
        raise ValueError(f"landing must be of at most {MAX_CLOSING_TOKENS} tokens, got {len(landing)}")
    longest = math.ceil(values["target_length"] * (1 + values["tolerance"]))
    return dict(
        allow_eos=True,
        hard_limit=min(max(1, longest - room), 2**31 - 2),
        hard_limit_grace=max(0, room - len(landing) - _ANSWER_AFTER_LANDING),
    )


def _token_divisors(given: Mapping[str, Any]) -> dict[int, float]:
    """``token_temperature_scale``, or the short form ``boosted_token_ids`` with ``token_temp_divisor``."""
    ids, divisor = given.get("boosted_token_ids"), given.get("token_temp_divisor")
    if (ids is None) != (divisor is None):
        raise ValueError("boosted_token_ids and token_temp_divisor must be given together")
    if ids is None or divisor is None:
        return given.get("token_temperature_scale", {})
    if "token_temperature_scale" in given:
        raise ValueError("give token_temperature_scale or boosted_token_ids with token_temp_divisor, not both")
    return dict.fromkeys(ids, divisor)
