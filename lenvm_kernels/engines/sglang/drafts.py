"""Draft tokens of SGLang's speculative decoding, and their verification by the tokens drawn at their nodes.

The engine verifies a tree of drafts from the logits at all of its nodes (:class:`Drafts`). At the nodes of guided
requests, a token is drawn from the candidates, and all others are masked out of the logits. Any verification of the
engine, by rejection with any threshold or by argmax, then accepts a draft exactly if it is that token, and otherwise
draws that token. So speculation changes neither the text of a guided request with a seed nor any distribution.
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

# Changes that the engine makes to logits before verification, one row per request.
_CHANGES = ("acc_additive_penalties", "acc_scaling_penalties", "logit_bias")


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


def leave_only(logits: torch.Tensor, tokens: torch.Tensor) -> None:
    """Mask all tokens but ``tokens [N]`` in logits ``[N, V]``. Rows with a negative token are unchanged."""
    is_drawn, token = tokens[:, None] >= 0, tokens[:, None].clamp(min=0).long()
    kept = logits.gather(1, token).masked_fill(is_drawn, 0.0)
    logits.masked_fill_(is_drawn, -math.inf).scatter_(1, token, kept)
