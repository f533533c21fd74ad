"""A mark for tests of Triton's interpreter, and subprocesses that compile kernels instead of interpreting them."""

import os
import subprocess
import sys

import pytest

needs_interpreter = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="tests Triton's interpreter, but kernels are compiled here"
)


def run_compiling(*arguments, **options):
    """Run Python successfully in a process without Triton's interpreter; returns its stdout."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    return done.stdout
