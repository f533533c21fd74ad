"""``lenvm collect``: samples the answers for training, in process or on a server.

The plan determines the seed, the target and the batch of an answer, so that a resumed run samples the same answers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lenvm_kernels.engines.settings import NONE
from lenvm_kernels.evaluate.run import seed_from
from lenvm_kernels.evaluate.servers import Server
from lenvm_kernels.loading import PROMPTS, SPLITS, TEST, TRAIN, Prompt, read_prompts, spread
from lenvm_kernels.loading.arguments import sampling_of
from lenvm_kernels.loading.models import AnswerBar, Models, load_tokenizer, locate, quiet, sample, tokens_of
from lenvm_kernels.train.answers import AnswerStore, Key, SampledAnswer

# Share of held-out prompts if the file has no splits, and the range of targets, also limited by the maximum length.
HELD_OUT, TARGETS = 0.1, (20, 2000)
Guidance = Mapping[str, Any] | None
# Samples the new tokens of rows of tokens, given their guidance, their limits, and a seed. A server gets one row.
Generate = Callable[[list[list[int]], list[Guidance], list[int], int], list[list[int]]]


@dataclass(frozen=True)
class CollectionPlan:
    """Every setting that affects the answers."""

    base: str
    value: str | None  # value source of the guidance. If None, answers are unguided
    prompts: list[Prompt]
    samples: int  # answers per prompt
    max_new_tokens: int
    sampling: dict[str, Any]
    seed: int
    rows: int  # answers per batch in process, or number of concurrent requests to a server
    dtype: str
    engine: str | None = None  # "sglang", "vllm", or None for answers in process

    @classmethod
    def of(cls, args: argparse.Namespace, value: str | None) -> CollectionPlan:
        """The plan of a command line; errors name the flag."""
        same = {name: getattr(args, name) for name in ("base", "max_new_tokens", "seed", "rows", "dtype")}
        prompts = _prompts(args.prompts, args.num_prompts)
        return cls(value=value, prompts=prompts, samples=args.answers_per_prompt, sampling=sampling_of(args), **same)

    def ordered(self) -> list[Key]:
        """The answers in sampling order: by guided length, because the longest guided row sets the cost of a batch."""
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


def vocabulary(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash that is equal for tokenizers with equal tokens."""
    content = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def collect(plan: CollectionPlan, folder: Path, *, device: str, url: str | None = None) -> None:
    """Sample the answers of a plan that a directory lacks, on the server at ``url`` or in process.

    Raises:
        ValueError: BASE has no end-of-sequence token, the directory has another plan, or the server does not answer.
    """
    quiet()
    tokenizer = load_tokenizer("BASE", locate("BASE", plan.base))
    server = Server.find("--url", url)
    plan = replace(plan, engine=None if server is None else server.engine)
    ids = tokens_of(tokenizer, [prompt.text for prompt in plan.prompts])
    prompts = [{"text": p.text, "split": p.split, "ids": row} for p, row in zip(plan.prompts, ids, strict=True)]
    store = AnswerStore(folder, {**asdict(plan), "prompts": prompts, "vocabulary": vocabulary(tokenizer)})
    keys = plan.ordered()
    missing = [key for key in keys if key not in store.answers]
    if not missing:
        return
    value = plan.value if server is None and plan.value is not None else NONE
    models = Models.load(plan.base, value, device=device, dtype=getattr(torch, plan.dtype), names=("BASE", "--value"))
    eos, lock = models.eos_token_ids, Lock()

    def generate(rows: list[list[int]], guidance: list[Guidance], limits: list[int], seed: int) -> list[list[int]]:
        if server is not None:
            request: dict[str, Any] = dict(max_new_tokens=limits[0], sampling=plan.sampling, seed=seed, eos=eos)
            return [server.answer(rows[0], guidance[0], **request)[0]]
        torch.manual_seed(seed)
        value_model = models.value_model if any(guidance) else None
        options: dict[str, Any] = dict(max_new_tokens=limits, streamer=bar, **plan.sampling)
        return [ids for ids, _ in sample(models, value_model, models.padded(rows), guidance, **options)]

    with AnswerBar(len(keys), len(keys) - len(missing), models) as bar:
        bar.set_description("collect")
        if server is None:
            for start in range(0, len(keys), plan.rows):
                batch = keys[start : start + plan.rows]
                if any(key not in store.answers for key in batch):
                    bar.update(len(store.add(_answers(plan, store, batch, eos, generate))))
            return

        def answer(key: Key) -> None:
            answers = _answers(plan, store, [key], eos, generate)
            with lock:
                store.add(answers)
                bar.put(torch.tensor(answers[0].ids))
                bar.update(1)

        # Each answer is stored on arrival, and the first error ends the run.
        with ThreadPoolExecutor(plan.rows) as pool:
            futures = [pool.submit(answer, key) for key in missing]
            try:
                for future in as_completed(futures):
                    future.result()
            finally:  # requests in flight are completed and stored
                pool.shutdown(cancel_futures=True)


def _prompts(file: Path | None, count: int | None) -> list[Prompt]:
    if file is None:
        texts = json.loads(PROMPTS.read_text(encoding="utf-8"))
        prompts = [Prompt(text, split) for split in SPLITS for text in texts[split]]
    else:
        prompts = read_prompts(file)
        if prompts[0].split is None:
            # By a hash of the text, so that a prompt keeps its split when other prompts are added to the file.
            by_hash = sorted((prompt.text for prompt in prompts), key=seed_from)
            test = set(by_hash[: max(1, round(HELD_OUT * len(prompts)))])
            prompts = [replace(p, split=TEST if p.text in test else TRAIN) for p in prompts]
    by_split = [[prompt for prompt in prompts if prompt.split == split] for split in (TRAIN, TEST)]
    if not all(by_split):
        raise ValueError(f"--prompts must have prompts of both splits, train and test, {file} has only one")
    return [prompt for of_split in by_split for prompt in spread(of_split, count or len(of_split))]


def _answers(
    plan: CollectionPlan, store: AnswerStore, keys: Sequence[Key], eos: list[int], generate: Generate
) -> list[SampledAnswer]:
    """Sample the guided part of every answer, then the rest."""
    prompts = [store.prompts[prompt]["ids"] for prompt, _ in keys]
    targets, limits = (list(column) for column in zip(*map(plan.guidance, keys), strict=True))
    guided: list[list[int]] = [[] for _ in keys]
    if any(limits):
        guidance: list[Guidance] = [{"target_length": target} for target in targets]
        guided = generate(prompts, guidance, limits, plan.draw(keys[0], "guidance"))
    whole = list(guided)
    rows = [row for row, ids in enumerate(guided) if not ids or ids[-1] not in eos]
    if rows:
        begun = [prompts[row] + guided[row] for row in rows]
        room = [plan.max_new_tokens - len(guided[row]) for row in rows]
        more = generate(begun, [None] * len(rows), room, plan.draw(keys[0], "sampling"))
        for row, ids in zip(rows, more, strict=True):
            whole[row] = guided[row] + ids
    return [
        SampledAnswer(*key, target, len(begun), plan.max_new_tokens, ids, ids[-1] in eos)
        for key, target, begun, ids in zip(keys, targets, guided, whole, strict=True)
    ]
