"""The model of a step's time: what it reads in SASS, its formulas, the layer it finds, and the rates it fits.

``python -m bench.codegen --check`` sends real steps through it.
"""

import json
import math
from dataclasses import replace

import pytest
import torch

from bench import kernel_model, step_model, step_rates
from bench.harness.measuring import Ceilings, Times
from bench.harness.storing import CaseResult, Measurement, Results, case_name, write_json
from bench.kernel_model import GPUS, HBM_LATENCY, L2_LATENCY, PARTS, START, Block, Cost, Rates, Work, launch_cost
from bench.sass import Code, Section, read
from bench.step_launches import Launch, Live, Step, _tiles, costs_of, layer_of
from tests.helpers.interpreter import run_compiling

H100 = GPUS["H100"]
EXACT = Rates(copy=1.0, chip=1.0, gap=0.0)

# A pipelined matmul of 8 warps: 128 x 64 tiles, 64 columns of x at a time, two groups of copies a pass.
MATMUL = """
S2R R0, SR_TID.X
LDG.E R2, desc[UR14][R4.64]
IADD3 R3, R2, R0, RZ
LDGSTS.E.BYPASS.128 [R14], desc[UR14][R26.64], P3
LDGDEPBAR
DEPBAR.LE SB0, 0x4
BAR.SYNC.DEFER_BLOCKING 0x0
@!PT LDS RZ, [RZ]
WARPGROUP.ARRIVE
HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24
HGMMA.64x64x16.F32.BF16 R24, R64, gdesc[UR4], R24, gsb0
WARPGROUP.DEPBAR.LE gsb0, 0x0
LDGSTS.E.BYPASS.128 [R123], desc[UR14][R106.64], P2
LDGSTS.E.BYPASS.128 [R123+0x1000], desc[UR14][R110.64], P5
LDGDEPBAR
@!P1 LDGSTS.E [R123+0x2000], desc[UR14][R106.64], P6
LDGDEPBAR
@!P0 BRA 0x50
DEPBAR.LE SB0, 0x0
FFMA R24, R24, R3, RZ
STG.E.128 desc[UR10][R4.64], R24
EXIT
SHFL.BFLY PT, R7, R24, 0x4, 0x1f
""".strip().splitlines()


def parsed(lines, warps=8):
    return read([(0x10 * i, line) for i, line in enumerate(lines)], warps)


def section(*lines, warps=4):
    return Section(lines, warps)


# --- what is read ---


def test_the_main_loop_and_the_rest_are_told_apart():
    code = parsed(MATMUL)
    assert code.loop.lines == tuple(MATMUL[5:18])
    assert code.rest.lines == tuple([*MATMUL[:5], *MATMUL[18:22]])  # what follows EXIT is for lanes that diverged


def test_bytes_waits_and_cycles_of_a_loop():
    loop = parsed(MATMUL).loop
    threads = 8 * 32
    assert loop.copied == threads * (16 + 16 + 4)
    assert (loop.groups, loop.wait, loop.stages_in_flight) == (2, 4, 2)
    assert loop.bytes_in_flight == 2 * loop.copied
    assert loop.issue_cycles == 13 * 8 / 4
    assert loop.tensor_cycles == 2 * 32 * 2  # two instructions of 32 cycles, by two warp groups
    # B of 64 columns twice, A of 64 rows once: the other one's is in registers. By two warp groups, and the copies.
    assert loop.shared_bytes == 2 * 32 * (64 + 64 + 64) + loop.copied
    assert (loop.loaded, loop.stored) == (0, 0)
    rest = parsed(MATMUL).rest
    assert (rest.loaded, rest.stored, rest.copied) == (threads * 4, threads * 16, threads * 16)


@pytest.mark.parametrize("branch", ["@P0 BRA 0xb0", "@!P3 EXIT"])
def test_what_only_the_last_program_to_arrive_runs_is_apart(branch):
    """The branch after the counter's update skips it; one before, and an exchange, are others'."""
    lines = [
        "@P1 BRA 0x20",
        "FADD R1, R1, R1",
        "@P2 ATOMG.E.ADD.STRONG.GPU PT, R7, desc[UR12][R8.64], R7",
        "FADD R2, R2, R2",
    ]
    merge = ["LDG.E.128.STRONG.GPU R4, desc[UR4][R2.64]", "@P4 BRA 0x70", "FADD R3, R3, R3", "STG.E [R2], R3"]
    code = parsed([*lines, branch, *merge, "NOP", "NOP", "FADD R9, R9, R9", "EXIT"])
    end = () if "BRA" in branch else ("FADD R9, R9, R9", "EXIT")
    assert code.of_last.lines == (*merge, "NOP", "NOP", *end)
    assert code.rest.lines == (*lines, branch, *([] if end else ["FADD R9, R9, R9", "EXIT"]))
    exchange = [line.replace("ADD.STRONG", "EXCH.STRONG") for line in lines]
    assert parsed([*exchange, branch, *merge, "EXIT"]).of_last is None


def test_a_loop_that_reads_e4m3_is_the_main_one():
    """Another one with more asynchronous copies, over what is in another dtype, is left out; one that loads is not."""
    copy = "LDGSTS.E.BYPASS.128 [R1], desc[UR4][R2.64]"
    e4m3 = [copy, "F2FP.F16.E4M3.UNPACK_B R3, R4", "@P0 BRA 0x0"]
    other = [copy, copy, copy, "@P0 BRA 0x40"]
    loads = ["LDG.E R5, desc[UR4][R6.64]", "@P0 BRA 0x80"]
    code = parsed([*e4m3, "FADD R1, R1, R1", *other, *loads, "EXIT"])
    assert code.loop.lines == tuple(e4m3)
    assert code.rest.lines == ("FADD R1, R1, R1", *loads, "EXIT")
    plain = parsed([line.replace("E4M3", "E5M2") for line in e4m3] + ["FADD R1, R1, R1", *other, *loads, "EXIT"])
    assert plain.loop.lines == tuple(other) and len(plain.rest.lines) == 7


def test_widths_of_shared_and_global_accesses():
    body = section("LDS.128 R8, [R8]", "LDS R8, [R8]", "@!P5 STS.64 [UR4], R4", "LDSM.16.M88.4 R68, [R106+0x14000]")
    assert body.shared_bytes == 128 * (16 + 4 + 8 + 16)
    body = section("@!P1 LDG.E.U16 R8, desc[UR4][R6.64]", "LDG.E.U8 R2, desc[UR4][R2.64]", "LDG.E.64.CONSTANT R4, [R2]")
    assert body.loaded == 128 * (2 + 1 + 8)


def test_tensor_cycles_by_kind_and_shape():
    assert section("HGMMA.64x256x16.F32.BF16 R24, gdesc[UR4], R24").tensor_cycles == 128
    assert section("QGMMA.64x64x32.F32.E4M3.E4M3 R24, gdesc[UR4], R24").tensor_cycles == 32
    assert section("HMMA.16816.F32.BF16 R4, R8, R2, R4").tensor_cycles == pytest.approx(4 / 0.62)
    assert section("HMMA.1688.F32.BF16 R4, R8, R2, R4").tensor_cycles == pytest.approx(2 / 0.62)


def test_the_strictest_of_several_waits_counts_and_that_of_a_warp_group_does_not():
    body = section("DEPBAR.LE SB0, 0x6", "DEPBAR.LE SB0, 0x3 ", "WARPGROUP.DEPBAR.LE gsb0, 0x0", "LDGDEPBAR")
    assert body.wait == 3
    assert section("WARPGROUP.DEPBAR.LE gsb0, 0x0").wait is None


def test_the_main_loop_is_the_innermost_with_most_copies():
    """A search loop before, and a persistent loop around."""
    search = ["LDG.E.128 R4, desc[UR10][R6.64]", "@!P0 BRA 0x0"]
    lines = [*search, "FADD R1, R1, R1", *MATMUL[:18], "@P1 BRA 0x20", "EXIT"]
    around = [line.replace("0x50", "0x80") for line in lines]
    assert parsed(around).loop.lines == tuple(around[8:21])
    assert parsed(search).loop.lines == tuple(search)
    assert parsed(["FADD R1, R1, R1", "@!P0 BRA 0x0", "EXIT"]).loop is None  # it loads nothing


def test_a_warp_waits_where_an_operand_is_not_ready():
    independent = section("LDG.E R2, desc[UR4][R4.64]", "FADD R6, R7, R8", "FADD R9, R7, R8")
    assert independent.stalled() == 3
    for user in ("FADD R9, R2, R8", "@P0 FADD R9, R8, R2", "STG.E desc[UR4][R8.64], R2"):
        assert section("LDG.E R2, desc[UR4][R4.64]", user).stalled(700) == 1 + 700
    # The fourth of its registers.
    assert section("LDG.E.128 R4, desc[UR4][R2.64]", "FADD R9, R7, R8").stalled(700) == 701
    assert section("LDG.E.64 R4, desc[UR4][R2.64]", "FADD R9, R6, R8").stalled(700) == 2
    assert section("ISETP.GE.AND P0, PT, R2, R3, PT", "@!P0 BRA 0x10").stalled() == 1 + 5
    assert section("SHFL.BFLY PT, R3, R4, 0x1, 0x1f", "FADD R9, R3, R8").stalled() == 1 + 24
    assert section("BAR.SYNC.DEFER_BLOCKING 0x0", "FADD R9, R3, R8").stalled() == 1 + 20 + 1


def test_a_load_for_the_next_pass_stalls_that_one():
    body = section("FADD R9, R2, R8", "LDG.E R2, desc[UR4][R4.64]")
    assert body.stalled(700) == 2
    assert body.stalled(700, passes=2) == 701


def test_a_warp_waits_for_its_warp_group_multiplications():
    tile = "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24"
    assert section(tile, f"{tile}, gsb0", "WARPGROUP.DEPBAR.LE gsb0, 0x0").stalled() == 1 + 64 + 64 + 30
    assert section(f"{tile}, gsb0", f"{tile}, gsb0", "WARPGROUP.DEPBAR.LE gsb0, 0x1").stalled() == 1 + 64 + 30
    assert section(f"{tile}, gsb0", "WARPGROUP.DEPBAR.LE gsb0, 0x1").stalled() == 2


# --- the formulas ---


def cycles(seconds):
    return seconds * H100.clock


def cost(code, work, *, resident=2, programs=10**6, rates=EXACT, gpu=H100):
    return launch_cost(code, resident, work, programs, gpu, rates)


ISSUE = Code(None, section(*["FADD R1, R2, R3"] * 100, warps=8))  # 200 cycles of issue, 100 alone


def test_issue_is_shared_by_the_programs_of_a_multiprocessor_and_waves_follow_each_other():
    for items, expected in ((1, 200), (132, 200), (133, 400), (264, 400), (265, 600), (528, 800), (529, 1000)):
        found = launch_cost(ISSUE, 2, Work(items), 264, H100, EXACT)
        assert cycles(found.seconds) == pytest.approx(START + expected)
        assert found.bound in ("issue", "rest")


def test_a_launch_of_few_programs_takes_its_items_in_turn():
    assert cycles(launch_cost(ISSUE, 2, Work(528), 132, H100, EXACT).seconds) == pytest.approx(START + 4 * 200)


def test_programs_start_at_one_a_cycle():
    assert cost(ISSUE, Work(1), programs=10**5) == Cost(1e5 / H100.clock, "programs")


def test_hbm_bounds_a_launch_by_the_share_of_its_bandwidth():
    for gpu, bandwidth in ((H100, 3.35e12), (GPUS["H200"], 4.8e12)):
        found = cost(ISSUE, Work(1, hbm=1e9), rates=Rates(copy=0.8), programs=1, gpu=gpu)
        assert found == Cost(pytest.approx(1e9 / (0.8 * bandwidth)), "HBM", 1e9)


def test_bytes_of_l2_are_shared_by_all_programs_and_capped_by_those_of_one():
    """A load of 128 bytes a thread pass by pass; the stalls of a warp alone are 10 cycles."""
    loop = section(*["LDG.E.128 R4, desc[UR4][R2.64]"] * 8, "@!P0 BRA 0x0", warps=8)
    code, moved = Code(loop, section(warps=8)), 8 * 16 * 256
    one = cost(code, Work(1, passes=100), programs=1)
    assert (cycles(one.seconds), one.bound) == (pytest.approx(START + 100 * moved / 64), "L2")
    full = cost(code, Work(264, passes=100), programs=264)
    assert cycles(full.seconds) == pytest.approx(START + 100 * moved * 2 / 34)
    masked = cost(code, Work(264, passes=100, share=0.5), programs=264)
    assert cycles(masked.seconds) == pytest.approx(START + 100 * moved / 34)
    slower = cost(code, Work(264, passes=100), programs=264, rates=replace(EXACT, chip=0.5))
    assert cycles(slower.seconds) == pytest.approx(START + 100 * moved * 4 / 34)


@pytest.mark.parametrize(("wait", "stages"), [(0, 0), (2, 1), (4, 2)])
def test_latency_is_hidden_by_the_stages_on_their_way(wait, stages):
    lines = [f"DEPBAR.LE SB0, {wait:#x}", "LDGSTS.E.128 [R2], desc[UR4][R4.64]", "LDGDEPBAR", "LDGDEPBAR"]
    code = Code(section(*lines), section())
    for hbm, latency in ((0, L2_LATENCY), (1, HBM_LATENCY * H100.clock)):
        found = cost(code, Work(1, passes=50, hbm=hbm), programs=1)
        assert cycles(found.seconds) == pytest.approx(START + latency + 50 * (latency + 4) / (stages + 1))
        assert found.bound == "latency"


def test_shared_memory_bounds_a_narrow_tile_and_the_tensor_cores_a_wide_one():
    """128 x 64 reaches 57 % of the tensor rate, 128 x 128 80 %, 128 x 256 all of it; issue and stalls left aside."""
    for columns, share in ((64, 64 / 112), (128, 0.8), (256, 1.0)):
        copies = (128 + columns) * 64 * 2 // (16 * 256)  # of 16 bytes by 256 threads
        lines = [f"HGMMA.64x{columns}x16.F32.BF16 R24, gdesc[UR4], R24"] * 4
        lines += ["LDGSTS.E.BYPASS.128 [R2], desc[UR4][R4.64]"] * copies
        loop = section(*lines, warps=8)
        assert loop.tensor_cycles / max(loop.tensor_cycles, loop.shared_bytes / 128) == pytest.approx(share, rel=1e-3)


def test_merging_takes_its_share_of_the_items():
    merge = section(*["FADD R1, R1, R1"] * 1000)
    code = replace(ISSUE, of_last=merge)
    assert cost(code, Work(1), programs=1).bound == "rest"
    for merges in (0.0, 0.5, 3.0):
        found = cost(code, Work(132, merges=merges), programs=132)
        rest = max(200, ISSUE.rest.stalled())
        assert cycles(found.seconds) == pytest.approx(START + rest + merges * max(1000, merge.stalled()))


def test_loads_beside_copies_come_from_the_l2_cache():
    lines = ["FADD R9, R2, R8", "LDG.E R2, desc[UR4][R4.64]"]
    hbm_latency, copy = HBM_LATENCY * H100.clock, ["LDGSTS.E [R7], [R4]", "LDGDEPBAR", "DEPBAR.LE SB0, 0x9"]
    for copies, latency, first in (([], hbm_latency, 0), (copy, L2_LATENCY, hbm_latency)):
        found = cost(Code(section(*lines, *copies), section()), Work(1, passes=100, hbm=1), programs=1)
        assert cycles(found.seconds) == pytest.approx(START + first + 100 * (latency + 1 + len(copies)), rel=1e-2)


def test_two_programs_hide_each_others_rest():
    """Alone a program is bound by its stalls, two by what both issue."""
    loop, rest = section(*["FADD R1, R1, R1"] * 100), section(*["FADD R1, R1, R1"] * 100)
    loop = section("LDG.E R9, desc[UR4][R2.64]", *loop.lines)
    code = Code(loop, rest)
    alone = loop.stalled(passes=2) * 10 + rest.stalled()
    assert alone > 2 * (1010 + 100)
    for resident, expected in ((1, alone), (8, 8 * (10 * 101 + 100))):
        found = cost(code, Work(132 * resident, passes=10), resident=resident, programs=132 * resident)
        assert cycles(found.seconds) == pytest.approx(START + expected)


# --- a step's launches ---


def test_a_layer_is_what_repeats():
    names = ["index", "index", "scan", "qkv", "o", "o", "gate", "qkv", "o", "o", "gate", "head", "index"]
    assert layer_of(names) == slice(3, 7)
    with pytest.raises(ValueError, match="no launches repeat"):
        layer_of(["scan", "qkv", "head"])


def test_tiles_and_the_share_of_their_rows_that_exist():
    assert _tiles(320, 17920, 128, 128) == (3 * 140, (128 + 320 / 3) / 256)
    assert _tiles(40, 2000, 128, 64) == (32, (64 + 40) / 192)


def test_live_rows_follow_from_the_candidates():
    assert Live.of_step(64) == Live(320, 64, 513)
    few = Live.of_step(64, "SmolLM2", 100)
    assert 64 < few.rows < 320 and few.cached == 101


SMALL = Block(64, 0, 4)


def a_step(requests, layers=2, operators=(1, 3)):
    """A step of made-up launches: one of a layer that grows with the requests, one outside of the layers."""
    code = parsed(MATMUL)
    layer = [
        Launch("_a_kernel", code, 10**4, Block(128, 0, 8), Work(40 * requests, 24, 2e7)),
        Launch("_b_kernel", ISSUE, 1, SMALL, Work(1)),
    ]
    others = [Launch("_c_kernel", ISSUE, 1, SMALL, Work(1))]
    step = Step("Qwen2.5-0.5B", Live.of_step(requests), layer, others, operators)
    assert step.config.num_layers == 24
    return step


def test_a_step_is_its_layers_and_the_rest_with_a_gap_before_each():
    step, rates = a_step(64), Rates()
    layer, others = (sum(x.cost(H100, rates).seconds for x in part) for part in (step.layer, step.others))
    torch_operator = 1.5e-6 + rates.gap
    expected = 24 * (layer + 2 * rates.gap + torch_operator) + others + rates.gap + 3 * torch_operator
    assert step.seconds(H100, rates) == pytest.approx(expected)
    assert (step.num_launches, step.num_operators) == (24 * 3 + 1 + 3, 24 + 3)


def test_a_launch_that_overlaps_the_one_before_has_a_shorter_gap():
    step = a_step(64)
    shorter = replace(step, others=[replace(step.others[0], overlaps=True)])
    assert step.seconds(H100, Rates()) - shorter.seconds(H100, Rates()) == pytest.approx(0.6 * 1.2e-6)


def test_a_multiprocessor_runs_blocks_side_by_side():
    """Bound by registers, by shared memory and by warps in turn, of which other blocks have their part."""
    room = PARTS["sm_90"].resident_blocks
    assert room(Block(128, 0, 4)) == 4
    assert [room(Block(128, 0, 4), Block(64, 0, 8), count) for count in range(5)] == [4, 3, 2, 1, 0]
    assert [room(Block(32, 100 * 1024, 4), Block(32, 60 * 1024, 4), count) for count in range(5)] == [2, 1, 1, 0, 0]
    assert [room(Block(32, 0, 16), Block(32, 0, 1), count) for count in (0, 1, 16, 17, 33)] == [4, 3, 3, 2, 0]
    assert room(Block(255, 0, 8), Block(255, 0, 8), 2) == 0


def matmul(prefetched=0, *, programs=264, hbm=1e7, shared=0, overlaps=True):
    work = Work(programs, 24, hbm, prefetching=100, prefetched=prefetched)
    return Launch("_a_kernel", parsed(MATMUL), programs, Block(128, shared, 8), work, overlaps)


def test_weights_come_while_the_launch_before_leaves_bandwidth_and_room():
    before = matmul(programs=132, hbm=0)
    alone = matmul().cost(H100, EXACT)

    def arrived(launch, before, cost=None):
        found = launch.cost(H100, EXACT, (before, cost or before.cost(H100, EXACT)))
        return alone.hbm - found.hbm, found

    assert arrived(matmul(), before) == (0.0, alone)  # it asks for none
    assert arrived(matmul(50_000, overlaps=False), before) == (0.0, alone)
    early, cost = arrived(matmul(50_000), before)
    assert early == 100 * 50_000 and cost.seconds < alone.seconds
    assert arrived(matmul(200_000), before, Cost(1.0, ""))[0] == 1e7  # no more than there is
    assert arrived(matmul(50_000), before, Cost(1e-6, "", 3.35e6 - 1000))[0] == pytest.approx(1000)
    assert arrived(matmul(50_000), before, Cost(1e-6, "", 3.36e6)) == (0.0, alone)
    # A block of 120 KB has room beside one of 100 KB, but not beside its like. Those leave 32 multiprocessors empty.
    large = matmul(50_000, shared=120 * 1024)
    assert large.find_room(matmul(programs=100, shared=120 * 1024), H100) == 32
    assert large.find_room(matmul(programs=100, shared=100 * 1024), H100) == 132
    assert large.find_room(matmul(programs=10**4, shared=100 * 1024), H100) == 0
    assert arrived(large, matmul(programs=100, shared=120 * 1024), Cost(1.0, ""))[0] == 32 * 50_000
    # Running are those that there is work for.
    few = matmul(programs=10**4, shared=120 * 1024)
    assert large.find_room(replace(few, work=Work(20)), H100) == 112
    assert arrived(replace(matmul(50_000), programs=7), before, Cost(1.0, ""))[0] == 7 * 50_000


def test_weights_that_are_there_are_read_from_the_l2_cache():
    loop = ["DEPBAR.LE SB0, 0x0", "LDGSTS.E.128 [R2], desc[UR4][R4.64]", "LDGDEPBAR"]
    code, far = Code(section(*loop), section()), HBM_LATENCY * H100.clock
    for share in (0.0, 0.25, 1.0):
        found = launch_cost(code, 1, Work(1, passes=50, hbm=1000), 1, H100, EXACT, arrived=1000 * share)
        latency = far - share * (far - L2_LATENCY)
        assert cycles(found.seconds) == pytest.approx(START + latency + 50 * (latency + 3))
        assert found.hbm == 1000 * (1 - share)
    for arrived in (0, 4e8):
        found = launch_cost(code, 1, Work(1, hbm=1e9), 1, H100, EXACT, arrived)
        assert found == Cost(pytest.approx((1e9 - arrived) / 3.35e12), "HBM", 1e9 - arrived)


def test_launches_follow_each_other():
    """Each leaves bandwidth to the next; the first follows the last where they repeat."""
    first, second = matmul(50_000, programs=132), matmul(30_000, programs=132)
    plain = costs_of([first, second], H100, EXACT)
    assert plain == [first.cost(H100, EXACT), second.cost(H100, EXACT, (first, plain[0]))]
    around = costs_of([first, second], H100, EXACT, repeat=True)
    assert around[0] == first.cost(H100, EXACT, (second, second.cost(H100, EXACT)))
    assert around[0].hbm < plain[0].hbm
    assert around[1] == second.cost(H100, EXACT, (first, around[0]))


def test_the_page_sets_the_numbers_beside_those_before():
    rates = dict.fromkeys(GPUS, Rates())
    sizes = {f"{b} {gpu}": step_model.numbers_of(a_step(b), GPUS[gpu], Rates()) for b in (8, 64, 256) for gpu in GPUS}
    now = {step_model.DETAILED: sizes}

    def changed(times=1.0, **others):
        """The numbers with so many times the milliseconds, and with others."""
        return {
            key: json.loads(json.dumps(numbers | {"milliseconds": times * numbers["milliseconds"]} | others))
            for key, numbers in sizes.items()
        }

    old = changed(2)
    for numbers in old.values():
        numbers["layer"]["gone"] = numbers["layer"].pop("b")
    before = {"commit": "abcdef0", "command": "command", "date": "2026-01-01", "models": {step_model.DETAILED: old}}
    for numbers in sizes.values():
        numbers["layer"]["ragged_linear 8 x 4"] = [9.5, "HBM"]
    quantized = changed(0.75, layer={"ragged_linear 8 x 4": [7.25, "HBM"]})
    drafted, of_trunk = changed(2, launches=99), changed(launches=5, floor=0.0123)
    text = step_model.page(now, quantized, drafted, of_trunk, before, rates)
    a, b = (now[step_model.DETAILED]["8 H100"]["layer"][label][0] for label in "ab")
    assert f"| a | {a:.1f} |" in text and f"| b | {b:.1f} |" in text
    assert "| gone | - | - | - |  |" in text
    n = now[step_model.DETAILED]["64 H200"]
    ms = n["milliseconds"]
    row = f"| {step_model.DETAILED} | 64 | H200 | 76 | 76 | {n['floor']:.2f} | {ms:.2f} | {2 * ms:.2f} |"
    assert row in text and "abcdef0" in text
    assert text.count("| ragged_linear 8 x 4, us | 7.2 | 7.2 | 7.2 | 9.5 | 9.5 | 9.5 |") == 2
    assert f" {0.75 * ms:.2f} |" in text
    assert f"| 64 | H200 | 99 | {2 * ms:.2f} | {5 * ms:.2f} | 40% |" in text
    with_trunk = text[text.index("## A trunk") : text.index("## Steps")]
    c = n["others"]["c"][0]
    assert "| 5 launches | B 8 | B 64 | B 256 |" in with_trunk and f"| c | {c:.1f} | {c:.1f} | {c:.1f} |" in with_trunk
    steps = " | ".join(f"{of_trunk[f'{b} H200']['milliseconds'] * 1e3:.0f}" for b in (8, 64, 256))
    assert f"| **a step** | {steps} |\n| at rates | 12 | 12 | 12 |" in with_trunk


def test_the_committed_numbers_before_are_whole():
    before = json.loads(step_model.BEFORE.read_text())
    assert step_model.dump(before, 3) == step_model.BEFORE.read_text()
    assert set(before["models"]) == set(step_model.MODELS)
    for by_size in before["models"].values():
        assert set(by_size) == {f"{b} {gpu}" for b in step_model.SIZES for gpu in GPUS}


REAL_STEP = """
import json
from bench.step_launches import Step
step = Step.of("Qwen2.5-0.5B", 8)
parts = (step.layer, step.others)
print(json.dumps([[[x.name, x.work.items, x.work.passes, x.work.hbm] for x in part] for part in parts]))
"""


def printed_by(source):
    """What a program that compiles kernels prints as JSON."""
    return json.loads(run_compiling("-c", source).splitlines()[-1])


def test_a_real_step_is_compiled_and_its_work_counted():
    layer, others = printed_by(REAL_STEP)
    linears = [work for name, *work in layer if name == "_ragged_linear_kernel"]
    sizes = ((1152, 896), (896, 896), (2 * 4864, 896), (896, 4864))
    assert [weights for *_, weights in linears] == [2 * columns * size for columns, size in sizes]
    # The parts of the last one's sums, of each row it has: of 4 rows by 64 columns at once.
    at = [name for name, *_ in layer].index("_add_parts_kernel")
    assert layer[at - 1][0] == "_ragged_linear_kernel" and layer[at - 1][3] == linears[-1][2]
    assert layer[at][1:] == [10 * 14, 1, 0]
    (attention,) = (work for name, *work in layer if name == "_value_tree_attention_kernel")
    items, passes, moved = attention
    assert moved == 8 * 513 * 2 * 64 * 2 * 2  # requests, tokens, heads, dimensions, keys and values, bytes
    assert items >= 8 * 2 and items * passes * 128 >= 8 * 2 * 513  # programs for each request and head, 128 keys a pass
    (scan,) = (work for name, *work in others if name == "_scan_kernel")
    assert scan[2] == 8 * 151_936 * 4 and scan[0] * scan[1] >= 8 * 151_936 / 4096


STEP_WITH_TRUNK = """
import json
from bench.kernel_model import GPUS
from bench.step_launches import Step
step = Step.of_trunk(20)
works = [[x.name, x.work.items, x.work.passes, x.work.hbm] for x in step.others]
print(json.dumps([works, len(step.layer), step.num_launches, step.num_operators, step.floor(GPUS["H100"], 1.0, 1.0)]))
"""


def test_a_real_step_with_a_trunk_has_no_layers():
    """Of 20 requests by 8 candidates, beside a base model of 28 layers of 3,584 numbers, of which three are read."""
    works, of_layer, launches, operators, floor = printed_by(STEP_WITH_TRUNK)
    assert of_layer == operators == 0 and launches == len(works)
    work = {name: others for name, *others in works}
    assert work["_ragged_linear_kernel"][2] == 256 * 3 * 3584 * 2
    # Tiles of 16 candidates by 64 of 128 outputs, and a pass over 64 of 128 inputs.
    head = 128 * 128 + 33 * 128
    assert work["_candidate_values_kernel"] == [160 / 16 * 128 / 64, 128 / 64, 160 * 128 * 2 + 2 * head]
    moved = 2 * (256 * 3 * 3584 + head + 20 * (3 * 3584 + 8 * 128)) + 20 * 151_936 * 4
    assert floor == pytest.approx(moved / GPUS["H100"].bandwidth)


# --- calibration ---

KNOWN = Rates(copy=0.91, chip=0.8, gap=0.9e-6)
DEVICE = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def suite(tmp_path, monkeypatch):
    """What writes a suite's results, as they would be at known rates, and gives their folder."""
    monkeypatch.setattr(kernel_model, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(step_rates.Step, "of", lambda model, requests, counts, cached, **kept: a_step(requests))

    def case(seconds, **shape):
        times = Times(seconds, 0.01, 3 * seconds, 0.01, "graph")
        return CaseResult(case_name(shape), shape, Measurement(times), floor=1e-3)

    def write(sizes=(1, 8, 64, 256, 512), device=DEVICE, **environment):
        common = dict(model="Qwen2.5-0.5B", L=512, counts="full", base="none", dtype="bfloat16")
        measured = dict(winners="committed", launch="graph")
        cases = [case(a_step(b).seconds(H100, KNOWN), B=b, **common, **measured) for b in sizes]
        # What the model does not describe, and what was not measured.
        others = ({"winners": "computed"}, {"launch": "python"})
        cases += [case(1.0, B=8, **common, **measured | other) for other in others]
        cases.append(replace(cases[0], ours=Measurement(missing="left out: no time")))
        ceilings = Ceilings(0.91 * H100.bandwidth, {"bfloat16": 7e14}, 2e-6, 3e-6)
        folder = tmp_path / "suite"
        environment = {"device": device, "date": "2026-01-02", **environment}
        write_json(folder / "step.json", Results("step", environment, ceilings, [], cases))
        return folder

    return write


def test_calibration_recovers_the_rates(suite):
    lines = step_rates.calibrate(suite())
    found = Rates.of(H100)
    assert (found.copy, found.chip, found.gap) == pytest.approx((KNOWN.copy, KNOWN.chip, KNOWN.gap), rel=1e-3)
    assert found.source == f"fitted to {DEVICE}, 2026-01-02"
    assert sum("B " in line and line.strip().startswith("1.00") for line in lines) == 5
    assert Rates.of(GPUS["H200"]) == Rates()  # nothing is known of another GPU


def test_calibration_takes_a_file_of_the_folder(suite):
    step_rates.calibrate(suite() / "step.json")
    assert Rates.of(H100).chip == pytest.approx(0.8, rel=1e-3)


def test_the_fit_is_the_least_squares_of_inexact_times():
    """Times with errors of 5 % leave rates near the known ones, from which no step makes the errors smaller."""
    steps = [a_step(b) for b in (1, 8, 64, 256, 512)]
    measured = [
        step_rates.Measured("", step.seconds(H100, KNOWN) * factor, lambda rates, step=step: step.seconds(H100, rates))
        for step, factor in zip(steps, (1.05, 0.95, 1.0, 1.05, 0.97), strict=True)
    ]

    def errors(rates):
        return sum(math.log(m.model(rates) / m.seconds) ** 2 for m in measured)

    found = step_rates.fit(measured, Rates(copy=KNOWN.copy))
    assert found.chip == pytest.approx(KNOWN.chip, rel=0.1) and found.gap == pytest.approx(KNOWN.gap, rel=0.1)
    for change in (dict(chip=found.chip * 1.01), dict(chip=found.chip * 0.99), dict(gap=found.gap * 1.01)):
        assert errors(replace(found, **change)) > errors(found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sizes": (1, 8)}, "step.json has 2 steps in a graph with winners committed, 3 are needed"),
        ({"device": "NVIDIA A100"}, "the model knows H100 and H200, the results in .* are of NVIDIA A100"),
        ({"dry_run": True}, "are of a dry run"),
    ],
)
def test_results_with_missing_parts_are_refused(suite, options, message):
    with pytest.raises(step_rates.CalibrationError, match=message):
        step_rates.calibrate(suite(**options))
    assert Rates.of(H100) == Rates()


def test_a_folder_without_steps_is_refused(tmp_path):
    with pytest.raises(step_rates.CalibrationError, match="no results of bench"):
        step_rates.calibrate(tmp_path)


def test_matmuls_of_the_suite_are_fitted_too(suite, monkeypatch):
    """The time of a cold call: an empty kernel's, and the gaps between its launches."""
    launches = a_step(64).layer
    monkeypatch.setattr(step_rates, "launches_of", lambda run, live: launches if live == Live(384) else [])
    shape = dict(model="Qwen2.5-0.5B", layer="o", rows=384, room=1.5, weights="dtype", dtype="bfloat16")
    seconds = 3e-6 + sum(launch.cost(H100, KNOWN).seconds for launch in launches) + KNOWN.gap
    result = CaseResult("o", shape, Measurement(Times(1.0, 0.0, seconds, 0.0, "graph")))
    folder = suite(sizes=(1, 8, 64))
    step = Results.read(folder / "step.json")
    write_json(folder / "ragged_linear.json", replace(step, operator="ragged_linear", cases=[result]))
    lines = step_rates.calibrate(folder)
    assert any(line.strip().startswith("1.00") and "ragged_linear o" in line for line in lines)
    assert torch.allclose(torch.tensor(Rates.of(H100).gap), torch.tensor(KNOWN.gap), rtol=1e-3)
