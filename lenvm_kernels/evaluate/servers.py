"""Answers from a running SGLang or vLLM server, over the standard library's HTTP client."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SECONDS = 600  # timeout of an answer
# The user names a server by its own address, so proxies of the environment are ignored.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Unreachable(ValueError):
    """A server did not answer or failed internally; a retry may succeed."""


@dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        flag: its name in error messages.
        url: without a trailing slash.
        engine: ``"sglang"`` or ``"vllm"``.
    """

    flag: str
    url: str
    engine: str

    @classmethod
    def find(cls, flag: str, url: str) -> Server:
        """Detect the engine of a server: only SGLang has ``/get_model_info``, only vLLM ``/version``.

        Raises:
            ValueError: it has neither, or there is no server.
        """
        url = url.rstrip("/")
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"{flag} must begin with http:// or https://, got {url!r}")
        for engine, path in (("sglang", "/get_model_info"), ("vllm", "/version")):
            try:
                with _OPENER.open(url + path, timeout=60):
                    return cls(flag, url, engine)
            except urllib.error.HTTPError:
                continue
            except OSError as error:
                raise ValueError(f"{flag} must be a running server, {url} gives: {error}") from error
        raise ValueError(f"{flag} must be SGLang's or vLLM's server, {url} knows neither /get_model_info nor /version")

    def answer(self, path: str, body: Mapping[str, Any]) -> tuple[list[int], bool, float | None]:
        """Answer one prompt.

        Args:
            path, body: see :func:`request_of`.

        Returns:
            The tokens as returned by the server, whether it reports that the answer ended by itself, and the predicted
            length, which SGLang returns for requests with ``return_values``.

        Raises:
            Unreachable: the server does not answer, or with a status of at least 500.
            ValueError: the server rejects the request, or its response has another form; the message quotes it.
        """
        response = self._post(path, body)
        if self.engine == "sglang":
            meta = response.get("meta_info", {})
            ids, reason = response.get("output_ids"), (meta.get("finish_reason") or {}).get("type")
            predicted = (meta.get("predicted_output_length") or [None])[0]
        else:
            choice = (response.get("choices") or [{}])[0]
            ids, reason, predicted = choice.get("token_ids"), choice.get("finish_reason"), None
        if not isinstance(ids, list) or reason not in ("stop", "length"):
            raise ValueError(
                f"{self.flag} must answer with token ids and with stop or length for a reason to end, {self.url} gave "
                f"{type(ids).__name__} and {reason!r}"
            )
        return ids, reason == "stop", predicted

    def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with _OPENER.open(request, timeout=SECONDS) as response:
                content = json.loads(response.read())
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")[:500]
            kind = Unreachable if error.code >= 500 else ValueError
            raise kind(f"{self.flag}: {self.url}{path} answered with status {error.code}: {text}") from error
        except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
            raise Unreachable(f"{self.flag}: {self.url}{path} failed: {error}") from error
        if not isinstance(content, dict):
            raise ValueError(f"{self.flag}: {self.url}{path} must answer with an object, got {type(content).__name__}")
        return content


def request_of(
    engine: str,
    prompt: Sequence[int],
    guidance: Mapping[str, Any] | None,
    *,
    max_new_tokens: int,
    sampling: Mapping[str, float],
    seed: int,
) -> tuple[str, dict[str, Any]]:
    """The path and the body of a request.

    Args:
        engine: ``"sglang"`` or ``"vllm"``.
        prompt: tokens.
        guidance: parameters of the request. If None, it has none.
        max_new_tokens: limit of the answer.
        sampling: ``temperature``, ``top_k`` (0: all), ``top_p`` and ``min_p``.
        seed: seed of the request, below 2**31.
    """
    if engine == "sglang":
        params: dict[str, Any] = {**sampling, "max_new_tokens": max_new_tokens, "sampling_seed": seed}
        params["top_k"] = sampling["top_k"] or -1  # SGLang's value for all tokens
        if guidance is not None:
            params["custom_params"] = dict(guidance)
        return "/generate", {"input_ids": list(prompt), "sampling_params": params}
    body: dict[str, Any] = {**sampling, "prompt": list(prompt), "max_tokens": max_new_tokens, "seed": seed}
    body["return_token_ids"] = True
    if guidance is not None:
        body["vllm_xargs"] = {name: _vllm_value(value) for name, value in guidance.items()}
    return "/v1/completions", body


def _vllm_value(value: Any) -> Any:
    """vLLM rejects objects and nested lists, but accepts them as JSON text."""
    is_nested = isinstance(value, list) and any(isinstance(x, list) for x in value)
    return json.dumps(value) if is_nested or isinstance(value, dict) else value
