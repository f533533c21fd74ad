"""The drop-in for the LenVM fork of SGLang: ``install()``, scenarios with every row checked against plain forwards,
and loading."""

import pkgutil
import re
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, Qwen2_5_VLForConditionalGeneration

from lenvm_kernels.engines import sglang_fork
from lenvm_kernels.engines.own_slots import PAGE_SIZE as PAGE
from lenvm_kernels.engines.settings import Settings
from lenvm_kernels.engines.signatures import USED
from lenvm_kernels.guidance import GuidanceParams, GuidanceTable, parse_guidance
from lenvm_kernels.guidance.fields import DEFAULT_GAMMA
from lenvm_kernels.ops.reweight_scatter import reweight_scatter
from lenvm_kernels.ops.topk_candidates import topk_candidates
from lenvm_kernels.step import working_bytes
from lenvm_kernels.types import Mode, Status
from lenvm_kernels.values import KVCache, ValueModel
from lenvm_kernels.values.images import load_vision_tower
from tests.helpers.models import EOS, IMAGE, VOCAB, random_head, random_model, save_checkpoint, vl_config
from tests.helpers.models import value_logits as plain_values
from tests.helpers.sglang_fork import ALL, SAMPLING, Engine, Item, Request, install, use_stand_in
from tests.helpers.watch import no_read_back

ATOL = 2e-5  # on probabilities computed from fp32 value logits of O(1)
TILT = {"value_mode": "centered_exp", "value_scale": -8}

# --- the oracle ---


class Plain:
    """A value model in ``transformers``."""

    def __init__(self, path, model_class):
        self.path, self._model = path, model_class.from_pretrained(path).eval()
        self._head = load_file(path / "value_head.safetensors")

    def after(self, tokens, candidates, items=()):
        """Value logit, fp32, of each candidate as the next token after the tokens and their images."""
        sequences, images = torch.tensor([[*tokens, token] for token in candidates]), {}
        if items:
            items = sorted(items, key=lambda item: item.offsets)
            for first, last in (offsets for item in items for offsets in item.offsets):
                sequences[:, first : last + 1] = IMAGE
            images = dict(
                pixel_values=torch.cat([item.feature for item in items]).repeat(len(candidates), 1),
                image_grid_thw=torch.cat([item.image_grid_thw for item in items]).repeat(len(candidates), 1),
                mm_token_type_ids=(sequences == IMAGE).int(),
            )
        return plain_values(self._model, self._head, sequences, **images)[:, -1]


def with_own_filters(request, probs):
    """``probs [V]`` after the request's filters, not normalised."""
    sampling, result, mass = request.sampling_params, torch.zeros_like(probs), 0.0
    for token in probs.argsort(descending=True)[: sampling.top_k].tolist():
        if mass <= sampling.top_p and probs[token] >= sampling.min_p * probs.max():
            result[token] = probs[token]
        mass += probs[token].item()
    return result


def expected_row(plain, request, probs, environment):
    """Guided ``probs [V]`` by the specification with values of plain forwards, and the row's status."""
    gamma = float(environment.get("LENVM_GAMMA", DEFAULT_GAMMA))
    sampling, row, params = request.sampling_params, probs[None].clone(), GuidanceParams()
    if sampling.custom_params:
        params = parse_guidance(sampling.custom_params, gamma=gamma, constraint="eq")
    table = GuidanceTable.from_params([params], [{EOS}], "cpu").columns
    generated = torch.tensor([len(request.tokens) - len(request.origin_input_ids)], dtype=torch.int32)
    candidates = topk_candidates(
        row,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        max_candidates=int(environment.get("LENVM_MAX_CANDIDATES", 64)),
        guided=torch.tensor([params.mode != Mode.UNGUIDED]),
        table=table,
        generated=generated,
    )
    status = Status(candidates.status.item())
    if status not in (Status.GUIDE, Status.SINGLE):
        return with_own_filters(request, probs), status
    listed = candidates.token_ids >= 0
    value_logits = torch.zeros_like(candidates.probs)
    value_logits[listed] = plain.after(request.tokens, candidates.token_ids[listed].tolist(), request.items)
    reweight_scatter(candidates, value_logits, table, generated=generated, probs=row)
    return row[0], status


# --- scenarios and their driver ---


def ask(parts, params, *, text=0, placeholder=None, changes=None, **filters):
    """A function that makes a request, given its id.

    Args:
        parts: parts of the prompt in order: a number of random tokens, or an image ``(rows, columns, seed)``. A number
            is a prompt without images.
        params, filters: ``custom_params`` and sampling filters of the request.
        text: seed of the tokens.
        placeholder: image token. If None, a token outside the vocabulary that depends on the pixels, as in the engine.
        changes: other attributes of the request, or of its last image.
    """

    def request_of(name):
        tokens, items = [], []
        for part in [parts] if isinstance(parts, int) else parts:
            if isinstance(part, int):
                generator = torch.Generator().manual_seed(text + len(tokens) + part)
                tokens += torch.randint(3, 83, (part,), generator=generator).tolist()
            else:
                items.insert(0, Item(len(tokens), *part))  # in the reverse of their order in the prompt
                tokens += [items[0].hash % 2**30 if placeholder is None else placeholder] * (part[0] * part[1])
        request = Request(name, tokens, params, **filters)
        request.multimodal_inputs = SimpleNamespace(mm_items=items) if items else None
        for attribute, value in (changes or {}).items():
            setattr(request if hasattr(request, attribute) else items[0], attribute, value)
        return request

    return request_of


@dataclass(frozen=True)
class Scenario:
    """Requests by name, and what happens to them in one engine.

    Commands of ``script`` name requests by letters: ``prefill a@4[16:30]`` (in row 4, the tokens from 16 to 30),
    ``decode ab``, ``finish a``, and ``drop a`` (its last token). After a step, ``forwards 9 *`` checks the rows of each
    forward of the value model, where ``*`` is any number and the default after ``decode``. ``embeds 6`` checks the rows
    of each forward of the vision tower, ``holds 1 4`` the rows of the engine's pool with slots.
    """

    name: str
    requests: dict[str, Any]
    script: str
    unguided: str = ""  # requests that keep their own filters in all steps
    strided: str = ""  # a request that is guided in 4 to 8 steps
    reads_images: bool = False
    lag: int = 0  # number of tokens that the host lacks in a decode batch
    pages: int | None = None  # pages of the value model's cache. If None, enough for all requests
    environment: dict[str, str] = field(default_factory=dict)
    logs: dict[str, int] = field(default_factory=dict)  # messages, and how often each is logged
    statuses: frozenset[Status] = frozenset()  # statuses that occur

    def __str__(self):
        return self.name


class Drive:
    """Runs a scenario and checks each row of each step against the oracle.

    ``forwards`` and ``embedded`` are lists of rows, to which the value model and its vision tower append.
    """

    def __init__(self, scenario, engine, plain, forwards, embedded):
        self.scenario, self.engine, self.plain = scenario, engine, plain
        self.forwards, self.embedded = forwards, embedded
        self.requests = {name: make(name) for name, make in scenario.requests.items()}
        self.statuses, self.guided = set(), 0

    def run(self):
        commands = [command.split() for command in re.split(r"[;\n]", self.scenario.script) if command.strip()]
        for i, ((word, *args), (following, *_)) in enumerate(zip(commands, [*commands[1:], ["end"]], strict=True)):
            self.where = f"{self.scenario.name}, command {i}: {word} {' '.join(args)}"
            if word in ("forwards", "embeds"):
                self.check_rows(self.forwards if word == "forwards" else sorted(self.embedded), args)
            elif word == "holds":
                assert not self.engine.runner or self.engine.rows == set(map(int, args)), self.where
            elif word in ("finish", "drop"):
                for request in (self.requests[name] for name in args[0]):
                    request.finished_reason = "stop" if word == "finish" else None
                    del request.tokens[len(request.tokens) - (word == "drop") :]
            else:
                self.step(args if word == "prefill" else args[0], is_prefill=word == "prefill")
                if word == "decode" and following != "forwards":
                    self.check_rows(self.forwards, ["*"])
        assert self.scenario.statuses <= self.statuses and (not self.scenario.strided or 4 <= self.guided <= 8)

    def check_rows(self, rows, expected):
        same = len(rows) == len(expected) and all(n in ("*", str(m)) for n, m in zip(expected, rows, strict=True))
        assert same or not self.engine.runner, f"{self.where}: {rows}"

    def step(self, args, is_prefill):
        self.forwards.clear()
        self.embedded.clear()
        batch, rows, prefixes, ends = [self.requests[arg[0]] for arg in args], [], [], []
        for arg, request in zip(args, batch, strict=True):
            row, first, end = re.fullmatch(r"\w(?:@(\d+))?(?:\[(\d*):(\d*)\])?", arg).groups()
            rows += [int(row)] if is_prefill else []
            prefixes.append(int(first or 0))
            ends.append(int(end or len(request.tokens)))
        before, after = self.engine.step(batch, rows, ends=ends, prefixes=prefixes)
        reached, environment = set(), self.scenario.environment
        for j, (request, row, end) in enumerate(zip(batch, before, ends, strict=True)):
            where, is_chunk = f"{self.where}, request {request.rid}", end < len(request.tokens)
            images = getattr(request, "lenvm_images", None)
            assert images is None or images.embeds is None, f"{where} keeps embeddings"
            expected, status, atol = with_own_filters(request, row), Status.UNGUIDED, 0
            if not is_chunk and request.rid not in self.scenario.unguided:
                is_skipped = request.rid in self.scenario.strided and torch.equal(after[j], expected)
                self.guided += request.rid in self.scenario.strided and not is_skipped
                if not is_skipped:
                    (expected, status), atol = expected_row(self.plain, request, row, environment), ATOL
            reached.add(status)
            drawn = row if after is None else after[j]
            if after is not None:
                assert torch.allclose(drawn, expected, rtol=0, atol=atol), f"{where}: {drawn - expected}"
            if not is_chunk:
                self.engine.draw([request], drawn[None])
        self.statuses |= reached
        unchanged = {Status.UNGUIDED} if self.engine.runner else {Status.UNGUIDED, Status.SKIP}  # not sent to a server
        assert (after is None) == (reached <= unchanged), self.where


def calls_of(monkeypatch, name, count):
    """A list to which each call of a value model's method appends a number."""
    counts, method = [], getattr(ValueModel, name)

    def wrapped(self, *args, **kwargs):
        result = method(self, *args, **kwargs)
        counts.append(count(result, *args))
        return result

    monkeypatch.setattr(ValueModel, name, wrapped)
    return counts


def run(scenario, modules, plain, monkeypatch, caplog, **options):
    for name, value in scenario.environment.items():
        monkeypatch.setenv(name, value)
    if scenario.pages is not None:
        monkeypatch.setattr(sglang_fork, "pages_for", lambda *args: scenario.pages)
    forwards = calls_of(monkeypatch, "forward", lambda result, batch, *args: int(batch.layout.q_offsets[-1]))
    embedded = calls_of(monkeypatch, "embed_images", lambda result, *args: len(result))
    engine = Engine(modules, monkeypatch, plain.path, **options)
    engine.lag = scenario.lag
    if engine.runner is None:  # values come from a server
        engine.lvm_guided_sampler._inproc = False
        engine.lvm_guided_sampler._post_tree_value = lambda rids, prefixes, ids, reqs: [
            plain.after(prefix, candidates).tolist() for prefix, candidates in zip(prefixes, ids, strict=True)
        ]
    Drive(scenario, engine, plain, forwards, embedded).run()
    for message, count in scenario.logs.items():
        assert caplog.text.count(message) == count, f"{scenario.name}: {message}"


# Scenarios that also run with values from a server.
JOIN_AND_LEAVE = Scenario(
    "requests join and leave",
    {
        "a": ask(23, TILT, top_k=5),
        "b": ask(1, {**TILT, "entropy_threshold": 0.1}, top_k=9, min_p=0.1),
        "c": ask(40, None, top_k=3),
        "d": ask(17, {"target_length": 9, "entropy_threshold": 1.7}, top_k=6, top_p=0.9),
        "e": ask(6, {"value_mode": "value_bias", "value_scale": 1.5, "entropy_threshold": 0.1}, top_k=ALL),
        "f": ask(33, {"target_length": 40, "constraint": "eq_soft"}, top_k=12),
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
    statuses=frozenset({Status.GUIDE, Status.SKIP, Status.UNGUIDED}),
)
MODES = {
    "a": ask(4, {"mode": "value_bias", "value_scale": 2.0}),
    "b": ask(5, {"value_scale": 0.7}),
    "c": ask(6, {"mode": "length_mul", "value_scale": 0.5, "gamma": 0.9}),
    "d": ask(7, {"target_length": 3, "gamma": 0.9}),
    "e": ask(8, {"target_length": 12, "op": "ge"}, top_p=0.9),
    "f": ask(9, None, top_k=3),
    "g": ask(10, None, top_k=ALL, top_p=0.5),
    "h": ask(11, {}, top_k=ALL, min_p=0.3),
    "i": ask(12, {"value_scale": 0.5, "entropy_threshold": 9.0}, top_k=6, top_p=0.9, min_p=0.05),
    "j": ask(13, TILT),
}
SERVED = [
    JOIN_AND_LEAVE,
    Scenario(
        "rows have their own modes, and unguided rows their own filters",
        MODES,
        """
        prefill a@0 b@1 c@2 d@3 e@4; decode edcba; decode adceb; finish abcde
        prefill f@0 g@1 h@2 i@3 j@4; holds 3 4; decode jihgf; decode jf; decode fi
        """,
    ),
    Scenario(
        "no guidance: absent, of strength 0, empty, below the entropy threshold",
        {
            "a": ask(8, None, top_k=3),
            "b": ask(9, {"value_mode": "centered_exp", "value_scale": 0}),
            "c": ask(7, {}, top_k=2),
            "d": ask(6, {"scale": 0.5, "entropy_threshold": 9.0}),
            "e": ask(5, TILT),
        },
        "prefill a@2 b@0 c@4; forwards; holds; prefill d@1; holds 1; prefill a@2 e@3",
    ),
    *(
        Scenario(
            f"bad parameters: {params}",
            {"a": ask(5, TILT, top_k=5), "b": ask(6, params, top_k=ALL), "c": ask(7, TILT, top_k=5)},
            "prefill a@1 b@2 c@3; decode cab; decode b; forwards",
            unguided="b",
            logs={f"request b has bad custom_params and is not guided: {message}": 1},
        )
        for params, message in (
            ({"mode": "loud"}, "value_mode must be one of"),
            ({"target_length": "long"}, "target_length must be a finite number"),
            ({"scale": 0.5, "gamma": 1.5}, "gamma must be a finite number > 0 and < 1, got 1.5"),
            ({"token_temperature_scale": [3]}, "token_temperature_scale must be a mapping"),
            ({"scale": 0.5, "end_token_ids": [7]}, "end_token_ids and landing must be absent in the fork"),
            ({"target_length": 60, "landing": [7]}, "end_token_ids and landing must be absent in the fork"),
        )
    ),
]
SCENARIOS = [
    *SERVED,
    replace(JOIN_AND_LEAVE, name="requests join and leave under the overlapping scheduler", lag=1),
    Scenario(
        "a request with one candidate",
        {"a": ask(7, TILT, top_k=1), "b": ask(8, None, top_k=3), "c": ask(6, TILT)},
        "prefill a@4; forwards; holds; prefill a@4 c@1 b@2; holds 1",
        unguided="a",
    ),
    Scenario(
        "chunks of a prompt, the second in a mixed batch",
        {"a": ask(5, TILT), "b": ask(50, TILT, top_k=7)},
        """
        prefill a@3; prefill b@1[:20]; forwards; prefill b@1[20:41] a@3[5:6]; forwards *
        prefill a@3[6:] b@6[41:]; forwards 49 *; holds 3 6; decode ba
        """,
    ),
    Scenario(
        "retracted, in its old row, with all tokens and with one dropped",
        {"a": ask(37, {"target_length": 30, "constraint": "eq_soft", "gamma": 0.98}, top_k=6)},
        f"""
        prefill a@2; forwards 36 7; decode a; decode a; decode a
        prefill a@2; forwards *; drop a; prefill a@2; forwards {40 - 2 * PAGE} 7
        """,
        lag=1,
    ),
    Scenario(
        "retracted, in another row and in chunks",
        {"a": ask(21, TILT, top_k=6), "b": ask(4, TILT, top_k=3)},
        """
        prefill a@2 b@5; decode ab; decode ab; prefill b@5[6:7] a@1[:23]; forwards *; holds 5
        prefill b@5[7:] a@3[23:]; holds 3 5; prefill b@5[8:] a@0; holds 0 5
        """,
    ),
    Scenario(
        "rows are taken over by a request as long as the next step, and by an unguided one",
        {"a": ask(20, TILT, top_k=5), "b": ask(21, TILT), "c": ask(5, None, top_k=3), "d": ask(7, TILT)},
        "prefill a@3; finish a; prefill b@3; holds 3; prefill c@3 d@6; holds 6; decode cd",
    ),
    Scenario(
        "a common prefix is computed once",
        {"a": ask(2 * PAGE + 5, TILT, top_k=3), "b": ask(2 * PAGE + 5, {"target_length": 9}, top_k=5)},
        "prefill a@5; finish a; prefill b@0; forwards 4 6; holds 0",
    ),
    Scenario(
        "slots are taken from a request in no batch",
        {name: ask(length, TILT, top_k=5) for name, length in (("a", 30), ("b", 20), ("c", 18))},
        """
        prefill a@3; prefill b@1; decode ab; prefill c@2; holds 2 3
        finish c; decode ba; forwards 21 *; decode ab; holds 1 3
        """,
        pages=5,
    ),
    Scenario(
        "a request without room is not guided, nor later",
        {name: ask(n, {"value_scale": 0.5}, top_k=k) for name, n, k in (("a", 12, 5), ("b", 28, 3), ("c", 3, 5))},
        """
        prefill a@1 b@4 c@0; forwards 13 *; holds 0 1; decode abc; decode abc
        finish a; decode bc; holds 0
        """,
        unguided="b",
        pages=3,
        environment={"LENVM_CHUNK_TOKENS": "16"},
        logs={"cache is full": 1},
    ),
    *(
        Scenario(
            f"a value stride of a {source}; every step that may end the sequence is guided",
            {"a": ask(8, TILT | params, top_k=4), "b": ask(4, TILT | {"value_stride": 1})},
            f"prefill a@6 b@2 {12 * '; decode ab'}",
            strided="a",
            environment=environment,
        )
        for source, params, environment in (
            ("request", {"value_stride": 3}, {}),
            ("server", {}, {"LENVM_VALUE_STRIDE": "3"}),
        )
    ),
    *(
        Scenario(
            f"{count} warnings of more candidates than LENVM_MAX_CANDIDATES",
            {name: ask(4, TILT, top_k=top_k) for name, top_k in requests.items()},
            ";".join(f"prefill {name}@3" for name in requests),
            environment={"LENVM_MAX_CANDIDATES": "4"},
            logs={"requests with a top_k above 4, or none, are drawn from their 4 most probable": count},
        )
        for count, requests in ((0, {"a": 4}), (1, {"b": 5, "c": ALL}))
    ),
    Scenario(
        "the default gamma comes from the settings",
        {"a": ask(4, {"target_length": 6, "op": "eq_soft"})},
        "prefill a@3; decode a",
        environment={"LENVM_GAMMA": "0.9"},
    ),
    Scenario(
        "images of several sizes beside text, in parts that cut images",
        {
            "a": ask([3, (2, 3, 1), 2, (4, 1, 2), 5], TILT, text=200, top_k=5),
            "b": ask(11, TILT, text=201, top_k=7),
            "c": ask([(3, 2, 3), 1], {"target_length": 9}, text=202, top_k=4),
            "d": ask([1, (1, 1, 4), 20, (1, 5, 5), 3, (3, 3, 6), 4], TILT, text=203, top_k=6),
        },
        """
        prefill a@4 b@1; embeds 10; decode ba; embeds; prefill b@1[12:] d@0 c@6; embeds 6 15
        decode cadb; decode dbac; embeds; finish a; decode cbd
        """,
        reads_images=True,
        environment={"LENVM_CHUNK_TOKENS": "8"},
    ),
    Scenario(
        "retracted requests with images are computed again",
        {
            "a": ask([4, (2, 3, 1), 6], TILT, text=210, top_k=5),
            "b": ask([PAGE, (1, 3, 2), 2], TILT, text=211, top_k=4),
            "c": ask([2, (4, 5, 3), 1], TILT, text=212, top_k=6),
        },
        f"""
        prefill a@3 b@1; embeds 3 6; decode ba; decode ba; decode ba
        prefill c@2; embeds 20; finish c; prefill b@0 a@3; embeds 3 6; decode ab
        drop a; prefill a@4 b@0; embeds; forwards {20 - PAGE} *; decode ba
        """,
        reads_images=True,
        lag=1,
        pages=5,
    ),
    *(
        Scenario(
            f"a prompt shares the pages before {name}",
            {
                "a": ask([2 * PAGE - 1, (3, 4, 1), 9], TILT, placeholder=IMAGE, top_k=3),
                "b": ask(parts, TILT, placeholder=IMAGE, top_k=3, text=text),
            },
            f"prefill a@3; forwards 51 *; embeds 12; prefill b@0; forwards {computed} *",
            reads_images=True,
        )
        for name, parts, text, computed in (
            ("its end, with the same image", [2 * PAGE - 1, (3, 4, 1), 9], 0, 51 - 3 * PAGE),
            ("other pixels", [2 * PAGE - 1, (3, 4, 2), 9], 0, 51 - PAGE),
            ("the same pixels in another shape", [2 * PAGE - 1, (4, 3, 1), 9], 0, 51 - PAGE),
            ("nothing, if positions are moved further", [2 * PAGE - 1, (3, 4, 1), 9, (2, 2, 1), 1], 0, 56),
            ("nothing, with other text", [2 * PAGE - 1, (3, 4, 1), 9], 1, 51),
        )
    ),
    *(
        Scenario(
            f"{message}, {'with' if reads_images else 'without'} a vision tower",
            {
                "a": ask([4, (1, 2, 7), 3], TILT, placeholder=placeholder, changes=changes, top_k=3),
                "b": ask([2, (2, 1, 8), 5], TILT) if reads_images else ask(4, TILT, changes=dict(session_id="s")),
            },
            "prefill a@3 b@0; decode ab",
            unguided="a",
            reads_images=reads_images,
            logs={f"request a is not guided: {message}": 1},
        )
        for changes, reads_images, placeholder, message in (
            (dict(input_embeds=object()), False, IMAGE, "input_embeds cannot be combined"),
            ({}, False, IMAGE, "images cannot be combined with guidance"),
            (dict(session_id="s"), True, IMAGE, "images in a session cannot be combined"),
            (dict(session_id="s", multimodal_inputs=None), True, None, "images in a session cannot be combined"),
            (dict(modality=SimpleNamespace(name="VIDEO")), True, IMAGE, "videos, audio and embeddings of images"),
            (dict(feature=torch.zeros(8, 99)), True, IMAGE, "pixel_values must be [8, 96]"),
        )
    ),
]


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


def test_install_replaces_every_name_once(monkeypatch):
    use_stand_in(monkeypatch)
    before = {name: pkgutil.resolve_name(name) for name in sglang_fork.REPLACED}
    assert sglang_fork.install() == before
    after = {name: pkgutil.resolve_name(name) for name in before}
    assert all(after[name] is not before[name] for name in before)
    assert sglang_fork.install() == before and {name: pkgutil.resolve_name(name) for name in before} == after


@pytest.mark.parametrize("change", ["is not there", "takes"])
@pytest.mark.parametrize("name", USED["sglang_fork"])
def test_install_changes_nothing_in_other_versions(monkeypatch, name, change):
    attribute = name.replace(":", ".").rpartition(".")[2]
    if change == "takes":
        modules = use_stand_in(monkeypatch, **{attribute: "one, other"})
    else:
        modules = use_stand_in(monkeypatch, without=name)
    before = vars(modules[SAMPLING].LvmGuidedSampler).copy()
    with pytest.raises(ImportError, match=f"needs the LenVM fork of SGLang .*{attribute} {change}"):
        sglang_fork.install()
    assert vars(modules[SAMPLING].LvmGuidedSampler) == before


def test_token_temperatures_drop_ids_beyond_int64(modules):
    extract = modules[SAMPLING]._extract_token_temperature_scale
    scale = {"3": 2.0, str(10**30): 2.0}
    assert extract(Request("a", [5], {"token_temperature_scale": scale})) == {3: 2.0}
    assert extract(Request("a", [5], None)) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model", ["qwen2", "qwen3"])
def test_value_logits_are_fp32(modules, model, dtype):
    torch.manual_seed(8)
    head = object.__new__(modules[f"sglang.srt.models.{model}_lvm"].MLP2SiLUValueHead)
    head.fc, head.summary = torch.nn.Linear(24, 24, dtype=dtype), torch.nn.Linear(24, 1, dtype=dtype)
    hidden = torch.randn(2, 5, 24)
    with torch.no_grad():
        logits = head.forward(hidden)
        x = torch.nn.functional.silu(head.fc.double()(hidden.to(dtype).double()))
        torch.testing.assert_close(logits, head.summary.double()(x).float(), rtol=1e-5, atol=1e-5)


# --- steps ---


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_scenario(modules, plain, plain_vl, monkeypatch, caplog, scenario):
    run(scenario, modules, plain_vl if scenario.reads_images else plain, monkeypatch, caplog)


@pytest.mark.parametrize("scenario", SERVED, ids=str)
def test_scenario_with_values_from_server(modules, plain, monkeypatch, caplog, scenario):
    run(scenario, modules, plain, monkeypatch, caplog, lvm_guided_inproc=False)
    is_long = scenario is JOIN_AND_LEAVE  # a request has no limit
    assert caplog.text.count("more than 64 candidates; the others are left out") == is_long


def test_request_fields_other_than_guidance(make):
    """The fork applies token temperatures itself and returns no lengths; the table has 64 end tokens per request."""
    engine, other = make(), {"token_temperature_scale": {"5": 2.0, "6": 0.5}, "return_values": True}
    request = ask(9, {**TILT, **other}, changes=dict(eos_token_ids={EOS, *range(1000, 1080)}), top_k=6)("a")
    engine.step([request], [4])
    columns = engine.runner.step.table.columns
    assert columns.token_scales.unique().tolist() == [1.0] and not columns.return_values.any()
    assert columns.eos_token_ids[4].tolist() == [EOS, *range(1000, 1063)]


def test_batches_read_back_nothing_to_the_host(make, monkeypatch):
    """Prompts, guided, unguided and skipped rows, and a finished request, with the Triton kernels."""
    make_config = Settings.step_config
    monkeypatch.setattr(Settings, "step_config", lambda *a, **o: replace(make_config(*a, **o), backend="triton"))
    engine, c = make(), ask(9, {**TILT, "entropy_threshold": 9.0}, top_k=3, min_p=0.01)("c")
    a, b = ask(18, {"value_scale": 0.7}, top_k=4)("a"), ask(5, None, top_k=3)("b")
    for requests, rows in (([a, b], [4, 1]), ([b, a], []), ([c], [2]), ([a, c, b], []), ([c, b], [])):
        a.finished_reason = "stop" if requests == [c, b] else None
        with no_read_back():
            _, after = engine.step(requests, rows)
        engine.draw(requests, after)


# --- loading ---


def test_value_model_is_loaded_at_start(make, monkeypatch):
    """From the fork's option, in the base model's dtype. ``LENVM_VALUE_MODEL`` is ignored, other settings apply."""
    monkeypatch.setenv("LENVM_VALUE_MODEL", "/nowhere")
    engine = make()
    step, slots = engine.runner.step, engine.runner.own.slots
    config = step.config
    assert (config.max_candidates, config.max_requests, config.vocab_size, config.max_delta) == (64, 5, VOCAB, 16)
    assert step.values.value_model.dtype == torch.float32 and slots.table.shape == (7, 6) and slots.num_slots == 5 * 96
    engine.model_runner.tp_group = SimpleNamespace(world_size=2, cpu_group="group")
    engine.model_runner.initialize(0.0)
    groups = {"distributed": False, "cpu_group": None}, {"distributed": True, "cpu_group": "group"}
    assert engine.asked_memory == [(("cpu", 0), group) for group in groups for _ in range(2)]

    for name, value in dict(MAX_CANDIDATES=8, VALUE_STRIDE=3, CHUNK_TOKENS=7, DTYPE="bfloat16").items():
        monkeypatch.setenv(f"LENVM_{name}", str(value))
    step = make(lvm_guided_inproc_json_model_override_args='{"architectures": ["X"]}').runner.step
    assert (step.config.max_candidates, step.config.value_stride, step.config.chunk_tokens) == (8, 3, 7)
    assert step.values.value_model.dtype == torch.bfloat16


def test_cache_size_follows_memory_fraction(make, monkeypatch):
    """The cache gets the option's share of the initially free memory, minus weights and working memory of steps."""
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
    ("option", "value", "message"),
    [
        ("model_path", "/nowhere", "model-path must be an existing directory"),
        ("model_path", "none", "model-path must be a value model for the fork"),
        (
            "json_model_override_args",
            '{"architectures": ["X"], "rope_theta": 3}',
            "json-model-override-args must name nothing but architectures, got architectures, rope_theta",
        ),
    ],
)
def test_bad_options_are_rejected_at_start(make, option, value, message):
    with pytest.raises(ValueError, match=f"--lvm-guided-inproc-{message}"):
        make(**{f"lvm_guided_inproc_{option}": value})


@pytest.mark.parametrize(
    "options", [dict(lvm_guided_inproc_model_path=None), dict(function=min), dict(is_draft_worker=True)]
)
def test_other_value_models_are_left_to_the_fork(modules, make, caplog, options):
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


def test_server_without_guidance_starts_as_the_fork(modules, make):
    """A server without ``--enable-lvm-guided-sampling`` has no sampler of guidance."""
    runner = make().model_runner
    runner.sampler = lambda *args: ("drawn", *args)
    modules[SAMPLING].calls.clear()
    runner.initialize(3.0)
    assert modules[SAMPLING].calls == [("initialize", runner, 3.0)]
    assert runner.sample("logits", "batch") == ("drawn", "logits", "batch")
