"""The engine's processor of Qwen2.5-VL on a CPU, named by ``SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE``.

The engine's module imports another model's processor, which needs kernels that a CPU lacks.
"""

import torch

for name in ("fused_sigmoid_mul", "fused_qk_gemma_rmsnorm", "fused_qk_gemma_rmsnorm_with_gate"):
    setattr(torch.ops.sgl_kernel, f"{name}_cpu", None)
torch.ops.sgl_kernel.fused_qkvzba_split_reshape_cat_contiguous_cpu = None

from sglang.srt.multimodal.processors import qwen_vl  # noqa: E402


class QwenVLImageProcessor(qwen_vl.QwenVLImageProcessor):
    """Unchanged, because the engine only accepts classes of this package."""
