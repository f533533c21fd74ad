"""The end of a step in plain PyTorch: guided probabilities, next tokens, and predicted lengths.

Sums have the dtype of the probabilities and follow the order of the columns, and the generator computes with integers,
so the kernel draws the same token from the same fp32 probabilities.
"""

import torch
from torch.nn.functional import softplus

from lenvm_kernels.reference._common import compute_dtype
from lenvm_kernels.reference.reweight_scatter import reweight_scatter, target_logits
from lenvm_kernels.types import Candidates, DrawnTokens, GuidanceColumns, ScoredCandidates, Status, StepRequests

_WORD = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10


def draw(
    candidates: Candidates,
    value_logits: torch.Tensor | None,  # [B, K]
    table: GuidanceColumns,
    requests: StepRequests,  # [B]
    scored: ScoredCandidates,  # [B, K]
    predicted: torch.Tensor | None,  # [B, K]
    drawn: torch.Tensor | None,  # [B]
    text_breaks: torch.Tensor | None,  # [S]
    sample: bool,
) -> DrawnTokens:
    """See :func:`lenvm_kernels.ops.draw.draw`."""
    table_rows = requests.table_rows
    options = dict(table_rows=table_rows, generated=requests.generated, text_breaks=text_breaks)
    guided_probs = reweight_scatter(candidates, value_logits, table, **options)
    tokens = torch.full_like(candidates.token_ids[:, 0], -1) if drawn is None else drawn
    if sample:
        own = draw_tokens(candidates, guided_probs, table.seed[table_rows], scored.positions, requests.greedy)
        tokens = torch.where(own >= 0, own, tokens)

    column = torch.arange(guided_probs.shape[1], device=tokens.device)
    is_token = (column < scored.counts[:, None]) & (scored.token_ids == tokens[:, None])
    if predicted is None:
        predicted = target_logits(candidates, table, table_rows)
    z = torch.where(is_token, predicted.to(compute_dtype(predicted, guided_probs)), 0.0).sum(1)
    is_end = (table.eos_token_ids[table_rows] == tokens[:, None]).any(1)
    lengths = torch.where(is_end, 0.0, softplus(z) / table.nats_per_token[table_rows])
    is_wanted = requests.wants_length & table.return_values[table_rows] & is_token.any(1)
    return DrawnTokens(guided_probs, tokens, torch.where(is_wanted, lengths, torch.nan))


def draw_tokens(
    candidates: Candidates,
    guided_probs: torch.Tensor,  # [B, K]
    seeds: torch.Tensor,  # [B]
    positions: torch.Tensor,  # [B]
    greedy: torch.Tensor | None = None,  # [B]
) -> torch.Tensor:
    """int32 ``[B]``: tokens drawn from the candidates with the weights ``guided_probs``, or -1."""
    p, cumulative, total = guided_probs, torch.zeros_like(guided_probs), torch.zeros_like(guided_probs[:, 0])
    for i in range(p.shape[1]):  # the order and precision of cumsum are not specified
        total = total + p[:, i]
        cumulative[:, i] = total

    beyond = cumulative > (uniform(seeds, positions).to(p.dtype) * total)[:, None]
    first_beyond = beyond.int().argmax(dim=1)  # argmax returns the first maximum
    columns = torch.arange(p.shape[1], device=p.device)
    last = torch.where(p > 0, columns, -1).amax(dim=1)
    column = torch.where(beyond.any(dim=1), first_beyond, last)
    if greedy is not None:
        column = torch.where(greedy, p.argmax(dim=1), column)

    status = candidates.status
    drawn = (last >= 0) & ((status == Status.GUIDE) | (status == Status.SINGLE))
    token = candidates.token_ids.gather(1, column.clamp(min=0)[:, None])[:, 0]
    return torch.where(drawn, token, -1)


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """fp32 multiples of 2^-24 in [0, 1): the upper 24 bits of the first Philox word for each seed and position."""
    zero = torch.zeros_like(seeds)
    counter = *_words(positions.long()), zero, zero
    return (philox4x32(counter, _words(seeds))[0] >> 8).float() * 2.0**-24


def philox4x32(counter: tuple[torch.Tensor, ...], key: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Philox4x32-10 of four counter words and two key words; every word is an int64 in [0, 2^32)."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(_ROUNDS):
        (high0, low0), (high1, low1) = _multiply(_MULTIPLIERS[0], c0), _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def _words(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The low and high 32 bits of an int64."""
    return x & _WORD, (x >> 32) & _WORD


def _multiply(a: int, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The high and low word of the product of two words, computed by halves so that no part exceeds 2^49."""
    low_part = a * (b & 0xFFFF)
    high_part = a * (b >> 16) + (low_part >> 16)
    return high_part >> 16, ((high_part & 0xFFFF) << 16) | (low_part & 0xFFFF)
