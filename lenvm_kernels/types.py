"""Named tuples of tensors that operators exchange. Kernels take them as arguments unchanged.

Annotations declare dtypes and shapes (:mod:`lenvm_kernels.ops._spec`); operators check and allocate fields by them.
"""

from enum import IntEnum, IntFlag
from math import inf, nan
from typing import Annotated, NamedTuple, get_type_hints

import torch
from torch import Tensor


class Status(IntEnum):
    """How a request is handled in a decode step."""

    UNGUIDED = 0
    """No guidance, neutral parameters, or broken scores: the request keeps its probabilities and filters."""
    GUIDE = 1
    """The candidates are reweighted by their values."""
    SINGLE = 2
    """Only one candidate is left: it is the next token, and no value is needed."""
    SKIP = 3
    """The candidates' entropy is at or below the threshold: the request keeps its probabilities and filters."""
    NOT_DUE = 4
    """``value_stride`` leaves out this step: the request keeps its probabilities and filters."""


class Mode(IntEnum):
    """How a request's candidates are reweighted. Requests with a target have a mode from ``EQ`` on."""

    UNGUIDED = 0
    MUL = 1
    LINEAR = 2
    EXP = 3
    LENGTH_MUL = 4
    CENTERED_EXP = 5
    VALUE_BIAS = 6
    EQ = 7
    GE = 8
    LE = 9
    EQ_SOFT = 10
    GE_SOFT = 11
    LE_SOFT = 12
    NEAR = 13
    GE_NEAR = 14
    LE_NEAR = 15


class TextBreak(IntFlag):
    """Text unit that a token ends, see :func:`lenvm_kernels.text_breaks_of`. A token can end a sentence and a line."""

    NONE = 0
    LINE = 1
    SENTENCE = 2


class Candidates(NamedTuple):
    """Candidate tokens of ``B`` requests, ``K`` columns each, in descending order of probability.

    Attributes:
        token_ids: int32 ``[B, K]``; -1 in padding.
        probs: fp32 ``[B, K]``; probabilities of the request's softmax, not renormalised; 0 in padding.
        counts: int32 ``[B]``; number of candidates, 0 without guidance.
        status: int8 ``[B]``; a :class:`Status`.
        lost_mass: fp32 ``[B]``; probability mass outside the candidates if ``K`` cut the list short, 0 if the request's
            own filters did. NaN marks broken scores: NaN or +inf among them, no token to choose, or a temperature that
            is not finite.
    """

    token_ids: Annotated[Tensor, "int32 [B, K=2**n]"]
    probs: Annotated[Tensor, "float32 [B, K]"]
    counts: Annotated[Tensor, "int32 [B]"]
    status: Annotated[Tensor, "int8 [B]"]
    lost_mass: Annotated[Tensor, "float32 [B]"]

    @property
    def broken(self) -> Tensor:
        """bool ``[B]``: requests that lost their guidance because of broken scores."""
        return self.lost_mass.isnan()


class DeltaTokens(NamedTuple):
    """Tokens of ``B`` requests that a value-model forward computes and caches, such as prompts.

    Attributes:
        token_ids: int32 or int64 ``[D]``; the tokens of all requests. Tokens that belong to no request are ignored.
        starts: int32 ``[B]``; index in ``token_ids`` of each request's first token.
        lens: int32 ``[B]``; number of tokens of each request, 0 or more, at most ``D`` in total.
        cached_lens: int32 ``[B]``; cached tokens of each request, which is the position of its first delta token.
        table_rows: int32 or int64 ``[B]``; row of each request in the slot table.
    """

    token_ids: Annotated[Tensor, "int [D]"]
    starts: Annotated[Tensor, "int32 [B]"]
    lens: Annotated[Tensor, "int32 [B]"]
    cached_lens: Annotated[Tensor, "int32 [B]"]
    table_rows: Annotated[Tensor, "int [B]"]


class RaggedLayout(NamedTuple):
    """The ``T = D + B * K`` token rows of one value-model forward, and the rows of each request's candidates.

    Request ``i`` owns rows ``q_offsets[i] .. q_offsets[i+1] - 1``. Rows from ``q_offsets[B]`` on are padding.

    Attributes:
        token_ids: int64 ``[T]``; 0 in padding.
        positions: int64 ``[T]``; position in the request's sequence, 0 in padding.
        slots: int64 ``[T]``; cache slot for the key and value of a delta token, -1 for all other rows.
        q_offsets: int32 ``[B+1]``; first row of each request, then the number of rows in use.
        cached_lens: int32 ``[B]``; number of cached tokens before each request's delta.
        candidate_rows: int64 ``[B, K]``; row of each candidate, -1 in padding columns.
        plan: int32 ``[P, 8]``; work list of :func:`value_tree_attention`. The first element is the number of items.
            The next rows are the items, each one split of one query tile: request, table row, first row, new tokens,
            delta tokens, cached tokens, tile, split. All other elements are 0.
        counters: int32 ``[C]``; zeros, as the operators of one forward need them. Each launch restores them.
        parents: int32 ``[T]``; the row of a candidate's parent, -1 for all other rows. None if no candidate has one.
    """

    token_ids: Annotated[Tensor, "int64 [T]"]
    positions: Annotated[Tensor, "int64 [T]"]
    slots: Annotated[Tensor, "int64 [T]"]
    q_offsets: Annotated[Tensor, "int32 [B + 1]"]
    cached_lens: Annotated[Tensor, "int32 [B]"]
    candidate_rows: Annotated[Tensor, "int64 [B, K]"]
    plan: Annotated[Tensor, "int32 [P, 8]"]
    counters: Annotated[Tensor, "int32 [C]"]
    parents: Annotated[Tensor | None, "int32 [T]"] = None


class EmbeddedTokens(NamedTuple):
    """Input of a value model's first layer, for ``T`` tokens.

    Attributes:
        hidden: ``[T, H]``; embeddings.
        square_sums: fp32 ``[ceil(H / 64), T]``; sums of the squared embeddings over groups of 64 columns.
        cos: fp32 ``[T, D / 2]``; cosine of the rotary angles of each token's position.
        sin: fp32 ``[T, D / 2]``; sine of the same angles.
    """

    hidden: Tensor
    square_sums: Tensor
    cos: Tensor
    sin: Tensor


class Drafts(NamedTuple):
    """Draft tokens for the sequences of ``B`` requests, ``D`` columns each: a chain or a tree per request.

    A *node* of a request is a place where a token is drawn: node 0 after the last token of the sequence, node
    ``1 + j`` after draft ``j``.

    Attributes:
        token_ids: int32 or int64 ``[B, D]``. The list ends at the first negative id.
        parents: int32 ``[B, D]``; the earlier column that each draft follows. For any other value (-1), the draft
            follows the last token of the sequence.
    """

    token_ids: Annotated[Tensor, "int [B, D+]"]
    parents: Annotated[Tensor, "int32 [B, D]"]


class Filters(NamedTuple):
    """Sampling filters of ``B`` requests, as in :func:`topk_candidates`. Expanded numbers are accepted.

    Attributes:
        top_k: int32 ``[B]``; tokens to keep, no limit if not positive.
        top_p: fp32 ``[B]``; in (0, 1].
        min_p: fp32 ``[B]``; in [0, 1].
        temperature: fp32 ``[B]``; not read if the scores are probabilities.
    """

    top_k: Annotated[Tensor, "int32 [B]"]
    top_p: Annotated[Tensor, "float32 [B]"]
    min_p: Annotated[Tensor, "float32 [B]"]
    temperature: Annotated[Tensor, "float32 [B]"]


class SpanNodes(NamedTuple):
    """State of the spans at the nodes of ``B`` requests (see :class:`Drafts`; one node per request without drafts).

    Attributes:
        ended: bool ``[B (1 + D)]``; the request uses spans and none is open: the node is not guided.
        generated: int32 ``[B (1 + D)]``; tokens since the span began, or since the prompt for requests without spans.
            0 for missing nodes.
    """

    ended: Annotated[Tensor, "bool [B * (1 + D)]"]
    generated: Annotated[Tensor, "int32 [B * (1 + D)]"]


class StepRequests(NamedTuple):
    """Inputs of a step per node (:class:`Drafts`), for ``N`` requests. Requests from ``B`` on are padding.

    Attributes:
        lengths: int32 ``[N]``; tokens of the sequence; 0 in padding.
        request_rows: int64 ``[N]``; row of the request in the slot table and the guidance table.
        needs_values: bool ``[N]``; the value model reads the sequence: it is guided or ``wants_length``.
        cached_lens: int32 ``[N]``; tokens of the sequence in the value model's cache; 0 in padding.
        draft_ids: int32 ``[N, D]``; the drafts, -1 from the first missing one on.
        draft_parents: int32 ``[N, D]``; the earlier column that each draft follows, or -1.
        positions: int32 ``[N (1 + D)]``; position of the token before the node; -1 in padding.
        table_rows: int64 ``[N (1 + D)]``; row of the request.
        guided: bool ``[N (1 + D)]``; the node is guided.
        wants_length: bool ``[N (1 + D)]``; predicted lengths are requested, or the request is between spans and still
            read.
        generated: int32 ``[N (1 + D)]``; number of generated tokens.
        due: bool ``[N (1 + D)]``; ``value_stride`` includes this step. Other requests are guided only if a candidate
            ends them.
        last_tokens: int32 ``[N (1 + D)]``; the token before the node, -1 if there is none.
        drawn: int32 ``[N (1 + D)]``; token drawn by the caller, negative if there is none.
        top_k: int32 ``[N (1 + D)]``; sampling filter, as in :class:`Filters`. A greedy request keeps all tokens.
        top_p, min_p, temperature: fp32 ``[N (1 + D)]``; sampling filters. A greedy request has temperature 1.
        greedy: bool ``[N (1 + D)]``; the most probable candidate is drawn: the request's ``top_k`` is 1, or its
            temperature is below 1e-6.
    """

    lengths: Annotated[Tensor, "int32 [N]"]
    request_rows: Annotated[Tensor, "int64 [N]"]
    needs_values: Annotated[Tensor, "bool [N]"]
    cached_lens: Annotated[Tensor, "int32 [N]"]
    draft_ids: Annotated[Tensor, "int32 [N, D]"]
    draft_parents: Annotated[Tensor, "int32 [N, D]"]
    positions: Annotated[Tensor, "int32 [N * (1 + D)]"]
    table_rows: Annotated[Tensor, "int64 [N * (1 + D)]"]
    guided: Annotated[Tensor, "bool [N * (1 + D)]"]
    wants_length: Annotated[Tensor, "bool [N * (1 + D)]"]
    generated: Annotated[Tensor, "int32 [N * (1 + D)]"]
    due: Annotated[Tensor, "bool [N * (1 + D)]"]
    last_tokens: Annotated[Tensor, "int32 [N * (1 + D)]"]
    drawn: Annotated[Tensor, "int32 [N * (1 + D)]"]
    top_k: Annotated[Tensor, "int32 [N * (1 + D)]"]
    top_p: Annotated[Tensor, "float32 [N * (1 + D)]"]
    min_p: Annotated[Tensor, "float32 [N * (1 + D)]"]
    temperature: Annotated[Tensor, "float32 [N * (1 + D)]"]
    greedy: Annotated[Tensor, "bool [N * (1 + D)]"]

    @property
    def drafts(self) -> Drafts:
        """The drafts of all ``N`` requests."""
        return Drafts(self.draft_ids, self.draft_parents)


class StepHistory(NamedTuple):
    """State of the requests in ``R`` table rows that persists between steps.

    Attributes:
        step: int64 ``[1]``; number of the next step.
        uncounted: int64 ``[1]``; number of earlier steps that ``value_stride`` does not count.
        tokens: int32 ``[R, M]``; ring buffer of the last tokens: the token at position ``p`` is in column ``p % M``.
        told_lens: int32 ``[R]``; length of the gapless prefix that steps and prompts have passed.
        cached_lens: int32 ``[R]``; tokens of the sequence in the value model's cache.
    """

    step: Annotated[Tensor, "int64 [1]"]
    uncounted: Annotated[Tensor, "int64 [1]"]
    tokens: Annotated[Tensor, "int32 [R, M+]"]
    told_lens: Annotated[Tensor, "int32 [R]"]
    cached_lens: Annotated[Tensor, "int32 [R]"]


class ScoredCandidates(NamedTuple):
    """Candidates that the value model scores in a step, for ``N`` requests including padding.

    Attributes:
        token_ids: int32 ``[N, K]``; -1 in padding.
        counts: int32 ``[N]``; number of leading columns that are scored.
        positions: int32 ``[N]``; the candidates' position in the sequence.
        alone: bool ``[N]``; only the next token is scored, to predict its length. Nothing is reweighted.
    """

    token_ids: Annotated[Tensor, "int32 [N, K=2**n]"]
    counts: Annotated[Tensor, "int32 [N]"]
    positions: Annotated[Tensor, "int32 [N]"]
    alone: Annotated[Tensor, "bool [N]"]


class CandidateTrees(NamedTuple):
    """Trees that the value model computes for ``N`` sequences with drafts: first the drafts, then their candidates.

    ``C = D + (1 + D) K`` columns. A candidate that is also a draft shares the draft's column.

    Attributes:
        token_ids: int32 ``[N, C]``; -1 in padding.
        parents: int32 ``[N, C]``; the column of the draft that each token follows, -1 if it follows the sequence.
        counts: int32 ``[N]``; number of leading columns that are computed.
        positions: int32 ``[N]``; position of the columns without a parent.
        columns: int64 ``[N * (1 + D), K]``; the column of each scored candidate of each node, -1 for other candidates.
    """

    token_ids: Annotated[Tensor, "int32 [N, C]"]
    parents: Annotated[Tensor, "int32 [N, C]"]
    counts: Annotated[Tensor, "int32 [N]"]
    positions: Annotated[Tensor, "int32 [N]"]
    columns: Annotated[Tensor, "int64 [N * (1 + D), K]"]


class DrawnTokens(NamedTuple):
    """Guided probabilities and next tokens of ``B`` requests.

    Attributes:
        guided_probs: fp32 ``[B, K]``; probabilities of the candidates, 0 in padding.
        tokens: int32 ``[B]``; next tokens; negative where neither a candidate was drawn nor a token was passed.
        remaining_lengths: fp32 ``[B]``; predicted number of tokens after ``tokens``. NaN for requests without
            ``return_values``, and for tokens that are not scored.
    """

    guided_probs: Annotated[Tensor, "float32 [B, K]"]
    tokens: Annotated[Tensor, "int32 [B]"]
    remaining_lengths: Annotated[Tensor, "float32 [B]"]


class VerifiedTokens(NamedTuple):
    """New tokens of ``B`` sequences with ``D`` drafts.

    Attributes:
        tokens: int32 ``[B, 1 + D]``; the tokens from column 0 on, then -1.
        lens: int32 ``[B]``; number of tokens.
        nodes: int32 ``[B, 1 + D]``; the node at which each token was drawn, then -1.
    """

    tokens: Annotated[Tensor, "int32 [B, 1 + D]"]
    lens: Annotated[Tensor, "int32 [B]"]
    nodes: Annotated[Tensor, "int32 [B, 1 + D]"]


class Column(NamedTuple):
    """How a column of :class:`GuidanceColumns` is stored.

    Attributes:
        dtype: dtype of the column.
        default: value for requests without the parameter, and padding of lists.
        is_list: whether the column is ``[R, n]`` instead of ``[R]``.
        is_packed: whether the guidance table packs the column into its rows.
    """

    dtype: torch.dtype
    default: float = 0
    is_list: bool = False
    is_packed: bool = True


# -2, because candidates are padded with -1.
_TOKENS = Column(torch.int32, -2, is_list=True)
_INTEGER, _NUMBER, _SWITCH = Column(torch.int32), Column(torch.float32), Column(torch.bool)


class GuidanceColumns(NamedTuple):
    """Guidance parameters of ``R`` requests, one tensor per parameter.

    Attributes:
        seed: int64 ``[R]``; seed of the request's draws.
        scaled_token_ids: int64 ``[R, W]``; tokens with their own temperature, padded with 0.
        token_scales: fp32 ``[R, W]``; factors on the logits of these tokens, padded with 1.
        eos_token_ids: int32 ``[R, E]``; padded with -2.
        span_end_token_ids: int32 ``[R, S]``; tokens that end the guided span, or begin a sequence that ends it; padded
            with -2.
        span_token_ids: int32 ``[R, P]``; the tokens of all sequences that end or begin a span, concatenated
            (:class:`SpanPatterns`); padded with -2.
        closing_token_ids: int32 ``[R, C]``; the tokens that a hard limit forces, in order; padded with -2.
        span_first_bits, span_end_bits, span_start_bits: int32 ``[R]``; bit ``i`` is set if span token ``i`` is the
            first of a sequence, the last of an end sequence, or the last of a start sequence.
        span_seen: int32 ``[R]``; tokens of the sequence that :func:`limit_span` has read. Written by it.
        span_match: int32 ``[R]``; bits of the span tokens that the last token may match. Written by it.
        closing_from: int32 ``[R]``; length of the sequence from which its end is forced, or -1. Written by it.
        mode: int32 ``[R]``; a :class:`Mode`.
        scale: fp32 ``[R]``; scale of the mode, or strength of the constraints ``NEAR``, ``GE_NEAR`` and ``LE_NEAR``.
        nats_per_token: fp32 ``[R]``; ``-ln(gamma)``.
        value_min: fp32 ``[R]``; -inf for no minimum.
        target_length: fp32 ``[R]``; tokens, 0 without a target.
        tolerance: fp32 ``[R]``; tokens; the near constraints treat all lengths within it of the target alike.
        min_end_prob: fp32 ``[R]``; minimum probability at which ``ending_token_ids`` become candidates, inf for never.
        least_share: fp32 ``[R]``; minimum probability of a candidate as a share of the largest probability.
        due_length: fp32 ``[R]``; a total target plus its tolerance, beyond which ``min_end_prob`` falls, or inf.
        entropy_threshold: fp32 ``[R]``; nats, NaN for no threshold.
        answer_length: fp32 ``[R]``; expected tokens after the span.
        target_logit: fp32 ``[R]``; value logit of the target length plus ``answer_length``, at least 8 tokens: the
            value of every candidate without a value model.
        prompt_len: int32 ``[R]``; tokens that do not count as generated. At the start of a span, :func:`limit_span`
            writes the number of tokens before it.
        hard_limit: int32 ``[R]``; generated tokens at which an open span is ended, the largest int32 for no limit.
        hard_limit_grace: int32 ``[R]``; maximum tokens beyond the limit to wait for the end of a line.
        value_stride: int32 ``[R]``; the request is guided at steps whose number is a multiple of it.
        counts_down: bool ``[R]``; whether ``target_length`` is a total.
        return_values: bool ``[R]``; whether predicted lengths are requested.
        allows_eos: bool ``[R]``; whether the sequence may end while its span is open.
        span_ended: bool ``[R]``; no span is open. Written by :func:`limit_span`.
        ending_token_ids: int32 ``[R, E + S]``; view of ``eos_token_ids`` and ``span_end_token_ids``: tokens whose value
            is 0.
        faults: int32 ``[R]``; steps in which the request lost its guidance (see :func:`reweight_scatter`).
    """

    seed: Annotated[Tensor, Column(torch.int64)]
    scaled_token_ids: Annotated[Tensor, Column(torch.int64, is_list=True)]
    token_scales: Annotated[Tensor, Column(torch.float32, 1, is_list=True)]
    eos_token_ids: Annotated[Tensor, _TOKENS]
    span_end_token_ids: Annotated[Tensor, _TOKENS]
    span_token_ids: Annotated[Tensor, _TOKENS]
    closing_token_ids: Annotated[Tensor, _TOKENS]
    span_first_bits: Annotated[Tensor, _INTEGER]
    span_end_bits: Annotated[Tensor, _INTEGER]
    span_start_bits: Annotated[Tensor, _INTEGER]
    span_seen: Annotated[Tensor, _INTEGER]
    span_match: Annotated[Tensor, _INTEGER]
    closing_from: Annotated[Tensor, Column(torch.int32, -1)]
    mode: Annotated[Tensor, _INTEGER]
    scale: Annotated[Tensor, _NUMBER]
    nats_per_token: Annotated[Tensor, _NUMBER]
    value_min: Annotated[Tensor, Column(torch.float32, -inf)]
    target_length: Annotated[Tensor, _NUMBER]
    tolerance: Annotated[Tensor, _NUMBER]
    min_end_prob: Annotated[Tensor, Column(torch.float32, inf)]
    least_share: Annotated[Tensor, _NUMBER]
    due_length: Annotated[Tensor, Column(torch.float32, inf)]
    entropy_threshold: Annotated[Tensor, Column(torch.float32, nan)]
    answer_length: Annotated[Tensor, _NUMBER]
    target_logit: Annotated[Tensor, _NUMBER]
    prompt_len: Annotated[Tensor, _INTEGER]
    hard_limit: Annotated[Tensor, Column(torch.int32, 2**31 - 1)]
    hard_limit_grace: Annotated[Tensor, _INTEGER]
    value_stride: Annotated[Tensor, Column(torch.int32, 1)]
    counts_down: Annotated[Tensor, _SWITCH]
    return_values: Annotated[Tensor, _SWITCH]
    allows_eos: Annotated[Tensor, _SWITCH]
    span_ended: Annotated[Tensor, _SWITCH]
    ending_token_ids: Annotated[Tensor, _TOKENS._replace(is_packed=False)]
    faults: Annotated[Tensor, _INTEGER._replace(is_packed=False)]


# Columns are packed in this order, widest elements first, so that each column is aligned.
GUIDANCE_COLUMNS: dict[str, Column] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(GuidanceColumns, include_extras=True).items()
}
