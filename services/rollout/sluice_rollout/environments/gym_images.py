"""Writes pictures of an environment with Gymnasium's interface as images for a model.

Pure. It uses the standard library only, because it runs in the environment's interpreter.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence
from typing import Any

# What the model reads: a text, or parts in the form of OpenAI's messages.
Content = str | list[dict[str, Any]]


def is_picture(value: Any) -> bool:
    """True for an array of numpy with the pixels of an image, [height, width, 3] of uint8."""
    shape = tuple(getattr(value, "shape", ()))
    return len(shape) == 3 and shape[-1] == 3 and 0 not in shape and str(value.dtype) == "uint8"


def content_of(parts: Sequence[Any]) -> Content:
    """Return texts, pictures and parts of messages as one content, with blank lines between texts.

    Empty texts are left out. A content without pictures is a text.
    """
    content: list[dict[str, Any]] = []
    for part in parts:
        if is_picture(part):
            content.append(_image_part(part))
        elif isinstance(part, dict):
            content.append(part)
        elif part and content and content[-1].get("type") == "text":
            content[-1] = _text_part(f"{content[-1]['text']}\n\n{part}")
        elif part:
            content.append(_text_part(part))
    if any(part.get("type") != "text" for part in content):
        return content
    return "\n\n".join(part["text"] for part in content)


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _image_part(picture: Any) -> dict[str, Any]:
    url = f"data:image/png;base64,{base64.b64encode(png(picture)).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def png(picture: Any) -> bytes:
    """Return a picture as a PNG file (RFC 2083): RGB, 8 bits a channel, lines without a filter."""
    height, width, _ = picture.shape
    lines = b"".join(b"\0" + line.tobytes() for line in picture)
    header = struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    checksum = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)
