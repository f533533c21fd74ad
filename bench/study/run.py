"""Decoding with and without guidance: per-step times of each way as JSON lines, and what it was in a JSON file.

Each way decodes the same prompts for the same number of steps; ends of sequence are passed over, so that every way does
the same work. A step draws a token for each row and runs the base model on it. The ways:

- ``base``: softmax over the vocabulary and a draw;
- ``ours``: :class:`lenvm_kernels.step.GuidedStep`, its stages timed through ``LENVM_TIMING``;
- ``two_forward``: the published way (:mod:`bench.baselines.two_forward`).

The load is SmolLM2-135M-Instruct on the demo's prompts (the default on a CPU), or random weights of real dimensions
with a cache of random keys and values behind every row (on a GPU): not what they compute matters but how long.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from bench.harness import storing
from bench.models import make_config, make_model
from bench.study.flops import Architecture, Guidance
from bench.study.result import Run, Stages, stages_of
from lenvm_kernels import timing
from lenvm_kernels.guidance import parse_guidance
from lenvm_kernels.paged_slots import PagedSlots
from lenvm_kernels.step import GuidedStep, Sampling, StepBatch, StepConfig
from lenvm_kernels.types import Status
from lenvm_kernels.value_model import KVCache, RaggedBatch, ValueModel

# Every stage of a step has work with it. The tilt changes lengths; decoding for a fixed number of steps hides that.
GUIDANCE = {"value_mode": "mul", "value_scale": 0.9}
MIN_P, TEMPERATURE = 0.01, 1.0  # as published
WARM_UP_STEPS = 2
MAX_CANDIDATES = 8  # slots of a row; the limit on its candidates is top-k


class SmolBase:
    """SmolLM2-135M-Instruct by ``transformers``, on held-out prompts of the demo.

    Attributes:
        prompts: int64 ``[B, P]``, padded on the left.
        prompt_lens: int32 ``[B]``.
        vocab_size: of the logits.
        architecture: of the model.
    """

    VALUE_MODEL = "SmolLM2-135M"
    COMPUTES_PROMPTS = True

    def __init__(self, rows: int, dtype: torch.dtype, device: str) -> None:
        from lenvm_kernels.loading import held_out_prompts
        from lenvm_kernels.loading.models import Models

        if rows > len(held_out_prompts()):
            raise ValueError(f"--rows must be from 1 to the {len(held_out_prompts())} prompts of the demo, got {rows}")
        self.models = Models.load("demo", "demo", device=device, dtype=dtype)
        inputs = self.models.encode(held_out_prompts()[:rows])
        self.prompts, self._mask = inputs["input_ids"], inputs["attention_mask"]
        self.prompt_lens = self._mask.sum(1).int()
        self.vocab_size = self.models.model.get_input_embeddings().num_embeddings
        self.architecture = Architecture.from_config(self.models.model.config.to_dict(), "SmolLM2-135M-Instruct")

    def value_model(self, name: str) -> tuple[ValueModel, Architecture]:
        """The shipped value model, whatever the name."""
        return self.models.value_model, self.architecture

    def start(self) -> torch.Tensor:
        """Compute the prompts; logits of their last tokens, ``[B, V]``."""
        self._mask, self._cache = self._mask[:, : self.prompts.shape[1]], None
        return self._forward(self.prompts, (self._mask.cumsum(1) - 1).clamp(min=0))

    def next(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits after one more token of each row, ``[B, V]``."""
        self._mask = F.pad(self._mask, (0, 1), value=1)
        return self._forward(tokens.long()[:, None], self._mask.sum(1, keepdim=True) - 1)

    def _forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        output = self.models.model(
            input_ids=tokens,
            attention_mask=self._mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self._cache = output.past_key_values
        return output.logits[:, -1]


class RandomBase:
    """A decoder of random weights with random keys and values behind each row, from a CUDA graph on a GPU.

    It has this package's layers, and a projection to the vocabulary of hidden states that stay the same.
    Attributes as :class:`SmolBase`.
    """

    COMPUTES_PROMPTS = False

    def __init__(self, name: str, rows: int, prompt_tokens: int, steps: int, dtype: torch.dtype, device: str) -> None:
        self.architecture, self._placed = Architecture.load(name), dict(dtype=dtype, device=device)
        self.vocab_size, hidden = self.architecture.vocab_size, self.architecture.hidden_size
        self._model = self.value_model(name)[0]
        self._slots = PagedSlots(rows, prompt_tokens + steps + 1, device=device)
        self._cache = KVCache.of_slots(self._model, self._slots.num_slots)
        self._cache.keys.normal_()
        self._cache.values.normal_()
        for row in range(rows):
            self._slots.extend(row, prompt_tokens + steps + 1)
        self.prompts = torch.randint(self.vocab_size, (rows, prompt_tokens), device=device)
        self.prompt_lens = torch.full((rows,), prompt_tokens, dtype=torch.int32, device=device)
        self._rows = torch.arange(rows, dtype=torch.int32, device=device)
        self._tokens, self._lengths = self.prompts[:, -1].clone(), self.prompt_lens.clone()
        self._lm_head = torch.randn(self.vocab_size, hidden, **self._placed)
        self._hidden = torch.randn(rows, hidden, **self._placed) * hidden**-0.5
        self._graph = None
        if device == "cuda":
            self._forward()  # compiles, which a capture cannot
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._logits = self._forward()

    def value_model(self, name: str) -> tuple[ValueModel, Architecture]:
        """A value model of the dimensions ``name`` and the base model's vocabulary."""
        return make_model(make_config(name, vocab_size=self.vocab_size), **self._placed), Architecture.load(name)

    def start(self) -> torch.Tensor:
        """Logits of the prompts' last tokens, ``[B, V]``; what is before them counts as computed."""
        self._lengths.copy_(self.prompt_lens)
        return self._run(self.prompts[:, -1])

    def next(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits after one more token of each row, ``[B, V]``."""
        self._lengths += 1
        return self._run(tokens)

    def _run(self, tokens: torch.Tensor) -> torch.Tensor:
        self._tokens.copy_(tokens)
        if self._graph is None:
            return self._forward()
        self._graph.replay()
        return self._logits

    @torch.no_grad()
    def _forward(self) -> torch.Tensor:
        ones, no_candidates = torch.ones_like(self._rows), self._rows.new_empty(len(self._rows), 0)
        cached = self._lengths - 1
        slots = self._slots.slots(self._rows, cached)
        tokens, candidates = (self._tokens, slots, self._rows, ones), (no_candidates, torch.zeros_like(ones))
        batch = RaggedBatch.build(*tokens, *candidates, cached, self._slots.table, self._rows)
        self._model.forward(batch, self._cache)
        return F.linear(self._hidden, self._lm_head)


Base = SmolBase | RandomBase


class Plain:
    """The base model's own draw: an exponential race, which needs no answer from the device."""

    computed = None

    def start(self) -> None:
        """Nothing is known of the prompts."""

    def draw(self, logits: torch.Tensor, tokens: torch.Tensor, step: int) -> torch.Tensor:
        """int ``[B]``: the next tokens."""
        probs = torch.softmax(logits.float() / TEMPERATURE, dim=-1)
        return (probs / torch.empty_like(probs).exponential_()).argmax(-1)

    def stages(self) -> Stages:
        """None of its own."""
        return {}


class Guided(Plain):
    """A guided step behind the base model, for as many requests as it has prompts.

    Attributes:
        top_k: the limit on candidates.
    """

    top_k = MAX_CANDIDATES

    def __init__(self, base: Base, model: ValueModel, steps: int, make_step: Callable[..., Any]) -> None:
        device, (rows, width) = base.prompts.device, base.prompts.shape
        self._base, self._rows = base, torch.arange(rows, device=device)
        self._slots = PagedSlots(rows, width + steps + 1, device=device)
        for row, length in enumerate(base.prompt_lens.tolist()):
            self._slots.extend(row, length + steps)
        config = StepConfig(vocab_size=base.vocab_size, max_candidates=MAX_CANDIDATES)
        self._step = make_step(model, self._slots, config)
        self._outputs: list[Any] = []

    def start(self) -> None:
        """Admit the requests, and compute their prompts but for the last token."""
        base, (rows, width) = self._base, self._base.prompts.shape
        self._outputs.clear()
        params, never_drawn = parse_guidance(GUIDANCE), {base.vocab_size}
        for row, length in enumerate(base.prompt_lens.tolist()):
            self._step.add_request(row, params, never_drawn, prompt_len=length)
        first = width - base.prompt_lens
        positions = (torch.arange(width, device=first.device) - first[:, None]).clamp(min=0)
        self._step.extend(
            base.prompts.flatten(),
            self._slots.slots(self._rows[:, None], positions).flatten(),
            self._rows,
            (self._rows * width + first).int(),
            base.prompt_lens - 1,
            torch.zeros_like(base.prompt_lens),
        )
        ones = torch.ones(rows, device=first.device)
        top_k = torch.full_like(base.prompt_lens, self.top_k)
        self._sampling = Sampling(top_k, ones, ones * MIN_P, ones * TEMPERATURE, is_logits=True, sample=True)

    def draw(self, logits: torch.Tensor, tokens: torch.Tensor, step: int) -> torch.Tensor:
        """int ``[B]``: the next tokens, of the guided distribution."""
        batch = StepBatch(tokens, self._rows, self._base.prompt_lens + step)
        output = self._step.step(logits, batch, self._sampling)
        self._outputs.append(output)
        return output.tokens

    @property
    def _draws(self) -> int:
        return len(self._outputs) * len(self._rows)


class Ours(Guided):
    """:class:`lenvm_kernels.step.GuidedStep`."""

    def __init__(self, base: Base, model: ValueModel, steps: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        file = Path(self._folder.name) / "stages.jsonl"
        with mock.patch.dict(os.environ, {timing.VARIABLE: str(file)}):  # the user may have set it too
            super().__init__(base, model, steps, GuidedStep)
            self._timer = timing.StepTimer.from_environment()  # the step's own
        self._file = timing.file_of_process(file, os.getpid())
        if base.prompts.is_cuda:
            self._step.warm_up(base.start().dtype, progress=False)

    @property
    def computed(self) -> Guidance:
        """What the value model computed for each output token since :meth:`start`."""
        candidates = [output.candidates for output in self._outputs]
        guided = torch.stack([c.status for c in candidates]) == Status.GUIDE  # [steps, B]
        counts = torch.stack([c.counts for c in candidates])
        # A token that was drawn without values is computed by the step after it.
        return Guidance(int(counts[guided].sum()) / self._draws, int((~guided[:-1]).sum()) / self._draws)

    def stages(self) -> Stages:
        """Of the steps since :meth:`start`."""
        self._timer.flush()
        return stages_of(self._file.read_text().splitlines()[-len(self._outputs) :])


class TwoForward(Guided):
    """The published way, whose stages are not timed."""

    def __init__(self, base: Base, model: ValueModel, steps: int) -> None:
        from bench.baselines.two_forward import TwoForwardStep

        super().__init__(base, model, steps, TwoForwardStep)

    @property
    def computed(self) -> Guidance:
        """What the value model computed for each output token since :meth:`start`."""
        # A row whose candidates are scored first catches up with all its tokens; those of its prompt do not count.
        caught_up = {row: step for step, output in enumerate(self._outputs) for row in output.rows}
        candidates = sum(len(ids) for output in self._outputs for ids in output.candidate_ids)
        return Guidance(candidates / self._draws, sum(caught_up.values()) / self._draws)


GUIDED = {"ours": Ours, "two_forward": TwoForward}
WAYS = ("base", *GUIDED)


@torch.no_grad()
def decode(base: Base, sampler: Plain, run: Run) -> Run:
    """The run, with what its prompts and steps took."""
    device, records = base.prompts.device, []

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    torch.manual_seed(0)
    begin = now()
    sampler.start()
    logits, tokens = base.start(), base.prompts[:, -1].contiguous()
    prompts = now()
    for step in range(run.steps):
        records.append(timing.StepRecord(len(tokens), device))
        tokens = sampler.draw(logits, tokens, step)
        records[-1].mark("sampler")
        logits = base.next(tokens)
        records[-1].mark("base")
    end = now()
    stages = merge(stages_of([record.line(step) for step, record in enumerate(records)]), sampler.stages())
    return replace(run, prompt_seconds=prompts - begin, decode_seconds=end - prompts, stages=stages)


def merge(outer: Stages, inner: Stages) -> Stages:
    """Stages of a whole step: the base model, then the sampler's stages, and what of it no stage has as ``other``.

    Args:
        outer: ``sampler``, ``base`` and ``total``.
        inner: the sampler's stages and their ``total``; empty, if it has none of its own.
    """
    parts = {"sampler": outer["sampler"]}
    if inner:
        rest = zip(outer["sampler"], inner["total"], strict=True)
        parts = {stage: inner[stage] for stage in timing.STAGES}
        parts["other"] = [round(sampler - total, 6) for sampler, total in rest]
    return {"base": outer["base"], **parts, "total": outer["total"]}


class Study:
    """The runs of one command into one folder.

    Args:
        base: the load.
        steps: decoded by each way.
        repeats: how often each way decodes them; the fastest time counts, which whatever else ran disturbed least.
        out: the folder; made if it is not there.
        environment: goes into each ``.meta.json``.
    """

    def __init__(self, base: Base, steps: int, repeats: int, out: Path, environment: dict[str, str]) -> None:
        self._base, self._out, self._failed = base, out, False
        self._fastest: dict[str, Run] = {}
        self._base_run = Run(
            name="base",
            way="base",
            base_model=base.architecture,
            environment=environment,
            rows=len(base.prompts),
            prompt_tokens=base.prompt_lens.double().mean().item(),
            prompts_computed=base.COMPUTES_PROMPTS,
            steps=steps,
            repeats=repeats,
        )
        out.mkdir(parents=True, exist_ok=True)

    def run(self, ways: Sequence[str], value_models: Sequence[str], top_ks: Sequence[int]) -> int:
        """Every way with every value model and k; what fails is recorded and keeps no other from running.

        Returns:
            The exit status: 1 if something failed.
        """
        guided = [(way, model) for way in ways if way != "base" for model in value_models]
        if "base" in ways:
            self._measure(self._base_run, Plain())
        for way, model in guided:
            run = replace(self._base_run, name=f"{way}-{model}", way=way)
            with self._recorded(run):
                weights, architecture = self._base.value_model(model)
                sampler = GUIDED[way](self._base, weights, run.steps)
                # An earlier command that could not build it left its error.
                (self._out / f"{run.name}.meta.json").unlink(missing_ok=True)
                for top_k in top_ks:
                    sampler.top_k, name = top_k, f"{run.name}-k{top_k}"
                    self._measure(replace(run, name=name, value_model=architecture, top_k=top_k), sampler)
        if "base" in ways and guided:  # all ratios are to it: once more, in case something disturbed it before
            self._measure(self._base_run, Plain())
        return int(self._failed)

    @contextmanager
    def _recorded(self, run: Run) -> Iterator[None]:
        """Record an error, and go on: an absent package, no memory, a kernel that does not compile."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self._failed = True
            if run.name not in self._fastest:  # of what is measured once more, the first result stays
                replace(run, error=f"{type(error).__name__}: {error}".splitlines()[0]).save(self._out)

    def _measure(self, run: Run, sampler: Plain) -> None:
        with self._recorded(run):
            decode(self._base, sampler, replace(run, steps=min(WARM_UP_STEPS, run.steps)))
            runs = [decode(self._base, sampler, run) for _ in range(run.repeats)]
            if run.name in self._fastest:
                runs.append(self._fastest[run.name])
            fastest = min(runs, key=lambda run: run.decode_seconds)
            fastest = replace(fastest, load_average=os.getloadavg()[0], computed=sampler.computed)
            fastest.save(self._out)
            self._fastest[run.name] = fastest
            ms, rate = fastest.decode_seconds / run.steps * 1e3, fastest.output_tokens / fastest.decode_seconds
            print(f"{run.name}: {ms:.2f} ms a step, {rate:.1f} tokens/s", flush=True)


def environment(device: str, dtype: torch.dtype) -> dict[str, str]:
    """What every result file says of where it comes from."""
    return storing.environment(device) | {
        "command": " ".join(["python -m bench.study", *sys.argv[1:]]),
        "operators": "Triton kernels" if device == "cuda" else "PyTorch reference",
        "dtype": str(dtype).removeprefix("torch."),
    }
