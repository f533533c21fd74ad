"""What operators pass each other, as tuples of tensors: kernels take them as they are."""

from enum import IntEnum
from typing import NamedTuple

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


class Mode(IntEnum):
    """How a request's candidates are reweighted. A target makes it one of the last four."""

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
        head_places: int64 ``[B, K]``; a permutation of ``0 .. B*K - 1`` with
            ``head_rows[head_places] == candidate_rows``: padding columns have, in order, the places after the last
            candidate. What the value head makes of ``head_rows`` is a ``[B, K]`` by one gather,
            ``logits[head_places]``.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    q_offsets: Tensor
    candidate_rows: Tensor
    head_rows: Tensor
    head_places: Tensor


class GuidanceColumns(NamedTuple):
    """What ``R`` requests ask for, a tensor a parameter; what operators read of a guidance table.

    Attributes:
        mode: int32 ``[R]``; a :class:`Mode`.
        scale: fp32 ``[R]``.
        nats_per_token: fp32 ``[R]``; ``-ln(gamma)``.
        value_min: fp32 ``[R]``; -inf for none.
        target_length: fp32 ``[R]``; tokens, 0 without a target.
        counts_down: bool ``[R]``; ``target_length`` is a total.
        entropy_threshold: fp32 ``[R]``; nats, NaN for none.
        eos_token_ids: int32 ``[R, E]``; -2 pads.
        scaled_token_ids: int64 ``[R, W]``; tokens with a temperature of their own, 0 pads.
        token_scales: fp32 ``[R, W]``; what their logits are multiplied by, 1 pads.
        prompt_len: int32 ``[R]``; tokens of the request that do not count as generated.
        seed: int64 ``[R]``; of the request's draws.
        return_values: bool ``[R]``; predicted lengths are wanted.
        faults: int32 ``[R]``; steps in which the request lost its guidance (see :func:`reweight_scatter`).
    """

    mode: Tensor
    scale: Tensor
    nats_per_token: Tensor
    value_min: Tensor
    target_length: Tensor
    counts_down: Tensor
    entropy_threshold: Tensor
    eos_token_ids: Tensor
    scaled_token_ids: Tensor
    token_scales: Tensor
    prompt_len: Tensor
    seed: Tensor
    return_values: Tensor
    faults: Tensor
