"""Rows of a step of vLLM, by request and draft. Importable without vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from lenvm_kernels.types import Drafts

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext


class Layout(NamedTuple):
    """Rows of ``B`` requests of a step. The *nodes* of a request are its last token and its drafts.

    Attributes:
        slots: int64 ``[B]``; slots of the requests.
        rows: int64 ``[B, N]``; the engine's row of each node, arbitrary for nodes that a request does not have.
        at: int64 ``[rows]``; the node of each row, counted over all requests; ``B N`` for rows of other requests.
        is_whole: node ``i`` is row ``i``: the step has no other rows, and no request lacks a node.
    """

    slots: torch.Tensor
    rows: torch.Tensor
    at: torch.Tensor
    is_whole: bool

    @classmethod
    def of_step(cls, ctx: LogitsContext) -> Layout:
        """The layout of all requests of a step without drafts."""
        at = torch.arange(len(ctx.pos), device=ctx.pos.device)
        return cls(ctx.idx_mapping.long(), at[:, None], at, True)

    @classmethod
    def of_requests(cls, ctx: LogitsContext, places: torch.Tensor, nodes: int, requests: torch.Tensor) -> Layout:
        """The layout of some requests of a step with drafts.

        Args:
            ctx: the engine's description of the step.
            places: int64 ``[B]``; places of the requests in the batch.
            nodes: N.
            requests: int64 ``[slots]``; scratch memory.
        """
        slots, count, rows = ctx.idx_mapping.long()[places], len(places), len(ctx.pos)
        row = torch.arange(rows, device=places.device)
        requests.fill_(count)
        requests[slots] = torch.arange(count, device=places.device)
        request = requests[ctx.expanded_idx_mapping.long()]
        first = torch.full((count + 1,), rows, device=places.device).scatter_reduce_(0, request, row, "amin")[:count]
        of_nodes = (first[:, None] + torch.arange(nodes, device=places.device)).clamp(max=rows - 1)
        at = torch.where(request < count, request * nodes + ctx.expanded_local_pos, count * nodes)
        return cls(slots, of_nodes, at, rows == count * nodes and count == len(ctx.idx_mapping))

    def by_node(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows [rows, X]`` by node: ``[B N, X]``."""
        return rows if self.is_whole else rows[self.rows.flatten()]

    def by_row(self, nodes: torch.Tensor, otherwise: torch.Tensor | int) -> torch.Tensor:
        """``nodes [B N, ...]`` by row; rows of other requests are ``otherwise``."""
        if self.is_whole:
            return nodes
        is_ours = (self.at < len(nodes)).view(-1, *[1] * (nodes.dim() - 1))
        return torch.where(is_ours, nodes[self.at.clamp(max=len(nodes) - 1)], otherwise)

    def drafts(self, input_ids: torch.Tensor) -> Drafts | None:
        """The drafts of the requests as chains; None if the step has none.

        Args:
            input_ids: int ``[rows]``; the token of each row.
        """
        requests, nodes = self.rows.shape
        if nodes == 1:
            return None
        token_ids = torch.full((requests * nodes + 1,), -1, device=input_ids.device)
        token_ids[self.at] = input_ids.long()
        chain = torch.arange(-1, nodes - 2, dtype=torch.int32, device=input_ids.device).repeat(requests, 1)
        return Drafts(token_ids[:-1].view(requests, -1)[:, 1:], chain)
