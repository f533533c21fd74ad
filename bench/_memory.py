"""How much of the GPU's memory a process may take: for many processes beside each other on one GPU."""

import os

import torch

SHARE = "BENCH_MEMORY_SHARE"  # environment variable: a number > 0 and <= 1


def limit() -> None:
    """Let torch allocate no more than the share of the GPU's memory in ``BENCH_MEMORY_SHARE``, if that is set.

    What goes past it gets an ordinary out-of-memory error, and no other process is harmed.
    """
    if share := os.environ.get(SHARE):
        torch.cuda.set_per_process_memory_fraction(float(share))
