"""The ``transformers`` adapter: ``generate`` with tiny models, against a plain implementation of the step."""

from collections import Counter
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from lenvm_kernels.engines.transformers import processor as transformers_adapter
from lenvm_kernels.engines.transformers.generate import generate, load_value_model
from lenvm_kernels.engines.transformers.processor import LenVMLogitsProcessor
from lenvm_kernels.types import Status
from lenvm_kernels.values import LengthProbe, ValueModel
from tests.helpers import models
from tests.helpers.models import last_value_logits, random_head, random_model, tokenizer_of
from tests.helpers.oracle import PlainStep
from tests.helpers.probes import write_random_probe

VOCAB, HIDDEN, EOS, PAD = 61, 32, 2, 0
TINY = models.TINY | dict(vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48, max_position_embeddings=128)
TINY |= dict(eos_token_id=EOS, pad_token_id=PAD)
SHORTER = {"value_mode": "centered_exp", "value_scale": -20}
KEEP_SCORES = dict(return_dict_in_generate=True, output_scores=True, pad_token_id=PAD)
NEUTRAL = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
FILTERS = dict(temperature=0.7, top_k=6, top_p=0.95, min_p=0.01)


# Three prompts of 6, 3 and 1 tokens, padded on the left.
IDS = torch.tensor([[5, 6, 7, 8, 9, 10], [PAD, PAD, PAD, 11, 12, 13], [PAD] * 5 + [14]])
PROMPTS = dict(input_ids=IDS, attention_mask=(IDS != PAD).long())
SCORES = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def tiny():
    """A base model, a value model, a function for value logits at the last tokens of sequences by full forwards, and a
    function that creates a processor for the prompts."""
    base = random_model(LlamaForCausalLM, LlamaConfig(**TINY), seed=0)
    backbone, head = random_model(Qwen2ForCausalLM, Qwen2Config(**TINY), seed=1), random_head(2, HIDDEN)
    value_model = ValueModel.from_causal_lm(backbone, head)

    def make(**changes):
        arguments = dict(model=base, value_model=value_model, guidance=SHORTER, max_new_tokens=4)
        return LenVMLogitsProcessor(**arguments | {"attention_mask": PROMPTS["attention_mask"]} | changes)

    values = lambda sequences: last_value_logits(backbone, head, sequences).tolist()  # noqa: E731
    return SimpleNamespace(base=base, value_model=value_model, values=values, make=make)


def with_likely(*ends):
    """Logits processors that raise the probability of these tokens."""

    def process(ids, scores):
        scores = scores.clone()
        scores[:, list(ends)] = scores.max(dim=1, keepdim=True).values - 3
        return scores

    return [process]


def lengths_of(new, ends=(EOS,)):
    """Number of tokens before the first end in each row."""
    rows = [next((i for i, token in enumerate(row) if token in ends), len(row)) for row in new.tolist()]
    return torch.tensor(rows, dtype=torch.float64)


def steps_of(output):
    """(row, step, previous tokens, scores, drawn token) for each row of ``generate``'s output up to its end."""
    width = IDS.shape[1]
    for row, sequence in enumerate(output.sequences.tolist()):
        start = int((IDS[row] == PAD).sum())
        for step, scores in enumerate(output.scores):
            if EOS in sequence[width : width + step]:
                break
            yield row, step, sequence[start : width + step], scores[row], sequence[width + step]


class Case(NamedTuple):
    """Guidance of a call of ``generate``, and the minimum number of rows per kind."""

    guidance: object
    least: dict
    steps: int = 8
    sampling: dict = FILTERS


SPANS = [
    SHORTER | {"end_token_ids": [20, 21], "hard_limit": 7},
    SHORTER | {"end_token_ids": [23], "allow_eos": True, "hard_limit": 5},
    {"end_token_ids": [22], "hard_limit": 3},
]
HOT = NEUTRAL | {"temperature": 0.7}
CASES = {
    "tilt": Case(SHORTER, {"GUIDE": 12}),
    "own parameters": Case(
        [{"target_length": 6, "op": "eq_soft", "gamma": 0.9}, SHORTER, {"target_length": 3, "gamma": 0.8}], {"GUIDE": 9}
    ),
    # Later steps get all tokens of the skipped steps.
    "skipped steps": Case(SHORTER | {"entropy_threshold": 1.9}, {"SKIP": 3, "GUIDE": 6}, 12, NEUTRAL),
    "spans": Case(SPANS, {"GUIDE": 8, "hard limit": 2, "after span": 12, "unguided": 3}, 16, HOT),
    # A prompt with an end, as from a chat template with thinking disabled, is neither guided nor forced.
    "closed span": Case(
        SHORTER | {"end_token_ids": [13], "hard_limit": 2}, {"GUIDE": 4, "hard limit": 1, "after span": 4}, 4, HOT
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_of_generate_match_plain_steps(tiny, name):
    """All rows of all steps, their drawn tokens, and the recorded values and probabilities."""
    case, oracle = CASES[name], PlainStep(tiny.values, EOS)
    options = dict(max_new_tokens=case.steps, record=name == "own parameters", **case.sampling)
    processor = tiny.make(guidance=case.guidance, **options)
    torch.manual_seed(3)
    output, found = tiny.base.generate(**PROMPTS, **processor.generation_kwargs, **KEEP_SCORES), Counter()
    for row, step, prefix, scores, token in steps_of(output):
        guidance = case.guidance if isinstance(case.guidance, dict) else case.guidance[row]
        with torch.no_grad():
            logits = tiny.base(torch.tensor([prefix])).logits[0, -1].double()
        expected, of_tokens, kind = oracle.row(logits, prefix, step, guidance, case.sampling)
        where = f"row {row}, step {step}, {kind}"
        assert (scores.exp() - expected).abs().max() < 1e-4 and expected[token] > 0, where
        found[kind] += 1
        if processor.records:
            record = processor.records[step]
            columns = record.candidates.token_ids[row], record.value_logits[row], record.probs[row]
            recorded = {token: (z, p) for token, z, p in zip(*(x.tolist() for x in columns), strict=True) if token >= 0}
            wanted = {t: pytest.approx((z, expected[t].item()), abs=1e-4) for t, z in of_tokens.items()}
            assert recorded == wanted, where
    assert all(found[kind] >= count for kind, count in case.least.items()), found
    assert len(processor.records) == (len(output.scores) if options["record"] else 0)
    assert processor.faults == [0, 0, 0]


EACH_FILTER = [{"temperature": 2.0}, {"top_k": 5}, {"top_p": 0.3}, {"min_p": 0.2}]


@pytest.mark.parametrize("filters", [FILTERS, *EACH_FILTER])
def test_unguided_rows_are_unchanged_by_the_processor(tiny, filters):
    """Unguided rows keep the base model's distribution and filters in a batch with a guided row."""
    kwargs = tiny.make(guidance=[None, SHORTER, {}], max_new_tokens=1, **filters).generation_kwargs
    guided = tiny.base.generate(**PROMPTS, **kwargs, **KEEP_SCORES).scores[0]
    options = dict(max_new_tokens=1, do_sample=True) | NEUTRAL | filters
    plain = tiny.base.generate(**PROMPTS, **options, **KEEP_SCORES).scores[0]
    close = (torch.softmax(guided, 1) - torch.softmax(plain, 1)).abs().amax(1) < 1e-6
    assert close.tolist() == [True, False, True]


def test_output_lengths_are_predicted_from_prompts(tiny, monkeypatch):
    """Rows with ``return_values``, guided or not. Unguided rows draw the same tokens, without forwards in steps."""
    guidance = [{"return_values": True, "gamma": 0.9} | SHORTER, SHORTER, {"return_values": True, "gamma": 0.95}]
    processor = tiny.make(guidance=guidance)
    output = tiny.base.generate(**PROMPTS, **processor.generation_kwargs, pad_token_id=PAD)
    z = tiny.values([IDS[row, start:].tolist() for row, start in enumerate((0, 3, 5))])
    lengths = torch.nn.functional.softplus(torch.tensor(z)) / -torch.tensor([0.9, 0.997, 0.95]).log()
    expected = [pytest.approx(length, rel=1e-3) for length in lengths.tolist()]
    assert processor.predicted_output_lengths(output) == [expected[0], None, expected[2]]
    with pytest.raises(ValueError, match=r"sequences must be \[3, 6 \+ N\], .* got \[3, 6\]"):
        processor.predicted_output_lengths(IDS)

    forwards, forward, outputs = [], tiny.value_model.forward, []
    monkeypatch.setattr(tiny.value_model, "forward", lambda *a, **k: (forwards.append(1), forward(*a, **k))[1])
    for changes in (dict(value_model=None, guidance=None), dict(guidance={"return_values": True})):
        processor = tiny.make(max_new_tokens=9, **changes)
        torch.manual_seed(3)
        outputs.append(tiny.base.generate(**PROMPTS, **processor.generation_kwargs, pad_token_id=PAD))
    assert torch.equal(*outputs) and 1 <= len(forwards) <= 2
    assert processor.predicted_output_lengths(outputs[1])[1] == expected[1]


def test_token_temperature_scale(tiny):
    """Scales multiply logits of any number of tokens before all filters; ids outside the vocabulary are ignored."""
    before = SCORES.clone()
    params = {"token_temperature_scale": {20: 3.0} | {30 + i: 2.0 for i in range(30)} | {10_000: 2.0}}
    actual = tiny.make(guidance=params)(IDS, SCORES)
    assert torch.equal(SCORES, before)
    before[:, 20] *= 3
    before[:, 30:60] *= 2
    torch.testing.assert_close(actual, torch.log_softmax(before, 1))


def test_ended_rows_are_not_guided(tiny, monkeypatch):
    """Rows end at the first of several end-of-sequence tokens, with any padding."""
    monkeypatch.setattr(tiny.base.generation_config, "eos_token_id", [EOS, 33])
    processor, tokens = tiny.make(record=True), IDS
    processor(tokens, SCORES)
    for new in ([EOS, 7, 8], [9, 33, 10], [PAD, PAD, 11]):
        tokens = torch.cat([tokens, torch.tensor(new)[:, None]], dim=1)
        processor(tokens, SCORES)
    found = [(record.candidates.status == Status.GUIDE).tolist() for record in processor.records]
    assert found == [[True] * 3, [False, True, True], [False, False, True], [False, False, True]]
    monkeypatch.setattr(tiny.base.generation_config, "eos_token_id", None)
    assert tiny.make()(IDS, torch.zeros(3, VOCAB)).isfinite().any(dim=1).all()


def test_non_finite_scores_only_affect_their_row(tiny):
    clean, broken, processor = tiny.make()(IDS, SCORES), SCORES.clone(), tiny.make()
    broken[1, 7] = torch.nan
    torch.testing.assert_close(processor(IDS, broken)[[0, 2]], clean[[0, 2]])
    assert processor.faults == [0, 1, 0]
    lost = [outcome["lost"] for outcome in processor.outcomes(torch.cat([IDS, IDS], dim=1))]
    assert lost == [None, "scores or values were not finite, number of steps: 1", None]


def test_outcomes_of_rows(tiny):
    """Rows end at different steps, prompts have different lengths, and a row is unguided."""
    processor = tiny.make(guidance=[{"target_length": 9}, None, {"thinking_budget": 5, "end_token_ids": [PAD]}])
    outputs = torch.tensor([[7, 8, EOS, PAD], [7, 8, EOS, PAD], [7, 8, PAD, EOS]])
    first, second, third = processor.outcomes(torch.cat([IDS, outputs], dim=1))
    assert second is None and (first["target"], first["length"], first["thought"]) == (9, 2, None)
    assert (third["constraint"], third["length"], third["thought"]) == ("le_near", 2, 2)


def test_guidance_uses_the_maximum_of_its_prompt(tiny):
    soft = tiny.make(guidance={"soft_max_tokens": True}, max_new_tokens=[10, 40, 20])
    assert [params.target_length for params in soft.params] == [8, 32, 16]
    assert soft.generation_kwargs["max_new_tokens"] == 40


# Changed arguments of the processor and of ``generate``, and their errors.
PADDING = "attention_mask must be .* padded on the left"
OF_PROCESSOR = [
    *(({"attention_mask": torch.tensor(x)}, PADDING) for x in ([[1, 1, 0], [1] * 3], [1] * 4, [[0] * 3, [1] * 3])),
    ({"attention_mask": torch.tensor([[1, 0, 1], [1, 1, 1]])}, "attention_mask must be .* padding elsewhere"),
    ({"guidance": [SHORTER]}, "guidance must be one for all or one for each of the 3 prompts, got 1"),
    ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, for all or for each of the 3 prompts, got 0"),
    ({"max_new_tokens": [4, 0, 9]}, r"max_new_tokens must be at least 1, .*, got \[4, 0, 9\]"),
    ({"max_new_tokens": [4, 9]}, r"max_new_tokens must be .* each of the 3 prompts, got \[4, 9\]"),
    *(({"temperature": x}, f"temperature must be a finite number >= 0, got {x}") for x in (-1.0, float("inf"))),
    *(({"top_k": x}, "top_k must be an integer >= 0") for x in (2**31, 5.0, -1)),
    *(({"top_p": x}, "top_p must be a number in") for x in (1.1, 0.0)),
    *(({"min_p": x}, "min_p must be a number in") for x in (-0.1, 1.5)),
    (
        {"tokenizers": (tokenizer_of("abc"), tokenizer_of("acb"))},
        r"value_model must share .*: 2 tokens differ, 'b' among them \(ids 1 and 2\)",
    ),
]
IMAGE = dict(pixel_values=torch.ones(1), image_grid_thw=torch.ones(1))
OF_GENERATE = [
    ({"num_return_sequences": 0}, "num_return_sequences must be at least 1, got 0"),
    ({"num_beams": 4}, "num_beams must be 1 with guidance, got 4"),
    ({"generation_config": GenerationConfig(num_beams=4)}, "num_beams must be 1 with guidance, got 4"),
    ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens must be None with guidance, got 3"),
    ({"decoder_input_ids": 7}, "decoder_input_ids must be None with guidance, got 7"),
    ({"inputs_embeds": torch.ones(3, 6, 8), "input_ids": None}, "inputs_embeds must be None with guidance, got Tensor"),
    ({"guidance": [None]}, "target_length must be None unless guidance is a mapping or None, got 5"),
    ({"target_length": None, "guidance": [None]}, "guidance must be one for all or one for each of the 3 prompts"),
    ({"guidance": {"op": "eq"}}, "value_constraint must be one of near, ge_near, le_near without a value model"),
    (IMAGE | {"num_return_sequences": 2}, "num_return_sequences must be 1 with pixel_values, got 2"),
]


@pytest.mark.parametrize(("changes", "message"), OF_PROCESSOR)
def test_bad_arguments_are_rejected_by_name(tiny, changes, message):
    with pytest.raises(ValueError, match=message):
        tiny.make(**changes)(IDS, SCORES)


@pytest.mark.parametrize(("changes", "message"), OF_GENERATE)
def test_generate_rejects_bad_arguments_by_name(tiny, changes, message):
    with pytest.raises(ValueError, match=message):
        generate(tiny.base, **PROMPTS | {"target_length": 5, "max_new_tokens": 4} | changes)


def test_vocabularies_may_only_differ_in_padding(tiny):
    other = LlamaForCausalLM(LlamaConfig(**TINY | {"vocab_size": VOCAB + 3}))
    with pytest.raises(ValueError, match="value_model must share the base model's vocabulary of 64 tokens, got 61"):
        tiny.make(model=other)
    assert tiny.make(model=other, tokenizers=(tokenizer_of("abc"), tokenizer_of("abc")))


def grown(columns, changed=None):
    """The prompts with new tokens, and a different token at ``changed``."""
    tokens = torch.cat([IDS, torch.full((3, columns), 30)], dim=1)
    if changed is not None:
        tokens[changed] += 1
    return tokens


ANOTHER = "expected the prompts and 1 new tokens, got .* make a new LenVMLogitsProcessor for each call of generate"
BEAMS = "generate runs 6 rows for 3 prompts: beam search"
NEXT = [(grown(1, (0, 5)), ANOTHER), (grown(0), ANOTHER), (grown(2), ANOTHER)]


@pytest.mark.parametrize(("tokens", "message"), [*NEXT, (grown(1).repeat_interleave(2, 0), BEAMS)])
def test_sequences_that_do_not_continue_the_last_step_are_rejected(tiny, tokens, message):
    processor = tiny.make()
    processor(IDS, SCORES)
    with pytest.raises(ValueError, match=message):
        processor(tokens, SCORES)


def test_generate_reads_sentence_ends_from_tokenizer(tiny, monkeypatch):
    """The step gets ``text_breaks`` of the tokenizer, or None without a tokenizer."""
    seen, make_step = [], transformers_adapter.GuidedStep
    monkeypatch.setattr(transformers_adapter, "GuidedStep", lambda *args: seen.append(args[-1]) or make_step(*args))
    arguments = dict(target_length=4, max_new_tokens=3, pad_token_id=PAD, value_model=tiny.value_model)
    for tokenizer in (tokenizer_of(["a", "b", "c", "d", "e", "f.", "g\n", "h"]), None):
        generate(tiny.base, **PROMPTS, tokenizer=tokenizer, **arguments)
    known, unknown = (config.text_breaks for config in seen)
    assert known.tolist() == [0, 0, 0, 0, 0, 2, 65, *[0] * (VOCAB - 7)] and unknown is None


@pytest.mark.parametrize("has_values", [True, False])
def test_generate_equals_explicit_use_of_the_processor(tiny, has_values):
    """Several samples per prompt in consecutive rows, each with the guidance of its prompt."""
    value_model = tiny.value_model if has_values else None
    guidance = [{"target_length": 2}, None, {"target_length": 12, "strength": 9}]
    options = dict(guidance=guidance, value_model=value_model, max_new_tokens=7, top_k=9, pad_token_id=PAD)
    torch.manual_seed(5)
    output = generate(tiny.base, **PROMPTS, **options, num_return_sequences=2, max_candidates=4)
    ids, mask = (PROMPTS[name].repeat_interleave(2, dim=0) for name in ("input_ids", "attention_mask"))
    doubled = [g for g in guidance for _ in range(2)]
    processor = LenVMLogitsProcessor(tiny.base, value_model, doubled, mask, max_new_tokens=7, top_k=9, max_candidates=4)
    torch.manual_seed(5)
    expected = tiny.base.generate(input_ids=ids, attention_mask=mask, **processor.generation_kwargs, pad_token_id=PAD)
    assert torch.equal(output, expected) and len(output.unique(dim=0)) > 3


@pytest.mark.parametrize("kind", [LengthProbe, ValueModel])
def test_generate_loads_values_from_a_path(tiny, tmp_path, kind):
    if kind is LengthProbe:
        write_random_probe(tmp_path, tiny.base)
    else:
        models.save_checkpoint(tmp_path, seed=3, words=[f"w{i}" for i in range(VOCAB)], value_head=True)
    loaded, outputs = load_value_model(tmp_path, tiny.base), []
    assert isinstance(loaded, kind)
    for values in (loaded, str(tmp_path), tiny.value_model):
        torch.manual_seed(1)
        options = dict(guidance=SHORTER, value_model=values, max_new_tokens=8, pad_token_id=PAD)
        outputs.append(generate(tiny.base, **PROMPTS, **options))
    assert torch.equal(*outputs[:2]) and not torch.equal(*outputs[1:])


def test_generate_meets_target_without_value_model(tiny):
    """With the model's sampling parameters, and another processor before this package's."""

    def lengths(target, **options):
        options |= dict(max_new_tokens=40, logits_processor=with_likely(EOS), pad_token_id=PAD)
        torch.manual_seed(1)
        output = generate(tiny.base, **PROMPTS, target_length=target, num_return_sequences=8, **options)
        return lengths_of(output[:, IDS.shape[1] :])

    for target in (6, 11, 26):
        found = lengths(target)
        assert len(found) == 24 and (found - target).abs().mean() < 0.25 * target, (target, found)
    weak = lengths(26, guidance={"strength": 0})
    assert weak.min() < 10 and weak.max() == 40


# Arguments of ``generate`` that set ends, and the expected ends.
ENDS = {
    "list": (dict(eos_token_id=[7, 9]), {7, 9}),
    "configuration": (dict(generation_config=GenerationConfig(eos_token_id=[7])), {7}),
    "argument before configuration": (dict(generation_config=GenerationConfig(eos_token_id=7), eos_token_id=9), {9}),
    "configuration without ends": (dict(generation_config=GenerationConfig(temperature=0.9)), {EOS}),
}


@pytest.mark.parametrize("name", ENDS)
def test_end_tokens_of_generate_are_the_ends(tiny, name):
    """They meet the target, and the model's end is an ordinary token."""
    options, ends = ENDS[name]
    torch.manual_seed(2)
    options |= dict(max_new_tokens=60, logits_processor=with_likely(EOS, *ends), pad_token_id=PAD)
    new = generate(tiny.base, **PROMPTS, target_length=20, num_return_sequences=8, **options)[:, 6:]
    assert abs(lengths_of(new, ends).mean() - 20) < 5 and (new == EOS).any()


GREEDY = [
    dict(do_sample=False),
    dict(top_k=1),
    dict(temperature=0.0),
    dict(generation_config=GenerationConfig(do_sample=False)),
]


@pytest.mark.parametrize("greedy", GREEDY)
def test_greedy_generate_is_guided(tiny, greedy):
    """Each token is the most probable, guided or not. Filters and seeds have no effect."""
    options, outputs = dict(max_new_tokens=8, pad_token_id=PAD), []
    for filters in (FILTERS | {"top_k": 0}, NEUTRAL):
        guided = options | dict(value_model=tiny.value_model, guidance=[SHORTER, None, SHORTER])
        outputs.append(generate(tiny.base, **PROMPTS, **guided | filters | greedy))
    plain = tiny.base.generate(**PROMPTS, do_sample=False, **options)
    assert torch.equal(*outputs) and torch.equal(outputs[0][1], plain[1]) and not torch.equal(outputs[0], plain)


def test_encoder_decoder_models_are_guided_without_values(tiny):
    """Inputs of the encoder are padded on the right; an output begins with the decoder's start token."""
    sizes = dict(encoder_layers=1, decoder_layers=1, encoder_ffn_dim=48, decoder_ffn_dim=48, d_model=32)
    sizes |= dict(vocab_size=VOCAB, encoder_attention_heads=4, decoder_attention_heads=4)
    tokens = dict(bos_token_id=1, pad_token_id=PAD, eos_token_id=EOS, decoder_start_token_id=EOS)
    config = BartConfig(**sizes, **tokens, forced_eos_token_id=None)
    base = random_model(BartForConditionalGeneration, config, seed=3)
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, PAD, PAD]])
    options = dict(attention_mask=(ids != PAD).long(), max_new_tokens=40, logits_processor=with_likely(EOS))
    for target in (5, 20):
        torch.manual_seed(1)
        output = generate(base, ids, target_length=target, num_return_sequences=8, **options)
        lengths = lengths_of(output[:, 1:])
        assert len(lengths) == 16 and abs(lengths.mean() - target) < 0.25 * target, lengths
    message = "value_model must be None with an encoder-decoder base model, got a ValueModel"
    with pytest.raises(ValueError, match=message):
        generate(base, ids, target_length=5, value_model=tiny.value_model, **options)
