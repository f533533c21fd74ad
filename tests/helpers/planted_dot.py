"""A faulty matmul for Triton's interpreter: the sum of a row begins at the row's index in its tile.

Matmul libraries also add in an order that depends on the row. ``python -m tests.helpers.planted_dot MODULE
ARGUMENTS`` runs a module with it in the interpreter.
"""

import os
import runpy
import sys

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from lenvm_kernels.ops import _operator  # noqa: F401 - importing it later would replace the fault
from lenvm_kernels.ops._interpreter import decoded, dot_in_order


def create_dot(self, a, b, d, *options):
    rows, columns, total = decoded(a), decoded(b), d.data
    order = [np.roll(np.arange(rows.shape[1]), -place) for place in range(rows.shape[0])]
    sums = [dot_in_order(rows[i : i + 1, k], columns[k], total[i : i + 1]) for i, k in enumerate(order)]
    return TensorHandle(np.concatenate(sums), d.dtype.scalar)


if __name__ == "__main__":
    InterpreterBuilder.create_dot = create_dot
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
