"""Every kernel of the package under the race checker: each operator, and whole guided steps.

``make races`` runs them; ``make test`` leaves them out (the marker ``races``). Rows, strides, lengths and slots differ
from each other everywhere: a kernel that mixes them up touches what belongs to another program.
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
from lenvm_kernels.guidance import parse_guidance
from lenvm_kernels.ops.value_tree_attention import value_tree_attention
from lenvm_kernels.paged_slots import PagedSlots
from lenvm_kernels.step import GuidedStep, StepBatch, StepConfig
from lenvm_kernels.value_model import Trunk
from tests.helpers.drafts import random_drafts
from tests.helpers.engine import Engine, take_step
from tests.helpers.interpreter import needs_interpreter
from tests.helpers.models import TINY, random_model
from tests.helpers.padded_step import PaddedStep
from tests.helpers.races import check_races
from tests.helpers.trunks import model_sizes, write_random_trunk

pytestmark = [pytest.mark.races, needs_interpreter]

OPERATORS = operators()
CASES, MOST_ROWS = 16, 12  # of an operator; requests of a case


def i32(values):
    return torch.tensor(values, dtype=torch.int32)


def operator_case(name, number):
    """The results of a drawn case: what belongs to the requests of its batch."""
    operator = OPERATORS[name]
    case = operator.draw(random.Random(f"{name} {number}"), interpreted=True)
    # Every setting of the tuning constants comes in turn, and attention over so many keys that it is split.
    inturn = {option: operator.options[option] for option in ("constants", "cached") if option in operator.options}
    options = {option: values[-1 - number % len(values)] for option, values in inturn.items()}
    case = replace(case, rows=case.rows[:MOST_ROWS], options={**case.options, **options})
    with operator.setting(case):
        given = operator.inputs(case, torch.device("cpu"))
        outputs = operator.outputs(given, operator.run(given, partial(operator.function, backend="triton")))
    return [(x.values if x.owners is None else x.values[x.owners >= 0]).contiguous() for x in outputs]


def kernels_of(name):
    """Names of the kernels in the operator's file, and in those files of operators that it is made of."""
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


@triton.jit
def _arrives_relaxed(counter_ptr, arrivals):
    tl.debug_barrier()
    is_last = tl.atomic_add(counter_ptr, 1, sem="relaxed") == arrivals - 1
    if is_last:
        tl.atomic_xchg(counter_ptr, 0, sem="relaxed")
    return is_last


@pytest.mark.parametrize("faulty", [_arrives_without_barrier, _arrives_relaxed])
def test_splits_merged_without_order_are_found(faulty, monkeypatch):
    monkeypatch.setattr(sys.modules[value_tree_attention.__module__], "arrives_last", faulty)
    with pytest.raises(AssertionError, match=r"store in line .* and load in line .* touch the same bytes from two"):
        check_races(partial(operator_case, "value_tree_attention", 3))  # long contexts, the constants as shipped


# Of steps with drafts.
DRAFT_KERNELS = {"_expand_drafts_kernel", "_pack_drafts_kernel", "_verify_drafts_kernel"}
# So many intermediate columns that their sum is taken in parts.
_WIDTHS = dict(hidden_size=32, intermediate_size=4096, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=16)
CONFIG = replace(make_config("Qwen3-1.7B", vocab_size=512, **_WIDTHS), qkv_bias=True)
VOCAB, EOS = 300, {7, 8}
# By row of the slot table: what a request asks for, and the length of its prompt.
REQUESTS = [
    ({"target_length": 60, "end_token_ids": [9, 12]}, 650),
    ({"scale": 0.7, "return_values": True}, 3),
    (None, 40),
    ({"mode": "exp", "scale": 2.0}, 1),
    ({"return_values": True}, 17),
    ({"mode": "value_bias", "scale": 2.0, "return_values": True}, 33),
    ({"target_length": 9, "op": "ge"}, 5),
]


def guided_step(step_class, k):
    """Prompts in ragged chunks, a prediction, then steps of changing subsets of the rows in changing order."""
    generator = torch.Generator().manual_seed(k)
    rows = len(REQUESTS)
    torch.manual_seed(0)  # the model's weights
    slots = PagedSlots(rows, 660, page_size=4)
    step = step_class(
        make_model(CONFIG, torch.float32, "cpu"),
        slots,
        StepConfig(vocab_size=VOCAB, max_candidates=k, chunk_tokens=32, backend="triton"),
    )
    for cache in (step.cache.keys, step.cache.values):
        cache.normal_(generator=generator)
    for row in torch.randperm(rows, generator=generator).tolist():
        guidance, prompt_len = REQUESTS[row]
        slots.extend(row, prompt_len + 5)
        params = None if guidance is None else parse_guidance(guidance)
        step.add_request(row, params, EOS, prompt_len=prompt_len, seed=row + 90)

    # Up to 12 tokens of each prompt, all but its last, are computed; those before them are in the cache.
    lengths = i32([prompt_len for _, prompt_len in REQUESTS])
    lens = (lengths - 1).clamp(max=12)
    order = torch.randperm(rows, generator=generator).int()
    starts = (lens[order].cumsum(0) - lens[order]).int()
    row_of = order.repeat_interleave(lens[order])
    cached = (lengths - 1 - lens)[order]
    position = torch.arange(len(row_of)) + (cached - starts).repeat_interleave(lens[order])
    prompt = torch.randint(VOCAB, (len(row_of),), generator=generator)
    step.extend(prompt, slots.slots(row_of, position), order, starts, lens[order], cached)
    last = torch.randint(VOCAB, (rows,), generator=generator, dtype=torch.int32)
    results = [step.predict(StepBatch(last[order], order, lengths[order]))]

    for number, chosen in enumerate([[4, 0, 6, 2, 5, 1, 3], [5, 0, 1], [1, 3, 5, 0, 6]]):
        chosen, b = i32(chosen), len(chosen)
        logits = torch.randn(b, VOCAB, generator=generator) * 3
        logits[0, 5] = torch.nan if number == 2 else 0.0
        probs = torch.softmax(logits, 1) if number % 2 else None
        output = take_step(
            step,
            logits,
            last[chosen],
            chosen,
            lengths[chosen],
            top_k=i32([0, 5, k][number % 3 : number % 3 + 1] * b),
            probs=probs,
            drawn=torch.randint(VOCAB, (b,), generator=generator),
            **sampling_of(b),
        )
        results += [output.candidates.token_ids, output.candidates.probs, output.value_logits, output.probs]
        results += [output.tokens, output.remaining_lengths] + ([] if probs is None else [probs])
        last[chosen.long()] = output.tokens.int()
        lengths[chosen.long()] += 1
    return [*results, step.cache.keys, step.cache.values, step.table.columns.faults]


def sampling_of(requests):
    """What each of so many requests samples by, but for ``top_k``."""
    filters = dict(top_p=0.98, min_p=1e-3, temperature=0.9)
    return dict(is_logits=True, sample=True) | {name: torch.full((requests,), x) for name, x in filters.items()}


def drafted_step(step_class, k):
    """Steps with trees of drafts, of which those that were drawn are taken."""
    generator, width, rows = torch.Generator().manual_seed(k), 3, 4
    torch.manual_seed(0)  # the model's weights
    slots = PagedSlots(rows, 80, page_size=4)
    step = step_class(
        make_model(replace(CONFIG, intermediate_size=64), torch.float32, "cpu"),
        slots,
        StepConfig(
            vocab_size=VOCAB, max_candidates=k, max_drafts=width, max_delta=5, chunk_tokens=32, backend="triton"
        ),
    )
    for cache in (step.cache.keys, step.cache.values):
        cache.normal_(generator=generator)
    lens = [9, 3, 12, 1]
    prompts = [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in lens]
    order = [3, 0, 2, 1]
    guidance = [REQUESTS[row][0] for row in order]
    Engine(step, slots).start(order, [prompts[row] for row in order], guidance, room=20)
    lengths, results = i32(lens), []
    tokens = torch.tensor([[prompt[-1]] * (1 + width) for prompt in prompts])
    new_lens = torch.ones(rows, dtype=torch.int32)
    for number, chosen in enumerate([[2, 0, 3, 1], [1, 2, 0]]):
        chosen = torch.tensor(chosen)
        b, nodes = len(chosen), len(chosen) * (1 + width)
        logits = torch.randn(nodes, VOCAB, generator=generator) * 3
        drafts = random_drafts(b, width, seed=number, tokens=VOCAB)
        # Of every other request the likeliest token after its last one is a draft.
        drafts.token_ids[::2, 0] = logits[:: 1 + width].argmax(dim=1)[::2]
        output = take_step(
            step,
            logits,
            tokens[chosen],
            chosen.int(),
            lengths[chosen],
            new_lens=new_lens[chosen],
            top_k=i32([5, k][number : number + 1] * b),
            drawn=torch.randint(VOCAB, (nodes,), generator=generator),
            drafts=drafts,
            verify="same_draws",
            **sampling_of(b),
        )
        results += [output.candidates.token_ids, output.candidates.probs, output.value_logits, output.probs]
        results += [output.tokens, output.remaining_lengths, *output.verified]
        tokens[chosen], new_lens[chosen] = output.verified.tokens.long(), output.verified.lens
        lengths[chosen] += output.verified.lens
    assert new_lens.max() > 1 and not step.table.columns.faults.any()
    return [*results, step.cache.keys, step.cache.values, step.table.columns.faults]


def trunk_step(trunk):
    """Steps of changing subsets of the rows in changing order, whose values are of the states of a base model."""
    generator, width, rows = torch.Generator().manual_seed(4), 2, len(REQUESTS)
    config = StepConfig(vocab_size=VOCAB, max_candidates=4, max_drafts=width, backend="triton")
    step = GuidedStep(trunk, PagedSlots(rows, 700, page_size=4), config)
    guidance = [{"target_length": 30}, None, {"target_length": 3, "op": "ge_near"}, *(one for one, _ in REQUESTS[3:])]
    for row, (params, (_, prompt_len)) in enumerate(zip(guidance, REQUESTS, strict=True)):
        parsed = None if params is None else parse_guidance(params)
        step.add_request(row, parsed, EOS, prompt_len=prompt_len, seed=row + 90)
    lengths, results = i32([prompt_len for _, prompt_len in REQUESTS]), []
    for number, chosen in enumerate([[4, 0, 6, 2, 5, 1, 3], [5, 0, 2]]):
        chosen = torch.tensor(chosen)
        nodes = len(chosen) * (1 + width)
        output = take_step(
            step,
            torch.randn(nodes, VOCAB, generator=generator) * 3,
            torch.randint(VOCAB, (len(chosen),), generator=generator, dtype=torch.int32),
            chosen.int(),
            lengths[chosen],
            states=torch.randn(nodes, trunk.config.state_size, generator=generator),
            top_k=i32([4, 3][number : number + 1] * len(chosen)),
            drawn=torch.randint(VOCAB, (nodes,), generator=generator),
            drafts=random_drafts(len(chosen), width, seed=number, tokens=VOCAB),
            verify="same_draws",
            **sampling_of(len(chosen)),
        )
        results += [output.candidates.token_ids, output.value_logits, output.probs, output.tokens]
        lengths[chosen] += output.verified.lens
    return [*results, step.table.columns.faults]


def test_no_races_in_a_step_with_a_trunk(tmp_path):
    base = random_model(LlamaForCausalLM, LlamaConfig(**TINY | {"vocab_size": VOCAB}), seed=0)
    write_random_trunk(tmp_path, base)
    trunk = Trunk.from_pretrained(tmp_path, *model_sizes(base))
    launched = set(check_races(lambda: trunk_step(trunk)))
    assert launched >= {"_candidate_values_kernel", "_ragged_linear_kernel", "_verify_drafts_kernel"}
    assert not launched & {"_embed_tokens_kernel", "_value_tree_attention_kernel", "_value_head_kernel"}


def test_no_races_in_a_step_with_drafts():
    launched = set(check_races(lambda: drafted_step(PaddedStep, 4)))
    assert launched >= {*DRAFT_KERNELS, "_ragged_layout_kernel", "_value_tree_attention_kernel"}


@pytest.mark.parametrize(("step_class", "k"), [(GuidedStep, 8), (PaddedStep, 4)])
def test_no_races_in_a_step(step_class, k):
    """All kernels of a value model, but that in a step whoever stores a row leaves the sums of its squares."""
    launched = set(check_races(lambda: guided_step(step_class, k)))
    assert launched == set(kernels()) - DRAFT_KERNELS - {"_square_sums_kernel", "_candidate_values_kernel"}
