"""``lenvm collect``: sampling of the answers that training uses, in process or by a server.

The seed, the target and the batch of an answer follow from the plan. An interrupted run therefore resumes with the same
answers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lenvm_kernels.engines.settings import NONE
from lenvm_kernels.evaluate.plan import seed_from
from lenvm_kernels.evaluate.run import with_end
from lenvm_kernels.evaluate.servers import Server, request_of
from lenvm_kernels.loading import held_out_prompts, spread, training_prompts
from lenvm_kernels.loading.generation import AnswerBar, sample
from lenvm_kernels.loading.models import Models, load_tokenizer, locate, quiet, tokens_of
from lenvm_kernels.loading.prompts import TEST, TRAIN, Prompt, read_prompts
from lenvm_kernels.train.answers import Answer, AnswerStore, Key

# Share of the prompts that are held out if the file has no splits, and range of targets, up to the maximum length.
HELD_OUT, TARGETS = 0.1, (20, 2000)


@dataclass(frozen=True)
class Plan:
    """Every setting that affects the answers.

    Attributes:
        base, value: the base model, and the value source that guides. If ``value`` is None, answers are unguided.
        prompts: the users' messages, each with a split.
        samples: answers per prompt.
        rows: answers per batch in process, or concurrent requests to a server.
        engine: ``"sglang"``, ``"vllm"``, or None for answers in process.
    """

    base: str
    value: str | None
    prompts: list[Prompt]
    samples: int
    max_new_tokens: int
    sampling: dict[str, Any]
    seed: int
    rows: int
    dtype: str
    engine: str | None = None

    @classmethod
    def of(cls, args: argparse.Namespace) -> Plan:
        """The plan of unguided answers of a command line; errors name the flag."""
        return cls(
            base=args.base,
            value=None,
            prompts=_prompts(args.prompts, args.num_prompts),
            samples=args.answers_per_prompt,
            max_new_tokens=args.max_new_tokens,
            sampling=dict(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p),
            seed=args.seed,
            rows=args.rows,
            dtype=args.dtype,
        )

    def ordered(self) -> list[Key]:
        """The answers in sampling order; the longest guided row of a batch sets its cost."""
        keys = [(prompt, i) for i in range(self.samples) for prompt in range(len(self.prompts))]
        return sorted(keys, key=lambda key: self.guidance(key)[1])

    def guidance(self, key: Key) -> tuple[int | None, int]:
        """Target length of an answer, None if it is unguided, and its maximum number of guided tokens.

        The target is drawn uniformly in its logarithm, and guidance ends at a uniformly drawn token before it.
        """
        if self.value is None:
            return None, 0
        least, most = (math.log(min(target, self.max_new_tokens)) for target in TARGETS)
        target = round(math.exp(least + (most - least) * self.draw(key, "target") / 2**31))
        return target, self.draw(key, "guided") % target

    def draw(self, key: Key, purpose: str) -> int:
        """A seed below 2**31 for one purpose of an answer."""
        return seed_from(self.seed, *key, purpose)

    def answer(self, key: Key, ids: list[int], guided: int, finished: bool) -> Answer:
        return Answer(*key, self.guidance(key)[0], guided, self.max_new_tokens, ids, finished)


def vocabulary(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash that is equal for tokenizers with equal tokens."""
    content = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def collect(plan: Plan, folder: Path, *, device: str, url: str | None = None) -> AnswerStore:
    """Sample the answers of a plan that a directory lacks, by the server at ``url`` or in process.

    Raises:
        ValueError: BASE has no end-of-sequence token, the directory holds answers of another plan, or the server does
            not answer a request.
    """
    quiet()
    tokenizer = load_tokenizer("BASE", locate("BASE", plan.base))
    server = None if url is None else Server.find("--url", url)
    plan = replace(plan, engine=None if server is None else server.engine)
    ids = tokens_of(tokenizer, [prompt.text for prompt in plan.prompts], chat=True)
    prompts = [{"text": p.text, "split": p.split, "ids": row} for p, row in zip(plan.prompts, ids, strict=True)]
    store = AnswerStore(folder, {**asdict(plan), "prompts": prompts, "vocabulary": vocabulary(tokenizer)})
    keys = plan.ordered()
    made = sum(key in store.answers for key in keys)
    if made == len(keys):
        return store
    value = plan.value if server is None and plan.value is not None else NONE
    models = Models.load(plan.base, value, device=device, dtype=getattr(torch, plan.dtype), names=("BASE", "--value"))
    if not models.eos_token_ids:
        raise ValueError("BASE must have an eos_token_id in its generation_config, got none")
    with AnswerBar(len(keys), made, models) as bar:
        bar.set_description("collect")

        def keep(answers: list[Answer]) -> None:
            new = store.add(answers)
            if server is not None:  # in process, generate counts the tokens of every step
                bar.put(torch.tensor([token for answer in new for token in answer.ids]))
            bar.update(len(new))

        if server is not None:
            _from_server(plan, store, server, models.eos_token_ids, keep)
            return store
        for start in range(0, len(keys), plan.rows):
            batch = keys[start : start + plan.rows]
            if any(key not in store.answers for key in batch):
                keep(_in_process(plan, store, models, batch, bar))
    return store


def _prompts(file: Path | None, count: int | None) -> list[Prompt]:
    """The prompts of a file or of the demo, at most ``count`` of each split."""
    if file is None:
        texts = {TRAIN: training_prompts(), TEST: held_out_prompts()}
        prompts = [Prompt(text, split) for split, of_split in texts.items() for text in of_split]
    else:
        prompts = read_prompts(file)
        if prompts[0].split is None:
            # By a hash of the text: a prompt stays in its split when others are added to the file.
            order = sorted(range(len(prompts)), key=lambda i: seed_from(prompts[i].text))
            test = set(order[: max(1, round(HELD_OUT * len(prompts)))])
            prompts = [replace(p, split=TEST if i in test else TRAIN) for i, p in enumerate(prompts)]
    by_split = [[prompt for prompt in prompts if prompt.split == split] for split in (TRAIN, TEST)]
    if not all(by_split):
        raise ValueError(f"--prompts must have prompts of the splits train and test, {file} has only one of them")
    return [prompt for of_split in by_split for prompt in spread(of_split, count or len(of_split))]


def _in_process(plan: Plan, store: AnswerStore, models: Models, batch: list[Key], bar: AnswerBar) -> list[Answer]:
    """Sample a batch in process: the guided part of every answer, then the rest."""
    prompts, eos = [store.prompts[prompt]["ids"] for prompt, _ in batch], models.eos_token_ids
    torch.manual_seed(plan.draw(batch[0], "sampling"))

    def tokens(rows: list[list[int]], guidance: list[Any] | None, limits: Sequence[int]) -> list[list[int]]:
        value, inputs = None if guidance is None else models.value_model, models.padded(rows)
        found = sample(models, value, inputs, guidance, max_new_tokens=limits, streamer=bar, **plan.sampling)
        return [ids[counts].tolist() for ids, counts in zip(found.tokens, found.counts, strict=True)]

    guided: list[list[int]] = [[] for _ in batch]
    targets, limits = zip(*map(plan.guidance, batch), strict=True)
    if any(limits):
        guided = tokens(prompts, [{"target_length": target} for target in targets], limits)
    whole = [*guided]
    rows = [row for row, ids in enumerate(guided) if not ids or ids[-1] not in eos]
    if rows:
        room = [plan.max_new_tokens - len(guided[row]) for row in rows]
        more = tokens([prompts[row] + guided[row] for row in rows], None, room)
        for row, ids in zip(rows, more, strict=True):
            whole[row] = guided[row] + ids
    return [
        plan.answer(key, ids, len(begun), ids[-1] in eos) for key, begun, ids in zip(batch, guided, whole, strict=True)
    ]


def _from_server(
    plan: Plan, store: AnswerStore, server: Server, eos: list[int], keep: Callable[[list[Answer]], None]
) -> None:
    """Sample the missing answers by a server. Every answer is stored on arrival, and the first error ends the run."""

    def tokens(prompt: list[int], guidance: dict[str, Any] | None, limit: int, seed: int) -> tuple[list[int], bool]:
        request = request_of(server.engine, prompt, guidance, max_new_tokens=limit, sampling=plan.sampling, seed=seed)
        ids, stopped, _ = server.answer(*request)
        return with_end(ids, stopped, eos)

    def ask(key: Key) -> Answer:
        ids: list[int] = []
        prompt, finished = store.prompts[key[0]]["ids"], False
        target, limit = plan.guidance(key)
        if limit > 0:
            ids, finished = tokens(prompt, {"target_length": target}, limit, plan.draw(key, "guidance"))
        guided = len(ids)
        if not finished:
            more, finished = tokens(prompt + ids, None, plan.max_new_tokens - guided, plan.draw(key, "sampling"))
            ids = ids + more
        return plan.answer(key, ids, guided, finished)

    with ThreadPoolExecutor(plan.rows) as pool:
        futures = [pool.submit(ask, key) for key in plan.ordered() if key not in store.answers]
        try:
            for future in as_completed(futures):
                keep([future.result()])
        finally:  # requests in flight are completed and stored
            pool.shutdown(cancel_futures=True)
            keep([future.result() for future in futures if not future.cancelled() and not future.exception()])
