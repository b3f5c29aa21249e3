"""Images in requests to SGLang: data URLs, written while the request is sent.

A group's samples share the bytes of an image. A body in one piece would hold each image again, half
as large again, for every request that is under way.
"""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from sluice.images.image import Image

# Bytes that are encoded at once, a fraction of a millisecond's work. A multiple of 3, so that the
# encoded parts can be joined.
_PART_BYTES = 192 << 10


def data_url(image: Image) -> str:
    """Return an image as a data URL."""
    return _head(image) + base64.b64encode(image.data).decode()


async def with_images(body: Mapping[str, Any], images: Sequence[Image]) -> AsyncIterator[bytes]:
    """Yield the parts of a body, as JSON, with images as its last field."""
    yield json.dumps(body).encode()[:-1] + b', "image_data": ['
    for number, image in enumerate(images):
        yield f'{", " if number else ""}"{_head(image)}'.encode()
        view = memoryview(image.data)
        for start in range(0, len(view), _PART_BYTES):
            yield base64.b64encode(view[start : start + _PART_BYTES])
        yield b'"'
    yield b"]}"


def _head(image: Image) -> str:
    return f"data:{image.media_type};base64,"
