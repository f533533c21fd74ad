"""Steps with drafted tokens: candidates, values and draws at every node of a chain or a tree."""

import math

import pytest
import torch

from lenvm_kernels.ops.sample_candidates import sample_candidates
from lenvm_kernels.ops.topk_candidates import topk_candidates
from lenvm_kernels.ops.verify_drafts import verify_drafts
from lenvm_kernels.step import Sampling, StepBatch, working_bytes
from lenvm_kernels.types import Candidates, Drafts, Status
from tests.helpers.drafted_steps import BaseModel, nodes_of, paths, run_drafted, run_plain, step_with
from tests.helpers.engine import GUIDANCE, PROMPTS, TILT, Engine, make_step
from tests.helpers.models import EOS, VOCAB, tiny_value_model
from tests.helpers.padded_step import pad
from tests.helpers.statistics import p_value
from tests.helpers.watch import PeakMemory, no_read_back, watch_forwards

# Two branches from the root, one of which forks, listed so that no draft follows its parent directly.
TREE = [-1, -1, 0, 0, 1, 3]


def likely(base, sequence, parents, rank):
    """A tree of drafts of the ``rank``-th most likely tokens, with a different token in each branch."""
    tokens = []
    for j, parent in enumerate(parents):
        path = paths(tokens, parents[: len(tokens)])[parent + 1]
        siblings = parents[:j].count(parent)
        tokens.append(base.scores([*sequence, *path]).topk(rank + siblings + 1).indices[-1].item())
    return tokens


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_values_at_every_node(models, backend):
    """Trees, chains, and requests with fewer drafts or none; only some drafts are candidates."""
    base, rows = BaseModel(), [4, 0, 6, 2]
    guidance = [TILT, GUIDANCE[2], TILT | {"return_values": True}, None]
    options = dict(max_drafts=6, max_delta=8, max_candidates=4, backend=backend)
    engine, sequences = models.start(rows, guidance, **options)
    new, scored = [1] * 4, 0
    for number in range(3):
        parents = [TREE, [-1, 0, 1, 2, 3, 4], [-1, 0, -1, -1, -1, -1], TREE]
        tokens = [likely(base, s, p, number) for s, p in zip(sequences, parents, strict=True)]
        tokens[2][2:] = [-1, 7, 7, 7]
        output = step_with(engine, rows, sequences, new, base, tokens, parents)
        status = output.candidates.status.view(4, 7)
        assert (status[3] == Status.UNGUIDED).all() and (status[2, 3:] == Status.UNGUIDED).all()
        scored += models.assert_values(output, nodes_of(sequences, tokens, parents))
        new = output.verified.lens.clamp(min=1).tolist()
        for i, sequence in enumerate(sequences):
            taken = output.verified.tokens[i, : new[i]].tolist()
            sequence += taken if taken[0] >= 0 else [9]
    assert scored > 120 and not engine.step.table.columns.faults.any()


@pytest.mark.parametrize(
    ("options", "padded"),
    [({}, False), ({}, True), ({"backend": "triton", "max_delta": 7}, False)],
)
def test_output_is_unchanged_by_drafts(models, options, padded):
    """Requests with several kinds of guidance and without; drafts that are right, partly right, wrong, and absent."""
    base, rows, count = BaseModel(), [4, 0, 6, 2, 5], 14 if options.get("backend") else 30
    prompts, guidance = [*PROMPTS, [40, 41, 42]], [*GUIDANCE[:4], None]
    plain = run_plain(models, rows, prompts, guidance, count, base, **options)

    def draft(i, sequence):
        done = len(sequence) - len(prompts[i])
        right = [*plain[i], *[3] * 9][done : done + 3]
        wrong = (right[0] + 1) % VOCAB
        return [
            [wrong, right[0], right[1], wrong, 3, right[2]],
            [wrong, right[0], wrong, right[1], 5, 6],
            [right[0], wrong, -1, right[1], 8, 8],
            [-1] * 6,
        ][(i + done) % 4]

    parents = [-1, -1, 1, 1, 0, 2]
    drafted, steps = run_drafted(models, rows, prompts, guidance, count, base, parents, draft, padded, **options)
    assert drafted == plain
    assert count / 4 < steps < count * 0.8


def test_nodes_of_draft_chain_equal_single_steps(models):
    """Probabilities and values at the nodes of a chain are those of single steps, and draws are identical."""
    base, chain = BaseModel(), [20, 21, 22]
    outputs = []
    for drafted in (True, False):
        options = dict(max_drafts=3, max_candidates=4, backend="triton")
        engine, sequences = models.start([5, 1], [TILT, GUIDANCE[2]], **options)
        if drafted:
            output = step_with(engine, [5, 1], sequences, [1, 1], base, [chain] * 2, [[-1, 0, 1]] * 2)
            outputs.append([x.view(2, 4, -1) for x in (output.probs, output.value_logits, output.tokens)])
            continue
        singles = []
        for i in range(4):
            sequences = [[*p, *chain[:i]] for p in PROMPTS[:2]]
            scores = torch.stack([base.scores(s) for s in sequences])
            output = engine.decode([5, 1], sequences, scores, min_p=0.02)
            singles.append((output.probs, output.value_logits, output.tokens[:, None]))
        outputs.append([torch.stack(x, dim=1) for x in zip(*singles, strict=True)])
    for found, expected in zip(*outputs, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert torch.equal(outputs[0][2], outputs[1][2])


def test_accepted_tokens_are_the_next_delta(models, monkeypatch):
    """Accepted drafts and the token drawn after them are computed at the next step."""
    base = BaseModel()
    plain = run_plain(models, [3], PROMPTS[:1], [TILT], 6, base)
    engine, (sequence,) = models.start([3], [TILT], max_drafts=2, max_candidates=4)
    seen = watch_forwards(models.value, monkeypatch, of_prompts=True)
    for new, drafted, taken in ((1, plain[0][:2], 3), (3, [plain[0][3], 1], 2), (2, [1, 1], 1)):
        output = step_with(engine, [3], [sequence], [new], base, [drafted], [[-1, 0]])
        assert output.verified.lens.tolist() == [taken]
        sequence += output.verified.tokens[0, :taken].tolist()
    assert sequence == [*PROMPTS[0], *plain[0]]
    assert seen.deltas == [[1], [3], [2]]


def test_nodes_use_the_filters_of_their_request(models):
    """Filters differ between requests, and each filter removes candidates at some node."""
    base, rows = BaseModel(), [5, 1, 3]
    engine, sequences = models.start(rows, [TILT, GUIDANCE[2], TILT], max_drafts=2)
    filters = dict(top_k=[3, 50, 7], top_p=[1.0, 0.5, 0.99], min_p=[0.0, 0.01, 0.1], temperature=[0.5, 1.3, 0.8])
    tensors = {name: torch.tensor(x, dtype=torch.float32) for name, x in filters.items()}
    tensors["top_k"] = engine.tensor(filters["top_k"])
    tokens, parents = [[30, 31], [32, 33], [34, 35]], [[-1, 0], [-1, -1], [-1, 0]]
    output = step_with(engine, rows, sequences, [1] * 3, base, tokens, parents, **tensors)
    all_scores = torch.stack([base.scores(node) for node in nodes_of(sequences, tokens, parents)])
    for i, scores in enumerate(all_scores.split(3)):
        own = {name: x[i] for name, x in filters.items()}
        expected = topk_candidates(scores, max_candidates=8, is_logits=True, **own)
        for name in ("token_ids", "probs", "counts"):
            assert torch.equal(getattr(output.candidates, name)[3 * i : 3 * i + 3], getattr(expected, name)), name


def test_probabilities_and_masks_have_one_row_per_node(models):
    """A token is masked at one node only; the second request is inactive."""
    base, rows, parents = BaseModel(peak=0.5), [6, 0, 3], [[-1, 0], [-1, -1], [-1, -1]]
    tokens = [[30, 31], [32, 33], [34, 35]]
    engine, sequences = models.start(rows, [TILT] * 3, max_drafts=2, max_candidates=4)
    forbidden = base.scores([*PROMPTS[2], 34]).argmax().item()
    mask = torch.full((9, 4), -1)
    mask[7, forbidden // 32] -= 1 << forbidden % 32
    probs = torch.rand(9, VOCAB, generator=torch.Generator().manual_seed(0))
    before, active = probs.clone(), torch.tensor([True, False, True])
    options = dict(probs=probs, vocab_mask=mask.int(), active=active)
    output = step_with(engine, rows, sequences, [1] * 3, base, tokens, parents, **options)
    candidates = output.candidates
    assert (candidates.status == Status.GUIDE).view(3, 3).tolist() == [[True] * 3, [False] * 3, [True] * 3]
    ids = candidates.token_ids.clamp(min=0).long()
    expected = torch.zeros(9, VOCAB).scatter_add(1, ids, output.probs)
    expected[3:6] = before[3:6]
    torch.testing.assert_close(probs, expected)
    scores = torch.stack([base.scores([*PROMPTS[2], *path]) for path in ([], [34], [35])])
    scores[1, forbidden] = -torch.inf
    assert torch.equal(ids[6:, 0], scores.argmax(1))


def test_alternating_steps_with_and_without_drafts(models, monkeypatch):
    """Every step computes the tokens added since the previous step."""
    base, rows, chain = BaseModel(), [3, 6, 1], [-1, 0, 1]
    engine, sequences = models.start(rows, [TILT] * 3, max_drafts=3, max_candidates=4)
    seen = watch_forwards(models.value, monkeypatch)
    tokens = [likely(base, s, chain, 0) for s in sequences]
    step_with(engine, rows, sequences, [1] * 3, base, tokens, [chain] * 3)
    sequences = [[*s, t[0]] for s, t in zip(sequences, tokens, strict=True)]
    scores = torch.stack([base.scores(s) for s in sequences])
    candidates = engine.decode(rows, sequences, scores, min_p=0.02).candidates.token_ids.tolist()
    sequences = [[*s, *more[: 1 + (i == 2)]] for i, (s, more) in enumerate(zip(sequences, candidates, strict=True))]
    none = [[-1] * 3] * 3
    output = step_with(engine, rows, sequences, [1, 1, 2], base, none, [chain] * 3)
    assert models.assert_values(output, nodes_of(sequences, none, [chain] * 3)) > 6
    assert seen.deltas == [[1, 1, 1], [1, 1, 1], [1, 1, 2]] and not engine.step.table.columns.faults.any()


def test_lengths_are_predicted_at_every_node(models):
    base, guidance = BaseModel(), {"return_values": True, "gamma": 0.9}
    engine, sequences = models.start([2, 7], [guidance, TILT | guidance], max_drafts=3, max_candidates=4)
    parents, tokens = [[-1, -1, 1], [-1, 0, 1]], [[30, 31, 32], [33, 34, 35]]
    drawn = torch.arange(40, 48)
    output = step_with(engine, [2, 7], sequences, [1, 1], base, tokens, parents, drawn=drawn)
    assert output.tokens[:4].tolist() == [40, 41, 42, 43]
    nodes = nodes_of(sequences, tokens, parents)
    expected = models.lengths([[*s, t] for s, t in zip(nodes, output.tokens.tolist(), strict=True)], 0.9)
    expected = expected.masked_fill(output.tokens == EOS, 0.0)
    torch.testing.assert_close(output.remaining_lengths, expected, rtol=0, atol=1e-3)


def test_strides_with_drafts(models):
    """A request is due at all nodes of a step or at none, except at nodes where it might end."""
    base = BaseModel()
    engine, sequences = models.start([2, 7], [TILT | {"value_stride": 2}, TILT], max_drafts=2, max_candidates=4)
    new, parents = [1, 1], [[-1, 0]] * 2
    for number in range(1, 5):
        tokens = [likely(base, s, [-1, 0], 0) for s in sequences]
        output = step_with(engine, [2, 7], sequences, new, base, tokens, parents, draws_others=True)
        candidates, status = output.candidates, output.candidates.status.view(2, 3)
        might_end = (candidates.token_ids == EOS).any(1).view(2, 3)[0]
        expected = torch.where(might_end | (number % 2 == 0), int(Status.GUIDE), int(Status.NOT_DUE))
        expected = torch.where(candidates.counts.view(2, 3)[0] == 1, int(Status.SINGLE), expected)
        assert status[0].tolist() == expected.tolist() and not (status[1] == Status.NOT_DUE).any()
        models.assert_values(output, nodes_of(sequences, tokens, parents))
        new = output.verified.lens.tolist()
        for i, sequence in enumerate(sequences):
            sequence += output.verified.tokens[i, : new[i]].tolist()
    assert not engine.step.table.columns.faults.any()


def test_pending_tokens_leave_room_for_accepted_drafts(models, monkeypatch):
    """With three drafts per step and eight held tokens, at most four may be pending, because one step may add four."""
    base, chain = BaseModel(peak=0.3), [-1, 0, 1]
    base.by_token[:, EOS] = -99.0  # a likely end would make the request due
    sizes = dict(max_drafts=3, max_delta=8, max_candidates=4)
    engine, (sequence,) = models.start([2], [TILT | {"value_stride": 999}], **sizes)
    deltas = watch_forwards(models.value, monkeypatch).deltas
    new, expected, missing = 1, [], 0
    for grows in (2, 2, 4, 1, 4, 4, 1):
        drafts = [40 + len(sequence) + i for i in range(3)]
        drawn = torch.tensor([*drafts[: grows - 1], *[7] * (5 - grows)])
        output = step_with(engine, [2], [sequence], [new], base, [drafts], [chain], drawn=drawn)
        missing += new
        expected.append([missing if missing > 4 else 0])
        missing = 0 if missing > 4 else missing
        new = output.verified.lens.item()
        assert new == grows
        sequence += output.verified.tokens[0, :new].tolist()
    assert deltas == expected and [0] in deltas and [8] in deltas
    assert not engine.step.table.columns.faults.any()


def test_lengths_after_accepted_tokens(models, monkeypatch):
    """Lengths after several tokens per request that the caller verified; a prediction caches none of them.

    No two requests have the same gamma, and one of the tokens ends a sequence."""
    base, guidance = BaseModel(), {"return_values": True, "gamma": 0.9}
    asked = [guidance, TILT, TILT | guidance | {"gamma": 0.8}]
    sizes = dict(max_drafts=3, max_candidates=4)
    engine, sequences = models.start([2, 7, 4], asked, **sizes)
    deltas, new = watch_forwards(models.value, monkeypatch).deltas, [1, 1, 1]
    for number in range(3):
        tokens = [[30 + number, 31, 32], [33, 34, 35], [36, 37 + number, 38]]
        step_with(engine, [2, 7, 4], sequences, new, base, tokens, [[-1, 0, 1]] * 3, verify=None)
        taken = [[30 + number, 31, EOS], [33, 61], [62]]  # with a draw after the last draft
        sequences = [[*s, *more] for s, more in zip(sequences, taken, strict=True)]
        new = [3, 2, 1]
        lengths = engine.tensor([len(s) for s in sequences])
        told = StepBatch(engine.told(sequences, new), engine.tensor([2, 7, 4]), lengths, engine.tensor(new))
        found = engine.step.predict(told)
        first = models.lengths([sequences[0][: len(sequences[0]) - i] for i in (2, 1, 0)], 0.9)
        first[2] = 0.0
        expected = torch.cat([first, models.lengths(sequences[2:], 0.8)])
        torch.testing.assert_close(torch.cat([found[0, :3], found[2, :1]]), expected, rtol=0, atol=1e-3)
        assert found.isnan().tolist() == [[False] * 3 + [True], [True] * 4, [False, True, True, True]]
    assert deltas == [[0, 1, 1], [1, 0, 0], [0, 2, 1], [3, 0, 0], [0, 2, 1], [3, 0, 0]]


@pytest.mark.parametrize("max_drafts", [0, 2])
def test_predict_computes_only_requests_that_return_values(models, monkeypatch, max_drafts):
    """Requests without ``return_values`` and padding of a graph have no candidates, whatever was computed before."""
    base, rows, guidance = BaseModel(), [4, 0, 6, 2], [TILT | {"return_values": True}, None, TILT, TILT]
    engine, sequences = models.start(rows, guidance, max_drafts=max_drafts, max_candidates=4)
    pad(engine.step)
    lens = watch_forwards(models.value, monkeypatch).candidates
    if max_drafts:
        step_with(engine, rows, sequences, [1] * 4, base, [[30, 31]] * 4, [[-1, 0]] * 4)
    else:
        engine.decode(rows, sequences, torch.stack([base.scores(s) for s in sequences]), min_p=0.02)
    assert lens[0][1] == 0 and lens[0][3] > 1
    new = [1 + max_drafts, 1, 1]
    tokens, lengths = torch.full((3, 1 + max_drafts), 50), engine.tensor([len(s) for s in sequences[:3]])
    if max_drafts:
        grown = engine.tensor(new)
        engine.step.predict(StepBatch(tokens, engine.tensor(rows[:3]), lengths + grown, grown))
    else:
        engine.step.predict(StepBatch(tokens[:, 0], engine.tensor(rows[:3]), lengths + 1))
    assert lens[-1] == [1 + max_drafts, 0, 0, 0]


@pytest.mark.parametrize("rows", [1, 4])
def test_memory_is_within_working_bytes_and_nothing_is_read_back(device, rows):
    """A step with drafts with the Triton kernels takes between half of ``working_bytes`` and all of it."""
    options = dict(max_drafts=3, max_delta=5, max_candidates=4)
    step, slots = make_step(tiny_value_model(device), max_len=96, backend="triton", graphs=False, **options)
    engine = Engine(step, slots).start(range(rows), PROMPTS[:rows], GUIDANCE[:rows], room=40)
    tokens, parents = (torch.zeros(rows, 3, dtype=torch.int32, device=device) for _ in range(2))
    parents += torch.tensor([-1, 0, 0], dtype=torch.int32, device=device)
    scores = torch.randn(rows * 4, VOCAB, device=device)
    last, lengths = engine.tensor([p[-1:] for p in PROMPTS[:rows]]), engine.tensor([len(p) for p in PROMPTS[:rows]])
    batch = StepBatch(last, engine.tensor(list(range(rows))), lengths, torch.ones_like(lengths))
    sampling = Sampling(4, 1.0, 0.0, is_logits=True, sample=True)
    with PeakMemory() as memory, no_read_back():
        output = step.step(scores, batch, sampling, Drafts(tokens, parents), verify="same_draws")
    assert (output.verified.lens > 0).all()
    stated = working_bytes(step.value_model, requests=rows, max_len=96, vocab_size=VOCAB, **options)
    assert 0.5 * stated < memory.peak <= stated


def test_verified_tokens_follow_the_guided_distribution():
    """100,000 requests with different seeds; drafts come from another distribution."""
    count, vocabulary = 100_000, 4
    generator = torch.Generator().manual_seed(0)
    guided = torch.softmax(torch.randn(1 + vocabulary, vocabulary, generator=generator), 1)  # first, after each token
    proposed = torch.softmax(torch.randn(vocabulary, generator=generator), 0)
    first = torch.multinomial(proposed, count, replacement=True, generator=generator)
    drafts = Drafts(first[:, None], torch.full((count, 1), -1, dtype=torch.int32))
    nodes = torch.stack((torch.zeros_like(first), 1 + first), dim=1).flatten()
    candidates = Candidates(
        token_ids=torch.arange(vocabulary, dtype=torch.int32).repeat(2 * count, 1),
        probs=torch.full((2 * count, vocabulary), 1 / vocabulary),
        counts=torch.full((2 * count,), vocabulary, dtype=torch.int32),
        status=torch.full((2 * count,), int(Status.GUIDE), dtype=torch.int8),
        lost_mass=torch.zeros(2 * count),
    )
    seeds = torch.randint(2**62, (count,), generator=generator).repeat_interleave(2)
    positions = torch.tensor([7, 8], dtype=torch.int32).repeat(count)
    drawn = sample_candidates(candidates, guided[nodes], seeds, positions)
    verified = verify_drafts(drawn, drafts)
    tokens, accepted = verified.tokens.long(), verified.lens == 2
    assert torch.equal(accepted, tokens[:, 0] == first)

    def p_of(tokens, probs):
        return p_value(torch.bincount(tokens, minlength=vocabulary), probs * len(tokens))

    assert p_of(tokens[:, 0], guided[0]) > 1e-3
    for token in range(vocabulary):
        second = tokens[accepted & (first == token), 1]
        assert len(second) > 300 and p_of(second, guided[1 + token]) > 1e-3
        assert p_of(second, guided[0]) < 1e-3
    # The acceptance rate is that of the distributions.
    rate = (guided[0] * proposed).sum().item()
    assert abs(accepted.double().mean().item() - rate) < 4 * math.sqrt(rate * (1 - rate) / count)


def test_end_tokens_are_candidates_at_every_node(models):
    """Each node has the end tokens of its own request, in any table row."""
    base, rows, sequences = BaseModel(), [6, 1], PROMPTS[:2]
    engine = Engine(*make_step(models.value, max_drafts=2))
    engine.start(rows, sequences, [{"target_length": 9, "min_end_prob": 0}] * 2, room=8, eos=[{50}, {60}])
    output = step_with(engine, rows, sequences, [1, 1], base, [[30, 31], [32, 33]], [[-1, 0], [-1, -1]], top_k=2)
    ends = [[token in row for token in (50, 60)] for row in output.candidates.token_ids.tolist()]
    assert ends == [[True, False]] * 3 + [[False, True]] * 3
