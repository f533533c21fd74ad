"""Probes in the SGLang plugin, with a real server on CPU and without it. Skipped without SGLang."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang: make test-sglang")

from safetensors.torch import load_file
from sglang.srt.layers.logits_processor import LogitsMetadata, LogitsProcessor
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.sampling_params import SamplingParams
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from lenvm_kernels.engines.settings import Settings
from lenvm_kernels.engines.sglang.guide import SGLangGuide
from lenvm_kernels.engines.sglang.hooks import guidance_of
from lenvm_kernels.engines.sglang.states import INNER_PROBE_OPTIONS, PROBE_OPTIONS, ProbeGuide, input_embedding
from lenvm_kernels.guidance import GuidanceTable, parse_guidance
from lenvm_kernels.values import LengthProbe
from tests.helpers.models import random_model
from tests.helpers.probes import probe_values, write_random_probe
from tests.helpers.sglang_server import (
    GENTLE,
    HIDDEN,
    MODES,
    TINY,
    TWO_RANKS,
    VOCAB,
    cached_tokens,
    guided_rows,
    prompts_of,
    running_server,
    running_speculation,
)

LAYERS, GAMMA = 3, 0.9
PROBES = {"last": (LAYERS,), "deep": (2, LAYERS, 1)}
NEAR = [  # targets are below max_new_tokens, which would lower them
    {"target_length": 12},
    {"target_length": 14, "value_constraint": "ge_near"},
    {"target_length": 10, "value_constraint": "le_near"},
]
ATOL = 5e-4  # on value logits of O(1), fp32


@pytest.fixture(scope="module")
def folder(folder):
    """The checkpoints of all SGLang tests, and two probes of the base model: last states, and several layers."""
    base = random_model(Qwen2ForCausalLM, Qwen2Config(**TINY | {"num_hidden_layers": LAYERS}), seed=0)
    base.save_pretrained(folder / "base")
    for name, layers in PROBES.items():
        write_random_probe(folder / name, base, layers, gamma=GAMMA)
    return folder


def running_probe(folder, name, *options, start=running_server, **more):
    """A server with the probe of several layers."""
    return start(folder, name, "--chunked-prefill-size", "32", *options, LENVM_VALUE_MODEL=str(folder / "deep"), **more)


@pytest.fixture(scope="module")
def engine(folder):
    with running_probe(folder, "engine", "--enable-mixed-chunk", "--enable-metrics") as server:
        yield server


def values_of(folder, rows):
    """:func:`probe_values` of the probe of several layers, with the gamma that all requests have."""
    return probe_values(folder / "base", folder / "deep", [(params | {"gamma": GAMMA}, *row) for params, *row in rows])


def check_steps(folder, prompts, guidance, results, steps):
    """Check all values of all traced steps with the probe on a plain forward. Returns the number of values."""
    rows, found = [], []
    for prompt, params, result in zip(prompts, guidance, results, strict=True):
        traced, sequence = guided_rows(prompt, result, steps), [*prompt, *result["output_ids"]]
        assert traced or not params
        rows += [(params, len(prompt), sequence[: row["length"]], row["token_ids"]) for row in traced]
        found += [row["value_logits"] for row in traced]
    is_there = torch.tensor([token_ids for *_, token_ids in rows]) >= 0
    found, expected = torch.tensor(found)[is_there], values_of(folder, rows)[0][is_there]
    assert expected.std() > 100 * ATOL, "other states would give the same values"
    torch.testing.assert_close(found, expected, rtol=0, atol=ATOL)
    return len(found)


def test_every_mode_in_batch_with_unguided_requests(folder, engine):
    """Prompts are shorter and longer than a chunk, then in the radix cache, which all requests share."""
    prompts, guidance = prompts_of(*range(3, 90, 6)), [*MODES, *NEAR, None, {}]
    engine.generate(prompts[9:10], [None], max_new_tokens=1)
    for is_cached in (False, True):
        results, steps = engine.generate(prompts, guidance)
        assert check_steps(folder, prompts, guidance, results, steps) > 13 * 16
        lens = {result["meta_info"]["id"]: len(prompt) for prompt, result in zip(prompts, results, strict=True)}
        batches = [{row["length"] > lens[row["rid"]] for row in step["rows"]} for step in steps]
        assert {True} in batches and (is_cached or {True, False} in batches)
        assert all(cached_tokens(results)) if is_cached else cached_tokens(results)[9]
    # For log-probabilities of prompts, the engine computes logits of more rows than it samples.
    results, steps = engine.generate(prompts, guidance, request=dict(return_logprob=True, logprob_start_len=1))
    assert check_steps(folder, prompts, guidance, results, steps) > 13 * 16
    assert len(results[9]["meta_info"]["input_token_logprobs"]) == len(prompts[9]) - 1


def test_predicted_lengths(folder, engine):
    """Lengths are predicted after drawn tokens, guided or not; the output's length after its first token."""
    wants = {"return_values": True}
    prompts, guidance = prompts_of(9, 40, 14, seed=2), [wants, wants | NEAR[0], wants | GENTLE]
    results, _ = engine.generate(prompts, guidance)
    for prompt, params, result in zip(prompts, guidance, results, strict=True):
        output = result["output_ids"]
        rows = [(params, len(prompt), [*prompt, *output[:i]], [token]) for i, token in enumerate(output)]
        expected = torch.nn.functional.softplus(values_of(folder, rows)[1][:, 0]) / -math.log(GAMMA)
        found = torch.tensor(result["meta_info"]["predicted_remaining_lengths"])
        torch.testing.assert_close(found, expected, rtol=0, atol=5e-3)
        assert result["meta_info"]["predicted_output_length"] == pytest.approx([1 + found[0].item()], abs=2e-3)
    assert engine.metrics()["fallbacks_total"] == 0


def test_output_is_unchanged_by_drafts(folder, engine):
    """EAGLE's draft model gets the same states as without a probe, and its drafts are accepted."""
    prompts, tokens = prompts_of(*range(4, 70, 12), seed=20), dict(sampling_seed=5, max_new_tokens=24)
    guidance = [GENTLE, MODES[1], *NEAR, GENTLE | {"return_values": True}]
    plain, _ = engine.generate(prompts, guidance, **tokens)
    tree = {"algorithm": "EAGLE", "draft": "eagle", "shape": {"steps": 3, "topk": 2, "tokens": 6}}
    with running_probe(folder, "tree", start=running_speculation, **tree) as server:
        for others in (0, 2):
            asked = [*guidance, *[None] * others]
            results, steps = server.generate([*prompts, *prompts_of(9, 14)[:others]], asked, **tokens)
            assert [r["output_ids"] for r in results[:6]] == [r["output_ids"] for r in plain]
            assert check_steps(folder, prompts, guidance, results[:6], steps) > 200
            assert any(step["mode"] == "TARGET_VERIFY" for step in steps)
            assert len(results[5]["meta_info"]["predicted_remaining_lengths"]) == 24
        unguided, _ = server.generate(prompts, [None] * 6, temperature=0.0, max_new_tokens=24)
        assert sum(result["meta_info"]["spec_num_correct_drafts"] for result in unguided) > 0


def test_two_ranks(folder):
    """Tensor-parallel ranks agree, each with a part of the embedding."""
    prompts, guidance = prompts_of(*range(3, 72, 6)), [*MODES, NEAR[0], None]
    with running_probe(folder, "ranks", "--tp", "2", **TWO_RANKS) as server:
        results, _ = server.generate(prompts, guidance)
        assert check_steps(folder, prompts, guidance, results, server.agreed_steps()) > 11 * 16


class Base(torch.nn.Module):
    """The engine's base model, with the attributes that the adapter reads."""

    def __init__(self, weight):
        super().__init__()
        self.embed_tokens = SimpleNamespace(weight=weight)
        self.logits_processor = LogitsProcessor.__new__(LogitsProcessor)
        torch.nn.Module.__init__(self.logits_processor)
        self.layers_to_capture = []

    def get_input_embeddings(self):
        return self.embed_tokens


class DeepBase(Base):
    """A base model that captures the inputs of its layers."""

    first_layer = 1

    def set_eagle3_layers_to_capture(self, layer_ids):
        self.layers_to_capture = [layer + self.first_layer for layer in layer_ids]


class OtherBase(DeepBase):
    """A base model that captures the layers with the given numbers."""

    first_layer = 0


@pytest.fixture(scope="module")
def weight(folder):
    return AutoModelForCausalLM.from_pretrained(folder / "base").get_input_embeddings().weight.detach()


def load_probe(path, base, drafts=0, layers=LAYERS, **options):
    """The guidance of a process that has loaded a base model."""
    runner = SimpleNamespace(model=base, model_config=SimpleNamespace(num_hidden_layers=layers))
    options = {name: accepted[0] for name, (accepted, _) in (PROBE_OPTIONS | INNER_PROBE_OPTIONS).items()} | options
    return ProbeGuide(Settings(path), torch.device("cpu"), drafts, runner, SimpleNamespace(**options))


class Hooked:
    """The hooks of a process that has loaded the probe of several layers, and the base model's processor."""

    def __init__(self, folder, weight):
        self.base = DeepBase(weight)
        self.tensors = load_file(folder / "deep" / "probe.safetensors")
        self.guide = load_probe(folder / "deep", self.base, 2)

    def kept(self, rows):
        """The states read by a step of ``rows`` rows."""
        return self.guide.states_of(torch.empty(rows))

    def prune(self, states, metadata):
        """The pruned last states of a forward, as in the engine."""

        def original(processor, input_ids, hidden_states, lm_head, metadata, aux_hidden_states):
            arguments = processor, hidden_states, None, aux_hidden_states, metadata
            return self.guide.keep_states(LogitsProcessor._get_pruned_states, *arguments)

        first, second, last = states
        arguments = self.base.logits_processor, None, last, None, metadata, [first, second]
        return self.guide.hide_inner_states(original, *arguments)[0]


@pytest.fixture
def hooked(folder, weight):
    return Hooked(folder, weight)


def rows_of_states(count, seed=0):
    """Distinct states ``[count, H]``: inputs of two layers, and the last states."""
    return list(torch.randn(3, count, HIDDEN, generator=torch.Generator().manual_seed(seed)))


def test_memory_of_states(hooked):
    """Bytes per node of a request, in addition to the step."""
    without = SGLangGuide(hooked.guide.settings, torch.device("cpu"), drafts=2)
    sizes = SimpleNamespace(context_len=512, vocab_size=VOCAB), 5
    states = 15 * 3 * HIDDEN * 4
    assert hooked.guide.num_bytes(*sizes) - without.num_bytes(*sizes) == states + 15 * hooked.guide.model.row_bytes


def test_replayed_graph_keeps_states_without_hook(hooked):
    """Operations captured for several batch sizes store the states in each replay."""
    hooked.guide.allocate(6)
    metadata = LogitsMetadata(ForwardMode.DECODE)
    graphs = {
        size: make_fx(lambda *states: hooked.prune(states, metadata))(*rows_of_states(size)) for size in (8, 4, 2)
    }
    kept = hooked.kept(6)
    for size, rows in ((4, 3), (8, 6), (2, 2), (4, 4)):
        first, second, last = states = rows_of_states(size, seed=size + rows)
        graphs[size](*states)
        assert torch.equal(hooked.kept(rows), torch.cat([second, last, first], dim=1)[:rows])
        assert kept.data_ptr() == hooked.kept(rows).data_ptr()


def sharded(parts, rank, **more):
    """The part of a tensor-parallel embedding on a rank."""
    group = SimpleNamespace(all_gather=lambda part, dim: torch.cat(parts, dim=dim))
    sizes = dict(tp_size=len(parts), num_added_embeddings=0, org_vocab_size=10)
    return SimpleNamespace(weight=parts[rank], tp_group=group, **sizes | more)


def test_input_embedding_of_base_model():
    """The parts of all ranks are concatenated without padding; quantised or LoRA embeddings are rejected."""
    rows = torch.arange(24.0).view(12, 2)
    base = Base(rows)
    assert torch.equal(input_embedding(base), rows)
    for rank in (0, 1):
        base.embed_tokens = sharded(rows.split(6), rank)
        assert torch.equal(input_embedding(base), rows[:10])
    assert torch.equal(input_embedding(SimpleNamespace(model=Base(rows))), rows)  # a model without get_input_embeddings
    base.embed_tokens = sharded(rows.split(6), 0, num_added_embeddings=2)
    with pytest.raises(ValueError, match="must have no tokens added for LoRA, got 2"):
        input_embedding(base)
    base.embed_tokens = SimpleNamespace(weight=rows.to(torch.int8))
    with pytest.raises(ValueError, match=r"must have an input embedding in float32, .* got torch\.int8"):
        input_embedding(base)
    with pytest.raises(ValueError, match="got NoneType in Identity"):
        input_embedding(torch.nn.Identity())


@pytest.mark.parametrize(
    ("probe", "base", "given", "message"),
    [
        ("last", Base, {"enable_torch_compile": True}, "enable_torch_compile must be False together with a probe"),
        ("deep", DeepBase, {"speculative_algorithm": "EAGLE3"}, r"must be one of .* probe of layers \[2, 3, 1\]"),
        ("deep", DeepBase, {"enable_return_aux_hidden_states": True}, "enable_return_aux_hidden_states must be False"),
        ("deep", Base, {}, r"must be a probe of the last state for a Base, .* also reads layers \[1, 2\]"),
        ("deep", OtherBase, {}, "must be a probe of the last state for a OtherBase"),
        ("last", Base, {"layers": 4}, "the base model must be 'tiny' with 3 layers, got one with 4"),
        ("last", Base, {"speculative_algorithm": "EAGLE3"}, None),
        ("deep", DeepBase, {"speculative_algorithm": "EAGLE"}, None),
    ],
)
def test_options_unsupported_by_probes_are_rejected_at_start(folder, weight, probe, base, given, message):
    with nullcontext() if message is None else pytest.raises(ValueError, match=message):
        load_probe(folder / probe, base(weight), **given)


def test_probe_after_weight_update(hooked, weight, caplog):
    """Values use the new embedding. With another base model's embedding, requests are rejected."""
    guide, states = hooked.guide, torch.randn(2, 3 * HIDDEN)
    hooked.base.embed_tokens = SimpleNamespace(weight=weight.clone())
    guide.runner = SimpleNamespace(model=hooked.base)

    def values(probe):
        table = GuidanceTable.from_params([parse_guidance({"target_length": 9})] * 2, [set()] * 2, "cpu").columns
        rows = dict(table_rows=torch.arange(2), generated=torch.zeros(2, dtype=torch.int32))
        return probe.value_logits(states, torch.tensor([[3, 4], [5, 6]], dtype=torch.int32), table, **rows)[0]

    probe = guide.probe
    before = values(probe)
    hooked.base.embed_tokens.weight.mul_(1.01)
    guide.update_probe(None, None, "version")
    expected = values(LengthProbe(probe.config, hooked.tensors, weight * 1.01, lenvm_config=probe.lenvm_config))
    assert torch.equal(values(probe), expected) and not torch.equal(values(probe), before)
    assert guide.failure is None
    hooked.base.embed_tokens.weight.neg_()
    guide.update_probe(None, None, "version")
    assert "got one with another embedding" in guide.failure and "requests with guidance are rejected" in caplog.text
    sampling = SamplingParams(custom_params=GENTLE)
    with pytest.raises(ValueError, match=r"guidance in custom_params must be absent: .* another embedding"):
        guidance_of(SimpleNamespace(sampling_params=sampling), guide.settings, guide.failure)
    hooked.base.embed_tokens.weight.neg_()
    guide.update_probe(None, None, "version")
    assert guide.failure is None
