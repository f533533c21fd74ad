"""Scenarios of guided steps: lists of events, a driver that runs them, and an oracle that checks every row of each
step.

The oracle recomputes each step from the requests' tokens: candidates, probabilities and draws with the operators'
references in PyTorch, values with plain forwards of ``transformers``, and the numbers of computed tokens by hand.
"""

import math
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.nn.functional import softplus

from lenvm_kernels.guidance import GuidanceParams, GuidanceTable, parse_guidance
from lenvm_kernels.ops.reweight_scatter import reweight_scatter
from lenvm_kernels.ops.topk_candidates import topk_candidates
from lenvm_kernels.ops.verify_drafts import verify_drafts
from lenvm_kernels.reference.draw import draw_tokens
from lenvm_kernels.step import StepBatch
from lenvm_kernels.step.inputs import FILTER_DTYPES, MAX_ROWS
from lenvm_kernels.step.state import bucket_of
from lenvm_kernels.types import Mode, Status
from tests.helpers.cases import make_drafts
from tests.helpers.drafted_steps import paths
from tests.helpers.engine import Engine, PaddedStep, make_step
from tests.helpers.models import EOS, VOCAB
from tests.helpers.watch import watch_forwards

STATUS = {"-": Status.UNGUIDED, "G": Status.GUIDE, "1": Status.SINGLE, "S": Status.SKIP, "N": Status.NOT_DUE}
LIKELY_LOGITS = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0])
LIKELY = len(LIKELY_LOGITS)


@dataclass
class Asked:
    """A request of a scenario: its row, prompt and parameters, and the passed part of its sequence."""

    row: int
    prompt: list[int]
    guidance: dict | None
    eos: tuple[int, ...] = (EOS,)
    seed: int = 0
    tokens: list[int] = field(default_factory=list)
    new: int = 1  # tokens to pass to the next step
    passed: int = 0
    cached: int = 0
    faults: int = 0

    @property
    def params(self):
        return GuidanceParams() if self.guidance is None else parse_guidance(self.guidance)

    @property
    def needs_model(self):
        return self.params.mode != Mode.UNGUIDED or self.params.return_values

    def renewed(self):
        return replace(self, tokens=list(self.prompt))


class Start(NamedTuple):
    """Requests arrive. Unless ``is_extended``, their prompts are not computed."""

    names: str
    is_extended: bool = True


class Leave(NamedTuple):
    """A request leaves; its row and slots are free."""

    name: str
    is_removed: bool = True  # False: the next request replaces it


class Extend(NamedTuple):
    """Tokens ``first`` to ``end`` of a sequence are passed to ``extend``. ``restarts``: after its slots were lost."""

    name: str
    first: int = 0
    end: int | None = None
    restarts: bool = False


class Grow(NamedTuple):
    """A sequence grows by other tokens than drawn ones. ``passed``: number passed to the next step; if None, all."""

    name: str
    tokens: tuple[int, ...]
    passed: int | None = None


class WarmUp(NamedTuple):
    """The step is warmed up."""


class Predict(NamedTuple):
    """Lengths are predicted after the tokens that are passed to the next step."""

    names: str
    deltas: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Step:
    """A step of some requests.

    Attributes:
        names: the requests, one letter each, in the order of the batch.
        status: expected status of each row, a letter of :data:`STATUS`. If empty, the oracle's status.
        deltas: expected number of tokens that the value model computes. If None, the oracle's number.
        likely: logits of tokens, by name of the request.
        drafts: tokens and parents of drafts, by name.
        draws: whether the caller draws a token for each row.
        takes: tokens that replace the drawn ones, by name.
        options: other arguments of :meth:`Engine.decode`.
    """

    names: str
    status: str = ""
    deltas: tuple[int, ...] | None = None
    likely: dict = field(default_factory=dict)
    drafts: dict | None = None
    draws: bool = True
    takes: dict = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


class Scenario:
    """Requests by name, events in order, and options of the step.

    ``is_padded``: as with CUDA graphs. ``parts_of``: maximum number of requests computed at once. ``has_values``:
    whether there is a value model.
    """

    def __init__(self, name, requests, *events, is_padded=False, parts_of=MAX_ROWS, **options):
        self.name, self.requests, self.events = name, requests, [*chain.from_iterable(events)]
        self.is_padded, self.parts_of, self.options = is_padded, parts_of, options


def same(found, expected, **tolerance):
    torch.testing.assert_close(found, expected, equal_nan=True, **tolerance)


class Driver:
    """Runs the events of scenarios, and checks each step against the oracle."""

    def __init__(self, models, monkeypatch, options, is_padded=False):
        self.is_padded, self.has_values = is_padded, options.pop("has_values", True)
        self.models, self.options = models, dict(max_delta=16, max_drafts=0, value_stride=1) | options
        if is_padded:
            options = options | dict(step_class=PaddedStep, backend="triton")
        self.engine = Engine(*make_step(models.value if self.has_values else None, **options))
        self.seen = watch_forwards(models.value, monkeypatch)
        self.live: dict[str, Asked] = {}
        self.counted = self.scored = self.number = 0

    def run(self, scenario):
        for number, event in enumerate(scenario.events):
            try:
                self.handle(event, scenario.requests)
            except AssertionError as error:
                raise AssertionError(f"{scenario.name}, event {number}, {event}: {error}") from error
        return self

    def handle(self, event, requests):
        match event:
            case Start(names, is_extended):
                for name in names:
                    self.start(name, requests[name].renewed())
                if is_extended:
                    self.prefill(names)
            case Leave(name, is_removed):
                self.leave(name, is_removed)
            case Extend(name, first, end, restarts):
                asked = self.live[name]
                if restarts:
                    self.engine.step.restart_request(asked.row)
                    asked.passed = asked.cached = 0
                end = len(asked.tokens) - 1 if end is None else end
                self.engine.step.extend(*self.engine.prompts([asked.row], [asked.tokens[first:end]], [first]))
                self.passed(asked, end)
            case Grow(name, tokens, passed):
                asked = self.live[name]
                asked.tokens += tokens
                asked.new = asked.new + len(tokens) if passed is None else passed
                self.engine.slots.extend(asked.row, len(asked.tokens))
            case WarmUp():
                before = self.engine.step.values.cache.keys.clone()
                self.engine.step.warm_up(progress=False)
                self.forget()
                assert torch.equal(self.engine.step.values.cache.keys, before), "warm-up wrote to the cache"
            case Predict():
                self.predict(event)
            case Step():
                self.step(event)

    def start(self, name, asked):
        self.live[name] = asked
        options = dict(prompt_len=len(asked.prompt), seed=asked.seed, eos=asked.eos)
        self.engine.admit(asked.row, asked.tokens, asked.guidance, **options)

    def prefill(self, names):
        batch = [self.live[name] for name in names]
        self.engine.prefill([asked.row for asked in batch], [asked.tokens for asked in batch])
        for asked in batch:
            self.passed(asked, len(asked.tokens) - 1)

    def leave(self, name, is_removed=True):
        asked = self.live.pop(name)
        self.engine.slots.free(asked.row)
        if is_removed:
            self.engine.step.remove_request(asked.row)
        return asked

    @staticmethod
    def passed(asked, end):
        if asked.needs_model:
            asked.passed, asked.cached = max(asked.passed, end), max(asked.cached, end)

    def catch_up(self, asked, length, is_needed, is_guided):
        """The number of tokens that a forward computes in a sequence of ``length`` tokens."""
        missing = max(length - asked.cached, 0)
        most = self.options["max_delta"] - 1 - self.options["max_drafts"]
        delta = missing if is_needed or (is_guided and missing > most) else 0
        asked.cached += delta
        return delta

    def forward(self, deltas, expected=None):
        computed = [*chain.from_iterable(self.seen.deltas)]  # a step in parts makes several forwards
        self.forget()
        assert computed[: len(deltas)] == deltas, f"computed {computed}, not {deltas}"
        size = bucket_of(len(deltas), self.engine.step.max_requests) if self.is_padded else len(deltas)
        assert computed[len(deltas) :] == [0] * (size - len(deltas)), "padding is computed, or missing"
        assert expected is None or deltas == list(expected), f"computed {deltas}, not {expected}"

    def forget(self):
        self.seen.deltas.clear()
        self.seen.candidates.clear()

    def predict(self, event):
        batch, i32 = [self.live[name] for name in event.names], self.engine.tensor
        new, tokens = [asked.new for asked in batch], [asked.tokens for asked in batch]
        if max(new) == 1 and not self.options["max_drafts"]:
            passed, new_lens = i32([sequence[-1] for sequence in tokens]), None
        else:
            passed, new_lens = self.engine.new_tokens(tokens, new)[:, : 1 + self.options["max_drafts"]], i32(new)
        cache = self.engine.step.values.cache
        before = cache.keys.clone()
        grown = StepBatch(passed, i32([a.row for a in batch]), i32([*map(len, tokens)]), new_lens)
        found = self.engine.step.predict(grown)
        deltas, scored = [], []
        for asked, row, n in zip(batch, found.view(len(batch), -1), new, strict=True):
            wants = asked.params.return_values
            scored.append(n if wants else 0)
            deltas.append(self.catch_up(asked, len(asked.tokens) - n, wants, False))
            ends = [len(asked.tokens) - n + i + 1 for i in range(n)]
            expected = [self.length(asked, asked.tokens[:end]) if wants else math.nan for end in ends]
            same(row, torch.tensor([*expected, *[math.nan] * (len(row) - n)]), rtol=0, atol=2e-3)
        candidates = [*chain.from_iterable(self.seen.candidates)][: len(batch)]
        assert candidates == scored, f"scored {candidates}, not {scored}"
        self.forward(deltas, event.deltas)
        written = (cache.keys != before).transpose(0, 1).flatten(1).any(1).sum()
        assert written <= sum(deltas), f"predict wrote {written} slots"

    @staticmethod
    def span(asked, sequence):
        return asked.params.span_state(asked.prompt, sequence[len(asked.prompt) :])

    def length(self, asked, sequence):
        if sequence[-1] in asked.eos:
            return 0.0
        return softplus(self.models.values([sequence])[0]).item() / -math.log(asked.params.gamma)

    def scores(self, event, nodes):
        """Random scores with a few likely tokens, different in every row and step."""
        generator = torch.Generator().manual_seed(self.number)
        scores = torch.randn(len(nodes), VOCAB, generator=generator) - 20
        for row, node in enumerate(nodes):
            first = 5 + (31 * self.number + 17 * row) % (VOCAB - 5 - LIKELY)
            scores[row, first : first + LIKELY] = LIKELY_LOGITS
            for token, logit in event.likely.get(node[0], {}).items():
                scores[row, token] = logit
        return scores

    def step(self, event):
        self.number += 1
        names, width = event.names, self.options["max_drafts"] if event.drafts is not None else 0
        batch = [self.live[name] for name in names]
        for asked in batch:
            self.engine.slots.extend(asked.row, len(asked.tokens))
        drafted = {name: (event.drafts or {}).get(name, ([-1] * width, [-1] * width)) for name in names}
        nodes = []
        for name in names:
            known = paths(*drafted[name])
            nodes += [(name, known[j] if j < len(known) else None) for j in range(1 + width)]
        options = dict(event.options)
        scores = self.scores(event, nodes).to(options.pop("dtype", torch.float32))
        before = scores.clone()
        if event.draws and "drawn" not in options:
            options["drawn"] = torch.tensor([4 + (7 * self.number + 13 * i) % 80 for i in range(len(nodes))])
        if options.pop("probs", False):
            options["probs"] = torch.softmax(scores, 1)
        if width:
            options["drafts"] = make_drafts(*(list(x) for x in zip(*drafted.values(), strict=True)))
        if width or any(asked.new != 1 for asked in batch):
            options["new"] = [asked.new for asked in batch]
        if "active" in options:
            options["active"] = torch.tensor([name in options["active"] for name in names])
        before_probs = options["probs"].clone() if "probs" in options else None
        output = self.engine.decode([a.row for a in batch], [a.tokens for a in batch], scores, **options)
        self.check(event, nodes, output, before, options, before_probs)
        letters = "".join(letter for s in output.candidates.status.tolist() for letter in STATUS if STATUS[letter] == s)
        assert not event.status or letters == event.status, f"status {letters}, not {event.status}"
        self.counted += options.get("counts", True)
        self.grow(event, batch, output)

    def grow(self, event, batch, output):
        tokens = output.tokens.view(len(batch), -1).tolist() if output.tokens is not None else None
        for i, (name, asked) in enumerate(zip(event.names, batch, strict=True)):
            if name in event.takes:
                taken = event.takes[name]
                taken = [taken] if isinstance(taken, int) else taken
            elif output.verified is not None:
                taken = output.verified.tokens[i, : output.verified.lens[i]].tolist()
            else:
                taken = [tokens[i][0] if tokens is not None and tokens[i][0] >= 0 else 9]
            asked.tokens += taken
            asked.new = len(taken)
            self.engine.slots.extend(asked.row, len(asked.tokens))

    def check(self, event, nodes, output, scores, options, before_probs):
        """Check all results of a step."""
        width = len(nodes) // len(event.names)
        active = options["active"].tolist() if "active" in options else [True] * len(event.names)
        due = {}
        rows = []  # (request, tokens before the candidates, parameters, whether guided, whether a length is wanted)
        for i, name in enumerate(event.names):
            asked, params = self.live[name], self.live[name].params
            length = len(asked.tokens)
            is_gap = asked.passed < length - asked.new
            is_open = self.span(asked, asked.tokens).end is None
            is_guided, wants = active[i] and params.mode != Mode.UNGUIDED, active[i] and params.return_values
            reads = self.has_values and (wants or (is_guided and (is_open or bool(params.start_token_ids))))
            is_lost = reads and (is_gap or length - asked.cached > self.options["max_delta"])
            asked.faults += is_lost
            asked.passed = asked.passed if is_gap else max(asked.passed, length)
            stride = params.value_stride or self.options["value_stride"]
            due[name] = (self.counted + 1) % stride == 0
            for _, path in nodes[width * i : width * (i + 1)]:
                exists = path is not None and not is_lost
                sequence = [*asked.tokens, *(path or ())]
                guided = is_guided and exists and self.span(asked, sequence).end is None
                rows.append((asked, sequence, params, guided, wants and exists))
        asked_of, sequences, params, guided, wants = map(list, zip(*rows, strict=True))
        breaks = self.options.get("text_breaks")
        of_requests = GuidanceTable(len(params), "cpu", early=0.0 if breaks is None else self.engine.step.values.early)
        for row, (p, asked) in enumerate(zip(params, asked_of, strict=True)):
            of_requests.add_request(row, p, set(asked.eos))
            for token, scale in p.token_temperature_scale.items():
                if token < VOCAB:
                    scores[row, token] *= scale
        table = of_requests.columns
        generated = torch.tensor([len(s) - self.span(a, s).begin for s, a in zip(sequences, asked_of, strict=True)])
        filters = dict(top_k=6, top_p=1.0, min_p=0.05, temperature=0.8) | options
        filters = {
            name: torch.as_tensor(filters[name]).expand(len(due)).repeat_interleave(width) for name in FILTER_DTYPES
        }
        greedy = (filters["top_k"] == 1) | (filters["temperature"] < 1e-6)
        without = dict(top_k=0, top_p=1.0, min_p=0.0, temperature=1.0)  # guidance chooses among all candidates
        candidates = topk_candidates(
            scores,
            **{name: torch.where(greedy, without[name], x).to(FILTER_DTYPES[name]) for name, x in filters.items()},
            max_candidates=output.probs.shape[1],
            is_logits=True,
            guided=torch.tensor(guided),
            vocab_mask=options.get("vocab_mask"),
            table=table,
            generated=generated.int(),
            text_breaks=breaks,
            last_tokens=None if breaks is None else torch.tensor([sequence[-1] for sequence in sequences]),
            backend="reference",
        )
        for row, (asked, _) in enumerate(zip(asked_of, sequences, strict=True)):
            ends = {*asked.eos, *(first for first, *_ in params[row].end_token_ids)}
            ends &= set(candidates.token_ids[row, : candidates.counts[row]].tolist())
            name = nodes[row][0]
            if candidates.status[row] == Status.GUIDE and not due[name] and not ends:
                candidates.status[row] = Status.NOT_DUE
        for name, found, expected in zip(candidates._fields, output.candidates, candidates, strict=True):
            message = f"{name} {found.tolist()}, not {expected.tolist()}"
            same(found, expected, rtol=1e-6, atol=1e-6, msg=message)  # kernels add in another order

        shown = {Status.SINGLE, Status.SKIP} if self.options.get("score_all") else set()
        status = candidates.status.tolist()
        scored = [s == Status.GUIDE or (s in shown and not want) for s, want in zip(status, wants, strict=True)]
        if self.has_values:
            self.scored += self.models.assert_values(output, sequences, scored)
        else:
            assert output.value_logits is None
            self.scored += sum(scored)
        changed = dict(generated=generated.int(), text_breaks=breaks, probs=before_probs)
        probs = reweight_scatter(candidates, output.value_logits, table, **changed, backend="reference")
        same(output.probs, probs, rtol=0, atol=1e-4)
        if before_probs is not None:
            same(options["probs"], before_probs, rtol=0, atol=1e-4)
        tokens = options.get("drawn")
        if options.get("sample", True):
            seeds = torch.tensor([asked.seed for asked in asked_of])
            lengths = torch.tensor([len(sequence) for sequence in sequences])
            tokens = draw_tokens(candidates, output.probs, seeds, lengths, greedy)
            if "drawn" in options:
                tokens = torch.where(tokens >= 0, tokens, options["drawn"].int())
        assert (output.tokens is None) == (tokens is None)
        if tokens is not None:
            assert output.tokens.tolist() == tokens.tolist(), f"tokens {output.tokens.tolist()}, not {tokens.tolist()}"
        if "verify" in options:
            expected = verify_drafts(tokens, options["drafts"], backend="reference")
            assert all(map(torch.equal, output.verified, expected)), "verified tokens differ"
        self.check_lengths(output, tokens, rows)
        faults = self.engine.step.table.columns.faults[[self.live[name].row for name in event.names]].tolist()
        assert faults == [self.live[name].faults for name in event.names], f"faults {faults}"
        if self.has_values:
            self.check_forward(event, nodes, output, tokens, guided, wants, scored)

    def check_lengths(self, output, tokens, rows):
        returns = any(asked.params.return_values for asked in self.live.values())
        assert (output.remaining_lengths is None) == (tokens is None or not returns)
        if output.remaining_lengths is not None:
            expected = []
            for row, ((asked, sequence, _, _, wants), token) in enumerate(zip(rows, tokens.tolist(), strict=True)):
                is_guided = output.candidates.status[row] == Status.GUIDE
                is_scored = token in output.candidates.token_ids[row] if is_guided else token >= 0
                expected.append(self.length(asked, [*sequence, token]) if wants and is_scored else math.nan)
            same(output.remaining_lengths, torch.tensor(expected), rtol=1e-4, atol=2e-3)

    def check_forward(self, event, nodes, output, tokens, guided, wants, scored):
        """Check the number of tokens that the value model has computed."""
        width, deltas = len(nodes) // len(event.names), []
        for i, name in enumerate(event.names):
            asked, own = self.live[name], range(width * i, width * (i + 1))
            is_needed = any(scored[j] or (wants[j] and self.next_token(event, output, tokens, j) >= 0) for j in own)
            deltas.append(self.catch_up(asked, len(asked.tokens), is_needed, guided[own[0]] or wants[own[0]]))
        self.forward(deltas, event.deltas)
        passed = self.engine.step.passed_lens(torch.tensor([self.live[name].row for name in event.names])).tolist()
        assert passed == [self.live[name].passed for name in event.names], f"passed_lens {passed}"

    @staticmethod
    def next_token(event, output, tokens, row):
        if output.candidates.status[row] == Status.SINGLE and event.options.get("sample", True):
            return output.candidates.token_ids[row, 0].item()
        return -1 if tokens is None else tokens[row].item()
