"""Value head: kernels against the reference in fp64, the reference against torch.nn, and what no batch may change."""

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from lenvm_kernels.fuzz.ops.value_head import EPS, exact, make_inputs, square_sums_of
from lenvm_kernels.ops import value_head as ops
from lenvm_kernels.ops.value_head import num_counters, value_head
from tests.helpers.matches import assert_matches, assert_same

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WEIGHTS = ("fc_weight", "fc_bias", "summary_weight", "summary_bias")


@pytest.mark.parametrize(("size", "tokens"), [(896, 20), (1536, 4), (3584, 2)])
def test_real_sizes_match_fp64_reference(device, size, tokens):
    inputs = make_inputs(tokens, size, torch.bfloat16, device=device, norm=True)
    assert_matches(value_head(**inputs, backend="triton"), exact(**inputs), "value_head", torch.bfloat16)


@pytest.fixture
def wide_tiles(monkeypatch):
    """The tiles of a large H at any H: a real one takes the interpreter seconds."""
    monkeypatch.setattr(ops, "WIDE_FROM", 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 200, 320])
def test_wide_tiles_match_fp64_reference(device, wide_tiles, size, dtype):
    inputs = make_inputs(150, size, dtype, device=device, norm=True)
    assert_matches(value_head(**inputs, backend="triton"), exact(**inputs), "value_head", dtype)


def test_reference_matches_torch_modules():
    size = 96
    inputs = make_inputs(17, size, torch.float64, norm=True)
    norm, fc, summary = LlamaRMSNorm(size, EPS), nn.Linear(size, size), nn.Linear(size, 1)
    for parameter, name in zip(
        (norm.weight, fc.weight, fc.bias, summary.weight, summary.bias), ("norm_weight", *WEIGHTS), strict=True
    ):
        parameter.data = inputs[name]
    head = nn.Sequential(fc, nn.SiLU(), summary)
    rows = torch.tensor([3, 3, 16, 0])
    with torch.no_grad():
        plain = {k: v for k, v in inputs.items() if not k.startswith("norm")}
        torch.testing.assert_close(value_head(**plain), head(inputs["hidden"])[:, 0])
        torch.testing.assert_close(value_head(**plain, token_rows=rows), head(inputs["hidden"][rows])[:, 0])
        # LlamaRMSNorm computes in fp32 whatever it is given
        normalised = head(norm(inputs["hidden"]))[:, 0]
        torch.testing.assert_close(value_head(**inputs), normalised, rtol=1e-5, atol=1e-5)


def test_reference_follows_fp64_and_else_returns_fp32():
    assert value_head(**make_inputs(2, 64, torch.float64)).dtype == torch.float64
    assert value_head(**make_inputs(2, 64, torch.bfloat16)).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fused_norm_is_as_exact_as_the_module(device, dtype):
    inputs = make_inputs(128, 96, dtype, device=device, norm=True)
    truth = value_head(
        **{k: v.double() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}, backend="reference"
    )
    fused = value_head(**inputs, backend="triton")
    norm = LlamaRMSNorm(96, EPS).to(device)
    norm.weight.data = inputs["norm_weight"]
    with torch.no_grad():
        weights = {name: inputs[name] for name in WEIGHTS}
        module = value_head(norm(inputs["hidden"]), **weights, backend="reference")
    assert (fused - truth).norm() <= (module - truth).norm()


# How the final norm comes: not at all, in the kernel, or with its squares and its weight from outside.
NORMS = [None, "computed", "folded"]
MANY = 300  # outputs, so many that they take the larger tiles


@pytest.mark.bits
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", NORMS)
def test_a_row_has_the_same_bits_in_every_batch(device, dtype, norm):
    check_bits_of_rows(make_inputs(MANY, 192, dtype, device=device, norm=norm == "computed"), norm == "folded")


@pytest.mark.bits
def test_a_row_has_the_same_bits_in_every_batch_of_wide_tiles(device, wide_tiles):
    check_bits_of_rows(make_inputs(MANY, 200, torch.bfloat16, device=device, norm=True), True)


def check_bits_of_rows(inputs, has_square_sums):
    hidden = inputs.pop("hidden")
    tokens, square_sums = hidden.shape[0], square_sums_of(hidden)

    def logits_of(rows, **options):
        if has_square_sums:
            options["square_sums"] = square_sums[:, rows]
        return value_head(hidden[rows], **inputs, **options, backend="triton")

    logits = logits_of(slice(None))
    assert tokens > ops.FEW_OUTPUTS
    for alone in (0, 1, 63, 130, tokens - 1):
        assert torch.equal(logits_of(slice(alone, alone + 1)), logits[alone : alone + 1])
    for fewer in (8, 64, ops.BLOCK_M + 1, ops.FEW_OUTPUTS):
        assert torch.equal(logits_of(slice(fewer)), logits[:fewer])

    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(1)).to(hidden.device)
    assert torch.equal(logits_of(order), logits[order])
    repeated = torch.cat([order, order[:7], order[:7]])
    targets = torch.randperm(tokens + 14, generator=torch.Generator().manual_seed(2)).to(hidden.device)
    assert torch.equal(logits_of(slice(None), token_rows=repeated), logits[repeated])
    assert torch.equal(logits_of(slice(None), token_rows=repeated, targets=targets)[targets], logits[repeated])


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
@pytest.mark.parametrize("outputs", [37, MANY])
def test_targets_say_where_logits_go(device, backend, integers, outputs):
    inputs = make_inputs(40, 64, torch.float32, device=device, norm=True)
    draws = torch.Generator().manual_seed(3)
    rows = torch.randint(-2, 43, (outputs,), generator=draws).to(device)  # some are padding, the second block only that
    rows[64:192] = -1
    targets = torch.randperm(outputs, generator=draws).to(device, integers)
    in_order = value_head(**inputs, token_rows=rows, backend=backend)
    placed = value_head(**inputs, token_rows=rows, targets=targets, backend=backend)
    assert_same(placed[targets.long()], in_order, "value_head", backend)
    assert torch.equal(in_order == 0, (rows < 0) | (rows >= 40))
    reverse = torch.arange(39, -1, -1, device=device, dtype=integers)
    of_all = value_head(**inputs, targets=reverse, backend=backend)
    assert_same(of_all.flip(0), value_head(**inputs, backend=backend), "value_head", backend)


@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
@pytest.mark.parametrize("padding", [False, True])
def test_targets_outside_are_not_written(device, monkeypatch, integers, padding):
    inputs = make_inputs(5, 64, torch.float32, device=device)
    rows = torch.tensor([-1] * 5 if padding else [0, 4, -1, 2, 3], device=device)
    targets = torch.tensor([3, -1, 0, 5, 2**31 - 1], device=device).to(integers)
    logits = value_head(**inputs, token_rows=rows, backend="reference")
    expected = torch.stack([logits[2], logits[0]])
    found = value_head(**inputs, token_rows=rows, targets=targets, backend="reference")
    assert_same(found[[0, 3]], expected, "value_head", "reference")
    assert (found[[1, 2, 4]] == 0).all()
    buffers = guard_fresh_memory(monkeypatch)
    found = value_head(**inputs, token_rows=rows, targets=targets, backend="triton")
    assert_matches(found[[0, 3]], expected.double(), "value_head", torch.float32)
    assert found[[1, 2, 4]].isnan().all()
    for buffer in buffers:
        assert buffer[-128:].isnan().all()


@pytest.mark.parametrize("size", [64, 200, 576])
@pytest.mark.parametrize("dtype", DTYPES)
def test_square_sums_are_those_that_the_kernel_computes(device, dtype, size):
    """Of small integers both are exact, so the logits have the same bits; of others the same but for rounding."""
    inputs = make_inputs(70, size, dtype, device=device, norm=True)
    given = value_head(**inputs, square_sums=square_sums_of(inputs["hidden"]), backend="triton")
    torch.testing.assert_close(given, value_head(**inputs, backend="triton"), rtol=1e-5, atol=1e-5)
    inputs["hidden"] = (2 * inputs["hidden"]).round()
    given = value_head(**inputs, square_sums=square_sums_of(inputs["hidden"]), backend="triton")
    assert torch.equal(given, value_head(**inputs, backend="triton"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_its_weight_the_norm_is_the_factor_alone(device, dtype):
    """As with a weight of 1 (in fp16 ``h * 1 / 64`` may be subnormal), and as with its weight in the matmul's."""
    inputs = make_inputs(33, 96, dtype, device=device)
    inputs |= {"square_sums": square_sums_of(inputs["hidden"]), "norm_eps": 1e-3}
    logits = value_head(**inputs, backend="triton")
    ones = torch.ones(96, device=device)
    weighted = value_head(**inputs, norm_weight=ones, backend="triton")
    torch.testing.assert_close(weighted, logits, rtol=0, atol=1e-4 if dtype == torch.float16 else 0)
    assert_matches(logits, exact(**inputs), "value_head", dtype)
    doubles = {name: x.double() for name, x in inputs.items() if isinstance(x, torch.Tensor)}
    norm = torch.linspace(0.5, 1.5, 96, device=device, dtype=torch.float64)
    folded = doubles | {"fc_weight": doubles["fc_weight"] * norm}
    torch.testing.assert_close(
        value_head(**folded, norm_eps=1e-3), value_head(**doubles, norm_weight=norm, norm_eps=1e-3)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_square_sums_are_added_one_group_after_the_other(device, dtype):
    """2**-24 added to 1 is lost; two of them are not, had they been added first."""
    inputs = make_inputs(3, 5 * 64 - 10, dtype, device=device)
    sums = torch.zeros(5, 3, device=device)
    sums[0] = 1.0
    expected = value_head(**inputs, square_sums=sums, backend="triton")
    sums[1:] = 2.0**-24
    assert torch.equal(value_head(**inputs, square_sums=sums, backend="triton"), expected)
    sums[0], sums[4] = 2.0**-24, 1.0  # 4 * 2**-24 + 1
    assert not torch.equal(value_head(**inputs, square_sums=sums, backend="triton"), expected)


@pytest.mark.parametrize("outputs", [1, 64, 65, 200, MANY])
def test_counters_are_zero_afterwards(device, outputs):
    """Twice with the same ones; the first block of rows is only padding, the last one has some. What follows stays."""
    inputs = make_inputs(9, 2 * ops.BLOCK_N + 20, torch.float32, device=device, norm=True)
    rows = torch.arange(outputs, device=device) % 13 - 2
    rows[: min(128, outputs - 10)] = -1
    expected = value_head(**inputs, token_rows=rows, backend="triton")
    counters = torch.cat([torch.zeros(num_counters(outputs)), torch.full((3,), 7)]).to(device, torch.int32)
    for _ in range(2):
        found = value_head(**inputs, token_rows=rows, counters=counters, backend="triton")
        assert torch.equal(found, expected)
        assert counters[:-3].eq(0).all() and counters[-3:].eq(7).all()
    assert_matches(found, exact(**inputs, token_rows=rows), "value_head", torch.float32)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_padding_is_zero_and_reads_nothing(device, backend):
    inputs = make_inputs(5, 64, torch.float32, device=device, norm=True)
    logits = value_head(**inputs, backend=backend)
    inputs["hidden"][0] = float("nan")  # what a clamped padding row would read
    inputs["hidden"][4] = float("nan")  # what -1 would read as an index from the end
    # a first block of nothing but padding, then rows that do not exist, then a real one
    rows = torch.full((ops.BLOCK_M + 6,), -1, device=device)
    rows[ops.BLOCK_M :] = torch.tensor([5, -2, 2**40, -(2**40), 2, -1])
    padded = value_head(**inputs, token_rows=rows, backend=backend)
    torch.testing.assert_close(padded[ops.BLOCK_M + 4], logits[2])
    padded[ops.BLOCK_M + 4] = 0
    assert torch.equal(padded, torch.zeros_like(padded))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy, of the broken row
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_a_broken_row_harms_no_other(device, dtype, norm, broken):
    inputs = make_inputs(70, 96, dtype, device=device, norm=norm)
    healthy = value_head(**inputs, backend="triton")
    inputs["hidden"][3, 40] = broken
    logits = value_head(**inputs, backend="triton")
    assert logits[3].isnan()
    logits[3] = healthy[3]
    assert torch.equal(logits, healthy)


@pytest.mark.parametrize("magnitude", [6e4, 300.0, 1e-2, 1e-4])
def test_fp16_norm_of_extreme_rows(device, magnitude):
    inputs = make_inputs(9, 96, torch.float16, device=device, norm=True)
    hidden = inputs["hidden"].float()
    inputs["hidden"] = (hidden / hidden.abs().amax(-1, keepdim=True) * magnitude).half()
    inputs["norm_weight"] *= 16  # h * w up to 2e6, far beyond fp16
    logits = value_head(**inputs, backend="triton")
    assert_matches(logits, exact(**inputs), "value_head", torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_saturated_activations(device, dtype):
    inputs = make_inputs(9, 96, dtype, device=device)
    inputs["fc_bias"][::2] = -6e4  # exp(6e4) overflows: silu is 0
    inputs["fc_bias"][1::8] = 6e4  # silu is the identity
    assert_matches(value_head(**inputs, backend="triton"), exact(**inputs), "value_head", dtype)


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_no_rows(device, backend):
    inputs = make_inputs(0, 64, torch.float32, device=device)
    assert value_head(**inputs, backend=backend).shape == (0,)
    only_padding = torch.tensor([-1, 0, 3], device=device)
    assert value_head(**inputs, token_rows=only_padding, backend=backend).tolist() == [0, 0, 0]
    inputs = make_inputs(3, 64, torch.float32, device=device)
    assert value_head(**inputs, token_rows=only_padding[:0], backend=backend).shape == (0,)


STRIDES = [(0, 7), (16, 3), (5, 0)]


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("hidden_padding, weight_padding", STRIDES)
def test_rows_of_hidden_and_weight_are_apart_by_different_amounts(device, backend, hidden_padding, weight_padding):
    """All rows and vectors are followed by NaN; rows are taken out of order, some twice, some are padding."""
    inputs = make_inputs(9, 40, torch.float32, device=device, norm=True)
    rows = torch.tensor([7, -1, 0, 8, 8, 2, 9, 5, 3, 1, 1, 4], device=device)
    paddings = dict(hidden=hidden_padding, fc_weight=weight_padding, fc_bias=3, summary_weight=2, norm_weight=1)
    for name, padding in paddings.items():
        inputs[name] = nn.functional.pad(inputs[name], (0, padding), value=float("nan"))[..., :40]
    h = inputs["hidden"].double()
    h = h * torch.rsqrt(h.square().mean(1, keepdim=True) + EPS) * inputs["norm_weight"].double()
    w = {name: inputs[name].double() for name in WEIGHTS}
    z = nn.functional.silu(h @ w["fc_weight"].T + w["fc_bias"]) @ w["summary_weight"][0] + w["summary_bias"]
    assert_matches(value_head(**inputs, backend=backend), z, "value_head", torch.float32)
    expected = torch.where((rows >= 0) & (rows < 9), z[rows.clamp(0, 8)], 0.0)
    assert_matches(value_head(**inputs, token_rows=rows, backend=backend), expected, "value_head", torch.float32)


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("eps", [None, 1e-2, 1])
def test_eps_is_added_to_the_mean_of_squares(device, backend, eps):
    """Rows whose mean of squares is 4e-4, or 1e-6: as large as the default."""
    inputs = make_inputs(2, 32, torch.float32, device=device)
    inputs["hidden"] = torch.where(torch.arange(32) % 3 == 0, -1.0, 1.0).to(device).repeat(2, 1)
    inputs["hidden"] *= torch.tensor([[2e-2], [1e-3]], device=device)
    inputs["norm_weight"] = torch.linspace(0.5, 1.5, 32, device=device)
    logits = value_head(**inputs, **({} if eps is None else {"norm_eps": eps}), backend=backend)
    mean = torch.tensor([[4e-4], [1e-6]], device=device)
    inputs["hidden"] = inputs["hidden"] * inputs.pop("norm_weight") / (mean + (eps or 1e-6)).sqrt()
    assert_matches(logits, exact(**inputs), "value_head", torch.float32)


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("wide", ["fc_bias", "summary_weight", "summary_bias", "norm_weight"])
def test_each_vector_may_be_fp32(device, backend, wide):
    inputs = make_inputs(3, 64, torch.bfloat16, device=device, norm=True)
    inputs[wide] = inputs[wide].float() + 2**-10
    logits = value_head(**inputs, backend=backend)
    if backend == "triton":
        assert_matches(logits, exact(**inputs), "value_head", torch.bfloat16)
    else:
        truth = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
        assert_matches(logits, value_head(**truth), "value_head", torch.bfloat16)


@pytest.mark.parametrize("outputs", [1, 33, 127])
def test_fresh_memory_is_filled_and_nothing_beside_it(device, monkeypatch, outputs):
    """It holds NaN at first, around it, too: what is read was written before."""
    inputs = make_inputs(5, 2 * ops.BLOCK_N + 20, torch.float32, device=device)
    rows = torch.arange(outputs, device=device) % 7 - 1  # -1 and 5 are padding
    expected = exact(**inputs, token_rows=rows)
    buffers = guard_fresh_memory(monkeypatch)
    logits = value_head(**inputs, token_rows=rows, backend="triton")
    assert_matches(logits, expected, "value_head", torch.float32)
    for buffer in buffers:
        assert buffer[-128:].isnan().all()


def guard_fresh_memory(monkeypatch):
    """From now on it holds NaN, and 128 more rows of that; gives the list of what is allocated."""
    buffers = []

    def guarded_empty(*shape, dtype, device):
        buffers.append(torch.full((shape[0] + 128, *shape[1:]), float("nan"), dtype=dtype, device=device))
        return buffers[-1][: shape[0]]

    monkeypatch.setattr(ops.torch, "empty", guarded_empty)
    return buffers


@pytest.mark.parametrize("far_rows", ["hidden", "fc_weight"])
def test_offsets_past_32_bits(device, far_rows):
    """Rows 2**30 numbers apart, so that row 2 is 2**31 away. Pages that nothing touches take no memory on a CPU."""
    far = 2**30
    inputs = make_inputs(3, 3, torch.float16, device=device)
    expected = exact(**inputs)
    spread = torch.empty(2 * far + 3, dtype=torch.float16, device=device).as_strided((3, 3), (far, 1))
    inputs[far_rows] = spread.copy_(inputs[far_rows])
    for token_rows in (None, torch.arange(3, device=device)):
        logits = value_head(**inputs, token_rows=token_rows, backend="triton")
        assert_matches(logits, expected, "value_head", torch.float16)


ERRORS = [
    ("hidden", torch.zeros(3, 64, dtype=torch.int32), ValueError, "hidden must be float32.*, got int32"),
    ("hidden", torch.zeros(3, 2, 64), ValueError, r"hidden must be .* \[\*, \*\], got float32 \[3, 2, 64\]"),
    ("hidden", torch.zeros(64, 3).t(), ValueError, "hidden must be contiguous in its last dimension"),
    ("hidden", torch.zeros(3, 0), ValueError, "hidden must have at least one column"),
    ("hidden", torch.zeros(3, 80), ValueError, r"fc_weight must be float32 \[80, 80\] on cpu, got .* \[64, 64\]"),
    ("fc_weight", None, TypeError, r"fc_weight must be a tensor float32 \[64, 64\] on cpu, got NoneType"),
    ("fc_weight", torch.zeros(64, 64).bfloat16(), ValueError, "fc_weight must be float32 .*, got bfloat16"),
    ("fc_weight", torch.zeros(64, 64, device="meta"), ValueError, "fc_weight must be .* on cpu, got .* on meta"),
    ("fc_weight", torch.zeros(64, 128)[:, ::2], ValueError, "fc_weight must be contiguous in its last dimension"),
    ("fc_bias", torch.zeros(1, 64), ValueError, r"fc_bias must be float32 \[64\] on cpu, got float32 \[1, 64\]"),
    ("fc_bias", torch.zeros(64).half(), ValueError, "fc_bias must be float32 .*, got float16"),
    ("summary_weight", torch.zeros(64), ValueError, r"summary_weight must be float32 \[1, 64\] on cpu, got .* \[64\]"),
    ("summary_bias", torch.zeros(()), ValueError, r"summary_bias must be float32 \[1\] on cpu, got float32 \[\]"),
    ("token_rows", torch.zeros(2), ValueError, r"token_rows must be int32\|int64 \[\*\] on cpu, got float32 \[2\]"),
    ("token_rows", torch.zeros(2, 1).int(), ValueError, r"token_rows must be .* \[\*\] on cpu, got int32 \[2, 1\]"),
    ("norm_weight", torch.zeros(32), ValueError, r"norm_weight must be float32 \[64\] on cpu, got float32 \[32\]"),
    ("targets", torch.zeros(3), ValueError, r"targets must be int32\|int64 \[3\] on cpu, got float32 \[3\]"),
    ("targets", torch.zeros(2).int(), ValueError, r"targets must be int32\|int64 \[3\] on cpu, got int32 \[2\]"),
    ("square_sums", torch.zeros(3, 1), ValueError, r"square_sums must be .* \[1, 3\] on cpu, got float32 \[3, 1\]"),
    ("square_sums", torch.zeros(1, 3).half(), ValueError, r"square_sums must be float32.*, got float16"),
    ("counters", torch.zeros(1), ValueError, r"counters must be int32 \[\*\] on cpu, got float32 \[1\]"),
    ("counters", torch.zeros(0).int(), ValueError, "counters must be at least 1, got 0"),
    ("norm_eps", 0.0, ValueError, "norm_eps must be a positive number, got 0.0"),
    ("norm_eps", float("inf"), ValueError, "norm_eps must be a positive number, got inf"),
    ("norm_eps", float("nan"), ValueError, "norm_eps must be a positive number, got nan"),
    ("norm_eps", "1e-6", ValueError, "norm_eps must be a positive number, got '1e-6'"),
]


@pytest.mark.parametrize(("name", "value", "error", "message"), ERRORS)
def test_errors_name_the_argument(name, value, error, message):
    arguments = {**make_inputs(3, 64, torch.float32), "backend": "reference"} | {name: value}
    with pytest.raises(error, match=message):
        value_head(**arguments)
