"""What a guided step launches on sm_90, each launch with its machine code and the work of its programs: without a GPU.

A step of two layers goes through the real launchers at its real shapes: as many rows as its CUDA graph has room for, of
which the candidates there are fill some. Every kernel is compiled as it would be launched there, and its code read;
what repeats is a layer. A step is a layer's launches times the layers, and the others, each with the gap before it; an
operator of torch counts as a gap and a short kernel.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench.kernel_model import OVERLAPPED, PARTS, Block, Cost, Gpu, Rates, Work, launch_cost
from bench.launches import intercept_launches, kernels_on_cpu, targeting
from bench.models import DIMENSIONS, VOCAB, forward_floor, make_config
from bench.sass import Code, disassemble, instructions_of, read, registers_and_stack
from bench.step import CACHED, MORE_CACHED, candidate_counts
from lenvm_kernels.guidance import parse_guidance
from lenvm_kernels.ops import value_tree_attention
from lenvm_kernels.step import EngineSlots, GuidedStep, Sampling, StepBatch, StepConfig
from lenvm_kernels.types import Drafts
from lenvm_kernels.value_model import Trunk, ValueModel, ValueModelConfig
from lenvm_kernels.value_model.trunk import TrunkConfig

# Of the data sheet's rates those that a copy and a large matmul of cuBLAS reach: the base of the aim of 1.35.
COPY_SHARE, MATMUL_SHARE = 0.85, 0.70
TORCH_OPERATOR = 1.5e-6  # seconds of a small kernel of torch: assumed
# Operators that are no views and launch nothing: the last makes a number a tensor on the host.
NO_LAUNCH = ("detach", "_unsafe_view", "lift_fresh", "scalar_tensor")
PART = PARTS["sm_90"]
DRAFTS = 4  # of a request, where a step has any
# The trunk of a step that has one: its base model, the layers whose states it reads, and the sizes of what ships.
TRUNK_BASE, TRUNK_LAYERS, TRUNK_SIZE, TRUNK_OUTPUTS, TRUNK_BINS = "Qwen2.5-7B", (14, 21, 28), 128, 128, 33
L2_HOLDS = 25e6  # bytes of its 50 MB that outlast a kernel which streams more: assumed


@dataclass(frozen=True)
class Live:
    """How much of a launch's room is in use: ``rows`` of a forward, of ``requests`` with ``cached`` tokens each, which
    are scored at so many ``nodes``."""

    rows: int
    requests: int = 0
    cached: int = 0
    nodes: int = 1

    @classmethod
    def of_step(cls, requests: int, counts: str = "full", cached: int = CACHED, drafts: int = 0) -> "Live":
        """Of a step in which every winner was committed: the last token is cached, and candidates are all there is,
        drafts among them."""
        counted = candidate_counts(requests, counts)
        rows = int(torch.where(counted > 1, counted, 1).sum())
        return cls(rows * (1 + drafts), requests, cached + 1, 1 + drafts)


# --- what the programs of each kernel have to do; a kernel not in the table takes one turn a program ---

Arguments = dict[str, Any]  # of a launch, by the kernel's parameters


def _ceil(x: int, y: int) -> int:
    return -(-x // y)


def _tiles(rows: int, columns: int, block_m: int, block_n: int) -> tuple[int, float]:
    """(tiles, share of their operands' rows that exist)."""
    row_blocks = _ceil(rows, block_m)
    return row_blocks * _ceil(columns, block_n), (block_n + rows / row_blocks) / (block_n + block_m)


def _spilled(written: int) -> int:
    """Bytes of HBM that go to or come from what one kernel leaves to the next: the L2 cache holds some of it."""
    return written if written > L2_HOLDS else 0


def _linear(a: Arguments, live: Live) -> Work:
    columns = a["N"] * (2 if a["SWIGLU"] else 1)
    tiles, share = _tiles(live.rows, columns, a["BLOCK_M"], a["BLOCK_N"])
    moved = columns * a["K"] * a["ptr"].weight.element_size()
    asked = a["BLOCK_N"] * a["PREFETCH_LEN"] * a["ptr"].weight.element_size() if a["OVERLAPS"] else 0
    work = Work(
        tiles * a["SPLITS"],
        a["SPLIT_LEN"] / a["BLOCK_K"],
        moved,
        share,
        prefetching=_ceil(columns, a["BLOCK_N"]) * a["SPLITS"],
        prefetched=asked,
        label=f"{columns} x {a['K']}",
    )
    if a["SPLITS"] == 1:
        return work
    return replace(work, hbm=moved + _spilled(_bytes_of_parts(a, live)))


def _bytes_of_parts(a: Arguments, live: Live) -> int:
    return live.rows * a["N"] * a["SPLITS"] * 4


def _add_parts(a: Arguments, live: Live) -> Work:
    items = _ceil(live.rows, a["ROWS"]) * _ceil(a["N"], a["COLUMNS"])
    return Work(items, hbm=_spilled(_bytes_of_parts(a, live)))


def _attention(a: Arguments, live: Live) -> Work:
    tokens, kv_heads = value_tree_attention.BLOCK_M.value // a["GROUP"], a["ptr"].k_new.shape[1]
    splits = value_tree_attention.workspace_shape(live.rows, live.requests, a["GROUP"], live.cached)[0]
    tiles = live.requests * _ceil(_ceil(live.rows, live.requests), tokens)
    moved = live.requests * live.cached * kv_heads * a["HEAD_DIM"] * 2 * a["ptr"].k_cache.element_size()
    passes = _ceil(_ceil(live.cached, splits), a["BLOCK_N"])
    merges = a["BLOCK_D"] // value_tree_attention.MERGE_COLUMNS.value if splits > 1 else 0
    return Work(tiles * splits * kv_heads, passes, moved, merges=merges)  # splits of a request, one program merges them


def _scan(a: Arguments, live: Live) -> Work:
    tiles = _ceil(_ceil(a["V"], a["TILE"]), a["PROGRAM_TILES"])
    return Work(live.requests * live.nodes * tiles, hbm=a["scores_ptr"].nbytes)


def _head(a: Arguments, live: Live) -> Work:
    tiles, share = _tiles(live.rows, a["H"], a["BLOCK_M"], a["BLOCK_N"])
    weights = a["H"] ** 2 * a["head"].fc_weight.element_size()
    return Work(tiles, a["H"] / a["BLOCK_K"], weights, share, merges=1 / _ceil(a["H"], a["BLOCK_N"]))


def _candidate_values(a: Arguments, live: Live) -> Work:
    rows, blocks = live.requests * live.nodes * a["K"], _ceil(a["E"], a["BLOCK_N"])
    moved = (
        rows * a["D"] * a["embedding_ptr"].element_size() + a["head"].fc_weight.nbytes + a["head"].bins_weight.nbytes
    )
    return Work(_ceil(rows, a["BLOCK_M"]) * blocks, a["D"] / a["BLOCK_K"], moved, merges=1 / blocks)


def _rope_cache(a: Arguments, live: Live) -> Work:
    return Work(live.rows)


WORK: dict[str, Callable[[Arguments, Live], Work]] = {
    "_ragged_linear_kernel": _linear,
    "_add_parts_kernel": _add_parts,
    "_value_tree_attention_kernel": _attention,
    "_scan_kernel": _scan,
    "_value_head_kernel": _head,
    "_candidate_values_kernel": _candidate_values,
    "_rope_cache_kernel": _rope_cache,
}


# --- the launches of a step ---


@dataclass(frozen=True)
class Launch:
    """A launch of a kernel.

    Attributes:
        name: the kernel's.
        code: of a program.
        programs: that it starts.
        block: what each of them needs of a multiprocessor.
        work: of them.
        overlaps: it starts before the launch before it has ended, and waits for it.
    """

    name: str
    code: Code
    programs: int
    block: Block
    work: Work
    overlaps: bool = False

    @property
    def label(self) -> str:
        """Its row in a table."""
        return f"{self.name.removeprefix('_').removesuffix('_kernel')} {self.work.label}".strip()

    def gap(self, rates: Rates) -> float:
        """Seconds between it and the launch before it."""
        return rates.gap * (OVERLAPPED if self.overlaps else 1)

    @property
    def resident(self) -> int:
        """Programs that a multiprocessor has room for."""
        return PART.resident_blocks(self.block)

    def find_room(self, before: "Launch", gpu: Gpu) -> int:
        """Programs that find room beside those of the launch before."""
        running = min(before.programs, before.work.items, gpu.sms * before.resident)
        of_each, more = divmod(running, gpu.sms)
        beside = partial(PART.resident_blocks, self.block, before.block)
        return more * beside(of_each + 1) + (gpu.sms - more) * beside(of_each)

    def cost(self, gpu: Gpu, rates: Rates, before: "tuple[Launch, Cost] | None" = None) -> Cost:
        """Without the gap before it. ``before`` is the launch before it, if its time is to be used."""
        arrived = 0.0
        if before and self.overlaps and self.work.prefetched:
            programs = min(self.find_room(before[0], gpu), self.work.prefetching, self.programs)
            arrived = min(programs * self.work.prefetched, before[1].left(gpu, rates), self.work.hbm)
        return launch_cost(self.code, self.resident, self.work, self.programs, gpu, rates, arrived)


def costs_of(launches: Sequence[Launch], gpu: Gpu, rates: Rates, repeat: bool = False) -> list[Cost]:
    """What launches cost that follow each other; with ``repeat`` the first follows the last."""
    costs: list[Cost] = []
    before = (launches[-1], launches[-1].cost(gpu, rates)) if repeat and launches else None
    for launch in launches:
        costs.append(launch.cost(gpu, rates, before))
        before = launch, costs[-1]
    return costs


_codes: dict[str, tuple[Code, Block]] = {}  # by the kernel's hash


def launches_of(call: Callable[[], object], live: Live) -> list[Launch]:
    """What a call on CPU tensors would launch on sm_90."""
    found = []

    def compile_only(name: str, launch: partial) -> object:
        kernel = launch(warmup=True)
        if kernel.hash not in _codes:
            text, warps = disassemble(kernel, PART.target.arch), kernel.metadata.num_warps
            block = Block(registers_and_stack(text)[0], kernel.metadata.shared, warps)
            _codes[kernel.hash] = read(instructions_of(text), warps), block
        function, *positional = launch.args
        arguments = dict(zip(function.arg_names, positional, strict=False)) | launch.keywords
        programs = 1
        for size in arguments["grid"]:
            programs *= size
        code, block = _codes[kernel.hash]
        work = WORK[name](arguments, live) if name in WORK else Work(programs)
        found.append(Launch(name, code, programs, block, work, bool(launch.keywords.get("launch_pdl"))))
        return kernel

    with targeting(PART.target), intercept_launches(compile_only):
        call()
    return found


def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def _guided_step(source: ValueModel | Trunk, requests: int, columns: int, **options: Any) -> GuidedStep:
    """With requests that are all guided."""
    slots = EngineSlots(zeros(requests, columns, dtype=torch.int32), requests * columns)
    step = GuidedStep(source, slots, StepConfig(vocab_size=VOCAB, backend="triton", **options))
    for row in range(requests):
        step.add_request(row, parse_guidance({"value_mode": "mul", "value_scale": 0.8}), {0})
    step.flush()
    return step


def _sampling(requests: int) -> Sampling:
    floats = zeros(requests, dtype=torch.float32)
    return Sampling(zeros(requests, dtype=torch.int32), floats, floats, is_logits=True, sample=True)


def trunk_shapes(hidden_size: int) -> dict[str, tuple[int, ...]]:
    """Of the tensors of the trunk of :data:`TRUNK_BASE`, or of another base model of this size."""
    weights = {
        "projection": (2 * TRUNK_SIZE, len(TRUNK_LAYERS) * hidden_size),
        "embedding": (TRUNK_SIZE, hidden_size),
        "fc": (TRUNK_OUTPUTS, TRUNK_SIZE),
        "bins": (TRUNK_BINS, TRUNK_OUTPUTS),
    }
    return {
        f"{name}.{kind}": of for name, shape in weights.items() for kind, of in (("weight", shape), ("bias", shape[:1]))
    }


@cache
def _trunk() -> Trunk:
    hidden, _, layers, *_ = DIMENSIONS[TRUNK_BASE]
    edges = tuple(range(1, TRUNK_BINS + 2))
    config = TrunkConfig(TRUNK_BASE, TRUNK_LAYERS, layers, hidden, VOCAB, "of zeros", edges)
    tensors = {name: zeros(*shape, dtype=torch.float32) for name, shape in trunk_shapes(hidden).items()}
    return Trunk(config, tensors, zeros(1, hidden, dtype=torch.bfloat16).expand(VOCAB, -1))


def make_trunk_step(requests: int) -> Callable[[], object]:
    """What takes a step with a trunk, likewise."""
    trunk = _trunk()
    step = _guided_step(trunk, requests, CACHED + MORE_CACHED)
    states = zeros(requests, trunk.config.state_size, dtype=torch.bfloat16)
    lengths = zeros(requests, dtype=torch.int32)
    batch = StepBatch(zeros(requests), zeros(requests), lengths, states=states)
    return partial(step.step, zeros(requests, VOCAB, dtype=torch.float32), batch, _sampling(requests))


def make_step(
    name: str,
    requests: int,
    layers: int,
    cached: int = CACHED,
    *,
    weights: str | None = None,
    cache: str | None = None,
    drafts: int = 0,
) -> Callable[[], object]:
    """What takes a step of so many layers as :mod:`bench.step` does, on CPU tensors of zeros.

    Args:
        weights: of :class:`ValueModel`.
        cache: of :class:`StepConfig`.
        drafts: a chain of so many a request.
    """

    config, columns = make_config(name, vocab_size=2**11, num_layers=layers), cached + MORE_CACHED
    tensors = {key: zeros(*shape, dtype=torch.bfloat16) for key, shape in config.tensor_shapes().items()}
    model = ValueModel(config, tensors, weights=weights)
    step = _guided_step(model, requests, columns, max_drafts=drafts, cache=cache)
    i32 = zeros(requests, dtype=torch.int32)
    scores = zeros(requests * (1 + drafts), VOCAB, dtype=torch.float32)
    sampling = _sampling(requests)
    if not drafts:
        return partial(step.step, scores, StepBatch(zeros(requests), zeros(requests), i32), sampling)
    assert step._tensors.trees is not None
    step._tensors.trees.columns.zero_()  # a kernel that does not run does not write them, and torch reads them
    chain = torch.arange(drafts, dtype=torch.int32).expand(requests, -1) - 1
    batch = StepBatch(zeros(requests, 1 + drafts), zeros(requests), i32, i32)
    return partial(step.step, scores, batch, sampling, Drafts(zeros(requests, drafts), chain), verify="same_draws")


class _Operators(TorchDispatchMode):
    """Appends torch's operators that launch a kernel to a list."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.split(".")[0]
        if not function.is_view and "empty" not in name and name not in NO_LAUNCH:
            self.names.append(f"torch {name}")
        if name == "index":  # a kernel that did not run has not written the indices
            args = (args[0], [None if x is None else torch.zeros_like(x) for x in args[1]])
        return function(*args, **(kwargs or {}))


def layer_of(names: Sequence[str]) -> slice:
    """Where the first of two equal layers stands in what a model of two layers launches: the longest that repeats."""
    for size in range(len(names) // 2, 0, -1):
        for at in range(len(names) - 2 * size + 1):
            if names[at : at + size] == names[at + size : at + 2 * size]:
                return slice(at, at + size)
    raise ValueError("no launches repeat from one layer to the next")


def _names_of(step: Callable[[], object]) -> list[str]:
    """Of the kernels and of torch's operators that a step launches, in their order."""
    names: list[str] = []
    with kernels_on_cpu("sm_90"), intercept_launches(lambda kernel, launch: names.append(kernel)), _Operators(names):
        step()
    return names


@cache
def operators_of_step(name: str, drafts: int = 0) -> tuple[int, int]:
    """Torch operators (of a layer, of the rest of a step) that launch a kernel."""
    names = _names_of(make_step(name, 1, 2, drafts=drafts))
    of_layer = sum(name.startswith("torch") for name in names[layer_of(names)])
    return of_layer, sum(name.startswith("torch") for name in names) - 2 * of_layer


@dataclass(frozen=True)
class Step:
    """A guided step of a value model, or of the trunk of a base model, which has no layers of its own.

    Attributes:
        model: the value model's name, or the base model's.
        live: what of it there is.
        layer: launches of a layer.
        others: launches before and after the layers.
        operators: of torch, in a layer and in the rest.
        kept: ``weights`` of the layers and ``cache``, as for :func:`make_step`.
    """

    model: str
    live: Live
    layer: list[Launch]
    others: list[Launch]
    operators: tuple[int, int]
    kept: dict[str, str | None] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        model: str,
        requests: int,
        counts: str = "full",
        cached: int = CACHED,
        *,
        drafts: int = 0,
        **kept: str | None,
    ) -> "Step":
        live = Live.of_step(requests, counts, cached, drafts)
        launches = launches_of(make_step(model, requests, 2, cached, drafts=drafts, **kept), live)
        layer = layer_of([launch.label for launch in launches])
        others = launches[: layer.start] + launches[2 * layer.stop - layer.start :]
        return cls(model, live, launches[layer], others, operators_of_step(model, drafts), kept)

    @classmethod
    def of_trunk(cls, requests: int) -> "Step":
        """With the trunk of :data:`TRUNK_BASE`."""
        step = make_trunk_step(requests)
        operators = sum(name.startswith("torch") for name in _names_of(step))
        return cls(
            TRUNK_BASE, Live(requests, requests), [], launches_of(step, Live(requests, requests)), (0, operators)
        )

    @property
    def config(self) -> ValueModelConfig:
        return make_config(self.model, vocab_size=VOCAB)

    @property
    def num_launches(self) -> int:
        """Of a step, torch's operators among them."""
        return self.config.num_layers * len(self.layer) + len(self.others) + self.num_operators

    @property
    def num_operators(self) -> int:
        """Of torch, in a step."""
        return self.config.num_layers * self.operators[0] + self.operators[1]

    def seconds(self, gpu: Gpu, rates: Rates) -> float:
        """Of a step."""

        def of(launches: Sequence[Launch], costs: Sequence[Cost], operators: int) -> float:
            kernels = sum(cost.seconds for cost in costs) + sum(launch.gap(rates) for launch in launches)
            return kernels + operators * (TORCH_OPERATOR + rates.gap)

        layer, others = self.costs(gpu, rates)
        of_layer = of(self.layer, layer, self.operators[0])
        return of_layer * self.config.num_layers + of(self.others, others, self.operators[1])

    def costs(self, gpu: Gpu, rates: Rates) -> tuple[list[Cost], list[Cost]]:
        """Of a layer's launches, which follow those of another layer, and of the others."""
        return costs_of(self.layer, gpu, rates, repeat=True), costs_of(self.others, gpu, rates)

    def floor(self, gpu: Gpu, copy: float = COPY_SHARE, matmul: float = MATMUL_SHARE) -> float:
        """Seconds that its bytes or its operations take at shares of the data sheet's rates."""
        live = self.live
        if self.layer:
            sizes = (live.rows, live.rows, live.requests, live.cached)
            moved, operations = forward_floor(self.config, torch.bfloat16, *sizes, **self.kept)
        else:
            moved, operations = self._trunk_floor()
        scores = live.requests * live.nodes * VOCAB * 4
        return max((moved + scores) / (gpu.bandwidth * copy), operations / (gpu.tensor_rate * matmul))

    def _trunk_floor(self) -> tuple[int, int]:
        """(bytes, operations) of weights, states and candidates' projected embeddings in bf16."""
        weights = {name: math.prod(shape) for name, shape in trunk_shapes(self.config.hidden_size).items()}
        projection, k = weights["projection.weight"], StepConfig(vocab_size=VOCAB).max_candidates
        head = weights["fc.weight"] + weights["bins.weight"]
        of_states = len(TRUNK_LAYERS) * self.config.hidden_size + k * TRUNK_SIZE
        moved = 2 * (projection + head + self.live.requests * of_states)
        return moved, 2 * self.live.requests * (projection + k * head)
