"""The value model: its checkpoint, the tokens of a forward, and the forward."""

from lenvm_kernels.value_model.checkpoint import HEAD_FILE, ValueModelConfig
from lenvm_kernels.value_model.model import ValueModel
from lenvm_kernels.value_model.ragged_batch import KVCache, RaggedBatch

__all__ = ["HEAD_FILE", "KVCache", "RaggedBatch", "ValueModel", "ValueModelConfig"]
