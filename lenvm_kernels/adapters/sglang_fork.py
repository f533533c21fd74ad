"""Drop-in for the LenVM fork of SGLang (eric-ai-lab/Length-Value-Model, ``sglang-LenVM``): :func:`install`.

It puts a guided step in place of the fork's in-process value model (``--lvm-guided-inproc``), and the operators of this
package in place of its candidate building, guidance, tree mask and value head, in every process that calls it. SGLang
spawns its schedulers, which run the top level of the main file again. So serve with a file of your own, whose arguments
are the fork's::

    import runpy

    from lenvm_kernels.adapters.sglang_fork import install

    install()
    if __name__ == "__main__":
        runpy.run_module("sglang.launch_server", run_name="__main__")

Where the fork and the specification differ, the specification holds from then on:

- A tilt meets its target on every row (the fork's search stops more than 0.01 short on 4 to 16 % of random rows).
- Every row has its own mode, ``gamma`` and ``value_min``. In the fork a batch of several modes is all ``mul``, the last
  two count only on its slow path, and one request with a target sends its whole batch there, where ``centered_exp`` and
  ``value_bias`` raise.
- Lengths come from value logits, not from values clamped to 1 - 1e-9: lengths past 6,897 tokens stay apart.
- Bad parameters leave a request without guidance, which is logged once. In the fork they raise in the scheduler, and
  the server ends. Neutral parameters and rows with NaN are without guidance, too.
- Rows without guidance, or below their entropy threshold, keep their top-k, top-p and min-p beside guided rows. (Tokens
  that these drop have probability 0 there, which top log-probabilities show.)
- A row has at most 64 candidates, its most probable ones; of equal ones the lower token ids. The fork takes any number.
- Value logits are fp32, whatever the value model is.
- Each of the fork's three guidance functions stands for all guidance that a request can ask for.
- The value server (``--lvm-guided-url``) serves all modes. In the fork, requests without a target raise with it.

With the value model in the process (:class:`lenvm_kernels.adapters.sglang_fork_runner.InprocRunner`):

- A step is one forward of the value model, over the tokens that it has not seen and the candidates together. No mask is
  built, and nothing is read back to the host, so the overlapping scheduler may stay on. In the fork its token history
  is then a token short, and values are those of another prefix.
- Keys and values stay in slots of their own until a request has ended, or its room is needed. The fork frees those of
  all requests that are not in a batch, and so computes every running request anew after each new prompt.
- The value model is loaded as the server starts, from a local directory (``--lvm-guided-inproc-model-path``), whole on
  every rank. It takes ``--lvm-guided-inproc-mem-fraction-static`` of the memory that is then free. Where that is too
  little, a request goes on without guidance; in the fork the server ends.
- ``LENVM_`` variables are read as in unforked SGLang (:class:`lenvm_kernels.adapters.settings.Settings`), but for the
  value model, the share of memory and the trace. ``LENVM_MAX_CANDIDATES`` is 64 without; the memory of a step follows
  it, so that 16 is better where no ``top_k`` is above.
- A request may ask for a ``value_stride``.
- A vision-language value model embeds a prompt's images itself, before the request's first step; what its vision tower
  takes for that is not in its share of the memory. Prompts share what is computed of them if their images have the same
  sizes, up to the first image that is another.
- Requests with input embeddings, videos, audio, images in a session, or images that the value model cannot read are not
  guided, which is logged.

With a guidance function that is not one of the fork's three, the fork's own runner, candidates and guidance stay.
"""

from __future__ import annotations

import inspect
import json
import logging
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from lenvm_kernels.adapters.settings import Settings
from lenvm_kernels.adapters.sglang_fork_runner import InprocRunner, keep_filters
from lenvm_kernels.guidance import GuidanceParams, GuidanceTable, parse_guidance
from lenvm_kernels.ops.reweight_scatter import reweight_scatter
from lenvm_kernels.ops.topk_candidates import MAX_CANDIDATES, topk_candidates
from lenvm_kernels.ops.value_head import value_head
from lenvm_kernels.types import Candidates, Mode, Status

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.lvm.lvm_guided_sampling import LvmGuidedSampler, PendingLvmResult
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.models.qwen2_lvm import MLP2SiLUValueHead

logger = logging.getLogger(__name__)

# What install() found: the fork's module, and its functions that were replaced, by name.
_fork: Any = None
_originals: dict[str, Callable] = {}
_warned: set[str] = set()
# That of the value model, of requests that name none; None: not known.
_gamma: float | None = None


@dataclass(frozen=True)
class _Step:
    """What the guidance of a step needs of its candidates, all of it of the whole batch."""

    candidates: Candidates
    table: GuidanceTable
    generated: torch.Tensor  # int32 [B]
    filters: dict[str, torch.Tensor]  # top_k, top_p and min_p, [B]
    left_alone: list[int]  # rows that keep their probabilities


def _warn_once(message: str, *args: Any) -> None:
    if message not in _warned:
        _warned.add(message)
        logger.warning(message, *args)


def _guidance_of(req: Req) -> tuple[GuidanceParams, set[int]]:
    """A request's parameters and end-of-sequence tokens, read at its first step."""
    if not hasattr(req, "lenvm_guidance"):
        custom_params, params = req.sampling_params.custom_params, GuidanceParams()
        try:
            given = custom_params if isinstance(custom_params, dict) else {}
            asked = parse_guidance(given, gamma=_gamma, constraint="eq")  # the fork's default
            if asked.has_span:
                raise ValueError("end_token_ids and landing must be absent in the fork, whose sampler reads neither")
            params = asked
        except ValueError as error:  # this is the scheduler: it must not die of it
            logger.warning("LenVM: request %s has bad custom_params and is not guided: %s", req.rid, error)
        req.lenvm_guidance = params, _fork.get_eos_token_ids(req)
    return req.lenvm_guidance


def _takes_its_place(function: Callable | None) -> bool:
    """Whether our guidance stands for a guidance function: it is one of the fork's three."""
    return function in (
        _fork.lvm_combined_guidance,
        _fork.lvm_expectation_guidance,
        _fork.lvm_hard_value_constraint_guidance,
    )


def _load_runner(runner: ModelRunner) -> InprocRunner | None:
    """The value model of a base model's runner; None if it is not in this process.

    Raises:
        ValueError: naming an option or a setting, what came and what is accepted.
    """
    global _gamma
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
    settings = Settings.from_environment(("--lvm-guided-inproc-model-path", path), max_candidates=MAX_CANDIDATES)
    assert settings is not None  # a path was given
    if settings.value_model is None:
        raise ValueError(f"--lvm-guided-inproc-model-path must be a value model for the fork, got {path!r}")
    group = runner.tp_group

    def free_bytes() -> float:
        memory = pkgutil.resolve_name(_FREE_MEMORY)
        is_shared = group.world_size > 1  # then the least of all ranks
        return 2**30 * memory(runner.device, runner.gpu_id, distributed=is_shared, cpu_group=group.cpu_group)

    fraction = options.lvm_guided_inproc_mem_fraction_static or options.mem_fraction_static
    made = InprocRunner(settings, runner, mem_fraction=fraction, free_bytes=free_bytes)
    _gamma = settings.gamma
    return made


# --- what takes the place of the fork's functions, with their parameters ---


def initialize(self: ModelRunner, min_per_gpu_memory: float) -> None:
    """Load the value model after the base model and its pools, not at the first request."""
    _originals[f"{_RUNNER}.initialize"](self, min_per_gpu_memory)
    sampler = getattr(self.sampler, "lvm_guided_sampler", None)
    if sampler is not None and not self.is_draft_worker and _takes_its_place(sampler._fn):
        sampler._inproc = _load_runner(self)


def sample(self: ModelRunner, logits_output: LogitsProcessorOutput, forward_batch: ForwardBatch) -> torch.Tensor:
    """Draw the tokens of a batch, which the sampler of guidance is told."""
    sampler = getattr(self.sampler, "lvm_guided_sampler", None)
    if sampler is not None:
        sampler.lenvm_batch = forward_batch
    return _originals[f"{_RUNNER}.sample"](self, logits_output, forward_batch)


def apply(
    self: LvmGuidedSampler,
    probs: torch.Tensor,  # [B, V]
    reqs: Iterable[Req],
    temperatures: torch.Tensor,
    top_ps: torch.Tensor,  # [B]
    top_ks: torch.Tensor,  # [B]
    min_ps: torch.Tensor,  # [B]
) -> torch.Tensor | None:
    """Guided ``probs``, None when there is nothing to guide. They are rewritten, not copied."""
    if not isinstance(self._inproc, InprocRunner):
        return _originals[f"{_SAMPLER}.apply"](self, probs, reqs, temperatures, top_ps, top_ks, min_ps)
    reqs = list(reqs)
    for req in reqs:
        _guidance_of(req)
    return self._inproc.guide(self.lenvm_batch, reqs, probs, top_k=top_ks, top_p=top_ps, min_p=min_ps)


def extract_token_temperature_scale(req: Req) -> dict[int, float] | None:
    """Divisors of the temperatures of single tokens."""
    scales = _guidance_of(req)[0].token_temperature_scale
    # The fork leaves out ids outside the vocabulary, but not before they are an int64 tensor.
    return {token: scale for token, scale in scales.items() if token < 2**31} or None


def build_pending(
    self: LvmGuidedSampler,
    probs: torch.Tensor,  # [B, V]
    reqs: Iterable[Req],
    temperatures: torch.Tensor,
    top_ps: torch.Tensor,  # [B]
    top_ks: torch.Tensor,  # [B]
    min_ps: torch.Tensor,  # [B]
) -> PendingLvmResult | None:
    """Candidates of the guided rows, None when there is nothing to guide. ``probs`` is rewritten, not copied."""
    if not _takes_its_place(self._fn):
        _warn_once("LenVM: lvm_guided_fn is %r, not one of the fork's three: the fork's own path stays", self._fn)
        return _originals[f"{_SAMPLER}._build_pending"](self, probs, reqs, temperatures, top_ps, top_ks, min_ps)
    reqs, device = list(reqs), probs.device
    rows = [_guidance_of(req) for req in reqs]
    if all(params.mode == Mode.UNGUIDED for params, _ in rows):
        return None
    if getattr(self, "lenvm_rows", None) != rows:  # else this is the next step of the same batch
        params = [replace(params, token_temperature_scale={}) for params, _ in rows]  # the logits have them already
        self.lenvm_table = GuidanceTable.from_params(params, [eos for _, eos in rows], device)
        self.lenvm_rows = rows
    table = self.lenvm_table

    filters: dict[str, Any] = dict(top_k=top_ks.int(), top_p=top_ps.float(), min_p=min_ps.float())
    candidates = topk_candidates(
        probs,
        **filters,
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
    left_alone = [row for row, s in enumerate(status) if s in (Status.UNGUIDED, Status.SKIP)]
    if len(left_alone) == len(reqs):
        return None
    sent_rows = [row for row, s in enumerate(status) if s == Status.GUIDE]
    pending = _fork.PendingLvmResult(
        req_list=reqs,
        device=device,
        guided=probs,
        send_batch_indices=sent_rows,
        prefix_ids_send=[self._get_prefix_ids_incremental(reqs[row]) for row in sent_rows],
        candidate_ids_send=[token_ids[row][: counts[row]] for row in sent_rows],
        candidate_probs_send=[],  # only for the fork's functions
    )
    generated = torch.tensor([len(req.output_ids) for req in reqs], dtype=torch.int32, device=device)
    pending.lenvm = _Step(candidates, table, generated, filters, left_alone)
    if not sent_rows:  # the fork asks for no values, and goes on with these probabilities
        _write(pending, torch.zeros_like(candidates.probs))
    return pending


def apply_guidance(self: LvmGuidedSampler, pending: PendingLvmResult, lvm_values: list[list[float]]) -> None:
    """Guide the rows whose candidates a value server has answered: each row sent, in the order of its candidates."""
    if not hasattr(pending, "lenvm"):
        return _originals[f"{_SAMPLER}._apply_guidance"](self, pending, lvm_values)
    candidates = pending.lenvm.candidates
    of_row = zip(lvm_values, pending.candidate_ids_send, strict=True)
    scored = (candidates.status == Status.GUIDE)[:, None] & (candidates.token_ids >= 0)
    value_logits = torch.zeros_like(candidates.probs)
    answer = [value for values, ids in of_row for value in values[: len(ids)]]
    value_logits.masked_scatter_(scored, torch.tensor(answer, dtype=torch.float32, device=pending.device))
    _write(pending, value_logits)


def _write(pending: PendingLvmResult, value_logits: torch.Tensor) -> None:
    """Rewrite the batch's probabilities: the engine draws from them as they are, without any row's own filters."""
    step, probs = pending.lenvm, pending.guided
    reweight_scatter(step.candidates, value_logits, step.table.columns, generated=step.generated, probs=probs)
    if step.left_alone:
        keep_filters(probs, torch.tensor(step.left_alone, device=probs.device), **step.filters)


def build_tree_value_custom_mask_and_positions(
    *,
    prefix_lens: list[int],
    candidate_lens: list[int],
    cached_prefix_lens: list[int],
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Who attends to whom, request by request: bool ``[sum (L - P + N) (L + N)]``; and int64 positions of the tokens.

    A token at position ``p`` attends to the first ``p`` tokens and to itself, which a candidate finds further on among
    the others. So a row of the mask is two runs of True; they are summed up from their ends, at two bytes an element.

    Args:
        prefix_lens: L, tokens of each request before its candidates.
        candidate_lens: N.
        cached_prefix_lens: P, those of the L tokens that are in the cache already.
        device: of the results.

    Raises:
        ValueError: lengths that are not ``L > 0``, ``N > 0``, ``0 <= P <= L``.
    """
    for length, number, cached_len in zip(prefix_lens, candidate_lens, cached_prefix_lens, strict=True):
        if not (length > 0 and number > 0 and 0 <= cached_len <= length):
            raise ValueError(
                "lengths must be prefix > 0, candidates > 0 and 0 <= cached <= prefix, "
                f"got prefix {length}, candidates {number}, cached {cached_len}"
            )
    lens = torch.tensor([prefix_lens, candidate_lens, cached_prefix_lens], dtype=torch.int64)
    tokens, keys = lens[0] - lens[2] + lens[1], lens[0] + lens[1]
    num_tokens, num_elements = int(tokens.sum()), int((tokens * keys).sum())

    prefix, _, cached, tokens, keys = torch.cat([lens, tokens[None], keys[None]]).to(device)
    of_token = torch.repeat_interleave(torch.arange(len(prefix), device=device), tokens, output_size=num_tokens)
    first = tokens.cumsum(0) - tokens
    own = torch.arange(num_tokens, device=device) - first[of_token] + cached[of_token]
    positions = torch.minimum(own, prefix[of_token])
    keys = keys[of_token]
    row = keys.cumsum(0) - keys
    edges = torch.zeros(num_elements + 1, dtype=torch.int8, device=device)
    ones = torch.ones(2 * num_tokens, dtype=torch.int8, device=device)
    edges.index_add_(0, torch.cat([row, row + own]), ones)
    edges.index_add_(0, torch.cat([row + positions, row + own + 1]), ones, alpha=-1)
    return edges.cumsum(0, dtype=torch.int8)[:-1].view(torch.bool), positions


def value_head_forward(self: MLP2SiLUValueHead, hidden_states: torch.Tensor) -> torch.Tensor:
    """Value logits, fp32 ``[..., 1]`` of hidden states ``[..., H]``."""
    fc, summary = self.fc, self.summary
    hidden = hidden_states.to(fc.weight.dtype).flatten(0, -2)
    logits = value_head(hidden, fc.weight, fc.bias, summary.weight, summary.bias)
    return logits.view(*hidden_states.shape[:-1], 1)


_GUIDED_SAMPLING = "sglang.srt.lvm.lvm_guided_sampling"
_SAMPLER = f"{_GUIDED_SAMPLING}:LvmGuidedSampler"
_RUNNER = "sglang.srt.model_executor.model_runner:ModelRunner"
_FREE_MEMORY = "sglang.srt.utils.common:get_available_gpu_memory"
_MASK = "build_tree_value_custom_mask_and_positions"
# Every place where the fork looks a function up. The head of the Qwen2.5-VL value model is that of the Qwen2 one.
REPLACED: dict[str, Callable] = {
    f"{_SAMPLER}.apply": apply,
    f"{_SAMPLER}._build_pending": build_pending,
    f"{_SAMPLER}._apply_guidance": apply_guidance,
    f"{_GUIDED_SAMPLING}:_extract_token_temperature_scale": extract_token_temperature_scale,
    f"sglang.srt.lvm.tree_value_spec:{_MASK}": build_tree_value_custom_mask_and_positions,
    f"sglang.srt.lvm.lvm_inproc_runner:{_MASK}": build_tree_value_custom_mask_and_positions,
    "sglang.srt.models.qwen2_lvm:MLP2SiLUValueHead.forward": value_head_forward,
    "sglang.srt.models.qwen3_lvm:MLP2SiLUValueHead.forward": value_head_forward,
    f"{_RUNNER}.initialize": initialize,
    f"{_RUNNER}.sample": sample,
}
_GUIDANCE_PARAMETERS = "(token_probs, token_values, token_ids, **kwargs)"
# What the replacements call, and its parameters.
USED = {
    _FREE_MEMORY: "(device, gpu_id, distributed=False, empty_cache=True, cpu_group=None)",
    f"{_SAMPLER}._get_prefix_ids_incremental": "(req)",
    f"{_GUIDED_SAMPLING}:get_eos_token_ids": "(req)",
    f"{_GUIDED_SAMPLING}:PendingLvmResult": "(req_list, device, guided, send_batch_indices, prefix_ids_send, "
    "candidate_ids_send, candidate_probs_send, gpu_candidates=None)",
    f"{_GUIDED_SAMPLING}:lvm_combined_guidance": _GUIDANCE_PARAMETERS,
    f"{_GUIDED_SAMPLING}:lvm_expectation_guidance": _GUIDANCE_PARAMETERS,
    f"{_GUIDED_SAMPLING}:lvm_hard_value_constraint_guidance": _GUIDANCE_PARAMETERS,
}


def _parameters(function: Callable) -> str:
    parameters = inspect.signature(function).parameters.values()
    return str(inspect.Signature([p.replace(annotation=inspect.Parameter.empty) for p in parameters]))


def install() -> dict[str, Callable]:
    """Replace the fork's functions by this package's, in this process. A second call changes nothing.

    Returns:
        The fork's functions that were replaced, by ``module:name``.

    Raises:
        ImportError: the fork is not installed, or is another version: the message says what is missing or different.
            Nothing was replaced.
    """
    global _fork
    if _originals:
        return dict(_originals)
    expected = {name: _parameters(function) for name, function in REPLACED.items()} | USED
    for module in dict.fromkeys(name.partition(":")[0] for name in expected):
        try:
            import_module(module)
        except ImportError as error:
            raise ImportError(
                "install() needs the LenVM fork of SGLang (eric-ai-lab/Length-Value-Model, sglang-LenVM), but cannot "
                f"import {module}: {error}"
            ) from error
    found, differences = {}, []
    for name, wanted in expected.items():
        try:
            found[name] = pkgutil.resolve_name(name)
            if (parameters := _parameters(found[name])) != wanted:
                differences.append(f"{name} has parameters {parameters}, expected {wanted}")
        except (AttributeError, TypeError, ValueError) as error:  # the last two: it has no signature
            differences.append(f"{name}: {error}")
    if differences:
        raise ImportError(f"install() does not fit this version of the LenVM fork: {'; '.join(differences)}")

    _fork = import_module(_GUIDED_SAMPLING)
    for name, function in REPLACED.items():
        module, _, path = name.partition(":")
        owner, _, attribute = path.rpartition(".")
        setattr(pkgutil.resolve_name(f"{module}:{owner}"), attribute, function)
        _originals[name] = found[name]
    logger.info("LenVM: replaced %s", ", ".join(REPLACED))
    return dict(_originals)
