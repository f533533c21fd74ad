"""Fit of a trunk: the distribution of remaining lengths from a base model's states and a candidate's embedding.

The loss is the negative log-likelihood of the bin of the remaining length, or of all later bins if the answer was cut.
The base model runs once over every answer and is not changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoConfig

from lenvm_kernels.adapters.settings import NONE
from lenvm_kernels.adapters.trunk_states import TrunkStates
from lenvm_kernels.demo.models import Models, locate, source_of
from lenvm_kernels.ops.candidate_values import MAX_BINS
from lenvm_kernels.training.answers import Answer
from lenvm_kernels.training.settings import Fitting
from lenvm_kernels.training.targets import Example
from lenvm_kernels.value_model.trunk import TrunkConfig, embedding_hash, write_trunk

# Single-token bins up to this length; every later bin is wider by a constant factor.
SINGLES = 6
# The last bin ends at this multiple of the longest answer, and holds the tails of cut answers.
BEYOND = 1.5
# Widths of scale, shift and embedding, and of the hidden layer. Larger networks overfit: SmolLM2's with 512 and 256 has a
# lower loss on training prompts and a higher one on held-out prompts.
SIZE, OUTPUTS = 128, 128
DROPOUT, WARM_UP, WEIGHT_DECAY, ROWS_PER_STEP = 0.3, 0.1, 0.02, 4096
# Rows that means and deviations are measured on, and rows of a forward without gradient.
STANDARDIZED, MEASURED_AT_ONCE = 50_000, 16_384


def edges_of(longest: int) -> tuple[int, ...]:
    """Bin edges for answers of at most ``longest`` tokens, see :class:`TrunkConfig`."""
    last = max(math.ceil(BEYOND * longest), 2)
    singles = list(range(1, min(SINGLES, last - 1) + 1))
    factor = 1.18
    while True:
        edges = list(singles)
        # The last bin is at least as wide as the one before it.
        while factor * (step := max(edges[-1] + 1, round(factor * edges[-1]))) < last:
            edges.append(step)
        if len(edges) <= MAX_BINS:
            return *edges, last
        factor *= 1.05


class Rows(NamedTuple):
    """Training data of a trunk, a row per token of an answer.

    Attributes:
        states: ``[N, L H]`` in the base model's dtype, states of the layers before the token.
        token_ids: int64 ``[N]``.
        remaining: int64 ``[N]``, known number of tokens after the token, end-of-sequence included; at least 1.
        is_cut: bool ``[N]``, whether the answer was cut, so that more tokens would follow.
    """

    states: Tensor
    token_ids: Tensor
    remaining: Tensor
    is_cut: Tensor

    def split(self, order: Tensor, count: int) -> Iterator[Rows]:
        """The rows at the indices ``order``, ``count`` at a time."""
        return (Rows(*(column[part] for column in self)) for part in order.split(count))


def tokens_valued(answer: Answer) -> range:
    """Indices of the tokens of an answer that become rows.

    The last token has nothing after it. In a guided answer the first row is the last guided token.
    """
    return range(max(answer.guided - 1, 0), len(answer.ids) - 1)


@torch.no_grad()
def rows_of(models: Models, layers: tuple[int, ...], examples: Sequence[Example], most: float = math.inf) -> Rows:
    """Run the base model over answers.

    Args:
        models: the base model.
        layers: layers whose states are read, see :class:`TrunkConfig`.
        examples: the answers.
        most: approximate maximum number of rows, drawn by torch's default generator.
    """
    decoder, kept = models.model.get_decoder(), TrunkStates(models.model, layers, last=False)
    forward_tokens = 1536 if models.model.device.type == "cpu" else 16384
    sequences = [[*example.prompt, *example.answer.ids] for example in examples]
    share = most / max(1, sum(len(tokens_valued(example.answer)) for example in examples))
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
                answer, tokens = examples[i].answer, torch.tensor(tokens_valued(examples[i].answer), dtype=torch.int64)
                if share < 1:
                    tokens = tokens[torch.rand(len(tokens)) < share]
                remaining, is_cut = len(answer.ids) - 1 - tokens, torch.full(tokens.shape, not answer.finished)
                before = states[len(examples[i].prompt) + tokens - 1]
                found[i] = Rows(before, torch.tensor(answer.ids)[tokens], remaining, is_cut)
                bar.update(len(sequences[i]))
    return Rows(*map(torch.cat, zip(*(found[i] for i in range(len(examples))), strict=True)))


class TrunkHead(nn.Module):
    """The network of a trunk with standardized states and embeddings, and dropout on the states.

    Args:
        states: ``[N, L H]``, rows that the standardization is measured on.
        embedding: input embedding of the base model, ``[V, H]``.
        bins: number of bins.
    """

    states_mean: Tensor
    states_deviation: Tensor
    embeddings_mean: Tensor
    embeddings_deviation: Tensor

    def __init__(self, states: Tensor, embedding: Tensor, bins: int) -> None:
        super().__init__()
        self.projection = nn.Linear(states.shape[1], 2 * SIZE)
        self.embedding = nn.Linear(embedding.shape[1], SIZE, bias=False)
        self.fc = nn.Linear(SIZE, OUTPUTS)
        self.bins = nn.Linear(OUTPUTS, bins)
        nn.init.zeros_(self.bins.weight)
        for name, x in (("states", states), ("embeddings", embedding)):
            x = x.float()
            self.register_buffer(f"{name}_mean", x.mean(0))
            self.register_buffer(f"{name}_deviation", x.std(0, correction=0).clamp(min=1e-3))

    def forward(self, states: Tensor, embeddings: Tensor) -> Tensor:
        """Logits ``[N, bins]`` of states ``[N, L H]`` and the tokens' embeddings ``[N, H]``."""
        states = F.dropout((states.float() - self.states_mean) / self.states_deviation, DROPOUT, self.training)
        embeddings = (embeddings.float() - self.embeddings_mean) / self.embeddings_deviation
        scale, shift = self.projection(states).chunk(2, dim=1)
        return self.bins(F.silu(self.fc(F.silu(shift + (1 + scale) * self.embedding(embeddings)))))

    @torch.no_grad()
    def tensors(self) -> dict[str, Tensor]:
        """Tensors for :class:`Trunk`, on the CPU, with the standardization folded in."""
        of_states = self.projection.weight / self.states_deviation
        projection_bias = self.projection.bias - of_states @ self.states_mean
        projection_bias[:SIZE] += 1
        of_embeddings = self.embedding.weight / self.embeddings_deviation
        found = {
            "projection.weight": of_states,
            "projection.bias": projection_bias,
            "embedding.weight": of_embeddings,
            "embedding.bias": -of_embeddings @ self.embeddings_mean,
            "fc.weight": self.fc.weight,
            "fc.bias": self.fc.bias,
            "bins.weight": self.bins.weight,
            "bins.bias": self.bins.bias,
        }
        return {name: tensor.detach().cpu() for name, tensor in found.items()}


def likelihood(logits: Tensor, remaining: Tensor, is_cut: Tensor, edges: Tensor) -> Tensor:
    """Negative log-likelihood of remaining lengths, ``[N]``.

    Args:
        logits: ``[N, bins]``.
        remaining, is_cut: as in :class:`Rows`.
        edges: ``[bins + 1]``.
    """
    log_probs = logits.log_softmax(dim=1)
    bins = logits.shape[1]
    bin_of = (torch.bucketize(remaining, edges, right=True) - 1).clamp(max=bins - 1)
    later = torch.arange(bins, device=logits.device) >= bin_of[:, None]
    some_later = log_probs.masked_fill(~later, -math.inf).logsumexp(dim=1)
    return -torch.where(is_cut, some_later, log_probs.gather(1, bin_of[:, None])[:, 0])


def fit_head(head: TrunkHead, rows: Rows, embedding: Tensor, edges: Sequence[int], how: Fitting) -> list[float]:
    """Train a head in place, on its device.

    Args:
        head: the head.
        rows: the training data.
        embedding: input embedding of the base model, ``[V, H]``.
        edges: bin edges.
        how: epochs and learning rate.

    Returns:
        Mean negative log-likelihood per epoch.

    Raises:
        ValueError: a loss is not finite.
    """
    device, count = head.bins.weight.device, len(rows.token_ids)
    optimizer = torch.optim.AdamW(head.parameters(), lr=how.learning_rate, weight_decay=WEIGHT_DECAY)
    steps = max(2, how.epochs * math.ceil(count / ROWS_PER_STEP))
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, how.learning_rate, total_steps=steps, pct_start=WARM_UP)
    of_bins = torch.tensor(edges, device=device)
    found: list[float] = []
    with tqdm(total=how.epochs * count, desc="fit", unit="token", unit_scale=True) as bar:
        for _ in range(how.epochs):
            total = 0.0
            for part in rows.split(torch.randperm(count), ROWS_PER_STEP):
                with torch.autocast(device.type, torch.bfloat16):
                    logits = head(part.states.to(device), embedding[part.token_ids.to(device)])
                loss = likelihood(logits.float(), part.remaining.to(device), part.is_cut.to(device), of_bins).mean()
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


@torch.no_grad()
def values_of(head: TrunkHead, rows: Rows, embedding: Tensor, edges: Sequence[int], gamma: float) -> Tensor:
    """Mean values of rows, fp32 ``[N]`` on the CPU; a bin counts with its middle length."""
    head.eval()
    device = head.bins.weight.device
    at = torch.tensor(edges, dtype=torch.float32, device=device)
    of_bins = 1 - gamma ** ((at[:-1] + at[1:] - 1) / 2)
    found = [
        head(part.states.to(device), embedding[part.token_ids.to(device)]).softmax(1) @ of_bins
        for part in rows.split(torch.arange(len(rows.token_ids)), MEASURED_AT_ONCE)
    ]
    return torch.cat(found).cpu()


def check_base(name: str, layers: tuple[int, ...] | None) -> Path:
    """Locate a base model that has the layers.

    Raises:
        ValueError, OSError: there is no such model or layer; the message names the flag.
    """
    path = locate("BASE", name)
    count = AutoConfig.from_pretrained(**source_of(path)).get_text_config().num_hidden_layers
    if layers is not None and max(layers) > count:
        raise ValueError(f"--layers must be at most the {count} layers of {name!r}, got {max(layers)}")
    return path


def fit_trunk(
    how: Fitting,
    base: str,
    training: Sequence[Example],
    held_out: Sequence[Sequence[Example]],
    gamma: float,
    output: Path,
) -> tuple[dict[str, Any], list[list[Tensor]]]:
    """Train a trunk and write it to ``output / "value"``.

    Args:
        how: the settings.
        base: name of the base model.
        training: the training examples.
        held_out: lists of examples to predict.
        gamma: discount of the values.
        output: the directory.

    Returns:
        Facts for the report, and the values of every held-out example.

    Raises:
        ValueError: no training example has a row, or a loss is not finite.
    """
    if not training:
        raise ValueError("--answers must have answers of two tokens or more to training prompts, got none")
    models = Models.load(base, NONE, device=how.device, dtype=getattr(torch, how.dtype), names=("BASE", "--value"))
    torch.manual_seed(how.seed)
    num_layers, embedding = models.of_trunk()
    edges = edges_of(max(len(example.answer.ids) for example in training))
    config = TrunkConfig(
        base=base,
        layers=how.layers or (num_layers,),
        num_layers=num_layers,
        hidden_size=embedding.shape[1],
        vocab_size=len(embedding),
        embedding_hash=embedding_hash(embedding),
        bin_edges=edges,
    )
    rows = rows_of(models, config.layers, training, how.states)
    sampled = torch.randperm(len(rows.token_ids))[:STANDARDIZED]
    head = TrunkHead(rows.states[sampled], embedding, len(edges) - 1).to(how.device)
    losses = fit_head(head, rows, embedding, edges, how)
    write_trunk(config, head.tensors(), gamma, output / "value")
    values: list[list[Tensor]] = []
    for examples in held_out:
        counts = [len(example.targets) for example in examples]
        found = values_of(head, rows_of(models, config.layers, examples), embedding, edges, gamma) if examples else None
        values.append([] if found is None else list(found.split(counts)))
    facts = {
        "rows": len(rows.token_ids),
        "negative log-likelihood": losses,
        "parameters": sum(parameter.numel() for parameter in head.parameters()),
    }
    return facts, values
