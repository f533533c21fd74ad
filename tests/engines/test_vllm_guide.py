"""The vLLM processor in a worker, without the engine: scenarios of a fake engine against an oracle, and refusals."""

from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from vllm import SamplingParams
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext
from vllm.v1.worker.gpu.sample.states import SamplingStates
from vllm.v1.worker.gpu.spec_decode import rejection_sampler
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

from lenvm_kernels.engines import signatures
from lenvm_kernels.engines.own_slots import MAX_DELTA, PAGE_SIZE
from lenvm_kernels.engines.settings import Settings
from lenvm_kernels.engines.vllm import guide as vllm_guide
from lenvm_kernels.engines.vllm import options as vllm_options
from lenvm_kernels.engines.vllm.guide import Guide
from lenvm_kernels.engines.vllm.processor import LenVMProcessor
from lenvm_kernels.engines.vllm.report import StepCounter
from lenvm_kernels.engines.vllm.requests import guidance_of
from lenvm_kernels.engines.vllm.states import show_layers
from lenvm_kernels.step import GuidedStep
from tests.helpers import models
from tests.helpers.models import ARCHITECTURES, EOS, HIDDEN, TINY, VOCAB
from tests.helpers.oracle import PlainStep
from tests.helpers.probes import write_random_probe
from tests.helpers.statistics import p_value
from tests.helpers.watch import no_read_back

WORDS = [f"w{i}" for i in range(VOCAB)]
SLOTS, MAX_LEN, END = 6, 128, 3
TILT = {"value_mode": "centered_exp", "value_scale": -20}
SPAN = TILT | {"end_token_ids": [END], "hard_limit": 4}
PROMPT = [5 + i % 40 for i in range(60)]


@pytest.fixture(scope="module")
def value_model(tmp_path_factory):
    return models.save_checkpoint(tmp_path_factory.mktemp("value"), seed=1, words=WORDS, value_head=True)


@pytest.fixture(scope="module")
def oracle(value_model):
    backbone = AutoModelForCausalLM.from_pretrained(value_model, dtype=torch.float32).eval()
    head = load_file(f"{value_model}/value_head.safetensors")
    return PlainStep(lambda sequences: models.last_value_logits(backbone, head, sequences).tolist(), EOS)


class Embedding(VocabParallelEmbedding):
    """An embedding of a weight; vLLM's constructor needs an engine."""

    def __init__(self, weight):
        torch.nn.Module.__init__(self)
        self.weight, self.tp_size = torch.nn.Parameter(weight), 1


class Head(ParallelLMHead):
    __init__ = Embedding.__init__


class Runner(GPUModelRunner):
    """The attributes of the engine's model runner that a probe needs."""

    def __init__(self, req_states, model):
        self.req_states, self.model, self.speculator = req_states, model, None

    def sample_tokens(self, draw):
        return draw()


class Add(NamedTuple):
    """A request enters a slot. ``prompt_len``: tokens before its output, if the engine has preempted it."""

    slot: int
    tokens: list
    guidance: dict | None
    prompt_len: int | None = None
    params: dict | None = None


class Step(NamedTuple):
    """A step of the engine.

    Attributes:
        rows: by slot, the tokens that its sequence has grown by and the drafts after them; or, for a part of a prompt,
            the length of the sequence.
        kinds: what decides each row: a word of the oracle, or one of :data:`UNCHANGED`.
        likely: tokens whose logits are raised.
        fails: whether the guided step fails on this rank, or on another one.
    """

    rows: dict
    kinds: list
    likely: tuple = ()
    fails: str = ""


class Engine:
    """The state of vLLM that a processor reads: requests in slots, their tokens, and the rows of a step."""

    def __init__(self, value_model, *, drafts=0, base=None, gamma=None, **changes):
        self.tokens = torch.full((SLOTS, MAX_LEN), 10**9, dtype=torch.int32)  # stale tokens are arbitrary
        self.requests, self.lengths = {}, {}
        self.staged = [], [], []  # slots, ends and tokens that are not copied to the device yet
        names = ("_staged_write_indices", "_staged_write_cu_lens", "_staged_write_contents")
        lens = [SimpleNamespace(np=np.zeros(SLOTS, dtype=np.int32)) for _ in range(2)]
        self.req_states = SimpleNamespace(
            device=torch.device("cpu"),
            max_num_reqs=SLOTS,
            vocab_size=VOCAB,
            all_token_ids=SimpleNamespace(gpu=self.tokens, **dict(zip(names, self.staged, strict=True))),
            prompt_len=lens[0],
            prefill_len=lens[1],
        )
        sizes = dict(get_vocab_size=lambda: VOCAB, get_total_num_hidden_layers=lambda: TINY["num_hidden_layers"])
        model = dict(dtype=torch.float32, max_model_len=MAX_LEN, enforce_eager=True, tokenizer="") | sizes
        config = dict(num_speculative_tokens=drafts, speculative_config=None, model_config=SimpleNamespace(**model))
        config["parallel_config"] = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1)
        config["cache_config"] = SimpleNamespace(kv_cache_memory_bytes=None)
        self.runner = Runner(self.req_states, base)
        self.guide = Guide(Settings(value_model, gamma=gamma), SimpleNamespace(**config | changes), self.req_states)

    def add(self, slot, tokens, guidance, prompt_len=None, params=None):
        """Admit a request; no token of its prompt, or of its output before a preemption, is computed yet."""
        defaults = dict(temperature=0.7, top_k=5, stop_token_ids=[EOS], ignore_eos=True, extra_args=guidance)
        params = SamplingParams(**defaults | (params or {}))
        self.requests[slot] = Add(slot, tokens, guidance, prompt_len or len(tokens), params)
        self.lengths[slot] = len(tokens)
        self.tokens[slot] = 10**9
        self.tokens[slot, : len(tokens)] = torch.tensor(tokens)
        self.req_states.prompt_len.np[slot] = self.requests[slot].prompt_len
        self.req_states.prefill_len.np[slot] = len(tokens)
        slots, ends, contents = self.staged
        slots.append(slot)
        contents.extend(tokens)
        ends.append(len(contents))
        return self.guide.add_request(slot, params, guidance_of(params, self.guide.settings))

    def step(self, rows, logits=None, likely=()):
        """Take a step with :attr:`Step.rows`; returns logits before and after, sequences by row, and the context."""
        for staged in self.staged:
            staged.clear()
        nodes, sequences, first = [], [], {}
        for slot, row in rows.items():
            new, drafts = ([], []) if isinstance(row, int) else row
            length = self.lengths[slot]
            self.tokens[slot, length : length + len(new)] = torch.tensor(new, dtype=torch.int32)
            self.lengths[slot] += len(new)
            first[slot] = row if isinstance(row, int) else self.lengths[slot]
            nodes += [(slot, node) for node in range(1 + len(drafts))]
            tokens = self.tokens[slot, : first[slot]].tolist()
            sequences += [tokens + drafts[:node] for node in range(1 + len(drafts))]
        slots, bounds = np.array(list(rows)), [first[slot] + sum(s == slot for s, _ in nodes) - 1 for slot in rows]
        context = LogitsContext(
            expanded_idx_mapping=torch.tensor([slot for slot, _ in nodes]),
            idx_mapping=torch.from_numpy(slots),
            idx_mapping_np=slots,
            expanded_local_pos=torch.tensor([node for _, node in nodes], dtype=torch.int32),
            input_ids=torch.tensor([tokens[-1] for tokens in sequences], dtype=torch.int32),
            pos=torch.tensor([len(tokens) - 1 for tokens in sequences]),
            seq_lens_upper_bound_np=np.array([*bounds, 0, 0]),
        )
        if logits is None:
            generator = torch.Generator().manual_seed(sum(map(len, sequences)))
            logits = torch.randn(len(nodes), VOCAB, generator=generator) * 2
            logits[:, 50:60] = -torch.inf  # masked by a grammar
            logits[:, list(likely)] += 6
        changed = logits.clone()
        assert self.guide.apply(changed, context) is changed
        return logits, changed, sequences, context


def run(engine, oracle, events):
    """Run the events of a scenario, and check every row of every step against the oracle."""
    for number, event in enumerate(events):
        if isinstance(event, Add):
            assert engine.add(*event) == (event.guidance is not None)
            continue
        with pytest.MonkeyPatch.context() as patch:
            if event.fails:
                patch.setattr(engine.guide, *FAILURES[event.fails])
            before, after, sequences, context = engine.step(event.rows, likely=event.likely)
        slots = context.expanded_idx_mapping.tolist()
        for row, (slot, tokens, kind) in enumerate(zip(slots, sequences, event.kinds, strict=True)):
            where, request = f"event {number}, slot {slot}, {len(tokens)} tokens, {kind}", engine.requests[slot]
            params, found = request.params, kind
            if kind not in UNCHANGED:
                sampling = {name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "min_p")}
                operands = tokens, len(tokens) - request.prompt_len, request.guidance, sampling
                expected, _, found = oracle.row(before[row].double(), *operands)
            assert found == kind, where
            if kind in ("GUIDE", "SINGLE", "hard limit"):
                probs = torch.softmax(after[row].double() / params.temperature, 0)
                assert (probs - expected).abs().max() < 1e-4, where
                assert ((probs == 0) == (expected == 0)).all(), where
            else:
                assert torch.equal(after[row], before[row]), where


def fail(*args, **options):
    raise RuntimeError("on purpose")


# Attributes of the guide that fail a step: here, and on another rank, whose failure the reduction returns.
FAILURES = {
    "here": ("own", SimpleNamespace(reserve=fail, release=lambda slot: None)),
    "elsewhere": ("reduce", lambda number, operation: 1),
}
G, AFTER, ON = "GUIDE", "after span", ([], [])
# Rows without guidance in this step, which the oracle does not compute.
UNCHANGED = CHUNK, LOST, NONE, NOT_DUE = "chunk", "lost", "unguided", "not due"
ENDED = [*PROMPT[:9], 20, 21, END, 20, 21]  # a prompt of 9 tokens, and an output that has ended its span
SCENARIOS = {
    # Guided, unguided, skipped by an entropy threshold, with one candidate, and an unfinished prompt.
    "mixed batch": [
        Add(2, PROMPT[:9], TILT, params={"temperature": 0.5, "top_k": 4}),
        Add(5, PROMPT[:6], None),
        Add(0, PROMPT[:12], TILT | {"value_entropy_threshold": 50.0}),
        Add(3, PROMPT[:50], TILT),
        Add(1, PROMPT[:4], TILT, params={"top_p": 1e-6}),
        Step({2: ON, 5: ON, 0: ON, 3: 20, 1: ON}, [G, NONE, "SKIP", CHUNK, "SINGLE"]),
        Step({0: ([9], []), 3: ON, 2: ([8], [])}, ["SKIP", G, G]),
        Step({2: ([7], []), 0: ([4], []), 5: ([1], [])}, [G, "SKIP", NONE]),
    ],
    "drafts of some requests": [
        Add(4, PROMPT, TILT),
        Add(1, PROMPT[3:9], TILT),
        Add(0, PROMPT[:7], None),
        Step({4: 20, 1: ON, 0: ON}, [CHUNK, G, NONE]),
        Step({1: ([9], []), 4: 45, 0: ([3], [])}, [G, CHUNK, NONE]),
        Step({1: ([8], [3, 4, 5]), 4: ON, 0: ([2], [1, 2, 3])}, [*[G] * 5, *[NONE] * 4]),
        Step({1: ([3, 4], [3, 4, 5]), 4: ([7], [6, 7, 8])}, [G] * 8),
    ],
    "stride": [
        Add(2, PROMPT[:9], TILT | {"value_stride": 2}),
        Step({2: ON}, [NOT_DUE]),
        Step({2: ([7], [])}, [G]),
        Step({2: ([9], [])}, [NOT_DUE]),
    ],
    # As from a chat template with thinking disabled; another request of the step has an open span.
    "closed span": [
        Add(4, [*PROMPT[:6], END, 9], SPAN),
        Add(2, PROMPT[:8], SPAN),
        Step({4: ON, 2: ON}, [AFTER, G], likely=(EOS,)),
    ],
    # With fewer drafts than the maximum, among other requests. The span in slot 4 ends in a draft, and then in the
    # first of two new tokens. The span in slot 2 ends at its limit.
    "spans with drafts": [
        Add(4, PROMPT[:9], SPAN),
        Add(1, PROMPT[3:9], None),
        Add(2, PROMPT[:5], SPAN),
        Step({4: ON, 1: ON, 2: ON}, [G, NONE, G], likely=(EOS,)),
        Step(
            {1: ([END], []), 4: ([20, 21], [END, 20]), 2: ([20] * 3, [21])},
            [NONE, G, AFTER, AFTER, G, "hard limit"],
            likely=(EOS,),
        ),
        Step({4: ([END, 20], [])}, [AFTER], likely=(EOS,)),
    ],
    # The request is added again with its output; or the end belongs to an earlier turn in the prompt.
    "preempted after its span": [Add(0, ENDED, SPAN, prompt_len=9), Step({0: ON}, [AFTER])],
    "preempted in its span": [
        Add(3, PROMPT[:12], SPAN, prompt_len=9),
        Step({3: ON}, [G]),
        Step({3: ([9], [])}, ["hard limit"]),
    ],
    # Twelve pages of slots: the requests that have waited longest lose them and are recomputed, also if the span has
    # ended meanwhile, or tokens of steps that were not due are not computed yet.
    "reclaimed slots": [
        Add(4, PROMPT[:9], SPAN),
        Add(5, PROMPT[2:9], TILT | {"value_stride": 5}),
        Step({4: ON, 5: ON}, [G, NOT_DUE]),
        Step({4: ([20, 21], []), 5: ([7], [])}, [G, NOT_DUE]),
        Add(1, PROMPT, TILT),
        Step({1: ON}, [G]),
        Add(2, PROMPT[1:], TILT),
        Add(3, PROMPT[2:], TILT),
        Step({2: ON, 3: ON}, [G, G]),
        Step({4: ([END, 8], [6]), 5: ([9], [])}, [AFTER, AFTER, G]),
        Step({1: ([7, 8], [9]), 4: ([9], [])}, [G, G, AFTER]),
        Step({3: ([5], []), 2: ([6], [4])}, [G, G, G]),
        Step({4: ([20], [])}, [AFTER]),
    ],
    # More than the cache has: the longest request continues without guidance.
    "refused slots": [
        Add(1, PROMPT, TILT),
        Add(2, PROMPT[1:50], TILT),
        Add(3, [7, *PROMPT, *PROMPT], TILT),
        Add(4, PROMPT[3:], TILT),
        Step({1: ON, 3: ON, 2: ON, 4: ON}, [G, LOST, G, G]),
        Step({3: ([9], []), 2: ([9], [8])}, [LOST, G, G]),
        Add(3, PROMPT[5:9], TILT),
        Step({3: ON}, [G]),
    ],
    **{
        f"failure {where}": [
            Add(1, PROMPT[:9], TILT),
            Add(3, PROMPT[:9], TILT),
            Step({3: ON}, [G]),
            Step({1: ON}, [G if where == "elsewhere" else LOST], fails=where),
            Step({1: ([8], []), 3: ([8], [])}, [LOST, G]),
        ]
        for where in FAILURES
    },
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_rows_match_plain_steps(value_model, oracle, monkeypatch, name):
    if "slots" in name:
        monkeypatch.setattr(vllm_guide, "pages_for", lambda *args: 12)
    engine = Engine(value_model, drafts=3)
    run(engine, oracle, SCENARIOS[name])
    assert engine.guide.without_room == (name == "refused slots")
    assert engine.guide.fallbacks == ("failure" in name) and not engine.guide.step.table.columns.faults.any()


def test_steps_read_back_nothing(value_model, oracle, monkeypatch):
    """Prompts whole and in chunks; first and later steps, with drafts for some requests."""
    make_config = Settings.step_config
    monkeypatch.setattr(Settings, "step_config", lambda *a, **o: replace(make_config(*a, **o), backend="triton"))
    engine = Engine(value_model, drafts=3)
    apply = engine.guide.apply

    def checked(*args):
        with no_read_back():
            return apply(*args)

    monkeypatch.setattr(engine.guide, "apply", checked)
    run(engine, oracle, SCENARIOS["drafts of some requests"])
    assert not engine.guide.fallbacks


@pytest.mark.parametrize("use_block_verification", [False, True])
def test_drafts_keep_the_distribution(value_model, oracle, use_block_verification):
    """vLLM's rejection sampler on guided rows of drafts, against plain steps: chi-square test at each node."""
    requests, temperature, drafts, expected = 1000, 0.7, [], []
    guidance, sampling = {"value_mode": "centered_exp", "value_scale": -2}, dict(temperature=temperature, top_k=3)
    scores = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(8))
    for node in range(4):
        filters = sampling | dict(top_p=1.0, min_p=0.0)
        probs, _, _ = oracle.row(scores[node].double(), [*PROMPT[:9], *drafts], node, guidance, filters)
        expected.append(probs)
        drafts.append(int(probs.argmax()))
    engine = Engine(value_model, drafts=3)
    engine.add(4, PROMPT[:9], guidance, params=sampling)
    _, changed, _, context = engine.step({4: ([], drafts[:3])}, logits=scores)
    sampled, num_sampled = rejection_sample(
        (changed / temperature).repeat(requests, 1),
        None,
        context.input_ids.repeat(requests),
        torch.arange(0, 4 * requests + 1, 4, dtype=torch.int32),
        context.pos.repeat(requests),
        torch.arange(requests),
        torch.arange(requests).repeat_interleave(4),
        context.expanded_local_pos.repeat(requests),
        torch.full((requests,), temperature),
        torch.arange(requests) + 1000,
        num_speculative_steps=3,
        use_block_verification=use_block_verification,
    )
    for node in range(4):
        reached = (sampled[:, :node] == torch.tensor(drafts[:node])).all(1) & (num_sampled > node)
        counts = sampled[reached, node].bincount(minlength=VOCAB).double()
        assert counts.sum() > 50 and not counts[expected[node] == 0].any()
        assert p_value(counts, expected[node] * counts.sum()) > 0.001


FILTERS = torch.tensor([3, 2]), torch.tensor([0.5, 0.1])


def filters_of_0_32(self, expanded_idx_mapping, idx_mapping_np):
    return FILTERS


def filters_of_0_33(self, expanded_idx_mapping, idx_mapping_np, vocab_size):
    return *FILTERS, (self, vocab_size)


def no_filters(self, expanded_idx_mapping, idx_mapping_np):
    return None, None


def mask_all(self, logits, expanded_idx_mapping, idx_mapping_np):
    logits[:] = -torch.inf


# A version's function, its further arguments, and its results for an unguided row, then a guided one.
OF_VERSIONS = [
    (filters_of_0_32, (), [[3, VOCAB], [0.5, 1.0]]),
    (filters_of_0_33, (VOCAB,), [[3, VOCAB], [0.5, 1.0], ("states", VOCAB)]),
    (no_filters, (), [None, None]),
]


@pytest.mark.parametrize(("get_top_k_top_p", "sizes", "expected"), OF_VERSIONS)
def test_engine_filters_do_not_apply_to_guided_rows(value_model, monkeypatch, get_top_k_top_p, sizes, expected):
    """Top-k and top-p are disabled in guided rows of the current step only; tokens removed by min-p are restored."""
    monkeypatch.setattr(SamplingStates, "get_top_k_top_p", get_top_k_top_p)
    monkeypatch.setattr(SamplingStates, "apply_min_p", mask_all)
    engine = Engine(value_model)
    engine.add(2, PROMPT[:9], TILT)
    engine.add(5, PROMPT[:6], None)
    _, logits, _, context = engine.step({5: ON, 2: ON})
    of_rows, found = context.expanded_idx_mapping, []
    for rows in (of_rows, of_rows.clone()):
        results = SamplingStates.get_top_k_top_p("states", rows, context.idx_mapping_np, *sizes)
        found.append([x.tolist() if isinstance(x, torch.Tensor) else x for x in results])
        changed = logits.clone()
        SamplingStates.apply_min_p("states", changed, rows, context.idx_mapping_np)
        assert changed[0].isinf().all() and torch.equal(changed[1], logits[1]) == (rows is of_rows)
        assert changed.isinf().all() or rows is of_rows
    unchanged = [x.tolist() for x in FILTERS] if expected[0] else [None, None]
    assert found == [expected, [*unchanged, *expected[2:]]]


def test_signatures_of_wrapped_functions(value_model):
    Engine(value_model)
    assert signatures.differences("vllm") == {}


def test_requests_share_the_pages_of_a_common_prefix(value_model, oracle, monkeypatch):
    """Three full pages of a common prefix of 50 tokens are computed once while a request holds their slots."""
    engine, extended, extend = Engine(value_model), [], GuidedStep.extend

    def recorded(self, tokens, table_rows, starts, lens, *args, **options):
        extended.append(int(lens.sum()))
        return extend(self, tokens, table_rows, starts, lens, *args, **options)

    monkeypatch.setattr(GuidedStep, "extend", recorded)
    prompts = [[*PROMPT[:50], 1, 2, 3], [*PROMPT[:50], 9, 8], PROMPT[1:40]]

    def computed(slot, prompt, *chunks):
        extended.clear()
        chunked = [Step({slot: length}, [CHUNK]) for length in chunks]
        run(engine, oracle, [Add(slot, prompt, TILT), *chunked, Step({slot: ON}, [G])])
        return sum(extended)

    assert computed(3, prompts[0]) == 52
    assert computed(0, prompts[1]) == 51 - 3 * PAGE_SIZE
    assert computed(1, prompts[2]) == 38
    # The same prompt in a free slot, in the slot that holds the pages, and in chunks shorter than the prefix.
    assert computed(4, prompts[0]) == computed(3, prompts[0]) == computed(5, prompts[0], 20, 30) == 52 - 3 * PAGE_SIZE
    for slot in (3, 4, 0, 5):
        engine.add(slot, [7], None)
    assert computed(0, prompts[0], 20) == 52
    assert not engine.guide.fallbacks


def test_failing_metrics_do_not_fail_the_step(value_model, oracle, caplog):
    engine = Engine(value_model)
    engine.guide.report = MagicMock(collect=MagicMock(side_effect=ValueError("on purpose")))
    with caplog.at_level("ERROR"):
        run(engine, oracle, [Add(1, PROMPT[:9], TILT), Step({1: ON}, [G])])
    assert engine.guide.report is None and "could not be counted" in caplog.text


def test_failures_are_reduced_over_ranks(value_model, monkeypatch):
    """Over the group of the ranks that draw the same tokens; a failure of another rank ends guidance here."""
    engine, calls = Engine(value_model), []

    def all_reduce(number, *args):
        calls.append((number.item(), *args))
        number.fill_(1)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    engine.add(1, PROMPT[:9], TILT)
    engine.step({1: ON})
    assert not calls and not engine.guide.fallbacks
    engine.guide.ranks = "ranks"
    engine.step({1: ([8], [])})
    assert calls == [(0, torch.distributed.ReduceOp.MAX, "ranks")] and engine.guide.fallbacks == 1


@pytest.mark.parametrize("has_model", [False, True])
def test_accepted_drafts_are_counted(value_model, has_model):
    """Tokens since the step with drafts, without tokens of a slot's last request and of unguided requests."""
    engine, metrics = Engine(value_model if has_model else None, drafts=2), MagicMock()
    engine.guide.report = StepCounter(metrics, torch.device("cpu"), SLOTS)

    def step(rows):
        """The tokens of each verification that a step counts."""
        metrics.count_verified.reset_mock()
        engine.step(rows)
        assert all(call.kwargs == {"is_guided": True} for call in metrics.count_verified.call_args_list)
        return [call.args[0] for call in metrics.count_verified.call_args_list]

    engine.add(4, [5, 6, 7], {"target_length": 9})
    engine.add(1, [9, 8, 7, 6], {"target_length": 9})
    assert step({4: ON, 1: ON}) == step({4: ([5], [3, 4]), 1: ([6], [8, 9])}) == []
    assert step({1: ([8], [8, 9]), 4: ([3, 4, 5], [3])}) == [1, 3]
    engine.add(4, [5, 6, 7, 8, 9], {"target_length": 12})
    assert step({4: ON, 1: ([8, 7], [])}) == [2]
    engine.add(5, PROMPT, None)
    assert step({1: ([5], [8, 9]), 5: ([], [3, 4])}) == []
    engine.add(5, [4, 4], None)
    assert step({5: ([3], [3]), 1: ([8, 5], [8, 9])}) == [2]
    assert not engine.guide.fallbacks


def test_memory_is_reserved_for_scores_of_drafts(value_model):
    """The engine's logits have rows for actual drafts, but a step's scores have rows for the maximum."""
    guide = Engine(value_model, drafts=3).guide
    sizes = dict(requests=SLOTS, max_len=MAX_LEN, vocab_size=VOCAB, max_delta=MAX_DELTA + 3, max_drafts=3)
    of_step = guide.settings.working_bytes(guide.step.values.value_model, **sizes)
    assert guide.kept_free.numel() - of_step == SLOTS * (1 + 3) * VOCAB * 4


def test_value_model_uses_gamma_of_settings(value_model):
    assert Engine(value_model, gamma=0.95).guide.step.values.value_model.lenvm_config.gamma == 0.95


def test_first_model_runner_is_rejected_unless_guidance_is_off(value_model, monkeypatch):
    monkeypatch.setenv("LENVM_VALUE_MODEL", "off")
    for processor in (LenVMProcessor(None, None), LenVMProcessor(None, None, False)):
        logits = torch.randn(2, 5)
        assert processor.apply(logits) is logits and processor.is_argmax_invariant()
        assert not processor.add_request(0, SamplingParams(extra_args={"value_mode": "loud"}))
    LenVMProcessor.validate_params(SamplingParams(extra_args={"value_mode": "loud"}))
    monkeypatch.setenv("LENVM_VALUE_MODEL", value_model)
    with pytest.raises(ValueError, match="needs vLLM's second model runner: set VLLM_USE_V2_MODEL_RUNNER=1"):
        LenVMProcessor(None, None, False)
    with pytest.raises(ValueError, match="value_mode must be one of"):
        LenVMProcessor.validate_params(SamplingParams(extra_args={"value_mode": "loud"}))


@pytest.fixture(scope="module")
def probe(tmp_path_factory):
    """The directory of a probe and its base model's modules in the engine, whose embedding has padding rows."""
    base, folder = models.random_model(*ARCHITECTURES["qwen2"]), tmp_path_factory.mktemp("probe")
    write_random_probe(folder, base)
    weight = torch.cat([base.get_input_embeddings().weight.detach(), torch.ones(7, HIDDEN)])
    return folder, torch.nn.ModuleList([Head(weight + 1), Embedding(weight)])


def test_states_and_last_tokens_of_step_rows(probe, monkeypatch):
    """States of the engine's logits, also if drafts are verified for some requests at a time.

    The token before each row is known without the tokens of its sequence.
    """
    folder, base = probe
    engine, seen, step = Engine(folder, drafts=3, base=base), [], GuidedStep.step

    def recorded(self, prepared, *args, **options):
        tokens, new_lens = prepared.batch.grown_by()
        last_tokens = tokens.gather(1, new_lens.clamp(1, tokens.shape[1])[:, None].long() - 1)[:, 0]
        seen.append((prepared.batch.states, last_tokens.tolist()))
        return step(self, prepared, *args, **options)

    monkeypatch.setattr(GuidedStep, "step", recorded)
    for slot, prompt in ((4, PROMPT), (1, PROMPT[3:9]), (2, PROMPT[:5])):
        engine.add(slot, prompt, None if slot == 2 else TILT)

    def take_step(*parts):
        """Take a step that is verified in ``parts``; returns the states of its rows and whether they are guided."""
        rows = {slot: 1 + len(drafts) for part in parts for slot, (_, drafts) in part.items()}
        count = sum(rows.values())
        generator = torch.Generator().manual_seed(count)
        at, hidden = torch.randperm(40, generator=generator)[:count], torch.randn(40, HIDDEN, generator=generator)
        batch = SimpleNamespace(
            idx_mapping_np=np.array([*rows]), cu_num_logits_np=np.cumsum([0, *rows.values()]), logits_indices=at
        )
        engine.runner.execute_model_state = SimpleNamespace(
            input_batch=batch, hidden_states=hidden, aux_hidden_states=None
        )
        seen.clear()
        changed = engine.runner.sample_tokens(lambda: [engine.step(part)[1] for part in parts])
        return hidden[at], [(logits.isinf().sum(1) >= VOCAB - 8).tolist() for logits in changed]

    none = [], []
    states, guided = take_step({4: none, 2: none, 1: none})
    assert torch.equal(seen[0][0], states) and guided == [[True, False, True]]
    states, guided = take_step({1: ([9], [3, 4, 5])}, {2: ([6], []), 4: ([8], [6])})
    of_absent = torch.zeros(3, HIDDEN)
    assert torch.equal(seen[0][0], states[:4]) and seen[0][1] == [9]
    assert torch.equal(seen[1][0], torch.cat([states[4:5], of_absent, states[5:], of_absent[1:]]))
    assert seen[1][1][1] == 8
    assert guided == [[True] * 4, [False, True, True]]
    # Only the second part has a guided request.
    states, guided = take_step({2: ([6], [])}, {1: ([3, 4, 5, 6], [3, 4, 5])})
    assert torch.equal(seen[0][0], states[1:]) and guided == [[False], [True] * 4] and not engine.guide.fallbacks


def part(**options):
    return SimpleNamespace(**{"tensor_parallel_size": 1, "pipeline_parallel_size": 1} | options)


# What guides, changes to the engine's configuration and the error.
OF_MODEL = "must be {} together with LENVM_VALUE_MODEL, got {}: {}"
REFUSED = [
    ("value", {"parallel_config": part(prefill_context_parallel_size=2)}, OF_MODEL.format(1, 2, "not tried")),
    ("value", {"speculative_config": part(enable_adaptive_verification=True)}, OF_MODEL.format(False, True, "not tr")),
    ("value", {"watermark_config": "some"}, OF_MODEL.format(None, "some", "its sampler")),
    (
        "value",
        {"cache_config": part(kv_cache_memory_bytes=2**20)},
        r"LENVM_MEMORY_SHARE must be above \d+\.\d+",
    ),
    ("probe", {"parallel_config": part(pipeline_parallel_size=2)}, "must be 1 together with a probe, got 2"),
    (
        "probe",
        {"base": lambda base: [Embedding(base[1].weight.detach().flip(0))]},
        "must be 'tiny', got one with",
    ),
    ("probe", {"base": lambda base: base[:1]}, "a probe with this base model: ModuleList has no input embedding"),
    ("inner", {}, r"got one of layers \[1\], too: ModuleList shows no others"),
]


@pytest.mark.parametrize(("source", "changes", "message"), REFUSED)
def test_unsupported_configurations_are_rejected(value_model, probe, tmp_path, source, changes, message):
    folder, base = probe
    if source == "inner":
        write_random_probe(folder := tmp_path, models.random_model(*ARCHITECTURES["qwen2"]), layers=(1, 2))
    base = torch.nn.ModuleList(changes.get("base", lambda base: base)(base))
    with pytest.raises(ValueError, match=message):
        Engine(value_model if source == "value" else folder, **changes | {"base": base})


def test_batches_verified_in_parts_are_rejected(value_model, monkeypatch):
    """vLLM's parts have at most 1 GiB of scores: 353 requests with four drafts and a vocabulary of 151,936."""
    vllm_options.check_one_part(353, 4, 151_936)
    vllm_options.check_one_part(9999, 0, 151_936)
    with pytest.raises(ValueError, match=r"max_num_seqs must be at most 353 .* and 4 drafted tokens, got 354: vLLM"):
        vllm_options.check_one_part(354, 4, 151_936)
    monkeypatch.setattr(rejection_sampler, "MAX_CHUNK_BYTES", 3 * (SLOTS - 1) * VOCAB * 4)
    with pytest.raises(ValueError, match=f"max_num_seqs must be at most {SLOTS - 1} .*, got {SLOTS}"):
        Engine(value_model, drafts=2)


def test_probe_of_inner_layers_is_rejected_with_a_draft_model(probe):
    folder, base = probe
    engine = Engine(folder, base=base)
    engine.runner.model, engine.runner.speculator = object.__new__(Qwen2ForCausalLM), object.__new__(EagleSpeculator)
    with pytest.raises(
        ValueError, match=r"got one of layers \[1\], too: the model that drafts would be given others, too"
    ):
        show_layers(engine.runner, [1])
