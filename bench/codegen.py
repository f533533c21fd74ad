"""What the compiler makes of every kernel, for GPUs that are not there: ``python -m bench.codegen [--check]``.

Runs the calls of :mod:`bench.kernel_calls` through the real launchers, on CPU tensors under a driver that compiles for
another GPU and launches nothing: the same specialisation of arguments, the same constants, the same code as a launch
there. For each GPU that is a prompt and a guided step of each value model, and for sm_90 also ``calls``: every operator
with all its dtypes and options. Each is compiled in a process of its own. The table has, for each kernel:

- registers a thread, bytes spilled a thread (on NVIDIA's GPUs the stack, which nothing else here needs), shared memory
  a block, warps a block, and the share of the part's warps that these leave resident (occupancy);
- tensor-core instructions by kind, global loads and stores by width in bits, asynchronous copies, and fp64 arithmetic.

``--check`` fails on

- a spill (in ``calls`` one of more than 64 bytes), or more shared memory than the part has;
- a matmul of 16-bit numbers without tensor cores (on sm_90 without asynchronous copies, and where its tile has 64 rows
  or more without warp-group instructions, HGMMA);
- 16-bit global loads in an innermost loop;
- fp64 arithmetic: no kernel means to do any (but see ``TAKES_ANGLES``);
- a product fused with an addition across threads (NVIDIA only), where a branch depends on such a sum: it leaves the
  threads with different sums, and a loop that they leave at different times hangs at its next barrier;
- a kernel launched before the one before it has ended that does not wait before it touches memory (sm_90);
- a sum whose layout along what is added, or a matmul whose instructions' products at once, hence its order and its last
  bits, depends on the number of requests in the batch;
- a kernel that no call launches;
- in a step on sm_90: a loop that waits for all of its asynchronous copies; a kernel that streams with too few bytes of
  copies on their way; a matmul whose loop is bound by issuing instructions; more launches or torch operators than
  ``LIMITS``;
- a figure of a step more than 10 % worse than the committed one of the same Triton version
  (``bench/results/codegen.json``, written by ``--update``).

Two cores take some minutes for everything.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget

from bench.harness import flags
from bench.harness.storing import dump
from bench.kernel_calls import DRAFTS, VALUE_MODELS, operator_calls, trunk_step, value_model_step, value_step
from bench.launches import compiling_for, intercept_launches, kernels, kernels_on_cpu
from bench.models import DIMENSIONS
from bench.sass import disassemble, instructions_of, loading_loops, loops_of, main_loop, registers_and_stack
from lenvm_kernels.ops import ragged_linear, value_head, value_tree_attention

RESULTS = Path(__file__).parent / "results" / "codegen.json"
# Requests in a batch: the least, some that fill no tile, and as many as take every tile of the matmuls.
BATCHES = (1, 17, 64, 256)
# Kernels that are matmuls, and the rows of their tiles.
MATMULS = {
    "_ragged_linear_kernel": ragged_linear.TILES[-1].block_m,
    "_value_tree_attention_kernel": value_tree_attention.BLOCK_M.value,
    "_value_head_kernel": value_head.BLOCK_M_FEW,
}
# Kernels that branch on no sum across threads. Threads may hold it with different last bits: one of them stores it.
BRANCH_ON_NO_SUM = {"_value_tree_attention_kernel"}
# Kernels that take cosines and sines. An angle beyond 105,615 is reduced with so many bits of 2/pi that they lie in 32
# bytes of the stack, and each function then has three instructions in fp64. A spill would come on top.
TAKES_ANGLES = {"_embed_tokens_kernel"}
ANGLE_STACK, ANGLE_FP64 = 32, 6
ASKS_EARLY = {"_ragged_linear_kernel"}  # for its first weights, while earlier launches run
WARP_GROUP_ROWS = 64  # of the smallest tile that sm_90's HGMMA multiplies
TOLERANCE = 0.10  # of a figure, against the committed one
# What a guided step of the model may launch.
STEP_MODEL, STEP_SIZES = "Qwen2.5-1.5B", (8, 64, 256)
LIMITS = {
    "launches of a layer": 7,
    "launches of a step": 207,
    "torch operators of a step": 0,
    "launches of a step with drafts": 217,
    "torch operators of a step with drafts": 7,
    "launches of a step with a trunk": 9,
}
# Kernels whose job is to stream, and the bytes of copies that each multiprocessor needs on their way after the wait for
# HBM to be busy: bandwidth x latency / 132. (The scan has no loop and no copies: its loads are on their way because 64
# warps share a multiprocessor, which its occupancy shows.)
STREAMING = {*MATMULS}
IN_FLIGHT = {"H100": 25_000, "H200": 40_000}
# Cycles of the tensor cores for a cycle of issuing instructions, in the main loop: below 1 the instructions bound it.
# Tiles of 64 x 64 are just below, but those of few rows wait for HBM.
TENSOR_OVER_ISSUE = {"_ragged_linear_kernel": 0.9}
# Some calls with unusual sizes park a few scalars outside their loops; a tile that does not fit the registers takes
# hundreds of bytes.
CALLS_SPILL = 64


@dataclass(frozen=True)
class Part:
    """What a GPU has, of its data sheet.

    Attributes:
        target: as Triton names it.
        shared: bytes of shared memory that one block may have.
        shared_of_sm: bytes of a multiprocessor; a block takes 1 KiB of it beside its own.
        registers: 32-bit ones of a multiprocessor (a SIMD's lane on gfx942).
        warps: resident on a multiprocessor (on a SIMD on gfx942).
        blocks: resident on a multiprocessor.
    """

    target: GPUTarget
    shared: int
    shared_of_sm: int
    registers: int
    warps: int
    blocks: int

    def resident_blocks(self, registers: int, shared: int, warps: int) -> int:
        """Blocks that a multiprocessor of NVIDIA's runs side by side. Registers are allotted in units of 256 a warp."""
        of_block = -(-registers * 32 // 256) * 256 * warps
        limits = (self.warps // warps, self.registers // of_block, self.shared_of_sm // (shared + 1024))
        return min(self.blocks, *limits)

    def occupancy(self, registers: int, shared: int, warps: int) -> float:
        """Share of the resident warps that a kernel with such blocks can fill."""
        if self.target.backend == "hip":
            # A wave's registers are allotted in eights; each of four SIMDs has 512 a lane. LDS limits whole blocks.
            waves = min(self.warps, self.registers // max(8, -(-registers // 8) * 8))
            by_shared = self.shared_of_sm // shared if shared else self.blocks
            return min(waves, by_shared * warps / 4) / self.warps
        return self.resident_blocks(registers, shared, warps) * warps / self.warps


KIB = 1024
PARTS = {
    "sm_80": Part(GPUTarget("cuda", 80, 32), 163 * KIB, 164 * KIB, 65_536, 64, 32),
    "sm_90": Part(GPUTarget("cuda", 90, 32), 227 * KIB, 228 * KIB, 65_536, 64, 32),
    "sm_100": Part(GPUTarget("cuda", 100, 32), 227 * KIB, 228 * KIB, 65_536, 64, 32),
    "gfx942": Part(GPUTarget("hip", "gfx942", 64), 64 * KIB, 64 * KIB, 512, 8, 16),
}
# What is compiled, and for which part: the value models' steps for each, the operators' calls for sm_90.
CALLS = "calls"
SUBJECTS = PARTS | {CALLS: PARTS["sm_90"]}


@dataclass(frozen=True)
class Figures:
    """What is known of a compiled kernel; see the module.

    Attributes:
        model: the value model whose step launches it, or the call of an operator.
        kernel: its name, and its number among those of that name there.
        is_half: it reads or writes floats of 16 bits.
        programs: that a multiprocessor has room for.
        loop_instructions, loop_copies, loop_wait: of the main loop (:mod:`bench.sass`) its instructions, those that
            copy asynchronously, and the groups of copies that may be on their way after its wait.
        bytes_in_flight: of a program's copies, after that wait.
        tensor_over_issue: cycles of the tensor cores / cycles of issuing instructions, in the main loop.
        waits_for_all: loops with asynchronous copies that wait for all of them.
        asks_before_wait: instructions that ask for weights before it waits for the launches before it. None where it
            does not wait.
    """

    model: str
    kernel: str
    registers: int
    spilled: int
    shared: int
    warps: int
    occupancy: float
    tensor_cores: dict[str, int] = field(default_factory=dict)
    loads: dict[str, int] = field(default_factory=dict)
    stores: dict[str, int] = field(default_factory=dict)
    async_copies: int = 0
    loads_16_in_loops: int = 0
    fp64: int = 0
    fused_into_shuffles: int = 0
    accesses_before_wait: int = 0
    batch_dependent_sums: bool = False
    is_half: bool = True  # as in all files of before this was read
    # On sm_90 only, and in no file of before these were read.
    programs: int | None = None
    loop_instructions: int | None = None
    loop_copies: int | None = None
    loop_wait: int | None = None
    bytes_in_flight: int | None = None
    tensor_over_issue: float | None = None
    waits_for_all: int | None = None
    asks_before_wait: int | None = None

    @property
    def name(self) -> str:
        """The kernel's."""
        return self.kernel.split()[0]


# --- compiling ---


def compile_steps(part: Part) -> list[Figures]:
    """The figures of every kernel of every value model."""
    figures, described = [], {}
    for model in VALUE_MODELS:
        batches = []
        for rows in BATCHES:
            with compiling_for(part.target) as compiled:
                value_model_step(model, rows)
            batches.append(compiled)
        batch_dependent = sums_that_differ(batches)
        seen: Counter[str] = Counter()
        for name, kernel in {kernel.hash: (name, kernel) for name, kernel in chain(*batches)}.values():
            seen[name] += 1
            if kernel.hash not in described:
                described[kernel.hash] = describe(kernel, part)
            depends = kernel.hash in batch_dependent
            figures.append(
                Figures(model, f"{name} {seen[name]}", **described[kernel.hash], batch_dependent_sums=depends)
            )
    return figures


def compile_calls(part: Part, once: bool) -> list[Figures]:
    """The figures of every kernel of the operators' calls; with ``once`` of the first call that launches it."""
    figures, seen = [], set()
    with compiling_for(part.target, once) as compiled:
        for call_name, call in operator_calls():
            call()
            new = {kernel.hash: (name, kernel) for name, kernel in compiled if kernel.hash not in seen}
            figures += [Figures(call_name, name, **describe(kernel, part)) for name, kernel in new.values()]
            seen |= new.keys()
            compiled.clear()
    return figures


def sums_that_differ(batches: list[list[tuple[str, object]]]) -> set[str]:
    """Hashes of the kernels whose floating-point sums are divided differently in the launches of different batches.

    The launches of a batch follow each other in the same order whatever its size, so the n-th of one batch is the n-th
    of another.
    """
    found = set()
    for launches in zip(*batches, strict=True):
        ttgirs = {kernel.hash: kernel.asm["ttgir"] for _, kernel in launches}
        layouts = {key: sum_layouts(ttgir) + matmul_steps(ttgir) for key, ttgir in ttgirs.items()}
        if len({tuple(of_kernel) for of_kernel in layouts.values()}) > 1:
            found |= layouts.keys()
    return found


def sum_layouts(ttgir: str) -> list[str]:
    """Of each floating-point sum across a tensor, in the order of the code: how its layout divides what is added.

    Not of sums of two numbers, which are the same in any order."""
    aliases = dict(re.findall(r"^(#\w+) = (#.+)$", ttgir, flags=re.MULTILINE))
    reduction = r'"tt\.reduce"\(.*?\) <\{axis = (\d+).*?\}> \(\{(.*?)\}\) : \((.*?)\) ->'
    found = []
    for axis, combine, operands in re.findall(reduction, ttgir, flags=re.DOTALL):
        if "arith.addf" in combine and _shape(operands)[int(axis)] != "2":
            found.append(_along(int(axis), re.sub(r"#\w+", lambda alias: aliases[alias[0]], operands)))
    return found


def matmul_steps(ttgir: str) -> list[str]:
    """How many products each kind of matmul instruction adds up at once (where the layout of its result tells)."""
    return sorted(set(re.findall(r"instrShape = \[\d+, \d+, (\d+)\]", ttgir)))


def _shape(tensor: str) -> list[str]:
    return re.match(r"tensor<([\dx]+)x", tensor)[1].split("x")


def _along(axis: int, tensor: str) -> str:
    """What the type of a tensor says of one axis. How many rows there are beside it changes no sum along it."""
    shape = _shape(tensor)

    def of_axis(match: re.Match) -> str:
        """Numbers by axis, or a list of such of a linear layout."""
        name, values = match[1], json.loads(match[2])
        nested = values and isinstance(values[0], list)
        if name in ("order", "instrShape") or len(values[0] if nested else values) != len(shape):
            return match[0]
        return f"{name} = {[x[axis] for x in values if x[axis]] if nested else values[axis]}"

    layout = re.sub(r"(\w+) = (\[[\[\]\d, ]*\](?=[,}]))", of_axis, tensor)
    return layout.replace("x".join(shape), shape[axis], 1)


# --- reading what was compiled ---

TENSOR_CORES = r"\b(?:(HMMA|HGMMA|UTC\w*MMA)\b|v_(mfma)_)"
LOADS_16 = r"\bLDG\.[\w.]*\b[US]16\b|\b(?:global|buffer)_load_(?:u|s)?short"
FP64 = r"\b(?:D(?:ADD|MUL|FMA|SETP|MNMX)|MUFU\.\w*64H|[FI]2[FI][\w.]*\.F64|v_\w+_f64)"


def describe(kernel: object, part: Part) -> dict[str, object]:
    """What :class:`Figures` has of a compiled kernel by itself."""
    warps, shared = kernel.metadata.num_warps, kernel.metadata.shared
    if part.target.backend == "hip":
        code = kernel.asm["amdgcn"]
        counts = (re.search(rf"\.{key}:\s+(\d+)", code)[1] for key in ("vgpr_count", "vgpr_spill_count"))
        registers, spilled = map(int, counts)
        spilled *= 4
        instructions = [(i, line) for i, line in enumerate(code.splitlines())]
        loops = _amd_loops(instructions)
    else:
        code = disassemble(kernel, part.target.arch)
        registers, spilled = registers_and_stack(code)
        instructions = instructions_of(code)
        loops = loops_of(instructions)
    of_sm_90 = part.target == PARTS["sm_90"].target
    overlaps = of_sm_90 and kernel.metadata.launch_pdl
    before_wait = until_wait([line for _, line in instructions]) if overlaps else []
    return {
        "registers": registers,
        "spilled": spilled,
        "shared": shared,
        "warps": warps,
        "accesses_before_wait": num_accesses(before_wait),
        "occupancy": round(part.occupancy(registers, shared, warps), 3),
        "is_half": bool(re.search(r"\*(?:bf|fp)16", str(kernel.src.signature))),  # some arguments are tuples
        **count_instructions(instructions, loops),
        **({"asks_before_wait": sum("CCTL.E.PF2" in line for line in before_wait)} if overlaps else {}),
        **({"programs": part.resident_blocks(registers, shared, warps)} if of_sm_90 else {}),
        **(loop_figures(instructions, warps) if of_sm_90 else {}),
    }


def loop_figures(instructions: list[tuple[int, str]], warps: int) -> dict[str, object]:
    """What :class:`Figures` has of the loops of a kernel for sm_90."""
    loops = loading_loops(instructions, warps)
    found: dict[str, object] = {
        "waits_for_all": sum(bool(loop.copied) and loop.wait == 0 for loop in loops),
        "bytes_in_flight": 0,
    }
    if loop := main_loop(loops):
        found |= {
            "loop_instructions": len(loop.lines),
            "loop_copies": sum("LDGSTS" in line for line in loop.lines),
            "loop_wait": loop.wait,
            "bytes_in_flight": loop.bytes_in_flight,
        }
        if loop.tensor_cycles:
            found["tensor_over_issue"] = round(loop.tensor_cycles / loop.issue_cycles, 3)
    return found


def count_instructions(instructions: list[tuple[int, str]], loops: list[tuple[int, int]]) -> dict:
    """What (address, instruction) pairs load, store and multiply; ``loops`` are the first and last address of each."""
    text = "\n".join(line for _, line in instructions)
    # What a loop does around another one is done once for all of the inner one.
    innermost = [
        (first, last)
        for first, last in loops
        if not any((first, last) != other and first <= other[0] and other[1] <= last for other in loops)
    ]
    in_loops = "\n".join(line for at, line in instructions if any(first <= at <= last for first, last in innermost))
    return {
        "tensor_cores": dict(Counter("".join(kind) for kind in re.findall(TENSOR_CORES, text))),
        "loads": _widths(text, "load"),
        "stores": _widths(text, "store"),
        "async_copies": len(re.findall(r"\b(?:LDGSTS|UTMALDG)\b", text)) + len(re.findall(r"load_lds", text)),
        "loads_16_in_loops": len(re.findall(LOADS_16, in_loops)),
        "fp64": len(re.findall(FP64, text)),
        "fused_into_shuffles": fused_into_shuffles([line for _, line in instructions]),
    }


def until_wait(lines: list[str]) -> list[str]:
    """What a kernel does before it waits for the launches before it (sm_90)."""
    return lines[: next((i for i, line in enumerate(lines) if "ACQBULK" in line), len(lines))]


def num_accesses(lines: list[str]) -> int:
    """Loads, stores and atomic updates of global memory (sm_90). What is only asked for is none."""
    return sum(bool(re.search(r"\b(?:LDG|STG|LDGSTS|ATOMG?|RED|REDG)\b", line)) for line in lines)


def fused_into_shuffles(lines: list[str]) -> int:
    """Fused multiply-adds that add what a shuffle brought from another thread (NVIDIA).

    Of two threads that exchange their products ``a b`` and ``c d``, one then has ``a b + round(c d)`` and the other
    ``c d + round(a b)``.
    """
    found = 0
    for at, line in enumerate(lines):
        shuffle = re.search(r"\bSHFL\.\w+ P\w+, (R\d+),", line)
        if shuffle is None:
            continue
        register = shuffle[1]
        for later in lines[at + 1 :]:
            found += bool(re.search(rf"\bFFMA\b.*, {register}\b[^,]*$", later))  # the addend comes last
            if re.search(rf"^\s*(?:@\S+ )?[A-Z]\S* {register}\b", later):  # it is written anew
                break
    return found


def _amd_loops(instructions: list[tuple[int, str]]) -> list[tuple[int, int]]:
    labels = {label[1]: at for at, line in instructions if (label := re.match(r"(\.LBB\w+):", line))}
    branches = ((at, re.search(r"\bs_c?branch\w*\s+(\.LBB\w+)", line)) for at, line in instructions)
    spans = ((labels[branch[1]], at) for at, branch in branches if branch)
    return [(target, at) for target, at in spans if target < at]


def _widths(text: str, access: str) -> dict[str, int]:
    """How many global loads or stores there are of each width in bits."""
    found: Counter[str] = Counter()
    nvidia = rf"\b{'LDG' if access == 'load' else 'STG'}\.([\w.]+)"
    for suffix in re.findall(nvidia, text):
        width = re.search(r"\b[US]?(8|16|64|128|256)\b", suffix)
        found[width[1] if width else "32"] += 1
    amd = {"byte": 8, "ubyte": 8, "sbyte": 8, "short": 16, "ushort": 16, "sshort": 16}
    amd |= {"dword": 32, "dwordx2": 64, "dwordx3": 96, "dwordx4": 128}
    for kind in re.findall(rf"\b(?:global|buffer)_{access}_([a-z0-9]+)", text):
        if kind in amd:
            found[str(amd[kind])] += 1
    return dict(sorted(found.items(), key=lambda item: int(item[0])))


# --- counting the launches of a step ---

# Operators that are no views and launch nothing: the last makes a number a tensor on the host.
NO_LAUNCH = ("detach", "_unsafe_view", "lift_fresh", "scalar_tensor")


class _Operators(TorchDispatchMode):
    """Counts torch's operators that launch a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.split(".")[0]
        self.count += not function.is_view and "empty" not in name and name not in NO_LAUNCH
        if name == "index":  # a kernel that did not run has not written the indices
            args = (args[0], [None if x is None else torch.zeros_like(x) for x in args[1]])
        return function(*args, **(kwargs or {}))


def count_launches(step: Callable[[], object]) -> tuple[int, int]:
    """(launches, torch's operators among them) of a step on sm_90, on CPU tensors."""
    names: list[str] = []
    with (
        kernels_on_cpu("sm_90"),
        intercept_launches(lambda name, launch: names.append(name)),
        _Operators() as operators,
    ):
        step()
    return len(names) + operators.count, operators.count


def step_launches() -> dict[str, int]:
    """What ``LIMITS`` limits, of guided steps on sm_90: the most of all sizes."""
    found = dict.fromkeys(LIMITS, 0)

    def add(what: str, count: int) -> None:
        found[what] = max(count, found[what])

    def add_step(requests: int, what: str = "", **options: object) -> int:
        """Gives the launches of a layer: what the second layer adds, as every other one does."""
        (one, of_torch), (two, of_torch_in_two) = (
            count_launches(value_step(STEP_MODEL, requests, layers, **options)) for layers in (1, 2)
        )
        more = DIMENSIONS[STEP_MODEL][2] - 1
        add(f"launches of a step{what}", one + more * (two - one))
        add(f"torch operators of a step{what}", of_torch + more * (of_torch_in_two - of_torch))
        return two - one

    for requests in STEP_SIZES:
        add("launches of a layer", add_step(requests))
    add_step(STEP_SIZES[0], " with drafts", drafts=DRAFTS)
    for requests in STEP_SIZES:
        add("launches of a step with a trunk", count_launches(trunk_step(requests))[0])
    return found


# --- the gate ---


def faults(subject: str, figures: list[Figures]) -> list[str]:
    """What is wrong with kernels, whatever they were before."""
    part, found = SUBJECTS[subject], []
    on_sm_90 = part is PARTS["sm_90"]
    for figure in figures:
        tensor_cores, rows = figure.tensor_cores, MATMULS.get(figure.name, 0)
        stack, fp64 = (ANGLE_STACK, ANGLE_FP64) if figure.name in TAKES_ANGLES else (0, 0)
        wrong = []
        if figure.spilled > (CALLS_SPILL if subject == CALLS else stack):
            wrong.append(f"{figure.spilled} bytes spilled")
        if figure.shared > part.shared:
            wrong.append(f"{figure.shared} bytes of shared memory, the part has {part.shared}")
        if rows and figure.is_half:
            if not tensor_cores:
                wrong.append("no tensor cores")
            elif on_sm_90 and rows >= WARP_GROUP_ROWS and "HGMMA" not in tensor_cores:
                wrong.append(f"{', '.join(tensor_cores)} but no HGMMA for a tile of {rows} rows")
            if on_sm_90 and not figure.async_copies:
                wrong.append("no asynchronous copies")
        if figure.loads_16_in_loops:
            wrong.append(f"{figure.loads_16_in_loops} 16-bit loads in loops")
        if figure.fp64 > fp64:
            wrong.append(f"{figure.fp64} instructions in fp64")
        if figure.accesses_before_wait:
            wrong.append(f"{figure.accesses_before_wait} accesses of memory before it waits for earlier launches")
        if figure.name in ASKS_EARLY and figure.asks_before_wait == 0:
            wrong.append("asks for no weights before it waits for earlier launches")
        if figure.fused_into_shuffles and figure.name not in BRANCH_ON_NO_SUM:
            wrong.append(f"{figure.fused_into_shuffles} products fused with an addition across threads")
        if figure.batch_dependent_sums:
            wrong.append("the layout of a sum depends on the number of requests")
        if subject == "sm_90":
            wrong += _slow_loops(figure)
        found += [f"{subject} {figure.model} {figure.kernel}: {what}" for what in wrong]
    if subject == CALLS:
        missing = kernels().keys() - {figure.name for figure in figures}
        found += [f"{subject}: {name} is launched by none of them" for name in sorted(missing)]
    return found


def _slow_loops(figure: Figures) -> list[str]:
    wrong = []
    if figure.waits_for_all:
        wrong.append(f"{figure.waits_for_all} loops wait for all of their asynchronous copies")
    if figure.name in STREAMING and figure.bytes_in_flight is not None:
        in_flight = figure.bytes_in_flight * figure.programs
        few = [f"an {gpu} needs {needed}" for gpu, needed in IN_FLIGHT.items() if in_flight < needed]
        if few:
            wrong.append(f"{in_flight} bytes of copies on their way on a multiprocessor, {', '.join(few)}")
    floor = TENSOR_OVER_ISSUE.get(figure.name)
    if floor and (figure.tensor_over_issue or 0.0) < floor:
        wrong.append(f"{figure.tensor_over_issue} tensor cycles for a cycle of issue in its loop, at least {floor}")
    return wrong


def step_faults(launches: dict[str, int]) -> list[str]:
    """What a step launches too often."""
    return [f"step: {launches[name]} {name}, at most {most}" for name, most in LIMITS.items() if launches[name] > most]


# Figures that a change may make worse, and the sign of worse.
COMPARED = {"registers": 1, "spilled": 1, "shared": 1, "occupancy": -1}
COMPARED |= {"loop_instructions": 1, "bytes_in_flight": -1, "tensor_over_issue": -1}


def regressions(subject: str, figures: list[Figures], committed: list[Figures]) -> list[str]:
    """Figures more than 10 % worse than the committed ones, and kernels that only one side has."""
    before, now = ({(f.model, f.kernel): f for f in side} for side in (committed, figures))
    changed = {key: "is not among" for key in now.keys() - before.keys()}
    changed |= {key: "is no longer compiled but among" for key in before.keys() - now.keys()}
    found = [
        f"{subject} {' '.join(key)} {what} the committed figures: --update writes them" for key, what in changed.items()
    ]
    for key in sorted(before.keys() & now.keys()):
        for figure, sign in COMPARED.items():
            old, new = getattr(before[key], figure), getattr(now[key], figure)
            if old is None or new is None:
                continue
            if sign * (new - old) > TOLERANCE * old:
                found.append(f"{subject} {' '.join(key)}: {figure} {old} -> {new}")
    return found


def table(subject: str, figures: list[Figures]) -> str:
    """The figures of a subject, a line a kernel."""

    def counts(numbers: dict[str, int]) -> str:
        return " ".join(f"{kind}:{number}" for kind, number in numbers.items()) or "-"

    width = max(14, *(len(f.model) + 1 for f in figures))
    header = f"{subject:<{width}}{'kernel':<33}{'regs':>5}{'spill':>6}{'shared':>8}{'warps':>6}{'occ':>6}  "
    lines = [header + "tensor cores | loads | stores | async copies"]
    for f in figures:
        lines.append(
            f"{f.model:<{width}}{f.kernel:<33}{f.registers:>5}{f.spilled:>6}{f.shared:>8}{f.warps:>6}{f.occupancy:>6.0%}"
            f"  {counts(f.tensor_cores)} | {counts(f.loads)} | {counts(f.stores)} | {f.async_copies}"
        )
    return "\n".join(lines)


def main() -> int:
    parser = flags.parser(__doc__)
    parser.add_argument("--check", action="store_true", help="fail on the faults above")
    parser.add_argument("--update", action="store_true", help=f"write {RESULTS.name} for this version of Triton")
    parser.add_argument(
        "--parts", nargs="+", choices=SUBJECTS, default=list(SUBJECTS), help="GPUs, calls (default: all)"
    )
    parser.add_argument("--once", action="store_true", help="of the calls: each kernel's first only, in half a minute")
    parser.add_argument("--compile", choices=SUBJECTS, help=argparse.SUPPRESS)  # this process compiles, prints JSON
    args = parser.parse_args()
    if args.compile:
        part = SUBJECTS[args.compile]
        figures = compile_calls(part, args.once) if args.compile == CALLS else compile_steps(part)
        launches = step_launches() if args.compile == "sm_90" else None
        print(json.dumps({"figures": [asdict(figure) for figure in figures], "launches": launches}))
        return 0

    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if triton.__version__.startswith("3.6."):
        environment["AMDGCN_USE_BUFFER_OPS"] = "0"  # as users of AMD's GPUs are told to, see value_tree_attention

    def compiled(subject: str) -> dict:
        command = [sys.executable, "-m", "bench.codegen", "--compile", subject, *["--once"] * args.once]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"compiling for {subject} failed:\n{done.stderr[-5000:]}")
        return json.loads(done.stdout)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        done = dict(zip(args.parts, pool.map(compiled, args.parts), strict=True))
    figures = {subject: [Figures(**figure) for figure in of_part["figures"]] for subject, of_part in done.items()}
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    known = results.get(triton.__version__, {}).get("parts", {})
    found = []
    for subject in args.parts:
        print(table(subject, figures[subject]), end="\n\n")
        found += faults(subject, figures[subject])
        if subject != CALLS and not args.update:
            found += regressions(subject, figures[subject], [Figures(**f) for f in known.get(subject, [])])
    if "sm_90" in done:
        launches = done["sm_90"]["launches"]
        print(f"{STEP_MODEL}:", ", ".join(f"{count} {name}" for name, count in launches.items()), end="\n\n")
        found += step_faults(launches)
    if args.update:
        steps = {part: [asdict(f) for f in of_part] for part, of_part in figures.items() if part != CALLS}
        results[triton.__version__] = {
            "command": "python -m bench.codegen --update",
            "device": "none: compiled only",
            "torch": torch.__version__,
            "python": platform.python_version(),
            "date": time.strftime("%Y-%m-%d"),
            "parts": known | steps,
        }
        RESULTS.write_text(dump(dict(sorted(results.items())), 4))
    print("\n".join(found) or "no faults")
    return int(args.check and bool(found))


if __name__ == "__main__":
    sys.exit(main())
