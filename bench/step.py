"""The whole guided step: time against the floor, beside the two-forward baseline, and beside a 7B base model's step.

    python -m bench.step [--device cpu] [--dtype bfloat16] [--quick] [--json FILE]

Value models have real dimensions and random weights; every request has L tokens in its cache, and one more with each
step up to L + 31, when it starts over. The floor counts the tokens that exist: weights and cached prefixes read once,
and the operations of the candidates and of the last tokens that are computed. Cases:

- ``launch graph``: the GPU's work, the whole step in one CUDA graph. ``launch python``: as an engine calls it, with the
  value model in graphs and the rest launched from Python; the comparison with the two-forward baseline, which waits
  for the host and can be in no graph.
- ``counts``: candidates of a row, five each or as SmolLM2 has them.
- ``base Qwen2.5-7B``: a base model's decode step and then the guided one; both alone are its peers.
- the peer "(dense forward)" is the value model's forward of as many tokens and nothing else.
"""

import json
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F

from bench.baselines.two_forward import TwoForwardStep
from bench.harness.cases import Benchmark, Case
from bench.harness.measuring import Uncaptured
from bench.models import VOCAB, forward_floor, make_config, make_model
from lenvm_kernels.guidance import parse_guidance
from lenvm_kernels.paged_slots import PagedSlots
from lenvm_kernels.step import GuidedStep, Sampling, StepBatch, StepConfig, StepOutput
from lenvm_kernels.value_model import KVCache, RaggedBatch, ValueModel

CACHED, MORE_CACHED = 512, 32
TOP_K = 5
COUNTS = Path(__file__).parent / "results" / "candidate_counts.json"


def candidate_counts(rows: int, distribution: str) -> torch.Tensor:
    """Candidates of each row, int64 ``[rows]``: ``full`` gives all rows ``TOP_K``, ``SmolLM2`` its measured shares."""
    if distribution == "full":
        return torch.full((rows,), TOP_K)
    shares = torch.tensor(list(json.loads(COUNTS.read_text())["share_of_steps_by_count"].values()))
    # The shares' quantiles instead of a random draw: no luck, and the same tokens in every run.
    places = (torch.arange(rows) + 0.5) / rows
    return (torch.searchsorted(shares.cumsum(0), places) + 1).clamp(max=TOP_K)


class Decode:
    """A batch of requests in the middle of their outputs; calling it is one guided step.

    Args:
        model: the value model.
        counts: candidates of each row, int64 ``[rows]``.
        cached: tokens that each request has in its cache at first.
        vocab_size: of the scores.
        two_forwards: take the step with :class:`TwoForwardStep`.
        options: of :class:`StepConfig`.
    """

    def __init__(
        self,
        model: ValueModel,
        counts: torch.Tensor,
        *,
        cached: int = CACHED,
        vocab_size: int = VOCAB,
        two_forwards: bool = False,
        **options: object,
    ) -> None:
        rows, device = len(counts), model.device
        slots = PagedSlots(rows, cached + MORE_CACHED, device=device)
        config = StepConfig(vocab_size=vocab_size, **{"graphs": False, **options})
        self.step = (TwoForwardStep if two_forwards else GuidedStep)(model, slots, config)
        for row in range(rows):
            slots.extend(row, cached + MORE_CACHED)
            self.step.add_request(row, parse_guidance({"value_mode": "mul", "value_scale": 0.8}), {0})
        self.slots, self.counts, self.cached = slots, counts, cached
        self.options = options
        self.rows = torch.arange(rows, device=device)
        self.lengths = torch.full((rows,), cached + 1, dtype=torch.int32, device=device)
        # A row's candidates are its first tokens, equally likely; the next token is always the first one.
        self.scores = torch.randn(rows, vocab_size, device=device)
        first = 1000 * torch.arange(rows) % vocab_size
        for row, count in enumerate(counts.tolist()):
            self.scores[row, first[row] : first[row] + count] = 30.0
        self.tokens = first.to(device)
        top_k = torch.full((rows,), TOP_K, dtype=torch.int32, device=device)
        min_p = torch.full((rows,), 0.01, device=device)
        self.sampling = Sampling(top_k, torch.ones(rows, device=device), min_p, is_logits=True, sample=True)
        if two_forwards:
            prompts = torch.randint(vocab_size, (rows * cached,), device=device)
            zeros = torch.zeros_like(self.lengths)
            self.step.extend(prompts, None, self.rows, cached * self.rows, zeros + cached, zeros)
        else:
            fill(self.step.cache)
            none, zeros = self.tokens[:0], torch.zeros_like(self.lengths)
            self.step.extend(none, none, self.rows, zeros, zeros, zeros + cached)

    def __call__(self, **options: object) -> StepOutput:
        batch = StepBatch(self.tokens, self.rows, self.lengths)
        output = self.step.step(self.scores, batch, self.sampling, **options)
        self.lengths.copy_(torch.where(self.lengths < self.cached + MORE_CACHED, self.lengths + 1, self.cached + 1))
        return output

    def check(self) -> None:
        """Take a step, and see that it is the one to be timed."""
        counts = self().candidates.counts.cpu()
        if not torch.equal(counts.long(), self.counts) or self.step.table.columns.faults.any():
            raise ValueError(f"the step has other candidates than it should, or faults: {counts.tolist()}")

    def num_tokens(self) -> int:
        """Tokens that a step computes: the last one of each request, and candidates where there are several."""
        return len(self.counts) + int(self.counts[self.counts > 1].sum())

    def floor(self) -> tuple[int, int]:
        """(bytes, operations) of a step."""
        model, scored = self.step.value_model, int(self.counts[self.counts > 1].sum())
        sizes = (self.num_tokens(), scored, len(self.counts), self.cached)
        moved, operations = forward_floor(model.config, model.dtype, *sizes)
        return moved + self.scores.nbytes, operations


class Dense:
    """One forward of exactly so many tokens and no candidates, spread over requests with ``cached`` tokens each."""

    def __init__(
        self, model: ValueModel, requests: int, tokens: int, *, cached: int = CACHED, lm_head_rows: int = 0
    ) -> None:
        device, dtype, config = model.device, model.dtype, model.config
        i32 = dict(dtype=torch.int32, device=device)
        lens = torch.full((requests,), tokens // requests, **i32)
        lens[: tokens % requests] += 1
        longest = -(-tokens // requests)
        slots = PagedSlots(requests, cached + longest, device=device)
        for row in range(requests):
            slots.extend(row, cached + longest)
        rows = torch.arange(requests, device=device)
        starts = lens.cumsum(0, dtype=torch.int32) - lens
        row_of = rows.repeat_interleave(lens)
        position = cached + torch.arange(tokens, device=device) - starts[row_of]
        self.model, self.cache, self.cached = model, KVCache.of_slots(model, slots.num_slots), cached
        fill(self.cache)
        self.batch = RaggedBatch.build(
            torch.arange(tokens, device=device),
            slots.slots(row_of, position),
            starts,
            lens,
            torch.empty(requests, 0, **i32),
            torch.zeros(requests, **i32),
            torch.full((requests,), cached, **i32),
            slots.table,
            rows,
        )
        self.lm_head = torch.randn(lm_head_rows, config.hidden_size, dtype=dtype, device=device)
        self.hidden = torch.randn(tokens, config.hidden_size, dtype=dtype, device=device)

    def __call__(self) -> None:
        self.model.forward(self.batch, self.cache)
        if len(self.lm_head):
            F.linear(self.hidden, self.lm_head)

    def floor(self) -> tuple[int, int]:
        """(bytes, operations) of the forward, and of the projection to the vocabulary if there is one."""
        tokens, requests = len(self.hidden), len(self.batch.table_rows)
        moved, operations = forward_floor(self.model.config, self.model.dtype, tokens, 0, requests, self.cached)
        return moved + self.lm_head.nbytes, operations + 2 * tokens * self.lm_head.numel()


def fill(cache: KVCache) -> None:
    """Random keys and values: zeros would be faster than real ones."""
    for layer in (*cache.keys, *cache.values):
        layer.copy_(torch.randn(layer.shape, device=layer.device))


@cache
def value_model(name: str, dtype: torch.dtype, device: str, vocab_size: int) -> ValueModel:
    """The model, made once for all cases."""
    return make_model(make_config(name, vocab_size=vocab_size), dtype, device)


def make_case(device: str, *, model: str, B: int, L: int, counts: str, launch: str, base: str, dtype: str) -> Case:
    dtype, vocab = getattr(torch, dtype), VOCAB if device == "cuda" else 2**16
    model, counts = value_model(model, dtype, device, vocab), candidate_counts(B, counts)
    guided = Decode(model, counts, cached=L, graphs=launch == "python" and device == "cuda")
    guided.check()
    moved, operations = guided.floor()
    if base != "none":
        base = Dense(value_model(base, dtype, device, 2**16), B, B, cached=L, lm_head_rows=VOCAB)
        moved, operations = (sum(pair) for pair in zip(base.floor(), (moved, operations), strict=True))
        peers = {"(base alone)": lambda: base, "(step alone)": lambda: guided}
        return Case(lambda: (base(), guided()), moved, operations, peers)
    peers = {
        "two forwards": lambda: Uncaptured(Decode(model, counts, cached=L, two_forwards=True)),
        "(dense forward)": lambda: Dense(model, B, guided.num_tokens(), cached=L),
    }
    return Case(Uncaptured(guided) if launch == "python" else guided, moved, operations, peers)


BENCHMARK = Benchmark(
    "step",
    make_case,
    production=dict(model="Qwen2.5-1.5B", B=64, L=CACHED, counts="full", launch="graph", base="none"),
    axes=dict(
        launch=["python"],
        base=["Qwen2.5-7B"],
        counts=["SmolLM2"],
        B=[256, 1, 8, 512],
        L=[2048, 128, 8192],
        model=["Qwen2.5-0.5B", "Qwen2.5-3B", "Qwen3-1.7B"],
    ),
    others=[
        dict(B=256, counts="SmolLM2"),
        dict(B=256, launch="python"),
        dict(B=1, launch="python"),
        dict(base="Qwen2.5-7B", B=256),
        dict(base="Qwen2.5-7B", B=8),
    ],
    quick=(dict(model="SmolLM2-135M", B=4, L=64), dict(counts="SmolLM2")),
)

if __name__ == "__main__":
    BENCHMARK.main()
