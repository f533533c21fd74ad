"""The in-process value model of the LenVM fork of SGLang as a guided step. Importable without the fork.

The fork's own runner is handed the prefixes and candidates of a batch as lists, and answers with values. This one is
handed the batch itself and its probabilities, and rewrites these: by one forward of the value model a step
(:class:`lenvm_kernels.step.GuidedStep`), with keys and values in slots of its own
(:class:`lenvm_kernels.slot_pool.SlotPool`). Nothing is read back from the device: lengths, and who comes and goes, the
host knows anyway. But for new images: their vision tower, a module of ``transformers``, waits for the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from lenvm_kernels.adapters.settings import MAX_END_TOKENS, Settings, check_vocabulary
from lenvm_kernels.adapters.sglang_batch import last_tokens
from lenvm_kernels.adapters.sglang_images import PromptImages, image_tokens
from lenvm_kernels.guidance import GuidanceParams
from lenvm_kernels.paged_slots import PagedSlots
from lenvm_kernels.slot_pool import SlotPool
from lenvm_kernels.step import GuidedStep, Sampling
from lenvm_kernels.types import Mode, Status
from lenvm_kernels.value_model import KVCache, ValueModel

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

PAGE_SIZE = 16
# Tokens of a request that wait at most for the value model, where steps need no values of it.
MAX_DELTA = 16


@dataclass
class _Request:
    """A guided request that the step knows.

    Attributes:
        req: the engine's.
        length: tokens of its sequence at its last step.
    """

    req: Req
    length: int


class _Prompt(NamedTuple):
    """Tokens of a new request before its last one, of which the first ``computed`` are in the cache already."""

    table_row: int
    token_ids: Sequence[int]
    computed: int
    images: PromptImages | None


class InprocRunner:
    """Guides the batches of one model runner.

    A request is known by its row of the engine's request pool. Its slots are freed when it has ended, or when the room
    is needed and it is in no batch. A request that comes back without slots, or with other tokens than the step was
    told, is computed anew.

    Args:
        settings: of the value model and its steps.
        runner: of the base model, with its pools.
        mem_fraction: share of the memory that is free now, for the value model's weights, cache and steps.
        free_bytes: how much memory is free, the same number on all ranks that draw the same tokens.

    Attributes:
        step: the guided step.
        pool: the value model's slots.

    Raises:
        ValueError: a value model with another vocabulary, or no room for it, naming the option.
    """

    def __init__(
        self, settings: Settings, runner: ModelRunner, *, mem_fraction: float, free_bytes: Callable[[], float]
    ) -> None:
        free, engine = free_bytes(), runner.model_config
        self.device = torch.device(runner.device, runner.gpu_id) if runner.device == "cuda" else runner.device
        value_model = settings.load_value_model(runner.dtype, self.device)
        assert value_model is not None  # the fork's option names one
        check_vocabulary(settings, value_model.config.vocab_size, engine.vocab_size, runner.server_args.tokenizer_path)
        if engine.is_multimodal:
            value_model.vision_tower  # noqa: B018, loaded before the rest of the memory is shared out
        room = int(mem_fraction * free - (free - free_bytes()))
        rows, max_len = runner.req_to_token_pool.req_to_token.shape
        pages = _num_pages(settings, value_model, runner, room)
        self.slots = PagedSlots(rows, max_len, page_size=PAGE_SIZE, num_pages=pages, device=value_model.device)
        self.pool = SlotPool(self.slots)
        self.step = GuidedStep(
            value_model,
            self.slots,
            settings.step_config(
                has_graphs=not runner.server_args.disable_cuda_graph,
                vocab_size=engine.vocab_size,
                max_requests=runner.max_running_requests,
                max_scaled_tokens=1,  # the engine's logits have them already
                max_delta=MAX_DELTA,
            ),
        )
        self._value_model, self._stride = value_model, settings.value_stride
        self._requests: dict[int, _Request] = {}  # by table row
        # Rows of the last batch that keep their own filters, and the same on the device.
        self._filtered: tuple[list[int], torch.Tensor] = ([], torch.empty(0, dtype=torch.int64, device=self.device))
        self._warned: set[str] = set()
        if value_model.device.type == "cuda":
            self.step.warm_up(is_logits=False)

    def guide(
        self,
        batch: ForwardBatch,
        reqs: Sequence[Req],
        probs: torch.Tensor,
        *,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
    ) -> torch.Tensor | None:
        """Guide the tokens that the engine is about to draw for a batch.

        Args:
            batch: its forward.
            reqs: its requests, in the order of the rows. ``lenvm_guidance`` of each holds what it asks for, and its
                end-of-sequence tokens.
            probs: fp32, bf16 or fp16 ``[B, V]``; rewritten in place.
            top_k, top_p, min_p: int32, fp32 and fp32 ``[B]``; the requests' own filters.

        Returns:
            ``probs``, to draw from as they are: every row has its filters. None: nothing is to be guided, and ``probs``
            is as it was.
        """
        lengths = batch.seq_lens_cpu.tolist()[: len(reqs)]  # lies on the host
        guided, prompts = self._admit(reqs, lengths)
        for row in self._requests.keys() - guided.keys():
            req = self._requests[row].req
            if req.finished() or req.req_pool_idx != row:
                self._leave(row)
        self._make_room(guided)
        if not guided:
            return None
        self._extend([prompt for prompt in prompts if prompt.table_row in guided])

        filters: dict[str, Any] = dict(top_k=top_k.int(), top_p=top_p.float(), min_p=min_p.float())
        output = self.step.step(probs, last_tokens(batch, len(reqs)), Sampling(**filters), probs=probs)
        rows = [i for i, req in enumerate(reqs) if self._may_keep_filters(req, guided)]
        if rows:
            if rows != self._filtered[0]:
                self._filtered = rows, self._to_device(np.array(rows))
            at = self._filtered[1]
            # Those of a single candidate leave just that.
            keep_filters(probs, at, **filters, of_rows=output.candidates.status[at] != Status.GUIDE)
        return probs

    def _admit(self, reqs: Sequence[Req], lengths: Sequence[int]) -> tuple[dict[int, int], list[_Prompt]]:
        """The lengths of a batch's guided requests by table row, and the prompts of those that the step does not know.

        All others that were in these rows have left.
        """
        guided, prompts = {}, []
        for req, length in zip(reqs, lengths, strict=True):
            row = req.req_pool_idx
            known = self._requests.get(row)
            # After a retraction the engine may drop a token, and goes on in another row, as it does after a chunk.
            if known is not None and known.req is req and length == known.length + 1:
                known.length = length
            elif self._is_due(req, length):
                prompts.append(self._add(req, row, length))
            else:
                if known is not None:
                    self._leave(row)
                continue
            guided[row] = length
        return guided, prompts

    def _is_due(self, req: Req, length: int) -> bool:
        """Whether a request that the step does not know is guided from this step on."""
        params, eos = req.lenvm_guidance
        if params.mode == Mode.UNGUIDED or req.sampling_params.top_k == 1:  # one candidate, which no guidance moves
            return False
        if length < len(req.origin_input_ids) + len(req.output_ids):
            return False  # the prompt goes on in a later batch: what is drawn now is thrown away
        try:
            if req.input_embeds is not None:
                raise ValueError("input_embeds cannot be combined with guidance in custom_params")
            # Of earlier turns the engine keeps what stands for images, past the vocabulary, but no pixels.
            if req.session_id is not None and max(req.origin_input_ids) >= self.step.config.vocab_size:
                raise ValueError("images in a session cannot be combined with guidance in custom_params")
            has_images = req.multimodal_inputs is not None
            req.lenvm_images = PromptImages(req, self._value_model) if has_images else None
        except ValueError as error:
            logger.warning("LenVM: request %s is not guided: %s", req.rid, error)
            req.lenvm_guidance = GuidanceParams(), eos
            return False
        return True

    def _add(self, req: Req, row: int, length: int) -> _Prompt:
        params, eos = req.lenvm_guidance
        if req.sampling_params.top_k > self.step.config.max_candidates:
            self._warn_once(
                "LenVM: requests with a top_k above %d, or none, are drawn from their %d most probable tokens at most: "
                "lower top_k, or raise LENVM_MAX_CANDIDATES up to 64",
                self.step.config.max_candidates,
                self.step.config.max_candidates,
            )
        # The engine may not know the last token on the host yet. The step reads it on the device.
        tokens = [*req.origin_input_ids, *req.output_ids][: length - 1]
        images = req.lenvm_images
        if images is None:
            computed = self.pool.admit(row, tokens)
        else:
            computed = self.pool.admit(row, images.identities(tokens), images.moved)
        self.step.add_request(
            row,
            replace(params, token_temperature_scale={}, return_values=False),
            set(sorted(eos)[:MAX_END_TOKENS]),
            prompt_len=len(req.origin_input_ids),
        )
        self._requests[row] = _Request(req, length)
        return _Prompt(row, tokens, computed, images)

    def _leave(self, row: int) -> None:
        """Whoever was guided in a row is not any more; its slots are free."""
        del self._requests[row]
        self.step.remove_request(row)
        self.pool.release(row)

    def _make_room(self, guided: dict[int, int]) -> None:
        """Slots for the requests of a step, which are taken out of ``guided`` where there are none."""
        room = self.pool.reserve(guided)
        for row in room.reclaimed:
            self._leave(row)
        for row in room.refused:
            self._warn_once(
                "LenVM: the value model's cache is full; requests go on without guidance. Raise "
                "--lvm-guided-inproc-mem-fraction-static."
            )
            req = self._requests[row].req
            req.lenvm_guidance = GuidanceParams(), req.lenvm_guidance[1]
            self._leave(row)
            del guided[row]

    def _extend(self, prompts: Sequence[_Prompt]) -> None:
        """Compute the tokens of new requests that are not in the cache."""
        if not prompts:
            return
        lens = [len(prompt.token_ids) - prompt.computed for prompt in prompts]
        rows, computed = [prompt.table_row for prompt in prompts], [prompt.computed for prompt in prompts]
        starts = np.cumsum(lens) - lens
        token_ids = np.concatenate([np.array(p.token_ids[p.computed :], dtype=np.int64) for p in prompts])
        positions = np.arange(len(token_ids)) + np.repeat(np.array(computed) - starts, lens)
        parts = list(zip([prompt.images for prompt in prompts], computed, lens, strict=True))
        for images, first, _ in parts:
            if images is not None:
                images.embed(first, self._value_model)
        of_images = image_tokens(parts, len(token_ids), self._value_model)
        if of_images is not None:
            rotary, embeds = (self._to_device(x.numpy()) for x in of_images[:2])
            of_images = of_images._replace(positions=rotary, rows=embeds)
        of_tokens = self._to_device(np.stack((token_ids, np.repeat(rows, lens), positions)))
        of_requests = self._to_device(np.array([rows, starts, lens, computed]))
        token_ids_there, table_rows, positions_there = of_tokens
        self.step.extend(
            token_ids_there,
            self.slots.slots(table_rows, positions_there),
            of_requests[0],
            *of_requests[1:].int(),
            begins=starts.tolist(),
            images=of_images,
        )
        for prompt in prompts:
            self.pool.computed(prompt.table_row, len(prompt.token_ids))
            if prompt.images is not None:
                prompt.images.embeds = None

    def _may_keep_filters(self, req: Req, guided: Mapping[int, int]) -> bool:
        """Whether a row of the batch may have to be drawn by its own filters. Which one is, only the device knows."""
        sampling = req.sampling_params
        if sampling.top_k >= self.step.config.vocab_size and sampling.top_p >= 1 and sampling.min_p <= 0:
            return False  # it has none
        params = req.lenvm_guidance[0]
        may_skip = params.entropy_threshold is not None or (params.value_stride or self._stride) > 1
        return req.req_pool_idx not in guided or may_skip

    def _to_device(self, values: np.ndarray) -> torch.Tensor:
        """Without waiting for the device."""
        tensor, device = torch.from_numpy(values), self.slots.table.device
        return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)

    def _warn_once(self, message: str, *args: Any) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message, *args)


def keep_filters(
    probs: torch.Tensor,
    rows: torch.Tensor,
    *,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    of_rows: torch.Tensor | None = None,
) -> None:
    """Leave of some rows of ``probs [B, V]`` only the tokens that their own filters leave; the others become 0.

    Args:
        probs: rewritten in place.
        rows: int64 ``[R]``; which rows.
        top_k, top_p, min_p: ``[B]``.
        of_rows: bool ``[R]``; which of these are to be changed (None: all).
    """
    top_k, top_p, min_p = (x[rows, None] for x in (top_k, top_p, min_p))
    before = probs[rows]
    p, order = before.float().sort(dim=1, descending=True)
    drop = torch.arange(p.shape[1], device=p.device) >= top_k
    drop |= p.cumsum(dim=1) - p > top_p.masked_fill(top_p >= 1, torch.inf)  # what rounds above 1 is no filter
    drop |= p < min_p * p[:, :1]
    after = torch.zeros_like(p).scatter_(1, order, p.masked_fill(drop, 0.0)).to(probs.dtype)
    probs[rows] = after if of_rows is None else torch.where(of_rows[:, None], after, before)


def _num_pages(settings: Settings, value_model: ValueModel, runner: ModelRunner, room: int) -> int:
    """Pages of the value model's cache: as many as fit beside its steps, or as all requests can fill."""
    requests, max_len = runner.max_running_requests, runner.req_to_token_pool.req_to_token.shape[1]
    sizes = dict(requests=requests, max_len=max_len, vocab_size=runner.model_config.vocab_size)
    taken = settings.working_bytes(value_model, **sizes, max_delta=MAX_DELTA)
    page_bytes = KVCache.num_bytes(value_model, PAGE_SIZE)
    most = requests * -(-max_len // PAGE_SIZE)
    pages = min(most, (room - taken) // page_bytes)
    if pages < 1:
        raise ValueError(
            f"--lvm-guided-inproc-mem-fraction-static leaves {room / 2**30:.2f} GiB beside the value model's weights, "
            f"and its steps take {taken / 2**30:.2f} GiB: raise it, or lower --max-running-requests, "
            "LENVM_MAX_CANDIDATES or LENVM_CHUNK_TOKENS"
        )
    logger.info(
        "LenVM: value model %s in %s; its cache of %d tokens takes %.2f GiB, its steps %.2f GiB",
        settings.value_model,
        value_model.dtype,
        pages * PAGE_SIZE,
        pages * page_bytes / 2**30,
        taken / 2**30,
    )
    return pages
