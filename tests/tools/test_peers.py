"""Peers compute the same results as this package; packages of peers are replaced by their documented behaviour."""

import pytest
import torch

from bench import peers
from lenvm_kernels.fuzz.ops.value_tree_attention import make_inputs
from lenvm_kernels.ops.topk_candidates import topk_candidates
from lenvm_kernels.ops.value_tree_attention import value_tree_attention

# Numbers of cached tokens, delta tokens and candidates, per request.
RAGGED, EQUAL = ([5, 70, 0, 9, 0], [1, 3, 0, 0, 4], [5, 0, 2, 3, 1]), ([11] * 3, [2] * 3, [3] * 3)


def make_tree(requests):
    return peers.Tree(*list(vars(make_inputs(*requests, q_heads=6, kv_heads=2, head_dim=16)).values())[:10])


def attend(q, k, v, visible):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("mhd,nhd->hmn", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("hmn,nhd->mhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("requests", [RAGGED, EQUAL])
def test_masks_describe_the_tree(requests):
    """As read by FlashInfer's and SGLang's attention: per request, new rows by cached and new tokens."""
    tree = make_tree(requests)
    masks, found = tree.masks(), []
    for slots, start, end, _ in tree.requests():
        keys, values = (torch.cat([x[slots], new[start:end]]) for x, new in zip(tree[3:5], tree[1:3], strict=True))
        size = (end - start) * len(keys)
        found.append(attend(tree.q[start:end], keys, values, masks[:size].view(-1, len(keys))))
        masks = masks[size:]
    assert not len(masks)
    torch.testing.assert_close(torch.cat(found), value_tree_attention(*tree), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention():
    tree = make_tree(EQUAL)
    torch.testing.assert_close(peers.flex_attention(*tree)(), value_tree_attention(*tree), rtol=1e-5, atol=1e-6)


def test_torch_topk():
    scores = torch.randn(3, 400)
    probs, token_ids = peers.torch_topk(scores, 8)()
    ours = topk_candidates(scores, top_k=8, top_p=1.0, min_p=0.0, is_logits=True, max_candidates=8)
    torch.testing.assert_close((probs, token_ids.int()), (ours.probs, ours.token_ids))
