"""Steps with drafts: scores from tables, trees of drafts, and runs of requests with and without drafts."""

import torch

from tests.helpers.drafts import make_drafts
from tests.helpers.engine import MOST_LIKELY, Engine, make_step
from tests.helpers.models import VOCAB
from tests.helpers.padded_step import PaddedStep


class BaseModel:
    """Scores of the next token that depend on the last token and the length alone."""

    def __init__(self, peak=2.0):
        generator = torch.Generator().manual_seed(3)
        self.by_token, self.by_length = (torch.randn(VOCAB, VOCAB, generator=generator) * peak for _ in range(2))

    def scores(self, sequence):
        return self.by_token[sequence[-1]] + self.by_length[len(sequence)]


def paths(tokens, parents):
    """The drafts on the path to each node of one request."""
    drafts = [[]]
    for token, parent in zip(tokens, parents, strict=True):
        if token < 0:
            break
        drafts.append([*drafts[parent + 1], token])
    return drafts


def nodes_of(sequences, tokens, parents):
    """The tokens before the candidates of each node of each request; None for an absent draft."""
    requests = [(s, paths(t, p), 1 + len(t)) for s, t, p in zip(sequences, tokens, parents, strict=True)]
    return [[*s, *drafts[j]] if j < len(drafts) else None for s, drafts, nodes in requests for j in range(nodes)]


def step_with(engine, rows, sequences, new, base, tokens, parents, *, draws_others=False, **options):
    """A step with drafts, after each sequence has grown by ``new[i]`` tokens.

    ``draws_others``: unguided requests get their most likely token."""
    nodes, drafts = nodes_of(sequences, tokens, parents), make_drafts(tokens, parents)
    scores = torch.stack([torch.zeros(VOCAB) if node is None else base.scores(node) for node in nodes])
    options = dict(min_p=0.02, top_p=1.0, temperature=0.8, verify="same_draws") | options
    if draws_others:
        options["drawn"] = MOST_LIKELY
    return engine.decode(rows, sequences, scores, new=new, drafts=drafts, **options)


def run_plain(models, rows, prompts, guidance, count, base, **options):
    """Decode ``count`` tokens per request, one per step; unguided requests get the most likely token."""
    engine = Engine(*make_step(models.value, max_candidates=4, **options)).start(rows, prompts, guidance, room=60)
    sequences = [list(tokens) for tokens in prompts]
    for _ in range(count):
        scores = torch.stack([base.scores(s) for s in sequences])
        output = engine.decode(rows, sequences, scores, min_p=0.02, drawn=MOST_LIKELY)
        sequences = [[*s, t] for s, t in zip(sequences, output.tokens.tolist(), strict=True)]
    assert not engine.step.table.columns.faults.any()
    return [s[len(p) : len(p) + count] for s, p in zip(sequences, prompts, strict=True)]


def run_drafted(models, rows, prompts, guidance, count, base, parents, draft, padded=False, **options):
    """The same with drafts; returns the tokens and the number of steps."""
    if padded:
        options |= dict(step_class=PaddedStep, backend="triton")
    step, slots = make_step(models.value, max_candidates=4, max_drafts=len(parents), **options)
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
