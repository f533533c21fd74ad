"""The fields of a request's ``custom_params``: parser, command-line flag and row in the docs.

Names and defaults follow the LenVM fork of SGLang (section Parameters of the specification). This module does not
import torch, so that the command line starts fast.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import ge, gt, lt
from typing import Any

from lenvm_kernels.guidance.spans import TokenSequences

DEFAULT_GAMMA = 0.997  # as in the fork
MAX_DIVISOR = 1e6  # so that no logit becomes infinite
MAX_SPAN_ENDS = 4  # maximum number of end sequences, and of start sequences
FP32_MAX = (2 - 2**-23) * 2.0**127
_COMPARISONS = {">": gt, ">=": ge, "<": lt}
# Other accepted spellings of words.
_SYNONYMS = {
    "total": "budget",
    "eq": "= == equal equals",
    "ge": ">= > gte greater_equal",
    "le": "<= < lte less_equal",
    "eq_soft": "soft equal_soft",
}

BUDGETS = ("thinking_budget", "thinking_budget_total")
TARGETS = ("target_length", "target_words", "target_sentences")
_A_TARGET = ("a target: give target_length or target_value as well", *TARGETS, "target_value", *BUDGETS)
_A_SPAN = ("end_token_ids, or a thinking_budget", "end_token_ids", *BUDGETS)
_A_LIMIT = ("a hard_limit, or a thinking_budget", "hard_limit", *BUDGETS)
_A_LANDING = ("a landing", "landing")


@dataclass(frozen=True)
class Field:
    """A field of a request. Servers accept its short names in the namespace only.

    If ``is_common``, other components may use the name; servers read it outside the namespace only next to other
    fields.
    """

    parser: Callable[[Field, Any], Any]  # computes the field's value from the given one
    spellings: str  # the field's name, and short names in the fork
    meaning: str  # a sentence without capital letter and full stop
    default: Any = None  # the value of requests without the field
    limits: str = ""  # the accepted values, briefly; empty if the meaning states them
    needs: tuple[str, ...] = ()  # a requirement for the error message, then the fields of which one is required
    metavar: str | None = None  # of the command-line flag. If None, the command line has no flag for the field
    elsewhere: str = ""  # names of the parameter in other engines and APIs
    is_common: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The canonical name, and the short names in the fork."""
        return tuple(self.spellings.split())

    @property
    def name(self) -> str:
        """The canonical name."""
        return self.names[0]

    def parse(self, given: Any) -> Any:
        """The value of the field, independent of other fields.

        Raises:
            ValueError: invalid value; the message names the field, the value and the accepted values.
        """
        return self.parser(self, given)

    def rejected(self, given: Any, must: str) -> ValueError:
        """The error for a value that is not accepted."""
        return ValueError(f"{self.name} must {must}, got {given!r}")


def _number(field: Field, given: Any, kind: str = "a finite number") -> float:
    """A finite number within the field's limits, which are comparisons joined by "and"."""
    try:
        number = float("nan") if isinstance(given, bool) else float(given)
    except (TypeError, ValueError, OverflowError):
        number = float("nan")
    is_accepted = abs(number) <= FP32_MAX  # NaN compares false
    for limit in filter(None, field.limits.split(" and ")):
        sign, bound = limit.split()
        is_accepted &= _COMPARISONS[sign](number, float(bound))
    if not is_accepted:
        raise field.rejected(given, f"be {kind} {field.limits}".rstrip())
    return number


def _integer(field: Field, given: Any) -> int:
    number = _number(field, given, "an integer")
    if number % 1:
        raise field.rejected(given, f"be an integer {field.limits}")
    return int(number)


def _budget(field: Field, given: Any) -> float | None:
    """A number within the limits. -1 means no budget."""
    return None if given in (-1, "-1") else _number(field, given, "-1, or a finite number")


def _word(field: Field, given: Any) -> str:
    words = field.limits.removeprefix("one of ").split(", ")
    known = {spelling: word for word in words for spelling in (word, *_SYNONYMS.get(word, "").split())}
    word = given.strip().lower() if isinstance(given, str) else ""
    if word not in known:
        raise field.rejected(given, f"be one of {', '.join(known)}")
    return known[word]


def _switch(field: Field, given: Any) -> bool:
    """True, false, 1 or 0; vLLM converts booleans to integers."""
    if given not in (0, 1):
        raise field.rejected(given, "be true or false")
    return bool(given)


def _sequences(field: Field, given: Any, least: int = 1) -> TokenSequences:
    """A list of token ids and of lists of token ids, or its JSON text. A bare id is a sequence of one token."""
    given = read_json(given)
    if not _is_list(given) or not least <= len(given) <= MAX_SPAN_ENDS:
        raise field.rejected(given, f"be a list of {least} to {MAX_SPAN_ENDS} token ids, or its JSON text")
    lists = [each if _is_list(each) else [each] for each in given]
    if not all(tokens and all(map(_is_token_id, tokens)) for tokens in lists):
        raise field.rejected(given, f"contain {_TOKEN_IDS}, or lists of them")
    return tuple(dict.fromkeys(map(tuple, lists)))


def _text(field: Field, given: Any) -> str | tuple[int, ...]:
    """A text, or its token ids."""
    if isinstance(given, str) and not any("\ud800" <= char <= "\udfff" for char in given):  # tokenizers reject these
        return given
    if not _is_list(given) or not all(map(_is_token_id, given)):
        raise field.rejected(given, f"be a text in Unicode, or a list of {_TOKEN_IDS}")
    return tuple(given)


def _divisors(field: Field, given: Any) -> dict[int, float]:
    """A mapping of token ids to divisors of their temperature, or its JSON text."""
    given = read_json(given)
    if not isinstance(given, Mapping):
        raise field.rejected(given, "be a mapping of token id to divisor, or its JSON text")
    return {_digits(field, t): replace(_DIVISOR, spellings=f"{field.name}[{t}]").parse(x) for t, x in given.items()}


def _token_ids(field: Field, given: Any) -> tuple[int, ...]:
    if not _is_list(given):
        raise field.rejected(given, "be a list of token ids")
    return tuple(_digits(field, token) for token in given)


def read_json(given: Any) -> Any:
    """Parse a JSON text, because some engines accept only scalars. Other values are returned unchanged."""
    try:
        return json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        return given


def _digits(field: Field, given: Any) -> int:
    """A token id, or its digits, because the keys of a JSON object are strings."""
    if isinstance(given, bool) or not str(given).isdecimal():
        raise field.rejected(given, "contain token ids >= 0")
    return int(given)


_TOKEN_IDS = "token ids >= 0 and < 2**31"


def _is_list(given: Any) -> bool:
    return isinstance(given, Sequence) and not isinstance(given, str)


def _is_token_id(given: Any) -> bool:
    return isinstance(given, int) and not isinstance(given, bool) and 0 <= given < 2**31


Number = partial(Field, _number, metavar="X")
Integer = partial(Field, _integer, metavar="N")
Word = partial(Field, _word, metavar="WORD")
_DIVISOR = Number(
    "token_temp_divisor", "the divisor of boosted_token_ids", limits=f"> 0 and < {MAX_DIVISOR:g}", metavar=None
)
_ALL = (
    Word(
        "value_mode mode",
        "how values reweight the candidates",
        "mul",
        "one of mul, linear, exp, length_mul, centered_exp, value_bias",
    ),
    Number(
        "value_scale scale",
        "strength of the mode; centered_exp, value_bias: < 0 shorter, > 0 longer; other modes: < 1 shorter, > 1 longer",
        1.0,
    ),
    Number(
        "gamma length_gamma",
        "discount that the value model was trained with; turns values into lengths; servers have their own default",
        DEFAULT_GAMMA,
        "> 0 and < 1",
        is_common=True,
    ),
    Number(
        "target_length", "target in tokens; its constraint replaces the mode", limits=">= 0", elsewhere="target_tokens"
    ),
    Number(
        "target_words",
        "target in words separated by blanks; tokens per word are estimated from the text so far",
        limits=">= 0 and < 1e+06",
    ),
    Number("target_sentences", "target in sentences", limits=">= 0 and < 1e+06"),
    Word(
        "target_length_mode length_mode",
        "answer, target_length counts the tokens after a thought; total, all new tokens, thoughts included; "
        "remaining, the tokens that remain at every step",
        "answer",
        "one of answer, total, remaining",
    ),
    Number("target_value", "the target as a value; takes precedence over target_length", limits=">= 0 and < 1"),
    Word(
        "value_constraint constraint cmp op",
        "how a target binds: eq, nearest candidate; ge, le, longest or shortest candidate; eq_soft, on average; "
        "ge_soft, le_soft, as eq_soft where the average is shorter or longer; near, candidates weighted by "
        "their distance; ge_near, le_near, as near, only for shorter or longer candidates",
        "near",
        "one of eq, ge, le, eq_soft, ge_soft, le_soft, near, ge_near, le_near",
        _A_TARGET,
    ),
    Number(
        "strength",
        "how fast near, ge_near and le_near lower probability with distance; 0, not at all; default "
        "without a value model 10; a value model may have its own default",
        5.0,
        ">= 0",
        is_common=True,
    ),
    Number(
        "min_end_prob",
        "probability from which tokens that end the output are candidates in spite of top_k, top_p and min_p; default "
        "with near, ge_near and le_near 0.0001; lower after sentences and lines and past a total target, higher "
        "elsewhere",
        None,
        ">= 0",
        _A_TARGET,
    ),
    Number(
        "tolerance",
        "share of the target within which near, ge_near and le_near treat all lengths as equal",
        0.0,
        ">= 0 and < 1",
        is_common=True,
    ),
    Field(
        _switch,
        "soft_max_tokens soft",
        "end with a sentence instead of a cut at max_tokens: the target is four fifths of it, with le_near, unless "
        "another is given; a thought takes at most the same number of tokens",
        False,
    ),
    # The bound makes its hard_limit an int32.
    Field(
        _budget,
        "thinking_budget",
        "average tokens of a thought: a target with le_near that holds until the thought ends; target_length then "
        "counts from the end of the thought; 0, no thought; -1, no budget",
        limits=">= 0 and < 1e+09",
        elsewhere="thinking_token_budget thinking_budget_tokens max_thinking_tokens reasoning_budget "
        "reasoning_max_tokens budget_tokens",
        metavar="N",
    ),
    Field(
        _budget,
        "thinking_budget_total",
        "thinking_budget of all thoughts of an output together",
        limits=">= 0 and < 1e+09",
        metavar="N",
    ),
    Integer(
        "answer_reserve",
        "tokens of max_tokens that a thinking_budget or soft_max_tokens leaves for the answer; default a fifth",
        limits=">= 0 and < 1e+09",
    ),
    Field(
        _sequences,
        "end_token_ids",
        "up to 4 tokens that end the guided span, such as a thought, and have value 0; each may be a list of tokens, "
        "of which the first has value 0",
        (),
    ),
    Field(
        partial(_sequences, least=0),
        "start_token_ids",
        "up to 4 tokens or sequences that begin a span; default: the answer begins the only span; with a "
        "thinking_budget without end_token_ids, the tokenizer's start of a thought, if it has one",
        (),
        needs=_A_SPAN,
    ),
    Field(_switch, "allow_eos", "let the sequence end before one of end_token_ids", False, needs=_A_SPAN),
    Number("answer_length", "tokens after the span, subtracted from predicted lengths", 0.0, ">= 0", _A_SPAN),
    Integer(
        "hard_limit",
        "tokens of a span at which the first of end_token_ids is forced; 1.25 times a thinking_budget by default",
        limits=">= 1 and < 2147483647",
        needs=_A_SPAN,
    ),
    Integer(
        "hard_limit_grace", "tokens that the hard_limit waits for the end of a line", 0, ">= 0 and < 1e+06", _A_LIMIT
    ),
    Field(
        _text,
        "end_message",
        "words or token ids forced at the hard_limit before the end token; up to 32 tokens including it",
        (),
        needs=_A_LIMIT,
    ),
    Field(
        _text,
        "landing",
        "words or up to 32 token ids that are forced once when target_length leaves just enough tokens for the answer, "
        "if possible at the end of a line; the output then continues and ends by itself",
        (),
        metavar="TEXT",
    ),
    Integer("landing_tokens", "tokens of target_length left at the landing", 24, ">= 1 and < 1e+06", _A_LANDING),
    Number("value_min", "minimum expected value of a step; steps below it are not reweighted"),
    Number(
        "value_entropy_threshold entropy_threshold",
        "entropy of the candidates in nats up to which steps are not reweighted",
        limits=">= 0",
    ),
    Field(
        _divisors,
        "token_temperature_scale",
        "divisors of the temperature of single tokens, by token id; > 0 and < 1e+06",
        metavar="ID=D",
    ),
    Field(_token_ids, "boosted_token_ids", "token ids of a token_temperature_scale with one divisor for all"),
    _DIVISOR,
    Integer(
        "value_stride",
        "guide every n-th step of the engine, and every step that may end the output",
        limits=">= 1 and < 1e+06",
    ),
    Field(_switch, "return_values", "predict lengths of the prompt and of each token, guided or not", False),
    Field(
        _switch,
        "guided_logprobs",
        "return log-probabilities of the guided candidates instead of the base model's; in SGLang and vLLM",
        False,
    ),
)
FIELDS: dict[str, Field] = {each.name: each for each in _ALL}
NAMESPACE = "lenvm"  # a dictionary of fields among parameters of other components
# Fields of chat requests that select the defaults of a server, and the name under which a front end adds them to the
# parameters of a request.
SELECTORS, SELECTED = ("reasoning_effort", "verbosity"), "lenvm_selected"


def with_selected(custom_params: Mapping[str, Any] | None, request: Any) -> dict[str, Any]:
    """The parameters of a chat request or a response, with its :data:`SELECTORS`."""
    places = {"reasoning_effort": ("reasoning", "effort"), "verbosity": ("text", "verbosity")}  # in a response
    selected = {}
    for name, (part, key) in places.items():
        value = getattr(request, name, None) or getattr(getattr(request, part, None), key, None)
        if value is not None:
            selected[name] = str(value)
    return {**(custom_params or {}), SELECTED: selected}


def markdown() -> str:
    """The table in ``docs/modes-and-parameters.md``."""
    lines = ["| parameter | other names | meaning | default |", "| --- | --- | --- | --- |"]
    for field in FIELDS.values():
        short = [f"`{name}` in `{NAMESPACE}`" for name in field.names[1:]]
        others = ", ".join([*short, *(f"`{name}`" for name in field.elsewhere.split())])
        meaning = "; ".join(filter(None, (field.meaning, field.limits)))
        default = "none" if field.default in (None, ()) else f"`{str(field.default).lower()}`"
        lines.append(f"| `{field.name}` | {others} | {meaning} | {default} |")
    return "\n".join(lines)
