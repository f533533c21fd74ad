"""Named tuples of tensors that operators exchange. Kernels accept them as arguments.

The annotation of a field describes it and declares its dtype and shape, which operators use to check and allocate it
(:mod:`lenvm_kernels.ops._spec`).
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
    """``value_stride`` skips this step: the request keeps its probabilities and filters."""


class Mode(IntEnum):
    """How a request's candidates are reweighted. The modes from ``EQ`` on have a target."""

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
    """Lines and sentences that end with a token, and words that begin with it (:func:`lenvm_kernels.text_breaks_of`).

    The end of a line begins a word, because the next token has no leading blank.
    """

    NONE = 0
    LINE = 1
    SENTENCE = 2
    WORD = 64


# Bit offsets of two numbers from 0 to 3 next to the flags of a :class:`TextBreak`: bytes missing from the token's last
# character, and leading bytes of the token that continue the previous token's last character.
MISSING_BYTES, ADDED_BYTES = 2, 4


class CountFrom(IntEnum):
    """Where the token count of a span begins."""

    SPAN = 0
    """At the start of the span."""
    SPANS = 1
    """At the start of the span, plus the tokens of earlier spans."""
    OUTPUT = 2
    """At the start of the output."""


class Candidates(NamedTuple):
    """Candidate tokens of ``B`` requests, ``K`` columns each, in descending order of probability.

    Scores are broken if they contain NaN, +inf or no selectable token, or if the temperature is not finite. Mass that
    the request's own filters cut off is not part of ``lost_mass``.
    """

    token_ids: Annotated[Tensor, "int32 [B, K=2**n]", "-1 in padding"]
    probs: Annotated[Tensor, "float32 [B, K]", "probabilities of the request's softmax, not renormalised; 0 in padding"]
    counts: Annotated[Tensor, "int32 [B]", "number of candidates, 0 without guidance"]
    status: Annotated[Tensor, "int8 [B]", "a :class:`Status`"]
    lost_mass: Annotated[Tensor, "float32 [B]", "mass lost because ``K`` is too small; NaN: broken scores"]

    @property
    def broken(self) -> Tensor:
        """bool ``[B]``: requests that lost their guidance because of broken scores."""
        return self.lost_mass.isnan()


class DeltaTokens(NamedTuple):
    """Tokens of ``B`` requests that a value-model forward computes and caches, such as prompts."""

    token_ids: Annotated[Tensor, "int [D]", "the tokens of all requests. Tokens that belong to no request are ignored."]
    starts: Annotated[Tensor, "int32 [B]", "index in ``token_ids`` of each request's first token"]
    lens: Annotated[Tensor, "int32 [B]", "number of tokens of each request, 0 or more, at most ``D`` in total"]
    cached_lens: Annotated[Tensor, "int32 [B]", "cached tokens of each request: the position of its first delta token"]
    table_rows: Annotated[Tensor, "int [B]", "row of each request in the slot table"]


class RaggedLayout(NamedTuple):
    """The ``T = D + B * K`` token rows of one value-model forward, and the rows of each request's candidates.

    Request ``i`` owns rows ``q_offsets[i] .. q_offsets[i+1] - 1``. Rows from ``q_offsets[B]`` on are padding.

    The first element of ``plan`` is the number of items. The next rows are the items, each one split of one query tile:
    request, table row, first row, new tokens, delta tokens, cached tokens, tile, split. All other elements are 0.
    """

    token_ids: Annotated[Tensor, "int64 [T]", "0 in padding"]
    positions: Annotated[Tensor, "int64 [T]", "position in the request's sequence, 0 in padding"]
    slots: Annotated[Tensor, "int64 [T]", "cache slot for the key and value of a delta token, -1 for all other rows"]
    q_offsets: Annotated[Tensor, "int32 [B + 1]", "first row of each request, then the number of rows in use"]
    cached_lens: Annotated[Tensor, "int32 [B]", "number of cached tokens before each request's delta"]
    candidate_rows: Annotated[Tensor, "int64 [B, K]", "row of each candidate, -1 in padding columns"]
    plan: Annotated[Tensor, "int32 [P, 8]", "work list of :func:`value_tree_attention`"]
    counters: Annotated[Tensor, "int32 [C]", "zeros; each launch of the forward restores them"]
    parents: Annotated[Tensor | None, "int32 [T]", "row of a candidate's parent, else -1; None without parents"] = None


class EmbeddedTokens(NamedTuple):
    """Input of a value model's first layer, for ``T`` tokens."""

    hidden: Annotated[Tensor, "float [T, H]", "embeddings"]
    square_sums: Annotated[Tensor, "float32 [(H + 63) // 64, T]", "sums of squares over groups of 64 columns"]
    cos: Annotated[Tensor, "float32 [T, D // 2]", "cosine of the rotary angles of each token's position"]
    sin: Annotated[Tensor, "float32 [T, D // 2]", "sine of the same angles"]


class Drafts(NamedTuple):
    """Draft tokens for the sequences of ``B`` requests, ``D`` columns each: a chain or a tree per request.

    A *node* of a request is a position at which a token is drawn: node 0 after the last token of the sequence, node
    ``1 + j`` after draft ``j``.
    """

    token_ids: Annotated[Tensor, "int [B, D+]", "the list ends at the first negative id"]
    parents: Annotated[Tensor, "int32 [B, D]", "earlier column that each draft follows; otherwise the sequence"]


class Filters(NamedTuple):
    """Sampling filters of ``B`` requests, as in :func:`topk_candidates`. Expanded scalars are accepted."""

    top_k: Annotated[Tensor, "int32 [B]", "tokens to keep, no limit if not positive"]
    top_p: Annotated[Tensor, "float32 [B]", "in (0, 1]"]
    min_p: Annotated[Tensor, "float32 [B]", "in [0, 1]"]
    temperature: Annotated[Tensor, "float32 [B]", "not read if the scores are probabilities"]


class SpanNodes(NamedTuple):
    """State of the spans at the nodes of ``B`` requests (see :class:`Drafts`; one node per request without drafts)."""

    ended: Annotated[Tensor, "bool [B * (1 + D)]", "the request uses spans and none is open"]
    in_call: Annotated[Tensor, "bool [B * (1 + D)]", "a tool call has begun since the last span: nothing is guided"]
    generated: Annotated[
        Tensor, "int32 [B * (1 + D)]", "tokens since the output or a span began, or a span ended; 0: no node"
    ]


class StepRequests(NamedTuple):
    """Inputs of a step per node (:class:`Drafts`), for ``N`` requests. Requests from ``B`` on are padding.

    A request that is not due is guided only if a candidate ends it. A request is greedy if its ``top_k`` is 1 or its
    temperature below 1e-6; its filters then keep all tokens at temperature 1.
    """

    lengths: Annotated[Tensor, "int32 [N]", "tokens of the sequence; 0 in padding"]
    request_rows: Annotated[Tensor, "int64 [N]", "row of the request in the slot table and the guidance table"]
    needs_values: Annotated[Tensor, "bool [N]", "the value model reads the sequence: it is guided or ``wants_length``"]
    cached_lens: Annotated[Tensor, "int32 [N]", "tokens of the sequence in the value model's cache; 0 in padding"]
    draft_ids: Annotated[Tensor, "int32 [N, D]", "the drafts, -1 from the first missing one on"]
    draft_parents: Annotated[Tensor, "int32 [N, D]", "earlier column that each draft follows, -1: the sequence"]
    positions: Annotated[Tensor, "int32 [N * (1 + D)]", "position of the token before the node; -1 in padding"]
    table_rows: Annotated[Tensor, "int64 [N * (1 + D)]", "row of the node's parameters in the guidance table"]
    guided: Annotated[Tensor, "bool [N * (1 + D)]", "the node is guided"]
    wants_length: Annotated[Tensor, "bool [N * (1 + D)]", "lengths are requested, or the request is between spans"]
    generated: Annotated[Tensor, "int32 [N * (1 + D)]", "number of generated tokens"]
    due: Annotated[Tensor, "bool [N * (1 + D)]", "``value_stride`` includes this step"]
    last_tokens: Annotated[Tensor, "int32 [N * (1 + D)]", "the token before the node, -1 if there is none"]
    drawn: Annotated[Tensor, "int32 [N * (1 + D)]", "token drawn by the caller, negative if there is none"]
    top_k: Annotated[Tensor, "int32 [N * (1 + D)]", "as in :class:`Filters`"]
    top_p: Annotated[Tensor, "float32 [N * (1 + D)]", "as in :class:`Filters`"]
    min_p: Annotated[Tensor, "float32 [N * (1 + D)]", "as in :class:`Filters`"]
    temperature: Annotated[Tensor, "float32 [N * (1 + D)]", "as in :class:`Filters`"]
    greedy: Annotated[Tensor, "bool [N * (1 + D)]", "the most probable candidate is drawn"]

    @property
    def drafts(self) -> Drafts:
        """The drafts of all ``N`` requests."""
        return Drafts(self.draft_ids, self.draft_parents)


class StepHistory(NamedTuple):
    """State of the requests in ``R`` table rows that persists between steps."""

    step: Annotated[Tensor, "int64 [1]", "number of the next step"]
    uncounted: Annotated[Tensor, "int64 [1]", "number of earlier steps that ``value_stride`` does not count"]
    tokens: Annotated[Tensor, "int32 [R, M+]", "ring buffer: the token at position ``p`` is in column ``p % M``"]
    passed_lens: Annotated[Tensor, "int32 [R]", "length of the gapless prefix that steps and prompts have passed"]
    cached_lens: Annotated[Tensor, "int32 [R]", "tokens of the sequence in the value model's cache"]


class ScoredCandidates(NamedTuple):
    """Candidates that the value model scores in a step, for ``N`` requests including padding."""

    token_ids: Annotated[Tensor, "int32 [N, K=2**n]", "-1 in padding"]
    counts: Annotated[Tensor, "int32 [N]", "number of leading columns that are scored"]
    positions: Annotated[Tensor, "int32 [N]", "the candidates' position in the sequence"]
    alone: Annotated[Tensor, "bool [N]", "only the next token is scored, to predict its length. Nothing is reweighted."]


class CandidateTrees(NamedTuple):
    """Trees that the value model computes for ``N`` sequences with drafts: first the drafts, then their candidates.

    ``C = D + (1 + D) K`` columns. A candidate that is also a draft shares the draft's column.
    """

    token_ids: Annotated[Tensor, "int32 [N, C]", "-1 in padding"]
    parents: Annotated[Tensor, "int32 [N, C]", "column of the draft that each token follows; -1: the sequence"]
    counts: Annotated[Tensor, "int32 [N]", "number of leading columns that are computed"]
    positions: Annotated[Tensor, "int32 [N]", "position of the columns without a parent"]
    columns: Annotated[Tensor, "int64 [N * (1 + D), K]", "column of each scored candidate, -1 for other candidates"]


class DrawnTokens(NamedTuple):
    """Guided probabilities and next tokens of ``B`` requests."""

    guided_probs: Annotated[Tensor, "float32 [B, K]", "probabilities of the candidates, 0 in padding"]
    tokens: Annotated[Tensor, "int32 [B]", "next tokens; negative if neither drawn nor passed"]
    remaining_lengths: Annotated[Tensor, "float32 [B]", "tokens predicted to follow; NaN: not requested or not scored"]


class VerifiedTokens(NamedTuple):
    """New tokens of ``B`` sequences with ``D`` drafts."""

    tokens: Annotated[Tensor, "int32 [B, 1 + D]", "the tokens from column 0 on, then -1"]
    lens: Annotated[Tensor, "int32 [B]", "number of tokens"]
    nodes: Annotated[Tensor, "int32 [B, 1 + D]", "the node at which each token was drawn, then -1"]


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


# Not -1, which pads candidates.
_TOKENS = Column(torch.int32, -2, is_list=True)
_INTEGER, _NUMBER, _SWITCH = Column(torch.int32), Column(torch.float32), Column(torch.bool)


class GuidanceColumns(NamedTuple):
    """Guidance parameters of ``R`` requests, one tensor per parameter (see :class:`Column`).

    ``ending_token_ids`` is a view of ``eos_token_ids`` and ``span_end_token_ids``. ``target_logit`` is the value of
    every candidate without a value model. ``faults`` is described in :func:`reweight_scatter`.
    """

    seed: Annotated[Tensor, Column(torch.int64), "seed of the request's draws"]
    scaled_token_ids: Annotated[Tensor, Column(torch.int64, is_list=True), "tokens with a temperature"]
    token_scales: Annotated[Tensor, Column(torch.float32, 1, is_list=True), "factors on their logits"]
    eos_token_ids: Annotated[Tensor, _TOKENS, "tokens that end the sequence"]
    span_end_token_ids: Annotated[Tensor, _TOKENS, "tokens that end the span, or begin a sequence that does"]
    span_token_ids: Annotated[Tensor, _TOKENS, "tokens of all end and start sequences (:class:`SpanPatterns`)"]
    closing_token_ids: Annotated[Tensor, _TOKENS, "tokens that a hard limit forces, in order"]
    span_first_bits: Annotated[Tensor, _INTEGER, "span tokens that begin a sequence, as bits"]
    span_end_bits: Annotated[Tensor, _INTEGER, "last tokens of end sequences, as bits"]
    span_start_bits: Annotated[Tensor, _INTEGER, "last tokens of start sequences, as bits"]
    span_call_bits: Annotated[Tensor, _INTEGER, "last tokens of sequences that begin a tool call, as bits"]
    span_seen: Annotated[Tensor, _INTEGER, "tokens of the sequence that :func:`limit_span` has read"]
    span_match: Annotated[Tensor, _INTEGER, "span tokens that the last token may match, as bits"]
    closing_from: Annotated[Tensor, Column(torch.int32, -1), "length of the sequence from which its end is forced"]
    span_used: Annotated[Tensor, _INTEGER, "tokens of earlier spans"]
    missing_bytes: Annotated[Tensor, _INTEGER, "bytes missing from the sequence's last character"]
    count_from: Annotated[Tensor, _INTEGER, "a :class:`CountFrom`"]
    unit: Annotated[Tensor, _INTEGER, "the :class:`TextBreak` that the target of the answer counts; 0: tokens"]
    target_units: Annotated[Tensor, _NUMBER, "target of the answer in this unit"]
    units: Annotated[Tensor, _INTEGER, "units since the start of the count"]
    mode: Annotated[Tensor, _INTEGER, "a :class:`Mode`"]
    scale: Annotated[Tensor, _NUMBER, "scale of the mode, or strength of a near constraint"]
    nats_per_token: Annotated[Tensor, _NUMBER, "``-ln(gamma)``"]
    value_min: Annotated[Tensor, Column(torch.float32, -inf), "minimum expected value"]
    target_length: Annotated[Tensor, _NUMBER, "tokens"]
    tolerance: Annotated[Tensor, _NUMBER, "half-width in tokens of the flat top of near constraints"]
    min_end_prob: Annotated[Tensor, Column(torch.float32, inf), "minimum probability at which ends are candidates"]
    least_share: Annotated[Tensor, _NUMBER, "minimum probability of a candidate as a share of the largest probability"]
    due_length: Annotated[Tensor, Column(torch.float32, inf), "tokens beyond which ``min_end_prob`` falls"]
    entropy_threshold: Annotated[Tensor, Column(torch.float32, nan), "nats"]
    answer_length: Annotated[Tensor, _NUMBER, "expected tokens after the span"]
    target_logit: Annotated[Tensor, _NUMBER, "value logit of every candidate without a value model"]
    prompt_len: Annotated[Tensor, _INTEGER, "tokens before the span, or before the end of the last one"]
    answer_row: Annotated[Tensor, Column(torch.int32, -1), "row with the parameters after the span; -1: unguided"]
    hard_limit: Annotated[Tensor, Column(torch.int32, 2**31 - 1), "generated tokens at which a span is ended"]
    hard_limit_grace: Annotated[Tensor, _INTEGER, "maximum tokens beyond the limit to wait for the end of a line"]
    value_stride: Annotated[Tensor, Column(torch.int32, 1), "the request is guided at every n-th step"]
    counts_down: Annotated[Tensor, _SWITCH, "whether ``target_length`` is a total"]
    return_values: Annotated[Tensor, _SWITCH, "whether predicted lengths are requested"]
    allows_eos: Annotated[Tensor, _SWITCH, "whether the sequence may end while its span is open"]
    span_ended: Annotated[Tensor, _SWITCH, "no span is open"]
    in_call: Annotated[Tensor, _SWITCH, "a tool call has begun since the last span"]
    ending_token_ids: Annotated[Tensor, _TOKENS._replace(is_packed=False), "tokens with value 0"]
    faults: Annotated[Tensor, _INTEGER._replace(is_packed=False), "steps in which guidance was lost"]


# Columns are packed in this order, widest elements first, so that each column is aligned.
GUIDANCE_COLUMNS: dict[str, Column] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(GuidanceColumns, include_extras=True).items()
}
