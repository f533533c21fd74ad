"""The study on a server, with SGLang's."""

import pytest

pytest.importorskip("sglang", reason="needs SGLang: make test-sglang")

from tests.helpers.sglang_server import prompts_of, write_checkpoints
from tests.helpers.studies import check_study

SERVER = ["--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--disable-cuda-graph"]
SERVER += ["--skip-tokenizer-init", "--mem-fraction-static", "0.5", "--max-total-tokens", "4096"]


def test_a_study_on_the_real_server(tmp_path, monkeypatch):
    write_checkpoints(tmp_path)
    conditions = check_study(tmp_path, monkeypatch, prompts_of(12, 7), ["--", *SERVER], slots=4096)
    # Steps are the engine's: a request is in none that computes the prompts of others, and such a one may be due.
    work = conditions["k5-stride4"]["work"]
    others = work["passes"] - work["decode_passes"] - 1
    assert abs(work["guided_rows"] - 6 * 24 // 4) <= 6 * others
