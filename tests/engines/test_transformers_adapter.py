"""The ``transformers`` adapter: ``generate`` on tiny models, against a plain implementation of the step."""

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM

from bench import ways
from lenvm_kernels.engines.transformers import processor as transformers_adapter
from lenvm_kernels.engines.transformers.generate import generate
from lenvm_kernels.engines.transformers.processor import LenVMLogitsProcessor
from lenvm_kernels.guidance import GuidanceTable, parse_guidance
from lenvm_kernels.ops.reweight_scatter import reweight_scatter
from lenvm_kernels.ops.topk_candidates import topk_candidates
from lenvm_kernels.values import ValueModel
from tests.helpers import models
from tests.helpers.models import random_model, value_logits

VOCAB, HIDDEN, EOS, PAD = 61, 32, 2, 0
TINY = models.TINY | dict(vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48, max_position_embeddings=128)
TINY |= dict(eos_token_id=EOS, pad_token_id=PAD)
SHORTER = {"value_mode": "centered_exp", "value_scale": -20}
KEEP_SCORES = dict(return_dict_in_generate=True, output_scores=True, pad_token_id=PAD)


@pytest.fixture(scope="module")
def base():
    return random_model(LlamaForCausalLM, LlamaConfig(**TINY), seed=0)


@pytest.fixture(scope="module")
def value_backbone():
    return random_model(Qwen2ForCausalLM, Qwen2Config(**TINY), seed=1)


@pytest.fixture(scope="module")
def head():
    generator, shapes = torch.Generator().manual_seed(2), models.head_shapes(HIDDEN)
    return {name: torch.randn(shape, generator=generator) * HIDDEN**-0.5 * 2 for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def value_model(value_backbone, head):
    return ValueModel.from_causal_lm(value_backbone, head)


@pytest.fixture
def prompts():
    """Three prompts of 6, 3 and 1 tokens, padded on the left."""
    ids = torch.tensor([[5, 6, 7, 8, 9, 10], [PAD, PAD, PAD, 11, 12, 13], [PAD] * 5 + [14]])
    return dict(input_ids=ids, attention_mask=(ids != PAD).long())


def plain_value(value_backbone, head, prefix, candidate):
    """Value logit of a candidate by a full forward of ``transformers`` over prefix and candidate."""
    return value_logits(value_backbone, head, torch.tensor([[*prefix, candidate]]))[0, -1].item()


def plain_step(base, value_backbone, head, prefix, guidance, generated, sampling):
    """Distribution of the next token of one row, without cache or batch."""
    with torch.no_grad():
        logits = base(torch.tensor([prefix])).logits[:, -1].double()
    filters = {name: torch.tensor([number]) for name, number in sampling.items()}
    filters["top_k"] = filters["top_k"].int()
    table = GuidanceTable.from_params([parse_guidance(guidance)], [{EOS}], "cpu").columns
    ends = dict(end_token_ids=table.ending_token_ids, min_end_prob=table.min_end_prob, due_length=table.due_length)
    ends["least_share"] = table.least_share
    ends["generated"] = torch.tensor([generated]).int()
    candidates = topk_candidates(logits, **filters, **ends, is_logits=True, backend="reference")
    z = [plain_value(value_backbone, head, prefix, t) if t >= 0 else 0.0 for t in candidates.token_ids[0].tolist()]
    z, probs = torch.tensor([z], dtype=torch.float64), torch.zeros(1, VOCAB, dtype=torch.float64)
    reweight_scatter(candidates, z, table, generated=ends["generated"], probs=probs, backend="reference")
    return probs[0]


def run(base, value_model, prompts, guidance, steps, **options):
    """(processor, output) of a call of ``generate`` with scores of every step."""
    mask = prompts["attention_mask"]
    processor = LenVMLogitsProcessor(base, value_model, guidance, mask, max_new_tokens=steps, **options)
    return processor, base.generate(**prompts, **processor.generation_kwargs, **KEEP_SCORES)


def steps_of(output, prompts):
    """(step, tokens before it, scores, drawn token) of every row of ``generate``'s output up to its end."""
    width = prompts["input_ids"].shape[1]
    for row, sequence in enumerate(output.sequences.tolist()):
        start = int((prompts["attention_mask"][row] == 0).sum())
        for step, scores in enumerate(output.scores):
            if EOS in sequence[width : width + step]:
                break
            yield step, sequence[start : width + step], scores[row], sequence[width + step]


SAMPLING = dict(temperature=0.7, top_k=6, top_p=0.95, min_p=0.01)


@pytest.mark.parametrize(
    "guidance",
    [
        SHORTER,
        {"value_mode": "mul", "value_scale": 0.8},
        {"target_length": 9, "constraint": "eq_soft"},
        {"target_length": 5, "constraint": "eq"},
        {"target_length": 5},
    ],
)
def test_steps_sample_from_the_guided_distribution(base, value_backbone, head, value_model, prompts, guidance):
    torch.manual_seed(0)
    processor, output = run(base, value_model, prompts, guidance, 8, **SAMPLING)
    for step, prefix, scores, token in steps_of(output, prompts):
        expected = plain_step(base, value_backbone, head, prefix, guidance, step, SAMPLING)
        torch.testing.assert_close(scores.exp().double(), expected, atol=1e-4, rtol=0)
        assert expected[token] > 0
    assert processor.faults == [0, 0, 0]


def test_mixture_of_experts_as_base(value_backbone, head, value_model, prompts):
    sizes = dict(moe_intermediate_size=24, num_experts=6, num_experts_per_tok=2, head_dim=8, mlp_only_layers=[0])
    moe = random_model(Qwen3MoeForCausalLM, Qwen3MoeConfig(**TINY, **sizes), seed=4)
    test_steps_sample_from_the_guided_distribution(moe, value_backbone, head, value_model, prompts, SHORTER)


def test_spans_and_tokens_after_them(base, value_model, prompts):
    """Distributions in a guided span, in a span that may end the sequence, with a hard limit alone, and after them."""
    guidance = [
        SHORTER | {"end_token_ids": [20, 21], "hard_limit": 7},
        SHORTER | {"end_token_ids": [23], "allow_eos": True, "hard_limit": 5},
        {"end_token_ids": [22], "hard_limit": 3},
    ]
    torch.manual_seed(0)
    processor, output = run(base, value_model, prompts, guidance, 16, temperature=0.7)
    after, can_end = 0, [False] * 3
    for step, prefix, scores, _ in steps_of(output, prompts):
        row = [5, 11, 14].index(prefix[0])
        ends, limit = guidance[row]["end_token_ids"], guidance[row]["hard_limit"]
        found = torch.softmax(scores, 0)
        with torch.no_grad():
            logits = base(torch.tensor([prefix])).logits[0, -1] / 0.7
        is_ended = not set(ends).isdisjoint(prefix[len(prefix) - step :])
        after += is_ended
        assert is_ended or step <= limit
        if not is_ended:
            can_end[row] |= found[EOS].item() > 0
        if is_ended:
            torch.testing.assert_close(found, torch.softmax(logits, 0), atol=1e-5, rtol=0)
        elif step == limit:
            assert found[ends[0]] == 1
        elif row == 2:
            logits[EOS] = -torch.inf
            torch.testing.assert_close(found, torch.softmax(logits, 0), atol=1e-5, rtol=0)
    assert after > 12 and can_end == [False, True, False] and processor.faults == [0, 0, 0]


def test_prompt_that_leaves_no_span_open(base, value_model, prompts):
    """As from a chat template with thinking disabled: no token is guided or forced."""
    closed = prompts["input_ids"].clone()
    closed[1, -2] = 20
    guidance = [SHORTER | {"end_token_ids": [20], "hard_limit": 2}] * 3
    torch.manual_seed(0)
    closed = dict(prompts) | {"input_ids": closed}
    processor, output = run(base, value_model, closed, guidance, 4, temperature=0.7)
    for step, prefix, scores, _ in steps_of(output, closed):
        found = torch.softmax(scores, 0)
        with torch.no_grad():
            plain = torch.softmax(base(torch.tensor([prefix])).logits[0, -1] / 0.7, 0)
        if prefix[0] == 11:
            torch.testing.assert_close(found, plain, atol=1e-5, rtol=0)
        elif step < 2 and 20 not in prefix[-step - 1 :]:
            assert found[EOS] == 0 and (found - plain).abs().max() > 1e-3
        elif step == 2 and 20 not in prefix[-2:]:
            assert found[20] == 1
    assert processor.faults == [0, 0, 0]


def test_thought_markers_are_read_from_tokenizer(base, value_model, tmp_path):
    words = [f"w{i}" for i in range(VOCAB)]
    plain, thinking = (
        AutoTokenizer.from_pretrained(models.save_checkpoint(tmp_path / name, seed=0, words=names))
        for name, names in (("plain", words), ("thinking", ["<think>", *words[1:17], "</think>", *words[18:]]))
    )
    budget = dict(guidance={"thinking_budget": 9.0, "end_message": "w3 w5"})
    processor = make(base, value_model, **budget, tokenizers=(thinking, thinking))
    table = processor._step.table.columns
    assert table.span_end_token_ids[0].tolist() == [17, -2, -2, -2] and table.hard_limit[0] == 12
    assert table.span_token_ids[0, :3].tolist() == [17, 0, -2] and table.span_start_bits[0] == 2
    assert table.closing_token_ids[0, :4].tolist() == [3, 5, 17, -2]
    for tokenizers in (None, (plain, plain)):
        with pytest.raises(ValueError, match="thinking_budget needs end_token_ids: no token is known"):
            make(base, value_model, **budget, tokenizers=tokenizers)


def test_unguided_rows_are_unchanged_by_the_processor(base, value_model, prompts):
    """Unguided rows keep the base model's distribution and filters in a batch with a guided row."""
    _, output = run(base, value_model, prompts, [None, SHORTER, {}], 1, **SAMPLING)
    guided = output.scores[0]
    plain = base.generate(**prompts, max_new_tokens=1, do_sample=True, **SAMPLING, **KEEP_SCORES).scores[0]
    for row, same in enumerate((True, False, True)):
        close = torch.allclose(torch.softmax(guided[row], 0), torch.softmax(plain[row], 0), atol=1e-6)
        assert close == same


def test_output_lengths_are_predicted_from_prompts(base, value_backbone, head, value_model, prompts, monkeypatch):
    """Rows with ``return_values``, guided or not. Unguided rows draw the same tokens, with no forward per step."""
    asks = [{"return_values": True, "gamma": 0.9} | SHORTER, SHORTER, {"return_values": True, "gamma": 0.95}]
    processor, output = run(base, value_model, prompts, asks, 4)
    rows = [prompts["input_ids"][row, start:].tolist() for row, start in enumerate((0, 3, 5))]
    z = torch.tensor([plain_value(value_backbone, head, tokens[:-1], tokens[-1]) for tokens in rows])
    lengths = torch.nn.functional.softplus(z) / -torch.tensor([0.9, 0.997, 0.95]).log()
    expected = [pytest.approx(length, rel=1e-3) for length in lengths.tolist()]
    assert processor.predicted_output_lengths(output.sequences) == [expected[0], None, expected[2]]
    with pytest.raises(ValueError, match=r"sequences must be \[3, 6 \+ N\], .* got \[3, 6\]"):
        processor.predicted_output_lengths(prompts["input_ids"])

    torch.manual_seed(3)
    _, plain = run(base, None, prompts, None, 9)
    forwards, forward = [], value_model.forward
    monkeypatch.setattr(value_model, "forward", lambda *a, **k: (forwards.append(1), forward(*a, **k))[1])
    torch.manual_seed(3)
    processor, output = run(base, value_model, prompts, {"return_values": True}, 9)
    assert torch.equal(output.sequences, plain.sequences) and 1 <= len(forwards) <= 2
    assert processor.predicted_output_lengths(output.sequences)[1] == expected[1]


def test_values_are_correct_after_skipped_steps(base, value_backbone, head, value_model, prompts):
    """Rows skipped by an entropy threshold have every token in later steps."""
    torch.manual_seed(1)
    _, output = run(base, value_model, prompts, SHORTER | {"entropy_threshold": 1.2}, 12)
    sampling = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    skipped, guided_after_skipped = set(), 0
    for step, prefix, scores, _ in steps_of(output, prompts):
        request = prefix[0]
        if (scores > -torch.inf).sum() > 8:  # more than the candidates: the row is unguided
            skipped.add(request)
            continue
        guided_after_skipped += request in skipped
        expected = plain_step(base, value_backbone, head, prefix, SHORTER, step, sampling)
        torch.testing.assert_close(scores.exp().double(), expected, atol=1e-4, rtol=0)
    assert guided_after_skipped > 2


def test_token_temperature_scale(base, value_model, prompts):
    """A scale multiplies its token's logit before all filters; ids outside the vocabulary are ignored."""
    params = {"token_temperature_scale": {20: 3.0} | {10_000 + i: 2.0 for i in range(40)}}
    processor = LenVMLogitsProcessor(base, value_model, params, prompts["attention_mask"], max_new_tokens=1)
    scores = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    before = scores.clone()
    actual = processor(prompts["input_ids"], scores)
    before_scaled = before.clone()
    before_scaled[:, 20] *= 3
    torch.testing.assert_close(actual, torch.log_softmax(before_scaled, 1))
    assert torch.equal(scores, before)


def test_le_shortens_outputs_of_tiny_model(base, value_model):
    """The constraint ``le`` draws the end of sequence as soon as it is a candidate."""
    ids = torch.randint(3, VOCAB, (16, 4), generator=torch.Generator().manual_seed(0))
    inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids))
    lengths = {}
    for name, guidance in (("base", None), ("le", {"target_length": 1, "op": "le"})):
        torch.manual_seed(0)
        _, output = run(base, value_model, inputs, guidance, 40, max_candidates=32)
        lengths[name] = (output.sequences[:, 4:] != PAD).sum(1).double().mean()
    assert lengths["le"] < 0.5 * lengths["base"]


def make(base, value_model, **changes):
    arguments = dict(guidance=SHORTER, attention_mask=torch.ones(2, 4), max_new_tokens=3) | changes
    return LenVMLogitsProcessor(base, value_model, **arguments)


def test_rows_are_guided_by_their_own_parameters(base, value_backbone, head, value_model, prompts):
    """Targets counted from prompts of different lengths, with different parameters in each row."""
    guidance = [{"target_length": 6, "op": "eq_soft", "gamma": 0.9}, SHORTER, {"target_length": 3, "gamma": 0.8}]
    torch.manual_seed(3)
    processor, output = run(base, value_model, prompts, guidance, 6, record=True, **SAMPLING)
    assert len(processor.records) == len(output.scores) == output.sequences.shape[1] - 6
    steps = 0
    for step, prefix, scores, chosen in steps_of(output, prompts):
        row = [5, 11, 14].index(prefix[0])
        expected = plain_step(base, value_backbone, head, prefix, guidance[row], step, SAMPLING)
        torch.testing.assert_close(scores.exp().double(), expected, atol=1e-4, rtol=0)
        record = processor.records[step]
        assert chosen in record.token_ids[row] and record.guided_probs.shape == record.value_logits.shape == (3, 8)
        for token, z, p in zip(*(x[row].tolist() for x in vars(record).values()), strict=True):
            if token >= 0:
                assert abs(z - plain_value(value_backbone, head, prefix, token)) < 1e-4
                assert abs(p - expected[token]) < 1e-4
        steps += 1
    assert steps > 8


def test_ended_rows_are_inactive(base, value_model, prompts, monkeypatch):
    """From the first of several end-of-sequence tokens on, whatever padding ``generate`` appends."""
    monkeypatch.setattr(base.generation_config, "eos_token_id", [EOS, 33])
    processor = make(base, value_model, attention_mask=prompts["attention_mask"], max_new_tokens=4)
    active, step = [], processor._step.step

    def record(scores, batch, *args, **options):
        active.append(batch.active.tolist())
        return step(scores, batch, *args, **options)

    monkeypatch.setattr(processor._step, "step", record)
    tokens, scores = prompts["input_ids"], torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    processor(tokens, scores)
    for new in ([EOS, 7, 8], [9, 33, 10], [PAD, PAD, 11]):
        tokens = torch.cat([tokens, torch.tensor(new)[:, None]], dim=1)
        processor(tokens, scores)
    assert active == [[True] * 3, [False, True, True], [False, False, True], [False, False, True]]
    assert processor._step.table.columns.eos_token_ids.tolist()[:3] == [[EOS, 33]] * 3


def test_extended_prompts_exclude_padding_and_last_token(base, value_model, prompts, monkeypatch):
    """The first step computes the last token. Token temperatures of many tokens are accepted."""
    scaled = [SHORTER | {"boosted_token_ids": list(range(40)), "token_temp_divisor": 2.0}, SHORTER, SHORTER]
    processor = make(base, value_model, guidance=scaled, attention_mask=prompts["attention_mask"])
    extended = {}
    monkeypatch.setattr(processor._step, "extend", lambda *args, **kwargs: extended.update(kwargs))
    processor(prompts["input_ids"], torch.zeros(3, VOCAB))
    assert extended.pop("images") is None and extended.pop("begins") == [0, 9, 17]
    found = {name: x.tolist() for name, x in extended.items()}
    assert found == {"starts": [0, 9, 17], "lens": [5, 2, 0], "cached_lens": [0, 0, 0]}


def test_model_without_end_of_sequence(base, value_model, prompts, monkeypatch):
    monkeypatch.setattr(base.generation_config, "eos_token_id", None)
    processor = make(base, value_model, attention_mask=prompts["attention_mask"], max_new_tokens=1)
    assert processor(prompts["input_ids"], torch.zeros(3, VOCAB)).isfinite().any(dim=1).all()
    assert (processor._step.table.columns.eos_token_ids == -2).all()


def test_filters_of_unguided_rows(base, value_model, prompts):
    """Each filter alone, and exactly neutral sampling parameters."""
    scores = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0)) * 2
    probs = torch.softmax(scores, dim=1)
    by_rank = probs.sort(dim=1, descending=True).values
    for options, kept in (
        ({}, probs > 0),
        ({"top_k": 1}, probs == by_rank[:, :1]),
        ({"top_k": 5}, probs >= by_rank[:, 4:5]),
        ({"min_p": 0.2}, probs >= 0.2 * by_rank[:, :1]),
        ({"min_p": 1.0}, probs == by_rank[:, :1]),
        ({"top_p": 1e-6}, probs == by_rank[:, :1]),
    ):
        processor = make(base, value_model, guidance=None, attention_mask=prompts["attention_mask"], **options)
        expected = torch.where(kept, probs, 0.0)
        actual = processor(prompts["input_ids"], scores.double()).exp()
        torch.testing.assert_close(actual, expected / expected.sum(1, keepdim=True))
    hot = make(base, value_model, guidance=None, attention_mask=prompts["attention_mask"], temperature=2.0)
    torch.testing.assert_close(hot(prompts["input_ids"], scores).exp(), torch.softmax(scores / 2, dim=1))


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(attention_mask=torch.tensor([[1, 1, 0], [1, 1, 1]])), "attention_mask must be .* padded on the left"),
        (dict(attention_mask=torch.ones(4)), "attention_mask must be"),
        (dict(attention_mask=torch.tensor([[0, 0, 0], [1, 1, 1]])), "attention_mask must be"),
        (dict(guidance=[SHORTER]), "guidance must be one for all or one for each of the 2 prompts, got 1"),
        (dict(guidance={"value_mode": "loud"}), "value_mode must be one of"),
        (dict(max_new_tokens=0), "max_new_tokens must be at least 1, got 0"),
        (dict(temperature=0.0), "temperature must be a finite number > 0, got 0.0"),
        (dict(attention_mask=torch.tensor([[1, 0, 1], [1, 1, 1]])), "attention_mask must be .* padding elsewhere"),
        (dict(guidance=[SHORTER] * 3), "one for each of the 2 prompts, got 3"),
        (dict(temperature=float("inf")), "temperature must be a finite number > 0, got inf"),
        (dict(top_k=2**31), "top_k must be an integer >= 0"),
        (dict(top_k=5.0), "top_k must be an integer >= 0"),
        (dict(top_p=1.1), "top_p must be a number in"),
        (dict(min_p=-0.1), "min_p must be a number in"),
        (dict(max_candidates=7), "max_candidates must be a power of two"),
        (dict(top_k=-1), "top_k must be an integer >= 0"),
        (dict(top_p=0.0), "top_p must be a number in"),
        (dict(min_p=1.5), "min_p must be a number in"),
    ],
)
def test_bad_arguments_are_rejected_by_name(base, value_model, changes, message):
    with pytest.raises(ValueError, match=message):
        make(base, value_model, **changes)


def test_backend_is_passed_to_the_step(base, value_model, prompts):
    processor = make(base, value_model, attention_mask=prompts["attention_mask"], backend="nobody's")
    with pytest.raises(ValueError, match="backend must be one of"):
        processor(prompts["input_ids"], torch.zeros(3, VOCAB))


class Tokenizer:
    """A tokenizer with one token per word."""

    def __init__(self, words):
        self.words = words

    def __len__(self):
        return len(self.words)

    def batch_decode(self, tokens, **_):
        return [self.words[i] for (i,) in tokens]

    def get_vocab(self):
        return {word: i for i, word in enumerate(self.words)}


def test_vocabulary_is_checked(value_model):
    other = LlamaForCausalLM(LlamaConfig(**{**TINY, "vocab_size": VOCAB + 3}))
    with pytest.raises(ValueError, match="value_model must share the base model's vocabulary of 64 tokens, got 61"):
        make(other, value_model)
    assert make(other, value_model, tokenizers=(Tokenizer("abc"), Tokenizer("abc")))
    with pytest.raises(ValueError, match=r"2 tokens differ, 'b' among them \(ids 1 and 2\)"):
        make(other, value_model, tokenizers=(Tokenizer("abc"), Tokenizer("acb")))


def test_beams_and_reuse_are_rejected(base, value_model, prompts):
    def processor():
        return make(base, value_model, attention_mask=prompts["attention_mask"])

    beams = processor()
    with pytest.raises(ValueError, match="generate runs 6 rows for 3 prompts: beam search"):
        base.generate(**prompts, **beams.generation_kwargs, num_beams=2, pad_token_id=PAD)
    used = processor()
    base.generate(**prompts, **used.generation_kwargs, pad_token_id=PAD)
    with pytest.raises(ValueError, match="make a new LenVMLogitsProcessor for each call of generate"):
        base.generate(**prompts, **used.generation_kwargs, pad_token_id=PAD)


def test_non_finite_scores_affect_their_row_only(base, value_model, prompts):
    scores = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    clean = make(base, value_model, attention_mask=prompts["attention_mask"])(prompts["input_ids"], scores)
    scores[1, 7] = torch.nan
    processor = make(base, value_model, attention_mask=prompts["attention_mask"])
    broken = processor(prompts["input_ids"], scores)
    torch.testing.assert_close(broken[[0, 2]], clean[[0, 2]])
    assert processor.faults == [0, 1, 0]


def outputs_of(output, prompts):
    """Generated tokens of each row before its end."""
    new = output[:, prompts["input_ids"].shape[1] :].tolist()
    return [row[: row.index(EOS)] if EOS in row else row for row in new]


@pytest.mark.parametrize("has_values", [True, False])
def test_generate_reads_sentence_ends_from_tokenizer(base, value_model, prompts, has_values, monkeypatch):
    """The step gets ``text_breaks`` of the tokenizer, or None without a tokenizer."""
    seen = []
    make_step = transformers_adapter.GuidedStep
    monkeypatch.setattr(transformers_adapter, "GuidedStep", lambda *args: seen.append(args[-1]) or make_step(*args))
    arguments = dict(target_length=4, max_new_tokens=3, pad_token_id=PAD)
    arguments["value_model"] = value_model if has_values else None
    generate(base, **prompts, tokenizer=Tokenizer(["a", "b", "c", "d", "e", "f.", "g\n", "h"]), **arguments)
    generate(base, **prompts, **arguments)
    known, unknown = (config.text_breaks for config in seen)
    size = base.get_input_embeddings().num_embeddings
    assert known.tolist() == [0, 0, 0, 0, 0, 2, 1, *[0] * (size - 7)] and unknown is None


@pytest.mark.parametrize("has_values", [True, False])
def test_generate_equals_explicit_use_of_the_processor(base, value_model, prompts, has_values):
    """Several samples per prompt in consecutive rows, each with the guidance of its prompt."""
    value_model = value_model if has_values else None
    guidance = [{"target_length": 2}, None, {"target_length": 12, "strength": 9}]
    torch.manual_seed(5)
    output = generate(
        base, **prompts, guidance=guidance, value_model=value_model, num_return_sequences=2, max_new_tokens=7, top_k=9,
        pad_token_id=PAD, processor_options={"max_candidates": 4},
    )  # fmt: skip
    mask = prompts["attention_mask"].repeat_interleave(2, dim=0)
    doubled = [g for g in guidance for _ in range(2)]
    processor = LenVMLogitsProcessor(base, value_model, doubled, mask, max_new_tokens=7, top_k=9, max_candidates=4)
    torch.manual_seed(5)
    ids = prompts["input_ids"].repeat_interleave(2, dim=0)
    expected = base.generate(input_ids=ids, attention_mask=mask, **processor.generation_kwargs, pad_token_id=PAD)
    assert torch.equal(output, expected) and len(output) == 6
    assert len({tuple(row) for row in outputs_of(output, prompts)}) > 3


def test_generate_meets_target_without_value_model(base, prompts):
    """With the model's own sampling parameters and another processor before this package's."""

    def always_possible(ids, scores):
        scores = scores.clone()
        scores[:, EOS] = scores.max(dim=1).values - 3
        return scores

    arguments = dict(max_new_tokens=40, logits_processor=[always_possible], pad_token_id=PAD, num_return_sequences=8)
    lengths = {}
    for target in (4, 11, 26):
        torch.manual_seed(1)
        outputs = outputs_of(generate(base, **prompts, target_length=target, **arguments), prompts)
        lengths[target] = torch.tensor([len(output) for output in outputs]).double()
        assert len(outputs) == 24
    for target, found in lengths.items():
        assert (found - target).abs().mean() < 0.25 * target, (target, found)
    weak = outputs_of(generate(base, **prompts, guidance={"strength": 0}, target_length=26, **arguments), prompts)
    assert min(map(len, weak)) < 10 and max(map(len, weak)) == 40


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(num_return_sequences=0), "num_return_sequences must be at least 1, got 0"),
        (dict(do_sample=False), "do_sample must be True: guided tokens are sampled, got False"),
        (dict(num_beams=4), "num_beams must be 1: guided tokens are sampled, got 4"),
        (dict(guidance=[None]), "target_length must be None unless guidance is a mapping or None, got 5"),
        (dict(target_length=None, guidance=[None]), "guidance must be one for all or one for each of the 3 prompts"),
        (dict(guidance={"op": "eq"}), "value_constraint must be one of near, ge_near, le_near without a value model"),
        (dict(top_p=0.0), "top_p must be a number in"),
        (
            dict(pixel_values=torch.ones(1), image_grid_thw=torch.ones(1), num_return_sequences=2),
            "num_return_sequences must be 1 with pixel_values, got 2",
        ),
    ],
)
def test_generate_rejects_bad_arguments_by_name(base, prompts, changes, message):
    with pytest.raises(ValueError, match=message):
        generate(base, **prompts, **{"target_length": 5, "max_new_tokens": 4} | changes)


@pytest.mark.parametrize(("changed", "more"), [((1, 2), 1), ((0, 5), 1), (None, 0), (None, 2)])
def test_sequences_that_do_not_continue_the_last_step_are_rejected(base, value_model, prompts, changed, more):
    """Sequences with changed tokens, and sequences that have not grown by exactly one token."""
    processor, ids = make(base, value_model, attention_mask=prompts["attention_mask"]), prompts["input_ids"]
    processor(ids, torch.zeros(3, VOCAB))
    grown = torch.cat([ids, torch.full((3, more), 30)], dim=1)
    if changed is not None:
        grown[changed] += 1
    with pytest.raises(ValueError, match="expected the prompts and 1 new tokens, got"):
        processor(grown, torch.zeros(3, VOCAB))


def test_published_way_as_processor(base, value_model, prompts):
    """The processor of ``bench.ways`` gives this package's probabilities in each row until the answer ends."""
    guidance, steps, width = {"value_mode": "mul", "value_scale": 0.97}, 24, prompts["input_ids"].shape[1]
    torch.manual_seed(5)
    options = dict(ways.SAMPLING, max_candidates=ways.SAMPLING["top_k"])
    processor = LenVMLogitsProcessor(
        base, value_model, guidance, prompts["attention_mask"], max_new_tokens=steps, **options
    )
    output = base.generate(**prompts, **processor.generation_kwargs, **KEEP_SCORES, output_logits=True)
    theirs = ways.TwoForwardProcessor(value_model, guidance, prompts["attention_mask"], steps, [EOS])
    compared = {0: 0, 1: 0, 2: 0}
    for step, (logits, scores) in enumerate(zip(output.logits, output.scores, strict=True)):
        found = theirs(output.sequences[:, : width + step], logits)
        for row in compared:
            if EOS not in output.sequences[row, width : width + step]:
                torch.testing.assert_close(found[row].exp(), scores[row].exp(), rtol=0, atol=1e-4)
                compared[row] += 1
    assert min(compared.values()) < steps == max(compared.values())  # one row ends earlier
    # Ended rows are no longer computed.
    assert theirs.step.requests.keys() == {row for row, count in compared.items() if count == steps}
