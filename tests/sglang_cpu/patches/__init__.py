"""Patches for the engine's processes, which import this module as ``SGLANG_EXTERNAL_MODEL_PACKAGE``."""

import os
from pathlib import Path

from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.runtime_context import get_parallel

from lenvm_kernels.step import GuidedStep

# Called when the batch of a data-parallel rank is padded, but this backend lacks it.
TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda _: 1


def fail_on_request(method):
    """Make a method of the guided step fail once on a rank, both named in the file LENVM_TEST_FAIL."""
    original, file = getattr(GuidedStep, method), Path(os.environ["LENVM_TEST_FAIL"])

    def failing(*args, **kwargs):
        if file.exists() and file.read_text() == f"{method} {get_parallel().tp_rank}":
            file.unlink()
            raise RuntimeError("a requested failure")
        return original(*args, **kwargs)

    setattr(GuidedStep, method, failing)


if "LENVM_TEST_FAIL" in os.environ:
    for method in ("extend", "step"):
        fail_on_request(method)
if "LENVM_TEST_SPECULATION" in os.environ:
    from tests.sglang_cpu.patches import speculation

    speculation.install()
