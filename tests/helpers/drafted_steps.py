"""Steps with drafts: scores by tables, trees of drafts, and requests that run with them and without."""

import torch

from lenvm_kernels.step import StepBatch
from tests.helpers.drafts import make_drafts
from tests.helpers.engine import Engine, make_step
from tests.helpers.models import VOCAB
from tests.helpers.padded_step import pad


class BaseModel:
    """Scores of the next token that follow from the last token and the length alone."""

    def __init__(self, peak=2.0):
        generator = torch.Generator().manual_seed(3)
        self.by_token, self.by_length = (torch.randn(VOCAB, VOCAB, generator=generator) * peak for _ in range(2))

    def scores(self, sequence):
        return self.by_token[sequence[-1]] + self.by_length[len(sequence)]


def paths(tokens, parents):
    """The drafts on the way to each node, of one request."""
    found = [[]]
    for token, parent in zip(tokens, parents, strict=True):
        if token < 0:
            break
        found.append([*found[parent + 1], token])
    return found


def nodes_of(sequences, tokens, parents):
    """What is before the candidates of each node of each request; None of a draft that is absent."""
    found = [(s, paths(t, p), 1 + len(t)) for s, t, p in zip(sequences, tokens, parents, strict=True)]
    return [[*s, *ways[j]] if j < len(ways) else None for s, ways, nodes in found for j in range(nodes)]


def step_with(engine, rows, sequences, new, base, tokens, parents, *, draws_others=False, tells_ends=True, **options):
    """A step with drafts after each sequence has grown by ``new`` tokens of its own number.

    ``draws_others``: requests that are not guided get their most likely token. ``tells_ends``: the step is told where
    spans have ended, or has to look."""
    nodes, drafts = nodes_of(sequences, tokens, parents), make_drafts(tokens, parents)
    scores = torch.stack([torch.zeros(VOCAB) if node is None else base.scores(node) for node in nodes])
    lengths = engine.tensor([len(s) for s in sequences])
    batch = StepBatch(engine.told(sequences, new), engine.tensor(rows), lengths, engine.tensor(new))
    spans = engine.step.limit_spans(scores, batch, drafts)
    options = dict(min_p=0.02, top_p=1.0, temperature=0.8, verify="same_draws") | options
    if tells_ends:
        options["spans"] = spans
    if draws_others:
        options["drawn"] = scores.argmax(1)
    return engine.decode(rows, sequences, scores, new=new, drafts=drafts, **options)


def run_plain(models, rows, prompts, guidance, count, base, **options):
    """So many tokens of each, one a step; unguided ones get the most likely."""
    engine = Engine(*make_step(models.value, max_candidates=4, **options)).start(rows, prompts, guidance, room=60)
    sequences = [list(tokens) for tokens in prompts]
    for _ in range(count):
        scores = torch.stack([base.scores(s) for s in sequences])
        last, lengths = engine.tensor([s[-1] for s in sequences]), engine.tensor([len(s) for s in sequences])
        engine.step.limit_spans(scores, StepBatch(last, engine.tensor(rows), lengths))
        output = engine.decode(rows, sequences, scores, min_p=0.02, drawn=scores.argmax(1))
        sequences = [[*s, t] for s, t in zip(sequences, output.tokens.tolist(), strict=True)]
    assert not engine.step.table.columns.faults.any()
    return [s[len(p) : len(p) + count] for s, p in zip(sequences, prompts, strict=True)]


def run_drafted(models, rows, prompts, guidance, count, base, parents, draft, padded=False, **options):
    """The same with drafts; returns the tokens and how many steps it took."""
    step, slots = make_step(models.value, max_candidates=4, max_drafts=len(parents), **options)
    if padded:
        pad(step)
    engine = Engine(step, slots).start(rows, prompts, guidance, room=60)
    sequences, new, steps = [list(tokens) for tokens in prompts], [1] * len(rows), 0
    while any(len(s) - len(p) < count for s, p in zip(sequences, prompts, strict=True)):
        tokens = [draft(i, s) for i, s in enumerate(sequences)]
        all_parents = [parents] * len(rows)
        output = step_with(engine, rows, sequences, new, base, tokens, all_parents, draws_others=True)
        new = output.verified.lens.tolist()
        for i, sequence in enumerate(sequences):
            nodes = output.verified.nodes[i, : new[i]].tolist()
            assert nodes[0] == 0 and [paths(tokens[i], parents)[n] for n in nodes] == [
                output.verified.tokens[i, :j].tolist() for j in range(new[i])
            ]
            sequence += output.verified.tokens[i, : new[i]].tolist()
        steps += 1
    assert not step.table.columns.faults.any()
    return [s[len(p) : len(p) + count] for s, p in zip(sequences, prompts, strict=True)], steps
