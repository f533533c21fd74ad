"""Launches, bytes and operations of a guided step, counted, and the times they predict: no GPU is needed.

    python -m bench.step_model [--out bench/results/step-model.md]

Launches are counted by running a step on CPU tensors with every Triton kernel replaced by a counter, and every torch
operator that is not a view counted as one launch. Bytes and operations are those of the tokens that exist. Predictions
use the rates below; they are assumptions, not measurements.
"""

import argparse
import platform
import time
from collections import Counter
from pathlib import Path

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode

from bench.launches import intercept_launches, kernels_on_cpu
from bench.models import VOCAB, forward_floor, layer_parameters, make_config, make_model
from bench.step import CACHED, Decode, candidate_counts

RESULT = Path(__file__).parent / "results" / "step-model.md"
# An H200's data sheet: memory bandwidth in bytes/s, dense bf16 tensor rate in operations/s.
BANDWIDTH, TENSOR_RATE = 4.8e12, 989e12
# Shares of them that a copy, a matmul of cuBLAS and one of Triton reach: assumed.
COPY_SHARE, MATMUL_SHARE, TRITON_SHARE = 0.85, 0.70, 0.50
LAUNCH_GAP = 1.3e-6  # seconds from the end of a kernel to the start of the next in a CUDA graph
NAME = "Qwen2.5-1.5B"
# Operators that are no views and launch nothing: the last makes a number a tensor on the host.
NO_LAUNCH = ("detach", "_unsafe_view", "lift_fresh", "scalar_tensor")


class Launches(TorchDispatchMode):
    """Counts kernel launches by name."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.split(".")[0]
        if not function.is_view and "empty" not in name and name not in NO_LAUNCH:
            self.count[f"torch {name}"] += 1
        if name == "index":  # a kernel that did not run has not written the indices
            args = (args[0], [None if x is None else torch.zeros_like(x) for x in args[1]])
        return function(*args, **(kwargs or {}))


def count_launches(layers: int, *, commit_winners: bool) -> Counter[str]:
    """Launches of a step of a model of so many layers, by kernel."""
    model = make_model(make_config(NAME, vocab_size=2**11, num_layers=layers), torch.bfloat16, "cpu")
    decode = Decode(model, candidate_counts(64, "full"), commit_winners=commit_winners)
    decode.step.backend = "triton"
    launches = Launches()

    def count(name: str, launch: object) -> None:
        launches.count[name.removeprefix("_").removesuffix("_kernel")] += 1

    slots = decode.slots.slots(decode.rows, decode.lengths - 1)
    batch = (decode.scores, decode.tokens, decode.rows, decode.lengths, slots)
    with kernels_on_cpu(), intercept_launches(count), launches:
        decode.step.step(*batch, **decode.filters, is_logits=True, sample=True)
    return launches.count


def launch_table(commit_winners: bool) -> tuple[list[str], int]:
    """Markdown rows of launches a layer and a step, and the launches of a step in all."""
    config = make_config(NAME, vocab_size=VOCAB)
    one, two = (count_launches(layers, commit_winners=commit_winners) for layers in (1, 2))
    rows, total = [], 0
    for name in sorted(two, key=lambda name: (name.startswith("torch"), name)):
        per_layer = two[name] - one[name]
        step = one[name] + per_layer * (config.num_layers - 1)
        rows.append(f"| {name} | {per_layer} | {step} |")
        total += step
    return rows, total


def prediction(rows: int, distribution: str, launches: int, *, commit_winners: bool) -> str:
    """A Markdown row: tokens, bytes, operations, the floor, and what the assumed rates make of a step."""
    config, counts = make_config(NAME, vocab_size=VOCAB), candidate_counts(rows, distribution)
    scored = int(counts[counts > 1].sum())
    deltas = int((counts == 1).sum()) if commit_winners else rows
    tokens = deltas + scored
    moved, operations = forward_floor(config, torch.bfloat16, tokens, scored, rows, CACHED)
    scores = rows * VOCAB * 4
    floor = max((moved + scores) / BANDWIDTH, operations / TENSOR_RATE)
    floor_at_rates = max((moved + scores) / (BANDWIDTH * COPY_SHARE), operations / (TENSOR_RATE * MATMUL_SHARE))
    predicted = max(moved / (BANDWIDTH * COPY_SHARE), operations / (TENSOR_RATE * TRITON_SHARE))
    predicted += scores / (BANDWIDTH * COPY_SHARE) + launches * LAUNCH_GAP
    return (
        f"| {rows} | {distribution} | {'yes' if commit_winners else 'no'} | {tokens} | {rows * 9} | {moved / 1e9:.2f} "
        f"| {operations / 1e9:.0f} | {floor * 1e3:.2f} | {floor_at_rates * 1e3:.2f} | {predicted * 1e3:.2f} "
        f"| {predicted / floor_at_rates:.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULT, help="where to write the page (default: %(default)s)")
    args = parser.parse_args()
    tables = {commit: launch_table(commit) for commit in (True, False)}
    config = make_config(NAME, vocab_size=VOCAB)
    weights = (config.num_layers * layer_parameters(config) + config.hidden_size**2) * 2
    columns = ("rows", "counts", "winners committed", "tokens", "slots", "GB", "Gops", "floor ms", "at rates ms")
    columns += ("step ms", "step / at rates")
    lines = [
        f"""# A guided step, counted

Counted and computed, not measured: no GPU has run the step yet.

- command: `python -m bench.step_model`, {time.strftime("%Y-%m-%d")}
- torch {torch.__version__}, triton {triton.__version__}, Python {platform.python_version()}, on a CPU
- value model: the dimensions of {NAME}, {config.num_layers} layers, {weights / 1e9:.2f} GB of weights in bf16;
  vocabulary {VOCAB:,}; {CACHED} cached tokens a request; K = 8 slots, top-k 5

## Launches
"""
    ]
    for commit, (rows, total) in tables.items():
        lines += [
            f"With winners {'committed' if commit else 'computed again'}: {total} launches a step.\n",
            "| kernel | a layer | a step |\n| --- | --- | --- |",
            *rows,
            "",
        ]
    lines.append(f"""## Bytes, operations and what they predict

`tokens` are those computed: last tokens (of rows whose winner was not committed) and candidates; `slots` is what a step
that computed its padding would have. Counts `full`: five candidates a row; `SmolLM2`: the shares measured in
`candidate_counts.json`. `floor` is the larger of bytes and operations at the data sheet's rates
({BANDWIDTH / 1e12:.1f} TB/s, {TENSOR_RATE / 1e12:.0f} Tops/s). `at rates` takes {COPY_SHARE:.0%} of the bandwidth and \
{MATMUL_SHARE:.0%} of the tensor rate, about what a copy and
cuBLAS reach: the base of the goal of 1.35. `step` assumes {TRITON_SHARE:.0%} of the tensor rate for the Triton matmuls
and {LAUNCH_GAP * 1e6:.1f} us between launches in a graph. All shares are assumptions until a GPU has run \
`bench.step`.

| {" | ".join(columns)} |
|{" --- |" * len(columns)}""")
    for rows, distribution in ((8, "full"), (64, "full"), (64, "SmolLM2"), (256, "full"), (256, "SmolLM2")):
        for commit, (_, launches) in tables.items():
            lines.append(prediction(rows, distribution, launches, commit_winners=commit))
    args.out.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
