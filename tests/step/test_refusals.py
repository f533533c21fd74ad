"""Errors of guided steps name the invalid argument."""

import re

import pytest
import torch

from lenvm_kernels.guidance import parse_guidance
from lenvm_kernels.ops.topk_candidates import MAX_VOCAB
from lenvm_kernels.step import (
    ConstantValues,
    EngineSlots,
    GuidedStep,
    ModelValues,
    PreparedStep,
    Sampling,
    StepBatch,
    StepConfig,
)
from tests.helpers.cases import make_drafts
from tests.helpers.engine import make_step, take_step
from tests.helpers.models import EOS, VOCAB
from tests.helpers.wrong_tensors import assert_refuses

FLOATS, INTEGERS, INT32 = ["float32", "bfloat16", "float16"], ["int32", "int64"], ["int32"]
TWO = torch.arange(2, dtype=torch.int32)
BATCH = dict(tokens=TWO, table_rows=TWO.long(), lengths=TWO + 1)
GROWN = BATCH | dict(tokens=torch.zeros(2, 3, dtype=torch.int32), new_lens=TWO + 1)
FILTERS = dict(top_k=TWO, top_p=TWO + 1.0, min_p=TWO + 0.0)
SCORES = torch.zeros(2, VOCAB)
MASK = torch.full((2, 4), -1, dtype=torch.int32)
STEP = BATCH | FILTERS | dict(scores=SCORES, drawn=TWO, probs=SCORES, vocab_mask=MASK)
EXTEND = dict(tokens=TWO.repeat(2)[:3].clone(), table_rows=TWO.long())
EXTEND |= dict.fromkeys(("starts", "lens", "cached_lens"), TWO * 0)
DRAFTED = dict(tokens=TWO[:1] + 5, table_rows=TWO[:1].long(), lengths=TWO[:1] + 1, top_k=4, top_p=1.0, min_p=0.0)
DRAFTED |= dict(scores=torch.zeros(3, VOCAB), is_logits=True, sample=True, verify="same_draws")
DRAFTED |= dict(drafts=make_drafts([[5, 6]], [[-1, 0]]))

CALLS = {
    "prepare": lambda step, logits=None, drafts=None, **batch: step.prepare(logits, StepBatch(**batch), drafts),
    "step": take_step,
    "predict": lambda step, **batch: step.predict(StepBatch(**batch)),
    "extend": lambda step, **arguments: step.extend(**arguments),
    "any": lambda step, /, **methods: [getattr(step, name)(*arguments) for name, arguments in methods.items()],
}


@pytest.mark.parametrize(
    ("call", "good", "names", "shape", "accepted"),
    [
        ("prepare", BATCH | {"logits": SCORES}, "logits", "[2, *]", FLOATS),
        ("prepare", BATCH, "batch.tokens", "[*]", INTEGERS),
        ("prepare", BATCH, "batch.table_rows", "[2]", INTEGERS),
        ("prepare", BATCH | {"active": TWO == 0}, "batch.active", "[2]", ["bool"]),
        ("prepare", GROWN, "batch.tokens", "[*, *]", INTEGERS),
        ("prepare", GROWN, "batch.lengths batch.new_lens", "[2]", INT32),
        ("step", STEP, "scores", "[2, *]", FLOATS),
        ("step", STEP, "drawn", "[2]", INTEGERS),
        ("step", STEP, "sampling.vocab_mask", "[2, *]", INT32),
        ("step", STEP, "probs", "[2, *]", [*FLOATS, "float64"]),
        ("predict", GROWN, "batch.lengths", "[2]", INT32),
        ("extend", EXTEND, "tokens table_rows", "[*]", INTEGERS),
        ("extend", EXTEND, "starts lens cached_lens", "[2]", INT32),
    ],
)
def test_every_tensor_is_checked(models, call, good, names, shape, accepted):
    step = make_step(models.value, max_drafts=2)[0]
    free = ["rows"] * shape.startswith("[*") + ["columns"] * shape.endswith(", *]") + ["apart"]
    for shown in names.split():
        name = shown.split(".")[-1]

        def function(**arguments):
            return CALLS[call](step, **arguments)

        assert_refuses(function, good, name, *accepted, *free, shown=shown)
        with pytest.raises(ValueError, match=re.escape(f"{shown} must be {'|'.join(accepted)} {shape} on cpu, got")):
            function(**good | {name: good[name].to("meta")})


THREE = torch.arange(3)
MANY = dict(tokens=THREE, table_rows=THREE, lengths=THREE.int())
NONE = {name: x[:0] for name, x in MANY.items()}
NO_VERIFY = "verify must be None, or 'same_draws' with drafts and sample, got"


@pytest.mark.parametrize(
    ("call", "arguments", "message"),
    [
        ("prepare", MANY, "batch.tokens must have 1 to max_requests = 2 requests, got 3"),
        ("prepare", NONE, "batch.tokens must have 1 to max_requests = 2 requests, got 0"),
        ("prepare", GROWN | {"tokens": torch.zeros(2, 0).int()}, "batch.tokens must have at least one column"),
        ("prepare", GROWN | {"tokens": TWO}, r"batch.tokens must be int32|int64 [*, *] on cpu, got int32 [2]"),
        ("prepare", BATCH | {"tokens": GROWN["tokens"]}, "batch.tokens must be int32|int64 [*] on cpu, got int32 [2"),
        ("predict", GROWN | {"tokens": torch.zeros(2, 4).int()},
         "batch.tokens must have 1 to 1 + max_drafts = 3 columns, got 4"),
        ("step", DRAFTED | {"verify": "rejection"}, f"{NO_VERIFY} 'rejection'"),
        ("step", DRAFTED | {"sample": False}, f"{NO_VERIFY} 'same_draws'"),
        ("step", DRAFTED | {"drafts": None, "scores": SCORES[:1]}, f"{NO_VERIFY} 'same_draws'"),
        ("step", DRAFTED | {"drafts": (1, 2)}, "drafts must be Drafts, got tuple"),
        ("step", DRAFTED | {"drafts": make_drafts([[5, 6, 7]], [[-1, 0, 1]])},
         "drafts must have max_drafts = 2 columns, got 3"),
        ("step", DRAFTED | {"drafts": make_drafts([[5]], [[-1]])}, "drafts must have max_drafts = 2 columns, got 1"),
        ("step", DRAFTED | {"drafts": make_drafts([[5, 6]] * 2, [[-1, 0]] * 2)}, "drafts.token_ids must be"),
        ("step", DRAFTED | {"scores": torch.zeros(4, VOCAB)}, "logits must be float32|bfloat16|float16 [3, *] on cpu"),
        ("step", DRAFTED | {"drawn": torch.zeros(1)}, "drawn must be int32|int64 [3] on cpu, got float32 [1]"),
        ("step", DRAFTED | {"top_p": torch.ones(3)}, "sampling.top_p must be float32 [1] on cpu, got float32 [3]"),
        ("step", STEP | {"scores": torch.zeros(2, 0)}, "scores must have at least one column, got none"),
        ("step", STEP | {"vocab_mask": torch.zeros(2, 3).int()},
         "sampling.vocab_mask must have at least 4 columns, got 3"),
        ("step", STEP | {"temperature": 1.0}, "sampling.temperature must be None when scores are probabilities"),
        ("step", STEP | {"scores": None}, "scores must be given unless logits were passed to prepare, got neither"),
        ("extend", EXTEND | {"begins": [2, 1]}, "begins must be ascending indices from 0 to the number of tokens, 3"),
        ("extend", EXTEND | {"begins": [-1]}, "begins must be ascending indices from 0 to the number of tokens, 3"),
        ("extend", EXTEND | {"begins": [0, 4]}, "begins must be ascending indices from 0 to the number of tokens, 3"),
        ("any", dict(prepare=(None, (1, 2))), "batch must be StepBatch, got tuple"),
        ("any", dict(predict=((1, 2),)), "batch must be StepBatch, got tuple"),
        ("any", dict(step=(StepBatch(**BATCH), Sampling(2, 1.0, 0.0))), "prepared must be PreparedStep, got StepBatch"),
        ("any", dict(step=(PreparedStep(*[None] * 5), 3)), "sampling must be Sampling, got int"),
    ],
)  # fmt: skip
def test_refused_calls(models, call, arguments, message):
    step = make_step(models.value, max_drafts=2, max_requests=2)[0]
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}"):
        CALLS[call](step, **arguments)


SLOTS, CONFIG = EngineSlots(torch.zeros(3, 4, dtype=torch.int32), 12), {"vocab_size": VOCAB}
NOT_INT32 = "slots.table must be int32 [*, *] on cpu, got"
NO_SOURCE = "values must be a ValueSource: ModelValues(value_model), ProbeValues(probe) or ConstantValues(), got"
NO_GRAPHS = "graphs must be None or False unless kernels run on a GPU, got True"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_requests": 0}, "max_requests must be at least 1, got 0"),
        ({"chunk_tokens": 0}, "chunk_tokens must be at least 1, got 0"),
        ({"max_delta": 0}, "max_delta must be at least 1, got 0"),
        ({"value_stride": 0}, "value_stride must be at least 1, got 0"),
        ({"max_candidates": 5}, "max_candidates must be a power of two up to 64, got 5"),
        ({"vocab_size": 0}, f"vocab_size must be from 1 to {MAX_VOCAB}, got 0"),
        ({"vocab_size": 2**31}, f"vocab_size must be from 1 to {MAX_VOCAB}, got {2**31}"),
        ({"max_drafts": -1}, "max_drafts must be at least 0 and less than max_delta = 16, got -1"),
        ({"max_drafts": 16}, "max_drafts must be at least 0 and less than max_delta = 16, got 16"),
        ({"text_breaks": torch.zeros(9)}, "text_breaks must be int8 [*], got float32 [9] on cpu"),
        ({"graphs": True}, NO_GRAPHS),
        ({"graphs": True, "values": ConstantValues()}, NO_GRAPHS),
        ({"values": None}, f"{NO_SOURCE} NoneType"),
        ({"slots": SLOTS._replace(num_slots=0)}, "slots.num_slots must be at least 1, got 0"),
        ({"slots": SLOTS.table}, "slots must be PagedSlots or EngineSlots, got Tensor"),
        ({"slots": SLOTS._replace(table=SLOTS.table.long())}, NOT_INT32),
        ({"slots": SLOTS._replace(table=SLOTS.table[0])}, NOT_INT32),
        ({"slots": SLOTS._replace(table=SLOTS.table.to("meta"))}, NOT_INT32),
        ({"config": VOCAB}, "config must be a StepConfig, got int"),
    ],
)
def test_refused_constructions(models, change, message):
    given = {"values": ModelValues(models.value), "slots": SLOTS} | CONFIG | change
    values, slots, config = given.pop("values"), given.pop("slots"), given.pop("config", None)
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}"):
        GuidedStep(values, slots, StepConfig(**given) if config is None else config)


def test_value_source_belongs_to_one_step(models):
    values = ModelValues(models.value)
    GuidedStep(values, SLOTS, StepConfig(**CONFIG))
    with pytest.raises(ValueError, match="values belongs to another step; create a source for each GuidedStep"):
        GuidedStep(values, SLOTS, StepConfig(**CONFIG))
    with pytest.raises(ValueError, match="values must be ModelValues or ProbeValues to predict lengths, got Constant"):
        make_step(None)[0].predict(StepBatch(**BATCH))


@pytest.mark.parametrize(
    ("row", "guidance", "eos", "message"),
    [
        (-1, None, 1, "table_row must be in [0, 3), got -1"),
        (3, None, 1, "table_row must be in [0, 3), got 3"),
        (2, None, 9, "eos_token_ids must have at most 8 ids, got 9"),
        (2, {"token_temperature_scale": {1: 2.0, 2: 2.0}}, 1, "token_temperature_scale must have at most 1 tokens"),
        (2, {"value_scale": 0.5}, 1, "value_mode mul needs a value model; without one, give a target_length"),
        # The fault is in the answer after a thought.
        (2, {"thinking_budget": 5, "end_token_ids": [1], "target_length": 9, "op": "eq"}, 1,
         "value_constraint must be one of near, ge_near, le_near without"),
    ],
)  # fmt: skip
def test_refused_requests(row, guidance, eos, message):
    step = make_step(None, rows=3, max_scaled_tokens=1)[0]
    step.add_request(2, parse_guidance({"target_length": 5}), {EOS}, prompt_len=2)
    with pytest.raises((IndexError, ValueError), match=f"^{re.escape(message)}"):
        step.add_request(row, None if guidance is None else parse_guidance(guidance), set(range(eos)))
    assert step.table.columns.target_length[2] == 5  # the row is unchanged


def test_answer_has_the_default_stride_and_tokens_of_the_vocabulary():
    step = make_step(None, rows=3, max_scaled_tokens=1, value_stride=4)[0]
    given = {"thinking_budget": 5, "end_token_ids": [1], "target_length": 9}
    given["token_temperature_scale"] = {10**30: 2.0}
    step.add_request(1, parse_guidance(given), {EOS, -1, 2**40})
    step.flush()
    columns = step.table.columns
    answer = int(columns.answer_row[1])
    for row in (1, answer):
        assert columns.value_stride[row] == 4 and [t for t in columns.eos_token_ids[row].tolist() if t >= 0] == [EOS]
