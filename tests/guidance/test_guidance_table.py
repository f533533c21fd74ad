"""The guidance table on the device: parameters are in the request's row, written once, and removed with the request."""

import math

import pytest
import torch

from lenvm_kernels.guidance import GuidanceParams, GuidanceTable, SpanState, parse_guidance
from lenvm_kernels.types import Mode
from tests.helpers.watch import Operators

INF, NAN, NO_LIMIT = math.inf, math.nan, 2**31 - 1
FULL = {
    "target_length": 5, "op": "le_near", "strength": 2.5, "entropy_threshold": 0.5, "value_min": 0.125, "gamma": 0.5,
    "return_values": True, "min_end_prob": 0.25, "tolerance": 0.5, "end_token_ids": [1, [2, 9], 3], "hard_limit": 9,
    "answer_length": 5, "allow_eos": True, "start_token_ids": [[5, 6], 4], "hard_limit_grace": 3, "end_message": [7, 7],
    "value_stride": 4, "token_temperature_scale": {3: 4, 1: 2, 2: 3},
}  # fmt: skip
UNGUIDED = dict(
    seed=0, scaled_token_ids=[0] * 3, token_scales=[1] * 3, eos_token_ids=[-2] * 3, span_end_token_ids=[-2] * 4,
    span_token_ids=[-2] * 31, closing_token_ids=[-2] * 32, span_first_bits=0, span_end_bits=0, span_start_bits=0,
    span_seen=0, span_match=0, closing_from=-1, mode=Mode.UNGUIDED, scale=1, nats_per_token=-math.log(0.997),
    value_min=-INF, target_length=0, tolerance=0, min_end_prob=INF, least_share=0, due_length=INF,
    entropy_threshold=NAN, answer_length=0, prompt_len=0, hard_limit=NO_LIMIT, hard_limit_grace=0, value_stride=1,
    counts_down=False, return_values=False, allows_eos=False, span_ended=False, ending_token_ids=[-2] * 7, faults=0,
)  # fmt: skip
# A request, its end-of-sequence ids, the columns that differ from an unguided request.
REQUESTS = [
    (None, set(), {}),
    (None, {7}, dict(eos_token_ids=[7, -2, -2], ending_token_ids=[7] + [-2] * 6)),
    ({"mode": "exp", "scale": 3, "entropy_threshold": 0.5, "gamma": 0.9}, set(),
     dict(mode=Mode.EXP, scale=3, entropy_threshold=0.5, nats_per_token=-math.log(0.9))),
    # 0 is a value, unlike None.
    ({"mode": "centered_exp", "scale": -2, "entropy_threshold": 0.0, "value_min": 0.0}, set(),
     dict(mode=Mode.CENTERED_EXP, scale=-2, entropy_threshold=0, value_min=0)),
    ({"target_length": 0, "length_mode": "remaining", "op": "ge_near", "min_end_prob": 0}, set(),
     dict(mode=Mode.GE_NEAR, scale=5, min_end_prob=0, least_share=0.05)),
    ({"target_length": 50, "op": "le"}, set(), dict(mode=Mode.LE, target_length=50, counts_down=True, due_length=50)),
    (FULL, {5, 4, 6}, dict(
        scaled_token_ids=[1, 2, 3], token_scales=[2, 3, 4], eos_token_ids=[4, 5, 6], span_end_token_ids=[1, 2, 3, -2],
        ending_token_ids=[4, 5, 6, 1, 2, 3, -2], span_token_ids=[1, 2, 9, 3, 5, 6, 4] + [-2] * 24,
        closing_token_ids=[7, 7, 1] + [-2] * 29, span_first_bits=0b1011011, span_end_bits=0b1101,
        span_start_bits=0b1100000, mode=Mode.LE_NEAR, scale=2.5, nats_per_token=math.log(2), value_min=0.125,
        target_length=5, tolerance=2.5, min_end_prob=0.25, least_share=0.05, due_length=7.5, entropy_threshold=0.5,
        answer_length=5, hard_limit=9, hard_limit_grace=3, value_stride=4, counts_down=True, return_values=True,
        allows_eos=True,
    )),
]  # fmt: skip


def new_table(rows=3, **options):
    return GuidanceTable(rows, "cpu", **dict(max_eos=3, max_scaled_tokens=3) | options)


def assert_row(table, row, **expected):
    for name, value in (UNGUIDED | expected).items():
        column = getattr(table.columns, name)
        wanted = torch.tensor(value, dtype=column.dtype)
        torch.testing.assert_close(column[row], wanted, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(("request_", "eos", "expected"), REQUESTS)
def test_request_is_written_into_its_row(request_, eos, expected):
    """A request overwrites all columns of the previous one, and its removal leaves the row unguided."""
    table, params = new_table(), request_ and parse_guidance(request_)
    table.add_request(1, parse_guidance(FULL), {1, 2}, seed=3, span=SpanState(9, 4, end=8, match=3, closing_from=6))
    state = dict(prompt_len=4, span_seen=9, span_ended=True, span_match=3, closing_from=6, seed=3)
    assert {name: getattr(table.columns, name)[1].item() for name in state} == state
    table.columns.faults[1] = 4
    table.add_request(1, params, eos, prompt_len=9, seed=-(2**63))
    assert_row(table, 0)
    assert_row(table, 1, **dict(seed=-(2**63), prompt_len=9, span_seen=9) | expected)
    table.add_request(1, None, set())
    assert_row(table, 1)
    packed = GuidanceTable.from_params([None, params, params], [set(), eos, {*range(10, 13)}], "cpu")
    assert packed.columns.mode.tolist() == [0, *[expected.get("mode", 0)] * 2]
    assert packed.columns.eos_token_ids[1].tolist() == [*sorted(eos), *[-2] * (3 - len(eos))]


def test_from_params_needs_a_set_for_each_request():
    with pytest.raises(ValueError, match=r"eos_token_ids must have one set per request \(1\), got 2 sets"):
        GuidanceTable.from_params([None], [set(), set()], "cpu")


NEAR = {"target_length": 100, "value_constraint": "near"}


@pytest.mark.parametrize(
    ("request_", "shift"),
    [
        (NEAR, 6),
        (NEAR | {"target_length": 40, "value_constraint": "le_near"}, 4),  # at most a tenth
        (NEAR | {"value_constraint": "ge_near"}, 0),
        (NEAR | {"tolerance": 0.1}, 0),
        (NEAR | {"target_length_mode": "remaining"}, 0),
        (NEAR | {"value_constraint": "eq"}, 0),
    ],
)
def test_totals_with_an_early_aim(request_, shift):
    late, early = (new_table(1, early=early) for early in (0.0, 6.0))
    for table in (late, early):
        table.add_request(0, parse_guidance(request_), set())
    assert (late.columns.target_length - early.columns.target_length).tolist() == [shift]
    assert torch.equal(late.columns.due_length, early.columns.due_length)


@pytest.mark.parametrize(
    ("asked", "length"),
    [
        (None, 8),
        (NEAR | {"target_length": 0}, 8),
        (NEAR, 100),
        ({"target_length": 9, "answer_length": 4.5}, 13.5),
        (NEAR | {"value_constraint": "le_near", "answer_length": 4.5}, 34.5),
        (NEAR | {"value_constraint": "le_near", "target_length": 20}, 8),
        (NEAR | {"target_length": 3e38, "gamma": 0.1}, torch.finfo(torch.float32).max / -math.log(0.1)),
    ],
)
def test_target_logit_is_the_value_of_target_and_answer(asked, length):
    """It is at least 8 tokens, and ignores the early aim."""
    table = new_table(1, early=6.0)
    table.add_request(0, None if asked is None else parse_guidance({"end_token_ids": [3]} | asked), set())
    nats = torch.nn.functional.softplus(table.columns.target_logit.double())
    torch.testing.assert_close(nats / table.columns.nats_per_token, torch.tensor([length]).double(), rtol=1e-5, atol=0)


def test_lengths_of_unordered_rows():
    """Each row has its own discount and end-of-sequence ids; token -1 matches neither these ids nor their padding."""
    params = [parse_guidance({"gamma": gamma}) for gamma in (0.5, 0.9, 0.99, 0.8)]
    table = GuidanceTable.from_params(params, [{0, 3}, {1}, set(), {2}], "cpu")
    z = torch.tensor([0.0, 2.0, -1.0, 1.0, 0.5])
    rows, tokens = torch.tensor([3, 0, 2, 1, 0]), torch.tensor([1, 0, -1, -2 + 1, 1])
    expected = torch.nn.functional.softplus(z) / -torch.tensor([0.8, 0.5, 0.99, 0.9, 0.5]).log()
    expected[1] = 0.0
    torch.testing.assert_close(table.remaining_lengths(rows, z, tokens), expected)


FP32 = (
    "eos_token_ids and prompt_len must be int32, tokens of token_temperature_scale int64, and numbers of params fp32,"
)


@pytest.mark.parametrize(
    ("row", "params", "eos", "options", "message"),
    [
        (-1, None, set(), {}, r"table_row must be in \[0, 3\), got -1"),
        (0, None, set(), {"seed": 2**63}, f"seed must be an int64, got {2**63}"),
        (0, None, set(), {"seed": -(2**63) - 1}, f"seed must be an int64, got {-(2**63) - 1}"),
        (0, None, {2**31}, {}, f"{FP32} got .2147483648., 0 and GuidanceParams"),
        (0, None, {1}, {"prompt_len": 2**31}, f"{FP32} got .1., 2147483648 and GuidanceParams"),
        (0, GuidanceParams(token_temperature_scale={2**63: 2.0}), {1}, {}, FP32),
        (0, GuidanceParams(scale=1e39), {1}, {}, FP32),
    ],
)  # fmt: skip
def test_rejected_request_leaves_the_table_unchanged(row, params, eos, options, message):
    table = new_table()
    with pytest.raises((IndexError, ValueError), match=f"^{message}") as raised:
        table.add_request(row, params, eos, **options)
    assert isinstance(raised.value, IndexError) == message.startswith("table_row")
    with Operators() as seen:
        table.flush()
    assert seen.names == []


def test_pending_writes_are_rejected_during_graph_capture(monkeypatch):
    """Replays would repeat the write, over requests that were added later."""
    table = GuidanceTable(2, "cpu")
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    table.flush()
    table.add_request(1, None, set())
    with pytest.raises(RuntimeError, match=r"call flush\(\) before a graph is captured"):
        table.flush()
