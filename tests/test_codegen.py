"""The codegen gate finds what it is there to find. Real kernels go through it in ``make codegen`` and test_compile."""

import json

import pytest

from bench import codegen

GOOD = {
    "model": "Qwen2.5-1.5B",
    "kernel": "_ragged_linear_kernel 1",
    "registers": 128,
    "spilled": 0,
    "shared": 65_536,
    "warps": 8,
    "occupancy": 0.25,
    "tensor_cores": {"HGMMA": 16},
    "loads": {"128": 4},
    "stores": {"128": 4},
    "async_copies": 24,
    "loads_16_in_loops": 0,
}


def test_good_figures_have_no_faults():
    for name, kind in (("sm_80", "HMMA"), ("sm_90", "HGMMA"), ("sm_100", "UTCHMMA"), ("gfx942", "mfma")):
        assert codegen.faults(name, codegen.PARTS[name], [GOOD | {"tensor_cores": {kind: 16}}]) == []


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("sm_80", {"spilled": 4}, "4 bytes spilled"),
        ("sm_80", {"shared": 163 * 1024 + 1}, "166913 bytes of shared memory, the part has 166912"),
        ("gfx942", {"shared": 73_728}, "73728 bytes of shared memory, the part has 65536"),
        ("sm_100", {"tensor_cores": {}}, "no tensor cores"),
        ("sm_90", {"tensor_cores": {"HMMA": 32}}, "HMMA but no HGMMA for a tile of 128 rows"),
        ("sm_90", {"loads_16_in_loops": 3}, "3 16-bit loads in loops"),
    ],
)
def test_each_fault_is_found(part, change, message):
    (found,) = codegen.faults(part, codegen.PARTS[part], [GOOD | change])
    assert found == f"{part} Qwen2.5-1.5B _ragged_linear_kernel 1: {message}"


def test_only_matmuls_need_tensor_cores():
    figure = GOOD | {"kernel": "_scan_kernel 1", "tensor_cores": {}}
    assert codegen.faults("sm_90", codegen.PARTS["sm_90"], [figure]) == []


@pytest.mark.parametrize(
    ("figure", "passes", "fails"),
    [("registers", 140, 141), ("shared", 72_089, 72_090), ("spilled", 0, 1), ("occupancy", 0.226, 0.224)],
)
def test_a_figure_may_get_ten_percent_worse(figure, passes, fails):
    assert codegen.regressions("sm_90", [GOOD | {figure: passes}], [GOOD]) == []
    (found,) = codegen.regressions("sm_90", [GOOD | {figure: fails}], [GOOD])
    assert found.endswith(f"{figure} {GOOD[figure]} -> {fails}")


def test_better_figures_are_no_regression():
    better = GOOD | {"registers": 64, "shared": 0, "occupancy": 1.0}
    assert codegen.regressions("sm_90", [better], [GOOD]) == []


def test_kernels_on_one_side_only_are_named():
    renamed = GOOD | {"kernel": "_linear_kernel 1"}
    found = codegen.regressions("sm_90", [renamed], [GOOD])
    assert sorted(found) == [
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
    assert codegen._nvidia_loops(instructions) == [(0x20, 0x50)]
    figures = codegen.count_instructions(instructions, codegen._nvidia_loops(instructions))
    assert figures["loads"] == {"16": 2, "32": 1, "128": 1}
    assert figures["stores"] == {"16": 1}
    assert figures["tensor_cores"] == {"HGMMA": 1}
    assert figures["loads_16_in_loops"] == 1


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


def test_committed_figures_are_whole():
    text = codegen.RESULTS.read_text()
    results = json.loads(text)
    assert codegen.dump(results) == text
    for entry in results.values():
        assert all(len(entry["parts"][name]) > 50 for name in codegen.PARTS)
