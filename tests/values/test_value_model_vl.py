"""Qwen2.5-VL value models with images in prompts, against plain forwards of ``transformers`` on tiny checkpoints."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2_5_VLForConditionalGeneration

from lenvm_kernels.engines.transformers.processor import LenVMLogitsProcessor
from lenvm_kernels.types import Status
from lenvm_kernels.values import ImageTokens, KVCache, RaggedBatch, ValueModel, ValueModelConfig, image_positions
from lenvm_kernels.values.images import image_sizes
from tests.helpers.drafts import make_drafts
from tests.helpers.engine import GUIDANCE, TILT, Engine, make_step
from tests.helpers.models import EOS, HIDDEN, IMAGE, VIDEO, VOCAB, random_head, random_model, value_logits, vl_config
from tests.helpers.step_models import ATOL, StepModels

MERGE = 2
# Patch grids of images of 2 x 3, 4 x 1, 1 x 2 and 3 x 3 tokens.
GRIDS = torch.tensor([[1, 4, 6], [1, 8, 2], [1, 2, 4], [1, 6, 6]])
SIZES = [6, 4, 2, 9]


def image(i):
    return [IMAGE] * SIZES[i]


# Images between text; no image; an image at the beginning; two images.
PROMPTS = [
    [5, 6, 7, *image(0), 8, 9, *image(1), 10, 11, 12],
    [13, 14],
    [*image(2), 15],
    [16, *image(3), 29, *image(2), 17, 18, 19, 20, 21, 22, 23],
]
IMAGES_OF = [[0, 1], [], [2], [3, 2]]


def pixels(of_images, seed):
    """Random pixels and the grids of the given images."""
    grids = GRIDS[of_images]
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(int(grids.prod(1).sum()), 3 * 2 * 4 * 4, generator=generator), grids


PIXELS = [pixels(of_images, seed=i) for i, of_images in enumerate(IMAGES_OF)]
ALL_PIXELS = torch.cat([of_prompt for of_prompt, _ in PIXELS])
ALL_GRIDS = torch.cat([grids for _, grids in PIXELS])
IMAGES = dict(pixel_values=ALL_PIXELS, image_grid_thw=ALL_GRIDS)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A backbone of ``transformers``, its head, and the value model loaded from their checkpoint."""
    path = tmp_path_factory.mktemp("vl")
    backbone, head = random_model(Qwen2_5_VLForConditionalGeneration, vl_config()), random_head()
    backbone.save_pretrained(path)
    save_file(head, path / "value_head.safetensors")
    return SimpleNamespace(path=path, backbone=backbone, head=head, value=ValueModel.from_pretrained(path))


def expected_values(models, prompt, more):
    """Value logits at the tokens ``more`` that follow prompt number ``prompt``."""
    tokens = torch.tensor([[*PROMPTS[prompt], *more]])
    images = {}
    if IMAGES_OF[prompt]:
        pixel_values, grids = PIXELS[prompt]
        images = dict(pixel_values=pixel_values, image_grid_thw=grids, mm_token_type_ids=(tokens == IMAGE).int())
    return value_logits(models.backbone, models.head, tokens, **images)[0, len(PROMPTS[prompt]) :]


def images_of(models, order):
    """Tokens of prompts in the given order, their :class:`ImageTokens`, and the index of each prompt's first token."""
    flat = [token for i in order for token in PROMPTS[i]]
    is_image = torch.tensor(flat) == IMAGE
    sizes = iter(image_sizes(torch.cat([PIXELS[i][1] for i in order]), MERGE))
    positions = [image_positions(torch.tensor(PROMPTS[i]) == IMAGE, sizes) for i in order]
    assert next(sizes, None) is None
    pixel_values, grids = (torch.cat(x) for x in zip(*(PIXELS[i] for i in order), strict=True))
    embeds = models.value.embed_images(pixel_values, grids)
    rows = torch.where(is_image, is_image.cumsum(0) - 1, -1)
    starts = [sum(len(PROMPTS[j]) for j in order[: order.index(i)]) for i in range(len(PROMPTS))]
    return flat, ImageTokens(torch.cat(positions, dim=1), rows, embeds), starts


def images_of_prefill(models, prompt):
    """:class:`ImageTokens` of a prompt for ``Engine.prefill``: one unused token, then all tokens but the last."""
    _, images, starts = images_of(models, [0, 1, 2, 3])
    told = [0, *range(starts[prompt], starts[prompt] + len(PROMPTS[prompt]) - 1)]
    return images._replace(positions=images.positions[:, told], rows=images.rows[told])


@pytest.fixture(scope="module")
def text_only():
    """A text-only backbone, its head, and the value model of both."""
    return StepModels()


# --- checkpoints ---

NAMINGS = {
    "hub": lambda name: name,
    "transformers": lambda name: (
        f"model.{name}" if name.startswith("visual.") else name.replace("model.", "model.language_model.", 1)
    ),
    "trainer": lambda name: f"pretrained_model.{name}",
}


@pytest.mark.parametrize("naming", NAMINGS.values(), ids=NAMINGS)
def test_vision_tower_of_checkpoint(models, tmp_path, naming):
    tensors = {naming(name): tensor for name, tensor in load_file(models.path / "model.safetensors").items()}
    (tmp_path / "config.json").write_text((models.path / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    before = torch.get_rng_state()
    value = ValueModel.from_pretrained(tmp_path, models.head)
    actual = value.embed_images(ALL_PIXELS, ALL_GRIDS)
    assert torch.equal(torch.get_rng_state(), before)  # the caller's random state is unchanged
    expected = models.backbone.model.get_image_features(ALL_PIXELS, ALL_GRIDS).pooler_output
    torch.testing.assert_close(actual, torch.cat(expected), rtol=0, atol=1e-5)
    assert actual.shape == (6 + 4 + 2 + 9 + 2, HIDDEN) and not actual.requires_grad


def test_flat_configuration_of_hub(models):
    config = json.loads((models.path / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    flat = config | text | dict(model_type="qwen2_5_vl", rope_theta=rope["rope_theta"], tie_word_embeddings=True)
    flat["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    read = ValueModelConfig.from_hf(type(models.backbone.config)(**flat))
    assert read == ValueModelConfig.from_hf(models.backbone.config).__class__(
        **{**vars(models.value.config), "tied_embeddings": True}
    )
    assert read.mrope_sections == (1, 2, 3) and (read.image_token_id, read.video_token_id) == (IMAGE, VIDEO)


def test_dtype_of_the_vision_tower(models):
    value = ValueModel.from_pretrained(models.path, dtype=torch.bfloat16)
    actual = value.embed_images(ALL_PIXELS, ALL_GRIDS)
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.float(), models.value.embed_images(ALL_PIXELS, ALL_GRIDS), rtol=0.1, atol=0.1)


def test_checkpoint_without_vision_tower_reads_text(models):
    tensors = {n: t for n, t in models.backbone.state_dict().items() if "visual." not in n} | models.head
    value = ValueModel(ValueModelConfig.from_hf(models.backbone.config), tensors)
    with pytest.raises(ValueError, match="value_model must be a vision-language model with its vision tower"):
        value.embed_images(ALL_PIXELS, ALL_GRIDS)
    engine = Engine(*make_step(value)).start([3], [PROMPTS[1]], [TILT])
    check_step(models, engine, [3], [1], [[]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.visual.merger.mlp.0.bias"), r"missing \['merger.mlp.0.bias'\], unexpected \[\]"),
        (lambda t: t.update({"model.visual.a": torch.zeros(1)}), r"missing \[\], unexpected \['a'\]"),
    ],
)
def test_broken_vision_towers_are_rejected(models, change, message):
    tensors = models.backbone.state_dict() | models.head
    change(tensors)
    value = ValueModel(ValueModelConfig.from_hf(models.backbone.config), tensors)
    with pytest.raises(ValueError, match=f"the tensors do not fit the vision tower: {message}"):
        value.embed_images(ALL_PIXELS, ALL_GRIDS)


def test_vision_tensors_of_other_architectures_are_rejected(text_only):
    tensors = text_only.backbone.state_dict() | text_only.head | {"visual.a": torch.zeros(1)}
    with pytest.raises(ValueError, match=r"unexpected visual\.a"):
        ValueModel(ValueModelConfig.from_hf(text_only.backbone.config), tensors)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({}, r"mrope_section must be three numbers, got \[\]"),
        ({"mrope_section": [1, 5]}, r"mrope_section must be three numbers, got \[1, 5\]"),
        ({"mrope_section": [1, 2, 4]}, r"mrope_section must add up to half of head_dim, 6, got \[1, 2, 4\]"),
    ],
)
def test_invalid_mrope_sections_are_rejected(rope, message):
    config = vl_config(rope_parameters={"rope_type": "default", "rope_theta": 1e4} | rope)
    with pytest.raises(ValueError, match=message):
        ValueModelConfig.from_hf(config)


def test_pixels_that_do_not_match_their_grid_are_rejected(models):
    accepted = r"pixel_values must be \[92, 96\], a row for each patch of image_grid_thw, got "
    for wrong in (ALL_PIXELS[1:], ALL_PIXELS[:, 1:], ALL_PIXELS.flatten()):
        with pytest.raises(ValueError, match=accepted):
            models.value.embed_images(wrong, ALL_GRIDS)


# --- positions ---


@pytest.mark.parametrize("prompt", range(len(PROMPTS)))
def test_positions_are_shifted_to_end_at_prompt_length(models, prompt):
    tokens = torch.tensor([PROMPTS[prompt]])
    is_image = tokens == IMAGE
    of_prompt, further = image_sizes(GRIDS[IMAGES_OF[prompt]], MERGE), (1, 7, 7)
    sizes = iter([*of_prompt, further])
    found = image_positions(is_image[0], sizes)
    expected, moved = models.backbone.model.get_rope_index(tokens, is_image.int(), GRIDS[IMAGES_OF[prompt]])
    assert torch.equal(found, expected[:, 0] - moved[0])
    assert found[:, -1].tolist() == [tokens.shape[1] - 1] * 3
    assert list(sizes) == [further]


@pytest.mark.parametrize(
    ("tokens", "sizes", "message"),
    [
        ([1, IMAGE, IMAGE], [(1, 1, 2)], "a prompt must end with text, got one that ends with an image"),
        (
            [IMAGE, IMAGE, 1, IMAGE, 1],
            [(1, 2, 1)],
            "images must be given for all their tokens in prompts, 1 tokens are left",
        ),
        ([1, IMAGE, 1, IMAGE, 1], [(1, 2, 1)], r"an image of \(1, 2, 1\) must have 2 tokens .* in a row from token 1"),
        ([1, 1, IMAGE, 1], [(1, 2, 1)], r"an image of \(1, 2, 1\) must have 2 tokens .* in a row from token 2"),
    ],
)
def test_prompts_that_do_not_match_their_images_are_rejected(tokens, sizes, message):
    with pytest.raises(ValueError, match=message):
        image_positions(torch.tensor(tokens) == IMAGE, iter(sizes))


# --- the forward ---


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_images_and_candidates_in_one_forward(models, backend):
    """Whole prompts, out of order and with a gap in between, and their candidates."""
    prompts, candidates = [3, 1, 0, 2], [[31, 32, 33], [34], [35, 36], [37, 38, 39, 40]]
    order = [2, 0, 3, 1]
    flat, images, starts = images_of(models, order)
    value, i32 = models.value, lambda x: torch.tensor(x, dtype=torch.int32)
    table = torch.randperm(5 * 32, generator=torch.Generator().manual_seed(0)).view(5, 32).int()
    table_rows = [4, 0, 2, 1]
    slots = torch.zeros(len(flat), dtype=torch.int32)
    for row, i in zip(table_rows, prompts, strict=True):
        slots[starts[i] : starts[i] + len(PROMPTS[i])] = table[row, : len(PROMPTS[i])]
    batch = RaggedBatch.build(
        i32(flat),
        slots,
        i32([starts[i] for i in prompts]),
        i32([len(PROMPTS[i]) for i in prompts]),
        i32([[*candidates[i], *[-1] * (4 - len(candidates[i]))] for i in prompts]),
        i32([len(candidates[i]) for i in prompts]),
        i32([0] * 4),
        table,
        i32(table_rows),
        images=images,
        backend=backend,
    )
    z = value.forward(batch, KVCache.of_slots(value, 5 * 32), backend=backend)
    for row, i in zip(z, prompts, strict=True):
        expected = torch.stack([expected_values(models, i, [token])[0] for token in candidates[i]])
        torch.testing.assert_close(row[: len(expected)], expected, rtol=0, atol=ATOL)


@pytest.mark.parametrize("outside", [-3, VOCAB])
def test_tokens_outside_vocabulary(models, outside):
    """Image tokens may have any id, as in SGLang. Other ids outside the vocabulary give NaN in their request."""
    flat, images, starts = images_of(models, [0, 1, 2, 3])
    flat = [VOCAB + 1000 if token == IMAGE else token for token in flat]
    flat[starts[1]] = outside
    i32 = lambda x: torch.tensor(x, dtype=torch.int32)  # noqa: E731
    lens = [len(prompt) for prompt in PROMPTS]
    slots = torch.arange(4 * 32, dtype=torch.int32).view(4, 32)
    of_tokens = torch.cat([row[:n] for row, n in zip(slots, lens, strict=True)])
    sequences = (i32(flat), of_tokens, i32(starts), i32(lens), i32([[30]] * 4), i32([1] * 4), i32([0] * 4), slots)
    batch = RaggedBatch.build(*sequences, i32([0, 1, 2, 3]), images=images)
    z = models.value.forward(batch, KVCache.of_slots(models.value, 4 * 32))[:, 0]
    expected = torch.stack([expected_values(models, i, [30])[0] for i in range(4)])
    expected[1] = torch.nan
    torch.testing.assert_close(z, expected, rtol=0, atol=ATOL, equal_nan=True)


# --- steps ---


def check_step(models, engine, rows, prompts, more, **options):
    """Check values of one step after ``prompts`` and ``more`` tokens against plain forwards; returns drawn tokens."""
    sequences = [[*PROMPTS[i], *tokens] for i, tokens in zip(prompts, more, strict=True)]
    scores = torch.stack([torch.randn(VOCAB, generator=torch.Generator().manual_seed(len(s))) * 2 for s in sequences])
    output = engine.decode(rows, sequences, scores, **options)
    assert (output.candidates.status == Status.GUIDE).all()
    for i, tokens, candidates, z in zip(prompts, more, output.candidates.token_ids, output.value_logits, strict=True):
        for token, value in zip(candidates.tolist(), z.tolist(), strict=True):
            if token >= 0:
                assert abs(value - expected_values(models, i, [*tokens, token])[-1]) < ATOL
    return output.tokens.tolist()


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("chunk_tokens", [7, 4096])
def test_values_of_steps_after_image_prompts(models, backend, chunk_tokens):
    """Prompts in chunks that split images, then steps after candidates and after other tokens."""
    options = dict(chunk_tokens=chunk_tokens, backend=backend)
    step, slots = make_step(models.value, max_candidates=4, **options)
    engine, rows, order = Engine(step, slots), [6, 0, 3, 2], [3, 1, 0, 2]
    for row, i in zip(rows, order, strict=True):
        engine.admit(row, [*PROMPTS[i], *[0] * 8], TILT, prompt_len=len(PROMPTS[i]))
    flat, images, starts = images_of(models, [0, 1, 2, 3])
    where = [(rows[order.index(i)], p) for i in range(4) for p in range(len(PROMPTS[i]))]
    of_rows, positions = (engine.tensor(x) for x in zip(*where, strict=True))
    step.extend(
        engine.tensor(flat),
        slots.slots(of_rows, positions),
        engine.tensor(rows),
        engine.tensor([starts[i] for i in order]),
        engine.tensor([len(PROMPTS[i]) - 1 for i in order]),
        engine.tensor([0] * 4),
        images=images,
    )
    more = [[] for _ in order]
    for number in range(4):
        tokens = check_step(models, engine, rows, order, more)
        tokens[number] = 50 + number  # may be no candidate
        more = [[*m, t] for m, t in zip(more, tokens, strict=True)]
    assert not step.table.columns.faults.any()


def test_drafts_after_image(models):
    """Values at the nodes of a tree."""
    parents = [-1, 0, -1, 1]
    engine = Engine(*make_step(models.value, max_candidates=4, max_drafts=4, max_delta=8))
    engine.start([5], PROMPTS[3:], [TILT], room=8, images=images_of_prefill(models, 3))
    paths = [[], [41], [41, 42], [43], [41, 42, 44]]
    scores = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(1)) * 2
    drafts = make_drafts([[41, 42, 43, 44]], [parents])
    output = engine.decode([5], PROMPTS[3:], scores, new=[1], drafts=drafts, top_k=4, min_p=0.0)
    for path, candidates, z in zip(paths, output.candidates.token_ids.tolist(), output.value_logits, strict=True):
        expected = torch.stack([expected_values(models, 3, [*path, token])[-1] for token in candidates])
        torch.testing.assert_close(z, expected, rtol=0, atol=ATOL)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_images_do_not_change_values_of_other_requests(models, backend):
    """The tokens are computed in one forward; kernel results are bitwise identical."""

    def values(images, rows, prompts):
        engine = Engine(*make_step(models.value, max_candidates=4, backend=backend))
        engine.start(rows, prompts, [TILT] * len(rows), **images)
        sequences, scores = prompts[-1:], torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(2))
        return engine.decode(rows[-1:], sequences, scores).value_logits

    text, of_prompt = [24, 25, 26, 27, 28], images_of_prefill(models, 2)
    positions = torch.cat([of_prompt.positions, torch.arange(4).expand(3, 4)], dim=1)
    images = ImageTokens(positions, torch.cat([of_prompt.rows, torch.full((4,), -1)]), of_prompt.embeds)
    beside, alone = values(dict(images=images), [1, 4], [PROMPTS[2], text]), values({}, [4], [text])
    torch.testing.assert_close(beside, alone, rtol=0, atol=0 if backend == "triton" else ATOL)


def test_extend_rejects_bad_images(models, text_only):
    step, of_text = make_step(models.value)[0], make_step(text_only.value)[0]
    i32 = lambda *x: torch.tensor(x, dtype=torch.int32)  # noqa: E731
    request = (i32(5, 6), i32(0, 1), i32(0), i32(0), i32(2), i32(0))
    good = ImageTokens(torch.zeros(3, 2).long(), torch.tensor([0, -1]), torch.zeros(1, HIDDEN))
    step.extend(*request, images=good)
    with pytest.raises(ValueError, match="images must be None unless the value model is a vision-language model"):
        of_text.extend(*request, images=good)
    for field, wrong in (
        ("positions", torch.zeros(2, 2).long()),
        ("positions", torch.zeros(3, 2).int()),
        ("rows", torch.tensor([0, -1, -1])),
        ("embeds", torch.zeros(1, HIDDEN + 1)),
        ("embeds", torch.zeros(1, HIDDEN, dtype=torch.bfloat16)),
    ):
        with pytest.raises(ValueError, match=rf"images\.{field} must "):
            step.extend(*request, images=good._replace(**{field: wrong}))


def test_scaled_rope_frequencies():
    """YaRN, which also scales cosine and sine."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    config = vl_config(rope_parameters=yarn | {"rope_theta": 1e4, "mrope_section": [3, 1, 2]})
    backbone, head = random_model(Qwen2_5_VLForConditionalGeneration, config, seed=4), random_head()
    scaled = SimpleNamespace(backbone=backbone, head=head, value=ValueModel.from_causal_lm(backbone, head))
    assert scaled.value.config.rope_scale > 1.1
    engine = Engine(*make_step(scaled.value, max_candidates=4))
    engine.start([1], PROMPTS[:1], [TILT], images=images_of_prefill(scaled, 0))
    check_step(scaled, engine, [1], [0], [[]])


# --- the adapter of transformers ---


@pytest.fixture(scope="module")
def base():
    return random_model(Qwen2_5_VLForConditionalGeneration, vl_config(), seed=7)


def padded(prompts):
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return dict(input_ids=ids, attention_mask=mask)


def processor_of(base, value_model, inputs, guidance=TILT, **options):
    options = {"max_new_tokens": 2, "record": True} | options
    return LenVMLogitsProcessor(base, value_model, guidance, inputs["attention_mask"], **options)


@pytest.mark.parametrize("guidance", [TILT, TILT | {"value_stride": 3}, [GUIDANCE[2], TILT, None, TILT]])
def test_generate_with_images(models, base, guidance):
    """Values of every step after left-padded prompts with two images, none and one."""
    inputs = padded(PROMPTS)
    processor = processor_of(base, models.value, inputs, guidance, max_new_tokens=7, top_k=4, **IMAGES)
    torch.manual_seed(0)
    mm = dict(mm_token_type_ids=(inputs["input_ids"] == IMAGE).int())
    output = base.generate(**inputs, **IMAGES, **mm, **processor.generation_kwargs, pad_token_id=0)
    width, checked = inputs["input_ids"].shape[1], [0] * len(PROMPTS)
    for step, record in enumerate(processor.records):
        for i in range(len(PROMPTS)):
            more = output[i, width : width + step].tolist()
            if EOS in more:
                continue
            for token, z in zip(record.candidates.token_ids[i].tolist(), record.value_logits[i].tolist(), strict=True):
                if token >= 0 and z != 0:
                    assert abs(z - expected_values(models, i, [*more, token])[-1]) < 1e-4
                    checked[i] += 1
    is_guided = [g is not None for g in (guidance if isinstance(guidance, list) else [guidance] * 4)]
    assert [n > 6 for n in checked] == is_guided
    assert processor.faults == [0] * 4


def test_padding_may_have_the_image_token_id(models, base):
    """Masked tokens are neither images nor text."""
    inputs = padded(PROMPTS)
    values = []
    for ids in (inputs["input_ids"], inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, IMAGE)):
        processor = processor_of(base, models.value, inputs, max_new_tokens=1, **IMAGES)
        processor(ids, torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0)))
        values.append(processor.records[0].value_logits)
    torch.testing.assert_close(*values, rtol=0, atol=ATOL)
    assert (values[0] != 0).all()


@pytest.mark.parametrize(
    ("prompts", "images", "message"),
    [
        (PROMPTS, None, "pixel_values and image_grid_thw must be given: prompts hold tokens of images"),
        (PROMPTS[:3], range(4), "image_grid_thw must be of the images in prompts, got 2 more"),
        (PROMPTS, range(3), "images must be given for all their tokens in prompts, 11 tokens are left"),
        ([[1, VIDEO, 2]], None, "prompts must hold no videos, got tokens of one"),
        ([[1, *image(2)]], [2], "a prompt must end with text"),
    ],
)
def test_processor_rejects_bad_prompts(models, base, prompts, images, message):
    inputs, options = padded(prompts), {}
    if images is not None:
        pixel_values, grids = zip(*(PIXELS[i] for i in images), strict=True)
        options = dict(pixel_values=torch.cat(pixel_values), image_grid_thw=torch.cat(grids))
    processor = processor_of(base, models.value, inputs, **options)
    with pytest.raises(ValueError, match=message):
        processor(inputs["input_ids"], torch.zeros(len(prompts), VOCAB))


def test_processor_rejects_bad_images(models, text_only, base):
    inputs, (pixel_values, grids) = padded(PROMPTS[:1]), PIXELS[0]
    for value, options, message in (
        (models.value, dict(pixel_values=pixel_values), "must be given together"),
        (models.value, dict(image_grid_thw=grids), "must be given together"),
        (text_only.value, dict(pixel_values=pixel_values, image_grid_thw=grids), "must be a vision-language model"),
    ):
        with pytest.raises(ValueError, match=message):
            processor_of(base, value, inputs, **options)


def test_text_only_value_model_reads_images_as_text(text_only, base):
    """Without images as arguments, image tokens are ordinary tokens."""
    inputs = padded(PROMPTS[2:3])
    processor = processor_of(base, text_only.value, inputs, max_new_tokens=1)
    processor(inputs["input_ids"], torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0)))
    token, z = processor.records[0].candidates.token_ids[0, 0].item(), processor.records[0].value_logits[0, 0]
    torch.testing.assert_close(z, text_only.values([[*PROMPTS[2], token]])[0], rtol=0, atol=ATOL)
