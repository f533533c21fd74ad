"""``lenvm demo``: its measures on a tiny model against plain ones, its files, and once the real model."""

import importlib.util
import json
import math
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import pytest
import torch
from tqdm import tqdm

from lenvm_kernels import LenVMConfig, cli
from lenvm_kernels.demo import MODEL_PACKAGE, held_out_prompts, run
from lenvm_kernels.demo.models import Models
from tests.helpers.models import EOS, save_checkpoint

SETTINGS = ["base", "shorter", "longer", "target_base", "target"]
PROMPTS = ["w1 w2 w3", "w4", "w5 w6", "w7 w8 w9 w1"]
PLAN = run.Plan(
    prompts=3,
    max_new_tokens=8,
    shorter=-500.0,
    longer=500.0,
    target={"target_length": 4, "constraint": "eq_soft"},
    more_scales=(-5.0,),
    scale_prompts=2,
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    base = save_checkpoint(tmp_path_factory.mktemp("base"), seed=0)
    value = save_checkpoint(tmp_path_factory.mktemp("value"), seed=1, value_head=True)
    return Models.load(base, value, device="cpu", dtype=torch.float32)


@pytest.fixture
def tiny_demo(monkeypatch, tiny):
    """``lenvm demo`` with the tiny model in place of SmolLM2."""
    monkeypatch.setattr(Models, "load", lambda *args, **kwargs: tiny)
    monkeypatch.setattr("lenvm_kernels.demo.held_out_prompts", lambda: PROMPTS)
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
    answers = run.answer(tiny, PROMPTS[:3], run._scaled(-3.0), 12, seed=3, bar=bar)
    assert bar.n == 24  # two batches, whenever they ended

    lengths, nll = [], 0.0
    for prompt, new in sequences:
        new = new[: new.index(EOS) + 1] if EOS in new else new
        lengths.append(len(new))
        log_p = torch.log_softmax(tiny.model(torch.tensor([prompt + new])).logits[0].double(), dim=-1)
        nll -= sum(log_p[len(prompt) + i - 1, token].item() for i, token in enumerate(new))
    assert answers.lengths == lengths and len(set(lengths)) > 1
    assert math.isclose(answers.perplexity, math.exp(nll / sum(lengths)), rel_tol=1e-4)
    assert answers.texts == [tiny.tokenizer.decode(new, skip_special_tokens=True) for _, new in sequences]


def test_the_command_writes_the_table_the_numbers_and_the_plot(tiny_demo, tmp_path, capsys):
    numbers, picture = tmp_path / "demo.json", tmp_path / "demo.png"
    assert cli.main(["demo", "--quick", "--device", "cpu", "--json", str(numbers), "--plot", str(picture)]) == 0
    text = capsys.readouterr().out
    table = [line.split() for line in text.splitlines() if line.split(" ")[0] in SETTINGS]
    written = json.loads(numbers.read_text())
    assert [row["setting"] for row in written["settings"]] == [row[0] for row in table] == SETTINGS
    for row, shown in zip(written["settings"], table, strict=True):
        values = [row[name] for name in ("mean_length", "length_deviation", "perplexity")]
        assert all(math.isfinite(value) for value in values)
        assert [f"{values[0]:.1f}", f"{values[1]:.1f}", f"{values[2]:.2f}"] == shown[1:4]
    by_name = {row["setting"]: row for row in written["settings"]}
    assert by_name["target_base"] == by_name["base"] | {"setting": "target_base"}
    assert by_name["shorter"]["mean_length"] <= by_name["longer"]["mean_length"]
    assert [point["scale"] for point in written["scales"]] == [-500.0, -5.0, 0.0, 500.0]
    assert "value_mode=centered_exp value_scale=-500.0" in text and "target_length=4 constraint=eq_soft" in text
    assert all(f"> {prompt}\n" in text for prompt in PROMPTS[:3])
    assert matplotlib.image.imread(picture).std() > 0


def test_a_seed_gives_the_same_numbers(tiny):
    first, again, other = (run.run(tiny, PROMPTS, PLAN, seed=seed) for seed in (5, 5, 6))
    for setting, answers in first.answers.items():
        assert replace(again.answers[setting], nll=answers.nll) == answers
        assert again.answers[setting].nll == pytest.approx(answers.nll, rel=1e-5)
    assert first.answers != other.answers


@pytest.mark.parametrize("plan", [run.QUICK, run.FULL])
def test_the_plans_fit_the_held_out_prompts(plan):
    assert plan.scale_prompts <= plan.prompts <= len(held_out_prompts())
    assert 0 < plan.target["target_length"] < plan.max_new_tokens
    scales = (plan.shorter, 0.0, plan.longer, *plan.more_scales)
    assert len(set(scales)) == len(scales)


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
    answers = run.answer(packaged, held_out_prompts()[:2], run._scaled(-5.0), 6, seed=0, bar=tqdm(total=6))
    assert all(1 <= length <= 6 for length in answers.lengths)
    assert all(text.strip() for text in answers.texts)
    assert 1 < answers.perplexity < 50


@needs_demo_model
@torch.no_grad()
def test_exported_models_are_those_of_the_demo(packaged, tmp_path, capsys):
    assert cli.main(["export", str(tmp_path)]) == 0
    base, value = (line.split(": ")[1] for line in capsys.readouterr().out.splitlines())
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
        "gamma": 0.985,  # of the training, tools/train_value_model.py
        "target_form": "discounted_return",
    }
    assert exported.value_model.lenvm_config == LenVMConfig(gamma=0.985)
    assert cli.main(["export", str(tmp_path)]) == 2  # overwrites nothing
    assert "File exists" in capsys.readouterr().err
