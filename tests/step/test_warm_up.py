"""Serving compiles no kernel after ``GuidedStep.warm_up``."""

import json

from tests.helpers.interpreter import run_compiling

# 18 tiles, so ranges have several tiles. Rows are not aligned to 16 bytes, except in padded tensors.
VOCAB = 17_411


def test_serving_compiles_nothing():
    report = json.loads(run_compiling("-m", "tests.helpers.serving_variants", str(VOCAB)))
    kinds = ("with graphs", "without graphs", "with drafts")
    of_probe = report.pop("with a probe")
    assert of_probe["new"] == {} and of_probe["warm"]["_candidate_values_kernel"] == 1
    assert of_probe["warm"]["_ragged_linear_kernel"] >= 1
    assert {name: served["new"] for name, served in report.items()} == {kind: {} for kind in kinds}
    for served in report.values():
        assert served["warm"].keys() >= {"_scan_kernel", "_draw_kernel", "_value_tree_attention_kernel"}
        for kernel in ("embed_tokens", "rope_cache"):
            assert served["warm"][f"_{kernel}_kernel"] == 1
    # Prompts, steps, and steps with drafts.
    layouts = {name: served["warm"]["_lay_out_kernel"] for name, served in report.items()}
    assert layouts == dict.fromkeys(kinds, 2) | {"with drafts": 3}
    # Steps with and without spans, predictions, and steps with drafts.
    gathers = {name: served["warm"]["_begin_step_kernel"] for name, served in report.items()}
    assert gathers == dict.fromkeys(kinds, 3) | {"with drafts": 8}
    # The number of requests and the strides of their drafts do not trigger a recompilation.
    warm = report["with drafts"]["warm"]
    assert [warm[f"_{name}_kernel"] for name in ("pack_drafts", "verify_drafts")] == [1, 1]
