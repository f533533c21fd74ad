"""Tile sizes of :mod:`lenvm_kernels.ops.ragged_linear`, and the amount of weights to prefetch.

Unless a measurement is named, numbers are estimates.
"""

import functools
from typing import NamedTuple

from torch import Tensor

from lenvm_kernels.ops._common import ceil_div
from lenvm_kernels.reference._common import SQUARES_GROUP

# Bytes of a row of x per block of products, whole cache lines. Blocks and splits determine the order of a row's sums.
# Both depend on the weight alone, so that a row's result is bitwise identical in any batch and any tile.
BLOCK_K_BYTES = 128


class Tile(NamedTuple):
    """Rows and columns of the result that a program computes at once, with its warps and pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# Tiles for sm_90, by size. For each k, a tile fetches one number per row and per column from L2, which bounds most
# launches: 128 x 256 reaches 71 % of the tensor cores' rate, 128 x 128 53 %, 128 x 64 35 %. A launch therefore uses the
# tile with which a multiprocessor fetches least, and the largest of equal ones. Launches of few rows have at most
# MULTIPROCESSORS tiles, so each program has a multiprocessor to itself, with 96 to 192 KB of tiles in flight. Measured
# on an H200: gate_up (N = 2 * 8960) of 192 rows takes 30 us with 64 x 256, and 44 us without that tile.
TILES = (
    Tile(128, 256, num_warps=8, num_stages=4),
    Tile(128, 128, num_warps=8, num_stages=6),
    Tile(128, 64, num_warps=8, num_stages=8),
    Tile(64, 256, num_warps=8, num_stages=4),
    Tile(64, 128, num_warps=4, num_stages=4),
    Tile(64, 64, num_warps=4, num_stages=8),
)
# Tiles for other GPUs and for fp32, which has no tensor cores; wide tiles are for many columns. The number of stages
# (24 or 32 KB each) leaves room for two programs. On sm_100, narrow 16-bit tiles use four warps, because eight spill.
TILE, TILE_WIDE = Tile(128, 64, num_warps=8, num_stages=4), Tile(128, 128, num_warps=8, num_stages=3)
TILE_SWIGLU = Tile(64, 128, num_warps=8, num_stages=4)  # a column of the result takes two, gate and up
NUM_WARPS_SM_100 = 4
# Bytes of the weight that a launch prefetches before the previous launch has ended: about 3 us of HBM bandwidth. Much
# more might delay the first loads of the matmul.
PREFETCH_BYTES = 10_000_000


@functools.lru_cache(4096)  # a step without a CUDA graph calls it four times per layer
def _fetching_least(rows: int, columns: int, splits: int, swiglu: bool, multiprocessors: int) -> Tile:
    def fetched(tile: Tile) -> int:
        """Numbers that the busiest multiprocessor fetches for each k."""
        count = ceil_div(rows, tile.block_m) * ceil_div(columns, tile.block_n) * splits
        return ceil_div(count, multiprocessors) * (tile.block_m + tile.block_n)

    least, smallest = (2 if swiglu else 1) * SQUARES_GROUP, TILES[-1].block_m
    fits = [t for t in TILES if t.block_n >= least and (rows > t.block_m // 2 or t.block_m == smallest)]
    return min(fits, key=fetched)  # the first, i.e. largest, of equal ones


def prefetch_len(weight: Tensor, splits: int, split_len: int) -> int:
    """Columns of each split whose weights a launch prefetches while it waits for the previous launches."""
    bytes_of_column = weight.shape[0] * splits * weight.element_size()
    return min(split_len, PREFETCH_BYTES // bytes_of_column)
