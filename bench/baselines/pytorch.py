"""PyTorch itself as a peer: the plain references, eager and compiled, and the best that its own operators do."""

from functools import partial

import torch
import torch.nn.functional as F

from bench.baselines import Absent, Run, Tree, describe


def compiled(reference: partial, compiler: str = "inductor") -> Run:
    """``torch.compile`` of a reference for these shapes, as one graph; ``run`` returns what the reference returns.

    Preparing it compiles it, which calls it once.

    Args:
        reference: a function of ``lenvm_kernels.reference`` with its arguments.
        compiler: backend of ``torch.compile``; "aot_eager" traces the graph but generates no code.

    Raises:
        Absent: the reference reads lengths back from the device, so that no one graph can hold it.
    """
    # Compiled code is kept by function, for eight shapes at most; after that PyTorch stops compiling, in silence.
    torch._dynamo.reset()
    function = torch.compile(reference.func, backend=compiler, dynamic=False, fullgraph=True)
    run = partial(function, *reference.args, **reference.keywords)
    try:
        run()
    except (torch._dynamo.exc.Unsupported, torch._dynamo.exc.UserError) as error:
        raise Absent(f"{reference.func.__name__} does not compile as one graph: {describe(error)}") from error
    return run


def topk_candidates(scores: torch.Tensor, top_k: int) -> Run:
    """Softmax in fp32, then ``torch.topk``: two passes over ``[B, V]`` and its probabilities written between them.

    ``run`` returns (probabilities fp32 ``[B, top_k]``, token ids int64 ``[B, top_k]``), with no top-p or min-p, and
    equal probabilities in any order.

    Args:
        scores: ``[B, V]`` logits, any float dtype.
        top_k: candidates of every row.
    """
    return lambda: torch.softmax(scores, dim=-1, dtype=torch.float32).topk(top_k)


def value_head(
    hidden: torch.Tensor,
    fc_weight: torch.Tensor,
    fc_bias: torch.Tensor,
    summary_weight: torch.Tensor,
    summary_bias: torch.Tensor,
) -> Run:
    """The unfused head: cuBLAS, SiLU and a matrix-vector product; ``run`` returns logits ``[T]``.

    Activations and logits are rounded to the weights' dtype, where ours stay in fp32.

    Args:
        hidden: ``[T, H]``.
        fc_weight, fc_bias: ``[H, H]`` and ``[H]``, dtype of ``hidden``.
        summary_weight, summary_bias: ``[1, H]`` and ``[1]``, dtype of ``hidden``.
    """
    return lambda: F.linear(F.silu(F.linear(hidden, fc_weight, fc_bias)), summary_weight, summary_bias).squeeze(-1)


def flex_attention(*args: torch.Tensor, **kwargs: torch.Tensor) -> Run:
    """FlexAttention with a block mask, on all requests as one batch; ``run`` returns ``[T, Hq, D]``, as ours.

    Not timed: the block mask, and the copy of each request's cached and new keys and values into one contiguous
    sequence (FlexAttention reads no slot table). On a CPU it runs unfused.

    Args:
        args, kwargs: the tensors of :class:`~bench.baselines.Tree`.

    Raises:
        Absent: the requests differ in length, and so do not fit into one batch.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    tree = Tree(*args, **kwargs)
    requests = tree.requests()
    lengths = {(len(slots), end - start, delta) for slots, start, end, delta in requests}
    if len(lengths) != 1:
        raise Absent(f"takes requests of one length only, got {len(lengths)} (cached, new, delta): {sorted(lengths)}")
    ((cached, new, delta),) = lengths

    def is_visible(batch, head, row, column):
        column = column - cached
        return (column < 0) | ((column < delta) & (column <= row)) | (column == row)

    def gather(cache: torch.Tensor, new_rows: torch.Tensor) -> torch.Tensor:  # [B, Hkv, cached + new, D]
        sequences = [torch.cat([cache[slots], new_rows[start:end]]) for slots, start, end, _ in requests]
        return torch.stack(sequences).transpose(1, 2).contiguous()

    block_mask = create_block_mask(is_visible, None, None, new, cached + new, device=tree.q.device)
    q = tree.q.unflatten(0, (len(requests), new)).transpose(1, 2)  # [B, Hq, new, D]
    k, v = gather(tree.k_cache, tree.k_new), gather(tree.v_cache, tree.v_new)
    attend = flex_attention
    if q.is_cuda:
        torch._dynamo.reset()  # as in `compiled`
        attend = torch.compile(flex_attention, dynamic=False)
    # The output has the strides of q, so that this is no copy.
    return lambda: attend(q, k, v, block_mask=block_mask, enable_gqa=True).transpose(1, 2).flatten(0, 1)
