"""``lenvm export``: the demo's models as directories in Hugging Face format, for engines."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from lenvm_kernels.loading import PROBE, VALUE
from lenvm_kernels.loading.arguments import usage_errors


def add(commands: Any) -> None:
    """Add the subcommand to ``lenvm``."""
    parser = commands.add_parser(
        "export",
        help="write the demo's models as directories, for engines",
        description="Write SmolLM2 and its value model in Hugging Face format to DIR/base and DIR/value (540 MB), and "
        "its probe to DIR/probe, for use with an engine. lenvm_config.json has their gamma.",
    )
    parser.set_defaults(run=run_command)
    parser.add_argument("folder", metavar="DIR", type=Path, help="directory in which the three are created")


def run_command(args: argparse.Namespace) -> None:
    """Write the models and print their paths. The base model and the value model share the file of weights."""
    base, value, probe = (args.folder / name for name in ("base", "value", "probe"))
    with usage_errors():
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        from lenvm_kernels.loading.models import DEMO, locate, quiet, source_of

        for directory in (base, value, probe):
            directory.mkdir(parents=True)
        quiet()
        source = source_of(locate("--model", DEMO))
        dequantized = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        # transformers treats a model from a GGUF file as quantized and cannot save it.
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(**source), dtype=torch.float32)
        model.load_state_dict(dequantized.state_dict())
        model.generation_config = dequantized.generation_config
        model.save_pretrained(base)
        AutoTokenizer.from_pretrained(**source).save_pretrained(base)
        for file in base.iterdir():
            (value / file.name).symlink_to(Path("..") / "base" / file.name)
        for packaged, directory in ((VALUE, value), (PROBE, probe)):
            shutil.copytree(packaged, directory, dirs_exist_ok=True)
    print(f"base model: {base}\nvalue model: {value}\nprobe: {probe}")
