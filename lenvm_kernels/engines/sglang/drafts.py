"""Draft tokens of SGLang's speculative decoding, and their verification by the tokens drawn at their nodes. Imported
only with speculative decoding.

The engine verifies a tree of drafts from the logits at all of its nodes (:class:`Drafts`). At the nodes of guided
requests, a token is drawn from the candidates, and all others are masked out of the logits. Any verification of the
engine, by rejection with any threshold or by argmax, then accepts a draft exactly if it is that token, and otherwise
draws that token. So speculation changes neither the text of a guided request with a seed nor any distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.sampling.penaltylib.repetition_penalty import apply_scaling_penalties

from lenvm_kernels.engines.one_token import leave_only
from lenvm_kernels.engines.report import trace_drafts
from lenvm_kernels.engines.sglang.guide import SGLangGuide, needs_step
from lenvm_kernels.step import StepBatch
from lenvm_kernels.types import Drafts, VerifiedTokens

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.speculative.eagle_info import EagleVerifyInput

# Changes that the engine makes to logits before verification, one row per request.
_CHANGES = ("acc_additive_penalties", "acc_scaling_penalties", "logit_bias")


def hooks_of(guide: SGLangGuide) -> dict[str, tuple[str, Callable]]:
    """Kind and function of further hooks, by target."""
    return {"sglang.srt.speculative.eagle_utils.eagle_sample": ("AROUND", partial(verify, guide))}


def verify(
    guide: SGLangGuide,
    original: Callable,
    verify_input: EagleVerifyInput,
    batch: ScheduleBatch,
    logits_output: LogitsProcessorOutput,
    grammar_mask: Any = None,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Around the verification of a batch's drafts: draw tokens at the nodes of guided requests first."""
    is_idle = batch.forward_mode.is_idle()
    batch.lenvm_reqs = [] if is_idle else [req for req in batch.reqs if req.lenvm_guidance is not None]
    batch.lenvm_failed = False
    if not batch.lenvm_reqs:
        return original(verify_input, batch, logits_output, grammar_mask, *args, **kwargs)
    guide.discard_read_done(guide.runner)
    logits, info, nodes = logits_output.next_token_logits, batch.sampling_info, verify_input.draft_token_num
    table_rows, lengths = batch.req_pool_indices, batch.seq_lens.int() + 1
    drawn = tokens = None
    assert guide.grown_by is not None  # there are drafts
    grown, count = guide.grown_by
    with changed_once(logits, info, grammar_mask, nodes):
        with guide.failing_softly(batch):
            rows = StepBatch(grown[table_rows], table_rows, lengths, count[table_rows], states=guide.states_of(logits))
            prepared = guide.step.prepare(logits, rows, drafts_of(verify_input))
            if needs_step(batch):
                drawn = guide.run(batch, prepared, info, is_prompt=False)
        if needs_step(batch):
            tokens = guide.agreed(drawn, len(logits))
            if batch.return_logprob:  # of the unmasked logits
                logits_output.next_token_logits = logits.clone()
            leave_only(logits_output.next_token_logits, tokens)
        verified = original(verify_input, batch, logits_output, None, *args, **kwargs)
        logits_output.next_token_logits = logits
    predict, lens, index = verified
    nodes = index.clamp(min=0).long()
    guide.report(batch, logits_output, drawn, VerifiedTokens(predict[nodes], lens, nodes), tokens)
    if drawn is not None and batch.lenvm_reqs and guide.settings.trace is not None:
        trace_drafts(guide.settings.trace, batch, drawn.output, verified)
    return verified


def drafts_of(verify_input: EagleVerifyInput) -> Drafts:
    """The drafts of a batch. The engine's first token of each request is the last token of its sequence."""
    token_ids = verify_input.draft_token.view(-1, verify_input.draft_token_num)
    parents = parents_of(verify_input.retrieve_next_token, verify_input.retrieve_next_sibling)
    return Drafts(token_ids[:, 1:], parents[:, 1:])


def parents_of(first_children: torch.Tensor, next_siblings: torch.Tensor) -> torch.Tensor:
    """int32 ``[B, 1 + D]``: the draft that each node follows, -1 for the root and its children.

    Args:
        first_children: int ``[B, 1 + D]``; the first child of each node, -1 for none.
        next_siblings: int ``[B, 1 + D]``; the next node with the same parent, -1 for none.
    """
    (b, nodes), device = first_children.shape, first_children.device
    node = torch.arange(nodes, device=device).expand(b, nodes)

    def sources(targets: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
        """The node that each node is the target of, else ``otherwise``."""
        found = torch.cat((otherwise, otherwise[:, :1]), dim=1)  # the last column is for those without a target
        return found.scatter(1, targets.long().where(targets >= 0, nodes), node)[:, :nodes]

    first_one = sources(next_siblings, node)
    for _ in range((nodes - 1).bit_length()):  # each round doubles the number of siblings that it goes back
        first_one = first_one.gather(1, first_one)
    parent = sources(first_children, torch.zeros_like(node))
    return (parent.gather(1, first_one) - 1).int()


@contextmanager
def changed_once(logits: torch.Tensor, info: SamplingBatchInfo, grammar_mask: Any, nodes: int) -> Iterator[None]:
    """Apply the engine's changes to the logits before verification, and disable them inside the context."""
    changes = {name: getattr(info, name) for name in _CHANGES}
    additive, scaling, bias = (
        None if change is None else change.repeat_interleave(nodes, dim=0) for change in changes.values()
    )
    if additive is not None:
        logits.add_(additive)
    if scaling is not None:
        apply_scaling_penalties(logits, scaling)
    if bias is not None:
        logits.add_(bias)
    if grammar_mask is not None:
        grammar_mask.apply(logits)
    try:
        for name in _CHANGES:
            setattr(info, name, None)
        yield
    finally:
        for name, change in changes.items():
            setattr(info, name, change)
