"""State of a request's span, computed from its tokens on the host and incrementally on the device."""

from dataclasses import replace
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from lenvm_kernels.guidance import GuidanceParams, GuidanceTable, SpanState, Thoughts, parse_guidance
from lenvm_kernels.ops.limit_span import limit_span

THINK, END_OF_THINK, BREAK, TURN, WORD, END = range(90, 96)


@pytest.mark.parametrize(
    ("prompt", "output", "starts", "expected"),
    [
        # Qwen3 and DeepSeek V3.1 without thinking: the prompt closes the thought.
        ([TURN, WORD, BREAK, THINK, BREAK, END_OF_THINK, BREAK], [], (), (7, 7)),
        ([TURN, WORD, BREAK, THINK, BREAK, END_OF_THINK, BREAK], [WORD, WORD], (THINK,), (7, 7)),
        # DeepSeek R1 and Qwen3 of July 2025: the prompt opens the thought.
        ([TURN, WORD, BREAK, THINK, BREAK], [WORD, WORD], (), (5, None)),
        ([TURN, WORD, BREAK, THINK, BREAK], [WORD, WORD], (THINK,), (4, None)),
        ([THINK], [WORD, END_OF_THINK, WORD], (THINK,), (3, 3)),
        ([TURN, THINK], [THINK, END_OF_THINK, THINK, END_OF_THINK], (THINK,), (6, 6)),
        # A thought of an earlier turn.
        ([END_OF_THINK, TURN, BREAK, WORD, BREAK], [WORD], (), (5, None)),
        ([THINK, END_OF_THINK, BREAK, WORD, TURN, BREAK, TURN, WORD], [WORD], (THINK,), (8, 8)),
        ([THINK, BREAK, WORD, END_OF_THINK, TURN, THINK, WORD, BREAK, WORD, WORD], [], (THINK,), (6, None)),
        # An end of two tokens; the first is in the prompt.
        ([TURN, END], [END, WORD], (), (3, 3)),
        ([], [WORD], (), (0, None)),
    ],
)
def test_prompts_begin_and_end_spans(prompt, output, starts, expected):
    params = GuidanceParams(
        end_token_ids=((7,), (END_OF_THINK,), (END, END)), start_token_ids=tuple((start,) for start in starts)
    )
    state = params.span_state(prompt, output)
    assert (state.begin, state.end) == expected and state.seen == len(prompt) + len(output)
    assert GuidanceParams().span_state(prompt, output) == SpanState(state.seen, len(prompt))


@pytest.mark.parametrize(
    ("prompt", "output", "expected"),
    [
        ([TURN, WORD], [WORD], (2, None)),  # a reasoning model may answer at once
        ([TURN, WORD], [THINK, WORD], (3, 3)),
        ([TURN, WORD, THINK, BREAK], [WORD], (4, 4)),  # the prompt opens the thought
        ([TURN, THINK, BREAK, END_OF_THINK, BREAK], [WORD], (5, None)),  # without thinking
        ([THINK, END_OF_THINK, TURN, *[WORD] * 9], [WORD], (12, None)),  # an earlier turn
        ([TURN], [THINK, END_OF_THINK, WORD, THINK, WORD, END_OF_THINK], (7, None)),
    ],
)
def test_start_of_the_answer_after_a_thought(prompt, output, expected):
    thoughts = Thoughts(ends=((END_OF_THINK,),), starts=((THINK,),))
    params = parse_guidance({"target_length": 50}, thoughts=thoughts)
    state = params.span_state(prompt, output)
    assert (state.begin, state.end) == expected and params.has_span


CALL = 99


@pytest.mark.parametrize(
    ("prompt", "output", "ended"),
    [
        ([TURN, CALL, WORD, TURN], [WORD], None),  # tool calls of earlier turns
        ([TURN, WORD], [WORD, CALL, WORD], 4),
        ([TURN, WORD], [CALL, WORD, THINK, WORD, END_OF_THINK, WORD], None),  # the answer follows another thought
    ],
)
def test_tool_calls_end_an_answer(prompt, output, ended):
    thoughts = Thoughts(ends=((END_OF_THINK,),), starts=((THINK,),), tool_calls=((CALL,),))
    assert parse_guidance({"target_length": 50}, thoughts=thoughts).span_state(prompt, output).end == ended
    if THINK not in output:  # also without thoughts
        params = parse_guidance({"target_length": 50}, thoughts=Thoughts(tool_calls=((CALL,),)))
        assert params.span_state(prompt, output).end == ended


CLOSED = dict(end_token_ids=((7, 9),), hard_limit=2, hard_limit_grace=2, end_message=(5, 6))
LANDING = parse_guidance({"target_length": 12, "landing": [5, 6], "landing_tokens": 10})


@pytest.mark.parametrize(
    ("params", "prompt", "output", "begin", "expected"),
    [
        # The message and the end after it begin within the grace.
        (CLOSED, [3, 3, 3], [1, 1], 3, None),
        (CLOSED, [3, 3, 3], [1, 1, 5], 3, 5),
        (CLOSED, [3, 3, 3], [1, 1, 1, 1, 5], 3, 7),
        (CLOSED, [3, 3, 3], [1, 1, 1, 1, 1, 1, 1, 1, 5], 3, 11),  # within a character
        (CLOSED, [3, 3, 3], [1, 1, 1, 1, 1, 1, 1, 1, 1, 5], 3, None),  # the message began too late
        (CLOSED, [3, 3, 3], [1, 5, 6], 3, None),
        (CLOSED, [3, 3, 3], [1, 1, 5, 1], 3, None),
        (CLOSED, [3, 3, 3], [1, 1, 5, 6, 7, 9], 9, None),  # the forced end has ended the span
        # The limit counts from the span.
        (dict(end_token_ids=((9,),), start_token_ids=((8,),), hard_limit=2, end_message=(5,)), [3],
         [1, 1, 5, 8, 1, 1, 5], 5, 7),
        # A thought that the prompt begins counts from its start.
        (dict(end_token_ids=((9,),), start_token_ids=((8,),), hard_limit=2, end_message=(5,)), [3, 8, 1, 1],
         [5], 2, 4),
        # A landing has no end tokens, and its tokens in the prompt are ignored.
        (vars(LANDING), [3, 5, 6], [1, 1], 3, None),
        (vars(LANDING), [3, 5, 6], [1, 1, 5, 6, 5, 1], 3, 5),
        (vars(LANDING), [3, 5, 6], [1, 5, 6], 3, None),
    ],
)  # fmt: skip
def test_progress_of_closing(params, prompt, output, begin, expected):
    state = GuidanceParams(**params).span_state(prompt, output)
    assert (state.seen, state.begin, state.closing_from) == (len(prompt) + len(output), begin, expected)


def ends_with(tokens, sequences):
    return any(tokens[-len(s) :] == list(s) for s in sequences)


def naive_state(ends, starts, prompt, output, *, is_open):
    """(begin, end) from the last start or end in the output; the prompt must have none."""
    begin, end = len(prompt), None if is_open else len(prompt)
    tokens = list(prompt)
    for token in output:
        tokens.append(token)
        if end is None and ends_with(tokens, ends):
            begin = end = len(tokens)
        elif end is not None and ends_with(tokens, starts):
            begin, end = len(tokens), None
    return begin, end


SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple), max_size=3, unique=True)


@given(
    ends=SEQUENCES.filter(bool),
    starts=SEQUENCES,
    output=st.lists(st.integers(0, 2), max_size=24),
    cuts=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 2)), min_size=24, max_size=24),
    known=st.integers(0, 24),
    pauses=st.booleans(),
)
def test_host_and_device_agree(ends, starts, output, cuts, known, pauses):
    """Some tokens are passed repeatedly. The table row of another request is not changed."""
    pauses &= bool(starts)
    spans = {"pause_token_ids" if pauses else "end_token_ids": tuple(ends), "start_token_ids": tuple(starts)}
    params = GuidanceParams(**spans)
    prompt, known = [9, 9], min(known, len(output))
    table = GuidanceTable(3, "cpu")
    table.add_request(1, params, {8}, prompt_len=2, span=params.span_state(prompt, output[:known]))
    table.add_request(2, params, {8}, prompt_len=2, span=params.span_state(prompt))
    sequence, at = [*prompt, *output], 2 + known
    for count, again in cuts:
        if at == len(sequence):
            break
        start, at = max(at - again, 0), min(at + count, len(sequence))
        passed = torch.tensor([[*sequence[start:at], *[7] * 6][:6]])
        found = limit_span(
            None,
            table.columns,
            passed,
            torch.tensor([1]),
            torch.tensor([at], dtype=torch.int32),
            new_lens=torch.tensor([at - start], dtype=torch.int32),
        )
        state = params.span_state(prompt, sequence[2:at])
        assert (state.begin, state.end) == naive_state(
            ends, starts, prompt, sequence[2:at], is_open=pauses or not starts
        )
        assert found.ended.tolist() == [state.end is not None] and found.generated.tolist() == [at - state.begin]
        columns = table.columns
        written = (columns.prompt_len, columns.span_ended, columns.span_seen, columns.span_match)
        assert [x[1].item() for x in written] == [state.begin, state.end is not None, state.seen, state.match]
    assert [x[2].item() for x in (table.columns.prompt_len, table.columns.span_seen)] == [2, 2]


MARKS = Thoughts(((4,),), ((3,),), ((7,),))
BUDGET, BOTH, ANSWER = {"thinking_budget": 4}, {"thinking_budget": 4, "target_length": 6}, {"target_length": 6}
CLOSED = {"end_token_ids": [[6, 4]], "end_message": [5]}
LANDING = {"target_length": 20, "landing": [5, 6], "landing_tokens": 12}  # forced after 8 to 10 tokens
# Parameters, prompt, output, and its outcome: target, constraint, length, thought and forced. The hard limit is 5.
OUTCOMES = [
    (ANSWER, [9], [3, 1, 1, 4, 1, 1, 1, 2], (6, "near", 3, 2, False)),
    (ANSWER, [9], [1, 3, 1, 1], (6, "near", 1, 2, False)),  # the thought was cut
    (ANSWER, [9, 3, 1], [1, 1, 4, 1, 2], (6, "near", 1, 2, False)),  # the prompt begins the thought
    (ANSWER, [9], [1, 1, 7, 1, 1, 1, 2], (6, "near", 2, 0, False)),  # a tool call
    (ANSWER, [9], [3, 1, 1, 7, 1, 1, 2], (6, "near", 0, 2, False)),  # in the thought
    (ANSWER | {"target_length_mode": "total"}, [9], [3, 1, 4, 1, 7, 1, 2], (6, "near", 4, 1, False)),
    (ANSWER | {"target_length_mode": "remaining"}, [9], [1, 1, 2], (None, None, 2, None, False)),
    (BUDGET, [9, 3, 1], [1, 1, 4, 1, 2], (4, "le_near", 3, 2, False)),  # the budget includes the prompt's token
    (BUDGET, [9], [3, *[1] * 5, 4, 1, 2], (4, "le_near", 5, 5, True)),
    (BUDGET | CLOSED, [9], [*[1] * 5, 5, 6, 4, 1, 2], (4, "le_near", 6, 6, True)),
    (BUDGET | CLOSED, [9], [1, 6, 4, 1, 1, 5, 6, 4, 2], (4, "le_near", 1, 1, False)),  # the closing is in the answer
    ({"thinking_budget_total": 8}, [9], [3, 1, 1, 4, 1, 3, 1, 4, 1, 2], (8, "le_near", 4, 3, False)),
    (BOTH, [9, 3], [*[1] * 5, 4, 1, 1, 2], (6, "near", 2, 5, True)),
    (BOTH, [9], [3, 1, 1], (6, "near", 0, 2, False)),
    (BOTH, [9], [3, 1, 1, 7, 1, 1, 1, 2], (6, "near", 0, 2, False)),
    (BOTH, [9], [3, 1, 4, 1, 1, 7, 1, 7, 2], (6, "near", 2, 1, False)),
    (BOTH | {"target_length_mode": "total"}, [9], [3, 1, 1], (6, "near", 3, 2, False)),
    (LANDING, [9], [*[1] * 9, 5, 6, 1, 1, 2], (20, "near", 13, 0, True)),
    (LANDING, [9], [1, 5, 6, *[1] * 9, 2], (20, "near", 12, 0, False)),
]


@pytest.mark.parametrize(("asked", "prompt", "output", "expected"), OUTCOMES)
def test_outcomes_count_as_targets(asked, prompt, output, expected):
    names = ("target", "constraint", "length", "thought", "forced")
    expected = dict(zip(names, expected, strict=True)) | {"unit": "tokens"}
    assert parse_guidance(asked, thoughts=MARKS).outcome(prompt, output, {2}) == expected


def test_outcomes_without_spans_or_guidance():
    assert parse_guidance({"return_values": True}).outcome([9], [1, 2], {2}) is None
    outcomes = [parse_guidance(ANSWER).outcome([9], [3, 1, 1], ends) for ends in ({1}, ())]
    assert [(x["length"], x["thought"]) for x in outcomes] == [(2, None), (3, None)]
    channels = Thoughts(((5, 6, 4), (6, 4)), ((3, 5, 6),))  # as in gpt-oss; the mark is the longest sequence
    found = parse_guidance(ANSWER, thoughts=channels).outcome([9], [3, 5, 6, 1, 5, 6, 4, 1, 1])
    assert (found["length"], found["thought"]) == (2, 1)
    found = parse_guidance(ANSWER, thoughts=channels).outcome([9, 3], [5, 6, 1])
    assert (found["length"], found["thought"]) == (0, 1)


def test_outcomes_in_words():
    """The answer's words, from 4 on, after a thought and while the thought is open."""
    params = parse_guidance({"target_words": 5, "thinking_budget": 9}, thoughts=replace(MARKS, encode=list))
    breaks = [0, 0, 0, 0, 64, 64, 64, 64]
    outcomes = [params.outcome([9], output, {2}, breaks) for output in ([3, 5, 1, 4, 5, 1, 6, 6, 2], [3, 5, 5])]
    assert [(x["target"], x["unit"], x["length"]) for x in outcomes] == [(5, "words", 3), (5, "words", 0)]


def tokenizer_of(vocab, template=None):
    """A tokenizer with a token per character, ``>`` merged with a line break, and the vocabulary's tokens."""

    def encode(given, add_special_tokens):
        assert not add_special_tokens
        return [ord(x) for x in given.replace(">\n", "}")]

    return SimpleNamespace(get_vocab=lambda: dict(vocab), chat_template=template, encode=encode)


def test_thought_markers_of_tokenizers():
    """Ends of several tokens, the last of which may include a line break; no markers without thinking."""
    of_one = Thoughts.of(tokenizer_of({"<think>": 3, "</think>": 4}))
    assert (of_one.ends, of_one.starts, of_one.encode("ab")) == (((4,),), ((3,),), [97, 98])
    of_several = Thoughts.of(tokenizer_of({}, "{{ '<think>' }} {{ content.split('</think>')[-1] }}"))
    text = [ord(x) for x in "</think"]
    assert of_several.ends == ((*text, ord(">")), (*text, ord("}")), (*text, ord("}"), ord("\n")))
    assert not of_several.starts
    channels = Thoughts.of(tokenizer_of({"<|channel|>": 3}))  # gpt-oss
    assert channels.starts == (tuple(map(ord, "<|channel|>analysis<|message|>")),)
    assert "".join(map(chr, channels.ends[0])) == "<|end|><|start|>assistant<|channel|>final<|message|>"
    of_gemma = Thoughts.of(tokenizer_of({"<|channel>": 5, "<channel|>": 6, "<|channel": 7}))
    assert (of_gemma.ends, of_gemma.starts) == (((6,),), ((5,),))
    assert "".join(map(chr, channels.tool_calls[0])) == "<|channel|>commentary"
    of_qwen = tokenizer_of({"<tool_call>": 7, "<think>": 3, "</think>": 4, "<a>": 5, "</a>": 6})
    assert replace(Thoughts.of(of_qwen), encode=of_one.encode) == replace(of_one, tool_calls=((7,),))
    parsed = Thoughts.of(of_qwen, ("<a>", "</a>"))  # the marks of an engine's parser
    assert (parsed.ends, parsed.starts, parsed.tool_calls) == (((6,),), ((5,),), ((7,),))
    several = Thoughts.of(of_qwen, ("<b>", "</b>"))
    assert several.ends[0] == tuple(map(ord, "</b>")) and not several.starts
    none = Thoughts.of(tokenizer_of({}, "{{ content }}"))
    assert (none.ends, none.starts) == ((), ())
    params = parse_guidance({"thinking_budget": 8, "end_message": "So", "hard_limit": 5}, thoughts=of_several)
    assert params.closing_token_ids == (83, 111, *text, ord(">")) and len(params.span_patterns.token_ids) == 25
    assert parse_guidance({"thinking_budget": 8}, thoughts=of_one) == replace(
        parse_guidance({"thinking_budget": 8, "end_token_ids": [4]}), start_token_ids=((3,),)
    )
