"""Guided steps on a device: memory, no host-device sync, bitwise identical results in any batch, and CUDA graphs."""

import contextlib
from functools import partial

import pytest
import torch
from torch.profiler import profile

from bench.launches import intercept_launches, without_kernels
from lenvm_kernels.guidance import parse_guidance
from lenvm_kernels.ops.topk_candidates import topk_candidates
from lenvm_kernels.step import EngineSlots, GuidedStep, Sampling, StepBatch, StepConfig, value_source, working_bytes
from lenvm_kernels.step.state import Graphs, bucket_of
from lenvm_kernels.step.sources import chunks_of
from lenvm_kernels.types import Status
from tests.helpers.drafts import random_drafts
from tests.helpers.engine import (
    GUIDANCE,
    MOST_LIKELY,
    PROMPTS,
    TILT,
    Engine,
    make_step,
    needs_gpu,
    random_scores,
    run_requests,
    take_step,
)
from tests.helpers.models import EOS, VOCAB, random_pair, tiny_value_model, value_model_of
from tests.helpers.padded_step import PaddedStep
from tests.helpers.watch import PeakMemory, no_read_back


def test_working_bytes_of_a_step_by_hand(models):
    """H 48, I 80, Hq 4, Hkv 2, D 12, fp32. 512 cached tokens are one split, 1153 are three."""
    token = 4 * (2 * 48 + 80 + 2 * (4 + 2 * 2) * 12) + 4 + 6 * 12 + 64
    row = VOCAB // 16 + 320 * 8 + 64
    sizes = dict(requests=3, vocab_size=VOCAB)
    counters = 4 * 3 * 2 * 2
    step = 27 * token + 3 * row + counters
    ours = dict(max_candidates=8, max_delta=1)
    assert working_bytes(models.value, max_len=512, **ours, **sizes) == step + 32 * (1 + 3)
    split = 4 * 3 * 27 * 4 * 13
    assert working_bytes(models.value, max_len=1153, **ours, **sizes) == step + 32 * (1 + 3 * 3) + split
    # Two drafts per request, and eight candidates at each of its three nodes; a tile of queries has 32 tokens.
    drafted = 3 * (1 + 2 + 24) * token + 9 * row + counters + 32 * (1 + 81 // 32 + 3)
    assert working_bytes(models.value, max_len=512, max_drafts=2, **ours, **sizes) == drafted
    # 16 delta tokens per request besides its candidates.
    step += 45 * token
    assert working_bytes(models.value, max_len=512, max_candidates=8, **sizes) == step + 32 * (1 + 72 // 32 + 3)
    row = VOCAB // 16 + 64
    extend = 50 * token + 3 * row + counters + 32 * (1 + 50 // 32 + 3)
    assert working_bytes(models.value, max_len=512, tokens=50, **sizes) == extend
    assert working_bytes(None, requests=3, max_len=99, vocab_size=160, max_candidates=8, max_drafts=2) == 9 * 2634
    assert working_bytes(None, requests=3, max_len=99, vocab_size=160) == 3 * (10 + 320 * 64 + 64)
    assert working_bytes(models.value, max_len=512, **sizes) == working_bytes(
        models.value, max_len=512, max_candidates=8, **sizes
    )


def test_default_number_of_candidates_depends_on_the_source(models):
    assert [make_step(source)[0].config.max_candidates for source in (models.value, None)] == [8, 64]


@pytest.mark.parametrize(("rows", "max_len"), [(1, 400), (5, 400), (2, 1200)])
def test_memory_of_step_is_within_working_bytes(device, rows, max_len):
    """Peak memory of a step and of a prompt of several chunks is between half of the stated bytes and all of them."""
    options, peaks = dict(chunk_tokens=64, backend="triton", graphs=False), {}
    engine = Engine(*make_step(tiny_value_model(device), max_len=max_len, **options))

    def measured(name, function):
        def call(*args, **kwargs):
            with PeakMemory() as memory:
                result = function(*args, **kwargs)
            peaks[name] = memory.peak
            return result

        return call

    engine.step.extend = measured("extend", engine.step.extend)
    engine.step.step = measured("step", engine.step.step)
    prompts = [[3] * 70] * rows
    engine.start(range(rows), prompts, [TILT] * rows)
    engine.decode(range(rows), prompts, torch.randn(rows, VOCAB, device=device))
    sizes = dict(requests=rows, max_len=max_len, vocab_size=VOCAB)
    stated = {
        "extend": working_bytes(engine.step.values.value_model, **sizes, tokens=64),
        "step": working_bytes(engine.step.values.value_model, **sizes, max_candidates=8),
    }
    for name, peak in peaks.items():
        assert 0.5 * stated[name] < peak <= stated[name], (name, peak, stated[name])


X = torch.tensor([1.0, 0.0, 2.0])


@pytest.mark.parametrize(
    "reads_back",
    [
        lambda: X.sum().item(),
        lambda: X.int().tolist(),
        lambda: X.numpy(),
        lambda: bool(X[0] > 0),
        lambda: X.nonzero(),
        lambda: X.masked_select(X > 0),
        lambda: X[X > 0],
        lambda: X.clone().__setitem__(X > 0, X[:2]),
        lambda: X.unique(),
        lambda: torch.equal(X, X + 1),
        lambda: X.repeat_interleave(X.long()),
        lambda: torch.where(X > 0),
    ],
)
def test_sync_mode_catches(reads_back):
    """The next test relies on detecting every way to read back."""
    with pytest.raises(AssertionError, match="reads back"), no_read_back():
        reads_back()


@pytest.mark.parametrize("is_logits", [True, False])
def test_sync_free_step(device, is_logits):
    """Prompts, and steps of guided and unguided rows with every feature of a step, with the Triton kernels."""
    step, slots = make_step(tiny_value_model(device), chunk_tokens=8, backend="triton")
    engine = Engine(step, slots)
    for row, (tokens, guidance) in enumerate(zip(PROMPTS, GUIDANCE[1:], strict=True)):
        more = {"token_temperature_scale": {5: 2.0}, "return_values": row == 1}
        engine.admit(row, [*tokens, 0], guidance and more | guidance, prompt_len=len(tokens))
    rows, lengths = engine.tensor([0, 1, 2, 3]), engine.tensor([len(tokens) for tokens in PROMPTS])
    last = engine.tensor([tokens[-1] for tokens in PROMPTS])
    lens, prompts = lengths - 1, engine.prompts([0, 1, 2, 3], [tokens[:-1] for tokens in PROMPTS])
    scores = random_scores(4).to(device)
    scores = scores if is_logits else torch.softmax(scores, dim=1)
    probs, filters = torch.softmax(scores, dim=1), dict(top_k=lens * 0 + 5, top_p=lens * 0 + 1.0, min_p=lens * 0.0)
    options = dict(is_logits=is_logits, sample=True, probs=probs, active=lens >= 0)
    options |= dict(temperature=lens * 0 + 0.9) if is_logits else {}
    options |= dict(drawn=lens * 0 + 7)
    options |= dict(vocab_mask=torch.full((4, -(-VOCAB // 32)), -1, dtype=torch.int32, device=device))

    def serve():
        step.extend(*prompts)
        tokens, at = last, lengths
        step.predict(StepBatch(tokens, rows, at))
        for _ in range(2):
            output = take_step(step, scores, tokens, rows, at, **filters, **options)
            tokens, at = output.tokens.clamp(min=0), at + 1
        return output

    sync_debug = torch.cuda.set_sync_debug_mode if device.type == "cuda" else lambda mode: None
    if device.type == "cuda":
        step.warm_up(is_logits=is_logits, progress=False)
        serve()
    sync_debug("error")
    try:
        with no_read_back():
            output = serve()
    finally:
        sync_debug("default")
    own = (output.candidates.token_ids == output.tokens[:, None]).any(1).tolist()
    assert own == [True, True, True, False] and output.tokens[3] == 7
    assert output.remaining_lengths.isnan().tolist() == [True, False, True, True]


@pytest.mark.parametrize("others", [[], [9], [13, 2], [0, 7]])
def test_keys_of_prompt_are_bitwise_identical_in_every_batch(device, others):
    """A prompt of 20 tokens, computed in parts of 8 tokens, alone and in batches."""
    caches = []
    for lens in ([20], [*others, 20, 3]):
        value_model = tiny_value_model(device, layers=2)  # keys of the second layer depend on all tokens
        step, slots = make_step(value_model, rows=6, max_len=24, chunk_tokens=8, backend="triton")
        engine, rows = Engine(step, slots), [4, 1, 0, 3][-len(lens) :]
        prompts = [[3 + (7 * n + 5 * i) % 50 for i in range(n)] for n in lens]
        for row, tokens in zip(rows, prompts, strict=True):
            engine.admit(row, tokens, TILT, prompt_len=len(tokens))
        begins = [1 + sum(lens[:i]) for i in range(len(lens))]
        step.extend(*engine.prompts(rows, prompts), begins=begins)
        row = rows[lens.index(20)]
        own = slots.slots(engine.tensor([row] * 20), engine.tensor(list(range(20))))
        caches.append((step.values.cache.keys[:, own], step.values.cache.values[:, own]))
    assert all(torch.equal(alone, beside) for alone, beside in zip(*caches, strict=True))
    assert caches[0][0].abs().sum(dim=(0, 2, 3)).min() > 0


@pytest.mark.parametrize(
    ("tokens", "begins", "expected"),
    [
        (20, [0], [(0, 8), (8, 16), (16, 20)]),
        (20, [3], [(3, 11), (11, 19), (19, 20)]),
        (20, [0, 2, 5, 9, 9], [(0, 5), (5, 9), (9, 17), (17, 20)]),
        (20, [0, 1, 13], [(0, 1), (1, 9), (9, 13), (13, 20)]),  # the second prompt has 4 left, and 7 more do not fit
        (20, [0, 12, 16], [(0, 8), (8, 16), (16, 20)]),  # the first prompt has 4 left, and 4 more fit
        (8, [0, 8], [(0, 8)]),
        (3, [], []),
        (0, [0], []),
    ],
)
def test_parts_of_prompts(tokens, begins, expected):
    assert [(part.start, part.stop) for part in chunks_of(tokens, begins, 8)] == expected


FORWARD = {"lay_out", "embed_tokens", "ragged_linear", "rope_cache", "value_tree_attention", "value_head"}


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_backend_reaches_every_operator(device, backend):
    """Prompts, predictions and steps launch the kernel of every operator with ``triton``, and none otherwise."""
    engine, launched = Engine(*make_step(tiny_value_model(device), rows=2, max_len=8, backend=backend)), set()
    batch = StepBatch(engine.tensor([7]), engine.tensor([1]), engine.tensor([3]))
    calls = [
        (partial(engine.start, [1], [[5, 6, 7]], [TILT | {"return_values": True}]), FORWARD - {"value_head"}),
        (partial(engine.step.predict, batch), {"begin_step", *FORWARD}),
        (
            partial(engine.decode, [1], [[5, 6, 7]], random_scores(1).to(device)),
            {"begin_step", "scan", "filter", *FORWARD, "draw"},
        ),
    ]
    for call, kernels in calls:
        launched.clear()
        with intercept_launches(lambda name, launch: (launched.add(name), launch())):
            call()
        wanted = {f"_{name}_kernel" for name in kernels} if backend == "triton" else set()
        assert launched >= wanted and bool(launched) == bool(wanted), launched


STRIDED = [TILT | {"value_stride": 3}, TILT, TILT | {"entropy_threshold": 1.5, "value_stride": 2}, GUIDANCE[2], None]


@pytest.mark.parametrize(
    ("architecture", "dtype", "guidance", "options", "batches"),
    [
        ("qwen3", None, GUIDANCE, {}, [(range(7), 3), ([3], 3), ([5, 3], 3), (range(63, -1, -1), 1)]),
        ("qwen2", torch.float16, GUIDANCE, {}, [(range(4), 3), ([2, 0, 3, 1], 3), ([1], 3)]),
        ("qwen3", torch.bfloat16, GUIDANCE, {}, [(range(4), 3), ([2, 0, 3, 1], 3), ([1], 3)]),
        (
            "qwen3",
            None,
            STRIDED,
            {"max_delta": 4},
            [(range(5), 7), ([2], 7), ([4, 2, 0, 3, 1], 7), ([1, 3, 0], 7, PaddedStep)],
        ),
    ],
    ids=["many", "fp16", "bf16", "strides"],
)
def test_requests_have_the_same_bits_in_every_batch(device, architecture, dtype, guidance, options, batches):
    """Values and draws alone, in batches of up to 64, in other orders and rows, and padded for a graph."""
    if architecture == "qwen3":
        value_model = tiny_value_model(device, dtype)
    else:
        value_model = value_model_of(*random_pair(architecture), device=device, dtype=dtype)
    prompts = [*PROMPTS, *([11 + i % 50] * (1 + i % 3) for i in range(4, 64))]
    results = []
    for chosen, steps, *step_class in batches:
        options = options | dict(step_class=step_class[0] if step_class else GuidedStep, backend="triton")
        engine = Engine(*make_step(value_model, rows=64, max_len=24, **options))
        rows = torch.randperm(64, generator=torch.Generator().manual_seed(len(chosen)))[: len(chosen)].tolist()
        asked, seeds = [guidance[i % 5] for i in chosen], [100 + i for i in chosen]
        sequences = [prompts[i] for i in chosen]
        _, outputs = run_requests(engine, sequences, asked, steps, seeds=seeds, rows=rows, min_p=0.02)
        found = [(x.candidates.status.tolist(), x.value_logits.tolist(), x.tokens.tolist()) for x in outputs]
        results.append({i: [[x[place] for x in step] for step in found] for place, i in enumerate(chosen)})
    first = results[0]
    for other in results[1:]:
        for i in first.keys() & other.keys():
            assert other[i] == first[i][: len(other[i])]
    of_steps = [step for steps in first.values() for step in steps]
    expected = {Status.GUIDE} | ({Status.UNGUIDED, Status.NOT_DUE} if guidance is STRIDED else set())
    assert {status for status, *_ in of_steps} >= expected
    assert sum(z != 0 for _, values, _ in of_steps for z in values) > 20


@pytest.mark.parametrize(("requests", "expected"), [(2, 2), (3, 4), (5, 7), (7, 7)])
def test_size_of_a_graph(requests, expected):
    assert bucket_of(requests, 7) == expected


def test_graph_is_captured_once_per_size_and_then_replayed(monkeypatch):
    """The first call also runs the function without a graph. All graphs share a memory pool."""
    events = []

    class FakeGraph:
        def __init__(self):
            self.name = f"graph {sum(event.startswith('begin') for event in events)}"

        def replay(self):
            events.append(f"replay {self.name}")

    @contextlib.contextmanager
    def capture(graph, pool):
        events.append(f"begin {graph.name} in {pool}")
        yield
        events.append(f"end {graph.name}")

    def score(size):
        events.append(f"score {size}")
        return torch.zeros(size)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", iter(["pool"]).__next__)
    graphs = Graphs(torch.device("cpu"))
    for size in (4, 4, 2, 4):
        assert graphs.run(("size", size), partial(score, size)).shape == (size,)
    assert events == [
        *("score 4", "begin graph 0 in pool", "score 4", "end graph 0", "replay graph 0"),
        *("score 2", "begin graph 1 in pool", "score 2", "end graph 1", "replay graph 0"),
    ]


def test_stages_of_step_are_profiler_ranges(models):
    engine = Engine(*make_step(models.value)).start([0, 1], PROMPTS[:2], [TILT] * 2)
    with profile() as profiler:
        engine.decode([0, 1], PROMPTS[:2], random_scores(2))
    ranges = sorted((e.time_range.start, e.name) for e in profiler.events() if e.name.startswith("lenvm."))
    stages = ["begin", "candidates", "values", "layers", "head", "draw"]
    assert [name for _, name in ranges] == [f"lenvm.{stage}" for stage in stages]


@needs_gpu
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_graphs_equal_plain_launches(device, batch):
    value_model = tiny_value_model(device)
    prompts = [PROMPTS[i % 4] for i in range(batch)]
    both = []
    for graphs in (True, False):
        engine = Engine(*make_step(value_model, graphs=graphs))
        guidance = [GUIDANCE[i % len(GUIDANCE)] for i in range(batch)]
        sequences, outputs = run_requests(engine, prompts, guidance, 6)
        both.append((sequences, torch.stack([output.value_logits for output in outputs])))
    assert both[0][0] == both[1][0] and torch.equal(both[0][1], both[1][1])


@needs_gpu
def test_graph_of_the_whole_step(device):
    """A caller can capture the whole step in its own graph."""
    engine = Engine(*make_step(tiny_value_model(device), graphs=False)).start(range(4), PROMPTS, [TILT] * 4)
    scores = torch.randn(4, VOCAB, device=device)
    lengths, rows = engine.tensor([len(tokens) for tokens in PROMPTS]), engine.tensor([0, 1, 2, 3])
    batch = StepBatch(engine.tensor([tokens[-1] for tokens in PROMPTS]), rows, lengths)
    sampling = Sampling(lengths * 0 + 5, lengths * 0 + 1.0, lengths * 0.0, is_logits=True, sample=True)

    def step():
        return engine.step.step(engine.step.prepare(scores, batch), sampling)

    expected = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step()
    scores.copy_(scores.flip(0))
    graph.replay()
    flipped = step()
    assert torch.equal(output.tokens, flipped.tokens) and torch.equal(output.value_logits, flipped.value_logits)
    assert not torch.equal(output.value_logits, expected.value_logits)


LATER = [
    {"target_length": 40, "end_token_ids": [3], "hard_limit": 2, "end_message": [7]},
    {"target_length": 30, "return_values": True},
    TILT | {"token_temperature_scale": {5: 4.0, 11: 0.25}, "value_stride": 2},
]


def test_requests_that_arrive_after_the_capture_get_what_they_ask_for(models):
    """Spans, predicted lengths, token temperatures, strides and the engine's draws, first used in a captured step."""
    outputs = []
    for options in ({"backend": "triton"}, {"backend": "triton", "step_class": PaddedStep}):
        engine = Engine(*make_step(models.value, **options)).start(range(4), PROMPTS, [TILT] * 4, room=9)
        sequences, found = [list(tokens) for tokens in PROMPTS], []
        for number in range(6):
            if number == 1:
                for row, guidance in enumerate(LATER):
                    length = len(sequences[row])
                    engine.step.add_request(row, parse_guidance(guidance), {EOS}, prompt_len=length, seed=row)
                engine.prefill(range(len(LATER)), sequences[: len(LATER)])
            scores = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(number))
            drawn = {} if number < 3 else {"drawn": torch.full((4,), 9)}
            output = engine.decode(range(4), sequences, scores, **drawn)
            found.append((output.tokens.tolist(), output.probs.tolist(), output.remaining_lengths))
            sequences = [[*s, max(t, 0)] for s, t in zip(sequences, found[-1][0], strict=True)]
        outputs.append(found)
    for (tokens, probs, lengths), (others, other_probs, other_lengths) in zip(*outputs, strict=True):
        assert tokens == others and probs == other_probs
        assert (lengths is None) == (other_lengths is None)
        assert lengths is None or torch.equal(lengths.nan_to_num(-1.0), other_lengths.nan_to_num(-1.0))
    assert any(lengths is not None and lengths[1] > 0 for *_, lengths in outputs[1])
    assert [tokens[0] for tokens, *_ in outputs[1]][3:5] == [7, 3], outputs[1]


@pytest.mark.parametrize("step_class", [GuidedStep, PaddedStep])
@pytest.mark.parametrize("width", [VOCAB - 40, VOCAB + 15])
def test_scores_narrower_and_wider_than_the_vocabulary(models, step_class, width):
    """Tokens without a score, and padding columns, which have the largest scores here, are no candidates."""
    engine = Engine(*make_step(models.value, step_class=step_class, backend="triton"))
    engine.start(range(3), PROMPTS[:3], [TILT, TILT | {"token_temperature_scale": {VOCAB - 1: 9.0}}, None])
    scores = torch.randn(3, width, generator=torch.Generator().manual_seed(1))
    scores[:, VOCAB:] = 50.0
    options = dict(vocab_mask=torch.full((3, -(-width // 32)), -1, dtype=torch.int32), drawn=MOST_LIKELY)
    output = engine.decode(range(3), PROMPTS[:3], scores.clone(), **options)
    common = scores[:, :VOCAB].clone()
    if width > VOCAB:
        common[1, -1] *= 9
    expected = topk_candidates(
        common, top_k=6, top_p=1.0, min_p=0.05, temperature=0.8, max_candidates=8, is_logits=True, backend="reference"
    )
    assert torch.equal(output.candidates.token_ids[:2], expected.token_ids[:2])
    assert (output.tokens[:2] < common.shape[1]).all()


def test_memory_of_a_warm_up():
    """For 4,096 requests and 152,064 tokens less than a tenth of the scores of the 512 that are computed at once."""
    slots = EngineSlots(torch.zeros(4096, 1, dtype=torch.int32), 4096)
    with without_kernels(), PeakMemory() as memory:
        step = PaddedStep(value_source(None), slots, StepConfig(vocab_size=152_064, backend="triton"))
        step.warm_up(sample=False, probs_dtype=torch.float32, progress=False)
    assert memory.peak < 2**25 < 512 * 152_064 * 4 / 9, f"{memory.peak / 2**20:.1f} MiB"


def test_large_batches_are_computed_in_parts(models, monkeypatch):
    """Requests in parts of three: tokens, lengths, strides, predictions and drafts are the same as in one part."""
    guidance = [
        TILT | {"value_stride": 2},
        TILT | {"return_values": True},
        None,
        {"target_length": 9, "op": "near"},
    ] * 2
    prompts = [[*PROMPTS[i % 4], 20 + i] for i in range(7)]
    results = []
    for largest in (512, 3):
        monkeypatch.setattr("lenvm_kernels.step.step.MAX_ROWS", largest)
        engine = Engine(*make_step(models.value, max_drafts=2, max_delta=9))
        engine.start(range(7), prompts, guidance[:7], room=9)
        rows, last = engine.tensor(range(7)), engine.tensor([tokens[-1] for tokens in prompts])
        lengths = engine.tensor([len(tokens) for tokens in prompts])
        found, sequences, new = (
            [engine.step.predict(StepBatch(last, rows, lengths))],
            [list(x) for x in prompts],
            [1] * 7,
        )
        for number in range(3):
            drafts = random_drafts(7, 2, seed=number)
            scores = torch.randn(21, VOCAB, generator=torch.Generator().manual_seed(number))
            mask = torch.full((21, -(-VOCAB // 32)), -1 - number, dtype=torch.int32)
            options = dict(drafts=drafts, verify="same_draws", vocab_mask=mask, new=new)
            output = engine.decode(range(7), sequences, scores, drawn=torch.arange(21), **options)
            found += [output.tokens, output.probs, output.remaining_lengths, *output.candidates, *output.verified]
            new = output.verified.lens.tolist()
            grown = [tokens[:n] for tokens, n in zip(output.verified.tokens.tolist(), new, strict=True)]
            sequences = [s + g for s, g in zip(sequences, grown, strict=True)]
        results.append((found, engine.step.table.columns.faults, sequences))
    (one, faults, sequences), (parts, other_faults, others) = results
    assert sequences == others and torch.equal(faults, other_faults)
    torch.testing.assert_close(parts, one, rtol=1e-5, atol=1e-6, equal_nan=True)  # BLAS adds in another order
    assert {Status.NOT_DUE, Status.GUIDE, Status.UNGUIDED} <= {
        s for x in one if x.dtype == torch.int8 for s in x.tolist()
    }
