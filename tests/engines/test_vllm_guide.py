"""The vLLM processor in a worker of a fake engine: scenarios against an oracle, and rejections."""

import json
from collections import ChainMap, Counter
from dataclasses import replace
from itertools import takewhile
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
from vllm.lora.layers import LogitsProcessorWithLoRA
from vllm.model_executor.layers.logits_processor import LogitsProcessor as LogitsLayer
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator

from lenvm_kernels.engines.settings import MAX_DELTA, Settings
from lenvm_kernels.engines.vllm import guide as vllm_guide
from lenvm_kernels.engines.vllm import model_guide
from lenvm_kernels.engines.vllm.processor import LenVMProcessor, guidance_of, new_guide
from lenvm_kernels.engines.vllm.report import Report
from lenvm_kernels.guidance import Thoughts
from lenvm_kernels.types import Status
from tests.helpers import models
from tests.helpers.models import ARCHITECTURES, EOS, HIDDEN, TINY, VOCAB
from tests.helpers.oracle import PlainStep
from tests.helpers.probes import write_random_probe
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


def layer_of(kind, weight=None):
    """A layer of the engine, without calling its constructor; its output is the hidden states."""
    made = object.__new__(kind)
    torch.nn.Module.__init__(made)
    made.forward = lambda lm_head, hidden_states: hidden_states
    if weight is not None:
        made.weight, made.tp_size = torch.nn.Parameter(weight), 1
    return made


class Runner(GPUModelRunner):
    """The engine's model runner, with the attributes that a probe needs."""

    def __init__(self, config, req_states, model, speculator):
        self.vllm_config, self.model_config, self.req_states = config, config.model_config, req_states
        self.model, self.speculator = model, speculator

    def load_model(self, settings):
        return new_guide(settings, self.vllm_config, self.req_states)

    def reset_lora_state(self):
        pass


class Add(NamedTuple):
    """A request enters a slot. ``prompt_len`` is the length of its prompt, if the engine has preempted it."""

    slot: int
    tokens: list
    guidance: dict | None
    prompt_len: int | None = None
    params: dict | None = None


class Step(NamedTuple):
    """A step of the engine.

    Attributes:
        rows: by slot, the new tokens of its sequence and the drafts after them; or, for a part of a prompt, the length
            of the sequence.
        kinds: kind of each row, from the oracle or in :data:`UNCHANGED`.
        likely: tokens with raised logits.
        fails: whether the guided step fails.
        computed: number of prompt tokens that the value model computes before the step. If None, it is not checked.
    """

    rows: dict
    kinds: list
    likely: tuple = ()
    fails: bool = False
    computed: int | None = None


class Engine:
    """The state of vLLM read by a processor: requests in slots, their tokens, and the rows of a step.

    ``computed`` are the lengths of the prompt parts computed by the value model for the last step.
    """

    trace = None  # the file of guided steps

    def __init__(self, value_model, *, drafts=0, base=None, speculator=None, **changes):
        self.tokens = torch.full((SLOTS, MAX_LEN), 10**9, dtype=torch.int32)  # stale tokens are arbitrary
        self.requests, self.lengths, self.computed = {}, {}, []
        lens = [SimpleNamespace(np=x.numpy(), gpu=x) for x in torch.zeros(2, SLOTS, dtype=torch.int32)]
        self.req_states = SimpleNamespace(
            device=torch.device("cpu"),
            max_num_reqs=SLOTS,
            vocab_size=VOCAB,
            all_token_ids=SimpleNamespace(gpu=self.tokens, stage_write=self.write),
            prompt_len=lens[0],
            prefill_len=lens[1],
        )
        sizes = dict(get_vocab_size=lambda: VOCAB, get_total_num_hidden_layers=lambda: TINY["num_hidden_layers"])
        parts = dict(
            model_config=dict(dtype=torch.float32, max_model_len=MAX_LEN, enforce_eager=True, tokenizer="", seed=0)
            | dict(enable_sleep_mode=False, **sizes),
            parallel_config=dict(tensor_parallel_size=1, data_parallel_rank=0),
            cache_config=dict(kv_cache_memory_bytes=None),
        )
        parts = {name: SimpleNamespace(**part | changes.get(name, {})) for name, part in parts.items()}
        config = SimpleNamespace(num_speculative_tokens=drafts, additional_config={}, **parts)
        self.runner = Runner(config, self.req_states, base, speculator)
        self.guide = self.runner.load_model(Settings(value_model, trace=self.trace))
        extend = self.guide.step.extend

        def counted(tokens, table_rows, starts, lens, *args, **options):
            self.computed.append(lens)
            extend(tokens, table_rows, starts, lens, *args, **options)

        self.guide.step.extend = counted

    def write(self, slot, start, tokens):
        """Stores the tokens of a new request, as the engine's request states do."""
        self.tokens[slot] = 10**9
        self.tokens[slot, start : len(tokens)] = torch.tensor(tokens)

    def add(self, slot, tokens, guidance, prompt_len=None, params=None):
        """Admit a request, without computed tokens of its prompt, or of its output before a preemption."""
        defaults = dict(temperature=0.7, top_k=5, stop_token_ids=[EOS], ignore_eos=True, extra_args=guidance, seed=1)
        params = SamplingParams(**defaults | (params or {}))
        self.requests[slot] = Add(slot, tokens, guidance, prompt_len or len(tokens), params)
        self.lengths[slot] = len(tokens)
        self.req_states.prompt_len.np[slot] = self.requests[slot].prompt_len
        self.req_states.prefill_len.np[slot] = len(tokens)
        self.req_states.all_token_ids.stage_write(slot, 0, tokens)
        return self.guide.add_request(slot, params, guidance_of(params, self.guide.settings))

    def step(self, rows, logits=None, likely=(), view=None):
        """Take a step with :attr:`Step.rows`. Returns logits before and after, sequences by row, and the context.

        ``view`` is the index of the first row in the step, and the step's number of rows, if it is verified in parts.
        """
        nodes, sequences, bounds = [], [], []
        for slot, row in rows.items():
            new, drafts = ([], []) if isinstance(row, int) else row
            self.tokens[slot, self.lengths[slot] :][: len(new)] = torch.tensor(new, dtype=torch.int32)
            self.lengths[slot] += len(new)
            length = row if isinstance(row, int) else self.lengths[slot]
            bounds.append(length + len(drafts))
            for node in range(1 + len(drafts)):
                nodes.append((slot, node))
                sequences.append([*self.tokens[slot, :length].tolist(), *drafts[:node]])
        slots, (before, total) = np.array(list(rows)), view or (0, len(nodes))
        pos = torch.zeros(total, dtype=torch.int64)
        pos[before : before + len(nodes)] = torch.tensor([len(tokens) - 1 for tokens in sequences])
        context = LogitsContext(
            expanded_idx_mapping=torch.tensor([slot for slot, _ in nodes]),
            idx_mapping=torch.from_numpy(slots),
            idx_mapping_np=slots,
            expanded_local_pos=torch.tensor([node for _, node in nodes], dtype=torch.int32),
            input_ids=torch.tensor([tokens[-1] for tokens in sequences], dtype=torch.int32),
            pos=pos[before : before + len(nodes)],
            seq_lens_upper_bound_np=np.array([*bounds, 0, 0]),
        )
        if logits is None:
            generator = torch.Generator().manual_seed(sum(map(len, sequences)))
            logits = torch.randn(len(nodes), VOCAB, generator=generator) * 2
            logits[:, 50:60] = -torch.inf  # masked by a grammar
            logits[:, list(likely)] += 6
        changed, self.computed = logits.clone(), []
        assert self.guide.apply(changed, context) is changed
        return logits, changed, sequences, context

    def traced(self):
        """Guided probabilities, fp64 ``[V]``, by sequence of the last step."""
        lines = self.trace.read_text().splitlines() if self.trace.exists() else []
        self.trace.unlink(missing_ok=True)
        steps = [{} for _ in lines]
        for found, line in zip(steps, lines, strict=True):
            for row in json.loads(line)["rows"]:
                found[tuple(row["tokens"])] = probs = torch.zeros(VOCAB, dtype=torch.float64)
                for token, prob in zip(row["token_ids"], row["probs"], strict=True):
                    probs[token] += prob if token >= 0 else 0.0
        return steps


@pytest.fixture(autouse=True)
def trace(tmp_path, monkeypatch):
    monkeypatch.setattr(Engine, "trace", tmp_path / "trace.jsonl")


def kept(logits):
    """Tokens with finite logits per row."""
    return [row.isfinite().nonzero().flatten().tolist() for row in logits]


def run(engine, oracle, events):
    """Run the events of a scenario, and check all rows of all steps against the oracle."""
    for number, event in enumerate(events):
        if isinstance(event, Add):
            assert engine.add(*event) == (event.guidance is not None)
            continue
        with pytest.MonkeyPatch.context() as patch:
            if event.fails:
                patch.setattr(engine.guide.own, "reserve", fail)
            before, after, sequences, context = engine.step(event.rows, likely=event.likely)
        computed = sum(int(lens.sum()) for lens in engine.computed)
        assert event.computed in (None, computed), f"event {number}, {computed} computed tokens"
        slots, traced = context.expanded_idx_mapping.tolist(), dict(ChainMap(*engine.traced()))
        for row, (slot, tokens, kind) in enumerate(zip(slots, sequences, event.kinds, strict=True)):
            where, request = f"event {number}, slot {slot}, {len(tokens)} tokens, {kind}", engine.requests[slot]
            params, found = request.params, kind
            if kind not in UNCHANGED:
                sampling = {name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "min_p")}
                operands = tokens, len(tokens) - request.prompt_len, request.guidance, sampling
                expected, _, found = oracle.row(before[row].double(), *operands)
            assert found == kind, where
            if kind in ("GUIDE", "SINGLE", "hard limit"):
                probs, (token,) = traced[tuple(tokens)], *kept(after[[row]])
                assert (probs - expected).abs().max() < 1e-4, where
                assert ((probs == 0) == (expected == 0)).all() and expected[token] > 0, where
            else:
                assert torch.equal(after[row], before[row]), where


def fail(*args, **options):
    raise RuntimeError("on purpose")


G, AFTER, ON = "GUIDE", "after span", ([], [])
# Rows without guidance in a step, which the oracle does not compute.
UNCHANGED = CHUNK, LOST, NONE, NOT_DUE = "chunk", "lost", "unguided", "not due"
SHARED = [*PROMPT[:50], 1, 2, 3]
ENDED = [*PROMPT[:9], 20, 21, END, 20, 21]  # a prompt of 9 tokens, and an output that has ended its span
SCENARIOS = {
    # Guided, unguided, skipped by an entropy threshold, with one candidate, an unfinished prompt, and a stride.
    "mixed batch": [
        Add(2, PROMPT[:9], TILT, params={"temperature": 0.5, "top_k": 4}),
        Add(5, PROMPT[:6], None),
        Add(0, PROMPT[:12], TILT | {"value_entropy_threshold": 50.0}),
        Add(3, PROMPT[:50], TILT),
        Add(1, PROMPT[:4], TILT, params={"top_p": 1e-6}),
        Add(4, PROMPT[1:9], TILT | {"value_stride": 2}),
        Step({2: ON, 5: ON, 0: ON, 3: 20, 1: ON, 4: ON}, [G, NONE, "SKIP", CHUNK, "SINGLE", NOT_DUE]),
        Step({0: ([9], []), 3: ON, 2: ([8], []), 4: ([7], [])}, ["SKIP", G, G, G]),
        Step({2: ([7], []), 0: ([4], []), 4: ([9], []), 5: ([1], [])}, [G, "SKIP", NOT_DUE, NONE]),
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
    # Spans after an end in the prompt, as from a chat template with thinking disabled; open spans; and preempted
    # requests with spans and a target, which are added again with their outputs.
    "spans and preempted requests": [
        Add(4, [*PROMPT[:6], END, 9], SPAN),
        Add(2, PROMPT[:8], SPAN),
        Add(0, ENDED, SPAN, prompt_len=9),
        Add(3, PROMPT[:12], SPAN, prompt_len=9),
        Add(1, PROMPT[1:14], {"target_length": 6}, prompt_len=9),
        Step({4: ON, 2: ON, 0: ON, 3: ON, 1: ON}, [AFTER, G, AFTER, G, G], likely=(EOS,)),
        Step({3: ([9], [])}, ["hard limit"]),
    ],
    # Fewer drafts than the maximum, among other requests. The span in slot 4 ends in a draft, then in the first of two
    # new tokens. The span in slot 2 ends at its limit.
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
    # Twelve pages of slots: the least recently used requests lose their slots and are recomputed, also after the end of
    # a span, or with pending tokens.
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
    # The cache is too small: the longest request loses guidance.
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
    "failure": [
        Add(1, PROMPT[:9], TILT),
        Add(3, PROMPT[1:9], TILT),
        Step({3: ON}, [G]),
        Step({1: ON}, [LOST], fails=True),
        Step({1: ([8], []), 3: ([8], [])}, [LOST, G]),
        Add(1, PROMPT[:7], TILT),
        Step({1: ON, 3: ([9], [])}, [G, G]),
    ],
    # Three full pages of a common prefix of 50 tokens are computed once while a request holds their slots: for a free
    # slot, for the slot with the pages, and in chunks shorter than the prefix.
    "common prefix": [
        Add(3, SHARED, TILT),
        Step({3: ON}, [G], computed=52),
        Add(0, [*PROMPT[:50], 9, 8], TILT),
        Step({0: ON}, [G], computed=51 - 48),
        Add(1, PROMPT[1:40], TILT),
        Step({1: ON}, [G], computed=38),
        Add(4, SHARED, TILT),
        Step({4: ON}, [G], computed=52 - 48),
        Add(3, SHARED, TILT),
        Step({3: ON}, [G], computed=52 - 48),
        Add(5, SHARED, TILT),
        Step({5: 20}, [CHUNK], computed=0),
        Step({5: ON}, [G], computed=52 - 48),
        *(Add(slot, [7], None) for slot in (3, 4, 0, 5)),
        Add(0, SHARED, TILT),
        Step({0: 20}, [CHUNK], computed=20),
        Step({0: ON}, [G], computed=32),
    ],
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_rows_match_plain_steps(value_model, oracle, monkeypatch, name):
    if "slots" in name:
        monkeypatch.setattr(model_guide, "pages_for", lambda *args: 12)
    engine = Engine(value_model, drafts=3)
    run(engine, oracle, SCENARIOS[name])
    assert engine.guide.without_room == (name == "refused slots")
    assert engine.guide.fallbacks == (name == "failure") and not engine.guide.step.table.columns.faults.any()


@pytest.mark.parametrize("has_model", [False, True])
def test_steps_read_back_nothing(value_model, monkeypatch, has_model):
    """Whole prompts and chunks; first and later steps, with drafts for some requests, spans and metrics."""
    make_config = Settings.step_config
    monkeypatch.setattr(Settings, "step_config", lambda *a, **o: replace(make_config(*a, **o), backend="triton"))
    monkeypatch.setattr(Engine, "trace", None)  # it reads back
    engine = Engine(value_model if has_model else None, drafts=3)
    engine.guide.report = Report(torch.device("cpu"), Counts())
    # Numbers are read on the host after they have arrived.
    monkeypatch.setattr(engine.guide.report, "collect", lambda: None)
    monkeypatch.setattr(engine.guide, "apply", no_read_back()(engine.guide.apply))
    engine.add(4, PROMPT, {"target_length": 30})
    engine.add(1, PROMPT[3:9], {"target_length": 9} | {"end_token_ids": [END], "hard_limit": 4})
    engine.add(0, PROMPT[:7], None)
    for event in SCENARIOS["drafts of some requests"][3:]:
        _, after, *_ = engine.step(event.rows)
        assert any(len(tokens) == 1 for tokens in kept(after)) and not engine.guide.fallbacks


def test_draws_of_ranks_without_a_seed():
    """Data-parallel ranks draw different tokens, except for requests with a seed."""
    drawn = []
    for rank in (0, 0, 1):
        engine = Engine(None, parallel_config={"data_parallel_rank": rank})
        for slot in range(SLOTS):
            seed = None if slot < 4 else slot
            engine.add(slot, PROMPT[:9], {"target_length": 30}, params={"seed": seed, "top_k": 0, "temperature": 2.0})
        _, after, *_ = engine.step({slot: ON for slot in range(SLOTS)}, logits=torch.zeros(SLOTS, VOCAB))
        drawn.append([token for (token,) in kept(after)])
    assert drawn[0] == drawn[1] and drawn[0][:4] != drawn[2][:4] and len(set(drawn[0][:4])) > 2
    assert drawn[0][4:] == drawn[2][4:]


@pytest.mark.parametrize(
    ("ignores", "stops", "ends"),
    [
        (False, {}, True),
        (True, {}, False),
        (True, {"stop_token_ids": [EOS]}, True),
        (True, {"stop": ["E"]}, True),
        (True, {"stop": ["EE"]}, False),
    ],
)
def test_end_tokens_match_the_engine(ignores, stops, ends, monkeypatch):
    """With ``ignore_eos``, end of sequence is an ordinary token. Stop tokens, and stop strings of one token, still end
    the output."""
    monkeypatch.setattr(Settings, "thoughts", Thoughts(encode=lambda text: [EOS] * len(text)))
    params = SamplingParams(extra_args={"target_length": 2}, ignore_eos=ignores, seed=1, top_k=5, **stops)
    params.update_from_generation_config({"eos_token_id": [EOS]}, EOS)
    engine = Engine(None)
    engine.add(2, PROMPT[:9], {"target_length": 2})
    engine.guide.add_request(2, params, guidance_of(params, engine.guide.settings))
    logits = torch.zeros(1, VOCAB)
    logits[:, EOS] = 3.0
    for number in range(12):
        engine.traced()
        engine.step({2: ([9] * bool(number), [])}, logits)
    (probs,) = engine.traced()[0].values()
    plain = torch.softmax(logits[0].topk(5)[0], 0)[0]
    assert (probs[EOS] > 0.99) == ends and (abs(probs[EOS] - plain) < 1e-4) != ends


def test_steps_continue_after_a_failure_of_metrics(value_model, oracle, caplog):
    engine = Engine(value_model)
    engine.guide.report = MagicMock(collect=fail)
    run(engine, oracle, [Add(1, PROMPT[:9], TILT), Step({1: ON}, [G])])
    assert engine.guide.report.metrics is None and "could not be counted" in caplog.text


def test_unexpected_requests_do_not_end_the_engine(value_model, caplog, monkeypatch):
    """The engine accepts larger numbers than the step. A request that cannot be admitted is unguided."""
    engine = Engine(value_model)
    processor = object.__new__(LenVMProcessor)
    processor._guide = engine.guide
    limits = dict(top_k=3_000_000_000, logprob_token_ids=[5, 9], stop_token_ids=[2**33])
    assert engine.add(0, PROMPT[:9], TILT | {"guided_logprobs": 1}, params=limits)
    assert engine.guide._sampling[0, 0] == 2**31 - 1 and engine.guide._wants_logprobs[0]
    for guidance in ({"value_mode": "loud"}, TILT):
        if guidance is TILT:
            monkeypatch.setattr(engine.guide.step, "add_request", lambda row, params, *_, **options: params and fail())
        assert not processor.add_request(0, SamplingParams(extra_args=guidance, ignore_eos=True))
        assert not engine.guide._is_known[0]
    assert "value_mode must be" in caplog.text and "on purpose" not in caplog.text and engine.guide.fallbacks == 2


class Group:
    """A tensor-parallel group of two ranks, in which this process is ``rank``."""

    def __init__(self, rank, first=None):
        self.rank_in_group, self.first, self.sent = rank, first, []

    def broadcast(self, tokens):
        self.sent.append(tokens.clone())
        if self.first is not None:
            tokens.copy_(self.first.sent[len(self.sent) - 1])
        return tokens


def test_ranks_use_the_tokens_of_the_first_rank(monkeypatch):
    """Also if guidance fails on a rank; all ranks take part in each broadcast."""
    groups, engines = [Group(0)], []
    groups.append(Group(1, groups[0]))
    for group in groups:
        monkeypatch.setattr(vllm_guide, "get_tp_group", lambda group=group: group)
        engines.append(Engine(None, parallel_config={"tensor_parallel_size": 2}))
        for slot in (0, 1, 2):  # the second rank would draw other tokens
            params = {"seed": group.rank_in_group, "top_k": 0}
            engines[-1].add(slot, PROMPT[:9], {"target_length": 9} if slot < 2 else None, params=params)
    for rows, failing, guided in (
        ({2: ON}, None, [False]),
        ({0: ON, 1: ON, 2: ([8], [])}, None, [True, True, False]),
        ({0: ([5], []), 1: ([5], [])}, 1, [True, True]),
        ({1: ([6], [])}, 0, [False]),
        ({0: ([6], []), 1: ([5], [])}, None, [True, False]),
    ):
        found = []
        for rank, engine in enumerate(engines):
            with pytest.MonkeyPatch.context() as patch:
                if rank == failing:
                    patch.setattr(engine.guide.step, "step", fail)
                found.append(kept(engine.step(rows, logits=torch.full((len(rows), VOCAB), float(rank)))[1]))
        assert found[0] == found[1] and [len(tokens) for tokens in found[0]] == [1 if x else VOCAB for x in guided]
        assert len(groups[0].sent) == len(groups[1].sent)
    assert [engine.guide.fallbacks for engine in engines] == [1, 1] and len(groups[0].sent) == 4


class Counts(Counter):
    """Numbers by name, in the form of :class:`Metrics`."""

    def __init__(self):
        super().__init__()
        self.rows = {name: self.counter(name) for name in (*(status.name.lower() for status in Status), "broken")}
        for name in ("guided_steps", "lost_mass", "value_model_milliseconds"):
            setattr(self, name, self.counter(name))
        self.verifications, self.verified_tokens = ({"yes": self.counter(name)} for name in ("verified", "tokens"))

    def counter(self, name):
        return SimpleNamespace(inc=lambda number=1: self.update({name: number}))


# Requests that enter a slot, and the rows of steps.
NINE = {"target_length": 9, "strength": 0.1}
VERIFIED = [
    Add(4, [5, 6, 7], NINE),
    Add(1, [9, 8, 7, 6], NINE),
    Add(0, PROMPT, None),
    Add(2, PROMPT, {"token_temperature_scale": {"5": 2.0}}),  # the engine draws its tokens
    {4: ON, 1: ON},
    *({4: ([5], [8, token]), 1: ([8, token], [token, 8]), 0: ON, 2: ([6], [8, 8])} for token in (8, 9, 10)),
    Add(4, [5, 6, 7, 8, 9], NINE),
    {4: ON, 1: ([8, 7], [8])},
    Add(5, PROMPT, NINE),  # in two chunks, in batches with drafts
    {5: 20, 1: ([5], [9])},
    {5: ON, 1: ([5], [8, 8])},
]


@pytest.mark.parametrize("has_model", [False, True])
def test_accepted_drafts_are_counted(value_model, has_model):
    """Accepted drafts and the next token are counted; rows without drafts or guidance are not."""
    engine, metrics, times, accepted = Engine(value_model if has_model else None, drafts=2), Counts(), 0, 0
    engine.guide.report = Report(torch.device("cpu"), metrics)
    for event in VERIFIED:
        if isinstance(event, Add):
            engine.add(*event)
            continue
        rows = iter(kept(engine.step(event, likely=(8,))[1]))
        for slot, row in event.items():
            drafts = [] if isinstance(row, int) else row[1]
            drawn = [next(rows) for _ in range(1 + len(drafts))]
            if drafts and slot != 2:
                pairs = zip(drafts, drawn, strict=False)
                times, accepted = times + 1, accepted + 1 + len([*takewhile(lambda pair: [pair[0]] == pair[1], pairs)])
    assert (metrics["verified"], metrics["tokens"]) == (times, accepted) and times < accepted < 2 * times
    assert metrics["guided_steps"] == 7 and not engine.guide.fallbacks


def test_rows_are_counted_by_status(value_model):
    """Rows of guided requests are counted, in steps without drafts all rows; rows with a discarded token are not."""
    engine, metrics = Engine(value_model), Counts()
    engine.guide.report = Report(torch.device("cpu"), metrics)
    engine.add(2, PROMPT[:9], TILT, params={"top_k": VOCAB - 1, "temperature": 2.0})
    engine.add(0, PROMPT[:12], TILT | {"value_entropy_threshold": 50.0})
    engine.add(1, PROMPT[:4], TILT, params={"top_p": 1e-6})
    engine.add(5, PROMPT[:6], None)
    engine.add(3, PROMPT, TILT)
    engine.add(4, PROMPT[:5], TILT)
    scores = torch.zeros(6, VOCAB)
    scores[5] = torch.nan
    engine.step({2: ON, 0: ON, 1: ON, 5: ON, 3: 20, 4: ON}, logits=scores)
    expected = dict(unguided=1, guide=1, single=1, skip=1, not_due=0, broken=1)
    assert {name: metrics[name] for name in metrics.rows} == expected
    engine.step({2: ([3], []), 4: ([3], [])})  # a row is broken in one step only
    assert (metrics["guide"], metrics["broken"]) == (3, 1) and metrics["value_model_milliseconds"] > 0
    assert 1 - 8.1 / VOCAB < metrics["lost_mass"] < 4
    engine.step({2: ([3], [])}, logits=torch.full((1, VOCAB), torch.nan))
    assert metrics["broken"] == 2


@pytest.mark.parametrize("drafts", [0, 3])
def test_memory_is_reserved_until_the_first_guided_request(value_model, drafts):
    """With drafts, also for the copy of scores. Warm-up steps do not free it."""
    engine = Engine(value_model, drafts=drafts)
    guide, sizes = engine.guide, dict(requests=SLOTS, max_len=MAX_LEN, vocab_size=VOCAB, max_drafts=drafts)
    working = guide.settings.working_bytes(guide.step.values.value_model, **sizes, max_delta=MAX_DELTA + drafts)
    assert guide.kept_free.numel() - working == (drafts > 0) * SLOTS * (1 + drafts) * VOCAB * 4
    engine.add(1, PROMPT[:9], None)
    engine.step({1: ON})
    assert guide.kept_free is not None
    engine.add(1, PROMPT[:9], TILT)
    assert guide.kept_free is None


@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("part_bytes", [2**28, 2 * 4 * VOCAB * 4])
def test_scores_of_drafts_are_copied_in_parts(value_model, monkeypatch, part_bytes, calls):
    """Only parts with guided requests are computed. A stride counts all parts of a step as one."""
    monkeypatch.setattr(vllm_guide, "PART_BYTES", part_bytes)
    engine, stride = Engine(value_model, drafts=3), {"value_stride": 2}
    for slot in range(5):
        engine.add(slot, PROMPT[slot : slot + 9], None if slot == 2 else TILT | stride)
    before, after, *_ = engine.step({slot: ON for slot in range(5)})
    assert torch.equal(before, after)
    for number in range(4):
        rows, done = [(slot, ([7], [3, 4, 5][:slot])) for slot in range(5)], 0
        engine.traced()
        for part in (rows,) if calls == 1 else (rows[:1], rows[1:]):  # the first of two parts has no drafts
            slots = [slot for slot, (_, drafts) in part for _ in range(1 + len(drafts))]
            logits = torch.zeros(len(slots), VOCAB)  # several candidates without an end, so rows need values
            logits[:, EOS] = -torch.inf
            found = kept(engine.step(dict(part), logits, view=(done, 1 + 2 + 3 + 4 + 4))[1])
            done += len(slots)
            assert [len(tokens) == 1 for tokens in found] == [number % 2 == 0 and slot != 2 for slot in slots]
        assert len(engine.traced()) == calls + (part_bytes != 2**28)


@pytest.fixture(scope="module")
def probe(tmp_path_factory):
    """The directory of a probe, and its base model's modules in the engine; the embedding has padding rows."""
    base, folder = models.random_model(*ARCHITECTURES["qwen2"]), tmp_path_factory.mktemp("probe")
    write_random_probe(folder, base)
    weight = torch.cat([base.get_input_embeddings().weight.detach(), torch.ones(7, HIDDEN)])
    embeddings = [layer_of(ParallelLMHead, weight + 1), layer_of(VocabParallelEmbedding, weight)]
    return folder, torch.nn.ModuleList([*embeddings, layer_of(LogitsLayer)])


@pytest.mark.parametrize("kind", [LogitsLayer, LogitsProcessorWithLoRA])
def test_states_match_the_rows_of_a_step(probe, kind):
    """Also if the engine verifies drafts in parts, in views of the step's rows."""
    base, hidden = torch.nn.ModuleList([*probe[1][:2], layer_of(kind)]), torch.randn(3, HIDDEN)
    engine, scores = Engine(probe[0], base=base, drafts=3), torch.randn(3, VOCAB)

    def probs(rows, first, view=None):
        """Guided probabilities of slot 4 and its draft, with logits from row ``first`` on."""
        engine.add(2, PROMPT[:5], None)
        engine.add(4, PROMPT[:9], TILT)
        if view is None:
            base[2](lm_head=None, hidden_states=hidden[first:])
        else:
            base[2](None, hidden)
        engine.step(rows, scores[first:], view=view)
        return torch.stack([found for tokens, found in engine.traced()[0].items() if len(tokens) > 6])

    rows = {4: ([8], [6])}
    beside, alone, viewed = probs({2: ([6], [])} | rows, 0), probs(rows, 1), probs(rows, 1, view=(1, 3))
    assert torch.equal(beside, alone) and torch.equal(beside, viewed)
    assert len(alone) == 2 and not engine.guide.fallbacks


@pytest.mark.parametrize("is_probe", [False, True])
@pytest.mark.parametrize("sleeps", [False, True])
def test_new_weights_and_sleep(probe, is_probe, sleeps):
    """Sleep discards the tensors of a step. New embeddings are checked and projected by a probe."""
    folder, base = probe
    base = torch.nn.ModuleList([layer_of(VocabParallelEmbedding, base[1].weight.detach().clone()), base[2]])
    engine = Engine(folder if is_probe else None, model_config={"enable_sleep_mode": sleeps}, base=base)
    step, values = engine.guide.step, getattr(engine.guide.step.values, "probe", None)
    engine.runner.reset_lora_state()
    assert (engine.guide.step is step) != sleeps
    if is_probe:
        assert engine.guide.step.values.probe is not values
        base[0].weight.data.copy_(base[0].weight.flip(0))
        with pytest.raises(ValueError, match="must be 'tiny', got one with another embedding"):
            engine.runner.reset_lora_state()


def with_inner_layers(base):
    """A model that returns the inputs of its layers."""
    model = layer_of(Qwen2ForCausalLM)
    model.parts = base
    return model


INNER = r"got one that also reads layers \[1\]"
NO_PROBE = "LENVM_VALUE_MODEL must not be a probe with this base model: ModuleList"
REFUSED = [
    ("probe", lambda base: base[:1], {}, f"{NO_PROBE} has no input embedding that is not quantized"),
    ("probe", lambda base: base[:2], {}, f"{NO_PROBE} computes its logits without vLLM's LogitsProcessor"),
    ("inner", lambda base: base, {}, f"{INNER}: ModuleList does not return others"),
    ("inner", with_inner_layers, {"speculator": object.__new__(EagleSpeculator)}, f"{INNER}: the draft model"),
    ("value", lambda base: base, {"cache_config": {"kv_cache_memory_bytes": 2**20}}, r"SHARE must be above \d+\.\d+"),
]


@pytest.mark.parametrize(("source", "change", "options", "message"), REFUSED)
def test_unsupported_configurations_are_rejected(value_model, probe, tmp_path, source, change, options, message):
    folder, base = (value_model if source == "value" else probe[0]), change(probe[1])
    if source == "inner":
        write_random_probe(folder := tmp_path, models.random_model(*ARCHITECTURES["qwen2"]), layers=(1, 2))
    with pytest.raises(ValueError, match=message):
        Engine(folder, base=base, **options)
