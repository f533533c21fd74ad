"""Outputs of guided steps with drafts and spans: ends, the suppressed end of sequence, tokens after them."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from lenvm_kernels.guidance import Thoughts, parse_guidance
from lenvm_kernels.step import StepBatch
from lenvm_kernels.types import TextBreak
from tests.helpers.cases import make_drafts
from tests.helpers.drafted_steps import END, BaseModel, run_drafted, run_plain
from tests.helpers.engine import GUIDANCE as KINDS
from tests.helpers.engine import PROMPTS, Engine, make_step, take_step
from tests.helpers.models import EOS, VOCAB

OTHER_END = 60
TILT = {"value_mode": "centered_exp", "value_scale": -6}
SOFT = {"target_length": 8, "op": "le_soft", "gamma": 0.9}


GUIDANCE = [
    TILT | {"end_token_ids": [END, OTHER_END], "hard_limit": 9},
    SOFT | {"end_token_ids": [OTHER_END], "hard_limit": 14, "answer_length": 3},
    {"end_token_ids": [END], "hard_limit": 5},  # a hard limit alone
    TILT | {"end_token_ids": [END], "allow_eos": True},
    TILT,
]
PROMPTS_OF_ALL = [*PROMPTS, [40, END, 42, OTHER_END]]


def test_sequence_cannot_end_before_its_span(models):
    """Spans cut at a limit, spans that end by themselves, only a hard limit, ``allow_eos``, and no span."""
    base, count = BaseModel(), 40
    texts = run_plain(models, [4, 0, 6, 2, 5], PROMPTS_OF_ALL, GUIDANCE, count, base, max_delta=6)
    ends = [[END, OTHER_END], [OTHER_END], [END]]
    for text, of_span, limit in zip(texts, ends, (9, 14, 5), strict=False):
        place = min(i for i, token in enumerate(text) if token in of_span)
        assert place <= limit and EOS not in text[:place]
        assert place < limit or text[place] == of_span[0]
        assert EOS in text[place:]
    assert texts[2].index(END) <= 5 and EOS in texts[3] and EOS in texts[4]
    # After its span, a request behaves as an unguided request.
    for text, prompt, of_span in zip(texts, PROMPTS_OF_ALL, ends, strict=False):
        place = 1 + min(i for i, token in enumerate(text) if token in of_span)
        after = [*prompt, *text[:place]]
        assert text[place:] == run_plain(models, [1], [after], [None], count - place, base)[0]


# Several spans with starts and ends of several tokens, and closings. The end of sequence begins the next span.
SEVERAL = [
    TILT | {"end_token_ids": [[END, OTHER_END], 9], "start_token_ids": [EOS], "hard_limit": 4},
    SOFT | {"end_token_ids": [END], "start_token_ids": [[EOS, EOS], 8], "hard_limit": 3, "end_message": [70, 71]},
    TILT | {"end_token_ids": [[3, 4]], "hard_limit": 5, "hard_limit_grace": 4, "end_message": [END]},
    {"end_token_ids": [OTHER_END], "start_token_ids": [[EOS, EOS, EOS]], "hard_limit": 2, "end_message": [5, END]},
    TILT | {"return_values": True},
]
LANDINGS = [
    {"target_length": 20, "landing": [70, 71, 5], "landing_tokens": 14},
    {"target_length": 16, "landing": [5], "landing_tokens": 14, "value_constraint": "le_near"},
    {"target_length": 15, "landing": [70, 71], "landing_tokens": 10, "value_constraint": "eq_soft"},
    {"target_length": 12, "landing": [END, 71], "strength": 2.0},
    TILT | {"return_values": True},
]
BREAKS = (torch.arange(VOCAB) % 4 == 1).to(torch.int8)


# Targets of answers after thoughts, with and without a budget. EOS begins thoughts and END ends them.
THOUGHTS = Thoughts(ends=((END,),), starts=((EOS,),))
ANSWERS = [
    {"target_length": 8, "gamma": 0.9},
    {"target_length": 6, "value_constraint": "eq_soft", "gamma": 0.9},
    {"target_length": 12, "tolerance": 0.3, "strength": 2},
]
BUDGETS = [answer | {"thinking_budget": 6, "end_token_ids": [END, OTHER_END]} for answer in ANSWERS]
BUDGETS[2] |= {"start_token_ids": [EOS], "hard_limit": 4}
CALLS = tuple((token,) for token in range(30, 36))  # begin tool calls
WITH_CALLS = [
    parse_guidance(answer | {"thinking_budget": 6}, thoughts=replace(THOUGHTS, tool_calls=CALLS)) for answer in ANSWERS
]
OF_THOUGHTS = [*BUDGETS[:2], WITH_CALLS[2], *(parse_guidance(answer, thoughts=THOUGHTS) for answer in ANSWERS[::2])]


def test_target_of_the_answer_after_a_thought(models):
    """After its thought, a request continues as a request with only the target."""
    base, count = BaseModel(), 40
    texts = run_plain(models, [4, 0, 6], PROMPTS_OF_ALL[:3], BUDGETS, count, base, max_delta=6)
    plain = run_plain(models, [4, 0, 6], PROMPTS_OF_ALL[:3], [None] * 3, count, base)
    for text, unguided, prompt, answer in zip(texts[:2], plain, PROMPTS_OF_ALL, ANSWERS, strict=False):
        place = 1 + min(i for i, token in enumerate(text) if token in (END, OTHER_END))
        after = [*prompt, *text[:place]]
        assert text[place:] == run_plain(models, [1], [after], [answer], count - place, base)[0] != unguided[place:]


def test_thoughts_without_a_budget_are_unguided(models):
    """A target without a budget counts from the end of a thought."""
    base, prompt, count, params = BaseModel(), PROMPTS[0], 30, OF_THOUGHTS[3]
    (text,) = run_plain(models, [2], [prompt], [params], count, base, max_delta=6)
    answers, sequence = 0, [*prompt, *text]
    states = [params.span_state(prompt, text[:i]) for i in range(count + 1)]
    for before, after in pairwise(states):
        if before.end is not None:
            assert sequence[before.seen] == base.scores(sequence[: before.seen]).argmax()
        elif after.end is not None or after.seen == len(sequence):
            answers += 1
            read, answer = sequence[: before.begin], sequence[before.begin : after.seen]
            assert answer == run_plain(models, [1], [read], ANSWERS[:1], len(answer), base)[0]
    assert answers > 1


def test_nothing_is_guided_after_a_tool_call(models):
    """The call is in the thought, or in the answer after it. The next thought is guided again."""
    base, count, kinds = BaseModel(), 60, set()
    texts = run_plain(models, [4, 0, 6], PROMPTS_OF_ALL[:3], WITH_CALLS, count, base, max_delta=6)
    for text, prompt, params in zip(texts, PROMPTS_OF_ALL, WITH_CALLS, strict=False):
        states = [params.span_state(prompt, text[:i]) for i in range(count + 1)]
        for before, after, token in zip(states, states[1:], text, strict=False):
            if before.in_call:
                assert token == base.scores([*prompt, *text[: before.seen - len(prompt)]]).argmax()
                kinds.add("thought" if after.end is None else "call")
            elif after.in_call:
                kinds.add("call in a thought" if before.end is None else "call in an answer")
    assert kinds == {"call in a thought", "call in an answer", "call", "thought"}


WITHOUT_SPANS = [*KINDS[:4], None]
OF_EACH_KIND = [GUIDANCE[0], SEVERAL[1], SEVERAL[2], LANDINGS[1], BUDGETS[0]]
KERNELS = {"backend": "triton", "max_delta": 7}


@pytest.mark.parametrize(
    ("guidance", "options"),
    [
        (WITHOUT_SPANS, {}),
        (WITHOUT_SPANS, {"padded": True}),
        (WITHOUT_SPANS, KERNELS),
        (GUIDANCE, {}),
        (SEVERAL, {}),
        (LANDINGS, {}),
        (OF_THOUGHTS, {}),
        (OF_EACH_KIND, KERNELS),
    ],
    ids=["no span", "padded", "kernels", "one span", "several spans", "landings", "thoughts", "kernels with spans"],
)
def test_output_is_unchanged_by_drafts(models, guidance, options):
    """Right, partly right, wrong and absent drafts; ends of spans and tokens after them."""
    base, rows, count = BaseModel(), [4, 0, 6, 2, 5], 9 if options else 30
    plain_options = {name: x for name, x in options.items() if name != "padded"} | {"text_breaks": BREAKS}
    plain = run_plain(models, rows, PROMPTS_OF_ALL, guidance, count, base, **plain_options)

    def draft(i, sequence):
        done = len(sequence) - len(PROMPTS_OF_ALL[i])
        right = [*plain[i], *[3] * 9][done : done + 3]
        wrong = (right[0] + 1) % VOCAB
        return [
            [END, right[0], right[1], END, OTHER_END, right[2]],
            [wrong, right[0], wrong, right[1], 5, 6],
            [right[0], EOS, -1, right[1], 8, 8],
            [END, right[0], EOS, right[1], 5, right[2]],
            [-1] * 6,
        ][(i + done) % 5]

    parents, options = [-1, -1, 1, 1, 0, 2], options | {"text_breaks": BREAKS}
    drafted, steps = run_drafted(models, rows, PROMPTS_OF_ALL, guidance, count, base, parents, draft, **options)
    assert drafted == plain and count / 4 < steps < count * 0.8


def test_logits_only_change_for_temperatures_and_spans(models):
    """At all nodes of the request, and in no other request. Spans are also tracked without logits."""
    engine = Engine(*make_step(models.value, max_drafts=1)).start([3, 1], PROMPTS[:2], [TILT] * 2)
    step, logits, drafts = engine.step, torch.ones(4, VOCAB), make_drafts([[5], [END]], [[-1], [-1]])
    batch = StepBatch(engine.tensor([8, 9]), engine.tensor([3, 1]), engine.tensor([len(s) for s in PROMPTS[:2]]))
    prepared = step.prepare(logits, batch, drafts)
    assert not prepared.is_changed and prepared.spans is None and (logits == 1).all()
    step.add_request(3, parse_guidance({"token_temperature_scale": {7: 3.0}}), {EOS})
    assert step.prepare(logits, batch, drafts).is_changed
    assert (logits != 1).nonzero().tolist() == [[0, 7], [1, 7]] and logits[0, 7] == 3
    step.remove_request(3)
    step.add_request(1, parse_guidance({"end_token_ids": [END]}), {EOS}, prompt_len=len(PROMPTS[1]))
    for scores in (logits.fill_(1), None):
        prepared = step.prepare(scores, batch, drafts)
        assert prepared.is_changed == (scores is not None) and prepared.spans.ended.tolist() == [False] * 3 + [True]
    assert (logits != 1).nonzero().tolist() == [[2, EOS]]


def test_words_are_counted_in_steps_and_after_a_retraction():
    """The first row reads every token, the second is admitted after four tokens. The third counts tokens."""
    text, breaks = [41, 3, 42, 43, 5], torch.zeros(VOCAB, dtype=torch.int8)
    breaks[40:] = TextBreak.WORD
    step, _ = make_step(None, text_breaks=breaks)
    words, tokens = (
        parse_guidance(asked, thoughts=Thoughts(encode=list), has_values=False)
        for asked in ({"target_words": 4}, {"target_length": 5.4})
    )
    guided = []
    # 3 of 4 words in 5 tokens count as 4 * 1.35 - 1 * 10.4 / 7 = 3.9 tokens.
    for row, (params, output, first) in enumerate([(words, text, 0), (words, text, 4), (tokens, text[1:], 0)]):
        step.add_request(row, params, {EOS}, span=params.span_state([7], output[:first], step.text_breaks))
        for seen in range(first, len(output) + 1):
            last = torch.tensor([[7, *output][seen]])
            batch = last, torch.tensor([row]), torch.tensor([1 + seen], dtype=torch.int32)
            scores = torch.linspace(0, 1, VOCAB).index_fill(0, torch.tensor([EOS]), 1.0)[None]
            out = take_step(step, scores, *batch, is_logits=True, top_k=5, top_p=1.0, min_p=0.0, temperature=1.0)
        guided.append(out.probs[0].tolist())
    assert guided[0] == guided[1] == guided[2]
    assert step.table.columns.units[:3].tolist() == [3, 3, 0]
