"""Operations of length-guided decoding by component, computed from the dimensions of the models.

    python -m bench.flops --check
    python -m bench.flops --base Qwen3-30B-A3B --value-model path/to/config.json --k 5

The components follow the authors' estimator (eric-ai-lab/Length-Value-Model, ``inference/timing``): matmuls of the
projections and SwiGLU, attention, and the head. Norms, activations, softmax, rotary embedding and the sampler are not
counted. A multiply-add is two operations.

- A token costs ``2 N (H D (2 Hq + 2 Hkv) + 3 H I)`` in its linear layers, and ``4 N Hq D c`` in attention over ``c``
  tokens, including itself. Output token ``t = 1 .. O`` after a prompt of ``P`` tokens attends to ``P + t`` tokens.
- In a mixture layer of ``E`` experts of size ``Ie``, with ``k`` experts per token, ``H E + 3 H Ie k`` replaces
  ``3 H I``: the router and the active experts. A shared expert of size ``Is`` adds ``3 H Is``, and ``H`` for its gate.
  The authors' estimator does not support mixtures.
- The head costs ``2 H V`` in a language model and ``2 (H^2 + H)`` in a value model.
- A prompt is computed once for all its samples, with a head per token as published; engines compute only the last head.
- The value model computes each prompt once, and each output token with ``k`` candidates, with a head for each.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.models import DIMENSIONS

VOCABULARY = {"SmolLM2-135M": 49_152, "Qwen2.5-7B": 152_064}
OTHER_VOCABULARY = 151_936  # the smaller Qwen2.5 and Qwen3
# Names of the number of experts in configurations, and architectures with supported mixtures.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe")


@dataclass(frozen=True)
class Architecture:
    """Dimensions of a Qwen2, Qwen3 or Llama model. The last five are 0 except for :data:`MIXTURES`."""

    hidden_size: int  # H
    intermediate_size: int  # I
    num_layers: int  # N
    num_heads: int  # Hq
    num_kv_heads: int  # Hkv
    head_dim: int  # D
    vocab_size: int  # V
    expert_layers: int = 0  # layers with experts instead of an MLP of size I
    num_experts: int = 0  # E, per layer
    experts_per_token: int = 0  # k
    expert_size: int = 0  # Ie
    shared_size: int = 0  # Is; 0 without a shared expert

    @classmethod
    def load(cls, source: str) -> Architecture:
        """Read a ``config.json``, a folder that contains one, or a known name.

        Raises:
            FileNotFoundError: ``source`` is not one of the three.
            ValueError: a mixture that is not in :data:`MIXTURES`.
        """
        if source in KNOWN_MIXTURES:
            return KNOWN_MIXTURES[source]
        if source in DIMENSIONS:
            return cls(*DIMENSIONS[source][:6], VOCABULARY.get(source, OTHER_VOCABULARY))
        name = Path(source, "config.json") if Path(source).is_dir() else Path(source)
        if not name.is_file():
            names = ", ".join((*DIMENSIONS, *KNOWN_MIXTURES))
            raise FileNotFoundError(f"a model must be a config.json, its folder, or one of {names}, got {source!r}")
        config = json.loads(name.read_text())
        hidden, heads, layers = (config[x] for x in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
        kv_heads, head_dim = config.get("num_key_value_heads") or heads, config.get("head_dim") or hidden // heads
        intermediate = config["intermediate_size"]
        model = cls(hidden, intermediate, layers, heads, kv_heads, head_dim, config["vocab_size"])
        experts = next((key for key in EXPERTS if config.get(key)), None)
        if experts is None:
            return model
        kind, dense, step = (
            config["model_type"],
            config.get("mlp_only_layers") or [],
            config.get("decoder_sparse_step", 1),
        )
        if kind not in MIXTURES:
            accepted = ", ".join(MIXTURES)
            raise ValueError(f"model_type in {name} must be one of {accepted} if it has {experts}, got {kind!r}")
        return replace(
            model,
            expert_layers=sum((i + 1) % step == 0 and i not in dense for i in range(layers)),
            num_experts=config[experts],
            experts_per_token=config["num_experts_per_tok"],
            expert_size=intermediate if kind == "mixtral" else config["moe_intermediate_size"],
            shared_size=config["shared_expert_intermediate_size"] if kind == "qwen2_moe" else 0,
        )

    @property
    def active_weights(self) -> int:
        """Number of weights of all layers that a token is multiplied with."""
        attention = self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        shared = 3 * self.shared_size + 1 if self.shared_size else 0
        mixture = self.num_experts + 3 * self.expert_size * self.experts_per_token + shared
        dense = (self.num_layers - self.expert_layers) * 3 * self.intermediate_size
        return self.hidden_size * (self.num_layers * attention + dense + self.expert_layers * mixture)

    @property
    def value_head(self) -> int:
        """Operations of a value head per token."""
        return 2 * (self.hidden_size**2 + self.hidden_size)

    def layers(self, tokens: float, attended: float) -> float:
        """Operations of ``tokens`` tokens in all layers; the tokens attend to ``attended`` tokens in total."""
        return 2 * self.active_weights * tokens + 4 * self.num_layers * self.num_heads * self.head_dim * attended


# Base models; bench.models has the dimensions of value models.
KNOWN_MIXTURES = {"Qwen3-30B-A3B": Architecture(2048, 6144, 48, 32, 4, 128, OTHER_VOCABULARY, 48, 128, 8, 768)}


@dataclass(frozen=True)
class Workload:
    """A decoding run. Numbers of tokens are means if lengths differ."""

    prompts: int
    samples: int  # per prompt
    prompt_tokens: float
    output_tokens: float  # per sample

    @property
    def outputs(self) -> float:
        """Output tokens of all samples."""
        return self.prompts * self.samples * self.output_tokens


def operations(base: Architecture, work: Workload, value: Architecture | None = None, k: int = 0) -> dict[str, float]:
    """Operations of a run by component: the base model, and the value model with ``k`` candidates unless it is None."""
    outputs, prefilled = work.outputs, work.prompts * work.prompt_tokens
    attended_by_outputs = outputs * (work.prompt_tokens + (work.output_tokens + 1) / 2)  # (P + 1) + ... + (P + O)
    attended_by_prompts = prefilled * (work.prompt_tokens + 1) / 2  # 1 + ... + P
    found: dict[str, float] = {
        "base linear": base.layers(outputs + prefilled, 0),
        "base attention": base.layers(0, attended_by_outputs + attended_by_prompts),
        "base LM head": 2 * base.hidden_size * base.vocab_size * (outputs + prefilled),
    }
    if value is None:
        return found
    decode = value.layers(outputs, attended_by_outputs)
    return found | {
        "LenVM extend": decode,
        "LenVM candidates": k * decode,
        "LenVM prefill": value.layers(prefilled, attended_by_prompts),
        "LenVM head": value.value_head * (outputs * (k + 1) + prefilled),
    }


def _total(*run: Any) -> float:
    return sum(operations(*run).values())


def per_output_token(base: Architecture, work: Workload, value: Architecture | None = None, k: int = 0) -> float:
    """Operations of decoding alone, without the prompts, per output token."""
    return (_total(base, work, value, k) - _total(base, replace(work, output_tokens=0), value, k)) / work.outputs


def ratio(base: Architecture, work: Workload, value: Architecture, k: int) -> float:
    """Operations of a guided run divided by the operations of the base model alone."""
    return _total(base, work, value, k) / _total(base, work)


# The published run: Qwen2.5-7B with the 1.5B value model, 50 questions of GSM8K, 16 samples each. The 237,724 published
# output tokens are 297 per sample. The length of the prompts is not published: 105 reproduces all published totals.
PUBLISHED_BASE, PUBLISHED_VALUE = "Qwen2.5-7B", "Qwen2.5-1.5B"
PUBLISHED_WORK = Workload(prompts=50, samples=16, prompt_tokens=105, output_tokens=297)


def published_figures() -> list[tuple[str, float, float, float]]:
    """Name, published number, computed number and accepted relative difference of each published figure."""
    base, value, work = Architecture.load(PUBLISHED_BASE), Architecture.load(PUBLISHED_VALUE), PUBLISHED_WORK
    peta = {name: count / 1e15 for name, count in operations(base, work, value, 5).items()}
    heads = value.value_head * work.outputs / 1e15  # the published figures of extend and candidates include their heads
    lenvm = sum(count for name, count in peta.items() if name.startswith("LenVM"))
    figures = [
        ("base, GFLOP per output token", 14.24, per_output_token(base, work) / 1e9, 0.001),
        ("guided, GFLOP per output token", 30.24, per_output_token(base, work, value, 5) / 1e9, 0.001),
        ("base linear, PFLOP", 3.17, peta["base linear"], 0.002),
        ("base attention, PFLOP", 0.02, peta["base attention"], 0.25),  # one digit is published
        ("base LM head, PFLOP", 0.26, peta["base LM head"], 0.02),
        ("LenVM extend, PFLOP", 0.63, peta["LenVM extend"] + heads, 0.01),
        ("LenVM candidates, PFLOP", 3.17, peta["LenVM candidates"] + 5 * heads, 0.002),
        ("LenVM in total, PFLOP", 3.82, lenvm, 0.002),
        ("value head, MFLOP per token", 4.7, value.value_head / 1e6, 0.01),
        ("ratio of the run, k = 5", 2.10, ratio(base, work, value, 5), 0.005),
    ]
    # Each run of the sweep had its own output length, which is not published. The run at k = 1 decodes greedily; an
    # output 5 % shorter than the baseline's output would give its ratio.
    for k, published, accepted in zip(range(1, 6), (1.30, 1.55, 1.74, 1.91, 2.08), (6, 1, 1, 1, 1.5), strict=True):
        figures.append((f"ratio in the sweep, k = {k}", published, ratio(base, work, value, k), accepted / 100))
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the published figures; fail if they differ")
    model = "a config.json, a folder with one, or a known name (default: %(default)s)"
    parser.add_argument("--base", default=PUBLISHED_BASE, help=f"base model: {model}")
    parser.add_argument("--value-model", default=PUBLISHED_VALUE, help=f"value model: {model}")
    parser.add_argument("--k", type=int, default=5, help="candidates per output token (default: %(default)s)")
    numbers = ("prompts", "samples", "prompt_tokens", "output_tokens")
    for name in numbers:
        flag, default = f"--{name.replace('_', '-')}", getattr(PUBLISHED_WORK, name)
        parser.add_argument(flag, type=int, default=default, help="(default: %(default)s)")
    args = parser.parse_args()
    for name in (*numbers, "k"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if args.check:
        status = 0
        for name, published, ours, accepted in published_figures():
            differs = abs(ours / published - 1) > accepted
            status |= differs
            print(f"{name:<32}{published:>8.4g}{ours:>10.4g}{ours / published - 1:>+8.1%}{'  DIFFERS' * differs}")
        return status
    try:
        base, value = Architecture.load(args.base), Architecture.load(args.value_model)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    work = Workload(*(getattr(args, name) for name in numbers))
    lines = {f"{name}, PFLOP": count / 1e15 for name, count in operations(base, work, value, args.k).items()}
    lines["base, GFLOP per output token"] = per_output_token(base, work) / 1e9
    lines["guided, GFLOP per output token"] = per_output_token(base, work, value, args.k) / 1e9
    lines["guided / base"] = ratio(base, work, value, args.k)
    print("\n".join(f"{name:<32}{number:>10.4g}" for name, number in lines.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
