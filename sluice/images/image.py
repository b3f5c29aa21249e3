"""An image as sluice stores it, and the reference to it in a message."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# Type of a part of a message's content that stands for an image (Hugging Face's chat templates).
IMAGE_PART = "image"
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

    return [
        message | {"content": [part(entry) for entry in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def is_image_part(part: Any) -> bool:
    """Return whether a part of a message's content stands for an image."""
    return isinstance(part, Mapping) and part.get("type") == IMAGE_PART


def _digests(parts: Iterable[Any]) -> Iterator[str]:
    for part in parts:
        if is_image_part(part):
            reference = part.get(IMAGE_PART)
            if isinstance(reference, str) and reference.startswith(SCHEME):
                yield reference.removeprefix(SCHEME)
