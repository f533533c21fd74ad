"""SGLang's extend attention, the path by which its LenVM fork scores candidates (Triton)."""

import torch
import torch.nn.functional as F

from bench.baselines import Absent, Run, Tree, load, require_cuda


def extend_attention(*args: torch.Tensor, **kwargs: torch.Tensor) -> Run:
    """``extend_attention_fwd`` with the tree as a custom mask; ``run`` returns ``[T, Hq, D]``, as ours.

    New keys and values are its extend part, so that none of them enters the cache. As in the fork, the mask is read for
    new tokens only. Not timed, though the engine does it in every step: the mask, and the list of slots.

    Args:
        args, kwargs: the tensors of :class:`~bench.baselines.Tree`.

    Raises:
        Absent: SGLang's files are not there, no GPU, or a mask that its kernel's 32-bit offsets cannot address.
    """
    tree = Tree(*args, **kwargs)
    require_cuda(tree.q, or_interpreter=True)
    extend = load("sglang.kernels.ops.attention.extend_attention").extend_attention_fwd
    requests = tree.requests()
    new = tree.q_offsets.diff().long()
    mask_sizes = new * (tree.cached_lens + new)
    if mask_sizes.max() >= 2**31:
        raise Absent(f"a request's mask has {mask_sizes.max()} entries, more than 32-bit offsets address")
    mask_offsets = F.pad(mask_sizes.cumsum(0), (1, 0))
    cached_offsets = F.pad(tree.cached_lens.cumsum(0), (1, 0)).int()
    slots = torch.cat([request.slots for request in requests])
    mask, longest, out = tree.masks(), int(new.max()), torch.empty_like(tree.q)

    def run() -> torch.Tensor:
        extend(
            tree.q,
            tree.k_new,
            tree.v_new,
            out,
            tree.k_cache,
            tree.v_cache,
            tree.q_offsets,
            cached_offsets,
            slots,
            mask,
            True,  # is_causal: the mask is a part of the causal one, so that tiles above the diagonal are skipped
            mask_offsets,
            longest,
            1.0,  # scale of keys
            1.0,  # scale of values
        )
        return out

    return run
