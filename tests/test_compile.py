"""What the interpreter accepts the compiler may refuse: every kernel compiles for an H200, and into what it should."""

import json
import os
import subprocess
import sys

import pytest

from bench.codegen import BRANCH_ON_NO_SUM


@pytest.fixture(scope="module")
def kernels():
    """Facts of every kernel that tests/compile_kernels.py compiles; another process, because this one may interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.compile_kernels"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-5000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_operator_is_compiled(kernels):
    names = {kernel["kernel"] for kernel in kernels}
    assert names == {
        "_scan_kernel",
        "_filter_kernel",
        "_value_tree_attention_kernel",
        "_merge_splits_kernel",
        "_partial_logits_kernel",
        "_sum_partials_kernel",
        "_reweight_kernel",
        "_reweight_scatter_kernel",
        "_rope_cache_kernel",
        "_ragged_layout_kernel",
        "_sample_candidates_kernel",
        "_commit_winner_kernel",
        "_inv_rms_kernel",
        "_ragged_linear_kernel",
        "_sum_splits_kernel",
    }


def test_no_kernel_spills_its_accumulators(kernels):
    # Some park a few scalars outside their loops; a tile that does not fit the registers takes hundreds of bytes.
    assert [k for k in kernels if k["spilled"] > 64] == []


def test_kernels_fit_a_multiprocessor(kernels):
    assert [k for k in kernels if k["shared"] > 227 * 1024] == []


def test_bf16_matmuls_use_the_tensor_cores_and_asynchronous_copies(kernels):
    names = ("_value_tree_attention_kernel", "_partial_logits_kernel", "_ragged_linear_kernel")
    matmuls = [k for k in kernels if k["kernel"] in names and "bf16" in k["call"]]
    assert matmuls
    assert [k for k in matmuls if "HGMMA" not in k["tensor_cores"] or not k["async_copies"]] == []


def test_no_kernel_computes_in_fp64(kernels):
    assert [k for k in kernels if k["fp64"]] == []


def test_no_product_is_fused_with_an_addition_across_threads(kernels):
    branching = [k for k in kernels if k["kernel"] not in BRANCH_ON_NO_SUM]
    assert [k for k in branching if k["fused_into_shuffles"]] == []
