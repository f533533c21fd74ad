"""The in-process runner that ``install()`` puts into the LenVM fork of SGLang: its steps against plain forwards.

Every test of the runner runs with a stand-in for the fork; those that have the fork's name in it, and all others once
more, where the fork can be imported (see tests/test_sglang_fork.py).
"""

import importlib
import json
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, Qwen2_5_VLForConditionalGeneration

from lenvm_kernels.adapters import sglang_fork, sglang_fork_runner
from lenvm_kernels.guidance import GuidanceParams, GuidanceTable, parse_guidance
from lenvm_kernels.ops.reweight_scatter import reweight_scatter
from lenvm_kernels.ops.topk_candidates import topk_candidates
from lenvm_kernels.step import working_bytes
from lenvm_kernels.types import Mode, Status
from lenvm_kernels.value_model import KVCache, ValueModel
from lenvm_kernels.value_model.images import load_vision_tower
from tests.helpers.models import (
    EOS,
    IMAGE,
    VIDEO,
    VOCAB,
    random_head,
    random_model,
    save_checkpoint,
    value_logits,
    vl_config,
)
from tests.helpers.sglang_fork import (
    ALL,
    BY_TOKEN,
    GUIDED_SAMPLING,
    MEMORY,
    RUNNER,
    Engine,
    Item,
    Request,
    install_in_fork,
    use_stand_in,
)
from tests.helpers.watch import no_read_back

ATOL = 2e-5  # of probabilities, which follow from value logits of O(1) in fp32
TILT = {"value_mode": "centered_exp", "value_scale": -8}
PAGE = sglang_fork_runner.PAGE_SIZE


class Plain:
    """A value model in ``transformers``."""

    def __init__(self, path, model_class=LlamaForCausalLM):
        self.path = path
        self._model, self._head = (
            model_class.from_pretrained(path).eval(),
            load_file(path / "value_head.safetensors"),
        )
        self._known = {}

    def after(self, tokens, items=()):
        """fp32 ``[V]``: the value logit of every token that may follow, by a forward over the whole sequence.

        Args:
            tokens: of the sequence.
            items: its images. Tokens that stand for one have no value after them.
        """
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
            self._known[known][follow] = value_logits(self._model, self._head, sequences, **images)[:, -1]
        return self._known[known]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    path = tmp_path_factory.mktemp("fork")
    save_checkpoint(path, seed=1, words=[f"w{i}" for i in range(VOCAB)], value_head=True)
    return Plain(path)


@pytest.fixture(scope="module")
def plain_vl(tmp_path_factory):
    """The same of a vision-language value model."""
    path = tmp_path_factory.mktemp("vl")
    random_model(Qwen2_5_VLForConditionalGeneration, vl_config(), seed=3).save_pretrained(path)
    save_file(random_head(), path / "value_head.safetensors")
    return Plain(path, Qwen2_5_VLForConditionalGeneration)


@pytest.fixture(scope="module")
def fork():
    """The fork after ``install()``."""
    return install_in_fork()


@pytest.fixture(params=["stand-in", "fork"])
def modules(request, monkeypatch):
    """The modules of the fork, or of the stand-in for it, after ``install()``."""
    if request.param == "fork":
        request.getfixturevalue("fork")
        return sys.modules
    modules = use_stand_in(monkeypatch)
    sglang_fork.install()
    return modules


@pytest.fixture
def make(modules, plain, monkeypatch):
    """Makes an engine after ``install()``, with the value model unless it is given another path."""
    return lambda path=plain.path, **options: Checked(plain, modules, monkeypatch, path, **options)


@pytest.fixture
def engine(make):
    return make()


@pytest.fixture
def make_vl(modules, plain_vl, monkeypatch):
    """:func:`make` with the vision-language value model; no token that stands for an image is drawn."""
    scores = BY_TOKEN.clone()
    scores[:, [IMAGE, VIDEO]] = -torch.inf
    monkeypatch.setattr("tests.helpers.sglang_fork.BY_TOKEN", scores)
    return lambda **options: Checked(plain_vl, modules, monkeypatch, plain_vl.path, **options)


@pytest.fixture(autouse=True)
def nothing_yet(monkeypatch):
    """No value model is loaded, and no setting is given."""
    monkeypatch.setattr(sglang_fork, "_gamma", None)
    for name in ("LENVM_CONFIG", "LENVM_VALUE_MODEL", "LENVM_MAX_CANDIDATES"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def forwards(monkeypatch):
    """Rows of every forward of the value model: tokens and candidates that are computed."""
    rows, forward = [], ValueModel.forward

    def counted(self, batch, *args, **kwargs):
        rows.append(int(batch.layout.q_offsets[-1]))
        return forward(self, batch, *args, **kwargs)

    monkeypatch.setattr(ValueModel, "forward", counted)
    return rows


@pytest.fixture
def embedded(monkeypatch):
    """Rows of embeddings of every forward of the vision tower."""
    rows, embed = [], ValueModel.embed_images

    def counted(self, *args):
        result = embed(self, *args)
        rows.append(len(result))
        return result

    monkeypatch.setattr(ValueModel, "embed_images", counted)
    return rows


def prompt_of(length, seed):
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def request_with_images(rid, parts, params, *, text=0, placeholder=None, **filters):
    """A request with a prompt of parts: so many tokens of text, or an image of rows, columns and a seed of its pixels.

    Args:
        rid, params, filters: of the request.
        parts: in their order.
        text: seed of the text.
        placeholder: token that stands for images (None: one past the vocabulary, by their pixels, as in the engine).
    """
    tokens, items = [], []
    for part in parts:
        if isinstance(part, int):
            tokens += [3 + token % 80 for token in prompt_of(part, text + len(tokens))]
        else:
            items.insert(0, Item(len(tokens), *part))  # in another order than in the prompt
            tokens += [items[0].hash % 2**30 if placeholder is None else placeholder] * (part[0] * part[1])
    request = Request(rid, tokens, params, **filters)
    request.multimodal_inputs = SimpleNamespace(mm_items=items)
    return request


def with_own_filters(request, probs):
    """``probs [V]`` as the request's own filters leave them, not normalised."""
    sampling, result, mass = request.sampling_params, torch.zeros_like(probs), 0.0
    for token in probs.argsort(descending=True)[: sampling.top_k].tolist():
        if mass <= sampling.top_p and probs[token] >= sampling.min_p * probs.max():
            result[token] = probs[token]
        mass += probs[token].item()
    return result


def expected_row(plain, request, probs, tokens=None):
    """What becomes of ``probs [V]`` by the specification, with values of plain forwards; and the row's status."""
    sampling, tokens = request.sampling_params, request.tokens if tokens is None else tokens
    custom_params = sampling.custom_params
    params = parse_guidance(custom_params, constraint="eq") if custom_params else GuidanceParams()
    row, column = probs[None].clone(), lambda x, dtype: torch.tensor([x], dtype=dtype)
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
    value_logits = plain.after(tokens, items)[candidates.token_ids.clamp(min=0).long()]
    table = GuidanceTable.from_params([params], [{EOS}], "cpu").columns
    generated = column(len(tokens) - len(request.origin_input_ids), torch.int32)
    reweight_scatter(candidates, value_logits, table, generated=generated, probs=row)
    return row[0], status


class Checked(Engine):
    """An engine, and the value model's plain forwards."""

    def __init__(self, plain, *args, **options):
        super().__init__(*args, **options)
        self.plain = plain

    def check(self, requests, before, after, left=()):
        """Each row of a step against :func:`expected_row`, of those ``left`` alone exactly; the rows' statuses."""
        assert after is not None
        statuses = []
        for request, row, found in zip(requests, before, after, strict=True):
            if request in left:
                assert torch.equal(found, with_own_filters(request, row))
                continue
            expected, status = expected_row(self.plain, request, row)
            torch.testing.assert_close(found, expected, rtol=0, atol=ATOL)
            statuses.append(status)
        return statuses

    def go(self, requests, rows=None, left=(), **options):
        """A step of prompts in ``rows``, or of decoding: checked, then the tokens are drawn. The rows' statuses."""
        before, after = self.decode(requests) if rows is None else self.prefill(requests, rows, **options)
        statuses = self.check(requests, before, after, left)
        self.draw(requests, after)
        return statuses


# --- steps ---


@pytest.mark.parametrize("lag", [0, 1])
def test_requests_join_and_leave(make, forwards, lag):
    """Requests of several lengths and filters, in rows and batches of another order, with and without the host knowing
    the last tokens. All probabilities of all steps are those of plain forwards, and a step of decoding is one forward.
    """
    engine = make(lag=lag)
    a = Request("a", prompt_of(23, 1), TILT, top_k=5)
    b = Request("b", prompt_of(1, 2), {**TILT, "entropy_threshold": 0.1}, top_k=9, min_p=0.1)
    c = Request("c", prompt_of(40, 3), None, top_k=3)
    d = Request("d", prompt_of(17, 4), {"target_length": 9, "entropy_threshold": 1.5}, top_k=6, top_p=0.9)
    e = Request(
        "e", prompt_of(6, 5), {"value_mode": "value_bias", "value_scale": 1.5, "entropy_threshold": 0.1}, top_k=ALL
    )
    f = Request("a", prompt_of(33, 6), {"target_length": 40, "constraint": "eq_soft"}, top_k=12)
    statuses = []

    def prefill(requests, rows, **options):
        statuses.extend(engine.go(requests, rows, **options))

    def decode(*requests):
        forwards.clear()
        statuses.extend(engine.go(requests))
        assert len(forwards) == 1

    prefill([a, b], [4, 1], prefixes=[16, 0])
    decode(b, a)
    decode(b, a)
    prefill([c, d], [6, 0])
    decode(d, b, c, a)
    decode(d, b, c, a)
    b.finished_reason = "stop"
    decode(a, d, c)
    prefill([e], [1])  # in the row of b
    decode(e, a, c, d)
    if lag:
        a.tokens.pop()  # drawn, and thrown away as a is retracted
    decode(d, c, e)
    prefill([f], [4])  # in the row of a, and with its id
    decode(e, f, c, d)
    prefill([a], [5])
    decode(a, e, f, c, d)
    c.finished_reason = d.finished_reason = "length"
    decode(f, a, e)
    decode(f, a, e)
    assert {Status.GUIDE, Status.SKIP, Status.UNGUIDED} <= set(statuses)
    assert set(engine.runner._requests) == {1, 4, 5}
    assert engine.runner.slots.free_pages == engine.runner.slots.num_slots // PAGE - sum(
        -(-len(r.tokens[:-1]) // PAGE) for r in (a, e, f)
    )


def test_a_drawn_token_need_not_be_a_candidate(engine, forwards):
    """Nor in the candidates' order. Every step computes each request's last token and its candidates."""
    requests = [Request(str(i), prompt_of(3 + 5 * i, 10 + i), TILT, top_k=4 + i) for i in range(3)]
    before, after = engine.prefill(requests, [5, 0, 2])
    engine.check(requests, before, after)
    for step in range(6):
        for i, request in enumerate(requests):
            ranked = after[i].argsort(descending=True).tolist()
            request.tokens.append(ranked[(2 * i + step) % 4] if (step + i) % 3 else ranked[50])
        forwards.clear()
        order = [2, 0, 1]
        requests = [requests[i] for i in order]
        before, after = engine.decode(requests)
        engine.check(requests, before, after)
        candidates = sum(r.sampling_params.top_k for r in requests)
        assert forwards == [candidates + len(requests)]


def test_nothing_is_read_back_to_the_host(engine):
    """Prompts, steps of guided, unguided and skipped rows, requests that end and lose their slots; by the kernels."""
    step = engine.runner.step
    step.config, step.values._backend = replace(step.config, backend="triton"), "triton"
    a = Request("a", prompt_of(18, 20), {"value_scale": 0.7}, top_k=4)
    b = Request("b", prompt_of(5, 21), None, top_k=3)
    c = Request("c", prompt_of(9, 22), {**TILT, "entropy_threshold": 9.0}, top_k=3, min_p=0.01)

    def go(requests, *rows):
        with no_read_back():
            before, after = engine.prefill(requests, *rows) if rows else engine.decode(requests)
        engine.check(requests, before, after)
        engine.draw(requests, after)

    go([a, b], [4, 1])
    go([b, a])
    go([c], [2])
    go([a, c, b])
    a.finished_reason = "stop"
    go([c, b])
    assert set(engine.runner._requests) == {2}


def test_nothing_to_guide(engine, forwards):
    """The engine's own sampling stays; nor does a single candidate, or one that is not guided, take slots."""
    requests = [
        Request("a", prompt_of(8, 30), None, top_k=3),
        Request("b", prompt_of(9, 31), {"value_mode": "centered_exp", "value_scale": 0}),
        Request("c", prompt_of(7, 32), TILT, top_k=1),
    ]
    assert engine.prefill(requests, [2, 0, 4])[1] is None
    assert not forwards and engine.runner.slots.free_pages * PAGE == engine.runner.slots.num_slots

    guided = Request("d", prompt_of(6, 33), TILT)
    engine.draw(requests, torch.ones(3, VOCAB))
    requests = [requests[2], guided, requests[0]]
    before, after = engine.prefill(requests, [4, 1, 2])
    assert after[0].nonzero()[:, 0].tolist() == [before[0].argmax()]
    engine.check(requests[1:], before[1:], after[1:])
    assert set(engine.runner._requests) == {1}


def test_chunks_of_a_prompt(engine, forwards):
    """Nothing is computed before the last chunk, which may be in another row; others are guided meanwhile."""
    other, long = Request("other", prompt_of(5, 40), TILT), Request("long", prompt_of(50, 41), TILT, top_k=7)
    engine.go([other], [3])
    assert engine.prefill([long], [1], ends=[20])[1] is None
    forwards.clear()
    before, after = engine.prefill([long, other], [1, 3], prefixes=[20, 5], ends=[41, 6])  # a mixed batch
    engine.check([other], before[1:], after[1:])
    assert forwards == [9] or forwards == [8]
    engine.draw([other], after[1:])
    engine.go([other, long], [3, 6], prefixes=[6, 41])
    assert forwards[1] == 49 and len(forwards) == 3
    engine.go([long, other])


def test_a_retracted_request_in_its_old_row(make, forwards):
    """It goes on where it was; if a token of it was thrown away, it is computed anew, but for the full pages."""
    engine = make(lag=1)
    request = Request("a", prompt_of(37, 50), {"target_length": 30, "constraint": "eq_soft", "gamma": 0.98}, top_k=6)
    engine.go([request], [2])
    for _ in range(3):
        engine.go([request])
    forwards.clear()
    engine.go([request], [2])
    assert forwards == [7]

    request.tokens.pop()
    forwards.clear()
    engine.go([request], [2])
    assert forwards == [len(request.tokens) - 2 - 2 * PAGE, 7]


def test_a_retracted_request_in_another_row_and_in_chunks(engine, forwards):
    """Its old slots are free; nothing is guided before all of its tokens are there, those it had generated included."""
    request, other = Request("a", prompt_of(21, 52), TILT, top_k=6), Request("b", prompt_of(4, 53), TILT, top_k=3)
    engine.go([request, other], [2, 5])
    for _ in range(3):
        engine.go([request, other])
    before, after = engine.decode([request, other])
    engine.check([request, other], before, after)
    engine.draw([other], after[1:])
    forwards.clear()
    before, after = engine.prefill([other, request], [5, 1], ends=[len(other.tokens), 23], prefixes=[8, 0])
    engine.check([other, request], before, after, left=[request])
    assert len(forwards) == 1 and set(engine.runner._requests) == {5}
    engine.draw([other], after[:1])
    engine.go([other, request], [5, 3], prefixes=[9, 23])
    engine.prefill([other, request], [5, 0], prefixes=[10, 0])  # in another row, all at once
    assert set(engine.runner._requests) == {5, 0}


def test_rows_are_taken_over(engine):
    """By a request whose length is that of the next step of who was there, and by one that is not guided."""
    first = Request("a", prompt_of(20, 55), TILT, top_k=5)
    engine.go([first], [3])
    engine.decode([first])
    first.finished_reason = "stop"
    second = Request("a", prompt_of(22, 56), TILT, top_k=4)
    engine.go([second], [3])

    unguided, other = Request("c", prompt_of(5, 57), None, top_k=3), Request("d", prompt_of(7, 58), TILT)
    engine.go([unguided, other], [3, 6])  # the second was retracted
    assert set(engine.runner._requests) == {6}


def test_what_a_request_has_beside_guidance(engine):
    """Token temperatures are in the logits already, lengths have no way back, and there is room for 64 end tokens."""
    beside = {"token_temperature_scale": {"5": 2.0, "6": 0.5}, "return_values": True}
    request = Request("a", prompt_of(9, 59), {**TILT, **beside}, top_k=6)
    request.eos_token_ids = {EOS, *range(1000, 1080)}
    engine.go([request], [4])
    table = engine.runner.step.table.columns
    assert table.token_scales.unique().tolist() == [1.0] and not table.return_values.any()
    assert table.eos_token_ids[4].tolist() == [EOS, *range(1000, 1063)]


def test_requests_share_the_pages_of_a_prompt(engine, forwards):
    prompt = prompt_of(2 * PAGE + 5, 60)
    first = Request("first", prompt, TILT, top_k=3)
    second = Request("second", [*prompt[: 2 * PAGE + 1], 7, 8], TILT, top_k=5)
    engine.go([first], [5])
    first.finished_reason = "stop"
    forwards.clear()
    engine.go([second], [0])
    assert forwards == [2, 1 + 5]
    assert set(engine.runner._requests) == {0}


def test_slots_are_taken_from_who_is_in_no_batch(make, monkeypatch):
    """Its tokens are computed anew when it is back."""
    monkeypatch.setattr(sglang_fork_runner, "_num_pages", lambda *args: 5)
    engine = make()
    a, b, c = (Request(name, prompt_of(n, 70 + n), TILT, top_k=5) for name, n in (("a", 30), ("b", 20), ("c", 18)))
    engine.go([a], [3])
    engine.go([b], [1])
    engine.go([a, b])
    engine.go([c], [2])  # a and b have two pages each
    assert set(engine.runner._requests) == {2, 3}
    c.finished_reason = "stop"
    engine.go([b, a])
    engine.go([a, b])
    assert set(engine.runner._requests) == {1, 3}


def test_without_room_a_request_is_not_guided(make, monkeypatch, forwards, caplog):
    """Nor later, when there would be room; its prompt is not computed."""
    monkeypatch.setattr(sglang_fork_runner, "_num_pages", lambda *args: 3)
    monkeypatch.setenv("LENVM_CHUNK_TOKENS", "16")
    engine = make()
    long = Request("long", prompt_of(28, 80), {"value_scale": 0.5}, top_k=3)
    short, other = (Request(str(n), prompt_of(n, 80 + n), {"value_scale": 0.5}, top_k=5) for n in (12, 3))
    engine.go([short, long, other], [1, 4, 0], left=[long])
    assert len(forwards) == 2  # of one chunk, and of the step
    engine.go([short, long, other], left=[long])
    engine.go([short, long, other], left=[long])
    short.finished_reason = "stop"
    engine.go([long, other], left=[long])
    short.finished_reason = None
    engine.go([short, other])
    assert caplog.text.count("cache is full") == 1 and set(engine.runner._requests) == {0, 1}


@pytest.mark.parametrize("asked_by", ["request", "server"])
def test_value_stride(make, monkeypatch, asked_by):
    """Every third step of the engine is guided, or one at which the sequence may end; in between the row's own filters
    count. The tokens of these steps are computed together."""
    if asked_by == "server":
        monkeypatch.setenv("LENVM_VALUE_STRIDE", "3")
    engine = make()
    stride = {"value_stride": 3} if asked_by == "request" else {}
    request = Request("a", prompt_of(8, 90), {**TILT, **stride}, top_k=4)
    always = Request("b", prompt_of(4, 91), {**TILT, "value_stride": 1}, top_k=3)
    requests, guided = [request, always], 0
    before, after = engine.prefill(requests, [6, 2])
    for _ in range(12):
        is_guided = not torch.equal(after[0], with_own_filters(request, before[0]))
        engine.check(requests, before, after, left=() if is_guided else [request])
        guided += is_guided
        engine.draw(requests, after)
        before, after = engine.decode(requests)
    assert 4 <= guided < 9


@pytest.mark.parametrize("filters", [dict(top_k=3), dict(top_p=0.5), dict(min_p=0.3)])
def test_each_filter_of_an_unguided_request(engine, filters):
    unguided, guided = (
        Request(name, prompt_of(5, seed), params, **{"top_k": ALL, **filters})
        for name, seed, params in (("a", 92, None), ("b", 93, TILT))
    )
    before, after = engine.prefill([guided, unguided], [1, 5])
    engine.check([guided, unguided], before, after, left=[unguided])
    assert 1 < (after[1] > 0).sum() < VOCAB


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
def test_what_the_value_model_cannot_read_is_not_guided(make, make_vl, caplog, changes, reads_images, message):
    engine = make_vl() if reads_images else make()
    placeholder = None if "multimodal_inputs" in changes else IMAGE
    request = request_with_images("a", [4, (1, 2, 7), 3], TILT, placeholder=placeholder, top_k=3)
    other = request_with_images("b", [2, (2, 1, 8), 5], TILT) if reads_images else Request("b", prompt_of(4, 95), TILT)
    other.session_id = None if reads_images else "s"
    for name, value in changes.items():
        vars(request if hasattr(request, name) else request.multimodal_inputs.mm_items[0])[name] = value
    engine.go([request, other], [3, 0], left=[request])
    engine.go([request, other], left=[request])
    assert len(re.findall(f"request a is not guided: {message}", caplog.text)) == 1


def test_a_bad_request_harms_nobody(engine, caplog):
    bad, other = Request("a", prompt_of(3, 96), {"mode": "loud"}, top_k=3), Request("b", prompt_of(4, 97), TILT)
    engine.go([bad, other], [3, 0], left=[bad])
    assert "request a has bad custom_params and is not guided: value_mode must be one of" in caplog.text


def test_more_candidates_than_there_is_room_for(make, monkeypatch, caplog):
    monkeypatch.setenv("LENVM_MAX_CANDIDATES", "4")
    engine = make()
    warning = "requests with a top_k above 4, or none, are drawn from their 4 most probable"
    for name, top_k, count in (("a", 4, 0), ("b", 5, 1), ("c", ALL, 1)):
        _, after = engine.prefill([Request(name, prompt_of(4, 98), TILT, top_k=top_k)], [3])
        assert (after[0] > 0).sum() == 4 and caplog.text.count(warning) == count


# --- images ---


def test_images_beside_text(make_vl, forwards, embedded, monkeypatch):
    """Requests with images of several sizes and numbers, and without, join and change places.

    Prompts are computed in parts that cut images. Steps of decoding are one forward, and the vision tower runs once for
    each request with images, when it comes.
    """
    monkeypatch.setenv("LENVM_CHUNK_TOKENS", "8")
    engine = make_vl()
    a = request_with_images("a", [3, (2, 3, 1), 2, (4, 1, 2), 5], TILT, text=200, top_k=5)
    b = Request("b", [3 + token % 80 for token in prompt_of(11, 201)], TILT, top_k=7)
    c = request_with_images("c", [(3, 2, 3), 1], {"target_length": 9}, text=202, top_k=4)
    d = request_with_images("d", [1, (1, 1, 4), 20, (1, 5, 5), 3, (3, 3, 6), 4], TILT, text=203, top_k=6)

    def decode(*requests):
        forwards.clear()
        statuses = engine.go(requests)
        assert len(forwards) == 1 and set(statuses) == {Status.GUIDE}

    engine.go([a, b], [4, 1])
    assert embedded == [6 + 4]
    decode(b, a)
    engine.go([b, d, c], [1, 0, 6])
    decode(c, a, d, b)
    decode(d, b, a, c)
    a.finished_reason = "stop"
    decode(c, b, d)
    assert d.lenvm_images.embeds is None  # once the prompt is computed
    assert sorted(embedded) == sorted([6 + 4, 6, 1 + 5 + 9])


def test_other_images_with_the_same_tokens_are_not_shared(make_vl, forwards, embedded):
    """Of three full pages of a prompt, those before the first image that is another are shared."""
    engine = make_vl()
    start, end = 2 * PAGE - 1, 9  # the image's first token ends a page
    first = [start, (3, 4, 1), end]

    def computed(parts, row, text=0):
        """Tokens of this prompt that were computed before its last one."""
        forwards.clear()
        options = dict(text=text, placeholder=IMAGE, top_k=3)
        engine.go([request_with_images(str(row), parts, TILT, **options)], [row])
        return forwards[0] if len(forwards) == 2 else 0

    length = start + 12 + end - 1
    assert computed(first, 3) == length
    embedded.clear()
    assert computed(first, 0) == length - 3 * PAGE and not embedded
    assert computed([start, (3, 4, 2), end], 5) == length - PAGE  # other pixels
    assert computed([start, (4, 3, 1), end], 1) == length - PAGE  # the same pixels in another shape
    assert computed([start, (3, 4, 1), end, (2, 2, 1), 1], 6) == length + 5  # positions are moved further
    assert computed([start + 12 + end], 4) == length and len(embedded) == 3
    assert computed(first, 2, text=1) == length


def test_retracted_requests_with_images(make_vl, monkeypatch, forwards, embedded):
    """Without slots, without a token and in another row, they are computed anew with their images."""
    monkeypatch.setattr(sglang_fork_runner, "_num_pages", lambda *args: 5)
    engine = make_vl(lag=1)
    a = request_with_images("a", [4, (2, 3, 1), 6], TILT, text=210, top_k=5)
    b = request_with_images("b", [PAGE, (1, 3, 2), 2], TILT, text=211, top_k=4)
    c = request_with_images("c", [2, (4, 5, 3), 1], TILT, text=212, top_k=6)
    engine.go([a, b], [3, 1])
    for _ in range(3):
        engine.go([b, a])
    engine.go([c], [2])  # in the slots of a
    c.finished_reason = "stop"
    assert embedded == [6, 3, 20]
    embedded.clear()
    engine.go([b, a], [0, 3])
    engine.go([a, b])
    assert embedded == [3, 6]
    a.tokens.pop()
    forwards.clear()
    engine.go([a, b], [4, 0])
    assert embedded == [3, 6] and forwards[0] == len(a.tokens) - 2 - PAGE  # its image was in a full page
    engine.go([b, a])


def test_the_vision_tower_is_loaded_at_the_start(make_vl, monkeypatch):
    """Where the base model reads images: after the first look at the memory, and before the second."""
    engine, looks = make_vl(), []

    def load(*args):
        looks.append(len(engine.asked_memory))
        return load_vision_tower(*args)

    monkeypatch.setattr("lenvm_kernels.value_model.model.load_vision_tower", load)
    for reads_images in (False, True):
        engine.asked_memory.clear()
        engine.model_runner.model_config.is_multimodal = reads_images
        engine.model_runner.initialize(0.0)
        assert looks == [1] * reads_images


def test_the_forks_images_are_read(fork, make_vl, embedded):
    """The fork's own objects: two items of an image, and an item of two images; with the hash that it gives them."""
    batch = importlib.import_module("sglang.srt.managers.schedule_batch")

    def make_item(items):
        grids = torch.cat([item.image_grid_thw for item in items])
        return batch.MultimodalDataItem(
            modality=batch.Modality.IMAGE,
            feature=torch.cat([item.feature for item in items]),
            offsets=[offsets for item in items for offsets in item.offsets],
            model_specific_data=dict(image_grid_thw=grids),
        )

    engine = make_vl()
    requests = [request_with_images(name, [3, (2, 3, 1), 2, (4, 1, 2), 5], TILT, text=220) for name in "ab"]
    for request, counts in zip(requests, ([1, 1], [2]), strict=True):
        items = iter(request.multimodal_inputs.mm_items[::-1])
        given = [make_item([next(items) for _ in range(count)]) for count in counts]
        request.multimodal_inputs = batch.MultimodalInputs.from_dict(dict(mm_items=given))
    engine.go(requests, [2, 5])
    engine.go(requests[::-1])
    assert embedded == [10, 10]


# --- against the fork's own sampler ---


class Provider:
    """In place of the fork's in-process value model: value logits of plain forwards, in its form."""

    def __init__(self, plain):
        self.plain = plain

    def clean_stale_requests(self, active_rids): ...

    def tree_value_extend(self, rids, prefix_ids, reqs):
        self.prefixes = dict(zip(rids, prefix_ids, strict=True))

    def tree_value_launch_gpu(self, rids, candidate_ids, gpu_candidates=None):
        return [self.plain.after(self.prefixes[rid])[ids] for rid, ids in zip(rids, candidate_ids, strict=True)]

    def tree_value_collect_gpu(self, embeddings):
        return embeddings

    def tree_value(self, rids, prefix_ids, candidate_ids, reqs):
        self.tree_value_extend(rids, prefix_ids, reqs)
        return [values.tolist() for values in self.tree_value_launch_gpu(rids, candidate_ids)]


def test_probabilities_are_the_forks(fork, plain, monkeypatch):
    """Step by step, those of the fork's own sampler with each row alone: beside each other its modes would mix."""
    engine = Engine(sys.modules, monkeypatch, plain.path)
    params = [
        {"value_mode": "value_bias", "value_scale": -2.0},
        {"target_length": 30, "gamma": 0.99},
        TILT,
        {"target_length": 3, "op": "ge"},
        {"value_scale": 0.9, "value_entropy_threshold": 9.0},
    ]
    requests = [Request(str(i), prompt_of(4 + 7 * i, 100 + i), p, top_k=4 + i) for i, p in enumerate(params)]
    theirs = object.__new__(fork.Original)
    theirs._inproc, theirs._fn = Provider(plain), fork.module.lvm_combined_guidance
    before, after = engine.prefill(requests, [6, 1, 3, 0, 5])
    for step in range(5):
        for i, request in enumerate(requests):
            sampling = request.sampling_params
            filters = torch.ones(1, 1), torch.ones(1), torch.tensor([sampling.top_k]), torch.zeros(1)
            alone = theirs.apply(before[i : i + 1].clone(), [request], *filters)
            expected = with_own_filters(request, before[i]) if alone is None else alone[0]
            torch.testing.assert_close(after[i], expected, rtol=0, atol=ATOL)
        engine.draw(requests, after)
        requests = requests[1:] + requests[:1] if step % 2 else requests[::-1]
        before, after = engine.decode(requests)


def test_the_forks_sampler_draws_by_it(fork, plain, monkeypatch):
    """The fork's whole sampler: a strong tilt leaves it the candidate with the least value."""
    module = sys.modules["sglang.srt.layers.sampler"]
    args = SimpleNamespace(rl_on_policy_target=None, sampling_backend="pytorch")
    monkeypatch.setattr(module, "get_global_server_args", lambda: args)
    engine = Engine(sys.modules, monkeypatch, plain.path)
    sampler = module.Sampler.__new__(module.Sampler)
    torch.nn.Module.__init__(sampler)
    sampler.use_nan_detection, sampler.lvm_guided_sampler = False, engine.guided_sampler
    drawn = []

    def forward(logits_output, info, *arguments):
        flags = dict.fromkeys(("is_all_greedy", "need_top_p_sampling", "need_min_p_sampling"), False)
        given = dict(need_top_k_sampling=True, has_custom_logit_processor=False, sampling_seed=None, grammars=None)
        vars(info).update(flags | given)
        drawn.append(sampler.forward(logits_output, info, *arguments))
        return drawn[-1]

    forward.lvm_guided_sampler, forward.result = engine.guided_sampler, None
    engine.model_runner.sampler = forward
    strong = {"value_mode": "centered_exp", "value_scale": -1e5}
    requests = [Request("a", prompt_of(9, 110), strong, top_k=5), Request("b", prompt_of(3, 111), None, top_k=2)]
    for step in range(4):
        scores, _ = engine.decode(requests) if step else engine.prefill(requests, [4, 2])
        best = [row.topk(k).indices.tolist() for row, k in zip(scores, (5, 2), strict=True)]
        values = plain.after(requests[0].tokens).clone()
        values[EOS] = -torch.inf
        assert drawn[-1][0] == min(best[0], key=lambda token: values[token].item())
        assert drawn[-1][1] in best[1]
        for request, token in zip(requests, drawn[-1].tolist(), strict=True):
            request.tokens.append(token)


# --- loading ---


def test_the_value_model_is_loaded_at_the_start(make, monkeypatch):
    """From the fork's option, in the base model's dtype, with the settings of the environment but for the model."""
    monkeypatch.setenv("LENVM_VALUE_MODEL", "/nowhere")
    engine = make()
    step = engine.runner.step
    config = step.config
    assert (config.max_candidates, config.max_requests, config.vocab_size, config.max_delta) == (64, 5, VOCAB, 16)
    assert step.value_model.dtype == torch.float32 and step.table.columns.eos_token_ids.shape == (8, 64)
    assert engine.runner.slots.table.shape == (7, 6) and engine.runner.slots.num_slots == 5 * 96
    assert engine.asked_memory == [(("cpu", 0), {"distributed": False, "cpu_group": None})] * 2

    for name, value in dict(MAX_CANDIDATES=8, VALUE_STRIDE=3, CHUNK_TOKENS=7, DTYPE="bfloat16").items():
        monkeypatch.setenv(f"LENVM_{name}", str(value))
    step = make().runner.step
    assert (step.config.max_candidates, step.config.value_stride, step.values._chunk_tokens) == (8, 3, 7)
    assert step.value_model.dtype == torch.bfloat16


def test_the_gamma_of_the_value_model_is_that_of_requests_without(make, plain, tmp_path):
    for file in plain.path.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "lenvm_config.json").write_text(json.dumps({"gamma": 0.9}))
    engine = make(tmp_path)
    target = {"target_length": 6, "op": "eq_soft"}
    request = Request("a", prompt_of(4, 120), target)
    before, after = engine.prefill([request], [3])
    request.sampling_params.custom_params = {**target, "gamma": 0.9}
    engine.check([request], before, after)


def test_memory(make, monkeypatch):
    """The option's share of what was free, without what the weights took; all ranks take the least of them."""
    free, weights, fraction = 2_500_000, 400_000, 0.7
    options = dict(lvm_guided_inproc_mem_fraction_static=fraction, free=[free, free - weights])
    sizes_of_engine = dict(max_requests=30, rows=31)
    monkeypatch.setenv("LENVM_MAX_CANDIDATES", "4")
    monkeypatch.setenv("LENVM_CHUNK_TOKENS", "64")
    engine = make(**sizes_of_engine, **options)
    model, sizes = engine.runner.step.value_model, dict(requests=30, max_len=90, vocab_size=VOCAB)
    taken = working_bytes(model, **sizes, max_candidates=4) + working_bytes(model, **sizes, tokens=64)
    room = fraction * free - weights - taken
    slots = engine.runner.slots.num_slots
    assert PAGE < slots < 30 * 90
    assert KVCache.num_bytes(model, slots) <= room < KVCache.num_bytes(model, slots + PAGE)

    options["free"] = [free, free - 1_700_000]
    with pytest.raises(ValueError, match=r"--lvm-guided-inproc-mem-fraction-static leaves 0\.00 GiB"):
        make(**sizes_of_engine, **options)

    # Without the option, the share of the base model's.
    options = dict(
        lvm_guided_inproc_mem_fraction_static=None, mem_fraction_static=fraction, free=[free, free - weights]
    )
    assert make(**sizes_of_engine, **options).runner.slots.num_slots == slots


def test_ranks_ask_for_the_memory_of_all(engine):
    engine.model_runner.tp_group = SimpleNamespace(world_size=2, cpu_group="group")
    engine.asked_memory.clear()
    engine.model_runner.initialize(0.0)
    assert engine.asked_memory == [(("cpu", 0), {"distributed": True, "cpu_group": "group"})] * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(lvm_guided_inproc_model_path="/nowhere"), "--lvm-guided-inproc-model-path must be an existing directory"),
        (
            dict(lvm_guided_inproc_json_model_override_args='{"architectures": ["X"], "rope_theta": 3}'),
            "--lvm-guided-inproc-json-model-override-args must name nothing but architectures, got architectures, r",
        ),
    ],
)
def test_bad_options_end_the_start(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_overridden_architectures_change_nothing(make):
    for text in ('{"architectures": ["Qwen3ForLengthValueModel"]}', "", None):
        assert make(lvm_guided_inproc_json_model_override_args=text).runner is not None


@pytest.mark.parametrize(
    "options",
    [
        dict(lvm_guided_inproc=False),  # a value server
        dict(lvm_guided_inproc_model_path=None),
        dict(function=min),  # one's own
        dict(is_draft_worker=True),
    ],
)
def test_everything_else_is_left_to_the_fork(make, monkeypatch, options):
    """Nothing is loaded, and the fork's own way of applying guidance is taken."""
    engine = make(**options)
    assert engine.runner is None
    calls = []
    original = f"{GUIDED_SAMPLING}:LvmGuidedSampler.apply"
    monkeypatch.setitem(sglang_fork._originals, original, lambda *args: calls.append(args))
    assert engine.prefill([Request("a", prompt_of(4, 130), TILT)], [3])[1] is None
    assert len(calls) == 1 and calls[0][0] is engine.guided_sampler and len(calls[0]) == 7


def test_without_guidance_the_start_is_the_forks(modules, engine, monkeypatch):
    """A server without ``--enable-lvm-guided-sampling`` has no sampler of guidance."""
    engine.model_runner.sampler = SimpleNamespace(lvm_guided_sampler=None)
    calls = []
    for name in ("initialize", "sample"):
        monkeypatch.setitem(
            sglang_fork._originals, f"{RUNNER}:ModelRunner.{name}", lambda *args, name=name: calls.append((name, args))
        )
    engine.model_runner.initialize(3.0)
    engine.model_runner.sample("logits", "batch")
    runner = engine.model_runner
    assert calls == [("initialize", (runner, 3.0)), ("sample", (runner, "logits", "batch"))]
    assert MEMORY in modules
