"""The study: its estimator against loops and published figures, reports on made-up steps, and a whole small study."""

import json
import os
import re
import sys
from types import SimpleNamespace

import matplotlib.image
import pytest
import torch

from bench import models
from bench.study import __main__ as cli
from bench.study import flops, report, run
from bench.study.flops import Architecture, Guidance, Workload
from lenvm_kernels import timing
from tests.test_step import VOCAB, tiny_value_model

# From inference/timing/README.md of eric-ai-lab/Length-Value-Model (b1b4ba0), and its sweep over k as issue 5 gives it:
# Qwen2.5-7B with the 1.5B value model, 50 questions of GSM8K, 16 samples each.
GFLOP_PER_TOKEN, GUIDED_GFLOP_PER_TOKEN, RATIO_AT_5, VALUE_HEAD_MFLOP = 14.24, 30.24, 2.10, 4.7
BASE_PFLOP = {"base linear": 3.17, "base attention": 0.02, "base LM head": 0.26}
SWEEP = {1: 1.30, 2: 1.55, 3: 1.74, 4: 1.91, 5: 2.08}

TINY = Architecture("tiny", 24, 40, 3, 4, 2, 8, 50)
TINY_CONFIG = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
}


# --- the estimator ---


def published():
    return Architecture.load("Qwen2.5-7B"), Architecture.load("Qwen2.5-1.5B"), flops.PUBLISHED_WORK


def test_published_totals():
    base, value, work = published()
    per_token = flops.operations_per_output_token
    assert per_token(base, None, work, None) / 1e9 == pytest.approx(GFLOP_PER_TOKEN, rel=1e-3)
    assert per_token(base, value, work, Guidance(5)) / 1e9 == pytest.approx(GUIDED_GFLOP_PER_TOKEN, rel=1e-3)
    operations = flops.base_operations(base, work)
    assert {name: round(count / 1e15, 2) for name, count in operations.items()} == BASE_PFLOP
    assert flops.ratio(base, value, work, Guidance(5), work) == pytest.approx(RATIO_AT_5, rel=5e-3)
    assert 2 * value.value_head_weights / 1e6 == pytest.approx(VALUE_HEAD_MFLOP, rel=5e-3) and value.hidden_size == 1536


def test_published_sweep():
    """The ratios are of whole runs, each with output tokens of its own. With equal lengths they come out but for k = 1,
    which is 5 % off: as if that run's output had been 5 % shorter than its baseline's."""
    base, value, work = published()
    ratios = {k: flops.ratio(base, value, work, Guidance(k), work) for k in SWEEP}
    for k, tolerance in ((2, 0.01), (3, 0.01), (4, 0.01), (5, 0.015)):
        assert ratios[k] == pytest.approx(SWEEP[k], rel=tolerance)
    assert ratios[1] / SWEEP[1] - 1 == pytest.approx(0.054, abs=1e-3)
    shorter = flops.explaining_output_ratio(base, value, work, 1, SWEEP[1])
    assert shorter == pytest.approx(0.948, abs=1e-3)
    fewer = Workload(work.prompts, work.samples, work.prompt_tokens, work.output_tokens * shorter)
    assert flops.ratio(base, value, fewer, Guidance(1), work) == pytest.approx(SWEEP[1], rel=1e-6)


def test_the_check_fails_when_a_figure_differs(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["study", "flops", "--check"])
    assert cli.main() == 0
    lines = {line.split(" | ")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "| 1.3 | 1.371 | +5.4% |" in lines["| ratio in the sweep, k = 1"] and "DIFFERS" not in "".join(
        lines.values()
    )
    monkeypatch.setitem(flops.PUBLISHED_RATIOS, 3, 1.78)
    assert cli.main() == 1
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
    expected = {
        "base linear": linear * len(positions + prompt_positions),
        "base attention": sum(map(attention, positions + prompt_positions)),
        "base LM head": 2 * 24 * 50 * len(positions + prompt_positions),
    }
    assert flops.base_operations(m, work) == expected
    token = [linear + attention(p) for p in positions]
    expected = {
        "LenVM extend": 0.5 * sum(token),
        "LenVM candidates": 3 * sum(token),
        "LenVM prefill": sum(linear + attention(p) for p in prompt_positions),
        "LenVM head": 2 * (24 * 24 + 24) * (3.5 * len(positions) + len(prompt_positions)),
    }
    assert flops.value_operations(m, work, Guidance(3, 0.5)) == expected


def test_bytes_of_a_step():
    moved = flops.step_bytes(TINY, TINY, Guidance(5, 1), rows=7, cached=11, element_size=2, forwards=2)
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
    assert list(flops.step_bytes(TINY, None, None, rows=7, cached=11, element_size=2)) == list(moved)[:3]


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
    ("changes", "message"),
    [
        ({"vocab_size": None}, "vocab_size in the configuration of .* must be an integer of at least 1, got None"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers in .* got '3'"),
        ({"head_dim": 0}, "head_dim in .* got 0"),
        ({"num_experts": 64}, "must be a dense model, its configuration has num_experts"),
    ],
)
def test_bad_configurations_are_named(tmp_path, changes, message):
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIG | changes))
    with pytest.raises(ValueError, match=message):
        Architecture.load(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{'hidden_size': 24}", "config.json must be JSON: Expecting property name"),
        (b"", "config.json must be JSON: Expecting value"),
        (b"\xff\xfe", "config.json must be JSON: 'utf-8' codec can't decode"),
        (b"[24]", "config.json must hold a JSON object, got list"),
        (b"null", "config.json must hold a JSON object, got NoneType"),
    ],
)
def test_files_that_are_no_configuration_are_named(tmp_path, content, message):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(str(tmp_path)) + ".*" + message):
        Architecture.load(str(tmp_path))


def test_missing_keys_and_models_are_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in TINY_CONFIG.items() if k != "hidden_size"}))
    with pytest.raises(ValueError, match=r"hidden_size in the configuration of .* got nothing"):
        Architecture.load(str(tmp_path))
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


def write_run(folder, name, times, **facts):
    meta = {
        "name": name,
        "way": "base",
        "rows": 2,
        "prompt_tokens": 5.0,
        "steps": len(times["total"]),
        "output_tokens": 2 * len(times["total"]),
        "prompts_computed": True,
        "prompt_seconds": 0.5,
        "decode_seconds": 1.5,
        "load_average": 0.5,
        "base_model": vars(TINY),
        **dict.fromkeys(report.ENVIRONMENT, "x"),
        "dtype": "float32",
        **facts,
    }
    (folder / f"{name}.meta.json").write_text(json.dumps(meta))
    lines = [
        {f"{stage}_ms": ms for stage, ms in zip(times, step, strict=True)} for step in zip(*times.values(), strict=True)
    ]
    text = "".join(json.dumps({"step": i, "rows": 2, **line}) + "\n" for i, line in enumerate(lines))
    (folder / f"{name}.jsonl").write_text(text)


def test_report_on_steps_made_up(tmp_path, capsys):
    """Means, percentiles, rates and ratios, by hand."""
    write_run(tmp_path, "base", {"base": [1.0] * 4, "sampler": [0.0, 1.0, 2.0, 3.0], "total": [1.0, 2.0, 3.0, 4.0]})
    guided = dict(way="ours", top_k=5, value_model=vars(TINY), computed={"candidates": 4.0, "extended": 0.0})
    times = {"base": [1.0] * 4, "forward": [4.0] * 4, "total": [5.0] * 4}
    write_run(tmp_path, "ours-tiny-k5", times, **guided, decode_seconds=3.5)
    (tmp_path / "two_forward-tiny.meta.json").write_text(
        json.dumps(
            {
                "name": "two_forward-tiny",
                "way": "two_forward",
                "error": "no such thing",
                **dict.fromkeys(report.ENVIRONMENT, "x"),
            }
        )
    )
    assert report.write(tmp_path) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    base, ours = summary["runs"]
    assert base["stages_ms"]["total"] == {"mean": 2.5, "p50": 2.5, "p95": pytest.approx(3.85)}
    assert base["stages_ms"]["sampler"] == {"mean": 1.5, "p50": 1.5, "p95": pytest.approx(2.85)}
    assert base["seconds"] == 2.0 and base["output_tokens_per_second"] == 4.0
    work = Workload(2, 1, 5.0, 4)
    operations = sum(flops.base_operations(TINY, work).values())
    assert base["operations_per_second"] == pytest.approx(operations / 2.0)
    extra = sum(flops.value_operations(TINY, work, Guidance(4, 0)).values())
    ratios = {"seconds": 2.0, "step": 2.0, "operations": (operations + extra) / operations}
    assert {name: ours["ratios"][name] for name in ratios} == pytest.approx(ratios)
    moved = [
        sum(flops.step_bytes(TINY, *more, rows=2, cached=7, element_size=4).values())
        for more in ((None, None), (TINY, Guidance(4, 0)))
    ]
    assert ours["ratios"]["bytes"] == pytest.approx(moved[1] / moved[0])
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
        ("base_model", vars(TINY) | {"num_layers": 4}),
        ("dtype", "bfloat16"),
        ("device", "another"),
    ],
)
def test_no_ratio_to_a_base_run_of_something_else(tmp_path, fact, value):
    times = {"base": [1.0] * 4, "forward": [4.0] * 4, "total": [5.0] * 4}
    write_run(tmp_path, "base", {"base": [1.0] * 4, "total": [2.0] * 4})
    guided = dict(way="ours", top_k=5, value_model=vars(TINY), computed={"candidates": 4.0, "extended": 0.0})
    write_run(tmp_path, "ours-alike-k5", times, **guided, command="another", date="another")
    write_run(tmp_path, "ours-tiny-k5", times, **guided | {fact: value})
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


def test_merged_lines_have_every_stage():
    outer = [{"step": 7, "rows": 3, "sampler_ms": 9.0, "base_ms": 2.0, "total_ms": 11.0}]
    inner = [
        dict.fromkeys(("candidates_ms", "forward_ms", "head_ms", "reweight_ms", "sample_ms"), 1.5) | {"total_ms": 7.5}
    ]
    (line,) = run.merge(outer, inner)
    assert line["step"] == 0 and line["rows"] == 3 and line["other_ms"] == 1.5
    assert (
        sum(ms for name, ms in line.items() if name.endswith("_ms") and name != "total_ms") == line["total_ms"] == 11.0
    )
    assert run.merge(outer, []) == [{"step": 0, "rows": 3, "base_ms": 2.0, "sampler_ms": 9.0, "total_ms": 11.0}]


RANDOM_LOAD = ["--load", "random", "--base", "Qwen2-tiny", "--value-model", "Qwen2-tiny", "--cached", "9"]


@pytest.fixture
def tiny_study(tmp_path, monkeypatch):
    """Runs a study of a tiny model of random weights with these options; gives the exit status and the folder."""
    monkeypatch.setitem(models.DIMENSIONS, "Qwen2-tiny", (32, 48, 2, 4, 2, 8, False))
    monkeypatch.setitem(flops.VOCABULARY, "Qwen2-tiny", 211)
    size = ["--device", "cpu", "--dtype", "float32", "--rows", "3", "--steps", "4"]

    def study(*options, load=RANDOM_LOAD):
        monkeypatch.setattr("sys.argv", ["study", "run", "--out", str(tmp_path / "study"), *load, *size, *options])
        return cli.main(), tmp_path / "study"

    return study


def test_a_whole_study(tiny_study, monkeypatch):
    """Every way and k, and the report of it."""
    monkeypatch.delenv(timing.VARIABLE, raising=False)
    status, folder = tiny_study("--top-k", "1", "4")
    assert status == 0 and timing.VARIABLE not in os.environ
    metas = {file.name.removesuffix(".meta.json"): json.loads(file.read_text()) for file in folder.glob("*.meta.json")}
    guided = [f"{way}-Qwen2-tiny-k{k}" for way in ("ours", "two_forward") for k in (1, 4)]
    assert sorted(metas) == sorted(["base", *guided])
    for name, meta in metas.items():
        assert meta["output_tokens"] == 12 and meta["prompt_tokens"] == 9 and meta["decode_seconds"] > 0
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
    monkeypatch.setattr("sys.argv", ["study", "report", str(folder)])
    assert cli.main() == 0
    assert len(json.loads((folder / "summary.json").read_text())["runs"]) == 5


def test_the_fastest_repeat_counts(tiny_study, monkeypatch):
    decode, seconds = run.decode, iter([0.5, 3.0, 1.0, 2.0])  # the first warms up
    monkeypatch.setattr(run, "decode", lambda *arguments: (decode(*arguments)[0], next(seconds)))
    _, folder = tiny_study("--ways", "base", "--repeats", "3")
    assert json.loads((folder / "base.meta.json").read_text())["decode_seconds"] == 1.0


def test_a_base_that_fails_when_measured_again_stays(tiny_study, monkeypatch):
    measure, names = run.Study._measure, []

    def failing(study, name, *arguments):
        names.append(name)
        if names.count("base") == 2:
            raise RuntimeError("out of memory")
        measure(study, name, *arguments)

    monkeypatch.setattr(run.Study, "_measure", failing)
    status, folder = tiny_study("--ways", "base", "ours")
    assert status == 1 and names == ["base", "ours-Qwen2-tiny-k5", "base"]
    assert json.loads((folder / "base.meta.json").read_text())["decode_seconds"] > 0


def test_the_users_own_timing_stays(tiny_study, tmp_path, monkeypatch):
    monkeypatch.setenv(timing.VARIABLE, str(tmp_path / "mine.jsonl"))
    assert tiny_study("--ways", "ours")[0] == 0
    assert os.environ[timing.VARIABLE] == str(tmp_path / "mine.jsonl") and not list(tmp_path.glob("mine*"))


def test_what_fails_keeps_no_other_way_from_running(tiny_study, monkeypatch):
    monkeypatch.setitem(sys.modules, "bench.baselines.two_forward", None)  # as if it were not there
    status, folder = tiny_study()
    assert status == 1
    assert "error" not in json.loads((folder / "ours-Qwen2-tiny-k5.meta.json").read_text())
    assert json.loads((folder / "two_forward-Qwen2-tiny.meta.json").read_text())["error"].startswith("ModuleNotFound")


def test_a_model_that_can_be_built_later_failed_no_more(tiny_study, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "bench.baselines.two_forward", None)
        status, folder = tiny_study("--ways", "two_forward")
    assert status == 1 and [file.name for file in folder.iterdir()] == ["two_forward-Qwen2-tiny.meta.json"]
    assert tiny_study("--ways", "two_forward")[0] == 0
    assert [file.name for file in folder.glob("*.meta.json")] == ["two_forward-Qwen2-tiny-k5.meta.json"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--top-k", "9"], "--top-k must be at most 8, got 9"),
        (["--base", "Qwen9"], "--base and --value-model must be of SmolLM2-135M, .* got 'Qwen9'"),
    ],
)
def test_bad_options_are_named(tiny_study, capsys, options, message):
    assert tiny_study(*options)[0] == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize("load", [[], ["--load", "smollm2"]])  # the default on a CPU, too
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rows", "4000"], "--rows must be from 1 to the .* prompts of the demo, got 4000"),
        (["--base", "Qwen2.5-7B"], "--base: only with --load random; smollm2 has models and prompts of its own"),
        (["--value-model", "Qwen2.5-0.5B", "--cached", "512"], "--value-model, --cached: only with --load random"),
    ],
)
def test_options_of_the_other_load_are_refused(tiny_study, capsys, load, options, message):
    assert tiny_study(*options, load=load)[0] == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize("option", ["--top-k", "--rows", "--steps", "--repeats", "--cached"])
@pytest.mark.parametrize("number", ["x", "0", "1.5", ""])
def test_numbers_are_positive_integers(tiny_study, capsys, option, number):
    with pytest.raises(SystemExit):
        tiny_study(option, number)
    assert f"argument {option}: must be an integer of at least 1, got {number!r}" in capsys.readouterr().err


def test_both_guided_ways_see_the_same_sequences(tmp_path):
    """Prompts of unequal lengths, padded on the left: the values of our candidates are those of the published way."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, VOCAB, (3, 7), generator=generator)
    base = SimpleNamespace(prompts=prompts, prompt_lens=torch.tensor([7, 2, 4], dtype=torch.int32), vocab_size=VOCAB)
    steps = [(torch.randn(3, VOCAB, generator=generator), torch.tensor([5, 6, 7 + i])) for i in range(3)]
    values = {}
    for way in ("ours", "two_forward"):
        guided = run.Guided(base, tiny_value_model(torch.device("cpu")), way, 3, tmp_path / "stages")
        guided.use_top_k(4)
        for _ in range(2):  # starting again forgets what was before
            guided.start()
            outputs, inner = [], guided._step.step
            guided._step.step = lambda *a, inner=inner, outputs=outputs, **k: (
                outputs.append(inner(*a, **k)) or outputs[-1]
            )
            tokens = prompts[:, -1].contiguous()
            for i, (logits, following) in enumerate(steps):
                guided.draw(logits, tokens, i)
                tokens = following
            guided._step.step = inner
        values[way] = [output.value_logits for output in outputs]
    for ours, theirs in zip(values["ours"], values["two_forward"], strict=True):
        torch.testing.assert_close(ours[:, :4], torch.stack(list(theirs)), rtol=0, atol=2e-5)
        assert ours.std() > 0.01
