"""The whole guided step: time against the floor, and beside the decode step of a 7B base model.

    python -m bench.bench_step [--device cpu] [--dtype bfloat16] [--quick] [--json FILE]

The value model has the dimensions of Qwen2.5-1.5B (on a CPU of SmolLM2-135M) and random weights; every request has 512
tokens in its cache, and one more with each step up to 543, when it starts over. The floor counts the tokens that exist:
weights and cached prefixes read once, and the operations of the last tokens and the candidates. Times are of the GPU's
work in a CUDA graph of the whole step; on a CPU of the PyTorch references.
"""

import json
from pathlib import Path

import torch
import torch.nn.functional as F

from bench._common import Case, parse_args, run_cases
from bench._models import forward_floor, make_config, make_model
from lenvm_kernels.guidance import parse_guidance
from lenvm_kernels.paged_slots import PagedSlots
from lenvm_kernels.step import GuidedStep
from lenvm_kernels.value_model import KVCache, RaggedBatch, ValueModel

VOCAB = 151_936
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
    """A batch of requests in the middle of their outputs; calling it is one guided step."""

    def __init__(self, model: ValueModel, counts: torch.Tensor, *, commit_winners: bool) -> None:
        rows, device = len(counts), model.device
        slots = PagedSlots(rows, CACHED + MORE_CACHED, device=device)
        self.step = GuidedStep(
            model, slots.table, slots.num_slots, vocab_size=VOCAB, commit_winners=commit_winners, graphs=False
        )
        for row in range(rows):
            slots.extend(row, CACHED + MORE_CACHED)
            self.step.set(row, parse_guidance({"value_mode": "mul", "value_scale": 0.8}), {0})
        self.slots, self.counts = slots, counts
        self.rows = torch.arange(rows, device=device)
        self.lengths = torch.full((rows,), CACHED + 1, dtype=torch.int32, device=device)
        # A row's candidates are its first tokens, equally likely; the next token is always the first one.
        self.scores = torch.full((rows, VOCAB), -1e4, device=device)
        first = 1000 * torch.arange(rows)
        for row, count in enumerate(counts.tolist()):
            self.scores[row, first[row] : first[row] + count] = 0.0
        self.tokens = first.to(device)
        self.filters = dict(
            top_k=torch.full((rows,), TOP_K, dtype=torch.int32, device=device),
            top_p=torch.ones(rows, device=device),
            min_p=torch.full((rows,), 0.01, device=device),
        )

    def __call__(self) -> None:
        slots = self.slots.slots(self.rows, self.lengths - 1)
        self.step.step(
            self.scores, self.tokens, self.rows, self.lengths, slots, **self.filters, is_logits=True, sample=True
        )
        self.lengths.copy_(torch.where(self.lengths < CACHED + MORE_CACHED, self.lengths + 1, CACHED + 1))

    def floor(self) -> tuple[int, int]:
        """(bytes, operations) of a step that computes each row's last token and its candidates, if it has several."""
        scored = int(self.counts[self.counts > 1].sum())
        rows, model = len(self.counts), self.step.value_model
        moved, operations = forward_floor(model.config, model.dtype, rows + scored, scored, rows, CACHED)
        return moved + self.scores.nbytes, operations


class Dense:
    """One forward of exactly so many tokens and no candidates, spread over requests with ``CACHED`` tokens each."""

    def __init__(self, model: ValueModel, requests: int, tokens: int, *, lm_head_rows: int = 0) -> None:
        device, dtype, config = model.device, model.dtype, model.config
        i32 = dict(dtype=torch.int32, device=device)
        lens = torch.full((requests,), tokens // requests, **i32)
        lens[: tokens % requests] += 1
        longest = -(-tokens // requests)
        slots = PagedSlots(requests, CACHED + longest, device=device)
        for row in range(requests):
            slots.extend(row, CACHED + longest)
        rows = torch.arange(requests, device=device)
        starts = lens.cumsum(0, dtype=torch.int32) - lens
        row_of = rows.repeat_interleave(lens)
        position = CACHED + torch.arange(tokens, device=device) - starts[row_of]
        self.model, self.cache = model, KVCache.of_slots(model, slots.num_slots)
        self.batch = RaggedBatch.build(
            torch.arange(tokens, device=device),
            slots.slots(row_of, position),
            starts,
            lens,
            torch.empty(requests, 0, **i32),
            torch.zeros(requests, **i32),
            torch.full((requests,), CACHED, **i32),
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
        moved, operations = forward_floor(self.model.config, self.model.dtype, tokens, 0, requests, CACHED)
        return moved + self.lm_head.nbytes, operations + 2 * tokens * self.lm_head.numel()


def make_cases(device: str, dtype: torch.dtype, quick: bool) -> list[Case]:
    """The step at B 64 and 256, what it costs beside a dense forward of as many tokens, and beside a base model."""
    name = "Qwen2.5-1.5B" if device == "cuda" else "SmolLM2-135M"
    model = make_model(make_config(name, vocab_size=VOCAB if device == "cuda" else 2**16), dtype, device)
    cases = []

    def add(case: str, run: Decode | Dense) -> None:
        cases.append(Case(f"{name}, {case}", run, *run.floor()))

    sizes = (4, 4) if quick else (64, 256) if device == "cuda" else (16, 64)
    for rows, distribution in zip(sizes, ("full", "SmolLM2"), strict=True):
        counts = candidate_counts(rows, distribution)
        for commit_winners in (True, False):
            case = f"step B {rows} {distribution} counts, winners {'committed' if commit_winners else 'computed'}"
            add(case, Decode(model, counts, commit_winners=commit_winners))
        tokens = rows + int(counts[counts > 1].sum())
        add(f"dense forward of {tokens} tokens", Dense(model, rows, tokens))
    if device == "cuda" and not quick:
        base_config = make_config("Qwen2.5-7B", vocab_size=2**16)
        base = Dense(make_model(base_config, dtype, device), 64, 64, lm_head_rows=VOCAB)
        guided = Decode(model, candidate_counts(64, "full"), commit_winners=True)
        moved, operations = (sum(pair) for pair in zip(base.floor(), guided.floor(), strict=True))
        cases.append(Case("7B base decode B 64", base, *base.floor()))
        cases.append(Case("7B base decode B 64 and step", lambda: (base(), guided()), moved, operations))
    return cases


if __name__ == "__main__":
    args = parse_args(__doc__)
    run_cases("step", make_cases(args.device, args.dtype, args.quick), args)
