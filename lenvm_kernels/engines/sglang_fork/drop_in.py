"""Drop-in for the LenVM fork of SGLang (eric-ai-lab/Length-Value-Model, ``sglang-LenVM``): :func:`install`.

``docs/sglang.md`` describes how to serve with it and what changes. Importable without the fork.
"""

from __future__ import annotations

import functools
import json
import logging
import pkgutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from lenvm_kernels.engines import signatures
from lenvm_kernels.engines.settings import Settings
from lenvm_kernels.engines.sglang_fork.runner import ForkFilters, InprocRunner, keep_filters, warn_once
from lenvm_kernels.guidance import GuidanceParams, GuidanceTable, parse_guidance
from lenvm_kernels.ops.reweight_scatter import reweight_scatter
from lenvm_kernels.ops.topk_candidates import MAX_CANDIDATES, topk_candidates
from lenvm_kernels.ops.value_head import value_head
from lenvm_kernels.types import Mode, Status

if TYPE_CHECKING:
    from sglang.srt.lvm.lvm_guided_sampling import LvmGuidedSampler
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.models.qwen2_lvm import MLP2SiLUValueHead

logger = logging.getLogger(__name__)

_SAMPLING = "sglang.srt.lvm.lvm_guided_sampling"
_GUIDANCE_FUNCTIONS = "lvm_combined_guidance", "lvm_expectation_guidance", "lvm_hard_value_constraint_guidance"


class ForkHooks:
    """Called around the fork's functions: each method takes the replaced function, then that function's arguments.

    Attributes:
        gamma: default of requests, from a value model in the engine's process. If None, 0.997.
    """

    def __init__(self) -> None:
        self.gamma: float | None = None

    def initialize(self, original: Callable, runner: ModelRunner, min_per_gpu_memory: float) -> None:
        """Load the value model after the base model and its pools, not at the first request."""
        original(runner, min_per_gpu_memory)
        sampler = getattr(runner.sampler, "lvm_guided_sampler", None)
        if sampler is None or runner.is_draft_worker or not _is_replaced(sampler._fn):
            return
        sampler._inproc = load_runner(runner)
        if sampler._inproc is not None:
            self.gamma = sampler._inproc.gamma

    def sample(self, original: Callable, runner: ModelRunner, logits_output: Any, batch: ForwardBatch) -> torch.Tensor:
        """Pass the batch to the sampler of guidance before its tokens are drawn."""
        sampler = getattr(runner.sampler, "lvm_guided_sampler", None)
        if sampler is not None:
            sampler.lenvm_batch = batch
        return original(runner, logits_output, batch)

    def extract_token_temperature_scale(self, _: Callable, req: Req) -> dict[int, float] | None:
        """Divisors of the temperatures of single tokens."""
        self._parse(req)
        scales = req.lenvm_guidance.token_temperature_scale
        # The fork drops ids outside the vocabulary, but only from an int64 tensor.
        return {token: scale for token, scale in scales.items() if token < 2**31} or None

    def apply(
        self,
        original: Callable,
        sampler: LvmGuidedSampler,
        probs: torch.Tensor,  # [B, V]
        reqs: Iterable[Req],
        temperatures: torch.Tensor,
        top_ps: torch.Tensor,  # [B]
        top_ks: torch.Tensor,  # [B]
        min_ps: torch.Tensor,  # [B]
    ) -> torch.Tensor | None:
        """Guided ``probs``, rewritten in place; None if no request is guided."""
        is_inproc = isinstance(sampler._inproc, InprocRunner)
        if not _is_replaced(sampler._fn):
            warn_once(
                f"LenVM: lvm_guided_fn is {sampler._fn!r}, not one of the fork's three: the fork's own path stays"
            )
        elif is_inproc or not sampler._get_inproc_provider():
            reqs, filters = list(reqs), ForkFilters(top_ks.int(), top_ps.float(), min_ps.float())
            for req in reqs:
                self._parse(req)
            if is_inproc:
                return sampler._inproc.guide(sampler.lenvm_batch, reqs, probs, filters)
            return guide_by_server(sampler, reqs, probs, filters)
        return original(sampler, probs, reqs, temperatures, top_ps, top_ks, min_ps)

    def _parse(self, req: Req) -> None:
        """Set a request's parameters and end-of-sequence tokens once. A request with bad parameters is not guided."""
        if hasattr(req, "lenvm_guidance"):
            return
        from sglang.srt.lvm.lvm_value_utils import get_eos_token_ids

        custom_params = req.sampling_params.custom_params
        req.lenvm_guidance, req.lenvm_end_tokens = GuidanceParams(), get_eos_token_ids(req)
        try:
            given = custom_params if isinstance(custom_params, dict) else {}
            params = parse_guidance(given, gamma=self.gamma, constraint="eq")  # the fork's default constraint
            if params.has_span:
                raise ValueError("end_token_ids and landing must be absent in the fork, whose sampler reads neither")
            req.lenvm_guidance = params
        except ValueError as error:  # an exception would end the scheduler
            logger.warning("LenVM: request %s has bad custom_params and is not guided: %s", req.rid, error)


def _is_replaced(function: Callable | None) -> bool:
    """Whether a guidance function is one of the fork's three, which :meth:`ForkHooks.apply` replaces."""
    return function in [pkgutil.resolve_name(f"{_SAMPLING}:{name}") for name in _GUIDANCE_FUNCTIONS]


def load_runner(runner: ModelRunner) -> InprocRunner | None:
    """The value model in the process of a base model's runner; None if the options name none.

    Raises:
        ValueError: an option or a setting; the message names it, its value and what is accepted.
    """
    options = runner.server_args
    path = options.lvm_guided_inproc_model_path
    if not options.lvm_guided_inproc or not path:
        return None
    overrides = json.loads(options.lvm_guided_inproc_json_model_override_args or "{}")
    if set(overrides) - {"architectures"}:
        raise ValueError(
            "--lvm-guided-inproc-json-model-override-args must name nothing but architectures, "
            f"got {', '.join(overrides)}: change config.json of the value model instead"
        )
    settings = Settings.from_environment(("--lvm-guided-inproc-model-path", path))
    if settings.value_model is None:
        raise ValueError(f"--lvm-guided-inproc-model-path must be a value model for the fork, got {path!r}")
    return InprocRunner(replace(settings, max_candidates=settings.max_candidates or MAX_CANDIDATES), runner)


def guide_by_server(
    sampler: LvmGuidedSampler, reqs: Sequence[Req], probs: torch.Tensor, filters: ForkFilters
) -> torch.Tensor | None:
    """:meth:`ForkHooks.apply` with values of a server (``--lvm-guided-url``)."""
    device, params = probs.device, [req.lenvm_guidance for req in reqs]
    if all(p.mode == Mode.UNGUIDED for p in params):
        return None
    table = GuidanceTable.from_params(params, [req.lenvm_end_tokens for req in reqs], device)
    generated = torch.tensor([len(req.output_ids) for req in reqs], dtype=torch.int32, device=device)
    candidates = topk_candidates(
        probs,
        **filters._asdict(),
        max_candidates=MAX_CANDIDATES,
        guided=table.columns.mode != Mode.UNGUIDED,
        table=table.columns,
        generated=generated,
    )
    if candidates.lost_mass.nan_to_num(0.0).max() > 0:
        warn_once(
            f"LenVM: a row has more than {MAX_CANDIDATES} candidates; the others are left out: lower its top_k or "
            "top_p, or raise its min_p"
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


_RUNNER = "sglang.srt.model_executor.model_runner:ModelRunner"
_MASK = "build_tree_value_custom_mask_and_positions"
# By every name under which the fork looks a function up. The Qwen2.5-VL value model has the head of the Qwen2 model.
REPLACED: dict[str, Callable] = {
    f"{_SAMPLING}:LvmGuidedSampler.apply": ForkHooks.apply,
    f"{_SAMPLING}:_extract_token_temperature_scale": ForkHooks.extract_token_temperature_scale,
    f"{_RUNNER}.initialize": ForkHooks.initialize,
    f"{_RUNNER}.sample": ForkHooks.sample,
    f"sglang.srt.lvm.tree_value_spec:{_MASK}": build_tree_value_custom_mask_and_positions,
    f"sglang.srt.lvm.lvm_inproc_runner:{_MASK}": build_tree_value_custom_mask_and_positions,
    "sglang.srt.models.qwen2_lvm:MLP2SiLUValueHead.forward": value_head_forward,
    "sglang.srt.models.qwen3_lvm:MLP2SiLUValueHead.forward": value_head_forward,
}


@functools.cache
def install() -> dict[str, Callable]:
    """Replace the fork's functions by this package's, in this process. A second call changes nothing.

    Returns:
        The replaced functions of the fork, by ``module:name``.

    Raises:
        ImportError: the fork is not installed, or is another version; the message names the difference. Nothing was
            replaced.
    """
    try:
        signatures.check("sglang_fork")
        originals = {name: pkgutil.resolve_name(name) for name in REPLACED}
    except (RuntimeError, ImportError, AttributeError) as error:
        raise ImportError(
            "install() needs the LenVM fork of SGLang (eric-ai-lab/Length-Value-Model, sglang-LenVM), and another "
            f"version does not fit: {error}"
        ) from error
    hooks = ForkHooks()
    for name, function in REPLACED.items():
        module, _, path = name.partition(":")
        owner, _, attribute = path.rpartition(".")
        is_hook = function in vars(ForkHooks).values()
        replacement = _hooked(function, hooks, originals[name]) if is_hook else function
        setattr(pkgutil.resolve_name(f"{module}:{owner}"), attribute, replacement)
    logger.info("LenVM: replaced %s", ", ".join(REPLACED))
    return originals


def _hooked(hook: Callable, hooks: ForkHooks, original: Callable) -> Callable:
    """A function that may become a method, and calls a hook around the fork's function."""

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return hook(hooks, original, *args, **kwargs)

    return replacement
