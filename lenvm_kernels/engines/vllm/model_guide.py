"""Guidance in a vLLM worker by a value model with a separate cache (:class:`OwnSlots`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from lenvm_kernels.engines.own_slots import PAGE_SIZE, OwnSlots, PromptPart, pages_for
from lenvm_kernels.engines.settings import MAX_DELTA
from lenvm_kernels.engines.tensors import to_device
from lenvm_kernels.engines.vllm.guide import Guide, logger
from lenvm_kernels.engines.vllm.states import Part
from lenvm_kernels.step import PreparedStep
from lenvm_kernels.step.inputs import SlotTable
from lenvm_kernels.values import KVCache, LengthProbe, ValueModel

# Default of LENVM_MEMORY_SHARE, a share of the memory that the engine leaves for caches.
MEMORY_SHARE = 0.2


class ModelGuide(Guide):
    """Guidance by a value model; for arguments and errors, see :class:`Guide`.

    ``without_room`` is the number of requests that lost their guidance because the value model's cache was full.
    """

    max_delta = MAX_DELTA

    def _load(self) -> tuple[ValueModel | LengthProbe | None, SlotTable, str]:
        settings, engine, rows = self.settings, self.config.model_config, self.rows
        base = engine.dtype, self.device, engine.get_vocab_size(), engine.tokenizer
        self.value_model = value_model = settings.load_value_model(*base)
        pages = self._num_pages()
        self.own = OwnSlots(rows, engine.max_model_len, num_pages=pages, device=self.device)
        self.without_room = 0
        # Per slot: prompt tokens passed to the value model, and whether all later tokens are passed to the step.
        self._computed, self._is_running = np.zeros(rows, dtype=np.int64), np.zeros(rows, dtype=bool)
        cache_bytes = KVCache.num_bytes(value_model, self.own.slots.num_slots)
        if self.report.metrics is not None:
            self.report.metrics.cache_bytes.set(cache_bytes)
        source = f"the value model {settings.value_model} in {value_model.dtype}; a cache of {pages * PAGE_SIZE}"
        return value_model, self.own.slots, f"{source} tokens takes {cache_bytes / 2**30:.2f} GiB"

    def _num_pages(self) -> int:
        """Number of pages of the cache, which shares ``LENVM_MEMORY_SHARE`` with the steps."""
        working, cache = self._working_bytes(self.value_model), self.config.cache_config
        total = cache.kv_cache_memory_bytes
        if total is None and self.device.type == "cuda":
            free, device_bytes = torch.cuda.mem_get_info(self.device)
            total = int(free - (1 - cache.gpu_memory_utilization) * device_bytes)
        share = MEMORY_SHARE if self.settings.memory_share is None else self.settings.memory_share
        room = None if total is None else share * total - working
        pages = pages_for(self.value_model, self.rows, self.config.model_config.max_model_len, room)
        if self._group is not None:
            of_ranks = torch.tensor([pages])
            torch.distributed.all_reduce(of_ranks, torch.distributed.ReduceOp.MIN, self._group.cpu_group)
            pages = int(of_ranks)
        if pages < 1:
            raise ValueError(
                f"LENVM_MEMORY_SHARE must be above {working / total:.3f}, got {share:g} of the {total / 2**30:.2f} GiB "
                f"left for caches, and a guided step takes {working / 2**30:.2f} GiB; "
                "lower max_num_seqs, LENVM_MAX_CANDIDATES or LENVM_CHUNK_TOKENS"
            )
        return pages

    # --- requests ---

    def _admit(self, slot: int, tokens: Sequence[int]) -> None:
        self._computed[slot], self._is_running[slot] = self.own.admit(slot, tokens), False

    def _remove(self, slot: int) -> None:
        super()._remove(slot)
        self.own.release(slot)

    def _lose(self, slots: Sequence[int] | np.ndarray) -> None:
        super()._lose(slots)
        for slot in slots:
            self.own.release(int(slot))

    # --- a step ---

    def _read_prompts(self, part: Part, lengths: torch.Tensor) -> None:
        slots, known_lens = part.host_slots, part.ctx.seq_lens_upper_bound_np[part.places]
        is_guided = self._needs_step[slots] & ~self._is_lost[slots]
        self._make_room(dict(zip(slots[is_guided].tolist(), known_lens[is_guided].tolist(), strict=True)))
        waiting = np.flatnonzero(is_guided & ~self._is_lost[slots] & ~self._is_running[slots])
        if not len(waiting):
            return
        # The last token is left to the step, unless a later step continues the prompt. With drafts, ``known_lens`` is
        # an upper bound for requests that have lost their slots.
        slot, known_len = slots[waiting], known_lens[waiting]
        keeps_last, start = known_len >= self.req_states.prefill_len.np[slot], self._computed[slot]
        end = np.maximum(known_len - keeps_last, start)
        place, kept, begin = to_device(np.stack((waiting, keeps_last, start)), self.device)
        self.own.extend(
            self.step,
            [PromptPart(*span) for span in np.stack((slot, start, end), axis=1).tolist()],
            lambda rows, positions: self.req_states.all_token_ids.gpu[rows, positions],
            lens=(lengths[place] - kept - begin).clamp(min=0).int(),
        )
        self._computed[slot], self._is_running[slot] = end, keeps_last

    def _make_room(self, lengths: dict[int, int]) -> None:
        """Reserve slots for the requests of a step; requests without room lose their guidance."""
        room = self.own.reserve(lengths)
        for slot in room.reclaimed:
            self._computed[slot], self._is_running[slot] = 0, False
        if not room.refused:
            return
        if not self.without_room:
            text = "LenVM: the value model's cache is full, so requests lose guidance. Raise LENVM_MEMORY_SHARE."
            logger.warning(text)
        self.without_room += len(room.refused)
        if self.report.metrics is not None:
            self.report.metrics.without_room.inc(len(room.refused))
        self._lose(room.refused)

    def _predict(self, prepared: PreparedStep) -> torch.Tensor:
        """Lengths predicted after the last token of each prompt, fp32 ``[B]``."""
        batch = prepared.batch
        if self.drafts:
            new_lens = (batch.lengths - self.step.passed_lens(batch.table_rows)).clamp(0, 1 + self.drafts)
            tokens = self.new_tokens(batch.table_rows, batch.lengths, new_lens)
            batch = batch._replace(tokens=tokens, new_lens=new_lens)
        return self.step.predict(batch).view(len(batch.lengths), -1)[:, 0]
