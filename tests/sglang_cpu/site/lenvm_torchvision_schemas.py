"""Lets torchvision be imported beside a CPU build of torch.

Its wheel's operators are a CUDA build and do not load, and it then looks for their schemas in vain. Nothing that
generates text calls them.
"""

import torch

library = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    library.define(f"{name}(Tensor x) -> Tensor")
for name in ("roi_align", "ps_roi_align", "roi_pool", "ps_roi_pool", "deform_conv2d"):
    library.define(f"{name}(Tensor x) -> Tensor")
    library.define(f"_{name}_backward(Tensor x) -> Tensor")
