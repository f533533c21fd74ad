"""The in-process runner of the LenVM fork of SGLang: engine scenarios with each step checked against plain forwards."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, Qwen2_5_VLForConditionalGeneration

from lenvm_kernels.engines.own_slots import PAGE_SIZE as PAGE
from lenvm_kernels.engines.settings import Settings
from lenvm_kernels.engines.sglang_fork import drop_in as sglang_fork
from lenvm_kernels.engines.sglang_fork import runner as sglang_fork_runner
from lenvm_kernels.guidance import GuidanceParams, GuidanceTable, parse_guidance
from lenvm_kernels.ops.reweight_scatter import reweight_scatter
from lenvm_kernels.ops.topk_candidates import topk_candidates
from lenvm_kernels.step import working_bytes
from lenvm_kernels.types import Mode, Status
from lenvm_kernels.values import KVCache, ValueModel
from lenvm_kernels.values.images import load_vision_tower
from tests.helpers import sglang_fork as helper
from tests.helpers.models import EOS, IMAGE, VIDEO, VOCAB, random_head, random_model, save_checkpoint, vl_config
from tests.helpers.models import value_logits as plain_values
from tests.helpers.sglang_fork import ALL, RUNNER, SAMPLING, Engine, Item, Request, install
from tests.helpers.watch import no_read_back

ATOL = 2e-5  # on probabilities computed from fp32 value logits of O(1)
TILT = {"value_mode": "centered_exp", "value_scale": -8}


class Plain:
    """A value model in ``transformers``."""

    def __init__(self, path, model_class):
        self.path, self._known = path, {}
        self._model = model_class.from_pretrained(path).eval()
        self._head = load_file(path / "value_head.safetensors")

    def after(self, tokens, items=()):
        """fp32 ``[V]``: value logit of every possible next token after the tokens and their images; NaN for images."""
        known = (*tokens, *((item.hash, *item.image_grid_thw.flatten().tolist()) for item in items))
        if known not in self._known:
            follow = [token for token in range(VOCAB) if not items or token not in (IMAGE, VIDEO)]
            sequences, images = torch.tensor([[*tokens, token] for token in follow]), {}
            if items:
                items = sorted(items, key=lambda item: item.offsets)
                for first, last in (offsets for item in items for offsets in item.offsets):
                    sequences[:, first : last + 1] = IMAGE
                images = dict(
                    pixel_values=torch.cat([item.feature for item in items]).repeat(len(follow), 1),
                    image_grid_thw=torch.cat([item.image_grid_thw for item in items]).repeat(len(follow), 1),
                    mm_token_type_ids=(sequences == IMAGE).int(),
                )
            self._known[known] = torch.full((VOCAB,), torch.nan)
            self._known[known][follow] = plain_values(self._model, self._head, sequences, **images)[:, -1]
        return self._known[known]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    path = tmp_path_factory.mktemp("text")
    save_checkpoint(path, seed=1, words=[f"w{i}" for i in range(VOCAB)], value_head=True)
    return Plain(path, LlamaForCausalLM)


@pytest.fixture(scope="module")
def plain_vl(tmp_path_factory):
    path = tmp_path_factory.mktemp("vl")
    random_model(Qwen2_5_VLForConditionalGeneration, vl_config(), seed=3).save_pretrained(path)
    save_file(random_head(), path / "value_head.safetensors")
    return Plain(path, Qwen2_5_VLForConditionalGeneration)


@pytest.fixture
def modules(monkeypatch):
    return install(monkeypatch)


@pytest.fixture
def make(modules, plain, monkeypatch):
    return lambda path=plain.path, **options: Engine(modules, monkeypatch, path, **options)


def counted(monkeypatch, name, count):
    """A list to which each call of a value model's method appends a number."""
    counts, method = [], getattr(ValueModel, name)

    def wrapped(self, *args, **kwargs):
        result = method(self, *args, **kwargs)
        counts.append(count(result, *args))
        return result

    monkeypatch.setattr(ValueModel, name, wrapped)
    return counts


def request_of(name, parts, params, *, text=0, placeholder=None, **filters):
    """A request whose prompt has parts: a number of random tokens, or an image ``(rows, columns, seed)``.

    Args:
        name, params, filters: id, ``custom_params`` and sampling filters of the request.
        parts: parts of the prompt in order. A number is a prompt without images.
        text: seed of the tokens.
        placeholder: image token. If None, a token outside the vocabulary that depends on the pixels, as in the engine.
    """
    tokens, items = [], []
    for part in [parts] if isinstance(parts, int) else parts:
        if isinstance(part, int):
            generator = torch.Generator().manual_seed(text + len(tokens) + part)
            tokens += torch.randint(3, 83, (part,), generator=generator).tolist()
        else:
            items.insert(0, Item(len(tokens), *part))  # in the reverse of their order in the prompt
            tokens += [items[0].hash % 2**30 if placeholder is None else placeholder] * (part[0] * part[1])
    request = Request(name, tokens, params, **filters)
    if items:
        request.multimodal_inputs = SimpleNamespace(mm_items=items)
    return request


# --- the oracle ---


def with_own_filters(request, probs):
    """``probs [V]`` after the request's filters, not normalised."""
    sampling, result, mass = request.sampling_params, torch.zeros_like(probs), 0.0
    for token in probs.argsort(descending=True)[: sampling.top_k].tolist():
        if mass <= sampling.top_p and probs[token] >= sampling.min_p * probs.max():
            result[token] = probs[token]
        mass += probs[token].item()
    return result


def expected_row(plain, request, probs, **overrides):
    """Guided ``probs [V]`` by the specification with values of plain forwards, and the row's status."""
    sampling, row = request.sampling_params, probs[None].clone()
    params = GuidanceParams()
    if sampling.custom_params:
        params = parse_guidance({**sampling.custom_params, **overrides}, constraint="eq")
    column = lambda x, dtype: torch.tensor([x], dtype=dtype)  # noqa: E731
    threshold = float("nan") if params.entropy_threshold is None else params.entropy_threshold
    candidates = topk_candidates(
        row,
        top_k=column(sampling.top_k, torch.int32),
        top_p=column(sampling.top_p, torch.float32),
        min_p=column(sampling.min_p, torch.float32),
        max_candidates=64,
        entropy_threshold=column(threshold, torch.float32),
        guided=column(params.mode != Mode.UNGUIDED, torch.bool),
    )
    status = Status(candidates.status.item())
    if status not in (Status.GUIDE, Status.SINGLE):
        return with_own_filters(request, probs), status
    items = () if request.multimodal_inputs is None else request.multimodal_inputs.mm_items
    value_logits = plain.after(request.tokens, items)[candidates.token_ids.clamp(min=0).long()]
    table = GuidanceTable.from_params([params], [{EOS}], "cpu").columns
    generated = column(len(request.tokens) - len(request.origin_input_ids), torch.int32)
    reweight_scatter(candidates, value_logits, table, generated=generated, probs=row)
    return row[0], status


# --- scenarios and their driver ---


class Event(NamedTuple):
    """An event of requests, which are named by letters: ``prefill``, ``decode``, ``finish``, or ``drop`` (last token).

    Attributes:
        rows, ends, prefixes: arguments of :meth:`Engine.prefill`.
        unguided: requests that are not guided in this step and keep their filters.
        unchanged: whether no row of the batch is rewritten.
        forwards: rows of each forward of the value model, None for any number. If None, one forward in ``decode``.
        embedded: rows of each forward of the vision tower.
        held: rows of the engine's pool that hold slots after the event.
    """

    kind: str
    names: str
    rows: tuple[int, ...] = ()
    ends: list[int] | None = None
    prefixes: list[int] | None = None
    unguided: str = ""
    unchanged: bool = False
    forwards: list[int | None] | None = None
    embedded: list[int] | None = None
    held: set[int] | None = None


def prefill(names, *rows, **options):
    return Event("prefill", names, rows, **options)


def decode(names, **options):
    return Event("decode", names, **options)


class Scenario(NamedTuple):
    """Events of one engine; arguments of :func:`request_of` per request name.

    Attributes:
        unguided: requests that are never guided.
        lag: number of tokens that the host lacks in a decode batch.
        pages: pages of the value model's cache. If None, enough for all requests.
        draws: if ``any``, also tokens that are not candidates are drawn.
        environment: environment variables of settings.
    """

    name: str
    requests: dict[str, tuple[Any, Any, dict[str, Any]]]
    events: list[Event]
    unguided: str = ""
    lag: int = 0
    pages: int | None = None
    draws: str = "candidates"
    environment: tuple[tuple[str, str], ...] = ()


def drive(scenario, engine, plain, forwards, embedded):
    """Run a scenario and check each row of each step against the oracle."""
    requests = {name: request_of(name, *args[:2], **args[2]) for name, args in scenario.requests.items()}
    statuses = set()
    for i, event in enumerate(scenario.events):
        where = f"{scenario.name}, event {i}: {event}"
        batch = [requests[name] for name in event.names]
        if event.kind in ("finish", "drop"):
            for request in batch:
                request.finished_reason = "stop" if event.kind == "finish" else None
                del request.tokens[len(request.tokens) - (event.kind == "drop") :]
            continue
        forwards.clear()
        embedded.clear()
        if event.kind == "prefill":
            before, after = engine.prefill(batch, event.rows, ends=event.ends, prefixes=event.prefixes)
        else:
            before, after = engine.decode(batch)
        assert (after is None) == event.unchanged, where
        for j, (request, row) in enumerate(zip(batch, before, strict=True)):
            images = getattr(request, "lenvm_images", None)
            assert images is None or images.embeds is None, f"{where}: {request.rid} keeps embeddings"
            is_chunk = event.ends is not None and event.ends[j] < len(request.tokens)
            if after is None:
                drawn = row
            elif is_chunk or request.rid in scenario.unguided + event.unguided:
                drawn = after[j]
                assert torch.equal(after[j], with_own_filters(request, row)), f"{where}, request {request.rid}"
            else:
                expected, status = expected_row(plain, request, row)
                statuses.add(status)
                drawn = after[j]
                message = f"{where}, request {request.rid}"
                torch.testing.assert_close(
                    after[j], expected, rtol=0, atol=ATOL, msg=lambda m, message=message: f"{message}: {m}"
                )
            if scenario.draws == "any":
                place = 50 * ((i + j) % 2)
                drawn = torch.zeros_like(row).index_fill(0, row.argsort(descending=True)[place : place + 1], 1)
            if not is_chunk:
                engine.draw([request], drawn[None])
        if not engine.runner:
            continue
        expected_forwards = [None] if event.forwards is None and event.kind == "decode" else event.forwards
        if expected_forwards is not None:
            assert len(forwards) == len(expected_forwards), f"{where}: {forwards}"
            assert all(e in (None, n) for n, e in zip(forwards, expected_forwards, strict=True)), f"{where}: {forwards}"
        assert event.embedded is None or sorted(embedded) == sorted(event.embedded), f"{where}: {embedded}"
        assert event.held is None or engine.rows == event.held, f"{where}: {engine.rows}"
    return statuses


JOIN_AND_LEAVE = Scenario(
    "requests join and leave",
    {
        "a": (23, TILT, dict(top_k=5)),
        "b": (1, {**TILT, "entropy_threshold": 0.1}, dict(top_k=9, min_p=0.1)),
        "c": (40, None, dict(top_k=3)),
        "d": (17, {"target_length": 9, "entropy_threshold": 1.7}, dict(top_k=6, top_p=0.9)),
        "e": (6, {"value_mode": "value_bias", "value_scale": 1.5, "entropy_threshold": 0.1}, dict(top_k=ALL)),
        "f": (33, {"target_length": 40, "constraint": "eq_soft"}, dict(top_k=12)),
    },
    [
        prefill("ab", 4, 1, prefixes=[16, 0], held={1, 4}),
        decode("ba"),
        decode("ba"),
        prefill("cd", 6, 0, held={0, 1, 4}),
        decode("dbca"),
        decode("dbca"),
        Event("finish", "b"),
        decode("adc", held={0, 4}),
        prefill("e", 1, held={0, 1, 4}),  # reuses the row of b
        decode("eacd"),
        Event("drop", "a"),  # the drawn token is dropped because a is retracted
        decode("dce"),
        prefill("f", 4),  # reuses the row of a
        decode("efcd"),
        prefill("a", 5),
        decode("aefcd"),
        Event("finish", "cd"),
        decode("fae", held={1, 4, 5}),
        decode("fae"),
    ],
)
MODES = Scenario(
    "rows have their own modes, and unguided rows their own filters",
    {
        name: (4 + i, params, filters)
        for i, (name, params, filters) in enumerate(
            [
                ("a", {"mode": "value_bias", "value_scale": 2.0}, {}),
                ("b", {"value_scale": 0.7}, {}),
                ("c", {"mode": "length_mul", "value_scale": 0.5, "gamma": 0.9}, {}),
                ("d", {"target_length": 3, "gamma": 0.9}, {}),
                ("e", {"target_length": 12, "op": "ge"}, dict(top_p=0.9)),
                ("f", None, dict(top_k=3)),
                ("g", None, dict(top_k=ALL, top_p=0.5)),
                ("h", {}, dict(top_k=ALL, min_p=0.3)),
                ("i", {"value_scale": 0.5, "entropy_threshold": 9.0}, dict(top_k=6, top_p=0.9, min_p=0.05)),
                ("j", TILT, {}),
            ]
        )
    },
    [
        prefill("abcde", 0, 1, 2, 3, 4),
        decode("edcba"),
        decode("adceb"),
        Event("finish", "abcde"),
        prefill("fghij", 0, 1, 2, 3, 4, held={3, 4}),
        decode("jihgf"),
        decode("jf"),
    ],
)
SCENARIOS = [
    JOIN_AND_LEAVE,
    MODES,
    JOIN_AND_LEAVE._replace(name="requests join and leave under the overlapping scheduler", lag=1),
    Scenario(
        "drawn tokens are no candidates",
        {name: (3 + 5 * i, TILT, dict(top_k=4 + i)) for i, name in enumerate("abc")},
        [prefill("abc", 5, 0, 2), decode("cab"), decode("bca"), decode("abc"), decode("cab")],
        draws="any",
    ),
    Scenario(
        "without guidance, a strength of 0, one candidate",
        {
            "a": (8, None, dict(top_k=3)),
            "b": (9, {"value_mode": "centered_exp", "value_scale": 0}, {}),
            "c": (7, TILT, dict(top_k=1)),
            "d": (6, TILT, {}),
        },
        [
            prefill("abc", 2, 0, 4, unchanged=True, forwards=[], held=set()),
            prefill("cda", 4, 1, 2, unguided="c", held={1}),
        ],
    ),
    Scenario(
        "chunks of a prompt",
        {"a": (5, TILT, {}), "b": (50, TILT, dict(top_k=7))},
        [
            prefill("a", 3),
            prefill("b", 1, ends=[20], unchanged=True, forwards=[]),
            prefill("ba", 1, 3, prefixes=[20, 5], ends=[41, 6], forwards=[None]),  # a mixed batch
            prefill("ab", 3, 6, prefixes=[6, 41], forwards=[49, None], held={3, 6}),
            decode("ba"),
        ],
    ),
    Scenario(
        "retracted, in its old row",
        {"a": (37, {"target_length": 30, "constraint": "eq_soft", "gamma": 0.98}, dict(top_k=6))},
        [
            prefill("a", 2, forwards=[36, 7]),
            decode("a"),
            decode("a"),
            decode("a"),
            prefill("a", 2, forwards=[None]),  # continues from its cached tokens
            Event("drop", "a"),
            prefill("a", 2, forwards=[40 - 2 * PAGE, 7]),  # recomputed except for full pages
        ],
        lag=1,
    ),
    Scenario(
        "retracted, in another row and in chunks",
        {"a": (21, TILT, dict(top_k=6)), "b": (4, TILT, dict(top_k=3))},
        [
            prefill("ab", 2, 5),
            decode("ab"),
            decode("ab"),
            prefill("ba", 5, 1, ends=[7, 23], prefixes=[6, 0], forwards=[None], held={5}),
            prefill("ba", 5, 3, prefixes=[7, 23], held={3, 5}),
            prefill("ba", 5, 0, prefixes=[8, 0], held={0, 5}),
        ],
    ),
    Scenario(
        "rows are taken over",  # by a request whose length is that of the next step, and by an unguided one
        {"a": (20, TILT, dict(top_k=5)), "b": (21, TILT, {}), "c": (5, None, dict(top_k=3)), "d": (7, TILT, {})},
        [
            prefill("a", 3),
            Event("finish", "a"),
            prefill("b", 3, held={3}),
            prefill("cd", 3, 6, held={6}),
            decode("cd"),
        ],
    ),
    Scenario(
        "a common prefix is computed once",
        {"a": (2 * PAGE + 5, TILT, dict(top_k=3)), "b": (2 * PAGE + 5, {"target_length": 9}, dict(top_k=5))},
        [prefill("a", 5), Event("finish", "a"), prefill("b", 0, forwards=[4, 1 + 5], held={0})],
    ),
    Scenario(
        "slots are taken from a request in no batch",
        {name: (length, TILT, dict(top_k=5)) for name, length in (("a", 30), ("b", 20), ("c", 18))},
        [
            prefill("a", 3),
            prefill("b", 1),
            decode("ab"),
            prefill("c", 2, held={2, 3}),  # a and b have two pages each
            Event("finish", "c"),
            decode("ba", forwards=[21, None]),
            decode("ab", held={1, 3}),
        ],
        pages=5,
    ),
    Scenario(
        "a request without room is not guided, nor later",
        {name: (n, {"value_scale": 0.5}, dict(top_k=k)) for name, n, k in (("a", 12, 5), ("b", 28, 3), ("c", 3, 5))},
        [
            prefill("abc", 1, 4, 0, forwards=[13, None], held={0, 1}),
            decode("abc"),
            decode("abc"),
            Event("finish", "a"),
            decode("bc", held={0}),
        ],
        unguided="b",
        pages=3,
        environment=(("LENVM_CHUNK_TOKENS", "16"),),
    ),
]
IMAGE_SCENARIOS = [
    Scenario(
        "images of several sizes beside text, in parts that cut images",
        {
            "a": ([3, (2, 3, 1), 2, (4, 1, 2), 5], TILT, dict(text=200, top_k=5)),
            "b": (11, TILT, dict(text=201, top_k=7)),
            "c": ([(3, 2, 3), 1], {"target_length": 9}, dict(text=202, top_k=4)),
            "d": ([1, (1, 1, 4), 20, (1, 5, 5), 3, (3, 3, 6), 4], TILT, dict(text=203, top_k=6)),
        },
        [
            prefill("ab", 4, 1, embedded=[6 + 4]),
            decode("ba", embedded=[]),
            prefill("bdc", 1, 0, 6, prefixes=[12, 0, 0], embedded=[1 + 5 + 9, 6]),
            decode("cadb"),
            decode("dbac", embedded=[]),
            Event("finish", "a"),
            decode("cbd"),
        ],
        environment=(("LENVM_CHUNK_TOKENS", "8"),),
    ),
    Scenario(
        "retracted requests with images are computed again",
        {
            "a": ([4, (2, 3, 1), 6], TILT, dict(text=210, top_k=5)),
            "b": ([PAGE, (1, 3, 2), 2], TILT, dict(text=211, top_k=4)),
            "c": ([2, (4, 5, 3), 1], TILT, dict(text=212, top_k=6)),
        },
        [
            prefill("ab", 3, 1, embedded=[6, 3]),
            decode("ba"),
            decode("ba"),
            decode("ba"),
            prefill("c", 2, embedded=[20]),  # reuses the slots of a
            Event("finish", "c"),
            prefill("ba", 0, 3, embedded=[3, 6]),
            decode("ab"),
            Event("drop", "a"),
            prefill("ab", 4, 0, embedded=[], forwards=[20 - PAGE, None]),
            decode("ba"),
        ],
        lag=1,
        pages=5,
    ),
    *(
        Scenario(
            f"a prompt shares the pages before {name}",
            {
                "a": ([2 * PAGE - 1, (3, 4, 1), 9], TILT, dict(placeholder=IMAGE, top_k=3)),
                "b": (parts, TILT, dict(placeholder=IMAGE, top_k=3, text=text)),
            },
            [prefill("a", 3, forwards=[51, None], embedded=[12]), prefill("b", 0, forwards=[computed, None])],
        )
        for name, parts, text, computed in (
            ("its end, with the same image", [2 * PAGE - 1, (3, 4, 1), 9], 0, 51 - 3 * PAGE),
            ("other pixels", [2 * PAGE - 1, (3, 4, 2), 9], 0, 51 - PAGE),
            ("the same pixels in another shape", [2 * PAGE - 1, (4, 3, 1), 9], 0, 51 - PAGE),
            ("nothing, if positions are moved further", [2 * PAGE - 1, (3, 4, 1), 9, (2, 2, 1), 1], 0, 56),
            ("nothing, with other text", [2 * PAGE - 1, (3, 4, 1), 9], 1, 51),
        )
    ),
]


def run(scenario, modules, plain, monkeypatch, **options):
    for name, value in scenario.environment:
        monkeypatch.setenv(name, value)
    if scenario.pages is not None:
        monkeypatch.setattr(sglang_fork_runner, "pages_for", lambda *args: scenario.pages)
    forwards = counted(monkeypatch, "forward", lambda result, batch, *args: int(batch.layout.q_offsets[-1]))
    embedded = counted(monkeypatch, "embed_images", lambda result, *args: len(result))
    engine = Engine(modules, monkeypatch, plain.path, lag=scenario.lag, **options)
    if engine.runner is None:  # values come from a server
        engine.lvm_guided_sampler._inproc = False
        engine.lvm_guided_sampler._post_tree_value = lambda rids, prefixes, ids, reqs: [
            plain.after(prefix)[candidates].tolist() for prefix, candidates in zip(prefixes, ids, strict=True)
        ]
    return drive(scenario, engine, plain, forwards, embedded)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_scenario(modules, plain, monkeypatch, caplog, scenario):
    statuses = run(scenario, modules, plain, monkeypatch)
    assert not scenario.name.startswith("requests join") or {Status.GUIDE, Status.SKIP, Status.UNGUIDED} <= statuses
    assert caplog.text.count("cache is full") == bool(scenario.unguided)


@pytest.mark.parametrize("scenario", [JOIN_AND_LEAVE, MODES], ids=lambda scenario: scenario.name)
def test_scenario_with_values_from_server(modules, plain, monkeypatch, scenario):
    run(scenario, modules, plain, monkeypatch, lvm_guided_inproc=False)


@pytest.fixture
def no_image_is_drawn(monkeypatch):
    scores = helper.BY_TOKEN.clone()
    scores[:, [IMAGE, VIDEO]] = -torch.inf
    monkeypatch.setattr(helper, "BY_TOKEN", scores)


@pytest.mark.parametrize("scenario", IMAGE_SCENARIOS, ids=lambda scenario: scenario.name)
def test_image_scenario(modules, plain_vl, monkeypatch, no_image_is_drawn, scenario):
    run(scenario, modules, plain_vl, monkeypatch)


@pytest.mark.parametrize(
    ("changes", "reads_images", "message"),
    [
        (dict(input_embeds=object()), False, "input_embeds cannot be combined with guidance in custom_params"),
        (dict(input_embeds=object()), True, "input_embeds cannot be combined with guidance in custom_params"),
        ({}, False, "images cannot be combined .* the value model has no vision tower"),
        (dict(session_id="s"), True, "images in a session cannot be combined"),
        (dict(session_id="s", multimodal_inputs=None), True, "images in a session cannot be combined"),
        (dict(modality=SimpleNamespace(name="VIDEO")), True, "videos, audio and embeddings of images cannot be"),
        (dict(feature=torch.zeros(8, 99)), True, r"pixel_values must be \[8, 96\], .* got \[8, 99\]"),
    ],
)
def test_unreadable_request_is_not_guided(
    make, plain, plain_vl, no_image_is_drawn, caplog, changes, reads_images, message
):
    model = plain_vl if reads_images else plain
    engine, placeholder = make(model.path), None if "multimodal_inputs" in changes else IMAGE
    refused = request_of("a", [4, (1, 2, 7), 3], TILT, placeholder=placeholder, top_k=3)
    other = request_of("b", [2, (2, 1, 8), 5] if reads_images else 4, TILT)
    other.session_id = None if reads_images else "s"
    for name, value in changes.items():
        vars(refused if hasattr(refused, name) else refused.multimodal_inputs.mm_items[0])[name] = value
    for step in range(2):
        before, after = engine.decode([refused, other]) if step else engine.prefill([refused, other], [3, 0])
        assert torch.equal(after[0], with_own_filters(refused, before[0]))
        torch.testing.assert_close(after[1], expected_row(model, other, before[1])[0], rtol=0, atol=ATOL)
        engine.draw([refused, other], after)
    assert len(re.findall(f"request a is not guided: {message}", caplog.text)) == 1


@pytest.mark.parametrize("source", ["request", "server"])
def test_value_stride(make, plain, monkeypatch, source):
    """Every third step and every step at which the sequence may end is guided; others use the request's filters."""
    if source == "server":
        monkeypatch.setenv("LENVM_VALUE_STRIDE", "3")
    engine, stride, guided = make(), {"value_stride": 3} if source == "request" else {}, 0
    requests = [request_of("a", 8, {**TILT, **stride}, top_k=4), request_of("b", 4, {**TILT, "value_stride": 1})]
    for step in range(13):
        before, after = engine.decode(requests) if step else engine.prefill(requests, [6, 2])
        is_guided = not torch.equal(after[0], with_own_filters(requests[0], before[0]))
        for request, old, new in list(zip(requests, before, after, strict=True))[not is_guided :]:
            torch.testing.assert_close(new, expected_row(plain, request, old)[0], rtol=0, atol=ATOL)
        guided += is_guided
        engine.draw(requests, after)
    assert 4 <= guided < 9


def test_request_fields_other_than_guidance(make):
    """The fork applies token temperatures itself and returns no lengths; the table has 64 end tokens per request."""
    engine, beside = make(), {"token_temperature_scale": {"5": 2.0, "6": 0.5}, "return_values": True}
    request = request_of("a", 9, {**TILT, **beside}, top_k=6)
    request.eos_token_ids = {EOS, *range(1000, 1080)}
    engine.prefill([request], [4])
    table = engine.runner.step.table
    assert table.columns.token_scales.unique().tolist() == [1.0] and not table.columns.return_values.any()
    assert table.columns.eos_token_ids[4].tolist() == [EOS, *range(1000, 1063)]


def test_warning_for_more_candidates_than_max_candidates(make, monkeypatch, caplog):
    monkeypatch.setenv("LENVM_MAX_CANDIDATES", "4")
    engine = make()
    warning = "requests with a top_k above 4, or none, are drawn from their 4 most probable"
    for name, top_k, count in (("a", 4, 0), ("b", 5, 1), ("c", ALL, 1)):
        _, after = engine.prefill([request_of(name, 4, TILT, top_k=top_k)], [3])
        assert (after[0] > 0).sum() == 4 and caplog.text.count(warning) == count


def test_batches_read_back_nothing_to_the_host(make, monkeypatch):
    """Prompts, guided, unguided and skipped rows, and a finished request, with the Triton kernels."""
    make_config = Settings.step_config
    monkeypatch.setattr(Settings, "step_config", lambda *a, **o: replace(make_config(*a, **o), backend="triton"))
    engine = make()
    a, b = request_of("a", 18, {"value_scale": 0.7}, top_k=4), request_of("b", 5, None, top_k=3)
    c = request_of("c", 9, {**TILT, "entropy_threshold": 9.0}, top_k=3, min_p=0.01)
    for requests, rows in (([a, b], [4, 1]), ([b, a], []), ([c], [2]), ([a, c, b], []), ([c, b], [])):
        a.finished_reason = "stop" if requests == [c, b] else None
        with no_read_back():
            _, after = engine.prefill(requests, rows) if rows else engine.decode(requests)
        engine.draw(requests, after)


# --- loading ---


def test_value_model_is_loaded_at_start(make, monkeypatch, plain, tmp_path):
    """From the fork's option, in the base model's dtype. ``LENVM_VALUE_MODEL`` is ignored, other settings apply."""
    monkeypatch.setenv("LENVM_VALUE_MODEL", "/nowhere")
    engine = make()
    step, slots = engine.runner.step, engine.runner.own.slots
    config = step.config
    assert (config.max_candidates, config.max_requests, config.vocab_size, config.max_delta) == (64, 5, VOCAB, 16)
    assert step.values.value_model.dtype == torch.float32 and slots.table.shape == (7, 6) and slots.num_slots == 5 * 96
    assert engine.asked_memory == [(("cpu", 0), {"distributed": False, "cpu_group": None})] * 2
    engine.model_runner.tp_group = SimpleNamespace(world_size=2, cpu_group="group")
    engine.model_runner.initialize(0.0)
    assert engine.asked_memory[2:] == [(("cpu", 0), {"distributed": True, "cpu_group": "group"})] * 2

    for name, value in dict(MAX_CANDIDATES=8, VALUE_STRIDE=3, CHUNK_TOKENS=7, DTYPE="bfloat16").items():
        monkeypatch.setenv(f"LENVM_{name}", str(value))
    step = make(lvm_guided_inproc_json_model_override_args='{"architectures": ["X"]}').runner.step
    assert (step.config.max_candidates, step.config.value_stride, step.config.chunk_tokens) == (8, 3, 7)
    assert step.values.value_model.dtype == torch.bfloat16


def test_default_gamma_is_that_of_the_value_model(make, plain, tmp_path):
    for file in plain.path.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "lenvm_config.json").write_text(json.dumps({"gamma": 0.9}))
    request = request_of("a", 4, {"target_length": 6, "op": "eq_soft"})
    before, after = make(tmp_path).prefill([request], [3])
    torch.testing.assert_close(after[0], expected_row(plain, request, before[0], gamma=0.9)[0], rtol=0, atol=ATOL)


def test_cache_size_follows_memory_fraction(make, monkeypatch):
    """The cache gets the option's share of the initially free memory, minus weights and working memory of steps."""
    free, weights, share = 2_500_000, 400_000, 0.7
    sizes, memory = dict(max_requests=30, rows=31), dict(free=[free, free - weights])
    monkeypatch.setenv("LENVM_MAX_CANDIDATES", "4")
    monkeypatch.setenv("LENVM_CHUNK_TOKENS", "64")
    runner = make(**sizes, **memory, lvm_guided_inproc_mem_fraction_static=share).runner
    model, slots, of_step = (
        runner.step.values.value_model,
        runner.own.slots.num_slots,
        dict(max_len=90, vocab_size=VOCAB),
    )
    taken = sum(working_bytes(model, requests=30, **of_step, **n) for n in (dict(max_candidates=4), dict(tokens=64)))
    room = share * free - weights - taken
    assert PAGE < slots < 30 * 90
    assert KVCache.num_bytes(model, slots) <= room < KVCache.num_bytes(model, slots + PAGE)
    # Without the option, the share is the base model's.
    options = dict(lvm_guided_inproc_mem_fraction_static=None, mem_fraction_static=share)
    assert make(**sizes, **memory, **options).runner.own.slots.num_slots == slots
    memory = dict(free=[free, free - 1_700_000])
    with pytest.raises(ValueError, match=r"--lvm-guided-inproc-mem-fraction-static leaves 0\.00 GiB"):
        make(**sizes, **memory, lvm_guided_inproc_mem_fraction_static=share)


@pytest.mark.parametrize("reads_images", [False, True])
def test_vision_tower_is_loaded_before_memory_is_measured_again(make, plain_vl, monkeypatch, reads_images):
    engine, looks = make(plain_vl.path), []

    def load(*args):
        looks.append(len(engine.asked_memory))
        return load_vision_tower(*args)

    monkeypatch.setattr("lenvm_kernels.values.model.load_vision_tower", load)
    engine.asked_memory.clear()
    engine.model_runner.model_config.is_multimodal = reads_images
    engine.model_runner.initialize(0.0)
    assert looks == [1] * reads_images


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(lvm_guided_inproc_model_path="/nowhere"), "--lvm-guided-inproc-model-path must be an existing directory"),
        (
            dict(lvm_guided_inproc_model_path="none"),
            "--lvm-guided-inproc-model-path must be a value model for the fork",
        ),
        (
            dict(lvm_guided_inproc_json_model_override_args='{"architectures": ["X"], "rope_theta": 3}'),
            "--lvm-guided-inproc-json-model-override-args must name nothing but architectures, got architectures, r",
        ),
    ],
)
def test_bad_options_are_rejected_at_start(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


@pytest.mark.parametrize(
    "options", [dict(lvm_guided_inproc_model_path=None), dict(function=min), dict(is_draft_worker=True)]
)
def test_other_value_models_are_left_to_the_fork(make, monkeypatch, options):
    """Nothing is loaded, and the fork's ``apply`` is called."""
    engine, calls = make(**options), []
    assert engine.runner is None
    engine.lvm_guided_sampler._get_inproc_provider = lambda: "the fork's"
    monkeypatch.setitem(sglang_fork._originals, f"{SAMPLING}:LvmGuidedSampler.apply", lambda *args: calls.append(args))
    assert engine.prefill([request_of("a", 4, TILT)], [3])[1] is None
    assert len(calls) == 1 and calls[0][0] is engine.lvm_guided_sampler and len(calls[0]) == 7


def test_server_without_guidance_starts_as_the_fork(make, monkeypatch):
    """A server without ``--enable-lvm-guided-sampling`` has no sampler of guidance."""
    runner, calls = make().model_runner, []
    runner.sampler = SimpleNamespace(lvm_guided_sampler=None)
    for name in ("initialize", "sample"):
        monkeypatch.setitem(
            sglang_fork._originals, f"{RUNNER}:ModelRunner.{name}", lambda *args, name=name: calls.append((name, args))
        )
    runner.initialize(3.0)
    runner.sample("logits", "batch")
    assert calls == [("initialize", (runner, 3.0)), ("sample", (runner, "logits", "batch"))]
