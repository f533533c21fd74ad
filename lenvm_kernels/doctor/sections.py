"""The sections of ``lenvm doctor``: a module each, of which :func:`examine` looks at one. Nothing here raises."""

from __future__ import annotations

from collections.abc import Callable

from lenvm_kernels.doctor import device, hooks, installed, kernels, settings, vllm
from lenvm_kernels.doctor.check import WRONG, Check, first_line

SECTIONS: dict[str, Callable[[], list[Check]]] = {
    "installed": installed.look,
    "device": device.look,
    "kernels": kernels.look,
    "settings": settings.look,
    "hooks": hooks.look,
    "vllm": vllm.look,
}


def examine(section: str) -> list[Check]:
    """Look at one of the :data:`SECTIONS`.

    The section ``hooks`` loads SGLang's plugins into this process, as SGLang itself does: the hooks stay.
    """
    try:
        return SECTIONS[section]()
    except Exception as error:  # a broken installation breaks in any way, and the other sections still tell something
        return [Check(section, WRONG, first_line(error), hint="mend this first; the section ended here")]
