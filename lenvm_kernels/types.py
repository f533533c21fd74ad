"""What operators pass each other, as tuples of tensors: kernels take them as they are."""

from enum import IntEnum, IntFlag
from math import inf, nan
from typing import Annotated, NamedTuple, get_type_hints

import torch
from torch import Tensor


class Status(IntEnum):
    """What becomes of a request in a decode step."""

    UNGUIDED = 0
    """No guidance asked, neutral parameters, or broken scores: the request keeps its probabilities and filters."""
    GUIDE = 1
    """The candidates are to be reweighted by their values."""
    SINGLE = 2
    """One candidate is left: it is the answer, no value is needed."""
    SKIP = 3
    """The candidates' entropy is at or below the request's threshold: it keeps its probabilities and filters."""
    NOT_DUE = 4
    """The step is none of those that the request is guided at: it keeps its probabilities and filters."""


class Mode(IntEnum):
    """How a request's candidates are reweighted. A target makes it one of those from ``EQ`` on."""

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
    """What ends with a token, see :func:`lenvm_kernels.text_breaks_of`. A token can end a sentence and its line."""

    NONE = 0
    LINE = 1
    SENTENCE = 2


class Candidates(NamedTuple):
    """Candidate tokens of ``B`` requests, ``K`` columns each, in descending order of probability.

    Attributes:
        token_ids: int32 ``[B, K]``; -1 pads.
        probs: fp32 ``[B, K]``; the request's softmax itself, not renormalised; 0 pads.
        counts: int32 ``[B]``; candidates of the request, 0 without guidance.
        status: int8 ``[B]``; a :class:`Status`.
        lost_mass: fp32 ``[B]``; probability mass outside the candidates where it was ``K``, not the request's own
            filters, that ended the list (else 0). NaN marks broken scores: NaN or +inf among them, nothing to choose
            from, or a temperature that is not finite.
    """

    token_ids: Tensor
    probs: Tensor
    counts: Tensor
    status: Tensor
    lost_mass: Tensor

    @property
    def broken(self) -> Tensor:
        """bool ``[B]``: requests that lost their guidance because of their scores. Sum it to count them."""
        return self.lost_mass.isnan()


class RaggedLayout(NamedTuple):
    """The ``T = D + B * K`` token rows of one value-model forward, and where each request's candidates are among them.

    Request ``i`` owns the rows ``q_offsets[i] .. q_offsets[i+1] - 1``. Those from ``q_offsets[B]`` on are padding.

    Attributes:
        token_ids: int64 ``[T]``; 0 in padding.
        positions: int64 ``[T]``; position in the request's sequence, 0 in padding.
        slots: int64 ``[T]``; cache slot that keeps the key and value of a delta token, -1 for every other row.
        q_offsets: int32 ``[B+1]``; first row of each request, then the number of rows in use.
        candidate_rows: int64 ``[B, K]``; row of each candidate, -1 in padding columns.
        head_rows: int64 ``[B*K]``; the rows of all candidates in the order of the requests, then -1.
        head_targets: int64 ``[B*K]``; a permutation of ``0 .. B*K - 1``: where what the value head makes of each of the
            ``head_rows`` belongs in a ``[B, K]``. Its padding goes to the padding columns, in their order.
        parents: int32 ``[T]``; of trees, the row of a candidate's parent, -1 for every other row; else None.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    q_offsets: Tensor
    candidate_rows: Tensor
    head_rows: Tensor
    head_targets: Tensor
    parents: Tensor | None = None


class EmbeddedTokens(NamedTuple):
    """What the layers of a value model start from, for ``T`` tokens.

    Attributes:
        hidden: ``[T, H]``; embeddings.
        square_sums: fp32 ``[ceil(H / 64), T]``; sums of their squares over groups of 64 columns.
        cos: fp32 ``[T, D / 2]``; of the angles of each token's position.
        sin: fp32 ``[T, D / 2]``.
    """

    hidden: Tensor
    square_sums: Tensor
    cos: Tensor
    sin: Tensor


class SpanNodes(NamedTuple):
    """Where spans stand at the nodes of ``B`` requests (:class:`Drafts`; without drafts each has one).

    Attributes:
        ended: bool ``[B (1 + D)]``; the request has a span, and none is open: nothing is to be guided there.
        generated: int32 ``[B (1 + D)]``; tokens since the span began, of requests without one since their prompts. 0
            where there is no node.
    """

    ended: Tensor
    generated: Tensor


class StepRequests(NamedTuple):
    """What a step has to know of its ``B`` requests, in tensors of ``N`` rows; those from ``B`` on are padding.

    Attributes:
        positions: int32 ``[N]``; position of the last token of the sequence; -1 in padding.
        table_rows: int64 ``[N]``; row of the request in the slot table and the guidance table.
        guided: bool ``[N]``; it has guidance.
        wants_length: bool ``[N]``; it asks for predicted lengths, or is between two spans and has to be read on.
        entropy_threshold: fp32 ``[N]``; nats, NaN for none.
        generated: int32 ``[N]``; tokens generated.
        seeds: int64 ``[N]``; of its draws.
        due: bool ``[N]``; it is guided at this step whatever its candidates are.
        cached_lens: int32 ``[N]``; tokens of its sequence that the value model has; 0 in padding.
    """

    positions: Tensor
    table_rows: Tensor
    guided: Tensor
    wants_length: Tensor
    entropy_threshold: Tensor
    generated: Tensor
    seeds: Tensor
    due: Tensor
    cached_lens: Tensor


class StepHistory(NamedTuple):
    """What a step leaves to the next of the requests in ``R`` table rows.

    Attributes:
        step: int64 ``[1]``; number of the step that comes.
        uncounted: int64 ``[1]``; how many before it are none that a ``value_stride`` counts.
        tokens: int32 ``[R, M]``; the last tokens of its sequence: the one at position ``p`` in column ``p % M``.
        told_lens: int32 ``[R]``; tokens of its sequence that steps or prompts have told, without a gap.
        cached_lens: int32 ``[R]``; tokens of its sequence that the value model has: these are in its cache.
    """

    step: Tensor
    uncounted: Tensor
    tokens: Tensor
    told_lens: Tensor
    cached_lens: Tensor


class ScoredCandidates(NamedTuple):
    """What the value model computes in a step, for ``N`` requests, padding included.

    Attributes:
        token_ids: int32 ``[N, K]``; -1 pads.
        counts: int32 ``[N]``; the first so many columns are scored.
        positions: int32 ``[N]``; the candidates' position in the sequence.
        alone: bool ``[N]``; the only token scored is the next one, for its length: nothing is to be reweighted.
    """

    token_ids: Tensor
    counts: Tensor
    positions: Tensor
    alone: Tensor


class Drafts(NamedTuple):
    """Tokens that may come next in the sequences of ``B`` requests, ``D`` columns each: a chain or a tree.

    The *nodes* of a request are where a token is to be drawn: node 0 after the last token of its sequence, node
    ``1 + j`` after draft ``j``.

    Attributes:
        token_ids: int32 or int64 ``[B, D]``; from column 0 on, negative from the first that is not there.
        parents: int32 ``[B, D]``; the column of the draft that each follows, an earlier one. Anything else (-1): it
            follows the last token of the sequence.
    """

    token_ids: Tensor
    parents: Tensor


class CandidateTrees(NamedTuple):
    """What the value model computes beside the tokens of ``N`` sequences with drafts: these, then their candidates.

    ``C = D + (1 + D) K`` columns. A candidate that is a draft, too, has the draft's column only.

    Attributes:
        token_ids: int32 ``[N, C]``; -1 pads.
        parents: int32 ``[N, C]``; the column of the draft that each follows; -1: it follows the sequence.
        counts: int32 ``[N]``; the first so many columns are computed.
        positions: int32 ``[N]``; position of the columns without a parent.
        columns: int64 ``[N * (1 + D), K]``; the column of each scored candidate of each node, -1 for the others.
    """

    token_ids: Tensor
    parents: Tensor
    counts: Tensor
    positions: Tensor
    columns: Tensor


class VerifiedTokens(NamedTuple):
    """The tokens that ``B`` sequences with ``D`` drafts grow by.

    Attributes:
        tokens: int32 ``[B, 1 + D]``; from column 0 on, -1 pads.
        lens: int32 ``[B]``; how many there are.
        nodes: int32 ``[B, 1 + D]``; the node of the request that each was drawn at, -1 pads.
    """

    tokens: Tensor
    lens: Tensor
    nodes: Tensor


class DeltaTokens(NamedTuple):
    """The tokens that the value model computes and keeps in a step, for ``N`` requests, padding included.

    Attributes:
        token_ids: int64 ``[N, M]``; from column 0 on, 0 pads.
        slots: int64 ``[N, M]``; where their keys and values belong, -1 pads.
        lens: int32 ``[N]``; how many there are.
        cached_lens: int32 ``[N]``; tokens of the sequence before them, all of them cached.
    """

    token_ids: Tensor
    slots: Tensor
    lens: Tensor
    cached_lens: Tensor


class Column(NamedTuple):
    """How a column of :class:`GuidanceColumns` is stored.

    Attributes:
        dtype: its dtype.
        default: the number for requests without the parameter, and the padding of lists.
        is_list: the column is ``[R, n]``, not ``[R]``.
        is_packed: the guidance table packs the column into its rows.
    """

    dtype: torch.dtype
    default: float = 0
    is_list: bool = False
    is_packed: bool = True


# Padding of token ids; the padding of candidates is -1.
_TOKENS = Column(torch.int32, -2, is_list=True)
_INTEGER, _NUMBER, _SWITCH = Column(torch.int32), Column(torch.float32), Column(torch.bool)


class GuidanceColumns(NamedTuple):
    """The parameters of ``R`` requests, a tensor for each, which operators read.

    Attributes:
        seed: int64 ``[R]``; seed of the request's draws.
        scaled_token_ids: int64 ``[R, W]``; tokens with a temperature of their own, 0 pads.
        token_scales: fp32 ``[R, W]``; factors of their logits, 1 pads.
        eos_token_ids: int32 ``[R, E]``; -2 pads.
        span_end_token_ids: int32 ``[R, S]``; tokens that end the guided span, or begin a sequence that ends it; -2
            pads.
        span_token_ids: int32 ``[R, P]``; the tokens of all sequences that end or begin a span, one sequence after the
            other (:class:`SpanPatterns`); -2 pads.
        closing_token_ids: int32 ``[R, C]``; the tokens that a hard limit forces, in order; -2 pads.
        span_first_bits, span_end_bits, span_start_bits: int32 ``[R]``; bit ``i`` says whether span token ``i`` is the
            first of a sequence, the last of an end sequence, the last of a start sequence.
        span_seen: int32 ``[R]``; tokens of the sequence that :func:`limit_span` has read. Written by it.
        span_match: int32 ``[R]``; bits of the span tokens that may have been matched last. Written by it.
        closing_from: int32 ``[R]``; length of the sequence from which its end is forced, or -1. Written by it.
        mode: int32 ``[R]``; a :class:`Mode`.
        scale: fp32 ``[R]``; scale of the mode, strength of the constraints ``NEAR``, ``GE_NEAR`` and ``LE_NEAR``.
        nats_per_token: fp32 ``[R]``; ``-ln(gamma)``.
        value_min: fp32 ``[R]``; -inf for none.
        target_length: fp32 ``[R]``; tokens, 0 without a target.
        tolerance: fp32 ``[R]``; tokens; the near constraints treat all lengths within it of the target alike.
        min_end_prob: fp32 ``[R]``; ``ending_token_ids`` are candidates from this probability on, inf for none.
        least_share: fp32 ``[R]``; the least share of the largest probability that a candidate may have.
        due_length: fp32 ``[R]``; a total target and its tolerance, beyond which ``min_end_prob`` falls, or inf.
        entropy_threshold: fp32 ``[R]``; nats, NaN for none.
        answer_length: fp32 ``[R]``; tokens that are to follow the span.
        prompt_len: int32 ``[R]``; tokens that do not count as generated. :func:`limit_span` writes the tokens before a
            span that begins.
        hard_limit: int32 ``[R]``; generated tokens at which an open span is ended, the largest int32 for none.
        hard_limit_grace: int32 ``[R]``; tokens that the limit waits for the end of a line.
        value_stride: int32 ``[R]``; the request is guided at steps whose number is a multiple of it.
        counts_down: bool ``[R]``; ``target_length`` is a total.
        return_values: bool ``[R]``; predicted lengths are requested.
        allows_eos: bool ``[R]``; the sequence may end while its span is open.
        span_ended: bool ``[R]``; no span is open. Written by :func:`limit_span`.
        ending_token_ids: int32 ``[R, E + S]``; ``eos_token_ids`` and ``span_end_token_ids`` in the same memory: tokens
            whose value is 0.
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


# Columns are packed in this order: the widest elements first, so that each column is aligned.
GUIDANCE_COLUMNS: dict[str, Column] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(GuidanceColumns, include_extras=True).items()
}
