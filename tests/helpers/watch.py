"""Observe operators, host-device syncs, memory, and forwards of a value model."""

import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Operators(TorchDispatchMode):
    """Records names of all operators, and of operators that write to an argument."""

    def __init__(self):
        super().__init__()
        self.names, self.writes = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function._schema.name)
        if function._schema.is_mutable:
            self.writes.append(function._schema.name)
        return function(*args, **(kwargs or {}))


class PeakMemory(TorchDispatchMode):
    """Peak bytes of tensors created in this mode."""

    def __init__(self):
        super().__init__()
        self.peak, self.alive = 0, {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(result):
            storage = x.untyped_storage() if isinstance(x, torch.Tensor) else None
            if storage and storage.data_ptr() not in given | self.alive.keys():
                self.alive[storage.data_ptr()] = storage.nbytes()
                weakref.finalize(storage, self.alive.pop, storage.data_ptr(), None)
                self.peak = max(self.peak, sum(self.alive.values()))
        return result


# Operators that read a value back or size a tensor by values, and methods that do so without an operator on a CPU.
READ_BACK = "local_scalar_dense nonzero masked_select unique equal is_nonzero repeat_interleave bincount"
READ_BACK_METHODS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)


class NoOperatorReadsBack(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.split(".")[0].lstrip("_")
        masks = name.startswith("index") and any(
            isinstance(x, torch.Tensor) and x.dtype in (torch.bool, torch.uint8) for x in tree_leaves(args[1:])
        )
        if masks or name.startswith(tuple(READ_BACK.split())):
            raise AssertionError(f"{function} reads back from the device")
        return function(*args, **(kwargs or {}))


class NoMethodReadsBack(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in READ_BACK_METHODS:
            raise AssertionError(f"{function} reads back from the device")
        return function(*args, **(kwargs or {}))


@contextmanager
def no_read_back():
    """Raises AssertionError at every operation that reads a value back to the host or sizes a tensor by values."""
    with NoOperatorReadsBack(), NoMethodReadsBack():
        yield


def watch_forwards(value_model, monkeypatch, *, of_prompts=False):
    """Lists to which every forward appends its numbers of delta tokens and candidates per request.

    ``of_prompts``: whether forwards without candidates also count."""
    seen, forward = SimpleNamespace(deltas=[], candidates=[]), value_model.forward

    def watched(batch, *args, **options):
        if of_prompts or batch.layout.candidate_rows.shape[1]:
            seen.deltas.append((batch.layout.q_offsets.diff() - batch.candidate_lens).tolist())
            seen.candidates.append(batch.candidate_lens.tolist())
        return forward(batch, *args, **options)

    monkeypatch.setattr(value_model, "forward", watched)
    return seen
