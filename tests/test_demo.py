"""``lenvm demo``: its measures on a tiny model against plain ones, its files, and once the real model."""

import importlib.util
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import pytest
import torch
from tqdm import tqdm

from lenvm_kernels import LenVMConfig
from lenvm_kernels.evaluate.measures import Answer, measure
from lenvm_kernels.loading import MODEL_PACKAGE, held_out_prompts, run
from lenvm_kernels.loading.models import Models
from tests.helpers.models import EOS

SETTINGS = ["base", "shorter", "longer", "hard cut", "eq", "constant", "target"]
PROMPTS = ["w1 w2 w3", "w4", "w5 w6", "w7 w8 w9 w1"]
PLAN = run.Plan(prompts=3, max_new_tokens=8, shorter=-500.0, longer=500.0, target=4, more_targets=(2,))


@pytest.fixture(scope="module")
def tiny(base, value):
    return Models.load(base, value, device="cpu", dtype=torch.float32)


@pytest.fixture
def tiny_demo(monkeypatch, tiny):
    """``lenvm demo`` with the tiny model in place of SmolLM2."""
    monkeypatch.setattr(Models, "load", lambda *args, **kwargs: tiny)
    monkeypatch.setattr("lenvm_kernels.loading.held_out_prompts", lambda: PROMPTS)
    monkeypatch.setattr(run, "QUICK", PLAN)


@torch.no_grad()
def test_lengths_and_perplexity_are_those_of_a_plain_forward(tiny, monkeypatch):
    """Batches of two, so that rows of unequal prompts and lengths are padded on both sides."""
    monkeypatch.setattr(run, "ROWS", 2)
    sequences = []
    generate = tiny.model.generate

    def keep(**kwargs):
        output = generate(**kwargs)
        width = kwargs["input_ids"].shape[1]
        for row, mask in zip(output.sequences, kwargs["attention_mask"], strict=True):
            sequences.append((row[:width][mask.bool()].tolist(), row[width:].tolist()))
        return output

    monkeypatch.setattr(tiny.model, "generate", keep)
    bar = tqdm(total=24, disable=False)
    answers = run.answer(tiny, PROMPTS[:3], "some", run.Setting(run._scaled(-3.0), True, 12), seed=3, bar=bar)
    assert bar.n == 24  # two batches, whenever they ended

    for i, (found, (prompt, new)) in enumerate(zip(answers, sequences, strict=True)):
        new = new[: new.index(EOS) + 1] if EOS in new else new
        log_p = torch.log_softmax(tiny.model(torch.tensor([prompt + new])).logits[0].double(), dim=-1)
        nll = [-log_p[len(prompt) + i - 1, token].item() for i, token in enumerate(new)]
        text = tiny.tokenizer.decode(new, skip_special_tokens=True)
        assert replace(found, nll=[]) == Answer("some", None, 3, i, new, text, new[-1] == EOS, [])
        assert found.nll == pytest.approx(nll, abs=1e-3)
    assert len({len(found.ids) for found in answers}) > 1 and any(found.ended for found in answers)


def test_the_command_writes_the_table_the_numbers_and_the_plot(tiny_demo, tmp_path, lenvm):
    numbers, picture = tmp_path / "demo.json", tmp_path / "demo.png"
    code, text, _ = lenvm("demo", "--quick", "--device", "cpu", "--json", numbers, "--plot", picture)
    assert code == 0
    table = [re.split(r"  +", line) for line in text.splitlines() if line[:10].rstrip() in SETTINGS]
    written = json.loads(numbers.read_text())
    assert [row["setting"] for row in written["settings"]] == [row[0] for row in table] == SETTINGS
    by_name = {row["setting"]: row for row in written["settings"]}
    for row, shown in zip(written["settings"], table, strict=True):
        assert all(math.isfinite(row[name]) for name in ("mean_length", "distance", "perplexity"))
        assert [f"{row['mean_length']:.1f}", f"{row['distance']:.1f}", f"{100 * row['within_25']:.0f} %"] == shown[1:4]
        assert shown[5] == f"{row['perplexity']:.2f}"
    lengths = written["lengths"]
    assert by_name["base"]["mean_length"] == pytest.approx(sum(lengths["base"]) / 3)
    assert by_name["hard cut"]["mean_length"] == pytest.approx(sum(min(n, 4) for n in lengths["base"]) / 3)
    assert by_name["shorter"]["mean_length"] <= by_name["longer"]["mean_length"]
    assert max(lengths["target/2"]) <= 5 and max(lengths["constant/2"]) <= 5  # 2.5 times the target
    assert "value_mode=centered_exp value_scale=-500.0" in text and "target_length=4 constraint=eq" in text
    assert all(f"> {prompt}\n" in text for prompt in PROMPTS[:3])
    assert matplotlib.image.imread(picture).std() > 0


def test_a_seed_gives_the_same_numbers(tiny):
    first, again, other = (run.run(tiny, PROMPTS, PLAN, seed=seed).answers for seed in (5, 5, 6))
    for name, answers in first.items():
        for found, same in zip(answers, again[name], strict=True):
            assert replace(same, nll=found.nll) == found and same.nll == pytest.approx(found.nll, rel=1e-4, abs=1e-6)
    assert any(a.ids != b.ids for name in first for a, b in zip(first[name], other[name], strict=True))


def test_what_is_plotted(tiny):
    """The base model's answers at each target, and those to it of both guided settings."""
    result = run.run(tiny, PROMPTS, PLAN, seed=5)
    views = result.views()
    assert list(views) == ["2", "4"] and views["2"]["base model"] is views["4"]["base model"]
    assert views["2"]["guided"] is result.answers["target/2"] and views["4"]["guided"] is result.answers["target"]
    assert views["2"]["no value model"] is result.answers["constant/2"]
    assert {answer.target for answer in views["2"]["guided"]} == {2}


@pytest.mark.parametrize("plan", [run.QUICK, run.FULL])
def test_the_plans_fit_the_held_out_prompts(plan):
    assert 0 < plan.prompts <= len(held_out_prompts())
    assert 0 < plan.targets[0] < plan.target and plan.targets[-1] < plan.max_new_tokens
    limits = [setting.max_new_tokens for setting in plan.settings().values()]
    assert max(limits) == plan.max_new_tokens and min(limits) == 2.5 * plan.targets[0]


needs_demo_model = pytest.mark.skipif(
    importlib.util.find_spec(MODEL_PACKAGE) is None, reason=f"{MODEL_PACKAGE} is not installed"
)


@pytest.fixture(scope="module")
def packaged():
    """SmolLM2 from its package, and the shipped value model. Reading it takes half a minute."""
    return Models.load("demo", "demo", device="cpu", dtype=torch.float32)


@needs_demo_model
def test_the_real_model(packaged):
    """SmolLM2 loads from its package, its chat template applies, and answers in words under the shipped value model."""
    ids = packaged.encode(["What is the capital of France?"])["input_ids"]
    assert packaged.tokenizer.decode(ids[0]).endswith("France?<|im_end|>\n<|im_start|>assistant\n")
    setting = run.Setting(run._scaled(-5.0), True, 6)
    answers = run.answer(packaged, held_out_prompts()[:2], "shorter", setting, seed=0, bar=tqdm(total=6))
    assert all(1 <= len(found.ids) <= 6 and found.text.strip() for found in answers)
    assert 1 < measure(answers, 6)["perplexity"] < 50


@needs_demo_model
@torch.no_grad()
def test_exported_models_are_those_of_the_demo(packaged, tmp_path, lenvm):
    code, text, _ = lenvm("export", tmp_path)
    base, value, trunk = (line.split(": ")[1] for line in text.splitlines())
    assert code == 0
    exported = Models.load(base, value, device="cpu", dtype=torch.float32)
    inputs = packaged.encode(["What is the capital of France?"])
    assert torch.equal(exported.encode(["What is the capital of France?"])["input_ids"], inputs["input_ids"])
    weights = [models.model.state_dict() for models in (exported, packaged)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())
    assert all(map(torch.equal, exported.value_model.head, packaged.value_model.head))
    for layer in (0, -1):
        assert torch.equal(exported.value_model.layers[layer].o, packaged.value_model.layers[layer].o)
    assert not torch.equal(packaged.value_model.layers[-1].o, packaged.model.model.layers[-1].self_attn.o_proj.weight)
    assert exported.eos_token_ids == packaged.eos_token_ids
    assert json.loads((Path(value) / "lenvm_config.json").read_text()) == {
        "gamma": 0.9821718891880378,  # of its training, bench/results/value_model
        "target_form": "discounted_return",
    }
    assert exported.value_model.lenvm_config == LenVMConfig(gamma=0.9821718891880378)
    # The trunk is the shipped one, and knows its base model by either.
    of_trunk = [
        Models.load(*of, device="cpu", dtype=torch.bfloat16).value_model
        for of in ((base, trunk), ("demo", "demo-trunk"))
    ]
    assert of_trunk[0].config == of_trunk[1].config and of_trunk[0].config.layers == (30,)
    code, _, error = lenvm("export", tmp_path)
    assert code == 2 and "File exists" in error  # it overwrites nothing
