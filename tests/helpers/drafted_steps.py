"""Steps with drafts: scores from tables, trees of drafts, and runs of requests with and without drafts."""

import torch

from tests.helpers.cases import make_drafts
from tests.helpers.engine import MOST_LIKELY, Engine, PaddedStep, RandomModel, make_step, run_requests
from tests.helpers.models import EOS, VOCAB

END = 11


class BaseModel(RandomModel):
    """A base model in which the end of sequence is always likely, and :data:`END` sometimes."""

    def __init__(self):
        super().__init__()
        self.by_token[:, EOS] = 6.0
        self.by_length[:, EOS] = torch.arange(VOCAB) % 3
        self.by_token[:, END] = 4.0


def paths(tokens, parents):
    """The drafts on the path to each node of one request."""
    drafts = [[]]
    for token, parent in zip(tokens, parents, strict=True):
        if token < 0:
            break
        drafts.append([*drafts[parent + 1], token])
    return drafts


def run_plain(models, rows, prompts, guidance, count, base, **options):
    """Decode ``count`` tokens per request, one per step; unguided requests get the most likely token."""
    engine, options = Engine(*make_step(models.value, max_candidates=4, **options)), dict(rows=rows, base=base)
    options |= dict(seeds=[0] * len(rows), min_p=0.02, drawn=MOST_LIKELY)
    sequences, _ = run_requests(engine, prompts, guidance, count, **options)
    assert not engine.step.table.columns.faults.any()
    return [s[len(p) :] for s, p in zip(sequences, prompts, strict=True)]


def run_drafted(models, rows, prompts, guidance, count, base, parents, draft, padded=False, **options):
    """As :func:`run_plain`, with drafts; returns the tokens and the number of steps."""
    if padded:
        options |= dict(step_class=PaddedStep, backend="triton")
    step, slots = make_step(models.value, max_candidates=4, max_drafts=len(parents), **options)
    engine = Engine(step, slots).start(rows, prompts, guidance, room=60)
    sequences, new, steps = [list(tokens) for tokens in prompts], [1] * len(rows), 0
    while any(len(s) - len(p) < count for s, p in zip(sequences, prompts, strict=True)):
        tokens = [draft(i, s) for i, s in enumerate(sequences)]
        scores = torch.zeros(len(rows), 1 + len(parents), VOCAB)
        for i, sequence in enumerate(sequences):
            for j, path in enumerate(paths(tokens[i], parents)):
                scores[i, j] = base.scores([*sequence, *path])
        options = dict(drafts=make_drafts(tokens, [parents] * len(rows)), verify="same_draws", drawn=MOST_LIKELY)
        output = engine.decode(rows, sequences, scores.flatten(0, 1), min_p=0.02, new=new, **options)
        new = output.verified.lens.tolist()
        for i, sequence in enumerate(sequences):
            nodes, accepted = (x[i, : new[i]].tolist() for x in (output.verified.nodes, output.verified.tokens))
            assert nodes[0] == 0
            assert [paths(tokens[i], parents)[n] for n in nodes] == [accepted[:j] for j in range(new[i])]
            sequence += accepted
        steps += 1
    assert not step.table.columns.faults.any()
    return [s[len(p) : len(p) + count] for s, p in zip(sequences, prompts, strict=True)], steps
