"""``reweight_scatter``: all modes in one batch, ties, broken values, answers, rows that are hard to tilt."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lenvm_kernels.fuzz.case import CallInputs, Case, Difference, Operator, Result, beyond, differs, owners_at
from lenvm_kernels.fuzz.draws import Draws
from lenvm_kernels.fuzz.ops._inputs import SPARE_ROWS, fill, padded_rows, poisoned
from lenvm_kernels.fuzz.tolerances import TOLERANCE
from lenvm_kernels.guidance import GuidanceTable
from lenvm_kernels.guidance.fields import MAX_SPAN_ENDS
from lenvm_kernels.ops import reweight_scatter as ops
from lenvm_kernels.ops._common import INTERPRETED
from lenvm_kernels.ops.reweight_scatter import reweight_scatter
from lenvm_kernels.types import Candidates, GuidanceColumns, Mode, Status

NEAR = (Mode.NEAR, Mode.GE_NEAR, Mode.LE_NEAR)
TILTING = (Mode.MUL, Mode.LINEAR, Mode.EXP, Mode.LENGTH_MUL, Mode.EQ_SOFT, Mode.GE_SOFT, Mode.LE_SOFT)
# Modes that are compared if an answer is subtracted from the lengths, which costs precision. The other
# modes are covered by cases computed by hand.
ANSWERED = (Mode.UNGUIDED, Mode.VALUE_BIAS, Mode.EQ, Mode.GE, Mode.LE)
# Error of a root as a share of the range of values. It changes the probabilities in proportion to their sensitivity,
# which is large for clustered values. Targets, exponents, and lengths after subtraction of an answer have the fp32
# relative errors below.
ROOT_SHARE = 4e-6
FP32_MAX = torch.finfo(torch.float32).max
TARGET_WIDTH = LENGTH_WIDTH = 2.0**-21
EXPONENT_ERROR = 1e-6
# Guaranteed error of the expected value for all rows that are tilted to a target.
EXPECTED_VALUE_ERROR = 1e-5
# Value logits of rows with an answer are multiples of this step, so that fp32 differences keep their order.
ANSWERED_STEP = 2.0**-6

READS = ("token_ids", "probs", "status", "lost_mass")  # fields of the candidates
FLOATS = ("scale", "nats_per_token", "value_min", "target_length", "tolerance", "answer_length", "target_logit")
FREE = {
    **dict.fromkeys(("candidates.probs", "candidates.lost_mass"), "float64"),
    "value_logits": "float64 apart",
    "table.ending_token_ids": "columns apart",
    **{f"table.{name}": "strided" for name in ("mode", "counts_down", "faults")},
    **{f"table.{name}": "float64 strided" for name in FLOATS},
    "text_breaks": "rows",
    "probs": "float32 bfloat16 float16 float64 columns apart",
}

OPTIONS: dict[str, list[Any]] = {
    "columns": [1, 2, 4, 8, 16, 32, 64],
    "rows": ["usual", "hard to tilt"],
    "broken": [False, True],
    "table_rows": ["int64", "int32", "none"],
    "generated": [False, True],
    "text_breaks": [0, 1, 40],
    "values": ["of targets", "of candidates"],
    "scatter": [False, True],
    "probs": ["float32", "bfloat16", "float16"],
    "vocab": [70, 600],
    "padding": [0, 5],
    "constants": ["shipped", "large tiles, small slices"],
}


def inputs(case: Case, device: torch.device) -> CallInputs:
    options, draws, rows = case.options, case.draws(device), case.rows
    k, vocab = options["columns"], options["vocab"]
    usual = options["rows"] == "usual"
    p, z, columns = usual_rows(draws, rows, k) if usual else hard_rows(draws, rows, k)
    listed = p > 0
    ids = draws.uniform("token_ids", rows, vocab).argsort(dim=1)[:, :k]
    counts = listed.sum(1).int()
    status = draws.choose("status", rows, values=[int(s) for s in [Status.GUIDE] * 4 + [Status.SKIP, Status.UNGUIDED]])
    status = torch.where(counts == 0, int(Status.UNGUIDED), torch.where(counts == 1, int(Status.SINGLE), status))
    lost_mass = torch.zeros_like(p[:, 0])
    if options["broken"]:
        z = poisoned(draws, rows, z, of=0.3)
        broken = draws.chance("broken scores", rows, of=0.1)
        lost_mass, status = lost_mass.masked_fill(broken, math.nan), status.masked_fill(broken, int(Status.UNGUIDED))

    # The end of sequence may be a candidate; token 0 ends some requests.
    eos_column = draws.integers("eos column", rows, 2, low=-2 * k, high=k - 1)
    eos = torch.where(eos_column >= 0, ids.gather(1, eos_column.clamp(min=0)), -2)
    eos = torch.where((eos_column < -k) & (eos_column % 2 == 0), 0, eos)
    columns["eos_token_ids"] = eos.int()
    # One or two tokens that end the span may also be candidates.
    end_column = draws.integers("span end column", rows, 2, low=-3 * k, high=k - 1)
    ends = torch.where(end_column >= 0, ids.gather(1, end_column.clamp(min=0)), -2)
    columns["span_end_token_ids"] = torch.nn.functional.pad(ends, (0, MAX_SPAN_ENDS - 2), value=-2)
    columns["target_logit"] = draws.normal("target_logit", rows) * 3
    is_listed = options["table_rows"] != "none"
    table_rows = draws.places("table_rows", rows, SPARE_ROWS) if is_listed else draws.rows(len(rows))
    table = GuidanceTable(len(rows) + SPARE_ROWS, device, max_eos=2).columns
    fill(table, table_rows, columns, elsewhere=3)

    candidates = Candidates(torch.where(listed, ids, -1).int(), p, counts, status.to(torch.int8), lost_mass)
    of_targets = options["values"] == "of targets"
    value_logits = None if of_targets else padded_rows(z, options["padding"])
    arguments: dict[str, Any] = dict(candidates=candidates, value_logits=value_logits, table=table)
    if is_listed:
        arguments["table_rows"] = table_rows.to(getattr(torch, options["table_rows"]))
    if options["generated"]:
        arguments["generated"] = draws.choose("generated", rows, values=[0, 10, 30, 10_000]).int()
    if options["text_breaks"]:
        breaks = draws.integers("text_breaks", options["text_breaks"], low=0, high=127)
        arguments["text_breaks"] = breaks.to(torch.int8)
    if options["scatter"]:
        dense = draws.uniform("probs", rows, vocab).to(getattr(torch, options["probs"]))
        arguments["probs"] = padded_rows(dense, options["padding"])
    return CallInputs(arguments, len(rows))


def usual_rows(draws: Draws, rows, k: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(fp32 probabilities, fp32 value logits, columns of the table) for all modes and constraints."""

    def pick(name, *values):
        return draws.choose(name, rows, values=values)

    p = torch.softmax(draws.normal("p", rows, k) * pick("spread of p", 0.0, 1.0, 5.0, 12.0)[:, None], dim=1)
    p = p * draws.uniform("sum of p", rows, low=0.1)[:, None]
    count = torch.tensor([0, 1, 2, k, k], device=draws.device).clamp(max=k)
    count = count[draws.integers("count", rows, low=0, high=4)]
    p = torch.where(torch.arange(k, device=draws.device) < count[:, None], p, 0.0)
    z = draws.normal("z", rows, k) * pick("spread of z", 0.3, 2.0, 10.0)[:, None]
    z = z + pick("shift of z", 0.0, 3.0, -3.0, 25.0)[:, None]
    z = torch.where(pick("ties of z", False, True)[:, None], z.round(), z)
    mode = draws.integers("mode", rows, low=0, high=len(Mode) - 1)
    answer = pick("answer_length", 0.0, 1.0, 10.0, 100.0).masked_fill(~is_one_of(mode, ANSWERED), 0.0)
    z = torch.where(answer[:, None] > 0, (z / ANSWERED_STEP).round() * ANSWERED_STEP, z)

    has_target, near = mode >= Mode.EQ, is_one_of(mode, NEAR)
    target = pick("target_length", 0.0, 1.0, 30.0, 500.0, 32_768.0)
    target = torch.where(near, pick("near target", 0.0, 0.01, 1.0, 30.0, 500.0, 1e6, FP32_MAX), target)
    scale = pick("scale", -20.0, -1.0, 0.0, 0.3, 0.9, 1.0, 1.2, 2.0, 15.0)
    gamma = pick("gamma", 0.9, 0.997, 0.9999)
    columns = {
        "mode": mode,
        "scale": torch.where(near, pick("strength", 0.0, 0.5, 2.0, 5.0, 20.0, 100.0), scale),
        "nats_per_token": -torch.where(near, pick("near gamma", 0.9, 0.985, 0.997, 0.99999), gamma).log(),
        "value_min": pick("value_min", -math.inf, -math.inf, 0.2, 0.7),
        "target_length": torch.where(has_target, target, 0.0),
        "tolerance": torch.where(near, pick("tolerance", 0.0, 0.0, 0.5, 20.0, 1e5), 0.0),
        "counts_down": has_target & pick("counts_down", False, True),
        "answer_length": answer,
    }
    return p.float(), z.float(), columns


def hard_rows(draws: Draws, rows, k: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """As :func:`usual_rows`, but hard to tilt: probabilities from 1 to 1e-30, value ranges from 1 to 1e-7."""

    def uniform(name, low=0.0, high=1.0, *shape):
        return draws.uniform(name, rows, *shape, low=low, high=high)

    column = torch.arange(k, device=draws.device)
    smallest = 10 ** uniform("smallest", -30, 0, 1)
    p = smallest ** uniform("p", 0, 1, k)
    p[:, 0] = torch.where(draws.chance("one is likely", rows, of=0.5), p[:, 0], 1.0)
    count = draws.integers("count", rows, 1, low=min(2, k), high=k)
    p = torch.where(column < count, p, 0.0)
    span = 10 ** uniform("span", -7, 0, 1)
    middle = span / 2 + (1 - span) * uniform("middle", 0, 1, 1)
    shares = uniform("shares", 0, 1, k)
    clustered = draws.chance("clustered", rows, 1, of=0.3)  # most values are clustered at one end
    shares = torch.where(clustered, shares ** uniform("crowding", -6, 6, 1).exp(), shares)
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64, device=draws.device)[:k]
    shares[:, :2] = ends
    shares = torch.where(draws.chance("mirrored", rows, 1, of=0.5), shares, shares.flip(1))
    shares[:, :2] = torch.where(count == 2, ends, shares[:, :2])
    v = (middle + (shares - 0.5) * span).clamp(1e-9, 1 - 1e-9)
    mode = draws.choose("mode", rows, values=[int(m) for m in TILTING])
    target_value = (middle[:, 0] + uniform("target", -0.5, 0.5) * span[:, 0]).clamp(1e-6, 1 - 1e-6)
    gamma = 0.997
    columns = {
        "mode": mode,
        "scale": 10 ** uniform("scale", -2, 0.7),
        "nats_per_token": torch.full_like(target_value, -math.log(gamma)),
        "target_length": torch.where(mode >= Mode.EQ_SOFT, torch.log1p(-target_value) / math.log(gamma), 0.0),
        "answer_length": torch.zeros_like(target_value),
    }
    return (p / p.sum(1, keepdim=True)).float(), torch.logit(v).float(), columns


@dataclass(frozen=True)
class Requests:
    """Arguments with a row of the table per request, and value logits in fp64."""

    candidates: Candidates
    value_logits: Tensor
    table: GuidanceColumns
    options: dict[str, Any]  # generated and text_breaks

    @classmethod
    def of(cls, table_rows, *, candidates, value_logits, table, **options) -> "Requests":
        table = table._make(x[table_rows] for x in table)
        if value_logits is None:
            value_logits = table.target_logit[:, None].repeat(1, candidates.probs.shape[1])
        return cls(candidates, value_logits.double(), table, options)

    def column(self, name: str) -> Tensor:
        """A column of the table, fp64 ``[B, 1]``."""
        return getattr(self.table, name).double()[:, None]

    def reference(self, width: float) -> tuple[Tensor, Tensor]:
        """Guided probabilities and faults in fp64, with scales and targets times ``1 + width``."""
        wider = {name: getattr(self.table, name).double() * (1 + width) for name in ("scale", "target_length")}
        table = self.table._replace(**wider, faults=self.table.faults.clone())
        candidates = self.candidates._replace(probs=self.candidates.probs.double())
        guided = reweight_scatter(candidates, self.value_logits, table, **self.options, backend="reference")
        return guided, table.faults


def compare_guided(requests: Requests, guided: Tensor, table_rows: Tensor, faults: Tensor) -> list[Difference]:
    """Differences of guided probabilities ``[B, K]``, and of the table's faults, which are 0 in unused rows."""
    expected, faults_of_requests = requests.reference(0.0)
    expected_faults = torch.zeros_like(faults).index_copy(0, table_rows, faults_of_requests)
    lower, upper = (requests.reference(width)[0] for width in (-TARGET_WIDTH, TARGET_WIDTH))
    v, tilted = -torch.expm1(-lengths_of(requests)), is_one_of(requests.table.mode, TILTING)
    relative, absolute = TOLERANCE["reweight_scatter"][torch.float32]
    moved = (upper - expected).abs() + (lower - expected).abs() + conditioning(requests, v, expected)
    moved = moved.masked_fill(~tilted[:, None], 0.0)
    mean, expected_mean = (torch.where(tilted, (p.double() * v).sum(1), 0.0) for p in (guided, expected))
    expected = torch.where(is_as_near(requests, guided, expected)[:, None], guided.double(), expected)
    return [
        differs("faults", faults, expected_faults, owners_at(table_rows, len(faults))),
        beyond("guided probabilities", guided, expected, (relative, absolute + moved)),
        beyond("expected value", mean, expected_mean, (0.0, EXPECTED_VALUE_ERROR)),
    ]


def compare(given: CallInputs, result: Result) -> list[Difference]:
    arguments = {name: x for name, x in given.arguments.items() if name not in ("table_rows", "probs")}
    requests, guided = Requests.of(given.table_rows, **arguments), result["guided probabilities"]
    found = compare_guided(requests, guided, given.table_rows, result["faults"])
    if "probs" in given.arguments:
        candidates, before = requests.candidates, given.arguments["probs"]
        status = candidates.status
        written = ((status == Status.GUIDE) & (requests.table.mode != Mode.UNGUIDED)) | (status == Status.SINGLE)
        dense = torch.zeros_like(before)
        ids = candidates.token_ids.long().clamp(min=0)
        dense.scatter_add_(1, ids, torch.where(candidates.token_ids >= 0, guided, 0.0).to(before.dtype))
        found.append(differs("probs", result["probs"], torch.where(written[:, None], dense, before)))
    return found


def is_one_of(mode: Tensor, modes: Collection[Mode]) -> Tensor:
    return torch.isin(mode, torch.tensor([int(m) for m in modes], dtype=mode.dtype, device=mode.device))


def lengths_of(requests: Requests) -> Tensor:
    """fp64 lengths ``[B, K]`` in nats, ``-ln(1 - v)``, without the answers; 0 if the sequence or the span ends."""
    is_end = (requests.candidates.token_ids[:, :, None] == requests.table.ending_token_ids[:, None]).any(2)
    answer = requests.column("answer_length") * requests.column("nats_per_token")
    nats = torch.nn.functional.softplus(requests.value_logits.nan_to_num(0.0))
    return torch.where(is_end, 0.0, (nats - answer).clamp(min=0))


def is_as_near(requests: Requests, guided: Tensor, expected: Tensor) -> Tensor:
    """bool ``[B]``: requests of mode ``eq`` with a candidate as near the target as expected, within fp32."""
    lengths, target = lengths_of(requests), requests.column("target_length")
    if "generated" in requests.options:
        target = target - requests.column("counts_down") * requests.options["generated"].double()[:, None]
    target = target.clamp(min=0) * requests.column("nats_per_token")
    distance = (lengths - target).abs()
    farther = ((guided.double() - expected) * distance).sum(1).abs()
    error = ((guided.double() + expected) * (lengths + target)).sum(1) * LENGTH_WIDTH
    is_one = (guided.amax(1) == 1) & (expected.amax(1) == 1)
    return (requests.column("mode")[:, 0] == Mode.EQ) & is_one & (farther <= error)


def conditioning(requests: Requests, v: Tensor, expected: Tensor) -> Tensor:
    """``[B, K]``: error of tilted probabilities due to ROOT_SHARE and to fp32 exponents.

    An error of ``E[w]``, the expected share of the range of values, changes ``p_i`` by ``p_i |w_i - E[w]| / Var[w]``
    times the error; an error of its exponent changes it by ``p_i`` times the error.
    """
    listed, is_there = expected > 0, requests.candidates.probs > 0  # an expected probability may underflow in fp64
    low = torch.where(is_there, v, 2.0).amin(1, keepdim=True)
    span = (torch.where(is_there, v, -1.0).amax(1, keepdim=True) - low).clamp(min=1e-12)
    w = torch.where(listed, (v - low) / span, 0.0)
    deviation = (w - (expected * w).sum(1, keepdim=True)).abs()
    variance = (expected * deviation**2).sum(1, keepdim=True).clamp(min=1e-12)
    ratio = torch.where(listed, expected / requests.candidates.probs.double(), 0.0).log()
    exponent = torch.where(listed, ratio.amax(1, keepdim=True) - ratio, 0.0)  # 0 for the favoured candidate
    moved = expected * EXPONENT_ERROR * exponent
    shift = ROOT_SHARE + (moved * deviation).sum(1, keepdim=True)
    return (expected * deviation / variance).amax(1, keepdim=True) * shift + moved


def row_work(options: Mapping[str, Any]) -> float:
    large = options["constants"] != "shipped"
    slices = -(-options["vocab"] // 256) if large else 1
    return 4000 / max(1, (8192 if large else 64) // options["columns"]) + 40 * slices * options["scatter"]


OPERATOR = Operator(
    function=reweight_scatter,
    options=OPTIONS,
    inputs=inputs,
    returns=("guided probabilities",),
    writes=("table.faults", "probs"),
    compare=compare,
    most_rows=lambda options: min(65_536, 2**26 // (options["vocab"] + 32 * options["columns"])),
    row_work=row_work,
    # The interpreter is as fast with tiles of 8,192 candidates as with 64; a compiler would take minutes.
    constants={"large tiles, small slices": {"TILE": 8192 if INTERPRETED else 128, "SLICE": 256}},
    free=FREE | {"table_rows": "int32"},
    reads={"candidates": READS, "table": ops.ReweightColumns._fields},
)
