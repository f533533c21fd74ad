"""``lenvm demo``: its table, numbers and plot on a tiny model; the packaged model and its export."""

import importlib.util
import json
import re
from pathlib import Path

import matplotlib.image
import pytest
import torch

from lenvm_kernels import LenVMConfig
from lenvm_kernels.evaluate import demo, report, run
from lenvm_kernels.evaluate.report import plot_lengths
from lenvm_kernels.loading import MODEL_PACKAGE
from lenvm_kernels.loading.models import Models, sample

SETTINGS = ["none", "hard cut", "shorter", "longer", "eq", "constant", "guided"]


def test_table_numbers_and_plot(base, value, monkeypatch, tmp_path, lenvm):
    """All cells of the table are numbers in the file. Only equal seeds give equal numbers."""
    tiny = Models.load(base, value, device="cpu", dtype=torch.float32)
    monkeypatch.setattr(Models, "load", lambda *args, **kwargs: tiny)
    monkeypatch.setattr(demo, "held_out_prompts", lambda: ["w1 w2 w3", "w4", "w5 w6", "w7 w8 w9 w1"])
    written, plotted, batches = [], [], []
    monkeypatch.setattr(run, "sample", lambda *args, **options: batches.append(args[3]) or sample(*args, **options))
    monkeypatch.setattr(report, "plot_lengths", lambda *args: plotted.append(args[1]) or plot_lengths(*args))
    for seed in (0, 0, 1):
        numbers, picture = tmp_path / "demo.json", tmp_path / "demo.png"
        files = ["--json", numbers, "--plot", picture]
        code, text, error = lenvm("demo", "--quick", "--device", "cpu", "--seed", seed, *files)
        assert code == 0, error
        written.append(json.loads(numbers.read_text()))
        assert matplotlib.image.imread(picture).std() > 0
    assert written[0]["settings"] == written[1]["settings"] != written[2]["settings"]
    assert [len(guidances) for guidances in batches] == 3 * [28, 12]  # with the value model, and without
    panels = {(name, a.setting, a.target) for view in plotted[2].values() for name in view for a in view[name]}
    targets = (20, 40, 80)
    guided = {("guided", "guided", target) for target in targets}
    assert panels == guided | {("base model", "none", None)} | {("no value model", "constant", t) for t in targets}
    rows = {row["setting"]: row for row in written[2]["settings"]}
    assert list(rows) == SETTINGS and (written[2]["prompts"], written[2]["target_length"]) == (4, 80)
    shown = {line[:10].strip(): re.split(r"  +", line) for line in text.splitlines() if line[:10].strip() in SETTINGS}
    for name, row in rows.items():
        ends = "-" if row["sentence_ends"] is None else f"{100 * row['sentence_ends']:.0f} %"
        cells = [f"{row['mean']:.1f}", f"{row['distance']:.1f}", f"{100 * row['within_25']:.0f} %", ends]
        assert shown[name][1:6] == [*cells, f"{row['perplexity']:.2f}"]
    assert rows["shorter"]["mean"] < rows["longer"]["mean"]
    assert text.count("> w") == 3 and text.count("tokens  ") == 3 * len(SETTINGS)


@pytest.mark.skipif(importlib.util.find_spec(MODEL_PACKAGE) is None, reason=f"{MODEL_PACKAGE} is not installed")
@torch.no_grad()
def test_packaged_model_and_its_export(tmp_path, lenvm):
    packaged = Models.load("demo", "demo", device="cpu", dtype=torch.float32)
    inputs = packaged.encode(["What is the capital of France?"])
    assert packaged.tokenizer.decode(inputs["input_ids"][0]).endswith("France?<|im_end|>\n<|im_start|>assistant\n")
    guidance = {"value_mode": "centered_exp", "value_scale": -5.0}
    ((ids, _),) = sample(packaged, packaged.value_model, inputs, guidance, max_new_tokens=6, top_k=8, min_p=0.02)
    assert packaged.tokenizer.decode(ids, skip_special_tokens=True).strip()

    code, text, _ = lenvm("export", tmp_path)
    base, value, probe = (line.split(": ")[1] for line in text.splitlines())
    assert code == 0
    exported = Models.load(base, value, device="cpu", dtype=torch.float32)
    assert torch.equal(exported.encode(["What is the capital of France?"])["input_ids"], inputs["input_ids"])
    weights = [models.model.state_dict() for models in (exported, packaged)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())
    assert all(map(torch.equal, exported.value_model.head, packaged.value_model.head))
    last, adapted = exported.value_model.layers[-1].o, packaged.value_model.layers[-1].o
    assert torch.equal(last, adapted) and not torch.equal(last, weights[1]["model.layers.29.self_attn.o_proj.weight"])
    assert exported.eos_token_ids == packaged.eos_token_ids
    assert exported.value_model.lenvm_config == LenVMConfig(gamma=0.9821718891880378)  # bench/results/value_model
    probe_config = Models.load(base, probe, device="cpu", dtype=torch.bfloat16).value_model.config
    assert probe_config == Models.load(base, "demo-probe", device="cpu", dtype=torch.bfloat16).value_model.config
    code, _, error = lenvm("export", tmp_path)
    assert code == 2 and "File exists" in error and (Path(value) / "lenvm_config.json").is_file()
