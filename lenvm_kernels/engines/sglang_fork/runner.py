"""The value model of the LenVM fork of SGLang in the engine's process, as a guided step. Importable without the fork.

It rewrites the probabilities of a batch with one forward of the value model per step, on separate slots. It makes no
host-device sync, except in the vision tower for new images, a module of ``transformers``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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


class Filters(NamedTuple):
    """Filters of a batch's requests, ``[B]``."""

    top_k: torch.Tensor  # int32
    top_p: torch.Tensor  # fp32
    min_p: torch.Tensor  # fp32


@dataclass
class _Request:
    """A guided request in a row: the engine's object, and the length of its sequence at its last step."""

    req: Req
    length: int


class InprocRunner:
    """Guides the batches of one model runner.

    Requests are identified by their row of the engine's request pool. Their slots are freed when they have ended, or
    when they are in no batch and the room is needed. A request that returns without slots, or with other tokens than
    the step has, is computed again.

    Args:
        settings: the value model and its steps.
        runner: runner of the base model, with its pools.
        mem_fraction: share of the free memory for the value model's weights, cache and steps.
        free_bytes: returns the free memory, the same number on all ranks that draw the same tokens.

    Attributes:
        step: the guided step.
        own: slots of the value model.

    Raises:
        ValueError: the value model has another vocabulary, or does not fit; the message names the option.
    """

    def __init__(
        self, settings: Settings, runner: ModelRunner, *, mem_fraction: float, free_bytes: Callable[[], float]
    ) -> None:
        free, engine, requests = free_bytes(), runner.model_config, runner.max_running_requests
        device = torch.device(runner.device, runner.gpu_id) if runner.device == "cuda" else runner.device
        value_model = settings.load_value_model(runner.dtype, device)
        assert value_model is not None  # the fork's option names one
        check_vocabulary(
            settings.value_model, value_model.config.vocab_size, engine.vocab_size, runner.server_args.tokenizer_path
        )
        if engine.is_multimodal:
            value_model.vision_tower  # noqa: B018, loaded before the rest of the memory is divided
        room = int(mem_fraction * free - (free - free_bytes()))
        rows, max_len = runner.req_to_token_pool.req_to_token.shape
        sizes = dict(requests=requests, max_len=max_len, vocab_size=engine.vocab_size, max_delta=MAX_DELTA)
        working = settings.working_bytes(value_model, **sizes)
        pages = pages_for(value_model, requests, max_len, room - working)
        if pages < 1:
            raise ValueError(
                f"--lvm-guided-inproc-mem-fraction-static leaves {room / 2**30:.2f} GiB beside the value model's "
                f"weights, and its steps take {working / 2**30:.2f} GiB: raise it, or lower --max-running-requests, "
                "LENVM_MAX_CANDIDATES or LENVM_CHUNK_TOKENS"
            )
        log_memory(logger, settings.value_model, value_model, pages, working)
        self.own = OwnSlots(rows, max_len, num_pages=pages, device=value_model.device)
        self.step = GuidedStep(
            ModelValues(value_model),
            self.own.slots,
            settings.step_config(
                has_graphs=not runner.server_args.disable_cuda_graph,
                vocab_size=engine.vocab_size,
                max_requests=requests,
                max_scaled_tokens=1,  # the engine applies token temperatures to the logits
                max_delta=MAX_DELTA,
            ),
        )
        self._value_model, self._stride = value_model, settings.value_stride
        self._requests: dict[int, _Request] = {}  # by table row
        self._warned: set[str] = set()
        if value_model.device.type == "cuda":
            self.step.warm_up(is_logits=False)

    def guide(
        self, batch: ForwardBatch, reqs: Sequence[Req], probs: torch.Tensor, filters: Filters
    ) -> torch.Tensor | None:
        """Guide the next tokens of a batch.

        Args:
            batch: the forward of the batch.
            reqs: its requests, in the order of the rows; ``lenvm_guidance`` of each holds its parameters and its
                end-of-sequence tokens.
            probs: fp32, bf16 or fp16 ``[B, V]``; rewritten in place.
            filters: filters of the requests.

        Returns:
            ``probs``, with the filters of every row applied; None if no request is guided and ``probs`` is unchanged.
        """
        lengths = batch.seq_lens_cpu.tolist()[: len(reqs)]  # on the host
        guided, prompts = self._admit(reqs, lengths)
        for row in self._requests.keys() - guided.keys():
            req = self._requests[row].req
            if req.finished() or req.req_pool_idx != row:
                self._end(row)
        self._make_room(guided)
        if not guided:
            return None
        self._extend([part for part in prompts if part.table_row in guided])

        prepared = self.step.prepare(None, last_tokens(batch, len(reqs)))
        output = self.step.step(prepared, Sampling(*filters), scores=probs, probs=probs)
        rows = [i for i, req in enumerate(reqs) if self._may_keep_filters(req, guided)]
        if rows:
            at = self.own.to_device(np.array(rows))
            keep_filters(probs, at, filters, where=output.candidates.status[at] != Status.GUIDE)
        return probs

    def _admit(self, reqs: Sequence[Req], lengths: Sequence[int]) -> tuple[dict[int, int], list[PromptPart]]:
        """Lengths of the guided requests by table row, and the parts of prompts to compute.

        The previous requests of these rows have ended.
        """
        guided, prompts = {}, []
        for req, length in zip(reqs, lengths, strict=True):
            row = req.req_pool_idx
            known = self._requests.get(row)
            # After a retraction the engine may drop a token; a request also changes its row after a chunk.
            if known is not None and known.req is req and length == known.length + 1:
                known.length = length
            elif self._is_due(req, length):
                prompts.append(self._add(req, row, length))
            else:
                if known is not None:
                    self._end(row)
                continue
            guided[row] = length
        return guided, prompts

    def _is_due(self, req: Req, length: int) -> bool:
        """Whether to guide a new request from this step on."""
        params, eos = req.lenvm_guidance
        if params.mode == Mode.UNGUIDED or req.sampling_params.top_k == 1:  # guidance does not change one candidate
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
            req.lenvm_guidance = GuidanceParams(), eos
            return False
        return True

    def _add(self, req: Req, row: int, length: int) -> PromptPart:
        (params, eos), images, tokens = req.lenvm_guidance, req.lenvm_images, _tokens(req, length - 1)
        if req.sampling_params.top_k > (most := self.step.config.max_candidates):
            self._warn_once(
                f"LenVM: requests with a top_k above {most}, or none, are drawn from their {most} most probable tokens "
                "at most: lower top_k, or raise LENVM_MAX_CANDIDATES up to 64"
            )
        prefix = (tokens, 0) if images is None else (images.identities(tokens), images.moved)
        computed = self.own.admit(row, *prefix)
        self.step.add_request(
            row,
            replace(params, token_temperature_scale={}, return_values=False),
            set(sorted(eos)[:MAX_END_TOKENS]),
            prompt_len=len(req.origin_input_ids),
        )
        self._requests[row] = _Request(req, length)
        return PromptPart(row, computed, length - 1)

    def _end(self, row: int) -> None:
        """End the guidance of the request in a row and free its slots."""
        del self._requests[row]
        self.step.remove_request(row)
        self.own.release(row)

    def _make_room(self, guided: dict[int, int]) -> None:
        """Reserve slots for the requests of a step; requests without room lose their guidance and leave ``guided``."""
        room = self.own.reserve(guided)
        for row in room.refused:
            self._warn_once(
                "LenVM: the value model's cache is full; requests go on without guidance. Raise "
                "--lvm-guided-inproc-mem-fraction-static."
            )
            req = self._requests[row].req
            req.lenvm_guidance = GuidanceParams(), req.lenvm_guidance[1]
            del guided[row]
        for row in (*room.reclaimed, *room.refused):
            self._end(row)

    def _extend(self, parts: Sequence[PromptPart]) -> None:
        """Compute prompts up to their last token."""
        if not parts:
            return
        reqs = [self._requests[part.table_row].req for part in parts]
        token_ids, located = [], []
        for req, part in zip(reqs, parts, strict=True):
            token_ids += _tokens(req, part.end)[part.start :]
            located.append((req.lenvm_images, part.start, part.end - part.start))
        for images, start, _ in located:
            if images is not None:
                images.embed(start, self._value_model)
        images = image_tokens(located, len(token_ids), self._value_model)
        if images is not None:
            positions, rows = self.own.to_device(images.positions), self.own.to_device(images.rows)
            images = images._replace(positions=positions, rows=rows)
        on_device = self.own.to_device(np.array(token_ids, dtype=np.int64))
        self.own.extend(self.step, parts, lambda *_: on_device, images=images)
        for req in reqs:
            if req.lenvm_images is not None:
                req.lenvm_images.embeds = None

    def _may_keep_filters(self, req: Req, guided: Mapping[int, int]) -> bool:
        """Whether the row of a request may be drawn by the request's own filters; the device decides."""
        sampling = req.sampling_params
        if sampling.top_k >= self.step.config.vocab_size and sampling.top_p >= 1 and sampling.min_p <= 0:
            return False  # no filters
        params = req.lenvm_guidance[0]
        may_skip = params.entropy_threshold is not None or (params.value_stride or self._stride) > 1
        return req.req_pool_idx not in guided or may_skip

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message)


def _tokens(req: Req, length: int) -> list[int]:
    """The first ``length`` tokens of a sequence; the last token may be on the device only."""
    return [*req.origin_input_ids, *req.output_ids][:length]


def keep_filters(probs: torch.Tensor, rows: torch.Tensor, filters: Filters, where: torch.Tensor | None = None) -> None:
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
