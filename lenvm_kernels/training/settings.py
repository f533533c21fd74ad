"""Settings of a fit."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields

from lenvm_kernels.cli_arguments import TRUNK, VALUE_MODEL

# Flags that only one kind has, and their defaults.
OF_KIND = {
    TRUNK: {"layers": None, "states": 1_000_000},
    VALUE_MODEL: {
        "lora_rank": 16,
        "batch_size": 8,
        "accumulation": 8,
        "gradient_checkpointing": False,
        "save_steps": 100,
    },
}
# Learning rates of a trunk, of adapters, and of all weights (arXiv 2604.27039).
RATE_TRUNK, RATE_ADAPTERS, RATE_FULL = 2e-3, 2e-4, 2e-5


@dataclass(frozen=True)
class Fitting:
    """The flags of ``lenvm fit``.

    Attributes:
        kind: ``"trunk"`` or ``"value-model"``.
        gamma: discount of the values. If None, the 99th percentile of the lengths has the value 0.99.
        epochs: passes over the answers.
        learning_rate: highest learning rate of the trunk, the backbone or its adapters.
        layers: layers whose states a trunk reads, see :class:`TrunkConfig`. If None, the states of the output layer.
        states: maximum number of tokens that a trunk learns from.
        lora_rank: rank of the adapters of a value model; 0 trains all weights.
        batch_size: answers per forward and process.
        accumulation: forwards per optimizer step.
        gradient_checkpointing: recompute activations in the backward pass.
        save_steps: optimizer steps between two checkpoints.
        seed: seed of initial weights, dropout and the order of the answers.
        device: torch device.
        dtype: ``"float32"`` or ``"bfloat16"``, of forwards and of frozen weights.
    """

    kind: str
    gamma: float | None
    epochs: int
    learning_rate: float
    layers: tuple[int, ...] | None
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
        """The settings of a command line.

        Raises:
            ValueError: a flag has a wrong value, or belongs to the other kind; the message names it.
        """
        given = {field.name: getattr(args, field.name) for field in fields(cls)}
        for kind, defaults in OF_KIND.items():
            for name, default in defaults.items():
                if given[name] is None:
                    given[name] = default
                elif kind != args.kind:
                    raise ValueError(f"--{name.replace('_', '-')} requires --kind {kind}, got --kind {args.kind}")
        if args.gamma is not None and not 0 < args.gamma < 1:
            raise ValueError(f"--gamma must be in (0, 1), got {args.gamma}")
        if args.dtype == "float16":
            raise ValueError("--dtype must be float32 or bfloat16 in a training, got 'float16'")
        if given["lora_rank"] < 0:
            raise ValueError(f"--lora-rank must be at least 0, got {given['lora_rank']}")
        if args.kind == VALUE_MODEL and args.device not in ("cpu", "cuda"):  # every process takes the GPU of its rank
            raise ValueError(f"--device must be cpu or cuda with --kind {VALUE_MODEL}, got {args.device!r}")
        if given["learning_rate"] is None:
            of_value_model = RATE_ADAPTERS if given["lora_rank"] else RATE_FULL
            given["learning_rate"] = RATE_TRUNK if args.kind == TRUNK else of_value_model
        if given["layers"] is not None:
            given["layers"] = tuple(given["layers"])
        return cls(**given)
