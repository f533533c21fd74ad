"""Other implementations of the operators, measured in the same run.

A function takes the tensors of an operator, prepares what the peer requires, and returns ``run``, one call of the peer.
Preparation is not timed. A peer's package is imported in its function; the harness records exceptions as results.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lenvm_kernels.reference.value_tree_attention import tree_mask

Run = Callable[[], object]
WORKSPACE_BYTES = 256 * 2**20  # FlashInfer recommends 128 MiB; large batches with split prefixes need more


def torch_topk(scores: Tensor, top_k: int) -> Run:
    """Softmax in fp32, then ``torch.topk``. Returns (probabilities fp32, token ids int64), both ``[B, top_k]``."""
    return lambda: torch.softmax(scores, dim=-1, dtype=torch.float32).topk(top_k)


def flashinfer_topk(scores: Tensor, top_k: int) -> Run:
    """``flashinfer.top_k``: deterministic, sorted, ties to the lower token id. No softmax, no top-p or min-p."""
    import flashinfer

    return lambda: flashinfer.top_k(scores, top_k, sorted=True, deterministic=True, tie_break=1)


def flag_gems_topk(scores: Tensor, top_k: int) -> Run:
    """FlagGems' top-k (Triton). No softmax, no top-p or min-p; ties in any order."""
    from flag_gems.ops.topk import topk

    return lambda: topk(scores, top_k)


def flashinfer_sample(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Run:
    """FlashInfer's top-k, top-p sampler. Returns token ids int32 ``[B]``. The generator is not this package's."""
    from flashinfer.sampling import top_k_top_p_sampling_from_logits as sample

    # Tensors, because a CUDA graph cannot contain the host's generator. Each call uses the same random numbers.
    seed, offset = torch.zeros(2, 1, dtype=torch.int64, device=logits.device)
    return lambda: sample(logits, top_k, top_p, seed=seed, offset=offset)


def vllm_filter(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Run:
    """vLLM's Triton filter, Qrita (arXiv 2602.01518): fp32 logits with -inf outside of top-k and top-p.

    The filter works in place, so each call copies the logits first; the time includes the copy.
    """
    from vllm.v1.sample.ops.topk_topp_triton import apply_top_k_top_p_triton as apply

    filtered = torch.empty_like(logits, memory_format=torch.contiguous_format)
    return lambda: apply(filtered.copy_(logits), top_k, top_p)


def unfused_head(hidden: Tensor, fc: Tensor, fc_bias: Tensor, summary: Tensor, summary_bias: Tensor) -> Run:
    """cuBLAS, SiLU and a matrix-vector product. Returns logits ``[T]``, rounded to the dtype of the weights."""
    return lambda: F.linear(F.silu(F.linear(hidden, fc, fc_bias)), summary, summary_bias).squeeze(-1)


class Tree(NamedTuple):
    """The tensors of ``value_tree_attention`` in its order, with pages of one token and without parents."""

    q: Tensor  # [T, Hq, D]
    k_new: Tensor  # [T, Hkv, D]
    v_new: Tensor  # [T, Hkv, D]
    k_cache: Tensor  # [S, Hkv, D]
    v_cache: Tensor  # [S, Hkv, D]
    slot_table: Tensor  # int32 [R, longest]
    table_rows: Tensor  # int32|int64 [B]
    cached_lens: Tensor  # int32 [B]
    q_offsets: Tensor  # int32 [B + 1]
    candidate_lens: Tensor  # int32 [B]

    def requests(self) -> list[tuple[Tensor, int, int, int]]:
        """Per request: slots of its cached tokens int64, first and last row of q, number of delta tokens."""
        rows, cached, offsets, candidates = (x.tolist() for x in self[6:])
        ends = zip(rows, cached, offsets, offsets[1:], candidates, strict=False)
        return [(self.slot_table[r, :c].long(), start, end, end - start - n) for r, c, start, end, n in ends]

    def masks(self) -> Tensor:
        """bool, per request ``[new, cached + new]``, flattened and concatenated."""
        masks = [tree_mask(len(s), d, end - start - d, [], self.q.device) for s, start, end, d in self.requests()]
        return torch.cat([mask.flatten() for mask in masks])


def flashinfer_attention(*tensors: Tensor) -> Run:
    """FlashInfer's paged prefill with the tree as a custom mask. Returns ``[T, Hq, D]``.

    Not timed: the mask, the plan, and the copy of new keys and values into the cache, which FlashInfer requires.
    """
    import flashinfer

    tree = Tree(*tensors)
    q, slots = tree.q, len(tree.k_cache)
    pages = [
        torch.cat([s, torch.arange(slots + start, slots + end, device=q.device)])
        for s, start, end, _ in tree.requests()
    ]
    offsets = F.pad((tree.cached_lens + tree.q_offsets.diff()).cumsum(0), (1, 0)).int()
    pools = ((tree.k_cache, tree.k_new), (tree.v_cache, tree.v_new))
    cache = tuple(torch.cat(pair).unsqueeze(1) for pair in pools)  # [S + T, 1 token per page, Hkv, D]
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
    wrapper.plan(
        tree.q_offsets,
        offsets,
        torch.cat(pages).int(),
        torch.ones_like(tree.cached_lens),  # tokens in the last page of each request
        num_qo_heads=q.shape[1],
        num_kv_heads=tree.k_new.shape[1],
        head_dim_qk=q.shape[2],
        page_size=1,
        custom_mask=tree.masks(),
        q_data_type=q.dtype,
        kv_data_type=tree.k_cache.dtype,
    )
    out = torch.empty_like(q)
    return lambda: wrapper.run(q, cache, out=out)


def sglang_attention(*tensors: Tensor) -> Run:
    """SGLang's extend attention (Triton) with the tree as a custom mask, as its LenVM fork calls it.

    Returns ``[T, Hq, D]``. Not timed: the mask and the list of slots.
    """
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd as extend

    tree, out = Tree(*tensors), torch.empty_like(tensors[0])
    new = tree.q_offsets.diff().long()
    mask_offsets = F.pad((new * (tree.cached_lens + new)).cumsum(0), (1, 0))
    cached_offsets = F.pad(tree.cached_lens.cumsum(0), (1, 0)).int()
    slots = torch.cat([request[0] for request in tree.requests()])
    # is_causal: the mask is a part of the causal mask, so tiles above the diagonal are skipped.
    options = tree.masks(), True, mask_offsets, int(new.max()), 1.0, 1.0
    offsets = tree.q_offsets, cached_offsets, slots

    def run() -> Tensor:
        extend(tree.q, tree.k_new, tree.v_new, out, tree.k_cache, tree.v_cache, *offsets, *options)
        return out

    return run


def flex_attention(*tensors: Tensor) -> Run:
    """FlexAttention with a block mask, for requests of one length. Returns ``[T, Hq, D]``.

    Not timed: the block mask and the copy of each request's keys and values into one contiguous sequence.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    tree = Tree(*tensors)
    requests = tree.requests()
    lengths = {(len(slots), end - start, delta) for slots, start, end, delta in requests}
    if len(lengths) != 1:
        raise ValueError(f"requests must have one (cached, new, delta), got {sorted(lengths)}")
    ((cached, new, delta),) = lengths

    def is_visible(batch, head, row, column):
        column = column - cached
        return (column < 0) | ((column < delta) & (column <= row)) | (column == row)

    def gather(cache: Tensor, new_rows: Tensor) -> Tensor:  # [B, Hkv, cached + new, D]
        sequences = [torch.cat([cache[slots], new_rows[start:end]]) for slots, start, end, _ in requests]
        return torch.stack(sequences).transpose(1, 2).contiguous()

    block_mask = create_block_mask(is_visible, None, None, new, cached + new, device=tree.q.device)
    q = tree.q.unflatten(0, (len(requests), new)).transpose(1, 2)  # [B, Hq, new, D]
    k, v = gather(tree.k_cache, tree.k_new), gather(tree.v_cache, tree.v_new)
    attend = torch.compile(flex_attention, dynamic=False) if q.is_cuda else flex_attention
    return lambda: attend(q, k, v, block_mask=block_mask, enable_gqa=True).transpose(1, 2).flatten(0, 1)
