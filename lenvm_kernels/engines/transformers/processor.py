"""The logits processor that guides ``model.generate`` of ``transformers``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lenvm_kernels.engines.probe_states import ProbeStates
from lenvm_kernels.engines.report import not_finite
from lenvm_kernels.engines.tokenizers import check_same_tokens
from lenvm_kernels.guidance import GuidanceParams, Thoughts, parse_guidance, text_breaks_of
from lenvm_kernels.paged_slots import PagedSlots
from lenvm_kernels.step import GuidedStep, Sampling, StepBatch, StepConfig, StepOutput, value_source
from lenvm_kernels.types import Mode
from lenvm_kernels.values import LengthProbe, LenVMConfig, ValueModel
from lenvm_kernels.values.images import ImageSize, ImageTokens, image_positions, image_sizes

Guidance = Mapping[str, Any] | GuidanceParams | None
# Sampling parameters of ``generate`` that change nothing.
NEUTRAL: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


class LenVMLogitsProcessor(LogitsProcessor):
    """Guides one call of ``model.generate``, with a value model or by end tokens only.

    :func:`generate` does this in one call. Otherwise, create a processor for each call of ``model.generate`` and pass
    its :attr:`generation_kwargs`, because the processor applies the sampling parameters itself.

    Args:
        model: the base model, of any architecture. With an encoder and a decoder, ``value_model`` must be None.
        value_model: a value model with the base model's vocabulary, or a :class:`LengthProbe` of the base model. If
            None, only ``near``, ``ge_near`` and ``le_near`` are available.
        guidance: parameters of all prompts (``custom_params`` as in :func:`parse_guidance`, or parsed), or a sequence
            with one entry per prompt. A prompt with None is unguided.
        attention_mask: ``[B, S]``; mask of the prompts, padded on the left, or of the encoder's inputs.
        max_new_tokens: maximum number of new tokens, which sizes the value model's cache, or a sequence with one entry
            per prompt. Guidance uses a prompt's own maximum, ``generate`` stops at the largest.
        temperature, top_k, top_p, min_p: sampling parameters of all prompts. A ``top_k`` of 0 disables the filter.
        do_sample: whether to sample. If not, or if ``top_k`` is 1 or ``temperature`` is 0, each token is the most
            probable one after guidance, without filters.
        eos_token_id: tokens that end an output. If None, the model's ``generation_config`` decides.
        max_candidates: candidates per step, a power of two up to 64. Guided tokens are drawn from the candidates only.
            If None, 8 with a value model and 64 without.
        tokenizers: tokenizers of the base model and the value model; without a value model, the base model's twice.
            With tokenizers, outputs end at ends of sentences. They are required if the models' ``vocab_size`` differ by
            padding, for a ``thinking_budget``, and for an ``end_message`` or ``landing`` given as text.
        pixel_values, image_grid_thw: images of the prompts in order, from the base model's processor. The value model,
            which must also be a Qwen2.5-VL, embeds them with its vision tower.
        record: store the :class:`StepOutput` of each step in :attr:`records`, and score candidates of all prompts.
        backend: backend of the operators.

    Attributes:
        params: guidance parameters per prompt, with the value model's defaults; None for unguided prompts.
        records: results of the steps, with one row per prompt. Empty without ``record``.

    Raises:
        ValueError: invalid argument; the message names it, the value and the accepted values. Images that do not match
            the prompts, and videos, are rejected in the first step.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        value_model: ValueModel | LengthProbe | None,
        guidance: Guidance | Sequence[Guidance],
        attention_mask: torch.Tensor,
        *,
        max_new_tokens: int | Sequence[int],
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        do_sample: bool = True,
        eos_token_id: int | Sequence[int] | None = None,
        max_candidates: int | None = None,
        tokenizers: tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase] | None = None,
        pixel_values: torch.Tensor | None = None,
        image_grid_thw: torch.Tensor | None = None,
        record: bool = False,
        backend: str = "auto",
    ) -> None:
        self._states: ProbeStates | None = None
        if model.config.is_encoder_decoder:
            if value_model is not None:
                kind = type(value_model).__name__
                raise ValueError(f"value_model must be None with an encoder-decoder base model, got a {kind}")
            attention_mask = attention_mask.new_ones(len(attention_mask), 1)  # the decoder's start token
        if isinstance(value_model, LengthProbe):
            self._states = ProbeStates(model, value_model.config.layers, last=True)
        elif value_model is not None and tokenizers is not None:
            check_same_tokens("value_model", *tokenizers)
        elif value_model is not None and (size := vocab_size_of(model)) != (came := value_model.config.vocab_size):
            raise ValueError(
                f"value_model must share the base model's vocabulary of {size} tokens, got {came} (if only the padding "
                "differs, give both tokenizers)"
            )
        self._unguided = _warpers(temperature, top_k, top_p, min_p)
        if attention_mask.dim() != 2 or not attention_mask[:, -1].all() or (attention_mask.diff(dim=1) < 0).any():
            raise ValueError(
                f"attention_mask must be [B, S] of prompts padded on the left, got {list(attention_mask.shape)}"
                " with padding elsewhere; tokenize with padding_side='left'"
            )
        rows, prompt_width = attention_mask.shape
        if guidance is None or isinstance(guidance, (Mapping, GuidanceParams)):
            guidance = [guidance] * rows
        if len(guidance) != rows:
            raise ValueError(f"guidance must be one for all or one for each of the {rows} prompts, got {len(guidance)}")
        limits = [max_new_tokens] * rows if isinstance(max_new_tokens, int) else list(max_new_tokens)
        if len(limits) != rows or min(limits, default=1) < 1:
            accepted = f"at least 1, for all or for each of the {rows} prompts"
            raise ValueError(f"max_new_tokens must be {accepted}, got {max_new_tokens}")
        config = LenVMConfig() if value_model is None else value_model.lenvm_config
        shared: dict[str, Any] = dict(gamma=config.gamma, strength=config.strength, has_values=value_model is not None)
        shared["thoughts"] = None if tokenizers is None else Thoughts.of(tokenizers[0])
        self.params = [
            parse_guidance(g, max_tokens=limit, **shared) if isinstance(g, Mapping) else g
            for g, limit in zip(guidance, limits, strict=True)
        ]
        guided = [params for params in self.params if params is not None]
        if (pixel_values is None) != (image_grid_thw is None):
            raise ValueError("pixel_values and image_grid_thw must be given together, got one of them")
        self._image_sizes: list[ImageSize] = []
        self._image_embeds: torch.Tensor | None = None
        if isinstance(value_model, ValueModel) and pixel_values is not None and image_grid_thw is not None:
            self._image_embeds = value_model.embed_images(pixel_values, image_grid_thw)
            self._image_sizes = image_sizes(image_grid_thw, value_model.config.vision.spatial_merge_size)

        device = model.device if value_model is None else value_model.device
        eos = set(eos_token_ids(model, eos_token_id))
        self._eos_on_device = torch.tensor(sorted(eos), dtype=torch.int64, device=device)
        self._max_new_tokens, self._prompt_width = max(limits), prompt_width
        self._do_sample = do_sample and top_k != 1 and temperature != 0
        if not self._do_sample:
            temperature, top_k, top_p, min_p = NEUTRAL.values()
            self._unguided = LogitsProcessorList()
        self._sampling = Sampling(top_k, top_p, min_p, temperature, is_logits=True)
        slots = PagedSlots(rows, prompt_width + self._max_new_tokens, device=device)
        self._value_model = value_model
        self._step = GuidedStep(
            value_source(value_model),
            slots,
            StepConfig(
                vocab_size=vocab_size_of(model),
                max_candidates=max_candidates,
                max_eos=max(1, len(eos)),
                max_scaled_tokens=max([1, *(len(params.token_temperature_scale) for params in guided)]),
                score_all=record,
                text_breaks=None if tokenizers is None else text_breaks_of(tokenizers[0], vocab_size_of(model)),
                backend=backend,
            ),
        )
        self._prompt_lens = attention_mask.sum(dim=1).to(device, torch.int32)
        for row, prompt_len in enumerate(self._prompt_lens.tolist()):
            slots.extend(row, prompt_len + self._max_new_tokens)
            self._step.add_request(row, self.params[row], eos, prompt_len=prompt_len)
        self._needs_steps = any(params.mode != Mode.UNGUIDED for params in guided)
        self._wants_lengths = any(params.return_values for params in guided)
        # Predicted lengths after the prompts or, with a probe, the states before the first new tokens.
        self._of_prompts: torch.Tensor | None = None
        self._previous: torch.Tensor | None = None
        self._table_rows = torch.arange(rows, device=device)
        self._active = torch.ones(rows, dtype=torch.bool, device=device)
        self._record, self.records = record, list[StepOutput]()

    @property
    def generation_kwargs(self) -> dict[str, Any]:
        """Arguments for ``model.generate``: this processor, its end tokens and neutral sampling parameters."""
        kwargs = dict(logits_processor=LogitsProcessorList([self]), max_new_tokens=self._max_new_tokens)
        kwargs |= dict(do_sample=self._do_sample, eos_token_id=self._eos_on_device.tolist() or None)
        return kwargs | (NEUTRAL if self._do_sample else {})

    @property
    def faults(self) -> list[int]:
        """Number of steps per prompt that lost their guidance because scores or values were not finite."""
        return self._step.faults[: len(self._table_rows)].tolist()

    def outcomes(self, sequences: torch.Tensor) -> list[dict[str, Any] | None]:
        """Guidance outcome per prompt (:meth:`GuidanceParams.outcome`), from the result of ``generate``."""
        eos, width, breaks = self._eos_on_device.tolist(), self._prompt_width, self._step.text_breaks
        outcomes = list[dict[str, Any] | None]()
        for row, params, prompt_len, faults in zip(
            sequences.tolist(), self.params, self._prompt_lens.tolist(), self.faults, strict=True
        ):
            length = next((i for i, token in enumerate(row[width:], start=1) if token in eos), None)
            output = row[width:][:length]
            outcome = (params or GuidanceParams()).outcome(row[width - prompt_len : width], output, eos, breaks)
            outcomes.append(outcome and outcome | {"lost": not_finite(faults)})
        return outcomes

    @torch.no_grad()
    def predicted_output_lengths(self, sequences: torch.Tensor) -> list[float | None]:
        """Output lengths predicted after the prompts, as SGLang's ``predicted_output_length``.

        Args:
            sequences: int64 ``[B, S + N]``; the result of ``generate``, prompts first. With a probe, the length is one
                plus the prediction after the first new token.

        Returns:
            Number of tokens, including end-of-sequence; None without ``return_values`` or without a finite value.

        Raises:
            ValueError: ``sequences`` has a wrong number of rows, or no new tokens.
        """
        rows, width, lengths = self._table_rows, self._prompt_width, self._of_prompts
        if sequences.dim() != 2 or len(sequences) != len(rows) or sequences.shape[1] <= width:
            came = list(sequences.shape)
            raise ValueError(f"sequences must be [{len(rows)}, {width} + N], prompts and their outputs, got {came}")
        if lengths is None:
            return [None] * len(rows)
        if self._states is not None:
            first = sequences[:, width].to(rows.device).contiguous()
            lengths = 1 + self._step.predict(StepBatch(first, rows, self._prompt_lens + 1, states=lengths))
        return [round(length, 3) if math.isfinite(length) else None for length in lengths.tolist()]

    @torch.no_grad()
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Called by ``generate``; returns logarithms of the probabilities to sample from, fp32 ``[B, V]``."""
        generated = self._check_progress(input_ids)
        step, device = self._step, self._table_rows.device
        tokens, logits = input_ids.to(device), scores.to(device, torch.float32, copy=True)
        lengths = self._prompt_lens + generated
        if generated == 0:
            self._begin_spans(tokens)
        elif self._needs_steps:
            self._active &= ~torch.isin(tokens[:, -1], self._eos_on_device)
        states = None if self._states is None else self._states.take()
        batch = StepBatch(tokens[:, -1].contiguous(), self._table_rows, lengths, active=self._active, states=states)
        prepared = step.prepare(logits, batch)
        filtered = self._unguided(tokens, logits)  # type: ignore[arg-type]  # annotated with a legacy tensor type
        probs = torch.softmax(filtered, dim=-1)
        if generated == 0 and (self._needs_steps or self._wants_lengths):
            self._extend_prompts(tokens)
        if generated == 0 and self._wants_lengths:
            self._of_prompts = states if states is not None else step.predict(batch)
        if self._needs_steps:
            output = step.step(prepared, self._sampling, probs=probs)
            if self._record:
                self.records.append(output)
        return probs.log().to(scores.device)

    def _begin_spans(self, tokens: torch.Tensor) -> None:
        """Find open spans at the end of prompts ``[B, S]``, padded on the left."""
        eos = set(self._eos_on_device.tolist())
        for row, params in enumerate(self.params):
            if params is not None and params.has_span:
                prompt = tokens[row, -int(self._prompt_lens[row]) :].tolist()
                self._step.add_request(row, params, eos, span=params.span_state(prompt))

    def _check_progress(self, input_ids: torch.Tensor) -> int:
        """Number of new tokens so far. Raises ValueError unless each row grew by one token since the last call."""
        rows, width = input_ids.shape
        if rows != len(self._table_rows):
            raise ValueError(
                f"generate runs {rows} rows for {len(self._table_rows)} prompts: beam search is not supported; for "
                "num_return_sequences use lenvm_kernels.generate, or repeat the prompts"
            )
        generated = width - self._prompt_width
        previous = self._previous
        expected = 0 if previous is None else previous.shape[1] + 1 - self._prompt_width
        if generated != expected or (previous is not None and not torch.equal(input_ids[:, :-1], previous)):
            raise ValueError(
                f"expected the prompts and {expected} new tokens, got {generated} and another history: make a new "
                "LenVMLogitsProcessor for each call of generate (beams and assisted decoding are not supported)"
            )
        self._previous = input_ids
        return generated

    def _extend_prompts(self, tokens: torch.Tensor) -> None:
        """Pass all prompt tokens except the last to the value model."""
        width = tokens.shape[1]
        first = width - self._prompt_lens  # after the padding
        self._step.extend(
            tokens.flatten(),
            self._table_rows,
            starts=(starts := (self._table_rows * width + first).int()),
            lens=self._prompt_lens - 1,
            cached_lens=torch.zeros_like(self._prompt_lens),
            begins=starts.tolist(),
            images=self._images_of(tokens, first),
        )

    def _images_of(self, tokens: torch.Tensor, first: torch.Tensor) -> ImageTokens | None:
        """Images of prompts ``[B, S]``, which begin at columns ``first``; None if the value model only reads text."""
        value_model, embeds = self._value_model, self._image_embeds
        if not isinstance(value_model, ValueModel) or value_model.config.vision is None:
            return None
        config = value_model.config
        tokens = tokens.cpu()
        if (tokens == config.video_token_id).any():
            raise ValueError("prompts must not contain videos, got video tokens: the value model reads text and images")
        is_image = tokens == config.image_token_id
        if embeds is None:
            if is_image.any():
                raise ValueError("pixel_values and image_grid_thw must be given, because prompts contain image tokens")
            return None
        sizes = iter(self._image_sizes)
        positions = torch.zeros(3, *tokens.shape, dtype=torch.int64)
        for i, column in enumerate(first.tolist()):
            is_image[i, :column] = False
            positions[:, i, column:] = image_positions(is_image[i, column:], sizes)
        if left := len(list(sizes)):
            raise ValueError(f"image_grid_thw must be of the images in prompts, got {left} more")
        of_image = is_image.flatten()
        rows = torch.where(of_image, of_image.cumsum(0) - 1, -1)
        return ImageTokens(positions.flatten(1).to(embeds.device), rows.to(embeds.device), embeds)


def vocab_size_of(model: PreTrainedModel) -> int:
    embedding: Any = model.get_input_embeddings()
    return embedding.num_embeddings


def eos_token_ids(model: PreTrainedModel, given: int | Sequence[int] | None = None) -> list[int]:
    """The tokens that end an output; if ``given`` is None, from the model's ``generation_config``."""
    ids = model.generation_config.eos_token_id if given is None else given
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def _warpers(temperature: float, top_k: int, top_p: float, min_p: float) -> LogitsProcessorList:
    """The filters of an unguided row as in ``generate``. Raises ValueError for invalid parameters."""
    is_count = isinstance(top_k, int) and 0 <= top_k < 2**31
    parameters: tuple[tuple[str, float, bool, str, Any], ...] = (
        ("temperature", temperature, 0 <= temperature < math.inf, "a finite number >= 0", TemperatureLogitsWarper),
        ("top_k", top_k, is_count, "an integer >= 0 (0: no limit)", TopKLogitsWarper),
        ("top_p", top_p, 0 < top_p <= 1, "a number in (0, 1]", TopPLogitsWarper),
        ("min_p", min_p, 0 <= min_p <= 1, "a number in [0, 1]", MinPLogitsWarper),
    )
    for name, value, fits, accepted, _ in parameters:
        if not fits:
            raise ValueError(f"{name} must be {accepted}, got {value!r}")
    used = [(warper, value) for name, value, _, _, warper in parameters if value not in (0, NEUTRAL[name])]
    return LogitsProcessorList([warper(value) for warper, value in used])
