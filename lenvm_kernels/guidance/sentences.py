"""Ends of sentences and lines, by text."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING

import torch

from lenvm_kernels.types import TextBreak

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SENTENCE_END = re.compile(r"""[.!?…。！？｡।॥؟۔։።។။][\s"'”’»)\]}」』）】*_`]*$|```\s*$""")  # noqa: RUF001


def ends_sentence(text: str) -> bool:
    """Whether a text ends with a sentence.

    A sentence ends with a full stop, an exclamation or question mark in any script, an ellipsis, or the fence of a code
    block. Blanks and closing quotes, brackets, asterisks, underscores and backticks after the mark are ignored.
    """
    return _SENTENCE_END.search(text) is not None


@functools.lru_cache(maxsize=4)
def text_breaks_of(tokenizer: PreTrainedTokenizerBase, vocab_size: int | None = None) -> torch.Tensor | None:
    """The sentence and line ends in a vocabulary, by the text of each token.

    A full stop of an abbreviation counts as an end: there, the end of the text has next to no probability.

    Args:
        tokenizer: the base model's.
        vocab_size: size of the result. If None, all tokens. Ids without a token end nothing.

    Returns:
        int8 ``[vocab_size]`` on the CPU; a :class:`TextBreak` per token. None if no token ends a sentence.
    """
    count = len(tokenizer)
    breaks = []
    for text in tokenizer.batch_decode([[i] for i in range(count)], clean_up_tokenization_spaces=False):
        ends_line = TextBreak.LINE if text.endswith("\n") else TextBreak.NONE
        breaks.append(ends_line | (TextBreak.SENTENCE if ends_sentence(text) else TextBreak.NONE))
    if not any(TextBreak.SENTENCE & each for each in breaks):
        return None
    size = count if vocab_size is None else vocab_size
    return torch.tensor([*breaks, *[TextBreak.NONE] * (size - count)], dtype=torch.int8)[:size]
