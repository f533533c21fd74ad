"""``limit_span``: ends of spans, logits lowered in an open span, and logits raised to end it."""

import pytest
import torch

from lenvm_kernels.guidance import GuidanceTable, SpanState, Thoughts, parse_guidance
from lenvm_kernels.ops.limit_span import limit_span
from lenvm_kernels.types import ADDED_BYTES, MISSING_BYTES, TextBreak
from tests.helpers.cases import i32, make_drafts

OUT, IN = -1e4, 2e4  # added to the logit of an excluded token, and of a forced token
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


VOCAB = 10
NO_SPAN = {"target_length": 30}
THOUGHT = {"end_token_ids": [2, 5]}
LANDING = {"target_length": 12, "landing": [5, 6], "landing_tokens": 10}
AT_LIMIT, LATER = THOUGHT | {"hard_limit": 2}, THOUGHT | {"hard_limit": 3}
# A request, its end-of-sequence ids, the new tokens of a sequence of six (four are the prompt's), two drafts and their
# parents; whether the span has ended at each existing node, and the numbers added to logits, by node and token.
SPANS = [
    (THOUGHT, {0}, [7], [], [], [False], {0: {0: OUT}}),
    (THOUGHT, {0, 9}, [7], [], [], [False], {0: {0: OUT, 9: OUT}}),
    (THOUGHT, set(), [7], [], [], [False], {}),
    (THOUGHT, {0}, [2, 7], [], [], [True], {}),
    (THOUGHT, {0}, [2, 7, 7], [], [], [False], {0: {0: OUT}}),  # the 2 is in the prompt
    (THOUGHT, {0}, [7, 7, 2, 7, 7], [], [], [True], {}),  # more new tokens than columns
    (THOUGHT, {0}, [], [], [], [False], {0: {0: OUT}}),
    (NO_SPAN, {0}, [5], [5, 2], [-1, 0], [False] * 3, {}),
    (THOUGHT | {"allow_eos": True}, {0}, [7], [], [], [False], {}),
    (THOUGHT, {0, 5}, [7], [], [], [False], {0: {0: OUT}}),  # a token may end both span and sequence
    ({"end_token_ids": [0]}, {0}, [7], [], [], [False], {}),
    (AT_LIMIT, {0}, [7], [], [], [False], {0: {0: OUT, 2: IN}}),
    (AT_LIMIT | {"end_token_ids": [5, 2]}, {0}, [7], [], [], [False], {0: {0: OUT, 5: IN}}),
    (AT_LIMIT | {"end_token_ids": [0, 2]}, {0}, [7], [], [], [False], {0: {0: IN}}),
    (AT_LIMIT | {"allow_eos": True}, {0}, [7], [], [], [False], {0: {2: IN}}),
    (AT_LIMIT, {0}, [5], [], [], [True], {}),
    (LATER, {0}, [7], [3, 4], [-1, 0], [False] * 3, {0: {0: OUT}, 1: {0: OUT, 2: IN}, 2: {0: OUT, 2: IN}}),
    (LATER | {"hard_limit": 4}, {0}, [7], [3, 4], [-1, 0], [False] * 3, {0: {0: OUT}, 1: {0: OUT}, 2: {0: OUT, 2: IN}}),
    (LATER | {"hard_limit": 4}, {0}, [7], [3, 4], [-1, -1], [False] * 3, {0: {0: OUT}, 1: {0: OUT}, 2: {0: OUT}}),
    (THOUGHT, {0}, [7], [5, 4], [-1, 0], [False, True, True], {0: {0: OUT}}),
    (THOUGHT, {0}, [7], [4, 2], [-1, 0], [False, False, True], {0: {0: OUT}, 1: {0: OUT}}),
    (THOUGHT, {0}, [7], [5, 4], [-1, -1], [False, True, False], {0: {0: OUT}, 2: {0: OUT}}),
    (THOUGHT, {0}, [7], [5, 4], [-1, 1], [False, True, False], {0: {0: OUT}, 2: {0: OUT}}),  # draft 1 is its own parent
    (THOUGHT, {0}, [7], [-2, 5], [-1, -1], [False], {0: {0: OUT}}),  # an absent draft, and a draft after it
    (LANDING, {0}, [7], [3, 4], [-1, 0], [False] * 3, {0: {5: IN}, 1: {6: IN}}),  # the sequence continues
    (LANDING | {"landing_tokens": 9}, {0}, [7], [3, -1], [-1, 0], [False] * 2, {1: {5: IN}}),
    ({"end_token_ids": [VOCAB, 2], "hard_limit": 1}, {VOCAB + 1}, [7], [], [], [False], {}),  # tokens without a logit
    ({"end_token_ids": [VOCAB, 2]}, {0}, [VOCAB], [], [], [True], {}),
    ({"end_token_ids": [2**31 - 1]}, {2**31 - 1, 0}, [2**31 - 1], [], [], [True], {}),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("turn", range(3))
def test_ends_of_spans_and_changed_logits(device, backend, dtype, turn):
    """The requests are in several orders, and a program processes only some of them."""
    order = torch.arange(len(SPANS)).roll(7 * turn).tolist()
    asked, eos, new, token_ids, parents, ended, changes = zip(*(SPANS[i] for i in order), strict=True)
    table = GuidanceTable(len(SPANS) + 1, device)
    for i, (params, ids) in enumerate(zip(asked, eos, strict=True)):
        table.add_request(i + 1, None if params is None else parse_guidance(params), ids, prompt_len=4)

    def filled(lists, width, value):
        return torch.tensor([[*x, *[value] * width][:width] for x in lists])

    drafts = make_drafts(filled(token_ids, 2, -1), filled(parents, 2, -1), device=device)
    logits = torch.randn(3 * len(SPANS), VOCAB).to(dtype)
    expected = logits.clone()
    for i, nodes in enumerate(changes):
        for node, added in nodes.items():
            for token, number in added.items():
                expected[3 * i + node, token] += number
    changed = logits.to(device)
    spans = limit_span(
        changed,
        table.columns,
        filled(new, 4, 2).to(device),  # padding with a token that ends a span
        torch.arange(1, len(SPANS) + 1, device=device),
        torch.full((len(SPANS),), 6, dtype=torch.int32, device=device),
        new_lens=i32(*map(len, new)).to(device),
        drafts=drafts,
        backend=backend,
    )
    assert spans.ended.view(-1, 3).tolist() == [x + [False] * (3 - len(x)) for x in ended]
    assert torch.equal(changed.cpu(), expected)
    assert table.columns.span_ended.tolist() == [False, *(x[0] for x in ended)]


# Tokens that end a line, a sentence, and both; and an ordinary token.
LINE, SENTENCE, BOTH, PLAIN = 3, 2, 1, 4
LATE_LANDING = {"target_length": 14, "landing": [5, 6], "landing_tokens": 12}
CLOSING = {"end_token_ids": [[7, 9], 2], "hard_limit": 3, "end_message": [5, 6]}
GRACE, CLOSED = CLOSING | {"hard_limit_grace": 2}, [5, 6, 7, 9]
# Tokens that begin a character of three bytes, add a byte to one, begin a tool call, and begin a word.
LEAD, BYTE, CALL, WORD = 10, 11, 12, 13
BREAKS = [0, 3, 2, 1, *[0] * 6, 2 << MISSING_BYTES, 1 << ADDED_BYTES, 0, TextBreak.WORD]
AFTER_OUTPUT = LATE_LANDING | {"target_length_mode": "total"}
# A request, the tokens that the model would draw, and the resulting tokens.
CLOSINGS = [
    # An end within a forced closing, and the same end drawn before it.
    ({"end_token_ids": [[7, 6, 5], 7], "hard_limit": 3}, [PLAIN], [*[PLAIN] * 3, 7, 6, 5, PLAIN, PLAIN]),
    ({"end_token_ids": [[7, 6, 5], 7], "hard_limit": 3}, [PLAIN, 7, PLAIN], [PLAIN, 7, *[PLAIN] * 6]),
    # A forced end waits at most four tokens for the end of a character.
    (CLOSING, [PLAIN, PLAIN, LEAD, BYTE, BYTE, PLAIN], [PLAIN, PLAIN, LEAD, BYTE, BYTE, *CLOSED, PLAIN]),
    (CLOSING, [LEAD, BYTE, BYTE, BYTE, PLAIN], [LEAD, BYTE, BYTE, *CLOSED, PLAIN]),
    (CLOSING, [LEAD], [*[LEAD] * 7, *CLOSED, LEAD]),
    (CLOSING | {"hard_limit_grace": 1}, [BYTE], [*[BYTE] * 4, *CLOSED, BYTE]),
    (GRACE, [PLAIN, LEAD, PLAIN, LEAD, LINE, PLAIN], [PLAIN, LEAD, PLAIN, LEAD, LINE, *CLOSED, PLAIN]),
    # Budgets of the tokenizer's thoughts, from 8 to 9: no thought, per thought, and for all thoughts together.
    ({"thinking_budget": 0}, [PLAIN, 8, PLAIN], [PLAIN, 8, 9, PLAIN]),
    ({"thinking_budget": 0, "end_message": [5, 8]}, [8, PLAIN, PLAIN, 8], [8, 5, 8, 9, 8, 5, 8, 9, 8]),
    ({"thinking_budget": 4}, [8, 4, 4, 9, 4, 8, 4], [8, 4, 4, 9, 4, 8, *[4] * 5, 9]),
    ({"thinking_budget_total": 4}, [8, 4, 4, 9, 4, 8, 4], [8, 4, 4, 9, 4, 8, 4, 4, 9]),
    ({"thinking_budget_total": 4}, [8, *[4] * 6, 8, 4], [8, *[4] * 5, 9, 8, 9]),
    # Long after the limit, the closing still continues to its own end.
    (
        {"thinking_budget_total": 2, "hard_limit_grace": 9, "end_message": [5, 9, 6]},
        [8, *[4] * 11, 3, *[4] * 4, 8, *[4] * 4],
        [8, *[4] * 11, 3, 5, 9, 6, 9, 8, 5, 9, 6, 9],
    ),
    # A tool call ends a thought or an answer; no token is forced in it.
    ({"thinking_budget": 4}, [8, CALL, 8, 4], [8, CALL, 8, *[4] * 5, 9]),
    (LATE_LANDING, [PLAIN, CALL, *[PLAIN] * 6, 0], [PLAIN, CALL, *[PLAIN] * 6, 0]),
    ({"thinking_budget": 4, "target_length": 9}, [8, 9, CALL, CALL, 8, 4], [8, 9, CALL, CALL, 8, *[4] * 5, 9]),
    ({"thinking_budget": 0, "end_message": [CALL, 4]}, [8, PLAIN], [8, CALL, 4, 9, PLAIN]),
    # Words and sentences are counted from the end of a thought.
    ({"target_words": 9}, [WORD, PLAIN, WORD], [WORD, PLAIN, WORD, WORD]),
    ({"target_sentences": 9}, [SENTENCE, 8, SENTENCE, 9, WORD, BOTH], [SENTENCE, 8, SENTENCE, 9, WORD, BOTH, BOTH]),
    ({"target_words": 9, "thinking_budget": 2}, [8, WORD, WORD, 9, WORD], [8, WORD, WORD, 9, WORD, WORD]),
    # A total counts the tokens of the thought.
    (AFTER_OUTPUT, [8, PLAIN, PLAIN, 9, PLAIN], [8, PLAIN, PLAIN, 9, 5, 6, PLAIN]),
    (AFTER_OUTPUT, [PLAIN, 8, 9, PLAIN], [PLAIN, 8, 9, PLAIN, 5, 6, PLAIN]),
    (CLOSING, [PLAIN] * 9, [*[PLAIN] * 3, *CLOSED, PLAIN, PLAIN]),
    (CLOSING, [PLAIN, 7, PLAIN, 9, *[PLAIN] * 5], [PLAIN, 7, PLAIN, *CLOSED, PLAIN, PLAIN]),
    (CLOSING, [PLAIN, PLAIN, 7, 2, *[PLAIN] * 5], [PLAIN, PLAIN, 7, *CLOSED, PLAIN, PLAIN]),  # the message comes first
    (GRACE, [PLAIN] * 9, [*[PLAIN] * 5, *CLOSED]),
    (GRACE, [PLAIN, LINE, *[PLAIN] * 7], [PLAIN, LINE, *[PLAIN] * 3, *CLOSED]),
    (GRACE, [*[PLAIN] * 3, BOTH, *[PLAIN] * 5], [*[PLAIN] * 3, BOTH, *CLOSED, PLAIN]),
    # A landing 12 tokens before the target, or at most 2 tokens later. The sequence may end before or after it.
    (LATE_LANDING, [PLAIN] * 9, [*[PLAIN] * 4, 5, 6, PLAIN, PLAIN, PLAIN]),
    (LATE_LANDING, [PLAIN, PLAIN, LINE, *[PLAIN] * 5], [PLAIN, PLAIN, LINE, 5, 6, PLAIN, PLAIN, PLAIN]),
    (LATE_LANDING, [PLAIN, LINE, PLAIN, SENTENCE, *[PLAIN] * 3, 0, 0], [PLAIN, LINE, 5, 6, *[PLAIN] * 3, 0, 0]),
    (LATE_LANDING, [LINE, PLAIN, PLAIN, SENTENCE, 0, PLAIN, PLAIN, 0], [LINE, PLAIN, PLAIN, SENTENCE, 5, 6, PLAIN, 0]),
    # The second thought has a separate limit; there is no limit between the thoughts.
    (
        {"end_token_ids": [2], "start_token_ids": [[8, 8]], "hard_limit": 2},
        [PLAIN, PLAIN, PLAIN, 8, 8, PLAIN, PLAIN, PLAIN, 8, 8, PLAIN, PLAIN, 1],
        [PLAIN, PLAIN, PLAIN, 8, 8, PLAIN, PLAIN, 2, 8, 8, PLAIN, PLAIN, 2],
    ),
    (
        {"end_token_ids": [2], "start_token_ids": [8], "hard_limit": 3, "hard_limit_grace": 1, "end_message": [8]},
        [8, PLAIN, PLAIN, PLAIN, PLAIN, PLAIN, PLAIN, 8, PLAIN, PLAIN, LINE, PLAIN, PLAIN],
        [8, PLAIN, PLAIN, PLAIN, PLAIN, 8, 2, 8, PLAIN, PLAIN, LINE, 8, 2],
    ),
    # In a thought, from 8 to 9, tokens are not counted or forced. The target counts from its end.
    (
        LATE_LANDING,
        [PLAIN, 8, *[PLAIN] * 5, 9, *[PLAIN] * 7],
        [PLAIN, 8, *[PLAIN] * 5, 9, *[PLAIN] * 4, 5, 6, PLAIN],
    ),
    (LATE_LANDING, [8, PLAIN, 0, LINE, PLAIN, PLAIN, PLAIN], [8, PLAIN, 0, LINE, PLAIN, PLAIN, PLAIN]),
]


@pytest.mark.parametrize(("asked", "drawn", "expected"), CLOSINGS)
def test_closing_is_forced_token_by_token(device, backend, asked, drawn, expected):
    """Tokens are passed one at a time. The host computes the same state from the complete text."""
    thoughts = Thoughts(ends=((9,),), starts=((8,),), tool_calls=((CALL,),), encode=list)
    params = parse_guidance(asked, thoughts=thoughts)
    prompt, text = [1, CALL, 1], []
    guidance = GuidanceTable(2, device)
    guidance.add_request(1, params, {0}, prompt_len=len(prompt), span=params.span_state(prompt))
    breaks, columns = torch.tensor(BREAKS, dtype=torch.int8, device=device), guidance.columns
    while len(text) < len(expected):
        logits = torch.zeros(1, len(BREAKS), device=device)
        logits[0, drawn[min(len(text), len(drawn) - 1)]] = 5.0
        last, row = torch.tensor([[*prompt, *text][-1:]], device=device), torch.tensor([1], device=device)
        length = i32(len(prompt) + len(text)).to(device)
        limit_span(logits, columns, last, row, length, text_breaks=breaks, backend=backend)
        state = params.span_state(prompt, text, BREAKS)
        names = "prompt_len span_ended span_used units in_call"
        on_device = tuple(getattr(columns, name)[1].item() for name in names.split())
        assert on_device == (state.begin, state.end is not None, state.used, state.units, state.in_call), text
        text.append(logits.argmax().item())
    assert text == expected


# A target, tokens and units of the answer so far, and generated tokens: 13.5 or 48 minus the expected tokens to come.
@pytest.mark.parametrize(
    ("asked", "tokens", "units", "generated"),
    [
        ({"target_words": 10}, 0, 0, 0),
        ({"target_words": 10}, 12, 8, 11),  # 13.5 - 2 * 17.4 / 12 = 10.6
        ({"target_words": 10}, 12, 12, 16),  # 13.5 + 2 * 17.4 / 16 = 15.7
        ({"target_words": 10}, 40, 4, -21),  # 13.5 - 6 * 45.4 / 8 = -20.6
        ({"target_sentences": 2}, 30, 1, 23),  # 48 - 126 / 5 = 22.8
        ({"target_sentences": 2}, 50, 2, 48),
    ],
)
@pytest.mark.parametrize("place", ["thought", "after a thought", "without a budget"])
def test_generated_tokens_of_targets_in_units(device, backend, asked, tokens, units, generated, place):
    """The rest of the target is in tokens, at the text's tokens per unit. Thoughts count tokens."""
    thoughts = Thoughts(ends=((9,),), starts=((8,),), encode=list)
    budget = {} if place == "without a budget" else {"thinking_budget": 90}
    params, ended = parse_guidance(asked | budget, thoughts=thoughts), 7 if place == "after a thought" else None
    guidance = GuidanceTable(1, device)
    guidance.add_request(0, params, {0}, span=SpanState(7 + tokens, 7, ended, units=units))
    last, row = torch.tensor([[PLAIN]], device=device), torch.tensor([0], device=device)
    found = limit_span(None, guidance.columns, last, row, i32(7 + tokens).to(device), backend=backend)
    assert found.generated.tolist() == [tokens if place == "thought" else generated]


def test_tool_call_ends_guidance_without_marks_of_thoughts(device, backend):
    """As in Qwen2.5."""
    params = parse_guidance({"target_length": 30}, thoughts=Thoughts(tool_calls=((CALL,),)))
    table = GuidanceTable.from_params([params, params], [{0}, {0}], device).columns
    tokens, rows = torch.tensor([[PLAIN], [CALL]], device=device), torch.tensor([0, 1], device=device)
    assert limit_span(None, table, tokens, rows, i32(3, 3).to(device), backend=backend).ended.tolist() == [False, True]
