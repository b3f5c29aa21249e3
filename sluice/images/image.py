"""An image as sluice stores it, and the reference to it in a message."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# Type of a part of a message's content that stands for an image (Hugging Face's chat templates).
IMAGE_PART = "image"
# Types of parts that are images: Hugging Face's, Qwen's and Anthropic's, and two of OpenAI.
# No set: callers look up what a client sent, which need not be hashable.
IMAGE_PART_TYPES = (IMAGE_PART, "image_url", "input_image")
# Beginning of a reference to a stored image.
SCHEME = "sha256:"


@dataclass(frozen=True, slots=True)
class Image:
    """An image's file.

    Parameters
    ----------
    media_type
        `image/png`, `image/jpeg` or `image/webp`.
    width, height
        Pixels, as every reader sees them: turned by EXIF already, in RGB.
    data
        The file's bytes.

    """

    media_type: str
    width: int
    height: int
    data: bytes

    @property
    def digest(self) -> str:
        """SHA-256 of the file, 64 hexadecimal digits: the image's name everywhere."""
        return hashlib.sha256(self.data).hexdigest()


def image_part(digest: str) -> dict[str, Any]:
    """Return the part of a message's content that refers to an image."""
    return {"type": IMAGE_PART, IMAGE_PART: SCHEME + digest}


def referred(messages: str | Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the digests of the images that messages refer to, in their order."""
    if isinstance(messages, str):
        return []
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return list(_digests(parts))


def with_digests(
    messages: str | list[dict[str, Any]], digests: Iterable[str]
) -> str | list[dict[str, Any]]:
    """Return messages whose image parts refer to the given digests, in their order."""
    if isinstance(messages, str):
        return messages
    given = iter(digests)

    def part(part: Any) -> Any:
        return image_part(next(given)) if is_image_part(part) else part

    return [_with_parts(message, part) for message in messages]


def data_url(image: Image) -> str:
    """Return an image's file as a data URL."""
    return f"data:{image.media_type};base64,{base64.b64encode(image.data).decode()}"


def with_data_urls(messages: list[dict[str, Any]], images: Iterable[Image]) -> list[dict[str, Any]]:
    """Return messages that hold the given images, in their order, in OpenAI's form."""
    given = iter(images)

    def part(part: Any) -> Any:
        if not is_image_part(part):
            return part
        return {"type": "image_url", "image_url": {"url": data_url(next(given))}}

    return [_with_parts(message, part) for message in messages]


def _with_parts(message: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return message | {"content": [change(part) for part in content]}


def is_image_part(part: Any) -> bool:
    """Return whether a part of a message's content stands for an image."""
    return isinstance(part, Mapping) and part.get("type") == IMAGE_PART


def _digests(parts: Iterable[Any]) -> Iterator[str]:
    for part in parts:
        if is_image_part(part):
            reference = part.get(IMAGE_PART)
            if isinstance(reference, str) and reference.startswith(SCHEME):
                yield reference.removeprefix(SCHEME)
