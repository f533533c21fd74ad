"""``verify_drafts``: how far the draws follow the drafts, and which tokens the sequences grow by."""

import pytest
import torch
from hypothesis import given

from lenvm_kernels.fuzz.ops.verify_drafts import inputs
from lenvm_kernels.ops import verify_drafts as ops
from lenvm_kernels.ops.verify_drafts import verify_drafts
from lenvm_kernels.types import Drafts, VerifiedTokens
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


def random_draws(drafts, *, seed=0, tokens=5):
    """At most nodes one of the drafts that follow is drawn; at some nothing."""
    generator = torch.Generator().manual_seed(seed)
    requests, width = drafts.token_ids.shape
    drawn = torch.randint(-1, tokens, (requests, 1 + width), generator=generator)
    for row, found in enumerate(listed(drafts)):
        for token, node in found:
            if torch.rand(1, generator=generator) < 0.6:
                drawn[row, node] = token
    return drawn.flatten().int()


def lists(drawn, drafts):
    """The tokens, their number and their nodes, request by request."""
    requests, width = drafts.token_ids.shape
    fields = {name: [] for name in VerifiedTokens._fields}
    for draws, found in zip(drawn.view(requests, 1 + width).tolist(), listed(drafts), strict=True):
        path = []
        followers = [0]  # of where the path has come to
        while followers:
            node = followers[0]
            if draws[node] < 0:
                break
            path.append((draws[node], node))
            followers = [1 + j for j, child in enumerate(found) if child == (draws[node], node)]
        padding = [-1] * (1 + width - len(path))
        fields["tokens"].append([token for token, _ in path] + padding)
        fields["nodes"].append([node for _, node in path] + padding)
        fields["lens"].append(len(path))
    of_nodes = (requests, 1 + width)
    shapes = dict(tokens=of_nodes, lens=(requests,), nodes=of_nodes)
    return VerifiedTokens(*(i32(*fields[name]).view(shapes[name]) for name in VerifiedTokens._fields))


def assert_equal(verified, expected):
    for name, x, wanted in zip(VerifiedTokens._fields, verified, expected, strict=True):
        assert x.dtype == torch.int32 and torch.equal(x.cpu(), wanted), name


@given(cases("verify_drafts"))
def test_reference_matches_lists(case):
    arguments = inputs(case, torch.device("cpu")).arguments
    assert_equal(verify_drafts(**arguments, backend="reference"), lists(**arguments))


# Draws at the nodes, the drafts and their parents; then the tokens and their nodes.
PATHS = [
    ([5, 6, 7, 9], [5, 6, 7], [-1, 0, 1], [5, 6, 7, 9], [0, 1, 2, 3]),  # all were drawn
    ([5, 6, 8, 9], [5, 6, 7], [-1, 0, 1], [5, 6, 8], [0, 1, 2]),
    ([4, 6, 7, 9], [5, 6, 7], [-1, 0, 1], [4], [0]),  # the first was not
    ([5, -1, 7, 9], [5, 6, 7], [-1, 0, 1], [5], [0]),  # no draw after it
    ([-2, 6, 7, 9], [-2, 6, 7], [-1, 0, 1], [], []),
    ([-1, 6, 7, 9], [5, 6, 7], [-1, 0, 1], [], []),
    ([7, 1, 2, 6], [5, 6, 7], [-1, -1, -1], [7, 6], [0, 3]),  # siblings
    ([7, 9, 5, 6], [7, 7, 9], [-1, -1, 0], [7, 9, 6], [0, 1, 3]),  # the first of two equal ones
    ([7, 1, 9, 6], [7, 7, 9], [-1, -1, 1], [7, 1], [0, 1]),  # what follows the second is not reached
    ([3, 3, 3, 3], [3, 3, 3], [-1, 0, 1], [3, 3, 3, 3], [0, 1, 2, 3]),
    ([3, 3, 3, 8], [3, 4, 3], [-1, -1, 0], [3, 3, 8], [0, 1, 3]),
    ([4, 3, 0, 8], [3, 4, 0], [-1, -1, 1], [4, 0, 8], [0, 2, 3]),
    ([5, 6, 7, 9], [5, -1, 7], [-1, 0, 1], [5, 6], [0, 1]),  # a draft that is not there, and one after it
    ([7, 6, 7, 9], [5, -1, 7], [-1, 0, -1], [7], [0]),
    ([5, 6, 7, 9], [-1, 5, 6], [-1, -1, 1], [5], [0]),
    ([6, 9, 7, 8], [5, 6, 7], [-1, 1, 1], [6, 7, 8], [0, 2, 3]),  # itself is no parent,
    ([6, 9, 7, 8], [5, 6, 7], [-1, 2, 1], [6, 7, 8], [0, 2, 3]),  # nor is a later one,
    ([7, 9, 7, 8], [5, 6, 7], [-1, 0, LARGEST], [7, 8], [0, 3]),
    ([7, 9, 7, 8], [5, 6, 7], [-1, 0, -(2**31)], [7, 8], [0, 3]),
    ([LARGEST, 0, 7, 8], [LARGEST, 0, 7], [-2, 0, 1], [LARGEST, 0, 7, 8], [0, 1, 2, 3]),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("turn", range(3))
def test_what_follows_what_was_drawn(device, backend, dtype, turn):
    """In any order; one program has some of the requests."""
    order = torch.arange(len(PATHS)).roll(7 * turn).tolist()
    drawn, token_ids, parents, tokens, nodes = zip(*(PATHS[i] for i in order), strict=True)
    drafts = make_drafts(token_ids, parents, dtype=dtype, device=device)
    verified = verify_drafts(i32(*drawn).flatten().to(device), drafts, backend=backend)
    assert verified.lens.tolist() == [len(x) for x in tokens]
    assert verified.tokens.tolist() == [x + [-1] * (4 - len(x)) for x in tokens]
    assert verified.nodes.tolist() == [x + [-1] * (4 - len(x)) for x in nodes]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", range(1, 10))
def test_every_number_of_drafts(device, backend, width):
    """Chains that are drawn as far as to each of their drafts, and trees."""
    chains = torch.arange(10 * (width + 1) + 1)[1:].view(width + 1, 10)[:, :width]
    drawn = torch.cat([chains, torch.full((width + 1, 1), 999)], dim=1)
    for i in range(width + 1):  # the first i drafts of request i are drawn
        drawn[i, i] = 500 + i
    parents = torch.arange(-1, width - 1).expand(width + 1, -1)
    drafts = make_drafts(chains, parents, device=device)
    drawn = drawn.flatten().int().to(device)
    verified = verify_drafts(drawn, drafts, backend=backend)
    assert verified.lens.tolist() == list(range(1, width + 2))
    for i in range(width + 1):
        padding = [-1] * (width - i)
        assert verified.tokens[i].tolist() == [*chains[i, :i].tolist(), 500 + i, *padding]
        assert verified.nodes[i].tolist() == [*range(i + 1), *padding]

    drafts = random_drafts(21, width, seed=width, tokens=3)
    drawn = random_draws(drafts, tokens=3)
    on_device = Drafts(*(x.to(device) for x in drafts))
    assert_equal(verify_drafts(drawn.to(device), on_device, backend=backend), lists(drawn, drafts))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("requests", [0, 1, 7, 9, 23])
@pytest.mark.parametrize("requests_a_program", [1, 4, ops.REQUESTS])
def test_requests_of_several_programs(device, monkeypatch, backend, requests, requests_a_program):
    monkeypatch.setattr(ops, "REQUESTS", requests_a_program)
    drafts = random_drafts(requests, 3, device=device)
    drawn = random_draws(drafts).to(device)
    assert_equal(verify_drafts(drawn, drafts, backend=backend), lists(drawn, drafts))


@pytest.mark.parametrize("backend", BACKENDS)
def test_draws_in_a_longer_tensor(device, backend):
    drafts = random_drafts(9, 4, device=device)
    drawn = random_draws(drafts).to(device)
    memory = torch.cat([drawn[-1:], drawn, drawn[:3]])
    assert_equal(verify_drafts(memory[1:-3], drafts, backend=backend), lists(drawn, drafts))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("negative", [-1, -(2**32), -(2**32) + 5, -(2**63)])
def test_any_negative_id_is_no_draft(device, backend, negative):
    """Also one whose low 32 bits are a token."""
    drafts = make_drafts([[4, negative, 3]], [[-1, 0, -1]], device=device)
    for first, second in ((4, 0), (4, 5), (3, 2)):
        drawn = i32(first, second, 2, 8).to(device)
        assert_equal(verify_drafts(drawn, drafts, backend=backend), lists(drawn, drafts))


def test_the_kernel_writes_its_results_and_nothing_else(device, monkeypatch):
    drafts = random_drafts(11, 4, device=device)
    drawn, margin, buffers, empty = random_draws(drafts).to(device), 64, [], torch.empty

    def guarded_empty(shape, *, dtype, device):
        size = torch.Size(shape).numel()
        buffers.append(empty(size + 2 * margin, dtype=dtype, device=device).fill_(-77))
        return buffers[-1][margin : margin + size].view(shape)

    monkeypatch.setattr(torch, "empty", guarded_empty)
    verified = verify_drafts(drawn, drafts, backend="triton")
    monkeypatch.undo()
    assert len(buffers) == 3
    assert all((x[:margin] == -77).all() and (x[-margin:] == -77).all() for x in buffers)
    assert_equal(verified, lists(drawn, drafts))


def test_no_number_of_requests_compiles_anything():
    assert variants("verify_drafts") == {"_verify_drafts_kernel": 1}
