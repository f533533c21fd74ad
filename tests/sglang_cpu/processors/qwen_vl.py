"""The engine's processor of Qwen2.5-VL on a CPU, named by ``SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE``.

The engine's own module imports another model's processor, which looks up kernels that are missing here.
"""

import torch

for name in ("fused_sigmoid_mul", "fused_qk_gemma_rmsnorm", "fused_qk_gemma_rmsnorm_with_gate"):
    setattr(torch.ops.sgl_kernel, f"{name}_cpu", None)
torch.ops.sgl_kernel.fused_qkvzba_split_reshape_cat_contiguous_cpu = None

from sglang.srt.multimodal.processors import qwen_vl  # noqa: E402


class QwenVLImageProcessor(qwen_vl.QwenVLImageProcessor):
    """Unchanged. The engine accepts only classes of the package itself."""
