"""Guidance by a value model in SGLang. Imported only with a value model.

Its keys and values are stored in the engine's slots, so chunked prefill, retraction and aborts need no extra handling.
Guided requests use a separate namespace of the radix cache, so they never reuse prefixes that the value model has not
computed.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.managers import mm_schedule

from lenvm_kernels.engines.settings import MAX_DELTA, Settings
from lenvm_kernels.engines.sglang.guide import EngineOptions, Hooks, SGLangGuide, check_options, needs_step
from lenvm_kernels.engines.sglang.images import PromptImages, image_tokens
from lenvm_kernels.engines.tensors import to_device
from lenvm_kernels.values import KVCache

if TYPE_CHECKING:
    from sglang.srt.distributed.parallel_state import GroupCoordinator
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

_FOREIGN_KEYS = "the value model has no keys and values of prompts computed elsewhere"
_OTHER_SLOTS = "the value model uses the slots of the engine's pool"
VALUE_MODEL_OPTIONS: EngineOptions = {
    "pp_size": ((1,), "not implemented"),
    "disaggregation_mode": (("null",), "the value model reads the tokens of prompts"),
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
RADIX_NAMESPACE = "lenvm|"
# Maximum number of pending tokens per request after a step, excluding drafts.
MAX_WAITING = MAX_DELTA - 1
_CACHE = "sglang.srt.mem_cache"


class ValueModelGuide(SGLangGuide):
    """The guidance of a scheduler process with a value model.

    Raises ValueError if an option or the base model cannot be combined with it.
    """

    def __init__(
        self, settings: Settings, device: torch.device, drafts: int, runner: ModelRunner, options: Any
    ) -> None:
        check_options(options, VALUE_MODEL_OPTIONS, "a value model")
        check_pool(runner)
        base = runner.dtype, device, runner.model_config.vocab_size, options.tokenizer_path
        self.value_model = value_model = settings.load_value_model(*base)
        super().__init__(settings, device, drafts, value_model)
        if runner.model_config.is_multimodal:
            value_model.vision_tower  # noqa: B018, must be loaded before the engine's pool takes the memory

    @property
    def hooks(self) -> Hooks:
        return super().hooks | {
            "sglang.srt.managers.schedule_batch.Req.extend_image_inputs": ("AFTER", self.note_images),
            f"{_CACHE}.kv_cache_configurator.KVCacheConfigurator.config_from_budget": ("AROUND", self.leave_room),
            f"{_CACHE}.radix_cache.RadixCache.checkpoint": ("AROUND", self.checkpoint),
            f"{_CACHE}.unified_radix_cache.UnifiedRadixCache.checkpoint": ("AROUND", self.checkpoint),
            "sglang.srt.model_executor.model_runner.ModelRunner.forward": ("AFTER", self.extend_prompts),
            "sglang.srt.managers.scheduler.Scheduler.launch_batch_sample_if_needed": ("AROUND", self.sample_delayed),
        }

    # --- memory ---

    def cache_bytes(self, slots: int) -> int:
        return KVCache.num_bytes(self.value_model, slots)

    def leave_room(
        self, original: Callable, configurator: Any, budget_bytes: int, *, cap_tokens: int | None = None
    ) -> Any:
        """Around the sizing of the engine's pool: reserve the memory of guidance."""
        if configurator.is_draft_worker or hasattr(self, "step"):  # memory is already divided
            return original(configurator, budget_bytes, cap_tokens=cap_tokens)

        def sized(part: int) -> tuple[Any, int]:
            """The pool for a part of the budget, in 1/4096, and the additional bytes for guidance."""
            pool = original(configurator, budget_bytes * part // 4096, cap_tokens=cap_tokens)
            requests = configurator.resolve_max_num_reqs(pool.max_total_num_tokens)
            slots = pool.max_total_num_tokens + configurator.page_size
            return pool, self.num_bytes(configurator.model_config, requests, slots)

        def is_too_large(part: int) -> bool:
            return budget_bytes * part // 4096 + sized(part)[1] > budget_bytes

        # Guidance takes more memory for a larger pool, so search for the largest pool that leaves room for it.
        part = bisect_left(range(1, 4096), True, key=is_too_large)
        fix = "raise mem_fraction_static, or lower max_running_requests, LENVM_MAX_CANDIDATES or LENVM_CHUNK_TOKENS"
        if part == 0:
            raise ValueError(
                f"LENVM_VALUE_MODEL leaves no memory for the engine's pool: the pool and the guided step have "
                f"{budget_bytes / 2**30:.2f} GiB together; {fix}"
            )
        pool, guidance_bytes = sized(part)
        share, most = guidance_bytes / budget_bytes, self.settings.memory_share
        if most is not None and share > most:
            raise ValueError(
                f"LENVM_MEMORY_SHARE is {most:g}, but the guided step takes {share:.3f} of the "
                f"{budget_bytes / 2**30:.2f} GiB left by the weights; {fix}"
            )
        logger.info("LenVM: guidance takes %.2f GiB, %.1f %%", guidance_bytes / 2**30, 100 * share)
        return pool

    def discard_read_done(self) -> None:
        """Make the scheduler also wait for the value model before it overwrites the slot table.

        The engine's event marks the base model's last read of the table, which is before the value model's reads.
        Without an event, the scheduler waits for all work on its forward stream.
        """
        self.runner.shared_read_done_event = None

    def sample_delayed(
        self, original: Callable, scheduler: Scheduler, result: Any, batch: ScheduleBatch | None
    ) -> None:
        """Around sampling that waited for the results of the previous batch, e.g. for a grammar.

        The engine's barrier against overwriting the slot table came before sampling, so it is applied again.
        """
        is_delayed = result is not None and result.delay_sample_func is not None
        reads_slots = is_delayed and batch is not None and any(req.lenvm_guidance is not None for req in batch.reqs)
        original(scheduler, result, batch)
        if reads_slots:
            scheduler._apply_war_barrier()

    # --- prompts ---

    def note_request(self, req: Req) -> None:
        """Set the radix cache namespace of a guided request."""
        req.lenvm_images, req.lenvm_prefilled = None, 0
        if req.lenvm_guidance is not None and req.lenvm_guidance.needs_step:
            req.extra_key = RADIX_NAMESPACE + (req.extra_key or "")

    def note_images(self, _: None, req: Req, *args: Any, **kwargs: Any) -> None:
        """After a scheduled request gets its images, before its prefix is matched in the radix cache."""
        if req.lenvm_guidance is None or not req.lenvm_guidance.needs_step:
            return
        try:
            req.lenvm_images = PromptImages(req, self.value_model)
        except ValueError as error:
            req.lenvm_guidance = None
            req.set_finish_with_abort(str(error))  # status 400
            return
        if req.lenvm_images.moved:
            req.extra_key = f"lenvm{req.lenvm_images.moved}|" + req.extra_key.removeprefix(RADIX_NAMESPACE)

    def admit(self, batch: ForwardBatch, reqs: list[Req], *, is_prefill: bool) -> None:
        super().admit(batch, reqs, is_prefill=is_prefill)
        if is_prefill:
            for req in reqs:
                req.lenvm_prefilled = req.extend_end

    def _admit(self, req: Req, table_row: int) -> None:
        """Also embed images. The engine copies their pixels to the host after the base model's forward."""
        super()._admit(req, table_row)
        if req.lenvm_images is not None:
            with self.stopwatch.running():
                if mm_schedule.host_offload_event is not None:  # copied earlier if the request was retracted
                    mm_schedule.host_offload_event.synchronize()
                req.lenvm_images.embed(req.prefix_len, self.value_model)

    def extend_prompts(self, _: Any, runner: ModelRunner, batch: ForwardBatch, *args: Any, **kwargs: Any) -> None:
        """After the base model's forward: compute prompts with the value model."""
        # Batches for graph capture have no requests.
        if getattr(batch, "lenvm_reqs", None) and batch.forward_mode.is_extend_without_speculative():
            if needs_step(batch):
                self.extend(batch)
            self.discard_read_done()

    def extend(self, batch: ForwardBatch) -> None:
        """Pass the tokens of a prefill batch, or of a chunk, to the value model.

        All tokens of a chunk are passed, because the engine may draw a token after it or not. In a mixed batch, tokens
        of decoding requests are passed to the step instead.
        """
        with self.failing_softly(batch), self.stopwatch.running():
            lens = batch.extend_seq_lens.int()
            images = [req.lenvm_images for req in batch.lenvm_all]  # a padded batch has more lengths
            parts = list(zip(images, batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu, strict=False))
            if any(batch.lenvm_decoding):
                lens = lens.masked_fill(to_device(torch.tensor(batch.lenvm_decoding), self.device), 0)
            self.step.extend(
                batch.input_ids,
                batch.req_pool_indices,
                batch.extend_start_loc.int(),
                lens,
                # The history of decoding requests must not change.
                batch.extend_prefix_lens.int().masked_fill(lens == 0, 0),
                begins=[0, *accumulate(batch.extend_seq_lens_cpu[: len(batch.lenvm_decoding) - 1])],
                images=image_tokens(parts, len(batch.input_ids), self.value_model),
            )
            for x, prefix_len, count in parts:
                if x is not None and prefix_len + count >= x.length:
                    x.embeds = None
        if self.ranks is not None:
            self._agree_on_prompts(batch, self.ranks)

    def _agree_on_prompts(self, batch: ForwardBatch, ranks: GroupCoordinator) -> None:
        """End the guidance of a prefill batch on all ranks if it has failed on any rank.

        The engine may insert a chunk into its radix cache before the host has read any token. So the hosts exchange
        flags, as they exchange requests, without a host-device sync.
        """
        flag = torch.tensor([batch.lenvm_failed], dtype=torch.uint8, device="cpu")
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, ranks.cpu_group)
        if flag:
            if not batch.lenvm_failed:
                self.count_failure()
            self.lose(batch.lenvm_reqs)
            batch.lenvm_reqs = []

    # --- the radix cache ---

    def checkpoint(self, original: Callable, tree: BasePrefixCache, req: Req, *, up_to: int, **kwargs: Any) -> None:
        """Around the insertion of tokens into the radix cache: insert only tokens computed by the value model."""
        original(tree, req, up_to=self.computed_len(req, up_to), **kwargs)

    def computed_len(self, req: Req, length: int) -> int:
        """Lower bound of the number of tokens, at most ``length``, that the value model has computed of a request.

        The prefix from the radix cache and the tokens of the last prefill are computed, and later tokens up to the end
        of the span (all, if another span may begin) except for the most recent tokens, which may be pending.
        """
        params = req.lenvm_guidance
        if params is None or not params.needs_step:
            return length  # not in the guided requests' namespace
        read, waiting = len(req.origin_input_ids) + len(req.output_ids), MAX_WAITING + self.drafts
        if not params.start_token_ids and params.answer is None:  # starts would need a search of the prompt
            end = params.span_state(req.origin_input_ids, req.output_ids).end
            read = read if end is None else end - 1
        return min(length, max(req.lenvm_prefilled, req.kv.cache_protected_len, min(length, read) - waiting))


def check_pool(runner: ModelRunner) -> None:
    """Raise ValueError unless all layers of the base model store all keys and values in slots of one pool."""
    windows, states = runner.is_hybrid_swa, mambaish_config(runner.model_config) is not None
    if windows or states:
        kind = "sliding windows" if windows else "recurrent layers"
        raise ValueError(
            f"LENVM_VALUE_MODEL must be a probe or none with this base model, which has {kind}: {_OTHER_SLOTS}"
        )
