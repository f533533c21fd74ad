"""What tests of the SGLang plugin share: tiny checkpoints, the real server on a CPU, and what its values should be."""

import json
import os
import re
import sys
from contextlib import contextmanager

import requests
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from lenvm_kernels.types import Status
from tests.helpers import models
from tests.helpers.models import last_value_logits, random_head, random_model
from tests.helpers.server import free_port, running

VOCAB, HIDDEN, EOS = 512, 64, 1
TINY = models.TINY | dict(vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=128, max_position_embeddings=512)
TINY |= dict(bos_token_id=0, eos_token_id=EOS)
ATOL = 1e-4  # on value logits of O(1), fp32
SAMPLING = {"temperature": 1.0, "top_k": 6, "min_p": 0.01, "max_new_tokens": 16, "ignore_eos": True}
MODES = [
    {"mode": "centered_exp", "value_scale": -20.0},
    {"mode": "value_bias", "value_scale": 2.0},
    {"value_scale": 0.7},
    {"mode": "linear", "value_scale": 0.5},
    {"mode": "exp", "value_scale": 2.0},
    {"mode": "length_mul", "value_scale": 0.5},
    {"target_length": 12},
    {"target_length": 12, "op": "ge"},
    {"target_length": 12, "op": "le"},
    {"target_length": 12, "op": "eq_soft"},
]
CHAIN = {"steps": 3, "topk": 1, "tokens": 4}  # of drafts, the last token among them
GENTLE = {"mode": "centered_exp", "value_scale": -2.0}  # leaves draws a choice


def write_checkpoints(folder):
    """Put a base model and a value model, both random, where :func:`running_server` looks for them."""
    random_model(Qwen2ForCausalLM, Qwen2Config(**TINY), seed=0).save_pretrained(folder / "base")
    random_model(Qwen2ForCausalLM, Qwen2Config(**TINY), seed=1).save_pretrained(folder / "value")
    save_file(random_head(2, HIDDEN), folder / "value" / "value_head.safetensors")


def write_eagle(folder):
    """A draft model of EAGLE that hands on the base's hidden states, all but unchanged."""
    config = Qwen2Config(**TINY | {"num_hidden_layers": 1}, architectures=["Qwen2ForCausalLMEagle"])
    config.save_pretrained(folder)
    layer = random_model(Qwen2ForCausalLM, config, seed=2).model.layers[0]
    weights = {f"layers.0.{name}": weight * 0.1 for name, weight in layer.state_dict().items()}
    del weights["layers.0.input_layernorm.weight"]
    weights |= {"fc.weight": torch.eye(HIDDEN, 2 * HIDDEN).roll(HIDDEN, 1), "fc.bias": torch.zeros(HIDDEN)}
    save_file(weights, folder / "model.safetensors")


class Server:
    """A running server, and the file that its guided steps are traced to."""

    def __init__(self, url, trace):
        self.url, self.trace = url, trace

    def post(self, **body):
        return requests.post(f"{self.url}/generate", json=body, timeout=600)

    def generate(self, prompts, guidance, *, processor=None, **sampling):
        """Generate for each prompt, through a logit processor of the engine's if one is given; returns the results and
        the steps in which at least one request was guided."""
        before = len(self._lines())
        params = [{**SAMPLING, **sampling, "custom_params": custom_params} for custom_params in guidance]
        response = self.post(input_ids=prompts, sampling_params=params, custom_logit_processor=processor)
        assert response.ok, response.text
        return response.json(), [json.loads(line) for line in self._lines()[before:]]

    def metrics(self, label="status"):
        """The plugin's metrics by name and, where there is one, such a label."""
        text = requests.get(f"{self.url}/metrics", timeout=60).text
        found = re.findall(rf'^lenvm:(\w+)\{{(?:.*{label}="(\w+)")?.*\}} (\S+)$', text, re.MULTILINE)
        return {f"{name} {of_label}".strip(): float(value) for name, of_label, value in found}

    def _lines(self):
        return self.trace.read_text().splitlines() if self.trace.exists() else []


@contextmanager
def running_server(folder, name, *options, plugin=True, **variables):
    """The real server with its overlapping scheduler on a CPU, for the models ``base`` and ``value`` of the folder.

    Args:
        folder: of the models; gets a log and a trace.
        name: of the two files.
        *options: of the server.
        plugin: with it or without.
        **variables: of the environment.
    """
    port = free_port()
    trace, log = folder / f"{name}.jsonl", folder / f"{name}.log"
    unset = ("LENVM_VALUE_MODEL", "LENVM_TRACE", "TRITON_INTERPRET")
    environment = {key: value for key, value in os.environ.items() if key not in unset}
    if plugin:
        environment |= {"LENVM_VALUE_MODEL": str(folder / "value"), "LENVM_TRACE": str(trace)}
    environment |= {"SGLANG_USE_CPU_ENGINE": "1", **variables}
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", folder / "base", "--port", str(port)]
    command += ["--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"]
    command += ["--sampling-backend", "pytorch", "--disable-cuda-graph", "--random-seed", "7"]
    command += ["--sleep-on-idle"]  # else an idle server keeps a core busy
    if not (folder / "base" / "tokenizer.json").exists():
        command += ["--skip-tokenizer-init"]
    # The pool has 4,096 tokens whatever the fraction is. A small one fails when another process takes memory meanwhile.
    command += ["--mem-fraction-static", "0.5", "--max-total-tokens", "4096", "--max-running-requests", "32", *options]
    with running(command, environment, log, f"http://127.0.0.1:{port}") as url:
        yield Server(url, trace)


def running_speculation(folder, name, *options, plugin=True, algorithm="STANDALONE", draft="base", shape=CHAIN, **env):
    """The server with the stand-ins, and a model of the folder that drafts. SGLang need not compile what it would, but
    for NGRAM's corpus: that takes g++ a minute, once."""
    values = {"algorithm": algorithm, "num-draft-tokens": shape["tokens"]}
    if draft:
        values |= {"draft-model-path": folder / draft, "num-steps": shape["steps"], "eagle-topk": shape["topk"]}
    options += tuple(text for key, value in values.items() for text in (f"--speculative-{key}", str(value)))
    env |= {"SGLANG_EXTERNAL_MODEL_PACKAGE": "tests.sglang_cpu.patches", "LENVM_TEST_SPECULATION": "1"}
    env |= {"TORCHDYNAMO_DISABLE": "1"}
    return running_server(folder, name, "--chunked-prefill-size", "32", *options, plugin=plugin, **env)


def check_spans(prompts, results, steps, ends, limit):
    """Each output has one of ``ends`` at the ``limit`` at the latest, and was guided up to it; returns the places."""
    places = []
    for prompt, result in zip(prompts, results, strict=True):
        places.append(min(i for i, token in enumerate(result["output_ids"]) if token in ends))
        rows = [row for step in steps for row in step["rows"] if row["rid"] == result["meta_info"]["id"]]
        rows = [row for row in rows if row["length"] >= len(prompt)]  # others are of chunks of the prompt
        open_rows = [row for row in rows if row["length"] <= len(prompt) + places[-1]]
        assert len(open_rows) == places[-1] + 1 and Status.UNGUIDED not in {row["status"] for row in open_rows}
        assert {row["status"] for row in rows if row not in open_rows} <= {Status.UNGUIDED}
        assert places[-1] < limit or result["output_ids"][limit] == ends[0]
    assert max(places) == limit
    return places


# Targets of requests to a server without a value model, whose outputs many tokens may end.
TARGETS = (4, 27, 9, 40, 15)
STOPS = list(range(200, 212))


def check_targets(outputs):
    """Each of these, tokens without the last, is about as long as its target, and ended by itself."""
    for output, target in zip(outputs, TARGETS, strict=True):
        assert output[-1] in STOPS and not set(output[:-1]) & set(STOPS)
        assert abs(len(output) - 1 - target) <= 2 + 0.2 * target, (len(output), target)


def values_from_scratch(folder, sequences):
    """The value logit at the last token of each sequence, by ``transformers``."""
    model = AutoModelForCausalLM.from_pretrained(folder / "value", dtype=torch.float32).eval()
    adapter = folder / "value" / "adapter_model.safetensors"
    if adapter.exists():  # of the demo's value model, whose scale is 1
        tensors = load_file(adapter)
        for name in [name for name in tensors if "lora_A" in name]:
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            update = tensors[name.replace("lora_A", "lora_B")].float() @ tensors[name].float()
            model.get_submodule(module).weight.data += update
    return last_value_logits(model, load_file(folder / "value" / "value_head.safetensors"), sequences)


def check_steps(folder, prompts, results, steps):
    """Every value of every traced step is that of the sequence as it came to be; returns how many there were."""
    sequences = {r["meta_info"]["id"]: (p, [*p, *r["output_ids"]]) for p, r in zip(prompts, results, strict=True)}
    candidates, values = [], []
    for step in steps:
        for row in step["rows"]:
            if row["rid"].startswith("HEALTH_CHECK"):  # one rank's answer ends the wait for a server of two
                continue
            prompt, sequence = sequences[row["rid"]]
            # The engine throws away the draws of a prompt's chunks but the last, and the overlapping scheduler computes
            # a step more than a request returns.
            if row["status"] != Status.GUIDE or not len(prompt) <= row["length"] < len(sequence):
                continue
            for token, value in zip(row["token_ids"], row["value_logits"], strict=True):
                if token >= 0:
                    candidates.append([*sequence[: row["length"]], token])
                    values.append(value)
            assert sequence[row["length"]] in row["token_ids"]
    assert candidates, "not one step was guided"
    torch.testing.assert_close(torch.tensor(values), values_from_scratch(folder, candidates), rtol=0, atol=ATOL)
    return len(values)


def prompts_of(*lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]
