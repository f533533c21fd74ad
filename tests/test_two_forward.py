"""The two-forward baseline against the guided step: the same values, keys and, where the fork is right, probabilities.

And against the pairs that were obtained from the fork itself (tests/golden): it guides as the fork does.
"""

import json
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config

from bench.baselines.two_forward import TwoForwardStep
from bench.baselines.two_forward.forward import tree_mask
from bench.baselines.two_forward.guidance import nearest
from lenvm_kernels.guidance import parse_guidance
from lenvm_kernels.ops._common import next_power_of_2
from lenvm_kernels.paged_slots import PagedSlots
from lenvm_kernels.step import EngineSlots, GuidedStep, StepConfig
from lenvm_kernels.types import Mode, Status
from lenvm_kernels.value_model import ValueModel, ValueModelConfig
from tests.helpers.engine import Engine, take_step
from tests.helpers.models import ARCHITECTURES, TINY, VOCAB, random_pair, value_model_of

GOLDEN = Path(__file__).parent / "golden"
ATOL = 2e-5  # on value logits of O(1), keys and values, fp32 against fp32
FORK_ATOL = 1e-3  # of probabilities: the fork's stopping rule, as for the golden pairs
PROMPTS = [[5, 6, 7, 8], [9], [10, 11, 12, 13, 14, 15, 16, 17, 18], [19, 20], [3, 4, 5]]


def golden(name):
    return [json.loads(line) for line in (GOLDEN / f"{name}.jsonl").open()]


def make_model(architecture, device):
    return value_model_of(*random_pair(architecture), device=device)


def make_model_of_vocab(vocab, device):
    """A value model whose values do not matter."""
    config = ValueModelConfig.from_hf(Qwen3Config(**{**TINY, "vocab_size": vocab, "num_hidden_layers": 1}, head_dim=16))
    return ValueModel(
        config, {name: torch.zeros(shape) for name, shape in config.tensor_shapes().items()}, device=device
    )


def make_both(model, guidance, *, top_k=8):
    """The baseline and the guided step with the same prompts admitted, as engines."""
    engines = []
    for cls in (TwoForwardStep, GuidedStep):
        slots = PagedSlots(len(guidance), 48, page_size=4, device=model.device)
        config = StepConfig(vocab_size=VOCAB, chunk_tokens=6, max_candidates=top_k)
        engine = Engine(cls(model, slots, config), slots)
        for row, params in enumerate(guidance):
            engine.admit(row, [0] * 40, params, prompt_len=len(PROMPTS[row]))
        engine.prefill(range(len(guidance)), PROMPTS[: len(guidance)])
        engines.append(engine)
    return engines


def decode_both(engines, sequences, scores, **filters):
    """A step of both on the same scores; the baseline's output, ours, and our probabilities [B, V]."""
    baseline, ours = engines
    rows = list(range(len(sequences)))
    probs = torch.softmax(scores / 0.8, dim=-1)  # at the temperature that Engine.decode asks for
    theirs = baseline.decode(rows, sequences, scores, **filters)
    return theirs, ours.decode(rows, sequences, scores, probs=probs, **filters), probs


def check_values(theirs, output):
    """The same rows, candidates and value logits."""
    assert theirs.rows == (output.candidates.status == Status.GUIDE).nonzero()[:, 0].tolist()
    for i, ids, z in zip(theirs.rows, theirs.candidate_ids, theirs.value_logits, strict=True):
        n = output.candidates.counts[i]
        assert ids == output.candidates.token_ids[i, :n].tolist()
        torch.testing.assert_close(z, output.value_logits[i, :n], rtol=0, atol=ATOL)
    return len(theirs.rows)


def check_cache(engines, sequences, length):
    """The same keys and values of the first tokens of each sequence, wherever they are."""
    baseline, ours = engines
    for row in range(len(sequences)):
        n = length(row)
        positions = torch.arange(n, device=ours.device)
        slots = ours.slots.slots(positions * 0 + row, positions)
        for name in ("keys", "values"):
            theirs = getattr(baseline.step.cache.kv, name)[:, baseline.step.cache.table[row, :n]]
            expected = getattr(ours.step.cache, name)[:, slots]
            assert n and (expected != 0).any(dim=(0, 2, 3)).all()
            torch.testing.assert_close(theirs, expected, rtol=0, atol=ATOL)


def random_scores(rows, seed, device):
    return (3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))).to(device)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_values_and_cache_over_steps(architecture, device):
    """Prompts in chunks, then 12 steps; rows that need no values in one step are caught up in the next."""
    guidance = [{"mode": "mul", "value_scale": 0.9, "entropy_threshold": 0.4 * (row % 2)} for row in range(5)]
    engines = make_both(make_model(architecture, device), guidance)
    sequences, compared, left_out = [list(tokens) for tokens in PROMPTS], 0, 0
    for number in range(12):
        theirs, output, _ = decode_both(engines, sequences, random_scores(5, number, device))
        compared += check_values(theirs, output)
        left_out += 5 - len(theirs.rows)
        for tokens, token in zip(sequences, output.tokens.tolist(), strict=True):
            tokens.append(token if token >= 0 else tokens[0])
    assert compared > 30 and left_out > 3
    check_cache(engines, sequences, lambda row: engines[0].step._requests[row].cached)
    assert min(request.cached for request in engines[0].step._requests.values()) > 9


def test_guided_probabilities_on_the_device(device):
    """Rows that are its own to draw stay as they are."""
    tilt = {"mode": "mul", "value_scale": 0.9}
    engines = make_both(make_model("qwen2", device), [tilt, None, tilt, tilt])
    theirs, output, probs = decode_both(engines, PROMPTS[:4], random_scores(4, 7, device), top_k=6)
    assert theirs.rows == [0, 2, 3] and check_values(theirs, output) == 3
    torch.testing.assert_close(theirs.probs, probs, rtol=0, atol=FORK_ATOL)
    assert not torch.allclose(theirs.probs[0], torch.softmax(random_scores(4, 7, device) / 0.8, dim=-1)[0], atol=0.01)


def test_guided_probabilities_on_the_host(device):
    """Each row with its own target."""
    engines = make_both(make_model("qwen2", device), [{"target_length": 20 * row, "op": "eq"} for row in range(1, 6)])
    theirs, output, probs = decode_both(engines, PROMPTS, random_scores(5, 3, device))
    assert check_values(theirs, output) == 5
    torch.testing.assert_close(theirs.probs, probs, rtol=0, atol=FORK_ATOL)


def test_requests_come_and_go(device):
    """Slots go round, a row is used again, a sequence falls back; draws are of the guided probabilities."""
    model = make_model("qwen2", device)
    engines = make_both(model, [{"value_scale": 0.9}] * 3)
    baseline = engines[0].step
    slots = len(baseline.cache.free)
    theirs, _, _ = decode_both(engines, PROMPTS[:3], random_scores(3, 1, device))
    assert len(baseline.cache.free) == slots - 3
    assert (theirs.probs.gather(1, theirs.tokens[:, None].long()) > 0).all()
    assert [token in ids for token, ids in zip(theirs.tokens.tolist(), theirs.candidate_ids, strict=True)] == [True] * 3
    baseline.add_request(1, None, set())
    assert len(baseline.cache.free) == slots - 2 + len(PROMPTS[1]) - 1
    unguided, _, _ = decode_both(engines, PROMPTS[:3], random_scores(3, 2, device))  # rows 0 and 2 from where they were
    assert unguided.rows == [0, 2]
    baseline.add_request(0, None, set())
    baseline.add_request(2, None, set())
    assert sorted(baseline.cache.free.tolist()) == list(range(baseline.cache.kv.keys.shape[1]))
    nothing = engines[0].decode([0, 1, 2], PROMPTS[:3], random_scores(3, 2, device))
    assert nothing.tokens is None and nothing.rows == []


def test_bad_input_is_named(device):
    engine = make_both(make_model("qwen2", device), [{"value_scale": 0.9}] * 2, top_k=4)[0]
    with pytest.raises(IndexError, match=r"row must be in \[0, 2\), got 2"):
        engine.step.add_request(2, None, set())
    with pytest.raises(ValueError, match="guidance must be mul or eq, got ge_soft"):
        engine.admit(1, [], {"target_length": 9, "op": "ge_soft"}, prompt_len=0)
    with pytest.raises(ValueError, match="row 0 must have 5 tokens before these, has 3"):
        engine.decode([0, 1], [[*PROMPTS[0], 4, 4], PROMPTS[1]], random_scores(2, 0, device))
    engine = make_both(make_model("qwen2", device), [{"value_scale": 0.9}] * 2, top_k=4)[0]
    with pytest.raises(ValueError, match=r"row 0 has \d+ candidates, room is for max_candidates = 4"):
        engine.decode([0, 1], PROMPTS[:2], random_scores(2, 0, device), top_k=12, min_p=0.0)
    with pytest.raises(ValueError, match="every row must have a top_k"):
        engine.decode([0, 1], PROMPTS[:2], random_scores(2, 0, device), top_k=0)
    engine = make_both(make_model("qwen2", device), [{"value_scale": 0.9}, {"target_length": 9, "op": "eq"}])[0]
    with pytest.raises(ValueError, match="all rows must have a target, or none"):
        engine.decode([0, 1], PROMPTS[:2], random_scores(2, 0, device))


# --- pairs of the fork's own ---


def test_golden_guidance():
    """Every pair of a target, as the fork took it on the host."""
    compared = 0
    for pair in golden("guidance"):
        params = parse_guidance(pair["params"])
        if params.mode == Mode.EQ:
            ends = [token in pair["eos"] for token in pair["token_ids"]]
            v = torch.tensor(pair["value_logits"], dtype=torch.float64).sigmoid().masked_fill(torch.tensor(ends), 0.0)
            found = nearest(pair["probs"], v.tolist(), params, pair["generated"])
            assert found == pytest.approx(pair["expected"], rel=0, abs=1e-6), pair
            compared += 1
    assert compared > 9


def test_golden_candidates(device):
    """Every row alone, through the step of a request whose values do not matter."""
    for pair in golden("candidates"):
        probs, expected = torch.tensor([pair["probs"]], device=device), pair["expected"]
        model = make_model_of_vocab(pair["vocab"], device)
        config = StepConfig(vocab_size=pair["vocab"], max_candidates=next_power_of_2(max(pair["top_k"], 1)))
        step = TwoForwardStep(model, EngineSlots(torch.zeros(1, 8), 8), config)
        step.add_request(0, parse_guidance({"value_scale": 0.9, "entropy_threshold": pair["entropy_threshold"]}), set())
        numbers = dict(dtype=torch.int32, device=device)
        output = take_step(
            step,
            probs,
            torch.tensor([1], **numbers),
            torch.tensor([0], **numbers),
            torch.tensor([1], **numbers),
            top_k=torch.tensor([pair["top_k"]], **numbers),
            top_p=torch.tensor([pair["top_p"]], device=device),
            min_p=torch.tensor([pair["min_p"]], device=device),
        )
        if expected["kind"] == "skip":
            assert output.rows == [] and torch.equal(output.probs, probs)
        elif expected["kind"] == "single":
            assert output.rows == [] and output.probs.nonzero().tolist() == [[0, expected["ids"][0]]]
        else:
            assert output.candidate_ids == [expected["ids"]]


def test_golden_masks():
    """Requests whose prefix is cached whole: all that the in-process value model ever asks for."""
    compared = 0
    for pair in golden("tree_mask"):
        first = 0
        for prefix, cached, count in zip(
            pair["prefix_lens"], pair["cached_prefix_lens"], pair["candidate_lens"], strict=True
        ):
            size = (prefix - cached + count) * (prefix + count)
            if prefix == cached:
                mask, positions = tree_mask([prefix, 2], [count, 1])  # beside another request: with padding
                found = mask[0, :count, : prefix + count].reshape(-1)
                assert "".join("01"[bit] for bit in found.tolist()) == pair["mask"][first : first + size]
                assert positions.tolist() == [prefix] * count + [2] and mask.sum() == found.sum() + 3
                compared += 1
            first += size
    assert compared > 20
