"""Helpers for tests of the SGLang plugin: tiny checkpoints, a real server on CPU, and its expected values."""

import json
import math
import os
import re
import sys
import time
from collections import Counter
from contextlib import contextmanager

import pytest
import requests
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from bench.serve import free_port, running
from lenvm_kernels.types import Status
from tests.helpers import models
from tests.helpers.models import last_value_logits, random_head, random_model

VOCAB, HIDDEN, EOS = 512, 64, 1
TINY = models.TINY | dict(vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=128, max_position_embeddings=512)
TINY |= dict(bos_token_id=0, eos_token_id=EOS)
ATOL = 1e-4  # on value logits of O(1), fp32
SAMPLING = {"temperature": 1.0, "top_k": 6, "min_p": 0.01, "max_new_tokens": 16, "ignore_eos": True}
MODES = [
    {"value_mode": "centered_exp", "value_scale": -20.0},
    {"value_mode": "value_bias", "value_scale": 2.0},
    {"value_scale": 0.7},
    {"value_mode": "linear", "value_scale": 0.5},
    {"value_mode": "exp", "value_scale": 2.0},
    {"value_mode": "length_mul", "value_scale": 0.5},
    {"target_length": 12},
    {"target_length": 12, "value_constraint": "ge"},
    {"target_length": 12, "value_constraint": "le"},
    {"target_length": 12, "value_constraint": "eq_soft"},
]
# Two ranks with one core each, without the engine's compilation, which takes most of the start-up time.
TWO_RANKS = {
    "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
    "TORCHDYNAMO_DISABLE": "1",
    "SGLANG_EXTERNAL_MODEL_PACKAGE": "tests.sglang_cpu.patches",
}
CHAIN = {"steps": 3, "topk": 1, "tokens": 4}  # three drafts and the last token
GENTLE = {"value_mode": "centered_exp", "value_scale": -2.0}  # several candidates stay probable


def write_checkpoints(folder, base=None):
    """Write a base model (if None, a random one), an EAGLE draft model and a value model to the folders of servers."""
    (base or random_model(Qwen2ForCausalLM, Qwen2Config(**TINY))).save_pretrained(folder / "base")
    config = Qwen2Config(**TINY | {"num_hidden_layers": 1}, architectures=["Qwen2ForCausalLMEagle"])
    write_eagle(folder / "eagle", Qwen2ForCausalLM, config, {"fc.bias": torch.zeros(HIDDEN)})
    write_value_model(folder)


def write_value_model(folder):
    random_model(Qwen2ForCausalLM, Qwen2Config(**TINY), seed=1).save_pretrained(folder / "value")
    save_file(random_head(2, HIDDEN), folder / "value" / "value_head.safetensors")


def write_eagle(folder, model_class, config, more=()):
    """Write an EAGLE draft model that passes the base's hidden states on almost unchanged."""
    config.save_pretrained(folder)
    layer, hidden = random_model(model_class, config, seed=2).model.layers[0], config.hidden_size
    weights = {f"layers.0.{name}": weight * 0.1 for name, weight in layer.state_dict().items()} | dict(more)
    del weights["layers.0.input_layernorm.weight"]
    weights["fc.weight"] = torch.eye(hidden, 2 * hidden).roll(hidden, 1)
    save_file(weights, folder / "model.safetensors")


class Server:
    """A running server of the models in a folder, its log, and the trace file of its guided steps."""

    def __init__(self, folder, name, url):
        self.folder, self.url, self.log, self.trace = folder, url, folder / f"{name}.log", folder / f"{name}.jsonl"

    def post(self, **body):
        return requests.post(f"{self.url}/generate", json=body, timeout=600)

    def generate(self, prompts, guidance, *, request=None, **sampling):
        """Generate for each prompt, with other fields of the ``request``; returns the results, and the steps in which
        at least one request was guided."""
        before = len(self.lines())
        params = [{**SAMPLING, **sampling, "custom_params": custom_params} for custom_params in guidance]
        response = self.post(input_ids=prompts, sampling_params=params, **(request or {}))
        assert response.ok, response.text
        return response.json(), self.steps(before)

    def lines(self):
        """Complete lines of the trace so far; a rank may still be writing the last one."""
        return self.trace.read_text().split("\n")[:-1] if self.trace.exists() else []

    def steps(self, first=0):
        """The steps of the trace from line ``first`` on."""
        return [json.loads(line) for line in self.lines()[first:]]

    def agreed_steps(self, ranks=2):
        """The steps of the trace without duplicates, after all ranks have written them."""
        end = time.monotonic() + 20  # the second rank may write its last step after the response
        while set((lines := Counter(self.lines())).values()) - {ranks}:
            assert time.monotonic() < end, f"ranks disagree: {[line for line, n in lines.items() if n != ranks][:2]}"
            time.sleep(0.1)
        return [json.loads(line) for line in lines]

    def metrics(self):
        """Numbers of ``/metrics`` by name without ``lenvm:`` and, if present, one of four labels."""
        text = requests.get(f"{self.url}/metrics", timeout=60).text
        line = r'^([\w:]+)(?:\{(?:.*(?:status|guided|reason|constraint)="(\w+)")?.*\})? (\S+)$'
        found = re.findall(line, text, re.MULTILINE)
        return {f"{name} {label}".strip().removeprefix("lenvm:"): float(value) for name, label, value in found}

    def check_steps(self, prompts, results, steps):
        """Check every value of every traced step against a forward of its sequence; returns the number of values."""
        return self.check_values(
            ([*prompt, *result["output_ids"]][: row["length"]], row)
            for prompt, result in zip(prompts, results, strict=True)
            for row in guided_rows(prompt, result, steps)
        )

    def check_values(self, rows):
        """Check the values in traced rows, given with the tokens before each, as in :meth:`check_steps`."""
        found = [
            ([*tokens, token], value)
            for tokens, row in rows
            for token, value in zip(row["token_ids"], row["value_logits"], strict=True)
            if token >= 0
        ]
        assert found, "not one step was guided"
        candidates, values = zip(*found, strict=True)
        torch.testing.assert_close(torch.tensor(values), self.values_from_scratch(candidates), rtol=0, atol=ATOL)
        return len(values)

    def check_lengths(self, prompts, guidance, results):
        """Check predicted lengths of the requests with ``return_values`` for gamma 0.9; other requests have none."""
        for prompt, params, result in zip(prompts, guidance, results, strict=True):
            keys = result["meta_info"].keys() & {"predicted_output_length", "predicted_remaining_lengths"}
            assert len(keys) == (2 if params and "return_values" in params else 0)
            if keys:
                tokens = [*prompt, *result["output_ids"]]
                values = self.values_from_scratch([tokens[:end] for end in range(len(prompt), len(tokens) + 1)])
                lengths = torch.nn.functional.softplus(values) / -math.log(0.9)
                of_prompt, of_tokens = (result["meta_info"][key] for key in sorted(keys))
                torch.testing.assert_close(torch.tensor(of_prompt + of_tokens), lengths, rtol=0, atol=2e-3)

    def check_logprobs(self, prompts, guidance, results, steps):
        """Check that requests with ``guided_logprobs``, and no other guided requests, return log-probabilities of the
        guided candidates."""
        for prompt, params, result in zip(prompts, guidance, results, strict=True):
            returned, expected = [], []
            for row in guided_rows(prompt, result, steps):
                place, info = row["length"] - len(prompt), result["meta_info"]
                logprobs = {token: math.log(p) for token, p in zip(row["token_ids"], row["probs"], strict=True) if p}
                (logprob, token, _), most = info["output_token_logprobs"][place], info["output_top_logprobs"][place]
                returned += [logprob, most[0][0]]
                expected += [logprobs[token], max(logprobs.values())]
            wants = "guided_logprobs" in (params or {})
            assert not params or (returned == pytest.approx(expected, abs=1e-3)) == wants, (returned, expected)

    def values_from_scratch(self, sequences):
        """Value logit at the last token of each sequence, by ``transformers``."""
        model = AutoModelForCausalLM.from_pretrained(self.folder / "value", dtype=torch.float32).eval()
        adapter = self.folder / "value" / "adapter_model.safetensors"
        if adapter.exists():  # the demo's value model, with LoRA scale 1
            tensors = load_file(adapter)
            for name in [name for name in tensors if "lora_A" in name]:
                module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                update = tensors[name.replace("lora_A", "lora_B")].float() @ tensors[name].float()
                model.get_submodule(module).weight.data += update
        return last_value_logits(model, load_file(self.folder / "value" / "value_head.safetensors"), sequences)


@contextmanager
def running_server(folder, name, *options, **variables):
    """The real server on CPU with its overlapping scheduler, for the models ``base`` and ``value`` of the folder.

    ``name`` is the name of the log and the trace in the folder. ``variables`` are environment variables.
    """
    port = free_port()
    server = Server(folder, name, f"http://127.0.0.1:{port}")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"LENVM_VALUE_MODEL": str(folder / "value"), "LENVM_TRACE": str(server.trace)}
    environment |= {"SGLANG_USE_CPU_ENGINE": "1", **variables}
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", folder / "base", "--port", str(port)]
    command += ["--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"]
    command += ["--sampling-backend", "pytorch", "--disable-cuda-graph", "--random-seed", "7"]
    command += ["--sleep-on-idle"]  # otherwise an idle server keeps a core busy
    if not (folder / "base" / "tokenizer.json").exists():
        command += ["--skip-tokenizer-init"]
    # The pool has 4,096 tokens for any fraction. A small fraction fails if another process allocates memory meanwhile.
    command += ["--mem-fraction-static", "0.5", "--max-total-tokens", "4096", "--max-running-requests", "32", *options]
    with running(command, environment, port, server.log, 300):
        yield server


def running_speculation(folder, name, *options, algorithm="STANDALONE", draft="base", shape=CHAIN, **env):
    """The server with stand-ins for speculation, and a draft model of the folder. NGRAM's corpus is compiled once,
    which takes g++ a minute."""
    values = {"algorithm": algorithm, "num-draft-tokens": shape["tokens"]}
    if draft:
        values |= {"draft-model-path": folder / draft, "num-steps": shape["steps"], "eagle-topk": shape["topk"]}
    options += tuple(text for key, value in values.items() for text in (f"--speculative-{key}", str(value)))
    env |= {"SGLANG_EXTERNAL_MODEL_PACKAGE": "tests.sglang_cpu.patches", "LENVM_TEST_SPECULATION": "1"}
    env["TORCHDYNAMO_DISABLE"] = "1"
    return running_server(folder, name, "--chunked-prefill-size", "32", *options, **env)


# Targets of requests to a server without a value model, with many stop tokens.
TARGETS = (4, 27, 9, 40, 15)
STOPS = list(range(200, 212))


def check_targets(outputs):
    """Check that each output is about as long as its target and ends by itself."""
    for output, target in zip(outputs, TARGETS, strict=True):
        assert output[-1] in {EOS, *STOPS} and not set(output[:-1]) & set(STOPS)
        assert abs(len(output) - 1 - target) <= 2 + 0.2 * target, (len(output), target)


def rows_of(result, steps):
    """The rows of a request in the steps of a trace."""
    return [row for step in steps for row in step["rows"] if row["rid"] == result["meta_info"]["id"]]


def cached_tokens(results):
    return [result["meta_info"]["cached_tokens"] for result in results]


def guided_rows(prompt, result, steps):
    """The guided rows of a request with draws that the engine has used.

    The engine discards the draws of all chunks of a prompt except the last, and the overlapping scheduler computes one
    more step than a request returns."""
    sequence = [*prompt, *result["output_ids"]]
    rows = [row for row in rows_of(result, steps) if row["status"] == Status.GUIDE]
    rows = [row for row in rows if len(prompt) <= row["length"] < len(sequence)]
    assert all(sequence[row["length"]] in row["token_ids"] for row in rows)
    return rows


def prompts_of(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]
