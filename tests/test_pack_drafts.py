"""``pack_drafts``: which columns a tree has, in what order, and where the candidates are in it."""

import pytest
import torch
from hypothesis import given

from lenvm_kernels.fuzz.ops.pack_drafts import inputs
from lenvm_kernels.ops.pack_drafts import empty_trees, pack_drafts, tree_columns
from lenvm_kernels.types import CandidateTrees, Drafts, ScoredCandidates
from tests.helpers.cases import cases
from tests.helpers.drafts import (
    BACKENDS,
    LARGEST,
    i32,
    listed,
    make_drafts,
    random_drafts,
    variants,
)


def make_scored(token_ids, counts, *, positions=None, device="cpu"):
    """Of the nodes of all requests. Their positions go down; no two are equal."""
    nodes = len(counts)
    positions = i32(*range(100 + nodes, 100, -1)) if positions is None else i32(*positions)
    fields = (torch.as_tensor(token_ids, dtype=torch.int32), i32(*counts), positions, torch.arange(nodes) % 2 == 0)
    return ScoredCandidates(*(x.to(device) for x in fields))


def random_scored(rows, drafts, columns, *, seed=0, tokens=9, device="cpu"):
    """Of nodes that are there, different candidates out of few tokens, beside numbers that are none."""
    generator = torch.Generator().manual_seed(seed)
    tokens = max(tokens, columns)
    nodes = 1 + drafts.token_ids.shape[1]
    counts = torch.randint(0, columns + 1, (rows, nodes), generator=generator)
    counts[torch.rand(rows, generator=generator) < 0.2] = 0
    present = listed(drafts) + [[]] * (rows - len(drafts.token_ids))
    for row, found in enumerate(present):
        counts[row, 1 + len(found) :] = 0
    ids = [torch.randperm(tokens, generator=generator)[:columns] for _ in range(rows * nodes)]
    return make_scored(torch.stack(ids) if ids else torch.empty(0, columns), counts.flatten().tolist(), device=device)


def lists(scored, drafts):
    """The trees, column by column."""
    requests, width = drafts.token_ids.shape
    nodes, k = 1 + width, scored.token_ids.shape[1]
    size, present = width + nodes * k, listed(drafts)
    fields = {name: [] for name in CandidateTrees._fields}
    for i in range(len(scored.counts) // nodes):
        counts = scored.counts[i * nodes : (i + 1) * nodes].tolist()
        tokens, parents, first = [], [], {}  # the first column of each token below each node
        for token, parent_node in present[i] if i < requests and sum(counts) else []:
            first.setdefault((parent_node, token), len(tokens))
            tokens.append(token)
            parents.append(parent_node - 1)
        of_drafts = dict(first)
        for node, count in enumerate(counts):
            candidates, columns = scored.token_ids[i * nodes + node].tolist(), [-1] * k
            for j in range(count):
                columns[j] = of_drafts.get((node, candidates[j]), len(tokens))
                if columns[j] == len(tokens):
                    tokens.append(candidates[j])
                    parents.append(node - 1)
            fields["columns"].append(columns)
        fields["counts"].append(len(tokens))
        fields["positions"].append(scored.positions[i * nodes].item())
        fields["token_ids"].append(tokens + [-1] * (size - len(tokens)))
        fields["parents"].append(parents + [-1] * (size - len(parents)))
    empty = empty_trees(len(fields["counts"]), width, k, torch.device("cpu"))
    return CandidateTrees(*(torch.tensor(fields[n], dtype=x.dtype).view(x.shape) for n, x in empty._asdict().items()))


def assert_equal(trees, expected):
    for name, x, wanted in zip(CandidateTrees._fields, trees, expected, strict=True):
        assert x.dtype == wanted.dtype and torch.equal(x.cpu(), wanted), name


@given(cases("pack_drafts"))
def test_reference_matches_lists(case):
    arguments = inputs(case, torch.device("cpu")).arguments
    out = arguments.pop("out", None)
    found = pack_drafts(**arguments, out=out, backend="reference")
    assert_equal(found, lists(**arguments))
    assert out is None or found is out


@pytest.mark.parametrize("backend", BACKENDS)
def test_drafts_then_candidates(device, backend):
    """A tree with equal siblings, a chain that ends, a request of which nothing is scored, and one without drafts.

    Beside the candidates are drafts of other nodes, and drafts in columns that do not count.
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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("node", range(4))
def test_one_candidate_anywhere_takes_all_drafts(device, backend, node):
    """Of the middle one of three requests; the others have nothing scored."""
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


@pytest.mark.parametrize("backend", BACKENDS)
def test_of_equal_siblings_the_first_takes_the_candidate(device, backend):
    """Those of other parents do not."""
    drafts = make_drafts([[7, 7, 7, 7, 7]], [[-1, 0, 0, -1, 2]], device=device)
    scored = make_scored([[2, 7]] * 6, [2] * 6, device=device)
    trees = pack_drafts(scored, drafts, backend=backend)
    assert trees.columns.tolist() == [[5, 0], [6, 1], [7, 8], [9, 4], [10, 11], [12, 13]]
    assert trees.parents.tolist() == [[-1, 0, 0, -1, 2, -1, 0, 1, 1, 2, 3, 3, 4, 4, -1, -1, -1]]
    assert trees.token_ids.tolist() == [[7, 7, 7, 7, 7, 2, 2, 2, 7, 2, 2, 7, 2, 7, -1, -1, -1]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("parent", [-1, -2, -(2**31), 2, 3, 4, LARGEST])
def test_what_is_no_earlier_draft_is_no_parent(device, backend, parent):
    """Of the third draft: itself, later ones and none. It takes the candidate after the sequence."""
    drafts = make_drafts([[5, 6, 8, 9]], [[-1, 0, parent, 2]], device=device)
    trees = pack_drafts(make_scored([[8]] * 5, [1] * 5, device=device), drafts, backend=backend)
    assert trees.columns.flatten().tolist() == [2, 4, 5, 6, 7]
    assert trees.parents.tolist() == [[-1, 0, -1, 2, 0, 1, 2, 3, -1]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("columns", [1, 2, 4, 8])
@pytest.mark.parametrize("width", range(1, 10))
def test_every_number_of_drafts_and_candidates(device, backend, width, columns):
    rows = 3 if backend == "triton" else 9
    drafts = random_drafts(rows - 1, width, seed=width)
    scored = random_scored(rows, drafts, columns, seed=columns)
    expected = lists(scored, drafts)
    dtype = torch.int32 if columns % 3 == 1 else torch.int64
    drafts = Drafts(drafts.token_ids.to(device, dtype), drafts.parents.to(device))
    assert_equal(pack_drafts(ScoredCandidates(*(x.to(device) for x in scored)), drafts, backend=backend), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("columns", [16, 64])
def test_many_candidates(device, backend, columns):
    drafts = random_drafts(2, 4, tokens=columns)
    scored = random_scored(3, drafts, columns, tokens=columns + 9)
    expected = lists(scored, drafts)
    drafts, scored = Drafts(*(x.to(device) for x in drafts)), ScoredCandidates(*(x.to(device) for x in scored))
    assert_equal(pack_drafts(scored, drafts, backend=backend), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("rows", "with_drafts"), [(0, 0), (1, 0), (1, 1), (7, 2), (7, 7), (23, 10)])
def test_requests_with_and_without_drafts(device, backend, rows, with_drafts):
    drafts = random_drafts(with_drafts, 3, device=device)
    scored = random_scored(rows, drafts, 2, device=device)
    trees = pack_drafts(scored, drafts, backend=backend)
    assert_equal(trees, lists(scored, drafts))
    assert trees.token_ids.shape == (rows, tree_columns(3, 2)) == (rows, 11)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("negative", [-1, -(2**32), -(2**32) + 5, -(2**63)])
def test_any_negative_id_is_no_draft(device, backend, negative):
    """Also one whose low 32 bits are a token."""
    drafts = make_drafts([[4, negative, 3]], [[-1, 0, 1]], device=device)
    scored = make_scored([[5, 3], [0, 5], [9, 9], [9, 9]], [2, 2, 0, 0], device=device)
    assert_equal(pack_drafts(scored, drafts, backend=backend), lists(scored, drafts))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("node", range(3))
def test_a_draft_after_one_that_is_not_there_takes_no_candidate(device, backend, node):
    """Though it is a candidate of the node that it says it follows."""
    drafts = make_drafts([[4, 6, -1, 7, 8]], [[-1, 0, 0, node - 1, -1]], device=device)
    counts = [int(i == node) for i in range(6)]
    trees = pack_drafts(make_scored([[7, 8]] * 6, counts, device=device), drafts, backend=backend)
    assert trees.counts.tolist() == [3]
    assert trees.token_ids.tolist() == [[4, 6, 7, *[-1] * 14]]
    assert trees.parents.tolist() == [[-1, 0, node - 1, *[-1] * 14]]
    assert trees.columns.tolist() == [[2 if i == node else -1, -1] for i in range(6)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_results_are_written_where_they_are_wanted(device, backend):
    """In slices of longer tensors, whose other numbers stay; every number of the slices is written."""
    drafts = random_drafts(4, 5, device=device)
    scored = random_scored(6, drafts, 4, device=device)
    memory = [torch.full((len(x) + 7, *x.shape[1:]), -77, dtype=x.dtype, device=device) for x in lists(scored, drafts)]
    out = CandidateTrees(*(x[3:-4] for x in memory))
    found = pack_drafts(scored, drafts, out=out, backend=backend)
    assert found is out
    assert_equal(found, lists(scored, drafts))
    assert all((x[:3] == -77).all() and (x[-4:] == -77).all() for x in memory)


def test_no_number_of_requests_compiles_anything():
    assert variants("pack_drafts") == {"_pack_drafts_kernel": 1}


def good_arguments():
    drafts = random_drafts(4, 2)
    return dict(scored=random_scored(5, drafts, 4), drafts=drafts, out=empty_trees(5, 2, 4, torch.device("cpu")))


def scored_with(token_ids):
    return good_arguments()["scored"]._replace(token_ids=token_ids)


def scored_of(nodes, columns=4):
    return make_scored([[0] * columns] * nodes, [0] * nodes)


IDS = good_arguments()["scored"].token_ids


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("scored", tuple(scored_of(15)), TypeError, "scored must be the ScoredCandidates of select_scored, got tuple"),
        ("scored", scored_with(IDS.tolist()), TypeError, r"scored.token_ids must be a tensor int32 .*, got list"),
        ("scored", scored_with(IDS.long()), ValueError, r"scored.token_ids must be int32 \[\*, \*\], got int64"),
        ("scored", scored_with(IDS[0]), ValueError, r"scored.token_ids must be int32 \[\*, \*\], got int32 \[4\]"),
        ("scored", scored_with(IDS[:-1]), ValueError, r"scored.counts must be int32 \[14\] on cpu, got int32 \[15\]"),
        (
            "scored",
            scored_with(torch.stack([IDS, IDS], dim=-1)[..., 0]),
            ValueError,
            "scored.token_ids must be contiguous in its last dimension, got strides",
        ),
        (
            "scored",
            scored_with(torch.cat([IDS, IDS], dim=1)[:, :4]),
            ValueError,
            r"scored.token_ids must be contiguous, got strides \(8, 1\)",
        ),
        *(
            (
                "scored",
                scored_of(15, columns),
                ValueError,
                f"scored.token_ids must have a power of two up to 64 columns, got {columns}",
            )
            for columns in (0, 3, 6, 128)
        ),
        ("scored", scored_of(14), ValueError, r"scored must have 1 \+ 2 rows a request for at least the 4 .*, got 14"),
        ("scored", scored_of(16), ValueError, r"scored must have 1 \+ 2 rows a request for at least the 4 .*, got 16"),
        ("scored", scored_of(9), ValueError, r"scored must have 1 \+ 2 rows a request for at least the 4 .*, got 9"),
        ("scored", scored_of(18), ValueError, r"out.token_ids must be int32 \[6, 14\] on cpu, got int32 \[5, 14\]"),
        ("out", tuple(empty_trees(5, 2, 4, "cpu")), TypeError, "out must be CandidateTrees, got tuple"),
        (
            "out",
            empty_trees(5, 3, 4, "cpu"),
            ValueError,
            r"out.token_ids must be int32 \[5, 14\] on cpu, got .* \[5, 19\]",
        ),
    ],
)
def test_errors_name_the_argument(name, value, error, message):
    with pytest.raises(error, match=f"^{message}"):
        pack_drafts(**good_arguments() | {name: value})
