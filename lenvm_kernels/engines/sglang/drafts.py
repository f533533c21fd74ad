"""Verification of SGLang's draft tokens by the tokens drawn at their nodes. Imported only with speculative decoding.

The engine verifies a tree of drafts from the logits at all of its nodes (:class:`Drafts`). At the nodes of guided
requests, a token is drawn from the candidates, and all other tokens are masked out of the logits. The engine's
verification, by argmax or by rejection with any threshold, then accepts a draft only if it equals the drawn token, and
otherwise samples the drawn token. So speculation changes neither distributions nor the text of a seeded request.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from lenvm_kernels.engines.sglang.guide import SGLangGuide
from lenvm_kernels.step import StepBatch
from lenvm_kernels.types import Drafts, VerifiedTokens

if TYPE_CHECKING:
    from sglang.srt.constrained.base_grammar_backend import GrammarMask
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.speculative.eagle_info import EagleVerifyInput


def verify(
    guide: SGLangGuide,
    original: Callable,
    verify_input: EagleVerifyInput,
    batch: ScheduleBatch,
    logits_output: LogitsProcessorOutput,
    grammar_mask: GrammarMask | None = None,
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
    unmasked: torch.Tensor | None = None

    def apply(logits: torch.Tensor) -> None:
        """Replaces the grammar's mask, which is the engine's last change to the logits before verification."""
        nonlocal unmasked
        if grammar_mask is not None:
            grammar_mask.apply(logits)
        # In the engine's tensors, node 0 is the last token of the sequence.
        token_ids = verify_input.draft_token.view(-1, verify_input.draft_token_num)
        parents = parents_of(verify_input.retrieve_next_token, verify_input.retrieve_next_sibling)
        drafts, copies = Drafts(token_ids[:, 1:], parents[:, 1:]), batch.return_logprob
        unmasked = guide.leave_drawn(batch, logits, rows, batch.sampling_info, drafts, copies=copies)

    mask = SimpleNamespace(apply=apply)
    verified = predict, lens, index = original(verify_input, batch, logits_output, mask, *args, **kwargs)
    if unmasked is not None:
        logits_output.next_token_logits = unmasked  # for log-probabilities
    nodes = index.clamp(min=0).long()
    guide.report(batch, logits_output, VerifiedTokens(predict[nodes], lens, nodes))
    return verified


def parents_of(first_children: torch.Tensor, next_siblings: torch.Tensor) -> torch.Tensor:
    """int32 ``[B, 1 + D]``: number of the draft before each node, -1 for the root and its children.

    Args:
        first_children: int ``[B, 1 + D]``; the first child of each node, or -1.
        next_siblings: int ``[B, 1 + D]``; the next node with the same parent, or -1.
    """
    (b, nodes), device = first_children.shape, first_children.device
    node = torch.arange(nodes, device=device).expand(b, nodes)

    def sources(targets: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
        """Per node, the node that has it as target, else ``otherwise``."""
        found = torch.cat((otherwise, otherwise[:, :1]), dim=1)  # the last column collects nodes without a target
        return found.scatter(1, targets.long().where(targets >= 0, nodes), node)[:, :nodes]

    first_one = sources(next_siblings, node)
    for _ in range((nodes - 1).bit_length()):  # each round doubles the distance
        first_one = first_one.gather(1, first_one)
    parent = sources(first_children, torch.zeros_like(node))
    return (parent.gather(1, first_one) - 1).int()
