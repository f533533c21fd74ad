"""Entry point of the plugin for unforked SGLang (``sglang.srt.plugins``). Does not import the engine or torch.

The engine's loader only logs exceptions, so if any ``LENVM_*`` variable is set, a plugin that cannot be imported or
does not fit the engine ends the process with ``SystemExit``.
"""

from __future__ import annotations

import logging
import sys

from lenvm_kernels.engines import variables

logger = logging.getLogger(__name__)


def plugin() -> None:
    """Register the hooks. The engine calls this function in each of its processes."""
    managers = "sglang.srt.managers"
    if f"{managers}.detokenizer_manager" in sys.modules and f"{managers}.scheduler" not in sys.modules:
        return  # the detokenizer process calls no hooked function
    try:
        from lenvm_kernels.engines.sglang.hooks import register

        register()
    except Exception as error:
        if variables():
            raise SystemExit(f"LenVM: the plugin of SGLang cannot be used: {error}") from error
        logger.warning("LenVM: guidance is off, because the plugin cannot be used: %s", error)
