"""The drop-in for the LenVM fork of SGLang: ``install()``, scenarios against plain forwards, and loading."""

import pkgutil
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen2_5_VLForConditionalGeneration

from lenvm_kernels.engines import sglang_fork
from lenvm_kernels.engines.own_slots import PAGE_SIZE as PAGE
from lenvm_kernels.engines.settings import Settings
from lenvm_kernels.guidance.fields import DEFAULT_GAMMA
from lenvm_kernels.step import working_bytes
from lenvm_kernels.values import KVCache
from lenvm_kernels.values.images import load_vision_tower
from tests.helpers.models import EOS, IMAGE, VOCAB, random_head, random_model, value_logits, vl_config
from tests.helpers.oracle import PlainStep
from tests.helpers.sglang_fork import ALL, SAMPLING, Engine, Item, Request, use_stand_in
from tests.helpers.watch import no_read_back, watch_forwards

ATOL = 2e-5  # on probabilities computed from fp32 value logits of O(1)
TILT = {"value_mode": "centered_exp", "value_scale": -8}
EQ_SOFT = {"target_length": 6, "op": "eq_soft"}


class Plain:
    """A value model that reads images, in ``transformers``, saved to ``path``."""

    def __init__(self, path):
        self.path, self._head = path, random_head()
        self._model = random_model(Qwen2_5_VLForConditionalGeneration, vl_config(), seed=3)
        self._model.save_pretrained(path)
        save_file(self._head, path / "value_head.safetensors")

    def values(self, sequences, items=()):
        """Value logits of the last tokens of sequences with the same prompt, which has images ``items``."""
        tokens, images = torch.tensor(sequences), {}
        if items:
            items = sorted(items, key=lambda item: item.offsets)
            for ((first, last),) in (item.offsets for item in items):
                tokens[:, first : last + 1] = IMAGE
            images = dict(
                pixel_values=torch.cat([item.feature for item in items]).repeat(len(tokens), 1),
                image_grid_thw=torch.cat([item.image_grid_thw for item in items]).repeat(len(tokens), 1),
                mm_token_type_ids=(tokens == IMAGE).int(),
            )
        return value_logits(self._model, self._head, tokens, **images)[:, -1].tolist()


def with_own_filters(request, probs):
    """``probs [V]`` after the request's filters, not normalised."""
    sampling, result, mass = request.sampling_params, torch.zeros_like(probs), 0.0
    for token in probs.argsort(descending=True)[: sampling.top_k].tolist():
        if mass <= sampling.top_p and probs[token] >= sampling.min_p * probs.max():
            result[token] = probs[token]
        mass += probs[token].item()
    return result


def expected_row(plain, request, probs, environment):
    """Guided ``probs [V]`` by the specification, with values of plain forwards, and the kind of the row."""
    items = getattr(request.multimodal_inputs, "mm_items", ())
    gamma, most = (environment.get(f"LENVM_{x}", y) for x, y in (("GAMMA", DEFAULT_GAMMA), ("MAX_CANDIDATES", 64)))
    values, defaults = partial(plain.values, items=items), dict(gamma=float(gamma), constraint="eq")
    oracle = PlainStep(values, EOS, int(most), **defaults)
    sampling = dict(temperature=1.0, **vars(request.sampling_params))
    params, generated = sampling.pop("custom_params"), len(request.tokens) - len(request.origin_input_ids)
    row, _, decided_by = oracle.row(probs.log(), request.tokens, generated, params or {}, sampling)
    return row if decided_by in ("GUIDE", "SINGLE") else with_own_filters(request, probs), decided_by


def ask(parts, params, *, text=0, placeholder=None, changes=None, **filters):
    """A function that creates a request from an id.

    ``parts`` of the prompt are numbers of random tokens and images ``(rows, columns, seed)``. If ``placeholder`` is
    None, it depends on the pixels and is outside the vocabulary, as in the engine. ``changes`` are other attributes of
    the request.
    """

    def request_of(name):
        tokens, items = [], []
        for part in [parts] if isinstance(parts, int) else parts:
            if isinstance(part, int):
                generator = torch.Generator().manual_seed(text + len(tokens) + part)
                tokens += torch.randint(3, 83, (part,), generator=generator).tolist()
            else:
                items.insert(0, Item(len(tokens), *part))  # in reverse order
                tokens += [items[0].hash % 2**30 if placeholder is None else placeholder] * (part[0] * part[1])
        request = Request(name, tokens, params, **filters)
        request.multimodal_inputs = SimpleNamespace(mm_items=items) if items else None
        vars(request).update(changes or {})
        return request

    return request_of


@dataclass(frozen=True)
class Scenario:
    """Requests by name, and events in an engine.

    Commands of ``script`` name requests by letters: ``prefill a@4[16:30]`` (in row 4, the tokens from 16 to 30),
    ``decode ab``, ``finish a``, and ``drop a`` (its last token). After a step, ``forwards 9 1`` checks the number of
    tokens in each forward of the value model, and ``holds 1 4`` the rows of the engine's pool with slots.
    """

    name: str
    requests: dict[str, Any]
    script: str
    unguided: str = ""  # requests that are never guided
    strided: str = ""  # requests that are guided in 4 to 8 steps
    lag: int = 0  # number of tokens that the host lacks in a decode batch
    pages: int | None = None  # pages of the value model's cache. If None, enough for all requests
    environment: dict[str, str] = field(default_factory=dict)
    logs: dict[str, int] = field(default_factory=dict)  # messages, and their numbers in the log


# Scenarios that also run with values from a server.
JOIN_AND_LEAVE = Scenario(
    "requests join and leave",
    {
        "a": ask(23, TILT, top_k=5),
        "b": ask(1, {**TILT, "entropy_threshold": 0.1}, top_k=9, min_p=0.1),
        "c": ask(40, None, top_k=3),
        "d": ask(17, {"target_length": 9, "gamma": 0.9, "entropy_threshold": 1.7}, top_k=6, top_p=0.9),
        "e": ask(6, {"value_mode": "value_bias", "value_scale": 1.5, "entropy_threshold": 0.1}, top_k=ALL),
        "f": ask(33, {"mode": "length_mul", "value_scale": 0.5}, top_k=12),
    },
    """
    prefill a@4[16:] b@1; holds 1 4; decode ba; decode ba
    prefill c@6 d@0; holds 0 1 4; decode dbca; decode dbca
    finish b; decode adc; holds 0 4
    prefill e@1; holds 0 1 4; decode eacd
    drop a; decode dce; prefill f@4; decode efcd
    prefill a@5; decode aefcd
    finish cd; decode fae; holds 1 4 5; decode fae
    """,
)
BAD = {
    "b": ({"mode": "loud"}, "value_mode must be one of"),
    "c": ({"scale": 0.5, "end_token_ids": [7]}, "end_token_ids and landing must be absent in the fork"),
    "d": ({"target_length": 60, "landing": [7]}, "end_token_ids and landing must be absent in the fork"),
}
SHARING = {name: [(3, 4, 1), 9] for name in "ab"} | {"c": [(3, 4, 2), 9], "d": [(4, 3, 1), 9]}
SHARING["e"] = [(3, 4, 1), 9, (2, 2, 1), 1]
SERVED = [
    JOIN_AND_LEAVE,
    Scenario(
        "no guidance: absent, of strength 0, empty, below the entropy threshold; such rows keep their own filters",
        {
            "a": ask(9, None, top_k=3),
            "b": ask(9, {"value_mode": "centered_exp", "value_scale": 0}),
            "c": ask(10, None, top_k=ALL, top_p=0.5),
            "d": ask(11, {}, top_k=ALL, min_p=0.3),
            "e": ask(12, {"scale": 0.5, "entropy_threshold": 9.0}, top_k=6, top_p=0.9, min_p=0.05),
            "f": ask(13, TILT),
        },
        """
        prefill a@2 b@0 d@4; forwards; holds; prefill e@3; holds 3; prefill c@1 f@5; holds 3 5
        decode fedca; decode fb; decode ae
        """,
    ),
    Scenario(
        "bad parameters",
        {"a": ask(5, TILT, top_k=5)} | {name: ask(6, params, top_k=ALL) for name, (params, _) in BAD.items()},
        "prefill a@1 b@2 c@3 d@4; decode abcd; decode bcd; forwards",
        unguided="bcd",
        logs={f"{name} has invalid custom_params and is not guided: {text}": 1 for name, (_, text) in BAD.items()},
    ),
]
SCENARIOS = [
    *SERVED,
    replace(JOIN_AND_LEAVE, name="requests join and leave under the overlapping scheduler", lag=1),
    Scenario(
        "chunks of a prompt, the second in a mixed batch; a retraction, in the old row and, after a drop, in chunks",
        {"a": ask(5, TILT), "b": ask(50, TILT, top_k=7)}
        | {"c": ask(37, {"target_length": 30, "constraint": "eq_soft", "gamma": 0.98}, top_k=6)},
        f"""
        prefill a@3; prefill b@1[:20]; forwards; prefill b@1[20:41] a@3[5:6]; forwards 1
        prefill a@3[6:] b@6[41:]; forwards 49 2; holds 3 6; decode ba; finish ab
        prefill c@2; forwards 36 1; decode c; decode c; decode c
        prefill c@2; forwards 1; drop c; prefill c@2; forwards {40 - 2 * PAGE} 1
        prefill c@1[:38]; forwards; holds
        """,
        lag=1,
    ),
    Scenario(
        "rows are taken over by a request as long as the next step, an unguided one, and one with one candidate",
        {name: ask(n, TILT, top_k=k) for name, n, k in (("a", 20, 5), ("b", 21, 8), ("d", 7, 8), ("e", 9, 1))}
        | {"c": ask(5, None, top_k=3)},
        """
        prefill e@4; forwards; holds; prefill a@3; finish a; prefill b@3; holds 3; prefill c@3 d@6; holds 6
        decode cd; prefill e@6; holds
        """,
        unguided="e",
    ),
    Scenario(
        "a request without room is not guided, nor later; one has more than LENVM_MAX_CANDIDATES and the default gamma",
        {name: ask(n, EQ_SOFT, top_k=k) for name, n, k in (("a", 12, 8), ("b", 28, 3), ("c", 3, ALL))},
        """
        prefill a@1 b@4 c@0; forwards 13 2; holds 0 1; decode abc; decode abc
        finish a; decode bc; holds 0
        """,
        unguided="b",
        pages=3,
        environment={"LENVM_CHUNK_TOKENS": "16", "LENVM_MAX_CANDIDATES": "8", "LENVM_GAMMA": "0.9"},
        logs={"cache is full": 1, "requests with a top_k above 8, or without one, only draw": 1},
    ),
    Scenario(
        "value strides of a request and of the server; every step that may end the sequence is guided",
        {name: ask(n, TILT | own, top_k=4) for name, n, own in (("a", 8, {"value_stride": 2}), ("b", 5, {}))}
        | {"c": ask(4, TILT | {"value_stride": 1})},
        f"prefill a@6 c@2 b@1 {12 * '; decode abc'}",
        strided="ab",
        environment={"LENVM_VALUE_STRIDE": "3"},
    ),
    Scenario(
        "images beside text, computed again after a retraction",
        {
            "a": ask([4, (2, 3, 1), 1, (1, 2, 9), 3], TILT, text=210, top_k=5),
            "b": ask([PAGE, (1, 3, 2), 2], TILT, text=211, top_k=4),
            "c": ask([2, (4, 5, 3), 1], {"target_length": 9}, text=212, top_k=6),
            "d": ask(3, TILT, text=213),
        },
        f"""
        prefill a@3 d@2 b@1; finish d; decode ba; decode ba; decode ba
        prefill c@2; finish c; prefill b@0 a@3; decode ab
        drop a; prefill a@4 b@0; forwards {20 - PAGE} 2; holds 0 4; decode ba
        """,
        lag=1,
        pages=5,
        environment={"LENVM_CHUNK_TOKENS": "8"},
    ),
    Scenario(
        "prompts share pages until pixels or shapes differ, and none if positions are moved further",
        {name: ask([2 * PAGE - 1, *x], TILT, placeholder=IMAGE, top_k=3) for name, x in SHARING.items()},
        f"""
        prefill a@3; forwards 51 1; prefill b@0; forwards {51 - 3 * PAGE} 1; prefill c@1; forwards {51 - PAGE} 1
        prefill d@2; forwards {51 - PAGE} 1; prefill e@4; forwards 56 1
        """,
    ),
    Scenario(
        "inputs that the value model cannot read, in three requests",
        {
            "a": ask(9, TILT, changes=dict(input_embeds=object())),
            "b": ask([4, (1, 2, 7), 3], TILT, changes=dict(session_id="s")),
            "c": ask([4, (1, 2, 7), 3], TILT, changes=dict(session_id="s", multimodal_inputs=None)),
            "d": ask(4, TILT, changes=dict(session_id="s")),
        },
        "prefill a@3 b@0 c@1 d@2; decode abcd",
        unguided="abc",
        logs={"request a is not guided: input_embeds": 1, "is not guided: images in a session cannot be combined": 2},
    ),
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return Plain(tmp_path_factory.mktemp("value"))


@pytest.fixture
def modules(monkeypatch, clean_settings):
    """The modules of the stand-in after ``install()``, without a value model and without settings."""
    modules = use_stand_in(monkeypatch)
    sglang_fork.install()
    return modules


@pytest.fixture
def make(modules, plain, monkeypatch):
    return partial(Engine, modules, monkeypatch, plain.path)


def test_install_replaces_every_name_once(monkeypatch):
    """In another version of the fork, nothing is replaced."""
    sampler = use_stand_in(monkeypatch)[SAMPLING].LvmGuidedSampler
    found = lambda: {name: pkgutil.resolve_name(name) for name in sglang_fork.REPLACED}  # noqa: E731
    before = found()
    with monkeypatch.context() as patch:
        patch.delattr(sampler, "_post_tree_value")
        with pytest.raises(ImportError, match=r"needs the LenVM fork of SGLang .*_post_tree_value is not there"):
            sglang_fork.install()
    assert found() == before == sglang_fork.install()
    after = found()
    assert all(after[name] is not before[name] for name in before)
    assert sglang_fork.install() == before and found() == after


def test_value_logits_are_fp32(modules):
    hidden = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(8))
    for model in ("qwen2", "qwen3"):
        head = object.__new__(modules[f"sglang.srt.models.{model}_lvm"].MLP2SiLUValueHead)
        head.fc, head.summary = (torch.nn.Linear(24, size, dtype=torch.bfloat16) for size in (24, 1))
        with torch.no_grad():
            logits = head.forward(hidden)
            x = torch.nn.functional.silu(head.fc.double()(hidden.bfloat16().double()))
            torch.testing.assert_close(logits, head.summary.double()(x).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("scenario", "is_inproc"),
    [*product(SCENARIOS, [True]), *product(SERVED, [False])],
    ids=lambda x: x.name if isinstance(x, Scenario) else None,
)
def test_scenario(modules, plain, monkeypatch, caplog, scenario, is_inproc):
    """Each row of each step is checked against the oracle."""
    for name, value in scenario.environment.items():
        monkeypatch.setenv(name, value)
    if scenario.pages is not None:
        monkeypatch.setattr(sglang_fork, "pages_for", lambda *args: scenario.pages)
    engine = Engine(modules, monkeypatch, plain.path, lvm_guided_inproc=is_inproc)
    engine.lag = scenario.lag
    forwards = []  # tokens per forward of the value model, without candidates
    if not is_inproc:
        engine.lvm_guided_sampler._inproc = False
        engine.lvm_guided_sampler._post_tree_value = lambda rids, prefixes, ids, reqs: [
            plain.values([[*prefix, token] for token in tokens]) for prefix, tokens in zip(prefixes, ids, strict=True)
        ]
    else:
        forwards = watch_forwards(engine.runner.step.values.value_model, monkeypatch, of_prompts=True).deltas
    requests, guided = {name: make(name) for name, make in scenario.requests.items()}, Counter()
    for command in re.split(r"[;\n]", scenario.script.strip()):
        word, *args = command.split()
        if word in ("prefill", "decode"):
            forwards.clear()
            guided += step(scenario, engine, plain, requests, args if word == "prefill" else args[0], command)
            assert word == "prefill" or len(forwards) <= 1, command
        elif word in ("finish", "drop"):
            for request in (requests[name] for name in args[0]):
                request.finished_reason = "stop" if word == "finish" else None
                del request.tokens[len(request.tokens) - (word == "drop") :]
        elif is_inproc:
            holding = [row for row in range(7) if engine.runner.own.slots.pages(row)]
            assert [*map(int, args)] == (holding if word == "holds" else [*map(sum, forwards)]), command
    assert all(4 <= guided[name] <= 8 for name in scenario.strided)
    # With values from a server, a request without a top_k is cut.
    is_long = scenario is JOIN_AND_LEAVE and not is_inproc
    for message, count in (scenario.logs | {"more than 64 candidates, and the rest is cut off": is_long}).items():
        assert caplog.text.count(message) == count, message


def step(scenario, engine, plain, requests, places, command):
    """Take a step with requests in ``places``, as in a script, and draw tokens. Returns the guided requests."""
    batch, guided, decided_by = [requests[place[0]] for place in places], Counter(), set()
    given = [re.fullmatch(r"\w(?:@(\d+))?(?:\[(\d*):(\d*)\])?", place).groups() for place in places]
    ends = [int(end or len(request.tokens)) for (_, _, end), request in zip(given, batch, strict=True)]
    rows, prefixes = [int(row) for row, _, _ in given if row], [int(first or 0) for _, first, _ in given]
    before, after = engine.step(batch, rows, ends=ends, prefixes=prefixes)
    for j, (request, row, end) in enumerate(zip(batch, before, ends, strict=True)):
        where, is_chunk, name = f"{command}, request {request.rid}", end < len(request.tokens), request.rid
        images = getattr(request, "lenvm_images", None)
        assert images is None or images.embeds is None, f"{where} keeps embeddings"
        expected, by, atol = with_own_filters(request, row), "unguided", 0
        is_due = name not in scenario.strided or not torch.equal(after[j], expected)
        if is_due and not is_chunk and name not in scenario.unguided:
            (expected, by), atol = expected_row(plain, request, row, scenario.environment), ATOL
            guided[name] += 1
        decided_by.add(by)
        drawn = row if after is None else after[j]
        assert after is None or torch.allclose(drawn, expected, rtol=0, atol=atol), f"{where}: {drawn - expected}"
        if not is_chunk:
            request.tokens.append(int(torch.multinomial(drawn, 1, generator=engine.draws)))
    unchanged = {"unguided"} if engine.runner else {"unguided", "SKIP"}  # not sent to a server
    assert (after is None) == (decided_by <= unchanged), command
    return guided


def test_request_fields_other_than_guidance(modules, make):
    """The fork applies token temperatures, with int64 ids, and does not return lengths. The table has 64 end tokens per
    request."""
    extract, scales = modules[SAMPLING]._extract_token_temperature_scale, {"5": 2.0, "6": 0.5, str(10**30): 2.0}
    params, ends = {**TILT, "token_temperature_scale": scales, "return_values": True}, {EOS, *range(1000, 1080)}
    request, engine = ask(9, params, changes=dict(eos_token_ids=ends), top_k=6)("a"), make()
    assert extract(request) == {5: 2.0, 6: 0.5} and extract(Request("b", [5], None)) is None
    engine.step([request], [4])
    columns = engine.runner.step.table.columns
    assert columns.token_scales.unique().tolist() == [1.0] and not columns.return_values.any()
    assert columns.eos_token_ids[4].tolist() == [EOS, *range(1000, 1063)]


def test_batches_read_back_nothing_to_the_host(make, monkeypatch):
    """Prompts, guided, unguided and skipped rows, and a finished request, with Triton kernels."""
    make_config = Settings.step_config
    monkeypatch.setattr(Settings, "step_config", lambda *a, **o: replace(make_config(*a, **o), backend="triton"))
    engine, c = make(), ask(9, {**TILT, "entropy_threshold": 9.0}, top_k=3, min_p=0.01)("c")
    a, b = ask(18, {"value_scale": 0.7}, top_k=4)("a"), ask(5, None, top_k=3)("b")
    for requests, rows in (([a, b], [4, 1]), ([b, a], []), ([c], [2]), ([a, c, b], []), ([c, b], [])):
        a.finished_reason = "stop" if requests == [c, b] else None
        with no_read_back():
            _, after = engine.step(requests, rows)
        for request, row in zip(requests, after, strict=True):
            request.tokens.append(int(row.argmax()))


def test_value_model_is_loaded_at_start(make, monkeypatch):
    """From the fork's option, in the base model's dtype, with its vision tower before the memory is measured again.
    ``LENVM_VALUE_MODEL`` is ignored."""
    monkeypatch.setenv("LENVM_VALUE_MODEL", "/nowhere")
    engine = make()
    step, slots = engine.runner.step, engine.runner.own.slots
    sizes = dict(max_candidates=64, max_requests=5, vocab_size=VOCAB, max_delta=16)
    assert vars(step.config).items() >= sizes.items()
    assert step.values.value_model.dtype == torch.float32 and slots.table.shape == (7, 6) and slots.num_slots == 5 * 96
    events, load = engine.asked_memory, "lenvm_kernels.values.model.load_vision_tower"
    monkeypatch.setattr(load, lambda *args: events.append("tower") or load_vision_tower(*args))
    engine.model_runner.tp_group = SimpleNamespace(world_size=2, cpu_group="group")
    for engine.model_runner.model_config.is_multimodal in (True, False):
        engine.model_runner.initialize(0.0)
    one, two = ((("cpu", 0), dict(distributed=x is not None, cpu_group=x)) for x in (None, "group"))
    assert events == [one, one, two, "tower", two, two, two]

    monkeypatch.setenv("LENVM_DTYPE", "bfloat16")
    step = make(lvm_guided_inproc_json_model_override_args='{"architectures": ["X"]}').runner.step
    assert step.values.value_model.dtype == torch.bfloat16


def test_cache_size_follows_memory_fraction(make, monkeypatch):
    """The cache takes the option's share of the initially free memory, without weights and working memory."""
    free, weights, share = 620_000, 100_000, 0.7
    memory = dict(free=[free, free - weights])
    monkeypatch.setenv("LENVM_MAX_CANDIDATES", "4")
    monkeypatch.setenv("LENVM_CHUNK_TOKENS", "64")
    runner = make(**memory, lvm_guided_inproc_mem_fraction_static=share).runner
    model, slots, sizes = runner.step.values.value_model, runner.own.slots.num_slots, dict(max_len=90, vocab_size=VOCAB)
    taken = sum(working_bytes(model, requests=5, **sizes, **n) for n in (dict(max_candidates=4), dict(tokens=64)))
    room = share * free - weights - taken
    assert PAGE < slots < 480
    assert KVCache.num_bytes(model, slots) <= room < KVCache.num_bytes(model, slots + PAGE)
    # Without the option, the share is the base model's.
    options = dict(lvm_guided_inproc_mem_fraction_static=None, mem_fraction_static=share)
    assert make(**memory, **options).runner.own.slots.num_slots == slots
    memory = dict(free=[free, free - 430_000])
    with pytest.raises(ValueError, match=r"--lvm-guided-inproc-mem-fraction-static leaves 0\.00 GiB"):
        make(**memory, lvm_guided_inproc_mem_fraction_static=share)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("model_path", "/nowhere", "model-path must be an existing directory"),
        ("model_path", "none", "model-path must be a value model for the fork"),
        ("json_model_override_args", '{"rope_theta": 3}', "json-model-override-args must name .*, got rope_theta"),
    ],
)
def test_bad_options_are_rejected_at_start(make, option, value, message):
    with pytest.raises(ValueError, match=f"--lvm-guided-inproc-{message}"):
        make(**{f"lvm_guided_inproc_{option}": value})


@pytest.mark.parametrize(
    "options", [dict(lvm_guided_inproc_model_path=None), dict(function=min), dict(is_draft_worker=True)]
)
def test_fork_handles_other_value_models(modules, make, caplog, options):
    """No model is loaded, and the fork's ``apply`` is called."""
    engine = make(**options)
    assert engine.runner is None
    engine.lvm_guided_sampler._inproc = "the fork's"
    modules[SAMPLING].calls.clear()
    for seed in range(2):
        assert engine.step([ask(4, TILT, text=seed)("a")], [3])[1] is None
    calls = modules[SAMPLING].calls
    assert len(calls) == 2 and calls[0][:2] == ("apply", engine.lvm_guided_sampler) and len(calls[0]) == 8
    warning = "lvm_guided_fn is <built-in function min>, not one of the fork's three"
    assert caplog.text.count(warning) == ("function" in options)
    # A server without --enable-lvm-guided-sampling has no guided sampler.
    engine.model_runner.sampler = lambda *args: ("drawn", *args)
    engine.model_runner.initialize(3.0)
    assert calls[2:] == [("initialize", engine.model_runner, 3.0)]
    assert engine.model_runner.sample("logits", "batch") == ("drawn", "logits", "batch")
