"""The plugin's settings as its processes would read them, misspelt variables, and whether the value model loads."""

from __future__ import annotations

import difflib
import os
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lenvm_kernels.doctor.check import MISSING, OK, WRONG, Check, first_line, quiet

if TYPE_CHECKING:
    from lenvm_kernels.adapters.settings import Settings


def look() -> list[Check]:
    """A check of each wrong variable, of the settings, and of the value model."""
    from lenvm_kernels import timing
    from lenvm_kernels.adapters.settings import CONFIG_VARIABLE, Settings
    from lenvm_kernels.ops._common import PDL_VARIABLE

    # The step reads LENVM_TIMING itself and the operators LENVM_PDL, so that they are no fields of the settings.
    known = {CONFIG_VARIABLE, timing.VARIABLE, PDL_VARIABLE}
    known |= {f"LENVM_{field.name.upper()}" for field in fields(Settings)}
    given = sorted(name for name in os.environ if name.startswith("LENVM_"))
    checks = [_unknown_variable(name, known) for name in given if name not in known]
    try:
        found = Settings.from_environment()
    except ValueError as error:
        return [*checks, Check("settings", WRONG, "refused", hint=first_line(error))]
    if found is None:
        return [*checks, Check("settings", MISSING, "the plugin is off", hint="LENVM_VALUE_MODEL turns it on")]
    values = ", ".join(f"{field.name}={getattr(found, field.name)}" for field in fields(found))
    checks.append(Check("settings", OK, values))
    if found.value_model is not None:
        checks += [*_gamma(found, found.value_model), _value_model(found, found.value_model)]
    return checks


def _unknown_variable(name: str, known: set[str]) -> Check:
    ends = [variable.removeprefix("LENVM_") for variable in sorted(known)]  # the prefix makes any two look alike
    close = difflib.get_close_matches(name.removeprefix("LENVM_"), ends, n=1)
    hint = f"did you mean LENVM_{close[0]}?" if close else f"unset it; there are {', '.join(sorted(known))}"
    return Check(name, WRONG, "not a variable of the plugin", hint=hint)


def _gamma(settings: Settings, path: Path) -> list[Check]:
    """A warning where nothing says the gamma that the value model was trained with."""
    from lenvm_kernels.guidance.fields import DEFAULT_GAMMA
    from lenvm_kernels.value_model.lenvm_config import CONFIG_FILE, DISCOUNTED_RETURN, LenVMConfig

    trained_with_gamma = LenVMConfig.read(path).target_form == DISCOUNTED_RETURN
    if settings.gamma is not None or not trained_with_gamma:
        return []
    hint = f"set LENVM_GAMMA, or gamma in {CONFIG_FILE} beside the model: with a wrong one all lengths are wrong"
    return [Check("gamma", MISSING, f"not set; requests that name none get {DEFAULT_GAMMA}", hint=hint)]


def _value_model(settings: Settings, path: Path) -> Check:
    """Whether the value model's files fit together. On the meta device the weights of safetensors are never read."""
    try:
        from lenvm_kernels.value_model import ValueModel

        with quiet():
            options: dict[str, Any] = dict(dtype=settings.dtype, device="meta", weights=settings.weights)
            model = ValueModel.from_pretrained(path, settings.value_head, **options)
    except Exception as error:  # its files may be anything
        return Check("value model", WRONG, f"{path} does not load", hint=first_line(error))
    config = model.config
    sizes = f"{config.num_layers} layers of {config.hidden_size}, vocabulary {config.vocab_size}"
    return Check("value model", OK, f"{sizes}, {str(model.dtype).removeprefix('torch.')}, with its head")
