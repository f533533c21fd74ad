"""Sampling the answers that a value model is trained on, in process or by a server.

Which answer has which seed, target and place in a batch follows from the plan alone: a run that goes on where another
one stopped makes the answers that the other would have made.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from typing import Any

import torch

from lenvm_kernels.evaluate.plan import seed_from
from lenvm_kernels.evaluate.run import with_end
from lenvm_kernels.evaluate.servers import Server, Unreachable, request_of
from lenvm_kernels.loading.generation import AnswerBar, sample
from lenvm_kernels.loading.models import Models
from lenvm_kernels.loading.prompts import Prompt
from lenvm_kernels.training.answers import Answer, AnswerStore, Key
from lenvm_kernels.training.decode import decode

# Seconds between the attempts at a server that does not answer.
PAUSES = (1, 2, 4, 8, 15, 30, 60)


@dataclass(frozen=True)
class Plan:
    """All that decides which answers are made.

    Attributes:
        base: as it was named.
        value: what guides, as it was named; None: nothing does.
        prompts: the users' messages, each with a split.
        samples: answers to each.
        max_new_tokens: at which an answer is cut.
        targets: the least and the most tokens that guidance aims at. Targets are drawn between them, evenly by their
            logarithm, and guidance ends before the target, anywhere evenly. None: nothing guides.
        sampling: ``temperature``, ``top_k``, ``top_p`` and ``min_p``.
        seed: of everything that is drawn.
        rows: prompts of a batch in process.
        dtype: of the models in process.
        engine: of the server; None: in process.
    """

    base: str
    value: str | None
    prompts: list[Prompt]
    samples: int
    max_new_tokens: int
    targets: tuple[int, int] | None
    sampling: dict[str, Any]
    seed: int
    rows: int
    dtype: str
    engine: str | None

    def described(self, ids: list[list[int]]) -> dict[str, Any]:
        """The plan as it is kept, with the tokens of each prompt."""
        prompts = [{**asdict(prompt), "ids": of_prompt} for prompt, of_prompt in zip(self.prompts, ids, strict=True)]
        return {**asdict(self), "prompts": prompts}

    def requests(self) -> list[Request]:
        """In the order in which they are made: each prompt's first answers before the second ones; guided ones by the
        tokens that are guided, because guidance of a batch takes as long as that of its longest row."""
        found = [Request(self, prompt, i) for i in range(self.samples) for prompt in range(len(self.prompts))]
        return found if self.targets is None else sorted(found, key=lambda request: (request.guided, request.key))


@dataclass(frozen=True)
class Request:
    """One answer to make."""

    plan: Plan
    prompt: int
    number: int

    @property
    def key(self) -> Key:
        return self.prompt, self.number

    @property
    def target(self) -> int | None:
        """Tokens to aim at."""
        if self.plan.targets is None:
            return None
        least, most = map(math.log, self.plan.targets)
        return round(math.exp(least + (most - least) * self.seed("target") / 2**31))

    @property
    def guided(self) -> int:
        """Tokens after which the base model goes on alone."""
        return 0 if self.target is None else self.seed("guided") % self.target

    def seed(self, purpose: str) -> int:
        """A seed below 2**31 that follows from what the request is."""
        return seed_from(self.plan.seed, self.prompt, self.number, purpose)


def collect(plan: Plan, store: AnswerStore, models: Models, server: Server | None, *, workers: int) -> None:
    """Make the answers of a plan that its directory does not hold yet, showing progress on stderr.

    Args:
        plan: what to make.
        store: gets the answers.
        models: the base model and its tokenizer, and the value model if one guides in process.
        server: answers; None: they are made in process.
        workers: requests to the server at a time.

    Raises:
        ValueError: the server refuses a request, or has not answered for two minutes; or as :func:`sample`.
        OSError: the disk is full. Answers of whole batches stay.
    """
    requests = plan.requests()
    made = sum(request.key in store.answers for request in requests)
    with AnswerBar(len(requests), made, models) as bar:
        bar.set_description("collect")

        def keep(answers: list[Answer]) -> None:
            store.add(answers)
            bar.update(len(store.answers) - bar.n)

        if server is not None:
            _ask(plan, store, server, models.eos_token_ids, workers, keep)
            return
        for start in range(0, len(requests), plan.rows):
            batch = requests[start : start + plan.rows]
            if any(request.key not in store.answers for request in batch):
                keep(_sample(plan, store, models, batch, bar))


def _sample(plan: Plan, store: AnswerStore, models: Models, batch: list[Request], bar: AnswerBar) -> list[Answer]:
    """The answers of a batch, in process."""
    prompts, eos = [store.prompts[request.prompt]["ids"] for request in batch], models.eos_token_ids
    torch.manual_seed(batch[0].seed("sampling"))
    begun: list[list[int]] = [[] for _ in batch]
    limits = [request.guided for request in batch]
    if max(limits) > 0:
        inputs, guidance = models.padded(prompts), [{"target_length": request.target} for request in batch]
        found = sample(
            models, models.value_model, inputs, guidance, max_new_tokens=limits, streamer=bar, **plan.sampling
        )
        begun = [tokens[counts].tolist() for tokens, counts in zip(found.tokens, found.counts, strict=True)]
    whole = [*begun]
    going_on = [row for row, ids in enumerate(begun) if not ids or ids[-1] not in eos]
    if going_on:
        rows = decode(
            models,
            [prompts[row] + begun[row] for row in going_on],
            plan.sampling,
            max_new_tokens=plan.max_new_tokens - min(len(begun[row]) for row in going_on),
            streamer=bar,
        )
        for row, ids in zip(going_on, rows, strict=True):
            whole[row] = (begun[row] + ids)[: plan.max_new_tokens]
    return [
        _answer(request, ids, len(of_guidance), ids[-1] in eos)
        for request, of_guidance, ids in zip(batch, begun, whole, strict=True)
    ]


def _answer(request: Request, ids: list[int], guided: int, finished: bool) -> Answer:
    limit = request.plan.max_new_tokens
    return Answer(request.prompt, request.number, request.target, guided, limit, ids, finished)


def _ask(
    plan: Plan, store: AnswerStore, server: Server, eos: list[int], workers: int, keep: Callable[[list[Answer]], None]
) -> None:
    """The answers of a server. Each is kept as soon as it is there; one failure ends the run."""
    failed = threading.Event()

    def tokens(
        prompt: list[int], guidance: dict[str, Any] | None, max_new_tokens: int, seed: int
    ) -> tuple[list[int], bool]:
        """What a request is answered with, and whether it ended by itself; a server that is silent is asked again."""
        request = request_of(
            server.engine, prompt, guidance, max_new_tokens=max_new_tokens, sampling=plan.sampling, seed=seed
        )
        for pause in (*PAUSES, None):
            try:
                ids, stopped, _ = server.answer(*request)
                return with_end(ids, stopped, eos)
            except Unreachable:
                if pause is None or failed.wait(pause):
                    raise
        raise AssertionError("the last attempt returns or raises")

    def ask(request: Request) -> Answer:
        prompt = store.prompts[request.prompt]["ids"]
        ids: list[int] = []
        finished = False
        if request.guided > 0:
            guidance = {"target_length": request.target}
            ids, finished = tokens(prompt, guidance, request.guided, request.seed("guidance"))
        guided = len(ids)
        if not finished:
            more, finished = tokens(prompt + ids, None, plan.max_new_tokens - guided, request.seed("sampling"))
            ids = ids + more
        return _answer(request, ids, guided, finished)

    with ThreadPoolExecutor(workers) as pool:
        missing = [request for request in plan.requests() if request.key not in store.answers]
        futures = [pool.submit(ask, request) for request in missing]
        try:
            for future in as_completed(futures):
                keep([future.result()])
        finally:  # what is asked already is waited for and kept
            failed.set()
            pool.shutdown(cancel_futures=True)
            answers = [future.result() for future in futures if not future.cancelled() and not future.exception()]
            keep(answers)
