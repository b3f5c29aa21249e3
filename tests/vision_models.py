"""The tiny vision-language models of examples/vision, and images for them."""

from __future__ import annotations

import io
import runpy
from pathlib import Path

import numpy as np
from PIL import Image as Pillow

from sluice.images.image import Image

_MAKER = Path(__file__).parents[1] / "examples/vision/make_model.py"
# Families whose rows hold several sequences, and all that are trained.
FAMILIES = ("qwen2_5_vl", "qwen3_vl")
TRAINED_FAMILIES = (*FAMILIES, "qwen3_5", "qwen3_vl_moe")


def make_model(directory: Path, family: str) -> Path:
    """Write the tiny model of a family; return its directory."""
    made: Path = runpy.run_path(str(_MAKER))["make_model"](directory, family)
    return made


def picture(width: int, height: int, seed: int = 0) -> Image:
    """Return a PNG of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Pillow.fromarray(pixels).save(file, "PNG")
    return Image("image/png", width, height, file.getvalue())
