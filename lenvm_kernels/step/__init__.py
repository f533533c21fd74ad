"""The guided step of an engine, and the memory it needs."""

from lenvm_kernels.step.inputs import EngineSlots, PreparedStep, Sampling, StepBatch, StepConfig
from lenvm_kernels.step.memory import working_bytes
from lenvm_kernels.step.outputs import StepOutput
from lenvm_kernels.step.sources import ConstantValues, ModelValues, ProbeValues, ValueSource, value_source
from lenvm_kernels.step.step import GuidedStep

__all__ = [
    "ConstantValues",
    "EngineSlots",
    "GuidedStep",
    "ModelValues",
    "PreparedStep",
    "ProbeValues",
    "Sampling",
    "StepBatch",
    "StepConfig",
    "StepOutput",
    "ValueSource",
    "value_source",
    "working_bytes",
]
