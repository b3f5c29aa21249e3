"""Find the images of a row, and put a part for each into its prompt.

An image is in the column of images, at the place of an `<image>` placeholder of a text or of a part
`{"type": "image"}` without a value; or it is in the part itself. Nothing is read or decoded here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from sluice.api.groups.data import ImageLimits, PromptSource
from sluice.data.messages import content_of
from sluice.images.image import IMAGE_PART_TYPES, image_part
from sluice.images.reading import FIELDS, ImageError, RawImage, raw_image
from sluice.input_checks import load_json

PLACEHOLDER = "<image>"
_OTHER_MEDIA = ("video", "video_url", "audio", "audio_url", "input_audio", "input_video")
_OTHER_COLUMNS = ("videos", "video", "audios", "audio")

Prompt = str | list[Any]


def refuse_images(row: dict[str, Any], source: PromptSource) -> None:
    """Raise ImageError if a row has images, for a job without `data.images`."""
    refuse_other_media(row)
    key = next((key for key in (source.images_key, "images") if row.get(key)), None)
    if key:
        raise ImageError(
            f"{key}: the row has images; set data.images: {{}} to train a vision-language model, "
            "or remove the column"
        )


def refuse_other_media(row: dict[str, Any]) -> None:
    """Raise ImageError if a row has videos or sound."""
    # A text in `video` or `audio` may be a fact about the row; verl's `videos` is always media.
    lists = (key for key in _OTHER_COLUMNS if isinstance(row.get(key), list) and row[key])
    key = "videos" if row.get("videos") else next(lists, None)
    if key:
        raise ImageError(f"{key}: sluice reads no video and no sound; remove such rows")


@dataclass(slots=True)
class _Images:
    """Images of one row, in the order in which its prompt shows them."""

    column: list[Any]
    key: str
    # Entries of the column that the prompt has shown.
    used: int = 0
    found: list[RawImage] = field(default_factory=list)

    def next_of_column(self) -> dict[str, Any]:
        if self.used < len(self.column):
            self.found.append(raw_image(self.column[self.used], f"{self.key}[{self.used}]"))
        self.used += 1
        return image_part("")

    def inline(self, part: dict[str, Any], name: str) -> dict[str, Any]:
        self.found.append(raw_image(part, name))
        return image_part("")


def place_images(
    row: dict[str, Any], key: str, source: PromptSource, limits: ImageLimits
) -> tuple[Prompt, tuple[RawImage, ...]]:
    """Return a row's prompt with a part for each image, and the images in the same order.

    The parts refer to no image yet (`image.with_digests`).

    Parameters
    ----------
    row
        The row.
    key
        Column of the prompt.
    source
        Names of the columns.
    limits
        `data.images`.

    Raises
    ------
    ImageError
        If an image is in no known form, there are too many, or their number is not that of the
        placeholders.

    """
    refuse_other_media(row)
    images = _Images(_column(row, source.images_key), source.images_key)
    prompt = _placed(row[key], key, images)
    if images.used != len(images.column):
        raise ImageError(
            f"{source.images_key}: {len(images.column)} images for {images.used} {PLACEHOLDER} "
            f"placeholders in {key}; expected one placeholder for each"
        )
    if len(images.found) > limits.max_per_prompt:
        raise ImageError(
            f"{source.images_key}: {len(images.found)} images, and data.images.maxPerPrompt is "
            f"{limits.max_per_prompt}"
        )
    if images.found and isinstance(row[key], str) and not source.apply_chat_template:
        raise ImageError(
            f"{key}: a text with images needs applyChatTemplate: true, or a list of chat messages "
            "instead: only the model's chat template knows how an image is written"
        )
    return prompt, tuple(images.found)


def _column(row: dict[str, Any], key: str) -> list[Any]:
    value = row.get(key)
    if isinstance(value, str) and value.startswith("["):  # JSON text, as Parquet writers prefer
        try:
            value = load_json(value, key)
        except ValueError as error:
            raise ImageError(str(error)) from error
    if value is None or value == "":
        return []
    return value if isinstance(value, list) else [value]


def _placed(prompt: Any, key: str, images: _Images) -> Any:
    if isinstance(prompt, str):
        content = _of_text(prompt, images)
        return prompt if isinstance(content, str) else [{"role": "user", "content": content}]
    if not isinstance(prompt, list):
        return prompt  # the caller refuses it
    return [
        message | {"content": _of_content(message["content"], f"{key}[{position}]", images)}
        if isinstance(message, dict) and message.get("content") is not None
        else message
        for position, message in enumerate(prompt)
    ]


def _of_content(content: Any, name: str, images: _Images) -> Any:
    if isinstance(content, str):
        return _of_text(content, images)
    if not isinstance(content, list):
        return content
    parts = [_of_part(part, f"{name}.content[{i}]", images) for i, part in enumerate(content)]
    return content if parts == content else content_of(parts)


def _of_text(text: str, images: _Images) -> str | list[dict[str, Any]]:
    if PLACEHOLDER not in text:
        return text
    return list(_split(text, images))


def _split(text: str, images: _Images) -> Iterator[dict[str, Any]]:
    for position, piece in enumerate(text.split(PLACEHOLDER)):
        if position:
            yield images.next_of_column()
        if piece:
            yield {"type": "text", "text": piece}


def _of_part(part: Any, name: str, images: _Images) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in _OTHER_MEDIA:
        raise ImageError(f"{name}: sluice reads no video and no sound; remove such rows")
    if kind not in IMAGE_PART_TYPES:
        return part
    has_value = any(part.get(field) not in (None, "") for field in FIELDS)
    return images.inline(part, name) if has_value else images.next_of_column()
