"""Every kernel of the package under the race checker: each operator, and whole guided steps.

``make races`` runs them; ``make test`` leaves them out (the marker ``races``).
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
from lenvm_kernels.paged_slots import PagedSlots
from lenvm_kernels.step import GuidedStep, ModelValues, StepConfig
from tests.helpers.drafts import make_drafts
from tests.helpers.engine import Engine
from tests.helpers.interpreter import needs_interpreter
from tests.helpers.padded_step import PaddedStep
from tests.helpers.races import check_races

pytestmark = [pytest.mark.races, needs_interpreter]

OPERATORS = operators()
CASES, MOST_ROWS = 16, 12  # cases per operator; requests per case


def operator_case(name, number):
    """The results of a drawn case that belong to requests of its batch."""
    operator = OPERATORS[name]
    case = operator.draw(random.Random(f"{name} {number}"), interpreted=True)
    # Tuning constants, and the options that decide whether a sum or attention is split, take all combinations in turn.
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


VOCAB = 300
# By row of the slot table: a request's guidance, and the length of its prompt.
REQUESTS = [
    ({"target_length": 60, "end_token_ids": [9, 12]}, 25),
    ({"scale": 0.7, "return_values": True}, 3),
    (None, 40),
    ({"mode": "exp", "scale": 2.0}, 1),
    ({"return_values": True}, 17),
    ({"mode": "value_bias", "scale": 2.0, "return_values": True}, 33),
    ({"target_length": 9, "op": "ge"}, 5),
]


def steps(model, width, step_class):
    """Prompts, then steps of changing subsets of the rows in changing order, with ``width`` drafts per request."""
    generator = torch.Generator().manual_seed(width)
    config = dict(vocab_size=VOCAB, max_candidates=4, max_drafts=width, max_delta=2 + width, chunk_tokens=32)
    slots, values = PagedSlots(len(REQUESTS), 80, page_size=4), ModelValues(model)
    engine = Engine(step_class(values, slots, StepConfig(**config, backend="triton")), slots)
    sequences = [torch.randint(VOCAB, (length,), generator=generator).tolist() for _, length in REQUESTS]
    order = torch.randperm(len(REQUESTS), generator=generator).tolist()
    for row in order:
        engine.admit(row, sequences[row] + [0] * 20, REQUESTS[row][0], prompt_len=len(sequences[row]), seed=row)
    engine.prefill(order, [sequences[row] for row in order])
    new, results = [1] * len(REQUESTS), []
    for number, rows in enumerate(([4, 0, 6, 2, 5, 1, 3], [5, 0, 1], [1, 3, 5, 0, 6])):
        nodes = len(rows) * (1 + width)
        logits = torch.randn(nodes, VOCAB, generator=generator) * 3
        options = dict(top_k=[0, 3, 4][number], top_p=torch.full((len(rows),), 0.98), min_p=1e-3)
        options["drawn"] = torch.randint(VOCAB, (nodes,), generator=generator)
        if width:
            places = len(rows), width
            token_ids, parents = (
                torch.randint(low, most, places, generator=generator) for low, most in ((0, VOCAB), (-1, width))
            )
            drafts = make_drafts(token_ids, parents)
            drafts.token_ids[::2, 0] = logits[:: 1 + width].argmax(dim=1)[::2]  # likely to be drawn
            options |= dict(drafts=drafts, verify="same_draws", new=[new[row] for row in rows])
        elif number % 2:
            options["probs"] = torch.softmax(logits, 1)
        output = engine.decode(rows, [sequences[row] for row in rows], logits, **options)
        results += [output.candidates.token_ids, output.candidates.probs, output.value_logits, output.probs]
        results += [output.tokens, output.remaining_lengths, *([options["probs"]] if "probs" in options else [])]
        if width:
            tokens, lens = output.verified.tokens, output.verified.lens
        else:
            tokens, lens = output.tokens[:, None], torch.ones_like(output.tokens)
        for row, drawn, count in zip(rows, tokens.tolist(), lens.tolist(), strict=True):
            new[row] = count
            sequences[row] += drawn[:count]
    return [*results, engine.step.table.columns.faults, values.cache.keys, values.cache.values]


DRAFT_KERNELS = {"_pack_drafts_kernel", "_verify_drafts_kernel"}


# A sum over 512 intermediate columns is split here, and a separate kernel adds the parts.
@pytest.mark.parametrize(("step_class", "width", "columns"), [(GuidedStep, 0, 512), (PaddedStep, 2, 64)])
def test_no_races_in_a_step_with_a_value_model(monkeypatch, step_class, width, columns):
    monkeypatch.setattr(sys.modules[ragged_linear.__module__], "SPLIT_FROM", 512)
    sizes = dict(hidden_size=32, intermediate_size=columns, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16)
    torch.manual_seed(0)  # the model's weights
    config = replace(make_config("Qwen3-1.7B", vocab_size=512, **sizes), qkv_bias=True)
    model = make_model(config, torch.float32, "cpu")
    launched = set(check_races(lambda: steps(model, width, step_class)))
    if width:
        assert launched >= {*DRAFT_KERNELS, "_lay_out_kernel", "_value_tree_attention_kernel"}
    else:
        # lay_out plans, and draw reweights.
        absent = {"_plan_attention_kernel", "_reweight_kernel", "_candidate_values_kernel", *DRAFT_KERNELS}
        assert launched == set(kernels()) - absent
