"""Drafted tokens of SGLang's speculative decoding, and how what was drawn at their nodes gets past its verification.

The engine verifies a tree of drafts from the logits at all of its nodes (:class:`Drafts`). At the nodes of guided
requests a token is drawn from the candidates, and the logits then leave no other: whatever verification the engine has,
by rejection with any threshold or by argmax, takes a draft exactly where it is that token, and that token elsewhere. So
the text of a guided request with a seed is the same with and without speculation, and its distribution with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.sampling.penaltylib.repetition_penalty import apply_scaling_penalties

from lenvm_kernels.types import Drafts

if TYPE_CHECKING:
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.speculative.eagle_info import EagleVerifyInput

# What the engine adds to logits before it verifies, a row a request.
_CHANGES = ("acc_additive_penalties", "acc_scaling_penalties", "logit_bias")


def drafts_of(verify_input: EagleVerifyInput) -> Drafts:
    """The drafts of a batch. The engine's first token of each request is the last one of its sequence."""
    token_ids = verify_input.draft_token.view(-1, verify_input.draft_token_num)
    parents = parents_of(verify_input.retrieve_next_token, verify_input.retrieve_next_sibling)
    return Drafts(token_ids[:, 1:], parents[:, 1:])


def parents_of(first_children: torch.Tensor, next_siblings: torch.Tensor) -> torch.Tensor:
    """int32 ``[B, 1 + D]``: the draft that each node follows, -1 for the root and its children.

    Args:
        first_children: int ``[B, 1 + D]``; the node that is the first child of each, -1 for none.
        next_siblings: likewise, the one after it below the same parent.
    """
    (b, nodes), device = first_children.shape, first_children.device
    node = torch.arange(nodes, device=device).expand(b, nodes)

    def sources(targets: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
        """Which node each one is the target of."""
        found = torch.cat((otherwise, otherwise[:, :1]), dim=1)  # the last column is for those without a target
        return found.scatter(1, targets.long().where(targets >= 0, nodes), node)[:, :nodes]

    first_one = sources(next_siblings, node)
    for _ in range((nodes - 1).bit_length()):  # each round doubles how many siblings it goes back
        first_one = first_one.gather(1, first_one)
    parent = sources(first_children, torch.zeros_like(node))
    return (parent.gather(1, first_one) - 1).int()


@contextmanager
def changed_once(logits: torch.Tensor, info: SamplingBatchInfo, grammar_mask: Any, nodes: int) -> Iterator[None]:
    """Does to the logits what the engine does before it verifies, which finds nothing left to do in here."""
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


def leave_only(logits: torch.Tensor, tokens: torch.Tensor) -> None:
    """Make ``tokens [N]`` the only ones that logits ``[N, V]`` leave. Rows of a negative token stay as they are."""
    is_drawn, token = tokens[:, None] >= 0, tokens[:, None].clamp(min=0).long()
    kept = logits.gather(1, token).masked_fill(is_drawn, 0.0)
    logits.masked_fill_(is_drawn, -math.inf).scatter_(1, token, kept)
