"""Scenarios of guided steps: every row of every step equals a recomputation from scratch."""

from dataclasses import replace

import pytest
import torch

from lenvm_kernels.types import TextBreak
from tests.helpers.engine import GUIDANCE, PROMPTS, TILT
from tests.helpers.models import EOS, VOCAB
from tests.helpers.scenarios import Asked, Driver, Extend, Grow, Leave, Predict, Scenario, Start, Step, WarmUp

LENGTHS = {"return_values": True, "gamma": 0.9}
NEVER = {"value_stride": 999_999}
TEMPERATURES = {"token_temperature_scale": {5: 4.0, 11: 0.25}}
SPAN = TILT | {"end_token_ids": [11, 60], "allow_eos": True}
SURE = {50: 30.0}  # a single candidate


def requests(*guidance, rows=(4, 1, 6, 3, 0, 7), eos=None, seeds=range(100, 200), prompts=PROMPTS):
    """Requests ``a``, ``b``, ... with these parameters, in unordered rows."""
    eos = eos or [(EOS,)] * len(guidance)
    prompts = [*prompts, [30, 31, 32], [14, 15]]
    zipped = zip("abcdef", rows, prompts, guidance, eos, seeds, strict=False)
    return {name: Asked(row, prompt, g, ends, seed) for name, row, prompt, g, ends, seed in zipped}


def by_stride(number, *strides):
    """Status of requests with these strides at a step."""
    return "".join("G" if number % stride == 0 else "N" for stride in strides)


# Requests that differ in every field and filter.
EVERY_FIELD = requests(
    {"mode": "centered_exp", "scale": -4, "gamma": 0.9, "return_values": True},
    {"target_length": 9, "op": "eq_soft", "gamma": 0.85},
    {"scale": 0.7, "entropy_threshold": 100.0, "return_values": True, "gamma": 0.99},
    {"mode": "linear", "scale": 1.6, "entropy_threshold": 0.0},
    {"return_values": True, "gamma": 0.8, "token_temperature_scale": {7: 3.0, VOCAB - 1: 4.0, VOCAB + 5: 9.0}},
    {"mode": "length_mul", "scale": 0.6, "gamma": 0.95, "value_min": 0.2, "token_temperature_scale": {7: 0.5}},
    rows=(5, 0, 3, 6, 1, 2),
    eos=[(1,), (2, 4), (3,), (), (0, 5), (0,)],
    seeds=(-7, 2**40, 5, 6, 7, 8),
)
OWN_FILTERS = dict(
    top_k=torch.tensor([6, 0, 7, 5, 8, 8], dtype=torch.int32),
    top_p=torch.tensor([0.8, 0.97, 0.9, 1.0, 0.8, 0.6]),
    min_p=torch.tensor([0.0, 0.02, 0.0, 0.01, 0.0, 0.005]),
    temperature=torch.tensor([1.0, 0.9, 1.5, 2.0, 0.7, 1.2]),
)
NO_TOKEN_3 = torch.tensor([[-1, -1, -1, -1]] * 3 + [[-9, -1, -1, -1]] * 3, dtype=torch.int32)
ENDS = {name: dict.fromkeys(range(6), 0.5) for name in "abcdef"}  # end tokens of some requests are candidates of all
CONSTANT = [
    {"target_length": 9, "strength": 3},
    {"target_length": 40, "constraint": "le_near", "gamma": 0.9},
    None,
    {"target_length": 3, "constraint": "ge_near", "target_length_mode": "remaining", "gamma": 0.5},
    {"target_length": 6, "end_token_ids": [7], "answer_length": 5, "allow_eos": True},
    {"target_length": 30, "value_stride": 3},
]
WAITING = (TILT, TILT | {"entropy_threshold": 100.0}, TILT | NEVER, None)
CHAIN, TREE = [-1, 0, 1], [-1, -1, 0, 0, 1, 3]  # two branches, one forks; no child is adjacent to its parent
DRAFTS = dict(max_drafts=3, max_candidates=4)
VERIFY = {"verify": "same_draws"}


def sure_of(*tokens):
    """A draft chain in a row that draws token 50 at every node, so leading tokens 50 are accepted."""
    return dict(likely={"a": SURE}, drafts={"a": (list(tokens), CHAIN)}, options=VERIFY)


SCENARIOS = [
    Scenario(
        "requests of all kinds arrive, decode and leave, and others use their rows",
        requests(*GUIDANCE, TILT),
        [Start("abcde"), *[Step("abcde")] * 3, Step("edcba"), Leave("b"), Step("acd"), Leave("a", is_removed=False)],
        [
            Start("ab"),
            Step("badc", options={"temperature": torch.tensor([0.0, 0.7, 0.0, 0.5])}),
            Start("f"),
            Step("f"),
            Step("fabcd"),
            Step("c"),
        ],
    ),
    Scenario(
        "a warm-up does not change results",
        requests(TILT, {"target_length": 9} | LENGTHS),
        [Start("ab"), WarmUp(), Step("ba"), WarmUp(), Step("ab")],
        max_requests=2,
        chunk_tokens=5,
    ),
    # Pending tokens.
    Scenario(
        "strides, one of which is the default of the step",
        requests(*(TILT | ({} if n is None else {"value_stride": n}) for n in (1, 2, 3, None))),
        [Start("abcd"), *(Step("abcd", by_stride(n, 1, 2, 3, 5)) for n in range(1, 21))],
        value_stride=5,
    ),
    Scenario(
        "uncounted steps of one request between counted steps of another",
        requests(*[TILT | {"value_stride": 2}] * 2),
        [Start("ab")],
        [
            step
            for number, between in enumerate((0, 2, 1, 0, 3), start=1)
            for step in [Step("b", by_stride(number, 2), options={"counts": False})] * between
            + [Step("a", by_stride(number, 2))]
        ],
    ),
    Scenario(
        "a row that may end is due, by its own end tokens, unless a filter removes them",
        requests(*[TILT | NEVER] * 3, eos=[(EOS,), (EOS, 3), (3,)]),
        [
            Start("abc"),
            *(
                Step("abc", status, likely={name: dict.fromkeys(tokens, 1.2) for name in "abc"})
                for tokens, status in (([EOS], "GGN"), ([3], "NGG"), ([4], "NNN"), ([EOS, 3], "GGG"))
            ),
            Step("abc", "NNN", likely={name: {EOS: -19.0} for name in "abc"}),
        ],
    ),
    Scenario(
        "rows without values wait for max_delta tokens",
        requests(*WAITING),
        [Start("abcd")],
        [Step("abcd", "1SN-", deltas=[3 * (n % 3 == 0)] * 3 + [0], likely={"a": SURE}) for n in range(1, 9)],
        [Step("a", "G", deltas=(3,))],
        max_delta=3,
    ),
    Scenario(
        "sequences that grow by several tokens",
        requests(*[TILT] * 4),
        [Start("abcd"), Grow("a", (20, 21, 22, 23, 24)), Grow("b", (30,)), Grow("d", (40, 41, 42))],
        [Step("abcd", "GGGG", deltas=(6, 2, 1, 4)), Grow("b", (91,)), Grow("d", (94,) * 15)],
        [Step("abcd", "GGGG", deltas=(1, 2, 1, 16))],
    ),
    Scenario(
        "new tokens wait, around the end of the ring buffer",
        requests(TILT | {"value_stride": 4}),
        [Start("a")],
        [
            event
            for number in range(1, 13)
            for event in (
                *([Grow("a", (20 + number,))] * (number in (2, 5, 6, 12))),
                Step("a", deltas=(5 * (number % 4 == 0),), takes={"a": () if number == 6 else (60 + number,)}),
            )
        ],
        max_delta=5,
    ),
    Scenario(
        "a missing token, or too many tokens, end guidance until extend passes them",
        requests(TILT, TILT),
        [Start("ab"), Step("ab", "GG"), Grow("a", (20,), passed=1), Step("ab", "-G"), Step("ab", "-G")],
        [Grow("b", (23, 24, 25)), Step("ab", "--"), Extend("a"), Extend("b"), Step("ab", "GG")],
        max_delta=3,
    ),
    Scenario(
        "a request without extend of its prompt, in a row with a longer history",
        {"a": Asked(6, PROMPTS[2], TILT), "b": Asked(6, [20, 21, 22], TILT)},
        [Start("a"), Step("a", "G"), Leave("a"), Start("b", is_extended=False), Step("b", "-"), Extend("b")],
        [Step("b", "G")],
    ),
    Scenario(
        "a prompt that is extended again, in part or not at all, also after the loss of its slots",
        requests(TILT, TILT),
        [Start("ab"), Step("ab"), Extend("a", 0, 0), Step("ab", deltas=(1, 1)), Extend("a", 0, 2)],
        [Step("ab", "GG", deltas=(1, 1)), Extend("b", restarts=True), Step("ab", "GG", deltas=(1, 1))],
        [Extend("b", 0, 0, restarts=True), Step("ab", "G-", deltas=(1, 0)), Extend("b"), Step("ab", "GG")],
    ),
    Scenario(
        "prompts that are extended in parts, with ends inside chunks",
        requests(*[TILT] * 3, prompts=[[*range(3, 53)], [60, 61], [*range(60, 90)]]),
        [Start("abc", is_extended=False), Extend("a", 0, 1), Extend("c", 0, 20), Extend("a", 1, 23), Extend("b")],
        [Extend("a", 23), Extend("c", 20), Step("abc", "GGG", deltas=(1, 1, 1))],
        chunk_tokens=8,
    ),
    # Lengths.
    Scenario(
        "lengths of the prompt and of every token, guided or not, with a stride",
        requests(LENGTHS | TILT, LENGTHS, LENGTHS | TILT | {"entropy_threshold": 100.0}, TILT, LENGTHS | TILT | NEVER),
        [Start("abcde"), Predict("abcde", deltas=(0, 0, 0, 0, 0)), Step("abcde", "G-SGN", deltas=(1, 1, 1, 1, 1))],
        [Step("abcde", "1-111", options={"min_p": 1.0}), Step("abcde", likely={"b": {EOS: 9.0}}, takes={"b": EOS})],
        [Step("abcde", options={"sample": False}), Step("abcde", draws=False), Leave("a"), Leave("b"), Leave("c")],
        [Leave("e"), Step("d", "G")],
        max_delta=1,
    ),
    Scenario(
        "token 0, drawn in all ways, is an end of one request",
        requests(
            LENGTHS,
            LENGTHS | {"target_length": 1, "op": "le"},
            LENGTHS | {"target_length": 1000, "op": "ge"},
            LENGTHS,
            eos=[(EOS,), (0,), (EOS,), (EOS,)],
        ),
        [Start("abcd"), Step("abcd", "-G1-", likely={"b": {0: 9.0, 8: 10.0}, "c": {0: 30.0}})],
        [Grow("a", (0,)), Step("abcd"), Step("abcd", options={"drawn": torch.tensor([0, 7, 7, 0], dtype=torch.int32)})],
        [Step("abcd")],
        max_delta=2,
        page_size=1,
    ),
    Scenario(
        "rows without a next token have no length",
        requests(
            TILT | {"entropy_threshold": 100.0}, LENGTHS | TILT | {"entropy_threshold": 100.0}, LENGTHS, LENGTHS | TILT
        ),
        [Start("abcd"), Step("abcd", "SS-G", draws=False), Step("abcd", draws=False, options={"sample": False})],
        [Step("abcd", "SS--", options={"active": "abc"}), Step("abcd", options={"sample": False, "min_p": 1.0})],
    ),
    Scenario(
        "score_all also scores skipped rows and single candidates, but only the drawn token of a row with a length",
        requests(TILT | {"entropy_threshold": 100.0}, LENGTHS | TILT | {"entropy_threshold": 100.0}, None, TILT),
        [Start("abcd"), Step("abcd", "SS-1", likely={"d": SURE})],
        [Step("abcd", "SS-G", options={"drawn": torch.tensor([7, 85, 7, 7])})],  # 85 is the second candidate of b
        score_all=True,
    ),
    Scenario(
        "without values, only end tokens are guided, and prompts are not extended",
        requests(*CONSTANT, prompts=[*PROMPTS, [3] * 30]),
        [Start("abcdef", is_extended=False)],
        [Step("abcdef", likely={name: {EOS: 0.1 * n, 7: 1.0 - 0.2 * n} for name in "abcdef"}) for n in range(4)],
        has_values=False,
        is_padded=True,
    ),
    Scenario(
        "rare ends after sentences, lines and drafts, and in late requests; ends of sentences near the target",
        requests({"target_length": 30}, {"target_length": 3}, {"target_length": 30, "min_end_prob": 1e-6}),
        [Start("abc", is_extended=False)],
        [
            Step(
                "abc",
                likely={name: {EOS: logit, 20: 1.5} for name in "abc"},
                drafts={"a": ([20, 9, 21], CHAIN), "b": ([9, 20, -1], CHAIN)},
                takes={"a": (9, token), "b": (token,), "c": (token, 9, token)},
            )
            for token, logit in ((20, -6.0), (21, -6.0), (9, -9.0), (20, -9.0), (9, -14.0), (21, -14.0), (9, -14.0))
        ],
        has_values=False,
        is_padded=True,
        text_breaks=torch.tensor([0] * 20 + [TextBreak.SENTENCE, TextBreak.LINE], dtype=torch.int8),
        **DRAFTS,
    ),
    # Drafts.
    Scenario(
        "trees, chains, fewer drafts and none",
        requests(TILT, GUIDANCE[2], TILT | LENGTHS, None),
        [Start("abcd")],
        [
            Step(
                "abcd",
                likely={"a": {20: 0.0, 23: 0.5}},
                drafts={
                    "a": ([20, 21, 22, 23, 24, 20], TREE),
                    "b": ([30, 31, 32, 33, 34, 35], [-1, 0, 1, 2, 3, 4]),
                    "c": ([40, 41, -1, 7, 7, 7], [-1, 0, -1, -1, -1, -1]),
                },
                takes={"a": (20, 22, 9), "b": 30, "c": (50, 51), "d": 9},
            )
        ]
        * 3,
        max_drafts=6,
        max_delta=8,
        max_candidates=4,
    ),
    Scenario(
        "filters, masks and probabilities of each node; an inactive request",
        requests(TILT, GUIDANCE[2], TILT),
        [
            Start("abc"),
            Step(
                "abc",
                drafts={"a": ([30, 31, -1], CHAIN), "b": ([32, 33, 34], [-1, -1, 0]), "c": ([34, 35, 36], CHAIN)},
                options=dict(
                    top_k=torch.tensor([3, 50, 7], dtype=torch.int32),
                    top_p=torch.tensor([1.0, 0.5, 0.99]),
                    min_p=torch.tensor([0.0, 0.01, 0.1]),
                    temperature=torch.tensor([0.5, 1.3, 0.8]),
                    vocab_mask=torch.tensor([[-1 << i, -1, -1, -1] for i in range(12)], dtype=torch.int32),
                    probs=True,
                    active="ac",
                ),
            ),
        ],
        **DRAFTS,
    ),
    Scenario(
        "accepted drafts, and the token after them, are computed at the next step; steps without drafts between them",
        requests(TILT, prompts=PROMPTS[2:]),
        [Start("a"), Step("a", deltas=(0,), **sure_of(50, 50, 51)), Step("a", deltas=(0,), **sure_of(50, 50, 50))],
        [
            Step("a", deltas=(8,)),
            Step("a", deltas=(1,), drafts={}),
            Step("a", "G" * 4, drafts={"a": ([40, 41, 42], CHAIN)}),
        ],
        [Step("a", "G", deltas=(1,))],
        **(DRAFTS | {"max_delta": 9}),
    ),
    Scenario(
        "tokens only wait while a step with drafts has room for more",
        requests(TILT | NEVER),
        [Start("a")],
        [
            Step("a", deltas=(delta,), drafts={"a": ([40, 41, 42], CHAIN)}, takes={"a": tuple(range(50, 50 + grows))})
            for grows, delta in ((2, 0), (2, 0), (4, 5), (1, 0), (4, 5), (4, 0), (1, 8))
        ],
        [Step("a", "GGGG", likely={"a": {EOS: 1.0}}, drafts={"a": ([40, 41, 42], CHAIN)})],
        **(DRAFTS | {"max_delta": 8}),
    ),
    Scenario(
        "strides and likely ends with drafts",
        requests(TILT | {"value_stride": 2}, TILT),
        [
            Start("ab"),
            *[
                Step(
                    "ab",
                    drafts={"a": ([30, 31, 32], CHAIN), "b": ([33, 34, 35], [-1, -1, 1])},
                    likely={"b": {EOS: -1.0}},
                )
            ]
            * 4,
        ],
        **DRAFTS,
    ),
    Scenario(
        "lengths at every node, and after tokens that the caller verified",
        requests(LENGTHS, TILT, TILT | LENGTHS | {"gamma": 0.8}),
        [Start("abc")],
        [
            event
            for number in range(3)
            for event in (
                Step(
                    "abc",
                    draws=number == 1,
                    drafts={"a": ([30, 31, 32], [-1, -1, 1]), "b": ([33, 34, 35], CHAIN), "c": ([36, 37, 38], CHAIN)},
                    takes={"a": (30 + number, 31, EOS), "b": (33, 61), "c": (62,)},
                ),
                Predict("abc"),
            )
        ],
        **DRAFTS,
    ),
    # Batches that are padded, as for CUDA graphs.
    Scenario(
        "batches of every size in a graph",
        requests(*[TILT] * 3, TILT | LENGTHS, rows=(6, 2, 5, 0)),
        [Start("abcd"), Step("abcd"), Step("bcd"), Step("cbd"), Step("a"), Predict("ad"), Step("dcba"), Predict("dba")],
        [Step("bd")],
        rows=7,
        is_padded=True,
    ),
    Scenario(
        "predictions after drafts in a graph",
        requests(TILT | LENGTHS, None, TILT, TILT),
        [Start("abcd"), Step("abcd", drafts={name: ([30, 31, -1], CHAIN) for name in "abcd"}, takes={"a": (30, 9, 8)})],
        [Predict("abc"), Step("abcd", drafts={}), Step("cba")],
        **DRAFTS,
        is_padded=True,
    ),
    Scenario(
        "requests that arrive after a graph is captured",
        requests(TILT, TILT, TILT, LENGTHS | {"target_length": 30}, TILT | TEMPERATURES | {"value_stride": 2})
        | {"f": Asked(5, [40, 41, 42, 8], LENGTHS)},
        [Start("abc"), Step("abc", draws=False), Leave("b"), Leave("c"), Start("de"), Step("ade", draws=False)],
        [Start("f"), *[Step("adef"), Predict("df")] * 2, Step("fdea")],
        is_padded=True,
    ),
    # Batches that are computed in parts.
    Scenario(
        "every field and filter differs",
        EVERY_FIELD,
        [Start("abcdef"), Predict("abcdef")],
        [Step("abcdef", likely=ENDS, options=OWN_FILTERS | {"probs": True, "vocab_mask": NO_TOKEN_3})] * 3,
        [Step("fabedc", options={"active": "abdef", "probs": True}), Step("fedcba", options={"dtype": torch.bfloat16})],
        max_requests=6,
        parts_of=4,
    ),
    Scenario(
        "drafts and masks of each part; a step in parts counts once",
        requests(TILT | {"value_stride": 2}, LENGTHS | TILT, None, LENGTHS, TILT | {"value_stride": 3}),
        [Start("abcde")],
        [
            Step(
                "abcde",
                drafts={name: ([30 + number, 31, 30], [-1, -1, 1]) for name in "abcd"},
                options=VERIFY | {"vocab_mask": torch.full((20, 4), -1 - number, dtype=torch.int32)},
            )
            for number in range(4)
        ],
        **(DRAFTS | {"max_delta": 9}),
        parts_of=2,
    ),
    # Spans.
    Scenario(
        "span ends count before a restart but not in the prompt, and the next request has a new span",
        {"a": Asked(3, [11, 5, 6, 7, 8], SPAN), "b": Asked(1, [9], SPAN), "c": Asked(1, [30, 31], SPAN)},
        [Start("ab"), Step("ab", "GG", takes={"a": 20, "b": 11}), Step("ab", "G-", takes={"a": 21, "b": 22})],
        [Step("ab", "G-", takes={"a": 23, "b": 11}), Extend("b", restarts=True), Extend("a", restarts=True)],
        [Step("ab", "G-", takes={"a": 60}), Leave("b", is_removed=False), Start("c"), Step("ac", "-G")],
    ),
    Scenario(
        "nodes after an end are not guided",
        requests(SPAN, SPAN | {"end_token_ids": [7, 11]}, TILT),
        [
            Start("abc"),
            Step(
                "abc",
                "GG-G-G" + "G--G--" + "GGGGGG",
                drafts={
                    "a": ([20, 11, 21, 22, 23], [-1, -1, 0, 1, 2]),
                    "b": ([7, 8, 9, 11, -1], [-1, 0, -1, 2, 3]),
                    "c": ([11, 7, 8, EOS, 9], [-1, 0, 1, 2, 3]),
                },
            ),
        ],
        max_drafts=5,
        max_candidates=4,
    ),
    Scenario(
        "a row with a span that may end is due",
        requests(*[SPAN | NEVER] * 4),
        [Start("abcd"), Step("abcd", "NGGG", likely={"b": {60: 1.5}, "c": {EOS: 1.5}, "d": {11: 1.5}})],
    ),
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_scenario(models, monkeypatch, scenario):
    monkeypatch.setattr("lenvm_kernels.step.step.MAX_ROWS", scenario.parts_of)
    driver = Driver(models, monkeypatch, scenario.options, scenario.is_padded).run(scenario)
    assert driver.scored > 0


def test_random_arrivals_departures_and_retractions(models, monkeypatch):
    """200 steps with too few pages: aborted and retracted requests, and reused rows and slots."""
    generator = torch.Generator().manual_seed(0)
    randint = lambda low, high: torch.randint(low, high, (), generator=generator).item()  # noqa: E731
    driver = Driver(models, monkeypatch, dict(rows=6, max_len=60, page_size=4, num_pages=30, chunk_tokens=7))
    waiting, longest, retractions, finished = [], {}, 0, 0

    def take(names):
        """Take a step. Some sequences continue with a token that was not drawn, e.g. of a grammar."""
        takes = {name: randint(0, VOCAB) for name in names if randint(0, 8) == 0}
        driver.handle(Step("".join(names), takes=takes, draws=randint(0, 2) == 0), {})

    while driver.number < 200:
        if randint(0, 2) == 0:
            prompt = [randint(3, VOCAB) for _ in range(randint(1, 20))]
            waiting.append(Asked(0, prompt, GUIDANCE[randint(0, len(GUIDANCE))], seed=randint(0, 99)))
        admitted = []
        for row in sorted(set(range(6)) - {asked.row for asked in driver.live.values()}):
            if waiting and driver.engine.slots.free_pages * 4 >= len(waiting[0].prompt) + 8:
                name = next(letter for letter in "abcdef" if letter not in driver.live)
                driver.start(name, replace(waiting.pop(0), row=row).renewed())
                longest[name] = min(len(driver.live[name].tokens) + randint(1, 30), 59)
                admitted.append(name)
        if admitted:  # a prefill batch is a separate step without the running requests
            driver.prefill(admitted)
            take(admitted)
        for name, asked in list(driver.live.items()):
            if len(asked.tokens) >= longest[name] or asked.tokens[-1] == EOS or randint(0, 60) == 0:
                driver.leave(name, is_removed=randint(0, 2) == 0)
                finished += 1
        while driver.engine.slots.free_pages < len(driver.live):
            retracted = driver.leave(sorted(driver.live)[randint(0, len(driver.live))])
            waiting.insert(0, replace(retracted, prompt=retracted.tokens))
            retractions += 1
        if driver.live:
            take(sorted(driver.live, key=lambda name: randint(0, 100)))
    assert driver.scored > 1000 and retractions > 5 and finished > 20, (driver.scored, retractions, finished)
