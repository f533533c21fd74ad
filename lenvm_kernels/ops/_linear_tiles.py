"""The tiles of :mod:`lenvm_kernels.ops.ragged_linear`, and what is fetched for them.

Estimates, not measured yet, but where a measurement is named.
"""

import functools
from typing import NamedTuple

from torch import Tensor

from lenvm_kernels.ops._common import ceil_div
from lenvm_kernels.reference._common import SQUARES_GROUP

# The order of a row's sums: products in blocks of so many bytes of x, whole cache lines, and splits. Both depend on the
# weight alone, so that the same row gives the same bits in any batch and in any tile.
BLOCK_K_BYTES = 128


class Tile(NamedTuple):
    """Rows and columns of the matmul's result that a program computes at once, and how."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# The tiles of sm_90, by size. For each k a tile fetches a number of each of its rows and columns from L2, which bounds
# most launches: 128 x 256 fetches 71 % of what its matmul would hide, 128 x 128 53 %, 128 x 64 35 %. So a launch takes
# the tile with which a multiprocessor fetches least, of several such the largest. Launches of few rows have no more
# tiles than MULTIPROCESSORS, and a program has one for itself, with 96 to 192 KB of tiles on their way. Measured on an
# H200: gate_up (N = 2 * 8960) of 192 rows takes 30 us with 64 x 256, and took 44 without that tile.
TILES = (
    Tile(128, 256, num_warps=8, num_stages=4),
    Tile(128, 128, num_warps=8, num_stages=6),
    Tile(128, 64, num_warps=8, num_stages=8),
    Tile(64, 256, num_warps=8, num_stages=4),
    Tile(64, 128, num_warps=4, num_stages=4),
    Tile(64, 64, num_warps=4, num_stages=8),
)
# The tiles of other GPUs and of fp32, which has no tensor cores: wide ones for many columns. With as many stages (24 or
# 32 KB each) as leave room for two programs. Four warps for the narrow ones of 16 bits on sm_100, where eight spill.
TILE, TILE_WIDE = Tile(128, 64, num_warps=8, num_stages=4), Tile(128, 128, num_warps=8, num_stages=3)
TILE_SWIGLU = Tile(64, 128, num_warps=8, num_stages=4)  # gate and up are two columns for one of the result
NUM_WARPS_SM_100 = 4
# Of a weight, that a launch asks for before the launch before it has ended: what HBM brings in 3 us. Much more might
# delay what the matmul begins with.
PREFETCH_BYTES = 10_000_000


@functools.lru_cache(4096)  # a step without a graph asks four times a layer
def _fetching_least(rows: int, columns: int, splits: int, swiglu: bool, multiprocessors: int) -> Tile:
    def fetched(tile: Tile) -> int:
        """Numbers for each k that the busiest multiprocessor fetches."""
        count = ceil_div(rows, tile.block_m) * ceil_div(columns, tile.block_n) * splits
        return ceil_div(count, multiprocessors) * (tile.block_m + tile.block_n)

    least, smallest = (2 if swiglu else 1) * SQUARES_GROUP, TILES[-1].block_m
    fits = [t for t in TILES if t.block_n >= least and (rows > t.block_m // 2 or t.block_m == smallest)]
    return min(fits, key=fetched)  # the first of equal ones


def prefetch_len(weight: Tensor, splits: int, split_len: int) -> int:
    """Columns of each split whose weights a launch asks for while it waits for the launches before it."""
    bytes_of_column = weight.shape[0] * splits * weight.element_size()
    return min(split_len, PREFETCH_BYTES // bytes_of_column)
