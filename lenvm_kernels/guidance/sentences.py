"""Text breaks of tokens: ends of sentences, lines and characters, and starts of words."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING

import torch

from lenvm_kernels.types import ADDED_BYTES, MISSING_BYTES, TextBreak

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SENTENCE_END = re.compile(r"""[.!?…。！？｡।॥؟۔։።។။][\s"'”’»)\]}」』）】*_`]*$|```\s*$""")  # noqa: RUF001

_BLANK = "▁"  # begins the tokens that SentencePiece decodes with a blank, except at the start of a text


def ends_sentence(text: str) -> bool:
    """Whether a text ends with a sentence.

    A sentence ends with a full stop, an exclamation or question mark in any script, an ellipsis, or the fence of a code
    block. Blanks and closing quotes, brackets, asterisks, underscores and backticks after the mark are ignored.
    """
    return _SENTENCE_END.search(text) is not None


def open_character(text: bytes) -> tuple[int, int]:
    """Bytes missing from the last character of a UTF-8 text, and continuation bytes before its first character.

    The second number is 0 if the text contains the first byte of a character.
    """
    for back, byte in enumerate(reversed(text)):
        if byte & 0xC0 != 0x80:  # the first byte of a character encodes how many bytes follow
            follow = sum(byte >= first for first in (0xC0, 0xE0, 0xF0))
            return max(follow - back, 0), 0
    return 0, min(len(text), 3)


def _bytes_of(token: str) -> bytes:
    """The bytes of a token in a vocabulary of bytes: ``<0xE2>``, or one character per byte."""
    if byte := re.fullmatch("<0x([0-9A-F]{2})>", token):
        return bytes.fromhex(byte[1])
    return bytes(_byte_of_character()[character] for character in token if character in _byte_of_character())


@functools.cache
def _byte_of_character() -> dict[str, int]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}


@functools.lru_cache(maxsize=4)
def text_breaks_of(tokenizer: PreTrainedTokenizerBase, vocab_size: int | None = None) -> torch.Tensor | None:
    """Ends of sentences, lines and characters, and starts of words, for each token of a vocabulary.

    The full stop of an abbreviation counts as an end; the model gives the end of the text next to no probability there.
    A word begins after a blank or a line break.

    Args:
        tokenizer: the base model's.
        vocab_size: size of the result. If None, all tokens. Ids without a token have no breaks.

    Returns:
        int8 ``[vocab_size]`` on the CPU; per token a :class:`TextBreak` and the numbers of :func:`open_character`. None
        if no token ends a sentence.
    """
    count = len(tokenizer)
    breaks, tokens = [], [str(token) for token in tokenizer.convert_ids_to_tokens(list(range(count)))]
    for i, text in enumerate(tokenizer.batch_decode([[i] for i in range(count)], clean_up_tokenization_spaces=False)):
        ends_line = TextBreak.LINE if text.endswith("\n") else TextBreak.NONE
        missing = added = 0
        if "\N{REPLACEMENT CHARACTER}" in text:
            missing, added = open_character(_bytes_of(tokens[i]))
        is_word = ends_line or (text.strip() and (text[0].isspace() or tokens[i].startswith(_BLANK)))
        ends = ends_line | (TextBreak.SENTENCE if ends_sentence(text) else TextBreak.NONE)
        ends |= TextBreak.WORD if is_word else TextBreak.NONE
        breaks.append(ends | missing << MISSING_BYTES | added << ADDED_BYTES)
    if not any(TextBreak.SENTENCE & each for each in breaks):
        return None
    size = count if vocab_size is None else vocab_size
    return torch.tensor([*breaks, *[TextBreak.NONE] * (size - count)], dtype=torch.int8)[:size]
