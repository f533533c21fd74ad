"""What benchmarks on the demo's models share: their arguments, the prompts, and the file of numbers."""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.harness import flags
from bench.harness.storing import write_json
from lenvm_kernels.loading import held_out_prompts, spread
from lenvm_kernels.loading.models import DEMO, Models


@dataclass(frozen=True)
class DemoRuns:
    """The models, and the prompts that each setting answers with each seed."""

    models: Models
    prompts: Sequence[str]
    seeds: Sequence[int]
    json: Path | None

    @classmethod
    def of(cls, args: argparse.Namespace, device: str = "cpu") -> "DemoRuns":
        """By the arguments of :func:`parser`."""
        prompts = spread(held_out_prompts(), args.prompts)
        return cls(Models.load(DEMO, DEMO, device=device, dtype=torch.float32), prompts, args.seeds, args.json)

    def write(self, command: str, rows: Sequence[Any], **about: Any) -> None:
        """The rows, dataclasses each, with what they are of; nowhere if no file was named."""
        if self.json is None:
            return
        content = dict(command=f"python -m {command}", date=time.strftime("%Y-%m-%d"), seeds=self.seeds)
        content |= dict(prompts=len(self.prompts), **about, torch=torch.__version__)
        write_json(self.json, content | {"rows": rows})


def parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments of all of them."""
    arguments = flags.parser(description, json="write the numbers to a file")
    arguments.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    arguments.add_argument("--prompts", type=int, default=16, help="held-out prompts to answer with each seed")
    return arguments
