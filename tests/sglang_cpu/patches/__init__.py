"""What tests change in the engine's processes, each of which imports this as ``SGLANG_EXTERNAL_MODEL_PACKAGE``."""

import os
from pathlib import Path

from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.runtime_context import get_parallel

from lenvm_kernels.step import GuidedStep

# The engine asks for it when it pads the batch of a data-parallel rank, and forgot it in this one of its backends.
TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda _: 1


def fail_when_told(method):
    """Let a method of the guided step fail on the second rank, once, when the file LENVM_TEST_FAIL has its name."""
    original, file = getattr(GuidedStep, method), Path(os.environ["LENVM_TEST_FAIL"])

    def failing(*args, **kwargs):
        if get_parallel().tp_rank == 1 and file.exists() and file.read_text() == method:
            file.unlink()
            raise RuntimeError("told to fail")
        return original(*args, **kwargs)

    setattr(GuidedStep, method, failing)


if "LENVM_TEST_FAIL" in os.environ:
    for method in ("extend", "step"):
        fail_when_told(method)
if "LENVM_TEST_SPECULATION" in os.environ:
    from tests.sglang_cpu.patches import speculation

    speculation.install()
