"""Draft tokens of SGLang's speculative decoding, and their verification by the tokens drawn at their nodes. Imported
only with speculative decoding.

The engine verifies a tree of drafts from the logits at all of its nodes (:class:`Drafts`). At the nodes of guided
requests, a token is drawn from the candidates, and all others are masked out of the logits. Any verification of the
engine, by rejection with any threshold or by argmax, then accepts a draft exactly if it is that token, and otherwise
draws that token. So speculation changes neither the text of a guided request with a seed nor any distribution.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.sampling.penaltylib.repetition_penalty import apply_scaling_penalties

from lenvm_kernels.engines.sglang.guide import SGLangGuide
from lenvm_kernels.step import StepBatch
from lenvm_kernels.types import Drafts, VerifiedTokens

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.speculative.eagle_info import EagleVerifyInput

# Changes that the engine makes to logits before verification, one row per request.
_CHANGES = ("acc_additive_penalties", "acc_scaling_penalties", "logit_bias")


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
    guide.note_batch(batch, [] if batch.forward_mode.is_idle() else batch.reqs)
    if not batch.lenvm_reqs:
        return original(verify_input, batch, logits_output, grammar_mask, *args, **kwargs)
    guide.discard_read_done()
    assert guide.grown_by is not None  # there are drafts
    (grown, count), table_rows = guide.grown_by, batch.req_pool_indices
    rows = StepBatch(grown[table_rows], table_rows, batch.seq_lens.int() + 1, count[table_rows])
    logits, info = logits_output.next_token_logits, batch.sampling_info
    apply_changes(logits, info, grammar_mask, verify_input.draft_token_num)
    unmasked = guide.leave_drawn(batch, logits, rows, info, drafts_of(verify_input), copies=batch.return_logprob)
    batch.sampling_info = without_changes(info)
    verified = predict, lens, index = original(verify_input, batch, logits_output, None, *args, **kwargs)
    batch.sampling_info = info
    if unmasked is not None:
        logits_output.next_token_logits = unmasked  # for log-probabilities
    nodes = index.clamp(min=0).long()
    guide.report(batch, logits_output, VerifiedTokens(predict[nodes], lens, nodes))
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


def apply_changes(logits: torch.Tensor, info: SamplingBatchInfo, grammar_mask: Any, nodes: int) -> None:
    """Apply the engine's changes to the logits before verification."""
    additive, scaling, bias = (
        None if change is None else change.repeat_interleave(nodes, dim=0)
        for change in (getattr(info, name) for name in _CHANGES)
    )
    if additive is not None:
        logits.add_(additive)
    if scaling is not None:
        apply_scaling_penalties(logits, scaling)
    if bias is not None:
        logits.add_(bias)
    if grammar_mask is not None:
        grammar_mask.apply(logits)


def without_changes(info: SamplingBatchInfo) -> SamplingBatchInfo:
    """The same filters without the changes, which are applied once."""
    info = copy.copy(info)
    for name in _CHANGES:
        setattr(info, name, None)
    return info
