"""The stages of a guided step, in order: scale tokens, limit spans, begin, choose candidates, values, draw, verify."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from lenvm_kernels.ops.begin_step import begin_step
from lenvm_kernels.ops.draw import draw
from lenvm_kernels.ops.limit_span import limit_span
from lenvm_kernels.ops.pack_drafts import pack_drafts
from lenvm_kernels.ops.topk_candidates import topk_candidates
from lenvm_kernels.ops.verify_drafts import verify_drafts
from lenvm_kernels.profiling import profiler_range
from lenvm_kernels.step.inputs import PreparedStep, StepBatch
from lenvm_kernels.step.outputs import StepOutput
from lenvm_kernels.step.sources import ValueSource
from lenvm_kernels.step.state import StepRows, StepState
from lenvm_kernels.types import Drafts, Filters, SpanNodes


class StepCall(NamedTuple):
    """Checked arguments of :meth:`GuidedStep.step`. Its CUDA graph does not use ``drawn`` and ``probs``.

    With ``addresses`` (:func:`begin_step`), only the dtype and the width of the scores and the mask are used.
    """

    scores: torch.Tensor  # [rows, V]
    vocab_mask: torch.Tensor | None  # int32 [rows, ceil(V / 32)]
    drawn: torch.Tensor | None
    probs: torch.Tensor | None
    is_logits: bool
    sample: bool
    verifies: bool
    is_aligned: bool  # each row of the scores begins at a multiple of 16 elements
    addresses: torch.Tensor | None = None  # int64 [4]

    @property
    def key(self) -> tuple[object, ...]:
        """The properties that determine a CUDA graph of the step."""
        scores, mask, _, _, *options, _ = self
        return scores.dtype, scores.shape[1], mask is None, *options

    def at_addresses(self, addresses: torch.Tensor, rows: int) -> StepCall:
        """The call for ``rows`` rows of scores and mask, which are read at ``addresses`` when it runs."""
        mask = None if self.vocab_mask is None else self.vocab_mask[:1].expand(rows, -1)
        scores = self.scores[:1].expand(rows, -1)
        return self._replace(scores=scores, vocab_mask=mask, drawn=None, probs=None, addresses=addresses)


def scale_tokens(state: StepState, logits: torch.Tensor, table_rows: torch.Tensor) -> None:
    """Apply token temperatures in place to ``logits [N, V]`` of the requests in ``table_rows [N]``."""
    columns, width = state.table.columns, logits.shape[1]
    token_ids, scales = columns.scaled_token_ids[table_rows], columns.token_scales[table_rows].to(logits.dtype)
    if width < state.config.vocab_size:
        is_known = token_ids < width
        token_ids, scales = torch.where(is_known, token_ids, 0), torch.where(is_known, scales, 1.0)
    logits.scatter_reduce_(1, token_ids, scales, "prod")


def limit_spans(state: StepState, logits: torch.Tensor | None, batch: StepBatch, drafts: Drafts | None) -> SpanNodes:
    """The state of the spans at each node. Changes the ``logits`` in place unless they are None."""
    return limit_span(
        logits,
        state.table.columns,
        batch.tokens[:, None] if batch.tokens.dim() == 1 else batch.tokens,
        batch.table_rows,
        batch.lengths,
        new_lens=batch.new_lens,
        drafts=drafts,
        text_breaks=state.config.text_breaks,
        backend=state.config.backend,
    )


def begin(state: StepState, rows: StepRows, prepared: PreparedStep, filters: Filters, call: StepCall | None) -> None:
    """Copy the step's inputs per request to ``rows``, in one launch. If ``call`` is None, there are no scores."""
    _, batch, drafts, spans, _ = prepared
    requests, tensors = len(batch.lengths), state.tensors
    nodes = requests * (1 + rows.requests.draft_ids.shape[1])
    scores, vocab_mask, drawn, *_ = call or (None, None, None)
    begin_step(
        state.table.columns,
        batch.tokens,
        batch.table_rows,
        batch.lengths,
        new_lens=batch.new_lens,
        active=tensors.all_active[:requests] if batch.active is None else batch.active,
        history=state.history.columns,
        drafts=drafts,
        spans=spans,
        drawn=tensors.none_drawn[:nodes] if drawn is None else drawn,
        filters=filters,
        addresses=tensors.addresses,
        scores=scores,
        vocab_mask=vocab_mask,
        padding_row=state.padding_row,
        out=rows.requests,
        backend=state.config.backend,
        validate=False,
    )
    if not batch.counts:
        state.history.columns.uncounted.add_(1)


def guide(
    state: StepState, rows: StepRows, values: ValueSource, call: StepCall, states: torch.Tensor | None
) -> StepOutput:
    """Choose the candidates of all nodes, compute the values of candidates that need them, and draw tokens."""
    requests, scored, table = rows.requests, rows.scored, state.table.columns
    text_breaks, backend = state.config.text_breaks, state.config.backend
    shared: dict[str, Any] = dict(drawn=requests.drawn, sample=call.sample, text_breaks=text_breaks)
    shared |= dict(backend=backend, validate=False)
    with profiler_range("candidates"):
        candidates = topk_candidates(
            call.scores,
            top_k=requests.top_k,
            top_p=requests.top_p,
            min_p=requests.min_p,
            max_candidates=scored.token_ids.shape[1],
            temperature=requests.temperature if call.is_logits else None,
            is_logits=call.is_logits,
            guided=requests.guided,
            vocab_mask=call.vocab_mask,
            addresses=call.addresses,
            is_aligned=call.is_aligned,
            table=table,
            table_rows=requests.table_rows,
            generated=requests.generated,
            last_tokens=None if text_breaks is None else requests.last_tokens,
            requests=requests,
            score_all=state.config.score_all,
            step=state.history.columns.step,
            scored=scored,
            **shared,
        )
        if rows.trees is not None:
            pack_drafts(scored, requests.drafts, out=rows.trees, backend=backend)
    with profiler_range("values"):
        value_logits, predicted = values.value_logits(rows, states) or (None, None)
    with profiler_range("draw"):
        drawn = draw(candidates, value_logits, table, requests, scored, predicted=predicted, **shared)
        verified = verify_drafts(drawn.tokens, requests.drafts, backend=backend) if call.verifies else None
    return StepOutput(candidates, value_logits, *drawn, verified)
