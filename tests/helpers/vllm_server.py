"""Helpers for tests of the vLLM processor: tiny checkpoints, a real server on CPU, and its expected values."""

import json
import os
import sys
from contextlib import contextmanager
from pathlib import Path

import requests
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from bench.serve import free_port, running
from lenvm_kernels.types import Status
from tests.helpers import sglang_server
from tests.helpers.models import random_model, tokenizer_of
from tests.helpers.sglang_server import TINY, VOCAB, write_eagle, write_value_model

SITE = Path(__file__).parent.parent / "vllm_cpu" / "site"
BASE = TINY | dict(hidden_size=128)  # vLLM's CPU attention needs a head dimension of 32
# The tokens of a small JSON object without blanks, and words.
PIECES = ["<pad>", "<eos>", "<unk>", "{", "}", '"n"', ":", ",", *map(str, range(10)), '"kind"', '"long"', '"short"']
WORDS = [*PIECES, *(f"w{i}" for i in range(VOCAB - len(PIECES)))]
SAMPLING = {"temperature": 1.0, "top_k": 6, "max_tokens": 16, "ignore_eos": True}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


def write_checkpoints(folder, **changes):
    """Write a random base model, with changes to its configuration, a draft model of EAGLE and a value model to the
    folders that servers load."""
    random_model(Qwen2ForCausalLM, Qwen2Config(**BASE | changes), seed=0).save_pretrained(folder / "base")
    config = LlamaConfig(**BASE | {"num_hidden_layers": 1}, architectures=["LlamaForCausalLM"])
    write_eagle(folder / "eagle", LlamaForCausalLM, config)
    for name in ("base", "eagle"):
        save_tokenizer(folder / name)
    write_value_model(folder)


def save_tokenizer(path):
    """Save a tokenizer of :data:`WORDS`, separated by blanks."""
    tokenizer_of(WORDS, chat_template="{{ messages[0]['content'] }}").save_pretrained(path)


class Server(sglang_server.Server):
    """A running server of the models in a folder."""

    def post(self, path="completions", **body):
        """Request completions of prompts of token ids, with equal ``vllm_xargs``."""
        return requests.post(f"{self.url}/v1/{path}", json=SAMPLING | {"return_token_ids": True} | body, timeout=600)

    def check_steps(self, sequences, steps, forced=()):
        """Check every guided row of every step: its values against forwards of its sequence, and that a drawn token has
        a positive probability and is returned, or is ``forced`` by the engine. Returns the number of values."""
        rows, following = [row for step in steps for row in step["rows"] if row["status"] == Status.GUIDE], {}
        for sequence in sequences:
            for end in range(1, len(sequence)):
                following.setdefault(tuple(sequence[:end]), set()).add(sequence[end])
        for row in rows:
            returned = following.get(tuple(row["tokens"]), set())
            # The sequence of a rejected draft is not returned.
            assert (row["node"] and not returned) or returned & {row["token"], *forced}
            assert row["probs"][row["token_ids"].index(row["token"])] > 0
        return self.check_values((row["tokens"], row) for row in rows)


@contextmanager
def running_server(folder, name, *options, speculation=None, has_settings=True, **variables):
    """The real server on CPU with vLLM's second model runner, for the models ``base`` and ``value`` of the folder.

    ``name`` is the name of the log and the trace in the folder. Without ``has_settings``, the plugin has its defaults.
    """
    port = free_port()
    server, metrics = Server(folder, name, f"http://127.0.0.1:{port}"), folder / f"{name}.metrics"
    metrics.mkdir()
    environment = {key: value for key, value in os.environ.items() if not key.startswith("LENVM_")}
    environment |= {"VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_CI_ENV": "1"}
    environment |= {"HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{SITE}:{os.environ.get('PYTHONPATH', '')}"}
    environment["PROMETHEUS_MULTIPROC_DIR"] = str(metrics)
    if has_settings:
        environment |= {"LENVM_VALUE_MODEL": str(folder / "value"), "LENVM_TRACE": str(server.trace)}
    environment |= variables
    # `vllm serve` reads the version of a package, which the CPU build lacks under this name.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / "base")]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "base"]
    command += ["--enforce-eager", "--dtype", "float32", "--max-model-len", "256"]
    if speculation is not None:
        command += ["--speculative-config", json.dumps(speculation)]
    command += ["--max-num-seqs", "16", "--max-num-batched-tokens", "48", *options]
    with running(command, environment, port, server.log, 300):
        yield server
