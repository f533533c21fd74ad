"""``lenvm collect``, ``lenvm fit`` and ``lenvm train`` on tiny models: results, resumption and errors."""

import json
import math
import shutil
import subprocess
import sys
from itertools import product

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from lenvm_kernels import cli
from lenvm_kernels.evaluate.run import seed_from
from lenvm_kernels.loading import models as load
from lenvm_kernels.loading.models import Models
from lenvm_kernels.train import collect, value_model
from lenvm_kernels.train.answers import AnswerStore, SampledAnswer
from lenvm_kernels.train.fit import measure
from lenvm_kernels.values import ValueModel
from lenvm_kernels.values.probe import is_probe
from tests.helpers.fake_engine import answer_to, fake_engines, request_of
from tests.helpers.models import EOS, save_checkpoint, value_logits
from tests.helpers.probes import probe_values

TEMPLATE = "{% for message in messages %}{{ 'w1 ' + message['content'] + ' w2' }}{% endfor %}"
TEXTS = [f"w{3 + i} w{4 + i % 5}" + " w9" * (i % 3) for i in range(12)]
COLLECT = ("--answers-per-prompt", 3, "--max-new-tokens", 24, "--rows", 5, "--temperature", 1.5, "--top-k", 0)
FIT = ("--kind", "value-model", "--lora-rank", 2, "--batch-size", 3, "--accumulation", 2, "--learning-rate", 0.01)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("base"), seed=0, layers=2, template=TEMPLATE)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """A file of 9 training prompts and 3 held-out prompts."""
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [{"prompt": text, "split": "test" if i % 4 == 1 else "train"} for i, text in enumerate(TEXTS)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture(scope="module")
def answers(base, prompts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("collected") / "answers"
    command = ("collect", base, "--prompts", prompts, "--output", folder, *COLLECT, "--device", "cpu")
    assert cli.main([str(argument) for argument in command]) == 0
    return folder


@pytest.fixture
def run(lenvm):
    """Function that runs a command on the CPU; returns stdout, or stderr if the command must fail."""

    def run(*argv, code=0):
        found, out, error = lenvm(*argv, "--device", "cpu")
        assert found == code, error
        return error if code else out

    return run


def lines_of(folder):
    return [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]


def report_of(folder):
    return json.loads((folder / "report.json").read_text())


def approx(measures, **tolerance):
    return {name: value and pytest.approx(value, **tolerance) for name, value in measures.items()}


def test_held_out_prompts_depend_only_on_their_text(run, base, tmp_path):
    for folder, texts in (("a", TEXTS), ("b", TEXTS[::-1])):
        (tmp_path / folder).write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
        command = ("collect", base, "--prompts", tmp_path / folder, "--output", tmp_path / f"{folder}-answers")
        run(*command, "--answers-per-prompt", 1, "--max-new-tokens", 2)
    plans = [json.loads((tmp_path / f"{folder}-answers" / "plan.json").read_text()) for folder in ("a", "b")]
    held_out = [[prompt["text"] for prompt in plan["prompts"] if prompt["split"] == "test"] for plan in plans]
    assert held_out[0] == held_out[1] and len(held_out[0]) == 1


def test_interrupted_collection_resumes_with_the_same_answers(run, answers, base, prompts, tmp_path, monkeypatch):
    folder, calls = tmp_path / "answers", []

    def interrupted(*args, **options):
        calls.append(args)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return load.sample(*args, **options)

    monkeypatch.setattr(collect, "sample", interrupted)
    command = ("collect", base, "--prompts", prompts, "--output", folder, *COLLECT)
    run(*command, code=130)
    kept = (folder / "answers.jsonl").read_bytes()
    assert len(kept.splitlines()) == 15
    (folder / "answers.jsonl").write_bytes(kept[:-20])  # the last line of a batch is incomplete
    run(*command)
    assert len(calls) == 3 + 1 + 6  # two of eight batches are complete
    assert sorted(map(str, lines_of(folder))) == sorted(map(str, lines_of(answers)))
    run(*command)
    assert len(calls) == 10
    error = run(*command, "--seed", 1, "--min-p", 0.1, code=2)
    assert "same plan" in error and "differs in sampling, seed" in error


@pytest.mark.parametrize("is_guided", [True, False])
def test_answers_in_process(run, base, prompts, tmp_path, monkeypatch, is_guided):
    """An answer consists of guided tokens, if there is a value model, and the base model's continuation."""
    guided, plain = [], []

    def noted(models, value, inputs, guidance, *, max_new_tokens, **options):
        found = load.sample(models, value, inputs, guidance, max_new_tokens=max_new_tokens, **options)
        read = [ids[mask.bool()].tolist() for ids, mask in zip(*inputs.values(), strict=True)]
        is_plain = guidance == [None] * len(read)
        assert (value is None) == is_plain
        targets = [fields and fields["target_length"] for fields in guidance]
        new = [ids for ids, _ in found]
        (plain if is_plain else guided).extend(zip(read, targets, max_new_tokens, new, strict=True))
        return found

    monkeypatch.setattr(collect, "sample", noted)
    folder, more = tmp_path / "answers", ["--max-new-tokens", 40]
    more += ["--value", save_checkpoint(tmp_path / "value", seed=1, value_head=True)] if is_guided else []
    run("collect", base, "--prompts", prompts, "--output", folder, *COLLECT, *more)
    asked = json.loads((folder / "plan.json").read_text())["prompts"]
    assert [prompt["text"] for prompt in asked[9:]] == TEXTS[1::4]
    decode, lines = AutoTokenizer.from_pretrained(base).decode, lines_of(folder)
    assert all(decode(prompt["ids"]) == f"w1 {prompt['text']} w2" for prompt in asked)
    assert sorted((line["prompt"], line["sample"]) for line in lines) == [(p, s) for p in range(12) for s in range(3)]
    assert len({tuple(line["ids"]) for line in lines}) > 30
    targets, kinds = [line["target"] for line in lines], set()
    for line in lines:
        prompt, target, ids, count = asked[line["prompt"]]["ids"], line["target"], line["ids"], line["guided"]
        limit = seed_from(0, line["prompt"], line["sample"], "guided") % target if is_guided else 0
        assert count == min(limit, len(ids)) and line["limit"] == 40
        assert line["finished"] == (ids[-1] == EOS) and (line["finished"] or len(ids) == 40)
        assert limit == 0 or (prompt, target, limit, ids[:count]) in guided
        ended = count > 0 and ids[count - 1] == EOS
        kinds.add((count > 0, ended, line["finished"]))
        assert len(ids) == count if ended else (prompt + ids[:count], None, 40 - count, ids[count:]) in plain
    if is_guided:
        assert 20 <= min(targets) <= 22 and 36 <= max(targets) <= 40
        assert {kind[:2] for kind in kinds} >= {(True, True), (True, False)}
    else:
        assert set(targets) == {None} and kinds == {(False, False, True), (False, False, False)} and not guided


def test_answers_from_server(run, base, prompts, tmp_path, monkeypatch):
    """Answers received before a server error are kept. The same command samples the rest."""
    folder, found = tmp_path / "answers", []
    with fake_engines() as start:
        server, url = start("sglang")
        command = ("collect", base, "--prompts", prompts, "--output", folder, "--url", url, "--value", "any", *COLLECT)
        reply = server.RequestHandlerClass.reply

        def fails(handler, status, content):
            found.append(handler.command)
            failed = found.count("POST") > 20
            return reply(handler, 500, {"error": "out of memory"}) if failed else reply(handler, status, content)

        monkeypatch.setattr(server.RequestHandlerClass, "reply", fails)
        assert "status 500" in (error := run(*command, code=2)) and "out of memory" in error
        kept = lines_of(folder)
        assert 8 <= len(kept) <= 20
        monkeypatch.setattr(server.RequestHandlerClass, "reply", reply)
        server.requests.clear()
        run(*command)
    asked = [prompt["ids"] for prompt in json.loads((folder / "plan.json").read_text())["prompts"]]
    wanted, lines = [], lines_of(folder)
    assert lines[: len(kept)] == kept and len({(line["prompt"], line["sample"]) for line in lines}) == len(lines) == 36
    for i, line in enumerate(lines):
        key = (0, line["prompt"], line["sample"])
        seeds = [seed_from(*key, purpose) for purpose in ("guidance", "sampling")]
        limit = seed_from(*key, "guided") % line["target"]
        begun, ended = answer_to(seeds[0], limit) if limit else ([], False)
        rest, finished = ([], True) if ended else answer_to(seeds[1], 24 - len(begun))
        assert (line["ids"], line["guided"], line["finished"]) == (begun + rest, len(begun), finished)
        prompt = asked[line["prompt"]]
        requests = [(prompt, limit, seeds[0], {"target_length": line["target"]})] * bool(limit)
        requests += [(prompt + begun, 24 - len(begun), seeds[1], {})] * (not ended)
        wanted += requests if i >= len(kept) else []
    assert sorted(map(str, wanted)) == sorted(str(request_of(body)) for _, body in server.requests)


@pytest.mark.parametrize(("layers", "guided", "epochs"), [((), 0, 2), ((1,), 3, 2), ((2, 1), 0, 3)])
def test_stored_probe_reproduces_measured_values(run, answers, base, tmp_path, layers, guided, epochs):
    shutil.copytree(answers, tmp_path / "answers")
    answers = tmp_path / "answers"
    lines = [line | {"guided": min(guided, len(line["ids"]))} for line in lines_of(answers)]
    (answers / "answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ("fit", base, "--answers", answers, "--output", tmp_path, *(("--layers", *layers) if layers else ()))
    out = run(*command, *(("--states", 100, "--gamma", 0.9, "--epochs", 3) if epochs == 3 else ()))
    report = report_of(tmp_path)
    measured, gamma, training = report["test"][str(answers)]["probe"], report["plan"]["gamma"], report["training"]
    assert f"{measured['r2']:.2f}" in out and len(training["negative log-likelihood"]) == epochs
    if epochs == 3:
        assert 60 < training["rows"] < 140 < training["states"] and gamma == 0.9
    models = Models.load(base, str(tmp_path / "value"), device="cpu", dtype=torch.float32)
    assert models.value_model.config.layers == (layers or (2,)) and models.value_model.lenvm_config.gamma == gamma
    examples, rows = AnswerStore.open(answers).examples("test", gamma, of_prompts=False), []
    for example in examples:
        prompt, ids = example.prompt, example.answer.ids
        for i in range(len(ids) - 1)[-len(example.targets) :]:
            rows.append(({"return_values": True, "gamma": gamma}, len(prompt), [*prompt, *ids[:i]], [ids[i]]))
    _, found = probe_values(base, tmp_path / "value", rows)
    assert measure(found[:, 0].sigmoid(), examples, gamma) == approx(measured, rel=0.01, abs=2e-3)


LEARNING = {"probe": ("--epochs", 100), "value-model": (*FIT, "--epochs", 40, "--gamma", 0.9, "--learning-rate", 3e-3)}


@pytest.mark.parametrize(("kind", "least"), [("probe", 0.7), ("value-model", 0.8)])
def test_lengths_are_learned(run, base, tmp_path, kind, least):
    """A probe learns the length, 4 or 16 tokens, from the answer's first token, and a value model from the prompt."""
    answers, is_probe = tmp_path / "answers", kind == "probe"
    prompts = [[7 + i, 8] if is_probe else [7 + i, 8 + i % 2, 5] for i in range(16)]
    kinds = ([9 if is_probe else 10, 10, 10, EOS], [11 if is_probe else 10, *[10] * 14, EOS])
    plan = {"base": base, "vocabulary": collect.vocabulary(AutoTokenizer.from_pretrained(base))}
    plan["prompts"] = [{"split": "train" if i < 12 else "test", "ids": ids} for i, ids in enumerate(prompts)]
    samples = product(range(16), range(4 if is_probe else 1))
    AnswerStore(answers, plan).add([SampledAnswer(i, j, None, 0, 20, kinds[(i + j) % 2], True) for i, j in samples])
    run("fit", base, "--answers", answers, "--output", tmp_path / "fitted", *LEARNING[kind])
    found = report_of(tmp_path / "fitted")["test"][str(answers)]
    assert found[kind]["r2"] > least > 0.1 > found["constant"]["r2"]
    assert not is_probe or found[kind]["correlation_at_a_position"] > 0.8  # from the candidate's embedding


@pytest.mark.parametrize("kind", ["probe", "value-model"])
def test_two_rounds(run, base, prompts, tmp_path, kind):
    command = ("train", base, "--prompts", prompts, "--output", tmp_path / "t", *COLLECT, "--kind", kind)
    out = run(*command, "--evaluate-prompts", 2)
    first, second = (report_of(tmp_path / "t" / f"round-{i}") for i in (1, 2))
    assert list(second["guided"].values()) == [False, True]
    assert second["training"]["states"] > first["training"]["states"] > 100
    plan = json.loads((tmp_path / "t" / "round-2" / "answers" / "plan.json").read_text())
    assert plan["value"] == str(tmp_path / "t" / "round-1" / "value") and plan["seed"] == 1
    assert (tmp_path / "t" / "value").resolve() == (tmp_path / "t" / "round-2" / "value").resolve()
    assert is_probe(tmp_path / "t" / "value") == (kind == "probe")
    assert "round 2:" in out and "Target 20 tokens" in out and (tmp_path / "t" / "evaluation" / "table.md").exists()
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "t").rglob("*.safetensors")}
    run(*command, "--evaluate-prompts", 0)
    assert before == {file: file.stat().st_mtime_ns for file in (tmp_path / "t").rglob("*.safetensors")}


@pytest.mark.parametrize("rank", [0, 2])
def test_stored_value_model_reproduces_measured_values(run, answers, base, tmp_path, rank):
    out = run("fit", base, "--answers", answers, "--output", tmp_path, *FIT, "--lora-rank", rank)
    assert out.startswith("| held-out answers |")
    report, value = report_of(tmp_path), tmp_path / "value"
    gamma, measured = report["plan"]["gamma"], report["test"][str(answers)]["value-model"]
    assert report["training"]["answers"] == 27 and not (tmp_path / "checkpoints").exists()
    loaded, tensors = ValueModel.from_pretrained(value), load_file(value / "model.safetensors")
    assert loaded.lenvm_config.gamma == gamma and AutoTokenizer.from_pretrained(value).chat_template == TEMPLATE
    model, original = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in (value, base))
    examples, found = AnswerStore.open(answers).examples("test", gamma), []
    for example in examples:
        ids = torch.tensor([[*example.prompt, *example.answer.ids[:-1]]])
        found.append(value_logits(model, tensors, ids)[0, -len(example.targets) :].sigmoid())
    assert measure(torch.cat(found), examples, gamma) == approx(measured, rel=0.05, abs=5e-3)
    for name, weight in original.model.named_parameters():  # LoRA changes only the matrices of layers
        is_changed = not torch.equal(weight.bfloat16().float(), model.model.get_parameter(name))
        assert is_changed == (rank == 0 or "_proj" in name), name


@pytest.mark.parametrize("options", [("--batch-size", 6, "--accumulation", 1), ("--gradient-checkpointing",)])
def test_division_into_forwards_does_not_change_training(run, answers, base, tmp_path, options):
    """The loss is the mean over all states of a step, independent of how answers are divided into forwards."""
    for folder, more in (("one", ()), ("two", options)):
        run("fit", base, "--answers", answers, "--output", tmp_path / folder, *FIT, "--learning-rate", 1e-3, *more)
    one, two = (load_file(tmp_path / folder / "value" / "model.safetensors") for folder in ("one", "two"))
    torch.testing.assert_close(two, one, rtol=1e-2, atol=2e-3)


def test_loss_is_mean_squared_error_of_all_states(run, answers, base, tmp_path, monkeypatch):
    """The initial prediction is the mean target, so the error of an untrained network is the variance."""
    monkeypatch.setattr(value_model, "HEAD_RATE", 0.0)
    monkeypatch.setattr(value_model, "LOGGED_STEPS", 1)
    run("fit", base, "--answers", answers, "--output", tmp_path, *FIT, "--learning-rate", 1e-12, "--batch-size", 14)
    report = report_of(tmp_path)
    targets = torch.cat([e.targets for e in AnswerStore.open(answers).examples("train", report["plan"]["gamma"])])
    variance = pytest.approx(float(targets.var(correction=0)), rel=1e-3)
    assert report["training"]["mean squared error"] == [variance] * 2 and report["training"]["steps"] == 2


def test_resumed_training_is_bitwise_identical(run, answers, base, tmp_path, monkeypatch):
    command = ("fit", base, "--answers", answers, *FIT, "--save-steps", 2)
    run(*command, "--output", tmp_path / "whole")

    steps = []

    class Interrupts(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            steps.append(state.global_step)
            if len(steps) == 5:
                raise KeyboardInterrupt

    monkeypatch.setattr(value_model, "StepBar", Interrupts)
    run(*command, "--output", tmp_path / "part", code=130)
    assert [folder.name for folder in (tmp_path / "part" / "checkpoints").glob("checkpoint-*")] == ["checkpoint-4"]
    assert "checkpoints' differs in gamma" in run(*command, "--output", tmp_path / "part", "--gamma", 0.5, code=2)
    run(*command, "--output", tmp_path / "part")
    assert steps == [1, 2, 3, 4, 5, 5, 6, 7, 8, 9, 10]
    found, wanted = (load_file(tmp_path / name / "value" / "model.safetensors") for name in ("part", "whole"))
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_non_finite_loss_is_an_error(run, answers, base, tmp_path, monkeypatch):
    monkeypatch.setattr(value_model, "HEAD_RATE", math.inf)
    error = run("fit", base, "--answers", answers, "--output", tmp_path, *FIT, code=2)
    assert "the loss is nan, --learning-rate must be lower" in error and not (tmp_path / "value").exists()


ONE_PROCESS = """
import gc, sys, torch
from torch.nn.parallel import DistributedDataParallel
from lenvm_kernels import cli

def destroy(group, destroys=torch.distributed.destroy_process_group):
    assert not any(isinstance(found, DistributedDataParallel) for found in gc.get_objects()), "may wait forever"
    destroys(group)

torch.distributed.destroy_process_group = destroy
code = cli.main(sys.argv[1:])
assert not torch.distributed.is_initialized(), "the exit may abort"
sys.exit(code)
"""


def test_two_processes_train_the_same_model_as_one(answers, base, tmp_path):
    command = ["fit", base, "--answers", answers, *FIT, "--learning-rate", 1e-3, "--device", "cpu"]
    one, two = ([*command, "--output", tmp_path / name, "--batch-size", n] for name, n in (("one", 4), ("two", 2)))
    assert cli.main(list(map(str, one))) == 0
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--no-python"]
    launcher += [sys.executable, "-c", ONE_PROCESS]
    found = subprocess.run([sys.executable, *launcher, *map(str, two)], capture_output=True, text=True, timeout=300)
    assert found.returncode == 0 and found.stdout.count("held-out answers") == 1, found.stderr
    one, two = (report_of(tmp_path / name)["test"][str(answers)]["value-model"] for name in ("one", "two"))
    assert two == approx(one, rel=0.05, abs=0.02)
