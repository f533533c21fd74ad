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


# Tiles by size, the largest first. For each k, a tile fetches one number per row and per column from L2, which bounds
# most launches: on an H200, 128 x 256 reaches 71 % of the tensor cores' rate, 128 x 128 53 %, 128 x 64 35 %. A launch
# therefore uses the tile with which a multiprocessor fetches least, and the largest of equal ones.
#
# sm_90, 16-bit: 64 rows are the least of its matmul instruction. Launches of few rows have at most MULTIPROCESSORS
# tiles, so each program has a multiprocessor to itself, with 96 to 192 KB of tiles in flight. Measured on an H200:
# gate_up (N = 2 * 8960) of 192 rows takes 30 us with 64 x 256, and 44 us without that tile.
TILES_SM_90 = (
    Tile(128, 256, num_warps=8, num_stages=4),
    Tile(128, 128, num_warps=8, num_stages=6),
    Tile(128, 64, num_warps=8, num_stages=8),
    Tile(64, 256, num_warps=8, num_stages=4),
    Tile(64, 128, num_warps=4, num_stages=4),
    Tile(64, 64, num_warps=4, num_stages=8),
)
# Other GPUs, and fp32, which has no tensor cores. The instruction of sm_80 to sm_89 and sm_120 has 16 rows in every
# tile. A tile takes at most 96 KB of shared memory, because sm_86, sm_89 and sm_120 have 99 KB. With few rows, a tile
# with 128 columns takes at most 48 KB: two fit on a multiprocessor, and all 140 tiles of gate_up run at once on 82
# multiprocessors. Weights that are cut into tiles with 64 columns have few tiles; each keeps 56 KB of the weight in
# flight. Not measured.
TILES = (
    Tile(128, 128, num_warps=8, num_stages=3),
    Tile(128, 64, num_warps=8, num_stages=4),
    Tile(64, 128, num_warps=8, num_stages=4),
    Tile(64, 64, num_warps=4, num_stages=6),
    Tile(32, 128, num_warps=4, num_stages=3),
    Tile(32, 64, num_warps=4, num_stages=8),
    Tile(16, 128, num_warps=4, num_stages=3),
    Tile(16, 64, num_warps=4, num_stages=8),
)
# Up to this many rows are in one tile: smaller ones would read the weight once per 16 or 32 rows.
FEW_ROWS = 64
# Bytes of the weight that a launch prefetches before the previous launch has ended: about 3 us of HBM bandwidth. Much
# more might delay the first loads of the matmul.
PREFETCH_BYTES = 10_000_000


@functools.lru_cache(4096)  # a step without a CUDA graph calls it four times per layer
def fetching_least(
    tiles: tuple[Tile, ...], rows: int, columns: int, splits: int, swiglu: bool, multiprocessors: int
) -> Tile:
    """The tile with which the busiest multiprocessor fetches the fewest numbers for each k."""

    def fetched(tile: Tile) -> int:
        count = ceil_div(rows, tile.block_m) * ceil_div(columns, tile.block_n) * splits
        return ceil_div(count, multiprocessors) * (tile.block_m + tile.block_n)

    def fits(tile: Tile) -> bool:
        """Whether it holds few rows at once, no smaller tile does, and its columns are whole groups of squares."""
        is_full = rows > tile.block_m // 2 or tile.block_m == tiles[-1].block_m
        is_large = tile.block_m >= min(rows, FEW_ROWS)
        return is_full and is_large and tile.block_n >= (2 if swiglu else 1) * SQUARES_GROUP

    return min(filter(fits, tiles), key=fetched)  # the first, i.e. largest, of equal ones


def prefetch_len(weight: Tensor, splits: int, split_len: int) -> int:
    """Columns of each split whose weights a launch prefetches while it waits for the previous launches."""
    bytes_of_column = weight.shape[0] * splits * weight.element_size()
    return min(split_len, PREFETCH_BYTES // bytes_of_column)
