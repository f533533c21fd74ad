"""Answers of several spans, whose start is made likely, and what an engine has to make of them."""

from lenvm_kernels.guidance import parse_guidance
from lenvm_kernels.types import Status

START = 33
LIKELY = {str(START): 6.0}  # a logit bias
# Its beginning is likely, too, where few tokens are allowed.
FEW = [START, 7, 8, 9, *range(44, 48), 50, 51]
# An end of two tokens after a message; a grace that no line ends, because no token of the tests does; one span only.
SEVERAL = [
    {"end_token_ids": [[7, 9], 8], "start_token_ids": [START], "hard_limit": 5, "end_message": [44, 45]},
    {"end_token_ids": [9], "start_token_ids": [[START, START], 8], "hard_limit": 3, "hard_limit_grace": 2},
    {"end_token_ids": [46, [7, 7]], "hard_limit": 4, "end_message": [START, 47]},
    # A landing: it is forced once, and no token ends the span.
    {"target_length": 14, "landing": [44, 47, 46], "landing_tokens": 12},
]
SPANS_ENDED = 3, 3, 1, 0  # at least


def check_several(asked, prompt, output, statuses):
    """Every span is guided, and closed in time, token by token; nothing else is.

    ``statuses``: of the rows of guided steps, by the length of the sequence. Returns how many spans have ended."""
    params, ended = parse_guidance(asked), 0
    closing, limit = params.closing_token_ids, params.hard_limit + params.hard_limit_grace
    states = [params.span_state(prompt, output[:i]) for i in range(len(output) + 1)]
    for state, after, token in zip(states, states[1:], output, strict=False):
        assert (statuses[state.seen] == Status.UNGUIDED) == (state.end is not None), (state, statuses[state.seen])
        ended += state.end is None and after.end is not None
        over = state.seen - state.begin - limit
        if state.end is None and 0 <= over < (len(closing) if not params.end_token_ids else over + 1):
            assert token == closing[min(over, len(closing) - 1)], (state, token)
    return ended


def check_answers_of_several(prompts, results, steps):
    """:func:`check_several` of SGLang's answers to :data:`SEVERAL`; each has as many spans as it is asked for."""
    for asked, prompt, result, spans in zip(SEVERAL, prompts, results, SPANS_ENDED, strict=True):
        rows = [row for step in steps for row in step["rows"] if row["rid"] == result["meta_info"]["id"]]
        statuses = {row["length"]: row["status"] for row in rows}
        assert check_several(asked, prompt, result["output_ids"], statuses) >= spans
