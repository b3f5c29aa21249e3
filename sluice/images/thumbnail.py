"""Small copies of images, for people who read samples."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable
from pathlib import Path

from sluice.images.image import Image

# Below the directory of the run's samples.
DIRECTORY = "images"
SIDE = 160  # pixels
# Images of a prompt that have one.
PER_PROMPT = 4


def path_of(samples: Path, digest: str) -> Path:
    """Return the file of an image's thumbnail in a directory of samples."""
    return samples / DIRECTORY / f"{digest}.jpg"


def write(samples: Path, image: Image) -> None:
    """Write the thumbnail of an image: a JPEG whose sides have at most `SIDE` pixels."""
    from PIL import Image as Pillow

    path = path_of(samples, image.digest)
    path.parent.mkdir(parents=True, exist_ok=True)
    with Pillow.open(io.BytesIO(image.data)) as opened:
        opened.thumbnail((SIDE, SIDE))  # decodes a JPEG at an eighth of its size
        small = opened.convert("RGB")
    unfinished = path.with_suffix(".tmp")
    small.save(unfinished, "JPEG", quality=80)
    unfinished.replace(path)


def data_urls(samples: Path, digests: Iterable[str]) -> list[str]:
    """Return the thumbnails that there are, for the page of a browser."""
    files = (path_of(samples, digest) for digest in digests)
    return [
        f"data:image/jpeg;base64,{base64.b64encode(file.read_bytes()).decode()}"
        for file in files
        if file.is_file()
    ]
