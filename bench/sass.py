"""What NVIDIA's code says of a kernel: its instructions, its loops, and what a program of it does in a pass of a loop.

A program is what CUDA calls a block. Its main loop is the innermost one with most of the asynchronous copies, or else
of the global loads.
"""

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

Line = tuple[int, str]  # an instruction's address, and its text

HMMA_SHARE = 0.62  # of HGMMA's rate that HMMA reaches on sm_90


def disassemble(kernel: object, arch: int) -> str:
    """What cuobjdump says of a compiled kernel: its resources, and its SASS."""
    from triton.backends.nvidia.compiler import get_ptxas

    tool = Path(get_ptxas(arch).path).with_name("cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        Path(cubin.name).write_bytes(kernel.asm["cubin"])
        command = [tool, "-res-usage", "-sass", cubin.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


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


@dataclass(frozen=True)
class Loop:
    """The instructions of a pass of a loop.

    Attributes:
        lines: without their addresses.
        warps: of a program.
    """

    lines: tuple[str, ...]
    warps: int

    @property
    def issue_cycles(self) -> float:
        """Of a multiprocessor, whose four schedulers issue one instruction a cycle each."""
        return len(self.lines) * self.warps / 4

    @property
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

    @property
    def wait(self) -> int | None:
        """Groups of asynchronous copies that may be on their way after the strictest wait; None without one."""
        waits = re.findall(r"(?<!\.)\bDEPBAR\.LE SB0, 0x([0-9a-f]+)", "\n".join(self.lines))
        return min((int(groups, 16) for groups in waits), default=None)

    @property
    def bytes_in_flight(self) -> int:
        """Bytes of copies on their way after the loop's wait."""
        groups = sum("LDGDEPBAR" in line for line in self.lines)  # of copies, in a pass
        return int(self.copied * (self.wait or 0) / groups) if groups else 0

    def _bytes(self, opcode: str) -> int:
        """Of all instructions with this opcode that are not switched off."""
        found = 0
        for line in self.lines:
            match = re.match(rf"\s*(@!?U?P\w+ )?{opcode}(\.[\w.]*)?(?=\s)", line)
            if match and match[1] != "@!PT ":
                widths = re.findall(r"\.[US]?(8|16|64|128)\b", match[2] or "")
                found += int(widths[-1] if widths else 32) // 8
        return found * 32 * self.warps


def loading_loops(instructions: Sequence[Line], warps: int) -> list[Loop]:
    """The loops that load from global memory and have no other such loop in them."""
    found = []
    for first, last in loops_of(instructions):
        loop = Loop(tuple(line for at, line in instructions if first <= at <= last), warps)
        if loop.copied or loop.loaded:
            found.append(((first, last), loop))
    return [
        loop
        for span, loop in found
        if not any(span[0] <= other[0] and other[1] <= span[1] and other != span for other, _ in found)
    ]


def main_loop(loops: Sequence[Loop]) -> Loop | None:
    """The main one of :func:`loading_loops`."""
    return max(loops, key=lambda loop: (loop.copied, loop.loaded), default=None)
