"""``embed_tokens``: kernel against reference, reference against transformers, ids of no vocabulary, other rows."""

import math

import pytest
import torch
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

from lenvm_kernels.fuzz.ops.embed_tokens import make_inputs
from lenvm_kernels.ops.embed_tokens import MAX_BLOCK_H, embed_tokens
from lenvm_kernels.types import EmbeddedTokens

BACKENDS = ["triton", "reference"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def i64(*values):
    return torch.tensor(values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_reference_matches_transformers(dtype):
    config = Qwen2Config(hidden_size=64, num_attention_heads=2, max_position_embeddings=131_072, rope_theta=1e6)
    rotary = Qwen2RotaryEmbedding(config)
    inputs = make_inputs(9, 64, 16, dtype) | {"inv_freq": rotary.inv_freq, "rope_scale": 1.5}
    embedded = embed_tokens(**inputs, backend="reference")
    cos, sin = rotary(torch.zeros(1), inputs["positions"][None])
    assert torch.equal(embedded.cos, 1.5 * cos[0, :, :16]) and torch.equal(embedded.sin, 1.5 * sin[0, :, :16])
    assert torch.equal(embedded.hidden, torch.nn.Embedding.from_pretrained(inputs["embedding"])(inputs["token_ids"]))
    assert embedded.hidden.dtype == dtype and embedded.square_sums.dtype == torch.float32


def test_reference_computes_in_fp64():
    inputs = make_inputs(5, 130, 8, torch.float64)
    embedded = embed_tokens(**inputs)
    assert embedded.hidden.dtype == embedded.square_sums.dtype == torch.float64
    assert embedded.cos.dtype == embedded.sin.dtype == torch.float32
    squares = embedded.hidden.square()
    for group, columns in enumerate((slice(0, 64), slice(64, 128), slice(128, 130))):
        torch.testing.assert_close(embedded.square_sums[group], squares[:, columns].sum(1), rtol=1e-14, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 64, 65, 200, MAX_BLOCK_H + 70])
def test_sums_of_small_integers_are_exact(device, backend, dtype, size):
    """Each group has its own columns, and each token its own column of the result."""
    tokens = 3
    table = torch.arange(tokens * size).view(tokens, size) % 7 - 3
    ids, zeros = torch.tensor([2, 0, 1], device=device), torch.zeros(tokens, dtype=torch.int64, device=device)
    embedded = embed_tokens(ids, zeros, table.to(device, dtype), torch.ones(1, device=device), backend=backend)
    rows = table[ids.cpu()]
    expected = torch.stack([x.square().sum(1) for x in rows.split(64, dim=1)])
    assert torch.equal(embedded.hidden.cpu(), rows.to(dtype))
    assert embedded.square_sums.is_contiguous() and torch.equal(embedded.square_sums.cpu(), expected.float())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_outside_of_the_vocabulary_are_nan(device, backend, dtype):
    """And those at its ends are not; nor are their neighbours. What lies around the vocabulary is not read."""
    vocab, size = 6, 70
    memory = torch.ones(vocab + 2, size, dtype=dtype, device=device)
    embedding = memory[1:-1].fill_(2)
    ids = [0, -1, vocab - 1, vocab, 3, -(2**63), 2**63 - 1, 2**32, -(2**32) + 3, 5]
    positions = torch.arange(len(ids), device=device)
    embedded = embed_tokens(
        torch.tensor(ids, device=device), positions, embedding, torch.ones(2, device=device), backend=backend
    )
    for i, token in enumerate(ids):
        if 0 <= token < vocab:
            assert (embedded.hidden[i] == 2).all() and embedded.square_sums[:, i].tolist() == [4 * 64, 4 * 6]
        else:
            assert embedded.hidden[i].isnan().all() and embedded.square_sums[:, i].isnan().all()
    assert embedded.cos.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_angles_of_far_positions(device, backend):
    """The angle is the fp32 product, as in transformers; its cosine and sine are right to fp32's last bits."""
    positions = [0, 1, 2, 1000, 32_767, 99_999, 100_000, 105_700, 131_071, 2**24 + 2, 2**33]
    inv_freq = torch.tensor([1.0, 0.8111, 0.0317, 1e-6, 3.7e-7])
    ids = torch.zeros(len(positions), dtype=torch.int64, device=device)
    embedded = embed_tokens(
        ids,
        torch.tensor(positions, device=device),
        torch.ones(1, 1, device=device),
        inv_freq.to(device),
        rope_scale=1.25,
        backend=backend,
    )
    angles = (torch.tensor(positions).float()[:, None] * inv_freq).double()
    for x, expected in ((embedded.cos, angles.cos()), (embedded.sin, angles.sin())):
        torch.testing.assert_close(x.cpu().double(), 1.25 * expected, rtol=0, atol=3e-7)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_rows", [None, -1, 0, 1, 4, 6, 7])
def test_only_the_tokens_that_are_there_count(device, backend, num_rows):
    tokens = 6
    inputs = make_inputs(tokens, 130, 5, torch.float32, device=device)
    expected = embed_tokens(**inputs, backend=backend)
    rows = tokens if num_rows is None else min(max(num_rows, 0), tokens)
    inputs["token_ids"][rows:] = 2**62
    inputs["positions"][rows:] = 2**62
    if num_rows is not None:
        inputs["num_rows"] = torch.tensor([num_rows], dtype=torch.int32, device=device)
    embedded = embed_tokens(**inputs, backend=backend)
    for x, wanted in zip(embedded, expected, strict=True):
        assert x.shape == wanted.shape
    for name in ("hidden", "cos", "sin"):
        assert torch.equal(getattr(embedded, name)[:rows], getattr(expected, name)[:rows])
    assert torch.equal(embedded.square_sums[:, :rows], expected.square_sums[:, :rows])


@pytest.mark.parametrize("size", [1, 130, 192, MAX_BLOCK_H + 1])
@pytest.mark.parametrize("half", [1, 5, 8])
def test_nothing_else_is_written(device, monkeypatch, size, half):
    """Neither what is around the results, nor the tokens that are not there; of the others, everything."""
    tokens, rows, guard, margin, buffers, empty = 4, 2, -77.0, 2 * MAX_BLOCK_H, [], torch.empty
    inputs = make_inputs(tokens, size, half, torch.float32, device=device)
    inputs["num_rows"] = torch.tensor([rows], dtype=torch.int32, device=device)

    def guarded_empty(shape, *, dtype, device):
        count = math.prod(shape)
        buffer = empty(count + 2 * margin, dtype=dtype, device=device).fill_(guard)
        buffers.append((buffer, count))
        return buffer[margin : margin + count].view(shape)

    monkeypatch.setattr(torch, "empty", guarded_empty)
    embedded = embed_tokens(**inputs, backend="triton")
    monkeypatch.undo()
    assert len(buffers) == len(EmbeddedTokens._fields)
    for buffer, count in buffers:
        assert (buffer[:margin] == guard).all() and (buffer[margin + count :] == guard).all()
    for x in embedded._replace(square_sums=embedded.square_sums.T):
        assert not (x[:rows] == guard).any() and (x[rows:] == guard).all()


def test_offsets_past_32_bits(device):
    """Row 2 of the embedding is 2**31 away. Pages that nothing touches take no memory on a CPU."""
    far, size = 2**30, 8
    memory = torch.empty(2 * far + size, dtype=torch.float16, device=device)
    embedding = memory.as_strided((3, size), (far, 1))
    embedding.copy_(torch.arange(3 * size).view(3, size))
    ids = torch.tensor([2, 0, 1], device=device)
    embedded = embed_tokens(ids, ids, embedding, torch.ones(1, device=device), backend="triton")
    assert embedded.hidden[:, 0].tolist() == [16, 0, 8] and torch.equal(embedded.hidden, embedding[ids])


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens(device, backend):
    embedded = embed_tokens(**make_inputs(0, 130, 5, torch.bfloat16, device=device), backend=backend)
    assert [tuple(x.shape) for x in embedded] == [(0, 130), (3, 0), (0, 5), (0, 5)]


def good_arguments():
    inputs = make_inputs(3, 16, 4, torch.float32)
    return inputs | {"num_rows": torch.tensor([3], dtype=torch.int32), "rope_scale": 1}


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("token_ids", i64(1, 2, 3).int(), ValueError, r"token_ids must be int64 \[\*\], got int32 \[3\] on cpu"),
        ("token_ids", i64([1, 2, 3]), ValueError, r"token_ids must be int64 \[\*\], got int64 \[1, 3\]"),
        ("token_ids", torch.arange(6)[::2], ValueError, "token_ids must be contiguous in its last dimension"),
        ("token_ids", i64(1, 2), ValueError, r"positions must be int64 \[2\] on cpu, got int64 \[3\]"),
        ("embedding", torch.zeros(0, 16), ValueError, r"embedding must have .* and column, got shape \[0, 16\]"),
        ("embedding", torch.zeros(5, 0), ValueError, r"embedding must have .* and column, got shape \[5, 0\]"),
        ("inv_freq", torch.zeros(0), ValueError, "inv_freq must have at least one element, got none"),
        ("rope_scale", "1", TypeError, "rope_scale must be a number, got str"),
        ("rope_scale", True, TypeError, "rope_scale must be a number, got bool"),
    ],
)
def test_errors_name_the_argument(name, value, error, message):
    with pytest.raises(error, match=f"^{message}"):
        embed_tokens(**good_arguments() | {name: value})
