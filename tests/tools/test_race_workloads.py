"""All kernels under the race checker: each operator, and whole guided steps.

``make races`` runs them; ``make test`` excludes them (marker ``races``).
"""

import random
import sys
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch

from bench.launches import kernels
from bench.models import make_config, make_model
from lenvm_kernels.fuzz.check import operators
from lenvm_kernels.ops.ragged_linear import ragged_linear
from tests.helpers.drafted_steps import BaseModel, run_drafted
from tests.helpers.engine import PROMPTS, Engine, make_step, run_requests
from tests.helpers.interpreter import needs_interpreter
from tests.helpers.models import VOCAB
from tests.helpers.races import check_races

pytestmark = [pytest.mark.races, needs_interpreter]

OPERATORS = operators()
CASES, MOST_ROWS = 16, 12  # cases per operator; requests per case


def operator_case(name, number):
    """The results of a drawn case that belong to requests of its batch."""
    operator = OPERATORS[name]
    case = operator.draw(random.Random(f"{name} {number}"), interpreted=True)
    # Tuning constants, and options that split a sum or attention, take all combinations in turn.
    options = {}
    for option in ("constants", "cached", "source", "swiglu", "size"):
        if option in operator.options:
            values = operator.options[option]
            number, index = divmod(number, len(values))
            options[option] = values[-1 - index]
    case = replace(case, rows=case.rows[:MOST_ROWS], options={**case.options, **options})
    with operator.setting(case):
        given = operator.inputs(case, torch.device("cpu"))
        outputs = operator.outputs(given, operator.run(given, partial(operator.function, backend="triton")))
    return [x[owners >= 0].contiguous() for x, owners in outputs.values()]


def kernels_of(name):
    """Names of the kernels in the operator's module or package."""
    module = OPERATORS[name].function.__module__
    return {kernel for kernel, function in kernels().items() if f"{function.fn.__module__}.".startswith(f"{module}.")}


@pytest.mark.parametrize("name", OPERATORS)
def test_no_races_in_an_operator(name):
    launched = Counter()
    for number in range(CASES):
        launched += check_races(partial(operator_case, name, number))
    assert set() < kernels_of(name) <= set(launched)


GUIDANCE = [
    {"target_length": 60, "end_token_ids": [9, 12]},
    {"scale": 0.7, "return_values": True},
    None,
    {"mode": "exp", "scale": 2.0},
    {"return_values": True},
    {"mode": "value_bias", "scale": 2.0, "return_values": True},
    {"target_length": 9, "op": "ge"},
]
SEQUENCES = [*PROMPTS, list(range(25)), list(range(40)), [3] * 33]
DRAFT_KERNELS = {"_pack_drafts_kernel", "_verify_drafts_kernel"}


def test_no_races_in_a_step_with_a_value_model(monkeypatch):
    """A sum over 512 intermediate columns is split, and a separate kernel adds the parts."""
    monkeypatch.setattr(sys.modules[ragged_linear.__module__], "SPLIT_FROM", 512)
    sizes = dict(hidden_size=32, intermediate_size=512, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16)
    torch.manual_seed(0)  # the model's weights
    config = replace(make_config("Qwen3-1.7B", vocab_size=VOCAB, **sizes), qkv_bias=True)
    model = make_model(config, torch.float32, "cpu")

    def steps():
        engine = Engine(*make_step(model, max_candidates=4, backend="triton"))
        probs = torch.full((len(GUIDANCE), VOCAB), 1 / VOCAB)
        _, outputs = run_requests(engine, SEQUENCES, GUIDANCE, 3, probs=probs)
        cache = engine.step.values.cache
        results = [probs, engine.step.table.columns.faults, cache.keys, cache.values]
        for x in outputs:
            results += [x.candidates.token_ids, x.candidates.probs, x.value_logits, x.probs, x.tokens]
        return [*results, *(x.remaining_lengths for x in outputs)]

    # lay_out plans, and draw reweights.
    absent = {"_plan_attention_kernel", "_reweight_kernel", "_candidate_values_kernel", *DRAFT_KERNELS}
    assert set(check_races(steps)) == set(kernels()) - absent


def test_no_races_in_a_padded_step_with_drafts(models):
    base = BaseModel()

    def steps():
        sequences = SEQUENCES[2:5]
        draft = lambda i, sequence: [int(base.scores(sequence).argmax()), i + 3]  # noqa: E731
        run = run_drafted(models, [4, 0, 6], sequences, GUIDANCE[:3], 4, base, [-1, 0], draft, padded=True)
        return [torch.tensor(run[0])]

    assert set(check_races(steps)) >= {*DRAFT_KERNELS, "_lay_out_kernel", "_value_tree_attention_kernel"}
