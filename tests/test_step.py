"""The guided step against recomputation from scratch; that it never synchronises; that no batch changes a draw."""

import math
import re
import weakref
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen2Config, Qwen2ForCausalLM

from lenvm_kernels.guidance import GuidanceTable, parse_guidance
from lenvm_kernels.ops.reweight_scatter import reweight_scatter
from lenvm_kernels.ops.sample_candidates import sample_candidates
from lenvm_kernels.ops.topk_candidates import MAX_VOCAB, topk_candidates
from lenvm_kernels.paged_slots import OutOfSlots
from lenvm_kernels.reference._common import of_codes, to_codes
from lenvm_kernels.step import EngineSlots, GuidedStep, Sampling, StepBatch, StepConfig, winners, working_bytes
from lenvm_kernels.step.graphs import bucket_of
from lenvm_kernels.types import Drafts, Mode, Status, TextBreak
from lenvm_kernels.value_model import ValueModel
from tests.helpers.engine import GUIDANCE, PROMPTS, Engine, make_step, needs_gpu, random_scores, run_requests, take_step
from tests.helpers.models import (
    EOS,
    TINY,
    VOCAB,
    last_value_logits,
    random_head,
    random_model,
    random_pair,
    tiny_value_model,
    value_model_of,
)
from tests.helpers.padded_step import pad
from tests.helpers.watch import Operators
from tests.helpers.wrong_tensors import assert_refuses

ATOL = 2e-5  # on value logits of O(1), fp32 against fp32


@pytest.fixture(scope="module")
def models():
    """A ``transformers`` backbone, its head, and the value model of both."""
    backbone, head = random_model(Qwen2ForCausalLM, Qwen2Config(**TINY)), random_head()
    return SimpleNamespace(backbone=backbone, head=head, value=ValueModel.from_causal_lm(backbone, head))


def values_from_scratch(models, sequences):
    """The value logit at the last token of each sequence."""
    return last_value_logits(models.backbone, models.head, sequences)


def lengths_from_scratch(models, sequences, gamma):
    """How many tokens follow each sequence, by those values."""
    return torch.nn.functional.softplus(values_from_scratch(models, sequences)) / -math.log(gamma)


def check_output(models, output, sequences, guidance, prompt_lens):
    """Every value and every guided probability of a step, against values computed from scratch."""
    ids, status = output.candidates.token_ids.tolist(), output.candidates.status.tolist()
    wanted = [(i, j) for i, s in enumerate(status) if s == Status.GUIDE for j, t in enumerate(ids[i]) if t >= 0]
    expected = torch.zeros_like(output.value_logits)
    if wanted:
        values = values_from_scratch(models, [sequences[i] + [ids[i][j]] for i, j in wanted])
        expected[tuple(zip(*wanted, strict=True))] = values
    torch.testing.assert_close(output.value_logits, expected, rtol=0, atol=ATOL)
    params = [None if g is None else parse_guidance(g) for g in guidance]
    generated = [len(tokens) - n for tokens, n in zip(sequences, prompt_lens, strict=True)]
    probs = reweight_scatter(
        output.candidates,
        expected,
        GuidanceTable.from_params(params, [{EOS}] * len(params), "cpu"),
        generated=torch.tensor(generated, dtype=torch.int32),
    )
    torch.testing.assert_close(output.probs, probs, rtol=0, atol=1e-3)
    for i, token in enumerate(output.tokens.tolist()):
        assert (token >= 0) == (status[i] in (Status.GUIDE, Status.SINGLE))
        assert token < 0 or output.probs[i, ids[i].index(token)] > 0
    return len(wanted)


@pytest.mark.parametrize("commit_winners", [True, False])
def test_500_steps_of_requests_that_come_and_go(models, commit_winners):
    """Arrivals, departures, aborts, retractions under a pool that is too small, slots and rows used again."""
    generator = torch.Generator().manual_seed(int(commit_winners))
    randint = lambda low, high: torch.randint(low, high, (), generator=generator).item()  # noqa: E731
    step, slots = make_step(
        models.value, rows=6, max_len=60, page_size=4, num_pages=30, chunk_tokens=7, commit_winners=commit_winners
    )
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
        scored += check_output(
            models, output, sequences, [r["guidance"] for r in requests], [r["prompt_len"] for r in requests]
        )
        for request, token in zip(requests, output.tokens.tolist(), strict=True):
            # Now and then what follows is not what was drawn: a stop string, a grammar, another sampler.
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
        if admitted:  # a prefill batch is a step of its own; the running requests sit it out
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
    assert step.table.faults.sum() == 0


def deltas_of_steps(value_model, monkeypatch):
    """A list that every forward adds its number of delta tokens to."""
    deltas, forward = [], value_model.forward

    def recording(batch, *args, **kwargs):
        deltas.append(int(batch.layout.q_offsets[-1] - batch.candidate_lens.sum()))
        return forward(batch, *args, **kwargs)

    monkeypatch.setattr(value_model, "forward", recording)
    return deltas


def test_winners_are_not_computed_again(models, monkeypatch):
    """With winners committed no decode step has a delta, except of rows that drew without values; and the values are
    those of recomputation."""
    guidance = [GUIDANCE[0]] * 4
    both = []
    for commit_winners in (True, False):
        engine = Engine(*make_step(models.value, max_delta=1, commit_winners=commit_winners))
        with monkeypatch.context() as patch:
            deltas = deltas_of_steps(models.value, patch)
            sequences, outputs = run_requests(engine, PROMPTS, guidance, 6)
        decodes = deltas[-5:]
        single = [int((output.candidates.status == Status.SINGLE).sum()) for output in outputs[:-1]]
        assert decodes == (single if commit_winners else [4] * 5)
        both.append((sequences, torch.stack([output.value_logits for output in outputs])))
    assert both[0][0] == both[1][0]
    torch.testing.assert_close(both[0][1], both[1][1], rtol=0, atol=ATOL)
    assert sum(single) < 8


def test_a_row_used_again_forgets_its_last_request(models):
    """The new request's token is a candidate of the old one at the same position: it must be computed all the same."""
    engine = Engine(*make_step(models.value))
    scores = random_scores(1)
    engine.start([0], [[5, 6, 7]], [GUIDANCE[0]])
    token = engine.decode([0], [[5, 6, 7]], scores).candidates.token_ids[0, 0].item()
    engine.step.remove_request(0)
    engine.slots.free(0)
    tokens = [30, 31, 32, token]
    engine.start([0], [tokens], [GUIDANCE[0]])
    assert check_output(models, engine.decode([0], [tokens], scores), [tokens], [GUIDANCE[0]], [4])


def test_a_row_used_again_forgets_what_was_predicted(models):
    """Before the first step of all; the new request's last token is that of the old one, at the same position."""
    engine = Engine(*make_step(models.value)).start([0], [[5, 6, 7]], [GUIDANCE[0]])
    engine.step.predict(StepBatch(engine.tensor([7]), engine.tensor([0]), engine.tensor([3])))
    engine.step.remove_request(0)
    engine.slots.free(0)
    tokens = [30, 31, 7]
    engine.start([0], [tokens], [GUIDANCE[0]])
    assert check_output(models, engine.decode([0], [tokens], random_scores(1)), [tokens], [GUIDANCE[0]], [3])


def test_rows_without_guidance_ride_along_untouched(models, monkeypatch):
    deltas = deltas_of_steps(models.value, monkeypatch)
    guidance = [None, GUIDANCE[0], {"value_mode": "mul", "value_scale": 1.0}, None]
    engine = Engine(*make_step(models.value)).start(range(4), PROMPTS, guidance)
    assert deltas == [len(PROMPTS[1]) - 1]
    scores = random_scores(4)
    probs = torch.softmax(scores, dim=1)
    before = probs.clone()
    output = engine.decode(range(4), PROMPTS, scores, probs=probs)
    assert deltas[1:] == [1]
    assert torch.equal(probs[[0, 2, 3]], before[[0, 2, 3]])
    assert not torch.equal(probs[1], before[1]) and (probs[1] > 0).sum() <= 6
    assert output.tokens[[0, 2, 3]].tolist() == [-1, -1, -1] and output.tokens[1] >= 0
    torch.testing.assert_close(probs[1, output.candidates.token_ids[1].long().clamp(min=0)], output.probs[1])


def test_probabilities_may_be_guided_in_place(models):
    engine = Engine(*make_step(models.value)).start([0], PROMPTS[:1], [GUIDANCE[0]])
    scores = torch.softmax(random_scores(1), dim=1)
    output = engine.decode([0], PROMPTS[:1], scores, probs=scores, is_logits=False, temperature=None)
    expected = torch.zeros(VOCAB).index_add(0, output.candidates.token_ids[0].clamp(min=0).long(), output.probs[0])
    torch.testing.assert_close(scores[0], expected)


@pytest.mark.parametrize("commit_winners", [True, False])
def test_steps_with_a_cache_in_fp8(models, monkeypatch, commit_winners):
    """Beside steps whose cache is rounded by hand after whatever writes it: the same values and the same tokens.

    Candidates and the tokens of a forward itself are not rounded before later forwards read them."""
    coded, plain = (
        Engine(*make_step(models.value, rows=4, commit_winners=commit_winners, cache=cache)) for cache in ("fp8", None)
    )
    sequences, outputs = run_requests(coded, PROMPTS, GUIDANCE[:4], 9)
    scales = coded.step.cache.key_scales, coded.step.cache.value_scales
    cache = plain.step.cache
    differences = []

    def rounding(function):
        def rounded(*args, **keywords):
            result = function(*args, **keywords)
            for numbers, of_heads in zip((cache.keys, cache.values), scales, strict=True):
                before = numbers.clone()
                numbers.copy_(of_codes(to_codes(numbers, of_heads[:, None]), of_heads[:, None]))
                differences.append((numbers - before).abs().max().item())
            return result

        return rounded

    monkeypatch.setattr(models.value, "forward", rounding(models.value.forward))
    monkeypatch.setattr(winners, "commit_winner", rounding(winners.commit_winner))
    expected_sequences, expected = run_requests(plain, PROMPTS, GUIDANCE[:4], 9)
    assert sequences == expected_sequences and max(differences) > 0.01
    for actual, wanted in zip(outputs, expected, strict=True):
        torch.testing.assert_close(actual.value_logits, wanted.value_logits, rtol=0, atol=ATOL)
        torch.testing.assert_close(actual.probs, wanted.probs, rtol=0, atol=1e-3)
    assert coded.step.cache.keys.dtype == torch.float8_e4m3fn
    codes = of_codes(coded.step.cache.keys, scales[0][:, None])
    # All but what differed in the last bit of fp32, and went to the other of two codes.
    assert (codes != cache.keys).double().mean() < 1e-3 < (codes != 0).double().mean()


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_a_row_has_the_same_bits_in_any_batch_with_a_cache_in_fp8(device, architecture):
    value_model = tiny_value_model(device, torch.bfloat16) if architecture == "qwen3" else None
    if value_model is None:
        model, head = random_pair(architecture)
        value_model = value_model_of(model, head, device=device, dtype=torch.float16)
    options = dict(rows=4, cache="fp8", backend="triton")

    def run(rows):
        engine = Engine(*make_step(value_model, **options))
        sequences = [PROMPTS[row] for row in rows]
        return run_requests(engine, sequences, [GUIDANCE[row] for row in rows], 3, seeds=[100 + row for row in rows])

    together, outputs = run([0, 1, 2, 3])
    for rows in ([2, 0, 3, 1], [1]):
        sequences, of_rows = run(rows)
        assert sequences == [together[row] for row in rows]
        for one, other in zip(of_rows, outputs, strict=True):
            assert torch.equal(one.value_logits, other.value_logits[rows])


def test_rows_left_out_of_a_step(models, monkeypatch):
    engine = Engine(*make_step(models.value)).start([0, 1], PROMPTS[:2], [GUIDANCE[0]] * 2)
    deltas = deltas_of_steps(models.value, monkeypatch)
    scores = random_scores(2)
    output = engine.decode([0, 1], PROMPTS[:2], scores, active=torch.tensor([True, False]))
    assert deltas == [1] and output.candidates.status.tolist() == [Status.GUIDE, Status.UNGUIDED]


def test_score_all_also_scores_rows_that_need_no_values(models):
    skipped = GUIDANCE[0] | {"entropy_threshold": 100.0}
    engine = Engine(*make_step(models.value, score_all=True)).start([0], PROMPTS[:1], [skipped])
    output = engine.decode([0], PROMPTS[:1], random_scores(1))
    assert output.candidates.status.tolist() == [Status.SKIP]
    count = int(output.candidates.counts)
    ids = output.candidates.token_ids[0, :count].tolist()
    expected = values_from_scratch(models, [[*PROMPTS[0], token] for token in ids])
    torch.testing.assert_close(output.value_logits[0, :count], expected, rtol=0, atol=ATOL)


@pytest.mark.parametrize("commit_winners", [True, False])
def test_remaining_lengths(models, monkeypatch, commit_winners):
    """What tokens are predicted to lead to: drawn from candidates, the only one, or drawn by the row's filters."""
    wants = {"return_values": True, "gamma": 0.9}
    guidance = [
        wants | GUIDANCE[0],
        wants,  # not guided
        wants | GUIDANCE[0] | {"entropy_threshold": 100.0},  # always skipped
        GUIDANCE[0],
    ]
    engine = Engine(*make_step(models.value, max_delta=1, commit_winners=commit_winners))
    engine.start(range(4), PROMPTS, guidance, room=8)
    sequences, seen, recomputed = [list(tokens) for tokens in PROMPTS], set(), []
    deltas = deltas_of_steps(models.value, monkeypatch)

    def expected(tokens):
        return lengths_from_scratch(models, tokens, 0.9).masked_fill(torch.tensor([t[-1] == EOS for t in tokens]), 0.0)

    last, lengths = (engine.tensor(x) for x in zip(*[(tokens[-1], len(tokens)) for tokens in PROMPTS], strict=True))
    predicted = engine.step.predict(StepBatch(last, engine.tensor([0, 1, 2, 3]), lengths))
    assert torch.isnan(predicted).tolist() == [False] * 3 + [True]
    torch.testing.assert_close(predicted[:3], expected(PROMPTS[:3]), rtol=0, atol=1e-3)
    generator = torch.Generator().manual_seed(1)
    for i in range(8):
        scores = torch.randn(4, VOCAB, generator=generator) * 3
        drawn = torch.randint(3, VOCAB, (4,), generator=generator)
        drawn[1] = EOS if i == 6 else drawn[1]
        output = engine.decode(range(4), sequences, scores, drawn=drawn, top_k=1 if i == 2 else 6)
        status = output.candidates.status.tolist()
        seen |= set(status)
        recomputed.append(int(status[3] != Status.GUIDE))
        for row, token in enumerate(output.tokens.tolist()):
            own = status[row] in (Status.UNGUIDED, Status.SKIP)
            assert token == drawn[row] if own else token in output.candidates.token_ids[row]
            assert status[row] == Status.GUIDE or (output.value_logits[row] == 0).all()
            sequences[row].append(token)
        assert torch.isnan(output.remaining_lengths[3])
        torch.testing.assert_close(output.remaining_lengths[:3], expected(sequences[:3]), rtol=0, atol=1e-3)
    assert seen == {Status.UNGUIDED, Status.GUIDE, Status.SINGLE, Status.SKIP} and sequences[1][-2] == EOS
    # Tokens that were scored are not computed again: all but those of the last row that were drawn without values.
    assert deltas == [0, *([0, *recomputed[:-1]] if commit_winners else [4] * 8)] and sum(recomputed) == 1
    greedy = engine.decode(range(4), sequences, scores, drawn=drawn, sample=False)
    assert greedy.tokens.tolist() == drawn.tolist()
    ends = [[*tokens, token] for tokens, token in zip(sequences, drawn.tolist(), strict=True)]
    assert not torch.isnan(greedy.remaining_lengths[1:3]).any()
    torch.testing.assert_close(greedy.remaining_lengths[1:3], expected(ends)[1:3], rtol=0, atol=1e-3)
    for row in range(3):
        engine.step.remove_request(row)
    assert engine.decode([3], sequences[3:], scores[3:], drawn=drawn[3:]).remaining_lengths is None


# --- everything is of the request's own row ---

# Six requests that differ in everything: row of the slot table, tokens, those that count as prompt, guidance,
# end-of-sequence ids, seed. The rows are not in order, and 4 and 7 are nobody's.
REQUESTS = [
    (5, [5, 6, 7, 8], 3, {"mode": "centered_exp", "scale": -4, "gamma": 0.9, "return_values": True}, {1}, -7),
    (0, [9, 3, 10, 11, 12, 13], 1, {"target_length": 9, "op": "eq_soft", "gamma": 0.85}, {2, 4}, 2**40),
    (3, [30, 31], 2, {"scale": 0.7, "entropy_threshold": 100.0, "return_values": True, "gamma": 0.99}, {3}, 5),
    (6, [14, 15, 16], 1, {"mode": "linear", "scale": 1.6, "entropy_threshold": 0.0}, set(), 6),
    (1, [17] * 9, 4, {"return_values": True, "gamma": 0.8}, {0, 5}, 7),
    (2, [18, 19, 20, 21, 22], 5, {"mode": "length_mul", "scale": 0.6, "gamma": 0.95, "value_min": 0.2}, {0}, 8),
]


@pytest.mark.parametrize("commit_winners", [True, False])
def test_every_row_gets_what_its_own_request_asked_for(models, commit_winners):
    """Candidates, values, probabilities, draws and lengths of rows out of order, each from its own parameters."""
    rows, prompts, prompt_lens, guidance, eos, seeds = map(list, zip(*REQUESTS, strict=True))
    params, b, steps = [parse_guidance(g) for g in guidance], len(rows), 5
    engine = Engine(*make_step(models.value, max_requests=b, commit_winners=commit_winners))
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
        scores[:, :6] += 5  # what ends some of the requests is among the candidates of all
        drawn = torch.randint(6, VOCAB, (b,), generator=generator)
        lengths = torch.tensor([len(tokens) for tokens in sequences], dtype=torch.int32)
        probs = torch.softmax(scores, dim=1)
        before = probs.clone()
        output = take_step(
            engine.step,
            scores,
            torch.tensor([tokens[-1] for tokens in sequences]),
            torch.tensor(rows),
            lengths,
            **filters,
            is_logits=True,
            probs=probs,
            sample=True,
            drawn=drawn,
        )
        candidates = topk_candidates(
            scores, **filters, is_logits=True, guided=table.guided, entropy_threshold=table.entropy_threshold
        )
        for name, found, expected in zip(candidates._fields, output.candidates, candidates, strict=True):
            assert torch.equal(found, expected), name
        values = torch.zeros(b, 8)
        scored = torch.where(candidates.status == Status.GUIDE, candidates.counts, 0).tolist()
        wanted = [(i, j) for i, n in enumerate(scored) for j in range(n)]
        ids = candidates.token_ids.tolist()
        scratch = values_from_scratch(models, [[*sequences[i], ids[i][j]] for i, j in wanted])
        values[tuple(zip(*wanted, strict=True))] = scratch
        torch.testing.assert_close(output.value_logits, values, rtol=0, atol=ATOL)
        generated = lengths - torch.tensor(prompt_lens, dtype=torch.int32)
        expected_probs = reweight_scatter(candidates, values, table, generated=generated, probs=before)
        torch.testing.assert_close(output.probs, expected_probs, rtol=0, atol=1e-3)
        torch.testing.assert_close(probs, before, rtol=0, atol=1e-3)
        own = sample_candidates(candidates, output.probs, torch.tensor(seeds), lengths)
        assert output.tokens.tolist() == torch.where(own >= 0, own, drawn.int()).tolist()
        for tokens, token in zip(sequences, output.tokens.tolist(), strict=True):
            tokens.append(token)
        remaining = torch.nn.functional.softplus(values_from_scratch(models, sequences)) / table.nats_per_token
        ended = torch.tensor([tokens[-1] in ids for tokens, ids in zip(sequences, eos, strict=True)])
        remaining = remaining.masked_fill(ended, 0.0).masked_fill(~table.return_values, math.nan)
        torch.testing.assert_close(output.remaining_lengths, remaining, rtol=1e-4, atol=1e-3, equal_nan=True)
        seen |= set(zip(rows, candidates.status.tolist(), strict=True))
    assert seen == {(3, Status.SKIP), (1, Status.UNGUIDED)} | {(row, Status.GUIDE) for row in (5, 0, 6, 2)}


@pytest.mark.parametrize("commit_winners", [True, False])
def test_token_0_is_a_token(models, monkeypatch, commit_winners):
    """Drawn from the candidates, drawn by a row's own filters, the only candidate: it is kept, moved and valued."""
    wants = {"return_values": True, "gamma": 0.9}
    guidance = [wants, wants | {"target_length": 1, "op": "le"}, wants | {"target_length": 1000, "op": "ge"}, wants]
    rows, drawn = [6, 1, 4, 3], torch.tensor([0, 7, 7, 0])
    engine = Engine(*make_step(models.value, max_delta=1, commit_winners=commit_winners))
    for row, tokens, g in zip(rows, PROMPTS, guidance, strict=True):
        engine.admit(row, [*tokens, 0], g, prompt_len=len(tokens), eos={0} if row == 1 else {EOS})
    engine.prefill(rows, PROMPTS)
    deltas = deltas_of_steps(models.value, monkeypatch)
    scores = torch.full((4, VOCAB), -20.0)
    scores[:2, [8, 0]] = torch.tensor([3.0, 2.0])  # row 1 takes the end of its sequence
    scores[2, 0] = 3.0
    output = engine.decode(rows, PROMPTS, scores, drawn=drawn)
    assert output.candidates.status.tolist() == [Status.UNGUIDED, Status.GUIDE, Status.SINGLE, Status.UNGUIDED]
    assert output.tokens.tolist() == [0, 0, 0, 0]
    sequences = [[*tokens, 0] for tokens in PROMPTS]
    expected = lengths_from_scratch(models, sequences, 0.9)
    expected[1] = 0.0
    torch.testing.assert_close(output.remaining_lengths, expected, rtol=0, atol=1e-3)
    again = engine.decode(rows, sequences, random_scores(4))
    assert deltas == [4, 0 if commit_winners else 4]
    check_output(models, again, sequences, [None, guidance[1], guidance[2], None], [len(t) for t in PROMPTS])


def test_rows_without_a_next_token_have_no_length(models, monkeypatch):
    """No length of padding: a row that is drawn by its own filters, of which nobody said what they drew. And no row."""
    wants = {"return_values": True}
    guidance = [GUIDANCE[0] | {"entropy_threshold": 100.0}, wants | GUIDANCE[0] | {"entropy_threshold": 100.0}]
    guidance += [wants, wants | GUIDANCE[0]]
    rows = [3, 7, 0, 5]
    engine = Engine(*make_step(models.value)).start(rows, PROMPTS, guidance)
    scored, forward = [], models.value.forward

    def recording(batch, *args, **kwargs):
        scored.append(batch.candidate_lens.tolist())
        return forward(batch, *args, **kwargs)

    monkeypatch.setattr(models.value, "forward", recording)
    scores = random_scores(4)
    output = engine.decode(rows, PROMPTS, scores)
    assert (output.tokens >= 0).tolist() == [False, False, False, True]
    assert output.remaining_lengths.isnan().tolist() == [True, True, True, False]
    assert engine.decode(rows, PROMPTS, scores, sample=False).tokens is None
    drawn, active = torch.tensor([20, 21, 22, 23]), torch.tensor([True, True, True, False])
    left_out = engine.decode(rows, PROMPTS, scores, active=active, drawn=drawn)
    assert left_out.remaining_lengths.isnan().tolist() == [True, False, False, True]
    guided = [0, 0, 0, int(output.candidates.counts[3])]
    assert scored == [guided, guided, [0, 1, 1, 0]]


def test_without_a_draw_the_length_is_that_of_the_token_given(models):
    """Of a single candidate too, when the filters of the row drew another token."""
    wants = {"return_values": True, "gamma": 0.9}
    engine = Engine(*make_step(models.value)).start([4], PROMPTS[:1], [wants | GUIDANCE[0]])
    scores = random_scores(1)
    token = (int(scores.argmax()) + 1) % VOCAB
    output = engine.decode([4], PROMPTS[:1], scores, top_k=1, sample=False, drawn=torch.tensor([token]))
    assert output.candidates.status.tolist() == [Status.SINGLE] and output.tokens.tolist() == [token]
    expected = lengths_from_scratch(models, [[*PROMPTS[0], token]], 0.9)
    torch.testing.assert_close(output.remaining_lengths, expected, rtol=0, atol=1e-3)


def test_score_all_scores_single_candidates_and_nobody_else_s(models):
    engine = Engine(*make_step(models.value, score_all=True)).start([6, 1], [PROMPTS[0]] * 2, [None, GUIDANCE[0]])
    scores = random_scores(2)
    output = engine.decode([6, 1], [PROMPTS[0]] * 2, scores, top_k=1)
    assert output.candidates.status.tolist() == [Status.UNGUIDED, Status.SINGLE]
    expected = torch.zeros(2, 8)
    expected[1, 0] = values_from_scratch(models, [[*PROMPTS[0], int(scores[1].argmax())]])
    torch.testing.assert_close(output.value_logits, expected, rtol=0, atol=ATOL)


def test_with_score_all_the_token_a_row_drew_itself_is_scored_alone(models):
    """Also where it is among the row's candidates, as whose value it does not count."""
    guidance = GUIDANCE[0] | {"entropy_threshold": 100.0, "return_values": True}
    engine = Engine(*make_step(models.value, score_all=True)).start([3], PROMPTS[:1], [guidance])
    scores = random_scores(1)
    second = scores.topk(2).indices[:, 1]
    output = engine.decode([3], PROMPTS[:1], scores, drawn=second)
    assert output.candidates.status.tolist() == [Status.SKIP] and output.candidates.token_ids[0, 1] == second
    expected = lengths_from_scratch(models, [[*PROMPTS[0], second.item()]], 0.997)
    torch.testing.assert_close(output.remaining_lengths, expected, rtol=1e-4, atol=0)
    assert (output.value_logits == 0).all()


def test_predict_writes_to_no_slot(models):
    """A prompt that repeats a token, predicted twice as it grows: the token is a candidate of the first prediction at
    the position it has in the second, and no slot is meant; slot 0 is another request's."""
    engine = Engine(*make_step(models.value, page_size=1))
    engine.admit(5, PROMPTS[2], GUIDANCE[0], prompt_len=9)
    engine.admit(2, [9, 9], {"return_values": True, "gamma": 0.9}, prompt_len=2)
    engine.prefill([5], [PROMPTS[2]])
    assert engine.slots.slots(torch.tensor([5]), torch.tensor([0])).item() == 0
    tokens, row, i32 = torch.tensor([9]), torch.tensor([2]), engine.tensor
    before = engine.step.cache.keys.clone(), engine.step.cache.values.clone()
    first = engine.step.predict(StepBatch(tokens, row, i32([1])))
    assert torch.equal(engine.step.cache.keys, before[0]) and torch.equal(engine.step.cache.values, before[1])
    engine.step.extend(tokens, engine.slots.slots(row, i32([0])), row, i32([0]), i32([1]), i32([0]))
    before = engine.step.cache.keys.clone(), engine.step.cache.values.clone()
    second = engine.step.predict(StepBatch(tokens, row, i32([2])))
    assert torch.equal(engine.step.cache.keys, before[0]) and torch.equal(engine.step.cache.values, before[1])
    expected = lengths_from_scratch(models, [[9], [9, 9]], 0.9)
    torch.testing.assert_close(torch.cat([first, second]), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("place", [0, 1])
def test_a_request_that_sat_a_step_out_is_computed_again(models, place):
    """Its candidates were overwritten by those of another request, at the same position and of the same tokens.

    At place 0 of its batch, which is then the other's, or at place 1, which the smaller batch after it has not."""
    engine = Engine(*make_step(models.value))
    sequences, unguided = [[5, 6, 7], [8, 9, 10]], [11, 12, 13]
    for row, tokens, g in zip((4, 1, 6), (*sequences, unguided), (GUIDANCE[0], GUIDANCE[0], None), strict=True):
        engine.admit(row, [*tokens, 0], g, prompt_len=3)
    engine.prefill([4, 1], sequences)
    scores = random_scores(1)
    rows, tokens = ([6, 4], [unguided, sequences[0]]) if place else ([4], sequences[:1])
    token = engine.decode(rows, tokens, scores.expand(len(rows), -1).contiguous()).tokens[place].item()
    other = engine.decode([1], sequences[1:], scores)
    assert token in other.candidates.token_ids
    tokens = [[*sequences[0], token]]
    assert check_output(models, engine.decode([4], tokens, scores), tokens, [GUIDANCE[0]], [3])


def test_a_candidate_at_another_position_is_computed_again(models):
    """A token was put in between, by a grammar say: what was drawn follows one position later than it was scored."""
    engine = Engine(*make_step(models.value)).start([4, 1], [[5, 6, 7]] * 2, [GUIDANCE[0]] * 2, room=2)
    scores = random_scores(2)
    token = engine.decode([4, 1], [[5, 6, 7]] * 2, scores).tokens[1].item()
    row, i32 = torch.tensor([1]), engine.tensor
    engine.step.extend(i32([40]), engine.slots.slots(row, i32([3])), row, i32([0]), i32([1]), i32([3]))
    tokens = [[5, 6, 7, 40, token]]
    assert check_output(models, engine.decode([1], tokens, scores[:1]), tokens, [GUIDANCE[0]], [3])


def test_a_prompt_may_come_in_parts(models):
    """Of several requests, in rows out of order, in calls and chunks that do not end together."""
    rows, prompts = [6, 1, 4], [list(range(3, 53)), [60, 61], list(range(60, 90))]
    caches = []
    for chunk_tokens, parts in ((1000, [0, 100]), (7, [0, 100]), (8, [0, 1, 20, 23, 100])):
        engine = Engine(*make_step(models.value, chunk_tokens=chunk_tokens))
        for row, tokens in zip(rows, prompts, strict=True):
            engine.admit(row, tokens, GUIDANCE[0], prompt_len=len(tokens))
        for first, end in pairwise(parts):
            pieces = [tokens[first:end] for tokens in prompts]
            lens, cached = [len(piece) for piece in pieces], [min(first, len(tokens)) for tokens in prompts]
            position = [c + i for c, n in zip(cached, lens, strict=True) for i in range(n)]
            engine.step.extend(
                engine.tensor([token for piece in pieces for token in piece]),
                engine.slots.slots(engine.tensor(rows).repeat_interleave(engine.tensor(lens)), engine.tensor(position)),
                engine.tensor(rows),
                engine.tensor([sum(lens[:i]) for i in range(3)]),
                engine.tensor(lens),
                engine.tensor(cached),
            )
        caches.append(torch.stack((engine.step.cache.keys, engine.step.cache.values)))
    for cache in caches[1:]:
        torch.testing.assert_close(cache, caches[0], rtol=0, atol=ATOL)
    assert (caches[0] != 0).any(dim=(0, 1, 3, 4)).sum() == 50 + 2 + 30


def test_candidates_of_other_numbers_and_tables(models):
    """Two candidates a row, as many rows as there may be, end-of-sequence ids and scaled tokens up to their limits."""
    step, slots = make_step(models.value, rows=3, max_candidates=2, max_eos=2, max_scaled_tokens=1)
    engine, rows, guidance = Engine(step, slots), [2, 0, 1], [GUIDANCE[0] | {"token_temperature_scale": {8: 2.0}}] * 3
    assert (step.max_requests, step.config.score_all) == (3, False)
    for row, tokens, g in zip(rows, PROMPTS, guidance, strict=False):
        engine.admit(row, tokens, g, prompt_len=len(tokens), eos={1, EOS})
    engine.prefill(rows, PROMPTS[:3])
    scores = random_scores(3)
    output = engine.decode(rows, PROMPTS[:3], scores)
    assert output.probs.shape == (3, 2)
    assert check_output(models, output, PROMPTS[:3], guidance, [len(tokens) for tokens in PROMPTS[:3]]) == 6
    with pytest.raises(ValueError, match="eos_token_ids must be at most 2 ids, got 3"):
        step.add_request(0, None, {1, 2, 3})
    with pytest.raises(ValueError, match="token_temperature_scale must be of at most 1 tokens, got 2"):
        step.add_request(0, parse_guidance({"token_temperature_scale": {1: 2.0, 2: 2.0}}), {1})


def test_flush_leaves_nothing_to_write(models):
    """A caller's own graph reads what came and left before it is replayed: no write is left for the next call."""
    step, _ = make_step(models.value)
    step.add_request(3, parse_guidance({"target_length": 5, "op": "ge"}), {EOS})
    step.add_request(1, None, {EOS}, seed=4)
    step.flush()
    with Operators() as seen:
        step.flush()
        assert step.table.mode.tolist() == [0, 0, 0, Mode.GE, 0, 0, 0, 0, 0] and step.table.seed[1] == 4
    assert seen.writes == []
    step.remove_request(3)
    with Operators() as seen:
        step.flush()
    assert sorted(seen.writes) == ["aten::index_copy_", *["aten::index_fill_"] * 3]
    assert not step.table.guided.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_token_temperatures_leave_with_their_request(models, dtype):
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


def test_steps_from_graphs_of_more_rows(models, monkeypatch):
    """The rows that fill a graph's batch up write nothing, whatever an earlier batch left where the graph looks.

    A graph is a function here, that scores what is in the inputs at the time."""

    results, deltas = [], deltas_of_steps(models.value, monkeypatch)
    for graphs in (False, True):
        engine = Engine(*make_step(models.value, rows=7))
        step = engine.step
        if graphs:
            pad(step)
            for buffer in (*step._tensors.requests, *step._tensors.scored):
                buffer.fill_(10**6)
        rows, prompts = [6, 2, 5, 0], [[*tokens, 40 + i] for i, tokens in enumerate(PROMPTS)]
        sequences, outputs = run_requests(engine, prompts, [GUIDANCE[0]] * 4, 4, rows=rows)
        scores = random_scores(4)
        for batch in ([1, 2, 3], [2, 1, 3], [0]):  # indices of rows
            now = [sequences[i] for i in batch]
            for i, tokens in zip(batch, now, strict=True):
                engine.slots.extend(rows[i], len(tokens) + 1)
            outputs.append(engine.decode([rows[i] for i in batch], now, scores[batch]))
            for tokens, token in zip(now, outputs[-1].tokens.tolist(), strict=True):
                tokens.append(token)
        values = torch.cat([output.value_logits for output in outputs])
        results.append((sequences, list(deltas), values, torch.stack((step.cache.keys, step.cache.values))))
        deltas.clear()
    assert sorted(step.values._graphs._captured) == [(1, 1), (4, 1)]
    assert [bucket_of(b, 7) for b in (2, 3, 5, 7)] == [2, 4, 7, 7]
    assert results[0][:2] == results[1][:2]
    for without, with_graphs in zip(results[0][2:], results[1][2:], strict=True):
        torch.testing.assert_close(with_graphs, without, rtol=0, atol=ATOL)


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
    # Two drafts a request, and eight candidates at each of its three nodes; a tile of queries takes 32 tokens.
    drafted = 3 * (1 + 2 + 24) * token + 9 * row + counters + 32 * (1 + 81 // 32 + 3)
    assert working_bytes(models.value, max_len=512, max_drafts=2, **ours, **sizes) == drafted
    # 16 tokens a request beside its candidates.
    step += 45 * token
    assert working_bytes(models.value, max_len=512, max_candidates=8, **sizes) == step + 32 * (1 + 72 // 32 + 3)
    row = VOCAB // 16 + 64
    extend = 50 * token + 3 * row + counters + 32 * (1 + 50 // 32 + 3)
    assert working_bytes(models.value, max_len=512, tokens=50, **sizes) == extend


# --- long prompts and memory ---


class PeakMemory(TorchDispatchMode):
    """The most bytes that the tensors made under it hold at a time."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.alive = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(result):
            if not isinstance(x, torch.Tensor):
                continue
            storage = x.untyped_storage()
            address, size = storage.data_ptr(), storage.nbytes()
            if size and address not in given | self.alive:
                self.alive.add(address)
                self.now += size
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.freed, address, size)
        return result

    def freed(self, address, size):
        self.alive.discard(address)
        self.now -= size


@pytest.mark.parametrize(("rows", "max_len"), [(1, 400), (5, 400), (2, 1200)])
def test_memory_of_a_step_is_as_stated(device, rows, max_len):
    """What a step and a prompt of several chunks take, against the formula; twice as much would be a poor bound."""
    engine = Engine(
        *make_step(tiny_value_model(device), max_len=max_len, chunk_tokens=64, backend="triton", graphs=False)
    )
    peaks = {}

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
    engine.start(range(rows), prompts, [GUIDANCE[0]] * rows)
    engine.decode(range(rows), prompts, torch.randn(rows, VOCAB, device=device))
    sizes = dict(requests=rows, max_len=max_len, vocab_size=VOCAB)
    stated = {
        "extend": working_bytes(engine.step.value_model, **sizes, tokens=64),
        "step": working_bytes(engine.step.value_model, **sizes, max_candidates=8),
    }
    for name, peak in peaks.items():
        assert 0.5 * stated[name] < peak <= stated[name], (name, peak, stated[name])


# --- nothing is read back to the host ---

# What reads a value back, or sizes a tensor by values: operators, and methods that call no operator on a CPU.
READ_BACK = (
    "local_scalar_dense",
    "nonzero",
    "masked_select",
    "unique",
    "equal",
    "is_nonzero",
    "repeat_interleave",
    "bincount",
)
READ_BACK_METHODS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)


class NoOperatorReadsBack(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.split(".")[0].lstrip("_")
        masks = name.startswith("index") and any(
            isinstance(x, torch.Tensor) and x.dtype in (torch.bool, torch.uint8) for x in tree_leaves(args[1:])
        )
        if masks or any(name.startswith(forbidden) for forbidden in READ_BACK):
            raise AssertionError(f"{function} reads back from the device")
        return function(*args, **(kwargs or {}))


class NoMethodReadsBack(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in READ_BACK_METHODS:
            raise AssertionError(f"{function} reads back from the device")
        return function(*args, **(kwargs or {}))


@contextmanager
def no_read_back():
    """Fails what reads a value back to the host or sizes a tensor by values."""
    with NoOperatorReadsBack(), NoMethodReadsBack():
        yield


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
    """The test below is worth something only if it sees every way to read back."""
    with pytest.raises(AssertionError, match="reads back"), no_read_back():
        reads_back()


@pytest.mark.parametrize("is_logits", [True, False])
@pytest.mark.parametrize("commit_winners", [True, False])
def test_sync_free_step(device, is_logits, commit_winners):
    """Prompts, and steps of guided and unguided rows with everything a step can do, through the Triton kernels."""
    step, slots = make_step(tiny_value_model(device), commit_winners=commit_winners, chunk_tokens=8, backend="triton")
    engine = Engine(step, slots)
    for row, tokens in enumerate(PROMPTS):
        engine.admit(
            row,
            [*tokens, 0],
            GUIDANCE[row + 1] and {"token_temperature_scale": {5: 2.0}, "return_values": row == 1} | GUIDANCE[row + 1],
            prompt_len=len(tokens),
        )
    rows, lengths = engine.tensor([0, 1, 2, 3]), engine.tensor([len(tokens) for tokens in PROMPTS])
    last = engine.tensor([tokens[-1] for tokens in PROMPTS])
    lens, flat = lengths - 1, engine.tensor([token for tokens in PROMPTS for token in tokens])
    starts = engine.tensor([sum(map(len, PROMPTS[:i])) for i in range(4)])
    position = engine.tensor([p for tokens in PROMPTS for p in range(len(tokens))])
    row_of = engine.tensor([row for row, tokens in enumerate(PROMPTS) for _ in tokens])
    scores = random_scores(4).to(device)
    scores = scores if is_logits else torch.softmax(scores, dim=1)
    probs, filters = torch.softmax(scores, dim=1), dict(top_k=lens * 0 + 5, top_p=lens * 0 + 1.0, min_p=lens * 0.0)
    options = dict(is_logits=is_logits, sample=True, probs=probs, active=lens >= 0)
    options |= dict(temperature=lens * 0 + 0.9) if is_logits else {}
    options |= dict(drawn=lens * 0 + 7)
    options |= dict(vocab_mask=torch.full((4, -(-VOCAB // 32)), -1, dtype=torch.int32, device=device))

    def serve():
        step.scale_tokens(scores, rows)
        step.extend(flat, slots.slots(row_of, position), rows, starts, lens, lens * 0)
        at = lengths
        tokens = last
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


def test_the_backend_reaches_every_operator(device, monkeypatch):
    """With ``triton`` no reference runs, in prompts, predictions and steps."""

    def fail(*args, **kwargs):
        raise AssertionError("a reference ran")

    operators = "gather_requests topk_candidates select_scored commit_winner catch_up ragged_layout embed_tokens"
    operators += " ragged_linear rope_cache value_head reweight_scatter sample_candidates"
    for name in operators.split():
        monkeypatch.setattr(f"lenvm_kernels.ops.{name}._reference", fail)
    monkeypatch.setattr("lenvm_kernels.reference.value_tree_attention.value_tree_attention", fail)
    engine = Engine(*make_step(tiny_value_model(device), rows=2, max_len=8, backend="triton"))
    engine.start([1], [[5, 6, 7]], [GUIDANCE[0] | {"return_values": True}])
    predicted = engine.step.predict(StepBatch(engine.tensor([7]), engine.tensor([1]), engine.tensor([3])))
    scores = random_scores(1).to(device)
    output = engine.decode([1], [[5, 6, 7]], scores, top_k=2)
    assert output.tokens >= 0 and predicted > 0 and output.remaining_lengths > 0


def test_ends_are_candidates_of_requests_that_have_a_target(models):
    """Each request's own, from its own probability on, in rows out of order; a target met by now takes the end."""
    guidance = [
        {"target_length": 9, "min_end_prob": 0.02},
        {"target_length": 9, "op": "eq"},
        {"target_length": 0, "strength": 40},
        {"value_mode": "mul", "value_scale": 0.8},
        {"target_length": 9, "op": "eq_soft", "min_end_prob": 0},
    ]
    rows, ends = [6, 1, 4, 0, 3], [{41, 40}, {41}, {42}, {41}, {43, 44}]
    engine = Engine(*make_step(models.value))
    for row, params, eos in zip(rows, guidance, ends, strict=True):
        engine.admit(row, [9, 10, 11, 0], params, prompt_len=3, eos=eos)
    engine.prefill(rows, [[9, 10, 11]] * 5)
    probs = torch.zeros(VOCAB)
    probs[[20, 21, 40, 41, 42, 43]] = torch.tensor([0.5, 0.4, 0.03, 0.01, 0.002, 1e-6])
    scores = (0.8 * probs.log()).repeat(5, 1)  # at the temperature of Engine.decode
    output = engine.decode(rows, [[9, 10, 11]] * 5, scores, top_k=2)
    candidates = [[token for token in row if token >= 0] for row in output.candidates.token_ids.tolist()]
    assert candidates == [[20, 21, 40], [20, 21], [20, 21, 42], [20, 21], [20, 21, 43]]
    torch.testing.assert_close(output.candidates.probs[2, 2].item(), 0.002 / probs.sum().item())
    assert output.probs[2, 2] > 0.99 and output.tokens[2] == 42


# --- the same in any batch ---


@pytest.mark.bits
def test_batch_invariant_draws(device):
    """A request's values and draws, to the bit, alone and in batches of 2, 7 and 64, wherever it stands in them."""
    value_model = tiny_value_model(device)
    request, prompt, seed = GUIDANCE[0], [5, 6, 7, 8, 9], 1234
    results = []
    for batch, place, steps in ((1, 0, 3), (2, 1, 3), (7, 3, 3), (64, 41, 1)):
        engine = Engine(*make_step(value_model, rows=64, max_len=16, backend="triton"))
        prompts = [[11 + i % 50] * (1 + i % 3) for i in range(batch)]
        guidance, seeds = [GUIDANCE[i % len(GUIDANCE)] for i in range(batch)], list(range(batch))
        prompts[place], guidance[place], seeds[place] = prompt, request, seed
        rows = torch.randperm(64, generator=torch.Generator().manual_seed(batch))[:batch].tolist()
        sequences, outputs = run_requests(engine, prompts, guidance, steps, seeds=seeds, rows=rows, min_p=0.02)
        results.append((sequences[place], torch.stack([output.value_logits[place] for output in outputs]).cpu()))
    alone = results[0]
    for sequence, values in results[1:]:
        assert sequence == alone[0][: len(sequence)]
        assert torch.equal(values, alone[1][: len(values)])
    assert (alone[1] != 0).sum() > 4  # it did have candidates to score


# --- CUDA graphs ---


@needs_gpu
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_graph_gives_what_launches_give(device, batch):
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
    """A caller can capture all of a step in a graph of its own."""
    engine = Engine(*make_step(tiny_value_model(device), graphs=False)).start(range(4), PROMPTS, [GUIDANCE[0]] * 4)
    scores = torch.randn(4, VOCAB, device=device)
    lengths, rows = engine.tensor([len(tokens) for tokens in PROMPTS]), engine.tensor([0, 1, 2, 3])
    batch = StepBatch(engine.tensor([tokens[-1] for tokens in PROMPTS]), rows, lengths)
    sampling = Sampling(lengths * 0 + 5, lengths * 0 + 1.0, lengths * 0.0, is_logits=True, sample=True)

    def step():
        return engine.step.step(scores, batch, sampling)

    expected = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step()
    scores.copy_(scores.flip(0))
    graph.replay()
    flipped = step()
    assert torch.equal(output.tokens, flipped.tokens) and torch.equal(output.value_logits, flipped.value_logits)
    assert not torch.equal(output.value_logits, expected.value_logits)


# --- warm_up and bad arguments ---


def test_warm_up_changes_nothing(models):
    engine = Engine(*make_step(models.value, max_requests=3, chunk_tokens=5))
    engine.admit(0, PROMPTS[0], GUIDANCE[0], prompt_len=4)
    before = engine.step.cache.keys.clone()
    engine.step.warm_up(progress=False)
    engine.step.warm_up(torch.bfloat16, is_logits=False, progress=False)
    assert torch.equal(engine.step.cache.keys, before)
    engine.prefill([0], PROMPTS[:1])
    scores = random_scores(1)
    assert check_output(models, engine.decode([0], PROMPTS[:1], scores), PROMPTS[:1], [GUIDANCE[0]], [4])


def good_step(rows=2):
    """Arguments of :meth:`GuidedStep.step` for two requests."""
    i32 = torch.zeros(rows, dtype=torch.int32)
    return dict(
        scores=torch.zeros(rows, VOCAB),
        tokens=i32,
        table_rows=torch.arange(rows),
        lengths=i32 + 1,
        top_k=i32,
        top_p=i32 + 1.0,
        min_p=i32 + 0.0,
        drawn=i32,
        active=i32 == 0,
    )


GOOD_EXTEND = dict(
    tokens=torch.zeros(3, dtype=torch.int32), slots=torch.arange(3), table_rows=torch.arange(2)
) | dict.fromkeys(("starts", "lens", "cached_lens"), torch.zeros(2, dtype=torch.int32))
FLOATS, INTEGERS = [torch.float32, torch.bfloat16, torch.float16], [torch.int32, torch.int64]
GOOD_PREDICT = dict(tokens=torch.arange(2), table_rows=torch.arange(2), lengths=torch.ones(2, dtype=torch.int32))


@pytest.mark.parametrize(
    ("method", "good", "name", "shape", "dtypes"),
    [
        ("step", good_step(), "scores", r"[*, 97]", FLOATS),
        *(("step", good_step(), name, "[2]", INTEGERS) for name in ("tokens", "table_rows", "drawn")),
        ("step", good_step(), "lengths", "[2]", [torch.int32]),
        ("step", good_step(), "active", "[2]", [torch.bool]),
        ("step", good_step() | {"probs": torch.zeros(2, VOCAB)}, "probs", "[2, *]", [*FLOATS, torch.float64]),
        ("extend", GOOD_EXTEND, "tokens", "[*]", INTEGERS),
        ("extend", GOOD_EXTEND, "slots", "[3]", INTEGERS),
        ("extend", GOOD_EXTEND, "table_rows", "[*]", INTEGERS),
        *(("extend", GOOD_EXTEND, name, "[2]", [torch.int32]) for name in ("starts", "lens", "cached_lens")),
        ("predict", GOOD_PREDICT, "tokens", "[*]", INTEGERS),
        ("predict", GOOD_PREDICT, "table_rows", "[2]", INTEGERS),
        ("predict", GOOD_PREDICT, "lengths", "[2]", [torch.int32]),
    ],
)
def test_every_tensor_is_checked(models, method, good, name, shape, dtypes):
    step = make_step(models.value, commit_winners=False)[0]
    calls = {
        "step": partial(take_step, step),
        "extend": step.extend,
        "predict": lambda **batch: step.predict(StepBatch(**batch)),
    }
    function, shown = calls[method], name if method == "extend" or name not in StepBatch._fields else f"batch.{name}"
    accepted = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    free = ["rows"] * shape.startswith("[*") + ["columns"] * shape.endswith(", *]") + ["apart"]
    assert_refuses(function, good, name, *accepted, *free, shown=shown)
    with pytest.raises(ValueError, match=re.escape(f"{shown} must be {'|'.join(accepted)} {shape} on cpu, got")):
        function(**good | {name: good[name].to("meta")})


def test_tables_and_sizes_are_checked(models):
    slots = EngineSlots(torch.zeros(3, 4, dtype=torch.int32), 12)
    for name, value in (("max_requests", 0), ("chunk_tokens", 0), ("max_delta", -1), ("value_stride", 0)):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got {value}"):
            StepConfig(vocab_size=VOCAB, **{name: value})
    for number in (5, 128):
        with pytest.raises(ValueError, match=f"max_candidates must be a power of two up to 64, got {number}"):
            StepConfig(vocab_size=VOCAB, max_candidates=number)
    for number in (0, 2**31):
        with pytest.raises(ValueError, match=f"vocab_size must be from 1 to {MAX_VOCAB}, got {number}"):
            StepConfig(vocab_size=number)
    config = StepConfig(vocab_size=VOCAB)
    with pytest.raises(ValueError, match="num_slots must be at least 1, got 0"):
        GuidedStep(models.value, slots._replace(num_slots=0), config)
    for bad in (slots.table.long(), slots.table[0], slots.table.to("meta")):
        with pytest.raises(ValueError, match=r"slots.table must be int32 \[\*, \*\] on cpu, got"):
            GuidedStep(models.value, slots._replace(table=bad), config)
    with pytest.raises(TypeError, match="slots must be PagedSlots or EngineSlots, got Tensor"):
        GuidedStep(models.value, slots.table, config)
    with pytest.raises(TypeError, match="config must be a StepConfig, got int"):
        GuidedStep(models.value, slots, VOCAB)
    with pytest.raises(ValueError, match="graphs must be None or False unless the value model is on a GPU"):
        GuidedStep(models.value, slots, replace(config, graphs=True))
    step = GuidedStep(models.value, slots, replace(config, max_candidates=64, max_requests=2))
    for row in (-1, 3):
        with pytest.raises(IndexError, match=rf"table_row must be in \[0, 3\), got {row}"):
            step.add_request(row, None, set())
    with pytest.raises(ValueError, match="eos_token_ids must be at most 8 ids, got 9"):
        step.add_request(0, None, set(range(9)))
    for rows in (0, 3):
        with pytest.raises(ValueError, match=f"scores must be of 1 to max_requests = 2 requests, got {rows}"):
            take_step(step, **good_step(rows))
    prompts = StepBatch(torch.arange(3), torch.arange(3), torch.ones(3, dtype=torch.int32))
    with pytest.raises(ValueError, match="tokens must be of at most max_requests = 2 requests, got 3"):
        step.predict(prompts)
    sampling = Sampling(2, 1.0, 0.0)
    for wrong, arguments in (("batch must be a StepBatch", (3, sampling)), ("sampling must be Sampling", (prompts, 3))):
        with pytest.raises(TypeError, match=f"{wrong}, got int"):
            step.step(torch.zeros(3, VOCAB), *arguments)
    with pytest.raises(TypeError, match="batch must be a StepBatch, got tuple"):
        step.predict(tuple(prompts))
    with pytest.raises(ValueError, match=r"scores must be .* \[\*, 97\] on cpu, got float32 \[1, 96\]"):
        take_step(step, **good_step(1) | {"scores": torch.zeros(1, VOCAB - 1)})


CONSTANT_GUIDANCE = [
    {"target_length": 9, "strength": 3},
    {"target_length": 40, "constraint": "le_near", "gamma": 0.9},
    None,
    {"target_length": 3, "constraint": "ge_near", "target_length_mode": "remaining", "gamma": 0.5},
    {"target_length": 6, "end_token_ids": [7], "answer_length": 5},
    {"target_length": 30, "value_stride": 3},
]


def test_without_a_value_model_only_the_end_is_apart(monkeypatch):
    """Ends are as far from the target as it is away, all else as far as the whole target; nobody tells a prompt."""
    rows, prompt_lens, steps = [5, 0, 6, 2, 7, 1], [4, 1, 9, 2, 30, 3], 8
    step, slots = make_step(None, rows=8, max_len=96)
    engine, generator = Engine(step, slots), torch.Generator().manual_seed(4)
    monkeypatch.setattr(step, "extend", None)
    params = [None if g is None else parse_guidance(g) for g in CONSTANT_GUIDANCE]
    for row, g, n in zip(rows, CONSTANT_GUIDANCE, prompt_lens, strict=True):
        engine.admit(row, [3] * (n + steps), g, prompt_len=n)
    seen, not_due = 0, []
    for generated in range(steps):
        sequences = [[9] * (n + generated) for n in prompt_lens]
        scores = torch.randn(len(rows), VOCAB, generator=generator) * 3
        scores[:, [EOS, 7]] += 6 * (torch.rand(len(rows), 2, generator=generator) - 0.3)
        output = engine.decode(rows, sequences, scores)
        for i, p in enumerate(params):
            if p is None or output.candidates.status[i] != Status.GUIDE:
                continue
            kept = output.candidates.token_ids[i] >= 0
            tokens, q = output.candidates.token_ids[i][kept].tolist(), output.candidates.probs[i][kept].double()
            left = max(0, p.target_length - generated) if p.counts_down else p.target_length
            far = [0.0 if t in (EOS, *p.end_token_ids) else p.target_length for t in tokens]
            d = torch.tensor([math.log((length + 2) / (left + 2)) for length in far], dtype=torch.float64)
            d = {Mode.LE_NEAR: d.clamp(min=0), Mode.GE_NEAR: d.clamp(max=0)}.get(p.mode, d).abs()
            expected = q * torch.exp(-p.scale * d)
            torch.testing.assert_close(output.probs[i][kept].double(), expected / expected.sum(), rtol=0, atol=2e-5)
            seen += len({round(x, 6) for x in d.tolist()}) > 1
        if output.candidates.status[5] == Status.NOT_DUE:
            not_due.append((generated + 1) % 3)
    assert seen > 15 and 0 not in not_due and len(not_due) > 2
    assert not step.table.faults.any()
    assert step.cache is None and step.value_model is None


@pytest.mark.parametrize(
    ("guidance", "message"),
    [
        ({"value_scale": 0.5}, "value_mode mul needs a value model; without one, give a target_length"),
        ({"target_length": 9, "op": "eq"}, "value_constraint must be one of near, ge_near, le_near .*, got 'eq'"),
        ({"target_length": 9, "value_min": 0.1}, "value_min must not be given without a value model, got 0.1"),
        ({"return_values": True}, "return_values must not be given without a value model, got True"),
    ],
)
def test_without_a_value_model_what_needs_one_is_refused(guidance, message):
    step, slots = make_step(None)
    Engine(step, slots).admit(2, [3, 4], {"target_length": 5}, prompt_len=2)
    with pytest.raises(ValueError, match=message):
        step.add_request(2, parse_guidance(guidance), {EOS})
    assert step.table.target_length[2] == 5  # the row is as it was


def test_without_a_value_model_there_are_no_graphs_images_or_cache():
    with pytest.raises(ValueError, match="graphs must be None or False unless the value model is on a GPU, got none"):
        make_step(None, graphs=True)
    assert working_bytes(None, requests=3, max_len=99, vocab_size=160, max_candidates=8, max_drafts=2) == 9 * 2634


def test_without_a_value_model_steps_are_warmed_up_and_replay_their_draws():
    """The draws of a request depend on its seed and length alone, in the batch and beside others."""
    sequences = [[5, 6], [9], [10, 11, 12]]
    guidance = [{"target_length": t} for t in (4, 30, 9)]
    alone = []
    for i in range(3):
        engine = Engine(*make_step(None, max_drafts=2 * (i == 1)))
        engine.step.warm_up(progress=False)
        alone += run_requests(engine, sequences[i : i + 1], guidance[i : i + 1], 6, seeds=[100 + i])[0]
    together, _ = run_requests(Engine(*make_step(None)), sequences, guidance, 6, rows=[4, 0, 7])
    assert together == alone
    with pytest.raises(ValueError, match="value_model must be given to predict lengths, got None"):
        engine.step.predict(StepBatch(*torch.zeros(2, 1).int(), torch.ones(1).int()))


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_ends_come_after_sentences(backend):
    """By the last token of a sequence, of several new ones, and of each draft: 11 ends a sentence, 12 a line."""
    breaks = torch.zeros(20, dtype=torch.int8)
    breaks[11], breaks[12] = TextBreak.SENTENCE, TextBreak.LINE
    rows = [2, 0, 3]
    scores = torch.zeros(3, VOCAB)
    scores[:, 30:] = -4 + torch.arange(VOCAB - 30) / 99
    scores[:, 9] = 5
    scores[:, EOS] = torch.tensor(1e-6).log() + scores[:, [i for i in range(VOCAB) if i != EOS]].logsumexp(1)
    options = dict(top_k=2, top_p=1.0, min_p=0.0, is_logits=True)
    lengths = torch.tensor([40, 44, 41], dtype=torch.int32)

    def step_of(**sizes):
        step, slots = make_step(None, text_breaks=breaks, backend=backend, **sizes)
        for row, least in zip(rows, (1e-4, 1e-4, 1e-6), strict=True):
            Engine(step, slots).admit(
                row, [3] * 50, {"target_length": 30, "min_end_prob": least}, prompt_len=lengths.tolist()[0] - 1
            )
        return step

    def with_end(found):
        return (found.candidates.token_ids == EOS).any(1).tolist()

    step, table_rows = step_of(), torch.tensor(rows)
    found = {
        token: with_end(take_step(step, scores, torch.tensor([token] * 3), table_rows, lengths, **options))
        for token in (9, 11, 12, 25)
    }
    assert found == {9: [False] * 3, 11: [True] * 3, 12: [False, False, True], 25: [False] * 3}
    step = step_of(max_drafts=2)
    several = torch.tensor([[9, 11, 9], [11, 12, 9], [9, 9, 11]])
    output = take_step(
        step, scores, several, table_rows, lengths, new_lens=torch.tensor([2, 1, 3], dtype=torch.int32), **options
    )
    assert with_end(output) == [True, True, True]
    output = take_step(
        step, scores, several, table_rows, lengths + 1, new_lens=torch.tensor([3, 2, 1], dtype=torch.int32), **options
    )
    assert with_end(output) == [False, False, False]
    drafts = Drafts(torch.tensor([[11, 9], [9, 11], [-1, 11]]), torch.tensor([[-1, 0]] * 3, dtype=torch.int32))
    output = take_step(
        step,
        scores.repeat_interleave(3, dim=0),
        several,
        table_rows,
        lengths + 2,
        new_lens=torch.tensor([1, 1, 3], dtype=torch.int32),
        drafts=drafts,
        **options,
    )
    assert with_end(output) == [False, True, False, True, False, True, True, False, False]


def test_sentences_end_in_time():
    """A token that ends one is drawn where little is left; without a vocabulary it is a token like any other."""
    breaks = torch.zeros(VOCAB, dtype=torch.int8)
    breaks[11] = TextBreak.SENTENCE
    scores = torch.zeros(1, VOCAB)
    scores[0, 9], scores[0, 11], scores[0, EOS] = 6.0, 4.0, -30.0
    of_length = {}
    for known in (breaks, None):
        step, slots = make_step(None, text_breaks=known)
        engine = Engine(step, slots)
        engine.admit(3, [3] * 80, {"target_length": 40}, prompt_len=2)
        for length in (4, 38):
            output = engine.decode([3], [[9] * length], scores, temperature=None, top_k=2)
            at = output.candidates.token_ids[0].tolist().index(11)
            of_length[length, known is None] = output.probs[0, at].item() / output.candidates.probs[0, at].item()
    assert of_length[4, False] == pytest.approx(of_length[4, True]) == pytest.approx(of_length[38, True])
    assert of_length[38, False] > 5 * of_length[38, True]


def test_text_breaks_are_checked():
    with pytest.raises(ValueError, match=r"text_breaks must be int8 \[\*\], got float32 \[9\] on cpu"):
        make_step(None, text_breaks=torch.zeros(9))


def test_who_is_late_takes_a_less_probable_end():
    """Of 2e-6: from half of a target past it, where that is a total; among drafts by the node."""
    step, slots = make_step(None, max_drafts=2, max_candidates=4)
    engine, prompt_lens = Engine(step, slots), [3, 5, 4, 2]
    guidance = [{"target_length": 20}, {"target_length": 20, "target_length_mode": "remaining"}]
    guidance += [{"target_length": 8, "constraint": "le_near"}, {"target_length": 20, "min_end_prob": 1e-3}]
    for row, (g, n) in enumerate(zip(guidance, prompt_lens, strict=True)):
        engine.admit(row, [3] * 48, g, prompt_len=n)
    scores = torch.zeros(4, VOCAB)
    scores[:, 30:] = -4 + torch.arange(VOCAB - 30) / 99
    scores[:, 9] = 5
    scores[:, EOS] = torch.tensor(2e-6).log() + scores[:, [i for i in range(VOCAB) if i != EOS]].logsumexp(1)
    first = {}
    for generated in range(1, 40):
        sequences = [[9] * (n + generated) for n in prompt_lens]
        output = engine.decode(range(4), sequences, scores, temperature=None, top_k=2)
        for row in (output.candidates.token_ids == EOS).any(1).nonzero()[:, 0].tolist():
            first.setdefault(row, generated)
    # 2e-6 is between 1e-4 / 2^5 and / 2^10, and 1e-3 / 2^5 and / 2^10.
    assert first == {0: 31, 2: 13, 3: 31}
    drafts = Drafts(torch.tensor([[9, 9]] * 4), torch.tensor([[-1, 0]] * 4, dtype=torch.int32))
    sequences = [[9] * (n + generated) for n, generated in zip(prompt_lens, (29, 24, 10, 24), strict=True)]
    lens = torch.ones(4, dtype=torch.int32)
    last = torch.tensor([[9, 0, 0]] * 4)
    output = take_step(
        step,
        scores.repeat_interleave(3, dim=0), last, torch.arange(4), torch.tensor([len(s) for s in sequences]).int(),
        new_lens=lens, top_k=2, top_p=1.0, min_p=0.0, is_logits=True, drafts=drafts,
    )  # fmt: skip
    assert (output.candidates.token_ids == EOS).any(1).nonzero()[:, 0].tolist() == [2]
