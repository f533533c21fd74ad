"""Answers from a running server, SGLang's or vLLM's, by the standard library alone."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SECONDS = 600  # that an answer may take
# Servers are named by their own address: a proxy of the environment is for other hosts.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Unreachable(ValueError):
    """A server did not answer, or failed by itself: asked again, it may answer."""


@dataclass(frozen=True)
class Server:
    """A server and how to ask it.

    Attributes:
        flag: what errors call it.
        url: without a slash at the end.
        engine: ``"sglang"`` or ``"vllm"``.
    """

    flag: str
    url: str
    engine: str

    @classmethod
    def find(cls, flag: str, url: str) -> Server:
        """Ask a server which engine it is: only SGLang answers ``/get_model_info``, only vLLM ``/version``.

        Raises:
            ValueError: it is neither, or there is none.
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
        """Answer one prompt, as :func:`request_of` asks for it.

        Returns:
            The tokens as the server gave them, whether it says that the answer ended by itself, and how long SGLang
            predicted it to be, if ``return_values`` asks for that and it did.

        Raises:
            Unreachable: the server does not answer, or with a status from 500 on.
            ValueError: the server refuses or answers in another form; the message has its words.
        """
        found = self._post(path, body)
        if self.engine == "sglang":
            facts = found.get("meta_info", {})
            ids, reason = found.get("output_ids"), (facts.get("finish_reason") or {}).get("type")
            predicted = (facts.get("predicted_output_length") or [None])[0]
        else:
            choice = (found.get("choices") or [{}])[0]
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
                found = json.loads(response.read())
        except urllib.error.HTTPError as error:
            words = error.read().decode(errors="replace")[:500]
            kind = Unreachable if error.code >= 500 else ValueError
            raise kind(f"{self.flag}: {self.url}{path} answered with status {error.code}: {words}") from error
        except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
            raise Unreachable(f"{self.flag}: {self.url}{path} failed: {error}") from error
        if not isinstance(found, dict):
            raise ValueError(f"{self.flag}: {self.url}{path} must answer with an object, got {type(found).__name__}")
        return found


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
        prompt: its tokens.
        guidance: the request's parameters, guided or not; None: there are none.
        max_new_tokens: the limit.
        sampling: ``temperature``, ``top_k`` (0: all), ``top_p`` and ``min_p``.
        seed: of the request, below 2**31.
    """
    if engine == "sglang":
        params: dict[str, Any] = {**sampling, "max_new_tokens": max_new_tokens, "sampling_seed": seed}
        params["top_k"] = sampling["top_k"] or -1  # as it spells all
        if guidance is not None:
            params["custom_params"] = dict(guidance)
        return "/generate", {"input_ids": list(prompt), "sampling_params": params}
    body: dict[str, Any] = {**sampling, "prompt": list(prompt), "max_tokens": max_new_tokens, "seed": seed}
    body["return_token_ids"] = True
    if guidance is not None:
        body["vllm_xargs"] = {name: _as_accepted(value) for name, value in guidance.items()}
    return "/v1/completions", body


def _as_accepted(value: Any) -> Any:
    """Objects and lists of lists are not among the values that vLLM accepts, their text is."""
    is_nested = isinstance(value, list) and any(isinstance(x, list) for x in value)
    return json.dumps(value) if is_nested or isinstance(value, dict) else value
