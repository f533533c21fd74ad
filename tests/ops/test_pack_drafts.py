"""``pack_drafts``: the columns of a tree, their order, and the columns of the candidates."""

import pytest
import torch

from lenvm_kernels.ops.pack_drafts import empty_trees, pack_drafts, tree_columns
from lenvm_kernels.types import ScoredCandidates
from tests.helpers.drafts import LARGEST, i32, make_drafts


def make_scored(token_ids, counts, *, positions=None, device="cpu"):
    """Scored candidates of all nodes. By default, positions decrease, so that no two are equal."""
    nodes = len(counts)
    positions = i32(*range(100 + nodes, 100, -1)) if positions is None else i32(*positions)
    fields = (torch.as_tensor(token_ids, dtype=torch.int32), i32(*counts), positions, torch.arange(nodes) % 2 == 0)
    return ScoredCandidates(*(x.to(device) for x in fields))


def test_drafts_come_before_candidates(device, backend):
    """A tree with equal siblings, a chain that ends, a request without scored candidates, and one without drafts.

    Some candidates equal drafts of other nodes, and some columns beyond the counts hold drafts.
    """
    drafts = make_drafts(
        [[6, 4, 6, 0], [9, 8, -1, 8], [5, 5, 5, 5]], [[-1, 0, -1, 1], [-1, -1, 1, 0], [-1, 0, 1, 2]], device=device
    )
    token_ids = [
        *([6, 7], [4, 6], [0, 9], [6, 4], [1, 2]),  # 6 at the root; 4, then 6 below the first 6; below 4: 0, 9
        *([8, 3], [9, 8], [1, 9], [7, 7], [7, 7]),
        *([5, 1], [5, 2], [5, 3], [5, 4], [5, 6]),
        *([5, LARGEST], [9, 9], [9, 9], [9, 9], [9, 9]),
    ]
    counts = [*(2, 2, 1, 2, 2), *(2, 1, 2, 0, 0), *(0, 0, 0, 0, 0), *(2, 0, 0, 0, 0)]
    positions = [50 - i for i in range(20)]
    trees = pack_drafts(make_scored(token_ids, counts, positions=positions, device=device), drafts, backend=backend)

    no = [-1]
    assert trees.token_ids.tolist() == [
        [6, 4, 6, 0, 7, 6, 6, 4, 1, 2, *no * 4],
        [9, 8, 3, 9, 1, 9, *no * 8],
        no * 14,
        [5, LARGEST, *no * 12],
    ]
    assert trees.parents.tolist() == [
        [-1, 0, -1, 1, -1, 0, 2, 2, 3, 3, *no * 4],
        [-1, -1, -1, 0, 1, 1, *no * 8],
        no * 14,
        no * 14,
    ]
    assert trees.counts.tolist() == [10, 6, 0, 2]
    assert trees.positions.tolist() == [50, 45, 40, 35]
    assert trees.columns.view(4, 10).tolist() == [
        [0, 4, 1, 5, 3, -1, 6, 7, 8, 9],
        [1, 2, 3, -1, 4, 5, *no * 4],
        no * 10,
        [0, 1, *no * 8],
    ]


# Drafts and their parents; the candidates of every node, and their number by node; then the tree's tokens and parents,
# and the columns of the candidates.
TREES = [
    # One candidate at any node packs all drafts.
    *(
        ([3, 2, 1], [-1, 0, -1], [8, 3], [int(i == node) for i in range(4)], [3, 2, 1, 8], [-1, 0, -1, node - 1],
         [[3, -1] if i == node else [-1, -1] for i in range(4)])
        for node in range(4)
    ),
    ([3, 2, 1], [-1, 0, -1], [8, 3], [0] * 4, [], [], [[-1, -1]] * 4),
    # The first of equal siblings takes the candidate; equal drafts with other parents do not.
    ([7] * 5, [-1, 0, 0, -1, 2], [2, 7], [2] * 6, [7, 7, 7, 7, 7, 2, 2, 2, 7, 2, 2, 7, 2, 7],
     [-1, 0, 0, -1, 2, -1, 0, 1, 1, 2, 3, 3, 4, 4], [[5, 0], [6, 1], [7, 8], [9, 4], [10, 11], [12, 13]]),
    # The third draft's parent is the root, itself, a later draft or out of range. It takes the root's candidate.
    *(
        ([5, 6, 8, 9], [-1, 0, parent, 2], [8], [1] * 5, [5, 6, 8, 9, 8, 8, 8, 8], [-1, 0, -1, 2, 0, 1, 2, 3],
         [[2], [4], [5], [6], [7]])
        for parent in (-1, -2, -(2**31), 2, 3, 4, LARGEST)
    ),
    # A draft after an absent draft is a candidate of its parent.
    *(
        ([4, 6, -1, 7, 8], [-1, 0, 0, node - 1, -1], [7, 8], [int(i == node) for i in range(6)], [4, 6, 7],
         [-1, 0, node - 1], [[2, -1] if i == node else [-1, -1] for i in range(6)])
        for node in range(3)
    ),
]  # fmt: skip


@pytest.mark.parametrize(("drafts", "draft_parents", "candidates", "counts", "token_ids", "parents", "columns"), TREES)
def test_trees_by_hand(device, backend, drafts, draft_parents, candidates, counts, token_ids, parents, columns):
    """The second of two requests; the first has no candidates."""
    nodes, width = len(counts), tree_columns(len(drafts), len(candidates))
    scored = make_scored([candidates] * 2 * nodes, [0] * nodes + counts, device=device)
    trees = pack_drafts(scored, make_drafts([drafts] * 2, [draft_parents] * 2, device=device), backend=backend)
    assert trees.counts.tolist() == [0, len(token_ids)]
    assert trees.token_ids.tolist() == [[-1] * width, token_ids + [-1] * (width - len(token_ids))]
    assert trees.parents.tolist() == [[-1] * width, parents + [-1] * (width - len(parents))]
    assert trees.columns.tolist() == [[-1] * len(candidates)] * nodes + columns


@pytest.mark.parametrize("columns", [16, 64])
def test_many_candidates(device, backend, columns):
    """Two nodes; the draft is the last candidate of the first node."""
    token_ids = torch.arange(2 * columns).view(2, columns)
    drafts = make_drafts([[columns - 1]], [[-1]], device=device)
    scored, trees = make_scored(token_ids, [columns] * 2, device=device), empty_trees(1, 1, columns, device)
    assert pack_drafts(scored, drafts, out=trees, backend=backend) is trees
    assert trees.columns.flatten().tolist() == [*range(1, columns), 0, *range(columns, 2 * columns)]
    assert trees.token_ids.tolist() == [[columns - 1, *range(columns - 1), *range(columns, 2 * columns), -1]]
    assert trees.parents.tolist() == [[-1] * columns + [0] * columns + [-1]]
    assert trees.counts.tolist() == [2 * columns] and trees.token_ids.shape[1] == tree_columns(1, columns)
