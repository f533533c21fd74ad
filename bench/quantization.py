"""What numbers in 8 bits change of a value model's answers: ``python -m bench.quantization [--json FILE] [--quick]``.

Each variant is a value model that keeps something in fewer bits, beside the one it is compared with. Both see the same
contexts and candidates. The differences, over all of them:

- of the value logits ``z``: root of their mean square, beside the spread of ``z``; and the largest;
- of the predicted lengths, ``-softplus(z) / ln(gamma)``: relative, the mean and the largest;
- of the guided probabilities: half the sum of the differences of a request's candidates (total variation, 0 to 1), the
  mean and the largest, for a tilt by a scale (``mul``) and for one to a target length (``eq_soft``, its target the
  middle one of the predicted lengths).

Models: that of the demo, whose contexts are answers to its held-out prompts and whose candidates are the base model's
five best next tokens; and the dimensions of Qwen2.5 with random weights, tokens and candidates. Random weights have no
outliers, and their values nothing to do with text: they say how errors grow with depth and width, no more. Everything
is computed by the references, which round as the kernels do: to the model's dtype after each operator. bf16 beside fp32
is a yardstick: what a model loses by what is in use anyway.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from bench.harness import flags
from bench.harness.reporting import table
from bench.harness.storing import environment, write_json
from bench.models import make_candidates, make_config
from lenvm_kernels.guidance import GuidanceTable, parse_guidance
from lenvm_kernels.loading import VALUE, held_out_prompts, spread
from lenvm_kernels.loading.models import Models
from lenvm_kernels.ops.reweight_scatter import reweight_scatter
from lenvm_kernels.ops.topk_candidates import topk_candidates
from lenvm_kernels.types import Candidates
from lenvm_kernels.value_model import KVCache, RaggedBatch, ValueModel, ValueModelConfig
from lenvm_kernels.value_model.checkpoint import HEAD_FILE, with_adapter, with_head

TOP_K, RANDOM_CANDIDATES = 5, 8
SCALE = 0.8  # of the tilt
ANSWER_TOKENS, EVERY = 192, 48  # of the demo's answers, and where in them a context ends
AT_ONCE = 16  # contexts of a forward


@dataclass(frozen=True)
class Variant:
    """A way to keep a value model.

    Attributes:
        name: of its row.
        dtype: of the model.
        against: that of the model it is compared with, which keeps everything in it.
        model: further options of :class:`ValueModel`.
        cache: of :meth:`KVCache.of_slots`.
    """

    name: str
    dtype: torch.dtype
    against: torch.dtype
    model: dict[str, Any] = field(default_factory=dict)
    cache: dict[str, Any] = field(default_factory=dict)


VARIANTS = (
    Variant("all in bf16, beside fp32", torch.bfloat16, torch.float32),
    Variant("weights in fp8, beside bf16", torch.bfloat16, torch.bfloat16, dict(weights="fp8")),
    Variant("cache in fp8, beside bf16", torch.bfloat16, torch.bfloat16, cache=dict(cache="fp8")),
    Variant("both in fp8, beside bf16", torch.bfloat16, torch.bfloat16, dict(weights="fp8"), cache=dict(cache="fp8")),
)


@dataclass(frozen=True)
class Subject:
    """A value model's tensors, and what it is asked.

    Attributes:
        name: of the model.
        config: its architecture.
        tensors: its weights.
        gamma: a value ``v`` is a length of ``ln(1 - v) / ln(gamma)``.
        contexts: tokens that each request has.
        candidates: of the next token of each.
        eos: ids that end an output.
    """

    name: str
    config: ValueModelConfig
    tensors: dict[str, torch.Tensor]
    gamma: float
    contexts: list[torch.Tensor]
    candidates: Candidates
    eos: set[int]


@dataclass(frozen=True)
class Errors:
    """Of a variant on a subject; see the module."""

    subject: str
    variant: str
    layers: int
    requests: int
    z_spread: float
    z_rms: float
    z_most: float
    length_mean: float
    length_most: float
    scale_mean: float
    scale_most: float
    target_mean: float
    target_most: float


# --- models ---


def demo(contexts: int) -> Subject:
    """SmolLM2-135M with the shipped adapters and head."""
    models = Models.load("demo", "demo", device="cpu", dtype=torch.float32)
    inputs = models.encode(spread(held_out_prompts(), contexts))
    torch.manual_seed(0)
    sampling = dict(do_sample=True, temperature=0.8, top_k=8, pad_token_id=models.pad_token_id)
    answers = models.model.generate(**inputs, max_new_tokens=ANSWER_TOKENS, **sampling)
    start, found, logits = inputs["input_ids"].shape[1], [], []
    with torch.no_grad():
        for answer, mask in zip(answers, inputs["attention_mask"], strict=True):
            tokens = answer[start - int(mask.sum()) :]
            ended = [i for i in range(int(mask.sum()), len(tokens)) if tokens[i].item() in models.eos_token_ids]
            tokens = tokens[: ended[0]] if ended else tokens
            scores = models.model(tokens[None]).logits[0]
            for length in range(int(mask.sum()), len(tokens) + 1, EVERY):
                found.append(tokens[:length])
                logits.append(scores[length - 1])
    candidates = topk_candidates(
        torch.stack(logits), top_k=TOP_K, top_p=1.0, min_p=0.0, temperature=0.8, is_logits=True
    )
    config, eos = models.value_model.config, set(models.eos_token_ids)
    tensors = with_head(with_adapter(models.model.state_dict(), VALUE), VALUE / HEAD_FILE)
    gamma = models.value_model.lenvm_config.gamma
    return Subject("SmolLM2-135M, the demo's value model", config, tensors, gamma, found, candidates, eos)


def random(name: str, contexts: int, layers: int | None) -> Subject:
    """The dimensions of ``name``: activations of O(1), what a layer adds smaller the deeper the model."""
    config = make_config(name, vocab_size=4096, **({} if layers is None else {"num_layers": layers}))
    generator = torch.Generator().manual_seed(0)
    added = (2 * config.num_layers) ** -0.5  # by o and down, so that the residual stream stays of O(1)

    def draw(key: str, shape: tuple[int, ...]) -> torch.Tensor:
        normal = torch.randn(shape, generator=generator)
        if "norm" in key:
            return 1 + 0.1 * normal
        if key == "embed_tokens.weight":
            return normal
        return normal * (added if "o_proj" in key or "down_proj" in key else 1) * shape[-1] ** -0.5

    tensors = {key: draw(key, shape) for key, shape in config.tensor_shapes().items()}
    tensors["v_head.summary.weight"] *= 4  # lengths that differ
    lengths = torch.randint(32, 128, (contexts,), generator=generator).tolist()
    found = [torch.randint(config.vocab_size, (length,), generator=generator) for length in lengths]
    torch.manual_seed(0)
    candidates = make_candidates(contexts, RANDOM_CANDIDATES, config.vocab_size, "cpu")
    return Subject(f"{name}, random", config, tensors, 0.997, found, candidates, set())


# --- what they answer ---


def value_logits(subject: Subject, dtype: torch.dtype, model: dict[str, Any], cache: dict[str, Any]) -> torch.Tensor:
    """Of all candidates, fp32 [B, K]. A context is read in two forwards: the second one, of the last
    token, reads the cache."""
    value_model = ValueModel(subject.config, subject.tensors, dtype=dtype, **model)
    results = []
    for first in range(0, len(subject.contexts), AT_ONCE):
        part = slice(first, first + AT_ONCE)
        contexts, ids = subject.contexts[part], subject.candidates.token_ids[part]
        lengths, width = [len(tokens) for tokens in contexts], max(map(len, contexts))
        slots = torch.arange(len(contexts) * width, dtype=torch.int32).view(len(contexts), width)
        kept = KVCache.of_slots(value_model, slots.numel(), **cache)
        none = torch.empty(len(contexts), 0, dtype=torch.int32)
        cached = [length - 1 for length in lengths]
        _forward(value_model, kept, slots, contexts, [0] * len(contexts), cached, none)
        results.append(_forward(value_model, kept, slots, contexts, cached, lengths, ids))
    return torch.cat(results)


def _forward(
    value_model: ValueModel,
    cache: KVCache,
    slots: torch.Tensor,
    contexts: Sequence[torch.Tensor],
    cached: Sequence[int],
    ends: Sequence[int],
    candidates: torch.Tensor,
) -> torch.Tensor:
    def int32(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    spans = list(zip(cached, ends, strict=True))
    lens = int32([end - start for start, end in spans])
    return value_model.forward(
        RaggedBatch.build(
            torch.cat([tokens[start:end] for tokens, (start, end) in zip(contexts, spans, strict=True)]),
            torch.cat([row[start:end] for row, (start, end) in zip(slots, spans, strict=True)]),
            lens.cumsum(0, dtype=torch.int32) - lens,
            lens,
            candidates,
            int32([int((row >= 0).sum()) for row in candidates]),
            int32(cached),
            slots,
            torch.arange(len(contexts)),
        ),
        cache,
    )


def lengths_of(z: torch.Tensor, gamma: float) -> torch.Tensor:
    return -F.softplus(z.double()) / torch.tensor(gamma, dtype=torch.float64).log()


def guided(subject: Subject, z: torch.Tensor, guidance: dict[str, Any]) -> torch.Tensor:
    """Guided probabilities of the candidates, [B, K]."""
    params = parse_guidance(guidance | {"gamma": subject.gamma})
    columns = GuidanceTable.from_params([params] * len(z), [subject.eos] * len(z), "cpu").columns
    return reweight_scatter(subject.candidates, z, columns)


def compare(subject: Subject, variant: Variant, expected: torch.Tensor) -> Errors:
    """A variant's answers, beside ``expected`` ones."""
    z = value_logits(subject, variant.dtype, variant.model, variant.cache)
    there = subject.candidates.token_ids >= 0
    difference = (z - expected).abs()[there].double()
    before = lengths_of(expected, subject.gamma)
    of_lengths = ((lengths_of(z, subject.gamma) - before).abs() / before)[there]
    target = {"target_length": round(before[there].median().item()), "op": "soft"}
    changes = []
    for guidance in ({"value_mode": "mul", "value_scale": SCALE}, target):
        one, other = (guided(subject, values, guidance) for values in (z, expected))
        changes.append((one - other).abs().sum(1) / 2)
    numbers = (expected[there].std(), difference.square().mean().sqrt(), difference.max())
    numbers += (of_lengths.mean(), of_lengths.max(), *(f(x) for x in changes for f in (torch.mean, torch.max)))
    rounded = [float(f"{number.item():.3g}") for number in numbers]
    return Errors(subject.name, variant.name, subject.config.num_layers, len(z), *rounded)


def measure(subjects: Iterator[Subject]) -> Iterator[Errors]:
    """Of every variant on every subject."""
    for subject in subjects:
        expected: dict[torch.dtype, torch.Tensor] = {}
        for variant in VARIANTS:
            if variant.against not in expected:
                expected[variant.against] = value_logits(subject, variant.against, {}, {})
            yield compare(subject, variant, expected[variant.against])


# --- the table ---

COLUMNS = ("model", "layers", "requests", "variant", "spread of z", "z rms", "z most", "length mean", "length most")
COLUMNS += ("tilt mean", "tilt most", "target mean", "target most")


def row(errors: Errors) -> list[object]:
    e = errors
    percent = [f"{x:.2%}" for x in (e.length_mean, e.length_most)]
    return [
        *(e.subject, e.layers, e.requests, e.variant, e.z_spread, e.z_rms, e.z_most, *percent),
        *(e.scale_mean, e.scale_most, e.target_mean, e.target_most),
    ]


def subjects(quick: bool) -> Iterator[Subject]:
    """One after the other: the largest takes 6 GB."""
    yield demo(2 if quick else 8)
    yield random("Qwen2.5-0.5B", 2 if quick else 8, 1 if quick else None)
    if not quick:
        yield random("Qwen2.5-1.5B", 8, None)


def main() -> None:
    parser = flags.parser(__doc__, json="write the numbers to a file")
    parser.add_argument("--quick", action="store_true", help="few requests, and a layer of the smallest model")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    found = []
    for errors in measure(subjects(args.quick)):
        found.append(errors)
        if args.json:  # what there is, should the rest not fit
            write_json(args.json, environment("cpu") | {"errors": [asdict(e) for e in found]})
    print("\n".join(table(COLUMNS, map(row, found))))


if __name__ == "__main__":
    main()
