"""pytest plugin for ttsem, which runs compiled TTIR on a CPU that it presents as a GPU: what it does not pretend."""

import os

import torch

torch.Tensor.pin_memory = lambda tensor, *_: tensor  # needs a real GPU
os.environ["LENVM_PDL"] = "0"  # waits for launches that still run are instructions of a GPU; read as the operators load
