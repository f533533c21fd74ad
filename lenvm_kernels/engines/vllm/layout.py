"""Rows of a step of vLLM, by request and draft. Importable without vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from lenvm_kernels.types import Drafts

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext


class Layout(NamedTuple):
    """Rows of a step. The *nodes* of a request are its last token and its drafts.

    Attributes:
        nodes: nodes per request: 1, or ``1 + D`` with at most ``D`` drafts.
        at: int64 ``[rows]``; the node of each row, counted over all requests.
        first_rows: int64 ``[B]``; the row of each request's first node.
    """

    nodes: int
    at: torch.Tensor
    first_rows: torch.Tensor

    @classmethod
    def of_step(cls, ctx: LogitsContext, max_drafts: int, places: torch.Tensor) -> Layout:
        """The layout of a step's rows.

        Args:
            ctx: the engine's description of the step.
            max_drafts: D.
            places: int64 ``[slots]``; scratch memory.
        """
        rows, requests = len(ctx.pos), len(ctx.idx_mapping)
        row = torch.arange(rows, device=places.device)
        if rows == requests:
            return cls(1, row, row)
        nodes = 1 + max_drafts
        places[ctx.idx_mapping.long()] = row[:requests]
        request = places[ctx.expanded_idx_mapping.long()]
        first_rows = torch.full((requests,), rows, device=places.device).scatter_reduce_(0, request, row, "amin")
        return cls(nodes, request * nodes + ctx.expanded_local_pos, first_rows)

    def of_nodes(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows [rows, N]`` by node, 0 for nodes without a row."""
        nodes = len(self.first_rows) * self.nodes
        return rows if len(rows) == nodes else rows.new_zeros(nodes, rows.shape[1]).index_copy_(0, self.at, rows)

    def drafts(self, input_ids: torch.Tensor) -> Drafts | None:
        """The drafts of the requests as chains; None if the step has none.

        Args:
            input_ids: int ``[rows]``; the token of each row.
        """
        if self.nodes == 1:
            return None
        requests, device = len(self.first_rows), input_ids.device
        token_ids = torch.full((requests * self.nodes,), -1, device=device)
        token_ids[self.at] = input_ids.long()
        chain = torch.arange(-1, self.nodes - 2, dtype=torch.int32, device=device).repeat(requests, 1)
        return Drafts(token_ids.view(requests, -1)[:, 1:], chain)
