import json
import os
from pathlib import Path


def variables() -> dict[str, str]:
    """The ``LENVM_*`` variables of this process. If there are none, a plugin's failure must not end the server."""
    return {name: text for name, text in os.environ.items() if name.startswith("LENVM_") and text.strip()}


def is_off() -> bool:
    """Whether the setting ``value_model`` is ``off``, which disables the plugin. Other settings may be invalid."""
    model, file = (os.environ.get(f"LENVM_{name}", "").strip() for name in ("VALUE_MODEL", "CONFIG"))
    if model or not file:
        return model == "off"
    try:
        return json.loads(Path(file).read_text())["value_model"] == "off"
    except (OSError, ValueError, LookupError, TypeError):  # reported by Settings.from_environment
        return False
