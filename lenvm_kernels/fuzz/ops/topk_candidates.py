"""``topk_candidates``: rows of scores with ties, extremes and broken numbers, each with different filters.

Requests of a step have every status, are due or not, and have a known or unknown next token."""

import math
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from lenvm_kernels.fuzz.case import CallInputs, Case, Difference, Operator, Result, beyond, differs, dtype_of
from lenvm_kernels.fuzz.ops._inputs import SPARE_ROWS, fill, padded_rows, poisoned, slice_of_longer, to_fill
from lenvm_kernels.fuzz.tolerances import TOLERANCE
from lenvm_kernels.guidance import GuidanceTable
from lenvm_kernels.guidance.fields import MAX_SPAN_ENDS
from lenvm_kernels.ops.begin_step import empty_requests
from lenvm_kernels.ops.topk_candidates import CandidateColumns, empty_scored, topk_candidates
from lenvm_kernels.reference.topk_candidates import choose_scored
from lenvm_kernels.types import Candidates, Status

NAN, INF = math.nan, math.inf
STEP_OPTIONS = ("requests", "drawn", "sample", "score_all", "step", "scored")
KINDS = ["normal", "peaked", "ties", "constant", "huge", "tiny", "mostly nothing", "halves"]
# Relative distance to a filter's bound within which fp32 and fp64 may disagree.
BOUND_WIDTH = 1e-5

OPTIONS: dict[str, list[Any]] = {
    "vocab": [1, 2, 7, 33, 257, 1024, 1025, 3067],
    "scores": ["probabilities", "logits"],
    "dtype": ["float32", "bfloat16", "float16"],
    "kind": [*KINDS, "any"],
    "max_candidates": [1, 2, 8, 16, 64],
    "broken": [False, True],
    "padding": [0, 5],
    "temperature": [False, True],
    "guided": [False, True],
    "vocab_mask": [False, True],
    "max_eos": [0, 1, 8],  # 0 for no table
    "table_rows": ["none", "int64", "int32"],
    "generated": [False, True],
    "text_breaks": [0, 1, 6],
    "scored": [False, True],
    "slices": [False, True],
    "drawn": [False, True],
    "sample": [False, True],
    "score_all": [False, True],
    "step": ["none", "1", "4294967295"],
    "constants": ["shipped", "small"],
}


def inputs(case: Case, device: torch.device) -> CallInputs:
    options, draws, rows = case.options, case.draws(device), case.rows
    vocab, dtype, is_logits = options["vocab"], dtype_of(options), options["scores"] == "logits"
    x = scores_of(draws, rows, vocab, options["kind"], torch.finfo(dtype).max / 8)
    if not is_logits:
        x = torch.softmax(x, dim=1)
    x = x.to(dtype)
    if options["broken"]:
        x = poisoned(draws, rows, x, of=0.3)

    def pick(name, values):
        return draws.choose(name, rows, values=values)

    arguments: dict[str, Any] = dict(
        scores=padded_rows(x, options["padding"]),
        top_k=pick("top_k", [0, -1, 1, 2, 5, 50, vocab, 1 << 30]).int(),
        top_p=pick("top_p", [1.0, 1.0, 0.95, 0.5, 0.1, 1e-9]).float(),
        min_p=pick("min_p", [0.0, 0.0, 0.01, 0.3, 1.0]).float(),
        max_candidates=options["max_candidates"],
        is_logits=is_logits,
    )
    if is_logits and options["temperature"]:
        values = [1.0, 0.7, 2.0, 0.01, 100.0, 0.0, 1e-7, 1e-6]
        broken = [NAN, INF] if options["broken"] else []
        arguments["temperature"] = pick("temperature", values + broken).float()
    if options["guided"]:
        arguments["guided"] = pick("guided", [True, True, False])
    if options["vocab_mask"]:
        words = draws.bits("vocab_mask", rows, -(-vocab // 32)).int()
        arguments["vocab_mask"] = padded_rows(words, options["padding"], value=-1)
    if options["max_eos"]:
        arguments |= table_options(case, device, x)
        if options["scored"]:
            arguments |= step_options(case, device)
    return CallInputs(arguments, len(rows))


def table_options(case: Case, device: torch.device, x: Tensor) -> dict[str, Any]:
    """The guidance of requests with the scores ``x``, and the arguments for ends of outputs."""
    options, draws, rows = case.options, case.draws(device), case.rows
    width, vocab = options["max_eos"] + MAX_SPAN_ENDS, x.shape[1]
    # Some ends are invalid, some are duplicates. In half of the rows, one is near the id of the best token.
    ends = draws.integers("ends", rows, width, low=-2, high=min(vocab, 9) + 1)
    ends = torch.where(draws.chance("no end", rows, width, of=0.6), -2, ends)
    best = x.nan_to_num(-INF, -INF, -INF).argmax(dim=1) + draws.choose("beside it", rows, values=[-1, 0, 1])
    ends[:, 0] = torch.where(draws.chance("near the best", rows, of=0.5), best, ends[:, 0])
    due_length = draws.choose("due_length", rows, values=[0.0, 1.0, 20.0, 77.5, 4096.0, INF])
    columns = {
        "min_end_prob": draws.choose("min_end_prob", rows, values=[0.0, 1e-4, 0.01, 0.1, 0.5, INF]),
        "least_share": draws.choose("least_share", rows, values=[0.0, 0.0, 0.05, 0.3, 1.0]),
        "due_length": due_length,
        "entropy_threshold": draws.choose("entropy_threshold", rows, values=[NAN, NAN, 0.0, 0.5, 2.0]),
        "ending_token_ids": ends,
    }
    table_rows = draws.rows(len(rows))
    arguments: dict[str, Any] = {}
    if options["table_rows"] != "none":
        table_rows = draws.places("table_rows", rows, SPARE_ROWS)
        arguments["table_rows"] = table_rows.to(dtype_of(options, "table_rows"))
    table = GuidanceTable(len(rows) + SPARE_ROWS, device, max_eos=options["max_eos"]).columns
    fill(table, table_rows, columns, elsewhere=0)
    arguments["table"] = table
    if options["generated"]:
        share = draws.choose("late", rows, values=[0.0, 0.9, 1.0, 1.04, 1.3, 2.0, 90.0])
        arguments["generated"] = torch.where(due_length < INF, due_length * share, 50 * share).int()
    if options["text_breaks"]:
        breaks = torch.tensor([1, 2, 0, 3, 8, 65], dtype=torch.int8, device=device)
        arguments["text_breaks"] = breaks[: options["text_breaks"]]
        arguments["last_tokens"] = draws.integers("last_tokens", rows, low=-2, high=options["text_breaks"])
    return arguments


def step_options(case: Case, device: torch.device) -> dict[str, Any]:
    """Arguments that determine which candidates are scored."""
    options, draws, rows = case.options, case.draws(device), case.rows
    requests = empty_requests(len(rows), device)
    columns = {
        "positions": draws.integers("positions", rows, low=0, high=100_000),
        "wants_length": draws.chance("wants_length", rows, of=0.5),
        "due": draws.chance("due", rows, of=0.4),
    }
    fill(requests, slice(None), columns)
    scored = empty_scored(len(rows), options["max_candidates"], device)
    arguments: dict[str, Any] = {"requests": requests, "scored": to_fill(scored, in_slices=options["slices"])}
    if options["drawn"]:
        drawn = draws.choose("drawn", rows, values=[-1, -1, -2, 0, 3, 2**31 - 1]).int()
        arguments["drawn"] = slice_of_longer(drawn) if options["slices"] else drawn
    arguments |= {name: options[name] for name in ("sample", "score_all")}
    if options["step"] != "none":
        arguments["step"] = torch.tensor([int(options["step"])], device=device)
    return arguments


def scores_of(draws, rows, vocab: int, kind: str, largest: float) -> Tensor:
    """fp64 logits ``[rows, vocab]`` of one kind, or of a random kind per row."""
    kinds = KINDS if kind == "any" else [kind]
    x = draws.normal("scores", rows, vocab)
    choice = draws.integers("kind", rows, low=0, high=len(kinds) - 1)[:, None]
    of_kind = {
        "normal": x,
        "peaked": 30 * x,
        "ties": x.round(),
        "constant": x[:, :1].expand_as(x),
        "huge": largest / 3 * x,
        "tiny": x - 80,
        "mostly nothing": torch.where(draws.chance("nothing", rows, vocab, of=0.98), -INF, x),
        # probabilities are powers of 1/2, so that a sum may equal top_p
        "halves": -math.log(2.0) * draws.integers("halves", rows, vocab, low=0, high=12),
    }
    of_rows = (torch.where(choice == i, of_kind[name], 0.0) for i, name in enumerate(kinds))
    return sum(of_rows, start=torch.zeros_like(x))


def compare(given: CallInputs, result: Result) -> list[Difference]:
    """A token within BOUND_WIDTH of a filter's bound may be on either side; everything else must match fp64."""
    tensors, tolerance = result, TOLERANCE["topk_candidates"][given.arguments["scores"].dtype]
    found = Candidates(*(tensors[name] for name in Candidates._fields))
    expected, fewest, most = (_reference(given, width) for width in (0.0, -BOUND_WIDTH, BOUND_WIDTH))
    listed = torch.arange(found.probs.shape[1], device=found.probs.device) < found.counts[:, None]
    clear = fewest.counts == most.counts
    known, settled = torch.ones_like(listed), clear
    if "table" in given.arguments:
        table, table_rows = given.arguments["table"], given.table_rows
        # With different ends, neither list is a prefix of the other.
        clear &= (fewest.token_ids == most.token_ids).all(1)
        known = clear[:, None]
        q = expected.probs / expected.probs.sum(1, keepdim=True)
        distance = torch.special.entr(q).sum(1) - table.entropy_threshold[table_rows]
        settled = clear & ~(distance.abs() < BOUND_WIDTH)
    between = (fewest.counts <= found.counts) & (found.counts <= most.counts)
    token_ids = torch.where(listed, most.token_ids, -1).where(known, found.token_ids)
    probs = torch.where(listed, most.probs, 0).where(known, found.probs.double())
    lost_mass = expected.lost_mass.where(clear, found.lost_mass.double())
    status = found.status
    if "scored" in given.arguments:
        status = torch.where(status == Status.NOT_DUE, int(Status.GUIDE), status)
    return [
        Difference("counts", ~between, found.counts, expected.counts),
        differs("token_ids", found.token_ids, token_ids),
        beyond("probs", found.probs, probs, tolerance),
        differs("rows marked as broken", found.lost_mass.isnan(), expected.broken),
        # The difference from 1 has the error of all subtracted terms.
        beyond("lost_mass", found.lost_mass, lost_mass, (0.0, sum(tolerance))),
        differs("status before the choice", status, expected.status.where(settled, status)),
        *_differences_of_choice(given, result, found._replace(status=status)),
    ]


def _differences_of_choice(given: CallInputs, result: Result, found: Candidates) -> list[Difference]:
    """Differences in the choice of scored candidates among the selected candidates."""
    if "scored" not in given.arguments:
        return []
    arguments: dict[str, Any] = deepcopy({name: given.arguments.get(name) for name in STEP_OPTIONS})
    step, scored = arguments.pop("step"), arguments["scored"]
    ends = given.arguments["table"].ending_token_ids[given.table_rows]
    expected = {"status": choose_scored(found, ending_token_ids=ends, **arguments).status}
    expected |= {f"scored.{name}": x for name, x in scored._asdict().items()}
    if step is not None:
        expected["step"] = step + (given.rows > 0)
    return [differs(name, result[name], x) for name, x in expected.items()]


def _reference(given: CallInputs, width: float) -> Candidates:
    """The candidates of the fp64 reference, with each filter's bound moved by ``width``, outwards if positive."""
    arguments = {name: x for name, x in given.arguments.items() if name not in STEP_OPTIONS}
    arguments["scores"] = arguments["scores"].double()
    arguments["top_p"] = arguments["top_p"] * (1 + width)
    arguments["min_p"] = arguments["min_p"] * (1 - width)
    if "table" in arguments:
        table = arguments["table"]
        moved = {name: getattr(table, name) * (1 - width) for name in ("min_end_prob", "least_share")}
        arguments["table"] = table._replace(**moved)
    return topk_candidates(**arguments, backend="reference")


OPERATOR = Operator(
    function=topk_candidates,
    options=OPTIONS,
    inputs=inputs,
    compare=compare,
    writes=("scored", "step"),
    moved=("step",),
    row_work=lambda options: (
        190 + options["vocab"] / (2 if options["constants"] == "small" else 32) + 40 * options["max_candidates"]
    ),
    # Several programs per row at sizes that the interpreter can handle.
    constants={"small": {"TILE": 32, "PROGRAM_BYTES": 256}},
    free={
        "scores": "float32 bfloat16 float16 float64 columns apart",
        **dict.fromkeys(("top_k", "top_p", "min_p", "temperature"), "strided"),
        **{f"table.{name}": "strided" for name in CandidateColumns._fields},
        "vocab_mask": "apart",
        "table.ending_token_ids": "columns apart",
        "text_breaks": "rows",
        **dict.fromkeys(("last_tokens", "table_rows"), "int32"),
    },
    reads={"table": CandidateColumns._fields, "requests": ("positions", "wants_length", "due")},
)
