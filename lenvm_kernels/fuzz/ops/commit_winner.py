"""``commit_winner``: rows that commit beside every reason not to, in caches of different layouts, with any bits."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lenvm_kernels.fuzz import calls
from lenvm_kernels.fuzz.case import Case, Difference, Output, as_codes, differs, dtype_of, powers_of_2
from lenvm_kernels.fuzz.draws import Draws
from lenvm_kernels.ops._common import E4M3
from lenvm_kernels.ops.commit_winner import commit_winner

BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float64: torch.int64}
BITS[E4M3] = torch.uint8
SPARE_SLOTS, SPARE_TOKENS, SPARE_ROWS = 3, 2, 2
LONGEST = 8  # tokens of a sequence

OPTIONS: dict[str, list[Any]] = {
    "layers": [1, 2, 5],
    "heads": [1, 2, 3],
    "head_dim": [1, 3, 8, 16],
    "candidates": [1, 2, 5, 8, 16, 33, 64],
    "new": ["one", "1", "4"],  # columns of tokens
    "parents": [False, True],
    "page_size": [1, 2, 4],
    "dtype": ["float32", "bfloat16", "float16"],
    "e4m3": [False, True],
    "cache": ["layers first", "tokens first", "values apart"],
    "last": ["layers first", "tokens first", "values apart"],
    "candidate_rows": ["int32", "int64"],
    "last_rows": ["int64", "int32"],
    "tokens": ["int32", "int64"],
    "table_rows": ["int64", "int32"],
    "constants": ["shipped", "small", "smallest"],
}
CONSTANTS = {"small": {"TILE": 32}, "smallest": {"TILE": 4}}


def random_bits(draws: Draws, name: str, rows, *shape: int, dtype: torch.dtype) -> Tensor:
    """``[rows, *shape]`` of any bit pattern, NaNs with any payload among them."""
    return draws.bits(name, rows, *shape).to(BITS[dtype]).view(dtype)


def make_pool(
    draws: Draws, name: str, rows, layers: int, heads: int, head_dim: int, dtype, *, interleaved: bool
) -> Tensor:
    """Keys and values ``[2, layers, tokens, heads, head_dim]`` of tokens by id; interleaved, a token's lie together."""
    pool = random_bits(draws, name, rows, layers, 2, heads, head_dim, dtype=dtype)
    return pool.permute(2, 1, 0, 3, 4) if interleaved else pool.permute(2, 1, 0, 3, 4).contiguous()


def as_integers(x: Tensor) -> Tensor:
    return as_codes(x) if x.dtype == E4M3 else x.contiguous().view(BITS[x.dtype])


@dataclass(frozen=True)
class Inputs(calls.Inputs):
    slot_owners: Tensor  # the row of the batch that each slot of the cache is for


def inputs(case: Case, device: torch.device) -> Inputs:
    options, draws, rows = case.options, case.draws(device), case.rows
    count, columns = len(rows), options["candidates"]
    sizes = options["layers"], options["heads"], options["head_dim"]
    dtypes = {"cache": E4M3 if options["e4m3"] else dtype_of(options), "last": dtype_of(options)}

    def either(name, x):
        return x.to(getattr(torch, options[name]))

    def mostly(name, usual, otherwise):
        return torch.where(draws.chance(name, rows, *usual.shape[1:], of=0.85), usual, otherwise)

    # Ids of what a row owns: as many slots as a sequence has tokens, its row of the last step, and of the last forward
    # as many rows as candidates.
    ids = draws.rows(rows)
    last, table_row = draws.places("last_rows", rows, SPARE_ROWS), draws.places("table_rows", rows, SPARE_ROWS)
    pages = LONGEST // options["page_size"]
    page_ids = (ids[:, None] * pages + torch.arange(pages, device=device)).flatten()
    page = draws.places("pages", page_ids, SPARE_SLOTS)
    computed_ids = (ids[:, None] * columns + torch.arange(columns, device=device)).flatten()
    computed = draws.places("candidate_rows", computed_ids, SPARE_TOKENS)
    tokens = len(computed) + SPARE_TOKENS
    pools: dict[str, Tensor] = {}
    in_page = torch.arange(options["page_size"], device=device)
    slot = (page[:, None] * options["page_size"] + in_page).flatten()
    slot_ids = (page_ids[:, None] * options["page_size"] + in_page).flatten()
    for name, owner_ids, places, spare in (
        ("cache", slot_ids, slot, SPARE_SLOTS * options["page_size"]),
        ("last", computed_ids, computed, SPARE_TOKENS),
    ):
        at = _owner_ids(owner_ids, places, spare)
        k, v = make_pool(draws, name, at, *sizes, dtypes[name], interleaved=options[name] != "layers first")
        pools |= {f"k_{name}": k, f"v_{name}": v.contiguous() if options[name] == "values apart" else v}

    def placed(values, padding):
        """Rows of the last step where they are in it."""
        table = values.new_full((count + SPARE_ROWS, *values.shape[1:]), padding)
        table[last] = values
        return table

    new = 1 if options["new"] == "one" else int(options["new"])
    new_lens = draws.integers("new_lens", rows, low=-1, high=new + 1)
    if options["new"] == "one":
        new_lens = torch.ones_like(new_lens)
    listed = draws.integers("candidate_ids", rows, columns, low=-1, high=9)  # some are listed twice
    # A parent is an earlier column, or none; now and then it is neither.
    below = draws.integers("parents", rows, columns, low=0, high=columns)
    parents = torch.where(below < torch.arange(columns, device=device), below, -1)
    parents = torch.where(draws.chance("a bad parent", rows, columns, of=0.05), columns + 3, parents)
    position = draws.integers("positions", rows, low=0, high=LONGEST - 1)
    first = position + 1 - new_lens
    nowhere = draws.choose("nowhere", rows, columns, values=[-1, -2, tokens, 10**6])
    outside = draws.choose("outside", rows, values=[-1, count + SPARE_ROWS, 10**6])
    slot_table = page.new_zeros(count + SPARE_ROWS, pages + 2)[:, :pages]
    slot_table[table_row] = torch.where(
        draws.chance("has a page", rows, pages, of=0.9),
        page.view(-1, pages),
        draws.choose("no page", rows, pages, values=[-1, 10**6]),
    )
    # Mostly a path down the tree.
    path, parent, column = [], torch.full((count, 1), -1, device=device), torch.arange(columns, device=device)
    turn = draws.integers("path", rows, new, low=0, high=columns - 1)
    for i in range(new):
        of_tree = parents if options["parents"] else torch.full_like(parents, -1)
        is_child = of_tree == parent
        has_child = (of_tree[:, None] == column[:, None]).any(2)
        rank = is_child * (1 + (column + turn[:, i, None]) % columns + columns * has_child)
        token = listed.gather(1, rank.argmax(1, keepdim=True))
        path.append(token[:, 0])
        parent = (is_child & (listed == token)).int().argmax(1, keepdim=True)  # the first of that name
    drawn = mostly("a path", torch.stack(path, 1), draws.integers("tokens", rows, new, low=-1, high=9))
    elsewhere = draws.integers("elsewhere", rows, low=0, high=9)
    row_arguments = dict(
        candidate_ids=placed(listed, 3).int(),
        candidate_rows=either("candidate_rows", placed(mostly("computed", computed.view(-1, columns), nowhere), 0)),
        candidate_positions=placed(mostly("in place", first, elsewhere), 5).int(),
        last_rows=either("last_rows", mostly("in the last step", last, outside)),
        tokens=either("tokens", drawn[:, 0].contiguous() if options["new"] == "one" else drawn),
        positions=position.int(),
        slot_table=slot_table.int(),
        table_rows=either("table_rows", table_row),
        page_size=options["page_size"],
    )
    if options["new"] != "one":
        row_arguments["new_lens"] = new_lens.int()
    if options["parents"]:
        row_arguments["candidate_parents"] = placed(parents, -1).int()
    if options["e4m3"]:
        for name in ("key_scales", "value_scales"):
            row_arguments[name] = powers_of_2(draws, name, *sizes[:2], exponents=[-20, 0, 20])
    owners = torch.full((len(slot) + SPARE_SLOTS * options["page_size"],), -1, device=device)
    owners[slot] = torch.arange(count, device=device).repeat_interleave(LONGEST)
    return Inputs(pools | row_arguments, count, owners)


def _owner_ids(ids: Tensor, places: Tensor, spare: int) -> Tensor:
    """The id of what lies at each place; spare places have negative ones."""
    at = -1 - torch.arange(len(ids) + spare, device=ids.device)
    at[places] = ids
    return at


def of_pools(result: calls.Result, which: str) -> Tensor:
    """``[tokens, 2, layers, ...]``: the keys and values of the cache or of the last forward, as integers."""
    return torch.stack([as_integers(result.tensors[f"{x}_{which}"].movedim(1, 0)) for x in "kv"], 1)


def outputs(given: Inputs, result: calls.Result) -> list[Output]:
    cache = Output("the cache", of_pools(result, "cache"), given.slot_owners)
    return [Output("committed", result.tensors["committed"]), cache]


def compare(given: Inputs, result: calls.Result) -> list[Difference]:
    expected = OPERATOR.expected(given)
    last = of_pools(result, "last")
    return [
        differs("committed", result.tensors["committed"], expected.tensors["committed"]),
        differs("the cache", of_pools(result, "cache"), of_pools(expected, "cache"), given.slot_owners),
        differs("the last forward", last, of_pools(expected, "last"), calls.nobody(last)),
    ]


def classes(given: Inputs) -> dict[str, Tensor]:
    committed = OPERATOR.expected(given).tensors["committed"]
    return {"commits one": committed == 1, "commits several": committed > 1, "does not": committed == 0}


OPERATOR = calls.named_operator(
    commit_winner,
    options=OPTIONS,
    inputs=inputs,
    returns=lambda given: {"committed": (torch.int32, given.arguments["positions"].shape)},
    writes=("k_cache", "v_cache", "k_last", "v_last"),
    outputs=outputs,
    compare=compare,
    most_rows=8192,
    row_size=lambda o: 2 * o["layers"] * o["heads"] * o["head_dim"] * (1 + o["candidates"]),
    row_work=lambda o: 40 * o["layers"] * (8 if o["constants"] == "smallest" else 1),
    classes=classes,
    constants=CONSTANTS,
    free={
        **dict.fromkeys(("candidate_ids", "candidate_parents", "key_scales", "value_scales"), "apart"),
        "candidate_rows": "int32 apart",
        "last_rows": "int64",
        "tokens": "int32 columns apart",
        "slot_table": "rows columns apart",
        "table_rows": "int32",
    },
)
