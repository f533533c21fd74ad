"""The HTTP server of a value model: the requests and answers of the LenVM authors' fork of SGLang, and their errors."""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import signal
import socket
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from lenvm_kernels.serving.engine import Answer, Query, ValueEngine

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, PlainTextResponse, Response
    from starlette.routing import Route
except ImportError as error:
    raise ImportError(f'{error.name} must be installed: pip install "lenvm-kernels[serve]"') from error

MAX_BODY_BYTES = 1_000_000
_STOP_SECONDS = 60  # for the calls that are running: a client may never finish what it sends
# Of the fork's requests: what has a meaning here, what has none and is passed over, and what asks for the impossible.
_IGNORED = ("log_metrics", "priority", "routing_key", "sampling_params")
_IMAGES = ("image_data", "video_data", "audio_data")
_SEQUENCES = ("input_ids", "text")
_OF_CANDIDATES = ("input_ids", "candidate_ids", "bypass_cache", "rid")

Handler = Callable[[Request], Awaitable[Response]]


class _Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def create_app(
    engine: ValueEngine,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    api_key: str | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
) -> Starlette:
    """The ASGI application. When it is shut down it closes the engine, which first answers what waits.

    Args:
        engine: that computes.
        tokenizer: of ``text`` in requests; None: they have to be token ids.
        api_key: that every request but ``/health`` has to carry, as ``Authorization: Bearer KEY``; None: none has to.
        max_body_bytes: of a request.
    """

    async def encode(request: Request) -> Response:
        queries, ids, is_single = _sequences(await body_of(request), tokenizer)
        answers = _described(queries, ids, await answers_of(request, queries))
        return JSONResponse(answers[0] if is_single else answers)

    async def tree_value(request: Request) -> Response:
        queries, ids = _candidates(await body_of(request))
        answers = _described(queries, ids, await answers_of(request, queries))
        return JSONResponse(answers[0] if len(answers) == 1 else answers)

    async def token_value(request: Request) -> Response:
        queries, ids, is_single = _sequences(await body_of(request), tokenizer)
        return _as_values(_described(queries, ids, await answers_of(request, queries)), is_single)

    async def candidate_value(request: Request) -> Response:
        queries, ids = _candidates(await body_of(request))
        return _as_values(_described(queries, ids, await answers_of(request, queries)), len(queries) == 1)

    async def predict(request: Request) -> Response:
        queries, ids, is_single = _sequences(await body_of(request), tokenizer, (*_SEQUENCES, "messages"))
        answers = await answers_of(request, queries)
        lengths = engine.value_model.lenvm_config.lengths(torch.tensor([answer.values[-1] for answer in answers]))
        found = [
            {"predicted_output_length": round(x, 3) if math.isfinite(x) else None, "meta_info": described["meta_info"]}
            for x, described in zip(lengths.tolist(), _described(queries, ids, answers), strict=True)
        ]
        return JSONResponse(found[0] if is_single else found)

    async def flush_cache(request: Request) -> Response:
        engine.flush_cache()
        return PlainTextResponse("The next query finds the cache empty.\n")

    async def model_info(request: Request) -> Response:
        model = engine.value_model
        gamma = model.lenvm_config.gamma
        return JSONResponse({"vocab_size": model.config.vocab_size, "gamma": gamma, "max_len": engine.max_len})

    async def health(request: Request) -> Response:
        return JSONResponse(asdict(engine.counts))

    async def body_of(request: Request) -> dict[str, Any]:
        body, size = bytearray(), 0
        async for part in request.stream():  # to its end: who is still writing reads no answer
            size += len(part)
            if size <= max_body_bytes:
                body += part
        if size > max_body_bytes:
            raise _Refused(413, f"the body must be at most {max_body_bytes} bytes, got {size}")
        try:
            given = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the body must be JSON: {error}") from error
        if not isinstance(given, dict):
            raise ValueError(f"the body must be a JSON object, got {_shown(given)}")
        return given

    async def answers_of(request: Request, queries: Sequence[Query]) -> list[Answer]:
        try:
            futures = engine.submit(queries)
        except RuntimeError as error:
            raise _Refused(503, str(error)) from error
        answers = asyncio.gather(*map(asyncio.wrap_future, futures))
        gone = asyncio.ensure_future(request.receive())  # the body was read: all that can come is that the client left
        try:
            await asyncio.wait((answers, gone), return_when=asyncio.FIRST_COMPLETED)
            if not answers.done():
                raise ClientDisconnect
            return answers.result()
        finally:
            gone.cancel()
            answers.cancel()  # what waits for a client that left is not computed

    def answered(handler: Handler, *, needs_key: bool = True) -> Handler:
        """The handler, with its errors as answers."""

        async def answer(request: Request) -> Response:
            try:
                if needs_key and api_key is not None:
                    given = request.headers.get("authorization", "")
                    if not hmac.compare_digest(given.encode(), f"Bearer {api_key}".encode()):
                        raise _Refused(401, "the header Authorization must be Bearer and the server's API key")
                return await handler(request)
            except ClientDisconnect:
                return Response(status_code=400)  # to nobody
            except _Refused as error:
                return _error(error.status, str(error))
            except ValueError as error:
                return _error(400, str(error))
            except RuntimeError as error:  # the engine goes on
                print(f"lenvm serve: {error}", file=sys.stderr, flush=True)
                return _error(500, "the value model failed, the server's log says how")

        return answer

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(engine.close)

    values = {"encode": encode, "tree_value": tree_value, "token_value": token_value}
    values |= {"candidate_value": candidate_value, "predict": predict}
    routes = [Route(f"/{name}", answered(handler), methods=["POST", "PUT"]) for name, handler in values.items()]
    routes += [
        Route("/flush_cache", answered(flush_cache), methods=["GET", "POST"]),
        Route("/model_info", answered(model_info)),
        Route("/health", answered(health, needs_key=False)),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


def serve(app: Starlette, listener: socket.socket) -> None:
    """Answer at a listening socket until SIGTERM or SIGINT, then finish the calls that are running."""
    # What the server does once it has finished is to raise the signal again, for whoever handled it before.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=_STOP_SECONDS)
    uvicorn.Server(config).run(sockets=[listener])


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there; port 0 is any that is free.

    Raises:
        OSError: naming the address.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise OSError(f"--host and --port must be an address that is free, {host}:{port}: {error.strerror}") from error


def _sequences(
    given: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None, forms: Sequence[str] = _SEQUENCES
) -> tuple[list[Query], list[str], bool]:
    """The queries of ``/encode``, ``/token_value`` and ``/predict``, their ids, and whether it is one alone."""
    _check_names(given, (*forms, "bypass_cache", "rid"))
    came = [name for name in forms if given.get(name) is not None]
    if len(came) != 1:
        raise ValueError(f"one of {', '.join(forms)} must be given, got {' and '.join(came) or 'none'}")
    form, content = came[0], given[came[0]]
    is_single = isinstance(content, str if form == "text" else list) and not any(isinstance(x, list) for x in content)
    several = [content] if is_single else content
    if form == "input_ids":
        sequences = _token_lists(form, several)
    elif form == "text" and not (isinstance(several, list) and several and all(isinstance(t, str) for t in several)):
        raise ValueError(f"text must be a text or a list of some, got {_shown(content)}")
    elif tokenizer is None:
        raise ValueError(f"{form} needs a tokenizer beside the value model's weights, there is none: send input_ids")
    elif form == "text":
        sequences = [tokenizer(t)["input_ids"] for t in several]
    else:
        sequences = _chats(several, tokenizer)
    bypass = _of_each("bypass_cache", given.get("bypass_cache"), False, bool, len(sequences))
    queries = [Query(tokens, bypass_cache=b) for tokens, b in zip(sequences, bypass, strict=True)]
    return queries, _ids(given, len(queries)), is_single


def _chats(chats: Any, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """The tokens of conversations up to where the next answer begins, by the tokenizer's chat template."""

    def is_message(m: Any) -> bool:
        return isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)

    for chat in chats if isinstance(chats, list) else [None]:
        if not isinstance(chat, list) or not chat or not all(map(is_message, chat)):
            expected = "conversations, lists of objects with the texts role and content"
            raise ValueError(f"messages must be one or several {expected}, got {_shown(chats)}")
    template: Any = tokenizer.apply_chat_template
    try:
        return [template(chat, add_generation_prompt=True, return_dict=True)["input_ids"] for chat in chats]
    except (TemplateError, ValueError) as error:  # there is none, or it refuses them
        raise ValueError(f"messages must fit a chat template beside the value model's weights: {error}") from error


def _candidates(given: dict[str, Any]) -> tuple[list[Query], list[str]]:
    """The queries of ``/tree_value`` and ``/candidate_value``, and their ids."""
    _check_names(given, _OF_CANDIDATES)
    sequences = _token_lists("input_ids", given.get("input_ids"))
    candidates = _token_lists("candidate_ids", given.get("candidate_ids"))
    if len(sequences) != len(candidates):
        raise ValueError(
            f"candidate_ids must be a list for each of the {len(sequences)} in input_ids, got {len(candidates)}"
        )
    for i, tokens in enumerate(candidates):
        if not tokens:
            raise ValueError(f"candidate_ids[{i}] must have at least one token, got none")
    bypass = _of_each("bypass_cache", given.get("bypass_cache"), False, bool, len(sequences))
    queries = [Query(*parts) for parts in zip(sequences, candidates, bypass, strict=True)]
    return queries, _ids(given, len(queries))


def _check_names(given: dict[str, Any], accepted: Sequence[str]) -> None:
    for name, value in given.items():
        if name in _IMAGES and value is not None:
            raise ValueError(f"{name} must be absent: the value model reads tokens only")
        if name not in (*accepted, *_IGNORED, *_IMAGES):
            raise ValueError(f"{name} must be one of {', '.join(accepted)}")


def _token_lists(name: str, given: Any) -> list[list[int]]:
    if not isinstance(given, list) or not given:
        raise ValueError(f"{name} must be a list of lists of token ids, got {_shown(given)}")
    for i, tokens in enumerate(given):
        if not isinstance(tokens, list):
            raise ValueError(f"{name}[{i}] must be a list of token ids, got {_shown(tokens)}")
        for token in tokens:
            if type(token) is not int:  # JSON's true is an int, too
                raise ValueError(f"{name}[{i}] must be a list of token ids, got {_shown(token)} in it")
    return given


def _of_each(name: str, given: Any, default: Any, kind: type, count: int) -> list[Any]:
    """An optional field that is one for all queries, or a list with one for each."""
    if given is None:
        return [default] * count
    values = given if isinstance(given, list) else [given] * count
    if len(values) != count or not all(type(value) is kind for value in values):
        what = {bool: "true or false", str: "a text"}[kind]
        raise ValueError(f"{name} must be {what}, or a list of {count}, got {_shown(given)}")
    return values


def _ids(given: dict[str, Any], count: int) -> list[str]:
    ids = _of_each("rid", given.get("rid"), None, str, count)
    return [uuid.uuid4().hex if rid is None else rid for rid in ids]


def _described(queries: Sequence[Query], ids: Sequence[str], answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """The answers as ``/encode`` and ``/tree_value`` give them."""
    return [
        {
            # JSON has no number for a value that is not finite.
            "embedding": [value if math.isfinite(value) else None for value in answer.values],
            "meta_info": {
                "id": rid,
                "prompt_tokens": len(query.token_ids) + len(query.candidate_ids),
                "cached_tokens": answer.cached_tokens,
            },
        }
        for query, rid, answer in zip(queries, ids, answers, strict=True)
    ]


def _as_values(answers: list[dict[str, Any]], is_single: bool) -> Response:
    """The answers as ``/token_value`` and ``/candidate_value`` give them."""
    infos = [answer["meta_info"] for answer in answers]
    values = [answer["embedding"] for answer in answers]
    return JSONResponse({"values": values, "meta_info": infos[0] if is_single else infos})


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "code": status}}, status_code=status)


def _shown(value: Any) -> str:
    """What came, in a few characters."""
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
