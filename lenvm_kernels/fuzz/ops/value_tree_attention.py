"""``value_tree_attention``: requests of any length on scattered pages, with all unused memory poisoned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lenvm_kernels.fuzz.case import CallInputs, Case, Difference, Operator, Result, beyond, dtype_of
from lenvm_kernels.fuzz.draws import Draws
from lenvm_kernels.fuzz.ops._inputs import draw_parents, in_fp64
from lenvm_kernels.fuzz.ops.lay_out import owners_of_tokens
from lenvm_kernels.fuzz.tolerances import TOLERANCE
from lenvm_kernels.ops.value_tree_attention import value_tree_attention
from lenvm_kernels.ops.value_tree_attention.plan import SPLIT_LEN, SPLIT_SLACK

LARGEST = UNUSED_PAGE = 2**31 - 1  # reading the cache through it is an out-of-bounds access
UNTOUCHED = 7.0
SPARE_TABLE_ROWS, SPARE_PAGES = 2, 3
TOKENS_OF_REQUEST = 2**20  # token j of request i has the id i * TOKENS_OF_REQUEST + j
ONE_SPLIT = SPLIT_LEN.value + SPLIT_SLACK.value  # maximum cached tokens without a split
LENGTHS = {"short": (0, 40), "long": (ONE_SPLIT - 20, ONE_SPLIT + SPLIT_LEN.value + 40)}

OPTIONS: dict[str, list[Any]] = {
    "cached": ["short", "any", "long"],
    "delta": [1, 2, 40],
    "candidates": [1, 5, 16],
    "trees": ["none", "roots", "tree", "chain", "any"],
    "group": [1, 3, 4, 6, 7, 8, 64],
    "kv_heads": [1, 2],
    "head_dim": [16, 48, 64, 96, 128],
    "dtype": ["float32", "bfloat16", "float16"],
    "layout": ["as projected", "heads first", "each its own"],
    "page_size": [1, 16, 64],
    "sm_scale": [None, 0.2, -0.1],
    "padding": [0, 2, 30],
    "table_rows": ["int64", "int32"],
    "constants": ["shipped", "few programs"],
}


@dataclass(frozen=True)
class Inputs:
    """Arguments of one call. Memory that must not be read is NaN, or a page number far outside the cache."""

    q: Tensor
    k_new: Tensor
    v_new: Tensor
    k_cache: Tensor
    v_cache: Tensor
    slot_table: Tensor
    table_rows: Tensor
    cached_lens: Tensor
    q_offsets: Tensor
    candidate_lens: Tensor
    page_size: int = 1
    parents: Tensor | None = None

    def run(self, backend: str = "triton", **keywords) -> Tensor:
        return value_tree_attention(**vars(self), **keywords, backend=backend)

    def expected(self, **keywords) -> Tensor:
        """Result of the reference in fp64 on the same values."""
        return value_tree_attention(**in_fp64(vars(self)), **keywords, backend="reference")

    def with_trees(self, trees: list[list[int]], elsewhere: int = -1) -> Inputs:
        """The same requests with one tree each: each candidate's parent as a candidate index, or any other number.

        ``elsewhere`` is written for delta tokens and padding, which have no parents.
        """
        parents = torch.full((len(self.q),), elsewhere, dtype=torch.int32)
        for end, tree in zip(self.q_offsets[1:].tolist(), trees, strict=True):
            first = end - len(tree)
            parents[first:end] = int32([first + x if 0 <= x < LARGEST else x for x in tree])
        return replace(self, parents=parents.to(self.q.device))


def int32(values: list[int], device: torch.device | str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def make_inputs(
    cached: list[int],
    delta: list[int],
    candidates: list[int],
    *,
    device: torch.device | str = "cpu",
    q_heads: int = 2,
    kv_heads: int = 1,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    page_size: int = 1,
    padding: int = 0,
    seed: int = 0,
    rows: Sequence[int] | None = None,
    longest: int | None = None,
) -> Inputs:
    """Random inputs in an engine's layout: q, k and v are slices of one projection, keys and values are interleaved in
    the cache, pages are scattered, and requests use shuffled rows of a wider table.

    Args:
        rows: ids of the requests. If None, 0, 1, 2 and so on.
        longest: capacity of a table row in cached tokens. If None, the cached tokens of the longest request.
    """
    draws = Draws(seed, device)
    requests = draws.rows(len(cached) if rows is None else rows)
    cached_lens, new_lens = draws.rows(cached), draws.rows(delta) + draws.rows(candidates)
    ids = _token_ids(requests, new_lens)
    qkv = torch.full((len(ids) + padding, q_heads + 2 * kv_heads, head_dim), float("nan"), dtype=dtype, device=device)
    qkv[: len(ids)] = draws.normal("qkv", ids, *qkv.shape[1:]).to(dtype)

    # All pages of all requests at different places, in shuffled order.
    pages = -(-cached_lens // page_size)
    page_ids = _token_ids(requests, pages)
    places = draws.places("pages", page_ids, SPARE_PAGES)
    most_pages = max([-(-longest // page_size) if longest is not None else 0, *pages.tolist()]) + 2
    table_rows = draws.places("table_rows", requests, SPARE_TABLE_ROWS)
    shape = len(requests) + SPARE_TABLE_ROWS, most_pages
    slot_table = torch.full(shape, UNUSED_PAGE, dtype=torch.int32, device=device)
    page_request = torch.repeat_interleave(torch.arange(len(requests), device=device), pages)
    first_page = pages.cumsum(0) - pages
    page = torch.arange(len(page_ids), device=device) - first_page[page_request]
    slot_table[table_rows[page_request], page] = places.int()

    kv_cache = torch.full(
        ((len(page_ids) + SPARE_PAGES) * page_size, 2, kv_heads, head_dim), float("nan"), dtype=dtype, device=device
    )
    token_request = torch.repeat_interleave(torch.arange(len(requests), device=device), cached_lens)
    token_keys = _token_ids(requests, cached_lens)
    position = token_keys - requests[token_request] * TOKENS_OF_REQUEST
    slots = places[first_page[token_request] + position // page_size] * page_size + position % page_size
    kv_cache[slots] = draws.normal("kv_cache", token_keys, *kv_cache.shape[1:]).to(dtype)

    q, k_new, v_new = qkv.split([q_heads, kv_heads, kv_heads], dim=1)
    q_offsets = torch.nn.functional.pad(new_lens.cumsum(0), (1, 0)).int()
    lens = cached_lens.int(), q_offsets, draws.rows(candidates).int()
    return Inputs(q, k_new, v_new, kv_cache[:, 0], kv_cache[:, 1], slot_table, table_rows, *lens, page_size)


def _token_ids(requests: Tensor, lens: Tensor) -> Tensor:
    """Ids of the tokens of all requests, one request after the other."""
    request = torch.repeat_interleave(torch.arange(len(requests), device=requests.device), lens)
    token = torch.arange(len(request), device=requests.device) - (lens.cumsum(0) - lens)[request]
    return requests[request] * TOKENS_OF_REQUEST + token


def inputs(case: Case, device: torch.device) -> CallInputs:
    options, draws, rows = case.options, case.draws("cpu"), case.rows
    shortest, longest = LENGTHS["short"][0], LENGTHS["short" if options["cached"] == "short" else "long"][1]
    kinds = [draws.integers(f"cached {kind}", rows, low=low, high=high) for kind, (low, high) in LENGTHS.items()]
    share_of_long = {"short": 0.0, "any": 0.3, "long": 1.0}[options["cached"]]
    cached = torch.where(draws.chance("is long", rows, of=share_of_long), kinds[1], kinds[0])
    cached = torch.where(draws.chance("nothing cached", rows, of=0.2), shortest, cached)
    delta = draws.integers("delta", rows, low=0, high=options["delta"])
    delta = torch.where(draws.chance("one token", rows, of=0.5), 1, delta)
    candidates = draws.integers("candidates", rows, low=0, high=options["candidates"])
    sizes = {name: options[name] for name in ("kv_heads", "head_dim", "page_size", "padding")}
    sizes |= dict(q_heads=options["group"] * options["kv_heads"], dtype=dtype_of(options), seed=case.seed)
    lens = (x.tolist() for x in (cached, delta, candidates))
    made = make_inputs(*lens, device=device, rows=rows, longest=longest, **sizes)
    if options["trees"] != "none":
        parents = draw_parents(draws, options["trees"], rows, options["candidates"])
        trees = [tree[:n] for tree, n in zip(parents.tolist(), candidates.tolist(), strict=True)]
        made = made.with_trees(trees, elsewhere=0 if options["trees"] == "any" else -1)
    if options["layout"] == "heads first":
        names = ("q", "k_cache", "v_cache")
        made = replace(made, **{n: getattr(made, n).transpose(0, 1).contiguous().transpose(0, 1) for n in names})
    elif options["layout"] == "each its own":
        every = ("q", "k_new", "v_new", "k_cache", "v_cache")
        spread: dict[str, Any] = {name: _among_nan(getattr(made, name), i) for i, name in enumerate(every)}
        made = replace(made, **spread)
    made = replace(made, table_rows=made.table_rows.to(getattr(torch, options["table_rows"])))
    out = torch.full_like(made.q, UNTOUCHED)
    if options["layout"] == "each its own":
        out = torch.nn.functional.pad(out, (0, 5, 0, 3), value=UNTOUCHED)[:, : out.shape[1], : out.shape[2]]
    return CallInputs({**vars(made), "sm_scale": options["sm_scale"], "out": out}, len(rows))


def _among_nan(x: Tensor, more: int) -> Tensor:
    """The numbers ``[tokens, heads, D]`` with larger strides of tokens and heads, and NaN between."""
    wider = torch.nn.functional.pad(x.contiguous(), (0, more, 0, more // 2), value=float("nan"))
    return wider[:, : x.shape[1], : x.shape[2]]


def owners(given: CallInputs, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return dict.fromkeys(tensors, owners_of_tokens(given.arguments["q"], given.arguments["q_offsets"]))


def compare(given: CallInputs, result: Result) -> list[Difference]:
    """Padding must keep its contents."""
    out, of_tokens = given.arguments["out"], owners(given, result)["the result"]
    tensors = {name: x for name, x in given.arguments.items() if name not in ("sm_scale", "out")}
    expected = Inputs(**tensors).expected(sm_scale=given.arguments["sm_scale"], out=out.double())
    return [
        beyond("the result", result["the result"], expected, TOLERANCE["value_tree_attention"][out.dtype], of_tokens)
    ]


def _row_work(options: Mapping[str, Any]) -> float:
    tiles = 1 + 1.5 * options["delta"] * options["group"] / 64
    keys = {"short": 1, "any": 6, "long": 14}[options["cached"]]
    levels = {"none": 1, "roots": 2, "tree": 4, "chain": 6, "any": 5}[options["trees"]]
    return 200 * options["kv_heads"] * tiles * (1 + keys) * levels


OPERATOR = Operator(
    function=value_tree_attention,
    options=OPTIONS,
    inputs=inputs,
    writes=("out",),
    owners=owners,
    moved=("out",),
    compare=compare,
    row_work=_row_work,
    # Requests have up to 1,650 tokens, and the reference processes one request after the other.
    most_rows=lambda o: min(256, 40_000 // ((o["group"] + 2) * o["kv_heads"] * o["head_dim"])),
    constants={"few programs": {"MAX_PROGRAMS": 3}},  # several items per program
    free={
        **dict.fromkeys(("q", "k_new", "v_new", "k_cache", "v_cache", "out"), "apart"),
        "slot_table": "rows columns apart",
        "table_rows": "int32",
        "counters": "rows",
    },
)
