"""The sections of ``lenvm doctor``, of which :func:`examine` looks at one. Nothing here raises."""

from __future__ import annotations

from collections.abc import Callable

from lenvm_kernels.doctor import device, engines, installed
from lenvm_kernels.doctor.check import WRONG, Check, first_line

SECTIONS: dict[str, Callable[[], list[Check]]] = {
    "installed": installed.look,
    "device": device.look_at_devices,
    "kernels": device.look_at_kernels,
    "settings": engines.look_at_settings,
    "hooks": engines.look_at_hooks,
    "vllm": engines.look_at_vllm,
}


def examine(section: str) -> list[Check]:
    """Look at one of the :data:`SECTIONS`.

    The section ``hooks`` loads SGLang's plugins into this process, as SGLang itself does: the hooks stay.
    """
    try:
        return SECTIONS[section]()
    except Exception as error:  # a broken installation breaks in any way, and the other sections still tell something
        return [Check(section, WRONG, first_line(error), hint="mend this first; the section ended here")]
