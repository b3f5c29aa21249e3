"""The image processor of a model: how many tokens an image takes, and what the tower gets of it.

Worker and trainer must agree with the engine to the token and to the pixel, so all of them use the
checkpoint's own settings and transformers' Pillow implementation (`BACKEND`): its results depend on
no GPU and no torchvision.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sluice.images.image import Image
from sluice.runtime.pod_env import ConfigurationError
from sluice.samples.sample import Float32, Int32, UInt8

Int64 = npt.NDArray[np.int64]
# transformers' name of the implementation. Engines have to be started with the same one.
BACKEND = "pil"
# Families by `model_type`, with the class of their image processor. Its name has no suffix in
# releases of transformers whose Pillow implementation is the default.
_PROCESSORS = {
    "qwen2_5_vl": "Qwen2VLImageProcessor",
    "qwen3_vl": "Qwen2VLImageProcessor",
    "qwen3_vl_moe": "Qwen2VLImageProcessor",
    "qwen3_5": "Qwen2VLImageProcessor",
}
# Values of `model_type` in config.json that can be trained with images.
VISION_FAMILIES = tuple(sorted(_PROCESSORS))
_FILES = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True, slots=True)
class Pixels:
    """What the tower gets of some images.

    Attributes
    ----------
    values
        [patches, channels x pixels of a patch] float32, image after image (`pixel_values`).
    grids
        [images, 3], patches of each image in time, height and width (`image_grid_thw`).

    """

    values: Float32
    grids: Int64


class ImageProcessor:
    """The image processor of a model, from the files of its checkpoint.

    Attributes
    ----------
    placeholder
        Id of the token that stands for an image in compact tokens, and for each part of it in
        expanded tokens.
    merge
        Patches of a token in height, and in width.

    """

    def __init__(self, model_dir: Path, *, trust_remote_code: bool = False) -> None:
        """Read the settings.

        Parameters
        ----------
        model_dir
            Hugging Face checkpoint.
        trust_remote_code
            Unused as long as all families that are supported are transformers' own.

        Raises
        ------
        ConfigurationError
            The checkpoint has no image processor, or its family is not supported.

        """
        config = _json(model_dir / "config.json")
        family = str(config.get("model_type"))
        if family not in _PROCESSORS:
            raise ConfigurationError(
                f"{model_dir}/config.json: model_type {family!r} cannot be trained with images "
                f"(data.images), only {', '.join(VISION_FAMILIES)}: name another "
                "spec.model.path, or leave out data.images to train it on text"
            )
        if not any((model_dir / name).is_file() for name in _FILES):
            raise ConfigurationError(
                f"{model_dir} has no {_FILES[0]}, which says how images are scaled: download the "
                "model again, with all of its files"
            )
        try:
            self.placeholder = int(config["image_token_id"])
            kind = _class(_PROCESSORS[family])
            self._processor = kind.from_pretrained(model_dir, local_files_only=True)
            # The rule of the processor itself, which it calls for each image.
            self._resize = sys.modules[kind.__module__].smart_resize
        except (AttributeError, ImportError, KeyError, OSError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"{model_dir} has no usable image processor: {type(error).__name__}: {error}"
            ) from error
        self.merge = int(self._processor.merge_size)

    @property
    def settings(self) -> dict[str, Any]:
        """What decides on tokens and pixels: models with equal settings see the same images."""
        names = ("image_processor_type", "processor_class")
        values = self._processor.to_dict()
        kept = {name: value for name, value in values.items() if name not in names}
        return {"image_token_id": self.placeholder, **kept}

    def grid_of(self, width: int, height: int) -> tuple[int, int]:
        """Return the tokens of an image in height and in width.

        Raises
        ------
        ValueError
            The model's processor refuses images of this shape.

        """
        settings = self._processor
        try:
            resized = self._resize(
                height,
                width,
                factor=settings.patch_size * self.merge,
                min_pixels=settings.size["shortest_edge"],
                max_pixels=settings.size["longest_edge"],
            )
        except ValueError as error:
            raise ValueError(f"an image of {width}x{height} pixels: {error}") from error
        rows, columns = (side // settings.patch_size // self.merge for side in resized)
        return rows, columns

    def tokens_of(self, width: int, height: int) -> int:
        """Return the number of tokens that replace the placeholder of an image.

        Raises
        ------
        ValueError
            The model's processor refuses images of this shape.

        """
        rows, columns = self.grid_of(width, height)
        return rows * columns

    def added(self, sizes: Sequence[tuple[int, int]]) -> int:
        """Return the number of tokens that images of these widths and heights add in all."""
        return sum(self.tokens_of(width, height) - 1 for width, height in sizes)

    def expand(
        self,
        tokens: Int32,
        sizes: Sequence[tuple[int, int]],
        *,
        sampled: UInt8 | None = None,
    ) -> tuple[Int32, Int64]:
        """Make each placeholder as long as its image; see `expand_by`.

        sizes: width and height of each image.
        """
        counts = [self.tokens_of(width, height) for width, height in sizes]
        return self.expand_by(tokens, counts, sampled=sampled)

    def expand_by(
        self, tokens: Int32, counts: Sequence[int], *, sampled: UInt8 | None = None
    ) -> tuple[Int32, Int64]:
        """Make each placeholder as long as its image.

        Parameters
        ----------
        tokens
            [t] compact ids.
        counts
            Tokens of each image, in the order of the placeholders.
        sampled
            [t], 1 for tokens that the model sampled: they stand for no image, whatever their id.
            None: no token.

        Returns
        -------
        The expanded ids, and for each of them its index in `tokens`.

        Raises
        ------
        ValueError
            There are more or fewer placeholders than images.

        """
        is_placeholder = tokens == self.placeholder
        if sampled is not None:
            is_placeholder &= sampled == 0
        if (places := int(is_placeholder.sum())) != len(counts):
            raise ValueError(f"{places} placeholders of images in the tokens, {len(counts)} images")
        repeats = np.ones(len(tokens), np.int64)
        repeats[is_placeholder] = counts
        source = np.repeat(np.arange(len(tokens)), repeats)
        return tokens[source], source

    def pixels(self, images: Sequence[Image]) -> Pixels:
        """Decode images and return what the tower gets of them."""
        from PIL import Image as Pillow

        pictures = [Pillow.open(io.BytesIO(image.data)).convert("RGB") for image in images]
        inputs = self._processor(images=pictures, return_tensors="np")
        values = np.asarray(inputs["pixel_values"], np.float32)
        return Pixels(values, np.asarray(inputs["image_grid_thw"], np.int64))


def _json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"spec.model.path: {path} cannot be read: {error}") from error


def _class(name: str) -> Any:
    """Return transformers' Pillow implementation of an image processor."""
    import transformers

    found = getattr(transformers, f"{name}Pil", None) or getattr(transformers, name)
    if getattr(found, "is_dummy", False):
        raise ImportError("Pillow is not installed")
    return found
