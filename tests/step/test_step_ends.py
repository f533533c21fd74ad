"""Steps without a value model, and end tokens among the candidates."""

import pytest
import torch

from lenvm_kernels.types import TextBreak
from tests.helpers.drafts import i32, make_drafts
from tests.helpers.engine import Engine, make_step, take_step
from tests.helpers.models import EOS, VOCAB


def scores_of_a_rare_end(rows, prob):
    """Logits with one likely token, unlikely ones, and an end whose probability relative to all others is ``prob``."""
    scores = torch.zeros(rows, VOCAB)
    scores[:, 30:] = -4 + torch.arange(VOCAB - 30) / 99
    scores[:, 9] = 5
    scores[:, EOS] = torch.tensor(prob).log() + scores[:, [i for i in range(VOCAB) if i != EOS]].logsumexp(1)
    return scores


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_ends_are_candidates_after_sentences(backend):
    """After the last of one or several new tokens, and after each draft. Token 11 ends a sentence, 12 a line."""
    breaks = torch.zeros(20, dtype=torch.int8)
    breaks[11], breaks[12] = TextBreak.SENTENCE, TextBreak.LINE
    rows, scores, lengths = [2, 0, 3], scores_of_a_rare_end(3, 1e-6), i32(40, 44, 41)

    def step_of(**sizes):
        step, slots = make_step(None, text_breaks=breaks, backend=backend, **sizes)
        for row, least in zip(rows, (1e-4, 1e-4, 1e-6), strict=True):
            Engine(step, slots).admit(row, [3] * 50, {"target_length": 30, "min_end_prob": least}, prompt_len=39)
        return step

    def with_end(step, tokens, more, scores=scores, **told):
        told |= dict(top_k=2, top_p=1.0, min_p=0.0, is_logits=True)
        output = take_step(step, scores, torch.tensor(tokens), torch.tensor(rows), lengths + more, **told)
        return (output.candidates.token_ids == EOS).any(1).tolist()

    step = step_of()
    found = {token: with_end(step, [token] * 3, 0) for token in (9, 11, 12, 25)}
    assert found == {9: [False] * 3, 11: [True] * 3, 12: [False, False, True], 25: [False] * 3}
    step, several = step_of(max_drafts=2), [[9, 11, 9], [11, 12, 9], [9, 9, 11]]
    assert with_end(step, several, 0, new_lens=i32(2, 1, 3)) == [True, True, True]
    assert with_end(step, several, 1, new_lens=i32(3, 2, 1)) == [False, False, False]
    drafts = make_drafts([[11, 9], [9, 11], [-1, 11]], [[-1, 0]] * 3)
    of_nodes = with_end(step, several, 2, scores.repeat_interleave(3, dim=0), new_lens=i32(1, 1, 3), drafts=drafts)
    assert of_nodes == [False, True, False, True, False, True, True, False, False]


def test_sentence_ends_are_preferred_near_the_target():
    """A token that ends a sentence becomes more probable near the target, unless ``text_breaks`` is None."""
    breaks = torch.zeros(VOCAB, dtype=torch.int8)
    breaks[11] = TextBreak.SENTENCE
    scores = torch.zeros(1, VOCAB)
    scores[0, 9], scores[0, 11], scores[0, EOS] = 6.0, 4.0, -30.0
    of_length = {}
    for known in (breaks, None):
        step, slots = make_step(None, text_breaks=known)
        engine = Engine(step, slots)
        engine.admit(3, [3] * 80, {"target_length": 40}, prompt_len=2)
        assert step.table.columns.target_length[3] == 40 - 3 * (known is not None)
        for length in (4, 38):
            output = engine.decode([3], [[9] * length], scores, temperature=None, top_k=2)
            at = output.candidates.token_ids[0].tolist().index(11)
            of_length[length, known is None] = output.probs[0, at].item() / output.candidates.probs[0, at].item()
    assert of_length[4, False] == pytest.approx(of_length[4, True]) == pytest.approx(of_length[38, True])
    assert of_length[38, False] > 5 * of_length[38, True]


def test_late_requests_accept_less_probable_ends():
    """An end of probability 2e-6 is accepted half a target past the target; with drafts, by the node's position."""
    step, slots = make_step(None, max_drafts=2, max_candidates=4)
    engine, prompt_lens = Engine(step, slots), [3, 5, 4, 2]
    guidance = [{"target_length": 20}, {"target_length": 20, "target_length_mode": "remaining"}]
    guidance += [{"target_length": 8, "constraint": "le_near"}, {"target_length": 20, "min_end_prob": 1e-3}]
    for row, (g, n) in enumerate(zip(guidance, prompt_lens, strict=True)):
        engine.admit(row, [3] * 48, g, prompt_len=n)
    scores, first = scores_of_a_rare_end(4, 2e-6), {}
    for generated in range(1, 40):
        sequences = [[9] * (n + generated) for n in prompt_lens]
        output = engine.decode(range(4), sequences, scores, temperature=None, top_k=2)
        for row in (output.candidates.token_ids == EOS).any(1).nonzero()[:, 0].tolist():
            first.setdefault(row, generated)
    # 2e-6 is between 1e-4 / 2^5 and / 2^10, and 1e-3 / 2^5 and / 2^10.
    assert first == {0: 31, 2: 13, 3: 31}
    sequences = [[9] * (n + generated) for n, generated in zip(prompt_lens, (29, 24, 10, 24), strict=True)]
    told = dict(new=[1] * 4, drafts=make_drafts([[9, 9]] * 4, [[-1, 0]] * 4), temperature=None, top_k=2)
    output = engine.decode(range(4), sequences, scores.repeat_interleave(3, dim=0), **told)
    assert (output.candidates.token_ids == EOS).any(1).nonzero()[:, 0].tolist() == [2]
