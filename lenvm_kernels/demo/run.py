"""What ``lenvm demo`` does: answer held-out prompts with and without guidance, and measure what comes of it.

Measures are those of ``lenvm evaluate``. The base model computes the logits behind a perplexity while it generates, so
no second forward is needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers.generation.streamers import BaseStreamer

from lenvm_kernels.demo import spread
from lenvm_kernels.demo.generation import sample
from lenvm_kernels.demo.models import Models
from lenvm_kernels.evaluate.measures import Answer, measure
from lenvm_kernels.evaluate.plan import LONGEST

# As when the answers were sampled that the value model is trained on.
SAMPLING: dict[str, Any] = dict(temperature=0.8, top_k=8, min_p=0.02)
# Rows of a batch: more are no faster on a CPU, where a step is bound by arithmetic, and each costs memory for logits.
ROWS = 16


@dataclass(frozen=True)
class Setting:
    """What the demo generates under one name.

    Attributes:
        guidance: of all prompts; None: none.
        with_values: by the value model, else by the end of the text alone.
        max_new_tokens: the limit of an answer.
    """

    guidance: dict[str, Any] | None
    with_values: bool
    max_new_tokens: int


@dataclass(frozen=True)
class Plan:
    """How much the demo generates, and what it asks for.

    Attributes:
        prompts: held-out prompts to answer in each setting, spread evenly over all of them.
        max_new_tokens: the limit of an answer, in tokens.
        shorter, longer: ``value_scale`` of ``centered_exp`` in these two settings.
        target: tokens; what the table is about.
        more_targets: further ones for the plot.
    """

    prompts: int
    max_new_tokens: int
    shorter: float = -60.0
    longer: float = 20.0
    target: int = 80
    more_targets: tuple[int, ...] = (20, 40)

    @property
    def targets(self) -> list[int]:
        """All of them, the least first."""
        return sorted({*self.more_targets, self.target})

    def settings(self) -> dict[str, Setting]:
        """What is generated, by name: those of the table, and behind a slash the further targets of two of them."""
        most = self.max_new_tokens
        found = {
            "base": Setting(None, False, most),
            "shorter": Setting(_scaled(self.shorter), True, most),
            "longer": Setting(_scaled(self.longer), True, most),
            "eq": Setting({"target_length": self.target, "constraint": "eq"}, True, most),
        }
        for name, with_values in (("constant", False), ("target", True)):
            for target in self.targets:
                limit = min(most, int(LONGEST * target))
                place = name if target == self.target else f"{name}/{target}"
                found[place] = Setting({"target_length": target}, with_values, limit)
        return found


QUICK = Plan(prompts=8, max_new_tokens=128)
FULL = Plan(prompts=40, max_new_tokens=256, more_targets=(20, 40, 120))


@dataclass(frozen=True)
class Result:
    """All of a demo.

    Attributes:
        plan: what was asked for.
        prompts: those answered.
        answers: by setting, one a prompt.
    """

    plan: Plan
    prompts: list[str]
    answers: dict[str, list[Answer]]

    def rows(self) -> list[dict[str, Any]]:
        """The table, measured against the target: lengths and distance in tokens, shares, perplexity."""
        settings, target = self.plan.settings(), self.plan.target
        rows = []
        for name in ("base", "shorter", "longer", "hard cut", "eq", "constant", "target"):
            of = "base" if name == "hard cut" else name
            answers = self.answers[of]
            found = measure([answer.cut(target) for answer in answers] if name == "hard cut" else answers, target)
            rows.append(
                {
                    "setting": name,
                    "guidance": settings[of].guidance,
                    "mean_length": found["mean"],
                    "distance": found["distance"],
                    "within_25": found["within_25"],
                    "sentence_ends": found["sentence_ends"],
                    "perplexity": found["perplexity"],
                }
            )
        return rows

    def views(self) -> dict[str, dict[str, list[Answer]]]:
        """For the plot: answers by target and name."""
        views = {}
        for target in self.plan.targets:
            place = "" if target == self.plan.target else f"/{target}"
            names = {"base model": "base", "no value model": f"constant{place}", "guided": f"target{place}"}
            views[str(target)] = {name: self.answers[setting] for name, setting in names.items()}
        return views


def run(models: Models, prompts: Sequence[str], plan: Plan, *, seed: int) -> Result:
    """Generate every setting, showing progress on stderr."""
    prompts = spread(prompts, plan.prompts)
    settings, batches = plan.settings(), -(-len(prompts) // ROWS)
    with tqdm(total=batches * sum(setting.max_new_tokens for setting in settings.values()), unit="step") as bar:
        answers = {}
        for name, setting in settings.items():
            bar.set_description(name)
            answers[name] = answer(models, prompts, name, setting, seed=seed, bar=bar)
        bar.set_description("done")
    return Result(plan, prompts, answers)


def answer(
    models: Models, prompts: Sequence[str], name: str, setting: Setting, *, seed: int, bar: tqdm
) -> list[Answer]:
    """Answer the prompts in one setting; ``bar`` moves by its limit for each batch of ``ROWS`` prompts."""
    torch.manual_seed(seed)
    answers = []
    for start in range(0, len(prompts), ROWS):
        sampled = sample(
            models,
            models.value_model if setting.with_values else None,
            models.encode(prompts[start : start + ROWS]),
            setting.guidance,
            max_new_tokens=setting.max_new_tokens,
            keep_logits=True,
            streamer=_Progress(bar, setting.max_new_tokens),
            **SAMPLING,
        )
        # On a GPU, generate may run a step more than it returns.
        steps = zip(sampled.logits, sampled.tokens.T, strict=False)
        nll = [-torch.log_softmax(logits.float(), dim=-1).gather(1, tokens[:, None])[:, 0] for logits, tokens in steps]
        target = None if setting.guidance is None else setting.guidance.get("target_length")
        for row, counts in enumerate(sampled.counts):
            ids, of_row = sampled.tokens[row][counts].tolist(), torch.stack(nll, dim=1)[row][counts].tolist()
            text = str(models.tokenizer.decode(ids, skip_special_tokens=True))
            ended = ids[-1] in models.eos_token_ids
            answers.append(Answer(name, target, seed, start + row, ids, text, ended, of_row))
    return answers


def plot(result: Result, file: Path) -> None:
    """Write the lengths of answers against their targets as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from lenvm_kernels.evaluate.report import plot_lengths

    plot_lengths(result.plan.targets, result.views(), file)


class _Progress(BaseStreamer):
    """Moves the bar with every step of ``generate``, and to the batch's end when all its rows have ended early."""

    def __init__(self, bar: tqdm, steps: int) -> None:
        self._bar, self._left, self._in_prompt = bar, steps, True

    def put(self, value: torch.Tensor) -> None:
        if not self._in_prompt:  # generate hands over the prompts first
            self._bar.update(1)
            self._left -= 1
        self._in_prompt = False

    def end(self) -> None:
        self._bar.update(self._left)


def _scaled(scale: float) -> dict[str, Any]:
    return {"value_mode": "centered_exp", "value_scale": scale}
