"""Time of the guided step and of the published algorithm: ``python -m bench.step [--profile]``.

Value models and probes have real dimensions and random weights. Each request has five candidates and L cached tokens,
one more with each step up to L + 31, when the lengths start again. The floor counts weights and cached prefixes read
once, the operations of live tokens, and the scores. Axes:

- ``values``: a value model, ``probe 7B`` (states of a 7B base model) or ``none``;
- ``launch graph``: the whole step in one CUDA graph. ``launch python``: launched as in an engine, with host time.

``--profile`` lists every kernel's launches and time; :mod:`bench.codegen` has registers and shared memory.
"""

import sys
from functools import cache

import torch

from bench.harness import Benchmark, Eager, TimedCase, captured, nbytes
from bench.models import DIMENSIONS, PROBE_LAYERS, VOCAB, forward_floor, make_config, make_model, random_probe
from bench.two_forward import TwoForwardStep
from lenvm_kernels.guidance import parse_guidance
from lenvm_kernels.paged_slots import PagedSlots
from lenvm_kernels.step import GuidedStep, Sampling, StepBatch, StepConfig, StepOutput, value_source
from lenvm_kernels.values import LengthProbe, ValueModel

CACHED, MORE_CACHED, TOP_K = 512, 32, 5
REPLAYS = 4  # per profile


class Decode:
    """A batch of requests in the middle of their outputs; a call is one guided step.

    Args:
        values: value model, probe, or None.
        rows: number of requests.
        cached: initial tokens in each request's cache.
        vocab_size: size of the vocabulary.
        two_forwards: use :class:`TwoForwardStep`.
        step_class: class of other steps.
        options: fields of :class:`StepConfig`.
    """

    def __init__(
        self,
        values: ValueModel | LengthProbe | None,
        rows: int,
        *,
        cached: int = CACHED,
        vocab_size: int = VOCAB,
        two_forwards: bool = False,
        step_class: type[GuidedStep] = GuidedStep,
        **options: object,
    ) -> None:
        device = torch.get_default_device()
        slots = PagedSlots(rows, cached + MORE_CACHED, device=device)
        config = StepConfig(vocab_size=vocab_size, **options)
        self.step = (
            TwoForwardStep(values, slots, config) if two_forwards else step_class(value_source(values), slots, config)
        )
        guidance = {"target_length": 600} if values is None else {"value_mode": "mul", "value_scale": 0.8}
        for row in range(rows):
            slots.extend(row, cached + MORE_CACHED)
            self.step.add_request(row, parse_guidance(guidance), {0})
        self.cached, self.rows = cached, torch.arange(rows)
        self.lengths = torch.full((rows,), cached + 1, dtype=torch.int32)
        # A row's candidates are its first tokens, equally likely; the next token is always the first.
        self.tokens = 1 + 1000 * self.rows % (vocab_size - TOP_K - 1)
        self.scores = torch.randn(rows, vocab_size)
        self.scores.scatter_(1, self.tokens[:, None] + torch.arange(TOP_K), 30.0)
        ones, top_k = torch.ones(rows), torch.full((rows,), TOP_K, dtype=torch.int32)
        self.sampling = Sampling(top_k, ones, 0.01 * ones, is_logits=True, sample=True)
        self.states = torch.randn(rows, values.config.state_size, dtype=values.dtype) if _is_probe(values) else None
        none, zeros = self.tokens[:0], torch.zeros_like(self.lengths)
        if two_forwards:
            prompts = torch.randint(vocab_size, (rows * cached,))
            self.step.extend(prompts, self.rows, cached * self.rows, zeros + cached, zeros)
        elif isinstance(values, ValueModel):
            for layer in (*self.step.values.cache.keys, *self.step.values.cache.values):
                layer.copy_(torch.randn(layer.shape))  # zeros would be faster than real keys and values
            self.step.extend(none, self.rows, zeros, zeros, zeros + cached)

    def take_step(self, **options: object) -> StepOutput:
        """Take a step without extending the sequences."""
        batch = StepBatch(self.tokens, self.rows, self.lengths, states=self.states)
        return self.step.step(self.step.prepare(self.scores, batch), self.sampling, **options)

    def __call__(self, **options: object) -> StepOutput:
        output = self.take_step(**options)
        self.lengths.copy_(torch.where(self.lengths < self.cached + MORE_CACHED, self.lengths + 1, self.cached + 1))
        return output

    def check(self) -> None:
        """Take a step. Raises ValueError for faults or unintended candidates."""
        counts = self().candidates.counts
        if not (counts == TOP_K).all() or self.step.table.columns.faults.any():
            raise ValueError(f"every request must have {TOP_K} candidates and no fault, got {counts.tolist()}")


def _is_probe(values: object) -> bool:
    return isinstance(values, LengthProbe)


@cache
def make_values(name: str, dtype: torch.dtype, device: str, vocab_size: int) -> ValueModel | LengthProbe | None:
    """The source of values, made once for all cases."""
    if name == "none":
        return None
    if not name.startswith("probe"):
        return make_model(make_config(name, vocab_size=vocab_size), dtype, device)
    hidden, _, layers, *_ = DIMENSIONS["Qwen2.5-7B"]
    config, tensors = random_probe(PROBE_LAYERS, layers, hidden, vocab_size, device)
    return LengthProbe(config, tensors, torch.randn(vocab_size, hidden, dtype=dtype, device=device))


def make_case(*, values, B, L, launch, dtype="bfloat16"):
    device = torch.get_default_device().type
    vocab, on_gpu = (VOCAB, True) if device == "cuda" else (2**13, False)
    source = make_values(values, getattr(torch, dtype), device, vocab)
    guided = Decode(source, B, cached=L, vocab_size=vocab, graphs=launch == "python" and on_gpu)
    guided.check()
    moved, operations, peers = nbytes(guided.scores, guided.states), 0, {}
    if isinstance(source, ValueModel):
        more, operations = forward_floor(source.config, source.dtype, B * (1 + TOP_K), B * TOP_K, B, L)
        moved += more

        def published() -> Eager:
            with torch.device(device):
                return Eager(Decode(source, B, cached=L, vocab_size=vocab, two_forwards=True))

        peers = {"two forwards": published}
    return TimedCase(Eager(guided) if launch == "python" else guided, moved, operations, peers)


def profile(values: str, B: int) -> str:
    """Table of a step's kernels in a CUDA graph: launches and times in ``REPLAYS`` replays."""
    with torch.device("cuda"):
        step = Decode(make_values(values, torch.bfloat16, "cuda", VOCAB), B, graphs=False)
        step.check()
        graph = captured(step)
    graph.replay()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
    return profiler.key_averages().table(sort_by="self_device_time_total", max_name_column_width=60)


BENCHMARK = Benchmark(
    "step",
    make_case,
    dict(values="Qwen2.5-1.5B", B=64, L=CACHED, launch="graph"),
    axes=dict(
        launch=["python"],
        values=["none", "probe 7B", "Qwen2.5-0.5B", "Qwen2.5-3B", "Qwen3-1.7B"],
        B=[1, 8, 256],
        L=[128, 2048, 8192],
    ),
    others=[
        dict(B=1, launch="python"),
        *(dict(values=v, B=B, launch=x) for v in ("none", "probe 7B") for B in (1, 512) for x in ("graph", "python")),
    ],
    quick=[dict(values=values, B=4, L=64) for values in ("SmolLM2-135M", "none", "probe 7B")],
)

if __name__ == "__main__":
    if "--profile" in sys.argv:
        if not torch.cuda.is_available():
            sys.exit("--profile needs a GPU")
        for values, B in (("Qwen2.5-1.5B", 1), ("Qwen2.5-1.5B", 64), ("probe 7B", 64), ("none", 64)):
            print(f"\n{values}, B {B}", profile(values, B), sep="\n", flush=True)
    else:
        BENCHMARK.main(__doc__)
