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
    """A caller's CUDA graph needs added and removed requests in the table before its replay."""
    step, _ = make_step(models.value)
    step.add_request(3, parse_guidance({"target_length": 5, "op": "ge"}), {EOS})
    step.add_request(1, None, {EOS}, seed=4)
    step.flush()
    with Operators() as seen:
        step.flush()
        assert step.table.columns.mode.tolist() == [0, 0, 0, Mode.GE, *[0] * 13] and step.table.columns.seed[1] == 4
    assert seen.writes == []
    step.remove_request(3)
    with Operators() as seen:
        step.flush()
    assert sorted(seen.writes) == ["aten::index_copy_", *["aten::index_fill_"] * 2]
    assert not step.table.columns.mode.any()


def test_steps_of_one_model_share_its_weights_only(models):
    """Steps on different streams must not share counters or other memory that kernels write."""
    kept, storages = {}, []  # kept, so that no memory is freed and used again

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
