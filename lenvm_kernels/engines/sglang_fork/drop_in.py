"""Drop-in for the LenVM fork of SGLang (eric-ai-lab/Length-Value-Model, ``sglang-LenVM``): :func:`install`.

``docs/sglang.md`` describes how to serve with it and what changes. Importable without the fork.
"""

from __future__ import annotations

import json
import logging
import pkgutil
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lenvm_kernels.engines import signatures
from lenvm_kernels.engines.settings import Settings
from lenvm_kernels.engines.sglang_fork.runner import Filters, InprocRunner, keep_filters
from lenvm_kernels.guidance import GuidanceParams, GuidanceTable, parse_guidance
from lenvm_kernels.ops.reweight_scatter import reweight_scatter
from lenvm_kernels.ops.topk_candidates import MAX_CANDIDATES, topk_candidates
from lenvm_kernels.ops.value_head import value_head
from lenvm_kernels.types import Mode, Status

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.lvm.lvm_guided_sampling import LvmGuidedSampler
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.models.qwen2_lvm import MLP2SiLUValueHead

logger = logging.getLogger(__name__)

_originals: dict[str, Callable] = {}  # functions that install() has replaced, by name
_warned: set[str] = set()
_gamma: float | None = None  # default gamma of requests, from the value model, if known


def _warn_once(message: str, *args: Any) -> None:
    if message not in _warned:
        _warned.add(message)
        logger.warning(message, *args)


def _parsed(req: Req) -> Req:
    """Set ``lenvm_guidance`` of a request once: its parameters and its end-of-sequence tokens.

    A request with bad parameters is not guided.
    """
    if not hasattr(req, "lenvm_guidance"):
        from sglang.srt.lvm.lvm_value_utils import get_eos_token_ids

        custom_params, params = req.sampling_params.custom_params, GuidanceParams()
        try:
            given = custom_params if isinstance(custom_params, dict) else {}
            parsed = parse_guidance(given, gamma=_gamma, constraint="eq")  # the fork's default constraint
            if parsed.has_span:
                raise ValueError("end_token_ids and landing must be absent in the fork, whose sampler reads neither")
            params = parsed
        except ValueError as error:  # an exception would end the scheduler
            logger.warning("LenVM: request %s has bad custom_params and is not guided: %s", req.rid, error)
        req.lenvm_guidance = params, get_eos_token_ids(req)
    return req


def _is_the_forks(function: Callable | None) -> bool:
    """Whether a guidance function is one of the fork's three, which :func:`apply` replaces."""
    names = "lvm_combined_guidance", "lvm_expectation_guidance", "lvm_hard_value_constraint_guidance"
    return function in [pkgutil.resolve_name(f"sglang.srt.lvm.lvm_guided_sampling:{name}") for name in names]


def _load_runner(runner: ModelRunner) -> InprocRunner | None:
    """The value model in the process of a base model's runner; None if the options name none.

    Raises:
        ValueError: an option or a setting; the message names it, its value and what is accepted.
    """
    global _gamma
    options, group = runner.server_args, runner.tp_group
    path = options.lvm_guided_inproc_model_path
    if not options.lvm_guided_inproc or not path:
        return None
    overrides = json.loads(options.lvm_guided_inproc_json_model_override_args or "{}")
    if set(overrides) - {"architectures"}:
        raise ValueError(
            "--lvm-guided-inproc-json-model-override-args must name nothing but architectures, "
            f"got {', '.join(overrides)}: change config.json of the value model instead"
        )
    settings = Settings.from_environment(("--lvm-guided-inproc-model-path", path), max_candidates=MAX_CANDIDATES)
    if settings.value_model is None:
        raise ValueError(f"--lvm-guided-inproc-model-path must be a value model for the fork, got {path!r}")

    def free_bytes() -> float:
        from sglang.srt.utils.common import get_available_gpu_memory

        options = dict(distributed=group.world_size > 1, cpu_group=group.cpu_group)  # then the minimum of all ranks
        return 2**30 * get_available_gpu_memory(runner.device, runner.gpu_id, **options)

    fraction = options.lvm_guided_inproc_mem_fraction_static or options.mem_fraction_static
    inproc = InprocRunner(settings, runner, mem_fraction=fraction, free_bytes=free_bytes)
    _gamma = settings.gamma
    return inproc


# --- replacements of the fork's functions, with their parameters ---


def initialize(self: ModelRunner, min_per_gpu_memory: float) -> None:
    """Load the value model after the base model and its pools, not at the first request."""
    _originals[f"{_RUNNER}.initialize"](self, min_per_gpu_memory)
    sampler = getattr(self.sampler, "lvm_guided_sampler", None)
    if sampler is not None and not self.is_draft_worker and _is_the_forks(sampler._fn):
        sampler._inproc = _load_runner(self)


def sample(self: ModelRunner, logits_output: LogitsProcessorOutput, forward_batch: ForwardBatch) -> torch.Tensor:
    """Draw the tokens of a batch, which is passed to the sampler of guidance."""
    sampler = getattr(self.sampler, "lvm_guided_sampler", None)
    if sampler is not None:
        sampler.lenvm_batch = forward_batch
    return _originals[f"{_RUNNER}.sample"](self, logits_output, forward_batch)


def extract_token_temperature_scale(req: Req) -> dict[int, float] | None:
    """Divisors of the temperatures of single tokens."""
    scales = _parsed(req).lenvm_guidance[0].token_temperature_scale
    # The fork drops ids outside the vocabulary, but only from an int64 tensor.
    return {token: scale for token, scale in scales.items() if token < 2**31} or None


def apply(
    self: LvmGuidedSampler,
    probs: torch.Tensor,  # [B, V]
    reqs: Iterable[Req],
    temperatures: torch.Tensor,
    top_ps: torch.Tensor,  # [B]
    top_ks: torch.Tensor,  # [B]
    min_ps: torch.Tensor,  # [B]
) -> torch.Tensor | None:
    """Guided ``probs``, rewritten in place; None if no request is guided."""
    if not _is_the_forks(self._fn):
        _warn_once("LenVM: lvm_guided_fn is %r, not one of the fork's three: the fork's own path stays", self._fn)
    elif isinstance(self._inproc, InprocRunner) or not self._get_inproc_provider():
        reqs, filters = [_parsed(req) for req in reqs], Filters(top_ks.int(), top_ps.float(), min_ps.float())
        if isinstance(self._inproc, InprocRunner):
            return self._inproc.guide(self.lenvm_batch, reqs, probs, filters)
        return _guide_by_server(self, reqs, probs, filters)
    return _originals[f"{_SAMPLER}.apply"](self, probs, reqs, temperatures, top_ps, top_ks, min_ps)


def _guide_by_server(
    sampler: LvmGuidedSampler, reqs: Sequence[Req], probs: torch.Tensor, filters: Filters
) -> torch.Tensor | None:
    """:func:`apply` with values of a server (``--lvm-guided-url``)."""
    device, guidance = probs.device, [req.lenvm_guidance for req in reqs]
    if all(params.mode == Mode.UNGUIDED for params, _ in guidance):
        return None
    table = GuidanceTable.from_params([params for params, _ in guidance], [eos for _, eos in guidance], device)
    candidates = topk_candidates(
        probs,
        **filters._asdict(),
        max_candidates=MAX_CANDIDATES,
        entropy_threshold=table.columns.entropy_threshold,
        guided=table.guided,
    )
    lost_mass = candidates.lost_mass.nan_to_num(0.0).max().item()
    if lost_mass > 0:
        _warn_once(
            "LenVM: a row has more than %d candidates; the others, of probability %.3g, are left out: "
            "lower its top_k or top_p, or raise its min_p",
            MAX_CANDIDATES,
            lost_mass,
        )
    status, counts, token_ids = (x.tolist() for x in (candidates.status, candidates.counts, candidates.token_ids))
    unchanged = [row for row, s in enumerate(status) if s in (Status.UNGUIDED, Status.SKIP)]
    if len(unchanged) == len(reqs):
        return None
    value_logits = torch.zeros_like(candidates.probs)
    if sent := [row for row, s in enumerate(status) if s == Status.GUIDE]:
        sent_reqs, ids = [reqs[row] for row in sent], [token_ids[row][: counts[row]] for row in sent]
        prefixes = [[*req.origin_input_ids, *req.output_ids] for req in sent_reqs]
        answer = sampler._post_tree_value([req.rid for req in sent_reqs], prefixes, ids, sent_reqs)
        for row, values in zip(sent, answer, strict=True):
            value_logits[row, : counts[row]] = torch.tensor(values[: counts[row]], dtype=torch.float32, device=device)
    generated = torch.tensor([len(req.output_ids) for req in reqs], dtype=torch.int32, device=device)
    reweight_scatter(candidates, value_logits, table.columns, generated=generated, probs=probs)
    if unchanged:
        keep_filters(probs, torch.tensor(unchanged, device=device), filters)
    return probs


def build_tree_value_custom_mask_and_positions(
    *,
    prefix_lens: list[int],
    candidate_lens: list[int],
    cached_prefix_lens: list[int],
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tree mask, bool ``[sum (L - P + N) (L + N)]``, and int64 positions of the new tokens, request by request.

    Args:
        prefix_lens: L, tokens of each request before its candidates.
        candidate_lens: N, candidates.
        cached_prefix_lens: P, the tokens of L that are in the cache.
        device: device of the results.

    Raises:
        ValueError: lengths that are not ``L > 0``, ``N > 0``, ``0 <= P <= L``.
    """
    masks, all_positions = [], []
    for prefix, candidates, cached in zip(prefix_lens, candidate_lens, cached_prefix_lens, strict=True):
        if not (prefix > 0 and candidates > 0 and 0 <= cached <= prefix):
            raise ValueError(
                "lengths must be prefix > 0, candidates > 0 and 0 <= cached <= prefix, "
                f"got prefix {prefix}, candidates {candidates}, cached {cached}"
            )
        keys = torch.arange(prefix + candidates)
        positions = keys[cached:].clamp(max=prefix)
        masks.append(((keys < positions[:, None]) | (keys == keys[cached:, None])).flatten())
        all_positions.append(positions)
    empty = torch.empty(0, dtype=torch.int64)
    return torch.cat([empty.bool(), *masks]).to(device), torch.cat([empty, *all_positions]).to(device)


def value_head_forward(self: MLP2SiLUValueHead, hidden_states: torch.Tensor) -> torch.Tensor:
    """Value logits, fp32 ``[..., 1]``, of hidden states ``[..., H]``."""
    fc, summary = self.fc, self.summary
    logits = value_head(
        hidden_states.to(fc.weight.dtype).flatten(0, -2), fc.weight, fc.bias, summary.weight, summary.bias
    )
    return logits.view(*hidden_states.shape[:-1], 1)


_SAMPLER = "sglang.srt.lvm.lvm_guided_sampling:LvmGuidedSampler"
_RUNNER = "sglang.srt.model_executor.model_runner:ModelRunner"
_MASK = "build_tree_value_custom_mask_and_positions"
# Every name under which the fork looks a function up. The Qwen2.5-VL value model has the head of the Qwen2 model.
REPLACED: dict[str, Callable] = {
    f"{_SAMPLER}.apply": apply,
    "sglang.srt.lvm.lvm_guided_sampling:_extract_token_temperature_scale": extract_token_temperature_scale,
    f"sglang.srt.lvm.tree_value_spec:{_MASK}": build_tree_value_custom_mask_and_positions,
    f"sglang.srt.lvm.lvm_inproc_runner:{_MASK}": build_tree_value_custom_mask_and_positions,
    "sglang.srt.models.qwen2_lvm:MLP2SiLUValueHead.forward": value_head_forward,
    "sglang.srt.models.qwen3_lvm:MLP2SiLUValueHead.forward": value_head_forward,
    f"{_RUNNER}.initialize": initialize,
    f"{_RUNNER}.sample": sample,
}


def install() -> dict[str, Callable]:
    """Replace the fork's functions by this package's, in this process. A second call changes nothing.

    Returns:
        The replaced functions of the fork, by ``module:name``.

    Raises:
        ImportError: the fork is not installed, or is another version; the message names the difference. Nothing was
            replaced.
    """
    if not _originals:
        try:
            signatures.check("sglang_fork")
            found = {name: pkgutil.resolve_name(name) for name in REPLACED}
        except (RuntimeError, ImportError, AttributeError) as error:
            raise ImportError(
                "install() needs the LenVM fork of SGLang (eric-ai-lab/Length-Value-Model, sglang-LenVM), and another "
                f"version does not fit: {error}"
            ) from error
        for name, function in REPLACED.items():
            module, _, path = name.partition(":")
            owner, _, attribute = path.rpartition(".")
            setattr(pkgutil.resolve_name(f"{module}:{owner}"), attribute, function)
        _originals.update(found)
        logger.info("LenVM: replaced %s", ", ".join(REPLACED))
    return dict(_originals)
