"""Hooks of the engine's functions that every source of values needs.

A probe (:mod:`~lenvm_kernels.engines.sglang.states`), a value model
(:mod:`~lenvm_kernels.engines.sglang.value_model`) and drafts (:mod:`~lenvm_kernels.engines.sglang.drafts`) add further
hooks after the base model was loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.arg_groups.model_override_base import resolved_view
from sglang.srt.layers.sampler import Sampler
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from lenvm_kernels.engines import signatures
from lenvm_kernels.engines.report import without_empty_keys
from lenvm_kernels.engines.settings import Settings
from lenvm_kernels.engines.sglang.guide import SGLangGuide
from lenvm_kernels.engines.sglang.options import DRAFT_OPTIONS, OPTIONS, check_options, drafts_a_step
from lenvm_kernels.engines.sglang.requests import check_off, guidance_of, separate_sample, settings_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

logger = logging.getLogger(__name__)


class SGLangPlugin:
    """The hooks of one process of the engine.

    They take the hooked function's arguments, preceded by its result (AFTER) or by the function (AROUND).

    Attributes:
        guide: the guidance of a scheduler process, which has one model runner that samples. None before it is loaded,
            and in other processes.
        off: why requests with guidance are rejected. If None, they are accepted.
    """

    def __init__(self, guide: SGLangGuide | None = None, off: str | None = None) -> None:
        self.guide, self.off = guide, off
        self._settings: Settings | None = None

    # --- requests ---

    def check_request(self, manager: TokenizerManager, request: Any, *args: Any, **kwargs: Any) -> None:
        """Before a tokenized request is sent: reject it if it cannot be guided, which the servers answer with status
        400."""
        if self.off is not None:
            check_off(request, self.off)
            return
        self._settings = self._settings or settings_of(resolved_view(manager.server_args))
        if guidance_of(request, self._settings) is not None:
            separate_sample(request)

    def add_meta_info(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """Around the update of a response's ``meta_info``."""
        return without_empty_keys(original, *args, **kwargs)

    def note_guidance(self, _: None, req: Req, *args: Any, **kwargs: Any) -> None:
        """After a request was created in the scheduler: parse its guidance."""
        req.lenvm_guidance = req.lenvm_row = None
        try:
            if self.off is not None:
                check_off(req, self.off)
            elif self.guide is not None:
                req.lenvm_guidance = guidance_of(req, self.guide.settings, self.guide.failure)
        except ValueError as error:  # not seen by check_request: the engine loads no plugins in further HTTP workers
            req.lenvm_guidance = req.input_embeds = None  # it keeps one token, and runs once to be answered
            req.set_finish_with_abort(str(error))  # status 400
        if self.guide is not None:
            self.guide.note_request(req)

    # --- the model ---

    def load(self, _: None, runner: ModelRunner) -> None:
        """After the base model was loaded: check the engine's options, load the source of values onto its device."""
        if runner.is_draft_worker:
            return
        try:
            self.guide = load_guide(runner)
        except Exception as error:
            if Settings.is_explicit():
                raise
            self.off = str(error)
            logger.warning("LenVM: guidance is off: %s", error)

    def take_slots(self, _: None, runner: ModelRunner, *args: Any, **kwargs: Any) -> None:
        """After the engine allocated its pools: create the guided step on them."""
        if self.guide is not None and not runner.is_draft_worker:
            self.guide.take_slots(runner)

    # --- batches ---

    def admit_requests(
        self, batch: ForwardBatch, _: type, scheduled: ScheduleBatch, runner: ModelRunner, *args: Any, **kwargs: Any
    ) -> None:
        """After a batch was prepared for a model: admit its requests."""
        batch.lenvm_reqs, batch.lenvm_failed = [], False
        if self.guide is None or not self.guide.has_slots or runner.is_draft_worker:
            return
        batch.lenvm_reqs = [req for req in scheduled.reqs if req.lenvm_guidance is not None]
        if is_prefill := batch.forward_mode.is_extend_without_speculative():
            running = {id(req) for req in scheduled.decoding_reqs or ()}  # in a mixed batch
            batch.lenvm_all, batch.lenvm_decoding = list(scheduled.reqs), [id(req) in running for req in scheduled.reqs]
            admitted = [req for req in scheduled.reqs if id(req) not in running]
        else:
            admitted = scheduled.reqs
        self.guide.admit(batch, admitted, is_prefill=is_prefill)

    def sample(self, original: Callable, runner: ModelRunner, logits_output: Any, batch: ForwardBatch) -> torch.Tensor:
        """Around the sampling of a batch's tokens."""
        # Batches that the engine makes for the capture of graphs have no requests.
        if self.guide is None or not getattr(batch, "lenvm_reqs", None):
            return original(runner, logits_output, batch)
        with self.guide.sampling(batch):
            tokens = original(runner, logits_output, batch)
        self.guide.report_sampled(batch, logits_output, tokens)
        self.guide.discard_read_done(runner)
        return tokens

    def draw(
        self,
        original: Callable,
        sampler: Sampler,
        logits_output: Any,
        info: SamplingBatchInfo,
        return_logprob: bool,
        *args: Any,
        logprob_logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Around the engine's sampler, after penalties, biases and grammars: leave it the drawn tokens only.

        Log-probabilities are computed from the unmasked logits.
        """
        if self.guide is not None:
            info, unmasked = self.guide.leave_drawn(sampler, logits_output, info, copies=return_logprob)
            logprob_logits = unmasked if logprob_logits is None else logprob_logits
        more = {} if logprob_logits is None else {"logprob_logits": logprob_logits}
        return original(sampler, logits_output, info, return_logprob, *args, **more)


_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
# The kind of each hook, and its method of SGLangPlugin.
HOOKS = {
    f"{_MANAGER}._send_one_request": ("BEFORE", "check_request"),
    f"{_MANAGER}.update_request_meta_info": ("AROUND", "add_meta_info"),
    "sglang.srt.managers.schedule_batch.Req.__init__": ("AFTER", "note_guidance"),
    f"{_RUNNER}.load_model": ("AFTER", "load"),
    f"{_RUNNER}.alloc_memory_pool": ("AFTER", "take_slots"),
    "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new": ("AFTER", "admit_requests"),
    f"{_RUNNER}.sample": ("AROUND", "sample"),
    "sglang.srt.layers.sampler.Sampler.forward": ("AROUND", "draw"),
}


def register() -> None:
    """Register the hooks in a process of the engine; if the plugin is off, only those that read requests.

    Raises:
        ValueError: invalid settings.
        RuntimeError: the engine's functions are not the recorded ones.
    """
    is_off = Settings.is_off()
    if not is_off:
        Settings.from_environment()
    signatures.check("sglang")
    plugin = SGLangPlugin(off="LENVM_VALUE_MODEL is off" if is_off else None)
    for target, (kind, method) in HOOKS.items():
        if not is_off or method in ("check_request", "note_guidance"):
            HookRegistry.register(target, getattr(plugin, method), HookType[kind])


def load_guide(runner: ModelRunner) -> SGLangGuide:
    """The guidance of a scheduler process, with its further hooks.

    Raises:
        RuntimeError: a function could not be hooked.
        ValueError: an option that guidance cannot be combined with, or invalid settings.
    """
    check_hooked(HOOKS)
    options = resolved_view(runner.server_args)  # with the engine's defaults
    check_options(options, OPTIONS, "guidance, which LENVM_VALUE_MODEL=off turns off")
    if options.speculative_algorithm:
        check_options(options, DRAFT_OPTIONS, "guidance and speculative decoding")
    if (sampler := type(runner.sampler)).forward is not Sampler.forward:
        raise ValueError(
            f"sampling_backend must be one of the engine's own together with guidance, got {options.sampling_backend}: "
            f"{sampler.__name__} does not call the function that guidance is in"
        )
    settings = settings_of(options)
    settings.thoughts  # noqa: B018, loads the tokenizer before the first request
    device = torch.device(runner.device, runner.gpu_id) if runner.device == "cuda" else torch.device(runner.device)
    kind: type[SGLangGuide] = SGLangGuide
    if settings.reads_tokens:
        from lenvm_kernels.engines.sglang.value_model import ValueModelGuide as kind
    elif settings.has_probe:
        from lenvm_kernels.engines.sglang.states import ProbeGuide as kind
    guide = kind.load(settings, runner, options, device, drafts_a_step(options))
    hooks = guide.hooks
    if options.speculative_algorithm:
        from lenvm_kernels.engines.sglang.drafts import hooks_of

        hooks |= hooks_of(guide)
    for target, (name, function) in hooks.items():
        if target in HookRegistry._patched:  # the registry applies no second hook
            raise RuntimeError(f"LenVM cannot hook {target}, which another plugin has hooked")
        HookRegistry.register(target, function, HookType[name])
    HookRegistry.apply_hooks()
    check_hooked(hooks)
    return guide


def check_hooked(targets: Mapping[str, Any]) -> None:
    """Raise RuntimeError, naming them, if hooks of the targets were not applied."""
    if missing := [target for target in targets if target not in HookRegistry._patched]:
        raise RuntimeError(f"LenVM does not fit this SGLang: it could not hook {', '.join(missing)}")
