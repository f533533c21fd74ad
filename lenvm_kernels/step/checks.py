"""Validation of a guided step's arguments.

Each check raises TypeError or ValueError, naming the argument, what came and what is accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from lenvm_kernels.ops._common import FLOAT_DTYPES, FLOATS, INT_DTYPES, check_fields, check_tensor
from lenvm_kernels.ops.expand_drafts import check_drafts
from lenvm_kernels.step.inputs import Sampling, SlotTable, StepBatch, StepConfig
from lenvm_kernels.types import Drafts, SpanNodes
from lenvm_kernels.values import ImageTokens, ValueModel


def check_kinds(batch: StepBatch, sampling: Sampling | None = None) -> None:
    """Raise TypeError unless ``batch`` is a StepBatch and ``sampling`` a Sampling."""
    if batch.__class__ is not StepBatch:  # no isinstance: a step makes few host calls
        raise TypeError(f"batch must be a StepBatch, got {type(batch).__name__}")
    if sampling is not None and sampling.__class__ is not Sampling:
        raise TypeError(f"sampling must be Sampling, got {type(sampling).__name__}")


def num_requests(
    scores: torch.Tensor, drafts: Drafts | None, config: StepConfig, max_requests: int, device: torch.device
) -> int:
    """The number of requests B, from the shapes of ``scores`` and ``drafts``, which are checked."""
    check_tensor("scores", scores, dtypes=FLOAT_DTYPES, shape=(None, config.vocab_size), device=device)
    rows, nodes = scores.shape[0], 1 if drafts is None else 1 + config.max_drafts
    requests, rest = divmod(rows, nodes)
    if rest:
        raise ValueError(f"scores must have 1 + max_drafts = {nodes} rows a request, got {rows}")
    if not 1 <= requests <= max_requests:
        raise ValueError(f"scores must be of 1 to max_requests = {max_requests} requests, got {requests}")
    if drafts is not None:
        check_drafts(drafts, requests, device)
        if drafts.token_ids.shape[1] != config.max_drafts:
            came = drafts.token_ids.shape[1]
            raise ValueError(f"drafts must have max_drafts = {config.max_drafts} columns, got {came}")
    return requests


def of_one_dtype(drafts: Drafts | None) -> Drafts | None:
    """Convert the drafts' token ids to int64: kernels are compiled for one dtype."""
    return None if drafts is None else drafts._replace(token_ids=drafts.token_ids.long())


def check_step(
    rows: int,
    device: torch.device,
    *,
    probs: torch.Tensor | None,
    drawn: torch.Tensor | None,
    spans: SpanNodes | None,
    backend: str,
) -> None:
    """Raise unless the optional arguments of a step fit its number of rows."""
    if drawn is not None:
        check_tensor("drawn", drawn, dtypes=INT_DTYPES, shape=(rows,), device=device)
    if spans is not None:
        if not isinstance(spans, SpanNodes):
            raise TypeError(f"spans must be SpanNodes, got {type(spans).__name__}")
        check_fields("spans", SpanNodes._fields, spans, (torch.bool, torch.int32), rows, device)
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


def check_predict(tokens: torch.Tensor, config: StepConfig, max_requests: int) -> None:
    """Raise unless :meth:`GuidedStep.predict` accepts this number of requests and of tokens per request."""
    b, columns, nodes = len(tokens), 1 if tokens.dim() == 1 else tokens.shape[1], 1 + config.max_drafts
    if b > max_requests:
        raise ValueError(f"batch.tokens must be of at most max_requests = {max_requests} requests, got {b}")
    if columns > nodes:
        raise ValueError(f"batch.tokens must have 1 to 1 + max_drafts = {nodes} columns, got {columns}")


def completed(config: StepConfig, value_model: ValueModel | None, slots: SlotTable) -> StepConfig:
    """The configuration with ``max_requests`` and ``graphs`` resolved, and its tensors on the step's device."""
    if not isinstance(config, StepConfig):
        raise TypeError(f"config must be a StepConfig, got {type(config).__name__}")
    if not isinstance(slots, SlotTable):
        raise TypeError(f"slots must be PagedSlots or EngineSlots, got {type(slots).__name__}")
    device = slots.table.device if value_model is None else value_model.device
    check_tensor("slots.table", slots.table, dtypes=torch.int32, shape=(None, None), device=device)
    if slots.num_slots < 1:
        raise ValueError(f"slots.num_slots must be at least 1, got {slots.num_slots}")
    can_have_graphs = device.type == "cuda" and value_model is not None
    if config.graphs and not can_have_graphs:
        where = "none" if value_model is None else f"it on {device}"
        raise ValueError(f"graphs must be None or False unless the value model is on a GPU, got {where}")
    return replace(
        config,
        max_requests=config.max_requests or slots.table.shape[0],
        text_breaks=None if config.text_breaks is None else config.text_breaks.to(device),
        graphs=can_have_graphs if config.graphs is None else config.graphs,
    )


def check_prompts(
    tokens: torch.Tensor,
    slots: torch.Tensor,
    table_rows: torch.Tensor,
    starts: torch.Tensor,
    lens: torch.Tensor,
    cached_lens: torch.Tensor,
    device: torch.device,
) -> None:
    """Raise unless the tensors fit as arguments of :meth:`GuidedStep.extend`."""
    check_tensor("tokens", tokens, dtypes=INT_DTYPES, shape=(None,), device=device)
    check_tensor("slots", slots, dtypes=INT_DTYPES, shape=tokens.shape, device=device)
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


def check_images(images: ImageTokens, tokens: int, model: ValueModel | None) -> None:
    """Raise unless ``images`` describe ``tokens`` tokens and the value model reads images."""
    if model is None or model.config.mrope_sections is None:
        raise ValueError("images must be None unless the value model is a vision-language model")
    device, shape = model.device, (None, model.config.hidden_size)
    check_tensor("images.positions", images.positions, dtypes=torch.int64, shape=(3, tokens), device=device)
    check_tensor("images.rows", images.rows, dtypes=torch.int64, shape=(tokens,), device=device)
    check_tensor("images.embeds", images.embeds, dtypes=model.dtype, shape=shape, device=device)
