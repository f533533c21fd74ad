"""The peers of the benchmarks: that they compute what ours computes, and that whatever they lack ends no benchmark.

What a package does behind its interface is checked where the package is installed, and stood in for by its documented
rule in plain PyTorch everywhere.
"""

import inspect
import itertools
import math
import sys
import types
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from bench import peers
from bench.baselines import Absent, Tree, flag_gems, flashinfer, load, pytorch, sglang, vllm
from bench.harness.demo_runs import DemoRuns
from bench.ops.topk_candidates import OPTIONS
from lenvm_kernels.reference.topk_candidates import topk_candidates
from lenvm_kernels.reference.value_head import value_head
from lenvm_kernels.reference.value_tree_attention import value_tree_attention

# (cached, delta, candidates) of each request.
RAGGED = [(5, 1, 5), (70, 3, 0), (0, 0, 2), (9, 0, 3), (0, 4, 1)]
EQUAL = [(11, 2, 3)] * 3
TOLERANCE = dict(rtol=1e-5, atol=1e-6)


@pytest.fixture(autouse=True)
def forget_packages():
    """Leave no package of a peer behind: other tests look whether SGLang is installed."""
    modules = dict(sys.modules)
    yield
    for name in sys.modules.keys() - modules.keys():
        if name.partition(".")[0] in ("sglang", "vllm", "flashinfer", "peer"):
            del sys.modules[name]


def install(monkeypatch, name: str, **members: object) -> None:
    """Make a package of a peer importable that has these members."""
    module = types.ModuleType(name)
    vars(module).update(members)
    parents = name.split(".")[:-1]
    for n in range(len(parents)):
        monkeypatch.setitem(sys.modules, ".".join(parents[: n + 1]), types.ModuleType(parents[n]))
    monkeypatch.setitem(sys.modules, name, module)


def load_or_skip(module: str) -> types.ModuleType:
    try:
        return load(module)
    except Absent as absence:
        pytest.skip(str(absence))


def make_tree(requests: list[tuple[int, int, int]], device: torch.device, heads: tuple[int, int, int] = (6, 2, 16)):
    """Requests whose cached tokens lie scattered over the cache, in rows of the slot table that are out of order."""
    generator = torch.Generator().manual_seed(0)
    q_heads, kv_heads, head_dim = heads
    cached, delta, candidates = (torch.tensor(column, dtype=torch.int32) for column in zip(*requests, strict=True))
    new = delta + candidates
    slots, tokens = int(cached.sum()) + 7, int(new.sum())
    rows = torch.randperm(len(requests) + 2, generator=generator)[: len(requests)]
    table = torch.full((len(requests) + 2, int(cached.max()) + 1), -1, dtype=torch.int32)
    places = torch.randperm(slots, generator=generator).int().split([*cached.tolist(), 7])
    for row, place in zip(rows, places, strict=False):
        table[row, : len(place)] = place

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    tensors = (
        random(tokens, q_heads, head_dim),
        *(random(n, kv_heads, head_dim) for n in (tokens, tokens, slots, slots)),
        table,
        rows,
        cached,
        F.pad(new.cumsum(0), (1, 0)).int(),
        candidates,
    )
    return Tree(*(tensor.to(device) for tensor in tensors))


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """q ``[M, Hq, D]``, k and v ``[N, Hkv, D]``, visible bool ``[M, N]`` -> ``[M, Hq, D]``."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.einsum("mhd,nhd->hmn", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("hmn,nhd->mhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v)


# --- importing ---


def test_absent_package():
    with pytest.raises(Absent, match="nopeer is not installed"):
        load("nopeer.kernels")


@pytest.mark.parametrize(
    "source, reason",
    [
        ("raise OSError('libcuda.so.1: cannot open')", "peer does not import: OSError: libcuda.so.1: cannot open"),
        ("raise RuntimeError('no\\ndriver')", "peer does not import: RuntimeError: no driver"),
        ("import nopeer", "peer does not import: No module named 'nopeer'"),
        ("from torch import nothing", "peer does not import: ImportError"),
    ],
)
def test_package_that_does_not_import(tmp_path, monkeypatch, source, reason):
    (tmp_path / "peer.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Absent, match=reason):
        load("peer")


def test_without_a_gpu_or_in_another_dtype(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    tree, scores, rows = make_tree(EQUAL, torch.device("cpu")), torch.randn(2, 50), torch.ones(2)
    for prepare, arguments in (
        (flashinfer.topk_candidates, (scores, 8)),
        (flashinfer.top_k_top_p_sample, (scores, 8, rows)),
        (flashinfer.masked_attention, tree),
        (flashinfer.multi_item_attention, tree),
        (flag_gems.topk_candidates, (scores, 8)),
        (vllm.top_k_top_p_filter, (scores, rows.int(), rows)),
        (sglang.extend_attention, tree),
    ):
        with pytest.raises(Absent, match="runs on a GPU only, got tensors on cpu"):
            prepare(*arguments)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(Absent, match=r"takes torch\.float32 only, got torch\.bfloat16"):
        vllm.top_k_top_p_filter(scores.bfloat16(), rows.int(), rows)


# --- PyTorch ---


def test_pytorch_topk():
    scores = torch.randn(3, 400, generator=torch.Generator().manual_seed(0))
    ones, top_k = torch.ones(3), torch.full((3,), 8, dtype=torch.int32)
    probs, token_ids = pytorch.topk_candidates(scores, 8)()
    options = dict.fromkeys(OPTIONS) | dict(top_k=top_k, top_p=ones, min_p=0 * ones, max_candidates=8, is_logits=True)
    ours = topk_candidates(scores, **options)
    torch.testing.assert_close(token_ids.int(), ours.token_ids)
    torch.testing.assert_close(probs, ours.probs)


def head_arguments() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=generator) for shape in ((5, 24), (24, 24), (24,), (1, 24), (1,)))


def test_pytorch_head():
    torch.testing.assert_close(pytorch.value_head(*head_arguments())(), value_head(*head_arguments()))


def test_reference_compiled(monkeypatch):
    arguments = head_arguments()
    expected = value_head(*arguments, token_rows=torch.tensor([3, 1]))
    compiled_with = []

    def compile(function, *, backend, **options):
        compiled_with.append((backend, options))
        return original(function, backend=backend, **options)

    original = torch.compile
    monkeypatch.setattr(torch, "compile", compile)
    run = pytorch.compiled(partial(value_head, *arguments, token_rows=torch.tensor([3, 1])), "aot_eager")
    torch.testing.assert_close(run(), expected)
    assert compiled_with == [("aot_eager", {"dynamic": False, "fullgraph": True})]


def test_reference_that_does_not_compile():
    with pytest.raises(Absent, match="value_tree_attention does not compile as one graph"):
        pytorch.compiled(partial(value_tree_attention, *make_tree(EQUAL, torch.device("cpu"))), "eager")


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention():
    tree = make_tree(EQUAL, torch.device("cpu"))
    result = pytorch.flex_attention(*tree)()
    torch.testing.assert_close(result, value_tree_attention(*tree), **TOLERANCE)
    assert result.is_contiguous()  # so that the last step of its run is no copy
    with pytest.raises(Absent, match=r"requests of one length only, got 2 .*\(5, 6, 1\)"):
        pytorch.flex_attention(*make_tree(RAGGED[:2], torch.device("cpu")))


# --- FlashInfer ---


class PagedPrefill:
    """Stands in for FlashInfer's wrapper: its documented masking rules, in plain PyTorch."""

    def __init__(self, float_workspace_buffer, kv_layout, backend):
        assert kv_layout == "NHD"
        self.backend = backend

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        *,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        causal,
        q_data_type,
        kv_data_type,
        custom_mask=None,
        prefix_len_ptr=None,
        token_pos_in_items_ptr=None,
        token_pos_in_items_len=0,
        max_item_len_ptr=None,
    ):
        for tensor in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
            assert tensor.dtype == torch.int32 and tensor.is_contiguous()
        assert page_size == 1 and (paged_kv_last_page_len == 1).all()
        self.shape, self.dtypes = (num_qo_heads, num_kv_heads, head_dim_qk), (q_data_type, kv_data_type)
        q_ends, kv_ends = qo_indptr.tolist(), paged_kv_indptr.tolist()
        self.requests, mask_end = [], 0
        for i, (start, end) in enumerate(itertools.pairwise(q_ends)):
            pages = paged_kv_indices[kv_ends[i] : kv_ends[i + 1]].long()
            position = torch.arange(len(pages) - (end - start), len(pages))[:, None]  # of queries, in the sequence
            key = torch.arange(len(pages))
            if custom_mask is not None:
                # Replaces the causal mask.
                size = (end - start) * len(pages)
                visible = custom_mask[mask_end : mask_end + size].view(end - start, len(pages))
                mask_end += size
            else:
                assert causal
                visible = key <= position
                prefix = int(self.unsigned(prefix_len_ptr, torch.uint32)[i])
                items = self.unsigned(token_pos_in_items_ptr, torch.uint16)[i * token_pos_in_items_len :]
                items = items[: len(pages) - prefix]
                if len(items):
                    assert items.max() <= self.unsigned(max_item_len_ptr, torch.uint16)[i]
                item_position = F.pad(items, (prefix, 0))[position[:, 0]][:, None]
                visible &= (position < prefix) | (key < prefix) | (key > position - item_position)
            self.requests.append((slice(start, end), pages, visible))
        assert custom_mask is None or mask_end == len(custom_mask)

    @staticmethod
    def unsigned(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The kernel reads this dtype, whatever comes; PyTorch computes little with it."""
        assert tensor.dtype == dtype and tensor.is_contiguous()
        return tensor.view(torch.int32 if dtype == torch.uint32 else torch.int16).long()

    def run(self, q, paged_kv_cache, *, out):
        k, v = paged_kv_cache
        assert k.shape[1] == 1 and self.shape == (q.shape[1], k.shape[2], q.shape[2])
        assert self.dtypes == (q.dtype, k.dtype)
        for rows, pages, visible in self.requests:
            out[rows] = attend(q[rows], k[pages, 0], v[pages, 0], visible)
        return out


@pytest.mark.parametrize("requests", [RAGGED, EQUAL])
def test_flashinfer_masks_are_ours(requests, monkeypatch):
    install(monkeypatch, "flashinfer", BatchPrefillWithPagedKVCacheWrapper=PagedPrefill)
    tree = make_tree(requests, torch.device("cpu"))
    expected = value_tree_attention(*tree)
    for run in (flashinfer._masked_attention(tree), flashinfer._multi_item_attention(tree)):
        torch.testing.assert_close(run(), expected, **TOLERANCE)


def test_flashinfer_has_what_is_called():
    package = load_or_skip("flashinfer")
    wrapper = package.BatchPrefillWithPagedKVCacheWrapper
    for function, stand_in in (
        (wrapper, PagedPrefill),
        (wrapper.plan, PagedPrefill.plan),
        (wrapper.run, PagedPrefill.run),
    ):
        assert inspect.signature(stand_in).parameters.keys() <= inspect.signature(function).parameters.keys()
    assert {"sorted", "deterministic", "tie_break"} <= inspect.signature(package.top_k).parameters.keys()
    assert package.TopKTieBreak.SMALL == 1
    sample = inspect.signature(package.sampling.top_k_top_p_sampling_from_logits)
    assert [*sample.parameters][:3] == ["logits", "top_k", "top_p"] and {"seed", "offset"} <= sample.parameters.keys()


def test_flashinfer_is_absent_until_it_is_compiled(tmp_path, monkeypatch):
    install(monkeypatch, "flashinfer")
    monkeypatch.setattr(flashinfer, "OUTCOMES", tmp_path)
    for outcome, reason in (
        (None, "python -m bench.baselines.flashinfer top_k does it$"),
        ("error: no nvcc", "error: no nvcc$"),
    ):
        if outcome:
            (tmp_path / "top_k").write_text(outcome)
        with pytest.raises(Absent, match=f"top_k is not compiled: {reason}"):
            flashinfer._require_compiled("top_k")
    (tmp_path / "top_k").write_text("")
    flashinfer._require_compiled("top_k")


@pytest.fixture
def compile_ahead(tmp_path, monkeypatch):
    """Runs the command that compiles FlashInfer's kernels with ``call_once`` in place of a call; its exit status."""

    def command(call_once, *kernels):
        monkeypatch.setattr(flashinfer, "OUTCOMES", tmp_path / "kernels")
        monkeypatch.setattr(flashinfer, "_call_once", call_once)
        monkeypatch.setattr(sys, "argv", ["flashinfer", *kernels])
        return flashinfer.main()

    return command


@pytest.mark.parametrize("name", ["topk", "attention-fa2", "attention-fa2-float32-64", "../top_k"])
def test_flashinfer_refuses_kernels_it_does_not_know(compile_ahead, name, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        compile_ahead(None, "top_k", name)
    assert not (tmp_path / "kernels").exists() and f"got {name}" in capsys.readouterr().err


@pytest.mark.parametrize("kernels", [(), ("attention-fa2-float16-64",)])
def test_flashinfer_compiles_what_it_is_asked_to(compile_ahead, kernels):
    calls = []
    assert compile_ahead(calls.append, *kernels) == 0 and calls == [*(kernels or flashinfer.KERNELS)]


def test_flashinfer_compiles_ahead_what_it_can(compile_ahead, tmp_path, capsys):
    def call_once(kernels):
        if kernels == "top_k":
            raise RuntimeError("Ninja build failed.\n[1/2] nvcc\ntopk.cu(3): error: no such type\nninja: stopped")

    assert compile_ahead(call_once, "top_k", "sampling") == 1
    assert (tmp_path / "kernels" / "top_k").read_text() == "topk.cu(3): error: no such type"
    assert (tmp_path / "kernels" / "sampling").read_text() == ""
    assert "Ninja build failed." in capsys.readouterr().out


# --- SGLang, vLLM ---


def extend_attention_fwd(
    q_extend,
    k_extend,
    v_extend,
    o_extend,
    k_buffer,
    v_buffer,
    qo_indptr,
    kv_indptr,
    kv_indices,
    custom_mask,
    is_causal,
    mask_indptr,
    max_len_extend,
    k_scale,
    v_scale,
):
    """Stands in for SGLang's: a row of the mask has a column for each cached token, and one for each new one."""
    assert is_causal and k_scale == v_scale == 1.0
    assert max_len_extend == qo_indptr.diff().max()
    for i, (start, end) in enumerate(itertools.pairwise(qo_indptr.tolist())):
        slots = kv_indices[kv_indptr[i] : kv_indptr[i + 1]]
        mask = custom_mask[mask_indptr[i] : mask_indptr[i + 1]].view(end - start, len(slots) + end - start)
        visible = torch.cat([torch.ones(end - start, len(slots), dtype=torch.bool), mask[:, len(slots) :]], 1)
        keys = torch.cat([k_buffer[slots], k_extend[start:end]])
        values = torch.cat([v_buffer[slots], v_extend[start:end]])
        o_extend[start:end] = attend(q_extend[start:end], keys, values, visible)


@pytest.mark.parametrize("requests", [RAGGED, EQUAL])
def test_sglang_mask_is_ours(requests, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # the peer looks whether the kernel can run
    install(monkeypatch, "sglang.kernels.ops.attention.extend_attention", extend_attention_fwd=extend_attention_fwd)
    tree = make_tree(requests, torch.device("cpu"))
    torch.testing.assert_close(sglang.extend_attention(*tree)(), value_tree_attention(*tree), **TOLERANCE)


def test_sglang(device):
    load_or_skip("sglang.kernels.ops.attention.extend_attention")
    tree = make_tree(RAGGED, device, (6, 2, 64))
    # fp32 on a GPU is not what the kernel is for: it multiplies in TF32.
    tolerance = TOLERANCE if device.type == "cpu" else dict(rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(sglang.extend_attention(*tree)(), value_tree_attention(*tree), **tolerance)


def test_vllm(device):
    load_or_skip("vllm.v1.sample.ops.topk_topp_triton")
    logits = 2 * torch.randn(3, 1000, generator=torch.Generator().manual_seed(0)).to(device)
    top_k = torch.tensor([5, 50, 1], dtype=torch.int32, device=device)
    top_p = torch.tensor([0.9, 0.5, 1.0], device=device)
    run = vllm.top_k_top_p_filter(logits, top_k, top_p)
    value, token = logits.sort(descending=True)
    value = torch.where(torch.arange(1000, device=device) < top_k[:, None], value, -torch.inf)
    probs = value.softmax(1)
    keep = (probs.cumsum(1) - probs < top_p[:, None]) & (probs > 0)
    expected = torch.full_like(logits, -torch.inf).scatter(1, token, torch.where(keep, value, -torch.inf))
    for _ in range(2):  # it filters in place, but not its argument
        torch.testing.assert_close(run(), expected)


def test_the_table_of_ways(monkeypatch):
    """Time over plain is of two times of a seed; tokens/s are of all seeds."""
    ids, eos, clock = torch.tensor([[0, 4, 5], [6, 7, 8]]), 1, iter([0.0, 2.0, 2.0, 8.0, 10.0, 11.0, 11.0, 16.0])
    answers = {"plain": [[9, 9, 9, eos], [9] * 6], "slow": [[9, eos], [9, 9, 9, 9, 9, 9, 9, eos]]}
    models = types.SimpleNamespace(
        eos_token_ids=[eos],
        tokenizer=types.SimpleNamespace(batch_decode=lambda found, **_: ["text."] * len(found)),
        encode=lambda prompts: {"input_ids": ids, "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]])},
    )
    ways = {way: lambda inputs, found=found: found for way, found in answers.items()}
    monkeypatch.setattr(peers, "ways_of", lambda *_: ways)
    monkeypatch.setattr(peers.time, "perf_counter", lambda: next(clock))

    def likelihoods(of, prompts, found):
        assert of is models and prompts == [[4, 5], [6, 7, 8]]
        return [[0.5] * len(ids) for ids in found]

    monkeypatch.setattr(peers, "likelihoods", likelihoods)
    runs = DemoRuns(models, ["a", "b"], [3, 4], None)
    plain, slow = peers.compare(runs, None, 5, types.SimpleNamespace(set_description=lambda _: 0, update=lambda: 0))
    perplexity = pytest.approx(math.exp(0.5))
    # 10 tokens in 2 and in 1 second; 10 in 6 and in 5.
    assert plain == peers.Way("plain", 20 / 3, 1.0, 5.0, 1.0, 0.0, 0.5, perplexity)
    assert slow == peers.Way("slow", 20 / 11, 4.0, 5.0, 3.0, 0.0, 0.0, perplexity)
    text = peers.table([plain, slow])
    assert "| slow | 1.8 | 4.00 | 5.0 | 3.0 | 0% | 0% | 1.65 |" in text and "| 1.006 |" in text
