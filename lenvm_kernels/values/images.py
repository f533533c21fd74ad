"""Images in prompts of a vision-language value model: embeddings, and rotary positions of tokens.

Images are embedded by the checkpoint's vision tower, a module of ``transformers``. A token has three positions, in
time, row and column (multimodal rotary embedding, Qwen2-VL, arXiv 2409.12191), which are equal for text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

# Size of an image in time, rows and columns of merged patches, which are one token each.
ImageSize = tuple[int, int, int]


class ImageTokens(NamedTuple):
    """Positions and image embeddings of ``T`` tokens, some of which belong to images.

    Attributes:
        positions: int64 ``[3, T]``; positions in time, row and column.
        rows: int64 ``[T]``; row of ``embeds`` for each token, -1 for text.
        embeds: ``[N, H]`` in the dtype of the value model.
    """

    positions: torch.Tensor
    rows: torch.Tensor
    embeds: torch.Tensor

    def of_tokens(self, which: slice) -> ImageTokens:
        """The fields for a slice of the tokens."""
        return ImageTokens(self.positions[:, which], self.rows[which], self.embeds)


def image_sizes(grid_thw: torch.Tensor, merge: int) -> list[ImageSize]:
    """Sizes of images with ``grid_thw`` patches, int ``[images, 3]``; ``merge * merge`` patches become one token."""
    return [(t, h // merge, w // merge) for t, h, w in grid_thw.tolist()]


def image_positions(is_image: torch.Tensor, sizes: Iterator[ImageSize]) -> torch.Tensor:
    """Positions of the tokens of a prompt, int64 ``[3, L]`` on the CPU.

    The tokens of an image count rows and columns from its position in the text. The text after it continues from the
    larger of both. All positions are then shifted by a constant, which does not change attention, so that the three
    positions of a token after the prompt equal its index and later steps need not handle images.

    Args:
        is_image: bool ``[L]``; whether a token belongs to an image.
        sizes: sizes of images; only the prompt's sizes are consumed.

    Raises:
        ValueError: the image tokens do not form whole images, or the prompt ends with an image.

    Example:
        >>> is_image = torch.tensor([False, True, True, True, True, False])
        >>> image_positions(is_image, iter([(1, 2, 2)]))
        tensor([[2, 3, 3, 3, 3, 5],
                [2, 3, 3, 4, 4, 5],
                [2, 3, 4, 3, 4, 5]])
    """
    length, image_places = len(is_image), is_image.nonzero().flatten().tolist()
    if length and is_image[-1]:
        raise ValueError("a prompt must end with text, got one that ends with an image")
    parts, token, position, seen = [], 0, 0, 0
    while seen < len(image_places):
        size = next(sizes, None)
        if size is None:
            left = len(image_places) - seen
            raise ValueError(f"every image token of a prompt needs an image, {left} have none")
        first, count = image_places[seen], size[0] * size[1] * size[2]
        if image_places[seen : seen + count] != list(range(first, first + count)):
            raise ValueError(f"an image of {size} must have {count} consecutive tokens from token {first} on")
        parts.append(torch.arange(position, position + first - token).expand(3, -1))
        position += first - token
        parts.append(position + torch.cartesian_prod(*(torch.arange(n) for n in size)).T)
        position += max(size[1:])
        token, seen = first + count, seen + count
    parts.append(torch.arange(position, position + length - token).expand(3, -1))
    moved = token - position  # number of tokens in excess of positions
    return torch.cat(parts, dim=1) + moved


def load_vision_tower(
    config: Any, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, device: torch.device
) -> torch.nn.Module:
    """The vision tower of a Qwen2.5-VL checkpoint.

    ``tensors`` are named as in the tower. Raises ValueError that names missing and unexpected tensors.
    """
    # Imported here, because only vision-language value models need it.
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

    with torch.device("meta"):
        expected = Qwen2_5_VisionTransformerPretrainedModel(config).state_dict()
    if different := sorted(expected.keys() ^ tensors.keys()):
        missing = [name for name in different if name in expected]
        unexpected = [name for name in different if name not in expected]
        raise ValueError(f"the tensors do not fit the vision tower: missing {missing}, unexpected {unexpected}")
    tower: torch.nn.Module = Qwen2_5_VisionTransformerPretrainedModel.from_pretrained(
        None, config=config, state_dict=dict(tensors), dtype=dtype
    )
    return tower.to(device)


def check_pixels(tower: torch.nn.Module, pixel_values: torch.Tensor, grid_thw: torch.Tensor) -> None:
    """Raise ValueError unless ``pixel_values`` has one row per patch, in the tower's patch size."""
    patches, elements = int(grid_thw.prod(dim=1).sum()), tower.get_parameter("patch_embed.proj.weight")[0].numel()
    if (came := list(pixel_values.shape)) != [patches, elements]:
        accepted = f"[{patches}, {elements}], a row for each patch of image_grid_thw"
        raise ValueError(f"pixel_values must be {accepted}, got {came}")


def embedding_with_images(
    token_ids: torch.Tensor, embedding: torch.Tensor, images: ImageTokens
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the tokens in an embedding of only these tokens, -1 for unknown ids; and this embedding, with images."""
    is_image, is_known = images.rows >= 0, (token_ids >= 0) & (token_ids < len(embedding))
    of_text = embedding[torch.where(is_known, token_ids, 0)]
    rows = torch.where(is_image[:, None], images.embeds[images.rows.clamp(min=0)], of_text)
    row = torch.arange(len(token_ids), device=token_ids.device)
    return torch.where(is_image | is_known, row, -1), rows
