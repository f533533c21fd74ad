"""Trains a probe: the distribution of remaining lengths, given a base model's states and a candidate's embedding.

The loss is the negative log-likelihood of the bin of the remaining length, or of all later bins if the answer was cut.
The base model runs once over every answer and is not changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from lenvm_kernels.engines.probe_states import ProbeStates, base_of_probe
from lenvm_kernels.engines.settings import NONE
from lenvm_kernels.loading.models import Models
from lenvm_kernels.ops.candidate_values import MAX_BINS
from lenvm_kernels.train.answers import Examples
from lenvm_kernels.train.settings import Fitting
from lenvm_kernels.values.probe import ProbeConfig, embedding_signs, write_probe

# Ratio of neighboring bin edges, and of the last edge to the longest answer; tails of cut answers are in the last bin.
GROWTH, BEYOND = 1.18, 1.5
# Widths of scale, shift and embedding, and of the hidden layer. Larger networks overfit (docs/training.md).
SIZE, OUTPUTS = 128, 128
DROPOUT, WARM_UP, WEIGHT_DECAY, ROWS_PER_STEP = 0.3, 0.1, 0.02, 4096
# Rows for the measurement of means and deviations, and rows of a forward without gradient.
STANDARDIZED, MEASURED_AT_ONCE = 50_000, 16_384


def edges_of(longest: int) -> tuple[int, ...]:
    """Bin edges for answers of at most ``longest`` tokens, as in :class:`ProbeConfig`."""
    last = max(math.ceil(BEYOND * longest), 2)
    count = min(MAX_BINS, math.ceil(math.log(last, GROWTH)))
    return tuple(np.unique(np.geomspace(1, last, count + 1).round().astype(int)).tolist())


class Rows(NamedTuple):
    """Training data of a probe, a row per token of an answer."""

    states: Tensor  # [N, L H] in the base model's dtype, states of the layers before the token
    token_ids: Tensor  # int64 [N]
    remaining: Tensor  # int64 [N], known number of tokens after the token, end-of-sequence included; at least 1
    is_cut: Tensor  # bool [N], whether the answer was cut, so that more tokens would follow

    def split(self, order: Tensor, count: int) -> Iterator[Rows]:
        """The rows at the indices ``order``, ``count`` at a time."""
        return (Rows(*(column[part] for column in self)) for part in order.split(count))


@torch.no_grad()
def rows_of(models: Models, layers: tuple[int, ...], examples: Examples, most: float = math.inf) -> Rows:
    """Run the base model over answers, and keep about ``most`` rows, drawn with torch's default generator.

    A row is a token after which an answer has a target.
    """
    decoder, kept = models.model.get_decoder(), ProbeStates(models.model, layers, last=False)
    forward_tokens = 1536 if models.model.device.type == "cpu" else 16384
    sequences = [[*example.prompt, *example.answer.ids] for example in examples]
    share = most / sum(len(example.targets) for example in examples)
    order = sorted(range(len(examples)), key=lambda i: len(sequences[i]))
    found: dict[int, Rows] = {}
    with tqdm(total=sum(map(len, sequences)), desc="states", unit="token", unit_scale=True) as bar:
        while order:
            longest = len(sequences[order[-1]])
            count = max(1, forward_tokens // longest)
            batch, order = order[-count:], order[:-count]
            padded = [sequences[i] + [0] * (longest - len(sequences[i])) for i in batch]
            decoder(input_ids=torch.tensor(padded, device=models.model.device), use_cache=False)
            for states, i in zip(kept.take().cpu(), batch, strict=True):
                answer = examples[i].answer
                tokens = torch.arange(len(answer.ids) - 1)[-len(examples[i].targets) :]
                if share < 1:
                    tokens = tokens[torch.rand(len(tokens)) < share]
                remaining, is_cut = len(answer.ids) - 1 - tokens, torch.full(tokens.shape, not answer.finished)
                before = states[len(examples[i].prompt) + tokens - 1]
                found[i] = Rows(before, torch.tensor(answer.ids)[tokens], remaining, is_cut)
                bar.update(len(sequences[i]))
    return Rows(*map(torch.cat, zip(*(found[i] for i in range(len(examples))), strict=True)))


class StandardizedLinear(nn.Linear):
    """A linear layer with dropout. Inputs are standardized with the mean and deviation of a sample ``x [N, K]``."""

    mean: Tensor
    std: Tensor

    def __init__(self, x: Tensor, outputs: int, dropout: float = 0.0) -> None:
        super().__init__(x.shape[1], outputs)
        self.dropout = dropout
        self.register_buffer("mean", x.float().mean(0))
        self.register_buffer("std", x.float().std(0, correction=0).clamp(min=1e-3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout((x.float() - self.mean) / self.std, self.dropout, self.training))

    @torch.no_grad()
    def folded(self) -> tuple[Tensor, Tensor]:
        """Weight and bias of the layer for raw inputs, fp32."""
        weight = self.weight / self.std
        return weight, self.bias - weight @ self.mean


@torch.no_grad()
def stored_tensors(network: nn.Module) -> dict[str, Tensor]:
    """Weights and biases of a network's layers for raw inputs, on the CPU."""
    tensors: dict[str, Tensor] = {}
    for name, layer in network.named_children():
        folded: Any = layer.folded() if isinstance(layer, StandardizedLinear) else (layer.weight, layer.bias)
        for kind, tensor in zip(("weight", "bias"), folded, strict=True):
            tensors[f"{name}.{kind}"] = tensor.detach().cpu().contiguous()
    return tensors


class ProbeHead(nn.Module):
    """The network of a probe, standardized with sample states ``[N, L H]`` and the embedding ``[V, H]``."""

    table: Tensor
    edges: Tensor

    def __init__(self, states: Tensor, embedding: Tensor, edges: Sequence[int]) -> None:
        super().__init__()
        self.register_buffer("table", embedding)
        self.register_buffer("edges", torch.tensor(edges))
        self.projection = StandardizedLinear(states, 2 * SIZE, DROPOUT)
        self.embedding = StandardizedLinear(embedding.cpu(), SIZE)
        self.fc = nn.Linear(SIZE, OUTPUTS)
        self.bins = nn.Linear(OUTPUTS, len(edges) - 1)
        nn.init.zeros_(self.bins.weight)

    def forward(self, rows: Rows) -> Tensor:
        """Logits fp32 ``[N, bins]``."""
        scale, shift = self.projection(rows.states.to(self.edges.device)).chunk(2, dim=1)
        embedded = self.embedding(self.table[rows.token_ids.to(self.edges.device)])
        return self.bins(F.silu(self.fc(F.silu(shift + (1 + scale) * embedded)))).float()

    @torch.no_grad()
    def values(self, rows: Rows, gamma: float) -> Tensor:
        """Mean values fp32 ``[N]`` on the CPU; each bin is represented by its middle length."""
        self.eval()
        of_bins = 1 - gamma ** ((self.edges[:-1] + self.edges[1:] - 1) / 2)
        parts = rows.split(torch.arange(len(rows.token_ids)), MEASURED_AT_ONCE)
        return torch.cat([self(part).softmax(1) @ of_bins for part in parts]).cpu()


def likelihood(logits: Tensor, remaining: Tensor, is_cut: Tensor, edges: Tensor) -> Tensor:
    """Negative log-likelihood ``[N]`` of remaining lengths, given logits ``[N, bins]`` and ``edges [bins + 1]``."""
    log_probs = logits.log_softmax(dim=1)
    bins = logits.shape[1]
    bin_of = (torch.bucketize(remaining, edges, right=True) - 1).clamp(max=bins - 1)
    later = torch.arange(bins, device=logits.device) >= bin_of[:, None]
    some_later = log_probs.masked_fill(~later, -math.inf).logsumexp(dim=1)
    return -torch.where(is_cut, some_later, log_probs.gather(1, bin_of[:, None])[:, 0])


def fit_head(head: ProbeHead, rows: Rows, how: Fitting) -> list[float]:
    """Train a head in place, and return the mean negative log-likelihood per epoch."""
    device, count = head.edges.device, len(rows.token_ids)
    optimizer = torch.optim.AdamW(head.parameters(), lr=how.learning_rate, weight_decay=WEIGHT_DECAY)
    steps = max(2, how.epochs * math.ceil(count / ROWS_PER_STEP))
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, how.learning_rate, total_steps=steps, pct_start=WARM_UP)
    found: list[float] = []
    with tqdm(total=how.epochs * count, desc="fit", unit="token", unit_scale=True) as bar:
        for _ in range(how.epochs):
            total = 0.0
            for part in rows.split(torch.randperm(count), ROWS_PER_STEP):
                with torch.autocast(device.type, torch.bfloat16):
                    logits = head(part)
                loss = likelihood(logits, part.remaining.to(device), part.is_cut.to(device), head.edges).mean()
                optimizer.zero_grad()
                loss.backward()
                number = float(loss.detach())
                if not math.isfinite(number):
                    raise ValueError(f"the loss is {number}, --learning-rate must be lower than {how.learning_rate}")
                optimizer.step()
                rate.step()
                total += number * len(part.token_ids)
                bar.update(len(part.token_ids))
            found.append(total / count)
            bar.set_postfix(loss=found[-1])
    return found


def fit_probe(
    how: Fitting, base: str, training: Examples, held_out: Sequence[Examples], gamma: float, output: Path
) -> tuple[dict[str, Any], list[Tensor]]:
    """Train a probe and write it to ``output / "value"``; return facts for the report, and the held-out values."""
    if not training:
        raise ValueError("--answers must have answers of two tokens or more to training prompts, got none")
    models = Models.load(base, NONE, device=how.device, dtype=getattr(torch, how.dtype), names=("BASE", "--value"))
    torch.manual_seed(how.seed)
    num_layers, embedding = base_of_probe(models.model)
    edges = edges_of(max(len(example.answer.ids) for example in training))
    config = ProbeConfig(
        base=base,
        layers=tuple(how.layers or [num_layers]),
        num_layers=num_layers,
        hidden_size=embedding.shape[1],
        vocab_size=len(embedding),
        embedding_signs=embedding_signs(embedding),
        bin_edges=edges,
    )
    rows = rows_of(models, config.layers, training, how.states)
    sampled = torch.randperm(len(rows.token_ids))[:STANDARDIZED]
    head = ProbeHead(rows.states[sampled], embedding, edges).to(how.device)
    losses = fit_head(head, rows, how)
    tensors = stored_tensors(head)
    tensors["projection.bias"][:SIZE] += 1  # LengthProbe does not add the 1 to the scale
    write_probe(config, tensors, gamma, output / "value")
    facts = {
        "rows": len(rows.token_ids),
        "negative log-likelihood": losses,
        "parameters": sum(parameter.numel() for parameter in head.parameters()),
    }
    return facts, [head.values(rows_of(models, config.layers, examples), gamma) for examples in held_out]
