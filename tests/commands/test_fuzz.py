"""``lenvm fuzz`` finds planted faults and replays them; correct functions pass."""

import json
import os
import re
import subprocess
import sys
from functools import partial
from itertools import product
from pathlib import Path

import pytest

from lenvm_kernels.fuzz import OPERATORS
from lenvm_kernels.fuzz.case import Case
from lenvm_kernels.fuzz.check import operators
from lenvm_kernels.fuzz.tolerances import TOLERANCE

FAULTS = "tests.helpers.planted_faults"
PLANTED = [*product(["off"], OPERATORS), *product(["nan", "odd"], TOLERANCE)]


@pytest.fixture
def fuzz(lenvm, tmp_path, monkeypatch):
    """Run the command in this process, in an empty directory; returns its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    return partial(lenvm, "fuzz")


@pytest.mark.parametrize(("fault", "name"), PLANTED)
def test_planted_fault_is_found_and_replayed(fuzz, fault, name):
    planted = f"{FAULTS}:{fault}.{name}"
    code, out, _ = fuzz("--against", planted, "--cases", 4 if fault == "off" else 8)
    assert code == 1 and f"FAILED {name}: " in out
    line = re.search(r"^  (\{.*)$", out, re.MULTILINE)[1]
    assert len(Case.from_line(line, operators()).rows) == 1 or fault != "off"  # other faults need more rows
    code, repeated, _ = fuzz("--against", planted, "--replay", line)
    assert code == 1 and line in repeated
    assert fuzz("--against", f"{FAULTS}:correct.{name}", "--replay", line)[0] == 0


# Arguments, exit code, and a pattern that the output matches.
RUNS = {
    "kernels": ("--ops draw verify_drafts --cases 4", 0, r"verify_drafts +2 "),
    "other batches": (f"--against {FAULTS}:odd.topk_candidates --cases 6", 1, "differs in another order"),
    "reference only": (f"--against {FAULTS}:odd.topk_candidates --cases 6 --reference-only", 0, "candidates +6 "),
    "own options": (f"--ops value_head --against {FAULTS}:narrow --cases 6", 1, '"size": (80|96), "dtype": "bfloat16"'),
    "exception": (f"--ops value_head --against {FAULTS}:fails --cases 3", 1, "RuntimeError\n  out of luck"),
    "wrong dtype": (
        f"--ops value_head --against {FAULTS}:halves --cases 3",
        1,
        r"or memory\n  logits must be float32 \[1\], got float16 \[1\]\n(.*\n)*value_head +3 .* 3\n",
    ),
    "other memory": (
        f"--ops value_tree_attention --against {FAULTS}:spills --cases 16 ",
        1,
        "memory around out must stay unchanged",
    ),
    "no time": ("--seconds 1e-9", 0, r"^operator .*failed\n$"),
}


@pytest.mark.parametrize("name", RUNS)
def test_output_and_exit_code(fuzz, name):
    arguments, code, pattern = RUNS[name]
    found, out, _ = fuzz(*arguments.split())
    assert found == code and re.search(pattern, out), out


def test_seed_and_number_of_cases_determine_a_run(fuzz):
    def run(seed):
        arguments = ("--against", f"{FAULTS}:off.topk_candidates", "--cases", 8, "--seed", seed)
        code, out, _ = fuzz(*arguments, "--json", "run.json")
        report = json.loads(Path("run.json").read_text())
        tally = report["operators"]["topk_candidates"]
        assert code == 1 and not report["ok"] and tally["cases"] == 8 and f" {tally['rows']} " in out
        assert all(f"{failure['problem']}\n  {failure['details']}\n" in out for failure in report["failures"])
        assert 0 < len(report["failures"]) <= tally["failed"] and tally.pop("seconds") > 0
        return report

    assert run(3) == run(3) != run(4)


def test_command_enables_the_interpreter(tmp_path):
    """Runs in a process without the environment variable TRITON_INTERPRET."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = "import sys; from lenvm_kernels.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "fuzz", "--device", "cpu", "--ops", "verify_drafts", "--cases", "1"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and not done.stderr, done.stderr
