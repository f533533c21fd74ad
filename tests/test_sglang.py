"""The SGLang plugin, in the real server on a CPU: ``make test-sglang`` builds its environment. Elsewhere skipped.

Every test looks at the trace of guided steps: a server that never guided would generate plausible tokens, too.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from lenvm_kernels.guidance import parse_guidance
from lenvm_kernels.ops.topk_candidates import Status
from lenvm_kernels.step import working_bytes
from lenvm_kernels.value_model import KVCache, ValueModel
from tests.test_value_model import random_model

pytest.importorskip("sglang", reason="needs SGLang: make test-sglang")
requests = pytest.importorskip("requests")
sglang_adapter = pytest.importorskip("lenvm_kernels.adapters.sglang")
ForwardMode = pytest.importorskip("sglang.srt.model_executor.forward_batch_info").ForwardMode

VOCAB, HIDDEN, EOS = 512, 64, 1
TINY = dict(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    bos_token_id=0,
    eos_token_id=EOS,
)
HEAD_SHAPES = {
    "v_head.fc.weight": (HIDDEN, HIDDEN),
    "v_head.fc.bias": (HIDDEN,),
    "v_head.summary.weight": (1, HIDDEN),
    "v_head.summary.bias": (1,),
}
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


GENTLE = {"mode": "centered_exp", "value_scale": -2.0}  # leaves draws a choice


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Checkpoints of a base model and of a value model, both random."""
    folder = tmp_path_factory.mktemp("models")
    random_model(Qwen2ForCausalLM, Qwen2Config(**TINY), seed=0).save_pretrained(folder / "base")
    random_model(Qwen2ForCausalLM, Qwen2Config(**TINY), seed=1).save_pretrained(folder / "value")
    generator = torch.Generator().manual_seed(2)
    head = {name: torch.randn(shape, generator=generator) * shape[-1] ** -0.5 for name, shape in HEAD_SHAPES.items()}
    save_file(head, folder / "value" / "value_head.safetensors")
    return folder


class Server:
    """A running server, and the file that its guided steps are traced to."""

    def __init__(self, url, trace):
        self.url, self.trace = url, trace

    def post(self, **body):
        return requests.post(f"{self.url}/generate", json=body, timeout=120)

    def generate(self, prompts, guidance, **sampling):
        """Generate for each prompt; returns the results and the steps in which at least one request was guided."""
        before = len(self._lines())
        params = [{**SAMPLING, **sampling, "custom_params": custom_params} for custom_params in guidance]
        response = self.post(input_ids=prompts, sampling_params=params)
        assert response.ok, response.text
        return response.json(), [json.loads(line) for line in self._lines()[before:]]

    def _lines(self):
        return self.trace.read_text().splitlines() if self.trace.exists() else []


@contextmanager
def running_server(folder, name, *options, plugin=True, **variables):
    """The real server with its overlapping scheduler, with or without the plugin, in a session of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    trace, log = folder / f"{name}.jsonl", folder / f"{name}.log"
    unset = ("LENVM_VALUE_MODEL", "LENVM_TRACE", "TRITON_INTERPRET")
    environment = {key: value for key, value in os.environ.items() if key not in unset}
    environment |= {"SGLANG_USE_CPU_ENGINE": "1", **variables}
    if plugin:
        environment |= {"LENVM_VALUE_MODEL": str(folder / "value"), "LENVM_TRACE": str(trace)}
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", folder / "base", "--port", str(port)]
    command += ["--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"]
    command += ["--sampling-backend", "pytorch", "--disable-cuda-graph", "--skip-tokenizer-init", "--random-seed", "7"]
    command += ["--mem-fraction-static", "0.1", "--max-total-tokens", "4096", "--max-running-requests", "32", *options]
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            if process.poll() is not None:
                break
            with suppress(requests.ConnectionError):
                if requests.get(f"{url}/health", timeout=10).ok:
                    break
            time.sleep(0.5)
        assert process.poll() is None, log.read_text()[-3000:]
        yield Server(url, trace)
    finally:
        with suppress(ProcessLookupError):  # it has ended by itself
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def engine(folder):
    with running_server(folder, "engine", "--chunked-prefill-size", "32") as server:
        yield server


@torch.no_grad()
def values_from_scratch(folder, sequences):
    """The value logit at the last token of each sequence, by ``transformers``."""
    model = Qwen2ForCausalLM.from_pretrained(folder / "value", dtype=torch.float32).eval()
    head = load_file(folder / "value" / "value_head.safetensors")
    lens = torch.tensor([len(tokens) for tokens in sequences])
    padded = torch.zeros(len(sequences), int(lens.max()), dtype=torch.long)
    for i, tokens in enumerate(sequences):
        padded[i, : len(tokens)] = torch.tensor(tokens)
    h = model.model(padded, use_cache=False).last_hidden_state[torch.arange(len(lens)), lens - 1]
    h = torch.nn.functional.silu(h @ head["v_head.fc.weight"].T + head["v_head.fc.bias"])
    return (h @ head["v_head.summary.weight"].T + head["v_head.summary.bias"])[:, 0]


def check_steps(folder, prompts, results, steps):
    """Every value of every traced step is that of the sequence as it came to be; returns how many there were."""
    sequences = {r["meta_info"]["id"]: (p, [*p, *r["output_ids"]]) for p, r in zip(prompts, results, strict=True)}
    candidates, values = [], []
    for step in steps:
        for row in step["rows"]:
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


def test_every_mode_beside_unguided_requests(folder, engine):
    """Prompts shorter and longer than a chunk of the prefill, guided in every mode and not at all, in one batch."""
    prompts = prompts_of(*range(3, 80, 6))[:12]
    results, steps = engine.generate(prompts, [*MODES, None, {}])
    assert check_steps(folder, prompts, results, steps) > 12 * 16
    guided = {row["rid"] for step in steps for row in step["rows"] if row["status"] != Status.UNGUIDED}
    assert guided == {result["meta_info"]["id"] for result in results[:10]}
    assert any(len(step["rows"]) >= 12 for step in steps)


def test_a_cached_prefix_is_one_that_the_value_model_has_seen(folder, engine):
    """An unguided request leaves its prompt in the radix cache; a guided one must not take it, but a second one may."""
    prompts = prompts_of(40, seed=1)
    engine.generate(prompts, [None])
    for cached, guidance in ((False, MODES[0]), (True, MODES[1]), (True, MODES[2])):
        results, steps = engine.generate(prompts, [guidance])
        assert (results[0]["meta_info"]["cached_tokens"] > 0) == cached
        assert check_steps(folder, prompts, results, steps)
    results, _ = engine.generate(prompts, [None])
    assert results[0]["meta_info"]["cached_tokens"] > 0


def test_bad_parameters_are_refused_and_harm_nobody(folder, engine):
    prompts = prompts_of(5, seed=2)
    for custom_params, message in (
        ({"mode": "loud"}, "value_mode must be one of"),
        ({"gamma": 1.5}, "gamma must be a finite number > 0 and < 1, got 1.5"),
        ({"target_lenght": 5}, "target_lenght is not a guidance parameter; did you mean target_length"),
    ):
        response = engine.post(input_ids=prompts[0], sampling_params={**SAMPLING, "custom_params": custom_params})
        assert response.status_code == 400 and message in response.json()["error"]["message"]
    results, steps = engine.generate(prompts, [MODES[0]])
    assert check_steps(folder, prompts, results, steps)


def test_greedy_requests_are_greedy(engine):
    """Guided or not, alone or in a batch with requests that are sampled."""
    prompts = prompts_of(9, 9, seed=3)
    plain, _ = engine.generate(prompts[:1], [None], temperature=0.0)
    guided, steps = engine.generate(prompts[:1], [MODES[0]], temperature=0.0)
    assert steps == []
    params = [{**SAMPLING, "temperature": t, "custom_params": MODES[0]} for t in (0.0, 1.0)]
    mixed = engine.post(input_ids=prompts, sampling_params=params).json()
    assert plain[0]["output_ids"] == guided[0]["output_ids"] == mixed[0]["output_ids"]


def test_seeds(engine):
    """A guided request with a seed is the same again, alone or beside others."""
    prompts = prompts_of(9, 12, 4, seed=4)
    alone, _ = engine.generate(prompts[:1], [GENTLE], sampling_seed=5)
    again, _ = engine.generate(prompts, [GENTLE, MODES[0], None], sampling_seed=5)
    other, _ = engine.generate(prompts[:1], [GENTLE], sampling_seed=6)
    assert alone[0]["output_ids"] == again[0]["output_ids"] != other[0]["output_ids"]


def test_logprobs_and_several_samples(engine):
    """Log-probabilities are the base model's, of the token that was drawn; ``n`` samples differ."""
    prompts = prompts_of(9, seed=5)
    params = {**SAMPLING, "n": 3, "custom_params": GENTLE}
    results = engine.post(input_ids=prompts[0], sampling_params=params, return_logprob=True).json()
    assert len({tuple(result["output_ids"]) for result in results}) == 3
    for result in results:
        drawn = [(token, value) for value, token, _ in result["meta_info"]["output_token_logprobs"]]
        assert [token for token, _ in drawn] == result["output_ids"]
        assert all(-20 < value < 0 for _, value in drawn)


def test_retracted_requests_keep_right_values(folder):
    """The engine throws running requests out of its pool every few steps; they come again and go on."""
    prompts = prompts_of(*[20] * 8, seed=6)
    with running_server(folder, "retracting", SGLANG_TEST_RETRACT="1") as server:
        results, steps = server.generate(prompts, MODES[:8], max_new_tokens=32)
    assert all(len(result["output_ids"]) == 32 for result in results)
    check_steps(folder, prompts, results, steps)
    again = [row for step in steps if step["mode"] == "EXTEND" for row in step["rows"] if row["length"] > 20]
    assert len(again) > 4, "no request was retracted: the test shows nothing"


def test_unguided_requests_are_drawn_as_without_the_plugin(folder):
    """Servers with the same seed, with and without the plugin: the rows without guidance get the same tokens."""
    prompts = prompts_of(5, 9, 7, 4, seed=7)
    guidance = [GENTLE, None, MODES[0], None]
    outputs = []
    for plugin in (True, False):
        with running_server(folder, f"seeded-{plugin}", plugin=plugin) as server:
            results, steps = server.generate(prompts, guidance)
        outputs.append([result["output_ids"] for result in results])
        assert bool(steps) == plugin
    assert outputs[0][1] == outputs[1][1] and outputs[0][3] == outputs[1][3]
    assert outputs[0][0] != outputs[1][0] and outputs[0][2] != outputs[1][2]


def test_speculative_decoding_is_refused_at_start(folder):
    options = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "4")
    with (
        pytest.raises(AssertionError, match="speculative_algorithm must not be set"),
        running_server(folder, "s", *options),
    ):
        pass


# --- the adapter without an engine ---


@pytest.fixture
def guide(folder, monkeypatch):
    """The guidance of this process, as if an engine had loaded the value model."""
    settings = sglang_adapter.Settings(folder / "value", chunk_tokens=64)
    guide = sglang_adapter.Guide(settings, ValueModel.from_pretrained(folder / "value"))
    monkeypatch.setattr(sglang_adapter, "_guide", guide)
    return guide


@pytest.mark.parametrize("cap", [None, 2000])
def test_the_pool_leaves_room_for_the_step(guide, cap):
    """All memory but at most a few slots is used, and none that the step needs; a smaller pool stays as it was told."""
    cell, budget = 1000, 40_000_000

    class Configurator:
        page_size = 1
        model_config = SimpleNamespace(context_len=512, vocab_size=VOCAB)

        def resolve_max_num_reqs(self, tokens):
            return min(tokens // 512 + 1, 64)

    def original(configurator, pool_bytes, *, cap_tokens):
        tokens = pool_bytes // cell
        return SimpleNamespace(max_total_num_tokens=tokens if cap is None else min(tokens, cap))

    pool = sglang_adapter.leave_room(original, Configurator(), budget)
    tokens, rows = pool.max_total_num_tokens, Configurator().resolve_max_num_reqs(pool.max_total_num_tokens)
    sizes = dict(rows=rows, max_len=512, vocab_size=VOCAB)
    working = max(
        working_bytes(guide.value_model, **sizes, max_candidates=8),
        working_bytes(guide.value_model, **sizes, tokens=64),
    )
    used = tokens * cell + KVCache.num_bytes(guide.value_model, tokens + 1 + rows * 9) + working
    assert used <= budget
    assert tokens == cap if cap else used > 0.9 * budget
    with pytest.raises(ValueError, match="LENVM_VALUE_MODEL leaves no memory for the engine's pool"):
        sglang_adapter.leave_room(original, Configurator(), 100_000)


def test_a_failing_step_ends_guidance_and_not_the_engine(guide, caplog):
    def request(row):
        return SimpleNamespace(
            kv=SimpleNamespace(req_pool_idx=row), lenvm_guidance=parse_guidance(GENTLE), skip_radix_cache_insert=False
        )

    cleared = []
    guide.step = SimpleNamespace(clear=cleared.append)  # it has nothing else: every step fails
    info = SimpleNamespace(top_ks=None, top_ps=None, min_ps=None)
    for failures in (1, 2):
        batch = SimpleNamespace(lenvm_guided_reqs=[request(3), request(5)], forward_mode=ForwardMode.DECODE)
        reqs = batch.lenvm_guided_reqs
        with guide.sampling(batch):
            assert guide.draw(torch.ones(2, VOCAB), info) is None
            assert guide.draw(torch.ones(2, VOCAB), info) is None  # nothing left to guide
        assert guide.counters.fallbacks == guide.counters.guided_steps == failures
        assert all(req.lenvm_guidance is None and req.skip_radix_cache_insert for req in reqs)
    assert cleared == [3, 5, 3, 5]
    assert caplog.text.count("a step failed") == 1


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        (
            "LENVM_VALUE_MODEL",
            "nowhere",
            "LENVM_VALUE_MODEL must be an existing directory or .gguf file, got 'nowhere'",
        ),
        ("LENVM_DTYPE", "int8", "LENVM_DTYPE must be one of float32, bfloat16, float16, got 'int8'"),
        ("LENVM_MAX_CANDIDATES", "5", "LENVM_MAX_CANDIDATES must be a power of two up to 64, got '5'"),
        ("LENVM_CHUNK_TOKENS", "0", "LENVM_CHUNK_TOKENS must be an integer of at least 1, got '0'"),
        ("LENVM_GRAPHS", "yes", "LENVM_GRAPHS must be 0 or 1, got 'yes'"),
    ],
)
def test_bad_settings_are_named(folder, monkeypatch, variable, value, message):
    monkeypatch.delenv("LENVM_VALUE_MODEL", raising=False)
    assert sglang_adapter.Settings.from_environment() is None
    monkeypatch.setenv("LENVM_VALUE_MODEL", str(folder / "value"))
    assert sglang_adapter.Settings.from_environment().max_candidates == 8
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=message):
        sglang_adapter.Settings.from_environment()
