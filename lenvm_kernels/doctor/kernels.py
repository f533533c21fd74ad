"""A few operators on tiny inputs against their references in fp64."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import lenvm_kernels
from lenvm_kernels.doctor.check import OK, WRONG, Check, first_line

if TYPE_CHECKING:
    import torch

TOLERANCE = 1e-4  # of an operator's fp32 results of O(1), against the reference in fp64


def look() -> list[Check]:
    """A check of each of the :data:`OPERATORS`: compiled on a GPU; else the reference runs."""
    import torch

    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.zeros(1, device=where).item()  # or the first operator's time would hold the start of CUDA
    return [_compare(name, operator, where) for name, operator in OPERATORS.items()]


def _compare(
    name: str, operator: Callable[[torch.device, torch.dtype, str], torch.Tensor], where: torch.device
) -> Check:
    import torch

    accepted = f"within {TOLERANCE:g} of the fp64 reference"
    start = time.perf_counter()
    try:
        results = operator(where, torch.float32, "auto").cpu()
    except Exception as error:
        hint = "Triton needs a C compiler (gcc) and Python's headers (python3-dev) to compile; else report this"
        return Check(name, WRONG, first_line(error), accepted, hint)
    milliseconds = 1e3 * (time.perf_counter() - start)
    difference = (results.double() - operator(torch.device("cpu"), torch.float64, "reference")).abs().max().item()
    runs = "kernel, first call" if where.type == "cuda" else "no GPU: reference,"
    found = f"{runs} {milliseconds:.0f} ms, off by {difference:.1g}"
    if not difference <= TOLERANCE:  # NaN compares false
        return Check(name, WRONG, found, accepted, 'report this; until then backend="reference" computes it')
    return Check(name, OK, found, accepted)


def _random(where: torch.device, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """A source of normal numbers: the same ones on each device and in each dtype."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator).to(where, dtype)


def _topk_candidates(where: torch.device, dtype: torch.dtype, backend: str) -> torch.Tensor:
    """The candidates' probabilities at their tokens: float [2, 1000]."""
    import torch

    logits, one = _random(where, dtype)(2, 1000), torch.ones(2, device=where)
    top_k = torch.full((2,), 8, dtype=torch.int32, device=where)
    chosen = lenvm_kernels.topk_candidates(
        logits, top_k=top_k, top_p=one, min_p=0 * one, temperature=one, is_logits=True, backend=backend
    )
    return torch.zeros_like(logits).scatter(1, chosen.token_ids.long(), chosen.probs.to(dtype))


def _value_tree_attention(where: torch.device, dtype: torch.dtype, backend: str) -> torch.Tensor:
    """One token and eight candidates after 20 cached tokens: [9, 4, 64]."""
    import torch

    normal = _random(where, dtype)
    q, k, v, (k_cache, v_cache) = normal(9, 4, 64), normal(9, 2, 64), normal(9, 2, 64), normal(2, 32, 2, 64)
    slots, row, cached, offsets, candidates = (
        torch.tensor(numbers, dtype=torch.int32, device=where)
        for numbers in ([list(range(31, 11, -1))], [0], [20], [0, 9], [8])
    )
    return lenvm_kernels.value_tree_attention(
        q, k, v, k_cache, v_cache, slots, row, cached, offsets, candidates, backend=backend
    )


def _value_head(where: torch.device, dtype: torch.dtype, backend: str) -> torch.Tensor:
    """Value logits of eight tokens: [8]."""
    normal = _random(where, dtype)
    weights = normal(64, 64) / 8, normal(64), normal(1, 64) / 8, normal(1)
    return lenvm_kernels.value_head(normal(8, 64), *weights, backend=backend)


OPERATORS = {
    "topk_candidates": _topk_candidates,
    "value_tree_attention": _value_tree_attention,
    "value_head": _value_head,
}
