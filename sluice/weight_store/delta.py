"""Lossless difference between two versions of the same bytes: `encode` and `apply`.

Few bf16 values change in a step of RL, and most of them by a bit or two. A delta has one bit for
each 16-bit word that says whether it changed, and the XOR of the words that did, low and high bytes
apart, all compressed with zstd. Bytes are XORed, not numbers subtracted, so NaN, -0 and any other
bit pattern survive. Applying a delta twice restores the old bytes: whoever applies one must know
what it is applied to (`digest`).

benchmarks/weight_deltas.py compares this format with others.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
import zstandard

if TYPE_CHECKING:
    from numpy.typing import NDArray

LEVEL = 1
# Bytes that are compared at once, which bounds the memory beside both versions.
BLOCK_BYTES = 16 << 20
# A header of zstd has at most 18 bytes.
_ZSTD_HEADER_BYTES = 18
# Of a block: its bytes, and those of bitmap, low and high bytes once compressed.
_HEADER = struct.Struct("<QQQQ")


class DeltaError(ValueError):
    """A delta that is damaged, or of other bytes."""


def digest(data: Any) -> str:
    """Return the hash of bytes or of an array by which a version of a file is verified."""
    return xxhash.xxh3_128_hexdigest(data)


def contents(path: Path) -> NDArray[np.uint8]:
    """Return the bytes of a file, which are read when they are used."""
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.empty(0, np.uint8)
    return np.memmap(path, np.uint8, mode="r")


def encode(old: NDArray[np.uint8], new: NDArray[np.uint8]) -> bytes:
    """Return the difference between two arrays of equal length.

    Parameters
    ----------
    old
        [bytes] what the receiver has.
    new
        [bytes] what it shall have.

    Returns
    -------
    The delta for `apply`.

    """
    if old.shape != new.shape or old.ndim != 1:
        raise ValueError(f"shapes {old.shape} and {new.shape}: expected two equal lengths")
    return b"".join(
        _encode_block(old[start : start + BLOCK_BYTES], new[start : start + BLOCK_BYTES])
        for start in range(0, len(new), BLOCK_BYTES)
    )


def apply(data: NDArray[np.uint8], delta: bytes) -> int:
    """Make the new version out of the old one, in place.

    Parameters
    ----------
    data
        [bytes] writable; the old version before, the new one after.
    delta
        What `encode` returned.

    Returns
    -------
    The number of 16-bit words that changed.

    Raises
    ------
    DeltaError
        The delta is damaged, or belongs to an array of another length. `data` may be partly new.

    """
    view, done, changed = memoryview(delta), 0, 0
    while view:
        if len(view) < _HEADER.size:
            raise DeltaError("a delta ends within a header")
        size, *lengths = _HEADER.unpack_from(view)
        end = _HEADER.size + sum(lengths)
        if not 0 < size <= BLOCK_BYTES or done + size > len(data) or end > len(view):
            raise DeltaError(f"a delta is longer than the {len(data)} bytes that it belongs to")
        changed += _apply_block(data[done : done + size], view[_HEADER.size : end], lengths)
        done, view = done + size, view[end:]
    if done != len(data):
        raise DeltaError(f"a delta covers {done} of {len(data)} bytes")
    return changed


def compress_file(source: Path, target: Path) -> None:
    """Compress a file that is sent whole."""
    with source.open("rb") as read, target.open("wb") as write:
        zstandard.ZstdCompressor(level=LEVEL).copy_stream(read, write, size=source.stat().st_size)


def expand_file(source: Path, target: Path, size: int) -> None:
    """Expand what `compress_file` has written, to exactly `size` bytes. Raises DeltaError."""
    with source.open("rb") as read, target.open("wb") as write, _damage():
        _check_size(read.read(_ZSTD_HEADER_BYTES), size)
        read.seek(0)
        _, written = zstandard.ZstdDecompressor().copy_stream(read, write)
    if written != size:
        raise DeltaError(f"{written} bytes were compressed, expected {size}")


def _compress(data: Any) -> bytes:
    return zstandard.ZstdCompressor(level=LEVEL).compress(data)


def _expand(data: Any, size: int) -> bytes:
    with _damage():
        _check_size(data, size)
        return zstandard.ZstdDecompressor().decompress(data)


@contextmanager
def _damage() -> Iterator[None]:
    try:
        yield
    except zstandard.ZstdError as error:
        raise DeltaError(f"compressed bytes are damaged: {error}") from error


def _check_size(frame: Any, size: int) -> None:
    """Check the size in a frame's header, because zstd allocates whatever a damaged one names."""
    named = zstandard.frame_content_size(frame)
    if named != size:
        raise DeltaError(f"{named} bytes were compressed, expected {size}")


def _encode_block(old: NDArray[np.uint8], new: NDArray[np.uint8]) -> bytes:
    changes = _words(old ^ new)
    changed = changes != 0
    values = changes[changed].view(np.uint8).reshape(-1, 2)
    parts = [
        _compress(np.packbits(changed, bitorder="little")),
        _compress(np.ascontiguousarray(values[:, 0])),
        _compress(np.ascontiguousarray(values[:, 1])),
    ]
    return _HEADER.pack(len(new), *map(len, parts)) + b"".join(parts)


def _apply_block(data: NDArray[np.uint8], body: memoryview, lengths: list[int]) -> int:
    words = -(-len(data) // 2)
    start, parts = 0, []
    for length in lengths:
        parts.append(body[start : start + length])
        start += length
    bits = np.frombuffer(_expand(parts[0], -(-words // 8)), np.uint8)
    # Most bytes of the bitmap are zero, so only the others are unpacked.
    occupied = np.flatnonzero(bits)
    rows, columns = np.nonzero(np.unpackbits(bits[occupied, None], axis=1, bitorder="little"))
    places = occupied[rows] * 8 + columns
    if len(places) and places[-1] >= words:
        raise DeltaError(f"a delta changes word {places[-1]} of {words}")
    values = np.empty((len(places), 2), np.uint8)
    for plane, part in enumerate(parts[1:]):
        values[:, plane] = np.frombuffer(_expand(part, len(places)), np.uint8)
    changes = values.reshape(-1).view(np.uint16)
    even = len(data) // 2 * 2
    if len(places) and places[-1] * 2 == even:  # the last byte of an odd length
        data[even] ^= values[-1, 0]
        places, changes = places[:-1], changes[:-1]
    data[:even].view(np.uint16)[places] ^= changes
    return len(values)


def _words(data: NDArray[np.uint8]) -> NDArray[np.uint16]:
    """Return bytes as words of 16 bits, with a zero after an odd length."""
    if len(data) % 2:
        data = np.append(data, np.uint8(0))
    return data.view(np.uint16)
