"""What a value model is trained on: prompts, rows of answers, targets, and the measures of what was learned."""

import json
import math
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2Config, Qwen3MoeConfig

from lenvm_kernels.adapters.transformers import _warpers
from lenvm_kernels.loading.prompts import Prompt, read_prompts
from lenvm_kernels.training import cost, trunk
from lenvm_kernels.training.answers import Answer, AnswerStore
from lenvm_kernels.training.decode import decode, filtered
from lenvm_kernels.training.fit import Schedule, steps_of
from lenvm_kernels.training.measures import lengths, measure
from lenvm_kernels.training.network import Adapters, ValueHead, ValueNetwork
from lenvm_kernels.training.packs import Example, filled, grouped, pack, tokens_of
from lenvm_kernels.training.targets import Split, gamma_of, split_of, tail_factor, targets
from tests.helpers.models import EOS, TINY, WORDS, random_pair, save_checkpoint


def example(prompt, ids):
    return Example(prompt, ids, torch.arange(len(ids)) / 100 + ids[0] / 10)


# Two prompts of which one has three answers that are not neighbours, and one that is only an end.
EXAMPLES = [
    example([5, 6, 7], [8, 9, 10, EOS]),
    example([11, 12], [13, EOS]),
    example([5, 6, 7], [EOS]),
    example([14, 15, 16, 17], [18, 19, 20, 21, 22, EOS]),
    example([5, 6, 7], [23, 24, EOS]),
]


def test_a_row_by_hand():
    made = pack(EXAMPLES, [[[0, 4], [1]], [[3]]])
    assert made.ids.tolist() == [[5, 6, 7, 8, 9, 10, 23, 24, 11, 12, 13], [14, 15, 16, 17, 18, 19, 20, 21, 22, 0, 0]]
    assert made.positions.tolist() == [[0, 1, 2, 3, 4, 5, 3, 4, 0, 1, 2], [*range(9), 0, 0]]
    assert made.states.tolist() == [2, 3, 4, 5, 2, 6, 7, 9, 10, 14, 15, 16, 17, 18, 19]
    assert made.examples.tolist() == [0] * 4 + [4] * 3 + [1] * 2 + [3] * 6
    assert torch.equal(made.targets, torch.cat([EXAMPLES[i].targets for i in (0, 4, 1, 3)]))
    seen = [[column for column in range(11) if made.mask()[0, 0, row, column]] for row in range(11)]
    prompt = [0, 1, 2]
    answers = [[*prompt, 3], [*prompt, 3, 4], [*prompt, 3, 4, 5], [*prompt, 6], [*prompt, 6, 7]]
    assert seen == [[0], [0, 1], prompt, *answers, [8], [8, 9], [8, 9, 10]]
    # An answer that has values of its last states alone: they are the same states.
    late = [*EXAMPLES[:3], replace(EXAMPLES[3], targets=torch.tensor([0.7, 0.6])), EXAMPLES[4]]
    made_late = pack(late, [[[0, 4], [1]], [[3]]])
    assert made_late.states.tolist() == [2, 3, 4, 5, 2, 6, 7, 9, 10, 18, 19]
    assert made_late.examples.tolist() == [0] * 4 + [4] * 3 + [1] * 2 + [3] * 2
    assert torch.equal(made_late.targets[-2:], torch.tensor([0.7, 0.6])) and torch.equal(made_late.ids, made.ids)
    assert made.mask()[1, 0].diagonal().all()  # a row of a softmax without any column would be NaN


@given(
    answers=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 12)), min_size=1, max_size=30),
    most=st.integers(4, 40),
    seed=st.none() | st.integers(0, 5),
    processes=st.integers(1, 3),
)
def test_every_answer_stands_in_one_row(answers, most, seed, processes):
    prompts = [[1], [1, 2], [3, 4, 5], [6] * 7]
    examples = [Example(prompts[prompt], [9] * length, torch.zeros(length)) for prompt, length in answers]
    rows = filled(examples, most, seed)
    assert sorted(i for row in rows for group in row for i in group) == list(range(len(examples)))
    for row in rows:
        assert tokens_of(examples, row) <= most or len(row) == len(row[0]) == 1
        assert all(len({tuple(examples[i].prompt) for i in group}) == 1 for group in row)
    # One more answer of a group's prompt would not have fitted.
    for group, other in zip(grouped(examples, most), grouped(examples, most)[1:], strict=False):
        if examples[group[0]].prompt == examples[other[0]].prompt:
            assert tokens_of(examples, [[*group, other[0]]]) > most
    steps = steps_of(examples, Schedule(2, 1.0, 1.0, 2 * most, most, 3 * most, seed=seed or 0), processes)
    for forwards in steps:
        assert len({len(of_process) for of_process in forwards}) == 1 and len(forwards) == processes
        for rows in (rows for of_process in forwards for rows in of_process if rows):
            width = max(tokens_of(examples, row) for row in rows)
            assert len(rows) * width <= 3 * most or len(rows) == 1
    seen = [i for step in steps for process in step for rows in process for row in rows for group in row for i in group]
    assert sorted(seen) == sorted([*range(len(examples))] * 2)
    for step in steps:
        rows = [row for process in step for rows in process for row in rows]
        assert sum(tokens_of(examples, row) for row in rows) <= 2 * most or len(rows) == 1


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
def test_states_in_a_row_are_those_of_each_answer_alone(architecture):
    model, _ = random_pair(architecture)
    network = ValueNetwork(model, Adapters(3, first_layer=1))
    for name, parameter in network.trained().items():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    made = pack(EXAMPLES, [[[0, 4], [1]], [[3], [2]]])
    with torch.no_grad():
        states = network.states(made)
        for i, found in enumerate(EXAMPLES):
            read = torch.tensor([[*found.prompt, *found.ids[:-1]]])
            alone = model.model(read).last_hidden_state[0, len(found.prompt) - 1 :]
            torch.testing.assert_close(states[made.examples == i], alone, rtol=1e-4, atol=1e-4)
    layers = {name.split(".")[3] for name in network.trained() if "lora" in name}
    assert layers == {"1"} and all(p.dtype == torch.float32 for p in network.trained().values())


def test_checkpointing_changes_no_gradient():
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        network = ValueNetwork(random_pair("llama")[0], Adapters(3), checkpointing=checkpointing).train()
        network(pack(EXAMPLES, [[[0, 4]], [[3]]])).square().sum().backward()
        gradients.append([parameter.grad for parameter in network.trained().values()])
    for found, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_the_head_with_its_standardisation_is_a_plain_head():
    torch.manual_seed(0)
    head, states = ValueHead(6), torch.randn(50, 6) * torch.arange(1, 7) + 3
    head.standardise(states, 0.8)
    torch.testing.assert_close(head(states).sigmoid(), torch.full((50,), 0.8))
    torch.nn.init.normal_(head.summary.weight)
    tensors = {name.removeprefix("v_head."): tensor for name, tensor in head.tensors().items()}
    plain = torch.nn.functional.silu(states @ tensors["fc.weight"].T + tensors["fc.bias"])
    plain = plain @ tensors["summary.weight"].T + tensors["summary.bias"]
    torch.testing.assert_close(head(states), plain[:, 0], rtol=1e-4, atol=1e-5)
    other = ValueHead(6)
    other.standardise(states * 2 - 1, 0.1)
    other.take(head.tensors())
    torch.testing.assert_close(other(states), head(states), rtol=1e-4, atol=1e-5)


def answer(length, finished=True, limit=10, prompt=0, sample=0, guided=0):
    return Answer(prompt, sample, 5 if guided else None, guided, limit, [7] * length, finished)


def test_targets_by_hand():
    found = targets(answer(3), 0.9, tail=0.25)
    torch.testing.assert_close(found, torch.tensor([1 - 0.9**3, 1 - 0.9**2, 1 - 0.9]))
    found = targets(answer(3, finished=False), 0.9, tail=0.25)
    torch.testing.assert_close(found, torch.tensor([1 - 0.25 * 0.9**3, 1 - 0.25 * 0.9**2, 1 - 0.25 * 0.9]))
    # Guidance chose three of five tokens: nothing is known of the states before them, two are learned from.
    found = targets(answer(5, guided=3), 0.9, tail=0.25)
    torch.testing.assert_close(found, torch.tensor([1 - 0.9**2, 1 - 0.9]))


def test_answers_that_ended_under_guidance_are_left_out(tmp_path):
    prompts = [dict(text=text, split=split, ids=[i]) for i, (text, split) in enumerate([("a", "train"), ("b", "test")])]
    store = AnswerStore(tmp_path / "answers", {"prompts": prompts})
    made = [answer(4, guided=4, sample=1), answer(4, guided=1, sample=2), answer(3, guided=3, prompt=1)]
    store.add(made)
    split = split_of(store, "train", 0.9)
    assert split.answers == [made[1]] and split.examples[0].targets.shape == (3,)
    assert split_of(store, "test", 0.9) == Split([], [])


def test_the_tail_of_answers_that_were_cut():
    # In the second half of their limits: 3 tokens and an end, 5 and none, 4 and an end; one answer ends before.
    answers = [answer(8), answer(10, finished=False), answer(4), answer(10, limit=12)]
    rate = 2 / 12
    by_sum = sum(rate * (1 - rate) ** (t - 1) * 0.9**t for t in range(1, 2000))
    assert tail_factor(answers, 0.9) == pytest.approx(by_sum, rel=1e-9)
    # Guidance kept two more from ending: behind it there are a token and an end, and none at all.
    guided = [answer(9, guided=7), answer(8, guided=8)]
    rate = 3 / 14
    by_sum = sum(rate * (1 - rate) ** (t - 1) * 0.9**t for t in range(1, 2000))
    assert tail_factor(answers + guided, 0.9) == pytest.approx(by_sum, rel=1e-9)
    assert tail_factor([answer(4)], 0.9) == 1.0
    assert tail_factor([answer(10, finished=False)], 0.9) == 0.0  # none ends: they go on for ever


@pytest.mark.parametrize("longest", [1, 2, 5, 16, 400, 2048, 32768])
def test_bins_hold_every_length(longest):
    edges = trunk.edges_of(longest)
    widths = [high - low for low, high in pairwise(edges)]
    assert edges[0] == 1 and edges[-1] >= 1.5 * longest and 1 <= len(widths) <= 64
    assert widths == sorted(widths) and widths[0] == 1
    assert all(width <= 0.6 * low + 1 for low, width in zip(edges, widths, strict=False))


def test_what_a_trunk_learns_of_an_answer():
    """All tokens but the last; of a guided answer from the last one on that guidance chose."""
    assert [*trunk.tokens_valued(answer(4))] == [0, 1, 2] == [*trunk.tokens_valued(answer(4, finished=False))]
    assert [*trunk.tokens_valued(answer(5, guided=2))] == [1, 2, 3]
    assert [*trunk.tokens_valued(answer(2, guided=2))] == [] == [*trunk.tokens_valued(answer(1))]


def test_likelihoods_by_hand():
    """Bins of 1, of 2 to 3 and of 4 to 9 tokens; of an answer that was cut, all bins from the known length on."""
    logits = torch.tensor([0.2, 0.5, 0.3]).log().expand(6, 3)
    remaining, is_cut = torch.tensor([1, 3, 9, 2, 4, 50]), torch.tensor([False, False, False, True, True, False])
    found = trunk.likelihood(logits, remaining, is_cut, torch.tensor([1, 2, 4, 10]))
    torch.testing.assert_close((-found).exp(), torch.tensor([0.2, 0.5, 0.3, 0.8, 0.3, 0.3]))


def test_gamma_gives_the_99th_percentile_of_lengths_the_value_0_99():
    answers = [answer(length) for length in range(1, 101)]
    assert 1 - gamma_of(answers) ** 99.01 == pytest.approx(0.99, rel=1e-12)


def test_measures_by_hand():
    answers = [answer(2, prompt=3), answer(3, prompt=3, sample=1, finished=False), answer(2, prompt=1)]
    wanted = [torch.tensor([0.4, 0.2]), torch.tensor([0.8, 0.7, 0.6]), torch.tensor([0.5, 0.1])]
    found = [torch.tensor([0.5, 0.3]), torch.tensor([0.6, 0.7, 0.2]), torch.tensor([0.5, 0.2])]
    got = measure(found, wanted, answers, 0.5)
    v, y = torch.cat(found).double(), torch.cat(wanted).double()
    assert got["answers"] == 3 and got["states"] == 7 and got["cut"] == pytest.approx(1 / 3)
    assert got["mse"] == pytest.approx((0.01 + 0.01 + 0.04 + 0 + 0.16 + 0 + 0.01) / 7)
    assert got["r2"] == pytest.approx(1 - got["mse"] / float(y.var(correction=0)))
    assert got["correlation"] == pytest.approx(float(torch.corrcoef(torch.stack([v, y]))[0, 1]))
    # Ranks of prompt 3: values 3, 2, 4, 5, 1 beside 2, 1, 5, 4, 3; of prompt 1: the same order.
    by_hand = 1 - 6 * (1 + 1 + 1 + 1 + 4) / (5 * 24)
    assert got["rank_correlation_within_prompts"] == pytest.approx((by_hand + 1) / 2)
    # At positions 0 and 1 of prompt 3 there are two answers; everywhere else one, which is its own mean.
    p, q = [-0.05, 0.05, -0.2, 0.2], [-0.2, 0.2, -0.25, 0.25]
    at = sum(a * b for a, b in zip(p, q, strict=True)) / math.sqrt(sum(a * a for a in p) * sum(b * b for b in q))
    assert got["correlation_at_a_position"] == pytest.approx(at)
    off = [abs(math.log2(1 - a) - math.log2(1 - b)) for a, b in ((0.5, 0.4), (0.3, 0.2), (0.5, 0.5), (0.2, 0.1))]
    assert got["mae_tokens"] == pytest.approx(sum(off) / 4, rel=1e-5)
    assert lengths(torch.tensor(0.75), 0.5) == pytest.approx(2.0)
    # Of an answer that begins guided, its first value is one of a later position: no two are of one position any more.
    answers[0] = answer(5, prompt=3, guided=3)
    assert measure(found, wanted, answers, 0.5)["correlation_at_a_position"] is None
    constant = measure([torch.full_like(x, 0.5) for x in found], wanted, answers, 0.5)
    assert constant["rank_correlation_within_prompts"] is constant["correlation"] is None


@pytest.mark.parametrize(
    "top_k, top_p, min_p", [(0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.6, 0.0), (9, 0.8, 0.1), (1, 1.0, 0.5)]
)
def test_sampling_filters_are_those_of_transformers(top_k, top_p, min_p):
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(top_k)) * 2
    sampling = dict(temperature=0.7, top_k=top_k, top_p=top_p, min_p=min_p)
    probs, tokens = filtered(logits, sampling)
    wanted = _warpers(**sampling)(None, logits.clone()).softmax(dim=1)
    torch.testing.assert_close(torch.zeros(6, 40).scatter(1, tokens, probs), wanted)


def test_greedy_answers_are_those_of_generate():
    """Rows end at different places, so that the batch shrinks; prompts have different lengths."""
    model, _ = random_pair("llama")
    model.generation_config.eos_token_id = [EOS, 11]
    prompts = [[5 + i, *range(20, 20 + i % 4)] for i in range(12)]

    def padded(rows):
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        return dict(input_ids=ids, attention_mask=mask)

    models = SimpleNamespace(model=model, eos_token_ids=[EOS, 11], padded=padded)
    greedy = dict(temperature=1.0, top_k=1, top_p=1.0, min_p=0.0)
    found = decode(models, prompts, greedy, max_new_tokens=40)
    assert len({len(ids) for ids in found}) > 2 and max(map(len, found)) == 40
    for prompt, ids in zip(prompts, found, strict=True):
        alone = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=40, pad_token_id=0)
        assert ids == alone[0, len(prompt) :].tolist()


def test_prompts_with_and_without_splits(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a", "split": "test"}\n{"prompt": "b", "split": "train", "more": 1}\n')
    assert read_prompts(file) == [Prompt("a", "test"), Prompt("b", "train")]
    file.write_text('{"prompt": "a"}\n{"prompt": "b"}')
    assert read_prompts(file) == [Prompt("a"), Prompt("b")]


@pytest.mark.parametrize(
    "lines, named",
    [
        (
            [{"prompt": "a"}, {"prompt": "b", "split": "dev"}],
            "line 2 must have a \"split\" of train or test, or none, got 'dev'",
        ),
        ([{"prompt": "a", "split": "test"}, {"prompt": "b"}], 'line 2 must have a "split" as other lines have'),
        ([{"prompt": "a"}, {"prompt": ""}], "line 2 must be an object"),
    ],
)
def test_bad_prompts_are_named(tmp_path, lines, named):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match="--these") as error:
        read_prompts(file, "--these")
    assert named in str(error.value) and str(file) in str(error.value)


def test_costs_by_hand(tmp_path):
    save_checkpoint(tmp_path, seed=0)
    hidden, inter, kv, words, row = 48, 64, 24, len(WORDS), 32
    layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inter
    head = hidden * hidden + hidden
    attention = 4 * row * hidden  # all pairs of tokens, scores and sums
    full = cost.model_cost(tmp_path, None, row)
    assert full.parameters == layer + head + 2 * words * hidden + 3 * hidden + hidden + 1  # norms, the head's biases
    assert full.trained == full.parameters - words * hidden  # the output layer is no part of it
    assert full.forward == 2 * (layer + head) + attention
    # Of the first products' inputs, the embeddings, there are gradients, too.
    assert full.step == pytest.approx(3 * full.forward, rel=0.02)
    low_rank = cost.model_cost(tmp_path, Adapters(2), row)
    added = 2 * (2 * 2 * hidden + 2 * (hidden + kv) + 3 * (hidden + inter))
    assert low_rank.trained == added + head + hidden + 1 and low_rank.forward == full.forward + 2 * added
    assert 2 * full.forward < low_rank.step < full.step
    assert cost.model_cost(tmp_path, None, row, checkpointing=True).kept < 0.5 * full.kept

    assert cost.kv_bytes(tmp_path) == 2 * 2 * kv  # keys and values of one layer, two bytes each
    base, value = (cost.ModelCost(int(n * 1e9), 0, 2e9 * n, 6e9 * n, 0.0) for n in (7, 1))
    read = (14e9 + 10 * 500 * 1000) / (3.35e12 * 0.6)
    assert cost.collect_hours(base, 1000, None, 3600 * 10, 500, 10) == pytest.approx(read * 3600 * 10 / 10 / 3600)
    computed = 1000 * (14e9 + 9 * 2e9) / (989e12 * 0.4)
    assert cost.collect_hours(base, 1000, value, 7200, 500, 1000) == pytest.approx(computed * 7.2 / 3600)
    assert cost.hours_of(3600 * value.step) == pytest.approx(6e9 / (989e12 * 0.4))
    found = cost.fit_gib(cost.ModelCost(10 * 2**30, 2**30, 0.0, 0.0, 2**20), 2048)
    assert found == pytest.approx(9 * 2 + 16 + 2)


def test_costs_of_a_mixture_by_hand(tmp_path):
    """A dense layer, and one of six experts, of which a token takes two."""
    heads, kv, hidden, row = 4 * 8, 2 * 8, TINY["hidden_size"], 32
    sizes = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, head_dim=8, mlp_only_layers=[0])
    Qwen3MoeConfig(**TINY, **sizes).save_pretrained(tmp_path)
    both = 2 * (2 * hidden * heads + 2 * hidden * kv) + 3 * hidden * TINY["intermediate_size"] + 6 * hidden
    head, expert = hidden * hidden + hidden, 3 * hidden * 24
    found = cost.model_cost(tmp_path, None, row)
    assert found.forward == 2 * (both + 2 * expert + head) + 2 * 4 * row * heads
    norms = 5 * hidden + 2 * 2 * 8  # of the states, and of queries and keys
    assert found.parameters == both + 6 * expert + 2 * TINY["vocab_size"] * hidden + norms + head + hidden + 1
    assert cost.kv_bytes(tmp_path) == 2 * 2 * 2 * kv
    GPT2Config(n_embd=36, n_layer=5, n_head=3).save_pretrained(tmp_path)
    assert cost.kv_bytes(tmp_path) == 2 * 2 * 5 * 36
