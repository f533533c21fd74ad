"""``lenvm collect``: sampling of the answers that training uses, in process or by a server.

The seed, the target and the batch of an answer follow from the plan. An interrupted run therefore resumes with the same
answers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lenvm_kernels.adapters.settings import NONE
from lenvm_kernels.demo import held_out_prompts, spread, training_prompts
from lenvm_kernels.demo.generation import AnswerBar, sample
from lenvm_kernels.demo.models import Models, load_tokenizer, locate, quiet, tokens_of
from lenvm_kernels.evaluate.plan import seed_from
from lenvm_kernels.evaluate.prompts import TEST, TRAIN, Prompt, read_prompts
from lenvm_kernels.evaluate.run import with_end
from lenvm_kernels.evaluate.servers import Server, request_of
from lenvm_kernels.training.answers import Answer, AnswerStore, Key

# Share of the prompts that are held out if the file has no splits.
HELD_OUT = 0.1


@dataclass(frozen=True)
class Plan:
    """Every setting that affects the answers.

    Attributes:
        base: name of the base model.
        value: name of the value source that guides. If None, answers are unguided.
        prompts: the users' messages, each with a split.
        chat: whether the chat template is applied.
        samples: answers per prompt.
        max_new_tokens: maximum length of an answer.
        targets: lowest and highest target length of guided answers. Targets are drawn uniformly in their logarithm.
            Guidance ends at a uniformly drawn token before the target.
        sampling: ``temperature``, ``top_k``, ``top_p`` and ``min_p``.
        seed: seed of every draw.
        rows: answers per batch in process, or concurrent requests to a server.
        dtype: dtype of the models in process.
        engine: ``"sglang"``, ``"vllm"``, or None for answers in process.
    """

    base: str
    value: str | None
    prompts: list[Prompt]
    chat: bool
    samples: int
    max_new_tokens: int
    targets: tuple[int, int]
    sampling: dict[str, Any]
    seed: int
    rows: int
    dtype: str
    engine: str | None = None

    @classmethod
    def of(cls, args: argparse.Namespace) -> Plan:
        """The plan of unguided answers of a command line.

        Raises:
            ValueError, OSError: a flag has a wrong value; the message names it.
        """
        low, high = args.targets or (min(20, args.max_new_tokens), 2000)
        if not low <= min(high, args.max_new_tokens):
            raise ValueError(f"--targets must be LOW <= HIGH with LOW at most --max-new-tokens, got {low} {high}")
        return cls(
            base=args.base,
            value=None,
            prompts=_prompts(args.prompts, args.num_prompts),
            chat=not args.plain_prompts,
            samples=args.answers_per_prompt,
            max_new_tokens=args.max_new_tokens,
            targets=(low, min(high, args.max_new_tokens)),
            sampling=dict(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p),
            seed=args.seed,
            rows=args.rows,
            dtype=args.dtype,
        )

    def requests(self) -> list[Request]:
        """The requests in sampling order.

        The first answers of all prompts come first. Guided answers are sorted by their number of guided tokens, because
        the longest row of a batch sets the cost of its guidance.
        """
        found = [Request(self, prompt, i) for i in range(self.samples) for prompt in range(len(self.prompts))]
        return found if self.value is None else sorted(found, key=lambda request: (request.guided, request.key))


@dataclass(frozen=True)
class Request:
    """One answer of a plan: prompt index and answer index."""

    plan: Plan
    prompt: int
    number: int

    @property
    def key(self) -> Key:
        return self.prompt, self.number

    @property
    def target(self) -> int | None:
        """Target length in tokens, None if unguided."""
        if self.plan.value is None:
            return None
        least, most = map(math.log, self.plan.targets)
        return round(math.exp(least + (most - least) * self.seed("target") / 2**31))

    @property
    def guided(self) -> int:
        """Number of tokens under guidance."""
        return 0 if self.target is None else self.seed("guided") % self.target

    def seed(self, purpose: str) -> int:
        """A seed below 2**31 for one of the request's draws."""
        return seed_from(self.plan.seed, self.prompt, self.number, purpose)

    def answer(self, ids: list[int], guided: int, finished: bool) -> Answer:
        """The answer with these tokens."""
        return Answer(self.prompt, self.number, self.target, guided, self.plan.max_new_tokens, ids, finished)


def vocabulary(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash that is equal for tokenizers with equal tokens."""
    content = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def collect(plan: Plan, folder: Path, *, device: str, url: str | None = None) -> AnswerStore:
    """Sample the answers of a plan that a directory lacks, with a progress bar on stderr.

    Args:
        plan: the plan, whose engine is set from ``url``.
        folder: the directory of the answers.
        device: device of the models in process.
        url: address of a server. If None, the answers are sampled in process.

    Raises:
        ValueError: BASE has no chat template or no end-of-sequence token, the directory holds answers of another plan,
            or the server does not answer a request.
        OSError: the disk is full; the answers of complete batches are kept.
    """
    quiet()
    tokenizer = load_tokenizer("BASE", locate("BASE", plan.base))
    if plan.chat and tokenizer.chat_template is None:
        raise ValueError(f"BASE must have a chat template unless --plain-prompts is set, {plan.base!r} has none")
    server = None if url is None else Server.find("--url", url)
    plan = replace(plan, engine=None if server is None else server.engine)
    ids = tokens_of(tokenizer, [prompt.text for prompt in plan.prompts], chat=plan.chat)
    prompts = [
        {"text": prompt.text, "split": prompt.split, "ids": tokens}
        for prompt, tokens in zip(plan.prompts, ids, strict=True)
    ]
    store = AnswerStore(folder, {**asdict(plan), "prompts": prompts, "vocabulary": vocabulary(tokenizer)})
    requests = plan.requests()
    if all(request.key in store.answers for request in requests):
        return store
    value = plan.value if server is None and plan.value is not None else NONE
    models = Models.load(plan.base, value, device=device, dtype=getattr(torch, plan.dtype), names=("BASE", "--value"))
    if not models.eos_token_ids:
        raise ValueError("BASE must have an eos_token_id in its generation_config, got none")
    made = sum(request.key in store.answers for request in requests)
    with AnswerBar(len(requests), made, models) as bar:
        bar.set_description("collect")

        def keep(answers: list[Answer]) -> None:
            new = store.add(answers)
            if server is not None:  # in process, generate counts the tokens of every step
                bar.put(torch.tensor([token for answer in new for token in answer.ids]))
            bar.update(len(new))

        if server is not None:
            _from_server(plan, store, server, models.eos_token_ids, keep)
            return store
        for start in range(0, len(requests), plan.rows):
            batch = requests[start : start + plan.rows]
            if any(request.key not in store.answers for request in batch):
                keep(_in_process(plan, store, models, batch, bar))
    return store


def _prompts(file: Path | None, count: int | None) -> list[Prompt]:
    """The prompts of a file or of the demo, each with a split; at most ``count`` of each split."""
    if file is None:
        texts = {TRAIN: training_prompts(), TEST: held_out_prompts()}
        prompts = [Prompt(text, split) for split, of_split in texts.items() for text in of_split]
    else:
        prompts = read_prompts(file)
        if prompts[0].split is None:
            if len(prompts) < 2:
                raise ValueError("--prompts must be at least two, one to train on and one to test, got 1")
            # By a hash of the text: a prompt stays in its split when others are added to the file.
            order = sorted(range(len(prompts)), key=lambda i: seed_from(prompts[i].text))
            test = set(order[: max(1, round(HELD_OUT * len(prompts)))])
            prompts = [replace(p, split=TEST if i in test else TRAIN) for i, p in enumerate(prompts)]
    by_split = [[prompt for prompt in prompts if prompt.split == split] for split in (TRAIN, TEST)]
    if not all(by_split):
        raise ValueError(f"--prompts must have prompts of the splits train and test, {file} has only one of them")
    return [prompt for of_split in by_split for prompt in spread(of_split, count or len(of_split))]


def _in_process(plan: Plan, store: AnswerStore, models: Models, batch: list[Request], bar: AnswerBar) -> list[Answer]:
    """Sample a batch in process: the guided part of every answer, then the rest."""
    prompts, eos = [store.prompts[request.prompt]["ids"] for request in batch], models.eos_token_ids
    torch.manual_seed(batch[0].seed("sampling"))

    def tokens(rows: list[list[int]], guidance: list[Any] | None, limits: list[int]) -> list[list[int]]:
        value, inputs = None if guidance is None else models.value_model, models.padded(rows)
        found = sample(models, value, inputs, guidance, max_new_tokens=limits, streamer=bar, **plan.sampling)
        return [ids[counts].tolist() for ids, counts in zip(found.tokens, found.counts, strict=True)]

    guided: list[list[int]] = [[] for _ in batch]
    limits = [request.guided for request in batch]
    if any(limits):
        guided = tokens(prompts, [{"target_length": request.target} for request in batch], limits)
    whole = [*guided]
    rows = [row for row, ids in enumerate(guided) if not ids or ids[-1] not in eos]
    if rows:
        limits = [plan.max_new_tokens - len(guided[row]) for row in rows]
        more = tokens([prompts[row] + guided[row] for row in rows], None, limits)
        for row, ids in zip(rows, more, strict=True):
            whole[row] = guided[row] + ids
    return [
        request.answer(ids, len(begun), ids[-1] in eos)
        for request, begun, ids in zip(batch, guided, whole, strict=True)
    ]


def _from_server(
    plan: Plan, store: AnswerStore, server: Server, eos: list[int], keep: Callable[[list[Answer]], None]
) -> None:
    """Sample the missing answers by a server. Every answer is stored on arrival, and the first error ends the run."""

    def tokens(prompt: list[int], guidance: dict[str, Any] | None, limit: int, seed: int) -> tuple[list[int], bool]:
        """Tokens of one request, and whether the answer is finished."""
        request = request_of(server.engine, prompt, guidance, max_new_tokens=limit, sampling=plan.sampling, seed=seed)
        ids, stopped, _ = server.answer(*request)
        return with_end(ids, stopped, eos)

    def ask(request: Request) -> Answer:
        ids: list[int] = []
        prompt, finished = store.prompts[request.prompt]["ids"], False
        if request.guided > 0:
            guidance = {"target_length": request.target}
            ids, finished = tokens(prompt, guidance, request.guided, request.seed("guidance"))
        guided = len(ids)
        if not finished:
            more, finished = tokens(prompt + ids, None, plan.max_new_tokens - guided, request.seed("sampling"))
            ids = ids + more
        return request.answer(ids, guided, finished)

    with ThreadPoolExecutor(plan.rows) as pool:
        futures = [pool.submit(ask, request) for request in plan.requests() if request.key not in store.answers]
        try:
            for future in as_completed(futures):
                keep([future.result()])
        finally:  # requests in flight are completed and stored
            pool.shutdown(cancel_futures=True)
            keep([future.result() for future in futures if not future.cancelled() and not future.exception()])
