"""``rope_cache``: heads, norms and cache layouts, absent rows, uncached tokens.

fp32 is compared with the reference in fp64. For bf16 and fp16, the roundings of the norm are part of the definition, so
the reference computes in the same dtype. Kernel and reference then differ in the last bits of fp32, which rarely
changes a rounding by one ulp.
"""

from typing import Any

import torch
from torch import Tensor

from lenvm_kernels.fuzz.case import CallInputs, Case, Difference, Operator, Result, beyond, differs, dtype_of
from lenvm_kernels.fuzz.ops._inputs import limit_rows, rows_and
from lenvm_kernels.fuzz.tolerances import TOLERANCE
from lenvm_kernels.ops.rope_cache import rope_cache

EPS = 1e-6
UNTOUCHED = -7.0  # contents of caches before a call
WRITTEN = ("k_cache", "v_cache")
LAYOUTS = ["plain", "layer of many", "keys beside values", "heads first"]  # cache layouts of servers

OPTIONS: dict[str, list[Any]] = {
    "heads": [[1, 1], [3, 1], [12, 2], [9, 3], [5, 5]],
    "head_dim": [2, 6, 64, 80, 96, 128],
    "dtype": ["float32", "bfloat16", "float16"],
    "norm": [False, True],
    "slots": ["int64", "int32"],
    "rows_not_there": ["none", "0", "2"],
    "row_padding": [0, 16, 3],
    "keys": LAYOUTS,
    "values": LAYOUTS,
    "broken": [False, True],
}


def make_cache(layout: str, kv_heads: int, head_dim: int, dtype, device, slots: int) -> Tensor:
    """[slots, Hkv, D] in one of LAYOUTS."""
    shape, select = {
        "plain": ((slots, kv_heads, head_dim), lambda x: x),
        "layer of many": ((3, slots, kv_heads, head_dim), lambda x: x[1]),
        "keys beside values": ((slots, 2, kv_heads, head_dim), lambda x: x[:, 1]),
        "heads first": ((kv_heads, slots, head_dim), lambda x: x.transpose(0, 1)),
    }[layout]
    return select(torch.full(shape, UNTOUCHED, dtype=dtype, device=device))


def inputs(case: Case, device: torch.device) -> CallInputs:
    options, draws, there = case.options, case.draws(device), len(case.rows)
    rows, dtype, padding = rows_and(case, options["rows_not_there"]), dtype_of(options), options["row_padding"]
    (heads, kv_heads), head_dim = options["heads"], options["head_dim"]
    columns, num_slots = (heads + 2 * kv_heads) * head_dim, len(rows) + 3
    angle = 100 * draws.normal("angle", rows, head_dim // 2 + padding).float()
    sizes = draws.choose("sizes", rows, 1, values=[1.0, 1.0, 1.0, 0.0, 1e-4, 5e3])
    # About a third of the tokens are not cached.
    outside = draws.choose("outside", rows, values=[-1, -9, num_slots, 2**31 - 1])
    slots = torch.where(draws.chance("not kept", rows, of=0.3), outside, draws.places("slots", rows, 3))
    of_cache = (kv_heads, head_dim, dtype, device, num_slots)
    arguments: dict[str, Any] = {
        "qkv": (3 * sizes * draws.normal("qkv", rows, columns + padding)).to(dtype)[:, :columns],
        "cos": angle.cos()[:, : head_dim // 2],
        "sin": angle.sin()[:, : head_dim // 2].contiguous(),
        "slots": slots.to(getattr(torch, options["slots"])),
        "k_cache": make_cache(options["keys"], *of_cache),
        "v_cache": make_cache(options["values"], *of_cache),
        "num_heads": heads,
    }
    if options["norm"]:
        weight = 1 + 0.3 * draws.normal("qk_norm_weight", heads + kv_heads, head_dim + padding)
        arguments |= {"qk_norm_weight": weight.to(dtype)[:, :head_dim], "norm_eps": EPS}
    if options["broken"]:
        poisoned = draws.chance("poisoned", rows, of=0.2)
        arguments["qkv"][poisoned, 0] = arguments["qkv"][poisoned, -1] = float("nan")
    if options["rows_not_there"] != "none":
        limit_rows(arguments, there, **{name: arguments[name] for name in ("qkv", "cos", "sin")})
    return CallInputs(arguments, there)


def compare(given: CallInputs, result: Result) -> list[Difference]:
    rows, dtype = given.rows, given.arguments["qkv"].dtype
    q, k, v = (x[:rows] for x in expected_of(given.arguments))
    new = {name: result[name][:rows] for name in ("q", "k", "v")}
    found = [rotated("q", new["q"], q, dtype), rotated("k", new["k"], k, dtype), differs("v", new["v"], v.to(dtype))]
    for name in WRITTEN:
        cache, slots = result[name], given.arguments["slots"][:rows].long()
        expected = torch.full_like(cache, UNTOUCHED)
        kept = (slots >= 0) & (slots < len(cache))
        expected[slots[kept]] = new[name[0]][kept]
        owners = torch.full((len(cache),), -1, device=cache.device)
        owners[slots[kept]] = kept.nonzero()[:, 0]
        found.append(differs(name, cache, expected, owners))
    return found


def expected_of(inputs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of the reference: in fp64 for fp32 inputs, else in the inputs' dtype."""
    wide = torch.float64 if inputs["qkv"].dtype == torch.float32 else inputs["qkv"].dtype
    own = ("qkv", "k_cache", "v_cache", "qk_norm_weight")
    inputs = {name: x.to(wide, copy=True) if name in own else x for name, x in inputs.items()}
    return rope_cache(**inputs, backend="reference")


def rotated(what: str, actual: Tensor, expected: Tensor, dtype: torch.dtype) -> Difference:
    """Compare relative to the length of each rotated pair, because rotation preserves it and one number of a pair may
    be close to 0."""
    first, second = expected.double().chunk(2, dim=-1)
    length = torch.hypot(first, second).clamp(min=1e-3).repeat(1, 1, 2)
    return beyond(what, actual.double() / length, expected.double() / length, TOLERANCE["rope_cache"][dtype])


OPERATOR = Operator(
    function=rope_cache,
    options=OPTIONS,
    inputs=inputs,
    returns=("q", "k", "v"),
    writes=WRITTEN,
    moved=WRITTEN,
    compare=compare,
    free={
        **dict.fromkeys(("qkv", "cos", "sin", "k_cache", "v_cache", "qk_norm_weight"), "apart"),
        "slots": "int64",
    },
)
