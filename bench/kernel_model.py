"""The time of a kernel's launch, computed from its machine code: no GPU is needed.

A launch has ``items`` to work on (tiles, say), each a turn of a program. A multiprocessor (SM) runs as many programs
side by side as their registers and shared memory allow, and the GPU takes the items in waves. A wave of n programs, p
of them on the busiest SM, takes the larger of

    one of them:   rest + first latency + passes of the main loop x pass
    p of them:     for each resource, what rest and passes need of it

where ``rest`` (the instructions outside of the main loop) and ``pass`` are the largest of

    issue      instructions x warps / 4 x p
    tensor     cycles of HGMMA or HMMA x p
    shared     bytes through shared memory / 128 x p
    L2         bytes from and to global memory, at 34 a cycle and SM, which the n programs share, and at most 64 an SM
    stalls     cycles that a warp takes alone, issuing in order
    latency    of the main loop's copies: (latency of memory + stalls) / (stages on their way after the wait + 1)

of which the first four are resources. The launch takes the largest of its waves and a start, of its bytes of HBM at the
bandwidth that a copy reaches, and of its programs at one a cycle, the rate at which they start. Rows that pad a tile
are in the instructions and the tensor cycles, not in the bytes; a last wave with few programs, and SMs without any, are
in the waves. What only the last program of several to arrive runs is a part like ``rest``, run by a share of the items.

A program that finds room beside the launch before it asks for its first weights while it waits there. They come with
the bandwidth that the launch before leaves, and are then read from L2.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from triton.backends.compiler import GPUTarget

from bench.sass import L2_LATENCY, Code, Section

RESULTS = Path(__file__).parent / "results"
HBM_LATENCY = 750e-9  # seconds of a load under load: assumed
OVERLAPPED = 0.4  # of the gap, where a launch starts before the one before it has ended (launch_pdl): assumed
START = 500  # cycles until a launch's first instructions and constants are there, and its stores have left: assumed
L2_RATE, SM_RATE, SHARED_RATE = 34, 64, 128  # bytes a cycle and SM: of all SMs at once, of one, of shared memory


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

    def resident_blocks(self, block: "Block", beside: "Block | None" = None, count: int = 0) -> int:
        """Such blocks that a multiprocessor of NVIDIA's runs side by side, or beside ``count`` other blocks."""
        have = (self.blocks, self.warps, self.registers, self.shared_of_sm)
        taken = (count * need for need in beside.needs()) if beside else (0,) * len(have)
        free = (max(0, all - other) for all, other in zip(have, taken, strict=True))
        return min(left // need for left, need in zip(free, block.needs(), strict=True))

    def occupancy(self, block: "Block") -> float:
        """Share of the resident warps that a kernel with such blocks can fill."""
        registers, shared, warps = block
        if self.target.backend == "hip":
            # A wave's registers are allotted in eights; each of four SIMDs has 512 a lane. LDS limits whole blocks.
            waves = min(self.warps, self.registers // max(8, -(-registers // 8) * 8))
            by_shared = self.shared_of_sm // shared if shared else self.blocks
            return min(waves, by_shared * warps / 4) / self.warps
        return self.resident_blocks(block) * warps / self.warps


class Block(NamedTuple):
    """What a program has: registers of a thread, bytes of shared memory, warps."""

    registers: int
    shared: int
    warps: int

    def needs(self) -> tuple[int, int, int, int]:
        """Of a multiprocessor: blocks, warps, registers (allotted in units of 256 a warp), bytes of shared memory."""
        return 1, self.warps, -(-self.registers * 32 // 256) * 256 * self.warps, self.shared + 1024


KIB = 1024
PARTS = {
    "sm_80": Part(GPUTarget("cuda", 80, 32), 163 * KIB, 164 * KIB, 65_536, 64, 32),
    "sm_90": Part(GPUTarget("cuda", 90, 32), 227 * KIB, 228 * KIB, 65_536, 64, 32),
    "sm_100": Part(GPUTarget("cuda", 100, 32), 227 * KIB, 228 * KIB, 65_536, 64, 32),
    "gfx942": Part(GPUTarget("hip", "gfx942", 64), 64 * KIB, 64 * KIB, 512, 8, 16),
}


@dataclass(frozen=True)
class Gpu:
    """Of its data sheet: what its device's name contains, bytes/s of HBM, multiprocessors, cycles a second."""

    name: str
    bandwidth: float
    sms: int = 132
    clock: float = 1.755e9
    tensor_rate: float = 989e12  # operations/s in bf16


GPUS = {gpu.name: gpu for gpu in (Gpu("H100", 3.35e12), Gpu("H200", 4.8e12))}


@dataclass(frozen=True)
class Rates:
    """What no data sheet says.

    Attributes:
        copy: share of HBM's bandwidth that a kernel reaches.
        chip: share of the rates of tensor cores, shared memory and L2 that a kernel reaches.
        gap: seconds from the end of a launch to the start of the next in a CUDA graph.
        source: where they are from.
    """

    copy: float = 0.85
    chip: float = 1.0
    gap: float = 1.2e-6
    source: str = "assumed, not measured"

    def __str__(self) -> str:
        shares = f"{self.copy:.0%} of HBM's bandwidth, {self.chip:.0%} of the chip's rates"
        return f"{shares}, {self.gap * 1e6:.2f} us between launches: {self.source}"

    @classmethod
    def of(cls, gpu: Gpu) -> "Rates":
        """Those that a calibration has left for the GPU, or the assumed ones."""
        for file in sorted(RESULTS.glob("*/rates.json")):
            data = json.loads(file.read_text())
            if data["gpu"] == gpu.name:
                return cls(**data["rates"])
        return cls()


@dataclass(frozen=True)
class Work:
    """What the programs of a launch have to do.

    Attributes:
        items: turns of programs.
        passes: of the main loop in a turn.
        hbm: bytes that have to come from HBM, each once.
        share: of the bytes of the loads that no mask leaves out.
        merges: passes through what only the last program to arrive runs, for an item on average.
        prefetching: programs that ask for weights while they wait for the launch before.
        prefetched: bytes that each of them asks for.
        label: what tells launches of the same kernel apart.
    """

    items: int
    passes: float = 1.0
    hbm: float = 0.0
    share: float = 1.0
    merges: float = 0.0
    prefetching: int = 0
    prefetched: int = 0
    label: str = ""


@dataclass(frozen=True)
class Cost:
    """Seconds of a launch, without the gap before it, what bounds it, and bytes that HBM brings meanwhile."""

    seconds: float
    bound: str
    hbm: float = 0.0

    def left(self, gpu: Gpu, rates: Rates) -> float:
        """Bytes that HBM could bring beside them."""
        return max(0.0, self.seconds * gpu.bandwidth * rates.copy - self.hbm)


def launch_cost(
    code: Code, resident: int, work: Work, programs: int, gpu: Gpu, rates: Rates, arrived: float = 0.0
) -> Cost:
    """What a launch of so many ``programs`` costs where an SM has room for ``resident`` of them.

    ``arrived`` bytes of its weights are in the L2 cache when it starts."""
    at_once = min(gpu.sms * resident, programs)
    full, rest = divmod(work.items, at_once)
    cycles, bound = _wave(code, work, at_once, gpu, rates, arrived) if full else (0.0, "")
    last, bound_of_last = _wave(code, work, rest, gpu, rates, arrived) if rest else (0.0, "")
    costs = {
        bound or bound_of_last: (START + full * cycles + last) / gpu.clock,
        "HBM": (work.hbm - arrived) / (gpu.bandwidth * rates.copy),
        "programs": programs / gpu.clock,
    }
    bound = max(costs, key=costs.get)
    return Cost(costs[bound], bound, work.hbm - arrived)


def _wave(code: Code, work: Work, n: int, gpu: Gpu, rates: Rates, arrived: float) -> tuple[float, str]:
    """(cycles of a wave of ``n`` programs, what bounds it)."""
    far = HBM_LATENCY * gpu.clock
    latency = far + (L2_LATENCY - far) * arrived / work.hbm if work.hbm else L2_LATENCY
    parts = [("rest", code.rest, 1.0), ("loop", code.loop, work.passes), ("merge", code.of_last, work.merges)]
    resources: dict[str, float] = {}
    alone: dict[str, float] = {"latency": latency if code.loop and code.loop.copied else 0.0}
    for kind, part, times in parts:
        if part is None or not times:
            continue
        of_part = _resources(part, n, work.share, gpu, rates)
        for name, cycles in of_part.items():
            resources[name] = resources.get(name, 0.0) + times * cycles
        terms = {name: cycles / -(-n // gpu.sms) for name, cycles in of_part.items()}
        terms |= _waits(part, latency) if kind == "loop" else {"stalls": part.stalled()}
        name = max(terms, key=terms.get)
        longest = name if kind == "loop" else kind
        alone[longest] = alone.get(longest, 0.0) + times * terms[name]
    name = max(resources, key=resources.get)
    return max((resources[name], name), (sum(alone.values()), max(alone, key=alone.get)))


def _resources(code: Section, n: int, share: float, gpu: Gpu, rates: Rates) -> dict[str, float]:
    """Cycles of each resource that all programs of a wave need of an SM."""
    p = -(-n // gpu.sms)
    moved = share * (code.copied + code.loaded) + code.stored
    return {
        "issue": code.issue_cycles * p,
        "tensor": code.tensor_cycles * p / rates.chip,
        "shared": code.shared_bytes * p / SHARED_RATE / rates.chip,
        "L2": moved * max(p / SM_RATE, n / (L2_RATE * gpu.sms)) / rates.chip,
    }


def _waits(loop: Section, latency: float) -> dict[str, float]:
    """Cycles of a pass that a program alone waits: for operands, and for copies. Loads beside copies are small ones."""
    if not loop.copied:
        return {"stalls": loop.stalled(latency, passes=2)}
    in_copies = (latency + loop.stalled()) / (loop.stages_in_flight + 1)
    return {"stalls": loop.stalled(passes=2), "latency": in_copies}
