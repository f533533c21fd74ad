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
import triton
import triton.language as tl
from transformers import LlamaConfig, LlamaForCausalLM

from bench.launches import kernels
from bench.models import make_config, make_model
from lenvm_kernels.fuzz.check import operators
from lenvm_kernels.ops.value_tree_attention import value_tree_attention
from lenvm_kernels.paged_slots import PagedSlots
from lenvm_kernels.step import GuidedStep, ModelValues, ProbeValues, StepConfig
from lenvm_kernels.values import LengthProbe
from tests.helpers.drafts import random_drafts
from tests.helpers.engine import Engine, take_step
from tests.helpers.interpreter import needs_interpreter
from tests.helpers.models import TINY, random_model
from tests.helpers.padded_step import PaddedValues
from tests.helpers.probes import model_sizes, write_random_probe
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
    for option in ("constants", "cached", "swiglu", "size"):
        if option in operator.options:
            values = operator.options[option]
            number, index = divmod(number, len(values))
            options[option] = values[-1 - index]
    case = replace(case, rows=case.rows[:MOST_ROWS], options={**case.options, **options})
    with operator.setting(case):
        given = operator.inputs(case, torch.device("cpu"))
        outputs = operator.outputs(given, operator.run(given, partial(operator.function, backend="triton")))
    return [(x.values if x.owners is None else x.values[x.owners >= 0]).contiguous() for x in outputs]


def kernels_of(name):
    """Names of the kernels in the operator's file, and in the private files of operators that it imports from."""
    public = OPERATORS[name].function.__module__
    parts = [getattr(x, "fn", x) for x in vars(sys.modules[public]).values()]
    named = {str(getattr(x, "__module__", "")) for x in parts}
    modules = {public} | {module for module in named if module.startswith("lenvm_kernels.ops._")}
    return {kernel for kernel, function in kernels().items() if function.fn.__module__ in modules}


@pytest.mark.parametrize("name", OPERATORS)
def test_no_races_in_an_operator(name):
    launched = Counter()
    for number in range(CASES):
        launched += check_races(partial(operator_case, name, number))
    assert kernels_of(name) <= set(launched)


@triton.jit
def _arrives_without_barrier(counter_ptr, arrivals):
    is_last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == arrivals - 1
    if is_last:
        tl.atomic_xchg(counter_ptr, 0, sem="relaxed")
    return is_last


def test_splits_merged_without_order_are_found(monkeypatch):
    monkeypatch.setattr(sys.modules[value_tree_attention.__module__], "arrives_last", _arrives_without_barrier)
    with pytest.raises(AssertionError, match=r"store in line .* and load in line .* touch the same bytes from two"):
        check_races(partial(operator_case, "value_tree_attention", 3))  # long contexts, the constants as shipped


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


def steps(values_class, model, width):
    """Prompts, then steps of changing subsets of the rows in changing order, with ``width`` drafts per request."""
    generator, rows = torch.Generator().manual_seed(width), len(REQUESTS)
    slots = PagedSlots(rows, 80, page_size=4)
    config = dict(vocab_size=VOCAB, max_candidates=4, max_drafts=width, max_delta=2 + width, chunk_tokens=32)
    values = values_class(model)
    step = GuidedStep(values, slots, StepConfig(**config, backend="triton"))
    engine, is_probe = Engine(step, slots), values.needs_states is not None
    prompts = [torch.randint(VOCAB, (length,), generator=generator).tolist() for _, length in REQUESTS]
    order = torch.randperm(rows, generator=generator).tolist()
    for row in order:
        guidance, length = REQUESTS[row]
        engine.admit(row, prompts[row] + [0] * 20, guidance, prompt_len=length, seed=row)
    if not is_probe:
        engine.prefill(order, [prompts[row] for row in order])
    lengths, results = torch.tensor([length for _, length in REQUESTS], dtype=torch.int32), []
    tokens = torch.tensor([[prompt[-1]] * (1 + width) for prompt in prompts])
    new_lens = torch.ones(rows, dtype=torch.int32)
    for number, chosen in enumerate(([4, 0, 6, 2, 5, 1, 3], [5, 0, 1], [1, 3, 5, 0, 6])):
        chosen, b = torch.tensor(chosen), len(chosen)
        nodes = b * (1 + width)
        logits = torch.randn(nodes, VOCAB, generator=generator) * 3
        options = {name: torch.full((b,), x) for name, x in dict(top_p=0.98, min_p=1e-3, temperature=0.9).items()}
        if is_probe:
            options["states"] = torch.randn(nodes, values.needs_states[0], generator=generator)
        if width:
            drafts = random_drafts(b, width, seed=number, tokens=VOCAB)
            drafts.token_ids[::2, 0] = logits[:: 1 + width].argmax(dim=1)[::2]  # likely to be drawn
            options |= dict(drafts=drafts, verify="same_draws", new_lens=new_lens[chosen])
        elif number % 2:
            options["probs"] = torch.softmax(logits, 1)
        output = take_step(
            step,
            logits,
            tokens[chosen] if width else tokens[chosen, 0].int(),
            chosen.int(),
            lengths[chosen],
            top_k=torch.full((b,), [0, 3, 4][number], dtype=torch.int32),
            drawn=torch.randint(VOCAB, (nodes,), generator=generator),
            is_logits=True,
            sample=True,
            **options,
        )
        results += [output.candidates.token_ids, output.candidates.probs, output.value_logits, output.probs]
        results += [output.tokens, output.remaining_lengths, *([options["probs"]] if "probs" in options else [])]
        if width:
            tokens[chosen], new_lens[chosen] = output.verified.tokens.long(), output.verified.lens
        else:
            tokens[chosen, 0] = output.tokens.long()
        lengths[chosen] += new_lens[chosen]
    return [*results, step.table.columns.faults, *([] if is_probe else [values.cache.keys, values.cache.values])]


@pytest.fixture(scope="module")
def probe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("probe")
    base = random_model(LlamaForCausalLM, LlamaConfig(**TINY | {"vocab_size": VOCAB}), seed=0)
    write_random_probe(folder, base)
    return LengthProbe.from_pretrained(folder, *model_sizes(base))


DRAFT_KERNELS = {"_expand_drafts_kernel", "_pack_drafts_kernel", "_verify_drafts_kernel"}
PROBE_KERNELS = {"_candidate_values_kernel"}


# A sum over 4096 intermediate columns is split, and a separate kernel adds the parts.
@pytest.mark.parametrize(("values_class", "width", "columns"), [(ModelValues, 0, 4096), (PaddedValues, 2, 64)])
def test_no_races_in_a_step_with_a_value_model(values_class, width, columns):
    sizes = dict(hidden_size=32, intermediate_size=columns, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16)
    torch.manual_seed(0)  # the model's weights
    config = replace(make_config("Qwen3-1.7B", vocab_size=512, **sizes), qkv_bias=True)
    model = make_model(config, torch.float32, "cpu")
    launched = set(check_races(lambda: steps(values_class, model, width)))
    if width:
        assert launched >= {*DRAFT_KERNELS, "_ragged_layout_kernel", "_value_tree_attention_kernel"}
    else:
        # The kernel that stores rows also stores the sums of their squares.
        assert launched == set(kernels()) - {"_square_sums_kernel", *PROBE_KERNELS, *DRAFT_KERNELS}


def test_no_races_in_a_step_with_a_probe(probe):
    launched = set(check_races(lambda: steps(ProbeValues, probe, 2)))
    assert launched >= PROBE_KERNELS | {"_ragged_linear_kernel", "_verify_drafts_kernel"}
    assert not launched & {"_embed_tokens_kernel", "_value_tree_attention_kernel", "_value_head_kernel"}
