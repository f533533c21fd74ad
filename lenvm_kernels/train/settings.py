"""Settings of a fit."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

# Results of lenvm fit and lenvm train.
VALUE_MODEL, PROBE = KINDS = ("value-model", "probe")
# Flags of only one kind, and their defaults.
OF_KIND: dict[str, dict[str, Any]] = {
    PROBE: dict(layers=None, states=1_000_000),
    VALUE_MODEL: dict(lora_rank=16, batch_size=8, accumulation=8, gradient_checkpointing=False, save_steps=100),
}
# Learning rates of a probe, of adapters, and of all weights (arXiv 2604.27039).
RATE_PROBE, RATE_ADAPTERS, RATE_FULL = 2e-3, 2e-4, 2e-5


@dataclass(frozen=True)
class Fitting:
    """The flags of ``lenvm fit``. Flags of the other kind have their defaults.

    ``dtype`` is ``"float32"`` or ``"bfloat16"``, for forwards and frozen weights.
    """

    kind: str
    gamma: float | None
    epochs: int
    learning_rate: float
    layers: Sequence[int] | None
    states: int
    lora_rank: int
    batch_size: int
    accumulation: int
    gradient_checkpointing: bool
    save_steps: int
    seed: int
    device: str
    dtype: str

    @classmethod
    def of(cls, args: argparse.Namespace) -> Fitting:
        """The settings of a command line; errors name the flag."""
        given = {field.name: getattr(args, field.name) for field in fields(cls)}
        for kind, defaults in OF_KIND.items():
            for name, default in defaults.items():
                if given[name] is None:
                    given[name] = default
                elif kind != args.kind:
                    raise ValueError(f"--{name.replace('_', '-')} requires --kind {kind}, got --kind {args.kind}")
        if args.dtype == "float16":
            raise ValueError("--dtype must be float32 or bfloat16 for training, got 'float16'")
        if args.kind == VALUE_MODEL and args.device not in ("cpu", "cuda"):  # each process uses the GPU of its rank
            raise ValueError(f"--device must be cpu or cuda with --kind {VALUE_MODEL}, got {args.device!r}")
        if given["learning_rate"] is None:
            of_value_model = RATE_ADAPTERS if given["lora_rank"] else RATE_FULL
            given["learning_rate"] = RATE_PROBE if args.kind == PROBE else of_value_model
        return cls(**given)
