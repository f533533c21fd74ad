"""Candidate extraction and choice of the scored candidates, in plain PyTorch."""

import torch

from lenvm_kernels.reference._common import breaks_of, compute_dtype
from lenvm_kernels.types import Candidates, GuidanceColumns, ScoredCandidates, Status, StepRequests, TextBreak

# A row below this temperature is greedy, as in SGLang: its only candidate is the most probable token.
GREEDY_TEMPERATURE = 1e-6
# Past the due length, the minimum probability of an end halves with each tenth of that length. From 1.5 times the due
# length on, it halves with each hundredth, because such outputs rarely end by themselves. The factor is at least
# 2^-120.
HALVINGS, MOST_HALVINGS = 10.0, 120.0
OVERDUE, HALVINGS_OVERDUE = 0.5, 100.0
# Factors on the minimum probability of an end, by whether the last token ended a sentence or a line.
AFTER_SENTENCE, AFTER_LINE, WITHIN_LINE = 1e-4, 0.1, 100.0


def topk_candidates(
    scores: torch.Tensor,  # [B, V]
    *,
    top_k: torch.Tensor,  # [B]
    top_p: torch.Tensor,  # [B]
    min_p: torch.Tensor,  # [B]
    max_candidates: int,
    temperature: torch.Tensor | None,  # [B]
    is_logits: bool,
    guided: torch.Tensor | None,  # [B]
    vocab_mask: torch.Tensor | None,  # [B, ceil(V / 32)]
    table: GuidanceColumns | None,  # R requests; columns that are not read may be missing
    table_rows: torch.Tensor | None,  # [B]
    generated: torch.Tensor | None,  # [B]
    text_breaks: torch.Tensor | None,  # [S]
    last_tokens: torch.Tensor | None,  # [B]
    requests: StepRequests | None,  # [N]
    drawn: torch.Tensor | None,  # [B]
    sample: bool,
    score_all: bool,
    step: torch.Tensor | None,  # [1]
    scored: ScoredCandidates | None,  # [N, K]
) -> Candidates:
    """See :func:`lenvm_kernels.ops.topk_candidates.topk_candidates`."""
    dtype, device = compute_dtype(scores), scores.device
    rows, vocab = scores.shape
    nothing = -torch.inf if is_logits else 0.0  # the score of a token that cannot be a candidate
    x = scores.to(dtype)
    if not is_logits:
        x = x.clamp(min=0)
    if vocab_mask is not None:
        token = torch.arange(vocab, device=device)
        allowed = (vocab_mask[:, token // 32] >> (token % 32)) & 1
        x = torch.where(allowed.bool(), x, nothing)

    # One more token than K shows whether K truncates the list.
    columns = max_candidates + 1
    listed = min(columns, vocab)
    highest, token = x.topk(listed, dim=1)
    top, last = highest[:, 0], highest[:, -1:]
    if ((x >= last).sum(dim=1) > listed).any():
        # torch.topk does not specify which of equal scores it returns, so take all above the last score, then the first
        # ones equal to it. This is 7 times faster than a stable sort of 4 x 151,936 scores.
        in_order = vocab - torch.arange(vocab, device=device)
        priority = torch.where(x > last, vocab + 1, torch.where(x == last, in_order, 0))
        token = priority.topk(listed, dim=1).indices
    token = token.sort(dim=1).values

    broken = ~top.isfinite() | (top == nothing)  # topk ranks NaN highest
    if temperature is None:
        temperature = torch.ones(rows, device=device)
    broken |= ~temperature.isfinite()
    greedy = temperature < GREEDY_TEMPERATURE
    t = torch.where(greedy | broken, 1.0, temperature.to(dtype))
    p = torch.softmax(x / t[:, None], dim=1) if is_logits else x
    score, order = x.gather(1, token).sort(dim=1, descending=True, stable=True)
    token = token.gather(1, order)
    score = torch.nn.functional.pad(score, (0, columns - listed), value=nothing)
    token = torch.nn.functional.pad(token, (0, columns - listed))
    q = torch.where(score > nothing, p.gather(1, token), 0.0)

    of_row = torch.arange(rows, device=device) if table_rows is None else table_rows.long()
    if table is not None:
        min_p = torch.maximum(min_p, table.least_share[of_row])
    limit = torch.where((top_k <= 0) | (top_k >= vocab), vocab, top_k.long())
    limit = torch.where(greedy, 1, limit)
    column = torch.arange(columns, device=device)
    mass_before = torch.nn.functional.pad(q.cumsum(dim=1)[:, :-1], (1, 0))
    keep = (column < limit[:, None]) & (score > nothing)
    keep &= (mass_before <= top_p[:, None].to(dtype)) & (q >= min_p[:, None].to(dtype) * q[:, :1])
    keep[:, 0] = True
    keep &= ~broken[:, None]
    if guided is not None:
        keep &= guided[:, None]
        broken &= guided
    if table is not None:
        ending, min_end_prob = table.ending_token_ids[of_row].long(), table.min_end_prob[of_row]
        least = min_end_prob.to(dtype)
        if text_breaks is not None and last_tokens is not None:
            by_bits = [WITHIN_LINE, AFTER_LINE, AFTER_SENTENCE, AFTER_SENTENCE]
            scales = torch.tensor(by_bits, dtype=dtype, device=device)
            ended = breaks_of(last_tokens, text_breaks) & (TextBreak.LINE | TextBreak.SENTENCE)
            least = least * scales[ended]
        if generated is not None:
            late = (generated.to(dtype) / table.due_length[of_row].to(dtype).clamp(min=1) - 1).clamp(min=0)
            halvings = HALVINGS * late.clamp(max=OVERDUE) + HALVINGS_OVERDUE * (late - OVERDUE).clamp(min=0)
            least = least * torch.exp2(-halvings.clamp(max=MOST_HALVINGS))
        ends = ends_among_candidates(x, p, ending, least, nothing, max_candidates)
        ends = torch.where(keep[:, :1], ends, -1)  # only rows with candidates
        # The most probable of the first K tokens that does not end the output is kept.
        goes_on = (token[:, :, None] != ending[:, None, :]).all(dim=2) & (score > nothing)
        goes_on &= keep[:, :1] & (min_end_prob < torch.inf)[:, None]
        is_improbable = (min_end_prob < torch.inf)[:, None] & (q < least[:, None])
        keep[:, :-1] &= ~(is_improbable & (token[:, :, None] == ending[:, None, :]).any(dim=2))[:, :-1]
        keep[:, :-1] |= (goes_on & (goes_on.cumsum(dim=1) == 1))[:, :-1]
        is_other = keep & ~(token[:, :, None] == ends[:, None, :]).any(dim=2)
        room = max_candidates - (ends >= 0).sum(dim=1, keepdim=True)
        others = is_other & (is_other.cumsum(dim=1) <= room) & (column < max_candidates)
        cut_by_columns = keep[:, -1] | (is_other & ~others).any(dim=1)
        token = torch.cat([torch.where(others, token, -1), ends], dim=1).sort(dim=1).values
        score = torch.where(token >= 0, x.gather(1, token.clamp(min=0)), -torch.inf)
        token = token.gather(1, score.sort(dim=1, descending=True, stable=True).indices)[:, :max_candidates]
        keep, q = token >= 0, p.gather(1, token.clamp(min=0))
    else:
        cut_by_columns = keep[:, -1]
        keep, q, token = keep[:, :-1], q[:, :-1], token[:, :-1]

    q, token = torch.where(keep, q, 0.0), torch.where(keep, token, -1)
    counts = keep.sum(dim=1)
    kept_mass = q.sum(dim=1)
    lost_mass = torch.where(cut_by_columns, p.sum(dim=1) - kept_mass, 0.0)
    lost_mass = torch.where(broken, torch.nan, lost_mass)

    status = torch.where(counts > 0, int(Status.GUIDE), int(Status.UNGUIDED))
    if table is not None:
        entropy = torch.special.entr(q / kept_mass[:, None]).sum(dim=1)
        is_low = entropy <= table.entropy_threshold[of_row]
        status = torch.where((counts > 1) & is_low, int(Status.SKIP), status)
    status = torch.where(counts == 1, int(Status.SINGLE), status)
    candidates = Candidates(token.int(), q, counts.int(), status.to(torch.int8), lost_mass)
    if table is None or requests is None or scored is None:
        return candidates
    if step is not None and len(scores) > 0:
        step += 1
    ending = table.ending_token_ids[of_row]
    return choose_scored(candidates, requests, ending, drawn=drawn, sample=sample, score_all=score_all, scored=scored)


def choose_scored(
    candidates: Candidates,  # [B, K]
    requests: StepRequests,  # [B]
    ending_token_ids: torch.Tensor,  # [B, E]
    *,
    drawn: torch.Tensor | None,  # [B]
    sample: bool,
    score_all: bool,
    scored: ScoredCandidates,  # [B, K]
) -> Candidates:
    """Write the candidates that the value model scores, and return the candidates with the status ``NOT_DUE``."""
    token_ids, counts = candidates.token_ids, candidates.counts
    is_end = (token_ids[:, :, None] == ending_token_ids[:, None]).any(2) & (token_ids >= 0)
    is_left_out = (candidates.status == Status.GUIDE) & ~requests.due & ~is_end.any(1)
    status = candidates.status.masked_fill(is_left_out, int(Status.NOT_DUE))
    is_guide = status == Status.GUIDE
    next_tokens = torch.full_like(counts, -1) if drawn is None else drawn
    if sample:
        next_tokens = torch.where(status == Status.SINGLE, token_ids[:, 0], next_tokens)
    alone = requests.wants_length & ~is_guide & (next_tokens >= 0)
    scored.token_ids.copy_(token_ids)
    scored.token_ids[:, 0] = torch.where(alone, next_tokens, token_ids[:, 0])
    scored.counts.copy_(torch.where(alone, 1, counts if score_all else torch.where(is_guide, counts, 0)))
    scored.positions.copy_(requests.positions + 1)
    scored.alone.copy_(alone)
    return candidates._replace(status=status)


def ends_among_candidates(
    x: torch.Tensor, p: torch.Tensor, ends: torch.Tensor, least: torch.Tensor, nothing: float, max_candidates: int
) -> torch.Tensor:
    """The ``ends [B, E]`` that are candidates regardless of the filters, because their probability is at least
    ``least [B]``; else -1. They take at most all columns except one, the most probable first."""
    is_token = (ends >= 0) & (ends < x.shape[1])
    token = torch.where(is_token, ends, 0)
    score = x.gather(1, token)
    again = (ends[:, :, None] == ends[:, None, :]).tril(-1).any(dim=2)
    allowed = is_token & ~again & (score > nothing) & (p.gather(1, token) >= least[:, None])
    is_higher, is_equal = score[:, None, :] > score[:, :, None], score[:, None, :] == score[:, :, None]
    ahead = is_higher | (is_equal & (token[:, None, :] < token[:, :, None]))
    rank = (ahead & allowed[:, None, :]).sum(dim=2)
    return torch.where(allowed & (rank < max_candidates - 1), token, -1)
