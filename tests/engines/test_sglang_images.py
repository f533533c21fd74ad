"""Images in the SGLang plugin: tokens passed to the value model, and its values in a real server."""

import base64
import io
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import requests
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import Qwen2_5_VLForConditionalGeneration

from lenvm_kernels.engines.sglang.images import PromptImages, image_tokens
from tests.helpers.models import (
    VISION,
    random_head,
    random_model,
    tokenizer_of,
    value_logits,
    value_model_of,
    vl_config,
)
from tests.helpers.sglang_fork import Item
from tests.helpers.sglang_server import ATOL, GENTLE, HIDDEN, SAMPLING, TINY, cached_tokens, guided_rows, running_server


@pytest.fixture(scope="module")
def value_model():
    return value_model_of(random_model(Qwen2_5_VLForConditionalGeneration, vl_config()), random_head())


def request(length, *items):
    inputs = SimpleNamespace(mm_items=list(items))
    return SimpleNamespace(session=None, multimodal_inputs=inputs, origin_input_ids=[0] * length)


def test_image_tokens_of_prompt_and_output(value_model):
    """An item has two images, and the items are not in prompt order."""
    grids = torch.tensor([[1, 2, 4], [1, 4, 2]])
    both = Item(
        8, 2, 2, offsets=[(8, 9), (11, 12)], image_grid_thw=grids, model_specific_data=dict(image_grid_thw=grids)
    )
    images = PromptImages(request(14, both, Item(1, 2, 2)), value_model)
    assert (images.length, images.moved) == (14, 2)  # the eight image tokens take six positions
    positions, rows = images.of_tokens(0, 16)
    assert rows.tolist() == [-1, 4, 5, 6, 7, -1, -1, -1, 0, 1, -1, 2, 3, -1, -1, -1]
    assert positions.tolist() == [
        [2, 3, 3, 3, 3, 5, 6, 7, 8, 8, 10, 11, 11, 13, 14, 15],
        [2, 3, 3, 4, 4, 5, 6, 7, 8, 8, 10, 11, 12, 13, 14, 15],
        [2, 3, 4, 3, 4, 5, 6, 7, 8, 9, 10, 11, 11, 13, 14, 15],
    ]
    for first, count in ((0, 16), (3, 7), (11, 5), (14, 2), (15, 1), (4, 0)):
        part_positions, part_rows = images.of_tokens(first, count)
        assert torch.equal(part_positions, positions[:, first : first + count])
        assert torch.equal(part_rows, rows[first : first + count])
    beside_text = image_tokens([(None, 7, 2), (images, 0, 14)], 16, value_model).positions
    assert beside_text[0, :3].tolist() == [7, 8, 2]


VIDEO = SimpleNamespace(name="VIDEO")
NOT_PIXELS = "videos, audio and image embeddings cannot be combined with guidance in custom_params"


@pytest.mark.parametrize(
    ("req", "message"),
    [
        (request(9, Item(1, 1, 2), Item(4, 1, 2, modality=VIDEO)), NOT_PIXELS),
        (request(9, Item(1, 2, 2, feature=None)), NOT_PIXELS),
        (request(9, Item(1, 2, 2, model_specific_data={})), NOT_PIXELS),
        (request(9, Item(1, 2, 2, offsets=None)), NOT_PIXELS),
        (request(9, Item(1, 2, 2, feature=torch.zeros(16, 99))), r"pixel_values must be \[16, 96\], .* got \[16, 99\]"),
        (request(5, Item(1, 2, 2)), "a prompt must end with text"),
        (request(9, Item(1, 2, 2, offsets=[(1, 3)])), r"an image of \(1, 2, 2\) must have 4 consecutive tokens"),
    ],
)
def test_inputs_that_the_value_model_cannot_read_are_rejected(value_model, req, message):
    with pytest.raises(ValueError, match=message):
        PromptImages(req, value_model)


def test_images_are_rejected_without_vision_tower():
    backbone = random_model(Qwen2_5_VLForConditionalGeneration, vl_config())
    del backbone.model.visual
    with pytest.raises(ValueError, match=r"images cannot be combined .*: the value model has no vision tower"):
        PromptImages(request(9, Item(1, 2, 2)), value_model_of(backbone, random_head()))


IMAGE = 502
SPECIAL = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"


def save_models(folder):
    """Save a random base model and a random value model that read images, and their processor."""
    # SGLang interprets patches of other sizes as embeddings.
    vision = VISION | dict(patch_size=14, window_size=56, out_hidden_size=HIDDEN)
    config = vl_config(vision, IMAGE, mrope_section=(2, 3, 3), **TINY)
    words = ["<bos>", "<eos>", "<unk>", *(f"w{i}" for i in range(3, IMAGE - 2)), *SPECIAL]
    processor = transformers.Qwen2_5_VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(patch_size=14, min_pixels=784, max_pixels=200_000),
        video_processor=transformers.Qwen2VLVideoProcessor(patch_size=14),
        tokenizer=tokenizer_of(words, pad="<eos>", additional_special_tokens=SPECIAL),
        chat_template="{{ messages[0]['content'] }}",
    )
    for seed, name in enumerate(("base", "value")):
        random_model(Qwen2_5_VLForConditionalGeneration, config, seed=seed).save_pretrained(folder / name)
        processor.save_pretrained(folder / name)
    save_file(random_head(2, HIDDEN), folder / "value" / "value_head.safetensors")


def picture(width, height, seed):
    image = pytest.importorskip("PIL.Image")
    pixels = torch.randint(256, (height, width, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return image.fromarray(pixels.numpy())


def as_url(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


HAS_SGLANG = find_spec("sglang") is not None  # before other tests import stubs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    if not HAS_SGLANG:
        pytest.skip("needs SGLang: make test-sglang")
    folder = tmp_path_factory.mktemp("models")
    save_models(folder)
    return folder


def serving_images(folder, name, *options, **variables):
    variables |= dict(SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE="tests.sglang_cpu.processors", TORCHDYNAMO_DISABLE="1")
    return running_server(folder, name, "--mm-attention-backend", "sdpa", *options, **variables)


@pytest.fixture(scope="module")
def engine(folder):
    with serving_images(folder, "images", "--chunked-prefill-size", "8") as server:
        yield server


def check_values(folder, engine, prompts, **sampling):
    """Send prompts of texts and images, check all values of all guided steps against plain forwards, and return the
    results."""
    before, processor = len(engine.lines()), transformers.AutoProcessor.from_pretrained(folder / "value")
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder / "value", dtype=torch.float32).eval()
    head = load_file(folder / "value" / "value_head.safetensors")
    params = {**SAMPLING, "max_new_tokens": 8, "custom_params": GENTLE, **sampling}
    urls = [[as_url(image) for image in images] for _, images in prompts]
    texts = [text for text, _ in prompts]
    response = engine.post(text=texts, image_data=urls, sampling_params=[params] * len(prompts))
    assert response.ok, response.text
    for result, (text, images) in zip(response.json(), prompts, strict=True):
        inputs = processor(text=[text], images=images or None, return_tensors="pt")
        prompt, output = inputs["input_ids"][0].tolist(), result["output_ids"]
        rows = guided_rows(prompt, result, engine.steps(before))
        assert len(rows) >= len(output)
        for row in rows:
            values = {t: z for t, z in zip(row["token_ids"], row["value_logits"], strict=True) if t >= 0}
            drawn = [*prompt, *output][: row["length"]]
            tokens = torch.tensor([[*drawn, token] for token in values])
            pixels = {x: inputs[x].repeat(len(values), 1) for x in ("pixel_values", "image_grid_thw") if images}
            types = dict(mm_token_type_ids=(tokens == IMAGE).int()) if images else {}
            expected = value_logits(model, head, tokens, **pixels, **types)[:, -1]
            torch.testing.assert_close(torch.tensor([*values.values()]), expected, rtol=0, atol=ATOL)
    return response.json()


A, B, C = (84, 56, 0), (56, 140, 1), (112, 84, 2)


def test_values_after_images_match_plain_forwards(folder, engine):
    """Prefill chunks of eight tokens split images; one request is text. Repeated with prompts in the radix cache."""
    prompts = [
        (f"w5 w6 {PICTURE} w9 w10 {PICTURE} w11", [picture(*A), picture(*B)]),
        ("w7 w8 w9", []),
        (f"{PICTURE} w12 w13 w14 w15", [picture(*C)]),
    ]
    assert not any(cached_tokens(check_values(folder, engine, prompts)))
    for result in check_values(folder, engine, prompts):
        assert result["meta_info"]["cached_tokens"] == result["meta_info"]["prompt_tokens"] - 1


def test_prefixes_shared_with_image_prompts(folder, engine):
    """A prefix before images of different sizes, before text, and before the same image."""
    start = " ".join(f"w{i}" for i in range(30, 54))
    prompts = [
        (f"{start} {PICTURE} w9", [picture(*A)]),
        (f"{start} {PICTURE} w9", [picture(*B)]),
        (f"{start} w9 w10", []),
        (f"{start} {PICTURE} w9 w11", [picture(84, 56, 7)]),  # other pixels, same number of tokens
        (f"{start} {PICTURE} w9 w12", [picture(*A)]),
    ]
    cached = [cached_tokens(check_values(folder, engine, [prompt])) for prompt in prompts]
    assert cached == [[0], [0], [0], [25], [33]]


def test_images_in_session_are_rejected_without_side_effects(folder, engine):
    session = requests.post(f"{engine.url}/open_session", json={"capacity_of_str_len": 1000}, timeout=60).json()
    request = dict(text=f"w5 {PICTURE} w6", image_data=[as_url(picture(*A))], session_params={"id": session})
    params = {**SAMPLING, "max_new_tokens": 2, "custom_params": GENTLE}
    response = engine.post(**request, sampling_params=params)
    assert response.status_code == 400 and "images in a session cannot be combined with guidance" in response.text
    assert engine.post(**request, sampling_params=params | {"custom_params": None}).ok
    check_values(folder, engine, [("w7 w8", []), (f"w5 {PICTURE} w6", [picture(*A)])])


def test_retracted_requests_with_images(folder):
    prompts = [(f"w{60 + i} {PICTURE} w9 w10", [picture(*size)]) for i, size in enumerate((A, B, C, A))]
    with serving_images(folder, "retracting", SGLANG_TEST_RETRACT="1") as server:
        results = check_values(folder, server, prompts, max_new_tokens=24)
    assert any(result["meta_info"]["num_retractions"] for result in results)
