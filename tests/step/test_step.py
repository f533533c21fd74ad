"""The guided step over the lifetime of requests, against recomputation from scratch."""

import torch
from torch.utils._pytree import tree_leaves

from bench.launches import intercept_launches
from lenvm_kernels.guidance import parse_guidance
from lenvm_kernels.types import Mode
from tests.helpers.engine import PROMPTS, TILT, Engine, make_step, random_scores
from tests.helpers.models import EOS, VOCAB
from tests.helpers.watch import Operators


def test_probabilities_may_be_guided_in_place(models):
    engine = Engine(*make_step(models.value)).start([0], PROMPTS[:1], [TILT])
    scores = torch.softmax(random_scores(1), dim=1)
    output = engine.decode([0], PROMPTS[:1], scores, probs=scores, is_logits=False, temperature=None)
    expected = torch.zeros(VOCAB).index_add(0, output.candidates.token_ids[0].clamp(min=0).long(), output.probs[0])
    torch.testing.assert_close(scores[0], expected)


def test_flush_leaves_no_pending_writes(models):
    """A caller's CUDA graph needs added and removed requests in the table before its replay.

    Any number of requests takes three writes, and a row gets its last request.
    """
    step, _ = make_step(models.value)
    step.table.columns.faults.fill_(3)
    for change in ([4, 0, 3, 4, 1], [0]):
        for i, row in enumerate(change):
            step.add_request(row, parse_guidance({"target_length": 10 + i}), {EOS}, prompt_len=i, seed=i)
        for expected in (["aten::index_copy_", *["aten::index_fill_"] * 2], []):
            with Operators() as seen:
                step.flush()
            assert sorted(seen.writes) == expected
    with Operators() as seen:
        found = [
            getattr(step.table.columns, name).tolist() for name in ("target_length", "prompt_len", "seed", "faults")
        ]
    zeros = [0] * 12
    assert found == [[10, 14, 0, 12, 13, *zeros], *[[0, 4, 0, 2, 3, *zeros]] * 2, [0, 0, 3, 0, 0, *[3] * 12]]
    assert seen.writes == []
    step.remove_request(3)
    assert step.table.columns.mode[:5].tolist() == [Mode.NEAR, Mode.NEAR, 0, 0, Mode.NEAR]


def test_steps_of_one_model_share_only_its_weights(models):
    """Steps on different streams must not share counters or other memory that kernels write."""
    kept, storages = {}, []  # kept, so that memory is not reused

    def note(kernel, launch):
        for x in tree_leaves((launch.args, launch.keywords)):
            if isinstance(x, torch.Tensor) and x.numel():
                storages[-1].add(x.untyped_storage().data_ptr())
                kept.setdefault(x.untyped_storage().data_ptr(), []).append((x, x.clone()))
        return launch()

    for _ in range(2):
        storages.append(set())
        engine = Engine(*make_step(models.value, backend="triton"))
        with intercept_launches(note):
            engine.start([0, 1], PROMPTS[:2], [TILT, TILT])
            engine.decode([0, 1], PROMPTS[:2], random_scores(2))
    shared = [pair for storage in storages[0] & storages[1] for pair in kept[storage]]
    assert len(shared) > 10
    for x, before in shared:
        assert x.is_floating_point() and torch.equal(x, before), x.shape
