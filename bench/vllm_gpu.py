"""Time tokens in vLLM, plain and guided, and answer GSM8K's problems with a real model.

    python -m bench.vllm_gpu --out DIR --dummy 1.5b
    python -m bench.vllm_gpu MODEL --out DIR --gsm8k DIR --phrase brief --guidance '[{"tolerance": 0.2}]'

MODEL is a Hugging Face folder; ``--dummy`` writes a configuration whose weights vLLM fills at random. The package need
not be installed. Each mode starts a process with one engine:

- ``plain``: without the processor;
- ``idle``: with the processor, no request guided;
- ``none``: every request guided, without a second model;
- ``probe``: every request guided by the probe of ``--probe`` (default: one with random weights).

For each number in ``--requests``, that many requests with random prompts and ``top_k`` 8 are sent at once. The results
are medians of the runs: ``tpot_ms`` is a request's time from its first to its last token, divided by its tokens less
one, and ``decode_ms`` is the same time of the request that began last, after the last prompt was computed.

``--gsm8k`` is a folder with ``test.jsonl``; answers are judged by the package math-verify. ``--phrase`` is a name in
:data:`PHRASES` or a text with ``{words}``, appended to every problem; ``plain`` also runs without it. Each object in
the list ``--guidance`` is run as a setting and may contain another ``target_length`` or ``phrase``. ``--out`` is a
folder for one run. A mode that fails does not stop the others; the exit status is then 1. The plugin's settings, such
as LENVM_MAX_CANDIDATES, are read from the environment.
"""

import argparse
import gc
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

PROCESSOR, GUIDE = "lenvm_kernels.adapters.vllm:LenVMProcessor", "lenvm_kernels.adapters.vllm_guide"
MODES = ("plain", "idle", "none", "probe")
ROWS = 256  # problems at a time
PHRASES = {  # measured in bench/results/nvidia-h200/real-model
    "brief": "Think step by step, but keep each step short. Use about {words} words in total, and end with "
    '"The final answer is ...".',
    "calc": "Write one short line for each calculation, then the final answer. Use about {words} words in total.",
    "long": 'Think step by step. Use about {words} words, and end with "The final answer is ...".',
}
# --attention auto leaves it to vLLM, --graphs NONE is eager, and a mode is ended after --limit seconds.
DEFAULTS: dict[str, Any] = dict(prompt_tokens=512, tokens=128, repeats=3, problems=500, target=151, limit=600.0)
DEFAULTS |= dict(attention="TRITON_ATTN", graphs="FULL_DECODE_ONLY", memory=0.6, load_format="auto")
DEFAULTS |= dict(max_model_len=2048, answer_tokens=512)
SIZES = ("tiny", "0.5b", "1.5b", "3b", "7b")  # of Qwen2.5, but for the first


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", metavar="MODEL")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--requests", nargs="*", type=int, default=[1, 8, 64, 256], help="none of them: no timing")
    parser.add_argument("--dummy", choices=SIZES)
    for name in ("out", "probe", "gsm8k", "phrase"):
        parser.add_argument(f"--{name}")
    # More arguments of vLLM's LLM; in a mode's process all of these.
    for name, of_json in dict(guidance=[{}], options={}, one=None).items():
        parser.add_argument(f"--{name}", type=json.loads, default=of_json)
    for name, default in DEFAULTS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    args = parser.parse_args()
    if args.one:
        return argparse.Namespace(**args.one)
    if args.out is None or (args.model is None) == (args.dummy is None) or (args.gsm8k and args.dummy):
        parser.error("give --out, and either MODEL or --dummy; --gsm8k needs MODEL")
    for name in ("out", "model", "probe", "gsm8k"):  # a mode's process runs elsewhere
        setattr(args, name, getattr(args, name) and os.path.abspath(getattr(args, name)))
    return args


def write_dummy(size: str, folder: Path) -> None:
    """Write the configuration of a model, and no weights."""
    from bench.models import DIMENSIONS, VOCAB

    vocab, sizes = VOCAB, (128, 256, 6, 4, 2)
    if size == "tiny":
        vocab = 1024
    else:
        sizes = DIMENSIONS[f"Qwen2.5-{size.upper()}"][:5]
    names = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
    ends = dict.fromkeys(("bos_token_id", "eos_token_id"), vocab - 1)
    config: dict[str, Any] = dict(zip(names.split(), sizes, strict=True)) | ends
    config |= dict(vocab_size=vocab, tie_word_embeddings=size != "7b", torch_dtype="bfloat16", hidden_act="silu")
    config |= dict(architectures=["Qwen2ForCausalLM"], model_type="qwen2", rms_norm_eps=1e-6, rope_theta=1e6)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | dict(max_position_embeddings=32_768)))
    (folder / "generation_config.json").write_text(json.dumps(ends))


def write_random_probe(config: dict[str, Any], folder: Path) -> None:
    """Write a probe of three layers and have this process accept it for the model."""
    from bench.models import random_trunk
    from lenvm_kernels.value_model.trunk import TrunkConfig, write_trunk

    count, hidden, vocab = (config[name] for name in ("num_hidden_layers", "hidden_size", "vocab_size"))
    torch.manual_seed(0)
    write_trunk(*random_trunk((count // 2, count * 3 // 4, count), count, hidden, vocab), 0.997, folder)
    # The hash of the embedding cannot match: it is not known before the engine has the weights.
    TrunkConfig.check_base = lambda *_: None  # type: ignore[method-assign]


def link_project(folder: Path) -> None:
    """The package for PYTHONPATH as it is once installed, ``reference`` included; in ``plugin`` is its entry point."""
    project, entry = Path(__file__).resolve().parents[1], folder / "plugin" / "lenvm_kernels-0.dist-info"
    names = {path.name: path for path in (project / "lenvm_kernels").iterdir()} | {"reference": project / "reference"}
    for made in (entry, folder / "lenvm_kernels"):
        made.mkdir(parents=True)
    for name in names.keys() - {"__pycache__"}:
        (folder / "lenvm_kernels" / name).symlink_to(names[name])
    (folder / "bench").symlink_to(project / "bench")
    (entry / "METADATA").write_text("Metadata-Version: 2.1\nName: lenvm-kernels\nVersion: 0\n")
    (entry / "entry_points.txt").write_text(f"[vllm.logits_processors]\nlenvm = {PROCESSOR}\n")


def environment_of(args: argparse.Namespace, mode: str, linked: str) -> dict[str, str]:
    paths = [linked, *map(os.path.abspath, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))]
    # Other settings of the caller hold where the processor is on, such as LENVM_MAX_CANDIDATES.
    env = {key: value for key, value in os.environ.items() if mode != "plain" or not key.startswith("LENVM_")}
    env |= dict(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false", DO_NOT_TRACK="1")
    env |= dict(VLLM_USE_V2_MODEL_RUNNER="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1")
    env |= dict(VLLM_USE_FLASHINFER_SAMPLER="0", VLLM_USE_DEEP_GEMM="0", VLLM_WORKER_MULTIPROC_METHOD="spawn")
    env |= dict(VLLM_HOST_IP="127.0.0.1", GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="lo", PYTHONUNBUFFERED="1")
    env["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"  # standard output has nothing but results
    if mode != "plain":
        env["LENVM_VALUE_MODEL"] = "none" if mode != "probe" else args.probe or f"{args.out}/random-probe"
        env |= {"LENVM_TOKENIZER": args.model} if args.gsm8k else {}  # for a landing in words
        paths.insert(1, f"{linked}/plugin")
    return env | {"PYTHONPATH": os.pathsep.join(paths)}


class Bench:
    """The engine of a mode, in this process, and what is measured with it."""

    def __init__(self, args: argparse.Namespace) -> None:
        import vllm

        self.args, self.vllm = args, vllm
        if args.dummy:
            write_dummy(args.dummy, Path(args.model))
        if args.gsm8k:
            import_module("math_verify")  # a missing package fails before the engine starts
        self.config = json.loads(Path(args.model, "config.json").read_text())
        if args.mode == "probe" and args.probe is None:
            write_random_probe(self.config, Path(os.environ["LENVM_VALUE_MODEL"]))
        options: dict[str, Any] = dict(model=args.model, dtype="bfloat16", seed=0, max_model_len=args.max_model_len)
        options |= dict(load_format="dummy" if args.dummy else args.load_format, skip_tokenizer_init=bool(args.dummy))
        options |= dict(max_num_seqs=max([*args.requests, *([ROWS] if args.gsm8k else [])]))
        options |= dict(enable_prefix_caching=False, disable_log_stats=False, gpu_memory_utilization=args.memory)
        graphs = {"compilation_config": {"mode": 0, "cudagraph_mode": args.graphs}}
        options |= {"enforce_eager": True} if args.graphs == "NONE" else graphs
        options |= {} if args.attention == "auto" else {"attention_config": {"backend": args.attention}}
        begun = time.perf_counter()
        self.llm = vllm.LLM(**options | args.options)
        self.common = dict(mode=args.mode, model=args.dummy or Path(args.model).name, attention=args.attention)
        self.common |= dict(start_s=time.perf_counter() - begun, vllm=vllm.__version__)
        cache = self.llm.llm_engine.vllm_config.cache_config
        self.common["kv_tokens"] = (cache.num_gpu_blocks or 0) * (cache.block_size or 0)
        self.common["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        gc.unfreeze()  # vLLM has hidden what it made from the collector
        found = [x for x in gc.get_objects() if getattr(type(x), "__module__", "") == GUIDE]
        gc.freeze()
        self.guide = next((x for x in found if type(x).__name__ == "Guide"), None)
        if (self.guide is None) != (args.mode == "plain"):
            raise RuntimeError(f"in mode {args.mode} the engine's processor has the guide {self.guide}")

    def run(self, prompts: list[list[int]], **of_all: Any) -> tuple[float, list[Any], list[list[int]]]:
        params = [self.vllm.SamplingParams(seed=i, detokenize=False, **of_all) for i in range(len(prompts))]
        begun = time.perf_counter()
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return time.perf_counter() - begun, outputs, [list(x.outputs[0].token_ids) for x in outputs]

    def keep(self, file: str, result: dict[str, Any]) -> None:
        """Write and print a result at once: whatever comes later may be killed."""
        if self.guide is not None:  # a failure ends the guidance of requests, which then take less time
            result |= dict(fallbacks=self.guide.fallbacks, guided=len(self.guide._requests))
        result = {key: round(x, 4) if isinstance(x, float) else x for key, x in (self.common | result).items()}
        with Path(self.args.out, file).open("a") as lines:
            lines.write(json.dumps(result) + "\n")
        print("RESULT " + json.dumps(result), flush=True)

    def time_requests(self, count: int) -> None:
        args, rng, runs, digests = self.args, random.Random(count), [], []
        prompts = [rng.choices(range(self.config["vocab_size"] // 2), k=args.prompt_tokens) for _ in range(count)]
        extra = dict(extra_args={"target_length": args.target}) if args.mode in ("none", "probe") else {}
        of_all: dict[str, Any] = dict(temperature=0.8, top_k=8, ignore_eos=True) | extra
        self.run(prompts, max_tokens=8, **of_all)
        for _ in range(args.repeats):
            seconds, outputs, ids = self.run(prompts, max_tokens=args.tokens, **of_all)
            of = [x.metrics for x in outputs]
            ttft = [1e3 * m.first_token_latency for m in of]
            tpot = [1e3 * (m.last_token_ts - m.first_token_ts) / max(1, m.num_generation_tokens - 1) for m in of]
            found = dict(seconds=seconds, tokens_per_s=sum(map(len, ids)) / seconds, tpot_ms=np.median(tpot))
            found |= dict(tpot_p99_ms=np.percentile(tpot, 99), ttft_ms=np.median(ttft))
            runs.append(found | dict(decode_ms=tpot[np.argmax([m.first_token_ts for m in of])]))
            digests.append(hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:12])
        result: dict[str, Any] = dict(requests=count, tokens=args.tokens, digests=digests)
        result |= {key: float(np.median([each[key] for each in runs])) for key in runs[0]}
        result["all_seconds"] = [round(each["seconds"], 4) for each in runs]
        self.keep("timings.jsonl", result | dict(memory_gib=torch.cuda.max_memory_allocated() / 2**30))

    def answer_problems(self) -> None:
        from lenvm_kernels.evaluate.accuracy import check, extract, references
        from lenvm_kernels.loading.prompts import read_prompts, say

        args, tokenizer = self.args, self.llm.get_tokenizer()
        problems = read_prompts(Path(args.gsm8k, "test.jsonl"), "--gsm8k")[: args.problems]
        answers = references(problems, "--gsm8k") or []
        is_guided, alone = args.mode in ("none", "probe"), [{"phrase": None}] if args.mode == "plain" else []
        default = {"phrase": args.phrase} | ({"target_length": args.target} if is_guided else {})
        for number, given in enumerate(args.guidance if is_guided else [*alone, {}] if args.phrase else [{}]):
            setting: dict[str, Any] = default | given
            phrase, target = setting.pop("phrase"), setting.get("target_length", args.target)
            texts = [problem.text for problem in problems]
            texts = texts if phrase is None else [say(x, PHRASES.get(phrase, phrase), target) for x in texts]
            of_chat: Any = dict(add_generation_prompt=True, return_dict=False)
            prompts = [tokenizer.apply_chat_template([{"role": "user", "content": x}], **of_chat) for x in texts]
            of_all = dict(temperature=0.6, max_tokens=args.answer_tokens) | ({"extra_args": setting} if setting else {})
            seconds, outputs, ids = self.run(prompts, **of_all)
            Path(args.out, f"answers-{args.mode}-{number}.json").write_text(json.dumps(ids))
            lengths, texts = np.array([*map(len, ids)]), [tokenizer.decode(x, skip_special_tokens=True) for x in ids]
            pairs = [*zip(map(extract, texts), answers, strict=True)]
            is_right = check(pairs)
            result: dict[str, Any] = dict(setting=number, name="guided" if setting else "said" if phrase else "alone")
            result |= dict(phrase=phrase, guidance=setting, answers=len(ids), target=target)
            result |= {f"within_{n}": float(np.mean(abs(lengths - target) <= n / 100 * target)) for n in (10, 25)}
            result |= dict(
                mean=float(lengths.mean()),
                right=float(np.mean([is_right[pair] for pair in pairs])),
                first=texts[0][-120:],
            )
            result["cut"] = float(np.mean([x.outputs[0].finish_reason == "length" for x in outputs]))
            self.keep("gsm8k.jsonl", result | dict(seconds=seconds, tokens_per_s=float(lengths.sum()) / seconds))


def run_mode(args: argparse.Namespace, mode: str, linked: str) -> int:
    """Run a mode in a subprocess and return its exit status."""
    log, begun = Path(args.out, f"{mode}.log"), time.perf_counter()
    command = [sys.executable, "-m", "bench.vllm_gpu", "--one", json.dumps(vars(args) | {"mode": mode})]
    of_process: Any = dict(cwd=linked, env=environment_of(args, mode, linked), timeout=args.limit)
    try:
        with log.open("w") as file:
            status = subprocess.run(command, stderr=file, **of_process).returncode
    except subprocess.TimeoutExpired:
        status = -9
    if status:
        print(f"{mode}: the end of {log}:", *log.read_text(errors="replace").splitlines()[-25:], sep="\n")
    print(f"{mode}: {time.perf_counter() - begun:.1f} s, status {status}", flush=True)
    return status


def main() -> None:
    args = arguments()
    if hasattr(args, "mode"):
        try:
            bench = Bench(args)
            for count in args.requests:
                bench.time_requests(count)
            if args.gsm8k:
                bench.answer_problems()
        except Exception:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)  # the results are written; the engine need not shut down
    Path(args.out).mkdir(parents=True, exist_ok=True)
    if args.dummy:
        args.model = os.path.abspath(Path(args.out, f"model-{args.dummy}"))
    with tempfile.TemporaryDirectory() as linked:
        link_project(Path(linked))
        failed = [mode for mode in args.modes if run_mode(args, mode, linked)]
    found = Path(args.out, "timings.jsonl")
    results = [*map(json.loads, found.read_text().splitlines())] if found.exists() else []
    for key in ("tpot_ms", "decode_ms") if results else ():
        of = {(result["mode"], result["requests"]): result[key] for result in results}
        print(f"{key:<10}" + "".join(f"{count:>18}" for count in args.requests))
        for mode in args.modes:  # with the ratio to plain
            times = [(of.get((mode, count), np.nan), of.get(("plain", count), np.nan)) for count in args.requests]
            print(f"{mode:<10}" + "".join(f"{f'{x:.3f} ({x / plain:.3f})':>18}" for x, plain in times))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
