"""A value model on another host or GPU, behind ``lenvm serve``, where a value model of this process would stand.

Its "keys" are token ids. So the cache of a guided step holds the sequences themselves, whatever way their tokens come
into it, and a forward asks the server for the values of candidates after what the cache holds. The server keeps the
prefixes that it has computed; nothing is lost here when it restarts.
"""

from __future__ import annotations

import http.client
import json
import math
import time
import urllib.parse
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch

from lenvm_kernels.value_model import KVCache, LenVMConfig, RaggedBatch, ValueModel, ValueModelConfig

_PIECE_BYTES = 1 << 16
# What a broken connection raises, a refused one, a time-out, and an answer that is none.
_FAULTS = (OSError, http.client.HTTPException, ValueError)


class RemoteValueModel(ValueModel):
    """Stands where :class:`ValueModel` does in :class:`LenVMLogitsProcessor`, and asks a server for the values.

    A call that fails, by a refusal, a time-out or a wrong answer, leaves its requests without values: these steps go on
    unguided and are counted in :attr:`LenVMLogitsProcessor.faults`. Candidates outside the value model's vocabulary
    cost the request its guidance of the step, too, and are not asked for.

    Args:
        url: of the server, such as ``http://10.0.0.7:30010``.
        api_key: of the server, if it wants one.
        timeout: seconds that a call may take.
        retry_after: seconds after a failure in which the server is not asked again: a server that hangs would cost
            every step the time-out.
        max_body_bytes: of a call; what is more goes in several, one after the other.
        device: where the guided step runs, which is where logits are moved.

    Attributes:
        failed_calls: calls that failed.
        skipped_calls: calls that were not made, shortly after one that failed.

    Raises:
        ValueError: a URL that is none, or a bad number.
        ConnectionError: the server does not say what its model is.

    Example:
        >>> value_model = RemoteValueModel("http://10.0.0.7:30010")
        >>> processor = LenVMLogitsProcessor(model, value_model, {"target_length": 60}, mask, max_new_tokens=200)
    """

    runs_in_graphs = False  # they cannot ask a server

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout: float = 2.0,
        retry_after: float = 1.0,
        max_body_bytes: int = 1_000_000,
        device: torch.device | str = "cpu",
    ) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or parts.hostname is None:
            raise ValueError(f"url must be that of a server, such as http://127.0.0.1:30010, got {url!r}")
        if not 0 < timeout < math.inf:
            raise ValueError(f"timeout must be a finite number of seconds > 0, got {timeout!r}")
        if not 0 <= retry_after < math.inf:
            raise ValueError(f"retry_after must be a finite number of seconds >= 0, got {retry_after!r}")
        if max_body_bytes < 1:
            raise ValueError(f"max_body_bytes must be at least 1, got {max_body_bytes}")
        self._timeout, self._retry_after, self._max_body_bytes = timeout, retry_after, max_body_bytes
        connection = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connect: Callable[[], http.client.HTTPConnection] = lambda: connection(parts.netloc, timeout=timeout)
        self._connection: http.client.HTTPConnection | None = None
        self._path = parts.path.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._silent_until = -math.inf
        self.failed_calls = self.skipped_calls = 0
        try:
            info = json.loads(self._exchange("GET", "/model_info", None))
            vocab_size, gamma = int(info["vocab_size"]), info["gamma"]
        except (*_FAULTS, KeyError, TypeError) as error:
            raise ConnectionError(f"url must be that of a lenvm serve that is up, {url}: {_named(error)}") from error
        one: dict[str, Any] = dict.fromkeys(
            ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"), 1
        )
        self.config = ValueModelConfig(**one, vocab_size=vocab_size, rms_norm_eps=1.0, rope_inv_freq=())
        self.lenvm_config = LenVMConfig(gamma=gamma)
        self.dtype = torch.float32  # exact for ids below 2**24
        self.device = torch.empty(0, device=device).device

    def sizes_of_every_tile(self, most: int) -> list[int]:
        """None: nothing is compiled here."""
        return []

    @torch.no_grad()
    def forward(self, batch: RaggedBatch, cache: KVCache, *, backend: str = "auto") -> torch.Tensor:
        """Value logits of all candidates as :meth:`ValueModel.forward` gives them, NaN where the server gave none.

        Raises:
            ValueError: the batch has drafts.
        """
        layout = batch.layout
        if layout.parents is not None:
            raise ValueError("max_drafts must be 0 with a remote value model, it does not value trees")
        ids = layout.token_ids.to(self.dtype)
        kept = layout.slots >= 0
        cache.keys[0, layout.slots[kept], 0, 0] = ids[kept]
        return self._answered(batch, cache)

    def _answered(self, batch: RaggedBatch, cache: KVCache) -> torch.Tensor:
        """The value logits that the server gives, NaN where it gave none."""
        layout = batch.layout
        rows = layout.candidate_rows
        z = torch.where(rows >= 0, math.nan, 0.0).to(torch.float32)
        asked = (batch.candidate_lens > 0).nonzero()[:, 0]
        if not len(asked):
            return z
        candidates = layout.token_ids[rows[asked].clamp(min=0)].tolist()
        counts, places = batch.candidate_lens[asked].tolist(), asked.tolist()
        lens = batch.cached_lens + layout.q_offsets.diff() - batch.candidate_lens
        queries = [
            (place, tokens[:length], of_place[:count])
            for place, tokens, length, of_place, count in zip(
                places,
                self._sequences(batch, cache, asked, lens),
                lens[asked].tolist(),
                candidates,
                counts,
                strict=True,
            )
            if max(of_place[:count]) < self.config.vocab_size
            and max(tokens[:length], default=0) < self.config.vocab_size
        ]
        for place, values in self._ask(queries):
            z[place, : len(values)] = torch.tensor(values, dtype=z.dtype)
        return z

    def _sequences(
        self, batch: RaggedBatch, cache: KVCache, asked: torch.Tensor, lens: torch.Tensor
    ) -> list[list[int]]:
        """The tokens of the requests, of which those beyond their lengths mean nothing."""
        width = int(lens[asked].max())
        positions = torch.arange(width, device=self.device)
        pages = batch.slot_table[batch.table_rows[asked].long()][:, positions // batch.page_size].long()
        slots = pages * batch.page_size + positions % batch.page_size
        of_request = positions < lens[asked, None]
        return cache.keys[0, torch.where(of_request, slots, 0), 0, 0].long().tolist()

    def _ask(self, queries: Sequence[tuple[int, Sequence[int], Sequence[int]]]) -> Iterator[tuple[int, list[float]]]:
        """The places that have got values, and these."""
        for group in self._groups(queries):
            if time.monotonic() < self._silent_until:
                self.skipped_calls += 1
                continue
            try:
                values = self._values([tokens for _, tokens, _ in group], [candidates for *_, candidates in group])
            except _FAULTS as error:
                self.failed_calls += 1
                self._silent_until = time.monotonic() + self._retry_after
                warnings.warn(f"the value server failed, steps go on unguided: {_named(error)}", stacklevel=2)
                continue
            yield from zip((place for place, _, _ in group), values, strict=True)

    def _groups(
        self, queries: Sequence[tuple[int, Sequence[int], Sequence[int]]]
    ) -> Iterator[list[tuple[int, Sequence[int], Sequence[int]]]]:
        """Queries that fit into one call together; one that does not fit alone is the server's to refuse."""
        group: list[tuple[int, Sequence[int], Sequence[int]]] = []
        group_bytes = 0
        for query in queries:
            query_bytes = 64 + len(json.dumps(query[1:]))
            if group and group_bytes + query_bytes > self._max_body_bytes:
                yield group
                group, group_bytes = [], 0
            group.append(query)
            group_bytes += query_bytes
        if group:
            yield group

    def _values(self, sequences: list[Sequence[int]], candidates: list[Sequence[int]]) -> list[list[float]]:
        body = json.dumps({"input_ids": sequences, "candidate_ids": candidates}, separators=(",", ":")).encode()
        answer = json.loads(self._exchange("POST", "/candidate_value", body))
        values = answer.get("values") if isinstance(answer, dict) else None
        if not isinstance(values, list) or len(values) != len(candidates):
            raise ValueError(f"it answered {str(answer)[:80]} to {len(candidates)} queries")
        for of_query, wanted in zip(values, candidates, strict=True):
            if not isinstance(of_query, list) or len(of_query) != len(wanted):
                raise ValueError(f"it answered {str(of_query)[:80]} to {len(wanted)} candidates")
        return [[math.nan if value is None else float(value) for value in of_query] for of_query in values]

    def _exchange(self, method: str, path: str, body: bytes | None) -> bytes:
        """One call; a connection that the server has closed since the last is made anew."""
        deadline = time.monotonic() + self._timeout
        was_open = self._connection is not None
        try:
            return self._exchange_once(method, path, body, deadline)
        except (ConnectionError, http.client.BadStatusLine):
            if not was_open:
                raise
            return self._exchange_once(method, path, body, deadline)

    def _exchange_once(self, method: str, path: str, body: bytes | None, deadline: float) -> bytes:
        connection = self._connection or self._connect()
        self._connection = None  # it is kept only if all goes well
        try:
            connection.request(method, self._path + path, body, self._headers)
            received = bytearray()
            with connection.getresponse() as response:
                while piece := response.read1(_PIECE_BYTES):
                    received += piece
                    if time.monotonic() > deadline:
                        raise TimeoutError(f"it takes more than {self._timeout} seconds")
            if response.status != 200:
                raise ValueError(f"status {response.status}: {received[:200].decode(errors='replace')}")
        except BaseException:
            with suppress(OSError):
                connection.close()
            raise
        self._connection = connection
        return bytes(received)


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
