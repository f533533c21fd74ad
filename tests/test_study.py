"""The study: its estimator against loops and published figures, reports on made-up steps, and a whole small study."""

import itertools
import json
import os
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import matplotlib.image
import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig

from bench import models
from bench.study import __main__ as cli
from bench.study import flops, report, run
from bench.study.flops import Architecture, Guidance, Workload
from bench.study.result import ENVIRONMENT, Run
from lenvm_kernels import timing
from tests.helpers.models import VOCAB, last_value_logits, random_pair, value_model_of

# From inference/timing/README.md of eric-ai-lab/Length-Value-Model (b1b4ba0), and its sweep over k as issue 5 gives it:
# Qwen2.5-7B with the 1.5B value model, 50 questions of GSM8K, 16 samples each.
GFLOP_PER_TOKEN, GUIDED_GFLOP_PER_TOKEN, RATIO_AT_5, VALUE_HEAD_MFLOP = 14.24, 30.24, 2.10, 4.7
BASE_PFLOP = {"base linear": 3.17, "base attention": 0.02, "base LM head": 0.26}
SWEEP = {1: 1.30, 2: 1.55, 3: 1.74, 4: 1.91, 5: 2.08}

TINY = Architecture("tiny", 24, 40, 3, 4, 2, 8, 50)
TINY_CONFIG = dict(
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=50,
)


MIXTURE = dict(model_type="qwen3_moe", num_experts=6, num_experts_per_tok=2, moe_intermediate_size=12)


@pytest.fixture
def study(monkeypatch):
    """Runs the command; gives the exit status."""

    def command(*argv):
        monkeypatch.setattr("sys.argv", ["study", *map(str, argv)])
        return cli.main()

    return command


# --- the estimator ---


BASE, VALUE, WORK = Architecture.load("Qwen2.5-7B"), Architecture.load("Qwen2.5-1.5B"), flops.PUBLISHED_WORK


def test_published_totals():
    per_token = flops.operations_per_output_token
    assert per_token(BASE, WORK) / 1e9 == pytest.approx(GFLOP_PER_TOKEN, rel=1e-3)
    assert per_token(BASE, WORK, VALUE, Guidance(5)) / 1e9 == pytest.approx(GUIDED_GFLOP_PER_TOKEN, rel=1e-3)
    assert {name: round(count / 1e15, 2) for name, count in flops.operations(BASE, WORK).items()} == BASE_PFLOP
    assert flops.ratio(BASE, WORK, VALUE, Guidance(5)) == pytest.approx(RATIO_AT_5, rel=5e-3)
    assert 2 * VALUE.value_head_weights / 1e6 == pytest.approx(VALUE_HEAD_MFLOP, rel=5e-3) and VALUE.hidden_size == 1536


def test_published_sweep():
    """The ratios are of whole runs, each with output tokens of its own. With equal lengths they come out but for k = 1,
    which is 5 % off: as if that run's output had been 5 % shorter than its baseline's."""
    ratios = {k: flops.ratio(BASE, WORK, VALUE, Guidance(k)) for k in SWEEP}
    for k, tolerance in ((2, 0.01), (3, 0.01), (4, 0.01), (5, 0.015)):
        assert ratios[k] == pytest.approx(SWEEP[k], rel=tolerance)
    assert ratios[1] / SWEEP[1] - 1 == pytest.approx(0.054, abs=1e-3)
    shorter = flops.explaining_output_ratio(BASE, WORK, VALUE, 1, SWEEP[1])
    assert shorter == pytest.approx(0.948, abs=1e-3)
    fewer = Workload(WORK.prompts, WORK.samples, WORK.prompt_tokens, WORK.output_tokens * shorter)
    assert flops.ratio(BASE, fewer, VALUE, Guidance(1), WORK) == pytest.approx(SWEEP[1], rel=1e-6)


def test_the_check_fails_when_a_figure_differs(study, monkeypatch, capsys):
    assert study("flops", "--check") == 0
    printed = capsys.readouterr().out
    assert re.search(r"ratio in the sweep, k = 1 \| 1\.3 \| 1\.371 \| \+5\.4% \|", printed) and "DIFFERS" not in printed
    monkeypatch.setitem(flops.PUBLISHED_RATIOS, 3, 1.78)
    assert study("flops", "--check") == 1
    assert "DIFFERS" in capsys.readouterr().out


@pytest.mark.parametrize("with_prompts", [True, False])
def test_operations_are_those_of_a_loop_over_matrices_and_positions(with_prompts):
    """Each product of matrices on its own, ``2 m n k``, for each token at its position."""
    m, work = TINY, Workload(prompts=2, samples=3, prompt_tokens=5, output_tokens=4, with_prompts=with_prompts)
    layer = [(24, 32), (24, 16), (24, 16), (32, 24), (24, 40), (24, 40), (40, 24)]  # q k v o gate up down
    linear = 3 * sum(2 * rows * columns for rows, columns in layer)

    def attention(seen):
        return 3 * 4 * (2 * 8 * seen + 2 * seen * 8)  # of each layer and query head: q by keys, weights by values

    positions = [5 + t for t in range(1, 5)] * 6
    prompt_positions = list(range(1, 6)) * 2 * with_prompts
    base = {
        "base linear": linear * len(positions + prompt_positions),
        "base attention": sum(map(attention, positions + prompt_positions)),
        "base LM head": 2 * 24 * 50 * len(positions + prompt_positions),
    }
    assert flops.operations(m, work) == base
    token = [linear + attention(p) for p in positions]
    value = {
        "LenVM extend": 0.5 * sum(token),
        "LenVM candidates": 3 * sum(token),
        "LenVM prefill": sum(linear + attention(p) for p in prompt_positions),
        "LenVM head": 2 * (24 * 24 + 24) * (3.5 * len(positions) + len(prompt_positions)),
    }
    assert flops.operations(m, work, m, Guidance(3, 0.5)) == base | value


def test_bytes_of_a_step():
    work = Workload(prompts=7, samples=1, prompt_tokens=9, output_tokens=4)  # 11 cached tokens in the middle
    moved = flops.step_bytes(TINY, work, TINY, Guidance(5, 1), element_size=2, forwards=2)
    layer = 24 * 32 + 2 * 24 * 16 + 32 * 24 + 3 * 24 * 40
    token = 3 * 2 * 2 * 8 * 2  # layers, keys and values, heads, head dimension, bytes
    assert moved == {
        "base weights": 2 * (3 * layer + 24 * 50),
        "base keys and values read": 7 * 11 * token,
        "base keys and values written": 7 * token,
        "LenVM weights": 2 * 2 * (3 * layer + 24 * 24 + 24),
        "LenVM keys and values read": 2 * 7 * 11 * token,
        "LenVM keys and values written": 7 * 6 * token,
    }
    assert list(flops.step_bytes(TINY, work, element_size=2)) == list(moved)[:3]


SHARED = MIXTURE | dict(shared_expert_intermediate_size=20, mlp_only_layers=[1], num_hidden_layers=7)


@pytest.mark.parametrize(
    ("config_class", "more", "experts_size"),
    [
        (Qwen3MoeConfig, MIXTURE | dict(head_dim=8), 12),
        (Qwen3MoeConfig, MIXTURE | dict(head_dim=8, num_hidden_layers=5, decoder_sparse_step=2), 12),
        (Qwen2MoeConfig, SHARED | dict(model_type="qwen2_moe", decoder_sparse_step=2), 12),
        (MixtralConfig, dict(num_local_experts=5, num_experts_per_tok=3, tie_word_embeddings=True), 40),
    ],
)
def test_mixtures_are_those_of_transformers(tmp_path, config_class, more, experts_size):
    """Matrices of the layers, by the models themselves; of those of experts a token is multiplied with a share."""
    config = config_class(**TINY_CONFIG | {k: v for k, v in more.items() if k != "model_type"})
    config.save_pretrained(tmp_path)
    model = Architecture.load(str(tmp_path))
    with torch.device("meta"):
        found = AutoModelForCausalLM.from_config(config)
    sizes = {name: weight.numel() for name, weight in found.named_parameters() if weight.dim() > 1}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    layers = sum(size for name, size in sizes.items() if ".layers." in name)
    assert experts > 0 and experts % (3 * 24 * experts_size) == 0 and model.parameters == sum(sizes.values())
    share = config.num_experts_per_tok / model.num_experts
    assert model.active_weights == layers - experts + experts * share
    assert model.touched_weights(1) == pytest.approx(model.active_weights)
    assert model.touched_weights(1e3) == pytest.approx(layers)
    work = Workload(prompts=2, samples=3, prompt_tokens=5, output_tokens=4)
    assert flops.operations(model, work, model, Guidance(3, 0))["base linear"] == 2 * model.active_weights * 34
    assert flops.operations(model, work, model, Guidance(3, 0))["LenVM prefill"] > 2 * model.active_weights * 10


def test_experts_that_a_step_reads():
    """The mean over all ways to route three rows to two of four experts."""
    model = replace(TINY, expert_layers=2, num_experts=4, experts_per_token=2, expert_size=7)
    routes = list(itertools.product(itertools.combinations(range(4), 2), repeat=3))
    distinct = sum(len(set().union(*route)) for route in routes) / len(routes)
    dense = 3 * 24 * 8 * 12 + 3 * 24 * 40
    moved = flops.step_bytes(model, Workload(3, 1, 9, 4), element_size=2)["base weights"]
    assert moved == pytest.approx(2 * (dense + 2 * (24 * 4 + 3 * 24 * 7 * distinct) + 24 * 50))


def test_a_mixture_is_a_base_and_no_value_model(study, capsys):
    assert study("flops", "--base", "Qwen3-30B-A3B", "--value-model", "Qwen3-1.7B") == 0
    assert "- Qwen3-30B-A3B: 30.53 billion parameters, 3.35 of them for a token\n" in capsys.readouterr().out
    assert study("flops", "--value-model", "Qwen3-30B-A3B") == 2
    assert "--value-model must be a dense model, Qwen3-30B-A3B is" in capsys.readouterr().err


# --- architectures ---


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, dict(head_dim=6, num_kv_heads=2, tied=False, parameters=3 * (24 * 6 * 12 + 2880) + 2 * 1200)),
        ({"head_dim": 8}, dict(head_dim=8, parameters=3 * (24 * 8 * 12 + 2880) + 2 * 1200)),
        ({"head_dim": None, "num_key_value_heads": None}, dict(head_dim=6, num_kv_heads=4)),
        ({"tie_word_embeddings": True}, dict(tied=True, parameters=3 * (24 * 6 * 12 + 2880) + 1200)),
        ({"num_experts": 0}, dict(num_layers=3, hidden_size=24, intermediate_size=40, num_heads=4, vocab_size=50)),
    ],
)
def test_configurations(tmp_path, more, expected):
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIG | more))
    from_folder, from_file = (Architecture.load(str(path)) for path in (tmp_path, tmp_path / "config.json"))
    for name, value in expected.items():
        assert getattr(from_folder, name) == getattr(from_file, name) == value


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"vocab_size": None}, "vocab_size in the configuration of .* must be an integer of at least 1, got None"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers in .* got '3'"),
        ({"head_dim": 0}, "head_dim in .* got 0"),
        ({"num_experts": 64}, "model_type .* mixtral, qwen2_moe, qwen3_moe for a model with num_experts, got None"),
        ({"n_routed_experts": 64, "model_type": "deepseek_v3"}, "with n_routed_experts, got 'deepseek_v3'"),
        (MIXTURE | {"num_experts_per_tok": 7}, "num_experts_per_tok of .* must be at most 6, got 7"),
        (MIXTURE | {"mlp_only_layers": 2}, "mlp_only_layers in .* must be a list of layers, got 2"),
        (MIXTURE | {"moe_intermediate_size": None}, "moe_intermediate_size in .* got None"),
        ({"hidden_size": ...}, "hidden_size in the configuration of .* got nothing"),
        (b"{'hidden_size': 24}", "config.json must be JSON: Expecting property name"),
        (b"", "config.json must be JSON: Expecting value"),
        (b"\xff\xfe", "config.json must be JSON: 'utf-8' codec can't decode"),
        (b"[24]", "config.json must hold a JSON object, got list"),
        (b"null", "config.json must hold a JSON object, got NoneType"),
    ],
)
def test_bad_configurations_are_named(tmp_path, content, message):
    if isinstance(content, dict):
        config = {key: value for key, value in (TINY_CONFIG | content).items() if value is not ...}
        content = json.dumps(config).encode()
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        Architecture.load(str(tmp_path))
    assert str(tmp_path) in str(error.value)


def test_missing_models_are_named():
    with pytest.raises(FileNotFoundError, match=r"or one of SmolLM2-135M, .*, got 'Qwen2.5-9B'"):
        Architecture.load("Qwen2.5-9B")


@pytest.mark.parametrize(
    ("name", "billions"),  # of the checkpoints' model cards, in which the embedding is counted
    [
        ("Qwen2.5-0.5B", 0.49),
        ("Qwen2.5-1.5B", 1.54),
        ("Qwen2.5-3B", 3.09),
        ("Qwen2.5-7B", 7.61),
        ("SmolLM2-135M", 0.135),
    ],
)
def test_parameters_are_those_of_the_checkpoints(name, billions):
    assert Architecture.load(name).parameters / 1e9 == pytest.approx(billions, rel=0.01)


# --- reports ---


WHERE = dict.fromkeys(ENVIRONMENT, "x") | {"dtype": "float32"}
GUIDED = dict(way="ours", top_k=5, value_model=TINY, computed=Guidance(4.0, 0.0))
GUIDED_TIMES = {"base": [1.0] * 4, "forward": [4.0] * 4, "total": [5.0] * 4}


def write_run(folder, name, stages, **facts):
    facts = dict(way="base", base_model=TINY, environment=WHERE, rows=2, prompt_tokens=5.0, steps=4) | facts
    times = dict(prompt_seconds=0.5, decode_seconds=1.5, load_average=0.5, prompts_computed=True)
    Run(name=name, stages=stages, **times | facts).save(folder)


def test_committed_results_are_reproduced(tmp_path):
    committed, folder = Path(report.__file__).parents[1] / "results" / "cpu" / "study", tmp_path / "study"
    shutil.copytree(committed, folder, ignore=shutil.ignore_patterns("summary.*", "*.png"))
    assert report.write(folder) == 0
    for name in ("summary.md", "summary.json"):
        assert (folder / name).read_text() == (committed / name).read_text()


def test_report_on_steps_made_up(tmp_path, capsys):
    """Means, percentiles, rates and ratios, by hand."""
    write_run(tmp_path, "base", {"base": [1.0] * 4, "sampler": [0.0, 1.0, 2.0, 3.0], "total": [1.0, 2.0, 3.0, 4.0]})
    write_run(tmp_path, "ours-tiny-k5", GUIDED_TIMES, **GUIDED, decode_seconds=3.5)
    write_run(tmp_path, "two_forward-tiny", {}, way="two_forward", error="no such thing")
    assert report.write(tmp_path) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    base, ours = summary["runs"]
    assert base["stages_ms"]["total"] == {"mean": 2.5, "p50": 2.5, "p95": pytest.approx(3.85)}
    assert base["stages_ms"]["sampler"] == {"mean": 1.5, "p50": 1.5, "p95": pytest.approx(2.85)}
    assert base["seconds"] == 2.0 and base["output_tokens_per_second"] == 4.0
    work = Workload(2, 1, 5.0, 4)
    guided = TINY, Guidance(4, 0)
    operations = [sum(flops.operations(TINY, work, *more).values()) for more in ((), guided)]
    assert base["operations_per_second"] == pytest.approx(operations[0] / 2.0)
    moved = [sum(flops.step_bytes(TINY, work, *more, element_size=4).values()) for more in ((), guided)]
    ratios = {"seconds": 2.0, "step": 2.0, "operations": operations[1] / operations[0], "bytes": moved[1] / moved[0]}
    assert ours["ratios"] == pytest.approx(ratios)
    assert ours["bytes_per_second"] == pytest.approx(moved[1] / 5e-3)
    assert summary["failed"] == {"two_forward-tiny": "no such thing"}
    text = (tmp_path / "summary.md").read_text()
    assert text == capsys.readouterr().out
    assert "| base | total | 2.5 | 2.5 | 3.85 |" in text and "- two_forward-tiny: no such thing" in text
    assert "| ours-tiny-k5 | 5 | 4 | 0 | 2 |" in text
    for name in ("stages", "operations", "ratios"):
        assert matplotlib.image.imread(tmp_path / f"{name}.png").std() > 0


@pytest.mark.parametrize(
    ("fact", "value"),
    [
        ("rows", 3),
        ("prompt_tokens", 6.0),
        ("steps", 5),
        ("prompts_computed", False),
        ("base_model", replace(TINY, num_layers=4)),
        ("environment", WHERE | {"dtype": "bfloat16"}),
        ("environment", WHERE | {"device": "another"}),
    ],
)
def test_no_ratio_to_a_base_run_of_something_else(tmp_path, fact, value):
    write_run(tmp_path, "base", {"base": [1.0] * 4, "total": [2.0] * 4})
    write_run(tmp_path, "ours-alike-k5", GUIDED_TIMES, **GUIDED, environment=WHERE | dict(command="another", date="0"))
    write_run(tmp_path, "ours-tiny-k5", GUIDED_TIMES, **GUIDED | {fact: value})
    assert report.write(tmp_path) == 0
    runs = {run["name"]: run["ratios"] for run in json.loads((tmp_path / "summary.json").read_text())["runs"]}
    assert runs["base"]["seconds"] == runs["ours-alike-k5"]["seconds"] == 1.0 and runs["ours-tiny-k5"] is None
    text = (tmp_path / "summary.md").read_text()
    assert "if its run had the same model, rows, prompts, steps, dtype and device" in text
    assert "| ours-tiny-k5 | 5 | 4 | 0 |  |  |" in text


def test_report_refuses_what_is_no_study(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"must hold the .meta.json files"):
        report.write(tmp_path)
    write_run(tmp_path, "base", {"base": [1.0], "total": [2.0]})
    (tmp_path / "base.jsonl").write_text('{"base_ms": 1, "total_ms": 1}\n{"total_ms": 1}\n')
    with pytest.raises(ValueError, match=r"line 2 of .*base.jsonl must have the stages base, total"):
        report.write(tmp_path)


# --- runs ---


def test_merged_steps_have_every_stage():
    outer = {"sampler": [9.0], "base": [2.0], "total": [11.0]}
    inner = {stage: [1.5] for stage in ("candidates", "forward", "head", "reweight", "sample")}
    merged = run.merge(outer, inner | {"total": [7.5]})
    assert merged == {"base": [2.0], **inner, "other": [1.5], "total": [11.0]}
    assert list(merged) == ["base", *inner, "other", "total"]
    assert run.merge(outer, {}) == {"base": [2.0], "sampler": [9.0], "total": [11.0]}


RANDOM_LOAD = ["--load", "random", "--base", "Qwen2-tiny", "--value-model", "Qwen2-tiny", "--cached", "9"]
SMOLLM2 = [[], ["--load", "smollm2"]]  # the default on a CPU, too


@pytest.fixture
def tiny_study(tmp_path, monkeypatch, study):
    """Runs a study of a tiny model of random weights with these options; gives the exit status and the folder."""
    monkeypatch.setitem(models.DIMENSIONS, "Qwen2-tiny", (32, 48, 2, 4, 2, 8, False))
    monkeypatch.setitem(flops.VOCABULARY, "Qwen2-tiny", 211)
    size = ["--device", "cpu", "--dtype", "float32", "--rows", "3", "--steps", "4"]

    def run(*options, load=RANDOM_LOAD):
        return study("run", "--out", tmp_path / "study", *load, *size, *options), tmp_path / "study"

    return run


def test_a_whole_study(tiny_study, study, monkeypatch):
    """Every way and k, and the report of it."""
    monkeypatch.delenv(timing.VARIABLE, raising=False)
    status, folder = tiny_study("--top-k", "1", "4")
    assert status == 0 and timing.VARIABLE not in os.environ
    metas = {file.name.removesuffix(".meta.json"): json.loads(file.read_text()) for file in folder.glob("*.meta.json")}
    guided = [f"{way}-Qwen2-tiny-k{k}" for way in ("ours", "two_forward") for k in (1, 4)]
    assert sorted(metas) == sorted(["base", *guided])
    for name, meta in metas.items():
        assert meta["rows"] == 3 and meta["prompt_tokens"] == 9 and meta["decode_seconds"] > 0
        assert meta["command"].startswith("python -m bench.study run") and meta["torch"] == torch.__version__
        stages = ("candidates", "forward", "head", "reweight", "sample", "other") if "ours" in name else ("sampler",)
        lines = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == list(range(4)) and {line["rows"] for line in lines} == {3}
        for line in lines:
            assert list(line)[2:] == ["base_ms", *(f"{stage}_ms" for stage in stages), "total_ms"]
            assert sum(line[f"{stage}_ms"] for stage in ("base", *stages)) == pytest.approx(line["total_ms"], abs=1e-2)
    # Four likely tokens of 211, or one: then no values are needed, and what was drawn is computed by the next step.
    assert metas["ours-Qwen2-tiny-k4"]["computed"] == {"candidates": 4.0, "extended": 0.0}
    assert metas["ours-Qwen2-tiny-k1"]["computed"] == {"candidates": 0.0, "extended": 0.75}
    assert metas["two_forward-Qwen2-tiny-k4"]["computed"] == {"candidates": 4.0, "extended": 0.75}
    assert metas["two_forward-Qwen2-tiny-k1"]["computed"] == {"candidates": 0.0, "extended": 0.0}
    assert study("report", folder) == 0
    runs = json.loads((folder / "summary.json").read_text())["runs"]
    assert len(runs) == 5 and {run["output_tokens"] for run in runs} == {12}


def test_the_fastest_repeat_counts(tiny_study, monkeypatch):
    decode, seconds = run.decode, iter([0.5, 3.0, 1.0, 2.0])  # the first warms up
    monkeypatch.setattr(run, "decode", lambda *arguments: replace(decode(*arguments), decode_seconds=next(seconds)))
    _, folder = tiny_study("--ways", "base", "--repeats", "3")
    assert json.loads((folder / "base.meta.json").read_text())["decode_seconds"] == 1.0


def test_a_base_that_fails_when_measured_again_stays(tiny_study, monkeypatch):
    decode, names = run.decode, []

    def failing(base, sampler, run):
        names.append(run.name)
        if names.count("base") == 3:
            raise RuntimeError("out of memory")
        return decode(base, sampler, run)

    monkeypatch.setattr(run, "decode", failing)
    status, folder = tiny_study("--ways", "base", "ours", "--repeats", "1")
    assert status == 1 and names == [*["base"] * 2, *["ours-Qwen2-tiny-k5"] * 2, "base"]  # each warms up
    assert json.loads((folder / "base.meta.json").read_text())["decode_seconds"] > 0


def test_the_users_own_timing_stays(tiny_study, tmp_path, monkeypatch):
    monkeypatch.setenv(timing.VARIABLE, str(tmp_path / "mine.jsonl"))
    assert tiny_study("--ways", "ours")[0] == 0
    assert os.environ[timing.VARIABLE] == str(tmp_path / "mine.jsonl") and not list(tmp_path.glob("mine*"))


def test_what_fails_keeps_no_other_way_from_running(tiny_study, monkeypatch):
    """And leaves no error when it can be built later."""
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "bench.baselines.two_forward", None)  # as if it were not there
        status, folder = tiny_study("--ways", "two_forward", "ours")
    failed, name = folder / "two_forward-Qwen2-tiny.meta.json", "Qwen2-tiny-k5.meta.json"
    assert status == 1 and {file.name for file in folder.glob("*.json")} == {failed.name, f"ours-{name}"}
    assert "error" not in json.loads((folder / f"ours-{name}").read_text())
    assert json.loads(failed.read_text())["error"].startswith("ModuleNotFound")
    assert tiny_study("--ways", "two_forward")[0] == 0
    assert {file.name for file in folder.glob("*.json")} == {f"two_forward-{name}", f"ours-{name}"}


@pytest.mark.parametrize(
    ("loads", "options", "message"),
    [
        ([RANDOM_LOAD], ["--top-k", "9"], "--top-k must be at most 8, got 9"),
        ([RANDOM_LOAD], ["--base", "Qwen9"], "--base and --value-model must be of SmolLM2-135M, .* got 'Qwen9'"),
        (SMOLLM2, ["--rows", "4000"], "--rows must be from 1 to the .* prompts of the demo, got 4000"),
        (SMOLLM2, ["--base", "Qwen2.5-7B"], "--base: only with --load random; smollm2 has models and prompts of its"),
        (SMOLLM2, ["--value-model", "Qwen2.5-0.5B", "--cached", "512"], "--value-model, --cached: only with --load ra"),
    ],
)
def test_bad_options_are_named(tiny_study, capsys, loads, options, message):
    for load in loads:
        assert tiny_study(*options, load=load)[0] == 2
        assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize("option", ["--top-k", "--rows", "--steps", "--repeats", "--cached"])
@pytest.mark.parametrize("number", ["x", "0", "1.5", ""])
def test_numbers_are_positive_integers(tiny_study, capsys, option, number):
    with pytest.raises(SystemExit):
        tiny_study(option, number)
    assert f"argument {option}: must be an integer of at least 1, got {number!r}" in capsys.readouterr().err


def test_both_guided_ways_see_the_same_sequences():
    """Prompts of unequal lengths, padded on the left: the values of our candidates are those of the published way."""
    generator = torch.Generator().manual_seed(0)
    prompts, lens = torch.randint(3, VOCAB, (3, 7), generator=generator), [7, 2, 4]
    base = SimpleNamespace(prompts=prompts, prompt_lens=torch.tensor(lens, dtype=torch.int32), vocab_size=VOCAB)
    steps = [(torch.randn(3, VOCAB, generator=generator), torch.tensor([5, 6, 7 + i])) for i in range(3)]
    model, head = random_pair("qwen3")
    outputs = {}
    for way in ("ours", "two_forward"):
        guided = run.GUIDED[way](base, value_model_of(model, head), 3)
        guided.top_k = 4
        for _ in range(2):  # starting again forgets what was before
            guided.start()
            tokens = prompts[:, -1].contiguous()
            for i, (logits, following) in enumerate(steps):
                guided.draw(logits, tokens, i)
                tokens = following
        outputs[way] = guided._outputs
    sequences = [tokens[-n:] for tokens, n in zip(prompts.tolist(), lens, strict=True)]
    for ours, theirs, (_, following) in zip(outputs["ours"], outputs["two_forward"], steps, strict=True):
        ids = ours.candidates.token_ids[:, :4].tolist()
        scored = [[*tokens, token] for tokens, row in zip(sequences, ids, strict=True) for token in row]
        expected = last_value_logits(model, head, scored).view(3, 4)
        for values in (ours.value_logits[:, :4], torch.stack(list(theirs.value_logits))):
            torch.testing.assert_close(values, expected, rtol=0, atol=2e-5)
        assert expected.std() > 0.01
        sequences = [[*tokens, token] for tokens, token in zip(sequences, following.tolist(), strict=True)]
