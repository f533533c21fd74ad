"""``topk_candidates``: rows of scores with ties, extremes and broken numbers, each with different filters."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lenvm_kernels.fuzz.case import Case, Difference, beyond, differs, dtype_of
from lenvm_kernels.fuzz.ops._calls import Form, NamedInputs, NamedResult, named_operator
from lenvm_kernels.fuzz.ops._inputs import padded_rows, poisoned
from lenvm_kernels.fuzz.tolerances import TOLERANCE
from lenvm_kernels.ops.topk_candidates import topk_candidates
from lenvm_kernels.types import Candidates

NAN, INF = float("nan"), float("inf")
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
    "entropy_threshold": [False, True],
    "guided": [False, True],
    "vocab_mask": [False, True],
    "ends": [0, 1, 3, 5],
    "least_share": [False, True],
    "due": [False, True],
    "text_breaks": [0, 1, 6],
    "constants": ["shipped", "small"],
}
# Several programs per row at sizes that the interpreter can handle.
CONSTANTS = {"small": {"TILE": 32, "PROGRAM_BYTES": 256}}


def inputs(case: Case, device: torch.device) -> NamedInputs:
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
    if options["entropy_threshold"]:
        arguments["entropy_threshold"] = pick("entropy_threshold", [NAN, 0.0, 0.5, 2.0]).float()
    if options["guided"]:
        arguments["guided"] = pick("guided", [True, True, False])
    if options["vocab_mask"]:
        words = draws.bits("vocab_mask", rows, -(-vocab // 32)).int()
        arguments["vocab_mask"] = padded_rows(words, options["padding"], value=-1)
    if options["ends"]:
        # In half of the rows, one is near the id of the best token; some are invalid, some are duplicates.
        ends = draws.integers("ends", rows, options["ends"], low=-2, high=min(vocab, 9) + 1)
        best = x.nan_to_num(-INF, -INF, -INF).argmax(dim=1)
        ends[:, 0] = torch.where(
            draws.chance("near the best", rows, of=0.5), best + pick("beside it", [-1, 0, 1]), ends[:, 0]
        )
        least = pick("min_end_prob", [0.0, 1e-4, 0.01, 0.1, 0.5, INF]).float()
        # The table has strided columns, and its rows are in another order than the requests.
        table_rows = torch.arange(len(x) - 1, -1, -1, device=device)
        arguments["end_token_ids"] = padded_rows(ends.flip(0).int(), options["padding"], value=0)
        arguments["min_end_prob"] = torch.stack([least.flip(0), least * NAN], dim=1)[:, 0]
        arguments["table_rows"] = table_rows
        if options["least_share"]:
            share = pick("least_share", [0.0, 0.05, 0.3, 1.0]).float()
            arguments["least_share"] = torch.stack([share * NAN, share.flip(0)], dim=1)[:, 1]
        if options["due"]:
            due = pick("due_length", [0.0, 1.0, 20.0, 77.5, 4096.0, INF]).float()
            arguments["due_length"] = torch.stack([due * NAN, due.flip(0)], dim=1)[:, 1]
            share = pick("late", [0.0, 0.9, 1.0, 1.04, 1.3, 2.0, 90.0])
            arguments["generated"] = torch.where(due < INF, due * share, 50 * share).int()
        if options["text_breaks"]:
            arguments["text_breaks"] = torch.tensor([1, 2, 0, 3, 0, 1], dtype=torch.int8, device=device)
            arguments["text_breaks"] = arguments["text_breaks"][: options["text_breaks"]]
            arguments["last_tokens"] = draws.integers("last_tokens", rows, low=-2, high=options["text_breaks"])
    return NamedInputs(arguments, len(rows))


def scores_of(draws, rows, vocab: int, kind: str, largest: float) -> Tensor:
    """fp64 logits ``[rows, vocab]`` of one kind, or of a random kind per row."""
    kinds = KINDS if kind == "any" else [kind]
    x = draws.normal("scores", rows, vocab)
    choice = draws.integers("kind", rows, low=0, high=len(kinds) - 1)[:, None]
    of_kind = {
        "normal": lambda: x,
        "peaked": lambda: 30 * x,
        "ties": lambda: x.round(),
        "constant": lambda: x[:, :1].expand_as(x),
        "huge": lambda: largest / 3 * x,
        "tiny": lambda: x - 80,
        "mostly nothing": lambda: torch.where(draws.chance("nothing", rows, vocab, of=0.98), -INF, x),
        # probabilities are powers of 1/2: a sum may meet top_p exactly
        "halves": lambda: -torch.log(x.new_tensor(2.0)) * draws.integers("halves", rows, vocab, low=0, high=12),
    }
    of_rows = (torch.where(choice == i, of_kind[name](), 0.0) for i, name in enumerate(kinds))
    return sum(of_rows, start=torch.zeros_like(x))


def returns(given: NamedInputs) -> dict[str, Form]:
    slots = given.arguments["max_candidates"]
    return {
        "token_ids": (torch.int32, [given.rows, slots]),
        "probs": (torch.float32, [given.rows, slots]),
        "counts": (torch.int32, [given.rows]),
        "status": (torch.int8, [given.rows]),
        "lost_mass": (torch.float32, [given.rows]),
    }


def compare(given: NamedInputs, result: NamedResult) -> list[Difference]:
    """A token within BOUND_WIDTH of a filter's bound may be on either side; everything else must match fp64."""
    found, tolerance = Candidates(**result.tensors), TOLERANCE["topk_candidates"][given.arguments["scores"].dtype]
    expected, fewest, most = (_reference(given, width) for width in (0.0, -BOUND_WIDTH, BOUND_WIDTH))
    listed = torch.arange(found.probs.shape[1], device=found.probs.device) < found.counts[:, None]
    clear = fewest.counts == most.counts
    has_ends = "min_end_prob" in given.arguments
    if has_ends:  # with different ends, neither list is a prefix of the other
        clear &= (fewest.token_ids == most.token_ids).all(1)
    known = clear[:, None] if has_ends else torch.ones_like(listed)
    settled = clear
    if "entropy_threshold" in given.arguments:
        q = expected.probs / expected.probs.sum(1, keepdim=True)
        distance = torch.special.entr(q).sum(1) - given.arguments["entropy_threshold"]
        settled = clear & ~(distance.abs() < BOUND_WIDTH)
    between = (fewest.counts <= found.counts) & (found.counts <= most.counts)
    return [
        Difference("counts", ~between, found.counts, expected.counts),
        differs(
            "token_ids", found.token_ids, torch.where(known, torch.where(listed, most.token_ids, -1), found.token_ids)
        ),
        beyond(
            "probs",
            found.probs,
            torch.where(known, torch.where(listed, most.probs, 0), found.probs.double()),
            tolerance,
        ),
        differs("rows marked as broken", found.lost_mass.isnan(), expected.broken),
        # The difference from 1 has the error of everything subtracted.
        beyond(
            "lost_mass",
            found.lost_mass,
            torch.where(clear, expected.lost_mass, found.lost_mass.double()),
            (0.0, sum(tolerance)),
        ),
        differs("status", found.status, torch.where(settled, expected.status, found.status)),
    ]


def _reference(given: NamedInputs, width: float) -> Candidates:
    """The reference in fp64, with each filter's bound moved by the share ``width``, outwards if positive."""
    arguments = given.arguments | {"scores": given.arguments["scores"].double()}
    arguments["top_p"] = arguments["top_p"] * (1 + width)
    arguments["min_p"] = arguments["min_p"] * (1 - width)
    for name in ("min_end_prob", "least_share"):
        if name in arguments:
            arguments[name] = arguments[name] * (1 - width)
    return topk_candidates(**arguments, backend="reference")


def _row_work(options: Mapping[str, Any]) -> float:
    small, slots = options["constants"] == "small", options["max_candidates"]
    programs = -(-options["vocab"] // (64 if small else 1024))
    return 4 * 40 + programs * 30 + 40 * slots


OPERATOR = named_operator(
    topk_candidates,
    options=OPTIONS,
    inputs=inputs,
    returns=returns,
    compare=compare,
    most_rows=16_384,
    row_size=lambda options: options["vocab"],
    row_work=_row_work,
    constants=CONSTANTS,
    free={
        "scores": "float32 bfloat16 float16 float64 columns apart",
        **dict.fromkeys(("top_k", "top_p", "min_p", "temperature", "entropy_threshold"), "strided"),
        **dict.fromkeys(("min_end_prob", "least_share", "due_length"), "strided"),
        "vocab_mask": "apart",
        "end_token_ids": "columns apart",
        "text_breaks": "rows",
        "last_tokens": "int32",
        "table_rows": "int32",
    },
)
