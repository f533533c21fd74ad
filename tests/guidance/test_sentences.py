"""Ends of sentences and lines in texts, and in the tokens of a vocabulary."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from lenvm_kernels import TextBreak, text_breaks_of
from lenvm_kernels.guidance.sentences import ends_sentence, open_character
from lenvm_kernels.types import ADDED_BYTES, MISSING_BYTES

ENDS = "a.", "a? \n", 'a!"', "a.)**", "etc…", "好。", "好\uff01」", "वर्षा।", "لماذا؟", "`a.`", "```\nx = 1\n```", "_a._"
OTHERS = "", "a", "a,", "a:", '"', "a. b", "x = 1`", "1.5", "(a.) b)"


@pytest.mark.parametrize(("text", "ends"), [*((text, True) for text in ENDS), *((text, False) for text in OTHERS)])
def test_text_ends_sentence(text, ends):
    assert ends_sentence(text) == ends


@given(text=st.text(st.sampled_from("aé€好🤔\n"), max_size=8), cuts=st.sets(st.integers(1, 24)))
def test_characters_of_several_pieces(text, cuts):
    """The missing bytes after each piece of a text complete its last character."""
    data, missing, begin = text.encode(), 0, 0
    for end in [*sorted(cut for cut in cuts if cut < len(data)), len(data)]:
        lacks, added = open_character(data[begin:end])
        missing, begin = (max(missing - added, 0) if added else lacks), end
        whole = data[:end].decode(errors="ignore")
        part = end - len(whole.encode())
        assert missing == (len(text[len(whole)].encode()) - part if part else 0)


def test_bytes_of_a_vocabulary():
    """Byte tokens as in Llama 2, characters that encode bytes as in GPT-2, and a complete character."""
    words = Words("<0xE2>", "<0x82>", "ðŁ", "¤Ķ", "Ġ好", "▁a", ".")
    words.texts = ("�", "�", "�", "��", " 好", "a", ".")
    lacks, adds = [2, 0, 2, 0, 0, 0, 0], [0, 1, 0, 2, 0, 0, 0]
    expected = [x << MISSING_BYTES | y << ADDED_BYTES for x, y in zip(lacks, adds, strict=True)]
    expected[-3:] = TextBreak.WORD, TextBreak.WORD, TextBreak.SENTENCE
    assert text_breaks_of(words).tolist() == expected


class Words:
    """A tokenizer of whole words."""

    def __init__(self, *words):
        self.words = self.texts = words

    def __len__(self):
        return len(self.words)

    def batch_decode(self, tokens, clean_up_tokenization_spaces):
        return ["".join(self.texts[i] for i in ids) for ids in tokens]

    def convert_ids_to_tokens(self, tokens):
        return [self.words[i] for i in tokens]


def test_text_breaks_of_hand_written_vocabulary():
    words = Words("a", ".", ",\n", "b.\n", '!"', "", "\n", ":")
    none, line, sentence = TextBreak.NONE, TextBreak.LINE | TextBreak.WORD, TextBreak.SENTENCE
    expected = [none, sentence, line, sentence | line, sentence, none, line, none]
    assert text_breaks_of(words).tolist() == expected
    assert text_breaks_of(words, 10).tolist() == [*expected, none, none]
    assert text_breaks_of(words, 3).tolist() == expected[:3]
    assert text_breaks_of(Words("a", "\n", ":")) is None
