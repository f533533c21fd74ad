"""Peers compute the same results as this package; a peer's package is replaced by its documented behaviour."""

import inspect
import itertools
import sys
import types

import pytest
import torch

from bench import peers
from lenvm_kernels.fuzz.ops.value_tree_attention import make_inputs
from lenvm_kernels.reference.topk_candidates import topk_candidates
from lenvm_kernels.reference.value_head import value_head
from lenvm_kernels.reference.value_tree_attention import value_tree_attention

# Numbers of cached tokens, delta tokens and candidates, per request.
RAGGED, EQUAL = ([5, 70, 0, 9, 0], [1, 3, 0, 0, 4], [5, 0, 2, 3, 1]), ([11] * 3, [2] * 3, [3] * 3)


def make_tree(requests):
    return peers.Tree(*list(vars(make_inputs(*requests, q_heads=6, kv_heads=2, head_dim=16)).values())[:10])


def attend(q, k, v, visible):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("mhd,nhd->hmn", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("hmn,nhd->mhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v)


class PagedPrefill:
    """FlashInfer's wrapper, as documented."""

    def __init__(self, float_workspace_buffer, kv_layout, backend):
        assert kv_layout == "NHD" and backend == "fa2"

    def plan(self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, *, custom_mask, **sizes):
        assert sizes["page_size"] == 1 and (paged_kv_last_page_len == 1).all()
        self.requests, end = [], 0
        for (first, last), (page, stop) in zip(*map(itertools.pairwise, (qo_indptr, paged_kv_indptr)), strict=True):
            size = (last - first) * (stop - page)
            mask, end = custom_mask[end : end + size].view(last - first, stop - page), end + size
            self.requests.append((slice(first, last), paged_kv_indices[page:stop].long(), mask))
        assert end == len(custom_mask)

    def run(self, q, paged_kv_cache, *, out):
        for rows, pages, mask in self.requests:
            out[rows] = attend(q[rows], *(x[pages, 0] for x in paged_kv_cache), mask)
        return out


def extend_attention_fwd(
    q, k, v, out, k_buffer, v_buffer, q_offsets, kv_offsets, slots, masks, causal, mask_offsets, *_
):
    """SGLang's kernel, as documented: a row of the mask has a column per cached token, which is not read."""
    assert causal
    for i, (start, end) in enumerate(itertools.pairwise(q_offsets.tolist())):
        cached = slots[kv_offsets[i] : kv_offsets[i + 1]]
        mask = masks[mask_offsets[i] : mask_offsets[i + 1]].view(end - start, -1).clone()
        mask[:, : len(cached)] = True
        out[start:end] = attend(
            q[start:end], torch.cat([k_buffer[cached], k[start:end]]), torch.cat([v_buffer[cached], v[start:end]]), mask
        )


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("name", "requests"),
    [(name, r) for name in ("flashinfer", "sglang") for r in (RAGGED, EQUAL)] + [("flex", EQUAL)],
)
def test_attention_masks_describe_the_tree(name, requests, monkeypatch):
    functions = dict(BatchPrefillWithPagedKVCacheWrapper=PagedPrefill, extend_attention_fwd=extend_attention_fwd)
    path = itertools.accumulate(["sglang", "kernels", "ops", "attention", "extend_attention"], "{}.{}".format)
    for package in ("flashinfer", *path):
        monkeypatch.setitem(sys.modules, package, types.SimpleNamespace(**functions))
    tree = make_tree(requests)
    run = getattr(peers, f"{name}_attention")(*tree)
    torch.testing.assert_close(run(), value_tree_attention(*tree), rtol=1e-5, atol=1e-6)


def test_flex_attention_rejects_requests_of_several_lengths():
    with pytest.raises(ValueError, match=r"requests must have one \(cached, new, delta\), got .*\(5, 6, 1\)"):
        peers.flex_attention(*make_tree(RAGGED))


def test_torch_topk_and_head():
    scores, ones, top_k = torch.randn(3, 400), torch.ones(3), torch.full((3,), 8, dtype=torch.int32)
    probs, token_ids = peers.torch_topk(scores, 8)()
    options = dict.fromkeys(inspect.signature(topk_candidates).parameters.keys() - {"scores"})
    options |= dict(top_k=top_k, top_p=ones, min_p=0 * ones, max_candidates=8, is_logits=True)
    ours = topk_candidates(scores, **options)
    torch.testing.assert_close((probs, token_ids.int()), (ours.probs, ours.token_ids))
    head = [torch.randn(shape) for shape in ((5, 24), (24, 24), (24,), (1, 24), (1,))]
    torch.testing.assert_close(peers.unfused_head(*head)(), value_head(*head))
