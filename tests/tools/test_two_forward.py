"""The published step against the guided step: candidates, values and cache."""

import pytest
import torch

from bench.two_forward import TwoForwardStep
from lenvm_kernels.paged_slots import PagedSlots
from lenvm_kernels.step import GuidedStep, ModelValues, StepConfig
from lenvm_kernels.types import Status
from tests.helpers.engine import Engine
from tests.helpers.models import ARCHITECTURES, VOCAB, random_pair, value_model_of

ATOL = 2e-5  # on value logits, keys and values of O(1), fp32 against fp32
PROMPTS = [[5, 6, 7, 8], [9], [10, 11, 12, 13, 14, 15, 16, 17, 18], [19, 20], [3, 4, 5]]
TILT = {"mode": "mul", "value_scale": 0.9}


class Both:
    """Engines of the published step and of the guided step with the same prompts."""

    def __init__(self, guidance, device, architecture="qwen2"):
        self.device, rows = device, list(range(len(guidance)))
        model = value_model_of(*random_pair(architecture), device=device)
        self.engines = []
        for cls, values in ((TwoForwardStep, model), (GuidedStep, ModelValues(model))):
            slots = PagedSlots(len(guidance), 48, page_size=4, device=device)
            config = StepConfig(vocab_size=VOCAB, chunk_tokens=6, max_candidates=8)
            engine = Engine(cls(values, slots, config), slots)
            self.engines.append(engine.start(rows, PROMPTS[: len(rows)], guidance, room=30))
        self.published = self.engines[0].step

    def decode(self, sequences, seed):
        """Compare rows, candidates and value logits; returns both outputs."""
        rows, generator = list(range(len(sequences))), torch.Generator().manual_seed(seed)
        scores = (3 * torch.randn(len(rows), VOCAB, generator=generator)).to(self.device)
        theirs, ours = (engine.decode(rows, sequences, scores) for engine in self.engines)
        assert theirs.rows == (ours.candidates.status == Status.GUIDE).nonzero()[:, 0].tolist()
        for i, ids, z in zip(theirs.rows, theirs.candidate_ids, theirs.value_logits, strict=True):
            assert ids == ours.candidates.token_ids[i, : len(ids)].tolist() and len(ids) == ours.candidates.counts[i]
            torch.testing.assert_close(z, ours.value_logits[i, : len(ids)], rtol=0, atol=ATOL)
        return theirs, ours


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_values_and_cache_of_both_steps_agree(architecture, device):
    """Prompts in chunks, then 12 steps. A row without values in a step catches up in a later step."""
    both = Both([TILT] * 5, device, architecture)
    sequences, compared = [list(tokens) for tokens in PROMPTS], 0
    for number in range(12):
        theirs, ours = both.decode(sequences, number)
        compared += len(theirs.rows)
        for tokens, token in zip(sequences, ours.tokens.tolist(), strict=True):
            tokens.append(token if token >= 0 else tokens[0])
    assert 30 < compared < 57
    slots, cache = both.engines[1].slots, both.engines[1].step.values.cache
    for row, request in both.published.requests.items():
        assert request.cached > 9
        places = torch.arange(request.cached, device=device)
        for theirs, ours in ((both.published.kv.keys, cache.keys), (both.published.kv.values, cache.values)):
            expected = ours[:, slots.slots(places * 0 + row, places)]
            assert (expected != 0).any(dim=(0, 2, 3)).all()
            found = theirs[:, both.published.table[row, : request.cached]]
            torch.testing.assert_close(found, expected, rtol=0, atol=ATOL)
