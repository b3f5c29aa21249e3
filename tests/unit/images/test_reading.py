"""Images of rows: every form that a row may hold, and the form that is stored."""

import base64
import errno
import io
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as Pillow
from PIL import ImageOps

from sluice.api.groups.data import ImageLimits
from sluice.images.image import Image
from sluice.images.reading import (
    ImageError,
    ImageUnavailableError,
    check_stored,
    raw_image,
    read_header,
    read_image,
    scaled,
    stored_image,
)
from tests.images import drawn, encoded, png

LIMITS = ImageLimits()
FILE = png().data
TEXT = base64.b64encode(FILE).decode()


def limits(**values: Any) -> ImageLimits:
    return ImageLimits.model_validate(values)


def pixels(image: Image) -> np.ndarray[Any, Any]:
    """What a reader sees."""
    return np.asarray(Pillow.open(io.BytesIO(image.data)))


@pytest.mark.parametrize(
    "value",
    [
        "pictures/one.png",
        "file://{directory}/pictures/one.png",
        "{directory}/pictures/one.png",
        f"data:image/png;base64,{TEXT}",
        f"data:image/png;charset=utf-8;base64,{TEXT}",
        TEXT,
        FILE,
        {"bytes": FILE, "path": None},
        {"bytes": FILE, "path": "elsewhere.png"},
        {"bytes": None, "path": "pictures/one.png"},
        {"bytes": TEXT},
        {"path": "pictures/one.png"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{TEXT}"}},
        {"type": "image_url", "image_url": f"data:image/png;base64,{TEXT}"},
        {"type": "image", "image": "pictures/one.png"},
        {"type": "image", "image": "file://{directory}/pictures/one.png"},
        {"image": {"bytes": FILE}},
    ],
    ids=lambda value: str(value)[:30],
)
def test_every_form_is_read(value: Any, tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures/one.png").write_bytes(FILE)
    value = _filled(value, tmp_path)
    raw = raw_image(value, "images[0]")
    assert read_image(raw, tmp_path, LIMITS) == png()
    assert read_header(raw, tmp_path, LIMITS).pixels == 48


def _filled(value: Any, directory: Path) -> Any:
    if isinstance(value, dict):
        return {key: _filled(entry, directory) for key, entry in value.items()}
    if isinstance(value, str):
        return value.replace("{directory}", str(directory))
    return value


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("https://example.com/a.png", r"images\[0\]: 'https://.*' is not fetched.*download"),
        ({"image_url": {"url": "http://a/b"}}, r"images\[0\]\.image_url\.url: .*is not fetched"),
        ("data:text/html;base64,AAAA", "expected a data URL such as"),
        ("data:image/png,plain", "expected a data URL such as"),
        (7, "expected an image: a path, .*; found 7"),
        (None, "found NoneType"),
        ("", "expected an image"),
        ([1], "found list"),
        ({"bytes": None, "path": None}, "an object with bytes, path"),
        ({"width": 3}, "an object with width"),
    ],
    ids=str,
)
def test_what_is_no_image_is_refused(value: Any, reason: str) -> None:
    with pytest.raises(ImageError, match=reason):
        raw_image(value, "images[0]")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("none.png", r"^images\[0\]: .*/none.png: no such file$"),
        ("../one.png", "leads out of .*, the directory of the data file; put the images below"),
        ("sub/../../one.png", "leads out of"),
        ("/etc/passwd", "leads out of"),
        ("file:///etc/passwd", "leads out of"),
        ("sub", "not a file"),
        ("a\0b", "null byte"),
        ("\ud800.png", "surrogates not allowed|can't encode"),
        ({"bytes": "%%%"}, "not valid base64"),
        ({"bytes": b""}, "not an image of a known format|the file is empty"),
        ({"bytes": b"hello"}, "not an image of a known format .* begins with b'hello'"),
        ({"bytes": b"<?xml version='1.0'?><svg width='1'></svg>"}, "an SVG drawing; convert it"),
        ({"bytes": FILE[:20]}, "header of the image is broken"),
        ({"bytes": FILE[:-40]}, "the image is broken or cut off"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_file_that_cannot_be_read_says_why(value: Any, reason: str, tmp_path: Path) -> None:
    (tmp_path / "one.png").write_bytes(FILE)
    directory = tmp_path / "data"
    (directory / "sub").mkdir(parents=True)
    with pytest.raises(ImageError, match=reason):
        read_image(raw_image(value, "images[0]"), directory, LIMITS)


@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.EIO, ImageUnavailableError), (errno.EACCES, ImageError)],
    ids=["storage", "path"],
)
def test_a_fault_of_the_storage_is_told_from_one_of_the_path(
    number: int, kind: type[ImageError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(path: Path) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "stat", fails)
    for read in (read_image, read_header):
        with pytest.raises(ImageError, match=r"^images\[0\]: /.*/a.png: ") as raised:
            read(raw_image("a.png", "images[0]"), tmp_path, LIMITS)
        assert type(raised.value) is kind


def test_links_in_the_directory_are_followed(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(FILE)
    directory = tmp_path / "data"
    directory.mkdir()
    (directory / "one.png").symlink_to("../blob")
    assert read_image(raw_image("one.png", ""), directory, LIMITS) == png()


@pytest.mark.parametrize("form", ["path", "base64", "bytes"])
def test_a_large_file_is_refused_in_every_form(form: str, tmp_path: Path) -> None:
    (tmp_path / "one.png").write_bytes(FILE)
    value = {"path": "one.png", "base64": {"base64": TEXT}, "bytes": {"bytes": FILE}}[form]
    small = limits(maxBytes="100")
    with pytest.raises(ImageError, match=r"a file of \d+ bytes, .*maxBytes is 100"):
        read_image(raw_image(value, "images[0]"), tmp_path, small)


def bomb(width: int, height: int) -> bytes:
    """A PNG of few bytes that claims many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = (b"IHDR", head), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (bomb(10_001, 10_000), "an image of 10001 x 10000 pixels; at most 100000000"),
        (bomb(60_000, 60_000), "more pixels than Pillow opens; at most"),
        (bomb(0, 5), "0 x 5 pixels|header of the image is broken"),
        (
            encoded(drawn(), "GIF", save_all=True, append_images=[drawn(seed=1)]),
            "an animated image; expected one frame",
        ),
        (
            encoded(drawn(), "WEBP", save_all=True, append_images=[drawn(seed=1)]),
            "an animated image; expected one frame",
        ),
        (
            encoded(drawn(), "PNG", save_all=True, append_images=[drawn(seed=1)]),
            "an animated image; expected one frame",
        ),
    ],
    ids=["bomb", "larger bomb", "no pixels", "GIF", "WebP", "APNG"],
)
def test_unusable_images_are_refused_before_they_are_decoded(data: bytes, reason: str) -> None:
    with pytest.raises(ImageError, match=reason):
        stored_image(data, LIMITS)
    with pytest.raises(ImageError, match=reason):
        read_header(raw_image(data, ""), Path(), LIMITS)


@pytest.mark.parametrize("format_", ["PNG", "JPEG", "WEBP"])
def test_a_file_that_needs_no_change_is_kept_to_the_byte(format_: str) -> None:
    data = encoded(drawn(30, 20), format_)
    assert stored_image(data, LIMITS) == Image(f"image/{format_.lower()}", 30, 20, data)


def _transparent() -> Pillow.Image:
    image = drawn(2, 1, mode="RGBA")
    image.putpixel((0, 0), (10, 20, 30, 0))
    image.putpixel((1, 0), (10, 20, 30, 255))
    return image


def _palette() -> Pillow.Image:
    image = Pillow.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 255, 0])
    image.putpixel((1, 0), 1)
    return image


WHITE_THEN_DARK = [[[255, 255, 255], [10, 20, 30]]]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (encoded(_transparent()), WHITE_THEN_DARK),
        (encoded(_transparent(), "WEBP", lossless=True, exact=True), WHITE_THEN_DARK),
        (encoded(_palette()), [[[255, 0, 0], [0, 255, 0]]]),
        (encoded(_palette(), transparency=0), [[[255, 255, 255], [0, 255, 0]]]),
        (encoded(_palette(), "GIF"), [[[255, 0, 0], [0, 255, 0]]]),
        (encoded(Pillow.new("L", (1, 1), 7)), [[[7, 7, 7]]]),
        (encoded(Pillow.new("LA", (1, 1), (7, 0))), [[[255, 255, 255]]]),
        (encoded(Pillow.new("1", (1, 1), 1)), [[[255, 255, 255]]]),
        (encoded(Pillow.new("I;16", (1, 1), 0x1234)), [[[0x12, 0x12, 0x12]]]),
        (encoded(Pillow.new("I;16", (1, 1), 0xFFFF), "TIFF"), [[[255, 255, 255]]]),
        (encoded(Pillow.new("RGB", (1, 1), (1, 2, 3)), transparency=(1, 2, 3)), [[[255] * 3]]),
        (encoded(Pillow.new("RGB", (1, 1), (1, 2, 3)), "BMP"), [[[1, 2, 3]]]),
        (encoded(Pillow.new("CMYK", (8, 8), (0, 0, 0, 255)), "JPEG"), [[[0] * 3] * 8] * 8),
    ],
    ids=[
        "alpha", "alpha WebP", "palette", "palette with transparency", "GIF", "grey",
        "grey with alpha", "black and white", "16 bits", "16 bits TIFF", "transparent colour",
        "BMP", "CMYK",
    ],
)  # fmt: skip
def test_other_colours_become_rgb(data: bytes, expected: Any) -> None:
    image = stored_image(data, LIMITS)
    assert image.media_type == "image/png"
    assert pixels(image).tolist() == expected
    check_stored(image, LIMITS)


def test_16_bits_a_channel_become_8() -> None:
    rows = b"\0" + struct.pack(">6H", 0x1234, 0xFFFF, 0, 0x00FF, 0x8000, 0x7FFF)
    data = bomb(2, 1)
    head = struct.pack(">IIBBBBB", 2, 1, 16, 2, 0, 0, 0)
    old = struct.pack(">IIBBBBB", 2, 1, 8, 2, 0, 0, 0)
    data = data.replace(old, head).replace(
        struct.pack(">I", zlib.crc32(b"IHDR" + old)), struct.pack(">I", zlib.crc32(b"IHDR" + head))
    )
    empty, full = zlib.compress(b""), zlib.compress(rows)
    data = data.replace(
        struct.pack(">I", len(empty))
        + b"IDAT"
        + empty
        + struct.pack(">I", zlib.crc32(b"IDAT" + empty)),
        struct.pack(">I", len(full))
        + b"IDAT"
        + full
        + struct.pack(">I", zlib.crc32(b"IDAT" + full)),
    )
    image = stored_image(data, LIMITS)
    assert image.data != data
    assert pixels(image).tolist() == [[[0x12, 0xFF, 0], [0, 0x80, 0x7F]]]


@pytest.mark.parametrize(
    ("mode", "reason"), [("F", "floating-point"), ("I", "32-bit integers")], ids=["F", "I"]
)
def test_pixels_that_are_no_colours_are_refused(mode: str, reason: str) -> None:
    with pytest.raises(ImageError, match=reason):
        stored_image(encoded(Pillow.new(mode, (2, 2), 1 << 20), "TIFF"), LIMITS)


def exif(orientation: int) -> bytes:
    data = Pillow.Exif()
    data[0x0112] = orientation
    return data.tobytes()


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format_", ["PNG", "JPEG", "WEBP"])
def test_images_are_turned_as_their_exif_data_say(orientation: int, format_: str) -> None:
    source = Pillow.new("RGB", (16, 32), (255, 255, 255))
    source.paste((0, 0, 0), (0, 0, 16, 8))
    data = encoded(source, format_, exif=exif(orientation))
    image = stored_image(data, LIMITS)
    seen = np.asarray(ImageOps.exif_transpose(Pillow.open(io.BytesIO(data))))
    assert (image.data == data) is (orientation == 1)
    assert (image.height, image.width) == seen.shape[:2]
    assert np.array_equal(pixels(image), seen)
    check_stored(image, LIMITS)


@pytest.mark.parametrize("format_", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", [1, 6])
def test_large_images_are_scaled_down_in_proportion(format_: str, orientation: int) -> None:
    data = encoded(drawn(400, 200), format_, exif=exif(orientation))
    image = stored_image(data, limits(maxPixels=5000))
    assert (image.width, image.height) == ((100, 50) if orientation == 1 else (50, 100))
    assert pixels(image).shape[:2] == (image.height, image.width)
    check_stored(image, limits(maxPixels=5000))


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(1, 10**7))
def test_a_scaled_size_fits_and_keeps_its_proportion(width: int, height: int, most: int) -> None:
    new = scaled(width, height, most)
    assert 1 <= new[0] * new[1] <= most
    assert new == (width, height) or width * height > most
    assert scaled(height, width, most) == new[::-1]
    if min(new) > 1:
        assert abs(new[0] / new[1] - width / height) <= 2 * (width / height) / min(new)


def test_the_same_file_gives_the_same_bytes() -> None:
    data = encoded(drawn(300, 200, mode="RGBA"))
    small = limits(maxPixels=10_000)
    assert stored_image(data, small) == stored_image(data, small)


def test_profiles_and_texts_do_not_get_into_a_rewritten_file() -> None:
    plain = encoded(drawn(mode="L"))
    marked = encoded(drawn(mode="L"), icc_profile=b"profile", dpi=(72, 72), exif=exif(1))
    assert plain != marked
    assert stored_image(plain, LIMITS) == stored_image(marked, LIMITS)


FILES: list[Callable[[], bytes]] = [
    lambda: encoded(drawn(20, 10)),
    lambda: encoded(drawn(20, 10), "JPEG"),
    lambda: encoded(drawn(20, 10), "WEBP"),
    lambda: encoded(drawn(20, 10, mode="L"), "GIF"),
    lambda: encoded(drawn(20, 10), "TIFF"),
    lambda: encoded(drawn(20, 10), "BMP"),
]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(FILES), st.data())
def test_no_broken_file_raises_anything_else(
    make: Callable[[], bytes], data: st.DataObject
) -> None:
    broken = bytearray(make())
    for _ in range(data.draw(st.integers(1, 4))):
        broken[data.draw(st.integers(0, len(broken) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(broken)))
    try:
        image = stored_image(bytes(broken[:cut]), LIMITS)
    except ImageError:
        return
    check_stored(image, LIMITS)
