"""The guided step of an engine, and the memory it needs."""

from lenvm_kernels.step.memory import working_bytes
from lenvm_kernels.step.step import GuidedStep, StepOutput

__all__ = ["GuidedStep", "StepOutput", "working_bytes"]
