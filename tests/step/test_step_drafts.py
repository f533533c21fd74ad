"""Steps with drafted tokens: candidates, values and draws at every node of a chain or a tree."""

import math

import pytest
import torch

from lenvm_kernels.ops.verify_drafts import verify_drafts
from lenvm_kernels.reference.draw import draw_tokens
from lenvm_kernels.step import Sampling, StepBatch, working_bytes
from lenvm_kernels.types import Candidates, Drafts, Status
from tests.helpers.drafted_steps import BaseModel, run_drafted, run_plain
from tests.helpers.engine import GUIDANCE, PROMPTS, Engine, make_step
from tests.helpers.models import VOCAB, tiny_value_model
from tests.helpers.statistics import p_value
from tests.helpers.watch import PeakMemory, no_read_back


@pytest.mark.parametrize(
    ("options", "padded"), [({}, False), ({}, True), ({"backend": "triton", "max_delta": 7}, False)]
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
        prepared = step.prepare(scores, batch, Drafts(tokens, parents))
        output = step.step(prepared, sampling, verify="same_draws")
    assert (output.verified.lens > 0).all()
    stated = working_bytes(engine.step.values.value_model, requests=rows, max_len=96, vocab_size=VOCAB, **options)
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
    drawn = draw_tokens(candidates, guided[nodes], seeds, positions)
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
    # The distributions determine the acceptance rate.
    rate = (guided[0] * proposed).sum().item()
    assert abs(accepted.double().mean().item() - rate) < 4 * math.sqrt(rate * (1 - rate) / count)
