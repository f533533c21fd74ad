"""HTTP server for the values of a value model, with the API of the LenVM authors' SGLang fork (``lenvm serve``)."""

from __future__ import annotations

import asyncio
import hmac
import itertools
import math
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from lenvm_kernels.engines.own_slots import PAGE_SIZE, OwnSlots, PromptPart
from lenvm_kernels.engines.tensors import to_device
from lenvm_kernels.loading.models import chat_tokens
from lenvm_kernels.ops._common import next_power_of_2
from lenvm_kernels.values import KVCache, RaggedBatch, ValueModel

try:
    from pydantic import BaseModel, ConfigDict, ValidationError
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import JSONResponse, PlainTextResponse, Response
    from starlette.routing import Route
except ImportError as error:
    raise ImportError(f'{error.name} must be installed: pip install "lenvm-kernels[serve]"') from error

ROWS = 1024  # sequences in the cache
QUERIES = 256  # maximum number of queries per computation
COLUMNS = 64  # maximum number of candidates of a query per forward
# Input fields of each path.
FORMS = {
    "/encode": ("input_ids", "text"),
    "/tree_value": ("input_ids",),
    "/predict": ("input_ids", "text", "messages"),
}


class Query(NamedTuple):
    """A sequence, and candidates for its next token. If there are no candidates, the sequence's tokens are valued.

    ``bypass_cache`` neither reads nor fills the cache, as is always the case without candidates.
    """

    token_ids: Sequence[int]
    candidate_ids: Sequence[int] = ()
    bypass_cache: bool = False


class QueryValues(NamedTuple):
    """Value logits of a query, and its number of cached tokens."""

    values: list[float]
    cached_tokens: int


class _Piece(NamedTuple):
    """Tokens ``part`` of a query, or candidates after all of its tokens, that one forward computes."""

    part: PromptPart
    token_ids: Sequence[int]
    candidate_ids: Sequence[int]
    values: list[float] | None  # the values are appended to it


class ValueEngine:
    """Computes queries in forwards of at most ``chunk_tokens`` tokens, and caches prefixes until space is needed.

    The cache has ``max_tokens`` slots, which is also the maximum length of a sequence.
    """

    def __init__(
        self, value_model: ValueModel, *, max_tokens: int = 32_768, chunk_tokens: int = 4096, backend: str = "auto"
    ) -> None:
        if max_tokens < PAGE_SIZE:
            raise ValueError(f"max_tokens must be at least {PAGE_SIZE}, the size of a page, got {max_tokens}")
        self.value_model, self.forwards = value_model, 0
        self._pages, self._chunk_tokens, self._backend = max_tokens // PAGE_SIZE, chunk_tokens, backend
        self._cache = KVCache.of_slots(value_model, self._pages * PAGE_SIZE)
        self.flush_cache()

    def flush_cache(self) -> None:
        """Drop all cached sequences."""
        max_len = self._pages * PAGE_SIZE
        self._own = OwnSlots(ROWS, max_len, num_pages=self._pages, device=self.value_model.device)
        self._next_rows = itertools.cycle(range(ROWS))

    def check(self, query: Query) -> None:
        """Raise ValueError, naming the field, if a query cannot be computed."""
        length, max_len = len(query.token_ids) + bool(query.candidate_ids), self._pages * PAGE_SIZE
        if not 1 <= length <= max_len:
            raise ValueError(f"input_ids must have 1 to {max_len} tokens, a candidate included, got {length}")
        vocab_size = self.value_model.config.vocab_size
        for name, token_ids in (("input_ids", query.token_ids), ("candidate_ids", query.candidate_ids)):
            wrong = [token for token in token_ids if not 0 <= token < vocab_size]
            if wrong:
                raise ValueError(f"{name} must be token ids in [0, {vocab_size}), got {wrong[0]}")

    def compute(self, queries: Sequence[Query]) -> list[QueryValues]:
        """Values of checked queries, computed in groups that fit into the cache."""
        answers: list[QueryValues] = []
        while len(answers) < len(queries):
            ahead = queries[len(answers) : len(answers) + QUERIES]
            pages = itertools.accumulate(-(-len(query.token_ids) // PAGE_SIZE) for query in ahead)
            try:
                answers += self._compute([q for q, total in zip(ahead, pages, strict=True) if total <= self._pages])
            except Exception as error:
                self.flush_cache()  # pages may be marked as computed that are not
                raise RuntimeError("the value model failed") from error
        return answers

    @torch.no_grad()
    def _compute(self, queries: Sequence[Query]) -> list[QueryValues]:
        """Values of queries that fit into the cache together."""
        answers, batches, passing, room = [], list[list[_Piece]](), [], 0
        for query in queries:
            row, length, candidates = next(self._next_rows), len(query.token_ids), query.candidate_ids
            if query.bypass_cache or not candidates:
                passing.append(row)
            cached = self._own.admit(row, () if row in passing else query.token_ids)
            self._own.reserve({row: length})
            # Later queries may share the pages at once: each layer writes the keys and values of all tokens of a
            # forward before it reads any.
            self._own.computed(row, length)
            values, pieces = list[float](), list[_Piece]()
            answers.append(QueryValues(values, cached))
            for start in range(cached, length, self._chunk_tokens):
                part = PromptPart(row, start, min(start + self._chunk_tokens, length))
                pieces.append(_Piece(part, query.token_ids[start : part.end], (), None if candidates else values))
            for first in range(0, len(candidates), COLUMNS):
                pieces.append(_Piece(PromptPart(row, length, length), (), candidates[first : first + COLUMNS], values))
            for piece in pieces:
                size = len(piece.token_ids) + len(piece.candidate_ids)
                if size > room:
                    batches.append([])
                    room = self._chunk_tokens
                batches[-1].append(piece)
                room -= size
        for batch in batches:
            self._forward(batch)
        for row in passing:
            self._own.release(row)
        return answers

    def _forward(self, pieces: Sequence[_Piece]) -> None:
        """Compute the value logits of the tokens and candidates of each piece."""
        own, device, counts = self._own, self.value_model.device, [len(piece.candidate_ids) for piece in pieces]
        columns = next_power_of_2(max(counts)) if any(counts) else 0  # each width compiles a kernel
        candidates = [[*piece.candidate_ids, *[-1] * (columns - len(piece.candidate_ids))] for piece in pieces]
        token_ids = torch.tensor([t for piece in pieces for t in piece.token_ids], dtype=torch.int64)
        delta, _ = own.delta([piece.part for piece in pieces], lambda *_: to_device(token_ids, device))
        batch = RaggedBatch.build(
            self.value_model,
            to_device(torch.tensor(candidates, dtype=torch.int32).view(len(pieces), columns), device),
            to_device(torch.tensor(counts, dtype=torch.int32), device),
            own.slots.table,
            delta=delta,
            page_size=PAGE_SIZE,
            backend=self._backend,
        )
        # The head computes every row, not only candidates; its cost is small next to the layers.
        every = torch.arange(len(batch.layout.token_ids), device=device)
        layout = batch.layout._replace(candidate_rows=every[None])
        self.forwards += 1
        values = self.value_model.forward(replace(batch, layout=layout), self._cache, backend=self._backend)
        rows = iter(values[0].tolist())
        for piece in pieces:
            of_piece = list(itertools.islice(rows, len(piece.token_ids) + len(piece.candidate_ids)))
            if piece.values is not None:
                piece.values.extend(of_piece)


class _Body(BaseModel):
    """Fields of a request. The fields of type Any are ignored; clients of the fork send them."""

    model_config = ConfigDict(strict=True, extra="forbid")
    input_ids: list[list[int]] | list[int] | None = None
    candidate_ids: list[list[int]] | None = None
    text: list[str] | str | None = None
    messages: list[list[dict[str, str]]] | list[dict[str, str]] | None = None
    bypass_cache: list[bool] | bool | None = None
    rid: list[str] | str | None = None
    log_metrics: Any = None
    priority: Any = None
    routing_key: Any = None
    sampling_params: Any = None

    def queries(self, forms: Sequence[str], tokenizer: PreTrainedTokenizerBase | None) -> tuple[list[Query], bool]:
        """The queries of a request, and whether it holds one sequence instead of a list."""
        given = [name for name in ("input_ids", "text", "messages") if getattr(self, name) is not None]
        if len(given) != 1 or given[0] not in forms:
            raise ValueError(f"one of {', '.join(forms)} is required, got {' and '.join(given) or 'none'}")
        value: Any = getattr(self, given[0])
        is_single = isinstance(value, str) or not any(isinstance(part, list | str) for part in value)
        sequences = [value] if is_single else value
        if given[0] != "input_ids":
            if tokenizer is None:
                raise ValueError(f"{given[0]} needs a tokenizer in the value model's folder; send input_ids instead")
            try:
                of_text = given[0] == "text"
                sequences = [tokenizer(s)["input_ids"] if of_text else chat_tokens(tokenizer, s) for s in sequences]
            except (TemplateError, ValueError, IndexError) as error:
                raise ValueError(f"{given[0]} must fit the value model's tokenizer and template: {error}") from error
        bypass = self.bypass_cache if isinstance(self.bypass_cache, list) else [self.bypass_cache] * len(sequences)
        candidates = [()] * len(sequences) if self.candidate_ids is None else self.candidate_ids
        for name, values in (("bypass_cache", bypass), ("candidate_ids", candidates), ("rid", self.rid)):
            if isinstance(values, list) and len(values) != len(sequences):
                raise ValueError(f"{name} must have one entry per sequence ({len(sequences)}), got {len(values)}")
        return [Query(s, c, bool(b)) for s, c, b in zip(sequences, candidates, bypass, strict=True)], is_single


def create_app(
    engine: ValueEngine, *, tokenizer: PreTrainedTokenizerBase | None = None, api_key: str | None = None
) -> Starlette:
    """The ASGI application. The queries of a call are computed together.

    If ``tokenizer`` is None, requests must contain token ids. If ``api_key`` is not None, every path except ``/health``
    requires the header ``Authorization: Bearer KEY``.
    """
    lock = asyncio.Lock()

    async def body_of(request: Request) -> bytes:
        sent = request.headers.get("authorization", "")
        if api_key is not None and not hmac.compare_digest(sent.encode(), f"Bearer {api_key}".encode()):
            raise HTTPException(401, "the Authorization header must be Bearer and the server's API key")
        return await request.body()

    async def values(request: Request) -> Response:
        body, path = _Body.model_validate_json(await body_of(request)), request.url.path
        queries, is_single = body.queries(FORMS[path], tokenizer)
        if any(bool(query.candidate_ids) != (path == "/tree_value") for query in queries):
            raise ValueError("candidate_ids must have tokens for each sequence of /tree_value, and be absent elsewhere")
        for query in queries:
            engine.check(query)
        async with lock:
            answers = await asyncio.to_thread(engine.compute, queries)
        found: list[dict[str, Any]] = []
        for i, (query, answer) in enumerate(zip(queries, answers, strict=True)):
            rid = body.rid[i] if isinstance(body.rid, list) else body.rid or uuid.uuid4().hex
            tokens = len(query.token_ids) + len(query.candidate_ids)
            found.append({"meta_info": {"id": rid, "prompt_tokens": tokens, "cached_tokens": answer.cached_tokens}})
            if path == "/predict":
                length = engine.value_model.lenvm_config.lengths(torch.tensor(answer.values[-1:])).item()
                found[i]["predicted_output_length"] = round(length, 3) if math.isfinite(length) else None
            else:
                found[i]["embedding"] = [z if math.isfinite(z) else None for z in answer.values]
        return JSONResponse(found[0] if is_single or (path == "/tree_value" and len(found) == 1) else found)

    async def flush_cache(request: Request) -> Response:
        await body_of(request)
        async with lock:
            engine.flush_cache()
        return PlainTextResponse("The cache is empty.\n")

    async def refused(request: Request, error: Exception) -> Response:
        status, message = 400, str(error)
        if isinstance(error, HTTPException):
            status, message = error.status_code, error.detail
        elif isinstance(error, ValidationError):
            first = error.errors()[0]  # a field with several types has an error per type
            name = ".".join(map(str, first["loc"])) or "the body"
            message = f"{name}: {first['msg']}, got {first['input']!r:.40}"
        return JSONResponse({"error": {"message": message, "code": status}}, status_code=status)

    routes = [Route(path, values, methods=["POST"]) for path in FORMS]
    routes += [
        Route("/flush_cache", flush_cache, methods=["GET", "POST"]),
        Route("/health", lambda _: JSONResponse({"forwards": engine.forwards})),
    ]
    handlers = dict.fromkeys((ValueError, HTTPException), refused)
    return Starlette(routes=routes, exception_handlers=handlers)
