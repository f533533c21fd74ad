"""``lenvm collect``, ``fit`` and ``train`` on tiny models: what they write, what a kill leaves, bad input."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, GPT2Config, MambaConfig, Qwen3MoeConfig

import lenvm_kernels
from lenvm_kernels import GuidanceTable, cli
from lenvm_kernels.evaluate.plan import seed_from
from lenvm_kernels.loading import generation
from lenvm_kernels.loading.models import Models
from lenvm_kernels.loading.prompts import TEST
from lenvm_kernels.training import collect, cost, decode, fit
from lenvm_kernels.training.answers import AnswerStore
from lenvm_kernels.training.measures import measure
from lenvm_kernels.training.stages import vocabulary
from lenvm_kernels.training.targets import split_of
from lenvm_kernels.value_model import LenVMConfig, ValueModel
from lenvm_kernels.value_model.trunk import is_trunk
from tests.helpers.fake_engine import fake_engines
from tests.helpers.models import EOS, TINY, WORDS, save_checkpoint

TEMPLATE = "{% for message in messages %}{{ 'w1 ' + message['content'] + ' w2' }}{% endfor %}"
TEXTS = [f"w{3 + i} w{4 + i % 5}" + " w9" * (i % 3) for i in range(12)]


def checkpoint(path, seed, **options):
    save_checkpoint(path, seed, **options)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("base"), seed=0)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    return file


@pytest.fixture
def lenvm(lenvm):
    """Run a command on the CPU; gives its exit code, its output and its errors."""
    return lambda command, *argv: lenvm(command, "--device", "cpu", *argv)


def succeeds(lenvm, *argv):
    """The output of a command that succeeds."""
    code, out, error = lenvm(*argv)
    assert code == 0, error
    return out


def refused(lenvm, *argv):
    """The errors of a command that ends with exit code 2."""
    code, _, error = lenvm(*argv)
    assert code == 2, error
    return error


COLLECT = ("--held-out", 0.25, "--answers-per-prompt", 3, "--max-new-tokens", 14, "--rows", 5)
COLLECT += ("--temperature", 1.5, "--top-k", 0)
OF_VALUE_MODEL = ("--kind", "value-model")
FIT = (*OF_VALUE_MODEL, "--adapters", 2, "--batch-tokens", 60, "--row-tokens", 40, "--forward-tokens", 80)
FIT += ("--learning-rate", 0.01)


@pytest.fixture(scope="module")
def answers(base, prompts, tmp_path_factory):
    """A directory of answers."""
    folder = tmp_path_factory.mktemp("collected") / "answers"
    assert cli.main([str(a) for a in ("collect", base, "--prompts", prompts, "--output", folder, *COLLECT)]) == 0
    return folder


def lines_of(folder):
    return [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]


def report_of(folder):
    return json.loads((folder / "report.json").read_text())


def reports_of(folder):
    """Of both rounds."""
    return [report_of(folder / f"round-{i}") for i in (1, 2)]


def store_answers(folder, base, prompts, is_held_out, answers):
    """Write down answers: (prompt, sample, tokens); ``prompts`` are those of each prompt."""
    prompts = [{"text": "", "split": "test" if is_held_out(i) else "train", "ids": x} for i, x in enumerate(prompts)]
    plan = {"prompts": prompts, "base": base, "vocabulary": vocabulary(AutoTokenizer.from_pretrained(base))}
    AnswerStore(folder, plan).add([collect.Answer(i, j, None, 0, 20, ids, True) for i, j, ids in answers])


def test_collected_answers(answers, base):
    lines, plan = lines_of(answers), json.loads((answers / "plan.json").read_text())
    assert sorted((line["prompt"], line["sample"]) for line in lines) == [(p, s) for p in range(12) for s in range(3)]
    assert {line["finished"] for line in lines} == {True, False}
    for line in lines:
        assert line["finished"] == (line["ids"][-1] == EOS) and EOS not in line["ids"][:-1]
        assert len(line["ids"]) <= line["limit"] == 14 and (line["finished"] or len(line["ids"]) == 14)
        assert line["target"] is None and line["guided"] == 0
    assert len({tuple(line["ids"]) for line in lines}) > 30
    # A quarter is held out, wherever it stands; the template says what is read.
    assert [prompt["split"] for prompt in plan["prompts"]] == ["train"] * 9 + ["test"] * 3
    assert {prompt["text"] for prompt in plan["prompts"][9:]} != set(TEXTS[9:])
    tokenizer = AutoTokenizer.from_pretrained(base)
    by_text = {prompt["text"]: tokenizer.decode(prompt["ids"]) for prompt in plan["prompts"]}
    assert by_text == {text: f"w1 {text} w2" for text in TEXTS}


def test_a_killed_collection_goes_on_and_gives_the_same(lenvm, answers, base, prompts, tmp_path, monkeypatch):
    folder = tmp_path / "answers"
    calls = []

    def killed(*args, **options):
        calls.append(args)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return decode.decode(*args, **options)

    monkeypatch.setattr(collect, "decode", killed)
    command = ("collect", base, "--prompts", prompts, "--output", folder, *COLLECT)
    assert lenvm(*command)[0] == 130
    kept = (folder / "answers.jsonl").read_bytes()
    assert len(kept.splitlines()) == 15
    (folder / "answers.jsonl").write_bytes(kept[:-20])  # the last line of a batch, cut short
    assert lenvm(*command)[0] == 0
    assert len(calls) == 3 + 1 + 6  # of eight batches two are whole

    def order(of):
        return sorted(lines_of(of), key=lambda line: (line["prompt"], line["sample"]))

    assert order(folder) == order(answers)
    assert lenvm(*command)[0] == 0 and len(calls) == 10
    error = refused(lenvm, *command, "--seed", 1, "--min-p", 0.1)
    assert "same plan" in error and "differs in prompts, sampling, seed" in error


def test_guidance_begins_answers_and_the_base_model_ends_them(lenvm, base, prompts, tmp_path, monkeypatch):
    asked = []

    def noted(models, value_model, inputs, guidance, **options):
        found = generation.sample(models, value_model, inputs, guidance, **options)
        prompts = [ids[mask.bool()].tolist() for ids, mask in zip(*inputs.values(), strict=True)]
        answers = [row[counts].tolist() for row, counts in zip(found.tokens, found.counts, strict=True)]
        asked.extend((p, g["target_length"], a) for p, g, a in zip(prompts, guidance, answers, strict=True))
        return found

    def went_on(models, begun, *args, **options):
        found = decode.decode(models, begun, *args, **options)
        ends.extend(zip(begun, found, strict=True))
        return found

    ends = []
    monkeypatch.setattr(collect, "sample", noted)
    monkeypatch.setattr(collect, "decode", went_on)
    value, folder = checkpoint(tmp_path / "value", seed=1, value_head=True), tmp_path / "answers"
    command = ("collect", base, "--prompts", prompts, "--output", folder, *COLLECT, "--value", value)
    succeeds(lenvm, *command, "--targets", 3, 900, "--max-new-tokens", 30)
    lines = lines_of(folder)
    targets = sorted(line["target"] for line in lines)
    assert 3 <= targets[0] <= 5 and 20 < targets[-1] <= 30
    prompts_ids = [prompt["ids"] for prompt in json.loads((folder / "plan.json").read_text())["prompts"]]
    kinds = set()
    for line in lines:
        prompt, target, ids, guided = (line[name] for name in ("prompt", "target", "ids", "guided"))
        prompt = prompts_ids[prompt]
        first = seed_from(0, line["prompt"], line["sample"], "guided") % target
        assert guided == min(first, len(ids)) and line["limit"] == 30
        assert line["finished"] == (ids[-1] == EOS) and (line["finished"] or len(ids) == 30)
        begun = [found[:first] for p, t, found in asked if (p, t) == (prompt, target)]
        assert ids[:guided] in begun or first == 0  # a batch without guidance is not asked for any
        if guided and ids[guided - 1] == EOS:
            kinds.add("ended under guidance")
            assert guided == len(ids)
            continue
        kinds.add("guided" if guided else "not guided")
        rest = [found[: 30 - guided] for p, found in ends if p == prompt + ids[:guided]]
        assert ids[guided:] in rest
    assert kinds == {"ended under guidance", "guided", "not guided"}


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_server_that_stops_half_way(lenvm, base, prompts, tmp_path, engine, monkeypatch):
    monkeypatch.setattr(collect, "PAUSES", (0.01, 0.02))
    folder = tmp_path / "answers"
    with fake_engines() as start:
        server, url = start(engine)
        command = (
            "collect",
            base,
            "--prompts",
            prompts,
            "--output",
            folder,
            "--url",
            url,
            "--concurrency",
            3,
            *COLLECT,
        )
        reply, count = server.RequestHandlerClass.reply, [0]

        def stops(handler, status, content):
            if handler.command == "POST":
                count[0] += 1
                if 5 < count[0] <= 7:  # for a moment
                    return reply(handler, 503, {"error": "busy"})
                if count[0] > 20:
                    return reply(handler, 500, {"error": "out of memory"})
            return reply(handler, status, content)

        monkeypatch.setattr(server.RequestHandlerClass, "reply", stops)
        error = refused(lenvm, *command)
        assert "answered with status 500" in error and "out of memory" in error
        done = {(line["prompt"], line["sample"]) for line in lines_of(folder)}
        assert len(done) == 18
        monkeypatch.setattr(server.RequestHandlerClass, "reply", reply)
        before = len(server.requests)
        assert lenvm(*command)[0] == 0
        assert len(server.requests) - before == 36 - 18
        lines = lines_of(folder)
        assert len({(line["prompt"], line["sample"]) for line in lines}) == len(lines) == 36
        plan = json.loads((folder / "plan.json").read_text())
        for line in lines:  # as the fake one makes answers of the seed and the limit
            seed = seed_from(0, line["prompt"], line["sample"], "sampling")
            assert line["ids"] == [5 + seed % 7] * (1 + seed % 9) + [EOS] and line["finished"]
        asked = {tuple(body.get("input_ids") or body["prompt"]) for _, body in server.requests}
        assert asked == {tuple(prompt["ids"]) for prompt in plan["prompts"]}


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_server_that_guides_is_asked_twice(lenvm, base, prompts, tmp_path, engine):
    folder = tmp_path / "answers"
    with fake_engines() as start:
        server, url = start(engine)
        command = ("collect", base, "--prompts", prompts, "--output", folder, "--url", url, "--value", "somewhere")
        assert lenvm(*command, *COLLECT, "--targets", 2, 14)[0] == 0
    plan = json.loads((folder / "plan.json").read_text())
    wanted = []
    for line in lines_of(folder):
        ids = plan["prompts"][line["prompt"]]["ids"]
        first, seeds = seed_from(0, line["prompt"], line["sample"], "guided") % line["target"], []
        for purpose in ("guidance", "sampling"):
            seeds.append(seed_from(0, line["prompt"], line["sample"], purpose))
        # As the fake one makes answers: 1 to 9 tokens and an end, if the limit leaves room for it.
        begun = ([5 + seeds[0] % 7] * (1 + seeds[0] % 9) + [EOS])[:first]
        if first:
            wanted.append((ids, first, seeds[0], line["target"]))
        assert line["ids"][: len(begun)] == begun and line["guided"] == len(begun)
        if EOS in begun:
            assert line["ids"] == begun and line["finished"]
            continue
        wanted.append((ids + begun, 14 - len(begun), seeds[1], None))
        rest = ([5 + seeds[1] % 7] * (1 + seeds[1] % 9) + [EOS])[: 14 - len(begun)]
        assert line["ids"] == begun + rest and line["finished"] == (rest[-1] == EOS)
    assert sorted(map(str, wanted)) == sorted(str(_asked(path, body)) for path, body in server.requests)
    assert len(wanted) > 36


def _asked(path, body):
    """Prompt, limit, seed and target of a request."""
    if path == "/generate":
        params = body["sampling_params"]
        target = params.get("custom_params", {}).get("target_length")
        return body["input_ids"], params["max_new_tokens"], params["sampling_seed"], target
    target = body.get("vllm_xargs", {}).get("target_length")
    return body["prompt"], body["max_tokens"], body["seed"], target


def test_a_server_that_refuses_is_not_asked_again(lenvm, base, prompts, tmp_path):
    with fake_engines() as start:
        server, url = start("sglang", broken=(400, {"error": "too long"}))
        command = ("collect", base, "--prompts", prompts, "--output", tmp_path / "a", "--url", url, *COLLECT)
        error = refused(lenvm, *command, "--concurrency", 1)
        assert "status 400" in error and "too long" in error
        assert len(server.requests) < 4 and not (tmp_path / "a").exists()


def test_a_fitted_model_gives_the_values_that_were_measured(lenvm, answers, base, tmp_path):
    """value/ and adapter/ are the network that was trained, in the runtime."""
    folder = tmp_path / "fitted"
    out, report = succeeds(lenvm, "fit", base, "--answers", answers, "--output", folder, *FIT), report_of(folder)
    found = report["test"][str(answers)]
    assert found["value model"]["answers"] == 9 and report["guided"] == {str(answers): False}
    assert f"{found['value model']['r2']:.2f}" in out
    assert not (folder / "state.pt").exists()
    whole = Models.load(base, str(folder / "value"), device="cpu", dtype=torch.float32)
    parts = ValueModel.from_pretrained(base, adapter=folder / "adapter")
    config = LenVMConfig.read(folder / "value")
    assert whole.value_model.lenvm_config == parts.lenvm_config == config and config.gamma == report["plan"]["gamma"]
    for found, wanted in zip(whole.value_model.head, parts.head, strict=True):
        assert torch.equal(found, wanted)
    for found, wanted in zip(whole.value_model.layers, parts.layers, strict=True):
        assert torch.equal(found.o, wanted.o) and torch.equal(found.qkv, wanted.qkv)
    # The same numbers once more, of what was written: gamma is that of what it goes on from.
    again = ("fit", base, "--answers", answers, "--output", tmp_path / "again", *FIT, "--initial", folder / "adapter")
    succeeds(lenvm, *again, "--epochs", 0)
    measured = report_of(tmp_path / "again")
    assert list(measured["test"][str(answers)]) == ["constant", "value model"]
    again, first = (of["test"][str(answers)]["value model"] for of in (measured, report))
    assert again == {name: value and pytest.approx(value, rel=0.02, abs=1e-3) for name, value in first.items()}
    adapters = load_file(folder / "adapter" / "adapter_model.safetensors")
    assert {tensor.shape[0] for name, tensor in adapters.items() if "lora_A" in name} == {2}
    assert all(tensor.abs().max() > 0 for tensor in adapters.values())


def test_lengths_that_the_prompt_tells_are_learned(lenvm, base, tmp_path):
    """Prompts with w5 are answered by 4 tokens, those with w6 by 16, all of them the same word."""
    answers, folder = tmp_path / "answers", tmp_path / "fitted"
    found = [(i, 0, [10] * (3 if i % 2 else 15) + [EOS]) for i in range(16)]
    store_answers(answers, base, [[7 + i, 8 if i % 2 else 9, 5] for i in range(16)], lambda i: i >= 12, found)
    options = (*OF_VALUE_MODEL, "--full", "--learning-rate", 3e-3, "--epochs", 40, "--batch-tokens", 60, "--gamma", 0.9)
    succeeds(lenvm, "fit", base, "--answers", answers, "--output", folder, *options)
    report = report_of(folder)
    found = report["test"][str(answers)]
    assert found["value model"]["r2"] > 0.8 > 0.1 > found["constant"]["r2"]
    assert report["plan"]["gamma"] == 0.9
    assert ValueModel.from_pretrained(folder / "value").dtype == torch.bfloat16
    assert not (folder / "adapter").exists()


@pytest.mark.parametrize("layers", [(), (1,), (2, 1)])
def test_a_trunk_gives_the_values_that_were_measured(lenvm, answers, tmp_path, layers):
    """value/ is the network that was trained, for the base model whose states taught it."""
    base = checkpoint(tmp_path / "base", seed=2, layers=2)
    folder = tmp_path / "fitted"
    command = ("fit", base, "--answers", answers, "--output", folder, "--batch-tokens", 40)
    command += (*(("--layers", *layers) if layers else ()), "--forward-tokens", 60)
    out, report = succeeds(lenvm, *command), report_of(folder)
    measured = report["test"][str(answers)]["trunk"]
    assert f"{measured['r2']:.2f}" in out and len(report["training"]["negative log-likelihood"]) == 2
    succeeds(lenvm, *command)  # it is there

    models = Models.load(base, str(folder / "value"), device="cpu", dtype=torch.float32)
    trunk, store = models.value_model, AnswerStore.open(answers, "--answers")
    assert trunk.config.layers == (layers or (2,)) and trunk.lenvm_config.gamma == report["plan"]["gamma"]
    table = GuidanceTable.from_params([None], [set()], "cpu")
    table.nats_per_token[:] = -math.log(trunk.lenvm_config.gamma)
    split = split_of(store, TEST, report["plan"]["gamma"], of_prompts=False)
    found = []
    for answer in split.answers:  # each alone, and none padded
        prompt = store.prompts[answer.prompt]["ids"]
        outputs = models.model(torch.tensor([[*prompt, *answer.ids]]), output_hidden_states=True)
        states = torch.cat([outputs.hidden_states[i][0] for i in trunk.config.layers], dim=1)
        states = states[len(prompt) - 1 : len(prompt) + len(answer.ids) - 2].detach().contiguous()
        rows = dict(table_rows=torch.zeros(len(states)).int(), generated=torch.zeros(len(states)).int())
        _, mean = trunk.value_logits(states, torch.tensor(answer.ids[:-1])[:, None], table.columns, **rows)
        found.append(mean[:, 0].sigmoid())
    again = measure(found, [example.targets for example in split.examples], split.answers, report["plan"]["gamma"])
    assert again == {name: value and pytest.approx(value, rel=0.01, abs=2e-3) for name, value in measured.items()}


def test_a_trunk_learns_lengths_that_a_token_tells(lenvm, base, tmp_path):
    """Answers of 4 tokens begin with w5 and those of 16 with w6; the rest of them is the same word."""
    answers, kinds = tmp_path / "answers", ([11, *[10] * 14, EOS], [9, *[10] * 2, EOS])
    found = [(i, sample, kinds[(i + sample) % 2]) for i in range(16) for sample in range(4)]
    store_answers(answers, base, [[7 + i, 8] for i in range(16)], lambda i: i >= 12, found)
    command = ("fit", base, "--answers", answers, "--output", tmp_path / "fitted")
    succeeds(lenvm, *command, "--epochs", 60, "--batch-tokens", 32)
    found = report_of(tmp_path / "fitted")["test"][str(answers)]
    assert found["trunk"]["r2"] > 0.7 > 0.1 > found["constant"]["r2"]
    # Two answers to a prompt are told apart at the same position: the candidate's embedding says which it is.
    assert found["trunk"]["correlation_at_a_position"] > 0.8


def test_a_trunk_needs_answers_to_learn_from(lenvm, base, tmp_path):
    """Of the training prompts there is one of a single token, and one that only chooses the epoch."""
    answers = [(0, 0, [9, EOS]), (3, 0, [EOS]), (19, 0, [9, EOS])]
    store_answers(tmp_path / "answers", base, [[7, 8]] * 20, lambda i: i == 0, answers)
    error = refused(lenvm, "fit", base, "--answers", tmp_path / "answers", "--output", tmp_path / "fitted")
    assert "--answers must have answers to training prompts, got none of two tokens or more" in error


def test_two_rounds_of_a_trunk(lenvm, base, prompts, tmp_path):
    """``lenvm train --kind trunk`` end to end: the first round's trunk guides the second round's answers."""
    folder = tmp_path / "trained"
    command = ("train", base, "--prompts", prompts, "--output", folder, *COLLECT)
    command += ("--targets", 3, 12, "--batch-tokens", 40)
    out = succeeds(lenvm, *command, "--evaluate-prompts", 2)
    first, second = reports_of(folder)
    assert list(second["guided"].values()) == [False, True]
    assert second["training"]["states"] > first["training"]["states"] > 100
    assert is_trunk(folder / "value") and "round 2:" in out and "Target 14 tokens" in out
    out = succeeds(lenvm, *command, "--dry-run", "--layers", 1)
    assert "trunk: " in out and len(costs_of(out)) == 4


def test_ctrl_c_and_a_kill_go_on_to_the_same_bits(lenvm, answers, base, tmp_path, monkeypatch):
    def command(folder):
        return ("fit", base, "--answers", answers, "--output", tmp_path / folder, *FIT)

    assert lenvm(*command("whole"))[0] == 0
    step, done = fit.Training._step, []

    def pressed(self, number):
        done.append(number)
        if len(done) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        if len(done) == 6:
            raise RuntimeError("killed")
        return step(self, number)

    monkeypatch.setattr(fit.Training, "_step", pressed)
    assert lenvm(*command("part"))[0] == 130
    assert (tmp_path / "part" / "state.pt").exists() and done == [0, 1, 2]
    with pytest.raises(RuntimeError, match="killed"):  # what has not been written is done again
        lenvm(*command("part"))
    assert done == [0, 1, 2, 3, 4, 5]
    assert lenvm(*command("part"))[0] == 0
    assert done[6] == 3
    for name in ("adapter/adapter_model.safetensors", "adapter/value_head.safetensors", "value/model.safetensors"):
        found, wanted = (load_file(tmp_path / folder / name) for folder in ("part", "whole"))
        assert found.keys() == wanted.keys() and all(torch.equal(found[key], wanted[key]) for key in wanted)
    again = len(done)
    assert lenvm(*command("part"))[0] == 0 and len(done) == again  # it is there
    assert "--output must be a new directory" in refused(lenvm, *command("part"), "--epochs", 3)


def test_two_processes_train_what_one_trains(lenvm, answers, base, tmp_path):
    """Forwards of a step are dealt out, where there are enough; gradients are added."""

    def arguments(folder):
        options = ("--batch-tokens", 100, "--forward-tokens", 40, "--save-seconds", 0.001)
        command = ("fit", base, "--answers", answers, "--output", tmp_path / folder, *FIT, *options, "--device", "cpu")
        return list(map(str, command))

    assert cli.main(arguments("one")) == 0
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        "-m",
        "lenvm_kernels.cli",
    ]
    run = subprocess.run(launcher + arguments("two"), capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("held-out answers") == 1
    for name in ("adapter_model", "value_head"):
        one, two = (load_file(tmp_path / folder / "adapter" / f"{name}.safetensors") for folder in ("one", "two"))
        for key, tensor in one.items():
            torch.testing.assert_close(two[key], tensor, rtol=1e-2, atol=1e-4)
    one, two = (report_of(tmp_path / folder) for folder in ("one", "two"))
    assert one["training"] == two["training"]
    found, wanted = (of["test"][str(answers)]["value model"] for of in (one, two))
    assert found == {name: value and pytest.approx(value, rel=0.01, abs=1e-3) for name, value in wanted.items()}


def test_a_state_of_another_training_is_refused(lenvm, answers, base, tmp_path, monkeypatch):
    command = ("fit", base, "--answers", answers, "--output", tmp_path, *FIT)
    monkeypatch.setattr(fit.Training, "_step", lambda *_: os.kill(os.getpid(), signal.SIGINT) or 0.5)
    assert lenvm(*command)[0] == 130
    assert "state.pt' differs in gamma, schedule" in refused(lenvm, *command, "--seed", 4, "--gamma", "0.5")


def test_a_loss_that_is_no_number_keeps_the_last_good_state(lenvm, answers, base, tmp_path, monkeypatch):
    saved = torch.tensor(0.0)
    step = fit.Training._step

    def breaks(self, number):
        if number == 2:
            self._save()
            saved.copy_(self._network.head.fc.weight.sum())
        if number == 3:
            self._network.head.summary.bias.data.fill_(torch.nan)
        return step(self, number)

    monkeypatch.setattr(fit.Training, "_step", breaks)
    error = refused(lenvm, "fit", base, "--answers", answers, "--output", tmp_path, *FIT)
    assert "the loss of step 4 is nan" in error and "--learning-rate" in error
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert len(state["losses"]) == 2 and torch.equal(state["trained"]["head.fc.weight"].sum(), saved)
    assert not (tmp_path / "value").exists()


def test_a_full_disk_leaves_the_state_that_was_there(lenvm, answers, base, tmp_path, monkeypatch):
    save, step = torch.save, fit.Training._step

    def full(content, file):
        if file.parent.joinpath("state.pt").exists():
            file.write_bytes(b"half")
            raise RuntimeError("PytorchStreamWriter failed writing file: No space left on device")
        save(content, file)

    def saves(self, number):
        if number:
            self._save()
        return step(self, number)

    monkeypatch.setattr(torch, "save", full)
    monkeypatch.setattr(fit.Training, "_step", saves)
    error = refused(lenvm, "fit", base, "--answers", answers, "--output", tmp_path, *FIT)
    assert "state.new could not be written" in error and "No space left" in error
    assert len(torch.load(tmp_path / "state.pt", weights_only=True)["losses"]) == 1
    assert not (tmp_path / "state.new").exists()


def test_two_rounds_from_prompts_to_a_guided_server(lenvm, base, prompts, tmp_path):
    """``lenvm train`` end to end, and what it leaves answers through ``lenvm serve`` and ``generate``."""
    folder = tmp_path / "trained"
    command = ("train", base, "--prompts", prompts, "--output", folder, *COLLECT, *FIT, "--targets", 3, 12)
    command += ("--guided-answers-per-prompt", 2)
    out = succeeds(lenvm, *command, "--evaluate-prompts", 2)
    first, second = reports_of(folder)
    assert list(second["guided"].values()) == [False, True]
    assert [list(found) for found in second["test"].values()] == [["constant", "initial", "value model"]] * 2
    plain = str(folder / "round-1" / "answers")
    errors = second["test"][plain]["initial"]["mse"], first["test"][plain]["value model"]["mse"]
    assert errors[0] == pytest.approx(errors[1], rel=0.05)
    assert second["plan"]["initial"] == str(folder / "round-1" / "adapter")
    assert second["plan"]["gamma"] == first["plan"]["gamma"]
    guided = [line for line in lines_of(folder / "round-2" / "answers") if line["prompt"] < 9]
    learned = sum(len(line["ids"]) > line["guided"] for line in guided)
    assert first["training"]["answers"] == 27 and len(guided) == 18 and learned < 18
    assert second["training"]["answers"] == 27 + learned
    assert {line["target"] for line in lines_of(folder / "round-2" / "answers")} <= set(range(3, 13))
    assert "round 2:" in out and "Target 14 tokens" in out
    assert (folder / "evaluation" / "table.md").exists()
    before = {file: file.stat().st_mtime_ns for file in folder.rglob("*.safetensors")}
    succeeds(lenvm, *command, "--evaluate-prompts", 2)  # nothing is made twice
    assert before == {file: file.stat().st_mtime_ns for file in folder.rglob("*.safetensors")}

    models = Models.load(base, str(folder / "value"), device="cpu", dtype=torch.float32)
    inputs = models.encode(TEXTS[:4])
    found = []
    for target in (4, 16):
        torch.manual_seed(0)
        options = dict(max_new_tokens=40, target_length=target, temperature=1.0, top_k=0)
        answered = lenvm_kernels.generate(models.model, **inputs, value_model=models.value_model, **options)
        new = answered[:, inputs["input_ids"].shape[1] :].tolist()
        found.append(sum(row.index(EOS) + 1 if EOS in row else 40 for row in new) / 4)
    assert abs(found[0] - 4) < 3 and abs(found[1] - 16) < 6


def test_all_weights_in_two_rounds(lenvm, base, prompts, tmp_path):
    options = (*OF_VALUE_MODEL, "--full", "--batch-tokens", 100, "--evaluate-prompts", 0, "--targets", 3, 12)
    succeeds(lenvm, "train", base, "--prompts", prompts, "--output", tmp_path / "t", *COLLECT, *options)
    first, second = reports_of(tmp_path / "t")
    assert first["plan"]["initial"] is None and first["plan"]["schedule"]["learning_rate"] == 2e-5
    assert second["plan"]["initial"] == second["plan"]["backbone"] == str(tmp_path / "t" / "round-1" / "value")
    assert second["plan"]["gamma"] == first["plan"]["gamma"]
    weights = [load_file(tmp_path / "t" / f"round-{i}" / "value" / "model.safetensors") for i in (1, 2)]
    assert weights[0].keys() == weights[1].keys()
    # At such a learning rate the second round goes on from where the first one ended.
    for name in ("v_head.fc.weight", "model.layers.0.mlp.up_proj.weight"):
        first, second = (of[name].float() for of in weights)
        assert 0 < (first - second).abs().max() < 0.1 * first.abs().max()


def costs_of(out):
    """Rows of the table that a dry run prints, all of whose costs are above 0."""
    rows = [line.split("|") for line in out.splitlines() if "round" in line and line.startswith("|")]
    assert all(float(cell) > 0 for row in rows for cell in row[2:5])
    return rows


def test_a_dry_run_prints_costs_and_does_nothing(lenvm, base, prompts, tmp_path):
    command = ("train", base, "--prompts", prompts, "--output", tmp_path / "t", *COLLECT, *FIT, "--dry-run")
    rows = costs_of(succeeds(lenvm, *command, "--guided-answers-per-prompt", 2))
    assert not (tmp_path / "t").exists()
    assert [row[1].strip() for row in rows] == [f"{stage}, round {i}" for i in (1, 2) for stage in ("collect", "fit")]
    assert float(rows[0][2]) == 12 * 3 * 14 and float(rows[2][2]) == 12 * 2 * 14
    prompt_tokens = sum(2 + len(text.split()) for text in TEXTS)
    assert float(rows[1][2]) == pytest.approx(2 * (12 * 3 * 14 + prompt_tokens) * 9 / 12, rel=0.01)


def test_a_dry_run_of_other_bases(lenvm, base, prompts, tmp_path):
    """A trunk beside a mixture of experts, and beside a model of other names; a value model is of dense ones."""
    other, sizes = checkpoint(tmp_path / "other", seed=1), TINY | {"vocab_size": len(WORDS)}
    command = ("train", other, "--prompts", prompts, "--output", tmp_path / "t", *COLLECT, "--dry-run")
    GPT2Config(**sizes).save_pretrained(other)
    assert len(costs_of(succeeds(lenvm, *command))) == 4
    MambaConfig(**sizes).save_pretrained(other)
    error = refused(lenvm, *command)
    assert "BASE must be a language model that transformers runs without weights for --dry-run, got" in error
    Qwen3MoeConfig(**sizes, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24).save_pretrained(other)
    assert len(costs_of(succeeds(lenvm, *command))) == 4
    rows = costs_of(succeeds(lenvm, *command, *FIT, "--backbone", base))
    assert float(rows[0][3]) == pytest.approx(12 * 3 * 14 * cost.model_cost(Path(other), None, 40).forward, rel=0.01)
    error = refused(lenvm, *command, *OF_VALUE_MODEL)
    assert "--backbone must be of an architecture that the value model runs (--kind trunk is for every base" in error
    assert "llama" in error and "got 'qwen3_moe'" in error and not (tmp_path / "t").exists()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--full"], "--full must not be given with --kind trunk, only with --kind value-model"),
        (["--head-learning-rate", "0.1"], "--head-learning-rate must not be given with --kind trunk"),
        (["--adapters", "2"], "--adapters must not be given with --kind trunk"),
        (["--backbone", "demo"], "--backbone must be base with --kind trunk, got 'demo'"),
        (["--epochs", "0"], "--epochs must be at least 1 with --kind trunk, got 0"),
        (["--layers", "3"], "--layers must be at most the 1 layers of"),
        (["--gamma", "2"], "--gamma must be auto or a number in (0, 1), got '2'"),
        ([*OF_VALUE_MODEL, "--targets", "9", "4"], "--targets must be LOW <= HIGH"),
        ([*OF_VALUE_MODEL, "--targets", "15", "40"], "with LOW at most --max-new-tokens, got 15 40"),
        ([*OF_VALUE_MODEL, "--held-out", "1.5"], "--held-out must be a share in (0, 1), got 1.5"),
        ([*OF_VALUE_MODEL, "--gamma", "1.5"], "--gamma must be auto or a number in (0, 1), got '1.5'"),
        ([*OF_VALUE_MODEL, "--gamma", "much"], "--gamma must be auto or a number in (0, 1), got 'much'"),
        ([*OF_VALUE_MODEL, "--epochs", "-1"], "--epochs must be at least 0, got -1"),
        ([*OF_VALUE_MODEL, "--first-layer", "-1"], "--first-layer must be at least 0"),
        ([*OF_VALUE_MODEL, "--first-layer", "1"], "--first-layer must be below the 1 layers"),
        ([*OF_VALUE_MODEL, "--backbone", "nowhere"], "--backbone must be a directory with config.json"),
        ([*OF_VALUE_MODEL, "--evaluate-prompts", "-1"], "--evaluate-prompts must be at least 0"),
        ([*OF_VALUE_MODEL, "--full", "--adapters", "4"], "not allowed with argument"),
        (
            [*OF_VALUE_MODEL, "--layers", "1"],
            "--layers must not be given with --kind value-model, only with --kind trunk",
        ),
        ([*OF_VALUE_MODEL, "--states", "9"], "--states must not be given with --kind value-model"),
        ([*OF_VALUE_MODEL, "--device", "meta"], "--device must be cpu or cuda where something is trained, got 'meta'"),
        ([*OF_VALUE_MODEL, "--dtype", "float16"], "--dtype must be float32 or bfloat16"),
        ([*OF_VALUE_MODEL, "--num-prompts", "0"], "--num-prompts"),
    ],
)
def test_bad_flags_are_named_before_anything_is_sampled(lenvm, base, prompts, tmp_path, options, named):
    error = refused(lenvm, "train", base, "--prompts", prompts, "--output", tmp_path / "t", *COLLECT, *options)
    assert named in error and len(error.splitlines()) == 1
    assert not (tmp_path / "t").exists()


def test_bad_models_are_named_before_anything_is_sampled(lenvm, base, prompts, tmp_path, monkeypatch):
    monkeypatch.setattr(collect, "collect", None)
    out = ("--output", tmp_path / "t")
    other = checkpoint(tmp_path / "other", seed=1, words=[*WORDS[:-1], "else"])
    of_other = ("train", base, *OF_VALUE_MODEL, "--backbone", other, "--prompts", prompts, *out)
    assert "--backbone must share the vocabulary" in refused(lenvm, *of_other)
    save_checkpoint(tmp_path / "bare", seed=1)
    error = refused(lenvm, "train", tmp_path / "bare", "--prompts", prompts, *out)
    assert "BASE must have a chat template" in error and "--plain-prompts" in error
    config = tmp_path / "other" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "gemma"}))
    error = refused(lenvm, *of_other)
    assert "--backbone must be of an architecture that the value model runs" in error and "gemma" in error
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "w1"}\n{"prompt"\n')
    assert f"{bad}, line 2" in refused(lenvm, "train", base, "--prompts", bad, *out)
    assert not out[1].exists()


def test_answers_that_do_not_fit_are_named(lenvm, answers, base, tmp_path):
    other = checkpoint(tmp_path / "other", seed=1, words=[*WORDS[:-1], "else"])
    error = refused(lenvm, "fit", other, "--answers", answers, "--output", tmp_path / "o")
    assert "BASE must have the vocabulary of the base model" in error and str(answers) in error
    error = refused(lenvm, "fit", base, "--answers", tmp_path, "--output", tmp_path / "o")
    assert "--answers must be directories that lenvm collect has written" in error
    succeeds(lenvm, "fit", base, "--answers", answers, "--output", tmp_path / "two", *FIT)
    initial = ("--initial", tmp_path / "two" / "adapter", "--adapters", 3)
    error = refused(lenvm, "fit", base, "--answers", answers, "--output", tmp_path / "o", *FIT, *initial)
    assert "--initial must hold adapters of the same layers and rank" in error
