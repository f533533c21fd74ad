"""pytest plugin for ttsem, which runs compiled TTIR on a CPU that it presents as a GPU: what it does not pretend."""

import torch

torch.Tensor.pin_memory = lambda tensor, *_: tensor  # needs a real GPU
