"""Qwen2.5-VL value models with images in prompts, against plain forwards of ``transformers`` on tiny checkpoints."""

import json
from dataclasses import replace
from functools import partial
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2_5_VLForConditionalGeneration

from lenvm_kernels.engines.transformers.processor import LenVMLogitsProcessor
from lenvm_kernels.types import Status
from lenvm_kernels.values import ImageTokens, ValueModel, ValueModelConfig, image_positions
from lenvm_kernels.values.images import image_sizes
from tests.helpers.engine import ATOL, GUIDANCE, TILT, Engine, StepModels, make_step
from tests.helpers.models import EOS, HIDDEN, IMAGE, VIDEO, VOCAB, random_head, random_model, value_logits, vl_config
from tests.helpers.value_requests import Requests

MERGE = 2
# Patch grids of images of 2 x 3, 4 x 1, 1 x 2 and 3 x 3 tokens.
GRIDS = torch.tensor([[1, 4, 6], [1, 8, 2], [1, 2, 4], [1, 6, 6]])
IMAGE_TOKENS = [[IMAGE] * count for count in (6, 4, 2, 9)]
# Images between text; no image; an image at the beginning; two images.
PROMPTS = [
    [5, 6, 7, *IMAGE_TOKENS[0], 8, 9, *IMAGE_TOKENS[1], 10, 11, 12],
    [13, 14],
    [*IMAGE_TOKENS[2], 15],
    [16, *IMAGE_TOKENS[3], 29, *IMAGE_TOKENS[2], 17, 18, 19, 20, 21, 22, 23],
]
IMAGES_OF = [[0, 1], [], [2], [3, 2]]
STARTS = [0, *accumulate(map(len, PROMPTS))][:4]
FLAT = [token for prompt in PROMPTS for token in prompt]


def pixels(of_images, seed):
    """Random pixels and the grids of the given images."""
    grids = GRIDS[of_images]
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(int(grids.prod(1).sum()), 3 * 2 * 4 * 4, generator=generator), grids


PIXELS = [pixels(of_images, seed=i) for i, of_images in enumerate(IMAGES_OF)]
ALL_PIXELS, ALL_GRIDS = (torch.cat(part) for part in zip(*PIXELS, strict=True))
IMAGES = dict(pixel_values=ALL_PIXELS, image_grid_thw=ALL_GRIDS)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A backbone of ``transformers``, its head, the value model of their checkpoint with the images of all prompts, a
    text-only value model, and a base model. YaRN also scales cosine and sine."""
    path, yarn = tmp_path_factory.mktemp("vl"), {"rope_type": "yarn", "original_max_position_embeddings": 16}
    rope = yarn | {"factor": 4.0, "rope_theta": 1e4, "mrope_section": [3, 1, 2]}
    backbone, head = random_model(Qwen2_5_VLForConditionalGeneration, vl_config(rope_parameters=rope)), random_head()
    backbone.save_pretrained(path)
    save_file(head, path / "value_head.safetensors")
    value, base = ValueModel.from_pretrained(path), random_model(type(backbone), vl_config(), seed=7)
    return SimpleNamespace(
        path=path,
        backbone=backbone,
        head=head,
        value=value,
        images=images_of(value),
        text=StepModels().value,
        base=base,
    )


def images_of(value_model):
    is_image, sizes = torch.tensor(FLAT) == IMAGE, iter(image_sizes(ALL_GRIDS, MERGE))
    positions = [image_positions(torch.tensor(prompt) == IMAGE, sizes) for prompt in PROMPTS]
    rows = torch.where(is_image, is_image.cumsum(0) - 1, -1)
    return ImageTokens(torch.cat(positions, dim=1), rows, value_model.embed_images(ALL_PIXELS, ALL_GRIDS))


def of_prefill(images, prompt):
    """The images of a prompt for ``Engine.prefill``: one unused token, then all tokens except the last."""
    which = [0, *range(STARTS[prompt], STARTS[prompt] + len(PROMPTS[prompt]) - 1)]
    return images._replace(positions=images.positions[:, which], rows=images.rows[which])


def expected_values(models, prompt, more):
    """Value logits at the tokens ``more`` after prompt number ``prompt``."""
    tokens = torch.tensor([[*PROMPTS[prompt], *more]])
    options = {}
    if IMAGES_OF[prompt]:
        pixel_values, grids = PIXELS[prompt]
        options = dict(pixel_values=pixel_values, image_grid_thw=grids, mm_token_type_ids=(tokens == IMAGE).int())
    return value_logits(models.backbone, models.head, tokens, **options)[0, len(PROMPTS[prompt]) :]


NAMINGS = {
    "hub": lambda name: name,
    "transformers": lambda name: (
        f"model.{name}" if name.startswith("visual.") else name.replace("model.", "model.language_model.", 1)
    ),
    "trainer": lambda name: f"pretrained_model.{name}",
}


@pytest.mark.parametrize("naming", NAMINGS.values(), ids=NAMINGS)
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_vision_tower_of_checkpoint(models, tmp_path, naming, dtype, atol):
    tensors = {naming(name): tensor for name, tensor in load_file(models.path / "model.safetensors").items()}
    (tmp_path / "config.json").write_text((models.path / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    before = torch.get_rng_state()
    actual = ValueModel.from_pretrained(tmp_path, models.head, dtype=dtype).embed_images(ALL_PIXELS, ALL_GRIDS)
    assert torch.equal(torch.get_rng_state(), before)  # the caller's random state is unchanged
    expected = torch.cat(models.backbone.model.get_image_features(ALL_PIXELS, ALL_GRIDS).pooler_output)
    torch.testing.assert_close(actual.float(), expected, rtol=0.1 if atol == 0.1 else 0, atol=atol)
    assert actual.shape == (6 + 4 + 2 + 9 + 2, HIDDEN) and actual.dtype == dtype and not actual.requires_grad


def test_flat_configuration_of_hub():
    nested = vl_config()
    config = json.loads(nested.to_json_string())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    flat = config | text | dict(model_type="qwen2_5_vl", rope_theta=rope["rope_theta"], tie_word_embeddings=True)
    flat["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    read = ValueModelConfig.from_hf(type(nested)(**flat))
    assert read == replace(ValueModelConfig.from_hf(nested), tied_embeddings=True)
    assert read.mrope_sections == (1, 2, 3) and (read.image_token_id, read.video_token_id) == (IMAGE, VIDEO)


TOWER = "the tensors do not fit the vision tower"
BIAS = "visual.merger.mlp.0.bias"


@pytest.mark.parametrize(
    ("without", "more", "message"),
    [
        ("visual.", {}, "value_model must be a vision-language model with a vision tower"),
        (BIAS, {}, rf"{TOWER}: missing \['merger.mlp.0.bias'\], unexpected \[\]"),
        ("none", {"model.visual.a": torch.zeros(1)}, rf"{TOWER}: missing \[\], unexpected \['a'\]"),
    ],
)
def test_checkpoint_with_broken_vision_tower_reads_text_only(models, without, more, message):
    tensors = {name: x for name, x in models.backbone.state_dict().items() if without not in name} | models.head | more
    value = ValueModel(ValueModelConfig.from_hf(models.backbone.config), tensors)
    with pytest.raises(ValueError, match=message):
        value.embed_images(ALL_PIXELS, ALL_GRIDS)
    check_step(models, Engine(*make_step(value)).start([3], [PROMPTS[1]], [TILT]), [3], [1], [[]])


@pytest.mark.parametrize("outside", [-3, VOCAB])
def test_token_outside_vocabulary_beside_images(models, outside):
    """The values of its request are NaN. Other requests are not affected."""
    prompts = [PROMPTS[0], [outside, 14], *PROMPTS[2:]]
    requests = Requests(models.value, rows=4, page_size=4)
    z = models.value.forward(requests.batch(prompts, [[31]] * 4, images=models.images), requests.cache)
    expected = torch.stack([expected_values(models, prompt, [31]) for prompt in range(4)])
    expected[1] = torch.nan
    torch.testing.assert_close(z, expected, rtol=0, atol=ATOL, equal_nan=True)


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


@pytest.mark.parametrize(("backend", "chunk_tokens"), [("reference", 7), ("triton", 7), ("triton", 4096)])
def test_values_of_steps_after_image_prompts(models, backend, chunk_tokens):
    """Unordered prompts in chunks that split images, then steps after candidates and after other tokens.

    Image tokens may have any id, as in SGLang.
    """
    step, slots = make_step(models.value, max_candidates=4, chunk_tokens=chunk_tokens, backend=backend)
    engine, rows, order = Engine(step, slots), [6, 0, 3, 2], [3, 1, 0, 2]
    for row, i in zip(rows, order, strict=True):
        engine.admit(row, [*PROMPTS[i], *[0] * 8], TILT, prompt_len=len(PROMPTS[i]))
    step.extend(
        engine.tensor([VOCAB + 1000 if token == IMAGE else token for token in FLAT]),
        engine.tensor(rows),
        engine.tensor([STARTS[i] for i in order]),
        engine.tensor([len(PROMPTS[i]) - 1 for i in order]),
        engine.tensor([0] * 4),
        images=models.images,
    )
    more = [[] for _ in order]
    for number in range(4):
        tokens = check_step(models, engine, rows, order, more)
        tokens[number] = 50 + number  # need not be a candidate
        more = [[*m, t] for m, t in zip(more, tokens, strict=True)]
    assert not step.table.columns.faults.any()


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_images_do_not_change_values_of_other_requests(models, backend):
    """The tokens are computed in one forward; kernel results are bitwise identical."""

    def values(rows, prompts, **options):
        engine = Engine(*make_step(models.value, max_candidates=4, backend=backend))
        engine.start(rows, prompts, [TILT] * len(rows), **options)
        scores = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(2))
        return engine.decode(rows[-1:], prompts[-1:], scores).value_logits

    text, of_prompt = [24, 25, 26, 27, 28], of_prefill(models.images, 2)
    positions = torch.cat([of_prompt.positions, torch.arange(4).expand(3, 4)], dim=1)
    both = ImageTokens(positions, torch.cat([of_prompt.rows, torch.full((4,), -1)]), of_prompt.embeds)
    beside, alone = values([1, 4], [PROMPTS[2], text], images=both), values([4], [text])
    torch.testing.assert_close(beside, alone, rtol=0, atol=0 if backend == "triton" else ATOL)


def processor_of(models, prompts, guidance=TILT, value_model=None, **options):
    """Left-padded prompts as arguments of ``generate``, and their processor."""
    width = max(map(len, prompts))
    padded = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = (padded != 0).long()
    options = {"max_new_tokens": 2, "record": True} | options
    processor = LenVMLogitsProcessor(models.base, value_model or models.value, guidance, mask, **options)
    return dict(input_ids=padded, attention_mask=mask), processor


@pytest.mark.parametrize("guidance", [TILT, TILT | {"value_stride": 3}, [GUIDANCE[2], TILT, None, TILT]])
def test_generate_with_images(models, guidance):
    """Values of every step after left-padded prompts with two images, none and one."""
    inputs, processor = processor_of(models, PROMPTS, guidance, max_new_tokens=7, top_k=4, **IMAGES)
    torch.manual_seed(0)
    mm = dict(mm_token_type_ids=(inputs["input_ids"] == IMAGE).int())
    output = models.base.generate(**inputs, **IMAGES, **mm, **processor.generation_kwargs, pad_token_id=0)
    width, checked = inputs["input_ids"].shape[1], [0] * len(PROMPTS)
    for step, record in enumerate(processor.records):
        for i in range(len(PROMPTS)):
            more = output[i, width : width + step].tolist()
            if EOS in more:
                continue
            for token, z in zip(record.candidates.token_ids[i].tolist(), record.value_logits[i].tolist(), strict=True):
                if token not in (-1, IMAGE) and z != 0:
                    assert abs(z - expected_values(models, i, [*more, token])[-1]) < 1e-4
                    checked[i] += 1
    is_guided = [g is not None for g in (guidance if isinstance(guidance, list) else [guidance] * 4)]
    assert [n > 6 for n in checked] == is_guided
    assert processor.faults == [0] * 4


def test_padding_may_have_the_image_token_id(models):
    """Masked tokens are neither images nor text."""
    values = []
    for padding in (0, IMAGE):
        inputs, processor = processor_of(models, PROMPTS, max_new_tokens=1, **IMAGES)
        ids = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, padding)
        processor(ids, torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0)))
        values.append(processor.records[0].value_logits)
    torch.testing.assert_close(*values, rtol=0, atol=ATOL)
    assert (values[0] != 0).all()


def configure(**rope):
    parameters = {"rope_type": "default", "rope_theta": 1e4} | rope
    return lambda models: ValueModelConfig.from_hf(vl_config(rope_parameters=parameters))


def embed(pixel_values):
    return lambda models: models.value.embed_images(pixel_values, ALL_GRIDS)


def position(tokens, size):
    return lambda models: image_positions(torch.tensor(tokens) == IMAGE, iter([size]))


def extend(value="value", **wrong):
    """Pass two tokens, the first an image, to a step of a value model."""
    i32 = partial(torch.tensor, dtype=torch.int32)
    images = ImageTokens(torch.zeros(3, 2).long(), torch.tensor([0, -1]), torch.zeros(1, HIDDEN))._replace(**wrong)
    request = i32([5, 6]), i32([0]), i32([0]), i32([2]), i32([0])
    return lambda models: make_step(getattr(models, value))[0].extend(*request, images=images)


def process(prompts, patches=None, images=None, value="value"):
    """Take a step with prompts, and the pixels of the first ``patches`` and the grids of the first ``images``."""
    given = {name: IMAGES[name][:count] for name, count in zip(IMAGES, (patches, images), strict=True) if count}

    def call(models):
        inputs, processor = processor_of(models, prompts, value_model=getattr(models, value), **given)
        processor(inputs["input_ids"], torch.zeros(len(prompts), VOCAB))

    return call


PIXELS_ARE = r"pixel_values must be \[92, 96\], a row for each patch of image_grid_thw"
IN_A_ROW = r"an image of \(1, 2, 1\) must have 2 consecutive tokens from token "
REJECTED = [
    (configure(), r"mrope_section must be three numbers, got \[\]"),
    (configure(mrope_section=[1, 5]), r"mrope_section must be three numbers, got \[1, 5\]"),
    (configure(mrope_section=[1, 2, 4]), r"mrope_section must add up to half of head_dim, 6, got \[1, 2, 4\]"),
    *((embed(wrong), PIXELS_ARE) for wrong in (ALL_PIXELS[1:], ALL_PIXELS[:, 1:], ALL_PIXELS.flatten())),
    (position([1, IMAGE, IMAGE], (1, 1, 2)), "a prompt must end with text, got one that ends with an image"),
    (position([IMAGE, IMAGE, 1, IMAGE, 1], (1, 2, 1)), "every image token of a prompt needs an image, 1 have none"),
    (position([1, IMAGE, 1, IMAGE, 1], (1, 2, 1)), f"{IN_A_ROW}1"),
    (position([1, 1, IMAGE, 1], (1, 2, 1)), f"{IN_A_ROW}2"),
    (extend("text"), "images must be None unless the value model is a vision-language model"),
    (extend(positions=torch.zeros(2, 2).long()), r"images\.positions must "),
    (extend(rows=torch.tensor([0, -1, -1])), r"images\.rows must "),
    (extend(embeds=torch.zeros(1, HIDDEN + 1)), r"images\.embeds must "),
    (extend(embeds=torch.zeros(1, HIDDEN, dtype=torch.bfloat16)), r"images\.embeds must "),
    (process(PROMPTS), "pixel_values and image_grid_thw must be given, because prompts contain image tokens"),
    (process(PROMPTS[:3], 92, 5), "image_grid_thw must be of the images in prompts, got 2 more"),
    (process(PROMPTS, 48, 3), "every image token of a prompt needs an image, 11 have none"),
    (process([[1, VIDEO, 2]]), "prompts must not contain videos, got video tokens"),
    (process(PROMPTS, images=5), "must be given together"),
    (process(PROMPTS, 92, 5, "text"), "must be a vision-language model"),
]


@pytest.mark.parametrize(("call", "message"), REJECTED)
def test_bad_images_are_rejected(models, call, message):
    with pytest.raises(ValueError, match=message):
        call(models)
