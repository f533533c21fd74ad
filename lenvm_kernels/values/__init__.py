"""The value model: checkpoint, ragged batches and forward; and the probe, a smaller replacement for it."""

from typing import TYPE_CHECKING

from lenvm_kernels import imported_on_use

if TYPE_CHECKING:
    from lenvm_kernels.values.checkpoint import ValueModelConfig as ValueModelConfig
    from lenvm_kernels.values.config import LenVMConfig as LenVMConfig
    from lenvm_kernels.values.images import ImageTokens as ImageTokens
    from lenvm_kernels.values.images import image_positions as image_positions
    from lenvm_kernels.values.model import ValueModel as ValueModel
    from lenvm_kernels.values.probe import LengthProbe as LengthProbe
    from lenvm_kernels.values.ragged_batch import KVCache as KVCache
    from lenvm_kernels.values.ragged_batch import RaggedBatch as RaggedBatch

# Imported on first use, so that an engine's front end can read a configuration without loading the operators.
_MODULES = {"config": "LenVMConfig", "images": "ImageTokens image_positions", "ragged_batch": "KVCache RaggedBatch"}
_MODULES |= {"checkpoint": "ValueModelConfig", "model": "ValueModel", "probe": "LengthProbe"}
__getattr__ = imported_on_use(__name__, _MODULES)
