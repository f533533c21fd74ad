"""Requests with several spans and likely start tokens, and checks of their outputs."""

from lenvm_kernels.guidance import parse_guidance
from lenvm_kernels.types import Status
from tests.helpers.sglang_server import rows_of

START = 33
LIKELY = {str(START): 6.0}  # a logit bias
# With few allowed tokens, the start is also likely.
FEW = [START, 7, 8, 9, *range(44, 48), 50, 51]
# An end of two tokens after a message that contains another end, with a budget of all spans; a grace (the tests draw no
# token that ends a line); a single span with a budget, before an answer with a target.
SEVERAL = [
    {"end_token_ids": [[7, 9], 8], "start_token_ids": [START], "hard_limit": 5, "end_message": [44, 8, 45]}
    | {"thinking_budget_total": 6},
    {"end_token_ids": [9], "start_token_ids": [[START, START], 8], "hard_limit": 3, "hard_limit_grace": 2},
    {"end_token_ids": [46, [7, 7]], "hard_limit": 4, "end_message": [START, 47]}
    | {"thinking_budget": 6, "target_length": 9},
    # A landing, which is forced once and does not end the span.
    {"target_length": 14, "landing": [44, 47, 46], "landing_tokens": 12},
]
SPANS_ENDED = 3, 3, 1, 0  # minimum per request


def check_several(asked, prompt, output, statuses):
    """Check each token: only spans and answers with a target are guided, and spans are closed in time.

    ``statuses`` are the statuses of guided rows by sequence length. Returns the number of ended spans."""
    params, ended, opened = parse_guidance(asked), 0, len(prompt)
    closing, limit = params.closing_token_ids, params.hard_limit + params.hard_limit_grace
    states = [params.span_state(prompt, output[:i]) for i in range(len(output) + 1)]
    for state, after, token in zip(states, states[1:], output, strict=False):
        is_guided = state.end is None or params.answer is not None
        assert (statuses[state.seen] != Status.UNGUIDED) == is_guided, (state, statuses[state.seen])
        ended += state.end is None and after.end is not None
        over = state.seen - max(state.begin + limit, opened)  # earlier spans may have used the budget
        if state.end is None and 0 <= over < (len(closing) if not params.end_token_ids else over + 1):
            assert token == closing[min(over, len(closing) - 1)], (state, token)
        opened = after.seen if state.end is not None and after.end is None else opened
    return ended


def check_answers_with_spans(guidance, prompts, results, steps, ended):
    """:func:`check_several` for SGLang's answers, with at least ``ended[i]`` ended spans of request ``i``."""
    for asked, prompt, result, spans in zip(guidance, prompts, results, ended, strict=True):
        statuses = {row["length"]: row["status"] for row in rows_of(result, steps)}
        assert check_several(asked, prompt, result["output_ids"], statuses) >= spans
