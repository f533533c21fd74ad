"""Triton kernels for LenVM length-guided decoding (arXiv 2604.27039), with pure-PyTorch references.

:class:`GuidedStep` runs a full guided decode step for an engine. It calls these operators in order: :func:`limit_span`,
:func:`begin_step`, :func:`topk_candidates`; then, for a value model, :func:`pack_drafts`, :func:`lay_out`,
:func:`embed_tokens`, :func:`ragged_linear`, :func:`rope_cache`, :func:`value_tree_attention` and :func:`value_head`,
or, for a probe, :func:`candidate_values`; then :func:`draw` and :func:`verify_drafts`. :func:`reweight_scatter`
computes the probabilities that :func:`draw` draws from, and scatters them. :func:`parse_guidance` and
:class:`GuidanceTable` hold request parameters, :class:`ValueModel` is the value model, and :func:`generate` does
everything in one call with ``transformers``.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lenvm_kernels.engines.transformers.generate import generate as generate
    from lenvm_kernels.guidance.params import GuidanceParams as GuidanceParams
    from lenvm_kernels.guidance.params import parse_guidance as parse_guidance
    from lenvm_kernels.guidance.sentences import text_breaks_of as text_breaks_of
    from lenvm_kernels.guidance.table import GuidanceTable as GuidanceTable
    from lenvm_kernels.ops.begin_step import begin_step as begin_step
    from lenvm_kernels.ops.begin_step import empty_history as empty_history
    from lenvm_kernels.ops.candidate_values import candidate_values as candidate_values
    from lenvm_kernels.ops.draw import draw as draw
    from lenvm_kernels.ops.embed_tokens import embed_tokens as embed_tokens
    from lenvm_kernels.ops.lay_out import lay_out as lay_out
    from lenvm_kernels.ops.limit_span import limit_span as limit_span
    from lenvm_kernels.ops.pack_drafts import pack_drafts as pack_drafts
    from lenvm_kernels.ops.ragged_linear import ragged_linear as ragged_linear
    from lenvm_kernels.ops.reweight_scatter import reweight_scatter as reweight_scatter
    from lenvm_kernels.ops.rope_cache import rope_cache as rope_cache
    from lenvm_kernels.ops.topk_candidates import empty_scored as empty_scored
    from lenvm_kernels.ops.topk_candidates import topk_candidates as topk_candidates
    from lenvm_kernels.ops.value_head import value_head as value_head
    from lenvm_kernels.ops.value_tree_attention import value_tree_attention as value_tree_attention
    from lenvm_kernels.ops.verify_drafts import verify_drafts as verify_drafts
    from lenvm_kernels.paged_slots import OutOfSlots as OutOfSlots
    from lenvm_kernels.paged_slots import PagedSlots as PagedSlots
    from lenvm_kernels.step import ConstantValues as ConstantValues
    from lenvm_kernels.step import EngineSlots as EngineSlots
    from lenvm_kernels.step import GuidedStep as GuidedStep
    from lenvm_kernels.step import ModelValues as ModelValues
    from lenvm_kernels.step import PreparedStep as PreparedStep
    from lenvm_kernels.step import ProbeValues as ProbeValues
    from lenvm_kernels.step import Sampling as Sampling
    from lenvm_kernels.step import StepBatch as StepBatch
    from lenvm_kernels.step import StepConfig as StepConfig
    from lenvm_kernels.step import StepOutput as StepOutput
    from lenvm_kernels.step import value_source as value_source
    from lenvm_kernels.step import working_bytes as working_bytes
    from lenvm_kernels.types import Candidates as Candidates
    from lenvm_kernels.types import CandidateTrees as CandidateTrees
    from lenvm_kernels.types import DeltaTokens as DeltaTokens
    from lenvm_kernels.types import Drafts as Drafts
    from lenvm_kernels.types import DrawnTokens as DrawnTokens
    from lenvm_kernels.types import EmbeddedTokens as EmbeddedTokens
    from lenvm_kernels.types import Filters as Filters
    from lenvm_kernels.types import GuidanceColumns as GuidanceColumns
    from lenvm_kernels.types import Mode as Mode
    from lenvm_kernels.types import RaggedLayout as RaggedLayout
    from lenvm_kernels.types import ScoredCandidates as ScoredCandidates
    from lenvm_kernels.types import Status as Status
    from lenvm_kernels.types import StepHistory as StepHistory
    from lenvm_kernels.types import StepRequests as StepRequests
    from lenvm_kernels.types import TextBreak as TextBreak
    from lenvm_kernels.types import VerifiedTokens as VerifiedTokens
    from lenvm_kernels.values import ImageTokens as ImageTokens
    from lenvm_kernels.values import KVCache as KVCache
    from lenvm_kernels.values import LengthProbe as LengthProbe
    from lenvm_kernels.values import LenVMConfig as LenVMConfig
    from lenvm_kernels.values import RaggedBatch as RaggedBatch
    from lenvm_kernels.values import ValueModel as ValueModel
    from lenvm_kernels.values import ValueModelConfig as ValueModelConfig
    from lenvm_kernels.values import image_positions as image_positions

__version__ = "0.1.0"

# Modules are imported on first use, so that `lenvm --help` does not wait for torch and transformers.
_OPERATORS = (
    "begin_step candidate_values draw embed_tokens lay_out limit_span pack_drafts ragged_linear reweight_scatter "
    "rope_cache topk_candidates value_head value_tree_attention verify_drafts"
)
_MODULES = {f"ops.{name}": name for name in _OPERATORS.split()} | {
    "engines.transformers.generate": "generate",
    "guidance": "GuidanceParams GuidanceTable parse_guidance text_breaks_of",
    "ops.begin_step": "begin_step empty_history",
    "ops.topk_candidates": "empty_scored topk_candidates",
    "paged_slots": "OutOfSlots PagedSlots",
    "step": (
        "ConstantValues EngineSlots GuidedStep ModelValues PreparedStep ProbeValues Sampling StepBatch StepConfig "
        "StepOutput value_source working_bytes"
    ),
    "types": (
        "CandidateTrees Candidates DeltaTokens Drafts DrawnTokens EmbeddedTokens Filters GuidanceColumns Mode "
        "RaggedLayout ScoredCandidates Status StepHistory StepRequests TextBreak VerifiedTokens"
    ),
    "values": ("ImageTokens KVCache LengthProbe LenVMConfig RaggedBatch ValueModel ValueModelConfig image_positions"),
}
__all__ = sorted(" ".join(_MODULES.values()).split())


def imported_on_use(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package: imports a name on first use. ``modules`` has the names of each module."""
    module_of = {name: f"{package}.{module}" for module, names in modules.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(module_of[name]), name)

    return get


__getattr__ = imported_on_use(__name__, _MODULES)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
