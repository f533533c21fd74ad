"""Value head: one fp32 logit per token, ``z = w2 . silu(W1 h + b1) + b2``.

Source: section 3 of the specification; ``v_head.fc`` and ``v_head.summary`` of a LenVM checkpoint.
:func:`ragged_linear` computes ``W1 h + b1`` for all rows in use and stores it in fp32. In a second launch, a program
per token reads its row, applies SiLU and computes the dot product with w2.
"""

import torch
import triton.language as tl
from torch import Tensor

from lenvm_kernels.ops._common import next_power_of_2, overlapping
from lenvm_kernels.ops._device import kernel, wait_for_inputs
from lenvm_kernels.ops._operator import operator
from lenvm_kernels.ops._spec import Spec
from lenvm_kernels.ops.ragged_linear import check_options, launch_linear
from lenvm_kernels.ops.ragged_linear.device import _live_rows
from lenvm_kernels.reference._common import compute_dtype
from lenvm_kernels.reference.value_head import value_head as _reference

NUM_WARPS = 4  # 12 numbers of a row of 1,536 per thread. Not measured.


@kernel(specialized="logits_ptr linear_ptr summary_weight_ptr summary_bias_ptr")
def _value_head_kernel(
    logits_ptr,  # [M]
    linear_ptr,  # fp32 [T, H]: W1 h + b1
    token_rows_ptr,  # [M] or None
    num_rows_ptr,  # int32 [1] or None
    summary_weight_ptr,  # [H]
    summary_bias_ptr,  # [1]
    T,
    H: tl.constexpr,
    COLUMNS: tl.constexpr,  # a power of two >= H
    OVERLAPS: tl.constexpr,
):
    wait_for_inputs(OVERLAPS)
    m = tl.program_id(0).to(tl.int64)
    row = m if token_rows_ptr is None else tl.load(token_rows_ptr + m).to(tl.int64)
    is_token = (row >= 0) & (row < _live_rows(num_rows_ptr, T))
    column = tl.arange(0, COLUMNS)
    y = tl.load(linear_ptr + row * H + column, mask=is_token & (column < H), other=0.0)
    summary_weight = tl.load(summary_weight_ptr + column, mask=column < H, other=0.0).to(tl.float32)
    z = tl.sum(y * tl.sigmoid(y) * summary_weight, axis=0) + tl.load(summary_bias_ptr).to(tl.float32)
    tl.store(logits_ptr + m, tl.where(is_token, z, 0.0))


_SPEC = Spec("""
    hidden: float [T, H+]
    fc_weight: =hidden [H, H]
    fc_bias: =hidden|float32 [H]
    summary_weight: =hidden|float32 [1, H]
    summary_bias: =hidden|float32 [1]
    token_rows?: int [M]
    num_rows?: int32 [1]
    square_sums?: single [(H + 63) // 64, T]
""")


@operator(_SPEC, reference=_reference, takes={"norm_eps": float | None, "expected_rows": int | None})
def _launch(out: Tensor, given):
    hidden, num_rows = given.hidden, given.num_rows
    (tokens, size), outputs = hidden.shape, out.shape[0]
    linear = torch.empty(tokens, size, dtype=torch.float32, device=hidden.device)
    operands = (hidden, given.fc_weight, given.fc_bias, num_rows, given.square_sums, None, None)
    launch_linear("triton", linear, *operands, given.norm_eps, False, given.expected_rows)
    _value_head_kernel[(outputs,)](
        *(out, linear, given.token_rows, num_rows, given.summary_weight, given.summary_bias, tokens),
        H=size,
        COLUMNS=next_power_of_2(size),
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,
        **overlapping(),
    )


def value_head(
    hidden: Tensor,  # [T, H]
    fc_weight: Tensor,  # [H, H]
    fc_bias: Tensor,  # [H]
    summary_weight: Tensor,  # [1, H]
    summary_bias: Tensor,  # [1]
    *,
    token_rows: Tensor | None = None,  # int32|int64 [M]
    num_rows: Tensor | None = None,  # int32 [1]
    norm_eps: float | None = None,
    square_sums: Tensor | None = None,  # fp32 [ceil(H / 64), T]
    expected_rows: int | None = None,
    backend: str = "auto",
) -> Tensor:  # fp32 [M], or [T] without token_rows
    """Compute value logits ``z = w2 . silu(W1 h + b1) + b2`` of tokens. ``sigmoid(z)`` is the value, larger for longer.

    The result for a row of ``hidden`` is bitwise identical in any batch and at any index.

    Args:
        hidden: hidden states [T, H], fp32, bf16 or fp16 (also fp64 on the reference). Rows may be strided.
        fc_weight: W1 [H, H], stored as in ``nn.Linear`` (out, in), in the dtype of ``hidden``. Rows may be strided.
        fc_bias: b1 [H]; in the dtype of ``hidden`` or fp32, as w2 and b2.
        summary_weight: w2 [1, H].
        summary_bias: b2 [1].
        token_rows: int32 or int64 [M]; row of ``hidden`` for each logit, may repeat. For rows outside of
            ``[0, num_rows)``, such as -1 for padding, the logit is exactly 0. If ``None``, all T rows in order.
        num_rows, norm_eps, square_sums, expected_rows: as in :func:`ragged_linear`, which computes ``W1 h + b1``. With
            ``norm_eps``, the final RMSNorm's weight ``w`` must be folded into ``fc_weight``, as ``W1 diag(w)``.
        backend: ``auto``, ``triton`` or ``reference``.

    Returns:
        Logits, fp32 [M] (fp32 [T] without ``token_rows``), accumulated in fp32; fp64 for fp64 inputs.

    Raises:
        TypeError, ValueError: an argument does not match its description. Raised before any launch.

    Example:
        >>> hidden, weight = torch.ones(2, 64), torch.eye(64)
        >>> rows = torch.tensor([1, -1])
        >>> value_head(hidden, weight, torch.zeros(64), torch.ones(1, 64), torch.ones(1), token_rows=rows)
        tensor([47.7878,  0.0000])
    """
    operands = (hidden, fc_weight, fc_bias, summary_weight, summary_bias, token_rows, num_rows, square_sums)
    without_rows = {"M": hidden.shape[0]} if token_rows is None and isinstance(hidden, Tensor) else {}
    backend, sizes = _SPEC.check(backend, *operands, sizes=without_rows)
    norm_eps = check_options(norm_eps, square_sums, expected_rows)
    logits = torch.empty(sizes["M"], dtype=compute_dtype(hidden), device=hidden.device)
    return _launch(backend, logits, *operands, norm_eps, expected_rows)
