"""Whether the vLLM that is here can be guided."""

from __future__ import annotations

import importlib
import os

from lenvm_kernels.doctor.check import MISSING, OK, WRONG, Check, first_line, quiet
from lenvm_kernels.doctor.installed import PACKAGE, VLLM_ADAPTER, version_of


def look() -> list[Check]:
    """Whether this vLLM runs logits processors of its second model runner, and has what ours wraps."""
    if version_of("vllm") is None:
        hint = 'nothing to look at without it: pip install "lenvm-kernels[vllm]"'
        return [Check("vllm", MISSING, "not installed", hint=hint)]
    try:
        with quiet():
            from vllm.triton_utils import HAS_TRITON
            from vllm.v1.worker.gpu.sample.states import SamplingStates

            importlib.import_module(VLLM_ADAPTER)
    except Exception as error:
        hint = 'vLLM cannot start either: mend it, or pip install "lenvm-kernels[vllm]" into a new environment'
        return [Check("vllm", WRONG, f"importing vLLM failed: {first_line(error)}", hint=hint)]
    differs = f"this vLLM differs: use a release that {PACKAGE} accepts, or a later {PACKAGE}"
    checks = [
        Check(f"SamplingStates.{name}", OK, "is there")
        if callable(getattr(SamplingStates, name, None))
        else Check(f"SamplingStates.{name}", WRONG, "is not there", hint=differs)
        for name in ("get_top_k_top_p", "apply_min_p")
    ]
    name, given = "VLLM_USE_V2_MODEL_RUNNER", os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
    if given == "1" or (given is None and HAS_TRITON):
        return [*checks, Check("model runner", OK, "the second")]
    hint = f"set {name}=1: only the second model runner can be guided"
    return [*checks, Check("model runner", WRONG, "the first", "the second", hint)]
