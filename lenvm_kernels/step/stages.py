"""The stages of a guided step, in order: scale tokens and limit spans; look up, choose, (values), draw."""

from __future__ import annotations

from typing import NamedTuple

import torch

from lenvm_kernels.ops.draw import draw
from lenvm_kernels.ops.expand_drafts import expand_drafts
from lenvm_kernels.ops.gather_requests import gather_requests
from lenvm_kernels.ops.limit_span import limit_span
from lenvm_kernels.ops.pack_drafts import pack_drafts
from lenvm_kernels.ops.select_scored import select_scored
from lenvm_kernels.ops.topk_candidates import topk_candidates
from lenvm_kernels.step.inputs import PreparedStep, Sampling, StepBatch
from lenvm_kernels.step.tensors import StepRows, StepState, apply_spans
from lenvm_kernels.types import Candidates, Drafts, DrawnTokens, SpanNodes, StepRequests


class StepView(NamedTuple):
    """The checked arguments of a step, and the tensors that its stages write.

    Attributes:
        prepared, scores, sampling: arguments of :meth:`GuidedStep.step`.
        drawn: int32 ``[B]``; the same, or None.
        filters: top_k, top_p, min_p and temperature of each node.
        rows: the tensors of the batch.
        padded: the tensors of its graph, which the value source reads: the batch and its padding.
        backend: backend of the operators.
    """

    prepared: PreparedStep
    scores: torch.Tensor
    sampling: Sampling
    drawn: torch.Tensor | None
    filters: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]
    rows: StepRows
    padded: StepRows
    backend: str


def scale_tokens(state: StepState, logits: torch.Tensor, table_rows: torch.Tensor) -> None:
    """Apply token temperatures to ``logits [N, V]`` of requests in ``table_rows [N]``, in place."""
    columns = state.table.columns
    scales = columns.token_scales[table_rows].to(logits.dtype)
    logits.scatter_reduce_(1, columns.scaled_token_ids[table_rows], scales, "prod")


def limit_spans(state: StepState, logits: torch.Tensor | None, batch: StepBatch, drafts: Drafts | None) -> SpanNodes:
    """The state of the spans at each node; changes the ``logits``, unless None, in place."""
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


def gather(state: StepState, batch: StepBatch, backend: str) -> StepRequests:
    """The state of the requests, padded to the number of requests of their graph."""
    requests = batch.tokens.shape[0]
    return gather_requests(
        state.table.columns,
        batch.tokens,
        batch.table_rows,
        batch.lengths,
        new_lens=batch.new_lens,
        active=state.tensors.rows(requests).all_active if batch.active is None else batch.active,
        history=state.history.columns,
        padding_row=state.padding_row,
        out=state.tensors.rows(state.padded(requests)).requests,
        backend=backend,
        validate=False,
    )


def look_up(state: StepState, view: StepView) -> None:
    """Read the state of the requests from the tables, and expand it to the nodes of their drafts."""
    _, batch, drafts, spans, _ = view.prepared
    requests = gather(state, batch, view.backend)
    if drafts is not None:
        expand_drafts(requests, drafts, out=view.padded.nodes, backend=view.backend)
        if spans is not None:
            apply_spans(view.rows.nodes, spans, state.table.columns)


def choose(state: StepState, view: StepView) -> Candidates:
    """The candidates of all nodes. Writes the candidates whose values are needed, and the trees that they form."""
    config, table, nodes = state.config, state.table.columns, view.rows.nodes
    _, batch, drafts, _, _ = view.prepared
    top_k, top_p, min_p, temperature = view.filters
    candidates = topk_candidates(
        view.scores,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        max_candidates=config.max_candidates,
        temperature=temperature,
        is_logits=view.sampling.is_logits,
        entropy_threshold=nodes.entropy_threshold,
        guided=nodes.guided,
        vocab_mask=view.sampling.vocab_mask,
        end_token_ids=table.ending_token_ids,
        min_end_prob=table.min_end_prob,
        least_share=table.least_share,
        due_length=table.due_length,
        generated=nodes.generated,
        text_breaks=config.text_breaks,
        last_tokens=None if config.text_breaks is None else batch.last_tokens(drafts),
        table_rows=nodes.table_rows,
        backend=view.backend,
        validate=False,
    )
    select_scored(
        candidates,
        view.padded.nodes,
        table.ending_token_ids,
        drawn=view.rows.none_drawn if view.drawn is None else view.drawn,
        sample=view.sampling.sample,
        score_all=config.score_all,
        step=state.history.columns.step,
        out=view.padded.scored,
        backend=view.backend,
        validate=False,
    )
    if not batch.counts:
        state.history.columns.uncounted.add_(1)
    if drafts is not None and view.padded.trees is not None:
        pack_drafts(view.padded.scored, drafts, out=view.padded.trees, backend=view.backend)
    return candidates


def draw_tokens(
    state: StepState,
    view: StepView,
    candidates: Candidates,
    values: tuple[torch.Tensor, torch.Tensor] | None,
    probs: torch.Tensor | None,
) -> DrawnTokens:
    """Guided probabilities, which are also written to ``probs``, next tokens, and predicted lengths of all nodes."""
    value_logits, predicted = (None, None) if values is None else values
    return draw(
        candidates,
        value_logits,
        state.table.columns,
        view.rows.nodes,
        view.rows.scored,
        predicted=predicted,
        sample=view.sampling.sample,
        drawn=view.rows.none_drawn if view.drawn is None else view.drawn,
        temperature=view.filters[3],
        text_breaks=state.config.text_breaks,
        probs=probs,
        backend=view.backend,
        validate=False,
    )
