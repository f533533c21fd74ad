"""The codegen gate finds what it is there to find, and finds nothing in the first call of each kernel on sm_90.

``make codegen`` sends all calls of the operators through it, and the value models' steps, for four GPUs.
"""

import json
import re
import subprocess
import sys
from dataclasses import asdict, replace

import pytest

from bench import codegen
from bench.kernel_calls import operator_calls, operators, trunk_step, value_step
from bench.launches import kernels
from bench.sass import Loop, loading_loops, loops_of, main_loop
from tests.helpers.interpreter import run_compiling

GOOD = codegen.Figures(
    model="Qwen2.5-1.5B",
    kernel="_ragged_linear_kernel 1",
    registers=128,
    spilled=0,
    shared=65_536,
    warps=8,
    occupancy=0.25,
    tensor_cores={"HGMMA": 16},
    loads={"128": 4},
    stores={"128": 4},
    async_copies=24,
    programs=2,
    bytes_in_flight=20_000,
    tensor_over_issue=1.0,
    waits_for_all=0,
)


def test_every_kernel_compiles_into_what_it_should():
    """What the interpreter accepts the compiler may refuse. Another process, because this one may interpret."""
    command = [sys.executable, "-m", "bench.codegen", "--check", "--parts", "calls", "--once"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    lines = done.stdout.splitlines()
    assert lines[-1] == "no faults"
    for kernel in kernels():
        assert sum(f" {kernel} " in line for line in lines) == 1


def compiled_for_sm_90(script):
    """What a script prints that compiles kernels."""
    return run_compiling("-c", COMPILING + script)


COMPILING = """
import hashlib
import torch
from bench.codegen import PARTS
from bench.launches import compiling_for
from bench.ops.value_tree_attention import make_call
from lenvm_kernels.ops import ragged_linear as ops
from lenvm_kernels.ops.topk_candidates import topk_candidates
sm_90 = PARTS["sm_90"].target
"""
# Parts of sums that are no longer than what a program multiplies at once, as in the tests of small sizes.
SHORT_SUM = """
ops.SPLIT_FROM = 128
for tile in ops.TILES:
    ops.choose_tile = lambda *_: tile
    with compiling_for(sm_90) as compiled:
        ops.ragged_linear(torch.zeros(300, 320).half(), torch.zeros(100, 320).half(), backend="triton")
    print(*(kernel.metadata.shared for _, kernel in compiled))
"""
# Attention over a cache whose slots lie 128 numbers apart, and then an odd number.
SLOTS_APART = """
for apart in (128, 129):
    call = make_call("cpu", heads=(12, 2, 64), B=8, L=512, branches=5, page_size=16, dtype="bfloat16")
    caches = [x.new_zeros(len(x), apart)[:, :128].unflatten(1, (2, 64)) for x in call.args[3:5]]
    with compiling_for(sm_90) as compiled:
        call.func(*call.args[:3], *caches, *call.args[5:], **call.keywords, backend="triton")
    print("apart", apart, *(kernel.asm["ttgir"] for _, kernel in compiled))
"""


# Candidates out of one row and of several, as far apart as the vocabulary and farther.
ROWS_APART = """
for vocab, apart in ((50_257, 50_304), (50_304, 50_320)):
    for rows in (1, 3):
        for scores in (torch.zeros(rows, vocab), torch.zeros(rows, apart)[:, :vocab]):
            for mask in (None, torch.zeros(rows, apart, dtype=torch.int32)[:, : -(-vocab // 32)]):
                with compiling_for(sm_90) as compiled:
                    topk_candidates(scores, top_k=5, top_p=1.0, min_p=0.0, vocab_mask=mask, backend="triton")
                (kernel,) = (kernel for name, kernel in compiled if name == "_scan_kernel")
                print(vocab, mask is None, hashlib.md5(kernel.asm["ptx"].encode()).hexdigest(), sep=",")
"""


def test_a_short_sum_has_room():
    """Without a loop of its own it would be pipelined with the loop over tiles: more shared memory than there is."""
    needed = [int(shared) for shared in compiled_for_sm_90(SHORT_SUM).split()]
    assert len(needed) > 4 and max(needed) <= 227 * 1024


def test_no_copy_is_wider_than_a_stride_allows():
    """Triton 3.6 took the sum of a page and of a place in it for a multiple of the page's size; later ones do not."""
    even, odd = compiled_for_sm_90(SLOTS_APART).split("apart 129", 1)
    for text, types in ((even, {"bf16"}), (odd, set())):
        assert text.count("tt.func public @_value_tree_attention_kernel") == 1
        assert set(re.findall(r"async_copy_global_to_local .*tensor<\w+x!tt.ptr<(\w+)>", text)) == types


def test_a_row_is_summed_in_one_order_however_far_the_next_one_is():
    found = compiled_for_sm_90(ROWS_APART).split()
    assert len(found) == 16 and len(set(found)) == 4


def test_forms_of_launch_have_names_of_their_own():
    """By the operator beside whose benchmark they stand; what one of them makes is a call of that operator."""
    names = [name for name, _ in operator_calls()]
    assert len(set(names)) == len(names) > 200
    for operator, module in operators().items():
        assert all(re.match(rf"{operator}\b", name) for name in module.FORMS) and module.BENCHMARK.operator == operator
        call = module.make_call("cpu", **module.FORMS[f"{operator}, every size 1"])
        assert call.func.__name__ == operator


def faults_of(part="sm_90", **changed):
    """Those of the good figures with changes."""
    return codegen.faults(part, [replace(GOOD, **changed)])


def test_good_figures_have_no_faults():
    for name, kind in (("sm_80", "HMMA"), ("sm_90", "HGMMA"), ("sm_100", "UTCHMMA"), ("gfx942", "mfma")):
        assert faults_of(name, tensor_cores={kind: 16}, async_copies=0 if name == "gfx942" else 24) == []


ON_THEIR_WAY = "bytes of copies on their way on a multiprocessor"


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("sm_80", {"spilled": 4}, "4 bytes spilled"),
        ("calls", {"spilled": 68}, "68 bytes spilled"),
        ("sm_80", {"shared": 163 * 1024 + 1}, "166913 bytes of shared memory, the part has 166912"),
        ("gfx942", {"shared": 73_728}, "73728 bytes of shared memory, the part has 65536"),
        ("calls", {"shared": 227 * 1024 + 1}, "232449 bytes of shared memory, the part has 232448"),
        ("sm_100", {"tensor_cores": {}}, "no tensor cores"),
        ("sm_90", {"tensor_cores": {"HMMA": 32}}, "HMMA but no HGMMA for a tile of 64 rows"),
        ("calls", {"tensor_cores": {"HMMA": 32}}, "HMMA but no HGMMA for a tile of 64 rows"),
        ("calls", {"async_copies": 0}, "no asynchronous copies"),
        ("sm_90", {"loads_16_in_loops": 3}, "3 16-bit loads in loops"),
        ("sm_80", {"fp64": 2}, "2 instructions in fp64"),
        ("sm_90", {"fused_into_shuffles": 1}, "1 products fused with an addition across threads"),
        ("sm_90", {"accesses_before_wait": 2}, "2 accesses of memory before it waits for earlier launches"),
        ("sm_90", {"asks_before_wait": 0}, "asks for no weights before it waits for earlier launches"),
        ("gfx942", {"batch_dependent_sums": True}, "the layout of a sum depends on the number of requests"),
        ("sm_90", {"waits_for_all": 2}, "2 loops wait for all of their asynchronous copies"),
        ("sm_90", {"bytes_in_flight": 19_999}, f"39998 {ON_THEIR_WAY}, an H200 needs 40000"),
        (
            "sm_90",
            {"bytes_in_flight": 24_999, "programs": 1},
            f"24999 {ON_THEIR_WAY}, an H100 needs 25000, an H200 needs 40000",
        ),
        ("sm_90", {"tensor_over_issue": 0.89}, "0.89 tensor cycles for a cycle of issue in its loop, at least 0.9"),
        ("sm_90", {"tensor_over_issue": None}, "None tensor cycles for a cycle of issue in its loop, at least 0.9"),
    ],
)
def test_each_fault_is_found(part, change, message):
    found = faults_of(part, **change)
    assert found[0] == f"{part} Qwen2.5-1.5B _ragged_linear_kernel 1: {message}"
    assert len(found) == 1 or part == "calls"


def test_calls_may_spill_a_little_and_have_to_launch_every_kernel():
    assert len(kernels()) >= 15
    every = [replace(GOOD, kernel=name, spilled=64) for name in kernels()]
    assert codegen.faults("calls", every) == []
    assert codegen.faults("calls", every[1:]) == [f"calls: {every[0].kernel} is launched by none of them"]


def test_angles_may_be_reduced_in_fp64_and_on_the_stack():
    """By the kernel that takes cosines and sines only, and no more than the two functions need."""
    angles = dict(kernel="_embed_tokens_kernel 1", tensor_cores={}, async_copies=0, spilled=32, fp64=6)
    assert faults_of(**angles) == []
    for change, message in ((dict(spilled=36), "36 bytes spilled"), (dict(fp64=7), "7 instructions in fp64")):
        (found,) = faults_of(**angles | change)
        assert found == f"sm_90 Qwen2.5-1.5B _embed_tokens_kernel 1: {message}"
    found = faults_of(**angles | dict(kernel="_rope_cache_kernel 1"))
    assert [line.partition(": ")[2] for line in found] == ["32 bytes spilled", "6 instructions in fp64"]


def test_sums_that_decide_no_branch_may_differ_between_threads():
    assert faults_of(kernel="_value_tree_attention_kernel 1", fused_into_shuffles=3) == []


def test_only_matmuls_of_16_bit_numbers_need_tensor_cores():
    for change in ({"kernel": "_scan_kernel 1"}, {"is_half": False}):
        assert faults_of(tensor_cores={}, async_copies=0, **change) == []


# A loop of 8 warps with two groups of copies a pass, 8 KB each, and 128 cycles of the tensor cores.
LOOP = [
    "DEPBAR.LE SB0, 0x4 ",  # 0x0
    "BAR.SYNC.DEFER_BLOCKING 0x0",
    "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24",
    "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24, gsb0",
    "WARPGROUP.DEPBAR.LE gsb0, 0x0",  # of the tensor cores: no wait for copies
    "LDGSTS.E.BYPASS.128 [R2], desc[UR14][R4.64], P2",
    "LDGSTS.E.BYPASS.128 [R2+0x1000], desc[UR14][R4.64], P2",
    "LDGDEPBAR",
    "LDGSTS.E.BYPASS.128 [R2+0x2000], desc[UR14][R4.64]",
    "LDGSTS.E.BYPASS.128 [R2+0x3000], desc[UR14][R4.64]",
    "LDGDEPBAR",
    "@!P0 BRA 0x0",  # 0xb0
    "DEPBAR.LE SB0, 0x0 ",  # after the loop, where none is left
    "EXIT",
]


def loop_figures(lines):
    return codegen.loop_figures([(0x10 * i, line) for i, line in enumerate(lines)], 8)


def test_a_loop_is_read():
    figures = {"loop_instructions": 12, "loop_copies": 4, "loop_wait": 4, "bytes_in_flight": 2 * 4 * 16 * 256}
    assert loop_figures(LOOP) == figures | {"tensor_over_issue": round(128 / 24, 3), "waits_for_all": 0}
    assert loop_figures(["FADD R1, R1, R1", "EXIT"]) == {"bytes_in_flight": 0, "waits_for_all": 0}
    assert faults_of(**loop_figures(LOOP)) == []


def loops_in(lines, warps=4):
    return loading_loops([(0x10 * i, line) for i, line in enumerate(lines)], warps)


def test_bytes_waits_and_cycles_of_a_loop():
    lines = [
        *LOOP[:9],
        "@!P1 LDGSTS.E [R2+0x3000], desc[UR14][R4.64]",
        "@!PT LDGSTS.E [R2], desc[UR14][R4.64]",
        *LOOP[10:],
    ]
    (loop,) = loops_in(lines, 8)
    assert loop.lines == tuple(lines[:13])
    assert (loop.copied, loop.loaded) == (8 * 32 * (3 * 16 + 4), 0)
    assert (loop.wait, loop.bytes_in_flight) == (4, 2 * loop.copied)
    assert (loop.issue_cycles, loop.tensor_cycles) == (13 * 8 / 4, 2 * 32 * 2)  # two warp groups
    body = Loop(("DEPBAR.LE SB0, 0x6", "DEPBAR.LE SB0, 0x3 ", "WARPGROUP.DEPBAR.LE gsb0, 0x0", "LDGDEPBAR"), 4)
    assert body.wait == 3 and Loop(body.lines[2:], 4).wait is None
    loads = ("@!P1 LDG.E.U16 R8, desc[UR4][R6.64]", "LDG.E.U8 R2, desc[UR4][R2.64]", "LDG.E.64.CONSTANT R4, [R2]")
    assert Loop(loads, 4).loaded == 128 * (2 + 1 + 8)


def test_tensor_cycles_by_kind_and_shape():
    def cycles(line):
        return Loop((line,), 4).tensor_cycles

    assert cycles("HGMMA.64x256x16.F32.BF16 R24, gdesc[UR4], R24") == 128
    assert cycles("QGMMA.64x64x32.F32.E4M3.E4M3 R24, gdesc[UR4], R24") == 32
    assert cycles("HMMA.16816.F32.BF16 R4, R8, R2, R4") == pytest.approx(4 / 0.62)
    assert cycles("HMMA.1688.F32.BF16 R4, R8, R2, R4") == pytest.approx(2 / 0.62)


def test_the_main_loop_is_the_innermost_with_most_copies():
    """A search loop before, and a persistent loop around. One that loads nothing is none."""
    search = ["LDG.E.128 R4, desc[UR10][R6.64]", "@!P0 BRA 0x0"]
    inner = [*LOOP[:11], "@!P0 BRA 0x30"]
    lines = [*search, "FADD R1, R1, R1", *inner, "@P1 BRA 0x20", "EXIT"]
    assert main_loop(loops_in(lines)).lines == tuple(inner)
    assert main_loop(loops_in(search)).lines == tuple(search)
    assert main_loop(loops_in(["FADD R1, R1, R1", "@!P0 BRA 0x0", "EXIT"])) is None


def test_a_loop_that_waits_for_all_of_its_copies_is_found_wherever_it_is():
    """In the main loop, in one beside it, and in both; what a persistent loop around them waits for is its own."""
    waiting = [line.replace("SB0, 0x4", "SB0, 0x0") for line in LOOP[:12]]
    shorter = [line for line in waiting if "LDGSTS" not in line or "+" not in line]

    def moved(lines, by):
        return [line.replace("BRA 0x0", f"BRA {0x10 * by:#x}") for line in lines]

    assert loop_figures(waiting)["waits_for_all"] == 1
    assert loop_figures(waiting)["bytes_in_flight"] == 0
    assert loop_figures(LOOP[:12] + moved(shorter, 12))["waits_for_all"] == 1
    assert loop_figures(waiting + moved(shorter, 12))["waits_for_all"] == 2
    assert loop_figures([*LOOP[:13], "@P1 BRA 0x0"])["waits_for_all"] == 0
    assert faults_of(**loop_figures(waiting))[0].endswith("1 loops wait for all of their asynchronous copies")


def test_a_loop_with_too_few_stages_is_found():
    """One pass's copies on their way are 16 KB: two programs a multiprocessor are enough for an H100."""
    (fault,) = faults_of(**loop_figures([LOOP[0].replace("4", "2"), *LOOP[1:]]))
    assert fault.endswith(f"32768 {ON_THEIR_WAY}, an H200 needs 40000")


def test_a_loop_that_its_instructions_bound_is_found():
    (fault,) = faults_of(**loop_figures(LOOP[:1] + ["FADD R1, R1, R1"] * 60 + LOOP[1:]))
    assert fault.endswith("0.889 tensor cycles for a cycle of issue in its loop, at least 0.9")


def test_only_what_streams_on_sm_90_needs_copies_in_flight():
    slow = {"bytes_in_flight": 0, "tensor_over_issue": 0.1}
    for kernel in ("_value_tree_attention_kernel 1", "_value_head_kernel 1"):
        (fault,) = faults_of(kernel=kernel, **slow)
        assert f"0 {ON_THEIR_WAY}" in fault
    assert faults_of(kernel="_scan_kernel 1", **slow) == []
    for part, kind in (("sm_80", "HMMA"), ("sm_100", "UTCHMMA")):
        assert faults_of(part, tensor_cores={kind: 16}, waits_for_all=1, **slow) == []


@pytest.mark.parametrize("name", codegen.LIMITS)
def test_a_step_may_launch_no_more_than_its_limits(name):
    assert codegen.step_faults(codegen.LIMITS) == []
    most = codegen.LIMITS[name]
    assert codegen.step_faults(codegen.LIMITS | {name: most + 1}) == [f"step: {most + 1} {name}, at most {most}"]


def test_launches_of_real_steps_are_counted():
    """Every layer launches the same; a step with a trunk has no layers, and asks torch for nothing."""
    counts = [codegen.count_launches(value_step("Qwen2.5-0.5B", 8, layers)) for layers in (1, 2, 3)]
    (one, of_torch), (two, _), (three, of_torch_in_three) = counts
    assert three - two == two - one > 4 and one > two - one + of_torch and of_torch == of_torch_in_three > 0
    drafted, of_torch_with_drafts = codegen.count_launches(value_step("Qwen2.5-0.5B", 2, 1, drafts=2))
    assert drafted > one and of_torch_with_drafts > of_torch
    launches, of_torch = codegen.count_launches(trunk_step(20))
    assert launches > 4 and of_torch == 0


def regressions(changed, committed=GOOD):
    """Those of the good figures with changes."""
    return codegen.regressions("sm_90", [replace(GOOD, **changed)], [committed])


@pytest.mark.parametrize(
    ("figure", "passes", "fails"),
    [
        ("registers", 140, 141),
        ("shared", 72_089, 72_090),
        ("spilled", 0, 1),
        ("occupancy", 0.226, 0.224),
        ("bytes_in_flight", 18_000, 17_999),
        ("tensor_over_issue", 0.91, 0.89),
    ],
)
def test_a_figure_may_get_ten_percent_worse(figure, passes, fails):
    assert regressions({figure: passes}) == []
    (found,) = regressions({figure: fails})
    assert found.endswith(f"{figure} {getattr(GOOD, figure)} -> {fails}")


def test_figures_of_a_loop_that_one_side_lacks_are_not_compared():
    """Files of before they were read have none of them."""
    without = {name: None for name in ("programs", "bytes_in_flight", "tensor_over_issue", "waits_for_all")}
    old = {name: value for name, value in asdict(GOOD).items() if name not in without}
    assert regressions({}, codegen.Figures(**old)) == []
    assert regressions(without) == []
    (found,) = regressions({"loop_instructions": 111}, replace(GOOD, loop_instructions=100))
    assert found.endswith("loop_instructions 100 -> 111")


def test_better_figures_are_no_regression():
    assert regressions(dict(registers=64, shared=0, occupancy=1.0)) == []


def test_kernels_on_one_side_only_are_named():
    assert sorted(regressions({"kernel": "_linear_kernel 1"})) == [
        "sm_90 Qwen2.5-1.5B _linear_kernel 1 is not among the committed figures: --update writes them",
        "sm_90 Qwen2.5-1.5B _ragged_linear_kernel 1 is no longer compiled but among the committed figures: "
        "--update writes them",
    ]


@pytest.mark.parametrize(
    ("part", "registers", "shared", "warps", "occupancy"),
    [
        # 255 registers: 256 allotted to each of 128 threads, 2 blocks of 65,536. NVIDIA's occupancy calculator agrees.
        ("sm_90", 255, 0, 4, 8 / 64),
        ("sm_90", 32, 0, 4, 1.0),
        ("sm_90", 32, 0, 1, 32 / 64),  # 32 blocks
        ("sm_90", 32, 114_688, 4, 8 / 64),  # two blocks of 113 KB in 228 KB
        ("sm_80", 32, 90_112, 4, 4 / 64),  # one block of 89 KB in 164 KB
        ("gfx942", 128, 0, 4, 4 / 8),
        ("gfx942", 64, 36_864, 4, 1 / 8),
    ],
)
def test_occupancy(part, registers, shared, warps, occupancy):
    assert codegen.PARTS[part].occupancy(registers, shared, warps) == occupancy


def test_instructions_are_counted_by_width_and_place():
    lines = [
        "LDG.E.128.CONSTANT R4, desc[UR4][R2.64]",
        "LDG.E.U16 R8, desc[UR4][R6.64]",  # 0x10: before the loop
        "LDG.E.U16 R9, desc[UR4][R6.64]",  # 0x20: in the loop
        "LDG.E R9, desc[UR4][R6.64]",
        "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24",
        "@P0 BRA 0x20",
        "STG.E.U16 desc[UR4][R6.64], R9",
        "BRA 0x90",  # forward: no loop
    ]
    instructions = [(0x10 * i, line) for i, line in enumerate(lines)]
    assert loops_of(instructions) == [(0x20, 0x50)]
    figures = codegen.count_instructions(instructions, loops_of(instructions))
    assert figures["loads"] == {"16": 2, "32": 1, "128": 1}
    assert figures["stores"] == {"16": 1}
    assert figures["tensor_cores"] == {"HGMMA": 1}
    assert figures["loads_16_in_loops"] == 1


def test_loads_around_an_inner_loop_are_not_in_it():
    """Once a tile, not once a step of its sums; where two loops are one after the other, both count."""
    lines = ["LDG.E.U16 R8, desc[UR4][R6.64]", "LDG.E.U16 R9, desc[UR4][R6.64]", "LDG.E.U16 R9, desc[UR4][R6.64]"]
    instructions = list(enumerate(lines))
    for loops, found in ([(0, 2), (1, 1)], 1), ([(0, 0), (1, 2)], 3), ([(0, 2)], 3), ([], 0):
        assert codegen.count_instructions(instructions, loops)["loads_16_in_loops"] == found


def test_amd_instructions_are_counted():
    lines = [
        "\tglobal_load_dwordx4 v[0:3], v[4:5], off",
        ".LBB0_1:",
        "\tglobal_load_ushort v1, v[4:5], off",
        "\tv_mfma_f32_32x32x8_bf16_1k a[0:15], v[0:1], v[2:3], a[0:15]",
        "\ts_cbranch_scc1 .LBB0_1",
        "\tbuffer_store_dwordx2 v[0:1], v2, s[0:3], 0 offen",
        "\ts_branch .LBB0_2",
        ".LBB0_2:",
    ]
    instructions = list(enumerate(lines))
    assert codegen._amd_loops(instructions) == [(1, 4)]
    figures = codegen.count_instructions(instructions, codegen._amd_loops(instructions))
    assert figures["loads"] == {"16": 1, "128": 1}
    assert figures["stores"] == {"64": 1}
    assert figures["tensor_cores"] == {"mfma": 1}
    assert figures["loads_16_in_loops"] == 1


def test_fp64_is_counted():
    lines = [
        "DADD R2, R2, R4",
        "DSETP.GT.AND P0, PT, R2, R4, PT",
        "MUFU.RCP64H R7, R5",
        "F2F.F64.F32 R2, R0",
        "F2F.F32.F64 R2, R4",
        "\tv_fma_f64 v[0:1], v[2:3], v[4:5], v[6:7]",
        "FADD R2, R2, R4",
        "FFMA R2, R2, R4, R6",
        "LDG.E.64 R2, desc[UR4][R6.64]",
        "MUFU.RCP R7, R5",
        "IADD3 R2, R2, R4, RZ",
    ]
    assert codegen.count_instructions(list(enumerate(lines)), [])["fp64"] == 6


def test_accesses_before_the_wait_are_counted():
    lines = ["LDC.64 R4, c[0x0][0x210]", "LDG.E R2, [R4.64]", "@!P0 STG.E [R4.64], R2", "CCTL.E.PF2 [R4]", "ACQBULK"]
    lines += ["LDG.E R3, [R4.64]", "CCTL.E.PF2 [R4]"]
    assert codegen.until_wait(lines) == lines[:4]
    assert codegen.until_wait(lines[:3]) == lines[:3]  # it never waits
    assert codegen.num_accesses(lines) == 3
    assert codegen.num_accesses(lines[:2]) == 1


def test_products_fused_with_what_a_shuffle_brought_are_counted():
    lines = [
        "SHFL.BFLY PT, R5, R4, 0x10, 0x1f",
        "FADD R6, R4, R5",  # a sum
        "SHFL.BFLY PT, R7, R6, 0x8, 0x1f",
        "@!P1 FFMA.FTZ R8, R2, R3.reuse, R7",  # a product and a sum at once
        "FFMA R9, R2, R7, R3",  # a multiple of what the shuffle brought
        "FFMA R9, R2, R3, R70",
        "@P0 FFMA R7, R2, R3, R6",  # writes the register
        "FFMA R9, R2, R3, R7",  # reads what was written since
    ]
    assert codegen.fused_into_shuffles(lines) == 1
    assert codegen.fused_into_shuffles(lines[:2] + lines[4:]) == 0


TTGIR = """#blocked = #ttg.blocked<{sizePerThread = [1], threadsPerWarp = [32]}>
#blocked1 = #ttg.blocked<{sizePerThread = [2], threadsPerWarp = [32]}>
module {
    %15 = "tt.reduce"(%14) <{axis = 0 : i32}> ({
    ^bb0(%arg1: f32, %arg2: f32):
      %16 = arith.addf %arg1, %arg2 : f32
      tt.reduce.return %16 : f32
    }) : (tensor<256xf32, #blocked1>) -> f32
    %17 = "tt.reduce"(%14) <{axis = 0 : i32}> ({
    ^bb0(%arg1: f32, %arg2: f32):
      %18 = arith.maxnumf %arg1, %arg2 : f32
      tt.reduce.return %18 : f32
    }) : (tensor<256xf32, #blocked>) -> f32
}
"""


class Compiled:
    def __init__(self, ttgir):
        self.hash, self.asm = str(hash(ttgir)), {"ttgir": ttgir}


def test_layouts_of_sums_are_read():
    layout = "#ttg.blocked<{sizePerThread = 2, threadsPerWarp = 32}>"
    assert codegen.sum_layouts(TTGIR) == [f"tensor<256xf32, {layout}>"]


@pytest.mark.parametrize(
    ("layout", "other_rows", "other_columns"),
    [
        ("blocked<{warpsPerCTA = [4, 1], order = [1, 0]}>", ("[4, 1]", "[8, 1]"), ("[4, 1]", "[2, 2]")),
        ("nvidia_mma<{warpsPerCTA = [2, 2], instrShape = [16, 8]}>", ("[2, 2]", "[4, 2]"), ("[2, 2]", "[1, 4]")),
        ("linear<{lane = [[1, 0], [0, 8]], warp = [[2, 0]]}>", ("[[2, 0]]", "[[2, 0], [4, 0]]"), ("[2, 0]", "[0, 2]")),
        ("slice<{dim = 0, parent = #blocked<{warps = [1, 4, 2]}>}>", None, ("[1, 4, 2]", "[1, 4, 4]")),
    ],
)
def test_rows_beside_a_sum_change_no_layout_of_it(layout, other_rows, other_columns):
    def sums(layout, rows=64):
        two = TTGIR.replace("axis = 0", "axis = 1").replace("256x", f"{rows}x256x")
        return codegen.sum_layouts(two.replace(re.search("#blocked1 = (.*)", TTGIR)[1], f"#ttg.{layout}"))

    if other_rows:
        assert sums(layout) == sums(layout.replace(*other_rows), rows=128)
    assert sums(layout) != sums(layout.replace(*other_columns))


def test_only_the_layout_along_a_sum_counts():
    """Of 256 rows by 64 columns, of which the columns are added."""

    def of_rows(rows, by_row, by_column, columns=64):
        ttgir = TTGIR.replace("axis = 0", "axis = 1").replace("256x", f"{rows}x{columns}x")
        return codegen.sum_layouts(ttgir.replace("sizePerThread = [2]", f"sizePerThread = [{by_row}, {by_column}]"))

    assert of_rows(256, 1, 2) == of_rows(128, 4, 2) != of_rows(256, 1, 4)
    assert of_rows(256, 1, 2) != of_rows(256, 1, 2, columns=128)
    assert of_rows(256, 1, 2, columns=2) == []  # one addition


def test_products_that_a_matmul_adds_at_once_are_read():
    """The last number of three; the others are rows and columns."""
    mma = TTGIR + "#mma = #ttg.nvidia_mma<{versionMajor = 3, warpsPerCTA = [4, 1], instrShape = [16, 128, 16]}>"
    assert codegen.matmul_steps(TTGIR) == [] and codegen.matmul_steps(mma) == ["16"]
    wide, long = Compiled(mma.replace("128, 16]", "256, 16]")), Compiled(mma.replace("128, 16]", "128, 8]"))
    same = Compiled(mma)
    assert codegen.sums_that_differ([[("_a_kernel", same)], [("_a_kernel", wide)]]) == set()
    assert codegen.sums_that_differ([[("_a_kernel", same)], [("_a_kernel", long)]]) == {same.hash, long.hash}


def test_sums_that_the_batch_decides_are_found():
    """The second launch has other layouts with other batches; that of a maximum does not count."""
    other_sum = Compiled(TTGIR.replace("sizePerThread = [2]", "sizePerThread = [4]"))
    other_maximum = Compiled(TTGIR.replace("sizePerThread = [1]", "sizePerThread = [4]"))
    same = Compiled(TTGIR)
    batches = [[("_a_kernel", same), ("_b_kernel", same)], [("_a_kernel", other_maximum), ("_b_kernel", other_sum)]]
    assert codegen.sums_that_differ(batches) == {same.hash, other_sum.hash}
    assert codegen.sums_that_differ([batches[0][:1], batches[1][:1]]) == set()


def test_committed_figures_are_whole():
    text = codegen.RESULTS.read_text()
    results = json.loads(text)
    assert codegen.dump(results, 4) == text
    for entry in results.values():
        for part in codegen.PARTS:
            figures = [codegen.Figures(**figure) for figure in entry["parts"][part]]
            assert len(figures) > 50 and asdict(figures[0]).items() >= entry["parts"][part][0].items()
