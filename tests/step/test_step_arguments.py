"""Errors of guided steps name the invalid argument."""

import re
from dataclasses import replace
from functools import partial

import pytest
import torch

from lenvm_kernels.guidance import parse_guidance
from lenvm_kernels.ops.topk_candidates import MAX_VOCAB
from lenvm_kernels.step import EngineSlots, GuidedStep, Sampling, StepBatch, StepConfig
from tests.helpers.drafts import make_drafts
from tests.helpers.engine import Engine, make_step, random_scores, take_step
from tests.helpers.models import EOS, VOCAB
from tests.helpers.wrong_tensors import assert_refuses


def good_step(rows=2):
    """Arguments of :meth:`GuidedStep.step` for two requests."""
    i32 = torch.zeros(rows, dtype=torch.int32)
    return dict(
        scores=torch.zeros(rows, VOCAB),
        tokens=i32,
        table_rows=torch.arange(rows),
        lengths=i32 + 1,
        top_k=i32,
        top_p=i32 + 1.0,
        min_p=i32 + 0.0,
        drawn=i32,
        active=i32 == 0,
    )


GOOD_EXTEND = dict(
    tokens=torch.zeros(3, dtype=torch.int32), slots=torch.arange(3), table_rows=torch.arange(2)
) | dict.fromkeys(("starts", "lens", "cached_lens"), torch.zeros(2, dtype=torch.int32))


FLOATS, INTEGERS = [torch.float32, torch.bfloat16, torch.float16], [torch.int32, torch.int64]


GOOD_PREDICT = dict(tokens=torch.arange(2), table_rows=torch.arange(2), lengths=torch.ones(2, dtype=torch.int32))


@pytest.mark.parametrize(
    ("method", "good", "name", "shape", "dtypes"),
    [
        ("step", good_step(), "scores", r"[*, 97]", FLOATS),
        *(("step", good_step(), name, "[2]", INTEGERS) for name in ("tokens", "table_rows", "drawn")),
        ("step", good_step(), "lengths", "[2]", [torch.int32]),
        ("step", good_step(), "active", "[2]", [torch.bool]),
        ("step", good_step() | {"probs": torch.zeros(2, VOCAB)}, "probs", "[2, *]", [*FLOATS, torch.float64]),
        ("extend", GOOD_EXTEND, "tokens", "[*]", INTEGERS),
        ("extend", GOOD_EXTEND, "slots", "[3]", INTEGERS),
        ("extend", GOOD_EXTEND, "table_rows", "[*]", INTEGERS),
        *(("extend", GOOD_EXTEND, name, "[2]", [torch.int32]) for name in ("starts", "lens", "cached_lens")),
        ("predict", GOOD_PREDICT, "tokens", "[*]", INTEGERS),
        ("predict", GOOD_PREDICT, "table_rows", "[2]", INTEGERS),
        ("predict", GOOD_PREDICT, "lengths", "[2]", [torch.int32]),
    ],
)
def test_every_tensor_is_checked(models, method, good, name, shape, dtypes):
    step = make_step(models.value)[0]
    calls = {
        "step": partial(take_step, step),
        "extend": step.extend,
        "predict": lambda **batch: step.predict(StepBatch(**batch)),
    }
    function, shown = calls[method], name if method == "extend" or name not in StepBatch._fields else f"batch.{name}"
    accepted = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    free = ["rows"] * shape.startswith("[*") + ["columns"] * shape.endswith(", *]") + ["apart"]
    assert_refuses(function, good, name, *accepted, *free, shown=shown)
    with pytest.raises(ValueError, match=re.escape(f"{shown} must be {'|'.join(accepted)} {shape} on cpu, got")):
        function(**good | {name: good[name].to("meta")})


@pytest.mark.parametrize("begins", [[2, 1], [-1], [0, 4]])
def test_invalid_begins_are_rejected(models, begins):
    step = make_step(models.value)[0]
    with pytest.raises(ValueError, match=rf"begins must be ascending places of 0 to 3.* got {re.escape(str(begins))}"):
        step.extend(**GOOD_EXTEND, begins=begins)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_requests": 0}, "max_requests must be at least 1, got 0"),
        ({"chunk_tokens": 0}, "chunk_tokens must be at least 1, got 0"),
        ({"max_delta": 0}, "max_delta must be at least 1, got 0"),
        ({"max_delta": -1}, "max_delta must be at least 1, got -1"),
        ({"value_stride": 0}, "value_stride must be at least 1, got 0"),
        ({"max_candidates": 5}, "max_candidates must be a power of two up to 64, got 5"),
        ({"max_candidates": 128}, "max_candidates must be a power of two up to 64, got 128"),
        ({"vocab_size": 0}, f"vocab_size must be from 1 to {MAX_VOCAB}, got 0"),
        ({"vocab_size": 2**31}, f"vocab_size must be from 1 to {MAX_VOCAB}, got {2**31}"),
        ({"max_drafts": -1}, "max_drafts must be at least 0 and less than max_delta = 16, got -1"),
        ({"max_drafts": 16}, "max_drafts must be at least 0 and less than max_delta = 16, got 16"),
        ({"text_breaks": torch.zeros(9)}, r"text_breaks must be int8 \[\*\], got float32 \[9\] on cpu"),
    ],
)
def test_sizes_are_checked(change, message):
    with pytest.raises(ValueError, match=message):
        StepConfig(**{"vocab_size": VOCAB} | change)


def test_constructor_arguments_are_checked(models):
    value, slots = models.value, EngineSlots(torch.zeros(3, 4, dtype=torch.int32), 12)
    config, graphs = StepConfig(vocab_size=VOCAB), "graphs must be None or False unless the value model is on a GPU"
    tables = [slots._replace(table=bad) for bad in (slots.table.long(), slots.table[0], slots.table.to("meta"))]
    for error, message, *arguments in (
        (ValueError, "num_slots must be at least 1, got 0", value, slots._replace(num_slots=0), config),
        *((ValueError, r"slots.table must be int32 \[\*, \*\] on cpu, got", value, bad, config) for bad in tables),
        (TypeError, "slots must be PagedSlots or EngineSlots, got Tensor", value, slots.table, config),
        (TypeError, "config must be a StepConfig, got int", value, slots, VOCAB),
        (ValueError, graphs, value, slots, replace(config, graphs=True)),
        (ValueError, f"{graphs}, got none", None, slots, replace(config, graphs=True)),
    ):
        with pytest.raises(error, match=message):
            GuidedStep(*arguments)


def test_requests_are_checked(models):
    step = make_step(models.value, rows=3)[0]
    for row in (-1, 3):
        with pytest.raises(IndexError, match=rf"table_row must be in \[0, 3\), got {row}"):
            step.add_request(row, None, set())
    with pytest.raises(ValueError, match="eos_token_ids must be at most 8 ids, got 9"):
        step.add_request(0, None, set(range(9)))


@pytest.mark.parametrize(
    ("guidance", "message"),
    [
        ({"value_scale": 0.5}, "value_mode mul needs a value model; without one, give a target_length"),
        ({"target_length": 9, "op": "eq"}, "value_constraint must be one of near, ge_near, le_near .*, got 'eq'"),
        ({"target_length": 9, "value_min": 0.1}, "value_min must not be given without a value model, got 0.1"),
        ({"return_values": True}, "return_values must not be given without a value model, got True"),
    ],
)
def test_parameters_that_need_a_value_model_are_rejected_without_one(guidance, message):
    step, slots = make_step(None)
    Engine(step, slots).admit(2, [3, 4], {"target_length": 5}, prompt_len=2)
    with pytest.raises(ValueError, match=message):
        step.add_request(2, parse_guidance(guidance), {EOS})
    assert step.table.columns.target_length[2] == 5  # the row is unchanged


def test_batches_are_checked(models):
    step = make_step(models.value, max_candidates=64, max_requests=2)[0]
    for rows in (0, 3):
        with pytest.raises(ValueError, match=f"scores must be of 1 to max_requests = 2 requests, got {rows}"):
            take_step(step, **good_step(rows))
    prompts, sampling = StepBatch(*(torch.arange(3) for _ in range(2)), torch.ones(3).int()), Sampling(2, 1.0, 0.0)
    for error, message, call, arguments in (
        (ValueError, "tokens must be of at most max_requests = 2 requests, got 3", step.predict, [prompts]),
        (TypeError, "batch must be a StepBatch, got tuple", step.predict, [tuple(prompts)]),
        (TypeError, "batch must be a StepBatch, got int", step.step, [torch.zeros(3, VOCAB), 3, sampling]),
        (TypeError, "sampling must be Sampling, got int", step.step, [torch.zeros(3, VOCAB), prompts, 3]),
    ):
        with pytest.raises(error, match=message):
            call(*arguments)
    with pytest.raises(ValueError, match=r"scores must be .* \[\*, 97\] on cpu, got float32 \[1, 96\]"):
        take_step(step, **good_step(1) | {"scores": torch.zeros(1, VOCAB - 1)})
    with pytest.raises(ValueError, match=r"^value_model must read tokens to predict lengths before any is drawn"):
        make_step(None)[0].predict(StepBatch(*torch.zeros(2, 1).int(), torch.ones(1).int()))


@pytest.fixture(params=["step", "predict"])
def told(models, request):
    """A call that takes new tokens of two requests, its valid arguments, and the number of requests in errors."""
    step, ones = make_step(models.value, max_drafts=2)[0], torch.ones(2, dtype=torch.int32)
    good = dict(tokens=torch.zeros(2, 3).long(), table_rows=torch.arange(2), lengths=ones, new_lens=ones)
    sampling = dict(top_k=4, top_p=1.0, min_p=0.0, is_logits=True)
    calls = {
        "step": lambda **batch: take_step(step, random_scores(2), **batch, **sampling),
        "predict": lambda **batch: step.predict(StepBatch(**batch)),
    }
    return calls[request.param], good, "2" if request.param == "step" else r"\*"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": torch.zeros(2, 0).long()}, "tokens must have at least one column, got none"),
        ({"tokens": torch.zeros(2).long()}, r"tokens must be int32\|int64 \[B, \*\] on cpu, got int64 \[2\]"),
        ({"new_lens": None}, r"tokens must be int32\|int64 \[B\] on cpu, got int64 \[2, "),
        ({"new_lens": torch.ones(3).int()}, r"new_lens must be int32 \[2\] on cpu, got int32 \[3\]"),
        ({"new_lens": torch.ones(2).long()}, r"new_lens must be int32 \[2\] on cpu, got int64 \[2\]"),
    ],
)
def test_new_tokens_are_checked(told, change, message):
    function, good, requests = told
    function(**good)
    with pytest.raises(ValueError, match=f"^batch.{message.replace('B', requests)}"):
        function(**good | change)


@pytest.mark.parametrize(("max_drafts", "columns"), [(2, 4), (0, 2)])
def test_columns_of_predicted_tokens_are_checked(models, max_drafts, columns):
    step, ones = make_step(models.value, max_drafts=max_drafts)[0], torch.ones(2, dtype=torch.int32)
    batch = StepBatch(torch.zeros(2, 1 + max_drafts).long(), torch.arange(2), ones, ones)
    step.predict(batch)
    message = rf"^batch.tokens must have 1 to 1 \+ max_drafts = {1 + max_drafts} columns, got {columns}"
    with pytest.raises(ValueError, match=message):
        step.predict(batch._replace(tokens=torch.zeros(2, columns).long()))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"drafts": None}, ValueError, "verify must be None, or 'same_draws' with drafts and sample"),
        ({"verify": "rejection"}, ValueError, "verify must be None, or 'same_draws' .* got 'rejection'"),
        ({"sample": False}, ValueError, "verify must be None, or 'same_draws' .* got 'same_draws'"),
        ({"drafts": (1, 2)}, TypeError, "drafts must be Drafts, got tuple"),
        (
            {"drafts": make_drafts([[5, 6, 7]], [[-1, 0, 1]])},
            ValueError,
            "drafts must have max_drafts = 2 columns, got 3",
        ),
        ({"drafts": make_drafts([[5]], [[-1]])}, ValueError, "drafts must have max_drafts = 2 columns, got 1"),
        ({"drafts": make_drafts([[5, 6]] * 2, [[-1, 0]] * 2)}, ValueError, r"drafts.token_ids must be .* \[1, \*\]"),
        ({"scores": torch.zeros(4, VOCAB)}, ValueError, r"scores must have 1 \+ max_drafts = 3 rows a request, got 4"),
        ({"drawn": torch.zeros(1)}, ValueError, r"drawn must be int32\|int64 \[3\]"),
        ({"top_p": torch.ones(3)}, ValueError, r"top_p must be float32 \[1\]"),
    ],
)
def test_drafts_are_checked(models, options, error, message):
    step, _ = make_step(models.value, max_drafts=2)
    one = torch.ones(1, dtype=torch.int32)
    arguments = dict(scores=torch.zeros(3, VOCAB), tokens=one, table_rows=one, lengths=one, top_k=4, top_p=1.0)
    arguments |= dict(min_p=0.0, is_logits=True, sample=True, verify="same_draws")
    arguments["drafts"] = make_drafts([[5, 6]], [[-1, 0]])
    take_step(step, **arguments)
    if options.get("drafts", 1) is None:
        options = options | {"scores": torch.zeros(1, VOCAB)}
    with pytest.raises(error, match=message):
        take_step(step, **arguments | options)
