"""Time the kernels with other tuning constants than they have: ``python -m bench.variants [--json FILE] [--quick]``.

What the constants at the top of ``lenvm_kernels/ops/*.py`` are was estimated for an H200 or measured there, and this is
how to choose them by measurement. Each case of a few production shapes is timed as it is, and then with each
alternative in place of one constant or a few; the ratio is the alternative's time over ours, below 1 where it is
faster. Results are compared with the fp64 reference as in the benchmarks, and an alternative that does not compile or
does not fit is reported so.

Constants that a kernel reads itself (``tl.constexpr`` of a module, as the split length of the attention) cannot be
replaced in a running process and are not here.
"""

import importlib
from functools import partial
from unittest import mock

from bench.harness.cases import Benchmark, Case
from bench.harness.storing import Shape
from lenvm_kernels.ops.ragged_linear import Tile

Constants = dict[str, object]


def each(**values: list[object]) -> list[Constants]:
    """One constant at a time."""
    return [{name: value} for name, of_name in values.items() for value in of_name]


def attention(block_n: int, warps: int, stages: int) -> Constants:
    """A launch configuration of the attention, whatever the head dimension (128 in the cases below)."""
    config = dict(BLOCK_D=128, BLOCK_N=block_n, num_warps=warps, num_stages=stages)
    config |= dict(E4M3_STAGES=stages + 1)
    return {"_launch_config": lambda head_dim, dtype: config}


def one_tile(*tile: int) -> Constants:
    """One tile of ragged_linear, whatever the shapes."""
    return {"TILES": (Tile(*tile),) * 2}


# Operator -> shapes, by what differs from production, and alternatives.
OPERATORS: dict[str, tuple[list[Shape], list[Constants]]] = {
    "value_tree_attention": (
        [{}, dict(B=1, L=32_768), dict(L=512), dict(B=1, L=0, delta=2048)],
        [
            *(attention(*c) for c in ((64, 4, 2), (64, 8, 3), (128, 8, 2))),
            *(attention(*c) for c in ((32, 4, 3), (32, 4, 4), (32, 4, 5), (32, 8, 5))),
            *each(MAX_PROGRAMS=[264, 528, 2048]),
        ],
    ),
    "ragged_linear": (
        [dict(layer=layer, rows=rows) for rows in (384, 48) for layer in ("gate_up", "down", "qkv", "o")],
        [
            *each(MULTIPROCESSORS=[66, 264], MAX_SPLITS=[2, 3, 4, 8], MAX_PROGRAMS=[264, 1056]),
            *(one_tile(*t) for t in ((128, 256, 8, 3), (128, 256, 8, 4), (128, 128, 8, 3), (128, 128, 8, 6))),
            *(one_tile(*t) for t in ((128, 64, 8, 4), (128, 64, 8, 8), (64, 256, 4, 5), (64, 128, 4, 8))),
            *(one_tile(*t) for t in ((64, 128, 4, 4), (64, 64, 4, 5), (64, 64, 4, 8))),
        ],
    ),
    "topk_candidates": (
        [{}, dict(B=1), dict(B=512), dict(k=64)],
        each(PROGRAM_BYTES=[4096, 16_384, 32_768], TILE=[64, 256]),
    ),
    "value_head": (
        [dict(in_step=True, M=M) for M in (320, 40, 2560)],
        [*each(FEW_OUTPUTS=[0, 64, 4096], BLOCK_N=[32, 128], STAGES=[3, 6], STAGES_FEW=[4, 12]), dict(WIDE_FROM=0)],
    ),
    "reweight_scatter": ([{}, dict(B=512)], each(SLICE=[4096, 8192, 32_768], TILE=[8, 256])),
}


def module(operator: str) -> object:
    """Where an operator's constants are."""
    return importlib.import_module(f"lenvm_kernels.ops.{operator}")


def benchmark(operator: str) -> Benchmark:
    return importlib.import_module(f"bench.ops.{operator}").BENCHMARK


def label(constants: Constants) -> str:
    """``STAGES 6, NUM_WARPS 4``; of a launch configuration or a tile what is in it."""
    if "_launch_config" in constants:
        constants = constants["_launch_config"](128, None)
    if "TILES" in constants:
        constants = constants["TILES"][0]._asdict()
    return ", ".join(f"{name} {value}" for name, value in constants.items())


def make_case(device: str, *, operator: str, **shape: object) -> Case:
    """The benchmark's case, with the alternatives for peers."""
    case = benchmark(operator).make_case(device, **shape)

    def run(constants: Constants) -> object:
        with mock.patch.multiple(module(operator), **constants):
            return case.run()

    _, alternatives = OPERATORS[operator]
    case.peers = {label(constants): partial(partial, run, constants) for constants in alternatives}
    case.reference = None
    return case


class Variants(Benchmark):
    """A benchmark of the shapes of all operators."""

    def shapes(self, *, quick: bool = False) -> list[Shape]:
        shapes = []
        for operator, (changes, _) in OPERATORS.items():
            of_operator = benchmark(operator)
            few = of_operator.shapes(quick=True)[:1]
            points = few if quick else [of_operator.production | change for change in changes]
            shapes += [{"operator": operator, **point} for point in points]
        return shapes


BENCHMARK = Variants("variants", make_case, production={})

if __name__ == "__main__":
    BENCHMARK.main()
