"""Training data: targets, rows of a probe, and measures, computed by hand."""

import math
from itertools import pairwise

import pytest
import torch

from lenvm_kernels.train import probe
from lenvm_kernels.train.answers import AnswerStore, Example, SampledAnswer, gamma_of, tail_factor, targets
from lenvm_kernels.train.fit import lengths, measure
from lenvm_kernels.train.probe import StandardizedLinear


def answer(length, finished=True, limit=10, prompt=0, sample=0, guided=0):
    return SampledAnswer(prompt, sample, 5 if guided else None, guided, limit, [7] * length, finished)


def test_targets():
    for made, wanted in (
        (answer(3), [1 - 0.9**3, 1 - 0.9**2, 1 - 0.9]),
        (answer(3, finished=False), [1 - 0.25 * 0.9**3, 1 - 0.25 * 0.9**2, 1 - 0.25 * 0.9]),
        (answer(5, guided=3), [1 - 0.9**2, 1 - 0.9]),
    ):
        torch.testing.assert_close(targets(made, 0.9, tail=0.25), torch.tensor(wanted))


def geometric(rate):
    return pytest.approx(sum(rate * (1 - rate) ** (t - 1) * 0.9**t for t in range(1, 2000)), rel=1e-9)


def test_tail_factor_and_gamma():
    # In the second half of the limits: 3 tokens and an end, 5 tokens, 4 tokens and an end. One answer ends earlier.
    late = [answer(8), answer(10, finished=False), answer(4), answer(10, limit=12)]
    assert tail_factor(late, 0.9) == geometric(2 / 12)
    late += [answer(9, guided=7), answer(8, guided=8)]  # guided tokens do not count
    assert tail_factor(late, 0.9) == geometric(3 / 14)
    assert (tail_factor([answer(4)], 0.9), tail_factor([answer(10, finished=False)], 0.9)) == (1.0, 0.0)
    # The 99th percentile of lengths has the value 0.99.
    assert 1 - gamma_of([answer(length) for length in range(1, 101)]) ** 99.01 == pytest.approx(0.99, rel=1e-12)


def test_examples_of_a_split(tmp_path):
    """Answers that ended under guidance have no targets. Probes have no target at the last token of a prompt."""
    prompts = [dict(text=text, split=split, ids=[i]) for i, (text, split) in enumerate([("a", "train"), ("b", "test")])]
    store = AnswerStore(tmp_path / "answers", {"prompts": prompts})
    made = [answer(4, guided=4), answer(4, guided=1, sample=2), answer(5, sample=3), answer(1, sample=4)]
    assert store.add([*made, answer(3, guided=3, prompt=1)])[:4] == made and store.add(made[:1]) == []
    for of_prompts, kept in ((True, {2: 3, 3: 5, 4: 1}), (False, {2: 3, 3: 4})):
        found = store.examples("train", 0.9, of_prompts=of_prompts)
        assert {example.answer.sample: len(example.targets) for example in found} == kept
        for example in found:
            assert example.prompt == [0]
            assert torch.equal(example.targets, targets(example.answer, 0.9, 1.0)[-len(example.targets) :])
    assert store.examples("test", 0.9) == []


@pytest.mark.parametrize("longest", [1, 2, 5, 16, 400, 2048, 32768])
def test_bins_cover_every_length(longest):
    edges = probe.edges_of(longest)
    widths = [high - low for low, high in pairwise(edges)]
    assert edges[0] == 1 and edges[-1] == max(2, math.ceil(1.5 * longest)) and 1 <= len(widths) <= 64
    assert all(1 <= width <= 0.2 * low + 1 for low, width in zip(edges, widths, strict=False))


def test_likelihoods_of_ended_and_cut_answers():
    """Bins of 1, 2 to 3, and 4 to 9 tokens. The likelihood of a cut answer is the sum of bins from its length on."""
    logits = torch.tensor([0.2, 0.5, 0.3]).log().expand(6, 3)
    remaining, is_cut = torch.tensor([1, 3, 9, 2, 4, 50]), torch.tensor([False, False, False, True, True, False])
    found = probe.likelihood(logits, remaining, is_cut, torch.tensor([1, 2, 4, 10]))
    torch.testing.assert_close((-found).exp(), torch.tensor([0.2, 0.5, 0.3, 0.8, 0.3, 0.3]))


def test_folded_standardised_layer_equals_plain_layer():
    torch.manual_seed(0)
    x = torch.randn(50, 6) * torch.arange(1, 7) + 3
    layer = StandardizedLinear(x, 4)
    torch.testing.assert_close(layer(x), torch.nn.functional.linear(x, *layer.folded()), rtol=1e-4, atol=1e-5)
    layer.weight.data = torch.eye(4, 6)
    standardized = layer(x) - layer.bias
    torch.testing.assert_close(standardized.mean(0), torch.zeros(4), rtol=0, atol=1e-5)
    torch.testing.assert_close(standardized.std(0, correction=0), torch.ones(4))


def test_measures():
    answers = [answer(2, prompt=3), answer(3, prompt=3, sample=1, finished=False), answer(2, prompt=1)]
    wanted = [torch.tensor([0.4, 0.2]), torch.tensor([0.8, 0.7, 0.6]), torch.tensor([0.5, 0.1])]
    found = [torch.tensor([0.5, 0.3]), torch.tensor([0.6, 0.7, 0.2]), torch.tensor([0.5, 0.2])]

    def measured(values):
        examples = [Example([], *pair) for pair in zip(answers, wanted, strict=True)]
        return measure(torch.cat(values), examples, 0.5)

    got = measured(found)
    v, y = torch.cat(found).double(), torch.cat(wanted).double()
    assert got["answers"] == 3 and got["states"] == 7 and got["cut"] == pytest.approx(1 / 3)
    assert got["mse"] == pytest.approx((0.01 + 0.01 + 0.04 + 0 + 0.16 + 0 + 0.01) / 7)
    assert got["r2"] == pytest.approx(1 - got["mse"] / float(y.var(correction=0)))
    assert got["correlation"] == pytest.approx(float(torch.corrcoef(torch.stack([v, y]))[0, 1]))
    # Ranks of prompt 3: values 3, 2, 4, 5, 1 and 2, 1, 5, 4, 3; prompt 1 has the same order twice.
    by_hand = 1 - 6 * (1 + 1 + 1 + 1 + 4) / (5 * 24)
    assert got["rank_correlation_within_prompts"] == pytest.approx((by_hand + 1) / 2)
    # Positions 0 and 1 of prompt 3 have two answers; every other position has one, which equals the mean.
    p, q = [-0.05, 0.05, -0.2, 0.2], [-0.2, 0.2, -0.25, 0.25]
    at = sum(a * b for a, b in zip(p, q, strict=True)) / math.sqrt(sum(a * a for a in p) * sum(b * b for b in q))
    assert got["correlation_at_a_position"] == pytest.approx(at)
    off = [abs(math.log2(1 - a) - math.log2(1 - b)) for a, b in ((0.5, 0.4), (0.3, 0.2), (0.5, 0.5), (0.2, 0.1))]
    assert got["mae_tokens"] == pytest.approx(sum(off) / 4, rel=1e-5)
    assert lengths(torch.tensor(0.75), 0.5) == pytest.approx(2.0)
    # The first value of a guided answer is at a later position, so no two answers share a position.
    answers[0] = answer(5, prompt=3, guided=3)
    assert measured(found)["correlation_at_a_position"] is None
    constant = measured([torch.full_like(x, 0.5) for x in found])
    assert constant["rank_correlation_within_prompts"] is constant["correlation"] is None
