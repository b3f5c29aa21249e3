"""Read an image of a row: every form that data sets use, into the one form that sluice stores.

A stored image is a PNG, JPEG or WebP file in RGB with 8 bits a channel, turned as its EXIF data
say, and scaled down to `data.images.maxPixels`. A file that is so already is kept to the byte;
any other is decoded, changed and written as PNG. The bytes depend on the file, the limits and the
version of Pillow only, which is pinned.

Files of rows come from anywhere: the size in the header is checked before anything is decoded.
"""

from __future__ import annotations

import base64
import binascii
import errno
import io
import math
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from sluice.api.groups.data import ImageLimits
from sluice.api.schema.base import quantity_value
from sluice.images.image import Image

if TYPE_CHECKING:  # imported late: only jobs with images need Pillow
    import PIL.Image

# Most pixels that are decoded. A file of a few kilobytes can claim billions.
MAX_DECODED_PIXELS = 100_000_000
# Bytes of memory for a pixel while an image is decoded, changed and written.
BYTES_PER_PIXEL = 12
# Formats that are read; Pillow knows others, some of which run programs.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_MEDIA_TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp"}
# How their files begin. WebP has its name behind a length.
_BEGINNINGS = (b"\x89PNG", b"\xff\xd8", b"GIF8", b"BM", b"II*\0", b"MM\0*")
_RIFF, _WEBP = b"RIFF", b"WEBP"
_ORIENTATION = 0x0112  # EXIF tag
_ON_THEIR_SIDE = range(5, 9)  # its values that exchange width and height
_PNG_BIT_DEPTH = 24  # offset in a PNG file
# Fields of an object that may hold the image, in the order in which they are tried.
FIELDS = ("bytes", "base64", "image", "image_url", "url", "path")
# How base64 text of PNG, JPEG, WebP, GIF, BMP and TIFF files begins. No path looks like that:
# base64 has no dot.
_BASE64 = re.compile(r"(?:iVBORw0KGgo|/9j/|UklGR|R0lGOD|Qk|SUkq|TU0A)[A-Za-z0-9+/\s]*={0,2}\s*")
_DATA_URL = re.compile(r"data:([^,;]*)(?:;[^,;]+=[^,;]*)*;base64,", re.IGNORECASE)
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
_LONGEST_SHOWN = 80
# Errors of a disk or of a file system on a network, rather than of a path.
_OF_STORAGE = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN}
_OF_STORAGE |= {errno.EHOSTUNREACH, errno.EREMOTEIO, errno.ENOMEM, errno.EMFILE, errno.ENFILE}


class ImageError(ValueError):
    """An image cannot be used. The message says why; the caller knows the row."""


class ImageUnavailableError(ImageError):
    """An image cannot be read now, because of the storage that it is on. It may be later."""


@dataclass(frozen=True, slots=True)
class Base64:
    """Base64 text of a file."""

    text: str

    def decode(self) -> bytes:
        try:
            return base64.b64decode("".join(self.text.split()), validate=True)
        except (binascii.Error, ValueError) as error:
            raise ImageError(f"not valid base64: {error}") from error


@dataclass(frozen=True, slots=True)
class RawImage:
    """An image as a row holds it, not read yet.

    Parameters
    ----------
    name
        Place in the row, such as `images[0]`.
    source
        The file's bytes, base64 text of them, or its path, relative to the data file's directory.

    """

    name: str
    source: bytes | Base64 | Path


def raw_image(value: Any, name: str) -> RawImage:
    """Return an image of a row, without reading it.

    Parameters
    ----------
    value
        A path, a data URL, base64 text, the file's bytes, an object `{bytes, path}` (Hugging
        Face's datasets), or a part of a message's content (OpenAI's `image_url`, Qwen's `image`).
    name
        Place in the row, for messages.

    Raises
    ------
    ImageError
        If it is in none of these forms.

    """
    return RawImage(name, _source(value, name))


def _source(value: Any, name: str) -> bytes | Base64 | Path:
    if isinstance(value, bytes):
        return value
    if isinstance(value, str) and value:
        return _text_source(value, name)
    if isinstance(value, dict):
        field = next((key for key in FIELDS if value.get(key) not in (None, "")), None)
        if field is not None:
            inner = value[field]
            if field in ("bytes", "base64") and isinstance(inner, str):
                url = _DATA_URL.match(inner)
                return Base64(inner[url.end() :] if url else inner)
            return _source(inner, f"{name}.{field}")
    raise ImageError(
        f"{name}: expected an image: a path, a data URL, base64 text, or an object with bytes or "
        f"path; found {_shown(value)}"
    )


def _text_source(text: str, name: str) -> Base64 | Path:
    if text[:5].lower() == "data:":
        url = _DATA_URL.match(text)
        if url is None or not (url[1] == "" or url[1].startswith(("image/", "application/"))):
            raise ImageError(
                f"{name}: expected a data URL such as data:image/png;base64,..., found "
                f"{_shown(text)}"
            )
        return Base64(text[url.end() :])
    scheme = _SCHEME.match(text)
    if scheme and scheme[1].lower() == "file":
        return Path(text[scheme.end() :])
    if scheme:
        raise ImageError(
            f"{name}: {_shown(text)} is not fetched, because it may change or be gone during a "
            "run; download the image and give its path"
        )
    return Base64(text) if _BASE64.fullmatch(text) else Path(text)


def _shown(value: Any) -> str:
    text = repr(value) if isinstance(value, str | int | float) else type(value).__name__
    if isinstance(value, dict):
        text = f"an object with {', '.join(map(str, list(value)[:8])) or 'no field'}"
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def read_image(raw: RawImage, directory: Path, limits: ImageLimits) -> Image:
    """Read an image of a row into the form that sluice stores.

    Parameters
    ----------
    raw
        The image.
    directory
        Directory of the data file.
    limits
        `data.images`.

    Raises
    ------
    ImageError
        If it cannot be read or is beyond a limit; the message begins with its place in the row.

    """
    try:
        return stored_image(_file_bytes(raw, directory, limits), limits)
    except ImageError as error:
        raise type(error)(f"{raw.name}: {error}") from error


def read_header(raw: RawImage, directory: Path, limits: ImageLimits) -> Header:
    """Read the header of an image of a row; see `read_image`."""
    try:
        if not isinstance(raw.source, Path):
            return header(_file_bytes(raw, directory, limits))
        with _open_file(raw.source, directory, max_bytes(limits)) as file:
            return _header(file)
    except ImageError as error:
        raise type(error)(f"{raw.name}: {error}") from error


def _file_bytes(raw: RawImage, directory: Path, limits: ImageLimits) -> bytes:
    most = max_bytes(limits)
    if isinstance(raw.source, Path):
        with _open_file(raw.source, directory, most) as file:
            data = file.read(most + 1)
        _check_bytes(len(data), most)
        return data
    if isinstance(raw.source, Base64):
        # Refused before it is decoded.
        _check_bytes(max(1, len(raw.source.text) * 3 // 4 - 2), most)
        data = raw.source.decode()
    else:
        data = raw.source
    _check_bytes(len(data), most)
    return data


def max_bytes(limits: ImageLimits) -> int:
    """Return `data.images.maxBytes` as a number."""
    return int(quantity_value(str(limits.max_bytes)))


def _check_bytes(size: int, most: int) -> None:
    if size > most:
        raise ImageError(
            f"a file of {size} bytes, and data.images.maxBytes is {most}; raise the limit or "
            "make the image smaller"
        )
    if size <= 0:
        raise ImageError("the file is empty")


def _resolved(path: Path, directory: Path) -> Path:
    """Return the place of an image's file. Raises ImageError if it is outside of the directory.

    Rows may come from others than the directory: they must not name files elsewhere. Links in the
    directory are followed, because whoever wrote it decides what it holds, and the cache of
    Hugging Face's hub consists of links.
    """
    root = directory.absolute()
    whole = root / path
    if ".." in path.parts or not whole.is_relative_to(root):
        raise ImageError(
            f"the path {_shown(str(path))} leads out of {root}, the directory of the data file; "
            "put the images below it, and write paths relative to it"
        )
    return whole


@contextmanager
def _open_file(path: Path, directory: Path, most: int) -> Iterator[IO[bytes]]:
    place = _resolved(path, directory)
    try:
        status = place.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ImageError(f"{place}: not a file")
        _check_bytes(status.st_size, most)
        with place.open("rb") as file:
            yield file
    except ImageError:
        raise
    except FileNotFoundError as error:
        raise ImageError(f"{place}: no such file") from error
    except OSError as error:
        kind = ImageUnavailableError if error.errno in _OF_STORAGE else ImageError
        raise kind(f"{place}: {error.strerror or error}") from error
    except ValueError as error:  # a null byte in the path
        raise ImageError(f"{place}: {error}") from error


@dataclass(frozen=True, slots=True)
class Header:
    """What an image's file says of itself, before anything is decoded."""

    format: str
    width: int
    height: int
    # Bytes of the file.
    size: int

    @property
    def pixels(self) -> int:
        return self.width * self.height


def header(data: bytes) -> Header:
    """Read the header of an image's file, and check all that it tells.

    Raises
    ------
    ImageError
        If it is no image, is animated, has no pixels, or more than MAX_DECODED_PIXELS.

    """
    return _header(io.BytesIO(data))


def _header(file: IO[bytes]) -> Header:
    with _opened(file) as image:
        return Header(_format(image), *image.size, file.seek(0, io.SEEK_END))


def stored_image(data: bytes, limits: ImageLimits) -> Image:
    """Return the form in which sluice stores an image.

    Parameters
    ----------
    data
        A PNG, JPEG, WebP, GIF, BMP or TIFF file.
    limits
        `data.images`.

    Raises
    ------
    ImageError
        If it is not such a file, or is broken, animated or too large to be decoded.

    """
    with _opened(io.BytesIO(data)) as image:
        media_type = _MEDIA_TYPES.get(_format(image))
        try:
            changed = _changed(image, data, limits.max_pixels)
            if changed is None and media_type is not None:
                return Image(media_type, *image.size, data)
            return _as_png(image if changed is None else changed)
        except ImageError:
            raise
        except Exception as error:  # of a decoder, which raises any kind for broken data
            raise ImageError(f"the image is broken or cut off: {error}") from error


def check_stored(image: Image, limits: ImageLimits) -> None:
    """Raise ImageError unless an image is in the form in which sluice stores images."""
    _check_bytes(len(image.data), max_bytes(limits))
    small = header(image.data).pixels <= limits.max_pixels
    normal = stored_image(image.data, limits) if small else None
    if normal is None or normal.data != image.data:
        raise ImageError(
            "expected an image as sluice stores it (sluice.images.reading.stored_image): RGB, "
            f"turned, and of at most {limits.max_pixels} pixels"
        )
    claimed = image.media_type, image.width, image.height
    found = normal.media_type, normal.width, normal.height
    if claimed != found:
        raise ImageError(
            f"said to be {claimed[0]} of {claimed[1]} x {claimed[2]} pixels, and is {found[0]} of "
            f"{found[1]} x {found[2]}"
        )


def _opened(file: IO[bytes]) -> PIL.Image.Image:
    """Open an image and check its header."""
    import PIL
    from PIL import Image as Pillow

    bombs = (Pillow.DecompressionBombError, Pillow.DecompressionBombWarning)
    try:
        image = Pillow.open(file, formats=_FORMATS)
    except bombs as error:
        raise ImageError(_too_many("more pixels than Pillow opens")) from error
    except PIL.UnidentifiedImageError as error:
        raise ImageError(_unknown(file)) from error
    except Exception as error:  # of a decoder, which raises any kind for broken data
        raise ImageError(f"the header of the image is broken: {error}") from error
    width, height = image.size
    if not width * height:
        raise ImageError(f"an image of {width} x {height} pixels")
    if width * height > MAX_DECODED_PIXELS:
        raise ImageError(_too_many(f"an image of {width} x {height} pixels"))
    if _format(image) != "JPEG" and getattr(image, "is_animated", False):
        raise ImageError("an animated image; expected one frame, so extract the one that is meant")
    return image


def _too_many(what: str) -> str:
    return f"{what}; at most {MAX_DECODED_PIXELS} are decoded, so scale it down"


def begins_as_image(data: bytes) -> bool:
    """Return True if bytes begin as a file of one of the formats that are read."""
    return data.startswith(_BEGINNINGS) or (data[:4], data[8:12]) == (_RIFF, _WEBP)


def _unknown(file: IO[bytes]) -> str:
    file.seek(0)
    data = file.read(4096)
    if b"<svg" in data.lower():
        return "an SVG drawing; convert it to PNG"
    if begins_as_image(data) or data.startswith(_RIFF):
        return "the header of the image is broken, or it has no pixels"
    return f"not an image of a known format ({', '.join(_FORMATS)}): it begins with {data[:12]!r}"


def _format(image: PIL.Image.Image) -> str:
    # A JPEG with further pictures behind it, as phones write: a preview, or the other eye.
    return "JPEG" if image.format == "MPO" else image.format or ""


def _changed(image: PIL.Image.Image, data: bytes, max_pixels: int) -> PIL.Image.Image | None:
    """Return the image in RGB, turned and scaled down; None if nothing has to change."""
    from PIL import Image as Pillow
    from PIL import ImageOps

    size = image.size
    target = scaled(*size, max_pixels)
    # A JPEG that is scaled down is decoded at a half, a quarter or an eighth of its size.
    image.draft("RGB", target)
    image.load()
    orientation = image.getexif().get(_ORIENTATION, 1)
    turned = orientation in range(2, 9)
    deep = image.format == "PNG" and data[_PNG_BIT_DEPTH] > 8
    plain = image.mode == "RGB" and "transparency" not in image.info and not deep
    if plain and not turned and size == target and image.format != "MPO":
        return None
    result = _rgb(ImageOps.exif_transpose(image) if turned else image)
    if orientation in _ON_THEIR_SIDE:
        target = target[::-1]
    return result if target == result.size else result.resize(target, Pillow.Resampling.LANCZOS)


def _rgb(image: PIL.Image.Image) -> PIL.Image.Image:
    """Return the image in RGB; what is transparent becomes white."""
    from PIL import Image as Pillow

    if image.mode.startswith("I;16") or image.mode == "I":
        values = np.asarray(image).astype(np.int64)
        if values.min() < 0 or values.max() > np.iinfo(np.uint16).max:
            raise ImageError("an image of 32-bit integers; convert it to 8 or 16 bits a channel")
        return Pillow.fromarray((values >> 8).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise ImageError("an image of floating-point numbers; convert it to 8 bits a channel")
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        colours = image.convert("RGBA")
        white = Pillow.new("RGBA", colours.size, (255, 255, 255, 255))
        white.alpha_composite(colours)
        return white.convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def scaled(width: int, height: int, max_pixels: int) -> tuple[int, int]:
    """Return a size of at most `max_pixels`, in proportion; the same if it is so already."""
    if width * height <= max_pixels:
        return width, height
    factor = math.sqrt(max_pixels / (width * height))
    small = max(1, math.floor(min(width, height) * factor))
    large = max(1, min(math.floor(max(width, height) * factor), max_pixels // small))
    return (large, small) if width >= height else (small, large)


def _as_png(image: PIL.Image.Image) -> Image:
    image.info = {}  # profiles and texts would become a part of the file
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=3)
    return Image("image/png", *image.size, file.getvalue())
