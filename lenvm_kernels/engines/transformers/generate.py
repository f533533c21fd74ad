"""Length-guided ``model.generate`` of ``transformers`` in one call."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase

from lenvm_kernels.engines.probe_states import base_of_probe
from lenvm_kernels.engines.transformers.processor import NEUTRAL, Guidance, LenVMLogitsProcessor, vocab_size_of
from lenvm_kernels.values import LengthProbe, ValueModel
from lenvm_kernels.values.checkpoint import local_path
from lenvm_kernels.values.probe import is_probe

# Arguments of ``model.generate`` that cannot be combined with guidance, with the only accepted value.
UNGUIDED = {
    "num_beams": 1,
    "assistant_model": None,
    "prompt_lookup_num_tokens": None,
    "inputs_embeds": None,
    "decoder_input_ids": None,
}


def generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    max_new_tokens: int,
    target_length: float | None = None,
    guidance: Guidance | Sequence[Guidance] = None,
    value_model: ValueModel | LengthProbe | str | Path | None = None,
    max_candidates: int | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    num_return_sequences: int = 1,
    processor_options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """``model.generate`` with a target for the length of each output.

    Tokens are sampled unless ``do_sample`` is False. Sampling parameters and ``eos_token_id`` are arguments, or in a
    ``generation_config``, as for ``model.generate``. Their defaults are the model's.

    Args:
        model: the base model, of any architecture.
        input_ids: int64 ``[B, S]``; prompts, padded on the left, or inputs of the encoder.
        attention_mask: int64 ``[B, S]``; 0 for padding. If None, there is no padding.
        max_new_tokens: maximum number of new tokens.
        target_length: target number of new tokens, without the end-of-sequence token.
        guidance: parameters as in :class:`LenVMLogitsProcessor`; with ``target_length``, a mapping.
        value_model: the value model, or a :class:`LengthProbe` of the base model; or its directory or name, which is
            loaded in each call (:func:`load_value_model`). If None, end tokens alone meet the target.
        max_candidates: as in :class:`LenVMLogitsProcessor`.
        tokenizer: tokenizer of the base model. Recommended, because outputs then end at ends of sentences.
        num_return_sequences: outputs per prompt, in consecutive rows.
        processor_options: further arguments of :class:`LenVMLogitsProcessor`, such as ``tokenizers``.
        **kwargs: further arguments of ``model.generate``.

    Returns:
        The result of ``model.generate``.

    Raises:
        ValueError: as :class:`LenVMLogitsProcessor`.
    """
    if num_return_sequences < 1:
        raise ValueError(f"num_return_sequences must be at least 1, got {num_return_sequences}")
    config = kwargs.pop("generation_config", None)
    given = ({} if config is None else _without_none(vars(config))) | _without_none(kwargs)
    settings = _without_none(vars(model.generation_config)) | given
    for name, accepted in UNGUIDED.items():
        if settings.get(name, accepted) != accepted:
            came = settings[name] if isinstance(settings[name], int) else type(settings[name]).__name__
            raise ValueError(f"{name} must be {accepted} with guidance, got {came}")
    images = {name: kwargs[name] for name in ("pixel_values", "image_grid_thw") if kwargs.get(name) is not None}
    if images and num_return_sequences > 1:
        raise ValueError(f"num_return_sequences must be 1 with {next(iter(images))}, got {num_return_sequences}")
    attention_mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    if target_length is not None:
        if guidance is not None and not isinstance(guidance, Mapping):
            raise ValueError(f"target_length must be None unless guidance is a mapping or None, got {target_length}")
        guidance = {"target_length": target_length} | dict(guidance or {})
    if isinstance(guidance, Sequence):
        guidance = [g for g in guidance for _ in range(num_return_sequences)]
    sampling = {name: settings.get(name, value) for name, value in NEUTRAL.items()}
    # Sampling is the default, although models are greedy by default.
    sampling |= dict(do_sample=given.get("do_sample", True), eos_token_id=settings.get("eos_token_id"))
    options = {"max_candidates": max_candidates} | dict(processor_options or {})
    if isinstance(value_model, (str, Path)):
        value_model = load_value_model(value_model, model)
    # Not passed as the value model's tokenizer if the vocabularies must be compared.
    is_other = isinstance(value_model, ValueModel) and vocab_size_of(model) != value_model.config.vocab_size
    if tokenizer is not None and not is_other:
        options.setdefault("tokenizers", (tokenizer, tokenizer))
    processor = LenVMLogitsProcessor(
        model,
        value_model,
        guidance,
        attention_mask.repeat_interleave(num_return_sequences, dim=0),
        max_new_tokens=max_new_tokens,
        **sampling,
        **(images if isinstance(value_model, ValueModel) else {}),
        **options,
    )
    other_processors = kwargs.pop("logits_processor", None) or []
    kwargs |= processor.generation_kwargs | {"logits_processor": LogitsProcessorList([*other_processors, processor])}
    if tokenizer is not None:
        kwargs["tokenizer"] = tokenizer
    kwargs |= dict(input_ids=input_ids, attention_mask=attention_mask, num_return_sequences=num_return_sequences)
    if config is not None:  # transformers accepts a configuration or arguments, not both
        config = copy.deepcopy(config)
        kwargs = config.update(**kwargs) | {"generation_config": config}
    return model.generate(**kwargs)  # type: ignore[operator]  # PreTrainedModel lacks the mixin


def load_value_model(path: str | Path, model: PreTrainedModel) -> ValueModel | LengthProbe:
    """Load the value model or probe at a location, in the dtype and on the device of a base model.

    Args:
        path: a directory, or a name ``owner/name`` on Hugging Face.
        model: the base model; a probe must have been trained for it.

    Raises:
        ValueError, OSError: as ``from_pretrained`` of :class:`ValueModel` and :class:`LengthProbe`.
    """
    path = local_path(path)
    if is_probe(path):
        return LengthProbe.from_pretrained(path, *base_of_probe(model))
    return ValueModel.from_pretrained(path, dtype=model.dtype, device=model.device)


def _without_none(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}
