"""The codegen gate finds each fault, and no fault in the first call of each kernel on sm_90."""

import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import codegen
from bench.launches import compiling_for, kernels
from bench.ops.value_tree_attention import make_call
from lenvm_kernels import ops
from lenvm_kernels.ops.topk_candidates import topk_candidates
from tests.helpers.interpreter import run_compiling

GOOD = codegen.Figures("Qwen2.5-1.5B", "_ragged_linear_kernel 1", 128, 0, 65_536, 8, True, {"HGMMA": 16}, 24, 100)
EVERY = [replace(GOOD, kernel=name) for name in kernels()]


def test_every_kernel_compiles_without_faults():
    """The compiler may reject code that the interpreter accepts. Runs in a subprocess, without the interpreter."""
    sources = "".join(file.read_text() for file in Path(ops.__path__[0]).rglob("*.py"))
    assert set(kernels()) == set(re.findall(r"^def (\w+_kernel)\(", sources, re.MULTILINE))
    lines = run_compiling("-m", "bench.codegen", "--check", "--parts", "calls", "--once").splitlines()
    assert lines[-1] == "no faults"
    assert all(sum(f" {kernel} " in line for line in lines) == 1 for kernel in kernels())
    assert codegen.faults("calls", EVERY[1:]) == [f"calls: {EVERY[0].kernel} is never launched"]


def compiled(call, *arguments, **options):
    with compiling_for(codegen.GPUS["sm_90"].target) as found:
        call(*arguments, **options, backend="triton")
    return {name: kernel.asm for name, kernel in found}


def check_compiled_code():
    # Types of asynchronous copies of attention over a cache with a slot stride of 128 elements, and of 129. Triton 3.6
    # assumes that a slot, the sum of a page's start and an offset, is a multiple of the page size.
    copies = []
    for apart in (128, 129):
        call = make_call(heads=(12, 2, 64), page_size=16, dtype="bfloat16")
        caches = [x.new_zeros(len(x), apart)[:, :128].unflatten(1, (2, 64)) for x in call.args[3:5]]
        asm = compiled(call.func, *call.args[:3], *caches, *call.args[5:], **call.keywords)
        ttgir = asm["_value_tree_attention_kernel"]["ttgir"]
        copies.append({*re.findall(r"async_copy_global_to_local .*tensor<\w+x!tt.ptr<(\w+)>", ttgir)})
    assert copies == [{"bf16"}, set()]
    # Code for candidates of one row and of several rows, contiguous or with a larger stride.
    scans, filters = set(), dict(top_k=5, top_p=1.0, min_p=0.0)
    for (vocab, *strides), rows, has_mask in product(((50_257, 50_304), (50_304, 50_320)), (1, 3), (True, False)):
        mask = torch.zeros(rows, vocab, dtype=torch.int32)[:, : -(-vocab // 32)] if has_mask else None
        for stride in (vocab, *strides):
            asm = compiled(topk_candidates, torch.zeros(rows, stride)[:, :vocab], **filters, vocab_mask=mask)
            scans.add((vocab, has_mask, asm["_scan_kernel"]["ptx"]))
    assert len(scans) == 4  # per size of the vocabulary, with and without a mask
    # Loads of 16 bytes from passed scores, at an aligned address, and at any address.
    loads, addresses = [], torch.zeros(4, dtype=torch.int64)
    for options in ({}, *(dict(addresses=addresses, is_aligned=x) for x in (True, False))):
        found = compiled(topk_candidates, torch.zeros(3, 50_304).bfloat16(), **filters, **options)
        loads.append({name: asm["ptx"].count("ld.global.v4") for name, asm in found.items()})
    assert loads[0] == loads[1] and loads[1]["_scan_kernel"] > 0 == loads[2]["_scan_kernel"]


def test_compiled_code():
    run_compiling("-c", "from tests.tools import test_codegen; test_codegen.check_compiled_code()")


FAULTS = [
    ("calls", {"spilled": 76}, "76 bytes spilled"),
    ("sm_90", dict(kernel="_embed_tokens_kernel 1", tensor_cores={}, spilled=32, fp64=7), "7 instructions in fp64"),
    ("sm_86", {"shared": 101_377}, "101377 bytes of shared memory, the GPU has 101376"),
    ("gfx942", {"shared": 73_728}, "73728 bytes of shared memory, the GPU has 65536"),
    ("sm_100", {"tensor_cores": {}}, "no tensor cores"),
    ("sm_90", {"tensor_cores": {"HMMA": 32}}, "HMMA but no HGMMA for a tile of 64 rows"),
    ("calls", {"async_copies": 0}, "no asynchronous copies"),
    ("sm_90", {"loads_16_in_loops": 3}, "3 16-bit loads in loops"),
    ("sm_90", {"waits_for_all": 2}, "2 loops wait for all of their asynchronous copies"),
    ("sm_90", {"fused_into_shuffles": 1}, "1 products fused with an addition across threads"),
    ("sm_90", {"accesses_before_wait": 2}, "2 accesses of memory before the wait for earlier launches"),
    ("gfx942", {"batch_dependent_sums": True}, "the layout of a sum depends on the number of requests"),
]


@pytest.mark.parametrize(("subject", "change", "message"), FAULTS)
def test_each_fault_is_found(subject, change, message):
    figure = replace(GOOD, **change)
    assert codegen.faults(subject, [figure, *EVERY]) == [f"{subject} Qwen2.5-1.5B {figure.kernel}: {message}"]


def test_figures_may_get_ten_percent_worse():
    name, only = "sm_90 Qwen2.5-1.5B _ragged_linear_kernel 1", "only: --update writes the figures"
    before, passing, failing = (codegen.compared([replace(GOOD, registers=x)]) for x in (128, 140, 141))
    pairs = (passing, before), (failing, before), ({}, before), (before, {})
    found = [line for pair in pairs for line in codegen.regressions("sm_90", *pair)]
    assert found == [f"{name}{x}" for x in (": registers 128 -> 141", f" is committed {only}", f" is compiled {only}")]


COPY, LOAD = "LDGSTS.E.BYPASS.128 [R2], desc[UR14][R4.64]", "LDG.E.U16 R8, desc[UR4][R6.64]"
LOOP = ["DEPBAR.LE SB0, 0x2 ", "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24", "WARPGROUP.DEPBAR.LE gsb0, 0x0"]
LOOP += [COPY, "@!P0 BRA 0x0", "DEPBAR.LE SB0, 0x0 ", "EXIT"]
FP64 = ["DADD R2, R2, R4", "MUFU.RCP64H R7, R5", "F2F.F64.F32 R2, R0", "\tv_fma_f64 v[0:1], v[2:3], v[4:5], v[6:7]"]
AMD = ["\ts_nop", ".LBB0_1:", "\tglobal_load_ushort v1, v[4:5], off", "\ts_cbranch_scc1 .LBB0_1"]
AMD += ["\tv_mfma_f32_32x32x8_bf16_1k a[0:15], v[0:1]", "\ts_branch .LBB0_2", ".LBB0_2:"]
SHUFFLES = [
    "SHFL.BFLY PT, R5, R4, 0x10, 0x1f",
    "FADD R6, R4, R5",  # a sum
    "SHFL.BFLY PT, R7, R6, 0x8, 0x1f",
    "@!P1 FFMA.FTZ R8, R2, R3.reuse, R7",  # a product and a sum at once
    "FFMA R9, R2, R7, R3",  # a multiple of the shuffled number
    "@P0 FFMA R7, R2, R3, R6",  # writes the register
    "FFMA R9, R2, R3, R7",  # reads the new value
]
WAITS = ["LDC.64 R4, c[0x0][0x210]", "LDG.E R2, [R4.64]", "@!P0 STG.E [R4.64], R2", "CCTL.E.PF2 [R4]", "ACQBULK", LOAD]
COUNTS = {
    "loop": (LOOP, dict(tensor_cores={"HGMMA": 1}, async_copies=1, loop_instructions=5, waits_for_all=0)),
    "loop that waits for all": ([LOOP[5], *LOOP[1:]], dict(waits_for_all=1)),
    "loop around a loop": ([*LOOP[:6], "@P1 BRA 0x0", "EXIT"], dict(waits_for_all=0)),  # a persistent loop may wait
    "loads in and after a loop": ([LOOP[0], LOAD, *LOOP[1:5], LOAD, "EXIT"], dict(loads_16_in_loops=1)),
    "fp64": ([*FP64, "FADD R2, R2, R4", "LDG.E.64 R2, desc[UR4][R6.64]", "MUFU.RCP R7, R5"], dict(fp64=4)),
    "AMD": (AMD, dict(loads_16_in_loops=1, tensor_cores={"mfma": 1}, loop_instructions=3)),
    "fused": (SHUFFLES, dict(fused_into_shuffles=1)),
    "wait": (WAITS, dict(before_wait=2)),
    "no wait": ([*WAITS[:4], LOAD], dict(before_wait=3)),
}


@pytest.mark.parametrize("name", COUNTS)
def test_instructions_are_counted(name):
    lines, expected = COUNTS[name]
    counted = codegen.count_instructions([*enumerate(lines)]) | {"before_wait": codegen.accesses_before_wait(lines)}
    assert counted | expected == counted


BLOCKED = "blocked<{sizePerThread = [1, 2], order = [1, 0]}>"
MMA = f"{BLOCKED}\n#mma = #ttg.nvidia_mma<{{versionMajor = 3, instrShape = [16, 128, 16]}}>"
SUMS = [(BLOCKED, "1, 2", "1, 4"), ("linear<{warp = [[2, 0]]}>", "2, 0", "0, 2"), (MMA, "128, 16", "128, 8")]


@pytest.mark.parametrize(("layout", "old", "new"), SUMS)
def test_sums_that_depend_on_the_batch(layout, old, new):
    text = f"""#blocked = #ttg.{layout}
    %15 = "tt.reduce"(%14) <{{axis = 1 : i32}}> ({{
      %16 = arith.addf %arg1, %arg2 : f32
    }}) : (tensor<64x256xf32, #blocked>) -> f32
"""
    ttgirs = {text, text.replace(old, new)}
    batches = [[("_kernel", SimpleNamespace(hash=ttgir, asm={"ttgir": ttgir}))] for ttgir in ttgirs]
    assert codegen.sums_that_differ(batches) == ttgirs
