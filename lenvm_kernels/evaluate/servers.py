"""Answers from a running SGLang or vLLM server, with the standard library's HTTP client."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SECONDS = 600  # timeout of an answer
# The user names the server's own address, so the environment's proxies are ignored.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
# Tokens of an answer with the end-of-sequence token, whether it ended by itself, and its predicted length.
Generated = tuple[list[int], bool, float | None]


@dataclass(frozen=True)
class Server:
    """A running server: the flag that names it, its address without a slash, and ``"sglang"`` or ``"vllm"``."""

    flag: str
    url: str
    engine: str

    @classmethod
    def find(cls, flag: str, url: str | None) -> Server | None:
        """Detect the engine of a server: only SGLang has ``/get_model_info``, only vLLM ``/version``.

        Returns None if ``url`` is None, and raises ValueError if the server has neither path or does not answer.
        """
        if url is None:
            return None
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
        raise ValueError(f"{flag} must be SGLang's or vLLM's server, {url} has neither /get_model_info nor /version")

    def answer(
        self,
        prompt: Sequence[int],
        guidance: Mapping[str, Any] | None,
        *,
        max_new_tokens: int,
        sampling: Mapping[str, float],
        seed: int,
        eos: Sequence[int],
    ) -> Generated:
        """Answer one prompt, given as tokens. Only SGLang predicts the length, for requests with ``return_values``.

        Args:
            guidance: parameters of the request. If None, it is unguided.
            sampling: ``temperature``, ``top_k`` (0: all), ``top_p`` and ``min_p``.
            seed: below 2**31.
            eos: end-of-sequence tokens, see :func:`with_end`.

        Raises:
            ValueError: no answer, a rejected request, or an unexpected response; the message quotes it.
        """
        if self.engine == "sglang":
            params: dict[str, Any] = {**sampling, "max_new_tokens": max_new_tokens, "sampling_seed": seed}
            params["top_k"] = sampling["top_k"] or -1  # -1 means all tokens
            if guidance is not None:
                params["custom_params"] = dict(guidance)
            response = self._post("/generate", {"input_ids": list(prompt), "sampling_params": params})
            meta = response.get("meta_info", {})
            ids, reason = response.get("output_ids"), (meta.get("finish_reason") or {}).get("type")
            predicted = (meta.get("predicted_output_length") or [None])[0]
        else:
            body: dict[str, Any] = {**sampling, "prompt": list(prompt), "max_tokens": max_new_tokens, "seed": seed}
            if guidance is not None:
                body["vllm_xargs"] = {name: _vllm_value(value) for name, value in guidance.items()}
            response = self._post("/v1/completions", body | {"return_token_ids": True})
            choice = (response.get("choices") or [{}])[0]
            ids, reason, predicted = choice.get("token_ids"), choice.get("finish_reason"), None
        if not isinstance(ids, list) or reason not in ("stop", "length"):
            raise ValueError(
                f"{self.flag} must answer with token ids and with finish reason stop or length, {self.url} gave "
                f"{type(ids).__name__} and {reason!r}"
            )
        return *with_end(ids, reason == "stop", eos), predicted

    def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        url = self.url + path
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with _OPENER.open(request, timeout=SECONDS) as response:
                content = json.loads(response.read())
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")[:500]
            raise ValueError(f"{self.flag}: {url} answered with status {error.code}: {text}") from error
        except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
            raise ValueError(f"{self.flag}: {url} failed: {error}") from error
        if not isinstance(content, dict):
            raise ValueError(f"{self.flag}: {url} must answer with an object, got {type(content).__name__}")
        return content


def with_end(ids: Sequence[int], stopped: bool, eos: Sequence[int]) -> tuple[list[int], bool]:
    """Cut an answer after its end-of-sequence token; returns the tokens, and whether the answer ended by itself.

    Some engines do not return that token; the first of ``eos`` is then added. ``stopped`` is whether the engine reports
    that the answer ended by itself.
    """
    ends = [i for i, token in enumerate(ids) if token in eos]
    if ends:
        return list(ids[: ends[0] + 1]), True
    return ([*ids, eos[0]], True) if stopped else (list(ids), False)


def _vllm_value(value: Any) -> Any:
    """Encode objects and nested lists as JSON text, because vLLM rejects them."""
    is_nested = isinstance(value, list) and any(isinstance(x, list) for x in value)
    return json.dumps(value) if is_nested or isinstance(value, dict) else value
