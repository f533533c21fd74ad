"""Makes torchvision importable with a CPU build of torch.

The operators in its wheel are a CUDA build and do not load, so their schemas are missing. Text generation does not call
them.
"""

import torch

library = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    library.define(f"{name}(Tensor x) -> Tensor")
for name in ("roi_align", "ps_roi_align", "roi_pool", "ps_roi_pool", "deform_conv2d"):
    library.define(f"{name}(Tensor x) -> Tensor")
    library.define(f"_{name}_backward(Tensor x) -> Tensor")
