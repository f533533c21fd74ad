"""Prometheus metrics of guided steps, and the time that they take on a device. Importable without an engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lenvm_kernels.types import Status

STATUS_NAMES = {status: status.name.lower() for status in Status}
BROKEN = "broken"


class Metrics:
    """Prometheus metrics of one scheduler process, on the server's ``/metrics``.

    Make it after the engine has set ``PROMETHEUS_MULTIPROC_DIR``, which prometheus_client reads when it is imported.

    Args:
        **labels: of every metric.
    """

    def __init__(self, **labels: Any) -> None:
        from prometheus_client import Counter, Gauge

        def labelled(metric: type, name: str, text: str, **options: Any) -> Any:
            return metric(f"lenvm:{name}", text, list(labels), **options).labels(**labels)

        self.guided_steps = labelled(Counter, "guided_steps", "Steps in which at least one request has guidance.")
        self.fallbacks = labelled(Counter, "fallbacks", "Steps whose guidance failed; their requests lost it.")
        self.without_room = labelled(
            Counter, "without_room", "Requests that lost their guidance because the value model's cache was full."
        )
        self.lost_mass = labelled(
            Counter, "lost_mass", "Probability that the limit on candidates cut off, summed over guided rows."
        )
        self.value_model_milliseconds = labelled(
            Counter,
            "value_model_milliseconds",
            "Time of guided steps and of prompts in the value model.",
        )
        rows = Counter("lenvm:rows", "Rows of guided steps, by what became of them.", [*labels, "status"])
        self.rows = {name: rows.labels(**labels, status=name) for name in (*STATUS_NAMES.values(), BROKEN)}
        self.verifications, self.verified_tokens = (
            {guided: counter.labels(**labels, guided=guided) for guided in ("yes", "no")}
            for counter in (
                Counter("lenvm:verifications", "Verifications of a request's drafts.", [*labels, "guided"]),
                Counter("lenvm:verified_tokens", "Tokens that these gave.", [*labels, "guided"]),
            )
        )
        self.cache_bytes = labelled(
            Gauge, "cache_bytes", "Memory of the value model's keys and values.", multiprocess_mode="mostrecent"
        )


class Stopwatch:
    """Times work on a device without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._spans: list[tuple[Any, Any]] = []

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def running(self) -> Iterator[None]:
        """Times what is launched inside."""
        start = self._now()
        yield
        self._spans.append((start, self._now()))

    def take(self) -> Callable[[], float]:
        """Forget the work so far; what is returned gives its milliseconds, once it is done."""
        spans, self._spans = self._spans, []
        if self._on_gpu:
            return lambda: sum(start.elapsed_time(end) for start, end in spans)
        return lambda: 1e3 * sum(end - start for start, end in spans)
