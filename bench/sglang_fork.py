"""What a step of the LenVM fork of SGLang costs, before and after ``install()``: ``python -m bench.sglang_fork``.

Counted on a CPU, by running the fork's own code, which has to be importable::

    PYTHONPATH=Length-Value-Model/sglang-LenVM/python python -m bench.sglang_fork

- Forwards of the value model, and the tokens and candidates that they compute.
- Host reads: values that the host waits for, be it one number, a copy of a tensor, or a shape that depends on values.
- Bytes of masks for attention.

Of the fork everything around the model runner's forward is its own, value head included. In place of the layers there
are zeros, in place of streams nothing, and what its attention reads and builds beside the mask is not counted. What is
counted of the step after ``install()`` is the whole step; for its host reads its kernels are not launched.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from bench.harness import flags
from bench.harness.reporting import text_table
from bench.harness.storing import environment, write_json
from bench.host import narrow_model
from bench.launches import without_kernels
from lenvm_kernels.adapters import sglang_fork
from lenvm_kernels.adapters.settings import Settings
from lenvm_kernels.adapters.sglang_fork_runner import InprocRunner
from lenvm_kernels.value_model import ValueModel

VOCAB, CACHED, TOP_K, EOS = 32_000, 512, 8, 0
LAYERS = 2  # of the value model after install()
ROWS = (1, 8, 64)
GUIDANCE = {
    "a tilt": {"value_mode": "mul", "value_scale": 0.8},
    "a target": {"target_length": 100},
}
_LVM = "sglang.srt.lvm"


@dataclass
class Counts:
    """Of a step.

    Attributes:
        forwards: of the value model.
        tokens: that they compute, candidates included.
        reads: of the host.
        mask_bytes: of masks.
    """

    forwards: int = 0
    tokens: int = 0
    reads: int = 0
    mask_bytes: int = 0


# --- what the fork needs that a CPU does not have ---


class _Missing:
    """Anything that the fork looks up in its compiled kernels while it is imported."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> _Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self._name}.{name}")

    def __call__(self, *args: object, **kwargs: object) -> None:
        raise RuntimeError(f"{self._name} was called, which there is not on a CPU")


class _NoKernels(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds ``sgl_kernel`` and all of its modules."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        is_its = name.partition(".")[0] == "sgl_kernel"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_its else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__getattr__ = _Missing(spec.name).__getattr__  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None: ...


class _Stream:
    """A stream or an event."""

    def __init__(self, **options: object) -> None: ...

    def __getattr__(self, name: str) -> Callable:
        return lambda *args: None


@contextmanager
def without_streams() -> Iterator[None]:
    """In here ``torch.cuda`` has streams and events that do nothing."""
    stands_in: dict[str, Any] = dict(Stream=_Stream, Event=_Stream, current_stream=_Stream)
    stands_in["stream"] = lambda stream: nullcontext()
    with mock.patch.multiple(torch.cuda, **stands_in):
        yield


# --- counting ---


class HostReads(TorchFunctionMode):
    """Counts what would wait for a device. On a CPU nothing does, so what lies on the host is kept track of.

    That is: tensors made of lists and arrays that are given no device, copies ``to("cpu")``, and what is computed of
    such alone. All others are on the device.
    """

    READS = (
        torch.Tensor.item,
        torch.Tensor.tolist,
        torch.Tensor.numpy,
        torch.Tensor.__bool__,
        torch.Tensor.__int__,
        torch.Tensor.__float__,
        torch.Tensor.__index__,
        torch.Tensor.__array__,
        torch.Tensor.nonzero,
        torch.nonzero,
        torch.masked_select,
        torch.unique,
        torch.equal,
    )
    COPIES = (torch.Tensor.cpu, torch.Tensor.to)
    MADE = (torch.tensor, torch.as_tensor, torch.from_numpy)

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0
        self._on_host: dict[int, torch.Tensor] = {}  # with the tensors, so that no other gets their ids

    def lie_on_host(self, result: Any) -> Any:
        """Note tensors that are on the host."""
        self._on_host |= {id(x): x for x in tree_leaves(result) if isinstance(x, torch.Tensor)}
        return result

    def __torch_function__(self, function: Callable, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        is_of_host = all(id(x) in self._on_host for x in tensors)
        if function in self.COPIES:
            to_host = function is torch.Tensor.cpu or "cpu" in args[1:] or kwargs.get("device") == "cpu"
            to_device = any(isinstance(x, torch.device) for x in (*args[1:], *kwargs.values()))
            if to_host or to_device:
                result = function(*args, **kwargs).clone()
                self.reads += to_host and not is_of_host
                return self.lie_on_host(result) if to_host else result
        result = function(*args, **kwargs)
        if function in self.MADE:
            return self.lie_on_host(result) if kwargs.get("device") is None else result
        if not is_of_host and (function in self.READS or self._has_unknown_shape(function, args, kwargs)):
            self.reads += 1
        return self.lie_on_host(result) if tensors and is_of_host else result

    def _has_unknown_shape(self, function: Callable, args: Any, kwargs: Any) -> bool:
        """Whether a result's shape depends on values: rows chosen by a mask, or repeated by counts."""
        if function in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            return any(isinstance(x, torch.Tensor) and x.dtype == torch.bool for x in tree_leaves(args[1]))
        if function in (torch.repeat_interleave, torch.Tensor.repeat_interleave):
            return isinstance(args[1], torch.Tensor) and "output_size" not in kwargs
        return False


# --- steps ---


class Steps:
    """Requests in the middle of their outputs, each with a row of the request pool, and a sampler that guides them."""

    def __init__(self, rows: int, guidance: dict) -> None:
        generator = torch.Generator().manual_seed(0)
        sampling = SimpleNamespace(custom_params=guidance, top_k=TOP_K, top_p=1.0, min_p=0.0)
        self.requests = [
            SimpleNamespace(
                rid=str(row),
                sampling_params=sampling,
                origin_input_ids=torch.randint(1, VOCAB, (CACHED,), generator=generator).tolist(),
                output_ids=[],
                eos_token_ids={EOS},
                req_pool_idx=row,
                multimodal_inputs=None,
                input_embeds=None,
                session_id=None,
                finished=lambda: False,
            )
            for row in range(rows + 1)
        ]
        self.counts = Counts()
        self._generator = generator

    def step(self, sampler: Any, requests: Sequence[SimpleNamespace]) -> Counts:
        """Guide the next tokens of some requests, which become their most probable ones; returns what it took."""
        rows = len(requests)
        probs = torch.softmax(3 * torch.randn(rows, VOCAB, generator=self._generator), dim=1)
        lengths = [len(r.origin_input_ids) + len(r.output_ids) for r in requests]
        reads = HostReads()
        sampler.lenvm_batch = SimpleNamespace(
            forward_mode=SimpleNamespace(is_decode=lambda: True),
            input_ids=torch.tensor([(r.output_ids or r.origin_input_ids)[-1] for r in requests]),
            req_pool_indices=torch.tensor([r.req_pool_idx for r in requests]),
            seq_lens=torch.tensor(lengths),
            seq_lens_cpu=reads.lie_on_host(torch.tensor(lengths)),
        )
        top_k = torch.full((rows,), TOP_K, dtype=torch.int32)
        filters = torch.ones(rows, 1), torch.ones(rows), top_k, torch.zeros(rows)
        best = probs.argmax(dim=1).tolist()
        self.counts = Counts()
        with reads, torch.no_grad():
            sampler.apply(probs, requests, *filters)
        self.counts.reads = reads.reads
        for request, token in zip(requests, best, strict=True):
            request.output_ids.append(token)
        return self.counts

    def run(self, sampler: Any) -> tuple[Counts, Counts]:
        """A step of decoding, and one after the prompt of another request."""
        *running, other = self.requests
        for _ in range(2):
            self.step(sampler, running)
        decode = self.step(sampler, running)
        self.step(sampler, [other])
        return decode, self.step(sampler, running)


def compute_position(backend: str, prefix_lens: Any, lens: Any, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """In place of the kernel that the fork has for it on a GPU: positions, and where each request begins."""
    return torch.zeros(total, dtype=torch.int64), torch.zeros_like(lens)


def fork_sampler(steps: Steps) -> Any:
    """The fork's sampler with its in-process runner, both as they are now."""
    sampling, model, memory, allocator, runners = (
        importlib.import_module(f"sglang.srt.{name}")
        for name in (
            "lvm.lvm_guided_sampling",
            "models.qwen2_lvm",
            "mem_cache.memory_pool",
            "mem_cache.allocator",
            "model_executor.model_runner",
        )
    )
    hidden, slots, device = 16, 2 * len(steps.requests) * (CACHED + TOP_K), torch.device("cpu")
    value_model = SimpleNamespace(
        model=lambda input_ids, *args: torch.zeros(len(input_ids), hidden), v_head=model.MLP2SiLUValueHead(hidden)
    )

    def forward_extend(batch: Any) -> Any:
        steps.counts.forwards += 1
        steps.counts.tokens += len(batch.input_ids)
        if batch.spec_info is not None:
            steps.counts.mask_bytes += batch.spec_info.custom_mask.nbytes
        return model.Qwen2ForLengthValueModel.forward(value_model, batch.input_ids, batch.positions, batch)

    runner = SimpleNamespace(
        device=device,
        server_args=SimpleNamespace(attention_backend="triton"),
        req_to_token_pool=memory.ReqToTokenPool(len(steps.requests) + 1, 2 * CACHED, device, False),
        token_to_kv_pool_allocator=allocator.TokenToKVPoolAllocator(slots, torch.float32, device, None, False),
        token_to_kv_pool=None,
        attn_backend=None,
        forward_extend=forward_extend,
        model=value_model,
    )
    options = mock.Mock(
        lvm_guided_inproc=True,
        lvm_guided_inproc_model_path="value-model",
        lvm_guided_inproc_mem_fraction_static=0.5,
    )
    base = mock.Mock(server_args=options)
    hf_config = SimpleNamespace(architectures=["Qwen2ForLengthValueModel"])

    with ExitStack() as patches:
        for owner, name, value in (
            (sampling, "ModelConfig", lambda **kwargs: SimpleNamespace(hf_config=hf_config)),
            (runners, "ModelRunner", lambda **kwargs: runner),
        ):
            patches.enter_context(mock.patch.object(owner, name, value))
        function = f"{_LVM}.lvm_guided_sampling:lvm_combined_guidance"
        guided = sampling.LvmGuidedSampler(
            sampling.LvmGuidedConfig(url=None, timeout=1.0, bypass_cache=False, fn_spec=function), model_runner=base
        )
        guided._get_inproc_provider()
    return guided


class _Narrow(Settings):
    """Settings of a value model that is made, not read."""

    def load_value_model(self, dtype: torch.dtype, device: torch.device | str) -> ValueModel:
        return narrow_model(LAYERS, VOCAB)


def our_sampler(steps: Steps) -> Any:
    """The fork's sampler with the runner that ``install()`` gives it."""
    sampling = importlib.import_module(f"{_LVM}.lvm_guided_sampling")
    rows = len(steps.requests)
    runner = SimpleNamespace(
        device="cpu",
        dtype=torch.bfloat16,
        server_args=SimpleNamespace(tokenizer_path="", disable_cuda_graph=False),
        model_config=SimpleNamespace(vocab_size=VOCAB, is_multimodal=False),
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(rows, CACHED + 16, dtype=torch.int32)),
        max_running_requests=rows,
    )
    settings = _Narrow(Path("value-model"), max_candidates=64)
    guided = sampling.LvmGuidedSampler.__new__(sampling.LvmGuidedSampler)
    guided._inproc = InprocRunner(settings, runner, mem_fraction=1.0, free_bytes=lambda: 2.0**36)
    return guided


def count_ours(rows: int, guidance: dict) -> tuple[Counts, Counts]:
    """What a step takes after ``install()``: forwards and tokens with the operators' references, then host reads."""
    steps, forward = Steps(rows, guidance), ValueModel.forward

    def counted(self: ValueModel, batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        steps.counts.forwards += 1
        steps.counts.tokens += int(batch.layout.q_offsets[-1])
        return forward(self, batch, *args, **kwargs)

    with mock.patch.object(ValueModel, "forward", counted):
        found = steps.run(our_sampler(steps))
    without = Steps(rows, guidance)
    sampler = our_sampler(without)
    step = sampler._inproc.step
    step.config, step.values._backend = replace(step.config, backend="triton"), "triton"
    with without_kernels():
        read = without.run(sampler)
    for of_step, reads in zip(found, read, strict=True):
        of_step.reads = reads.reads
    return found


def count_fork(rows: int, guidance: dict) -> tuple[Counts, Counts]:
    """What a step takes with the fork's own runner."""
    steps = Steps(rows, guidance)
    inproc = importlib.import_module(f"{_LVM}.lvm_inproc_runner")
    with without_streams(), mock.patch.object(inproc, "compute_position", compute_position):
        return steps.run(fork_sampler(steps))


# --- the command ---

FORK, OURS = "the fork", "install()"


def tables(results: list[dict]) -> str:
    """A row for each result."""
    columns = ("", "guidance", "requests", "forwards", "tokens", "host reads", "mask bytes", "tokens after a prompt")
    rows = []
    for r in results:
        numbers = [*r["decode"].values(), r["after_prompt"]["tokens"]]
        rows.append((r["what"], r["guidance"], r["requests"], *(f"{n:,}" for n in numbers)))
    return text_table(columns, rows)


def main() -> None:
    parser = flags.parser(__doc__, json="write the results to this file")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS), help="batch sizes (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    sys.meta_path.insert(0, _NoKernels())
    try:
        importlib.import_module(f"{_LVM}.lvm_guided_sampling")
    except ImportError as error:
        parser.error(f"the LenVM fork of SGLang cannot be imported: {error}")
    results: list[dict] = []
    counts: dict[str, Callable] = {FORK: count_fork, OURS: count_ours}
    for what, count in counts.items():
        if what == OURS:
            sglang_fork.install()
        for name, guidance in GUIDANCE.items():
            for rows in args.rows:
                decode, after_prompt = count(rows, guidance)
                numbers = dict(decode=asdict(decode), after_prompt=asdict(after_prompt))
                results.append(dict(what=what, guidance=name, requests=rows, **numbers))
    print(tables(results))
    if args.json:
        write_json(args.json, {"environment": environment("cpu"), "results": results})


if __name__ == "__main__":
    main()
