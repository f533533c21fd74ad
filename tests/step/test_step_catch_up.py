"""Steps in which the value model computes several tokens of a request: pending tokens, and several new tokens."""

import pytest
import torch

from lenvm_kernels.guidance import parse_guidance
from lenvm_kernels.step import GuidedStep
from lenvm_kernels.types import Status
from tests.helpers.engine import PROMPTS, TILT, Engine, make_step
from tests.helpers.models import EOS, VOCAB
from tests.helpers.watch import watch_forwards


def scores_of(rows, step, end=None):
    """Five likely tokens per row, different at every step. Only in the row ``end`` one of them ends the sequence."""
    scores = torch.full((rows, VOCAB), -20.0)
    for row in range(rows):
        first = 5 + (31 * step + 17 * row) % 80
        scores[row, first : first + 5] = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0])
        if row == end:
            scores[row, EOS] = 1.2
    return scores


def own_draws(rows, step):
    """Tokens drawn by the caller, none of which is a candidate."""
    return torch.tensor([4 + (7 * step + 13 * row) % 80 for row in range(rows)])


def test_strides(models, monkeypatch):
    """Rows of strides 1, 2, 3 and the step's default 5 in one batch: each is guided at its own steps with values of
    plain forwards, and its pending tokens are computed together at these steps."""
    strides, rows = [1, 2, 3, None], [4, 1, 6, 3]
    guidance = [TILT | ({} if n is None else {"value_stride": n}) for n in strides]
    engine, sequences = models.start(rows, guidance, value_stride=5)
    deltas, waiting, scored = watch_forwards(models.value, monkeypatch).deltas, [1] * 4, 0
    for number in range(1, 21):
        drawn = own_draws(4, number)
        output = engine.decode(rows, sequences, scores_of(4, number), drawn=drawn)
        due = [number % (n or 5) == 0 for n in strides]
        assert output.candidates.status.tolist() == [Status.GUIDE if is_due else Status.NOT_DUE for is_due in due]
        scored += models.assert_values(output, sequences)
        assert deltas[-1] == [waiting[i] if is_due else 0 for i, is_due in enumerate(due)]
        for i, token in enumerate(output.tokens.tolist()):
            assert token in output.candidates.token_ids[i] if due[i] else token == drawn[i]
            sequences[i].append(token)
            waiting[i] = 1 if due[i] else waiting[i] + 1
    assert scored == 5 * (20 + 10 + 6 + 4)
    assert not engine.step.table.columns.faults.any()


def test_uncounted_steps_do_not_advance_a_stride(models):
    """Uncounted steps of another request run between counted steps; it is due if the next counted step is due."""
    guidance = [TILT | {"value_stride": 2}, TILT | {"value_stride": 2}]
    engine, sequences = models.start([4, 1], guidance)
    for number, between in enumerate((0, 2, 1, 0, 3, 1, 0, 1), start=1):
        of_steps = [(1, False)] * between + [(0, True)]
        for which, counts in of_steps:
            of_one, rows = [sequences[which]], [[4, 1][which]]
            output = engine.decode(rows, of_one, scores_of(1, number), drawn=own_draws(1, number), counts=counts)
            assert output.candidates.status.tolist() == [[Status.GUIDE, Status.NOT_DUE][number % 2]]
            models.assert_values(output, of_one)
            sequences[which].append(output.tokens.item())
    assert not engine.step.table.columns.faults.any()


def test_row_that_might_end_is_due(models):
    """An end token of the request among its candidates makes it due at any step; end tokens of others do not."""
    sequences, guidance, eos = [[9, 10, 11]] * 3, [TILT | {"value_stride": 1000}] * 3, [{EOS}, {EOS, 3}, {3}]
    engine = Engine(*make_step(models.value)).start([5, 2, 0], sequences, guidance, room=9, eos=eos)
    of_steps = [([EOS], [1, 1, 0]), ([3], [0, 1, 1]), ([4], [0, 0, 0]), ([EOS, 3], [1] * 3)]
    for number, (tokens, due) in enumerate(of_steps):
        scores = scores_of(3, number)
        scores[:, tokens] = 1.2
        output = engine.decode([5, 2, 0], sequences, scores, drawn=own_draws(3, number))
        assert (output.candidates.status == Status.GUIDE).tolist() == [bool(x) for x in due]
        assert (output.candidates.status == Status.NOT_DUE).tolist() == [not x for x in due]
        models.assert_values(output, sequences)
        sequences = [[*s, t] for s, t in zip(sequences, output.tokens.tolist(), strict=True)]
    # An end token removed by the filters does not count.
    scores = scores_of(3, 9)
    scores[:, EOS] = -19.0
    output = engine.decode([5, 2, 0], sequences, scores, drawn=own_draws(3, 9))
    assert (output.candidates.status == Status.NOT_DUE).all()


def test_rows_without_values_wait_for_max_delta_tokens(models, monkeypatch):
    """Rows that are SINGLE, SKIP or NOT_DUE compute no token until ``max_delta`` tokens are pending, then all of them
    at once."""
    guidance = [TILT, TILT | {"entropy_threshold": 100.0}, TILT | {"value_stride": 1000}, None]
    engine, sequences = models.start([3, 0, 7, 5], guidance, max_delta=3)
    deltas = watch_forwards(models.value, monkeypatch).deltas
    for number in range(1, 9):
        scores = scores_of(4, number)
        scores[0] = torch.where(scores[0] == 2.0, 30.0, -20.0)
        output = engine.decode([3, 0, 7, 5], sequences, scores, drawn=own_draws(4, number))
        assert output.candidates.status.tolist() == [Status.SINGLE, Status.SKIP, Status.NOT_DUE, Status.UNGUIDED]
        assert deltas[-1] == [3 * (number % 3 == 0)] * 3 + [0]
        sequences = [[*s, t] for s, t in zip(sequences, output.tokens.tolist(), strict=True)]
    # Two pending tokens are computed with the new one once values are needed.
    output = engine.decode([3], sequences[:1], scores_of(1, 99))
    assert deltas[-1] == [3] and models.assert_values(output, sequences[:1]) == 5
    assert not engine.step.table.columns.faults.any()


def test_max_delta_of_one_leaves_no_pending_tokens(models, monkeypatch):
    guidance = [TILT, TILT | {"value_stride": 4}]
    engine, sequences = models.start([3, 0], guidance, max_delta=1)
    deltas = watch_forwards(models.value, monkeypatch).deltas
    for number in range(1, 9):
        output = engine.decode([3, 0], sequences, scores_of(2, number), drawn=own_draws(2, number))
        assert deltas[-1] == [1, 1]
        models.assert_values(output, sequences)
        sequences = [[*s, t] for s, t in zip(sequences, output.tokens.tolist(), strict=True)]


def test_several_new_tokens_equal_single_steps(models, monkeypatch):
    """Each request has grown by a different number of tokens, one by none since its prompt."""
    more = [[20, 21, 22, 23, 24], [30], [], [40, 41, 42]]
    engine, _ = models.start([6, 1, 4, 2], [TILT] * 4)
    deltas = watch_forwards(models.value, monkeypatch).deltas
    sequences = [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, more, strict=True)]
    # The last token of a prompt is new to the step, because extend received all others.
    output = engine.decode([6, 1, 4, 2], sequences, scores_of(4, 3), new=[6, 2, 1, 4])
    assert deltas == [[6, 2, 1, 4]]
    assert models.assert_values(output, sequences) == 20
    sequences = [[*s, *more] for s, more in zip(sequences, ([90], [91, 92], [93], [94] * 16), strict=True)]
    output = engine.decode([6, 1, 4, 2], sequences, scores_of(4, 4), new=[1, 2, 1, 16])
    assert deltas[-1] == [1, 2, 1, 16]
    assert models.assert_values(output, sequences) == 20 and not engine.step.table.columns.faults.any()


def test_new_tokens_may_be_pending(models, monkeypatch):
    """Several new tokens per step, at steps without guidance, wrap around the ring buffer of held tokens."""
    engine, (sequence,) = models.start([6], [TILT | {"value_stride": 4}], max_delta=5)
    deltas = watch_forwards(models.value, monkeypatch).deltas
    told = [1, 2, 1, 1, 2, 2, 0, 1, 1, 1, 1, 2]
    expected = [0, 0, 0, 5, 0, 0, 0, 5, 0, 0, 0, 5]
    token = 60
    for number, (n, delta) in enumerate(zip(told, expected, strict=True), start=1):
        new = [token + i for i in range(n if number > 1 else 0)]
        token, sequence = token + len(new), [*sequence, *new]
        output = engine.decode([6], [sequence], scores_of(1, number), new=[n], drawn=torch.tensor([0]))
        assert deltas[-1] == [delta]
        assert models.assert_values(output, [sequence]) == (5 if number % 4 == 0 else 0)
    assert not engine.step.table.columns.faults.any()


def test_missing_token_ends_guidance_until_extended(models):
    engine, sequences = models.start([6, 1], [TILT] * 2, max_delta=3)
    engine.decode([6, 1], sequences, scores_of(2, 0))
    faults = lambda: engine.step.table.columns.faults[[6, 1]].tolist()  # noqa: E731
    sequences[0] += [20, 21]  # only the last is passed
    sequences[1] += [22]
    for number in (1, 2):
        output = engine.decode([6, 1], sequences, scores_of(2, number), drawn=own_draws(2, number))
        assert output.candidates.status.tolist() == [Status.UNGUIDED, Status.GUIDE]
        assert output.tokens[0] == own_draws(2, number)[0] and faults() == [number, 0]
        assert models.assert_values(output, sequences) == 5
        sequences = [[*s, t] for s, t in zip(sequences, output.tokens.tolist(), strict=True)]
    # Four new tokens are more than a sequence holds.
    sequences[1] += [23, 24, 25]
    output = engine.decode([6, 1], sequences, scores_of(2, 3), new=[1, 4], drawn=own_draws(2, 3))
    assert output.candidates.status.tolist() == [Status.UNGUIDED] * 2 and faults() == [3, 1]
    engine.prefill([6, 1], sequences)
    output = engine.decode([6, 1], sequences, scores_of(2, 4))
    assert models.assert_values(output, sequences) == 10 and faults() == [3, 1]


def test_reused_row_keeps_no_tokens_of_its_last_request(models):
    """A request without an extended prompt is not guided, even if the row's last request had more tokens."""
    engine = Engine(*make_step(models.value)).start([6], PROMPTS[2:3], [TILT])
    assert models.assert_values(engine.decode([6], PROMPTS[2:3], scores_of(1, 0)), PROMPTS[2:3]) == 5
    assert engine.step.told_lens(engine.tensor([6, 1])).tolist() == [len(PROMPTS[2]), 0]
    engine.step.remove_request(6)
    engine.slots.free(6)
    engine.admit(6, [20, 21, 22], TILT, prompt_len=3)
    assert engine.step.told_lens(engine.tensor([6, 1])).tolist() == [0, 0]
    output = engine.decode([6], [[20, 21, 22]], scores_of(1, 1), drawn=own_draws(1, 1))
    assert output.candidates.status.tolist() == [Status.UNGUIDED] and engine.step.table.columns.faults[6] == 1
    engine.prefill([6], [[20, 21, 22]])
    assert models.assert_values(engine.decode([6], [[20, 21, 22]], scores_of(1, 2)), [[20, 21, 22]]) == 5


@pytest.mark.parametrize("again", [0, 2])
def test_repeated_prompt_does_not_discard_tokens(models, monkeypatch, again):
    """The first tokens, or none, of a request are extended again between its steps."""
    engine, sequences = models.start([6, 1], [TILT] * 2)
    deltas = watch_forwards(models.value, monkeypatch).deltas
    for number in range(3):
        output = engine.decode([6, 1], sequences, scores_of(2, number))
        assert models.assert_values(output, sequences) == 10
        sequences = [[*s, t] for s, t in zip(sequences, output.tokens.tolist(), strict=True)]
        engine.prefill([6], [sequences[0][: again + 1]])
    assert deltas == [[1, 1]] * 3 and not engine.step.table.columns.faults.any()


def test_lengths_of_every_token_with_a_stride(models):
    """With ``return_values`` every token is scored, and guidance keeps its stride."""
    guidance = TILT | {"value_stride": 3, "return_values": True, "gamma": 0.9}
    engine, (sequence,) = models.start([5], [guidance], prompts=PROMPTS[2:])
    for number in range(1, 8):
        output = engine.decode([5], [sequence], scores_of(1, number), drawn=own_draws(1, number))
        assert output.candidates.status.tolist() == [Status.NOT_DUE if number % 3 else Status.GUIDE]
        sequence.append(output.tokens.item())
        torch.testing.assert_close(output.remaining_lengths, models.lengths([sequence], 0.9), rtol=0, atol=1e-3)


def test_stride_of_request_takes_precedence(models):
    step: GuidedStep = make_step(models.value, value_stride=4)[0]
    for row, stride in ((3, None), (1, 1), (6, 9)):
        step.add_request(row, parse_guidance(TILT | {"value_stride": stride}), {EOS})
    assert step.table.columns.value_stride.tolist() == [1, 1, 1, 4, 1, 1, 9, 1, 1]
