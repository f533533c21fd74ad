"""What NVIDIA's code says of a kernel: its instructions, its loops, and what a program of it does in them.

A program is what CUDA calls a block. :func:`read` takes the machine code that :func:`disassemble` makes of a cubin
apart into the main loop, which is the innermost one with most of the asynchronous copies or else of the global loads
what only the last of several programs to arrive runs, and the rest. Of the last two all instructions are counted once:
no branch is taken but those of the main loop. Where a loop reads numbers in e4m3 it is the main one, and others with
asynchronous copies are left out: in attention that is the loop over delta tokens, of which a step that commits its
winners has none.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

Line = tuple[int, str]  # an instruction's address, and its text

# Cycles until what an instruction gives can be used, about; where the first match decides. Global loads are apart.
LATENCIES = {"LDS": 30, "SHFL": 24, "MUFU": 20, "S2": 25, "LDC": 30, "HMMA": 33, "BAR": 20, "": 5}
L2_LATENCY = 400  # cycles of a load that the L2 cache answers: assumed
TENSOR_LATENCY = 30  # cycles from a warp-group multiplication's end until its result can be used
HMMA_SHARE = 0.62  # of HGMMA's rate that HMMA reaches on sm_90
NO_RESULT = ("STG", "STS", "LDGSTS", "LDGDEPBAR", "RED", "BAR", "BRA", "EXIT", "DEPBAR", "WARPGROUP", "MEMBAR", "FENCE")


_texts: dict[str, str] = {}  # by the kernel's hash: cuobjdump takes a second


def disassemble(kernel: object, arch: int) -> str:
    """What cuobjdump says of a compiled kernel: its resources, and its SASS."""
    from triton.backends.nvidia.compiler import get_ptxas

    if kernel.hash in _texts:
        return _texts[kernel.hash]
    tool = Path(get_ptxas(arch).path).with_name("cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        Path(cubin.name).write_bytes(kernel.asm["cubin"])
        command = [tool, "-res-usage", "-sass", cubin.name]
        _texts[kernel.hash] = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return _texts[kernel.hash]


def registers_and_stack(code: str) -> tuple[int, int]:
    """Registers a thread, and bytes of stack a thread, of :func:`disassemble`'s text."""
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", code).groups()
    return int(registers), int(stack)


def instructions_of(code: str) -> list[Line]:
    """The instructions in :func:`disassemble`'s text."""
    return [(int(at, 16), line) for at, line in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", code)]


def loops_of(instructions: Sequence[Line]) -> list[tuple[int, int]]:
    """Addresses from the target of each backward branch to the branch."""
    branches = ((at, re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", line)) for at, line in instructions)
    spans = ((int(branch[1], 16), at) for at, branch in branches if branch)
    return [(target, at) for target, at in spans if target < at]


@dataclass(frozen=True, eq=False)
class Section:
    """Instructions that a program runs once, one after the other; for the main loop those of one pass.

    Attributes:
        lines: without their addresses.
        warps: of a program.
    """

    lines: tuple[str, ...]
    warps: int

    @cached_property
    def issue_cycles(self) -> float:
        """Of a multiprocessor, whose four schedulers issue one instruction a cycle each."""
        return len(self.lines) * self.warps / 4

    @cached_property
    def tensor_cycles(self) -> float:
        """Of a multiprocessor's tensor cores: 64 x 8 x 16 numbers of 16 bits take them 4 cycles."""
        text = "\n".join(self.lines)
        groups = sum(int(n) / 2 for n in re.findall(r"\b[HQI]GMMA\.64x(\d+)x", text)) * self.warps / 4
        single = sum(int(k) / 16 for k in re.findall(r"\bHMMA\.168(\d+)\b", text)) * self.warps
        return groups + single / HMMA_SHARE

    @cached_property
    def copied(self) -> int:
        """Bytes that asynchronous copies bring."""
        return self._bytes("LDGSTS")

    @cached_property
    def loaded(self) -> int:
        """Bytes of the global loads that are no asynchronous copies."""
        return self._bytes("LDG")

    @cached_property
    def stored(self) -> int:
        """Bytes of the global stores."""
        return self._bytes("STG")

    @cached_property
    def shared_bytes(self) -> int:
        """Bytes through shared memory: loads, stores, what copies write, and what HGMMA reads there.

        A step of HGMMA takes 32 bytes of each of the tile's columns and, unless they are in registers, of its 64 rows.
        """
        own = sum(map(self._bytes, ("LDS", "LDSM", "STS", "STSM", "LDGSTS")))
        for line in self.lines:
            if found := re.search(r"\b[HQI]GMMA\.64x(\d+)x\S+ R\d+, (gdesc)?", line):
                own += 32 * (int(found[1]) + (64 if found[2] else 0)) * self.warps // 4
        return own

    @cached_property
    def reads_e4m3(self) -> bool:
        return any(".E4M3.UNPACK" in line for line in self.lines)

    @cached_property
    def groups(self) -> int:
        """Groups of asynchronous copies."""
        return sum("LDGDEPBAR" in line for line in self.lines)

    @cached_property
    def wait(self) -> int | None:
        """Groups of asynchronous copies that may be on their way after the strictest wait; None without one."""
        waits = re.findall(r"(?<!\.)\bDEPBAR\.LE SB0, 0x([0-9a-f]+)", "\n".join(self.lines))
        return min((int(groups, 16) for groups in waits), default=None)

    @property
    def stages_in_flight(self) -> float:
        """Passes of the loop whose copies are on their way after its wait."""
        return (self.wait or 0) / self.groups if self.groups else 0.0

    @property
    def bytes_in_flight(self) -> int:
        """Bytes of copies on their way after the loop's wait."""
        return int(self.copied * self.stages_in_flight)

    def stalled(self, memory_latency: float = L2_LATENCY, passes: int = 1) -> float:
        """Cycles that one warp takes for the last of some passes, alone on its multiprocessor.

        It issues in order, and waits where an operand is not ready. Waits for asynchronous copies are not counted.
        """
        return _stalled(self, memory_latency, passes)

    def _bytes(self, opcode: str) -> int:
        """Of all instructions with this opcode that are not switched off."""
        found = 0
        for line in self.lines:
            match = re.match(rf"\s*(@!?U?P\w+ )?{opcode}(\.[\w.]*)?(?=\s)", line)
            if match and match[1] != "@!PT ":
                widths = re.findall(r"\.[USM]?(8|16|64|128|88\.\d)\b", match[2] or "")
                width = widths[-1] if widths else "32"
                found += 4 * int(width[3:]) if width.startswith("88.") else int(width) // 8
        return found * 32 * self.warps


@cache
def _stalled(section: Section, memory_latency: float, passes: int) -> float:
    clock, tensor_free, ready, groups, before = 0.0, 0.0, {}, [], 0.0
    for _ in range(passes):
        before = clock
        for line in section.lines:
            name, results, operands = _parse(line)
            clock = max([clock + 1, *(ready.get(register, 0.0) for register in operands)])
            if found := re.match(r"[HQI]GMMA\.64x(\d+)x", name):
                tensor_free = max(tensor_free, clock) + int(found[1]) / 2 * section.warps / 4
                groups += [tensor_free + TENSOR_LATENCY] if "gsb0" in line else []
            elif name.startswith("WARPGROUP.DEPBAR"):
                pending = int(line.split("0x")[-1].strip(), 16)
                clock = max([clock, *groups[: len(groups) - pending]])
            elif name.startswith("BAR"):
                clock += LATENCIES["BAR"]
            else:
                is_global = re.match(r"(LDG|LD|ATOM|ATOMG)\b", name)
                latency = memory_latency if is_global else _latency(name)
                ready.update(dict.fromkeys(results, clock + latency))
    return clock - before


def _latency(name: str) -> int:
    return next(cycles for prefix, cycles in LATENCIES.items() if name.startswith(prefix))


def _parse(line: str) -> tuple[str, list[str], list[str]]:
    """(opcode, registers written, registers read). Only the first result counts, and a shuffle's second."""
    predicate, name, rest = re.match(r"\s*(?:@!?(U?P\w+)\s+)?([A-Z][\w.]*)(.*)", line).groups()
    parts = [part.strip() for part in rest.split(",")]
    results: list[str] = []
    if not name.startswith(NO_RESULT):
        number = 2 if name.startswith("SHFL") else 1
        written, parts = parts[:number], parts[number:]
        wide = re.search(r"\.(64|128|WIDE|M88\.[24])\b", name) or re.match("CS2R", name)
        size = 1 if not wide else 4 if re.search(r"128|M88\.4", name) else 2
        for kind, at in re.findall(r"\b(U?R)(\d+)\b", " ".join(written)):
            results += [f"{kind}{int(at) + i}" for i in range(size)]
        results += re.findall(r"\bU?P\d\b", " ".join(written))
    read = [f"{kind}{at}" for part in parts for kind, at in re.findall(r"\b(U?[RP])(\d+)\b", part)]
    return name, results, read + ([predicate] if predicate else [])


@dataclass(frozen=True)
class Code:
    """A kernel's code, of one program: its main loop, what only the last program to arrive runs, and the rest."""

    loop: Section | None
    rest: Section
    of_last: Section | None = None


def loading_loops(instructions: Sequence[Line], warps: int) -> list[tuple[tuple[int, int], Section]]:
    """(first and last address, body) of the loops that load from global memory and have no other such loop in them."""
    found = []
    for first, last in loops_of(instructions):
        body = Section(tuple(line for at, line in instructions if first <= at <= last), warps)
        if body.copied or body.loaded:
            found.append(((first, last), body))
    return [
        (span, body)
        for span, body in found
        if not any(span[0] <= other[0] and other[1] <= span[1] and other != span for other, _ in found)
    ]


def read(instructions: Sequence[Line], warps: int) -> Code:
    """Take instructions apart."""
    loops = loading_loops(instructions, warps)
    span, loop = max(
        loops, key=lambda item: (item[1].reads_e4m3, item[1].copied, item[1].loaded), default=((-1, -1), None)
    )
    # What follows the end serves lanes that diverged.
    ends = (at for at, line in instructions if line.strip() == "EXIT" and at > span[1])
    end = next(ends, instructions[-1][0] if instructions else 0)
    merge = _branch_of_last(instructions, end)

    left_out = [span]
    if loop is not None and loop.reads_e4m3:
        left_out += [other for other, body in loops if body.copied and other[0] not in merge]

    def section(lines: Iterable[Line]) -> Section:
        there = ((at, line) for at, line in lines if at <= end)
        return Section(tuple(line for at, line in there if not any(a <= at <= b for a, b in left_out)), warps)

    rest = section(line for line in instructions if line[0] not in merge)
    return Code(loop, rest, section(line for line in instructions if line[0] in merge) if merge else None)


def _branch_of_last(instructions: Sequence[Line], end: int) -> range:
    """Addresses that only the last program to arrive comes to: the branch after the counter's update skips them."""
    counted = False
    for at, line in instructions:
        counted = counted or bool(re.search(r"\bATOMG?\.\S*ADD", line))
        branch = counted and re.match(r"\s*@!?U?P\d (?:BRA (0x[0-9a-f]+)|EXIT)", line)
        if branch:
            return range(at + 1, int(branch[1], 16) if branch[1] else end + 1)
    return range(0)
