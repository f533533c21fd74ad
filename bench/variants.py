"""Time the kernels with other tuning constants than they have: ``python -m bench.variants [--json FILE] [--quick]``.

What the constants at the top of ``lenvm_kernels/ops/*.py`` are was estimated for a H200, and this is how to choose them
by measurement. Each case of a few production shapes is timed as it is, and then with each alternative in place of one
constant or a few; the ratio is the alternative's time over ours, below 1 where it is faster. Results are compared with
the fp64 reference as in the benchmarks, and an alternative that does not compile or does not fit is reported so.

Constants that a kernel reads itself (``tl.constexpr`` of a module, as the split length of the attention) cannot be
replaced in a running process and are not here.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from bench import (
    bench_ragged_linear,
    bench_reweight_scatter,
    bench_topk_candidates,
    bench_value_head,
    bench_value_tree_attention,
)
from bench._common import Case, Shape, parse_args, run_cases
from lenvm_kernels.ops import ragged_linear, reweight_scatter, topk_candidates, value_head, value_tree_attention


def attention(block_n: int, warps: int, stages: int) -> dict[str, object]:
    """A launch configuration of the attention, whatever the head dimension (128 in the cases below)."""
    config = dict(BLOCK_D=128, BLOCK_N=block_n, num_warps=warps, num_stages=stages)
    return {"_launch_config": lambda head_dim, dtype: config}


# operator -> module of the constants, benchmark, shapes by what differs from production, alternatives
OPERATORS = {
    "value_tree_attention": (
        value_tree_attention,
        bench_value_tree_attention,
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
    "ragged_linear": (
        ragged_linear,
        bench_ragged_linear,
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
    "topk_candidates": (
        topk_candidates,
        bench_topk_candidates,
        [{}, {"B": 1}, {"B": 512}, {"k": 64}],
        [
            {"TILE": 512},
            {"TILE": 2048},
            {"TILE": 4096},
            {"RANGES_OF_MANY_REQUESTS": 4},
            {"RANGES_OF_MANY_REQUESTS": 8},
            {"RANGES_OF_MANY_REQUESTS": 32},
            {"FEW_REQUESTS": 64},
        ],
    ),
    "value_head": (
        value_head,
        bench_value_head,
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
    "reweight_scatter": (
        reweight_scatter,
        bench_reweight_scatter,
        [{}, {"B": 512}],
        [{"SLICE": 4096}, {"SLICE": 8192}, {"SLICE": 32_768}, {"TILE": 8}, {"TILE": 256}],
    ),
}


@contextmanager
def replaced(module: object, constants: dict[str, object]) -> Iterator[None]:
    """With other values of a module's constants."""
    before = {name: getattr(module, name) for name in constants}
    vars(module).update(constants)
    try:
        yield
    finally:
        vars(module).update(before)


def label(constants: dict[str, object]) -> str:
    """``STAGES 6, NUM_WARPS 4``; of a launch configuration what is in it."""
    if "_launch_config" in constants:
        constants = constants["_launch_config"](128, None)
    return ", ".join(f"{name} {value}" for name, value in constants.items())


def make_case(device: str, shape: Shape) -> Case:
    """The benchmark's case, with the alternatives for peers."""
    shape = dict(shape)
    module, bench, _, alternatives = OPERATORS[shape.pop("operator")]
    case = bench.make_case(device, shape)

    def run(constants: dict[str, object]) -> object:
        with replaced(module, constants):
            return case.run()

    def prepare(constants: dict[str, object]) -> Callable[[], object]:
        return partial(run, constants)

    case.peers = {label(constants): partial(prepare, constants) for constants in alternatives}
    return case


SHAPES = [
    {"operator": operator, **bench.PRODUCTION, **change}
    for operator, (_, bench, changes, _) in OPERATORS.items()
    for change in changes
]
QUICK = [{"operator": operator, **bench.QUICK[0]} for operator, (_, bench, _, _) in OPERATORS.items()]

if __name__ == "__main__":
    run_cases("variants", SHAPES, QUICK, make_case, parse_args(__doc__))
