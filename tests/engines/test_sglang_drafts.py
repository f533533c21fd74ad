"""Drafts of SGLang's speculative decoding in the plugin, tested without a server. Skipped without SGLang."""

import math
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang", reason="needs SGLang: make test-sglang")

from lenvm_kernels.engines.one_token import leave_only
from lenvm_kernels.engines.sglang.drafts import apply_changes, drafts_of, parents_of, without_changes
from lenvm_kernels.ops.verify_drafts import verify_drafts
from lenvm_kernels.types import Drafts

# Parents of nodes, -1 for the root. Children of the root are 1, 3 and 4; of node 1, 2 and 5; of node 4, 6.
TREE = [-1, 0, 1, 0, 0, 1, 4]
CHAIN = [-1, 0, 1, 2, 3, 4, 5]
STAR = [-1, 0, 0, 0, 0, 0, 0]


def links(parents):
    """(first child, next sibling) of each node."""
    children, siblings = [-1] * len(parents), [-1] * len(parents)
    for node in reversed(range(1, len(parents))):
        siblings[node], children[parents[node]] = children[parents[node]], node
    return children, siblings


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_parents_of_links(dtype):
    trees = [TREE, STAR, CHAIN]
    children, siblings = (torch.tensor(x, dtype=dtype) for x in zip(*map(links, trees), strict=True))
    found = parents_of(children, siblings)
    assert found.dtype == torch.int32
    assert found.tolist() == [[max(parent - 1, -1) for parent in tree] for tree in trees]
    assert parents_of(children[:, :1] * 0 - 1, siblings[:, :1] * 0 - 1).tolist() == [[-1]] * 3


def test_drafts_of_a_batch():
    children, siblings = (torch.tensor(x) for x in zip(*map(links, [CHAIN, TREE]), strict=True))
    tokens = torch.arange(20, 34)
    given = SimpleNamespace(
        draft_token=tokens, draft_token_num=7, retrieve_next_token=children, retrieve_next_sibling=siblings
    )
    drafts = drafts_of(given)
    assert drafts.token_ids.tolist() == [[21, 22, 23, 24, 25, 26], [28, 29, 30, 31, 32, 33]]
    assert drafts.parents.tolist() == [[-1, 0, 1, 2, 3, 4], [-1, 0, -1, -1, 0, 3]]


def test_only_drawn_tokens_are_left():
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    leave_only(logits, torch.tensor([8, -1, 0, 3], dtype=torch.int32))
    assert torch.equal(logits[1], before[1])
    for row, token in ((0, 8), (2, 0), (3, 3)):
        assert torch.softmax(logits[row], 0).tolist() == [float(i == token) for i in range(9)]
        # Penalties applied later do not change the result.
        assert (logits[row] * 1.3 - 0.7).argmax() == token and logits[row].isfinite().sum() == 1


def test_penalties_are_applied_once():
    additive, scaling = torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.0, 0.0]]), torch.tensor([[2.0, 1, 1], [1, 1, 4.0]])
    bias = torch.tensor([[0.0, 0.0, -math.inf], [0.0, 0.0, 0.0]])
    info = SimpleNamespace(acc_additive_penalties=additive, acc_scaling_penalties=scaling, logit_bias=bias)
    mask = SimpleNamespace(apply=lambda logits: logits[3].fill_(-math.inf))
    logits = torch.tensor([[4.0, 1.0, 0.0], [-4.0, 2.0, 0.0], [0.5, 1.0, 8.0], [0.5, 1.0, 8.0]])
    expected = [[2.0, 2.0, -math.inf], [-8.0, 3.0, -math.inf], [1.0, 1.0, 2.0], [-math.inf] * 3]
    apply_changes(logits, info, mask, 2)
    assert logits.tolist() == expected
    apply_changes(logits, without_changes(info), None, 2)
    assert logits.tolist() == expected and info.logit_bias is bias


def reject_or_accept(logits, drafts, links, threshold, generator):
    """Rejection sampling of one request's tree by its target probabilities alone, in place of the engine's kernel,
    which has no CPU build. Returns the accepted tokens."""
    probs, children, siblings = torch.softmax(logits, 1), *links
    tokens, node = [], 0
    while True:
        left, coin, accepted = probs[node].clone(), torch.rand((), generator=generator), 0.0
        child = children[node]
        while child >= 0:
            token = int(drafts[child])
            accepted += float(probs[node, token])
            if coin <= accepted / threshold:
                break
            left[token] = 0.0
            child = siblings[child]
        if child < 0:
            return [*tokens, int(torch.multinomial(left / left.sum(), 1, generator=generator))]
        tokens, node = [*tokens, int(drafts[child])], child


@pytest.mark.parametrize("threshold", [1.0, 0.6])
def test_engine_verification_accepts_exactly_the_drawn_tokens(threshold):
    """If logits leave only the drawn token, rejection sampling equals ``verify_drafts`` for any random numbers."""
    generator, vocabulary = torch.Generator().manual_seed(1), 5
    lens = set()
    for parents in (TREE, CHAIN, STAR) * 40:
        count = len(parents)
        draft_tokens = torch.randint(vocabulary, (count,), generator=generator)
        drawn = torch.randint(vocabulary, (count,), generator=generator).int()
        logits = torch.randn(count, vocabulary, generator=generator)
        leave_only(logits, drawn)
        children, siblings = links(parents)
        drafts = Drafts(draft_tokens[None, 1:], parents_of(*torch.tensor([[children], [siblings]]))[:, 1:])
        verified = verify_drafts(drawn, drafts)
        found = reject_or_accept(logits, draft_tokens, (children, siblings), threshold, generator)
        assert found == verified.tokens[0, : verified.lens[0]].tolist()
        lens.add(len(found))
    assert lens >= {1, 2, 3}
