"""The guided step over the lifetime of requests, against recomputation from scratch."""

import math
from itertools import pairwise

import pytest
import torch

from lenvm_kernels.guidance import GuidanceTable, parse_guidance
from lenvm_kernels.ops.reweight_scatter import reweight_scatter
from lenvm_kernels.ops.sample_candidates import sample_candidates
from lenvm_kernels.ops.topk_candidates import topk_candidates
from lenvm_kernels.paged_slots import OutOfSlots
from lenvm_kernels.step import StepBatch
from lenvm_kernels.types import Mode, Status
from tests.helpers.engine import GUIDANCE, PROMPTS, TILT, Engine, make_step, random_scores
from tests.helpers.models import EOS, VOCAB
from tests.helpers.step_models import ATOL
from tests.helpers.watch import Operators, watch_forwards


def test_500_steps_of_arriving_and_leaving_requests(models):
    """Arrivals, departures, aborts, retractions from a pool that is too small, and reuse of slots and rows."""
    generator = torch.Generator().manual_seed(0)
    randint = lambda low, high: torch.randint(low, high, (), generator=generator).item()  # noqa: E731
    sizes = dict(rows=6, max_len=60, page_size=4, num_pages=30, chunk_tokens=7)
    step, slots = make_step(models.value, **sizes)
    engine = Engine(step, slots)
    waiting, running, steps, scored, retractions, finished = [], {}, 0, 0, 0, 0

    def new_request():
        tokens = [randint(3, VOCAB) for _ in range(randint(1, 20))]
        guidance = GUIDANCE[randint(0, len(GUIDANCE))]
        return dict(tokens=tokens, guidance=guidance, prompt_len=len(tokens), most=len(tokens) + randint(1, 30))

    def decode(rows):
        nonlocal steps, scored
        requests = [running[row] for row in rows]
        sequences = [r["tokens"] for r in requests]
        scores = torch.randn(len(rows), VOCAB, generator=generator) * 3
        output = engine.decode(rows, sequences, scores)
        guidance, prompt_lens = ([r[name] for r in requests] for name in ("guidance", "prompt_len"))
        scored += models.assert_guided(output, sequences, guidance, prompt_lens)
        for request, token in zip(requests, output.tokens.tolist(), strict=True):
            # Sometimes the next token is not the drawn one: a stop string, a grammar, another sampler.
            request["tokens"] = [*request["tokens"], randint(0, VOCAB) if token < 0 or randint(0, 8) == 0 else token]
        steps += 1

    while steps < 500:
        if randint(0, 2) == 0:
            waiting.append(new_request())
        free = [row for row in range(6) if row not in running]
        admitted = []
        while waiting and free and len(admitted) < 3:
            row = free.pop(randint(0, len(free)))
            try:
                request = waiting[0]
                engine.admit(row, request["tokens"], request["guidance"], prompt_len=request["prompt_len"])
            except OutOfSlots:
                break
            running[row] = waiting.pop(0)
            admitted.append(row)
        if admitted:  # a prefill batch is a separate step without the running requests
            engine.prefill(admitted, [running[row]["tokens"] for row in admitted])
            decode(admitted)
            continue
        for row in sorted(running):
            request = running[row]
            if len(request["tokens"]) >= request["most"] or EOS in request["tokens"][-1:] or randint(0, 60) == 0:
                finished += 1
                slots.free(row)
                step.remove_request(row)
                del running[row]
        for row in sorted(running):
            while row in running:
                try:
                    slots.extend(row, len(running[row]["tokens"]))
                    break
                except OutOfSlots:
                    victim = sorted(running)[randint(0, len(running))]
                    retractions += 1
                    slots.free(victim)
                    step.remove_request(victim)
                    waiting.insert(0, running.pop(victim))
        if running:
            rows = sorted(running, key=lambda row: randint(0, 100))
            decode(rows)
    assert scored > 2000 and retractions > 5 and finished > 50, (scored, retractions, finished)
    assert step.table.columns.faults.sum() == 0


@pytest.mark.parametrize("is_predicted", [False, True])
def test_reused_row_keeps_no_state_of_its_last_request(models, is_predicted):
    """The new request has the last token of the old one at the same position."""
    engine, scores = Engine(*make_step(models.value)).start([0], [[5, 6, 7]], [TILT]), random_scores(1)
    if is_predicted:
        engine.step.predict(StepBatch(engine.tensor([7]), engine.tensor([0]), engine.tensor([3])))
        tokens = [30, 31, 7]
    else:
        tokens = [30, 31, 32, engine.decode([0], [[5, 6, 7]], scores).candidates.token_ids[0, 0].item()]
    engine.step.remove_request(0)
    engine.slots.free(0)
    engine.start([0], [tokens], [TILT])
    assert models.assert_guided(engine.decode([0], [tokens], scores), [tokens], [TILT], [len(tokens)])


def test_token_inserted_between_steps(models):
    """For example a token forced by a grammar: ``extend`` adds it after the first step."""
    engine = Engine(*make_step(models.value)).start([4, 1], [[5, 6, 7]] * 2, [TILT] * 2, room=2)
    scores = random_scores(2)
    token = engine.decode([4, 1], [[5, 6, 7]] * 2, scores).tokens[1].item()
    engine.step.extend(*engine.prompts([1], [[40]], [3]))
    tokens = [[5, 6, 7, 40, token]]
    assert models.assert_guided(engine.decode([1], tokens, scores[:1]), tokens, [TILT], [3])


def test_prompts_may_be_extended_in_parts(models):
    """Several requests in rows out of order; ends of parts and chunks do not coincide."""
    rows, prompts = [6, 1, 4], [list(range(3, 53)), [60, 61], list(range(60, 90))]
    caches = []
    for chunk_tokens, parts in ((1000, [0, 100]), (7, [0, 100]), (8, [0, 1, 20, 23, 100])):
        engine = Engine(*make_step(models.value, chunk_tokens=chunk_tokens))
        for row, tokens in zip(rows, prompts, strict=True):
            engine.admit(row, tokens, TILT, prompt_len=len(tokens))
        for first, end in pairwise(parts):
            pieces = [tokens[first:end] for tokens in prompts]
            engine.step.extend(*engine.prompts(rows, pieces, [min(first, len(tokens)) for tokens in prompts]))
        caches.append(torch.stack((engine.step.cache.keys, engine.step.cache.values)))
    for cache in caches[1:]:
        torch.testing.assert_close(cache, caches[0], rtol=0, atol=ATOL)
    assert (caches[0] != 0).any(dim=(0, 1, 3, 4)).sum() == 50 + 2 + 30


def test_unguided_rows_are_unchanged(models, monkeypatch):
    seen = watch_forwards(models.value, monkeypatch, of_prompts=True)
    guidance = [None, TILT, {"value_mode": "mul", "value_scale": 1.0}, None]
    engine = Engine(*make_step(models.value)).start(range(4), PROMPTS, guidance)
    assert seen.deltas == [[0] * 4]
    scores = random_scores(4)
    probs = torch.softmax(scores, dim=1)
    before = probs.clone()
    output = engine.decode(range(4), PROMPTS, scores, probs=probs)
    assert seen.deltas[1:] == [[0, 1, 0, 0]]
    assert torch.equal(probs[[0, 2, 3]], before[[0, 2, 3]])
    assert not torch.equal(probs[1], before[1]) and (probs[1] > 0).sum() <= 6
    assert output.tokens[[0, 2, 3]].tolist() == [-1, -1, -1] and output.tokens[1] >= 0
    torch.testing.assert_close(probs[1, output.candidates.token_ids[1].long().clamp(min=0)], output.probs[1])


def test_probabilities_may_be_guided_in_place(models):
    engine = Engine(*make_step(models.value)).start([0], PROMPTS[:1], [TILT])
    scores = torch.softmax(random_scores(1), dim=1)
    output = engine.decode([0], PROMPTS[:1], scores, probs=scores, is_logits=False, temperature=None)
    expected = torch.zeros(VOCAB).index_add(0, output.candidates.token_ids[0].clamp(min=0).long(), output.probs[0])
    torch.testing.assert_close(scores[0], expected)


def test_inactive_rows_are_unguided(models, monkeypatch):
    engine = Engine(*make_step(models.value)).start([0, 1], PROMPTS[:2], [TILT] * 2)
    seen = watch_forwards(models.value, monkeypatch)
    scores = random_scores(2)
    output = engine.decode([0, 1], PROMPTS[:2], scores, active=torch.tensor([True, False]))
    assert seen.deltas == [[1, 0]] and output.candidates.status.tolist() == [Status.GUIDE, Status.UNGUIDED]


# Six requests that differ in every field: row of the slot table, tokens, prompt length, guidance, end-of-sequence ids,
# seed. Rows are not in order, and row 4 is unused.
REQUESTS = [
    (5, [5, 6, 7, 8], 3, {"mode": "centered_exp", "scale": -4, "gamma": 0.9, "return_values": True}, {1}, -7),
    (0, [9, 3, 10, 11, 12, 13], 1, {"target_length": 9, "op": "eq_soft", "gamma": 0.85}, {2, 4}, 2**40),
    (3, [30, 31], 2, {"scale": 0.7, "entropy_threshold": 100.0, "return_values": True, "gamma": 0.99}, {3}, 5),
    (6, [14, 15, 16], 1, {"mode": "linear", "scale": 1.6, "entropy_threshold": 0.0}, set(), 6),
    (1, [17] * 9, 4, {"return_values": True, "gamma": 0.8}, {0, 5}, 7),
    (2, [18, 19, 20, 21, 22], 5, {"mode": "length_mul", "scale": 0.6, "gamma": 0.95, "value_min": 0.2}, {0}, 8),
]


def test_rows_use_the_parameters_of_their_own_request(models):
    """Candidates, values, probabilities, draws and lengths of rows out of order."""
    rows, prompts, prompt_lens, guidance, eos, seeds = map(list, zip(*REQUESTS, strict=True))
    params, b, steps = [parse_guidance(g) for g in guidance], len(rows), 5
    engine = Engine(*make_step(models.value, max_requests=b))
    for row, tokens, prompt_len, g, ids, seed in REQUESTS:
        engine.admit(row, tokens + [0] * steps, g, prompt_len=prompt_len, eos=ids, seed=seed)
    engine.prefill(rows, prompts)
    table = GuidanceTable.from_params(params, eos, "cpu")
    filters = dict(
        top_k=torch.tensor([6, 0, 7, 5, 8, 8], dtype=torch.int32),
        top_p=torch.tensor([0.8, 0.97, 0.9, 1.0, 0.8, 0.6]),
        min_p=torch.tensor([0.0, 0.02, 0.0, 0.01, 0.0, 0.005]),
        temperature=torch.tensor([1.0, 0.9, 1.5, 2.0, 0.7, 1.2]),
        vocab_mask=torch.tensor([[-1, -1, -1, -1]] * 3 + [[-9, -1, -1, -1]] * 3, dtype=torch.int32),  # all but token 3
    )
    generator, sequences, seen = torch.Generator().manual_seed(0), [list(tokens) for tokens in prompts], set()
    for _ in range(steps):
        scores = torch.randn(b, VOCAB, generator=generator)
        scores[:, :6] += 5  # end tokens of some requests are candidates of all
        drawn = torch.randint(6, VOCAB, (b,), generator=generator)
        lengths = torch.tensor([len(tokens) for tokens in sequences], dtype=torch.int32)
        probs = torch.softmax(scores, dim=1)
        before = probs.clone()
        output = engine.decode(rows, sequences, scores, **filters, probs=probs, drawn=drawn)
        of_rows = dict(guided=table.guided, entropy_threshold=table.columns.entropy_threshold)
        candidates = topk_candidates(scores, **filters, **of_rows, is_logits=True)
        for name, found, expected in zip(candidates._fields, output.candidates, candidates, strict=True):
            assert torch.equal(found, expected), name
        models.assert_values(output, sequences)
        generated = lengths - torch.tensor(prompt_lens, dtype=torch.int32)
        expected_probs = reweight_scatter(
            candidates, output.value_logits, table.columns, generated=generated, probs=before
        )
        torch.testing.assert_close(output.probs, expected_probs, rtol=0, atol=1e-3)
        torch.testing.assert_close(probs, before, rtol=0, atol=1e-3)
        own = sample_candidates(candidates, output.probs, torch.tensor(seeds), lengths)
        assert output.tokens.tolist() == torch.where(own >= 0, own, drawn.int()).tolist()
        for tokens, token in zip(sequences, output.tokens.tolist(), strict=True):
            tokens.append(token)
        remaining = torch.nn.functional.softplus(models.values(sequences)) / table.columns.nats_per_token
        ended = torch.tensor([tokens[-1] in ids for tokens, ids in zip(sequences, eos, strict=True)])
        remaining = remaining.masked_fill(ended, 0.0).masked_fill(~table.columns.return_values, math.nan)
        torch.testing.assert_close(output.remaining_lengths, remaining, rtol=1e-4, atol=1e-3, equal_nan=True)
        seen |= set(zip(rows, candidates.status.tolist(), strict=True))
    assert seen == {(3, Status.SKIP), (1, Status.UNGUIDED)} | {(row, Status.GUIDE) for row in (5, 0, 6, 2)}


def test_limits_of_rows_candidates_and_tables(models):
    """Two candidates per row; rows, end-of-sequence ids and scaled tokens up to their limits."""
    step, slots = make_step(models.value, rows=3, max_candidates=2, max_eos=2, max_scaled_tokens=1)
    rows, guidance, scores = [2, 0, 1], [TILT | {"token_temperature_scale": {8: 2.0}}] * 3, random_scores(3)
    assert (step.max_requests, step.config.score_all) == (3, False)
    engine = Engine(step, slots).start(rows, PROMPTS[:3], guidance, room=0, eos=[{1, EOS}] * 3)
    output = engine.decode(rows, PROMPTS[:3], scores)
    assert output.probs.shape == (3, 2)
    assert models.assert_guided(output, PROMPTS[:3], guidance, [len(tokens) for tokens in PROMPTS[:3]]) == 6
    with pytest.raises(ValueError, match="eos_token_ids must be at most 2 ids, got 3"):
        step.add_request(0, None, {1, 2, 3})
    with pytest.raises(ValueError, match="token_temperature_scale must be of at most 1 tokens, got 2"):
        step.add_request(0, parse_guidance({"token_temperature_scale": {1: 2.0, 2: 2.0}}), {1})


def test_flush_leaves_no_pending_writes(models):
    """A caller's CUDA graph needs added and removed requests in the table before its replay."""
    step, _ = make_step(models.value)
    step.add_request(3, parse_guidance({"target_length": 5, "op": "ge"}), {EOS})
    step.add_request(1, None, {EOS}, seed=4)
    step.flush()
    with Operators() as seen:
        step.flush()
        assert step.table.columns.mode.tolist() == [0, 0, 0, Mode.GE, 0, 0, 0, 0, 0] and step.table.columns.seed[1] == 4
    assert seen.writes == []
    step.remove_request(3)
    with Operators() as seen:
        step.flush()
    assert sorted(seen.writes) == ["aten::index_copy_", *["aten::index_fill_"] * 2]
    assert not step.table.guided.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_token_temperatures_are_removed_with_their_request(models, dtype):
    step, _ = make_step(models.value)
    scales = {0: 3.0, 3: 2.0, VOCAB - 1: 4.0, VOCAB: 9.0, VOCAB + 5: 9.0}
    step.add_request(0, parse_guidance({"token_temperature_scale": scales}), {EOS})
    step.add_request(2, parse_guidance({"token_temperature_scale": {3: 0.5}}), {EOS})
    logits = random_scores(3).to(dtype)
    expected = logits.clone()
    expected[1, [0, 3, VOCAB - 1]] *= torch.tensor([3.0, 2.0, 4.0], dtype=dtype)
    expected[2, 3] *= 0.5
    step.scale_tokens(logits, torch.tensor([5, 0, 2]))
    assert torch.equal(logits, expected)
    step.remove_request(0)
    expected[0, 3] *= 0.5
    step.scale_tokens(logits, torch.tensor([2, 0, 5]))
    assert torch.equal(logits, expected)


def test_warm_up_changes_nothing(models):
    engine = Engine(*make_step(models.value, max_requests=3, chunk_tokens=5))
    engine.admit(0, PROMPTS[0], TILT, prompt_len=4)
    before = engine.step.cache.keys.clone()
    engine.step.warm_up(progress=False)
    engine.step.warm_up(torch.bfloat16, is_logits=False, progress=False)
    assert torch.equal(engine.step.cache.keys, before)
    engine.prefill([0], PROMPTS[:1])
    scores = random_scores(1)
    assert models.assert_guided(engine.decode([0], PROMPTS[:1], scores), PROMPTS[:1], [TILT], [4])
