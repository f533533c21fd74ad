"""Spans, such as thoughts: their start and end sequences, and the state of a request's span.

A span begins with the answer, or after a start sequence if the request has any. It ends after one of its end sequences.
Partial matches at the last token are stored as bits, one per token of a sequence (the Shift-And algorithm), so that
host and device can read tokens one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

MAX_SPAN_TOKENS = 31  # total length of start and end sequences: bits of an int32
MAX_CLOSING_TOKENS = 32  # maximum number of tokens that a hard limit forces
# A prompt with an end among this many last tokens has no open span. Ends of earlier turns are further away.
CLOSED_WITHIN = 4
# Marks of thoughts in the vocabularies of reasoning models. The first pair is also looked up in chat templates.
_THOUGHT_MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),  # Magistral
    ("<|channel>", "<channel|>"),  # Gemma 4
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A Reasoning
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("<mm:think>", "</mm:think>"),  # MiniMax M3
    ("◁think▷", "◁/think▷"),  # Kimi-VL
    ("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
)
# gpt-oss writes its thought and its answer into channels. The first end is the one that is forced.
_CHANNEL, _CHANNEL_STARTS = "<|channel|>", ("<|channel|>analysis<|message|>",)
_CHANNEL_ENDS = ("<|end|><|start|>assistant<|channel|>final<|message|>", "<|channel|>final<|message|>")
# A tokenizer may merge the last character of an end with a following line break.
_AFTER_END = ("", "\n", "\n\n")
# Tokens that begin tool calls.
_TOOL_CALL_MARKS = (
    "<tool_call>",  # Qwen, GLM, Hermes
    "[TOOL_CALLS]",  # Mistral
    "<|python_tag|>",  # Llama
    "<|tool_call>",  # Gemma 4
    "<start_function_call>",  # FunctionGemma
    "<｜tool▁calls▁begin｜>",  # DeepSeek  # noqa: RUF001
    "<|tool_calls_section_begin|>",  # Kimi K2
    "<minimax:tool_call>",
    "<seed:tool_call>",
    "<|tool_call_start|>",  # LFM2
    "<|START_ACTION|>",  # Command A
)
_CHANNEL_CALL = "<|channel|>commentary"  # gpt-oss

TokenSequences = tuple[tuple[int, ...], ...]


class SpanPatterns(NamedTuple):
    """The end sequences, the start sequences, and the starts of tool calls of a request, concatenated.

    Bit ``i`` of a number stands for token ``i``. A tool call ends a span, so its bits are also in ``end_bits``.
    """

    token_ids: tuple[int, ...]
    begins_open: bool  # whether a span is open after a prompt without any of the sequences
    first_bits: int  # first tokens of all sequences
    end_bits: int  # last tokens of end sequences
    start_bits: int  # last tokens of start sequences
    call_bits: int  # last tokens of starts of tool calls
    bits_of: Mapping[int, int]  # the indices of a token in token_ids

    @classmethod
    def of(
        cls, ends: TokenSequences, starts: TokenSequences, calls: TokenSequences = (), *, begins_open: bool = False
    ) -> SpanPatterns:
        """The patterns of these non-empty sequences. Without ``starts``, a span always begins open."""
        token_ids: list[int] = []
        first_bits, last_bits, bits_of = 0, [0, 0, 0], dict[int, int]()
        for kind, sequences in enumerate((ends, starts, calls)):
            for sequence in sequences:
                first_bits |= 1 << len(token_ids)
                token_ids += sequence
                last_bits[kind] |= 1 << len(token_ids) - 1
        for i, token in enumerate(token_ids):
            bits_of[token] = bits_of.get(token, 0) | 1 << i
        end_bits, start_bits, call_bits = last_bits
        opens = begins_open or not starts
        return cls(tuple(token_ids), opens, first_bits, end_bits | call_bits, start_bits, call_bits, bits_of)

    def after(self, match: int, token: int) -> int:
        """The match bits after one more ``token``."""
        return (match << 1 | self.first_bits) & self.bits_of.get(token, 0)

    def at_end_of(self, tokens: Sequence[int]) -> int:
        """The match bits after ``tokens``."""
        match = 0
        for token in tokens[-MAX_SPAN_TOKENS:]:
            match = self.after(match, token)
        return match

    def length_of(self, last_bits: int) -> int:
        """Length of the longest sequence with its last token among these bits."""
        ends = [i for i in range(len(self.token_ids)) if last_bits >> i & 1]
        return max((i + 2 - (self.first_bits & (2 << i) - 1).bit_length() for i in ends), default=0)

    def open_from(self, prompt: Sequence[int]) -> int | None:
        """The place from which a span that is open after a prompt counts. None if no span is open.

        Without start sequences, a span is open unless an end is among the last :data:`CLOSED_WITHIN` tokens: chat
        templates without thinking end with ``<think></think>`` and line breaks. With start sequences, the last start or
        end of the prompt decides. A thought that the prompt begins counts from its start, any other span from the
        output. Tool calls in the prompt are ignored: they belong to earlier turns or describe the format of a call.
        """
        end_bits = self.end_bits & ~self.call_bits
        lasts = {token for token, bits in self.bits_of.items() if bits & (end_bits | self.start_bits)}
        within = len(prompt) if self.start_bits else CLOSED_WITHIN
        for i in range(len(prompt) - 1, max(len(prompt) - within, 0) - 1, -1):
            if prompt[i] in lasts:
                match = self.at_end_of(prompt[max(i + 1 - MAX_SPAN_TOKENS, 0) : i + 1])
                if match & end_bits:
                    return None
                if match & self.start_bits:
                    return len(prompt) if self.begins_open else i + 1
        return len(prompt) if self.begins_open else None


@dataclass(frozen=True)
class SpanState:
    """The state of a request's span. Places count tokens of the sequence from the prompt's first token."""

    seen: int  # tokens of the sequence that have been read
    begin: int  # place from which limits and targets count: the open span's first token, or the end of the last span
    end: int | None = None  # place after the last span. If None, a span is open
    match: int = 0  # match bits of the last token (SpanPatterns)
    closing_from: int | None = None  # place from which the end is forced. If None, it is not forced
    used: int = 0  # tokens of the last ended span
    units: int = 0  # words or sentences from ``begin`` on
    in_call: bool = False  # a tool call has begun since the last span


@dataclass(frozen=True)
class Thoughts:
    """A tokenizer's marks of thoughts and of tool calls."""

    ends: TokenSequences = ()  # sequences of tokens that end a thought, empty without thoughts
    starts: TokenSequences = ()  # sequences that begin a thought
    tool_calls: TokenSequences = ()  # sequences that begin a tool call
    encode: Callable[[str], Sequence[int]] | None = None  # tokenizes a text. If None, texts are rejected

    @classmethod
    def unknown(cls) -> Thoughts:
        """A stand-in that checks the fields of a request before the tokenizer is loaded."""
        return cls(ends=((0,),), encode=lambda text: [0])

    @classmethod
    def of(cls, tokenizer: Any, marks: tuple[str, str] | None = None) -> Thoughts:
        """The marks of a tokenizer of ``transformers``.

        The marks are tokens of the vocabulary. ``</think>``, or the end in ``marks``, may also be a sequence of tokens;
        ``</think>`` must then be in the chat template. Starts of several tokens are not looked up, because their last
        token may depend on the text after it.

        Args:
            tokenizer: the base model's.
            marks: start and end of a thought in an engine's reasoning parser. If None, a built-in table is used.
        """

        def encode(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False)

        vocab = tokenizer.get_vocab()
        if _CHANNEL in vocab:
            ends, starts = (tuple(tuple(encode(text)) for text in texts) for texts in (_CHANNEL_ENDS, _CHANNEL_STARTS))
            return cls(ends, starts, (tuple(encode(_CHANNEL_CALL)),), encode)
        calls = tuple((vocab[mark],) for mark in _TOOL_CALL_MARKS if mark in vocab)
        for start, end in _THOUGHT_MARKS if marks is None else [marks]:
            if end in vocab:
                return cls(((vocab[end],),), ((vocab[start],),) if start in vocab else (), calls, encode)
        end = _THOUGHT_MARKS[0][1] if marks is None else marks[1]
        if marks is None and end not in (getattr(tokenizer, "chat_template", None) or ""):
            return cls((), (), calls, encode)
        ends = tuple(dict.fromkeys(tuple(encode(end + after)) for after in _AFTER_END))
        return cls(ends, (), calls, encode)
