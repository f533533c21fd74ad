"""Guided steps on a device: memory and writes, no host-device sync, equal bits in any batch, and CUDA graphs."""

from functools import partial
from unittest.mock import MagicMock

import pytest
import torch
from torch.profiler import profile
from torch.utils._pytree import tree_leaves

from bench.launches import intercept_launches, without_kernels
from lenvm_kernels.guidance import parse_guidance
from lenvm_kernels.ops.topk_candidates import topk_candidates
from lenvm_kernels.step import EngineSlots, GuidedStep, Sampling, StepBatch, StepConfig, value_source, working_bytes
from lenvm_kernels.step.state import Graphs, bucket_of
from lenvm_kernels.types import Drafts, Mode, Status
from tests.helpers.engine import (
    GUIDANCE,
    MOST_LIKELY,
    PROMPTS,
    TILT,
    Engine,
    PaddedStep,
    make_step,
    needs_gpu,
    random_scores,
    run_requests,
    take_step,
)
from tests.helpers.models import EOS, VOCAB, tiny_value_model
from tests.helpers.watch import Operators, PeakMemory, no_read_back


def test_working_bytes_by_hand(models):
    """H 48, I 80, Hq 4, Hkv 2, D 12, fp32. 512 cached tokens are one split, 1153 are three."""
    token = 4 * (2 * 48 + 80 + 2 * (4 + 2 * 2) * 12) + 4 + 6 * 12 + 64
    row, counters = VOCAB // 16 + 320 * 8 + 64, 4 * 3 * 2 * 2
    of_step = partial(working_bytes, models.value, requests=3, vocab_size=VOCAB, max_len=512)
    step, split = 27 * token + 3 * row + counters, 4 * 3 * 27 * 4 * 13
    assert of_step(max_candidates=8, max_delta=1) == step + 32 * (1 + 3)
    assert of_step(max_candidates=8, max_delta=1, max_len=1153) == step + 32 * (1 + 3 * 3) + split
    # Two drafts per request, and eight candidates at each of its three nodes; a query tile has 32 tokens.
    drafted = 3 * (1 + 2 + 24) * token + 9 * row + counters + 32 * (1 + 81 // 32 + 3)
    assert of_step(max_candidates=8, max_delta=1, max_drafts=2) == drafted
    # 16 delta tokens per request and its candidates; the default number of candidates depends on the source.
    assert of_step() == step + 45 * token + 32 * (1 + 72 // 32 + 3)
    assert of_step(tokens=50) == 50 * token + 3 * (VOCAB // 16 + 64) + counters + 32 * (1 + 50 // 32 + 3)
    assert of_step(requests=4096) == of_step(requests=512)  # computed in parts of 512
    of_rows = partial(working_bytes, None, requests=3, max_len=99, vocab_size=160)
    assert (of_rows(max_candidates=8, max_drafts=2), of_rows()) == (9 * 2634, 3 * (10 + 320 * 64 + 64))
    assert [make_step(source)[0].config.max_candidates for source in (models.value, None)] == [8, 64]


@pytest.mark.parametrize(
    ("rows", "max_len", "drafts"), [(1, 400, 0), (5, 400, 0), (2, 1200, 0), (1, 96, 3), (4, 96, 3)]
)
def test_memory_is_within_working_bytes(device, rows, max_len, drafts):
    """Peak memory of a prompt of several chunks and of a step is between half of the stated bytes and all of them.

    The step makes no host read.
    """
    sizes = dict(max_candidates=4, max_drafts=drafts, max_delta=5) if drafts else dict(max_candidates=8)
    value_model = tiny_value_model(device)
    step, slots = make_step(value_model, max_len=max_len, chunk_tokens=64, backend="triton", graphs=False, **sizes)
    engine, length = Engine(step, slots), 70 if max_len > 96 else 20
    for row in range(rows):
        engine.admit(row, [3] * (length + 9), TILT, prompt_len=length)
    numbers, lengths = engine.tensor(list(range(rows))), engine.tensor([length] * rows)
    prompts, last = engine.prompts(range(rows), [[3] * (length - 1)] * rows), engine.tensor([[3]] * rows)
    chains = None
    if drafts:
        chains = Drafts(last.repeat(1, drafts), engine.tensor([[-1, *range(drafts - 1)]] * rows))
    scores, ones = torch.randn(rows * (1 + drafts), VOCAB, device=device), torch.ones_like(lengths)
    with PeakMemory() as of_extend:
        step.extend(*prompts, begins=[1 + i * (length - 1) for i in range(rows)])
    with PeakMemory() as of_step, no_read_back():
        prepared = step.prepare(scores, StepBatch(last, numbers, lengths, ones), chains)
        step.step(prepared, Sampling(4, 1.0, 0.0, is_logits=True, sample=True), verify=chains and "same_draws")
    common = dict(requests=rows, max_len=max_len, vocab_size=VOCAB)
    tokens = min(64, rows * (length - 1) + 1)
    for peak, stated in (
        (of_extend.peak, working_bytes(value_model, **common, tokens=tokens)),
        (of_step.peak, working_bytes(value_model, **common, **sizes)),
    ):
        assert 0.5 * stated < peak <= stated, (peak, stated)


def test_steps_of_one_model_share_only_its_weights(models):
    """Steps on different streams must not share counters or other memory that kernels write."""
    kept, storages = {}, []  # kept, so that memory is not reused

    def note(kernel, launch):
        for x in tree_leaves((launch.args, launch.keywords)):
            if isinstance(x, torch.Tensor) and x.numel():
                storages[-1].add(x.untyped_storage().data_ptr())
                kept.setdefault(x.untyped_storage().data_ptr(), []).append((x, x.clone()))
        return launch()

    for _ in range(2):
        storages.append(set())
        engine = Engine(*make_step(models.value, backend="triton"))
        with intercept_launches(note):
            engine.start([0, 1], PROMPTS[:2], [TILT, TILT])
            engine.decode([0, 1], PROMPTS[:2], random_scores(2))
    shared = [pair for storage in storages[0] & storages[1] for pair in kept[storage]]
    assert len(shared) > 10
    for x, before in shared:
        assert x.is_floating_point() and torch.equal(x, before), x.shape


def test_flush_leaves_no_pending_writes(models):
    """A caller's CUDA graph needs added and removed requests in the table before its replay.

    Any number of requests takes three writes, and a row gets its last request.
    """
    step, _ = make_step(models.value)
    step.table.columns.faults.fill_(3)
    for change in ([4, 0, 3, 4, 1], [0]):
        for i, row in enumerate(change):
            step.add_request(row, parse_guidance({"target_length": 10 + i}), {EOS}, prompt_len=i, seed=i)
        for expected in (["aten::index_copy_", *["aten::index_fill_"] * 2], []):
            with Operators() as seen:
                step.flush()
            assert sorted(seen.writes) == expected
    with Operators() as seen:
        found = [
            getattr(step.table.columns, name).tolist() for name in ("target_length", "prompt_len", "seed", "faults")
        ]
    zeros = [0] * 12
    assert found == [[10, 14, 0, 12, 13, *zeros], *[[0, 4, 0, 2, 3, *zeros]] * 2, [0, 0, 3, 0, 0, *[3] * 12]]
    assert seen.writes == []
    step.remove_request(3)
    assert step.table.columns.mode[:5].tolist() == [Mode.NEAR, Mode.NEAR, 0, 0, Mode.NEAR]


@pytest.mark.parametrize("is_logits", [True, False])
def test_sync_free_step(device, is_logits):
    """Prompts, and steps of guided and unguided rows with all features, with the Triton kernels."""
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
    options = dict(is_logits=is_logits, sample=True, probs=probs, active=lens >= 0, drawn=lens * 0 + 7)
    options |= dict(temperature=lens * 0 + 0.9) if is_logits else {}
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
OF_STRIDED = [(range(5), 5), ([2], 5), ([4, 2, 0, 3, 1], 5), ([1, 3, 0], 5, PaddedStep)]


@pytest.mark.parametrize(
    ("guidance", "layers", "options", "batches"),
    [
        # Keys of the second layer depend on all tokens.
        (GUIDANCE, 2, {"chunk_tokens": 8}, [(range(7), 2), ([1], 2), ([5, 1], 2), (range(63, -1, -1), 1)]),
        (STRIDED, 1, {"max_delta": 4}, OF_STRIDED),
    ],
    ids=["many", "strides"],
)
def test_requests_are_bitwise_identical_in_every_batch(device, guidance, layers, options, batches):
    """Values and draws alone, in batches of up to 64, in other orders and rows, and padded for a graph.

    Prompts are computed in parts; the second has three of 8 tokens.
    """
    value_model = tiny_value_model(device, layers=layers)
    prompts = [PROMPTS[0], [*range(30, 54)], *PROMPTS[2:], *([11 + i % 50] * (1 + i % 3) for i in range(4, 64))]
    results = []
    for chosen, steps, *step_class in batches:
        options = options | dict(step_class=step_class[0] if step_class else GuidedStep, backend="triton")
        engine = Engine(*make_step(value_model, rows=64, max_len=32, **options))
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
    cuda = MagicMock()
    for name in ("CUDAGraph", "graph", "device", "graph_pool_handle"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    cuda.score.side_effect = torch.zeros
    graphs = Graphs(torch.device("cpu"))
    for size in (4, 4, 2, 4):
        assert graphs.run(("size", size), partial(cuda.score, size)).shape == (size,)
    captured = ["score", "graph().__enter__", "score", "graph().__exit__"]
    events = [name for name, *_ in cuda.mock_calls if name in (*captured, "CUDAGraph().replay")]
    assert events == [*captured, "CUDAGraph().replay", *captured, "CUDAGraph().replay"]
    pool = cuda.graph_pool_handle.return_value
    assert [call.kwargs["pool"] for call in cuda.graph.call_args_list] == [pool] * 2
    assert cuda.graph_pool_handle.call_count == 1


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


def test_probabilities_may_be_guided_in_place(models):
    engine = Engine(*make_step(models.value)).start([0], PROMPTS[:1], [TILT])
    scores = torch.softmax(random_scores(1), dim=1)
    output = engine.decode([0], PROMPTS[:1], scores, probs=scores, is_logits=False, temperature=None)
    expected = torch.zeros(VOCAB).index_add(0, output.candidates.token_ids[0].clamp(min=0).long(), output.probs[0])
    torch.testing.assert_close(scores[0], expected)


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
    """For 4,096 requests and 152,064 tokens, less than a ninth of the scores of the 512 requests computed at once."""
    slots = EngineSlots(torch.zeros(4096, 1, dtype=torch.int32), 4096)
    with without_kernels(), PeakMemory() as memory:
        step = PaddedStep(value_source(None), slots, StepConfig(vocab_size=152_064, backend="triton"))
        step.warm_up(sample=False, probs_dtype=torch.float32, progress=False)
    assert memory.peak < 2**25 < 512 * 152_064 * 4 / 9, f"{memory.peak / 2**20:.1f} MiB"
