"""Parts of large batches: a step of more than :data:`MAX_ROWS` requests runs in several parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lenvm_kernels.step.inputs import MAX_ROWS, PreparedStep
from lenvm_kernels.step.stages import StepCall


@dataclass(frozen=True)
class Part:
    """Some requests of a batch, and their nodes; ``is_last`` if no other requests follow."""

    requests: slice
    nodes: slice
    is_last: bool

    def of_requests(self, x: Any) -> Any:
        """The part of tensors ``[B, ...]``: a tensor, a named tuple, or None."""
        return _rows(x, self.requests)

    def of_nodes(self, x: Any) -> Any:
        """The part of tensors ``[B (1 + D), ...]``."""
        return _rows(x, self.nodes)

    def of(self, prepared: PreparedStep) -> PreparedStep:
        """The part of a prepared batch. Only the last part counts as a step."""
        batch = prepared.batch
        return prepared._replace(
            batch=self.of_requests(batch)._replace(
                states=self.of_nodes(batch.states), counts=batch.counts and self.is_last
            ),
            drafts=self.of_requests(prepared.drafts),
            spans=self.of_nodes(prepared.spans),
        )

    def of_call(self, call: StepCall) -> StepCall:
        """The part of a step's arguments."""
        return call._replace(scores=self.of_nodes(call.scores), vocab_mask=self.of_nodes(call.vocab_mask))


def parts_of(requests: int, nodes: int) -> Iterator[Part]:
    """The parts of a batch of ``requests`` with ``nodes`` each."""
    for first in range(0, requests, MAX_ROWS):
        end = min(first + MAX_ROWS, requests)
        yield Part(slice(first, end), slice(first * nodes, end * nodes), end == requests)


def _rows(x: Any, rows: slice) -> Any:
    if isinstance(x, torch.Tensor):
        return x[rows]
    return type(x)(*(_rows(field, rows) for field in x)) if isinstance(x, tuple) else x
