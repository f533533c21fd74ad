"""Every kernel in every form in which it is launched, and whole steps: what :mod:`bench.codegen` compiles and counts.

Those of an operator are the ``FORMS`` beside its benchmark in ``bench/ops``. Random numbers are zeros here: compiling
looks at dtypes, sizes and alignments only.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch

import bench.ops
from bench.launches import empty_is_zero
from bench.models import DIMENSIONS, TRUNK_LAYERS, VOCAB, make_config, random_trunk
from bench.step import CACHED, MORE_CACHED
from lenvm_kernels.guidance import parse_guidance
from lenvm_kernels.step import EngineSlots, GuidedStep, Sampling, StepBatch, StepConfig
from lenvm_kernels.types import Drafts
from lenvm_kernels.value_model import Trunk, ValueModel

VALUE_MODELS = ("Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-3B", "Qwen3-1.7B")
MAX_LEN, PAGE_SIZE, MAX_CANDIDATES = 4096, 1, 8  # k 5 and 8 take the same kernels
DRAFTS = 4  # of a request, where a step has any
TRUNK_BASE = "Qwen2.5-7B"

bf16, i32, i64 = (partial(torch.zeros, dtype=dtype) for dtype in (torch.bfloat16, torch.int32, torch.int64))


def operators() -> dict[str, ModuleType]:
    """The modules of ``bench/ops`` by name."""
    names = sorted(module.name for module in pkgutil.iter_modules(bench.ops.__path__))
    return {name: importlib.import_module(f"bench.ops.{name}") for name in names}


def operator_calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Each operator with every dtype, option and kind of size, and with every size 1: its name, and what makes it."""

    def call(module: ModuleType, form: dict[str, object]) -> None:
        with empty_is_zero(random=True):
            made = module.make_call("cpu", **form)
        made(backend="triton")

    for module in operators().values():
        for name, form in module.FORMS.items():
            yield name, partial(call, module, form)


def value_model_step(name: str, rows: int) -> None:
    """A prompt and a step of one layer of a value model in bf16. The layers of a model are the same kernels."""
    config = make_config(name, vocab_size=VOCAB, num_layers=1)
    step = GuidedStep(
        ValueModel(config, {key: bf16(shape) for key, shape in config.tensor_shapes().items()}),
        EngineSlots(i32(rows, MAX_LEN // PAGE_SIZE), 4 * MAX_LEN, PAGE_SIZE),
        StepConfig(vocab_size=VOCAB, max_candidates=MAX_CANDIDATES, backend="triton"),
    )
    for row in range(rows):
        step.add_request(row, parse_guidance({"target_length": 100}), {0})
    numbers, ones, prompt, probs = i32(rows), torch.ones(rows), i64(16 * rows), torch.zeros(rows, VOCAB)
    step.extend(prompt, prompt, numbers, numbers, numbers, numbers)
    sampling, batch = Sampling(numbers, ones, ones, sample=True), StepBatch(prompt[:rows], prompt[:rows], numbers)
    step.step(probs, batch, sampling, probs=probs)
    step.step(bf16(rows, VOCAB), batch, sampling._replace(temperature=ones, is_logits=True))


def value_step(name: str, requests: int, layers: int, *, drafts: int = 0) -> Callable[[], object]:
    """A call that runs a guided step of a value model with ``layers`` layers and ``drafts`` drafts per request."""
    config = make_config(name, vocab_size=2**11, num_layers=layers)
    tensors = {key: bf16(shape) for key, shape in config.tensor_shapes().items()}
    step = _guided_step(ValueModel(config, tensors), requests, max_drafts=drafts)
    scores, rows, lengths = torch.zeros(requests * (1 + drafts), VOCAB), i64(requests), i32(requests)
    if not drafts:
        return partial(step.step, scores, StepBatch(rows, rows, lengths), _sampling(requests))
    assert step._tensors.trees is not None
    step._tensors.trees.columns.zero_()  # a kernel that does not run does not write them, and torch reads them
    chain = torch.arange(drafts, dtype=torch.int32).expand(requests, -1) - 1
    batch, drafted = StepBatch(i64(requests, 1 + drafts), rows, lengths, lengths), Drafts(i64(requests, drafts), chain)
    return partial(step.step, scores, batch, _sampling(requests), drafted, verify="same_draws")


def trunk_step(requests: int) -> Callable[[], object]:
    """A call that runs a guided step with a trunk."""
    trunk = _trunk()
    states, rows = bf16(requests, trunk.config.state_size), i64(requests)
    batch = StepBatch(rows, rows, i32(requests), states=states)
    return partial(_guided_step(trunk, requests).step, torch.zeros(requests, VOCAB), batch, _sampling(requests))


@cache
def _trunk() -> Trunk:
    hidden, _, layers, *_ = DIMENSIONS[TRUNK_BASE]
    return Trunk(*random_trunk(TRUNK_LAYERS, layers, hidden, VOCAB), bf16(1, hidden).expand(VOCAB, -1))


def _guided_step(source: ValueModel | Trunk, requests: int, **options: Any) -> GuidedStep:
    """A step whose requests are all guided."""
    columns = CACHED + MORE_CACHED
    slots = EngineSlots(i32(requests, columns), requests * columns)
    step = GuidedStep(source, slots, StepConfig(vocab_size=VOCAB, backend="triton", **options))
    for row in range(requests):
        step.add_request(row, parse_guidance({"value_mode": "mul", "value_scale": 0.8}), {0})
    step.flush()
    return step


def _sampling(requests: int) -> Sampling:
    floats = torch.zeros(requests)
    return Sampling(i32(requests), floats, floats, is_logits=True, sample=True)
