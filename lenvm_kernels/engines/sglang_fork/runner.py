"""The value model of the LenVM fork of SGLang in the engine's process, as a guided step. Importable without the fork.

It rewrites the probabilities of a batch with one forward of the value model per step, on separate slots. It makes no
host-device sync, except in the vision tower for new images, a module of ``transformers``.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from lenvm_kernels.engines.own_slots import MAX_DELTA, OwnSlots, PromptPart, log_memory, pages_for
from lenvm_kernels.engines.settings import MAX_END_TOKENS, Settings
from lenvm_kernels.engines.sglang.batch import last_tokens
from lenvm_kernels.engines.sglang.images import PromptImages, image_tokens
from lenvm_kernels.engines.tokenizers import check_vocabulary
from lenvm_kernels.guidance import GuidanceParams
from lenvm_kernels.step import GuidedStep, ModelValues, Sampling
from lenvm_kernels.types import Mode, Status

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)


@functools.cache
def warn_once(message: str) -> None:
    """Log a warning, each message once per process."""
    logger.warning(message)


class ForkFilters(NamedTuple):
    """Filters of a batch's requests, ``[B]``."""

    top_k: torch.Tensor  # int32
    top_p: torch.Tensor  # fp32
    min_p: torch.Tensor  # fp32


class InprocRunner:
    """Guides the batches of one model runner.

    Requests are identified by their row of the engine's request pool. Their slots are freed when they have ended, or
    when they are in no batch and the room is needed. A request that returns without slots, or with other tokens than
    the step has, is computed again.

    Args:
        settings: the value model and its steps.
        runner: runner of the base model, with its pools. Its options state the share of the free memory for the value
            model's weights, cache and steps.

    Attributes:
        gamma: default of requests; None if the value model's directory states none.
        step: the guided step.
        own: slots of the value model.

    Raises:
        ValueError: the value model has another vocabulary, or does not fit; the message names the option.
    """

    def __init__(self, settings: Settings, runner: ModelRunner) -> None:
        options, engine, requests = runner.server_args, runner.model_config, runner.max_running_requests
        free = free_bytes(runner)
        device = torch.device(runner.device, runner.gpu_id) if runner.device == "cuda" else runner.device
        value_model = settings.load_value_model(runner.dtype, device)
        assert value_model is not None  # the fork's option names one
        check_vocabulary(settings.value_model, value_model.config.vocab_size, engine.vocab_size, options.tokenizer_path)
        if engine.is_multimodal:
            value_model.vision_tower  # noqa: B018, loaded before the rest of the memory is divided
        share = options.lvm_guided_inproc_mem_fraction_static or options.mem_fraction_static
        room = int(share * free - (free - free_bytes(runner)))
        rows, max_len = runner.req_to_token_pool.req_to_token.shape
        working = settings.working_bytes(
            value_model, requests=requests, max_len=max_len, vocab_size=engine.vocab_size, max_delta=MAX_DELTA
        )
        pages = pages_for(value_model, requests, max_len, room - working)
        if pages < 1:
            raise ValueError(
                f"--lvm-guided-inproc-mem-fraction-static leaves {room / 2**30:.2f} GiB beside the value model's "
                f"weights, and its steps take {working / 2**30:.2f} GiB: raise it, or lower --max-running-requests, "
                "LENVM_MAX_CANDIDATES or LENVM_CHUNK_TOKENS"
            )
        log_memory(logger, settings.value_model, value_model, pages, working)
        self.gamma = settings.gamma
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
        self, batch: ForwardBatch, reqs: Sequence[Req], probs: torch.Tensor, filters: ForkFilters
    ) -> torch.Tensor | None:
        """Guide the next tokens of a batch.

        Args:
            batch: the forward of the batch.
            reqs: its requests in row order; ``lenvm_guidance`` of each holds its parameters, ``lenvm_end_tokens`` its
                end-of-sequence tokens.
            probs: fp32, bf16 or fp16 ``[B, V]``; rewritten in place.
            filters: filters of the requests.

        Returns:
            ``probs``, with the filters of every row applied; None if no request is guided and ``probs`` is unchanged.
        """
        lengths, prompts = {}, []  # lengths of the guided requests by table row, and parts of prompts to compute
        for req, length in zip(reqs, batch.seq_lens_cpu.tolist(), strict=False):  # a padded batch has more lengths
            row = req.req_pool_idx
            # After a retraction the engine may drop a token; a request also changes its row after a chunk.
            if row not in self._guided or self._guided[row] is not req or length != req.lenvm_length + 1:
                if not self._is_due(req, length):
                    self._end(row)
                    continue
                prompts.append(self._admit(req, length))
            lengths[row] = req.lenvm_length = length
        for row in self._guided.keys() - lengths.keys():
            if self._guided[row].finished() or self._guided[row].req_pool_idx != row:
                self._end(row)
        self._make_room(lengths)
        if not lengths:
            return None
        self._extend([part for part in prompts if part.table_row in lengths])

        prepared = self.step.prepare(None, last_tokens(batch, len(reqs)))
        output = self.step.step(prepared, Sampling(*filters), scores=probs, probs=probs)
        rows = [i for i, req in enumerate(reqs) if self._has_filters(req) and self._may_skip(req)]
        if rows:
            at = self.own.to_device(np.array(rows))
            keep_filters(probs, at, filters, where=output.candidates.status[at] != Status.GUIDE)
        return probs

    def _is_due(self, req: Req, length: int) -> bool:
        """Whether to guide a new request from this step on."""
        if req.lenvm_guidance.mode == Mode.UNGUIDED or req.sampling_params.top_k == 1:  # one candidate
            return False
        if length < len(req.origin_input_ids) + len(req.output_ids):
            return False  # a chunk of the prompt: the token drawn after it is dropped
        try:
            if req.input_embeds is not None:
                raise ValueError("input_embeds cannot be combined with guidance in custom_params")
            # The engine keeps the placeholders of earlier turns' images, beyond the vocabulary, but not their pixels.
            if req.session_id is not None and max(req.origin_input_ids) >= self.step.config.vocab_size:
                raise ValueError("images in a session cannot be combined with guidance in custom_params")
            has_images = req.multimodal_inputs is not None
            req.lenvm_images = PromptImages(req, self._value_model) if has_images else None
        except ValueError as error:
            logger.warning("LenVM: request %s is not guided: %s", req.rid, error)
            req.lenvm_guidance = GuidanceParams()
            return False
        return True

    def _admit(self, req: Req, length: int) -> PromptPart:
        """Give a request its row; returns the part of its sequence to compute before the step."""
        row, images, tokens = req.req_pool_idx, req.lenvm_images, _tokens(req, length - 1)
        if req.sampling_params.top_k > (most := self.step.config.max_candidates):
            warn_once(
                f"LenVM: requests with a top_k above {most}, or none, are drawn from their {most} most probable tokens "
                "at most: lower top_k, or raise LENVM_MAX_CANDIDATES up to 64"
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
        return PromptPart(row, computed, length - 1)

    def _end(self, row: int) -> None:
        """End the guidance of the request in a row, if there is one, and free its slots."""
        if self._guided.pop(row, None) is not None:
            self.step.remove_request(row)
            self.own.release(row)

    def _make_room(self, lengths: dict[int, int]) -> None:
        """Reserve slots for the requests of a step; requests without room lose their guidance and leave ``lengths``."""
        room = self.own.reserve(lengths)
        for row in room.refused:
            warn_once(
                "LenVM: the value model's cache is full; requests go on without guidance. Raise "
                "--lvm-guided-inproc-mem-fraction-static."
            )
            self._guided[row].lenvm_guidance = GuidanceParams()
            del lengths[row]
        for row in (*room.reclaimed, *room.refused):
            self._end(row)

    def _extend(self, parts: Sequence[PromptPart]) -> None:
        """Compute prompts up to their last token."""
        if not parts:
            return
        reqs = [self._guided[part.table_row] for part in parts]
        token_ids = [token for r, part in zip(reqs, parts, strict=True) for token in _tokens(r, part.end)[part.start :]]
        located = [(r.lenvm_images, part.start, part.end - part.start) for r, part in zip(reqs, parts, strict=True)]
        with_images = [(images, start) for images, start, _ in located if images is not None]
        for images, start in with_images:
            images.embed(start, self._value_model)
        on_device = self.own.to_device(np.array(token_ids, dtype=np.int64))
        embedded = image_tokens(located, len(token_ids), self._value_model)
        self.own.extend(self.step, parts, lambda *_: on_device, images=embedded)
        for images, _ in with_images:
            images.embeds = None

    def _has_filters(self, req: Req) -> bool:
        sampling = req.sampling_params
        return sampling.top_k < self.step.config.vocab_size or sampling.top_p < 1 or sampling.min_p > 0

    def _may_skip(self, req: Req) -> bool:
        """Whether the row of a request may not be guided in this step; the device decides."""
        params = req.lenvm_guidance
        stride = params.value_stride or self.step.config.value_stride
        return self._guided.get(req.req_pool_idx) is not req or params.entropy_threshold is not None or stride > 1


def free_bytes(runner: ModelRunner) -> float:
    """The free memory of a runner's device, the minimum of all ranks that draw the same tokens."""
    from sglang.srt.utils.common import get_available_gpu_memory

    group = runner.tp_group
    ranks = dict(distributed=group.world_size > 1, cpu_group=group.cpu_group)
    return 2**30 * get_available_gpu_memory(runner.device, runner.gpu_id, **ranks)


def _tokens(req: Req, length: int) -> list[int]:
    """The first ``length`` tokens of a sequence; the last token may be on the device only."""
    return [*req.origin_input_ids, *req.output_ids][:length]


def keep_filters(
    probs: torch.Tensor, rows: torch.Tensor, filters: ForkFilters, where: torch.Tensor | None = None
) -> None:
    """Set tokens of ``probs [B, V]`` to 0 that the filters of their row drop, in ``rows``, int64 ``[R]``.

    ``where``, bool ``[R]``, limits the rows that change.
    """
    top_k, top_p, min_p = (x[rows, None] for x in filters)
    before = probs[rows]
    p, order = before.float().sort(dim=1, descending=True)
    drop = torch.arange(p.shape[1], device=p.device) >= top_k
    drop |= p.cumsum(dim=1) - p > top_p.masked_fill(top_p >= 1, torch.inf)  # sums may round above 1
    drop |= p < min_p * p[:, :1]
    after = torch.zeros_like(p).scatter_(1, order, p.masked_fill(drop, 0.0)).to(probs.dtype)
    probs[rows] = after if where is None else torch.where(where[:, None], after, before)
