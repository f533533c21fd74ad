"""Validation of a guided step's arguments.

Each check raises TypeError or ValueError, naming the argument, what came and what is accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from lenvm_kernels.ops._common import FLOAT_DTYPES, FLOATS, INT_DTYPES, ceil_div, check_tensor
from lenvm_kernels.ops._spec import Spec
from lenvm_kernels.step.graphs import Graphs
from lenvm_kernels.step.inputs import SlotTable, StepConfig
from lenvm_kernels.types import Drafts
from lenvm_kernels.values import ImageTokens, ValueModel

_DRAFTS = Spec("drafts: Drafts")
NO_IMAGES = "images must be None unless the value model is a vision-language model"


def check_class(name: str, value: object, accepted: type) -> None:
    """Raise TypeError unless ``value`` is an instance of the named tuple ``accepted``."""
    if value.__class__ is not accepted:  # no isinstance: a step makes few host calls
        raise TypeError(f"{name} must be {accepted.__name__}, got {type(value).__name__}")


def checked_drafts(drafts: Drafts, requests: int, config: StepConfig, device: torch.device) -> Drafts:
    """The checked drafts, with token ids as int64: kernels are compiled for one dtype."""
    _DRAFTS.check("auto", drafts, device=device, sizes={"B": requests})
    if drafts.token_ids.shape[1] != config.max_drafts:
        came = drafts.token_ids.shape[1]
        raise ValueError(f"drafts must have max_drafts = {config.max_drafts} columns, got {came}")
    return drafts._replace(token_ids=drafts.token_ids.long())


def checked_scores(scores: torch.Tensor, shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    """The checked scores of ``shape[0]`` rows, without padding columns beyond a vocabulary of ``shape[1]`` tokens.

    They may have fewer columns: the output layers of some models have no row for special tokens of the prompt.
    """
    rows, vocab = shape
    check_tensor("scores", scores, dtypes=FLOAT_DTYPES, shape=(rows, None), device=device)
    if scores.shape[1] == 0:
        raise ValueError("scores must have at least one column, got none")
    return scores[:, :vocab] if scores.shape[1] > vocab else scores


def checked_mask(mask: torch.Tensor | None, scores: torch.Tensor) -> torch.Tensor | None:
    """The checked ``sampling.vocab_mask`` for the columns of the scores."""
    if mask is None:
        return None
    rows, words = scores.shape[0], ceil_div(scores.shape[1], 32)
    check_tensor("sampling.vocab_mask", mask, dtypes=torch.int32, shape=(rows, None), device=scores.device)
    if mask.shape[1] < words:
        raise ValueError(f"sampling.vocab_mask must have at least {words} columns, got {mask.shape[1]}")
    return mask[:, :words]


def check_step(
    rows: int, device: torch.device, *, probs: torch.Tensor | None, drawn: torch.Tensor | None, backend: str
) -> None:
    """Raise unless the optional arguments of a step fit its number of rows."""
    if drawn is not None:
        check_tensor("drawn", drawn, dtypes=INT_DTYPES, shape=(rows,), device=device)
    if probs is not None:
        check_tensor("probs", probs, dtypes=FLOATS[backend], shape=(rows, None), device=device)


def check_states(
    states: torch.Tensor | None, rows: int, device: torch.device, needed: tuple[int, torch.dtype] | None
) -> None:
    """Raise unless ``states`` are those that the value source needs for a step of ``rows`` rows."""
    if needed is not None:
        check_tensor("batch.states", states, dtypes=needed[1], shape=(rows, needed[0]), device=device)
    elif states is not None:
        raise ValueError("batch.states must be None unless values are made of the base model's states, got some")


def check_predict(tokens: torch.Tensor, config: StepConfig) -> None:
    """Raise unless :meth:`GuidedStep.predict` accepts this number of tokens per request."""
    columns, nodes = 1 if tokens.dim() == 1 else tokens.shape[1], 1 + config.max_drafts
    if columns > nodes:
        raise ValueError(f"batch.tokens must have 1 to 1 + max_drafts = {nodes} columns, got {columns}")


def completed(
    config: StepConfig, slots: SlotTable, device: torch.device | None, candidates: int, graphs_class: type[Graphs]
) -> StepConfig:
    """The configuration with its defaults resolved, and its tensors on the step's device.

    Args:
        config, slots: arguments of the step, which are checked.
        device: device of the value source. If None, the slots' device.
        candidates: default of ``max_candidates``.
        graphs_class: runs the step if it has graphs.
    """
    if not isinstance(config, StepConfig):
        raise TypeError(f"config must be a StepConfig, got {type(config).__name__}")
    if not isinstance(slots, SlotTable):
        raise TypeError(f"slots must be PagedSlots or EngineSlots, got {type(slots).__name__}")
    device = slots.table.device if device is None else device
    check_tensor("slots.table", slots.table, dtypes=torch.int32, shape=(None, None), device=device)
    if slots.num_slots < 1:
        raise ValueError(f"slots.num_slots must be at least 1, got {slots.num_slots}")
    can_have_graphs = graphs_class.supports(device) and config.backend != "reference"
    if config.graphs and not can_have_graphs:
        raise ValueError("graphs must be None or False unless kernels run on a GPU, got True")
    return replace(
        config,
        max_requests=config.max_requests or slots.table.shape[0],
        max_candidates=config.max_candidates or candidates,
        text_breaks=None if config.text_breaks is None else config.text_breaks.to(device),
        graphs=can_have_graphs if config.graphs is None else config.graphs,
    )


def check_prompts(
    tokens: torch.Tensor,
    table_rows: torch.Tensor,
    starts: torch.Tensor,
    lens: torch.Tensor,
    cached_lens: torch.Tensor,
    device: torch.device,
) -> None:
    """Raise unless the tensors fit as arguments of :meth:`GuidedStep.extend`."""
    check_tensor("tokens", tokens, dtypes=INT_DTYPES, shape=(None,), device=device)
    check_tensor("table_rows", table_rows, dtypes=INT_DTYPES, shape=(None,), device=device)
    for name, tensor in (("starts", starts), ("lens", lens), ("cached_lens", cached_lens)):
        check_tensor(name, tensor, dtypes=torch.int32, shape=table_rows.shape, device=device)


def check_begins(begins: Sequence[int] | None, tokens: int) -> list[int]:
    """The first token of each request, as a list. If ``begins`` is None, one request at token 0."""
    if begins is None:
        return [0]
    found = [int(begin) for begin in begins]
    if found != sorted(found) or not all(0 <= begin <= tokens for begin in found):
        raise ValueError(f"begins must be ascending places of 0 to {tokens}, the number of tokens, got {found}")
    return found


def check_images(images: ImageTokens, tokens: int, model: ValueModel) -> None:
    """Raise unless ``images`` describe ``tokens`` tokens and the value model reads images."""
    if model.config.mrope_sections is None:
        raise ValueError(NO_IMAGES)
    device, shape = model.device, (None, model.config.hidden_size)
    check_tensor("images.positions", images.positions, dtypes=torch.int64, shape=(3, tokens), device=device)
    check_tensor("images.rows", images.rows, dtypes=torch.int64, shape=(tokens,), device=device)
    check_tensor("images.embeds", images.embeds, dtypes=model.dtype, shape=shape, device=device)
