"""Input of the first layer: embeddings of tokens, their sums of squares, and rotary angles of positions.

    hidden[t] = embedding[token_ids[t]]                  NaN for ids outside of the vocabulary
    square_sums[g, t] = sum of hidden[t, 64 g : 64 g + 64]^2
    cos[t], sin[t] = scale cos(a), scale sin(a)          a = positions[t] * inv_freq

Source: ``embed_tokens`` and ``rotary_emb`` of decoders in transformers (RoFormer, arXiv 2104.09864). The norm of the
first layer (:func:`ragged_linear`) needs the sums of squares. One launch with one program per token.
"""

from collections import namedtuple

import torch
import triton.language as tl
from torch import Tensor

from lenvm_kernels.ops._common import ceil_div, check_number, next_power_of_2, overlapping
from lenvm_kernels.ops._device import kernel, wait_for_inputs
from lenvm_kernels.ops._operator import operator
from lenvm_kernels.ops._spec import Spec
from lenvm_kernels.reference._common import SQUARES_GROUP, compute_dtype
from lenvm_kernels.reference.embed_tokens import embed_tokens as _reference
from lenvm_kernels.types import EmbeddedTokens

# Maximum columns of a token per block. A thread then has up to four loads of 16 bytes (bf16) in flight, whereas a loop
# over smaller blocks would wait for memory once per block. Not measured.
MAX_BLOCK_H = 4096
NUM_WARPS = 4


EmbedTensors = namedtuple("EmbedTensors", "hidden square_sums cos sin token_ids positions embedding inv_freq")


@kernel(specialized="stride_embedding_row")
def _embed_tokens_kernel(
    ptr,  # EmbedTensors
    stride_embedding_row,
    num_rows_ptr,  # int32 [1] or None
    rope_scale,
    T,
    vocab_size,
    H: tl.constexpr,
    HALF: tl.constexpr,  # D / 2
    GROUP: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    wait_for_inputs(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    if num_rows_ptr is not None:  # noqa: SIM102 - a None pointer must not reach the load
        if token >= tl.load(num_rows_ptr):
            return

    # Issue independent loads before the embedding's loads.
    half = tl.arange(0, BLOCK_HALF)
    token_id = tl.load(ptr.token_ids + token)
    position = tl.load(ptr.positions + token).to(tl.float32)
    inv_freq = tl.load(ptr.inv_freq + half, mask=half < HALF, other=0.0)

    is_known = (token_id >= 0) & (token_id < vocab_size)
    row_ptr = ptr.embedding + token_id * stride_embedding_row
    for start in tl.static_range(0, H, BLOCK_H):
        column = start + tl.arange(0, BLOCK_H)
        is_column = column < H
        x = tl.load(row_ptr + column, mask=is_known & is_column, other=float("nan"))
        tl.store(ptr.hidden + token * H + column, x, mask=is_column)
        x = x.to(tl.float32)
        squares = tl.where(is_column, x * x, 0.0)
        group = start // GROUP + tl.arange(0, BLOCK_H // GROUP)
        sums = tl.sum(tl.reshape(squares, [BLOCK_H // GROUP, GROUP]), axis=1)
        tl.store(ptr.square_sums + group.to(tl.int64) * T + token, sums, mask=group * GROUP < H)

    angle = position * inv_freq
    tl.store(ptr.cos + token * HALF + half, tl.cos(angle) * rope_scale, mask=half < HALF)
    tl.store(ptr.sin + token * HALF + half, tl.sin(angle) * rope_scale, mask=half < HALF)


_SPEC = Spec("""
    token_ids: int64 [T]
    positions: int64 [T]
    embedding: float [V, H]
    inv_freq: float32 [half+]
    num_rows?: int32 [1]
""")


@operator(_SPEC, reference=_reference, takes={"rope_scale": float})
def _launch(out: EmbeddedTokens, given):
    (tokens, size), half = out.hidden.shape, given.inv_freq.shape[0]
    tensors = EmbedTensors(*out, given.token_ids, given.positions, given.embedding, given.inv_freq)
    block_h = min(next_power_of_2(max(size, SQUARES_GROUP)), MAX_BLOCK_H)
    sizes = dict(H=size, HALF=half, GROUP=SQUARES_GROUP, BLOCK_H=block_h, BLOCK_HALF=next_power_of_2(half))
    vocab_size, stride = given.embedding.shape[0], given.embedding.stride(0)
    arguments = (tensors, stride, given.num_rows, given.rope_scale, tokens, vocab_size)
    _embed_tokens_kernel[(tokens,)](*arguments, **sizes, num_warps=NUM_WARPS, **overlapping())


def embed_tokens(
    token_ids: Tensor,  # int64 [T]
    positions: Tensor,  # int64 [T]
    embedding: Tensor,  # [vocabulary, H]
    inv_freq: Tensor,  # fp32 [D / 2]
    *,
    rope_scale: float = 1.0,
    num_rows: Tensor | None = None,  # int32 [1]
    backend: str = "auto",
) -> EmbeddedTokens:
    """Look up token embeddings and compute their sums of squares, and cosine and sine of the rotary angles.

    Args:
        token_ids: int64 [T]. The embedding of an id outside of the vocabulary is NaN.
        positions: int64 [T]; each token's position in its sequence.
        embedding: [vocabulary, H], fp32, bf16 or fp16 (also fp64 on the reference). Rows may be strided.
        inv_freq: fp32 [D / 2]; radians per position for each pair of a head's dimensions.
        rope_scale: factor on cosine and sine, for example YaRN's.
        num_rows: int32 [1]; number of tokens. If ``None``, all T. The remaining rows are neither read nor written.
        backend: ``auto``, ``triton`` or ``reference``.

    Returns:
        The :class:`EmbeddedTokens`. Tokens from ``num_rows`` on are arbitrary.

    Raises:
        TypeError, ValueError: an argument does not match its description. Raised before any launch.

    Example:
        >>> embedding = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> embedded = embed_tokens(torch.tensor([1, 0]), torch.tensor([0, 2]), embedding, torch.tensor([0.5]))
        >>> embedded.hidden
        tensor([[3., 4.],
                [1., 2.]])
        >>> embedded.square_sums
        tensor([[25.,  5.]])
    """
    operands = (token_ids, positions, embedding, inv_freq, num_rows)
    backend, sizes = _SPEC.check(backend, *operands)
    tokens, size, half, device = sizes["T"], sizes["H"], sizes["half"], token_ids.device
    if embedding.numel() == 0:
        raise ValueError(f"embedding must have at least one row and column, got shape {list(embedding.shape)}")
    check_number("rope_scale", rope_scale)
    embedded = EmbeddedTokens(
        hidden=torch.empty(tokens, size, dtype=embedding.dtype, device=device),
        square_sums=torch.empty(ceil_div(size, SQUARES_GROUP), tokens, dtype=compute_dtype(embedding), device=device),
        cos=torch.empty(tokens, half, dtype=torch.float32, device=device),
        sin=torch.empty(tokens, half, dtype=torch.float32, device=device),
    )
    return _launch(backend, embedded, *operands, float(rope_scale))
