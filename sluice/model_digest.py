"""A digest of the tensors of a Hugging Face checkpoint, by which copies of a model are compared.

Engines that get an adapter alone read the model from their own files, so they run this file too: it
needs the standard library and `model_parts` only.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from .model_parts import INDEXES, SINGLE, safetensors_header

_PICKLED = "pytorch_model.bin"
# Bytes that a thread reads and hashes at a time. Larger tensors are divided.
_PIECE = 16 << 20
# More threads would read hardly faster, and take CPUs from the loading of the model.
_THREADS = 8


class _Piece(NamedTuple):
    """Bytes of a file, and what they are; in the order in which pieces are hashed."""

    name: str
    # Position in the tensor, or in the file that is hashed whole.
    position: int
    # Type and shape of the tensor.
    kind: str
    file: Path
    offset: int
    length: int


def model_digest(directory: Path) -> str:
    """Return the digest of name, type, shape and bytes of all tensors, in the order of their names.

    It does not depend on how the checkpoint is divided into files, nor on how it is loaded. Files
    of the older `.bin` format are hashed whole.

    Raises
    ------
    OSError
        A file does not exist, or cannot be read.
    ValueError
        A file is damaged, or the directory has no weights.

    """
    pieces = sorted(_pieces(directory))
    if not pieces:
        raise ValueError(f"{directory} has no weights: expected {SINGLE} or {INDEXES[0]}")
    digest = hashlib.sha256()
    with ThreadPoolExecutor(min(_THREADS, len(os.sched_getaffinity(0)))) as threads:
        for piece, content in zip(pieces, threads.map(_hashed, pieces), strict=True):
            digest.update(json.dumps([piece.name, piece.position, piece.kind]).encode() + content)
    return digest.hexdigest()


def _pieces(directory: Path) -> Iterator[_Piece]:
    for file, names in _files(directory).items():
        if file.suffix != ".safetensors":
            yield from _divided(file.name, "file", file, 0, file.stat().st_size)
            continue
        header = safetensors_header(file)
        with file.open("rb") as opened:
            first = 8 + int.from_bytes(opened.read(8), "little")
        for name in header if names is None else names:
            if name not in header:
                raise ValueError(f"{file} has no tensor {name}, which the index of the model names")
            entry = header[name]
            start, end = entry["data_offsets"]
            kind = f"{entry['dtype']} {entry['shape']}"
            yield from _divided(name, kind, file, first + start, end - start)


def _files(directory: Path) -> dict[Path, list[str] | None]:
    """Return the files with the weights, and the names of their tensors; None: all."""
    for index in INDEXES:
        if (directory / index).is_file():
            files: dict[Path, list[str] | None] = {}
            for name, file in json.loads((directory / index).read_text())["weight_map"].items():
                named = files.setdefault(directory / file, [])
                assert named is not None
                named.append(name)
            return files
    singles = (directory / SINGLE, directory / _PICKLED)
    return {file: None for file in singles if file.is_file()}


def _divided(name: str, kind: str, file: Path, offset: int, length: int) -> Iterator[_Piece]:
    for position in range(0, max(length, 1), _PIECE):
        size = min(_PIECE, length - position)
        yield _Piece(name, position, kind, file, offset + position, size)


def _hashed(piece: _Piece) -> bytes:
    with piece.file.open("rb", buffering=0) as file:
        file.seek(piece.offset)
        content = file.read(piece.length)
    if len(content) != piece.length:
        raise ValueError(f"{piece.file} is damaged: it ends in {piece.name}: download it again")
    return hashlib.sha256(content).digest()


def main() -> None:
    """Print the digest of the model in the directory that the first argument names, or fail."""
    try:
        print(model_digest(Path(sys.argv[1])))
    except (KeyError, OSError, TypeError, ValueError) as error:
        sys.exit(f"{error or type(error).__name__}")
