"""``lenvm fuzz``: that it finds, makes small, writes down and repeats what is wrong, and leaves alone what is right."""

import json
import os
import subprocess
import sys
from functools import partial
from xml.etree import ElementTree

import pytest
import torch

from lenvm_kernels.fuzz import OPERATORS
from lenvm_kernels.fuzz.case import VERSION, Case, CaseError
from lenvm_kernels.fuzz.check import operators
from lenvm_kernels.fuzz.draws import Draws
from tests.helpers.cases import simplest

FAULTS = "tests.helpers.planted_faults"
# Whose results are compared as they are.
INTEGERS = (
    *("limit_span", "gather_requests", "expand_drafts", "select_scored", "pack_drafts"),
    *("catch_up", "ragged_layout", "sample_candidates", "verify_drafts"),
)
FLOATS = [name for name in OPERATORS if name not in INTEGERS]
PLANTED = [
    *(("off", name) for name in OPERATORS),
    *(("nan", name) for name in FLOATS),
    *(("odd", name) for name in FLOATS),
    *(("ties", name) for name in ("topk_candidates", "reweight_scatter", "sample_candidates")),
]
# Where the fault shows in few rows of few cases.
MORE = {("ties", "reweight_scatter"): ("--only", "rows=usual", "scatter=False", "columns=8")}


@pytest.fixture
def fuzz(lenvm, tmp_path, monkeypatch):
    """Run the command in this process and an empty directory; returns its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    return partial(lenvm, "fuzz")


@pytest.mark.parametrize(("fault", "name"), PLANTED)
def test_a_planted_fault_is_found_made_small_written_and_repeated(fuzz, tmp_path, fault, name):
    planted, corpus = f"{FAULTS}:{fault}.{name}", tmp_path / "lenvm-fuzz.jsonl"
    code, out, err = fuzz("--against", planted, "--cases", 16, *MORE.get((fault, name), ()))
    assert code == 1 and f"FAILED {name}: " in out and f"FAILED {name}: " in err
    written = corpus.read_text()
    cases = [json.loads(line) for line in written.splitlines()]
    assert cases
    for case in cases:
        assert case["op"] == name and case["version"] == VERSION and case["problem"] in out
        assert (case["rows"] if isinstance(case["rows"], int) else len(case["rows"])) <= 3

    code, out, _ = fuzz("--against", planted, "--cases", 1)
    assert code == 1 and f"({len(cases)} from the corpus)" in out and "from the corpus; met" in out
    assert corpus.read_text().startswith(written)
    code, out, _ = fuzz("--against", f"{FAULTS}:correct.{name}", "--cases", 1)
    assert code == 0 and "from the corpus)" in out


@pytest.mark.parametrize("name", OPERATORS)
def test_what_is_right_passes(fuzz, tmp_path, name):
    code, out, err = fuzz("--against", f"{FAULTS}:correct.{name}", "--cases", 12, "--seed", 5)
    assert code == 0 and not err, out
    assert not (tmp_path / "lenvm-fuzz.jsonl").exists()


def test_the_kernels_pass(fuzz):
    code, out, _ = fuzz("--ops", "sample_candidates", "catch_up", "--cases", 4)
    assert code == 0, out


def test_the_rows_that_a_fault_needs_are_kept_and_no_other(fuzz, tmp_path):
    code, *_ = fuzz("--against", f"{FAULTS}:many.value_head", "--cases", 8)
    case = json.loads((tmp_path / "lenvm-fuzz.jsonl").read_text().splitlines()[0])
    assert code == 1 and (case["rows"] == 5 or len(case["rows"]) == 5)
    assert case["options"] == simplest("value_head", 5).options


def test_bits_in_other_batches_can_be_left_out(fuzz):
    odd = ("--against", f"{FAULTS}:odd.topk_candidates", "--cases", 6)
    assert fuzz(*odd)[0] == 1
    assert fuzz(*odd, "--reference-only", "--corpus", "other.jsonl")[0] == 0


def test_options_can_be_chosen(fuzz, tmp_path):
    chosen = ("--only", "dtype=bfloat16", "size=80", "size=96")
    code, out, _ = fuzz("--against", f"{FAULTS}:nan.value_head", "--cases", 6, *chosen)
    assert code == 1 and "dtype              bfloat16: 6\n" in out
    for line in (tmp_path / "lenvm-fuzz.jsonl").read_text().splitlines():
        options = json.loads(line)["options"]
        assert options["dtype"] == "bfloat16" and options["size"] in (80, 96)


def test_an_exception_of_the_function_is_a_failure(fuzz):
    code, out, _ = fuzz("--ops", "value_head", "--against", f"{FAULTS}:fails", "--cases", 3)
    assert code == 1 and "raised RuntimeError" in out and "out of luck" in out and "met 3 times" in out


def test_a_result_of_another_dtype_is_a_failure(fuzz):
    code, out, _ = fuzz("--ops", "value_head", "--against", f"{FAULTS}:halves", "--cases", 3)
    assert code == 1 and "logits must be float32 [1], got float16 [1]" in out and "met 3 times" in out


def test_seed_and_number_of_cases_decide_everything(fuzz, tmp_path):
    def run(seed):
        arguments = ("--against", f"{FAULTS}:off.topk_candidates", "--cases", 8, "--seed", seed)
        fuzz(*arguments, "--json", tmp_path / "run.json", "--corpus", tmp_path / f"{os.urandom(4).hex()}.jsonl")
        found = json.loads((tmp_path / "run.json").read_text())
        for timed in (found, *found["operators"].values()):
            del timed["seconds"]
        return found

    assert run(3) == run(3) != run(4)


def test_reports_say_the_same(fuzz, tmp_path):
    code, out, _ = fuzz(
        *("--against", f"{FAULTS}:nan.topk_candidates", "--cases", 10),
        *("--json", tmp_path / "run.json", "--junit", tmp_path / "run.xml"),
    )
    found = json.loads((tmp_path / "run.json").read_text())
    suite = ElementTree.parse(tmp_path / "run.xml").getroot()
    assert code == 1 and not found["ok"]
    tally = found["operators"]["topk_candidates"]
    assert tally["cases"] == 10 and f"10 cases (0 from the corpus), {tally['rows']} rows" in out
    assert sum(tally["cases_by_option"]["dtype"].values()) == 10 and tally["rows_by_class"]["status guide"] > 0
    problems = [failure["problem"] for failure in found["failures"]]
    assert [test.find("failure").get("message") for test in suite] == problems
    assert int(suite.get("tests")) == int(suite.get("failures")) == len(problems) > 0


def test_the_command_asks_for_the_interpreter_itself(tmp_path):
    """In a process of its own, without the variable: on a CPU the kernels run in the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = "import sys; from lenvm_kernels.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "fuzz", "--device", "cpu", "--ops", "sample_candidates", "--cases", "1"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "1 cases (0 from the corpus)" in done.stdout and not done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ops", "softmax"], "--ops: invalid choice: 'softmax'"),
        (["--cases", "0"], "--cases: must be a number above 0, got '0'"),
        (["--seconds", "soon"], "--seconds: must be a number above 0, got 'soon'"),
        (["--cases", "1", "--seconds", "1"], "not allowed with"),
        (["--seed", "-1"], "--seed: must be an integer"),
        (["--against", "value_head"], "--against must be MODULE:FUNCTION, got 'value_head'"),
        (["--against", "no.such:value_head"], "No module named 'no'"),
        (["--against", f"{FAULTS}:none"], "--against must be MODULE:FUNCTION, but"),
        (["--against", f"{FAULTS}:fails"], "a function of an operator's name, or --ops must name one"),
        (["--only", "dtype"], "--only must be OPTION=VALUE with an option of drafts, parents, dtype"),
        (["--ops", "value_head", "--only", "dtype=int8"], "dtype of value_head must be of float32, bfloat16, float16"),
        (["--json", "no/such.json"], "--json must be a file in an existing directory, got 'no/such.json'"),
        (["--corpus", "."], "--corpus must be a file in an existing directory, got '.'"),
    ],
)
def test_mistakes_end_in_one_line(fuzz, arguments, message):
    code, out, err = fuzz(*arguments)
    assert code == 2 and message in err and err.count("\n") == 1 and not out


def good_case():
    return simplest("value_head", (3, 1), seed=7).to_json()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": VERSION + 1}, f"is of version {VERSION + 1}, this is version {VERSION}"),
        ({"op": "softmax"}, "op must be one of limit_span, gather_requests"),
        ({"rows": [1, 1]}, "rows must be a number of rows or a list of different row ids"),
        ({"rows": "all"}, "rows must be"),
        ({"seed": 1.5}, "seed must be an integer, got 1.5"),
        ({"options": {}}, "options must be size, dtype"),
        ({"options": good_case()["options"] | {"dtype": "int8"}}, "dtype must be one of .*, got 'int8'"),
    ],
)
def test_lines_that_are_no_cases_are_named(fuzz, tmp_path, change, message):
    with pytest.raises(CaseError, match=message):
        Case.from_json(good_case() | change, operators())
    (tmp_path / "c.jsonl").write_text(json.dumps(good_case()) + "\n\n" + json.dumps(good_case() | change) + "\n")
    code, _, err = fuzz("--corpus", "c.jsonl", "--cases", 1)
    assert code == 2 and "line 3 of c.jsonl" in err


def test_a_case_is_what_it_was_when_written():
    case = Case.from_json(json.loads(json.dumps(good_case())), operators())
    assert case.to_json() == good_case()
    whole = Case("value_head", 0, tuple(range(500)), case.options)
    assert whole.to_json()["rows"] == 500 and Case.from_json(whole.to_json(), operators()) == whole


def test_a_row_is_the_same_in_any_batch():
    draws = Draws(4)
    whole = draws.normal("x", 50, 7)
    assert torch.equal(draws.normal("x", [40, 3], 7), whole[[40, 3]])
    assert torch.equal(draws.normal("x", 50, 3), whole[:, :3])
    assert not torch.equal(draws.normal("y", 50, 7), whole) and not torch.equal(Draws(5).normal("x", 50, 7), whole)
    uniform = draws.uniform("u", 2000, 3, low=-2, high=4)
    assert uniform.min() >= -2 and uniform.max() < 4 and abs(uniform.mean() - 1) < 0.1
    assert abs(whole.mean()) < 0.2 and abs(whole.std() - 1) < 0.1
    places = draws.places("p", 6, 3).tolist()
    assert places != sorted(places) and len(set(places)) == 6 and set(places) < set(range(9))


@pytest.mark.parametrize(
    ("name", "options", "indices"),
    [
        ("limit_span", {}, lambda given: given.arguments["table_rows"]),
        ("gather_requests", {}, lambda given: given.arguments["table_rows"]),
        ("select_scored", {}, lambda given: given.arguments["requests"].table_rows),
        ("catch_up", {}, lambda given: given.arguments["requests"].table_rows),
        ("expand_drafts", {"drafts": 9, "parents": "tree"}, lambda given: given.arguments["drafts"].parents.flatten()),
        ("embed_tokens", {}, lambda given: given.arguments["token_ids"]),
        ("reweight_scatter", {}, lambda given: given.table_rows),
        ("value_head", {"token_rows": "int64"}, lambda given: given.arguments["token_rows"]),
        ("rope_cache", {}, lambda given: given.arguments["slots"]),
        ("ragged_layout", {"longest": 70}, lambda given: given.arguments["delta_starts"]),
        ("value_tree_attention", {}, lambda call: call.inputs.table_rows),
    ],
)
def test_what_rows_refer_to_is_in_no_order(name, options, indices):
    operator = operators()[name]
    options = {option: values[0] for option, values in operator.options.items()} | options
    given = operator.inputs(Case(name, 1, tuple(range(12)), options), torch.device("cpu"))
    steps = indices(given).long().diff()
    assert (steps > 0).any() and (steps < 0).any()
