import os


def variables() -> dict[str, str]:
    """The ``LENVM_*`` variables of this process. Without any, failures of a plugin must not end a server."""
    return {name: text for name, text in os.environ.items() if name.startswith("LENVM_") and text.strip()}
