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

import numpy as np
import torch

from lenvm_kernels.engines import signatures
from lenvm_kernels.engines.own_slots import PAGE_SIZE, OwnSlots, PromptPart, pages_for
from lenvm_kernels.engines.settings import MAX_DELTA, MAX_END_TOKENS, Settings
from lenvm_kernels.engines.sglang.images import PromptImages, image_tokens
from lenvm_kernels.engines.tensors import last_tokens, to_device
from lenvm_kernels.guidance import GuidanceParams, GuidanceTable, parse_guidance
from lenvm_kernels.guidance.params import read_names
from lenvm_kernels.ops._common import MAX_CANDIDATES
from lenvm_kernels.ops.reweight_scatter import reweight_scatter
from lenvm_kernels.ops.topk_candidates import topk_candidates
from lenvm_kernels.ops.value_head import value_head
from lenvm_kernels.step import GuidedStep, ModelValues, Sampling
from lenvm_kernels.types import Mode, Status
from lenvm_kernels.values import KVCache

if TYPE_CHECKING:
    from sglang.srt.lvm.lvm_guided_sampling import LvmGuidedSampler
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.models.qwen2_lvm import MLP2SiLUValueHead

logger = logging.getLogger(__name__)

_SAMPLING = "sglang.srt.lvm.lvm_guided_sampling"
_GUIDANCE_FUNCTIONS = "lvm_combined_guidance", "lvm_expectation_guidance", "lvm_hard_value_constraint_guidance"


@functools.cache
def warn_once(message: str) -> None:
    """Log each warning once per process."""
    logger.warning(message)


class ForkHooks:
    """Replacements of the fork's functions. Each takes the replaced function, then its arguments."""

    def __init__(self) -> None:
        self._gamma: float | None = None  # default of requests, the value model's. If None, 0.997
        self._replaced = [pkgutil.resolve_name(f"{_SAMPLING}:{name}") for name in _GUIDANCE_FUNCTIONS]

    def initialize(self, original: Callable, runner: ModelRunner, min_per_gpu_memory: float) -> None:
        """Load the value model after the base model and its pools."""
        original(runner, min_per_gpu_memory)
        sampler = getattr(runner.sampler, "lvm_guided_sampler", None)
        if sampler is None or runner.is_draft_worker or sampler._fn not in self._replaced:
            return
        if settings := inproc_settings(runner.server_args):
            sampler._inproc, self._gamma = InprocRunner(settings, runner), settings.gamma

    def sample(self, original: Callable, runner: ModelRunner, logits_output: Any, batch: ForwardBatch) -> torch.Tensor:
        """Pass the batch to the guided sampler before its tokens are drawn."""
        sampler = getattr(runner.sampler, "lvm_guided_sampler", None)
        if sampler is not None:
            sampler.lenvm_batch = batch
        return original(runner, logits_output, batch)

    def extract_token_temperature_scale(self, _: Callable, req: Req) -> dict[int, float] | None:
        """Temperature divisor per token."""
        self._parse(req)
        scales = req.lenvm_guidance.token_temperature_scale
        # The fork drops ids outside the vocabulary, if they fit into int64.
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
        """Guided ``probs``, in place; None if no request is guided."""
        is_inproc = isinstance(sampler._inproc, InprocRunner)
        if sampler._fn not in self._replaced:
            warn_once(f"LenVM: lvm_guided_fn is {sampler._fn!r}, not one of the fork's three: the fork calls it")
        elif is_inproc or not sampler._get_inproc_provider():
            reqs, sampling = list(reqs), Sampling(top_ks.int(), top_ps.float(), min_ps.float())
            for req in reqs:
                self._parse(req)
            if is_inproc:
                return sampler._inproc.guide(sampler.lenvm_batch, reqs, probs, sampling)
            return guide_by_server(sampler, reqs, probs, sampling)
        return original(sampler, probs, reqs, temperatures, top_ps, top_ks, min_ps)

    def value_head(self, _: Callable, head: MLP2SiLUValueHead, hidden_states: torch.Tensor) -> torch.Tensor:
        """Value logits, fp32 ``[..., 1]``, of hidden states ``[..., H]``."""
        weights = head.fc.weight, head.fc.bias, head.summary.weight, head.summary.bias
        logits = value_head(hidden_states.to(head.fc.weight.dtype).flatten(0, -2), *weights)
        return logits.view(*hidden_states.shape[:-1], 1)

    def _parse(self, req: Req) -> None:
        """Set a request's parameters and end-of-sequence tokens once. With invalid parameters, it is not guided."""
        if hasattr(req, "lenvm_guidance"):
            return
        from sglang.srt.lvm.lvm_value_utils import get_eos_token_ids

        custom_params = req.sampling_params.custom_params
        req.lenvm_guidance, req.lenvm_end_tokens = GuidanceParams(), get_eos_token_ids(req)
        try:
            given = read_names(custom_params, others="ignored") if isinstance(custom_params, dict) else {}
            params = parse_guidance(given, gamma=self._gamma, constraint="eq")  # the fork's default constraint
            if params.has_span:
                raise ValueError("end_token_ids and landing must be absent in the fork: its sampler ignores them")
            req.lenvm_guidance = params
        except ValueError as error:  # an exception would end the scheduler
            logger.warning("LenVM: request %s has invalid custom_params and is not guided: %s", req.rid, error)


def inproc_settings(options: Any) -> Settings | None:
    """The settings of a value model in the engine's process, from the server's options, or None without one.

    Raises ValueError for an invalid option or setting, naming it, the value and the accepted values.
    """
    path = options.lvm_guided_inproc_model_path
    if not options.lvm_guided_inproc or not path:
        return None
    overrides = json.loads(options.lvm_guided_inproc_json_model_override_args or "{}")
    if set(overrides) - {"architectures"}:
        raise ValueError(
            "--lvm-guided-inproc-json-model-override-args must name only architectures, "
            f"got {', '.join(overrides)}: change the value model's config.json instead"
        )
    settings = Settings.from_environment(("--lvm-guided-inproc-model-path", path))
    if settings.value_model is None:
        raise ValueError(f"--lvm-guided-inproc-model-path must be a value model for the fork, got {path!r}")
    return replace(settings, max_candidates=settings.max_candidates or MAX_CANDIDATES)


def guide_by_server(
    sampler: LvmGuidedSampler, reqs: Sequence[Req], probs: torch.Tensor, sampling: Sampling
) -> torch.Tensor | None:
    """As :meth:`ForkHooks.apply`, with values from a server (``--lvm-guided-url``)."""
    device, params = probs.device, [req.lenvm_guidance for req in reqs]
    if all(p.mode == Mode.UNGUIDED for p in params):
        return None
    table = GuidanceTable.from_params(params, [req.lenvm_end_tokens for req in reqs], device).columns
    generated = torch.tensor([len(req.output_ids) for req in reqs], dtype=torch.int32, device=device)
    candidates = topk_candidates(
        probs,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        max_candidates=MAX_CANDIDATES,
        guided=table.mode != Mode.UNGUIDED,
        table=table,
        generated=generated,
    )
    if candidates.lost_mass.nan_to_num(0.0).max() > 0:
        warn_once(
            f"LenVM: a row has more than {MAX_CANDIDATES} candidates, and the rest is cut off: lower its top_k or "
            "top_p, or raise its min_p"
        )
    unchanged = (candidates.status == Status.UNGUIDED) | (candidates.status == Status.SKIP)
    if unchanged.all():
        return None
    value_logits = torch.zeros_like(candidates.probs)
    if sent := (candidates.status == Status.GUIDE).nonzero().flatten().tolist():
        counts, token_ids = candidates.counts.tolist(), candidates.token_ids.tolist()
        sent_reqs, ids = [reqs[row] for row in sent], [token_ids[row][: counts[row]] for row in sent]
        prefixes = [[*req.origin_input_ids, *req.output_ids] for req in sent_reqs]
        answer = sampler._post_tree_value([req.rid for req in sent_reqs], prefixes, ids, sent_reqs)
        for row, tokens, values in zip(sent, ids, answer, strict=True):
            value_logits[row, : len(tokens)] = torch.tensor(values[: len(tokens)], dtype=torch.float32, device=device)
    reweight_scatter(candidates, value_logits, table, generated=generated, probs=probs)
    keep_filters(probs, unchanged.nonzero().flatten(), sampling)
    return probs


class InprocRunner:
    """Guides the batches of a model runner.

    Requests are identified by their row in the engine's request pool. Their slots are freed when they have ended, or
    reclaimed while they are in no batch. A request that returns without slots, or with tokens that differ from the
    step's, is recomputed.

    Options of the base model's ``runner`` limit the share of the free memory for the value model's weights, cache and
    steps. Raises ValueError that names the option if the value model does not fit.
    """

    def __init__(self, settings: Settings, runner: ModelRunner) -> None:
        options, engine, requests = runner.server_args, runner.model_config, runner.max_running_requests
        free = free_bytes(runner)
        device = torch.device(runner.device, runner.gpu_id) if runner.device == "cuda" else runner.device
        value_model = settings.load_value_model(runner.dtype, device, engine.vocab_size, options.tokenizer_path)
        if engine.is_multimodal:
            value_model.vision_tower  # noqa: B018, must be loaded before the remaining memory is divided
        share = options.lvm_guided_inproc_mem_fraction_static or options.mem_fraction_static
        room = int(share * free - (free - free_bytes(runner)))
        rows, max_len = runner.req_to_token_pool.req_to_token.shape
        working = settings.working_bytes(
            value_model, requests=requests, max_len=max_len, vocab_size=engine.vocab_size, max_delta=MAX_DELTA
        )
        pages = pages_for(value_model, requests, max_len, room - working)
        if pages < 1:
            raise ValueError(
                f"--lvm-guided-inproc-mem-fraction-static leaves {room / 2**30:.2f} GiB after the value model's "
                f"weights, and its steps take {working / 2**30:.2f} GiB: raise it, or lower --max-running-requests, "
                "LENVM_MAX_CANDIDATES or LENVM_CHUNK_TOKENS"
            )
        text = "LenVM: value model %s in %s on %s; its cache of %d tokens takes %.2f GiB, its steps %.2f GiB"
        slots, gib = pages * PAGE_SIZE, [KVCache.num_bytes(value_model, PAGE_SIZE) * pages / 2**30, working / 2**30]
        logger.info(text, settings.value_model, value_model.dtype, value_model.device, slots, *gib)
        self.own = OwnSlots(rows, max_len, num_pages=pages, device=value_model.device)
        config = settings.step_config(
            has_graphs=not options.disable_cuda_graph,
            vocab_size=engine.vocab_size,
            max_requests=requests,
            max_scaled_tokens=1,  # the engine applies token temperatures to the logits
            max_delta=MAX_DELTA,
        )
        self.step = GuidedStep(ModelValues(value_model), self.own.slots, config)
        self._value_model = value_model
        self._guided: dict[int, Req] = {}  # by table row
        if value_model.device.type == "cuda":
            self.step.warm_up(is_logits=False, sample=False, probs_dtype=torch.float32)

    def guide(
        self, batch: ForwardBatch, reqs: Sequence[Req], probs: torch.Tensor, sampling: Sampling
    ) -> torch.Tensor | None:
        """Guide the next tokens of a batch; ``reqs`` are its parsed requests in row order.

        Changes ``probs``, fp32, bf16 or fp16 ``[B, V]``, in place, and returns it with the filters of all rows applied.
        If no request is guided, ``probs`` is unchanged and None is returned.
        """
        lengths, prompts = {}, []  # lengths of guided requests by table row, and tokens to compute first
        for req, length in zip(reqs, batch.seq_lens_cpu.tolist(), strict=False):  # a padded batch has more lengths
            row = req.req_pool_idx
            # After a retraction, the engine may drop a token. After a chunk, a request changes its row.
            if row not in self._guided or self._guided[row] is not req or length != req.lenvm_length + 1:
                if not self._is_due(req, length):
                    self._end(row)
                    continue
                prompts.append(self._admit(req, length))
            lengths[row] = req.lenvm_length = length
        for row in self._guided.keys() - lengths.keys():
            if self._guided[row].finished() or self._guided[row].req_pool_idx != row:
                self._end(row)
        room = self.own.reserve(lengths)
        for row in room.refused:
            warn_once(
                "LenVM: the value model's cache is full, so requests lose guidance. Raise "
                "--lvm-guided-inproc-mem-fraction-static."
            )
            self._guided[row].lenvm_guidance = GuidanceParams()
            del lengths[row]
        for row in (*room.reclaimed, *room.refused):
            self._end(row)
        if not lengths:
            return None
        self._extend([(part, tokens) for part, tokens in prompts if part.table_row in lengths])

        prepared = self.step.prepare(None, last_tokens(batch, len(reqs)))
        output = self.step.step(prepared, sampling, scores=probs, probs=probs)
        if rows := [i for i, req in enumerate(reqs) if self._may_keep_filters(req)]:
            at = to_device(np.array(rows), probs.device)
            keep_filters(probs, at, sampling, where=output.candidates.status[at] != Status.GUIDE)
        return probs

    def _is_due(self, req: Req, length: int) -> bool:
        """Whether to guide a new request from this step on."""
        if req.lenvm_guidance.mode == Mode.UNGUIDED or req.sampling_params.top_k == 1:  # one candidate
            return False
        if length < len(req.origin_input_ids) + len(req.output_ids):
            return False  # the token drawn after a chunk of the prompt is dropped
        try:
            if req.input_embeds is not None:
                raise ValueError("input_embeds cannot be combined with guidance in custom_params")
            # The engine keeps only placeholders, beyond the vocabulary, of images in earlier turns.
            if req.session_id is not None and max(req.origin_input_ids) >= self.step.config.vocab_size:
                raise ValueError("images in a session cannot be combined with guidance in custom_params")
            has_images = req.multimodal_inputs is not None
            req.lenvm_images = PromptImages(req, self._value_model) if has_images else None
        except ValueError as error:
            logger.warning("LenVM: request %s is not guided: %s", req.rid, error)
            req.lenvm_guidance = GuidanceParams()
            return False
        return True

    def _admit(self, req: Req, length: int) -> tuple[PromptPart, list[int]]:
        """Admit a request into its row. Returns the part of its sequence to compute before the step, and its tokens."""
        row, images = req.req_pool_idx, req.lenvm_images
        tokens = [*req.origin_input_ids, *req.output_ids][: length - 1]  # the last token may only be on the device
        if req.sampling_params.top_k > (most := self.step.config.max_candidates):
            warn_once(
                f"LenVM: requests with a top_k above {most}, or without one, only draw from their {most} most probable "
                "tokens: lower top_k, or raise LENVM_MAX_CANDIDATES up to 64"
            )
        identities, moved = (tokens, 0) if images is None else (images.identities(tokens), images.moved)
        computed = self.own.admit(row, identities, moved)
        self.step.add_request(
            row,
            replace(req.lenvm_guidance, token_temperature_scale={}, return_values=False),
            set(sorted(req.lenvm_end_tokens)[:MAX_END_TOKENS]),
            prompt_len=len(req.origin_input_ids),
        )
        self._guided[row] = req
        return PromptPart(row, computed, length - 1), tokens[computed:]

    def _end(self, row: int) -> None:
        """End the guidance of the request in a row, if any, and free its slots."""
        if self._guided.pop(row, None) is not None:
            self.step.remove_request(row)
            self.own.release(row)

    def _extend(self, prompts: Sequence[tuple[PromptPart, list[int]]]) -> None:
        """Compute prompts, without their last token."""
        if not prompts:
            return
        located: list[tuple[PromptImages | None, int, int]] = []
        for part, tokens in prompts:
            images = self._guided[part.table_row].lenvm_images
            located.append((images, part.start, len(tokens)))
            if images is not None:
                images.embed(part.start, self._value_model)
        token_ids = [token for _, tokens in prompts for token in tokens]
        on_device = to_device(np.array(token_ids, dtype=np.int64), self._value_model.device)
        embedded = image_tokens(located, len(token_ids), self._value_model)
        self.own.extend(self.step, [part for part, _ in prompts], lambda *_: on_device, images=embedded)
        for images, _, _ in located:
            if images is not None:
                images.embeds = None

    def _may_keep_filters(self, req: Req) -> bool:
        """Whether a request has filters, and its row may be unguided in this step. The device has the exact status."""
        params, sampling = req.lenvm_guidance, req.sampling_params
        has_filters = sampling.top_k < self.step.config.vocab_size or sampling.top_p < 1 or sampling.min_p > 0
        stride = params.value_stride or self.step.config.value_stride
        is_guided = self._guided.get(req.req_pool_idx) is req
        return has_filters and (not is_guided or params.entropy_threshold is not None or stride > 1)


def free_bytes(runner: ModelRunner) -> float:
    """Free memory of a runner's device, the minimum over the tensor-parallel ranks."""
    from sglang.srt.utils.common import get_available_gpu_memory

    group = runner.tp_group
    ranks = dict(distributed=group.world_size > 1, cpu_group=group.cpu_group)
    return 2**30 * get_available_gpu_memory(runner.device, runner.gpu_id, **ranks)


def keep_filters(
    probs: torch.Tensor, rows: torch.Tensor, sampling: Sampling, where: torch.Tensor | None = None
) -> None:
    """Apply the filters of ``rows``, int64 ``[R]``, to ``probs [B, V]`` in place.

    ``where``, bool ``[R]``, selects the rows that change.
    """
    top_k, top_p, min_p = (torch.as_tensor(x)[rows, None] for x in sampling[:3])
    before = probs[rows]
    p, order = before.float().sort(dim=1, descending=True)
    drop = torch.arange(p.shape[1], device=p.device) >= top_k
    drop |= p.cumsum(dim=1) - p > top_p.masked_fill(top_p >= 1, torch.inf)  # sums may round above 1
    drop |= p < min_p * p[:, :1]
    after = torch.zeros_like(p).scatter_(1, order, p.masked_fill(drop, 0.0)).to(probs.dtype)
    probs[rows] = after if where is None else torch.where(where[:, None], after, before)


_RUNNER = "sglang.srt.model_executor.model_runner:ModelRunner"
REPLACED: dict[str, Callable] = {
    f"{_SAMPLING}:LvmGuidedSampler.apply": ForkHooks.apply,
    f"{_SAMPLING}:_extract_token_temperature_scale": ForkHooks.extract_token_temperature_scale,
    f"{_RUNNER}.initialize": ForkHooks.initialize,
    f"{_RUNNER}.sample": ForkHooks.sample,
    # Also used by the Qwen2.5-VL value model.
    "sglang.srt.models.qwen2_lvm:MLP2SiLUValueHead.forward": ForkHooks.value_head,
    "sglang.srt.models.qwen3_lvm:MLP2SiLUValueHead.forward": ForkHooks.value_head,
}


@functools.cache
def install() -> dict[str, Callable]:
    """Replace the fork's functions by this package's, in this process. A second call changes nothing.

    Returns:
        The replaced functions of the fork, by ``module:name``.

    Raises:
        ImportError: the fork is not installed, or its version differs; the message names the difference. Nothing is
            replaced.
    """
    try:
        signatures.check("sglang_fork")
        originals = {name: pkgutil.resolve_name(name) for name in REPLACED}
    except (RuntimeError, ImportError, AttributeError) as error:
        raise ImportError(
            "install() needs the LenVM fork of SGLang (eric-ai-lab/Length-Value-Model, sglang-LenVM) in the tested "
            f"version: {error}"
        ) from error
    hooks = ForkHooks()
    for name, function in REPLACED.items():
        module, _, path = name.partition(":")
        owner, _, attribute = path.rpartition(".")
        setattr(pkgutil.resolve_name(f"{module}:{owner}"), attribute, _hooked(function, hooks, originals[name]))
    logger.info("LenVM: replaced %s", ", ".join(REPLACED))
    return originals


def _hooked(hook: Callable, hooks: ForkHooks, original: Callable) -> Callable:
    """A function, which may become a method, that calls a hook around the fork's function."""

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return hook(hooks, original, *args, **kwargs)

    return replacement
