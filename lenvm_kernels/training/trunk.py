"""Fitting a trunk: what a base model's states say of the lengths that came out of its own answers.

A head learns how the tokens after each token of an answer are distributed, from the states before the token and from
its embedding: by the likelihood of the bin in which the number of them lies, or of all later bins where the answer was
cut. The base model runs once over every answer, and stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from lenvm_kernels.adapters.trunk_states import TrunkStates
from lenvm_kernels.loading.models import Models
from lenvm_kernels.ops.candidate_values import MAX_BINS
from lenvm_kernels.training.answers import Answer
from lenvm_kernels.value_model.trunk import TrunkConfig, embedding_hash

# Bins of one token up to here; then each is wider than the one before it by the same factor.
SINGLES = 6
# What the last bin stands for, answers that were cut: so many times the longest.
BEYOND = 1.5
# Numbers of the head: of scale, shift and embeddings, and of its hidden layer. Larger heads learn the prompts by heart:
# with 512 and 256 SmolLM2's is likelier on training prompts, and less likely on others.
SIZE, OUTPUTS = 128, 128
DROPOUT, WARM_UP, WEIGHT_DECAY = 0.3, 0.1, 0.02
# Rows that means and deviations of states are measured on, and rows of a forward of the head that is not trained.
STANDARDISED, MEASURED_AT_ONCE = 50_000, 16_384


def edges_of(longest: int) -> tuple[int, ...]:
    """Edges of bins for answers of so many tokens at most, see :class:`TrunkConfig`."""
    last = max(math.ceil(BEYOND * longest), 2)
    singles = list(range(1, min(SINGLES, last - 1) + 1))
    factor = 1.18
    while True:
        edges = list(singles)
        # No last bin that is narrower than the one before it.
        while factor * (step := max(edges[-1] + 1, round(factor * edges[-1]))) < last:
            edges.append(step)
        if len(edges) <= MAX_BINS:
            return *edges, last
        factor *= 1.05


@dataclass(frozen=True)
class Rows:
    """What a trunk learns from, a token of an answer each.

    Attributes:
        states: ``[N, L H]``, in the base model's dtype; what the layers said before the token.
        token_ids: int64 ``[N]``.
        remaining: int64 ``[N]``; tokens after it, at least one, the end-of-sequence token included. Of an answer that
            was cut, those that are known.
        is_cut: bool ``[N]``; there are more than that.
        answers: int64 ``[N]``; which answer the token is of.
    """

    states: Tensor
    token_ids: Tensor
    remaining: Tensor
    is_cut: Tensor
    answers: Tensor

    def __len__(self) -> int:
        return len(self.token_ids)

    def of(self, chosen: Tensor) -> Rows:
        """Some of them, by their places or by a mask."""
        return Rows(*(getattr(self, field.name)[chosen] for field in fields(self)))


def tokens_valued(answer: Answer) -> range:
    """Which tokens of an answer have a value: all after which the base model went on alone, but for the last one.

    Of an answer that guidance has begun, the first is the last token that guidance chose.
    """
    return range(max(answer.guided - 1, 0), len(answer.ids) - 1)


@torch.no_grad()
def rows_of(
    models: Models,
    layers: tuple[int, ...],
    answers: Sequence[tuple[Sequence[int], Answer]],
    *,
    most: int,
    forward_tokens: int,
) -> Rows:
    """Run the base model over answers.

    Args:
        models: the base model.
        layers: as of :class:`TrunkConfig`.
        answers: each with the tokens of its prompt.
        most: rows to keep, about so many drawn by torch's generator if there are more.
        forward_tokens: of a forward at most, padding counted, if an answer is not longer.
    """
    decoder, kept = models.model.get_decoder(), TrunkStates(models.model, layers, last=False)
    valued = [torch.tensor(list(tokens_valued(answer)), dtype=torch.int64) for _, answer in answers]
    share = most / max(1, sum(map(len, valued)))
    sequences = [[*prompt, *answer.ids] for prompt, answer in answers]
    order = sorted(range(len(answers)), key=lambda i: len(sequences[i]))
    found: list[Rows] = []
    with tqdm(total=len(answers), desc="states", unit="answer") as bar:
        while order:
            longest = len(sequences[order[-1]])
            count = max(1, forward_tokens // longest)
            batch, order = order[-count:], order[:-count]
            padded = [sequences[i] + [0] * (longest - len(sequences[i])) for i in batch]
            decoder(input_ids=torch.tensor(padded, device=models.model.device), use_cache=False)
            states = kept.take().cpu()
            for place, i in enumerate(batch):
                (prompt, answer), tokens = answers[i], valued[i]
                if share < 1:
                    tokens = tokens[torch.rand(len(tokens)) < share]
                found.append(
                    Rows(
                        states[place, len(prompt) + tokens - 1],
                        torch.tensor(answer.ids)[tokens],
                        len(answer.ids) - 1 - tokens,
                        torch.full(tokens.shape, not answer.finished),
                        torch.full_like(tokens, i),
                    )
                )
            bar.update(len(batch))
    found.sort(key=lambda rows: int(rows.answers[0]) if len(rows) else -1)
    return Rows(*(torch.cat([getattr(rows, field.name) for rows in found]) for field in fields(Rows)))


class TrunkHead(nn.Module):
    """The network of a trunk as it is trained: states and embeddings are standardised, states drop out.

    Args:
        states: some of those that it is trained on.
        embedding: of the base model, ``[V, H]``.
        bins: N.
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
        """Logits of the bins ``[N, bins]``, of states ``[N, L H]`` and their tokens' embeddings ``[N, H]``."""
        states = F.dropout((states.float() - self.states_mean) / self.states_deviation, DROPOUT, self.training)
        embeddings = (embeddings.float() - self.embeddings_mean) / self.embeddings_deviation
        scale, shift = self.projection(states).chunk(2, dim=1)
        return self.bins(F.silu(self.fc(F.silu(shift + (1 + scale) * self.embedding(embeddings)))))

    @torch.no_grad()
    def tensors(self) -> dict[str, Tensor]:
        """The same network as :class:`Trunk` takes it, on the CPU."""
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
    """``-ln p`` of what is known of the lengths, ``[N]``.

    Args:
        logits: of the bins, ``[N, bins]``.
        remaining, is_cut: as of :class:`Rows`.
        edges: ``[bins + 1]``.
    """
    log_probs = logits.log_softmax(dim=1)
    bins = logits.shape[1]
    bin_of = (torch.bucketize(remaining, edges, right=True) - 1).clamp(max=bins - 1)
    later = torch.arange(bins, device=logits.device) >= bin_of[:, None]
    some_later = log_probs.masked_fill(~later, -math.inf).logsumexp(dim=1)
    return -torch.where(is_cut, some_later, log_probs.gather(1, bin_of[:, None])[:, 0])


@dataclass(frozen=True)
class TrunkSchedule:
    """How long and how fast.

    Attributes:
        epochs: times that every row is seen, at most: what is kept is the best of them on held-out prompts.
        learning_rate: the highest.
        rows: of a step.
    """

    epochs: int
    learning_rate: float
    rows: int


def fit_trunk(
    head: TrunkHead, training: Rows, held_out: Rows, embedding: Tensor, edges: Sequence[int], how: TrunkSchedule
) -> list[dict[str, float | None]]:
    """Train a head, in place.

    Args:
        head: on the device that computes; rows are taken there.
        training, held_out: what it learns from, and what chooses the epoch whose weights are kept. Without rows held
            out that is the last.
        embedding: of the base model, ``[V, H]``.
        edges: of the bins.
        how: the schedule.

    Returns:
        Of each epoch, and before the first of them, ``training`` and ``held_out``: the mean of ``-ln p``.

    Raises:
        ValueError: a loss is no finite number.
    """
    device, count = head.bins.weight.device, len(training)
    optimizer = torch.optim.AdamW(head.parameters(), lr=how.learning_rate, weight_decay=WEIGHT_DECAY)
    steps = how.epochs * math.ceil(count / how.rows)
    rate = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, how.learning_rate, total_steps=max(2, steps), pct_start=WARM_UP
    )
    of_bins = torch.tensor(edges, device=device)

    def loss_of(rows: Rows) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            logits = head(rows.states.to(device), embedding[rows.token_ids.to(embedding.device)].to(device))
        return likelihood(logits.float(), rows.remaining.to(device), rows.is_cut.to(device), of_bins).mean()

    @torch.no_grad()
    def of_held_out() -> float | None:
        head.eval()
        if len(held_out) == 0:
            return None
        parts = [held_out.of(part) for part in torch.arange(len(held_out)).split(MEASURED_AT_ONCE)]
        return sum(float(loss_of(part)) * len(part) for part in parts) / len(held_out)

    found: list[dict[str, float | None]] = []
    best, weights = math.inf, None
    with tqdm(total=steps, desc="fit", unit="step") as bar:
        for _ in range(how.epochs):
            head.train()
            total = 0.0
            for part in torch.randperm(count).split(how.rows):
                loss = loss_of(training.of(part))
                optimizer.zero_grad()
                loss.backward()
                number = float(loss.detach())
                if not math.isfinite(number):
                    raise ValueError(f"the loss of step {bar.n + 1} is {number}; a lower --learning-rate may help")
                optimizer.step()
                rate.step()
                total += number * len(part)
                bar.update()
            measured = of_held_out()
            found.append({"training": total / count, "held_out": measured})
            bar.set_postfix(found[-1])
            if measured is None or measured < best:
                best = math.inf if measured is None else measured
                weights = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    if weights is not None:
        head.load_state_dict(weights)
    return found


@torch.no_grad()
def values_of(head: TrunkHead, rows: Rows, embedding: Tensor, edges: Sequence[int], gamma: float) -> Tensor:
    """The mean values of rows, fp32 ``[N]`` on the CPU: bins count with their middle lengths."""
    head.eval()
    device = head.bins.weight.device
    at = torch.tensor(edges, dtype=torch.float32, device=device)
    of_bins = 1 - gamma ** ((at[:-1] + at[1:] - 1) / 2)
    found = [
        head(part.states.to(device), embedding[part.token_ids.to(embedding.device)].to(device)).softmax(1) @ of_bins
        for part in (rows.of(part) for part in torch.arange(len(rows)).split(MEASURED_AT_ONCE))
    ]
    return torch.cat(found).cpu()


def config_of(models: Models, base: str, layers: tuple[int, ...], edges: tuple[int, ...]) -> TrunkConfig:
    """Of a trunk for a base model."""
    num_layers, embedding = models.of_trunk()
    return TrunkConfig(
        base=base,
        layers=layers,
        num_layers=num_layers,
        hidden_size=embedding.shape[1],
        vocab_size=len(embedding),
        embedding_hash=embedding_hash(embedding),
        bin_edges=edges,
    )
