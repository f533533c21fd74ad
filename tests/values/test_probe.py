"""A probe: checkpoint, guided steps, and ``generate`` of transformers, against values of each sequence."""

import gc
import math
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import lenvm_kernels
from lenvm_kernels.engines.probe_states import ProbeStates
from lenvm_kernels.engines.transformers.processor import LenVMLogitsProcessor
from lenvm_kernels.guidance import GuidanceTable, parse_guidance
from lenvm_kernels.ops import ragged_linear
from lenvm_kernels.ops.reweight_scatter import reweight_scatter
from lenvm_kernels.step import StepBatch, working_bytes
from lenvm_kernels.types import Drafts
from lenvm_kernels.values import LengthProbe
from lenvm_kernels.values.probe import CONFIG_FILE, TENSORS_FILE, ProbeConfig, embedding_signs
from tests.helpers.engine import make_step, random_scores, take_step
from tests.helpers.models import EOS, TINY, VOCAB, change_checkpoint, random_model
from tests.helpers.probes import model_sizes, probe_values, write_random_probe
from tests.helpers.watch import PeakMemory

NEAR = {"target_length": 20, "strength": 4, "gamma": 0.99}
SAMPLING = dict(top_k=4, top_p=1.0, min_p=0.0, sample=True)
# Rows differ in all inputs of a probe; the third is unguided, the last has no near constraint.
GUIDANCE = [
    NEAR,
    NEAR | {"op": "ge_near", "strength": 2},
    None,
    NEAR | {"op": "le_near", "target_length": 14, "return_values": True},
    {"value_mode": "centered_exp", "value_scale": -20, "gamma": 0.99},
]


@pytest.fixture(scope="module")
def base():
    return random_model(LlamaForCausalLM, LlamaConfig(**TINY | {"num_hidden_layers": 3}), seed=0)


@pytest.fixture(scope="module", params=[(3,), (2, 3, 1)], ids=["last", "several"])
def folder(request, base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("probe")
    write_random_probe(folder, base, request.param)
    return folder


@pytest.fixture(scope="module")
def probe(folder, base):
    return LengthProbe.from_pretrained(folder, *model_sizes(base))


def table_of(guidance, early=0.0):
    table = GuidanceTable(len(guidance), "cpu", early=early)
    for row, one in enumerate(guidance):
        table.add_request(row, parse_guidance(one) if one else None, {EOS})
    return table.columns


def states_of(probe, rows, seed=1):
    return torch.randn(rows, probe.config.state_size, generator=torch.Generator().manual_seed(seed))


def test_network_matches_torch_functions(probe, folder, base):
    """Computed from the stored tensors in fp64; the value is the mean over the bins. Padding has the logit 0."""
    stored = {name: tensor.double() for name, tensor in load_file(folder / TENSORS_FILE).items()}
    embedding, states = base.get_input_embeddings().weight.double(), states_of(probe, 2)
    scale, shift = F.linear(states.double(), stored["projection.weight"], stored["projection.bias"]).chunk(2, 1)
    e = F.linear(embedding[[5, 7]], stored["embedding.weight"], stored["embedding.bias"])
    hidden = F.silu(F.linear(F.silu(shift + scale * e), stored["fc.weight"], stored["fc.bias"]))
    probs = F.linear(hidden, stored["bins.weight"], stored["bins.bias"]).softmax(1)
    edges, gammas = torch.tensor(probe.config.bin_edges).double(), torch.tensor([[0.99], [0.9]]).double()
    values = (probs * (1 - gammas ** ((edges[:-1] + edges[1:] - 1) / 2))).sum(1)
    rows = dict(table_rows=torch.tensor([1, 0]), generated=torch.zeros(2).int())
    table = table_of([{"value_mode": "mul", "value_scale": 2, "gamma": gamma} for gamma in (0.9, 0.99)])
    logits, mean = probe.value_logits(states, torch.tensor([[5, -1], [7, -1]]), table, **rows)
    torch.testing.assert_close(mean[:, 0].double(), torch.logit(values), rtol=1e-4, atol=1e-4)
    assert torch.equal(logits, mean) and not mean[:, 1].any() and not mean.requires_grad


@pytest.mark.parametrize("has_text_breaks", [False, True])
def test_step_is_guided_by_values_of_its_states(probe, has_text_breaks):
    """Table rows are in another order than the batch."""
    breaks = torch.zeros(VOCAB, dtype=torch.int8) if has_text_breaks else None
    step, _ = make_step(probe, max_candidates=4, text_breaks=breaks)
    table_rows, prompt_lens, generated = [6, 1, 3, 0, 5], [3, 1, 4, 2, 6], torch.tensor([5, 0, 3, 12, 2]).int()
    for row, guidance, prompt_len in zip(table_rows, GUIDANCE, prompt_lens, strict=True):
        step.add_request(row, parse_guidance(guidance) if guidance else None, {EOS}, prompt_len=prompt_len)
    scores, states = random_scores(5).softmax(1), states_of(probe, 5)
    tokens, rows = torch.tensor([3, 4, 5, 6, 7]), torch.tensor(table_rows)
    lengths = torch.tensor(prompt_lens).int() + generated
    output = take_step(step, scores, tokens, rows, lengths, states=states, drawn=tokens, **SAMPLING)
    assert output.candidates.status.tolist()[2] != output.candidates.status.tolist()[0]

    guided = [0, 1, 3, 4]
    guided_rows = dict(table_rows=torch.tensor(guided), generated=generated[guided])
    ids = output.candidates.token_ids[guided]
    table = table_of(GUIDANCE, 6.0 * has_text_breaks)
    expected, mean = probe.value_logits(states[guided], ids, table, **guided_rows)
    torch.testing.assert_close(output.value_logits[guided], expected, rtol=1e-4, atol=1e-4)
    again = reweight_scatter(output.candidates, output.value_logits, table, generated=generated, text_breaks=breaks)
    torch.testing.assert_close(output.probs, again, rtol=0, atol=1e-6)
    # Lengths are predicted from the mean, not from the guiding value.
    place = output.candidates.token_ids[3].tolist().index(int(output.tokens[3]))
    length = F.softplus(mean[2, place]) / -math.log(0.99) * (int(output.tokens[3]) != EOS)
    torch.testing.assert_close(output.remaining_lengths[3], length, rtol=1e-3, atol=1e-3)
    assert output.remaining_lengths[:3].isnan().all() and (expected[2] - mean[2]).abs().max() > 0.1
    after = StepBatch(output.tokens, rows, lengths + 1, states=states)
    torch.testing.assert_close(step.predict(after), output.remaining_lengths, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("split_from", [1, 10**6])
def test_row_bytes_are_the_memory_of_the_projection(probe, monkeypatch, split_from):
    """With and without partial sums. A row also has two fp32 value logits."""
    monkeypatch.setattr(ragged_linear, "SPLIT_FROM", split_from)
    states, token_ids, table = states_of(probe, 64), torch.full((64, 1), 5), table_of([NEAR])
    rows = dict(table_rows=torch.zeros(64, dtype=torch.int64), generated=torch.zeros(64).int())
    with PeakMemory() as memory:
        probe.value_logits(states, token_ids, table, **rows, backend="triton")
    bound = working_bytes(probe, requests=64, max_len=1, vocab_size=VOCAB)
    bound -= working_bytes(None, requests=64, max_len=1, vocab_size=VOCAB)
    assert bound == 64 * probe.row_bytes
    assert bound < memory.peak <= bound + 64 * 8 + 512


def test_every_node_of_drafts_has_states(probe):
    step, _ = make_step(probe, max_candidates=4, max_drafts=2)
    for row, guidance in ((2, GUIDANCE[0]), (4, GUIDANCE[3])):
        step.add_request(row, parse_guidance(guidance), {EOS}, prompt_len=2)
    drafts = Drafts(torch.tensor([[8, 9], [10, -1]]).int(), torch.tensor([[-1, 0], [-1, -1]]).int())
    states, rows = states_of(probe, 6), torch.tensor([2, 4])
    lengths = torch.tensor([5, 9]).int()
    output = take_step(
        step, random_scores(6).softmax(1), torch.tensor([5, 6]), rows, lengths, drafts=drafts, states=states, **SAMPLING
    )
    nodes = dict(table_rows=torch.tensor([0, 0, 0, 1, 1, 1]), generated=torch.tensor([3, 4, 5, 7, 8, 9]).int())
    expected, _ = probe.value_logits(states, output.candidates.token_ids, table_of([GUIDANCE[0], GUIDANCE[3]]), **nodes)
    existing = [0, 1, 2, 3, 4]  # the last node has no draft
    torch.testing.assert_close(output.value_logits[existing], expected[existing], rtol=1e-4, atol=1e-4)


FLOAT32 = r"batch.states must be (a tensor )?float32 \[2, \d+\] on cpu, got "
NO_STATES = "batch.states must be None without a probe"


@pytest.mark.parametrize(
    ("has_probe", "change", "message"),
    [
        (True, lambda states: None, f"{FLOAT32}NoneType"),
        (True, lambda states: states[:, :5], rf"{FLOAT32}float32 \[2, 5\]"),
        (True, lambda states: states.half(), f"{FLOAT32}float16"),
        (True, lambda states: states[:1], rf"{FLOAT32}float32 \[1, "),
        (False, lambda states: states, NO_STATES),
    ],
)
def test_states_are_checked(probe, has_probe, change, message):
    batch = torch.tensor([5, 6]), torch.tensor([0, 1]), torch.tensor([3, 3]).int()
    step, scores = make_step(probe if has_probe else None)[0], random_scores(2).softmax(1)
    with pytest.raises((TypeError, ValueError), match=message):
        take_step(step, scores, *batch, states=change(states_of(probe, 2)), **SAMPLING)


def test_value_min_is_rejected_with_near(probe):
    step, _ = make_step(probe)
    with pytest.raises(ValueError, match=r"value_min must be absent with near and a probe, got 0.5"):
        step.add_request(0, parse_guidance(NEAR | {"value_min": 0.5}), {EOS})
    step.add_request(0, parse_guidance(GUIDANCE[4] | {"value_min": 0.5}), {EOS})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_generate_is_guided_by_the_models_own_states(base, folder, dtype, tmp_path):
    """Prompts of 6, 3 and 1 tokens, padded on the left; each step against forwards over single sequences."""
    model = LlamaForCausalLM(base.config).to(dtype).eval()
    model.load_state_dict(base.state_dict())
    model.save_pretrained(tmp_path)  # each sequence's values are computed in fp32
    probe = LengthProbe.from_pretrained(folder, *model_sizes(model))
    assert probe.dtype == dtype
    ids = torch.tensor([[5, 6, 7, 8, 9, 10], [0, 0, 0, 11, 12, 13], [0] * 5 + [14]])
    short = NEAR | {"target_length": 8}  # within max_new_tokens
    mask, guidance = (ids != 0).long(), [short, short | {"op": "ge_near"}, short | {"target_length": 7}]
    options = dict(max_new_tokens=8, temperature=0.7, top_k=4, record=True)
    processor = LenVMLogitsProcessor(model, probe, guidance, mask, **options)
    torch.manual_seed(0)
    output = model.generate(input_ids=ids, attention_mask=mask, pad_token_id=0, **processor.generation_kwargs)
    count = 0
    for number, record in enumerate(processor.records):
        rows = [row for row in range(3) if EOS not in output[row, 6 : 6 + number]]
        starts, ids = (mask == 0).sum(1).tolist(), record.candidates.token_ids.tolist()
        tokens = [output[row, starts[row] : 6 + number].tolist() for row in range(3)]
        asked = [(guidance[row], 6 - starts[row], tokens[row], ids[row]) for row in rows]
        expected, _ = probe_values(tmp_path, folder, asked)
        tolerance = dict(rtol=1e-3, atol=1e-3) if dtype == torch.float32 else dict(rtol=0.1, atol=0.15)
        torch.testing.assert_close(record.value_logits[rows], expected, **tolerance)
        count += len(rows)
    assert count > 12


@torch.no_grad()
def test_output_lengths_are_predicted_from_the_first_tokens(base, probe):
    ids, wants = torch.tensor([[5, 6, 7, 8], [0, 0, 11, 12], [0, 0, 0, 14], [0, 0, 0, 15]]), {"return_values": True}
    mask, guidance = (ids != 0).long(), [wants, NEAR | wants | {"gamma": 0.95}, NEAR, wants]
    processor = LenVMLogitsProcessor(base, probe, guidance, mask, max_new_tokens=3)
    torch.manual_seed(0)
    output = base.generate(input_ids=ids, attention_mask=mask, pad_token_id=0, **processor.generation_kwargs)
    output[0, 4], output[3, 4] = 33, EOS  # any token, including the end
    lengths, states = processor.predicted_output_lengths(output), ProbeStates(base, probe.config.layers, last=True)
    for row, gamma in enumerate((0.99, 0.95)):
        base(ids[row : row + 1, mask[row] == 1])
        operands = states.take(), output[row, None, 4:5].int(), table_of([NEAR | {"gamma": gamma}])
        _, mean = probe.value_logits(*operands, table_rows=torch.tensor([0]), generated=torch.zeros(1).int())
        assert lengths[row] == pytest.approx(1 + F.softplus(mean).item() / -math.log(gamma), abs=5e-3)
    assert lengths[2:] == [None, 1.0]


def test_hooks_are_removed_with_their_states():
    model = random_model(LlamaForCausalLM, LlamaConfig(**TINY | {"num_hidden_layers": 3}))
    inputs = torch.tensor([[5, 6, 7]])
    hidden = model(inputs, output_hidden_states=True).hidden_states

    def hooks():
        return [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]

    before, states = hooks(), ProbeStates(model, (1, 3), last=True)
    assert sum(hooks()) == sum(before) + 2
    with pytest.raises(RuntimeError, match="has not run since its states were taken"):
        states.take()
    model(inputs)
    assert torch.equal(states.take(), torch.cat([hidden[1][:, -1], hidden[3][:, -1]], dim=1))
    with pytest.raises(RuntimeError):
        states.take()
    del states
    gc.collect()
    assert hooks() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": [4]}, r"probe_config.json: layers must be in 1 to num_layers = 3, got \[4\]"),
        ({"bin_edges": [1, 1]}, r"bin_edges must be 2 to 65 ascending integers of at least 1, got \[1, 1\]"),
        ({"hidden_size": 0}, "hidden_size must be an integer of at least 1, got 0"),
        ({"more": 1}, "more in .*probe_config.json is not a field"),
        ({"layers": None, "base": None}, "probe_config.json must have the fields base, layers"),
        ({"num_layers": 5}, "the base model must be 'tiny' with 5 layers, got one with 3"),
        ({"hidden_size": 24}, r"projection.weight must be \[32, 24\], got \[32, 48\]"),
        ({"vocab_size": 500}, "the base model must be 'tiny' with 500 tokens, got one with"),
        ({"embedding_signs": "0f" * 128}, "the base model must be 'tiny', got one with another embedding"),
        ({"embedding_signs": "0"}, "embedding_signs must be 256 hexadecimal digits, got '0'"),
        (lambda x: {n: x[n] for n in x if n != "fc.bias"}, "tensors must be projection.weight, .* got"),
        (lambda x: x | {"fc.bias": torch.zeros(3)}, r"fc.bias must be \[24\], got \[3\]"),
        (lambda x: x | {"bins.weight": torch.zeros(3, 24)}, r"bins.weight must be \[7, 24\], got \[3, 24\]"),
    ],
)
def test_probe_that_does_not_fit_is_rejected(base, tmp_path, change, message):
    write_random_probe(tmp_path, base)
    change_checkpoint(tmp_path / CONFIG_FILE, tmp_path / TENSORS_FILE, change)
    with pytest.raises(ValueError, match=message):
        LengthProbe.from_pretrained(tmp_path, *model_sizes(base))


def quantized(x, levels, group):
    """``x`` rounded to integers up to ``levels`` of the largest magnitude in each group."""
    groups = x.float().view(-1, group)
    step = groups.abs().amax(1, keepdim=True) / levels
    return ((groups / step).round() * step).view_as(x)


# Embeddings by name, computed from the base model's bfloat16 embedding, and whether they are accepted.
COPIES = {
    "float16": (lambda x: x.half(), True),
    "float32": (lambda x: x.float(), True),
    "float8": (lambda x: (x / x.abs().max() * 448).to(torch.float8_e4m3fn).float(), True),
    "int8": (lambda x: quantized(x, 127, 3584), True),
    "int4": (lambda x: quantized(x, 7, 128), True),
    "int4 beside outliers": (lambda x: quantized(x, 3, 128), True),
    "padded": (lambda x: torch.cat([x, x[:64]]), True),
    "of another seed": (lambda x: torch.randn(x.shape, generator=torch.Generator().manual_seed(1)), False),
    "of other tokens": (lambda x: x.roll(1, 0), False),
    "of other columns": (lambda x: x.roll(1, 1), False),
    "of other columns but the first": (lambda x: torch.cat([x[:, :1], x[:, 1:].roll(1, 1)], 1), False),
    "of other tokens but the first": (lambda x: torch.cat([x[:1], x[1:].roll(1, 0)]), False),
    "positive": (lambda x: x.abs(), False),
    "two thirds replaced": (lambda x: torch.cat([x[: len(x) // 3], x[len(x) // 3 :].flip(1)]), False),
}


def test_copies_of_the_base_model_in_other_dtypes_are_accepted():
    """Normal values, as in a checkpoint. The smallest values underflow in float16."""
    embedding = (torch.randn(4096, 3584, generator=torch.Generator().manual_seed(0)) * 0.01).bfloat16()
    assert ((embedding < 0) != (embedding.half() < 0)).any()
    config = ProbeConfig("base", (2,), 2, 3584, 4096, embedding_signs(embedding), (1, 2, 4))
    for copy, is_accepted in COPIES.values():
        with nullcontext() if is_accepted else pytest.raises(ValueError, match="another embedding"):
            config.check_base(2, copy(embedding))


def test_base_model_and_dtype_of_a_probe_are_checked(probe, folder):
    with pytest.raises(ValueError, match="with 48 columns in its embedding, got one with 24"):
        probe.config.check_base(3, torch.zeros(VOCAB, 24))
    with pytest.raises(ValueError, match="embedding must be float32, bfloat16 or float16, got float64"):
        LengthProbe(probe.config, load_file(folder / TENSORS_FILE), torch.zeros(VOCAB, 48).double())


def test_mixture_of_experts(tmp_path, put_into_cache):
    """``lenvm_kernels.generate`` with a mixture of experts and a probe loaded by name."""
    sizes = TINY | dict(num_hidden_layers=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
    model = random_model(Qwen3MoeForCausalLM, Qwen3MoeConfig(**sizes), seed=4)
    write_random_probe(tmp_path / "probe", model, (1, 2))
    put_into_cache("owner/probe", tmp_path / "probe")
    probe = LengthProbe.from_pretrained("owner/probe", *model_sizes(model))
    inputs = dict(input_ids=torch.tensor([[5, 6, 7], [8, 9, 10]]), attention_mask=torch.ones(2, 3).long())
    torch.manual_seed(0)
    output = lenvm_kernels.generate(model, **inputs, value_model=probe, max_new_tokens=12, target_length=5)
    assert output.shape[0] == 2 and output.shape[1] > 3
