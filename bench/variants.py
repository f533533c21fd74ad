"""Time the kernels with other tuning constants than they have: ``python -m bench.variants [--json FILE] [--quick]``.

What the constants at the top of ``lenvm_kernels/ops/*.py`` are was estimated for a H200, and this is how to choose them
by measurement. Each case of a few production shapes is timed as it is, and then with each alternative in place of one
constant or a few; the ratio is the alternative's time over ours, below 1 where it is faster. Results are compared with
the fp64 reference as in the benchmarks, and an alternative that does not compile or does not fit is reported so.

Constants that a kernel reads itself (``tl.constexpr`` of a module, as the split length of the attention) cannot be
replaced in a running process and are not here.
"""

import importlib
from dataclasses import dataclass
from functools import partial
from unittest import mock

from bench.harness.cases import Benchmark, Case
from bench.harness.storing import Shape


def attention(block_n: int, warps: int, stages: int) -> dict[str, object]:
    """A launch configuration of the attention, whatever the head dimension (128 in the cases below)."""
    config = dict(BLOCK_D=128, BLOCK_N=block_n, num_warps=warps, num_stages=stages)
    return {"_launch_config": lambda head_dim, dtype: config}


@dataclass
class Operator:
    """What is tried of an operator.

    Attributes:
        name: of its file.
        changes: shapes, by what differs from production.
        alternatives: values of constants.
    """

    name: str
    changes: list[Shape]
    alternatives: list[dict[str, object]]

    @property
    def module(self) -> object:
        """Where its constants are."""
        return importlib.import_module(f"lenvm_kernels.ops.{self.name}")

    @property
    def benchmark(self) -> Benchmark:
        return importlib.import_module(f"bench.ops.{self.name}").BENCHMARK


OPERATORS = (
    Operator(
        "value_tree_attention",
        [{}, {"B": 1, "L": 32_768}, {"L": 512}, {"B": 1, "L": 0, "delta": 2048}],
        [
            *(
                attention(*c)
                for c in ((64, 4, 2), (64, 4, 3), (64, 8, 3), (32, 4, 2), (32, 4, 4), (32, 8, 4), (128, 8, 2))
            ),
            {"MAX_PROGRAMS": 264},
            {"MAX_PROGRAMS": 528},
            {"MAX_PROGRAMS": 2048},
        ],
    ),
    Operator(
        "ragged_linear",
        [{"layer": layer, "rows": rows} for rows in (384, 48) for layer in ("gate_up", "down", "qkv", "o")],
        [
            {"BLOCK_M": 64},
            {"BLOCK_M": 64, "NUM_WARPS": 4},
            {"WIDE_FROM": 1024},
            {"WIDE_FROM": 65_536},
            {"BLOCK_N_WIDE": 256, "STAGES_WIDE": 3},
            {"STAGES": 3, "STAGES_WIDE": 2},
            {"STAGES": 6, "STAGES_WIDE": 4},
            {"STAGES": 8, "STAGES_WIDE": 6},
            {"NUM_WARPS": 4},
            {"BLOCK_K_BYTES": 256, "STAGES": 3, "STAGES_WIDE": 3},
            {"SPLIT_K": 640},
            {"SPLIT_K": 2240},
            {"MAX_PROGRAMS": 264},
            {"MAX_PROGRAMS": 1056},
        ],
    ),
    Operator(
        "topk_candidates",
        [{}, {"B": 1}, {"B": 512}, {"k": 64}],
        [
            {"TILE": 512},
            {"TILE": 2048},
            {"TILE": 4096},
            {"RANGES_OF_MANY_ROWS": 4},
            {"RANGES_OF_MANY_ROWS": 8},
            {"RANGES_OF_MANY_ROWS": 32},
            {"FEW_ROWS": 64},
        ],
    ),
    Operator(
        "value_head",
        [{"norm_and_gather": True}, {"norm_and_gather": True, "M": 40}, {"norm_and_gather": True, "M": 2560}],
        [
            {"BLOCK_M": 64},
            {"BLOCK_M": 64, "NUM_WARPS": 4},
            {"BLOCK_N": 32},
            {"BLOCK_N": 128},
            {"STAGES": 3},
            {"STAGES": 6},
            {"NUM_WARPS": 4},
        ],
    ),
    Operator(
        "reweight_scatter",
        [{}, {"B": 512}],
        [{"SLICE": 4096}, {"SLICE": 8192}, {"SLICE": 32_768}, {"TILE": 8}, {"TILE": 256}],
    ),
)
BY_NAME = {operator.name: operator for operator in OPERATORS}


def label(constants: dict[str, object]) -> str:
    """``STAGES 6, NUM_WARPS 4``; of a launch configuration what is in it."""
    if "_launch_config" in constants:
        constants = constants["_launch_config"](128, None)
    return ", ".join(f"{name} {value}" for name, value in constants.items())


def make_case(device: str, *, operator: str, **shape: object) -> Case:
    """The benchmark's case, with the alternatives for peers."""
    tried = BY_NAME[operator]
    case, module = tried.benchmark.make_case(device, **shape), tried.module

    def run(constants: dict[str, object]) -> object:
        with mock.patch.multiple(module, **constants):
            return case.run()

    case.peers = {
        label(constants): lambda constants=constants: partial(run, constants) for constants in tried.alternatives
    }
    case.reference = None
    return case


class Variants(Benchmark):
    """The shapes of all operators."""

    def shapes(self, *, quick: bool = False) -> list[Shape]:
        return [
            {"operator": operator.name, **shape}
            for operator in OPERATORS
            for shape in (
                operator.benchmark.shapes(quick=True)[:1]
                if quick
                else [operator.benchmark.production | change for change in operator.changes]
            )
        ]


BENCHMARK = Variants("variants", make_case, production={})

if __name__ == "__main__":
    BENCHMARK.main()
