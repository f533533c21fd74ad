"""Calls of every kernel in every form, which :mod:`bench.codegen` compiles.

An operator's calls are the ``FORMS`` of its benchmark in ``bench/ops``. Random numbers are zeros here, because
compilation depends on dtypes, sizes and alignments only.
"""

from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType

import torch

from bench.launches import empty_is_zero
from bench.models import VOCAB, make_config
from bench.ops import operators
from lenvm_kernels.guidance import parse_guidance
from lenvm_kernels.step import EngineSlots, GuidedStep, ModelValues, Sampling, StepBatch, StepConfig
from lenvm_kernels.values import ValueModel

VALUE_MODELS = ("Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-3B", "Qwen3-1.7B")
MAX_LEN, MAX_CANDIDATES = 4096, 8  # k 5 and 8 use the same kernels

bf16, i32, i64 = (partial(torch.zeros, dtype=dtype) for dtype in (torch.bfloat16, torch.int32, torch.int64))


def operator_calls() -> Iterator[tuple[str, Callable[[], object]]]:
    """Each operator with every dtype, option and kind of size, and with every size 1: (name, function of the call)."""

    def call(module: ModuleType, form: dict[str, object]) -> None:
        with empty_is_zero(random=True):
            made = module.make_call(**form)
        made(backend="triton")

    for module in operators().values():
        for name, form in module.FORMS.items():
            yield name, partial(call, module, form)


def value_model_step(name: str, rows: int) -> None:
    """A prompt and two steps of one layer of a value model in bf16. All layers of a model launch the same kernels."""
    config = make_config(name, vocab_size=VOCAB, num_layers=1)
    step = GuidedStep(
        ModelValues(ValueModel(config, {key: bf16(shape) for key, shape in config.tensor_shapes().items()})),
        EngineSlots(i32(rows, MAX_LEN), 4 * MAX_LEN),
        StepConfig(vocab_size=VOCAB, max_candidates=MAX_CANDIDATES, backend="triton"),
    )
    for row in range(rows):
        step.add_request(row, parse_guidance({"target_length": 100}), {0})
    numbers, ones, prompt, probs = i32(rows), torch.ones(rows), i64(16 * rows), torch.zeros(rows, VOCAB)
    step.extend(prompt, numbers, numbers, numbers, numbers)
    sampling, batch = Sampling(numbers, ones, ones, sample=True), StepBatch(prompt[:rows], prompt[:rows], numbers)
    step.step(step.prepare(None, batch), sampling, scores=probs, probs=probs)
    step.step(step.prepare(bf16(rows, VOCAB), batch), sampling._replace(temperature=ones, is_logits=True))
