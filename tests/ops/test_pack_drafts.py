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


@pytest.mark.parametrize("node", range(4))
def test_one_candidate_at_any_node_packs_all_drafts(device, backend, node):
    """The second of three requests has the candidate; the others have none."""
    drafts = make_drafts([[3, 2, 1]] * 3, [[-1, 0, -1]] * 3, device=device)
    counts = [0] * 12
    counts[4 + node] = 1
    scored = make_scored([[8, 3, 2, 1]] * 12, counts, device=device)
    trees = pack_drafts(scored, drafts, backend=backend)
    assert trees.counts.tolist() == [0, 4, 0]
    assert trees.token_ids[1].tolist() == [3, 2, 1, 8, *[-1] * 15]
    assert trees.parents[1].tolist() == [-1, 0, -1, node - 1, *[-1] * 15]
    assert trees.columns[4 + node].tolist() == [3, -1, -1, -1]
    assert (trees.token_ids[[0, 2]] == -1).all() and (trees.parents[[0, 2]] == -1).all()
    assert trees.columns.sum() == 3 - 47


def test_first_of_equal_siblings_takes_the_candidate(device, backend):
    """Equal drafts with other parents do not."""
    drafts = make_drafts([[7, 7, 7, 7, 7]], [[-1, 0, 0, -1, 2]], device=device)
    scored = make_scored([[2, 7]] * 6, [2] * 6, device=device)
    trees = pack_drafts(scored, drafts, backend=backend)
    assert trees.columns.tolist() == [[5, 0], [6, 1], [7, 8], [9, 4], [10, 11], [12, 13]]
    assert trees.parents.tolist() == [[-1, 0, 0, -1, 2, -1, 0, 1, 1, 2, 3, 3, 4, 4, -1, -1, -1]]
    assert trees.token_ids.tolist() == [[7, 7, 7, 7, 7, 2, 2, 2, 7, 2, 2, 7, 2, 7, -1, -1, -1]]


@pytest.mark.parametrize("parent", [-1, -2, -(2**31), 2, 3, 4, LARGEST])
def test_invalid_parents_count_as_the_root(device, backend, parent):
    """The third draft's parent is the root, itself, a later draft or out of range. It takes the root's candidate."""
    drafts = make_drafts([[5, 6, 8, 9]], [[-1, 0, parent, 2]], device=device)
    trees = pack_drafts(make_scored([[8]] * 5, [1] * 5, device=device), drafts, backend=backend)
    assert trees.columns.flatten().tolist() == [2, 4, 5, 6, 7]
    assert trees.parents.tolist() == [[-1, 0, -1, 2, 0, 1, 2, 3, -1]]


@pytest.mark.parametrize("node", range(3))
def test_draft_after_an_absent_draft_takes_no_candidate(device, backend, node):
    """The draft is a candidate of its parent nevertheless."""
    drafts = make_drafts([[4, 6, -1, 7, 8]], [[-1, 0, 0, node - 1, -1]], device=device)
    counts = [int(i == node) for i in range(6)]
    trees = pack_drafts(make_scored([[7, 8]] * 6, counts, device=device), drafts, backend=backend)
    assert trees.counts.tolist() == [3]
    assert trees.token_ids.tolist() == [[4, 6, 7, *[-1] * 14]]
    assert trees.parents.tolist() == [[-1, 0, node - 1, *[-1] * 14]]
    assert trees.columns.tolist() == [[2 if i == node else -1, -1] for i in range(6)]


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
