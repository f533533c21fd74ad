"""The SGLang plugin, in the real engine on a CPU: ``make test-sglang`` builds its environment. Elsewhere skipped.

Every test looks at the trace of guided steps: an engine that never guided would generate plausible tokens, too.
"""

import json
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from lenvm_kernels.ops.topk_candidates import Status
from tests.test_value_model import random_model

sglang = pytest.importorskip("sglang", reason="needs SGLang: make test-sglang")

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


class TracedEngine:
    """An engine and the file that its guided steps are traced to."""

    def __init__(self, engine, trace):
        self.engine, self.trace = engine, trace

    def generate(self, prompts, guidance, **sampling):
        """Generate for each prompt; returns the results and the steps in which at least one request was guided."""
        before = len(self._lines())
        params = [{**SAMPLING, **sampling, "custom_params": custom_params} for custom_params in guidance]
        results = self.engine.generate(input_ids=prompts, sampling_params=params)
        return results, [json.loads(line) for line in self._lines()[before:]]

    def _lines(self):
        return self.trace.read_text().splitlines() if self.trace.exists() else []


@contextmanager
def running_engine(folder, name, *, plugin=True, **options):
    """The engine with its overlapping scheduler, with or without the plugin."""
    trace = folder / f"{name}.jsonl"
    environment = {"SGLANG_USE_CPU_ENGINE": "1"}
    if plugin:
        environment |= {"LENVM_VALUE_MODEL": str(folder / "value"), "LENVM_TRACE": str(trace)}
    with pytest.MonkeyPatch.context() as patch:
        for variable in ("LENVM_VALUE_MODEL", "LENVM_TRACE", "TRITON_INTERPRET"):
            patch.delenv(variable, raising=False)
        for variable, value in environment.items():
            patch.setenv(variable, value)
        engine = sglang.Engine(
            model_path=str(folder / "base"),
            device="cpu",
            dtype="float32",
            attention_backend="torch_native",
            sampling_backend="pytorch",
            disable_cuda_graph=True,
            skip_tokenizer_init=True,
            random_seed=7,
            log_level="warning",
            **{"mem_fraction_static": 0.1, "max_total_tokens": 4096, "max_running_requests": 32, **options},
        )
    try:
        yield TracedEngine(engine, trace)
    finally:
        engine.shutdown()


@pytest.fixture(scope="module")
def engine(folder):
    with running_engine(folder, "engine", chunked_prefill_size=32) as engine:
        yield engine


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
        ({"gamma": 1.5}, r"gamma must be a finite number > 0 and < 1, got 1.5"),
        ({"target_lenght": 5}, "target_lenght is not a guidance parameter; did you mean target_length"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.generate(prompts, [custom_params])
    results, steps = engine.generate(prompts, [MODES[0]])
    assert check_steps(folder, prompts, results, steps)


def test_greedy_requests_are_greedy(engine):
    """Guided or not, alone or in a batch with requests that are sampled."""
    prompts = prompts_of(9, 9, seed=3)
    plain, _ = engine.generate(prompts[:1], [None], temperature=0.0)
    guided, steps = engine.generate(prompts[:1], [MODES[0]], temperature=0.0)
    assert steps == []
    params = [{**SAMPLING, "temperature": t, "custom_params": MODES[0]} for t in (0.0, 1.0)]
    mixed = engine.engine.generate(input_ids=prompts, sampling_params=params)
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
    results = engine.engine.generate(input_ids=prompts[0], sampling_params=params, return_logprob=True)
    assert len({tuple(result["output_ids"]) for result in results}) == 3
    for result in results:
        drawn = [(token, value) for value, token, _ in result["meta_info"]["output_token_logprobs"]]
        assert [token for token, _ in drawn] == result["output_ids"]
        assert all(-20 < value < 0 for _, value in drawn)


def test_retraction_under_a_tiny_pool(folder, engine):
    """Requests that are thrown out of the pool and come again keep right values."""
    prompts = prompts_of(*[20] * 8, seed=6)
    with running_engine(
        folder, "tiny", max_total_tokens=320, chunked_prefill_size=32, schedule_conservativeness=0.05
    ) as tiny:
        results, steps = tiny.generate(prompts, [MODES[i] for i in range(8)], max_new_tokens=48)
    assert all(len(result["output_ids"]) == 48 for result in results)
    check_steps(folder, prompts, results, steps)
    lengths = {}
    for step in steps:
        for row in step["rows"]:
            lengths.setdefault(row["rid"], []).append((row["length"], step["mode"]))
    retracted = [rid for rid, steps in lengths.items() if any(m == "EXTEND" and n > 20 for n, m in steps)]
    assert retracted, "no request was retracted: the test shows nothing"


def test_unguided_requests_are_drawn_as_without_the_plugin(folder, engine):
    """Engines with the same seed, with and without the plugin: the rows without guidance get the same tokens."""
    prompts = prompts_of(5, 9, 7, 4, seed=7)
    guidance = [MODES[0], None, MODES[9], None]
    outputs = []
    for plugin in (True, False):
        with running_engine(folder, f"seeded-{plugin}", plugin=plugin) as seeded:
            results, steps = seeded.generate(prompts, guidance)
        outputs.append([result["output_ids"] for result in results])
        assert bool(steps) == plugin
    assert outputs[0][1] == outputs[1][1] and outputs[0][3] == outputs[1][3]
    assert outputs[0][0] != outputs[1][0] and outputs[0][2] != outputs[1][2]
