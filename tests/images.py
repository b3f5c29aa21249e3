"""Images for tests, drawn with Pillow."""

from __future__ import annotations

import io
import random
from typing import Any

from PIL import Image as Pillow

from sluice.images.image import Image
from tests.vision_models import picture


def drawn(width: int = 8, height: int = 6, seed: int = 0, mode: str = "RGB") -> Pillow.Image:
    """An image of random pixels."""
    size = len(Pillow.new(mode, (1, 1)).tobytes()) * width * height
    return Pillow.frombytes(mode, (width, height), random.Random(seed).randbytes(size))


def encoded(image: Pillow.Image, format_: str = "PNG", **options: Any) -> bytes:
    """The image's file."""
    file = io.BytesIO()
    image.save(file, format_, **options)
    return file.getvalue()


def png(width: int = 8, height: int = 6, seed: int = 0) -> Image:
    """A small image as sluice stores it."""
    return picture(width, height, seed)
