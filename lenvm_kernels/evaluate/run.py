"""What ``lenvm evaluate`` does: make the answers of a plan that its file does not hold yet, and sort them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from lenvm_kernels.demo.generation import AnswerBar, sample
from lenvm_kernels.demo.models import NONE, Models, tokens_of
from lenvm_kernels.evaluate.measures import Answer
from lenvm_kernels.evaluate.plan import BASE, CLOSING_TOKENS, CUT, FORCED, AnswerFile, Key, Plan, Unit
from lenvm_kernels.evaluate.prompts import say
from lenvm_kernels.evaluate.servers import Server, request_of

# Tokens of a forward that computes perplexities: their logits are [tokens, vocabulary] in fp32.
FORWARD_TOKENS = 1024


def run(
    plan: Plan, file: AnswerFile, models: Models, server: Server | None, constant_server: Server | None, *, workers: int
) -> None:
    """Make the answers of a plan that its file does not hold yet, showing progress on stderr.

    Args:
        plan: what to make.
        file: gets the answers.
        models: the base model, and the value model unless there is none or a server has it.
        server: answers guided and base settings; None: they are answered in process.
        constant_server: the same for guided settings without values.
        workers: requests to a server at a time.

    Raises:
        ValueError: as :class:`Server` and :func:`sample`, or the base model has no end-of-sequence token.
    """
    if not models.eos_token_ids:
        raise ValueError("BASE must have an eos_token_id in its generation_config, got none")
    units = plan.units()
    with AnswerBar(sum(len(unit.prompts) for unit in units), len(file.answers), models) as bar:
        for unit in units:
            if unit.keys()[0] in file.answers:
                continue
            bar.set_description(unit.setting.name if unit.target is None else f"{unit.setting.name}, {unit.target}")
            values_or_none = unit.setting.with_values or unit.setting.guidance is None
            answerer = server if values_or_none else constant_server
            generate = partial(_generate, plan, unit, models, answerer, workers, bar)
            file.add(_answer(plan, unit, models, generate, file.answers))
            bar.update(len(unit.prompts))


# Answers prompts in at most so many tokens: new tokens, whether a server says that they ended, the predicted length.
Generate = Callable[[list[list[int]], int], list[tuple[list[int], bool, float | None]]]


def _answer(plan: Plan, unit: Unit, models: Models, generate: Generate, made: Mapping[Key, Answer]) -> list[Answer]:
    """Answer the prompts of a unit; ``made`` has the base model's own answers, which a forced answer begins with."""
    texts = [plan.prompts[i] for i in unit.prompts]
    if unit.setting.said:
        assert plan.say_it is not None and unit.target is not None
        texts = [say(text, plan.say_it, unit.target) for text in texts]
    prompts, limit = tokens_of(models.tokenizer, texts, chat=True), plan.limit(unit.target)
    begun: list[list[int]] = [[] for _ in prompts]
    found: dict[int, tuple[list[int], bool, float | None]] = {}
    if unit.setting.name == FORCED:
        assert plan.closing is not None and unit.target is not None
        closing = models.tokenizer(plan.closing, add_special_tokens=False)["input_ids"]
        limit = max(4, CLOSING_TOKENS - len(closing))
        for row, prompt in enumerate(unit.prompts):
            own = made[BASE, None, unit.seed, prompt]
            begun[row] = own.ids[: unit.target - CLOSING_TOKENS] + closing
            if len(own.ids) <= unit.target:
                found[row] = own.ids, own.ended, None
    rows = [row for row in range(len(prompts)) if row not in found]
    asked = [prompts[row] + begun[row] for row in rows]
    new = generate(asked, limit) if rows else []
    for row, (ids, stopped, predicted) in zip(rows, new, strict=True):
        ids, ended = with_end(ids, stopped, models.eos_token_ids)
        found[row] = begun[row] + ids, ended, predicted
    whole = [found[row] for row in range(len(prompts))]
    nlls = likelihoods(models, prompts, [ids for ids, *_ in whole])
    texts = models.tokenizer.batch_decode([ids for ids, *_ in whole], skip_special_tokens=True)
    return [
        Answer(unit.setting.name, unit.target, unit.seed, prompt, ids, text, ended, nll, predicted)
        for prompt, (ids, ended, predicted), text, nll in zip(unit.prompts, whole, texts, nlls, strict=True)
    ]


def _generate(
    plan: Plan,
    unit: Unit,
    models: Models,
    server: Server | None,
    workers: int,
    bar: AnswerBar,
    prompts: list[list[int]],
    limit: int,
) -> list[tuple[list[int], bool, float | None]]:
    """Generate in process, or by a server if there is one, see :data:`Generate`."""
    guidance = None
    if unit.setting.guidance is not None:
        guidance = {"target_length": unit.target, **unit.setting.guidance}
    # Predicted lengths are asked for where the base model answers by itself: that is what they predict.
    predicts = unit.setting.name == BASE and plan.value != NONE and (server is None or server.engine == "sglang")
    guidance = {"return_values": True} if predicts else guidance
    if server is None:
        torch.manual_seed(unit.seed_of())
        sampled = sample(
            models,
            models.value_model if unit.setting.with_values or predicts else None,
            models.padded(prompts),
            guidance,
            max_new_tokens=limit,
            streamer=bar,
            **plan.sampling,
        )
        rows = zip(sampled.tokens, sampled.counts, sampled.predicted, strict=True)
        return [(tokens[counts].tolist(), False, predicted) for tokens, counts, predicted in rows]

    def ask(row: int) -> tuple[list[int], bool, float | None]:
        sampling, seed = plan.sampling, unit.seed_of(row)
        asked = request_of(server.engine, prompts[row], guidance, max_new_tokens=limit, sampling=sampling, seed=seed)
        return server.answer(*asked)

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(ask, range(len(prompts))))


def with_end(ids: Sequence[int], stopped: bool, eos: Sequence[int]) -> tuple[list[int], bool]:
    """The tokens of an answer up to its end, the end-of-sequence token last, and whether it ended by itself.

    Engines differ in whether they return that token.

    Args:
        ids: tokens of an answer.
        stopped: whether the engine says that it ended by itself.
        eos: tokens that end it; the first stands for one that was not returned.
    """
    ends = [i for i, token in enumerate(ids) if token in eos]
    if ends:
        return list(ids[: ends[0] + 1]), True
    return ([*ids, eos[0]], True) if stopped else (list(ids), False)


@torch.no_grad()
def likelihoods(
    models: Models, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> list[list[float]]:
    """Nats of each token of each answer under the base model alone, by teacher forcing.

    That is its raw distribution at temperature 1, without filters, with the softmax in fp32.

    Args:
        models: the base model.
        prompts: tokens of each prompt, at least one.
        answers: tokens of each answer.
    """
    found: list[list[float]] = []
    while len(found) < len(prompts):
        start, width = len(found), 0
        rows: list[list[int]] = []
        for prompt, answer in zip(prompts[start:], answers[start:], strict=True):
            width = max(width, len(prompt) + len(answer))
            if rows and width * (len(rows) + 1) > FORWARD_TOKENS:
                break
            rows.append([*prompt, *answer])
        width = max(map(len, rows))
        device = models.model.device
        ids = torch.tensor([row + [models.pad_token_id] * (width - len(row)) for row in rows], device=device)
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=device)
        logits = models.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        for i, row in enumerate(rows):
            first = len(prompts[start + i])
            log_p = torch.log_softmax(logits[i, first - 1 : len(row) - 1].float(), dim=-1)
            nats = -log_p.gather(1, ids[i, first : len(row), None])[:, 0]
            found.append([round(x, 6) for x in nats.tolist()])
    return found


def views(plan: Plan, answers: Sequence[Answer]) -> dict[str, dict[str, list[Answer]]]:
    """Answers by target (as text, for JSON) and name of a setting, the baselines first.

    The base model's answers count with the limit that other settings have at a target, and once more cut at it.
    """
    made: dict[tuple[str, int | None], list[Answer]] = {}
    for answer in answers:
        made.setdefault((answer.setting, answer.target), []).append(answer)
    found: dict[str, dict[str, list[Answer]]] = {}
    for target in plan.targets:
        found[str(target)] = {
            BASE: [answer.cut(plan.limit(target)) for answer in made[BASE, None]],
            CUT: [answer.cut(target) for answer in made[BASE, None]],
        }
        names = [setting.name for setting in plan.settings if setting.name != BASE]
        found[str(target)] |= {name: made[name, target] for name in names}
    return found
