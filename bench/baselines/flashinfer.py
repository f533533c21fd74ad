"""FlashInfer: its deterministic top-k, its sampler, and its paged attention with two ways of saying our mask.

FlashInfer compiles its kernels with nvcc when they are first called, which takes a minute or more. No benchmark waits
for it: ``python -m bench.baselines.flashinfer [KERNELS ...]`` compiles ahead, and what is not compiled is absent. What
is compiled, and why what fails does, stays in ``build/peers``.
"""

import os
import re
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from bench.baselines import Absent, Run, Tree, describe, load, require_cuda, require_dtype
from bench.harness import flags

KERNELS = ("top_k", "sampling", "attention-fa2-bfloat16-128", "attention-fa2-bfloat16-64")
# Attention has more than those: other dtypes and head dimensions are compiled when they are named. fa2 packs the query
# heads of a group into a tile, and splits long prefixes over programs; FlashInfer's fa3 does neither.
KNOWN = re.compile(r"top_k|sampling|attention-fa2-(bfloat16|float16)-[1-9]\d*")
# FlashInfer's own recommendation is 128 MiB; a large batch whose prefixes are split over programs needs more.
WORKSPACE_BYTES = 256 * 2**20

COMPILED = Path(__file__).resolve().parents[2] / "build" / "peers"
# A file for each of the kernels that were compiled: empty, or why that failed.
OUTCOMES = COMPILED / "flashinfer-kernels"
os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", str(COMPILED))  # so that both are kept, or deleted, together


def topk_candidates(scores: torch.Tensor, top_k: int) -> Run:
    """``top_k``, deterministic, ties to the lower token id, sorted: the same tokens in the same order as ours.

    ``run`` returns (scores ``[B, top_k]``, token ids int64 ``[B, top_k]``). Only the selection: no softmax, no top-p or
    min-p.

    Args:
        scores: ``[B, V]``, fp32, bf16 or fp16.
        top_k: candidates of every row.

    Raises:
        Absent: FlashInfer is not there or not compiled, or no GPU.
    """
    require_cuda(scores)
    _require_compiled("top_k")
    return _topk_candidates(scores, top_k)


def _topk_candidates(scores: torch.Tensor, top_k: int) -> Run:
    select = load("flashinfer").top_k
    return lambda: select(scores, top_k, sorted=True, deterministic=True, tie_break=1)  # 1: the lower index


def top_k_top_p_sample(logits: torch.Tensor, top_k: torch.Tensor | int, top_p: torch.Tensor) -> Run:
    """``top_k_top_p_sampling_from_logits``; ``run`` returns token ids int32 ``[B]``.

    An int for ``top_k`` takes FlashInfer's fast path, which draws among the row's top k; a tensor its general one,
    which masks the logits and writes their softmax. Its draws are not ours: another generator, and one seed a call.

    Args:
        logits: fp32 ``[B, V]``.
        top_k: int32 ``[B]``, or one for every row.
        top_p: fp32 ``[B]``.

    Raises:
        Absent: FlashInfer is not there or not compiled, no GPU, or logits in another dtype.
    """
    require_cuda(logits)
    require_dtype(logits, torch.float32)
    _require_compiled("sampling")
    return _top_k_top_p_sample(logits, top_k, top_p)


def _top_k_top_p_sample(logits: torch.Tensor, top_k: torch.Tensor | int, top_p: torch.Tensor) -> Run:
    sample = load("flashinfer").sampling.top_k_top_p_sampling_from_logits
    # Tensors, as a CUDA graph cannot hold the host's generator. Every call draws with the same numbers.
    seed, offset = torch.zeros(2, 1, dtype=torch.int64, device=logits.device)
    return lambda: sample(logits, top_k, top_p, seed=seed, offset=offset)


def masked_attention(*args: torch.Tensor, **kwargs: torch.Tensor) -> Run:
    """Paged prefill with the tree as a custom mask; ``run`` returns ``[T, Hq, D]``, as ours.

    Not timed, though an engine does it in every step: building and packing the mask, planning, and writing new keys and
    values into the cache, where FlashInfer wants them.

    Args:
        args, kwargs: the tensors of :class:`~bench.baselines.Tree`, fp16 or bf16.

    Raises:
        Absent: FlashInfer is not there or not compiled, no GPU, another dtype, or a mask beyond 32-bit offsets.
    """
    tree = Tree(*args, **kwargs)
    _prepare_attention(tree)
    return _masked_attention(tree)


def _masked_attention(tree: Tree) -> Run:
    mask = tree.masks()
    if len(mask) >= 2**31:
        raise Absent(f"the masks have {len(mask)} entries, more than 32-bit offsets address")
    return _attention(tree, custom_mask=mask)


def multi_item_attention(*args: torch.Tensor, **kwargs: torch.Tensor) -> Run:
    """Paged prefill with multi-item scoring, which says our mask without building it; ``run`` returns ``[T, Hq, D]``.

    Items are what is scored side by side behind a shared prefix. Here the prefix is the cached and the delta tokens,
    and every candidate is an item of one token: exactly our mask. Not timed, though an engine does it in every step:
    planning, and writing new keys and values into the cache, where FlashInfer wants them.

    Args:
        args, kwargs: the tensors of :class:`~bench.baselines.Tree`, fp16 or bf16.

    Raises:
        Absent: FlashInfer is not there or not compiled, no GPU, or another dtype.
    """
    tree = Tree(*args, **kwargs)
    _prepare_attention(tree)
    return _multi_item_attention(tree)


def _multi_item_attention(tree: Tree) -> Run:
    requests, most = len(tree.candidate_lens), max(1, int(tree.candidate_lens.max()))
    ones = torch.ones(requests * most, dtype=torch.int16, device=tree.q.device).view(torch.uint16)
    return _attention(
        tree,
        # A token after the prefix sees the prefix and the last `position` tokens up to itself. Position 0 is for the
        # delimiters between items, which do not even see themselves; items need none between them.
        prefix_len_ptr=(tree.cached_lens + tree.q_offsets.diff() - tree.candidate_lens).view(torch.uint32),
        token_pos_in_items_ptr=ones,
        token_pos_in_items_len=most,
        max_item_len_ptr=ones[:requests],
    )


def _prepare_attention(tree: Tree) -> None:
    require_cuda(tree.q)
    require_dtype(tree.q, torch.bfloat16, torch.float16)
    _require_compiled(f"attention-fa2-{str(tree.q.dtype).removeprefix('torch.')}-{tree.q.shape[-1]}")


def _attention(tree: Tree, **mask: object) -> Run:
    """Plan paged prefill over a copy of the cache that holds the new keys and values too."""
    q, slots_before_new = tree.q, len(tree.k_cache)
    pages = [
        torch.cat([slots, torch.arange(slots_before_new + start, slots_before_new + end, device=q.device)])
        for slots, start, end, _ in tree.requests()
    ]
    page_offsets = F.pad((tree.cached_lens + tree.q_offsets.diff()).cumsum(0), (1, 0))
    cache = tuple(
        torch.cat(pair).unsqueeze(1) for pair in ((tree.k_cache, tree.k_new), (tree.v_cache, tree.v_new))
    )  # [S + T, 1 token a page, Hkv, D]
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
    wrapper = load("flashinfer").BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
    wrapper.plan(
        tree.q_offsets,
        page_offsets.int(),
        torch.cat(pages).int(),
        torch.ones_like(tree.cached_lens),  # tokens in each request's last page
        num_qo_heads=q.shape[1],
        num_kv_heads=tree.k_new.shape[1],
        head_dim_qk=q.shape[2],
        page_size=1,
        causal=True,  # both masks are parts of the causal one
        q_data_type=q.dtype,
        kv_data_type=tree.k_cache.dtype,
        **mask,
    )
    out = torch.empty_like(q)
    return lambda: wrapper.run(q, cache, out=out)


def _require_compiled(kernels: str) -> None:
    """Raise :class:`Absent` unless FlashInfer is there and some of its kernels are compiled."""
    load("flashinfer")
    outcome = OUTCOMES / kernels
    if reason := outcome.read_text() if outcome.exists() else f"python -m bench.baselines.flashinfer {kernels} does it":
        raise Absent(f"{kernels} is not compiled: {reason}")


def _call_once(kernels: str) -> None:
    """Call some of FlashInfer's kernels on next to nothing, so that it compiles them."""
    kind, *options = kernels.split("-")
    device = torch.device("cuda")
    # The vocabulary is above the 65,536 from which sampling has a fast path.
    scores, top_p = torch.randn(1, 100_000, device=device), torch.ones(1, device=device)
    if kind == "top_k":
        _topk_candidates(scores, 8)()
    elif kind == "sampling":
        for top_k in (8, torch.full((1,), 8, dtype=torch.int32, device=device)):
            _top_k_top_p_sample(scores, top_k, top_p)()
    else:
        dtype, head_dim = getattr(torch, options[1]), int(options[2])
        shapes = ((3, 2, head_dim), (3, 1, head_dim), (4, 1, head_dim))
        q, k, cache = (torch.randn(shape, dtype=dtype, device=device) for shape in shapes)
        integers = ([[0, 1, 2, 3]], [0], [4], [0, 3], [2])  # one request: 4 cached tokens, 1 delta token, 2 candidates
        i32 = (torch.tensor(values, dtype=torch.int32, device=device) for values in integers)
        tree = Tree(q, k, k, cache, cache, *i32)
        _multi_item_attention(tree)()
        _masked_attention(tree)()
    torch.cuda.synchronize()


def main() -> int:
    """Compile ahead."""
    parser = flags.parser(__doc__)
    parser.add_argument("kernels", nargs="*", metavar="KERNELS", help=f"default: {' '.join(KERNELS)}")
    args = parser.parse_args()
    if unknown := [kernels for kernels in args.kernels if not KNOWN.fullmatch(kernels)]:
        parser.error(f"kernels must be like one of {', '.join(KERNELS)}, got {', '.join(unknown)}")
    OUTCOMES.mkdir(parents=True, exist_ok=True)
    failed = False
    for kernels in args.kernels or KERNELS:
        start, reason = time.monotonic(), ""
        try:
            _call_once(kernels)
        except Absent as absence:  # not recorded: it may be installed before the next asks
            failed = True
            print(f"{kernels}: absent: {absence}", flush=True)
            continue
        except Exception as error:
            failed = True
            print(error, flush=True)
            # A compiler's first error says more than the end, or the beginning, of what ninja prints.
            reason = next((line for line in str(error).splitlines() if "error:" in line), describe(error))
        (OUTCOMES / kernels).write_text(reason)
        print(f"{kernels}: {reason or f'{time.monotonic() - start:.0f} s'}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
