"""``lenvm evaluate``: measures computed by hand, answers in process and from servers, and resumption."""

import itertools
import json
import math
import re

import matplotlib.image
import numpy as np
import pytest
import torch

from lenvm_kernels.evaluate import run
from lenvm_kernels.evaluate.measures import Answer, bootstrap, calibrate, measure, pearson, ranks, repeated_4grams
from lenvm_kernels.evaluate.servers import Server
from lenvm_kernels.loading.models import Models
from tests.helpers.fake_engine import answer_to, fake_engines, request_of
from tests.helpers.models import EOS, last_value_logits, random_head

PROMPTS = ["w1 w2 w3", "w4", "w5 w6", "w7 w8 w9 w1", "w3 w3"]


@pytest.fixture(scope="module")
def tiny(base):
    return Models.load(base, "none", device="cpu", dtype=torch.float32)


@pytest.fixture
def evaluate(base, value, tmp_path, lenvm):
    """Run the command on tiny models and few prompts; returns the directory and stderr."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))

    def start(*argv, code=0, value=value, targets=(4, 7)):
        arguments = ["evaluate", base, value, "--prompts", prompts, "--targets", *targets, "--seeds", 0, 3, "--rows", 2]
        found, _, error = lenvm(*arguments, "--device", "cpu", "--output", tmp_path / "out", *argv)
        assert found == code, error
        return tmp_path / "out", error

    return start


@torch.no_grad()
def plain_nll(models, prompt, ids):
    """Negative log-likelihoods of tokens after a prompt, from a forward without padding."""
    logits = models.model(torch.tensor([[*prompt, *ids]])).logits[0].double()
    log_p = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
    return pytest.approx([-row[token].item() for row, token in zip(log_p, ids, strict=True)], abs=2e-4)


def lines_of(folder):
    return [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]


def scores_of(folder):
    return json.loads((folder / "result.json").read_text())["scores"]


def answer(prompt, seed, ids, text="", ended=True, nats=1.0):
    return Answer("x", 10, seed, prompt, ids, text, ended, [nats] * len(ids))


ANSWERS = [
    answer(4, 0, list(range(20, 29)), "So it is. ", nats=0.5),
    answer(4, 1, [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2, 3, 9], "So it is.", ended=False, nats=2.0),
    answer(0, 0, [7, EOS], "no", nats=3.0),
    answer(0, 1, [*range(9), EOS], 'a "b!"', nats=0.25),
    answer(2, 0, list(range(30, 42)), "x, y", nats=1.5),
    answer(2, 1, list(range(30, 42)), "x, y", nats=1.5),
]


def test_measures_by_hand():
    measures = measure(ANSWERS, 10)  # lengths 9, 14, 2, 10, 12, 12
    assert measures["answers"] == 6
    assert measures["quartiles"] == [9.25, 11.0, 12.0]
    expected = {
        "mean": 59 / 6,
        "distance": 17 / 6,
        "within_10": 2 / 6,
        "within_25": 4 / 6,
        "too_short": 1 / 6,
        "cut": 1 / 6,
        "length_score": 100 * (math.exp(-0.5) + math.exp(-0.8) + math.exp(-4) + 1 + 2 * math.exp(-0.4)) / 6,
        "length_deviation": -1 / 60,
        "relative_error": 17 / 60,
        "perplexity": math.exp((4.5 + 28 + 6 + 2.5 + 18 + 18) / 59),
        "repetition": 5 / (6 + 11 + 0 + 7 + 9 + 9),  # 1234 2345 3451 4512 5123 are new; then 5 repeated ones and 1239
        "sentence_ends": 2 / 5,
        "distinct": 5 / 6,
    }
    assert expected.keys() == measures.keys() - {"answers", "quartiles", "intervals"}
    assert {name: measures[name] for name in expected} == pytest.approx(expected, rel=1e-12)
    low, high = measures["intervals"]["distance"]
    assert low == pytest.approx(2.0) and high == pytest.approx(4.0)  # only prompt 2 is drawn, or only prompt 0
    assert measure(ANSWERS[::-1], 10)["intervals"] == measures["intervals"]


def test_measures_with_denominator_0_are_none():
    scores = measure([answer(0, 0, [5, 6], ended=False)], 3)
    assert scores["repetition"] is None and scores["sentence_ends"] is None
    assert scores["intervals"]["sentence_ends"] is None and scores["intervals"]["distance"] == [1.0, 1.0]
    assert [repeated_4grams(ids) for ids in ([1] * 6, [1, 2, 3])] == [(2, 3), (0, 0)]
    assert measure([answer(0, 0, [5]), answer(1, 0, [5])], 3)["distinct"] == 1.0  # the same text for two prompts


def test_statistics():
    above, below = np.array([0.0, 40.0]), np.array([40.0, 40.0])
    assert bootstrap(above, below) == (0.0, 1.0)  # prompts are drawn; drawing 80 answers would give about 0.5
    above, below = np.array([3.0, 1.0, 9.0, 2.0, 5.0]), np.array([4.0, 1.0, 5.0, 0.0, 7.0])
    draws = np.random.default_rng(0).multinomial(5, [0.2] * 5, size=1000)
    ratios = [draw @ above / (draw @ below) for draw in draws if draw @ below]
    assert bootstrap(above, below) == bootstrap(above, below) == pytest.approx(np.percentile(ratios, (2.5, 97.5)))
    assert ranks(torch.tensor([30.0, 10.0, 30.0, 20.0])).tolist() == [3.5, 1.0, 3.5, 2.0]
    x = torch.tensor([1.0, 2.0, 4.0])
    assert [pearson(x, y) for y in (3 - 2 * x, torch.full((3,), 0.1))] == [pytest.approx(-1.0), None]


def test_cut_answer_has_not_ended():
    whole = answer(0, 0, [4, 5, 6, EOS], "a.", nats=2.0)
    assert whole.cut(4) is whole
    assert whole.cut(3) == Answer("x", 10, 0, 0, [4, 5, 6], "a.", False, [2.0] * 3)


def predictions(*numbers):
    """Answers with (predicted, actual) lengths; answers above 30 tokens were cut."""
    return [Answer("none", None, 0, i, [5] * n, "", n <= 30, [1.0] * n, p) for i, (p, n) in enumerate(numbers)]


def test_calibration_by_hand():
    calibration = calibrate(predictions((30.0, 20), (10.0, 5), (None, 9), (20.0, 25), (10.0, 15), (30.0, 40)))
    assert calibration.pop("bins") == [
        {"answers": 2, "predicted": 10.0, "actual": 10.0, "ratio": 1.0, "cut": 0.0},
        {"answers": 1, "predicted": 20.0, "actual": 25.0, "ratio": 0.8, "cut": 0.0},
        {"answers": 2, "predicted": 30.0, "actual": 30.0, "ratio": 1.0, "cut": 0.5},
    ]
    relative = (10 / 20 + 5 / 5 + 5 / 25 + 5 / 15 + 10 / 40) / 5
    expected = {"answers": 5, "left_out": 1, "cut": 0.2, "rank_correlation": 7.5 / 90**0.5, "mae_tokens": 7.0}
    assert calibration == pytest.approx(expected | {"mean_relative_error": relative})
    assert calibrate(predictions((None, 3))) is None
    bins = calibrate(predictions(*((float(7 * i % 23), i + 1) for i in range(23))))["bins"]
    assert sorted(one["answers"] for one in bins) == [2] * 7 + [3] * 3
    assert (bins[0]["predicted"], bins[-1]["predicted"]) == (0.5, 21.5)
    bins = calibrate(predictions(*((3.0, i + 1) for i in range(9)), (7.0, 1), (6.0, 2), (5.0, 4)))["bins"]
    assert [(one["answers"], one["predicted"]) for one in bins] == [(9, 3.0), (3, 6.0)]


def test_answers_numbers_tables_and_plot(evaluate, tiny, value):
    folder, error = evaluate("--max-new-tokens", 24)
    versions = json.loads((folder / "result.json").read_text())["versions"]
    assert "50/50" in error and versions.keys() == {"lenvm_kernels", "python", "torch", "transformers", "numpy"}
    lines, names = lines_of(folder), ["none", "guided", "constant"]
    assert list(dict.fromkeys(line["setting"] for line in lines)) == names
    assert len(lines) == 5 * 2 * (1 + 2 * 2)  # prompts, seeds, settings: the base once, two settings at two targets
    for target, limit in ((4, 16), (7, 24)):
        scores = scores_of(folder)[str(target)]
        assert list(scores) == ["none", "hard cut", "constant", "guided"]
        for name, score in scores.items():
            setting, most = ("none", target) if name == "hard cut" else (name, limit)
            found = [x for x in lines if x["setting"] == setting and x["target"] in (None, target)]
            assert len(found) == 10 and score == measure([Answer(**line).cut(most) for line in found], target)
    for line in lines:
        assert line["ended"] == (line["ids"][-1] == EOS) and EOS not in line["ids"][:-1]
        assert line["text"] == tiny.tokenizer.decode(line["ids"], skip_special_tokens=True)
    assert {line["ended"] for line in lines} == {True, False}
    table, score = (folder / "table.md").read_text(), scores_of(folder)["7"]["none"]
    assert "Target 4 tokens, 5 prompts, 2 seeds, at most 16 tokens" in table and "| distinct % |\n" in table
    row = next(line for line in table.split("Target 7")[1].splitlines() if line.startswith("| none |"))
    cells = [cell.strip().split(" ")[0] for cell in row.strip("|").split("|")]
    assert cells[2:4] == [f"{score['mean']:.1f}", f"{score['distance']:.1f}"]
    shares = [score[name] for name in ("within_10", "within_25", "too_short", "cut")]
    assert cells[4:8] == [f"{100 * share:.0f}" for share in shares]
    assert cells[11:13] == [f"{score['perplexity']:.2f}", f"{100 * score['repetition']:.1f}"]
    model = Models.load(value, "none", device="cpu", dtype=torch.float32).model
    z = last_value_logits(model, random_head(), [tiny.tokenizer(prompt)["input_ids"] for prompt in PROMPTS])
    lengths = (torch.nn.functional.softplus(z) / -math.log(0.997)).tolist()
    own = [line for line in lines if line["setting"] == "none"]
    assert [line["predicted"] for line in own] == pytest.approx([lengths[line["prompt"]] for line in own], abs=0.01)
    assert {line["predicted"] for line in lines if line["setting"] != "none"} == {None}
    first = sum(len(line["ids"]) for line in own if lengths[line["prompt"]] == min(lengths)) / 2
    assert f"| 1 | 2 | {min(lengths):.1f} | {first:.1f} |" in table
    assert matplotlib.image.imread(folder / "lengths.png").std() > 0


def test_killed_run_is_resumed_with_the_same_answers(evaluate, monkeypatch):
    folder, _ = evaluate()
    answers, whole = folder / "answers.jsonl", (folder / "answers.jsonl").read_bytes()
    result = json.loads((folder / "result.json").read_text())
    lines = whole.splitlines(keepends=True)
    # Six batches of two answers are left, and one line and part of another from the next batch.
    answers.write_bytes(b"".join(lines[:13]) + lines[13][:30])
    evaluate()
    assert answers.read_bytes() == whole
    again = json.loads((folder / "result.json").read_text())
    assert all(again[name] == result[name] for name in ("scores", "calibration"))
    monkeypatch.setattr(run, "answer", None)  # all answers exist
    without = [re.sub(', "predicted": .*}', "}", line.decode()) for line in lines[:6]]
    answers.write_text("".join(without) + b"".join(lines[6:]).decode())
    evaluate()
    assert "of 4 answers of the base model (6 others have no prediction)" in (folder / "table.md").read_text()
    for argv, message in (
        (["--min-p", 0.1, "--targets", 30], "differs in max_new_tokens, sampling, targets"),
        (["--say-it"], "differs in say_it, settings"),
    ):
        refusal = f"--output must be a new directory or one with the same plan, {str(folder)!r} {message}"
        assert refusal in evaluate(*argv, code=2)[1]
    answers.write_bytes(b'{"setting": "none"}\n' + whole)
    assert "answers.jsonl, line 1 must be an answer of lenvm evaluate" in evaluate(code=2)[1]
    (folder / "plan.json").unlink()
    assert "must have plan.json next to answers.jsonl" in evaluate(code=2)[1]


# Prompts solved with seeds 3 and 0, by setting and target. "hard cut": the base model's answers cut at 4 tokens.
SOLVED = {"none None": ({0, 2}, {0, 1, 4}), "hard cut 4": ({1}, {1, 3}), "constant 4": (set(), set())}
SOLVED |= {"guided 4": ({1, 2, 4}, {1}), "constant 7": ({0, 1, 2, 3, 4}, set()), "guided 7": (set(), {2})}
# acc_first and acc_any times five prompts; the first seed is 3.
ACCURACIES = {"4 none": (2, 4), "4 hard cut": (1, 2), "4 constant": (0, 0), "4 guided": (3, 3)}
ACCURACIES |= {"7 none": (2, 4), "7 hard cut": (2, 4), "7 constant": (5, 5), "7 guided": (0, 1)}


def test_accuracies_from_the_tokens_of_answers(evaluate, tmp_path):
    file = tmp_path / "problems.jsonl"
    lines = [{"question": text, "answer": f"So it is.\n#### {30 + i}"} for i, text in enumerate(PROMPTS)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--prompts", file, "--seeds", 3, 0]
    folder, _ = evaluate(*options)
    planted = lines_of(folder)
    for line in planted:
        # The last word is 30 + prompt if the prompt is solved, as is the fourth word of base answers cut at 4 tokens.
        key, column = f"{line['setting']} {line['target']}", int(line["seed"] == 0)
        ids = [13, 14, 15, 16, 17, 18]  # w10 to w15
        solved = {5: SOLVED[key], 3: SOLVED["hard cut 4"] if line["target"] is None else (set(), set())}
        for place, prompts in solved.items():
            if line["prompt"] in prompts[column]:
                ids[place] = 3 + 30 + line["prompt"]
        line |= {"ids": ids, "text": "w10", "ended": False, "nll": [1.0] * 6}
    (folder / "answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in planted))
    evaluate(*options, "--answer-regex", r"w(\d+)")
    scores = {f"{target} {name}": score for target, view in scores_of(folder).items() for name, score in view.items()}
    assert {key: (5 * score["acc_first"], 5 * score["acc_any"]) for key, score in scores.items()} == ACCURACIES
    intervals, hits = scores["4 none"]["intervals"], {"acc_first": [1.0, 0, 1, 0, 0], "acc_any": [1.0, 1, 1, 0, 1]}
    assert all(intervals[name] == list(bootstrap(np.array(row), np.ones(5))) for name, row in hits.items())
    assert matplotlib.image.imread(folder / "accuracy.png").std() > 0
    table, (low, high) = (folder / "table.md").read_text(), intervals["acc_any"]
    assert table.count("| acc_first % | acc_any % |\n") == 2
    assert f"| 80 [{100 * low:.0f}, {100 * high:.0f}] |\n" in table
    evaluate(*options, "--answer-regex", "no such")
    assert scores_of(folder)["7"]["constant"]["acc_any"] == 0
    file.write_text("".join(json.dumps(line | {"answer": 31}) + "\n" for line in lines))
    assert "differs in answers" in evaluate(*options, code=2)[1]


@pytest.fixture
def served():
    """Start a fake server, given the name of its engine."""
    with fake_engines() as start:
        yield start


SAMPLING = {"temperature": 0.8, "top_k": 0, "top_p": 1.0, "min_p": 0.02}
GUIDANCE = {"strength": 7, "token_temperature_scale": {"5": 1.5}, "end_token_ids": [[3, 9], 4]}
AS_TEXT = {"strength": 7, "token_temperature_scale": '{"5": 1.5}', "end_token_ids": "[[3, 9], 4]"}


@pytest.mark.parametrize("guidance", [None, GUIDANCE, {"return_values": True}])
@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_request_and_answer_of_a_server(served, engine, guidance):
    server, url = served(engine)
    answers = (11, [EOS], ([9, 9, 9, EOS], True)), (11, [EOS, 9], ([9], True)), (6, [EOS], ([11] * 5, False))
    for seed, ends, expected in answers:
        options = dict(max_new_tokens=5, sampling=SAMPLING, seed=seed, eos=ends)
        found = Server.find("--url", url + "/").answer([8, 9], guidance, **options)
        predicted = 2.5 if engine == "sglang" and guidance == {"return_values": True} else None
        assert found == (*expected, predicted)
        path, body = server.requests.pop()
        if engine == "sglang":
            params = SAMPLING | {"top_k": -1, "max_new_tokens": 5, "sampling_seed": seed}
            params |= {} if guidance is None else {"custom_params": guidance}
            assert (path, body) == ("/generate", {"input_ids": [8, 9], "sampling_params": params})
        else:
            params = SAMPLING | {"prompt": [8, 9], "max_tokens": 5, "seed": seed, "return_token_ids": True}
            params |= {} if guidance is None else {"vllm_xargs": AS_TEXT if guidance is GUIDANCE else guidance}
            assert (path, body) == ("/v1/completions", params)


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_answers_come_from_a_server(evaluate, served, tiny, engine):
    server, url = served(engine)
    constant_server, constant_url = served("vllm")
    options = ["--url", url, "--guidance", '{"strength": 7}', "--max-new-tokens", 6, "--top-k", 5]
    options += ["--constant-url", constant_url] if engine == "sglang" else []  # vLLM: in this process
    folder, _ = evaluate(*options, value="of-the-server", targets=[4])
    expected = []
    for _, body in server.requests:
        prompt, limit, seed, guidance = request_of(body)
        assert body.get("sampling_params", body).items() >= (SAMPLING | {"top_k": 5}).items()
        is_guided = guidance == {"target_length": 4, "strength": 7}
        assert limit == 6 and (is_guided or guidance == ({"return_values": True} if engine == "sglang" else {}))
        predicted = len(prompt) + 0.5 if engine == "sglang" and not is_guided else None
        expected.append((prompt, '{"strength": 7}' if is_guided else "none", *answer_to(seed, limit), predicted))
    assert len({request_of(body)[2] for _, body in server.requests}) == 20
    found = []
    for line in lines_of(folder):
        if line["setting"] != "constant":
            prompt = tiny.tokenizer(PROMPTS[line["prompt"]])["input_ids"]
            found.append((prompt, line["setting"], line["ids"], line["ended"], line["predicted"]))
            assert line["nll"] == plain_nll(tiny, prompt, line["ids"])
    assert sorted(map(str, found)) == sorted(map(str, expected)) and len(found) == 20
    left_out = "has a predicted length: vLLM returns none" in (folder / "table.md").read_text()
    assert left_out == (engine == "vllm")
    constant = [body["vllm_xargs"] for _, body in constant_server.requests]
    assert constant == [{"target_length": 4}] * (10 if engine == "sglang" else 0)


@pytest.mark.parametrize("engine", [None, "sglang"])
def test_said_settings_put_each_target_into_the_prompt(evaluate, served, tiny, engine):
    """Without a server, there is also no value model, so the default guidance is the constant baseline."""
    (server, url), guided = served("sglang"), "guided" if engine else '{"gamma": 0.9, "strength": 2}'
    options = ["--url", url, "--constant-url", url] if engine else ["--guidance", '{"strength": 2, "gamma": 0.9}', "{}"]
    options += ["--num-prompts", 2, "--say-it", "w{words} w{tokens}", "--temperature", 0]
    chosen = dict(targets=[3, 30]) if engine else dict(targets=[3, 30], value="none")
    folder, _ = evaluate(*options, **chosen)
    lines, names = lines_of(folder), ["constant", guided, "none, said", "constant, said", f"{guided}, said"]
    settings = json.loads((folder / "plan.json").read_text())["settings"]
    assert [setting["name"] for setting in settings] == ["none", *names]
    counts = {"none": 4, **dict.fromkeys(names, 8)}
    assert {name: sum(line["setting"] == name for line in lines) for name in counts} == counts and len(lines) == 44
    assert {line["target"] for line in lines if line["setting"] == "none, said"} == {3, 30}
    asked = []
    for line in lines:
        said = {3: "\n\nw5 w3", 30: "\n\nw20 w30"}[line["target"]] if line["setting"].endswith("said") else ""
        prompt = tiny.tokenizer([PROMPTS[0], PROMPTS[2]][line["prompt"]] + said)["input_ids"]
        asked.append((prompt, {None: 80, 3: 16, 30: 80}[line["target"]]))
        assert line["nll"] == plain_nll(tiny, prompt, line["ids"]) and len(line["ids"]) <= asked[-1][1]
    assert sorted(request_of(body)[:2] for _, body in server.requests) == (sorted(asked) if engine else [])
    assert list(scores_of(folder)["30"]) == ["none", "hard cut", *list(counts)[1:]]
    answers = {(line["setting"], line["target"], line["prompt"], *line["ids"]) for line in lines}
    assert engine or len(answers) == 22  # equal for both seeds
    evaluate(*options, **chosen)
    assert len(server.requests) == (0 if engine is None else 44)


def test_tokens_are_shown_while_a_batch_is_decoded(evaluate, monkeypatch):
    monkeypatch.setattr("tqdm.std.time", itertools.count().__next__)  # a bar is drawn once a second
    folder, error = evaluate()
    answers = [line["ids"] for line in lines_of(folder)]
    shown = [(int(n), int(t)) for n, t in re.findall(r" (\d+)/\d+ \[[^\]]*, (\d+) tokens, [\d.]+ tokens/s\]", error)]
    assert len([tokens for done, tokens in shown if done == 0]) > 3
    assert shown[-1] == (len(answers), sum(len(ids) - (ids[-1] == EOS) for ids in answers))
    assert [tokens for _, tokens in shown] == sorted(tokens for _, tokens in shown)
