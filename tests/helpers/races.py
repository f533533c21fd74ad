"""Detects races in Triton kernels with Triton's interpreter.

The interpreter runs the programs of a launch one after the other, so races do not show in its results. Instead,
:class:`LaunchChecker` records the memory accesses of each program, and reports

- two programs that access the same bytes, at least one of them with a store, or only one with an atomic update, unless
  a release and an acquire on one address order them (:class:`_Program`);
- a program that does so without a ``tl.debug_barrier()`` in between, which orders its threads;
- one store that writes different values to the same bytes;
- an address that is not an element of the tensor from which it was computed. A view only has the elements of its shape
  and strides. The access is skipped, so that the process survives.

The check is stricter than a GPU: two accesses to the same bytes are safe if one thread does both, but kernels cannot
rely on that. :func:`check_races` also runs a workload in several orders of programs and with different garbage in fresh
memory, and checks that the results are bitwise identical.
"""

import ctypes
import inspect
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import combinations, product
from unittest import mock

import numpy as np
import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

from lenvm_kernels.ops import begin_step

# In a checked launch, a pointer argument is its number times this spacing, with offsets of up to 2^43 bytes either way,
# so that an address identifies its argument.
_ARGUMENT_SPACING = 1 << 44
# Numbers from here on belong to tensors with an address that a kernel has stored.
_STORED = 1000
_FRESH = {getattr(torch.ops.aten, name) for name in ("empty", "empty_like", "empty_strided")}
_FRESH |= {torch.ops.aten.new_empty, torch.ops.aten.new_empty_strided}
_SEMANTIC = interpreter._ir.MEM_SEMANTIC
_ACQUIRES = (_SEMANTIC.ACQUIRE, _SEMANTIC.ACQUIRE_RELEASE)
_RELEASES = (_SEMANTIC.RELEASE, _SEMANTIC.ACQUIRE_RELEASE)
Handle = interpreter.TensorHandle


class _FreshMemory(TorchDispatchMode):
    """Fills memory from ``torch.empty`` (or ``empty_like``, ``new_empty``) with garbage."""

    def __init__(self, garbage: int) -> None:
        super().__init__()
        self.garbage = garbage

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket in _FRESH and result.device.type == "cpu" and result.numel():
            storage = result.untyped_storage()
            ctypes.memset(storage.data_ptr(), self.garbage, storage.nbytes())
        return result


@dataclass(eq=False)
class _Program:
    """A program of a launch, and the accesses of other programs that happen before its next access.

    A release publishes the program's accesses before its last barrier, because one thread makes the atomic update, and
    only a barrier orders accesses of other threads before it. A later acquire on the same address sees all of them.
    """

    interval: int = 0  # number of barriers
    releases: int = 0
    seen: dict["_Program", int] = field(default_factory=dict)  # number of releases seen per other program
    unpublished: list["_Access"] = field(default_factory=list)  # since the last barrier

    def barrier(self) -> None:
        self.interval += 1
        for access in self.unpublished:
            access.epoch = self.releases
        self.unpublished = []

    def synchronise(self, published: dict["_Program", int], semantic: object) -> None:
        """Make an atomic update of an address; ``published`` are earlier releases at this address."""
        if semantic in _ACQUIRES:
            self.seen = {p: max(self.seen.get(p, 0), published.get(p, 0)) for p in self.seen | published}
        if semantic in _RELEASES:
            self.releases += 1
            for program, count in {**self.seen, self: self.releases}.items():
                published[program] = max(published.get(program, 0), count)


@dataclass(eq=False)
class _Access:
    """One load, store or atomic update of one program."""

    kind: str
    where: str
    addresses: np.ndarray  # sorted, without duplicates
    size: int  # bytes at each address
    program: _Program
    interval: int  # ``_Program.interval`` at the access
    seen: dict[_Program, int]  # ``_Program.seen`` at the access
    epoch: int | None = None  # number of the program's first release that publishes the access

    def happens_before(self, other: "_Access") -> bool:
        """Whether this access, which is earlier in the interpreter, also happens before ``other`` on a GPU."""
        if self.program is other.program:
            return self.interval < other.interval
        return other.seen.get(self.program, 0) > self.epoch


def _is_element(tensor: torch.Tensor, offsets: np.ndarray, size: int) -> np.ndarray:
    """Whether ``size`` bytes at ``offsets`` (bytes from the tensor's first element) are within one of its elements."""
    rest, inside = offsets, np.full(offsets.shape, tensor.numel() > 0)
    dimensions = [(stride, length) for stride, length in zip(tensor.stride(), tensor.shape, strict=True) if length > 1]
    for stride, length in sorted(dimensions, reverse=True):
        if stride:  # an expanded dimension repeats the same memory
            index = rest // (stride * tensor.itemsize)
            inside = inside & (index >= 0) & (index < length)
            rest = rest - index * (stride * tensor.itemsize)
    return inside & (rest >= 0) & (rest + size <= tensor.itemsize)


class LaunchChecker(ExitStack):
    """Context that checks every interpreted launch, with its programs in an ``order``: forward, reverse or random.

    Memory from ``torch.empty`` is filled with the byte ``garbage``. ``conflicts`` are distinct descriptions with source
    lines; ``launches`` are numbers of launches by kernel name.
    """

    def __init__(self, order: str = "forward", garbage: int = 0xA5) -> None:
        super().__init__()
        self.order, self._random = order, random.Random(0)
        self.conflicts: list[str] = []
        self.launches: Counter[str] = Counter()
        self._memory = _FreshMemory(garbage)
        self._stored: dict[int, tuple[str, torch.Tensor]] = {}

    def __enter__(self) -> "LaunchChecker":
        checker, builder = self, interpreter.InterpreterBuilder
        load, store, atomic_rmw = builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw

        def checked_load(self, ptrs, mask, other, *options):
            return load(self, *checker._access("load", ptrs, mask), other, *options)

        def checked_store(self, ptrs, value, mask, *options):
            ptrs, mask = checker._access("store", ptrs, mask, value=value.data)
            return store(self, ptrs, value, mask, *options)

        def checked_rmw(self, operation, ptr, value, mask, semantic, scope):
            ptr, mask = checker._access("atomic update", ptr, mask, semantic=semantic)
            return atomic_rmw(self, operation, ptr, value, mask, semantic, scope)

        def run(executor, *args, **kwargs):
            self._run(executor, args, kwargs)

        for target, name, function in (
            (builder, "create_masked_load", checked_load),
            (builder, "create_masked_store", checked_store),
            (builder, "create_atomic_rmw", checked_rmw),
            (builder, "create_barrier", lambda _: self._program.barrier()),
            (interpreter.GridExecutor, "__call__", run),
            (begin_step, "address_and_stride", self._address_and_stride),
        ):
            self.enter_context(mock.patch.object(target, name, function))
        self.enter_context(self._memory)
        return self

    def _run(self, executor: interpreter.GridExecutor, args: tuple, kwargs: dict) -> None:
        """Run a launch instead of the interpreter's loop over programs."""
        self._kernel, parameters = executor.fn.__name__, inspect.signature(executor.fn).parameters
        self.launches[self._kernel] += 1
        self._tensors: list[tuple[str, torch.Tensor]] = []
        self._accesses: list[_Access] = []
        self._published: dict[int, dict[_Program, int]] = {}  # by address of an atomic update
        scope = interpreter._patch_lang(executor.fn)
        try:
            bound = inspect.getcallargs(executor.fn, *args, **{k: v for k, v in kwargs.items() if k in parameters})
            arguments = {k: v if k in executor.constexprs else self._convert(k, v) for k, v in bound.items()}
            grid = executor.grid(arguments) if callable(executor.grid) else executor.grid
            grid = tuple(grid) + (1,) * (3 - len(grid))
            interpreter.interpreter_builder.set_grid_dim(*grid)
            indices = list(product(*map(range, grid)))
            if self.order == "reverse":
                indices.reverse()
            elif self.order == "random":
                self._random.shuffle(indices)
            for index in indices:
                self._program = _Program()
                interpreter.interpreter_builder.set_grid_idx(*index)
                executor.fn(**arguments)
                self._program.barrier()  # at the end, because later accesses publish nothing
        finally:
            scope.restore()
        self._compare()

    def _convert(self, name: str, argument: object) -> object:
        """An argument in the interpreter's form. A pointer identifies its argument."""
        if isinstance(argument, tuple):
            names = getattr(argument, "_fields", range(len(argument)))
            fields = [self._convert(f"{name}.{n}", value) for n, value in zip(names, argument, strict=True)]
            return type(argument)(*fields) if hasattr(argument, "_fields") else tuple(fields)
        converted = interpreter._implicit_cvt(argument)
        if isinstance(argument, torch.Tensor):
            self._tensors.append((name, argument))
            converted.handle.data[0] = len(self._tensors) * _ARGUMENT_SPACING
        return converted

    def _address_and_stride(self, x: torch.Tensor | None) -> tuple[int, int]:
        """The address, which identifies the tensor in later launches, and the row stride."""
        if x is None:
            return 0, 0
        number = _STORED + len(self._stored)
        self._stored[number] = "a stored address", x
        return number * _ARGUMENT_SPACING, x.stride(0)

    def _report(self, conflict: str) -> None:
        conflict = f"{self._kernel}: {conflict}"
        if conflict not in self.conflicts:
            self.conflicts.append(conflict)

    def _line(self) -> str:
        """The current line, in the kernel or in a function that it calls."""
        frame = sys._getframe(2)
        while frame.f_code.co_filename.startswith((__file__, triton.__path__[0])):
            frame = frame.f_back
        return f"line {frame.f_lineno}"

    def _access(self, kind, ptrs, mask, value=None, semantic=None):
        """Record an access; returns its real addresses, and its mask without out-of-bounds elements."""
        virtual = np.asarray(ptrs.data).astype(np.int64)
        active = np.broadcast_to(np.asarray(mask.data, dtype=bool), virtual.shape)
        size = interpreter._get_np_dtype(ptrs.get_element_ty()).itemsize
        where = self._line()
        real, inside = np.zeros(virtual.shape, np.int64), np.zeros(virtual.shape, bool)
        numbers = (virtual + _ARGUMENT_SPACING // 2) // _ARGUMENT_SPACING
        for number in np.unique(numbers[active]):
            lanes = active & (numbers == number)
            known = self._tensors[number - 1 : number] if number > 0 else []
            if number in self._stored:
                known = [self._stored[number]]
            if not known:
                self._report(f"the {kind} in {where} is far out of bounds")
                continue
            ((name, tensor),) = known
            offsets = virtual[lanes] - number * _ARGUMENT_SPACING
            valid = _is_element(tensor, offsets, size)
            if not valid.all():
                self._report(f"the {kind} in {where} is out of bounds of {name}, shape {tuple(tensor.shape)}")
            inside[lanes] = valid
            real[lanes] = tensor.data_ptr() + offsets
        addresses = real[inside]
        unique = np.unique(addresses)
        if kind == "store" and unique.size < addresses.size:
            values = np.broadcast_to(value, virtual.shape)[inside]
            if np.unique(np.rec.fromarrays([addresses, values.view(f"u{values.itemsize}")])).size > unique.size:
                self._report(f"the store in {where} writes different values to the same bytes")
        if semantic is not None:
            for address in unique.tolist():
                self._program.synchronise(self._published.setdefault(address, {}), semantic)
        if unique.size:
            program = self._program
            self._accesses.append(_Access(kind, where, unique, size, program, program.interval, program.seen))
            program.unpublished.append(self._accesses[-1])
        return Handle(real.astype(np.uint64), ptrs.dtype), Handle(inside, mask.dtype)

    def _compare(self) -> None:
        """Report unordered accesses of the launch to the same bytes."""
        changed = [access.addresses for access in self._accesses if access.kind != "load"]
        if not changed:
            return
        # In units of the smallest access. Bytes that are only loaded, the majority, are skipped.
        unit = min(access.size for access in self._accesses)
        blocks = np.unique(np.concatenate(changed) // 8)
        units = []
        for access in self._accesses:
            places = np.searchsorted(blocks, access.addresses // 8).clip(max=len(blocks) - 1)
            near = access.addresses[blocks[places] == access.addresses // 8]
            units.append((near[:, None] // unit + np.arange(access.size // unit)).ravel())
        numbers, units = np.repeat(np.arange(len(units)), [x.size for x in units]), np.concatenate(units)
        order = np.argsort(units, kind="stable")  # per unit, in the order of execution
        groups = np.split(numbers[order], np.nonzero(np.diff(units[order]))[0] + 1)
        for group in {tuple(group) for group in groups if len(group) > 1}:
            for first, second in combinations((self._accesses[number] for number in group), 2):
                kinds = {first.kind, second.kind}
                if kinds in ({"load"}, {"atomic update"}) or first.happens_before(second):
                    continue
                how = "with no barrier between" if first.program is second.program else "from two programs"
                what = f"{first.kind} in {first.where} and {second.kind} in {second.where}"
                self._report(f"{what} touch the same bytes {how}")


# As floats, the garbage is a small number, a large one, and a NaN.
_RUNS = (("forward", 0xA5), ("reverse", 0x5A), ("random", 0xFF))


def check_races(workload: Callable[[], Sequence[torch.Tensor]]) -> Counter[str]:
    """Run a workload in several orders of programs, and return the number of launches by kernel name. Raises
    AssertionError if a conflict is found or the returned tensors differ."""
    expected = None
    for order, garbage in _RUNS:
        with LaunchChecker(order, garbage) as checker:
            results = [result.detach().clone() for result in workload()]
        assert not checker.conflicts, "\n".join(checker.conflicts)
        expected = results if expected is None else expected
        for number, (actual, wanted) in enumerate(zip(results, expected, strict=True)):
            same = torch.equal(*(x.flatten().view(torch.uint8) for x in (actual, wanted)))
            assert same, f"result {number} changes with the order of the programs ({order}), or with garbage in memory"
    return checker.launches
