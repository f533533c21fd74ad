"""Compiled code of all kernels, for GPUs that need not be present: ``python -m bench.codegen [--check]``.

The calls run through the real launchers, on CPU tensors under a driver that compiles for another GPU and launches no
kernel. Specialisation, constants and code are the same as on that GPU. Each GPU compiles a prompt and guided steps of
each value model. GPUs with the tiles of sm_80 and less shared memory compile one model. sm_90 also compiles ``calls``:
every operator with all dtypes and options.

``--check`` fails on

1. spills (in ``calls`` of more than 72 bytes), or more shared memory than the GPU has;
2. slow code: a matmul of 16-bit numbers without tensor cores (on sm_90 without asynchronous copies, and without HGMMA
   if its tile has 64 rows or more), 16-bit global loads in an innermost loop, an innermost loop that waits for all of
   its asynchronous copies (sm_90), fp64 arithmetic;
3. bits that depend on the batch: a sum with a layout along the summed axis, or a matmul with a number of products per
   instruction, that depends on the number of requests;
4. races that no other test detects: global memory accessed before the wait for earlier launches (sm_90); a product
   fused with an addition across threads where a branch depends on the sum (NVIDIA), so that threads leave a loop at
   different times and hang at its next barrier;
5. a figure of a step more than 10 % worse than the one committed for this Triton version in
   ``bench/results/codegen.json`` (``--update`` writes it), or a kernel that no call launches.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from argparse import SUPPRESS
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget

from bench.harness import parser, table
from bench.launches import compiling_for, kernels
from bench.models import value_model_step
from bench.ops import operator_calls
from lenvm_kernels.ops import ragged_linear, value_tree_attention

RESULTS = Path(__file__).parent / "results" / "codegen.json"
BATCHES = (1, 3, 6, 17, 64, 256)  # requests, each with 6 rows in use: all tiles, full and partial
# Matmul kernels, and the rows of their tiles.
MATMULS = {
    "_ragged_linear_kernel": ragged_linear.TILES_SM_90[-1].block_m,
    "_value_tree_attention_kernel": value_tree_attention.BLOCK_M.value,
}
# Kernels that never branch on a sum across threads, which may differ in its last bits between threads.
BRANCH_ON_NO_SUM = {"_value_tree_attention_kernel"}
# Kernels that compute cosines and sines. Angles beyond 105,615 are reduced with bits of 2/pi in 32 bytes of the stack,
# with three fp64 instructions in each of the two functions.
TAKES_ANGLES = {"_embed_tokens_kernel"}
ANGLE_STACK, ANGLE_FP64 = 32, 6
WARP_GROUP_ROWS = 64  # rows of the smallest tile for HGMMA
# Calls with unusual sizes spill a few scalars outside loops. A tile larger than the registers spills hundreds of bytes.
CALLS_SPILL = 72
TOLERANCE = 0.10
SHOWN = ("registers", "spilled", "shared", "warps", "async_copies", "loop_instructions")
COMPARED = {"registers": 1, "spilled": 1, "shared": 1, "loop_instructions": 1, "async_copies": -1}  # sign if worse


class Gpu(NamedTuple):
    """A GPU as Triton target, the maximum shared memory of a block in bytes, and the value models of its steps."""

    target: GPUTarget
    shared: int
    models: Sequence[str] = ("Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-3B", "Qwen3-1.7B")


GPUS = {
    "sm_80": Gpu(GPUTarget("cuda", 80, 32), 163 * 1024),
    "sm_90": Gpu(GPUTarget("cuda", 90, 32), 227 * 1024),
    "sm_100": Gpu(GPUTarget("cuda", 100, 32), 227 * 1024),
    "gfx942": Gpu(GPUTarget("hip", "gfx942", 64), 64 * 1024),
    **{f"sm_{arch}": Gpu(GPUTarget("cuda", arch, 32), 99 * 1024, ["Qwen2.5-1.5B"]) for arch in (86, 89, 120)},
}
CALLS = "calls"
SUBJECTS = {CALLS: GPUS["sm_90"]} | GPUS  # the longest first, for two processes


@dataclass(frozen=True)
class Figures:
    """A compiled kernel; numbers of instructions, unless noted."""

    model: str  # value model of the step, or call of an operator, that launches the kernel
    kernel: str  # name, and number among the kernels of this name
    registers: int  # per thread
    spilled: int  # bytes per thread (on NVIDIA the stack, which is only used for spills)
    shared: int  # bytes of shared memory per block
    warps: int  # per block
    is_half: bool = False  # whether the kernel reads or writes 16-bit floats
    tensor_cores: dict[str, int] = field(default_factory=dict)  # by kind
    async_copies: int = 0
    loop_instructions: int = 0  # in innermost loops
    loads_16_in_loops: int = 0
    waits_for_all: int = 0  # innermost loops that wait for all of their asynchronous copies
    fp64: int = 0
    fused_into_shuffles: int = 0
    accesses_before_wait: int = 0  # of global memory, before the wait for earlier launches (sm_90)
    batch_dependent_sums: bool = False  # whether the order of a sum depends on the batch

    @property
    def name(self) -> str:
        return self.kernel.split()[0]


def compile_steps(gpu: Gpu) -> list[Figures]:
    """The figures of all kernels in the steps of all value models."""
    figures, described = [], {}
    for model in gpu.models:
        batches = []
        for rows in BATCHES:
            with compiling_for(gpu.target) as compiled:
                value_model_step(model, rows)
            batches.append(compiled)
        batch_dependent, seen = sums_that_differ(batches), Counter()
        for name, kernel in {kernel.hash: (name, kernel) for name, kernel in chain(*batches)}.values():
            seen[name] += 1
            if kernel.hash not in described:
                described[kernel.hash] = describe(kernel, gpu)
            depends = {"batch_dependent_sums": kernel.hash in batch_dependent}
            figures.append(Figures(model, f"{name} {seen[name]}", **described[kernel.hash], **depends))
    return figures


def compile_calls(gpu: Gpu, once: bool) -> list[Figures]:
    """The figures of all kernels in the operators' calls; with ``once``, only of the first call with a kernel."""
    figures, seen = [], set()
    with compiling_for(gpu.target, once) as compiled:
        for call_name, call in operator_calls():
            call()
            new = {kernel.hash: (name, kernel) for name, kernel in compiled if kernel.hash not in seen}
            figures += [Figures(call_name, name, **describe(kernel, gpu)) for name, kernel in new.values()]
            seen |= new.keys()
            compiled.clear()
    return figures


def sums_that_differ(batches: list[list[tuple[str, object]]]) -> set[str]:
    """Hashes of the kernels with floating-point sums that are divided differently in different batches."""
    found = set()
    for launches in zip(*batches, strict=True):  # the order of launches is the same in all batches
        ttgirs = {kernel.hash: kernel.asm["ttgir"] for _, kernel in launches}
        layouts = {key: sum_layouts(ttgir) + matmul_steps(ttgir) for key, ttgir in ttgirs.items()}
        if len({tuple(of_kernel) for of_kernel in layouts.values()}) > 1:
            found |= layouts.keys()
    return found


def sum_layouts(ttgir: str) -> list[str]:
    """Layout along the summed axis of each floating-point sum of more than two numbers, in the order of the code."""
    aliases = dict(re.findall(r"^(#\w+) = (#.+)$", ttgir, flags=re.MULTILINE))
    reduction = r'"tt\.reduce"\(.*?\) <\{axis = (\d+).*?\}> \(\{(.*?)\}\) : \((.*?)\) ->'
    found = []
    for axis, combine, operands in re.findall(reduction, ttgir, flags=re.DOTALL):
        if "arith.addf" in combine and _shape(operands)[int(axis)] != "2":
            found.append(_along(int(axis), re.sub(r"#\w+", lambda alias: aliases[alias[0]], operands)))
    return found


def matmul_steps(ttgir: str) -> list[str]:
    """Products that a matmul instruction adds at once, for each kind with the number in its layout."""
    return sorted(set(re.findall(r"instrShape = \[\d+, \d+, (\d+)\]", ttgir)))


def _shape(tensor: str) -> list[str]:
    return re.match(r"tensor<([\dx]+)x", tensor)[1].split("x")


def _along(axis: int, tensor: str) -> str:
    """The type of a tensor reduced to one axis, because the number of rows does not change sums along that axis."""
    shape = _shape(tensor)

    def of_axis(match: re.Match) -> str:
        """Numbers by axis, or in a linear layout a list of such numbers."""
        name, values = match[1], json.loads(match[2])
        nested = values and isinstance(values[0], list)
        if name in ("order", "instrShape") or len(values[0] if nested else values) != len(shape):
            return match[0]
        return f"{name} = {[x[axis] for x in values if x[axis]] if nested else values[axis]}"

    layout = re.sub(r"(\w+) = (\[[\[\]\d, ]*\](?=[,}]))", of_axis, tensor)
    return layout.replace("x".join(shape), shape[axis], 1)


TENSOR_CORES = r"\b(?:(HMMA|HGMMA|UTC\w*MMA)\b|v_(mfma)_)"
COPIES = r"\b(?:LDGSTS|UTMALDG)\b|load_lds"
LOADS_16 = r"\bLDG\.[\w.]*\b[US]16\b|\b(?:global|buffer)_load_(?:u|s)?short"
FP64 = r"\b(?:D(?:ADD|MUL|FMA|SETP|MNMX)|MUFU\.\w*64H|[FI]2[FI][\w.]*\.F64|v_\w+_f64)"
ACCESSES = r"\b(?:LDG|STG|LDGSTS|ATOMG?|RED|REDG)\b"  # accesses of global memory without prefetches
Line = tuple[int, str]  # an instruction's address and text


def describe(kernel: Any, gpu: Gpu) -> dict[str, object]:
    """The fields of :class:`Figures` that are read from a compiled kernel."""
    if gpu.target.backend == "hip":
        code = kernel.asm["amdgcn"]
        counts = (re.search(rf"\.vgpr_{key}:\s+(\d+)", code)[1] for key in ("count", "spill_count"))
        registers, spilled = (int(count) * size for count, size in zip(counts, (1, 4), strict=True))
        instructions = list(enumerate(code.splitlines()))
    else:
        code = disassemble(kernel, gpu.target.arch)
        registers, spilled = map(int, re.search(r"REG:(\d+) STACK:(\d+)", code).groups())
        instructions = [(int(at, 16), line) for at, line in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", code)]
    overlaps = gpu is GPUS["sm_90"] and kernel.metadata.launch_pdl
    return {
        "registers": registers,
        "spilled": spilled,
        "shared": kernel.metadata.shared,
        "warps": kernel.metadata.num_warps,
        "is_half": bool(re.search(r"\*(?:bf|fp)16", str(kernel.src.signature))),  # some arguments are tuples
        "accesses_before_wait": accesses_before_wait([line for _, line in instructions]) if overlaps else 0,
        **count_instructions(instructions),
    }


def disassemble(kernel: Any, arch: int) -> str:
    """cuobjdump's output for a compiled kernel: its resources and its SASS."""
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        Path(cubin.name).write_bytes(kernel.asm["cubin"])
        command = [Path(get_ptxas(arch).path).with_name("cuobjdump"), "-res-usage", "-sass", cubin.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def loops_of(instructions: list[Line]) -> list[tuple[int, int]]:
    """First and last address of each loop: the target of a backward branch, and the branch."""
    labels = {label[1]: at for at, line in instructions if (label := re.match(r"(\.LBB\w+):", line))}  # AMD's
    pattern = r"\b(?:BRA\b.*?|s_c?branch\w*\s+)(0x[0-9a-f]+|\.LBB\w+)"
    branches = [(at, branch[1]) for at, line in instructions if (branch := re.search(pattern, line))]
    spans = [(labels[target] if target in labels else int(target, 16), at) for at, target in branches]
    return [(target, at) for target, at in spans if target < at]


def count_instructions(instructions: list[Line]) -> dict[str, Any]:
    """Counts of instructions. Code of outer loops is not counted."""
    loops = loops_of(instructions)
    text = "\n".join(line for _, line in instructions)
    innermost = [
        "\n".join(line for at, line in instructions if first <= at <= last)
        for first, last in loops
        if not any((first, last) != other and first <= other[0] and other[1] <= last for other in loops)
    ]
    return {
        "tensor_cores": dict(Counter("".join(kind) for kind in re.findall(TENSOR_CORES, text))),
        "async_copies": len(re.findall(COPIES, text)),
        "loop_instructions": sum(loop.count("\n") + 1 for loop in innermost),
        "loads_16_in_loops": sum(len(re.findall(LOADS_16, loop)) for loop in innermost),
        # (WARPGROUP.DEPBAR waits for tensor cores.)
        "waits_for_all": sum(
            "LDGSTS" in loop and bool(re.search(r"(?<!\.)\bDEPBAR\.LE SB0, 0x0\b", loop)) for loop in innermost
        ),
        "fp64": len(re.findall(FP64, text)),
        "fused_into_shuffles": fused_into_shuffles([line for _, line in instructions]),
    }


def accesses_before_wait(lines: list[str]) -> int:
    """Accesses of global memory before the wait for earlier launches (sm_90); all accesses without a wait."""
    wait = next((i for i, line in enumerate(lines) if "ACQBULK" in line), len(lines))
    return sum(bool(re.search(ACCESSES, line)) for line in lines[:wait])


def fused_into_shuffles(lines: list[str]) -> int:
    """Fused multiply-adds with an addend that a shuffle moved from another thread (NVIDIA).

    Two threads that exchange their products ``a b`` and ``c d`` get ``a b + round(c d)`` and ``c d + round(a b)``.
    """
    found = 0
    for at, line in enumerate(lines):
        shuffle = re.search(r"\bSHFL\.\w+ P\w+, (R\d+),", line)
        if shuffle is None:
            continue
        register = shuffle[1]
        for later in lines[at + 1 :]:
            found += bool(re.search(rf"\bFFMA\b.*, {register}\b[^,]*$", later))  # the addend comes last
            if re.search(rf"^\s*(?:@\S+ )?[A-Z]\S* {register}\b", later):  # the register is overwritten
                break
    return found


def faults(subject: str, figures: list[Figures]) -> list[str]:
    """Faults 1 to 4 in the module's docstring, and kernels that no call launches."""
    gpu, found = SUBJECTS[subject], []
    on_sm_90 = gpu is GPUS["sm_90"]
    for f in figures:
        rows, waits = MATMULS.get(f.name, 0) if f.is_half else 0, f.waits_for_all if subject == "sm_90" else 0
        stack, fp64 = (ANGLE_STACK, ANGLE_FP64) if f.name in TAKES_ANGLES else (0, 0)
        is_small = on_sm_90 and rows >= WARP_GROUP_ROWS and f.tensor_cores and "HGMMA" not in f.tensor_cores
        wrong = {
            f"{f.spilled} bytes spilled": f.spilled > (CALLS_SPILL if subject == CALLS else stack),
            f"{f.shared} bytes of shared memory, the GPU has {gpu.shared}": f.shared > gpu.shared,
            "no tensor cores": rows and not f.tensor_cores,
            f"{', '.join(f.tensor_cores)} but no HGMMA for a tile of {rows} rows": is_small,
            "no asynchronous copies": rows and on_sm_90 and not f.async_copies,
            f"{f.loads_16_in_loops} 16-bit loads in loops": f.loads_16_in_loops,
            f"{waits} loops wait for all of their asynchronous copies": waits,
            f"{f.fp64} instructions in fp64": f.fp64 > fp64,
            "the layout of a sum depends on the number of requests": f.batch_dependent_sums,
            f"{f.accesses_before_wait} accesses of memory before the wait for earlier launches": f.accesses_before_wait,
            f"{f.fused_into_shuffles} products fused with an addition across threads": f.fused_into_shuffles
            and f.name not in BRANCH_ON_NO_SUM,
        }
        found += [f"{subject} {f.model} {f.kernel}: {what}" for what, is_wrong in wrong.items() if is_wrong]
    if subject == CALLS:
        missing = kernels().keys() - {f.name for f in figures}
        found += [f"{subject}: {name} is never launched" for name in sorted(missing)]
    return found


def compared(figures: list[Figures]) -> dict[str, dict[str, int]]:
    """The committed figures by kernel."""
    return {f"{f.model} {f.kernel}": {name: getattr(f, name) for name in COMPARED} for f in figures}


def regressions(subject: str, now: dict[str, dict[str, int]], before: dict[str, dict[str, int]]) -> list[str]:
    """Figures more than 10 % worse than the committed ones, and kernels that only one of both has."""
    found = [
        f"{subject} {kernel} is {'compiled' if kernel in now else 'committed'} only: --update writes the figures"
        for kernel in sorted(now.keys() ^ before.keys())
    ]
    for kernel in sorted(before.keys() & now.keys()):
        for name, sign in COMPARED.items():
            old, new = before[kernel][name], now[kernel][name]
            if sign * (new - old) > TOLERANCE * old:
                found.append(f"{subject} {kernel}: {name} {old} -> {new}")
    return found


def compile_in_process(subject: str, once: bool) -> list[Figures]:
    """Compile for a GPU in a separate process, because Triton keeps one target per process."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if triton.__version__.startswith("3.6."):
        environment["AMDGCN_USE_BUFFER_OPS"] = "0"  # see value_tree_attention
    command = [sys.executable, "-m", "bench.codegen", "--compile", subject, *["--once"] * once]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"compiling for {subject} failed:\n{done.stderr[-5000:]}")
    return [Figures(**figure) for figure in json.loads(done.stdout)]


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--check", action="store_true", help="exit with 1 if there are faults")
    arguments.add_argument("--update", action="store_true", help=f"write {RESULTS.name} for this version of Triton")
    arguments.add_argument("--parts", nargs="+", choices=SUBJECTS, default=list(SUBJECTS), help="default: all")
    arguments.add_argument("--once", action="store_true", help="compile only the first call of each kernel in calls")
    arguments.add_argument("--compile", choices=SUBJECTS, help=SUPPRESS)  # compiles in this process and prints JSON
    args = arguments.parse_args()
    if args.compile:
        gpu = SUBJECTS[args.compile]
        figures = compile_calls(gpu, args.once) if args.compile == CALLS else compile_steps(gpu)
        print(json.dumps([asdict(figure) for figure in figures]))
        return 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        done = dict(zip(args.parts, pool.map(partial(compile_in_process, once=args.once), args.parts), strict=True))
    results, found = json.loads(RESULTS.read_text()), []
    known = results.get(triton.__version__, {}).get("parts", {})
    for subject, figures in done.items():
        rows = [(f.model, f.kernel, *(getattr(f, name) for name in SHOWN), f.tensor_cores or None) for f in figures]
        print(*table((subject, "kernel", *SHOWN, "tensor cores"), rows), sep="\n", end="\n\n")
        found += faults(subject, figures)
        if subject in known and not args.update:
            found += regressions(subject, compared(figures), known[subject])
    if args.update:
        steps = {subject: compared(figures) for subject, figures in done.items() if subject != CALLS}
        about = {"torch": torch.__version__, "python": platform.python_version(), "date": time.strftime("%Y-%m-%d")}
        text = json.dumps(results | {triton.__version__: about | {"parts": known | steps}}, indent=1)
        text = re.sub(r"\{[^{}]*\}", lambda kernel: json.dumps(json.loads(kernel[0])), text)  # a line per kernel
        RESULTS.write_text(text + "\n")
    elif not known:
        print(f"no figures of Triton {triton.__version__} are committed")
    print("\n".join(found) or "no faults")
    return int(args.check and bool(found))


if __name__ == "__main__":
    sys.exit(main())
