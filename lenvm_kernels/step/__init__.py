"""The guided step of an engine, and the memory it needs."""

from lenvm_kernels.step.inputs import EngineSlots, Sampling, StepBatch, StepConfig
from lenvm_kernels.step.memory import working_bytes
from lenvm_kernels.step.outputs import StepOutput
from lenvm_kernels.step.step import GuidedStep

__all__ = ["EngineSlots", "GuidedStep", "Sampling", "StepBatch", "StepConfig", "StepOutput", "working_bytes"]
