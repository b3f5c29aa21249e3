"""Results of tools as texts and images, in every form in which tools and MCP servers give them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sluice.images.image import IMAGE_PART_TYPES
from sluice.images.reading import begins_as_image

# What a model without images reads in place of one.
IMAGE_TEXT = "(image)"


def parts_of(value: Any) -> list[Any]:
    """Return the texts and images of a result in their order, images as `Episode.read_image` reads.

    A value without images is its only part.
    """
    if not isinstance(value, list | tuple) or not any(map(is_image, value)):
        return [_plain(value)]
    return [_plain(part) for part in value]


def is_image(part: Any) -> bool:
    """True for the bytes of an image, a data URL of one, or a message's part with one."""
    if isinstance(part, bytes):
        return begins_as_image(part)
    if isinstance(part, str):
        return part[:11].lower() == "data:image/"
    return isinstance(part, Mapping) and part.get("type") in IMAGE_PART_TYPES


def _plain(part: Any) -> Any:
    """Unwrap a part of a message: texts to text, MCP's and Anthropic's images to OpenAI's form."""
    if not isinstance(part, Mapping):
        return part
    if part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    if part.get("type") != "image":
        return part
    source = part.get("source")
    data = source.get("data") if isinstance(source, Mapping) else part.get("data")
    return {"type": "image", "base64": data} if data else part
