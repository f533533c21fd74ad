"""vLLM's engine in a process without a server, for ``python -m bench.serve --in-process``.

``python -m bench.vllm_engine FD`` imports vLLM, then reads a call per line from stdin, ``["name", {arguments}]``, and
writes each result as a line of JSON to the file descriptor FD. The process ends with stdin, or with an exception.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import vllm
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from safetensors.torch import save_file
from transformers import AutoConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.worker.gpu import model_runner  # noqa: F401 - imported before an engine is timed

from bench.models import DIMENSIONS, RANDOM_PROBE, VOCAB, make_config, random_probe
from lenvm_kernels.engines.vllm import guide  # noqa: F401
from lenvm_kernels.values.probe import ProbeConfig, write_probe

# The architectures of DIMENSIONS, by the first part of a name.
ARCHITECTURES = {"Qwen2.5": "Qwen2ForCausalLM", "Qwen3": "Qwen3ForCausalLM", "SmolLM2": "LlamaForCausalLM"}

# Fields of a completion that are no sampling parameters.
OTHER_FIELDS = ("model", "prompt", "stream", "stream_options", "vllm_xargs")


def write_config(name: str, vocab_size: int, folder: Path) -> None:
    """Write the configuration of a model of :data:`DIMENSIONS`."""
    fields = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    sizes = dict(zip(fields, DIMENSIONS[name], strict=False))
    architecture = ARCHITECTURES[name.partition("-")[0]]
    common = dict(architectures=[architecture], vocab_size=vocab_size, max_position_embeddings=32_768)
    common |= dict(dtype="bfloat16", eos_token_id=vocab_size - 1, tie_word_embeddings=name != "Qwen2.5-7B")
    AutoConfig.for_model(architecture.removesuffix("ForCausalLM").lower(), **sizes, **common).save_pretrained(folder)


def write_value_model(name: str, vocab_size: int, folder: Path) -> None:
    """Write a value model of :data:`DIMENSIONS` with random weights in bf16."""
    write_config(name, vocab_size, folder)
    shapes = make_config(name, vocab_size=vocab_size).tensor_shapes()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = {key: torch.randn(of, dtype=torch.bfloat16, device=device) * of[-1] ** -0.5 for key, of in shapes.items()}
    save_file({key: tensor.cpu() for key, tensor in tensors.items()}, folder / "model.safetensors")


def free_bytes() -> int:
    """Free memory of the GPU, 0 without one."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


class Engine:
    """The engine of this process."""

    llm: vllm.LLM

    def start(self, model: str, value_model: str, folder: str, options: list[str]) -> dict[str, Any]:
        """Start the engine, and return its measures.

        Args:
            model: path of the base model, or a name in :data:`DIMENSIONS`, whose weights are random.
            value_model: a name in :data:`DIMENSIONS`, or :data:`RANDOM_PROBE` for a probe of three layers. Their random
                weights are written to ``values`` in the folder, which ``LENVM_VALUE_MODEL`` names. Others are ignored.
            folder: a temporary folder.
            options: further options of vLLM's server.
        """
        base, values = Path(folder, "base"), Path(folder, "values")
        if model in DIMENSIONS:
            write_config(model, VOCAB, base)
            model, options = str(base), ["--load-format", "dummy", "--skip-tokenizer-init", *options]
        config = AutoConfig.from_pretrained(model)
        if value_model == RANDOM_PROBE:
            count = config.num_hidden_layers
            layers, sizes = (count // 2, count * 3 // 4, count), (count, config.hidden_size, config.vocab_size)
            write_probe(*random_probe(layers, *sizes), 0.997, values)
            # The signs of random embeddings are not known before the engine has made them.
            ProbeConfig.check_base = lambda *_: None  # type: ignore[method-assign]
        elif value_model in DIMENSIONS:
            write_value_model(value_model, config.vocab_size, values)
        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        arguments = EngineArgs.from_cli_args(parser.parse_args(["--model", model, *options]))
        free, begun = free_bytes(), time.perf_counter()
        self.llm = vllm.LLM.from_engine_args(arguments)
        found: dict[str, Any] = {"start_s": time.perf_counter() - begun}
        cache = self.llm.llm_engine.vllm_config.cache_config
        found["kv_tokens"] = (cache.num_gpu_blocks or 0) * cache.block_size
        (caches,) = self.llm.collective_rpc(lambda worker: sum(x.nbytes for x in worker.model_runner.kv_caches))
        if torch.cuda.is_available():
            found["start_gib"] = (free - free_bytes() - caches) / 2**30
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        return {"version": vllm.__version__, "torch": torch.__version__, "device": device, "measures": found}

    def prepare(self, bodies: list[dict[str, Any]], concurrency: int) -> None:
        """Set the completions of the next :meth:`run`."""
        requests = []
        for body in bodies:
            fields = {key: x for key, x in body.items() if key not in OTHER_FIELDS}
            params = vllm.SamplingParams(**fields, extra_args=body.get("vllm_xargs"), detokenize=False)
            requests.append(({"prompt_token_ids": body["prompt"]}, params))
        self._batches = [requests[first : first + concurrency] for first in range(0, len(requests), concurrency)]

    def run(self) -> list[list[float] | str]:
        """Compute the completions, ``concurrency`` at a time. An element is as :func:`bench.serve.ask`'s, or an error.

        The times are from vLLM's statistics of requests."""
        answers: list[list[float] | str] = []
        for batch in self._batches:
            prompts, sampling = zip(*batch, strict=True)
            for output, params in zip(self.llm.generate(prompts, sampling, use_tqdm=False), sampling, strict=True):
                times, (completion,) = output.metrics, output.outputs
                if (count := len(completion.token_ids)) != params.max_tokens:
                    answers.append(f"ended by {completion.finish_reason} after {count} of {params.max_tokens} tokens")
                    continue
                seconds = times.last_token_ts - times.first_token_ts
                answers.append([times.first_token_latency, seconds / (count - 1)])
        return answers

    def metrics(self) -> str:
        """The text of a server's ``/metrics``."""
        registry = CollectorRegistry()
        MultiProcessCollector(registry)
        return generate_latest(registry).decode()


def main() -> None:
    engine = Engine()
    with os.fdopen(int(sys.argv[1]), "w") as answers:
        for line in sys.stdin:
            name, arguments = json.loads(line)
            print(json.dumps(getattr(engine, name)(**arguments)), file=answers, flush=True)
    os._exit(0)  # the engine need not shut down


if __name__ == "__main__":
    main()
