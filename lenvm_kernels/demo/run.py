"""What ``lenvm demo`` does: answer held-out prompts with and without guidance, and measure lengths and perplexity.

Lengths count new tokens, the end-of-sequence token included, and stop at the limit of new tokens. Perplexity is ``exp``
of the mean negative log-likelihood per generated token under the base model alone: fp32, its raw distribution at
temperature 1, without the sampling filters. The base model computes exactly these logits while it generates, so no
second forward is needed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers.generation.streamers import BaseStreamer

from lenvm_kernels.demo import spread
from lenvm_kernels.demo.generation import sample
from lenvm_kernels.demo.models import Models

# As when the answers were sampled that the value model is trained on.
SAMPLING: dict[str, Any] = dict(temperature=0.8, top_k=8, min_p=0.02)
TARGET = {"target_length": 80}  # by the default constraint; docs/demo.md has others beside it
# Rows of a batch: more are no faster on a CPU, where a step is bound by arithmetic, and each costs memory for logits.
ROWS = 16


@dataclass(frozen=True)
class Plan:
    """How much the demo generates, and what it asks for.

    Attributes:
        prompts: held-out prompts to answer in each setting, spread evenly over all of them.
        max_new_tokens: the limit of an answer, in tokens.
        shorter, longer: ``value_scale`` of ``centered_exp`` in these two settings.
        target: guidance of the setting ``target``; its ``target_length`` is in tokens.
        more_scales: further values of ``value_scale`` for the plot.
        scale_prompts: prompts behind each point of the plot.
    """

    prompts: int
    max_new_tokens: int
    shorter: float = -60.0
    longer: float = 20.0
    target: dict[str, Any] = field(default_factory=lambda: dict(TARGET))
    more_scales: tuple[float, ...] = ()
    scale_prompts: int = 8

    def guidance(self) -> dict[str, dict[str, Any] | None]:
        """The guidance of each setting that is generated; ``target_base`` is ``base`` measured against the target."""
        return {
            "base": None,
            "shorter": _scaled(self.shorter),
            "longer": _scaled(self.longer),
            "target": self.target,
        }


QUICK = Plan(prompts=10, max_new_tokens=128, more_scales=(-10.0,), scale_prompts=5)
FULL = Plan(prompts=40, max_new_tokens=128, more_scales=(-20.0, -10.0, -5.0, 5.0, 10.0, 40.0), scale_prompts=16)


@dataclass(frozen=True)
class Answers:
    """One setting's output for every prompt."""

    lengths: list[int]  # tokens
    texts: list[str]
    nll: float  # nats, summed over all generated tokens

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll / sum(self.lengths))


@dataclass(frozen=True)
class Result:
    """All of a demo: the answers of each setting, and the points of the plot."""

    plan: Plan
    prompts: list[str]
    answers: dict[str, Answers]  # by setting
    mean_length_of_scale: dict[float, float]  # tokens, over the first ``plan.scale_prompts`` prompts

    def rows(self) -> list[dict[str, Any]]:
        """The table: mean length and mean distance from the target length, both in tokens, and perplexity."""
        target = self.plan.target["target_length"]
        guidance = self.plan.guidance()
        rows = []
        for setting in ("base", "shorter", "longer", "target_base", "target"):
            name = "base" if setting == "target_base" else setting
            answers = self.answers[name]
            rows.append(
                {
                    "setting": setting,
                    "guidance": guidance[name],
                    "mean_length": _mean(answers.lengths),
                    "length_deviation": _mean([abs(length - target) for length in answers.lengths]),
                    "perplexity": answers.perplexity,
                }
            )
        return rows


def run(models: Models, prompts: Sequence[str], plan: Plan, *, seed: int) -> Result:
    """Generate every setting and every point of the plot, showing progress on stderr."""
    prompts = spread(prompts, plan.prompts)
    few = prompts[: plan.scale_prompts]
    batches = len(plan.guidance()) * -(-len(prompts) // ROWS) + len(plan.more_scales) * -(-len(few) // ROWS)
    with tqdm(total=batches * plan.max_new_tokens, unit="step") as bar:
        answers = {}
        for setting, guidance in plan.guidance().items():
            bar.set_description(setting)
            answers[setting] = answer(models, prompts, guidance, plan.max_new_tokens, seed=seed, bar=bar)
        scales = {0.0: answers["base"], plan.shorter: answers["shorter"], plan.longer: answers["longer"]}
        for scale in plan.more_scales:
            bar.set_description(f"scale {scale:g}")
            scales[scale] = answer(models, few, _scaled(scale), plan.max_new_tokens, seed=seed, bar=bar)
        bar.set_description("done")
    curve = {scale: _mean(scales[scale].lengths[: len(few)]) for scale in sorted(scales)}
    return Result(plan, prompts, answers, curve)


def answer(
    models: Models,
    prompts: Sequence[str],
    guidance: dict[str, Any] | None,
    max_new_tokens: int,
    *,
    seed: int,
    bar: tqdm,
) -> Answers:
    """Answer the prompts under one guidance; ``bar`` moves by ``max_new_tokens`` for each batch of ``ROWS`` prompts."""
    torch.manual_seed(seed)
    lengths, texts, nll = [], [], 0.0
    for start in range(0, len(prompts), ROWS):
        sampled = sample(
            models,
            models.value_model,
            models.encode(prompts[start : start + ROWS]),
            guidance,
            max_new_tokens=max_new_tokens,
            keep_logits=True,
            streamer=_Progress(bar, max_new_tokens),
            **SAMPLING,
        )
        # On a GPU, generate may run a step more than it returns.
        for logits, tokens, counts in zip(sampled.logits, sampled.tokens.T, sampled.counts.T, strict=False):
            log_p = torch.log_softmax(logits.float(), dim=-1).gather(1, tokens[:, None])[:, 0]
            nll -= log_p[counts].sum().item()
        lengths += sampled.counts.sum(1).tolist()
        texts += models.tokenizer.batch_decode(sampled.tokens, skip_special_tokens=True)
    return Answers(lengths, texts, nll)


def plot(result: Result, file: Path) -> None:
    """Write the mean length against ``value_scale`` as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 4.0), layout="constrained")
    scales, lengths = zip(*result.mean_length_of_scale.items(), strict=True)
    axes.plot(scales, lengths, marker="o")
    axes.axhline(result.mean_length_of_scale[0.0], color="grey", linestyle="--", linewidth=1, label="base model")
    axes.set_xlabel("value_scale of centered_exp")
    axes.set_ylabel(f"mean length in tokens (at most {result.plan.max_new_tokens})")
    axes.set_title(f"SmolLM2-135M-Instruct, {min(len(result.prompts), result.plan.scale_prompts)} held-out prompts")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(file, format="png", dpi=150)
    pyplot.close(figure)


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


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
