"""Images in prompts of SGLang and of its LenVM fork, for a value model that reads images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from lenvm_kernels.engines.tensors import to_device
from lenvm_kernels.values import ImageTokens, ValueModel
from lenvm_kernels.values.images import check_pixels, image_positions, image_sizes

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import MultimodalDataItem, Req


class PromptImages:
    """The positions of the images in a request's prompt, and their embeddings while the prompt is computed.

    Args:
        req: the request; its prompt has one token per image embedding.

    Attributes:
        length: number of prompt tokens.
        moved: offset of the rotary positions (:func:`image_positions`). Prompts with a common prefix but different
            offsets have different cached keys.

    Raises:
        ValueError: the value model cannot read the request's multimodal inputs.
    """

    def __init__(self, req: Req, value_model: ValueModel) -> None:
        reason = "combined with guidance in custom_params"
        if getattr(req, "session", getattr(req, "session_id", None)) is not None:  # the fork only has its id
            raise ValueError(f"images in a session cannot be {reason}")
        self._items: list[MultimodalDataItem] = req.multimodal_inputs.mm_items
        if not all(has_pixels(item) for item in self._items):
            raise ValueError(f"videos, audio and image embeddings cannot be {reason}: only pixels of images can")
        tower = value_model.vision_tower
        if tower is None:
            raise ValueError(f"images cannot be {reason}: the value model has no vision tower")
        self.length = len(req.origin_input_ids)
        self._rows = torch.full((self.length,), -1)
        merge, count = value_model.config.vision.spatial_merge_size, 0
        sizes: list[tuple[int, tuple[int, int, int]]] = []
        for item in self._items:
            check_pixels(tower, item.feature, item.image_grid_thw)
            for (first, last), size in zip(item.offsets, image_sizes(item.image_grid_thw, merge), strict=True):
                self._rows[first : last + 1] = torch.arange(count, count + last + 1 - first)
                sizes.append((first, size))
                count += last + 1 - first
        self._positions = image_positions(self._rows >= 0, iter([size for _, size in sorted(sizes)]))
        self.moved = int(self._positions[0, 0])
        self.embeds: torch.Tensor | None = None

    def embed(self, first: int, value_model: ValueModel) -> None:
        """Compute the embeddings if the prompt has images from token ``first`` on."""
        if self.embeds is None and (self._rows[first:] >= 0).any():
            # In the fork, the pixels' copy to the host may still run; only copies in the same stream wait for it.
            pixel_values = torch.cat([item.feature.to(value_model.device, non_blocking=True) for item in self._items])
            grids = torch.cat([item.image_grid_thw for item in self._items])
            self.embeds = value_model.embed_images(pixel_values, grids)

    def identities(self, token_ids: Sequence[int]) -> list[int]:
        """Replace the first token of each image in ``token_ids``, prompt and output, by a hash of the image."""
        ids = list(token_ids)
        for item in self._items:
            for first, _ in item.offsets:
                ids[first] = hash((item.hash, *item.image_grid_thw.flatten().tolist()))
        return ids

    def of_tokens(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions ``[3, count]`` of tokens from ``first`` on, and their rows of the embeddings, -1 for text."""
        after = torch.arange(max(first, self.length), max(first + count, self.length))
        which = slice(first, first + count)
        positions = torch.cat([self._positions[:, which], after.expand(3, -1)], dim=1)
        return positions, torch.cat([self._rows[which], torch.full_like(after, -1)])


def has_pixels(item: MultimodalDataItem) -> bool:
    """Whether an item is an image in the format of the engine's processor for Qwen models."""
    has_grid = isinstance(item.model_specific_data.get("image_grid_thw"), torch.Tensor) and bool(item.offsets)
    return item.is_image() and isinstance(item.feature, torch.Tensor) and has_grid


def image_tokens(
    parts: Sequence[tuple[PromptImages | None, int, int]], tokens: int, value_model: ValueModel
) -> ImageTokens | None:
    """The images among ``tokens`` tokens, on the value model's device, or None without images.

    Args:
        parts: consecutive parts, each with the request's images, first token and number of tokens.
        tokens: total number of tokens; tokens after the parts are padding.
    """
    if all(images is None for images, _, _ in parts):
        return None
    positions, rows, device = torch.zeros(3, tokens, dtype=torch.int64), torch.full((tokens,), -1), value_model.device
    embeds = [torch.empty(0, value_model.config.hidden_size, dtype=value_model.dtype, device=device)]
    start = count = 0
    for images, first, length in parts:
        here, start = slice(start, start + length), start + length
        if images is None:
            positions[:, here] = torch.arange(first, first + length)
            continue
        positions[:, here], part_rows = images.of_tokens(first, length)
        if images.embeds is not None:  # None if the rest is text, or guidance was lost
            rows[here] = torch.where(part_rows >= 0, part_rows + count, -1)
            embeds.append(images.embeds)
            count += len(images.embeds)
    return ImageTokens(to_device(positions, device), to_device(rows, device), torch.cat(embeds))
