"""Argument errors of every operator: each message names the argument, the value and the accepted values.

``test_operator_laws.py`` has wrong tensors: dtypes, shapes, devices and strides.
"""

import math

import pytest
import torch

from lenvm_kernels.ops.begin_step import empty_requests
from lenvm_kernels.ops.value_tree_attention import plan_shape
from lenvm_kernels.types import DeltaTokens
from tests.helpers.cases import arguments_of, changed, i32, operators, small_case
from tests.helpers.wrong_tensors import assert_refuses


def size(dim, count):
    """A change of a tensor: zeros of the same dtype with another size of one dimension."""
    return lambda x: x.new_zeros([count if i == dim else n for i, n in enumerate(x.shape)])


def rows(count):
    """A change of a named tuple: all tensors have ``count`` rows."""
    return lambda fields: type(fields)(*(None if x is None else x.new_zeros(count, *x.shape[1:]) for x in fields))


def each(argument, what, values, wrong=()):
    """Cases of invalid values of an argument that must be ``what``. For a wrong type, errors show the type."""
    shown = [*((x, repr(x)) for x in values), *((x, type(x).__name__) for x in wrong)]
    return [({argument: x}, f"{argument} must be {what}, got {y}") for x, y in shown]


FEW_ROWS = (
    {"table_rows": None, "table": rows(2)},
    r"table must have a row for each of the 3 requests, got 2 \(or give table_rows\)",
)
ALONE, TOGETHER = "scored must be given with drawn or step, got", "must be given together"
POSITIVE, LEAST_1 = "a positive number or None", "an int of at least 1"
OF_TABLE = ("table_rows", "generated", "text_breaks", "last_tokens", "requests", "drawn", "step", "scored")
DELTA = DeltaTokens(*(i32(0, 0, 0, 0) for _ in DeltaTokens._fields))
COLUMNS = "token_ids must have a power of two up to 64 columns, got"
K_COLUMNS = [({"candidates.token_ids": size(1, n)}, f"candidates.{COLUMNS} {n}") for n in (0, 3, 128)]
ALL_HEADS = ("q", "k_new", "v_new", "k_cache", "v_cache", "out")
HEADS_3 = dict.fromkeys(ALL_HEADS[1:5], size(1, 3))
HEADS = "q must have a multiple of the heads of k_new, got"
LINEAR_OPTIONS = [
    *each("expected_rows", "an int of at least 0", (-1,), (2.0, True, "9")),
    *each("norm_eps", POSITIVE, (0.0, math.inf, math.nan), (True, "1e-6")),
    ({"norm_eps": None}, "square_sums needs norm_eps, got None"),
]
# Three requests with every optional tensor; the changed arguments, and the message.
ERRORS = {
    "topk_candidates": [
        *(({"scores": size(1, n)}, f"scores must have 1 to 1048576 columns, got {n}") for n in (0, 1_048_577)),
        *each("max_candidates", "a power of two up to 64", (0, 12, 128)),
        *each("top_k", "an int32", (2**31, -(2**31) - 1)),
        *each("top_k", "an integer or a tensor .*", (), (5.0, True)),
        *(
            line
            for name in ("top_p", "min_p")
            for line in each(name, "a number or a tensor .*", (), ("1", None, False))
        ),
        *each("temperature", "a number or a tensor .*", (), ([1.0],)),
        ({"is_logits": False}, "temperature must be None when scores are probabilities"),
        *(
            (dict.fromkeys({*OF_TABLE, "table"} - {x}), "table must be given with table_rows, .* or scored, got None")
            for x in OF_TABLE
        ),
        *(({x: None}, f"text_breaks and last_tokens {TOGETHER}") for x in ("text_breaks", "last_tokens")),
        *(({x: None}, f"requests and scored {TOGETHER}") for x in ("requests", "scored")),
        *((dict.fromkeys(("requests", x, "scored")), ALONE) for x in ("drawn", "step")),
        FEW_ROWS,
    ],
    "reweight_scatter": [
        *K_COLUMNS,
        FEW_ROWS,
    ],
    "draw": [
        *K_COLUMNS,
        ({"candidates": None}, "candidates must be the Candidates of topk_candidates, got NoneType"),
    ],
    "begin_step": [
        ({"tokens": size(1, 0)}, "tokens must have at least one column, got none"),
        ({"new_lens": None}, r"new_lens must be given with tokens \[B, N\], got None"),
        ({"history.tokens": size(1, 0)}, "history.tokens must have at least one column, got none"),
        (
            {"out": lambda x: empty_requests(2, x.due.device, 2)},
            "out must have a row for each of the 3 requests, got 2",
        ),
        *each("padding_row", "an int from 0 to 5", (6, -1), (1.0, True)),
        ({"drafts.token_ids": size(1, 0)}, "drafts.token_ids must have at least one column, got none"),
    ],
    "limit_span": [
        ({"tokens": size(1, 0)}, "tokens must have at least one column, got none"),
        ({"tokens": size(1, 3), "new_lens": None}, "new_lens must be given with tokens of several columns, got 3"),
        ({"table.span_end_token_ids": size(1, 0)}, "table.span_end_token_ids must have at least one column, got none"),
    ],
    "lay_out": [
        ({"candidate_ids": size(0, 0)}, "candidate_ids must have at least one row, got none"),
        ({"slot_table": size(0, 4)}, "slot_table must have at least 6 rows, got 4"),
        *(
            line
            for name in ("page_size", "max_new", "num_heads", "num_kv_heads")
            for line in each(name, LEAST_1, (0, -4), (2.0, True, "4"))
        ),
        *each("num_heads", "a multiple of num_kv_heads, 2, up to 64 times this number", (3, 130)),
        ({"requests": None}, "delta must be passed, or requests and history, got history"),
        ({"history": None}, "delta must be passed, or requests and history, got requests"),
        ({"requests": None, "history": None}, "delta must be passed, or requests and history, got neither"),
        ({"delta": DELTA}, "delta must be passed, or requests and history, got delta and requests and history"),
        ({"history.tokens": size(1, 0)}, "history.tokens must have at least one column, got none"),
    ],
    "pack_drafts": [
        *(({"scored.token_ids": size(1, n)}, f"scored.{COLUMNS} {n}") for n in (0, 3, 6, 128)),
        *(
            ({"scored": rows(n)}, rf"scored must have 1 \+ 2 rows per request for at least 3 .*, got {n}")
            for n in (6, 10)
        ),
    ],
    "embed_tokens": [
        *(({"embedding": size(dim, 0)}, "embedding must have at least one row and column, got .*0") for dim in (0, 1)),
        ({"inv_freq": size(0, 0)}, "inv_freq must have at least one element, got none"),
        *each("rope_scale", "a finite number", (math.inf, math.nan), ("1", True)),
    ],
    "rope_cache": [
        *(
            ({"k_cache": size(dim, n)}, r"k_cache must have at least one head and an even last dimension, got .* \[")
            for dim, n in ((2, 15), (2, 0), (1, 0))
        ),
        *each("num_heads", LEAST_1, (0,), (2.0, True)),
        *each("norm_eps", "a positive number", (0.0, math.inf, math.nan), ("1e-6",)),
    ],
    "ragged_linear": [
        *LINEAR_OPTIONS,
        ({"x": size(1, 0)}, "x must have at least one column"),
        ({"weight": size(0, 0)}, "weight must have at least one row, got none"),
        ({"weight": size(0, 97), "swiglu": True, "bias": None}, r"weight must have an even number of rows.* \[97, "),
    ],
    "value_head": [
        ({"hidden": size(1, 0)}, "hidden must have at least one column"),
        *LINEAR_OPTIONS,
    ],
    "candidate_values": [
        ({"embedding": size(1, 0)}, "embedding must have at least one column"),
        ({"fc_weight": size(0, 0)}, "fc_weight must have at least one row"),
        ({"bins_weight": size(0, 65)}, "bins_weight must have 1 to 64 rows, got 65"),
    ],
    "value_tree_attention": [
        (HEADS_3 | {"q": size(1, 4), "out": size(1, 4)}, f"{HEADS} 4 query and 3 key/value"),
        ({"q": size(1, 0), "out": size(1, 0)}, f"{HEADS} 0 query and "),
        (HEADS_3 | dict.fromkeys(HEADS_3, size(1, 0)), f"{HEADS} . query and 0 key/value"),
        ({"counters": i32(1)[:0]}, r"counters must be int32 \[\d+ or more\], got int32 \[0\]"),
        *each("page_size", LEAST_1, (0, -1), (True, 1.0)),
        *each("sm_scale", "a finite number or None", (math.inf, math.nan), (True, "1")),
        (dict.fromkeys(ALL_HEADS, size(2, 0)), "q must have a last dimension of at least 1, got 0"),
        (
            {"backend": "triton"} | dict.fromkeys(ALL_HEADS, size(2, 257)),
            "q must have a last dimension of 1 to 256 for backend 'triton', got 257",
        ),
        (
            {"backend": "triton"} | dict.fromkeys(ALL_HEADS, size(1, 1)) | {"q": size(1, 65), "out": None},
            "q must have at most 64 heads per head of k_new for backend 'triton', got 65",
        ),
    ],
}


@pytest.mark.parametrize(
    ("name", "changes", "message"), [(name, *error) for name, errors in ERRORS.items() for error in errors]
)
def test_errors_name_the_argument(device, name, changes, message):
    """Runs the reference on a CPU, unless the error is specific to the kernel."""
    function = operators()[name].function
    arguments = arguments_of(small_case(name, rows_not_there="2"), device if "backend" in changes else "cpu")
    function(**arguments)
    for path, change in changes.items():
        argument, _, field = path.partition(".")
        if callable(change):
            change = change(getattr(arguments[argument], field) if field else arguments[argument])
        arguments = changed(arguments, path, change)
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        function(**arguments)


def test_wrong_plan_is_rejected():
    """``test_operator_laws.py`` covers all other tensors."""
    arguments = arguments_of(small_case("value_tree_attention"), "cpu")
    (tokens, heads, _), kv_heads = arguments["q"].shape, arguments["k_new"].shape[1]
    max_len = arguments["slot_table"].shape[1] * arguments["page_size"]
    shape = plan_shape(tokens, len(arguments["table_rows"]), heads // kv_heads, max_len)
    arguments["plan"] = torch.zeros(shape, dtype=torch.int32)
    assert_refuses(operators()["value_tree_attention"].function, arguments, "plan", "apart")
