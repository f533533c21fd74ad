"""Ends of sentences and lines in texts, and in the tokens of a vocabulary."""

import pytest

from lenvm_kernels import TextBreak, text_breaks_of
from lenvm_kernels.guidance.sentences import ends_sentence

ENDS = "a.", "a? \n", 'a!"', "a.)**", "etc…", "好。", "好\uff01」", "वर्षा।", "لماذا؟", "`a.`", "```\nx = 1\n```", "_a._"
OTHERS = "", "a", "a,", "a:", '"', "a. b", "x = 1`", "1.5", "(a.) b)"


@pytest.mark.parametrize(("text", "ends"), [*((text, True) for text in ENDS), *((text, False) for text in OTHERS)])
def test_text_ends_sentence(text, ends):
    assert ends_sentence(text) == ends


class Words:
    """A tokenizer of whole words."""

    def __init__(self, *words):
        self.words = words

    def __len__(self):
        return len(self.words)

    def batch_decode(self, tokens, clean_up_tokenization_spaces):
        return ["".join(self.words[i] for i in ids) for ids in tokens]


def test_text_breaks_of_hand_written_vocabulary():
    words = Words("a", ".", ",\n", "b.\n", '!"', "", "\n", ":")
    none, line, sentence = TextBreak.NONE, TextBreak.LINE, TextBreak.SENTENCE
    expected = [none, sentence, line, sentence | line, sentence, none, line, none]
    assert text_breaks_of(words).tolist() == expected
    assert text_breaks_of(words, 10).tolist() == [*expected, none, none]
    assert text_breaks_of(words, 3).tolist() == expected[:3]
    assert text_breaks_of(Words("a", "\n", ":")) is None
