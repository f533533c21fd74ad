"""Time tokens in vLLM on a GPU, plain and guided, each mode in a process with one engine.

    python -m bench.vllm_gpu --out DIR --dummy 1.5b
    python -m bench.vllm_gpu MODEL --out DIR --modes plain probe --probe PROBE

MODEL is a Hugging Face folder; ``--dummy`` writes a configuration whose weights vLLM fills at random. The package must
be installed, so that vLLM finds its processor. The modes:

- ``plain``: the processor is off;
- ``idle``: the processor is on, no request is guided;
- ``none``: every request is guided, without a second model;
- ``probe``: every request is guided by the probe of ``--probe`` (default: one with random weights).

For each number in ``--requests``, that many requests with random prompts and ``top_k`` 8 are sent at once. The results
are medians of the runs: ``tpot_ms`` is a request's time from its first to its last token, divided by its tokens less
one, and ``decode_ms`` the same time of the request that began last, after the last prompt was computed. ``--out`` is
a folder for one run. A mode that fails does not stop the others; the exit status is then 1. The plugin's settings are
read from the environment. ``lenvm evaluate`` measures lengths and right answers.
"""

import argparse
import gc
import hashlib
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lenvm_kernels.types import Mode

MODES = ("plain", "idle", "none", "probe")
# --attention auto leaves it to vLLM, --graphs NONE is eager, and a mode is ended after --limit seconds.
DEFAULTS: dict[str, Any] = dict(prompt_tokens=512, tokens=128, repeats=3, target=151, limit=600.0, max_model_len=2048)
DEFAULTS |= dict(attention="TRITON_ATTN", graphs="FULL_DECODE_ONLY", memory=0.6, load_format="auto")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", metavar="MODEL")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 8, 64, 256])
    parser.add_argument("--dummy", choices=("tiny", "0.5b", "1.5b", "3b", "7b"), help="as Qwen2.5, except tiny")
    parser.add_argument("--out")
    parser.add_argument("--probe")
    parser.add_argument("--options", type=json.loads, default={}, help="more arguments of vLLM's LLM, as JSON")
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)  # all arguments of a mode's process
    for name, default in DEFAULTS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    args = parser.parse_args()
    if args.one:
        return argparse.Namespace(**args.one)
    if args.out is None or (args.model is None) == (args.dummy is None):
        parser.error("--out and either MODEL or --dummy must be given")
    return args


def write_dummy(size: str, folder: str) -> None:
    """Write the configuration of a model, and no weights."""
    from transformers import Qwen2Config

    from bench.models import DIMENSIONS, VOCAB

    sizes = (128, 256, 6, 4, 2) if size == "tiny" else DIMENSIONS[f"Qwen2.5-{size.upper()}"][:5]
    names = ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"]
    vocab = 1024 if size == "tiny" else VOCAB
    config: dict[str, Any] = dict(zip(names, sizes, strict=True)) | dict(vocab_size=vocab, eos_token_id=vocab - 1)
    config |= dict(architectures=["Qwen2ForCausalLM"], tie_word_embeddings=size != "7b")
    Qwen2Config(**config).save_pretrained(folder)


def write_random_probe(config: dict[str, Any], folder: Path) -> None:
    """Write a probe of three layers and have this process accept it for the model."""
    from bench.models import random_probe
    from lenvm_kernels.values.probe import ProbeConfig, write_probe

    count, hidden, vocab = (config[name] for name in ("num_hidden_layers", "hidden_size", "vocab_size"))
    torch.manual_seed(0)
    write_probe(*random_probe((count // 2, count * 3 // 4, count), count, hidden, vocab), 0.997, folder)
    # The signs of the embedding cannot match: they are not known before the engine has the weights.
    ProbeConfig.check_base = lambda *_: None


def environment_of(args: argparse.Namespace, mode: str) -> dict[str, str]:
    env = {key: value for key, value in os.environ.items() if mode != "plain" or not key.startswith("LENVM_")}
    env |= dict(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", VLLM_LOGGING_STREAM="ext://sys.stderr")
    env |= dict(VLLM_USE_V2_MODEL_RUNNER="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1")
    env |= dict(VLLM_USE_FLASHINFER_SAMPLER="0", VLLM_USE_DEEP_GEMM="0", VLLM_WORKER_MULTIPROC_METHOD="spawn")
    env |= dict(VLLM_HOST_IP="127.0.0.1", GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo", PYTHONUNBUFFERED="1")
    env["LENVM_VALUE_MODEL"] = "off" if mode == "plain" else "none"
    if mode == "probe":
        env["LENVM_VALUE_MODEL"] = args.probe or f"{args.out}/random-probe"
    return env


class Bench:
    """The engine of a mode in this process, and its measurements."""

    def __init__(self, args: argparse.Namespace) -> None:
        import vllm

        from lenvm_kernels.engines.vllm.guide import Guide

        self.args, self.vllm = args, vllm
        if args.dummy:
            write_dummy(args.dummy, args.model)
        self.config = json.loads(Path(args.model, "config.json").read_text())
        if args.mode == "probe" and args.probe is None:
            write_random_probe(self.config, Path(os.environ["LENVM_VALUE_MODEL"]))
        options: dict[str, Any] = dict(model=args.model, dtype="bfloat16", seed=0, max_model_len=args.max_model_len)
        options |= dict(load_format="dummy" if args.dummy else args.load_format, skip_tokenizer_init=bool(args.dummy))
        options |= dict(max_num_seqs=max(args.requests), gpu_memory_utilization=args.memory)
        options |= dict(enable_prefix_caching=False, disable_log_stats=False, enforce_eager=args.graphs == "NONE")
        options |= dict(compilation_config={"mode": 0, "cudagraph_mode": args.graphs})
        options |= {} if args.attention == "auto" else {"attention_config": {"backend": args.attention}}
        begun = time.perf_counter()
        self.llm = vllm.LLM(**options | args.options)
        self.common = dict(mode=args.mode, model=args.dummy or Path(args.model).name, attention=args.attention)
        self.common |= dict(start_s=time.perf_counter() - begun, vllm=vllm.__version__)
        cache = self.llm.llm_engine.vllm_config.cache_config
        self.common["kv_tokens"] = (cache.num_gpu_blocks or 0) * (cache.block_size or 0)
        self.common["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        gc.unfreeze()  # vLLM has frozen its objects
        self.guide = next((x for x in gc.get_objects() if type(x) is Guide), None)
        gc.freeze()
        if (self.guide is None) != (args.mode == "plain"):
            raise RuntimeError(f"in mode {args.mode} the engine's processor has the guide {self.guide}")

    def run(self, prompts: list[list[int]], max_tokens: int) -> tuple[float, list[Any]]:
        common: dict[str, Any] = dict(temperature=0.8, top_k=8, ignore_eos=True, max_tokens=max_tokens)
        if self.args.mode in ("none", "probe"):
            common["extra_args"] = {"target_length": self.args.target}
        params = [self.vllm.SamplingParams(seed=i, detokenize=False, **common) for i in range(len(prompts))]
        begun = time.perf_counter()
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return time.perf_counter() - begun, outputs

    def time_requests(self, count: int) -> None:
        """Time ``count`` requests. The result is written at once: a later mode may be killed."""
        args, rng, runs, digests = self.args, random.Random(count), [], []
        prompts = [rng.choices(range(self.config["vocab_size"] // 2), k=args.prompt_tokens) for _ in range(count)]
        self.run(prompts, 8)
        for _ in range(args.repeats):
            seconds, outputs = self.run(prompts, args.tokens)
            ids, times = [list(x.outputs[0].token_ids) for x in outputs], [x.metrics for x in outputs]
            ttft = np.median([1e3 * m.first_token_latency for m in times])
            tpot = [1e3 * (m.last_token_ts - m.first_token_ts) / max(1, m.num_generation_tokens - 1) for m in times]
            last = tpot[np.argmax([m.first_token_ts for m in times])]
            rate, p99 = sum(map(len, ids)) / seconds, np.percentile(tpot, 99)
            runs.append(dict(tokens_per_s=rate, tpot_ms=np.median(tpot), tpot_p99_ms=p99, decode_ms=last, ttft_ms=ttft))
            digests.append(hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:12])
        result: dict[str, Any] = self.common | dict(requests=count, tokens=args.tokens, digests=digests)
        result |= {key: float(np.median([each[key] for each in runs])) for key in runs[0]}
        if self.guide is not None:  # a failure ends the guidance of requests, which then take less time
            guided = int((self.guide.step.table.columns.mode != Mode.UNGUIDED).sum())
            result |= dict(fallbacks=self.guide.fallbacks, guided=guided)
        line = json.dumps({key: round(x, 4) if isinstance(x, float) else x for key, x in result.items()})
        with Path(args.out, "timings.jsonl").open("a") as lines:
            lines.write(line + "\n")
        print(f"RESULT {line}", flush=True)


def run_mode(args: argparse.Namespace, mode: str) -> int:
    """Run a mode in a subprocess and return its exit status."""
    log, begun = Path(args.out, f"{mode}.log"), time.perf_counter()
    command = [sys.executable, "-m", "bench.vllm_gpu", "--one", json.dumps(vars(args) | {"mode": mode})]
    try:
        with log.open("w") as file:
            status = subprocess.run(command, stderr=file, env=environment_of(args, mode), timeout=args.limit).returncode
    except subprocess.TimeoutExpired:
        status = -9
    if status:
        print(*log.read_text(errors="replace").splitlines()[-25:], f"the end of {log}", sep="\n")
    print(f"{mode}: {time.perf_counter() - begun:.1f} s, status {status}", flush=True)
    return status


def main() -> None:
    args = arguments()
    if hasattr(args, "mode"):
        bench = Bench(args)
        for count in args.requests:
            bench.time_requests(count)
        os._exit(0)  # the results are written; the engine need not shut down
    Path(args.out).mkdir(parents=True, exist_ok=True)
    if args.dummy:
        args.model = str(Path(args.out, f"model-{args.dummy}"))
    failed = [mode for mode in args.modes if run_mode(args, mode)]
    found = Path(args.out, "timings.jsonl")
    results = [*map(json.loads, found.open())] if found.exists() else []
    for key in ("tpot_ms", "decode_ms"):  # with the ratio to plain
        times = {(result["mode"], result["requests"]): result[key] for result in results}
        for (mode, count), ms in times.items():
            print(f"{key:<10}{mode:<6}{count:>5} requests{ms:>9.3f}{ms / times.get(('plain', count), np.nan):>9.3f}")
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
