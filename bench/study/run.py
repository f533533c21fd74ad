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

import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from bench.harness import storing
from bench.models import make_config, make_model
from bench.study.flops import Architecture, Guidance
from lenvm_kernels import timing
from lenvm_kernels.guidance import parse_guidance
from lenvm_kernels.ops.topk_candidates import Status
from lenvm_kernels.paged_slots import PagedSlots
from lenvm_kernels.step import GuidedStep
from lenvm_kernels.value_model import KVCache, RaggedBatch, ValueModel

WAYS = ("base", "ours", "two_forward")
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
        from lenvm_kernels.demo import held_out_prompts
        from lenvm_kernels.demo.models import Models

        if not 1 <= rows <= len(held_out_prompts()):
            raise ValueError(f"--rows must be from 1 to the {len(held_out_prompts())} prompts of the demo, got {rows}")
        self.models = Models.load("demo", "demo", device=device, dtype=dtype)
        inputs = self.models.encode(held_out_prompts()[:rows])
        self.prompts, self._mask = inputs["input_ids"], inputs["attention_mask"]
        self.prompt_lens = self._mask.sum(1).int()
        self.vocab_size = self.models.model.get_input_embeddings().num_embeddings
        self.architecture = Architecture.from_config(self.models.model.config.to_dict(), "SmolLM2-135M-Instruct")

    def value_model(self, name: str) -> tuple[ValueModel, Architecture]:
        """The shipped head on the same backbone, whatever the name."""
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
        self.architecture, self._dtype, self._device = Architecture.load(name), dtype, device
        self.vocab_size = self.architecture.vocab_size
        config = make_config(name, vocab_size=self.vocab_size)
        self._model = make_model(config, dtype, device)
        self._slots = PagedSlots(rows, prompt_tokens + steps + 1, device=device)
        self._cache = KVCache.of_slots(self._model, self._slots.num_slots)
        for elements in (self._cache.keys, self._cache.values):
            elements.normal_()
        for row in range(rows):
            self._slots.extend(row, prompt_tokens + steps + 1)
        self.prompts = torch.randint(self.vocab_size, (rows, prompt_tokens), device=device)
        self.prompt_lens = torch.full((rows,), prompt_tokens, dtype=torch.int32, device=device)
        self._rows = torch.arange(rows, dtype=torch.int32, device=device)
        self._tokens, self._lengths = self.prompts[:, -1].clone(), self.prompt_lens.clone()
        self._lm_head = torch.randn(self.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self._hidden = torch.randn(rows, config.hidden_size, dtype=dtype, device=device) * config.hidden_size**-0.5
        self._graph = None
        if device == "cuda":
            self._forward()  # compiles, which a capture cannot
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._logits = self._forward()

    def value_model(self, name: str) -> tuple[ValueModel, Architecture]:
        """A value model of the dimensions ``name`` and the base model's vocabulary."""
        model = make_model(make_config(name, vocab_size=self.vocab_size), self._dtype, self._device)
        return model, Architecture.load(name)

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
        ones = torch.ones_like(self._lengths)
        batch = RaggedBatch.build(
            self._tokens,
            self._slots.slots(self._rows, self._lengths - 1),
            self._rows,
            ones,
            torch.empty(len(ones), 0, dtype=torch.int32, device=self._device),
            torch.zeros_like(ones),
            self._lengths - 1,
            self._slots.table,
            self._rows,
        )
        self._model.forward(batch, self._cache)
        return F.linear(self._hidden, self._lm_head)


class Plain:
    """The base model's own draw: an exponential race, which needs no answer from the device."""

    def start(self) -> None:
        """Nothing is known of the prompts."""

    def draw(self, logits: torch.Tensor, tokens: torch.Tensor, step: int) -> torch.Tensor:
        """int ``[B]``: the next tokens."""
        probs = torch.softmax(logits.float() / TEMPERATURE, dim=-1)
        return (probs / torch.empty_like(probs).exponential_()).argmax(-1)


class Guided:
    """A guided step behind the base model: ours or the published one.

    Args:
        base: the load.
        model: the value model.
        way: ``ours`` or ``two_forward``.
        steps: the most that are decoded.
        stages: file of the stages of our step.
    """

    def __init__(self, base: SmolBase | RandomBase, model: ValueModel, way: str, steps: int, stages: Path) -> None:
        device, (rows, width) = base.prompts.device, base.prompts.shape
        self._base, self._steps, self._way = base, steps, way
        self._slots = PagedSlots(rows, width + steps + 1, device=device)
        for row, length in enumerate(base.prompt_lens.tolist()):
            self._slots.extend(row, length + steps)
        arguments, self._timer = (model, self._slots.table, self._slots.num_slots), None
        options = dict(vocab_size=base.vocab_size, max_candidates=MAX_CANDIDATES)
        if way == "ours":
            with mock.patch.dict(os.environ, {timing.VARIABLE: str(stages)}):  # the user may have set it too
                self._step = GuidedStep(*arguments, **options)
                self._timer = timing.StepTimer.from_environment()  # the step's own
            self._stages = timing.file_of_process(stages, os.getpid())
            if device.type == "cuda":
                self._step.warm_up(base.start().dtype, progress=False)
        else:
            from bench.baselines.two_forward import TwoForwardStep

            self._step = TwoForwardStep(*arguments, **options)
        self._rows = torch.arange(rows, device=device)
        self._params = parse_guidance(GUIDANCE)
        self._outputs: list[Any] = []

    def use_top_k(self, top_k: int) -> None:
        """Set the limit on candidates."""
        device, rows = self._rows.device, len(self._rows)
        self._filters = dict(
            top_k=torch.full((rows,), top_k, dtype=torch.int32, device=device),
            top_p=torch.ones(rows, device=device),
            min_p=torch.full((rows,), MIN_P, device=device),
            temperature=torch.full((rows,), TEMPERATURE, device=device),
        )

    def start(self) -> None:
        """Admit the requests, and compute their prompts but for the last token."""
        base, width = self._base, self._base.prompts.shape[1]
        self._outputs.clear()
        for row, length in enumerate(base.prompt_lens.tolist()):
            self._step.set(row, self._params, {base.vocab_size}, prompt_len=length)  # an end that is never drawn
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

    def draw(self, logits: torch.Tensor, tokens: torch.Tensor, step: int) -> torch.Tensor:
        """int ``[B]``: the next tokens, of the guided distribution."""
        lengths = self._base.prompt_lens + step
        slots = self._slots.slots(self._rows, lengths - 1)
        output = self._step.step(
            logits, tokens, self._rows, lengths, slots, **self._filters, is_logits=True, sample=True
        )
        self._outputs.append(output if self._way == "two_forward" else output.candidates)
        return output.tokens

    def computed(self) -> Guidance:
        """Tokens that the value model computed for each output token since :meth:`start`."""
        outputs = len(self._outputs) * len(self._rows)
        if self._way == "two_forward":
            # A row whose candidates are scored first catches up with all its tokens; those of its prompt do not count.
            caught_up = {row: step for step, output in enumerate(self._outputs) for row in output.rows}
            candidates = sum(len(ids) for output in self._outputs for ids in output.candidate_ids)
            return Guidance(candidates / outputs, sum(caught_up.values()) / outputs)
        status = torch.stack([candidates.status for candidates in self._outputs])  # [steps, B]
        counts = torch.stack([candidates.counts for candidates in self._outputs])
        guided = status == Status.GUIDE
        # A token that was drawn without values is computed by the step after it.
        return Guidance(int(counts[guided].sum()) / outputs, int((~guided[:-1]).sum()) / outputs)

    def stages(self, steps: int) -> list[dict]:
        """Lines of the stages of the last ``steps`` steps; none if they are not timed."""
        if self._timer is None:
            return []
        self._timer.flush()
        return _read_lines(self._stages)[-steps:]


@torch.no_grad()
def decode(
    base: SmolBase | RandomBase, sampler: Plain | Guided, steps: int, timer: timing.StepTimer
) -> tuple[float, float]:
    """Seconds of the prompts and of ``steps`` steps; the timer gets the stages ``sampler`` and ``base`` of each."""
    device = base.prompts.device

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    torch.manual_seed(0)
    begin = now()
    sampler.start()
    logits, tokens = base.start(), base.prompts[:, -1].contiguous()
    prompts = now()
    for step in range(steps):
        record = timer.begin(len(tokens), device)
        tokens = sampler.draw(logits, tokens, step)
        record.mark("sampler")
        logits = base.next(tokens)
        record.mark("base")
        timer.end(record)
    return prompts - begin, now() - prompts


def merge(outer: list[dict], inner: list[dict]) -> list[dict]:
    """Lines of a whole step: the base model, then the sampler's stages, and what of it no stage has as ``other``.

    Args:
        outer: lines with ``sampler_ms``, ``base_ms`` and ``total_ms``.
        inner: lines of the sampler's stages, one for each of ``outer``; none, if it has a single one.
    """
    lines = []
    for i, line in enumerate(outer):
        stages = {"sampler_ms": line["sampler_ms"]}
        if inner:
            stages = {f"{stage}_ms": inner[i][f"{stage}_ms"] for stage in timing.STAGES}
            stages["other_ms"] = round(line["sampler_ms"] - inner[i]["total_ms"], 6)
        lines.append(
            {"step": i, "rows": line["rows"], "base_ms": line["base_ms"], **stages, "total_ms": line["total_ms"]}
        )
    return lines


class Study:
    """The runs of one command into one folder.

    Args:
        base: the load.
        steps: decoded by each way.
        repeats: how often each way decodes them; the fastest time counts, which whatever else ran disturbed least.
        out: the folder; made if it is not there.
        environment: goes into each ``.meta.json``.
    """

    def __init__(
        self, base: SmolBase | RandomBase, steps: int, repeats: int, out: Path, environment: dict[str, Any]
    ) -> None:
        self._base, self._steps, self._repeats, self._out, self._environment = base, steps, repeats, out, environment
        self._failed = False
        self._fastest: dict[str, tuple[float, float, list[dict]]] = {}
        out.mkdir(parents=True, exist_ok=True)

    def run(self, ways: Sequence[str], value_models: Sequence[str], top_ks: Sequence[int]) -> int:
        """Every way with every value model and k; what fails is recorded and keeps no other from running.

        Returns:
            The exit status: 1 if something failed.
        """
        guided = [way for way in ways if way != "base"]
        base = "base", {"way": "base"}, self._measure, "base", Plain(), {"way": "base"}
        with tempfile.TemporaryDirectory() as folder:
            if "base" in ways:
                self._attempt(*base, folder)
            for way in guided:
                for model in value_models:
                    self._attempt(f"{way}-{model}", {"way": way}, self._measure_each, way, model, top_ks, folder)
            if "base" in ways and guided:  # all ratios are to it: once more, in case something disturbed it before
                self._attempt(*base, folder)
        return int(self._failed)

    def _attempt(self, name: str, facts: dict[str, Any], function: Callable[..., None], *arguments: Any) -> None:
        try:
            function(*arguments)
        except Exception as error:  # an absent package, no memory, a kernel that does not compile: the others go on
            traceback.print_exc()
            self._failed = True
            if name not in self._fastest:  # of what is measured once more, the first result stays
                self._write(name, facts | {"error": f"{type(error).__name__}: {error}".splitlines()[0]})

    def _measure_each(self, way: str, model: str, top_ks: Sequence[int], folder: str) -> None:
        weights, architecture = self._base.value_model(model)
        guided = Guided(self._base, weights, way, self._steps, Path(folder) / f"{way}-{model}.stages")
        # An earlier command that could not build it left its error.
        (self._out / f"{way}-{model}.meta.json").unlink(missing_ok=True)
        for top_k in top_ks:
            guided.use_top_k(top_k)
            name = f"{way}-{model}-k{top_k}"
            facts = {"way": way, "top_k": top_k, "value_model": asdict(architecture)}
            self._attempt(name, facts, self._measure, name, guided, facts, folder)

    def _measure(self, name: str, sampler: Plain | Guided, facts: dict[str, Any], folder: str) -> None:
        file = Path(folder) / f"{name}.steps"
        timer = timing.StepTimer(file)
        decode(self._base, sampler, min(WARM_UP_STEPS, self._steps), timer)
        fastest = self._fastest.get(name)
        for _ in range(self._repeats):
            prompt_seconds, seconds = decode(self._base, sampler, self._steps, timer)
            if fastest is None or seconds < fastest[0]:
                timer.flush()
                stages = sampler.stages(self._steps) if isinstance(sampler, Guided) else []
                fastest = seconds, prompt_seconds, merge(_read_lines(file)[-self._steps :], stages)
        seconds, prompt_seconds, lines = fastest
        (self._out / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        tokens = len(self._base.prompts) * self._steps
        facts = facts | {
            "rows": len(self._base.prompts),
            "prompt_tokens": self._base.prompt_lens.double().mean().item(),
            "steps": self._steps,
            "repeats": self._repeats,
            "load_average": os.getloadavg()[0],
            "output_tokens": tokens,
            "prompts_computed": self._base.COMPUTES_PROMPTS,
            "prompt_seconds": prompt_seconds,
            "decode_seconds": seconds,
        }
        if isinstance(sampler, Guided):
            facts["computed"] = asdict(sampler.computed())
        self._write(name, facts)
        self._fastest[name] = fastest
        print(f"{name}: {seconds / self._steps * 1e3:.2f} ms a step, {tokens / seconds:.1f} tokens/s", flush=True)

    def _write(self, name: str, facts: dict[str, Any]) -> None:
        meta = {"name": name, **facts, "base_model": asdict(self._base.architecture), **self._environment}
        (self._out / f"{name}.meta.json").write_text(json.dumps(meta, indent=1) + "\n")


def environment(device: str, dtype: torch.dtype) -> dict[str, str]:
    """What every result file says of where it comes from."""
    return storing.environment(device) | {
        "command": " ".join(["python -m bench.study", *sys.argv[1:]]),
        "operators": "Triton kernels" if device == "cuda" else "PyTorch reference",
        "dtype": str(dtype).removeprefix("torch."),
    }


def _read_lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]
