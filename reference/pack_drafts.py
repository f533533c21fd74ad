"""One tree per request of its drafts and the scored candidates of all nodes, in plain PyTorch."""

import torch

from lenvm_kernels.reference._common import tidy_drafts
from lenvm_kernels.types import CandidateTrees, Drafts, ScoredCandidates


def pack_drafts(scored: ScoredCandidates, drafts: Drafts, out: CandidateTrees) -> None:
    """See :func:`lenvm_kernels.ops.pack_drafts.pack_drafts`."""
    width = drafts.token_ids.shape[1]
    draft_ids, draft_parents = tidy_drafts(drafts, len(out.counts))
    for x in (out.token_ids, out.parents, out.columns):
        x.fill_(-1)
    out.counts.zero_()
    out.positions.copy_(scored.positions[:: 1 + width])
    ids, counts = scored.token_ids.tolist(), scored.counts.tolist()
    all_drafts = [list(zip(*x, strict=True)) for x in zip(draft_ids.tolist(), draft_parents.tolist(), strict=True)]
    for row, drafted in enumerate(all_drafts):
        nodes = range(row * (1 + width), (row + 1) * (1 + width))
        if not any(counts[node] for node in nodes):
            continue
        tree = [(token, parent) for token, parent in drafted if token >= 0]
        for node in nodes:
            for k, token in enumerate(ids[node][: counts[node]]):
                entry = (token, node - nodes[0] - 1)
                if entry not in drafted:
                    tree.append(entry)
                out.columns[node, k] = drafted.index(entry) if entry in drafted else len(tree) - 1
        out.counts[row] = len(tree)
        out.token_ids[row, : len(tree)], out.parents[row, : len(tree)] = torch.tensor(tree, dtype=torch.int32).T
