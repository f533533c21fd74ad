"""Every field of a request's ``custom_params``: what parses them, the command line's flags and the docs follow this.

Names and defaults are those of the LenVM fork of SGLang (section Parameters of the specification).
"""

from collections.abc import Mapping
from dataclasses import dataclass

DEFAULT_GAMMA = 0.997  # as in the fork
MAX_DIVISOR = 1e6  # so that no logit becomes infinite


@dataclass(frozen=True)
class Field:
    """A field.

    Attributes:
        name: its name.
        meaning: a sentence without its first capital and full stop.
        other_names: what the fork calls it too.
        default: None for none.
        words: every word that is accepted, with the word that it stands for; None for a field that is no word.
        above, least, below: bounds of a number: ``> above``, ``>= least``, ``< below``.
        is_integer: a number has to be whole.
        metavar: of its flag; None for a field that the command line has no flag for.
    """

    name: str
    meaning: str
    other_names: tuple[str, ...] = ()
    default: float | str | bool | None = None
    words: Mapping[str, str] | None = None
    above: float | None = None
    least: float | None = None
    below: float | None = None
    is_integer: bool = False
    metavar: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Its name, then the others."""
        return (self.name, *self.other_names)

    @property
    def bounds(self) -> str:
        """``> 0 and < 1``, or nothing."""
        bounds = ((">", self.above), (">=", self.least), ("<", self.below))
        return " and ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)

    @property
    def limits(self) -> str:
        """What a value is limited to, in the fewest words: each word once, or the bounds."""
        if self.words is not None:
            return f"one of {', '.join(dict.fromkeys(self.words.values()))}"
        return self.bounds

    @property
    def accepted(self) -> str:
        """All that is accepted, for a message."""
        if self.words is not None:
            return f"one of {', '.join(self.words)}"
        return f"{'an integer' if self.is_integer else 'a finite number'} {self.bounds}".rstrip()


def _spellings(**words: str) -> dict[str, str]:
    """The words of each list, with the name of the list."""
    return {spelling: word for word, spellings in words.items() for spelling in spellings.split()}


FIELDS = {
    field.name: field
    for field in (
        Field(
            "value_mode",
            "how values reweight the candidates",
            ("mode",),
            "mul",
            words={word: word for word in ("mul", "linear", "exp", "length_mul", "centered_exp", "value_bias")},
            metavar="MODE",
        ),
        Field(
            "value_scale",
            "strength of the mode; centered_exp and value_bias: < 0 shorter, > 0 longer; other modes: < 1 shorter, > 1 "
            "longer",
            ("scale",),
            1.0,
            metavar="S",
        ),
        Field(
            "gamma",
            "discount that the value model was trained with; turns values into lengths; of requests without: that of "
            "LENVM_GAMMA, or of lenvm_config.json",
            ("length_gamma",),
            DEFAULT_GAMMA,
            above=0.0,
            below=1.0,
            metavar="G",
        ),
        Field(
            "target_length",
            "tokens to guide to, by the constraint and whatever the mode",
            least=0.0,
            metavar="TOKENS",
        ),
        Field(
            "target_length_mode",
            "what the target counts: total, all new tokens, or remaining, those still to come at every step",
            ("length_mode",),
            "total",
            words=_spellings(total="total budget", remaining="remaining"),
            metavar="MODE",
        ),
        Field(
            "target_value",
            "the target as a value instead of a length; goes before target_length",
            least=0.0,
            below=1.0,
            metavar="V",
        ),
        Field(
            "value_constraint",
            "how a target binds: eq, nearest candidate; ge or le, longest or shortest candidate; eq_soft, on average; "
            "ge_soft or le_soft, the same where the average is shorter or longer; near, each candidate by its "
            "distance; ge_near or le_near, the same of shorter or longer ones only",
            ("constraint", "cmp", "op"),
            "near",
            words=_spellings(
                eq="eq = == equal equals",
                ge="ge >= > gte greater_equal",
                le="le <= < lte less_equal",
                eq_soft="eq_soft soft equal_soft",
                ge_soft="ge_soft",
                le_soft="le_soft",
                near="near",
                ge_near="ge_near",
                le_near="le_near",
            ),
            metavar="OP",
        ),
        Field(
            "strength",
            "of near, ge_near and le_near: how fast probability falls with distance from the target; 0, not at all; if "
            "nothing is said 10 without a value model, and with one that of lenvm_config.json, if it has any",
            default=5.0,
            least=0.0,
            metavar="S",
        ),
        Field(
            "min_end_prob",
            "with a target: tokens that end the output are candidates from this probability on, whatever top_k, top_p "
            "and min_p say; 0.0001 with near, ge_near and le_near if nothing is said; 0, always; a 10,000th of it "
            "after the end of a sentence, a tenth after that of a line, 100 times as much elsewhere, and less of it "
            "past a total target",
            least=0.0,
            metavar="P",
        ),
        Field(
            "tolerance",
            "share of the target within which near, ge_near and le_near treat all lengths alike",
            default=0.0,
            least=0.0,
            below=1.0,
            metavar="SHARE",
        ),
        Field(
            "thinking_budget",
            "tokens that a thought may take on average: a target_length with le_near that holds up to the end of the "
            "thought",
            above=0.0,
            below=1e9,  # so that its hard_limit is an int32
            metavar="TOKENS",
        ),
        Field(
            "end_token_ids",
            "a list of up to 4 tokens that end what is guided, such as a thought, and have value 0; several that do so "
            "one after the other are a list of their own, whose first has value 0",
        ),
        Field(
            "start_token_ids",
            "likewise, what begins it, also anew once it has ended; without, it begins with the answer, once; <think> "
            "for a thinking_budget without end_token_ids, if that is a token",
        ),
        Field("allow_eos", "let the sequence end before one of end_token_ids", default=False),
        Field(
            "answer_length",
            "tokens that are to follow what is guided; taken off predicted lengths",
            default=0.0,
            least=0.0,
            metavar="TOKENS",
        ),
        Field(
            "hard_limit",
            "tokens of what is guided at which the first of end_token_ids is forced; 1.25 times the thinking_budget if "
            "there is one",
            least=1.0,
            below=2.0**31 - 1,
            is_integer=True,
            metavar="TOKENS",
        ),
        Field(
            "hard_limit_grace",
            "tokens for which the hard_limit waits for the end of a line",
            default=0,
            least=0.0,
            below=1e6,
            is_integer=True,
            metavar="TOKENS",
        ),
        Field(
            "end_message",
            "words, or a list of token ids, that are forced before the end that the hard_limit forces; up to 32 tokens "
            "with it",
        ),
        Field(
            "landing",
            "words, or a list of up to 32 token ids, that are forced once when what is left of target_length is just "
            "enough to say the answer, if possible at the end of a line; the output then goes on, and ends by itself",
            metavar="TEXT",
        ),
        Field(
            "landing_tokens",
            "tokens of target_length that are left for the landing and what follows it",
            default=24,
            least=1.0,
            below=1e6,
            is_integer=True,
            metavar="TOKENS",
        ),
        Field("value_min", "leave a step alone whose expected value is below this", metavar="V"),
        Field(
            "value_entropy_threshold",
            "leave a step alone whose candidates have at most this entropy, in nats",
            ("entropy_threshold",),
            least=0.0,
            metavar="NATS",
        ),
        Field(
            "token_temperature_scale",
            "divide the temperature of single tokens: a token id and its divisor each, which multiplies the logit",
            above=0.0,
            below=MAX_DIVISOR,
            metavar="ID=D",
        ),
        Field("boosted_token_ids", "the same with one divisor: a list of the token ids"),
        Field("token_temp_divisor", "the divisor of boosted_token_ids", above=0.0, below=MAX_DIVISOR),
        Field(
            "value_stride",
            "guide at every n-th step of the engine only, and wherever the output might end",
            least=1.0,
            below=1e6,
            is_integer=True,
            metavar="N",
        ),
        Field(
            "return_values",
            "predict lengths of the prompt and of each token, guided or not",
            default=False,
        ),
    )
}


def markdown() -> str:
    """The table of the docs (``docs/modes-and-parameters.md``)."""
    lines = ["| parameter | other names | meaning | default |", "| --- | --- | --- | --- |"]
    for field in FIELDS.values():
        others = ", ".join(f"`{name}`" for name in field.other_names)
        meaning = "; ".join(filter(None, (field.meaning, field.limits)))
        default = "none" if field.default is None else f"`{str(field.default).lower()}`"
        lines.append(f"| `{field.name}` | {others} | {meaning} | {default} |")
    return "\n".join(lines)
