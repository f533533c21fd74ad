"""The vLLM processor in a worker, without the engine: its inputs, rewritten logits, shared pages and errors."""

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

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
from lenvm_kernels.engines.own_slots import MAX_DELTA, PAGE_SIZE, Room
from lenvm_kernels.engines.settings import Settings
from lenvm_kernels.engines.vllm import filters as vllm_filters
from lenvm_kernels.engines.vllm import options as vllm_options
from lenvm_kernels.engines.vllm.filters import rewrite
from lenvm_kernels.engines.vllm.guide import Guide
from lenvm_kernels.engines.vllm.processor import LenVMProcessor
from lenvm_kernels.engines.vllm.report import Report
from lenvm_kernels.engines.vllm.requests import guidance_of
from lenvm_kernels.engines.vllm.states import show_layers
from lenvm_kernels.types import Status
from tests.helpers.models import ARCHITECTURES, HIDDEN, TINY, VOCAB, random_model, save_checkpoint
from tests.helpers.probes import write_random_probe
from tests.helpers.statistics import p_value
from tests.helpers.watch import no_read_back

WORDS = [f"w{i}" for i in range(VOCAB)]
SLOTS, MAX_LEN = 6, 128
TILT = {"value_mode": "centered_exp", "value_scale": -20}


@pytest.fixture(scope="module")
def value_model(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("value"), seed=1, words=WORDS, value_head=True)


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


class Engine:
    """The state of vLLM that a processor reads: requests in slots, their tokens, and the rows of a step."""

    def __init__(self, value_model, *, drafts=0, base=None, pipeline=1, **settings):
        self.tokens = torch.full((SLOTS, MAX_LEN), 10**9, dtype=torch.int32)  # stale tokens are arbitrary
        self.staged = SimpleNamespace(
            gpu=self.tokens, _staged_write_indices=[], _staged_write_cu_lens=[], _staged_write_contents=[]
        )
        self.lengths = {}
        lens = [SimpleNamespace(np=np.zeros(SLOTS, dtype=np.int32)) for _ in range(2)]
        self.req_states = SimpleNamespace(
            device=torch.device("cpu"),
            max_num_reqs=SLOTS,
            vocab_size=VOCAB,
            all_token_ids=self.staged,
            prompt_len=lens[0],
            prefill_len=lens[1],
        )
        model_config = SimpleNamespace(
            dtype=torch.float32,
            max_model_len=MAX_LEN,
            enforce_eager=True,
            get_vocab_size=lambda: VOCAB,
            tokenizer="",
            get_total_num_hidden_layers=lambda: TINY["num_hidden_layers"],
        )
        self.config = SimpleNamespace(
            model_config=model_config,
            parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=pipeline),
            cache_config=SimpleNamespace(kv_cache_memory_bytes=None),
            num_speculative_tokens=drafts,
            speculative_config=None,
        )
        self.runner = Runner(self.req_states, base)
        self.guide = Guide(Settings(value_model, **settings), self.config, self.req_states)

    def add(self, slot, prompt, guidance, prompt_len=None, **params):
        """Add a request to a slot; no token of its prompt, or of its output before a preemption, is computed yet."""
        self.tokens[slot] = 10**9
        self.tokens[slot, : len(prompt)] = torch.tensor(prompt)
        self.req_states.prompt_len.np[slot] = prompt_len or len(prompt)
        self.req_states.prefill_len.np[slot] = len(prompt)
        self.staged._staged_write_indices.append(slot)
        self.staged._staged_write_contents.extend(prompt)
        self.staged._staged_write_cu_lens.append(len(self.staged._staged_write_contents))
        params = SamplingParams(**{"temperature": 0.7, "top_k": 5, "extra_args": guidance} | params)
        return self.guide.add_request(slot, params, guidance_of(params, self.guide.settings))

    def step(self, lengths, drafts=None, logits=None):
        """Take a step with sequence lengths and drafts by slot; returns logits before and after, and the context."""
        for staged in (self.staged._staged_write_indices, self.staged._staged_write_cu_lens):
            staged.clear()
        self.staged._staged_write_contents.clear()
        drafts = drafts or {}
        rows = [(slot, node) for slot in lengths for node in range(1 + len(drafts.get(slot, ())))]
        slots = np.array(list(lengths))
        last = [[int(self.tokens[s, lengths[s] - 1]), *drafts.get(s, ())][node] for s, node in rows]
        bounds = [lengths[slot] + len(drafts.get(slot, ())) for slot in lengths]
        context = LogitsContext(
            expanded_idx_mapping=torch.tensor([slot for slot, _ in rows]),
            idx_mapping=torch.from_numpy(slots),
            idx_mapping_np=slots,
            expanded_local_pos=torch.tensor([node for _, node in rows], dtype=torch.int32),
            input_ids=torch.tensor(last, dtype=torch.int32),
            pos=torch.tensor([lengths[slot] - 1 + node for slot, node in rows]),
            seq_lens_upper_bound_np=np.array([*bounds, 0, 0]),
        )
        if logits is None:
            generator = torch.Generator().manual_seed(sum(lengths.values()))
            logits = torch.randn(len(rows), VOCAB, generator=generator) * 2
        changed = logits.clone()
        assert self.guide.apply(changed, context) is changed
        return logits, changed, context

    def grow(self, slot, length, tokens):
        self.tokens[slot, length : length + len(tokens)] = torch.tensor(tokens)


PROMPT = [5 + i % 40 for i in range(60)]


def is_guided(logits):
    return logits.isinf().sum(1) >= VOCAB - 8


def test_steps_read_back_nothing(value_model, monkeypatch):
    """Prompts whole and in chunks; first and later steps, with drafts for some requests."""
    make_config = Settings.step_config
    monkeypatch.setattr(Settings, "step_config", lambda *a, **o: replace(make_config(*a, **o), backend="triton"))
    engine = Engine(value_model, drafts=3)
    assert engine.add(4, PROMPT, TILT) and engine.add(1, PROMPT[3:9], TILT) and not engine.add(0, PROMPT[:7], None)
    step, apply = engine.step, engine.guide.apply

    def checked(*args):
        with no_read_back():
            return apply(*args)

    monkeypatch.setattr(engine.guide, "apply", checked)
    step({4: 20, 1: 6, 0: 7})
    engine.grow(1, 6, [9])
    engine.grow(0, 7, [3])
    step({1: 7, 4: 45, 0: 8})
    engine.grow(1, 7, [8])
    _, changed, _ = step({1: 8, 4: 60, 0: 9}, {1: [3, 4, 5], 0: [1, 2, 3]})
    engine.grow(1, 8, [3, 4])
    engine.grow(4, 60, [7])
    _, full, _ = step({1: 10, 4: 61}, {1: [3, 4, 5], 4: [6, 7, 8]})
    assert is_guided(changed).tolist() == [True] * 4 + [True] + [False] * 4
    assert is_guided(full).all() and not engine.guide.step.table.columns.faults.any() and not engine.guide.fallbacks


@pytest.mark.parametrize("use_block_verification", [False, True])
def test_drafts_keep_the_distribution(value_model, use_block_verification):
    """vLLM's rejection sampler on guided rows of drafts, against single steps: chi-square test at each node."""
    requests, temperature, drafts = 1000, 0.7, []
    guidance = {"value_mode": "centered_exp", "value_scale": -2}
    scores = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(8))
    plain, drafting = Engine(value_model), Engine(value_model, drafts=3)
    for engine in (plain, drafting):
        engine.add(4, PROMPT[:9], guidance, temperature=temperature, top_k=3)
    expected = []
    for node in range(4):
        _, changed, _ = plain.step({4: 9 + node}, logits=scores[node : node + 1])
        expected.append((changed[0] / temperature).exp().double())
        drafts.append(int(expected[-1].argmax()))
        plain.grow(4, 9 + node, drafts[-1:])
    _, changed, context = drafting.step({4: 9}, {4: drafts[:3]}, logits=scores)
    assert torch.allclose((changed / temperature).exp().double(), torch.stack(expected), atol=1e-5)
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


def test_guided_rows_keep_candidates_only_and_others_are_unchanged(value_model):
    engine = Engine(value_model)
    engine.add(2, PROMPT[:9], TILT, temperature=0.5, top_k=4)
    engine.add(5, PROMPT[:6], None)
    engine.add(0, PROMPT[:12], TILT | {"entropy_threshold": 50.0})
    engine.add(3, PROMPT[:50], TILT)
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(2)) * 3
    logits[1, 3:6] = torch.tensor([float("nan"), -torch.inf, 0.0])
    logits[0, :40] = -torch.inf  # masked by a grammar
    before, after, _ = engine.step({2: 9, 5: 6, 0: 12, 3: 20}, logits=logits)
    # An unguided row, a skipped one, and an unfinished prompt.
    assert torch.equal(after[1:].view(torch.int32), before[1:].view(torch.int32))
    left = after[0].isfinite().nonzero().flatten().tolist()
    assert left == sorted(before[0].topk(4).indices.tolist())
    probs = (after[0] / 0.5).exp()[left]
    assert torch.isclose(probs.sum(), torch.tensor(1.0), atol=1e-5)
    plain = (before[0] / 0.5).softmax(0)[left]
    assert (probs - plain / plain.sum()).abs().max() > 0.01


def test_engine_filters_do_not_apply_to_guided_rows(value_model):
    """Top-k and top-p are disabled in guided rows of the current step only; tokens removed by min-p are restored."""
    engine = Engine(value_model)
    engine.add(2, PROMPT[:9], TILT)
    engine.add(5, PROMPT[:6], None)
    _, logits, context = engine.step({5: 6, 2: 9})
    top_k, top_p = torch.tensor([3, 2], dtype=torch.int32), torch.tensor([0.5, 0.1])
    filters, of_rows = engine.guide.filters, context.expanded_idx_mapping
    assert signatures.differences("vllm") == {}  # also with wrapped functions
    found = filters.after_top_k_top_p(of_rows, top_k, top_p)
    assert found[0].tolist() == [3, VOCAB] and found[1].tolist() == [0.5, 1.0]
    assert filters.after_top_k_top_p(of_rows, None, None) == (None, None)
    assert filters.after_top_k_top_p(of_rows.clone(), top_k, top_p)[0] is top_k
    before = logits.clone()
    with filters.around_min_p(logits, of_rows):
        logits[:] = -torch.inf
    assert logits[0].isinf().all() and torch.equal(logits[1], before[1])
    with filters.around_min_p(logits, of_rows.clone()):
        logits[:] = -torch.inf
    assert logits.isinf().all()


FILTERS = torch.tensor([3]), torch.tensor([0.5])


def filters_of_0_32(self, expanded_idx_mapping, idx_mapping_np):
    return FILTERS


def filters_of_0_33(self, expanded_idx_mapping, idx_mapping_np, vocab_size):
    return *FILTERS, (self, vocab_size)


@pytest.mark.parametrize(("get_top_k_top_p", "sizes"), [(filters_of_0_32, ()), (filters_of_0_33, (VOCAB,))])
def test_further_results_of_engine_filters_are_returned(value_model, monkeypatch, get_top_k_top_p, sizes):
    monkeypatch.setattr(vllm_filters, "_filters", None)
    monkeypatch.setattr(SamplingStates, "get_top_k_top_p", get_top_k_top_p)
    monkeypatch.setattr(SamplingStates, "apply_min_p", SamplingStates.apply_min_p)  # the wrapper is removed at teardown
    engine = Engine(value_model)
    engine.add(2, PROMPT[:9], TILT)
    _, _, context = engine.step({2: 9})
    given = context.expanded_idx_mapping, context.idx_mapping_np, *sizes
    top_k, top_p, *others = SamplingStates.get_top_k_top_p("states", *given)
    assert top_k.tolist() == [VOCAB] and top_p.tolist() == [1.0]
    assert others == ([("states", VOCAB)] if sizes else [])


def test_requests_share_the_pages_of_a_common_prefix(value_model, monkeypatch):
    """Three full pages of a common prefix of 50 tokens are computed once while a request holds their slots."""
    engine, extended = Engine(value_model), []
    extend = engine.guide.step.extend

    def recorded(tokens, slots, table_rows, starts, lens, cached_lens, **options):
        extended.append(int(lens.sum()))
        return extend(tokens, slots, table_rows, starts, lens, cached_lens, **options)

    monkeypatch.setattr(engine.guide.step, "extend", recorded)
    prompts = [[*PROMPT[:50], 1, 2, 3], [*PROMPT[:50], 9, 8], PROMPT[1:40]]

    def computed(slot, prompt, *chunks):
        extended.clear()
        engine.add(slot, prompt, TILT)
        for length in (*chunks, len(prompt)):
            engine.step({slot: length})
        return sum(extended)

    assert computed(3, prompts[0]) == 52
    assert computed(0, prompts[1]) == 51 - 3 * PAGE_SIZE
    assert computed(1, prompts[2]) == 38
    # The same prompt in a free slot, in the slot that holds the pages, and in chunks shorter than the prefix.
    assert computed(4, prompts[0]) == computed(3, prompts[0]) == computed(5, prompts[0], 20, 30) == 52 - 3 * PAGE_SIZE
    for slot in (3, 4, 0, 5):
        engine.add(slot, [7], None)
    assert computed(0, prompts[0], 20) == 52
    assert not engine.guide.fallbacks and not engine.guide.step.table.columns.faults.any()


def test_prompt_that_leaves_no_span_open(value_model):
    """As from a chat template with thinking disabled; another request of the step has an open span."""
    engine, logits = Engine(value_model), torch.zeros(2, VOCAB)
    for slot, prompt in ((4, [*PROMPT[:6], 7, 9]), (2, PROMPT[:8])):
        engine.add(slot, prompt, TILT | {"end_token_ids": [7], "hard_limit": 4})
    _, changed, _ = engine.step({4: 8, 2: 8}, logits=logits)
    assert is_guided(changed).tolist() == [False, True] and torch.equal(changed[0], logits[0])


def test_spans_end_at_their_nodes_and_stay_ended(value_model, monkeypatch):
    """With fewer drafts than the maximum, among other requests; after reclaimed slots, and after preemption."""
    end, eos = 2, 3
    guidance = TILT | {"end_token_ids": [end], "hard_limit": 4}
    engine = Engine(value_model, drafts=3)
    for slot, prompt in ((4, PROMPT[:9]), (1, PROMPT[3:9]), (2, PROMPT[:5])):  # slot 1 has no span
        engine.add(slot, prompt, None if slot == 1 else guidance, stop_token_ids=[eos], ignore_eos=True)
    logits = torch.zeros(3, VOCAB)
    logits[:, [eos, 20, 21]] = torch.tensor([5.0, 4.0, 4.0])
    _, changed, _ = engine.step({4: 9, 1: 6, 2: 5}, logits=logits)
    assert is_guided(changed).tolist() == [True, False, True]
    assert torch.equal(changed[1], logits[1]) and changed[[0, 2], eos].isinf().all()
    # Two new tokens of slot 4, a draft that ends its span and one after it; slot 2 is one token before its limit.
    engine.grow(4, 9, [20, 21])
    engine.grow(1, 6, [end])
    engine.grow(2, 5, [20] * 3)
    logits = logits[:1].repeat(6, 1)
    _, changed, _ = engine.step({1: 7, 4: 11, 2: 8}, {4: [end, 20], 2: [21]}, logits=logits)
    assert is_guided(changed).tolist() == [False, True, False, False, True, True]
    assert torch.equal(changed[[0, 2, 3]], logits[[0, 2, 3]])
    assert changed[5].isfinite().nonzero().tolist() == [[end]] and changed[[1, 4], eos].isinf().all()
    # The end is the first of two new tokens. Then the slots are temporarily reclaimed.
    engine.grow(4, 11, [end, 20])
    _, changed, _ = engine.step({4: 13}, logits=logits[:1])
    assert torch.equal(changed, logits[:1])
    own, reserve = engine.guide.own, engine.guide.own.reserve
    engine.grow(4, 13, [21])
    with monkeypatch.context() as patch:
        patch.setattr(own, "reserve", lambda lengths: own.release(4) or Room([4], reserve(lengths).refused))
        _, changed, _ = engine.step({4: 14}, logits=logits[:1])
    assert torch.equal(changed, logits[:1])
    # The request is added again with its output; or the end belongs to an earlier turn in the prompt.
    sequence = [*engine.tokens[4, :14].tolist(), *[20] * 4]
    for prompt_len, is_ended in ((9, True), (17, False)):
        engine.add(0, sequence, guidance, prompt_len=prompt_len)
        _, changed, _ = engine.step({0: 18}, logits=logits[:1])
        assert is_guided(changed).item() != is_ended
    assert not engine.guide.fallbacks


def test_failure_ends_guidance_of_its_batch_only(value_model, monkeypatch):
    engine = Engine(value_model)
    for slot in (1, 3):
        engine.add(slot, PROMPT[:9], TILT)

    def fail(*args, **options):
        raise RuntimeError("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(engine.guide.step, "step", fail)
        before, after, _ = engine.step({1: 9})
    assert torch.equal(before, after) and engine.guide.fallbacks == 1
    for slot, guided in ((1, False), (3, True)):
        _, after, _ = engine.step({slot: 9})
        assert is_guided(after).item() == guided


def test_failing_metrics_do_not_fail_the_step(value_model, caplog):
    engine = Engine(value_model)
    engine.guide.report = MagicMock(collect=MagicMock(side_effect=ValueError("on purpose")))
    engine.add(1, PROMPT[:9], TILT)
    with caplog.at_level("ERROR"):
        _, after, _ = engine.step({1: 9})
    assert is_guided(after).item() and engine.guide.report is None and "could not be counted" in caplog.text


def test_ranks_agree_on_failures(value_model, monkeypatch):
    """If another rank fails, this rank also ends guidance, for the requests of that step only."""
    engine, asked, others = Engine(value_model), [], []

    def all_reduce(number, operation, group):
        asked.append((number.item(), operation, group))
        number.fill_(max(number.item(), others[-1]))

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    engine.guide.ranks = "ranks"
    for slot in (1, 3):
        engine.add(slot, PROMPT[:9], TILT)
    for slot, fails, guided in ((3, 0, True), (1, 1, True), (1, 0, False), (3, 0, True)):
        others.append(fails)
        _, after, _ = engine.step({slot: 9})
        assert is_guided(after).item() == guided
    assert engine.guide.fallbacks == 1
    assert asked == [(0, torch.distributed.ReduceOp.MAX, "ranks")] * 3


@pytest.mark.parametrize(
    ("part", "option", "given", "message"),
    [
        ("parallel_config", "prefill_context_parallel_size", 2, "must be 1 together .*, got 2: not tried"),
        ("speculative_config", "enable_adaptive_verification", True, r"must be False .*, got True: not tried"),
        ("", "watermark_config", "some", "must be None together with LENVM_VALUE_MODEL, got some"),
    ],
)
def test_unsupported_options_are_rejected(value_model, part, option, given, message):
    engine = Engine(value_model)
    if part:
        setattr(engine.config, part, SimpleNamespace(**{option: given}))
    else:
        setattr(engine.config, option, given)
    with pytest.raises(ValueError, match=f"{option} {message}"):
        vllm_options.check_options(engine.config)


@pytest.mark.parametrize("has_model", [False, True])
def test_accepted_drafts_are_counted(value_model, has_model):
    """Tokens since the step with drafts, without those of a slot's last request and of unguided requests."""
    engine, metrics = Engine(value_model if has_model else None, drafts=2), MagicMock()
    engine.guide.report = Report(metrics, torch.device("cpu"), SLOTS)

    def step(lengths, drafts=None):
        """The tokens of each verification that a step counts."""
        metrics.count_verified.reset_mock()
        engine.step(lengths, drafts)
        assert all(call.kwargs == {"is_guided": True} for call in metrics.count_verified.call_args_list)
        return [call.args[0] for call in metrics.count_verified.call_args_list]

    for slot, prompt in ((4, [5, 6, 7]), (1, [9, 8, 7, 6])):
        engine.add(slot, prompt, {"target_length": 9})
    engine.tokens[[4, 1], 3:12] = torch.arange(18, dtype=torch.int32).view(2, 9)
    assert step({4: 3, 1: 4}) == step({4: 4, 1: 5}, {4: [3, 4], 1: [8, 9]}) == []
    assert step({1: 6, 4: 7}, {4: [3], 1: [8, 9]}) == [1, 3]
    engine.add(4, [5, 6, 7, 8, 9], {"target_length": 12})
    assert step({4: 5, 1: 8}) == [2]
    engine.add(5, PROMPT, None)
    assert step({1: 9, 5: 9}, {1: [8, 9], 5: [3, 4]}) == []
    engine.add(5, [4, 4], None)
    assert step({5: 3, 1: 11}, {1: [8, 9], 5: [3]}) == [2]
    assert not engine.guide.fallbacks


def test_batches_verified_in_parts_are_rejected(value_model, monkeypatch):
    """vLLM's parts have at most 1 GiB of scores: 353 requests with four drafts and a vocabulary of 151,936."""
    vllm_options.check_one_part(353, 4, 151_936)
    vllm_options.check_one_part(9999, 0, 151_936)
    with pytest.raises(ValueError, match=r"max_num_seqs must be at most 353 .* and 4 drafted tokens, got 354: vLLM"):
        vllm_options.check_one_part(354, 4, 151_936)
    monkeypatch.setattr(rejection_sampler, "MAX_CHUNK_BYTES", 3 * (SLOTS - 1) * VOCAB * 4)
    with pytest.raises(ValueError, match=f"max_num_seqs must be at most {SLOTS - 1} .*, got {SLOTS}"):
        Engine(value_model, drafts=2)


def test_memory_is_reserved_for_scores_of_drafts(value_model):
    """The engine's logits have rows for actual drafts, but a step's scores have rows for the maximum."""
    guide = Engine(value_model, drafts=3).guide
    sizes = dict(requests=SLOTS, max_len=MAX_LEN, vocab_size=VOCAB, max_delta=MAX_DELTA + 3, max_drafts=3)
    of_step = guide.settings.working_bytes(guide.step.values.value_model, **sizes)
    assert guide.kept_free.numel() - of_step == SLOTS * (1 + 3) * VOCAB * 4


def test_cache_without_memory(value_model):
    engine = Engine(value_model)
    engine.config.cache_config.kv_cache_memory_bytes = 2**20
    with pytest.raises(ValueError, match=r"LENVM_MEMORY_SHARE must be above \d+\.\d+: it is 0.2 of the 0.00 GiB"):
        Guide(Settings(value_model), engine.config, engine.req_states)


def test_first_model_runner_is_rejected_only_with_a_value_model(value_model, monkeypatch):
    monkeypatch.delenv("LENVM_VALUE_MODEL", raising=False)
    for processor in (LenVMProcessor(None, None), LenVMProcessor(None, None, False)):
        logits = torch.randn(2, 5)
        assert processor.apply(logits) is logits and processor.is_argmax_invariant()
        assert not processor.add_request(0, SamplingParams(extra_args={"mode": "loud"}))
    LenVMProcessor.validate_params(SamplingParams(extra_args={"mode": "loud"}))
    monkeypatch.setenv("LENVM_VALUE_MODEL", value_model)
    with pytest.raises(ValueError, match="needs vLLM's second model runner: set VLLM_USE_V2_MODEL_RUNNER=1"):
        LenVMProcessor(None, None, False)
    with pytest.raises(ValueError, match="value_mode must be one of"):
        LenVMProcessor.validate_params(SamplingParams(extra_args={"mode": "loud"}))


def test_rewrite_by_status():
    """All tokens but a single candidate are masked; rows that are not due are unchanged."""
    candidates = SimpleNamespace(
        status=torch.tensor([Status.SINGLE, Status.NOT_DUE]), token_ids=torch.tensor([[3, -1], [0, 2]])
    )
    output = SimpleNamespace(candidates=candidates, probs=torch.tensor([[1.0, 0.0], [0.5, 0.5]]))
    logits = torch.arange(10.0).view(2, 5)
    rewrite(logits, output, torch.tensor([0, 1]), torch.tensor([[2.0], [2.0]]), None)
    inf = torch.inf
    assert logits.tolist() == [[-inf, -inf, -inf, 0.0, -inf], [5.0, 6.0, 7.0, 8.0, 9.0]]


def test_value_model_uses_gamma_of_settings(value_model):
    assert Engine(value_model, gamma=0.95).guide.step.values.value_model.lenvm_config.gamma == 0.95


@pytest.fixture(scope="module")
def probe(tmp_path_factory):
    """The directory of a probe and its base model's modules in the engine, whose embedding has padding rows."""
    base, folder = random_model(*ARCHITECTURES["qwen2"]), tmp_path_factory.mktemp("probe")
    write_random_probe(folder, base)
    weight = torch.cat([base.get_input_embeddings().weight.detach(), torch.ones(7, HIDDEN)])
    return folder, torch.nn.ModuleList([Head(weight + 1), Embedding(weight)])


def test_states_and_last_tokens_of_step_rows(probe, monkeypatch):
    """States of the engine's logits, also if drafts are verified for some requests at a time.

    The token before each row is known without the tokens of its sequence.
    """
    folder, base = probe
    engine, seen = Engine(folder, drafts=3, base=base), []
    for slot, prompt in ((4, PROMPT), (1, PROMPT[3:9]), (2, PROMPT[:5])):
        engine.add(slot, prompt, None if slot == 2 else TILT)
    step = engine.guide.step.step

    def keeping(prepared, *args, **options):
        seen.append((prepared.batch.states, prepared.batch.last_tokens(None).tolist()))
        return step(prepared, *args, **options)

    monkeypatch.setattr(engine.guide.step, "step", keeping)

    def take_step(rows, *parts, drafts=None):
        """Take a step with ``rows`` per request, verified in ``parts``; returns states and whether rows are guided."""
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
        guided = engine.runner.sample_tokens(lambda: [is_guided(engine.step(part, drafts)[1]) for part in parts])
        return hidden[at], torch.cat(guided).tolist()

    states, guided = take_step({4: 1, 2: 1, 1: 1}, {4: 60, 2: 5, 1: 6})
    assert torch.equal(seen[0][0], states) and guided == [True, False, True]
    engine.grow(1, 6, [9])
    engine.grow(4, 60, [8])
    drafts = {1: [3, 4, 5], 4: [6]}
    states, guided = take_step({1: 4, 2: 1, 4: 2}, {1: 7}, {2: 6, 4: 61}, drafts=drafts)
    of_absent = torch.zeros(3, HIDDEN)
    assert torch.equal(seen[0][0], states[:4]) and seen[0][1] == [9]
    assert torch.equal(seen[1][0], torch.cat([states[4:5], of_absent, states[5:], of_absent[1:]]))
    assert seen[1][1][1] == 8
    assert guided == [True] * 4 + [False] + [True] * 2
    # Only the second part has a guided request.
    states, guided = take_step({2: 1, 1: 4}, {2: 7}, {1: 11}, drafts=drafts)
    assert torch.equal(seen[0][0], states[1:]) and guided == [False] + [True] * 4 and not engine.guide.fallbacks


def test_unusable_probes_are_rejected(probe, tmp_path):
    folder, base = probe
    with pytest.raises(ValueError, match="the base model must be 'tiny', got one with another embedding"):
        Engine(folder, base=torch.nn.ModuleList([Embedding(base[1].weight.detach().flip(0))]))
    with pytest.raises(ValueError, match="pipeline_parallel_size must be 1 together with a probe, got 2"):
        Engine(folder, base=base, pipeline=2)
    with pytest.raises(ValueError, match="a probe with this base model: ModuleList has no input embedding"):
        Engine(folder, base=base[:1])
    write_random_probe(tmp_path, random_model(*ARCHITECTURES["qwen2"]), layers=(1, 2))
    message = r"a probe of the last layer alone here, got one of layers \[1\], too: ModuleList shows no others"
    with pytest.raises(ValueError, match=message):
        Engine(tmp_path, base=base)
    engine = Engine(folder, base=base)
    engine.runner.model, engine.runner.speculator = object.__new__(Qwen2ForCausalLM), object.__new__(EagleSpeculator)
    with pytest.raises(
        ValueError, match=r"got one of layers \[1\], too: the model that drafts would be given others, too"
    ):
        show_layers(engine.runner, [1])
