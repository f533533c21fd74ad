"""Other implementations of what our operators compute, timed beside them in the same run; none of their code is here.

Each module is one package, each function one peer: it takes the tensors of our operator, prepares everything that the
peer wants made beforehand, and returns ``run``, one call of the peer. What its docstring says is prepared is not timed.
A peer's package is imported when a function of its module is called. A peer that cannot run raises :class:`Absent`.
"""

import importlib
import os
from types import ModuleType
from typing import NamedTuple

import torch

from bench.harness.measuring import Run  # noqa: F401  what the functions of all modules return
from lenvm_kernels.reference.value_tree_attention import tree_mask


class Absent(Exception):
    """A peer that cannot run here; the message says why."""


def load(module: str) -> ModuleType:
    """Import a module of a peer.

    Raises:
        Absent: whatever keeps it from being imported: not installed, no GPU, another version of PyTorch, ...
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name == package:
            raise Absent(f"{package} is not installed") from None
        raise Absent(f"{module} does not import: {error}") from error
    except Exception as error:  # no peer may end a run, and packages fail to import in every way there is
        raise Absent(f"{module} does not import: {describe(error)}") from error


def describe(error: BaseException) -> str:
    """An exception's type and what it says, on one line and no more than a table's cell can hold."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def require_cuda(tensor: torch.Tensor, *, or_interpreter: bool = False) -> None:
    """Raise :class:`Absent` unless a peer's kernels can run on the tensor's device.

    Args:
        tensor: one of the peer's arguments.
        or_interpreter: whether the peer is written in Triton, whose interpreter runs it on a CPU.
    """
    if not (tensor.is_cuda or (or_interpreter and os.environ.get("TRITON_INTERPRET") == "1")):
        raise Absent(f"runs on a GPU only, got tensors on {tensor.device}")


def require_dtype(tensor: torch.Tensor, *accepted: torch.dtype) -> None:
    """Raise :class:`Absent` unless a peer takes the tensor's dtype."""
    if tensor.dtype not in accepted:
        raise Absent(f"takes {' and '.join(str(dtype) for dtype in accepted)} only, got {tensor.dtype}")


class Request(NamedTuple):
    """A request of a :class:`Tree`."""

    slots: torch.Tensor  # int64 [cached], slots of its cached tokens
    start: int  # its rows of q, k_new and v_new
    end: int
    delta: int  # of them, those before the candidates


class Tree(NamedTuple):
    """The tensors of ``value_tree_attention`` in its order, with pages of one token and no parents."""

    q: torch.Tensor  # [T, Hq, D]
    k_new: torch.Tensor  # [T, Hkv, D]
    v_new: torch.Tensor  # [T, Hkv, D]
    k_cache: torch.Tensor  # [S, Hkv, D]
    v_cache: torch.Tensor  # [S, Hkv, D]
    slot_table: torch.Tensor  # int32 [R, longest]
    table_rows: torch.Tensor  # int32|int64 [B]
    cached_lens: torch.Tensor  # int32 [B]
    q_offsets: torch.Tensor  # int32 [B + 1]
    candidate_lens: torch.Tensor  # int32 [B]

    def requests(self) -> list[Request]:
        """The requests one by one; reads lengths from the device."""
        offsets = self.q_offsets.tolist()
        lengths = zip(
            self.table_rows.tolist(),
            self.cached_lens.tolist(),
            offsets,
            offsets[1:],
            self.candidate_lens.tolist(),
            strict=False,
        )
        return [
            Request(self.slot_table[row, :cached].long(), start, end, end - start - candidates)
            for row, cached, start, end, candidates in lengths
        ]

    def masks(self) -> torch.Tensor:
        """Which tokens each new token attends to, for peers that need it built: bool, of each request
        ``[new, cached + new]``, flattened and one after the other."""
        return torch.cat(
            [
                tree_mask(len(slots), delta, end - start - delta, [], self.q.device).flatten()
                for slots, start, end, delta in self.requests()
            ]
        )
