"""LenVM in unforked SGLang, as a plugin of the engine (entry point ``sglang.srt.plugins``).

``LENVM_VALUE_MODEL`` (:class:`Settings`) enables its hooks of the engine's functions (:data:`HOOKS`):

- Requests are validated before they are scheduled. Guided requests use a separate namespace of the radix cache, so that
  they never reuse a prefix that the value model has not computed.
- The value model is loaded after the base model and gets its share of the memory. Its keys and values are stored in the
  engine's slots, so that the radix cache, chunked prefill, retraction and aborts need no extra handling.
- At every step, tokens of guided requests are drawn from their candidates; the engine draws all others.

The work on a batch is in :mod:`lenvm_kernels.engines.sglang.guide`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.arg_groups.model_override_base import resolved_view
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.managers.auxiliary_output import append_auxiliary_output
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from lenvm_kernels.engines import signatures
from lenvm_kernels.engines.report import without_empty_keys
from lenvm_kernels.engines.settings import MAX_SCALED_TOKENS, MAX_STOP_TOKENS, Settings
from lenvm_kernels.engines.sglang.guide import SGLangGuide
from lenvm_kernels.engines.sglang.images import PromptImages
from lenvm_kernels.engines.sglang.states import SampledStates, input_embedding
from lenvm_kernels.engines.tokenizers import check_vocabulary
from lenvm_kernels.guidance import GuidanceParams
from lenvm_kernels.types import Mode

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessor, LogitsProcessorOutput
    from sglang.srt.managers.io_struct import TokenizedEmbeddingReqInput, TokenizedGenerateReqInput
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.speculative.eagle_info import EagleVerifyInput

logger = logging.getLogger(__name__)

RADIX_NAMESPACE = "lenvm|"
_NO_SAMPLER = "it never reaches the sampler that guidance is in"
_NOT_TRIED = "not tried"
_FOREIGN_KEYS = "the value model has no keys and values for prompts that come from elsewhere"
_OTHER_SLOTS = "the value model lives in the slots of the engine's own pool"
_OTHER_LAYERS = "it has the base model hand over what other layers read"
# Options of the engine, each with the accepted values and the reason.
EngineOptions = Mapping[str, tuple[tuple[Any, ...], str]]
OPTIONS: EngineOptions = {
    "speculative_algorithm": ((None, "EAGLE", "EAGLE3", "STANDALONE", "NGRAM"), _NOT_TRIED),
    "speculative_adaptive": ((False,), "the step takes a fixed number of drafts"),
    "enable_multi_layer_eagle": ((False,), _NOT_TRIED),
    "dllm_algorithm": ((None,), _NO_SAMPLER),
    "pp_size": ((1,), "not built"),
    "startup_weight_load_mode": (("serial",), "weights are read and graphs captured after the base model is loaded"),
    "attn_cp_size": ((1,), _NOT_TRIED),
    "enable_pdmux": ((False,), "prompts and draws would be computed at the same time"),
    "disaggregation_mode": (("null",), "requests are guided from their prompts on"),
}
# Further options with a value model that reads tokens, with a probe, with a probe of inner layers, and with drafts.
VALUE_MODEL_OPTIONS: EngineOptions = {
    "enable_hierarchical_cache": ((False,), _FOREIGN_KEYS),
    "enable_lmcache": ((False,), _FOREIGN_KEYS),
    "enable_flexkv": ((False,), _FOREIGN_KEYS),
    "enable_unified_cache_external_linker": ((False,), _FOREIGN_KEYS),
    "radix_cache_backend": ((None,), _FOREIGN_KEYS),
    "enable_unified_memory": ((False,), _OTHER_SLOTS),
    "enable_hisparse": ((False,), _OTHER_SLOTS),
    "enable_kv_cache_sharding": ((False,), _OTHER_SLOTS),
    "dcp_size": ((1,), _OTHER_SLOTS),
}
PROBE_OPTIONS: EngineOptions = {"enable_torch_compile": ((False,), _NOT_TRIED)}
INNER_PROBE_OPTIONS: EngineOptions = {
    "speculative_algorithm": ((None, "EAGLE", "STANDALONE", "NGRAM"), _OTHER_LAYERS),
    "enable_return_aux_hidden_states": ((False,), _OTHER_LAYERS),
}
DRAFT_OPTIONS: EngineOptions = {"enable_mixed_chunk": ((False,), _NOT_TRIED)}


def guidance_of(
    request: TokenizedGenerateReqInput | TokenizedEmbeddingReqInput | Req, settings: Settings
) -> GuidanceParams | None:
    """The parameters of a request, or None without guidance.

    A greedy request is not guided: it has one candidate.

    Raises:
        ValueError: naming the field of ``custom_params``, what came and what is accepted; or a feature that cannot be
            combined with guidance.
    """
    sampling = request.sampling_params
    if sampling.custom_params is None:
        return None
    if not isinstance(sampling.custom_params, dict):
        raise ValueError(f"custom_params must be an object of named values, got {sampling.custom_params!r}")
    params = settings.parse_request(sampling.custom_params)
    if sampling.top_k == 1:
        params = replace(params, mode=Mode.UNGUIDED)
    if not params.needs_step and not params.token_temperature_scale:
        return None
    if not -(2**63) <= (sampling.sampling_seed or 0) < 2**63:
        raise ValueError(f"sampling_seed must be an int64, got {sampling.sampling_seed}")
    for name, tokens, most in (
        ("stop_token_ids", sampling.stop_token_ids or (), MAX_STOP_TOKENS),
        ("token_temperature_scale", params.token_temperature_scale, MAX_SCALED_TOKENS),
    ):
        if len(tokens) > most:
            raise ValueError(f"{name} must be of at most {most} tokens together with guidance, got {len(tokens)}")
    given = {"beam_width": (sampling.beam_width or 1) > 1}  # beams are not drawn
    if settings.reads_tokens:
        # Requests before they are scheduled have no session, and requests for embeddings no input embeddings.
        session = getattr(request, "session", None)
        given |= {
            "input_embeds": getattr(request, "input_embeds", None) is not None,
            "positional_embed_overrides": request.positional_embed_overrides is not None,
            # If the value model reads images, the scheduler rejects unsupported ones (PromptImages).
            "images, videos and audio": getattr(request, "mm_inputs", None) is not None and not settings.reads_images,
            # Its requests share slots outside the radix cache, which are not computed for requests without guidance.
            "a streaming session": session is not None and session.streaming,
        }
    for name, is_given in given.items():
        if is_given:
            raise ValueError(f"{name} cannot be combined with guidance in custom_params")
    return params


def drafts_a_step(options: Any) -> int:
    """Number of draft tokens per request and step of an engine with these options."""
    return (options.speculative_num_draft_tokens or 1) - 1 if options.speculative_algorithm else 0


def check_options(options: Any, accepted_values: EngineOptions, feature: str) -> None:
    """Raise ValueError unless ``feature`` can be combined with each option of the engine."""
    for option, (accepted, reason) in accepted_values.items():
        if (given := getattr(options, option)) not in accepted:
            texts = ", ".join(map(str, accepted))
            one_of = "one of " * (len(accepted) > 1)
            raise ValueError(f"{option} must be {one_of}{texts} together with {feature}, got {given}: {reason}")


def check_pool(runner: ModelRunner) -> None:
    """Raise ValueError unless every layer of the base model stores all keys and values in slots of one pool."""
    kinds = {
        "sliding windows": runner.is_hybrid_swa,
        "layers with a state": mambaish_config(runner.model_config) is not None,
    }
    for kind, is_there in kinds.items():
        if is_there:
            raise ValueError(
                f"LENVM_VALUE_MODEL must be a probe or none with this base model, which has {kind}: {_OTHER_SLOTS}"
            )


def load_probe(settings: Settings, runner: ModelRunner, options: Any) -> SampledStates:
    """The probe, and the states of the base model that it reads."""
    check_options(options, PROBE_OPTIONS, "a probe")
    probe = settings.load_probe(runner.model_config.num_hidden_layers, input_embedding(runner.model))
    layers = probe.config.layers
    if set(layers) != {probe.config.num_layers}:
        check_options(options, INNER_PROBE_OPTIONS, f"a probe of layers {list(layers)}")
    return SampledStates(runner.model, probe)


class SGLangPlugin:
    """The hooks of one process of the engine.

    They take the hooked function's arguments, preceded by its result (AFTER) or by the function (AROUND).

    Attributes:
        guide: the guidance of a scheduler process, which has one model runner that samples. None before it is loaded,
            and in other processes.
    """

    def __init__(self, guide: SGLangGuide | None = None) -> None:
        self.guide = guide

    def check_request(self, result: Any, manager: TokenizerManager, *args: Any, **kwargs: Any) -> None:
        """After a request was tokenized: reject it if it cannot be guided, which the servers answer with status 400."""
        guidance_of(result, Settings.current(manager.server_args.tokenizer_path))

    def add_meta_info(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        """Around the update of a response's ``meta_info``."""
        return without_empty_keys(original, *args, **kwargs)

    def note_guidance(self, _: None, req: Req, *args: Any, **kwargs: Any) -> None:
        """After a request was created in the scheduler: parse its guidance and set its namespace of the radix cache."""
        req.lenvm_images, req.lenvm_prefilled = None, 0
        settings = Settings.current() if self.guide is None else self.guide.settings
        try:
            req.lenvm_guidance = guidance_of(req, settings)
        except ValueError as error:  # not seen by check_request: the engine loads no plugins in further HTTP workers
            req.lenvm_guidance = req.input_embeds = None  # it keeps one token, and runs once to be answered
            req.set_finish_with_abort(str(error))  # status 400
        if settings.reads_tokens and req.lenvm_guidance is not None and req.lenvm_guidance.needs_step:
            req.extra_key = RADIX_NAMESPACE + (req.extra_key or "")

    def note_images(self, _: None, req: Req, *args: Any, **kwargs: Any) -> None:
        """After a request in the scheduler got its images, before a prefix is matched in the radix cache."""
        value_model = None if self.guide is None else self.guide.value_model
        if value_model is None or req.lenvm_guidance is None or not req.lenvm_guidance.needs_step:
            return
        try:
            req.lenvm_images = PromptImages(req, value_model)
        except ValueError as error:
            req.lenvm_guidance = None
            req.set_finish_with_abort(str(error))  # status 400
            return
        if req.lenvm_images.moved:
            req.extra_key = f"lenvm{req.lenvm_images.moved}|" + req.extra_key.removeprefix(RADIX_NAMESPACE)

    def load_value_model(self, _: None, runner: ModelRunner) -> None:
        """After the base model was loaded: check the engine's options, load the value model onto its device."""
        if runner.is_draft_worker:
            return
        missing = [target for target in HOOKS if target not in HookRegistry._patched]
        if missing:
            raise RuntimeError(f"LenVM does not fit this SGLang: it could not hook {', '.join(missing)}")
        signatures.check("sglang")
        options = resolved_view(runner.server_args)  # with the engine's defaults
        check_options(options, OPTIONS, "LENVM_VALUE_MODEL")
        if options.speculative_algorithm:
            check_options(options, DRAFT_OPTIONS, "speculative decoding")
        settings = Settings.current(options.tokenizer_path)
        if settings.reads_tokens:
            check_options(options, VALUE_MODEL_OPTIONS, "LENVM_VALUE_MODEL")
            check_pool(runner)
        settings.thoughts  # noqa: B018, loads the tokenizer before the first request
        device = torch.device(runner.device, runner.gpu_id) if runner.device == "cuda" else torch.device(runner.device)
        value_model = settings.load_value_model(runner.dtype, device)
        states = load_probe(settings, runner, options) if settings.has_probe else None
        self.guide = SGLangGuide(settings, value_model, device, drafts=drafts_a_step(options), states=states)
        if states is not None:
            logger.info("LenVM: probe %s in %s on %s", settings.value_model, states.probe.dtype, states.probe.device)
            return
        if value_model is None:
            logger.info("LenVM: no value model; targets are met by the end tokens alone")
            return
        if runner.model_config.is_multimodal:
            value_model.vision_tower  # noqa: B018, loaded before the engine's pool takes the memory
        sizes = value_model.config.vocab_size, runner.model_config.vocab_size
        check_vocabulary(settings.value_model, *sizes, options.tokenizer_path)
        logger.info("LenVM: value model %s in %s on %s", settings.value_model, value_model.dtype, device)

    def leave_room(
        self, original: Callable, configurator: Any, budget_bytes: int, *, cap_tokens: int | None = None
    ) -> Any:
        """Around the sizing of the engine's pool: reserve the memory of guidance."""
        guide = self.guide
        if guide is None or configurator.is_draft_worker:
            return original(configurator, budget_bytes, cap_tokens=cap_tokens)

        def sized(pool_bytes: int) -> tuple[Any, int]:
            """The pool for ``pool_bytes``, and the bytes that guidance takes in addition."""
            pool = original(configurator, pool_bytes, cap_tokens=cap_tokens)
            requests = configurator.resolve_max_num_reqs(pool.max_total_num_tokens)
            slots = pool.max_total_num_tokens + configurator.page_size
            return pool, guide.num_bytes(configurator.model_config, requests, slots)

        # The memory of guidance grows with the slots of the pool, so the largest pool that leaves room for it is found
        # by bisection.
        fits, too_large = 0, budget_bytes
        for _ in range(24):
            middle = (fits + too_large) // 2
            has_room = middle + sized(middle)[1] <= budget_bytes
            fits, too_large = (middle, too_large) if has_room else (fits, middle)
        remedies = (
            "raise mem_fraction_static, or lower max_running_requests, LENVM_MAX_CANDIDATES or LENVM_CHUNK_TOKENS"
        )
        if fits == 0:
            raise ValueError(
                f"LENVM_VALUE_MODEL leaves no memory for the engine's pool: {budget_bytes / 2**30:.2f} GiB are left "
                f"for it and the guided step; {remedies}"
            )
        pool, guidance_bytes = sized(fits)
        share, most = guidance_bytes / budget_bytes, guide.settings.memory_share
        if most is not None and share > most:
            raise ValueError(
                f"LENVM_MEMORY_SHARE is {most:g}, but the guided step takes {share:.3f} of the "
                f"{budget_bytes / 2**30:.2f} GiB beside the weights; {remedies}"
            )
        logger.info("LenVM: guidance takes %.2f GiB, %.1f %%", guidance_bytes / 2**30, 100 * share)
        return pool

    def take_slots(self, _: None, runner: ModelRunner, *args: Any, **kwargs: Any) -> None:
        """After the engine allocated its pools: create the guided step on them."""
        if self.guide is not None and not runner.is_draft_worker:
            self.guide.take_slots(runner)

    def admit_requests(
        self, batch: ForwardBatch, _: type, scheduled: ScheduleBatch, runner: ModelRunner, *args: Any, **kwargs: Any
    ) -> None:
        """After a batch was prepared for a model: admit its requests."""
        batch.lenvm_reqs, batch.lenvm_decoding, batch.lenvm_images = [], [], []
        if self.guide is None or not self.guide.has_slots or runner.is_draft_worker:
            return
        batch.lenvm_reqs = [req for req in scheduled.reqs if req.lenvm_guidance is not None]
        if batch.forward_mode.is_extend_without_speculative():
            running = {id(req) for req in scheduled.decoding_reqs or ()}  # in a mixed batch
            batch.lenvm_decoding = [id(req) in running for req in scheduled.reqs]
            batch.lenvm_images = [req.lenvm_images for req in scheduled.reqs]
            self.guide.admit(batch, [req for req in scheduled.reqs if id(req) not in running])

    def checkpoint(self, original: Callable, tree: BasePrefixCache, req: Req, *, up_to: int, **kwargs: Any) -> None:
        """Around the insertion of a request's first tokens into the radix cache: insert only tokens that the value
        model has computed, so that its cache covers every guided prefix."""
        if self.guide is not None and self.guide.has_slots:
            up_to = self.guide.computed_len(req, up_to)
        original(tree, req, up_to=up_to, **kwargs)

    def hide_inner_states(self, original: Callable, processor: LogitsProcessor, *args: Any, **kwargs: Any) -> Any:
        """Around the computation of logits from the base model's states: hide inner states from the processor."""
        states = self._states_of(processor)
        if states is None or not states.has_inner:
            return original(processor, *args, **kwargs)
        return states.hide_inner(original, processor, *args, **kwargs)

    def keep_states(self, original: Callable, processor: LogitsProcessor, *args: Any, **kwargs: Any) -> tuple:
        """Around the selection of the states that logits are computed from: keep those that the probe reads."""
        states = self._states_of(processor)
        if states is None:
            return original(processor, *args, **kwargs)
        return states.prune(original, processor, *args, **kwargs)

    def _states_of(self, processor: LogitsProcessor) -> SampledStates | None:
        """The states that a probe reads; None without a probe, and for the processor of a draft model."""
        states = None if self.guide is None else self.guide.states
        return states if states is not None and states.are_of(processor) else None

    def extend_prompts(self, _: Any, runner: ModelRunner, batch: ForwardBatch, *args: Any, **kwargs: Any) -> None:
        """After the base model's forward: compute prompts with the value model."""
        guide = self._guide_of(batch)
        if guide is not None and batch.forward_mode.is_extend_without_speculative():
            guide.extend(batch)
            guide.discard_read_done(runner)

    def sample(self, original: Callable, runner: ModelRunner, logits_output: Any, batch: ForwardBatch) -> torch.Tensor:
        """Around the sampling of a batch's tokens."""
        guide = self._guide_of(batch)
        if guide is None:
            return original(runner, logits_output, batch)
        with guide.sampling(batch):
            tokens = original(runner, logits_output, batch)
            report = guide.report(logits_output.next_token_logits, batch.sampling_info, tokens)
            guide.note_drawn(batch, tokens)
        guide.discard_read_done(runner)
        logits_output.auxiliary_device_output = append_auxiliary_output(logits_output.auxiliary_device_output, report)
        return tokens

    def sample_delayed(
        self, original: Callable, scheduler: Scheduler, result: Any, batch: ScheduleBatch | None
    ) -> None:
        """Around the sampling of a batch that had to wait for the results of the previous one, e.g. for a grammar.

        The engine applied its barrier against overwriting the slot table before that, so it is applied again.
        """
        is_delayed = result is not None and result.delay_sample_func is not None
        reads_slots = is_delayed and batch is not None and any(req.lenvm_guidance is not None for req in batch.reqs)
        original(scheduler, result, batch)
        if reads_slots:
            scheduler._apply_war_barrier()

    def change_logits(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """After the engine's own logit processors: apply token temperatures and spans."""
        if self.guide is not None:
            self.guide.change_logits(logits)

    def sample_from_probs(
        self, original: Callable, sampler: Any, probs: torch.Tensor, info: SamplingBatchInfo, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, Any]:
        """Around the draw itself: guided requests get a token of their candidates, all others the engine's draw."""
        tokens = None if self.guide is None else self.guide.draw_all(probs, info)
        if tokens is not None:
            return tokens, None
        tokens, capture = original(sampler, probs, info, *args, **kwargs)
        return tokens if self.guide is None else self.guide.draw(probs, info, tokens), capture

    def verify_drafts(
        self,
        original: Callable,
        verify_input: EagleVerifyInput,
        batch: ScheduleBatch,
        logits_output: LogitsProcessorOutput,
        grammar_mask: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Around the verification of a batch's drafts: draw tokens at the nodes of guided requests first."""
        arguments = verify_input, batch, logits_output, grammar_mask, *args
        is_idle = batch.forward_mode.is_idle()
        batch.lenvm_reqs = [] if is_idle else [req for req in batch.reqs if req.lenvm_guidance is not None]
        guide = self._guide_of(batch)
        if guide is None:
            return original(*arguments, **kwargs)
        guide.discard_read_done(guide.runner)
        return guide.verify(original, *arguments, **kwargs)

    def _guide_of(self, batch: ForwardBatch | ScheduleBatch) -> SGLangGuide | None:
        """The guidance of a batch; None if no request of the batch is guided."""
        # Batches that the engine makes for the capture of graphs have no requests.
        return self.guide if getattr(batch, "lenvm_reqs", None) else None


_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_PROCESSOR = "sglang.srt.layers.logits_processor.LogitsProcessor"
_SAMPLER = "sglang.srt.layers.sampler.Sampler"
_CACHE = "sglang.srt.mem_cache"
# The kind of each hook, and its method of SGLangPlugin.
HOOKS = {
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object": ("AFTER", "check_request"),
    "sglang.srt.managers.tokenizer_manager.TokenizerManager.update_request_meta_info": ("AROUND", "add_meta_info"),
    "sglang.srt.managers.schedule_batch.Req.__init__": ("AFTER", "note_guidance"),
    "sglang.srt.managers.schedule_batch.Req.extend_image_inputs": ("AFTER", "note_images"),
    f"{_RUNNER}.load_model": ("AFTER", "load_value_model"),
    f"{_CACHE}.kv_cache_configurator.KVCacheConfigurator.config_from_budget": ("AROUND", "leave_room"),
    f"{_RUNNER}.alloc_memory_pool": ("AFTER", "take_slots"),
    "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new": ("AFTER", "admit_requests"),
    f"{_CACHE}.radix_cache.RadixCache.checkpoint": ("AROUND", "checkpoint"),
    f"{_CACHE}.unified_radix_cache.UnifiedRadixCache.checkpoint": ("AROUND", "checkpoint"),
    f"{_PROCESSOR}.forward": ("AROUND", "hide_inner_states"),
    f"{_PROCESSOR}._get_pruned_states": ("AROUND", "keep_states"),
    f"{_RUNNER}.forward": ("AFTER", "extend_prompts"),
    f"{_RUNNER}.sample": ("AROUND", "sample"),
    "sglang.srt.managers.scheduler.Scheduler.launch_batch_sample_if_needed": ("AROUND", "sample_delayed"),
    f"{_SAMPLER}._preprocess_logits": ("AFTER", "change_logits"),
    f"{_SAMPLER}._sample_from_probs": ("AROUND", "sample_from_probs"),
    "sglang.srt.speculative.eagle_utils.eagle_sample": ("AROUND", "verify_drafts"),
}


def plugin() -> None:
    """The entry point, called in each process of the engine: register the hooks unless the plugin is off.

    The engine only logs exceptions of a plugin: invalid settings end its start later, when the model is loaded.
    """
    if not Settings.is_off():
        hooks = SGLangPlugin()
        for target, (kind, method) in HOOKS.items():
            HookRegistry.register(target, getattr(hooks, method), HookType[kind])
