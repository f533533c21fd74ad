"""Lengths predicted by guided steps, and values of rows without guidance."""

import torch

from lenvm_kernels.step import StepBatch
from lenvm_kernels.types import Status
from tests.helpers.engine import PROMPTS, TILT, Engine, make_step, random_scores
from tests.helpers.models import EOS, VOCAB
from tests.helpers.step_models import ATOL
from tests.helpers.watch import watch_forwards


def test_remaining_lengths(models, monkeypatch):
    """Lengths after tokens drawn from candidates, single candidates, and tokens drawn by the row's filters."""
    wants = {"return_values": True, "gamma": 0.9}
    guidance = [
        wants | TILT,
        wants,  # not guided
        wants | TILT | {"entropy_threshold": 100.0},  # always skipped
        TILT,
    ]
    engine = Engine(*make_step(models.value, max_delta=1))
    engine.start(range(4), PROMPTS, guidance, room=8)
    sequences, seen = [list(tokens) for tokens in PROMPTS], set()
    seen_forwards = watch_forwards(models.value, monkeypatch)

    def expected(tokens):
        return models.lengths(tokens, 0.9).masked_fill(torch.tensor([t[-1] == EOS for t in tokens]), 0.0)

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
        for row, token in enumerate(output.tokens.tolist()):
            own = status[row] in (Status.UNGUIDED, Status.SKIP)
            assert token == drawn[row] if own else token in output.candidates.token_ids[row]
            assert status[row] == Status.GUIDE or (output.value_logits[row] == 0).all()
            sequences[row].append(token)
        assert torch.isnan(output.remaining_lengths[3])
        torch.testing.assert_close(output.remaining_lengths[:3], expected(sequences[:3]), rtol=0, atol=1e-3)
    assert seen == {Status.UNGUIDED, Status.GUIDE, Status.SINGLE, Status.SKIP} and sequences[1][-2] == EOS
    # A prediction caches nothing: the first step computes the last tokens of the prompts again.
    assert [sum(deltas) for deltas in seen_forwards.deltas] == [0, *[4] * 8]
    greedy = engine.decode(range(4), sequences, scores, drawn=drawn, sample=False)
    assert greedy.tokens.tolist() == drawn.tolist()
    ends = [[*tokens, token] for tokens, token in zip(sequences, drawn.tolist(), strict=True)]
    assert not torch.isnan(greedy.remaining_lengths[1:3]).any()
    torch.testing.assert_close(greedy.remaining_lengths[1:3], expected(ends)[1:3], rtol=0, atol=1e-3)
    for row in range(3):
        engine.step.remove_request(row)
    assert engine.decode([3], sequences[3:], scores[3:], drawn=drawn[3:]).remaining_lengths is None


def test_token_0_is_valid(models, monkeypatch):
    """Token 0 is cached and scored as a draw from candidates or by a row's filters, and as a single candidate."""
    wants = {"return_values": True, "gamma": 0.9}
    guidance = [wants, wants | {"target_length": 1, "op": "le"}, wants | {"target_length": 1000, "op": "ge"}, wants]
    rows, drawn = [6, 1, 4, 3], torch.tensor([0, 7, 7, 0])
    engine = Engine(*make_step(models.value, max_delta=1))
    engine.start(rows, PROMPTS, guidance, eos=[{EOS}, {0}, {EOS}, {EOS}])
    seen = watch_forwards(models.value, monkeypatch)
    scores = torch.full((4, VOCAB), -20.0)
    scores[:2, [8, 0]] = torch.tensor([3.0, 2.0])  # row 1 draws its end of sequence
    scores[2, 0] = 3.0
    output = engine.decode(rows, PROMPTS, scores, drawn=drawn)
    assert output.candidates.status.tolist() == [Status.UNGUIDED, Status.GUIDE, Status.SINGLE, Status.UNGUIDED]
    assert output.tokens.tolist() == [0, 0, 0, 0]
    sequences = [[*tokens, 0] for tokens in PROMPTS]
    expected = models.lengths(sequences, 0.9)
    expected[1] = 0.0
    torch.testing.assert_close(output.remaining_lengths, expected, rtol=0, atol=1e-3)
    again = engine.decode(rows, sequences, random_scores(4))
    assert seen.deltas == [[1] * 4] * 2
    models.assert_guided(again, sequences, [None, guidance[1], guidance[2], None], [len(t) for t in PROMPTS])


def test_rows_without_a_next_token_have_no_length(models, monkeypatch):
    """Rows drawn by their own filters without ``drawn`` have no length, and neither have inactive rows."""
    wants = {"return_values": True}
    guidance = [TILT | {"entropy_threshold": 100.0}, wants | TILT | {"entropy_threshold": 100.0}]
    guidance += [wants, wants | TILT]
    rows = [3, 7, 0, 5]
    engine = Engine(*make_step(models.value)).start(rows, PROMPTS, guidance)
    seen = watch_forwards(models.value, monkeypatch)
    scores = random_scores(4)
    output = engine.decode(rows, PROMPTS, scores)
    assert (output.tokens >= 0).tolist() == [False, False, False, True]
    assert output.remaining_lengths.isnan().tolist() == [True, True, True, False]
    assert engine.decode(rows, PROMPTS, scores, sample=False).tokens is None
    drawn, active = torch.tensor([20, 21, 22, 23]), torch.tensor([True, True, True, False])
    left_out = engine.decode(rows, PROMPTS, scores, active=active, drawn=drawn)
    assert left_out.remaining_lengths.isnan().tolist() == [True, False, False, True]
    guided = [0, 0, 0, int(output.candidates.counts[3])]
    assert seen.candidates == [guided, guided, [0, 1, 1, 0]]


def test_length_without_sampling_is_that_of_drawn_token(models):
    """Also if the row has a single candidate and its filters drew another token."""
    wants = {"return_values": True, "gamma": 0.9}
    engine = Engine(*make_step(models.value)).start([4], PROMPTS[:1], [wants | TILT])
    scores = random_scores(1)
    token = (int(scores.argmax()) + 1) % VOCAB
    output = engine.decode([4], PROMPTS[:1], scores, top_k=1, sample=False, drawn=torch.tensor([token]))
    assert output.candidates.status.tolist() == [Status.SINGLE] and output.tokens.tolist() == [token]
    expected = models.lengths([[*PROMPTS[0], token]], 0.9)
    torch.testing.assert_close(output.remaining_lengths, expected, rtol=0, atol=1e-3)


def test_score_all_includes_skipped_and_single_rows(models):
    """Skipped rows and rows with one candidate are scored, unguided rows are not."""
    guidance = [TILT | {"entropy_threshold": 100.0}, None, TILT]
    prompts, rows = [PROMPTS[0], PROMPTS[0], PROMPTS[2]], [6, 1, 4]
    engine, scores = Engine(*make_step(models.value, score_all=True)).start(rows, prompts, guidance), random_scores(3)
    output = engine.decode(rows, prompts, scores, top_k=engine.tensor([6, 6, 1]))
    assert output.candidates.status.tolist() == [Status.SKIP, Status.UNGUIDED, Status.SINGLE]
    assert output.candidates.counts.tolist()[::2] == [6, 1]
    expected = torch.zeros(3, 8)
    ids = output.candidates.token_ids[0, :6].tolist()
    expected[0, :6] = models.values([[*prompts[0], token] for token in ids])
    expected[2, 0] = models.values([[*prompts[2], int(scores[2].argmax())]])
    torch.testing.assert_close(output.value_logits, expected, rtol=0, atol=ATOL)


def test_score_all_scores_drawn_token_alone(models):
    """The drawn token of a skipped row gives its length, even as one of the candidates, which then have no values."""
    guidance = TILT | {"entropy_threshold": 100.0, "return_values": True}
    engine = Engine(*make_step(models.value, score_all=True)).start([3], PROMPTS[:1], [guidance])
    scores = random_scores(1)
    second = scores.topk(2).indices[:, 1]
    output = engine.decode([3], PROMPTS[:1], scores, drawn=second)
    assert output.candidates.status.tolist() == [Status.SKIP] and output.candidates.token_ids[0, 1] == second
    expected = models.lengths([[*PROMPTS[0], second.item()]], 0.997)
    torch.testing.assert_close(output.remaining_lengths, expected, rtol=1e-4, atol=0)
    assert (output.value_logits == 0).all()


def test_predict_writes_to_no_slot(models):
    """A prompt of one repeated token, predicted at two lengths. The scored token has no slot and must not be written to
    slot 0, which belongs to another request."""
    engine = Engine(*make_step(models.value, page_size=1))
    engine.admit(5, PROMPTS[2], TILT, prompt_len=9)
    engine.admit(2, [9, 9], {"return_values": True, "gamma": 0.9}, prompt_len=2)
    engine.prefill([5], [PROMPTS[2]])
    assert engine.slots.slots(torch.tensor([5]), torch.tensor([0])).item() == 0
    tokens, row, i32 = torch.tensor([9]), torch.tensor([2]), engine.tensor
    found, cache = [], engine.step.cache
    for length in (1, 2):
        before = cache.keys.clone(), cache.values.clone()
        found.append(engine.step.predict(StepBatch(tokens, row, i32([length]))))
        assert torch.equal(cache.keys, before[0]) and torch.equal(cache.values, before[1])
        if length == 1:
            engine.step.extend(*engine.prompts([2], [[9]]))
    torch.testing.assert_close(torch.cat(found), models.lengths([[9], [9, 9]], 0.9), rtol=0, atol=1e-3)
