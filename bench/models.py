"""Value models and probes of real dimensions with random weights, for benchmarks and compilation."""

from functools import partial
from typing import Any

import torch

from lenvm_kernels.guidance import parse_guidance
from lenvm_kernels.step import EngineSlots, GuidedStep, ModelValues, Sampling, StepBatch, StepConfig
from lenvm_kernels.types import Candidates, Status
from lenvm_kernels.values import ValueModel, ValueModelConfig
from lenvm_kernels.values.probe import SIGNS, ProbeConfig

VOCAB = 151_936  # of Qwen2.5

# hidden, intermediate, layers, query heads, key/value heads, head dimension, norm of queries and keys
DIMENSIONS = {
    "SmolLM2-135M": (576, 1536, 30, 9, 3, 64, False),
    "Qwen2.5-0.5B": (896, 4864, 24, 14, 2, 64, False),
    "Qwen2.5-1.5B": (1536, 8960, 28, 12, 2, 128, False),
    "Qwen2.5-3B": (2048, 11008, 36, 16, 2, 128, False),
    "Qwen2.5-7B": (3584, 18944, 28, 28, 4, 128, False),
    "Qwen3-1.7B": (2048, 6144, 28, 16, 8, 128, True),
}
RANDOM_PROBE = "random-probe"  # in place of the path of a probe
# A probe: layers of a base model of 28 layers whose states are read, sizes, and bins of lengths.
PROBE_LAYERS, PROBE_SIZE, PROBE_OUTPUTS, PROBE_BINS = (14, 21, 28), 128, 128, 33


def make_config(name: str, *, vocab_size: int, **changed: int) -> ValueModelConfig:
    """The architecture ``name`` with another vocabulary and the fields ``changed``."""
    fields = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "qk_norm")
    dimensions: dict[str, Any] = dict(zip(fields, DIMENSIONS[name], strict=True)) | changed
    head_dim = dimensions["head_dim"]
    return ValueModelConfig(
        **dimensions,
        vocab_size=vocab_size,
        rms_norm_eps=1e-6,
        rope_inv_freq=tuple(1e6 ** (-2 * i / head_dim) for i in range(head_dim // 2)),
        qkv_bias=name.startswith("Qwen2"),
    )


def make_model(config: ValueModelConfig, dtype: torch.dtype, device: str) -> ValueModel:
    """A value model with random weights."""
    tensors = {
        name: torch.randn(shape, dtype=dtype, device=device) * shape[-1] ** -0.5
        for name, shape in config.tensor_shapes().items()
    }
    return ValueModel(config, tensors)


def make_candidates(B: int, K: int, V: int, device: str) -> Candidates:
    """Candidates of ``B`` guided rows, ``K`` each."""
    return Candidates(
        token_ids=torch.rand(B, V, device=device).topk(K).indices.int(),
        probs=torch.softmax(3 * torch.randn(B, K, device=device), 1),
        counts=torch.full((B,), K, dtype=torch.int32, device=device),
        status=torch.full((B,), int(Status.GUIDE), dtype=torch.int8, device=device),
        lost_mass=torch.zeros(B, device=device),
    )


def random_probe(
    layers: tuple[int, ...], num_layers: int, hidden_size: int, vocab_size: int, device: str = "cpu"
) -> tuple[ProbeConfig, dict[str, torch.Tensor]]:
    """The configuration and tensors of a probe with random weights, which reads the states of ``layers``."""
    edges = tuple(range(1, PROBE_BINS + 2))
    config = ProbeConfig("random", layers, num_layers, hidden_size, vocab_size, "0" * (SIGNS // 4), edges)
    weights = {
        "projection": (2 * PROBE_SIZE, config.state_size),
        "embedding": (PROBE_SIZE, hidden_size),
        "fc": (PROBE_OUTPUTS, PROBE_SIZE),
        "bins": (PROBE_BINS, PROBE_OUTPUTS),
    }
    shapes = {f"{name}.{kind}": of for name, x in weights.items() for kind, of in (("weight", x), ("bias", x[:1]))}
    return config, {name: torch.randn(shape, device=device) * shape[-1] ** -0.5 for name, shape in shapes.items()}


def forward_floor(
    config: ValueModelConfig, dtype: torch.dtype, tokens: int, candidates: int, requests: int, cached: int
) -> tuple[int, int]:
    """Minimum (bytes, operations) of a forward.

    Args:
        config: the architecture.
        dtype: dtype of weights and cache.
        tokens: rows of the forward, delta tokens and candidates.
        candidates: number of requested values.
        requests: number of requests, with ``cached`` tokens each.
        cached: tokens in the cache per request.
    """
    size, kv = dtype.itemsize, 2 * config.num_kv_heads * config.head_dim
    head = config.hidden_size * (config.hidden_size + 1)
    attention = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
    parameters = config.num_layers * config.hidden_size * (attention + 3 * config.intermediate_size)
    moved = head + tokens * config.hidden_size + parameters + config.num_layers * kv * requests * cached
    matmuls = parameters * tokens + head * candidates
    pairs = config.num_layers * 2 * config.num_heads * config.head_dim * tokens * cached
    return moved * size, 2 * (matmuls + pairs)


def value_model_step(name: str, rows: int) -> None:
    """Run a prompt and two steps of one layer of a value model in bf16. All layers launch the same kernels."""
    bf16, i32, i64 = (partial(torch.zeros, dtype=dtype) for dtype in (torch.bfloat16, torch.int32, torch.int64))
    config = make_config(name, vocab_size=VOCAB, num_layers=1)
    step = GuidedStep(
        ModelValues(ValueModel(config, {key: bf16(shape) for key, shape in config.tensor_shapes().items()})),
        EngineSlots(i32(rows, 4096), 4 * 4096),
        StepConfig(vocab_size=VOCAB, max_candidates=8, backend="triton"),
    )
    for row in range(rows):
        step.add_request(row, parse_guidance({"target_length": 100}), {0})
    numbers, ones, prompt, probs = i32(rows), torch.ones(rows), i64(16 * rows), torch.zeros(rows, VOCAB)
    step.extend(prompt, numbers, numbers, numbers, numbers)
    sampling, batch = Sampling(numbers, ones, ones, sample=True), StepBatch(prompt[:rows], prompt[:rows], numbers)
    step.step(step.prepare(None, batch), sampling, scores=probs, probs=probs)
    step.step(step.prepare(bf16(rows, VOCAB), batch), sampling._replace(temperature=ones, is_logits=True))
