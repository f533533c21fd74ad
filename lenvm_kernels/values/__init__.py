"""The value model: its checkpoint, its ragged batches and its forward; and the probe, which replaces the model."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lenvm_kernels.values.checkpoint import ValueModelConfig as ValueModelConfig
    from lenvm_kernels.values.config import LenVMConfig as LenVMConfig
    from lenvm_kernels.values.images import ImageTokens as ImageTokens
    from lenvm_kernels.values.images import image_positions as image_positions
    from lenvm_kernels.values.model import ValueModel as ValueModel
    from lenvm_kernels.values.probe import LengthProbe as LengthProbe
    from lenvm_kernels.values.ragged_batch import KVCache as KVCache
    from lenvm_kernels.values.ragged_batch import RaggedBatch as RaggedBatch

# Imported on first use, so that an engine's front end reads a model's configuration without loading the operators.
_MODULES = {
    "ImageTokens": "images",
    "KVCache": "ragged_batch",
    "LenVMConfig": "config",
    "RaggedBatch": "ragged_batch",
    "LengthProbe": "probe",
    "ValueModel": "model",
    "ValueModelConfig": "checkpoint",
    "image_positions": "images",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
