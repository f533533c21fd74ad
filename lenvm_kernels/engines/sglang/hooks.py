"""The hooks registered in each process of the engine, and the parsing of requests in front end and schedulers. A
scheduler's guidance adds further hooks after the base model was loaded."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from sglang.srt.arg_groups.model_override_base import resolved_view
from sglang.srt.environ import envs
from sglang.srt.layers.sampler import Sampler
from sglang.srt.parser.reasoning_parser import ReasoningParser
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.utils.hf_transformers.tokenizer import get_tokenizer

from lenvm_kernels.engines import is_off, signatures, variables
from lenvm_kernels.engines.report import OUTCOME, OUTPUT_LENGTH, REMAINING_LENGTHS
from lenvm_kernels.engines.settings import Settings
from lenvm_kernels.engines.sglang.guide import NOT_TRIED, EngineOptions, SGLangGuide, check_options, seed_of
from lenvm_kernels.engines.tokenizers import load_with
from lenvm_kernels.guidance import GuidanceParams
from lenvm_kernels.guidance.fields import with_selected
from lenvm_kernels.guidance.params import read_names

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import TokenizedEmbeddingReqInput, TokenizedGenerateReqInput
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.model_executor.model_runner import ModelRunner

    Request: TypeAlias = TokenizedGenerateReqInput | TokenizedEmbeddingReqInput | Req

logger = logging.getLogger(__name__)

OPTIONS: EngineOptions = {
    "speculative_algorithm": ((None, "EAGLE", "EAGLE3", "STANDALONE", "NGRAM"), NOT_TRIED),
    "speculative_adaptive": ((False,), "the step takes a fixed number of drafts"),
    "enable_multi_layer_eagle": ((False,), NOT_TRIED),
    "dllm_algorithm": ((None,), "it does not call the sampler hooked by guidance"),
    "startup_weight_load_mode": (("serial",), "weights are read and graphs captured after the base model is loaded"),
    "attn_cp_size": ((1,), NOT_TRIED),
    "enable_pdmux": ((False,), "prompts and draws would be computed at the same time"),
}
DRAFT_OPTIONS: EngineOptions = {"enable_mixed_chunk": ((False,), NOT_TRIED)}


class SGLangPlugin:
    """The hooks of a process of the engine.

    Attributes:
        guide: guidance of a scheduler process; None before it is loaded, and in other processes.
        off: reason for rejecting requests with guidance. If None, they are accepted.
    """

    def __init__(self, off: str | None = None) -> None:
        self.off = off
        self.guide: SGLangGuide | None = None
        self._settings: Settings | None = None

    def check_request(self, manager: TokenizerManager, request: Any, *args: Any, **kwargs: Any) -> None:
        """Before a tokenized request is sent: reject it with status 400 if it cannot be guided."""
        if self.off is not None:
            check_off(request, self.off)
            return
        self._settings = self._settings or settings_of(resolved_view(manager.server_args))
        if guidance_of(request, self._settings) is not None:
            separate_sample(request)

    def check_requests(self, manager: TokenizerManager, requests: list[Any], *args: Any, **kwargs: Any) -> None:
        """Before a batch of tokenized requests is sent."""
        for request in requests:
            self.check_request(manager, request)

    def pass_selected(self, sampling: dict[str, Any], request: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """After a chat request is converted to sampling parameters: add the fields that select defaults."""
        return sampling | {"custom_params": with_selected(sampling.get("custom_params"), request)}

    def add_meta_info(
        self,
        original: Callable,
        manager: TokenizerManager,
        meta_info: dict[str, Any],
        state: Any,
        customized_info: dict[str, list],
        index: int,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Around the update of a response's ``meta_info``, which adds the keys of all requests of the batch."""

        def is_empty(key: str) -> bool:
            ours = key in (REMAINING_LENGTHS, OUTPUT_LENGTH) and key not in state.customized_info_accumulated
            return ours and all(number is None for number in customized_info[key][index])

        # A list would be cut to the new output tokens in a stream.
        for outcome in customized_info.get(OUTCOME, {index: ()})[index]:
            meta_info[OUTCOME] = outcome
        others = {key: values for key, values in customized_info.items() if key != OUTCOME and not is_empty(key)}
        original(manager, meta_info, state, others, index, *args, **kwargs)

    def note_guidance(self, _: None, req: Req, *args: Any, **kwargs: Any) -> None:
        """After a request was created in the scheduler: parse its guidance."""
        req.lenvm_guidance = req.lenvm_row = req.lenvm_lost = None
        req.lenvm_broken = req.lenvm_broken_before = 0
        try:
            if self.off is not None:
                check_off(req, self.off)
            elif self.guide is not None:
                req.lenvm_guidance = guidance_of(req, self.guide.settings, self.guide.failure)
        # Further HTTP workers load no plugins, so check_request was skipped. No error may end the scheduler.
        except Exception as error:
            req.lenvm_guidance = req.input_embeds = None  # the request runs once, with one token, to be answered
            req.set_finish_with_abort(str(error))  # status 400
        if self.guide is not None:
            self.guide.note_request(req)

    def load(self, _: None, runner: ModelRunner) -> None:
        """After the base model was loaded: load the guidance onto its device."""
        if runner.is_draft_worker:
            return
        try:
            self.guide = load_guide(runner)
        except Exception as error:
            if variables():
                raise
            self.off = str(error)
            logger.warning("LenVM: guidance is off: %s", error)


_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
# Kind of each hook, and the method of SGLangPlugin.
HOOKS = {
    f"{_MANAGER}._send_one_request": ("BEFORE", "check_request"),
    f"{_MANAGER}._send_batch_request": ("BEFORE", "check_requests"),
    f"{_MANAGER}.update_request_meta_info": ("AROUND", "add_meta_info"),
    "sglang.srt.managers.schedule_batch.Req.__init__": ("AFTER", "note_guidance"),
    "sglang.srt.model_executor.model_runner.ModelRunner.load_model": ("AFTER", "load"),
}
# Registered only if defaults depend on fields of chat requests.
_PROTOCOL = "sglang.srt.entrypoints.openai.protocol"
CHAT_HOOKS = {
    f"{_PROTOCOL}.{name}.to_sampling_params": ("AFTER", "pass_selected")
    for name in ("ChatCompletionRequest", "ResponsesRequest")
}


def register() -> None:
    """Register the hooks in a process of the engine. If the plugin is off, only register hooks that reject requests.

    Raises as :meth:`Settings.from_environment` and :func:`signatures.check`.
    """
    signatures.check("sglang")
    hooks = HOOKS
    if is_off():
        hooks = {target: hook for target, hook in HOOKS.items() if hook[1] not in ("add_meta_info", "load")}
    elif Settings.from_environment().has_choices:
        hooks = HOOKS | CHAT_HOOKS
    plugin = SGLangPlugin(off="LENVM_VALUE_MODEL is off" if is_off() else None)
    for target, (kind, method) in hooks.items():
        HookRegistry.register(target, getattr(plugin, method), HookType[kind])


def load_guide(runner: ModelRunner) -> SGLangGuide:
    """Load the guidance of a scheduler process and install its hooks.

    Raises RuntimeError if a function could not be hooked, and ValueError for invalid settings and unsupported options.
    """
    if missing := [target for target in HOOKS if target not in HookRegistry._patched]:
        raise RuntimeError(f"LenVM does not fit this SGLang: it could not hook {', '.join(missing)}")
    options = resolved_view(runner.server_args)  # with the engine's defaults
    check_options(options, OPTIONS, "guidance, which LENVM_VALUE_MODEL=off turns off")
    if options.speculative_algorithm:
        check_options(options, DRAFT_OPTIONS, "guidance and speculative decoding")
    if (sampler := type(runner.sampler)).forward is not Sampler.forward:
        raise ValueError(
            f"sampling_backend must be built into the engine together with guidance, got {options.sampling_backend}: "
            f"{sampler.__name__} does not call the function hooked by guidance"
        )
    settings = settings_of(options)
    settings.thoughts  # noqa: B018, loads the tokenizer before the first request
    device = torch.device(runner.device, runner.gpu_id) if runner.device == "cuda" else torch.device(runner.device)
    drafts = (options.speculative_num_draft_tokens or 1) - 1 if options.speculative_algorithm else 0
    if settings.reads_tokens:
        from lenvm_kernels.engines.sglang.value_model import ValueModelGuide

        guide: SGLangGuide = ValueModelGuide(settings, device, drafts, runner, options)
    elif settings.has_probe:
        from lenvm_kernels.engines.sglang.states import ProbeGuide

        guide = ProbeGuide(settings, device, drafts, runner, options)
    else:
        guide = SGLangGuide(settings, device, drafts)
    if not settings.reads_tokens:
        guide.reserve(runner, options.max_running_requests)
    hooks = guide.hooks
    if options.speculative_algorithm:
        from lenvm_kernels.engines.sglang.drafts import verify

        hooks |= {"sglang.srt.speculative.eagle_utils.eagle_sample": ("AROUND", partial(verify, guide))}
    for target, (kind, function) in hooks.items():
        HookRegistry._apply_target(target, [(HookType[kind], function, None)])  # works if other plugins hook the target
    return guide


def settings_of(options: Any) -> Settings:
    """The settings of this process, with the tokenizer loaded by the engine's function."""
    path, names = options.tokenizer_path, ("tokenizer_mode", "trust_remote_code", "revision", "tokenizer_backend")

    def marks(tokenizer: Any) -> tuple[str, str] | None:
        if options.reasoning_parser is None:
            return None
        detector = ReasoningParser(options.reasoning_parser, tokenizer=tokenizer).detector
        return detector.think_start_token, detector.think_end_token

    load_with(path, partial(get_tokenizer, path, **{name: getattr(options, name) for name in names}), marks)
    return Settings.current(path)


def guidance_of(request: Request, settings: Settings, failure: str | None = None) -> GuidanceParams | None:
    """The parameters of a request, or None without guidance.

    ``failure`` is the reason for rejecting requests with guidance. If None, they are accepted. Raises ValueError as
    :meth:`Settings.parse_request`, and for a feature that cannot be combined with guidance.
    """
    sampling = request.sampling_params
    if sampling.custom_params is None and not settings.defaults:
        return None
    if not isinstance(sampling.custom_params or {}, dict):
        raise ValueError(f"custom_params must be an object of named values, got {sampling.custom_params!r}")
    params = settings.parse_request(
        sampling.custom_params,
        sampling.stop_token_ids or (),
        # 0 if the engine only caches the prompt of several samples.
        max_tokens=2**20 if sampling.max_new_tokens == 0 else sampling.max_new_tokens,
        has_schema=any((sampling.json_schema, sampling.regex, sampling.ebnf, sampling.structural_tag)),
    )
    if not params.needs_step and not params.token_temperature_scale:
        return None
    if failure is not None:
        raise ValueError(f"guidance in custom_params must be absent: {failure}")
    if not -(2**63) <= (sampling.sampling_seed or 0) < 2**63:
        raise ValueError(f"sampling_seed must be an int64, got {sampling.sampling_seed}")
    given = {
        "beam_width": (sampling.beam_width or 1) > 1,  # beams are not drawn
        "watermark": sampling.watermark is not None,  # it replaces the drawn token
        # The engine aborts a request if its token is removed by the engine's filters.
        "return_sampling_mask": getattr(request, "return_sampling_mask", False),
    }
    if settings.reads_tokens:
        # A request has no session before it is scheduled. Requests for embeddings have no input embeddings.
        session = getattr(request, "session", None)
        given |= {
            "input_embeds": getattr(request, "input_embeds", None) is not None,
            "positional_embed_overrides": request.positional_embed_overrides is not None,
            # If the value model reads images, the scheduler rejects unsupported ones (PromptImages).
            "images, videos and audio": getattr(request, "mm_inputs", None) is not None and not settings.reads_images,
            # Its requests share slots outside the radix cache, and requests without guidance leave these uncomputed.
            "a streaming session": session is not None and session.streaming,
        }
    if found := [name for name, is_given in given.items() if is_given]:
        if not settings.is_asked(sampling.custom_params):
            return None
        raise ValueError(f"{found[0]} cannot be combined with guidance in custom_params")
    return params


def check_off(request: Request, reason: str) -> None:
    """Raise ValueError with the reason if a request has guidance parameters.

    ``thinking_budget`` is also a parameter of the engine. Names that may belong to other components are ignored.
    """
    custom_params = request.sampling_params.custom_params
    if isinstance(custom_params, dict):
        try:
            given = read_names(custom_params, others="shared")
        except ValueError:  # a name that looks like a field
            return
        if given.keys() - {"thinking_budget"}:
            raise ValueError(f"guidance in custom_params must be absent: {reason}")


def separate_sample(request: Request) -> None:
    """Copy the sampling parameters of a guided request before it is sent.

    The ``n`` samples of a prompt are sent one after the other and share one object. Each call changes the seed in this
    object, so that the next sample draws other tokens.
    """
    shared = request.sampling_params
    request.sampling_params = own = copy.copy(shared)
    if shared.sampling_seed is not None:
        shared.sampling_seed = seed_of(str(shared.sampling_seed))
    if not envs.SGLANG_USE_PICKLE_IPC.get():
        own.custom_params = {name: _for_msgpack(value) for name, value in (own.custom_params or {}).items()}


def _for_msgpack(value: Any) -> Any:
    """Encode nested lists and objects as JSON text, because the engine's msgpack rejects them."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return json.dumps(value) if any(isinstance(part, (list, dict)) for part in parts) else value
