"""Spans, such as thoughts: what begins and ends them, and where a request stands in its own.

A span begins with the answer; or, of requests with start sequences, after one of these. It ends after one of its end
sequences. Which of them the last tokens may be part of is kept as bits, one for each of their tokens (the Shift-And
algorithm): so tokens can be read one at a time, on a device as well as here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

MAX_SPAN_TOKENS = 31  # of all of these: bits of an int32
MAX_CLOSING_TOKENS = 32  # of what a hard limit forces
# A prompt of whose last tokens one ends a span leaves none open. Those of an earlier turn are further away.
CLOSED_WITHIN = 4
START_OF_THOUGHT, END_OF_THOUGHT = "<think>", "</think>"
# A tokenizer may make one token of the last character of an end and of a line break after it.
_AFTER_END = ("", "\n", "\n\n")

TokenSequences = tuple[tuple[int, ...], ...]


class SpanPatterns(NamedTuple):
    """The end sequences of a request and then its start sequences, one behind the other.

    Attributes:
        token_ids: their tokens.
        first_bits, end_bits, start_bits: bit ``i`` says that token ``i`` is the first of a sequence, the last of one
            that ends a span, and the last of one that begins one.
        bits_of: of a token, which of ``token_ids`` it is.
    """

    token_ids: tuple[int, ...]
    first_bits: int
    end_bits: int
    start_bits: int
    bits_of: Mapping[int, int]

    @classmethod
    def of(cls, ends: TokenSequences, starts: TokenSequences) -> SpanPatterns:
        """The patterns of these sequences, none of which is empty."""
        token_ids: list[int] = []
        first_bits, last_bits, bits_of = 0, [0, 0], dict[int, int]()
        for kind, sequences in enumerate((ends, starts)):
            for sequence in sequences:
                first_bits |= 1 << len(token_ids)
                token_ids += sequence
                last_bits[kind] |= 1 << len(token_ids) - 1
        for i, token in enumerate(token_ids):
            bits_of[token] = bits_of.get(token, 0) | 1 << i
        return cls(tuple(token_ids), first_bits, last_bits[0], last_bits[1], bits_of)

    def after(self, match: int, token: int) -> int:
        """Bits of the tokens that a sequence may be at after ``token``, by those of before."""
        return (match << 1 | self.first_bits) & self.bits_of.get(token, 0)

    def at_end_of(self, tokens: Sequence[int]) -> int:
        """The same after some tokens."""
        match = 0
        for token in tokens[-MAX_SPAN_TOKENS:]:
            match = self.after(match, token)
        return match


@dataclass(frozen=True)
class SpanState:
    """Where a request stands. Places are those of its sequence, whose prompt begins at 0.

    Attributes:
        seen: tokens of the sequence that have been read for it.
        begin: where its span begins: limits and targets count from there.
        end: where the last span has ended; None: a span is open.
        match: bits of the tokens of :class:`SpanPatterns` that a sequence may be at.
        closing_from: from where its end is forced; None: it is not.
    """

    seen: int
    begin: int
    end: int | None = None
    match: int = 0
    closing_from: int | None = None

    @classmethod
    def of(
        cls,
        patterns: SpanPatterns | None,
        prompt: Sequence[int],
        output: Sequence[int] = (),
        *,
        closing: Sequence[int] = (),
        hard_limit: int | None = None,
        grace: int = 0,
    ) -> SpanState:
        """That of a request which has generated ``output`` after ``prompt``.

        A prompt leaves no span open where an end is within its last :data:`CLOSED_WITHIN` tokens: a chat template that
        is told not to think puts ``<think></think>`` there, and a line break or two. With start sequences it leaves one
        open only where its last start comes after its last end.

        Args:
            patterns: sequences that begin and end its spans. If None, the whole output is one span.
            prompt, output: tokens.
            closing, hard_limit, grace: what is forced when a span has so many tokens, or that many more.
        """
        begin, seen = len(prompt), len(prompt) + len(output)
        patterns = patterns or SpanPatterns.of((), ())
        end = None if _leaves_open(patterns, prompt) else begin
        match = patterns.at_end_of(prompt)
        for place, token in enumerate(output, len(prompt) + 1):
            match = patterns.after(match, token)
            if end is None and match & patterns.end_bits:
                end = place
            elif end is not None and match & patterns.start_bits:
                begin, end = place, None
        closing_from = None
        if end is None and hard_limit is not None:
            closing_from = _closing_from(closing, output[begin - len(prompt) :], hard_limit, grace)
        return cls(seen, begin, end, match, None if closing_from is None else begin + closing_from)


def _leaves_open(patterns: SpanPatterns, prompt: Sequence[int]) -> bool:
    """Whether a span is open after a prompt."""
    lasts = {token for token, bits in patterns.bits_of.items() if bits & (patterns.end_bits | patterns.start_bits)}
    within = len(prompt) if patterns.start_bits else CLOSED_WITHIN
    for i in range(len(prompt) - 1, max(len(prompt) - within, 0) - 1, -1):
        if prompt[i] in lasts:
            match = patterns.at_end_of(prompt[max(i + 1 - MAX_SPAN_TOKENS, 0) : i + 1])
            if match & patterns.end_bits:
                return False
            if match & patterns.start_bits:
                return True
    return not patterns.start_bits


def _closing_from(closing: Sequence[int], span: Sequence[int], limit: int, grace: int) -> int | None:
    """Where in an open span the closing has begun, as its tokens show; None: nowhere."""
    for start in range(limit, min(limit + grace + 1, len(span))):
        if list(span[start : start + len(closing)]) == list(closing[: len(span) - start]):
            return start
    return None


@dataclass(frozen=True)
class Thoughts:
    """What a tokenizer says of thoughts.

    Attributes:
        ends, starts: sequences of tokens that end and begin one; none if it knows of no thoughts.
        encode: what makes tokens of a text; None: nothing does.
    """

    ends: TokenSequences = ()
    starts: TokenSequences = ()
    encode: Callable[[str], Sequence[int]] | None = None

    @classmethod
    def unknown(cls) -> Thoughts:
        """Stand in for a tokenizer that is not loaded yet, to check the fields of a request."""
        return cls(ends=((0,),), encode=lambda text: [0])

    @classmethod
    def of(cls, tokenizer: Any) -> Thoughts:
        """Of a tokenizer of ``transformers``.

        ``<think>`` and ``</think>`` are its own tokens, or several where its chat template has them. A start of several
        tokens is not looked for: the tokens after it may be other ones than those of the text alone.
        """

        def encode(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False)

        vocab = tokenizer.get_vocab()
        starts = ((vocab[START_OF_THOUGHT],),) if START_OF_THOUGHT in vocab else ()
        if END_OF_THOUGHT in vocab:
            return cls(((vocab[END_OF_THOUGHT],),), starts, encode)
        if END_OF_THOUGHT not in (getattr(tokenizer, "chat_template", None) or ""):
            return cls((), (), encode)
        ends = dict.fromkeys(tuple(encode(END_OF_THOUGHT + after)) for after in _AFTER_END)
        return cls(tuple(ends), starts, encode)
