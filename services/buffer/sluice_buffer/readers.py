"""Rows of prompt files: JSON Lines, JSON, Parquet, directories of them, slices of them.

Only the place of each row is kept in memory (8 bytes a row). JSON Lines are read where they lie; JSON and Parquet,
which cannot be read row by row in any order, are written once as JSON Lines to an unnamed temporary file beside the
database.
"""

from __future__ import annotations

import json
import tempfile
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import xxhash

from sluice.api.data import parse_path
from sluice.environment import ConfigurationError

ENDINGS = (".jsonl", ".json", ".parquet")
Row = dict[str, Any]
Check = Callable[[Row], str | None]
"""What is wrong with a row, or None."""


def files_of(path: Path) -> list[Path]:
    """The file itself, or the prompt files of a directory by name."""
    if path.is_dir():
        found = sorted(p for p in path.iterdir() if p.suffix in ENDINGS and p.is_file())
        if not found:
            raise ConfigurationError(f"{path}: no {', '.join(ENDINGS)} file in this directory")
        return found
    if not path.is_file():
        raise ConfigurationError(f"{path}: no such prompt file")
    if path.suffix not in ENDINGS:
        raise ConfigurationError(f"{path}: expected a file that ends with {', '.join(ENDINGS)}")
    return [path]


@dataclass(slots=True)
class _Place:
    """Where the rows of one file are."""

    file: IO[bytes]
    offsets: array[int] = field(default_factory=lambda: array("Q"))


class Table:
    """The rows of one source. Row numbers count from 0 over all files of the source, before the slice."""

    def __init__(self, places: list[_Place], rows: range, fingerprint: str) -> None:
        self._places = places
        self._rows = rows
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        return len(self._rows)

    def number(self, position: int) -> int:
        """Row number in the file of a position in the slice."""
        return self._rows[position]

    def row(self, position: int) -> Row:
        at = self._rows[position]
        for place in self._places:
            if at < len(place.offsets):
                place.file.seek(place.offsets[at])
                row: Row = json.loads(place.file.readline())
                return row
            at -= len(place.offsets)
        raise IndexError(f"row {position} of {len(self)}")

    def close(self) -> None:
        for place in self._places:
            place.file.close()


def open_table(text: str, check: Check, spool: Path) -> Table:
    """Open a source and look at every row of it. ConfigurationError `file:line: what` for the first row that is not
    sound.

    The fingerprint covers the bytes of all files, so that a changed file is noticed whatever its dates say.
    """
    path, part = parse_path(text)
    digest = xxhash.xxh3_128()
    places: list[_Place] = []
    total = 0
    for file in files_of(path):
        try:
            places.append(
                _open_lines(file, check, digest)
                if file.suffix == ".jsonl"
                else _open_spooled(file, check, digest, spool)
            )
        except OSError as error:
            raise ConfigurationError(f"{file}: {error.strerror or error}") from error
        total += len(places[-1].offsets)
    rows = range(total)[part]
    if not rows:
        raise ConfigurationError(f"{text}: no rows" + (f" in this slice of {total}" if total else ""))
    return Table(places, rows, digest.hexdigest())


def _open_lines(path: Path, check: Check, digest: xxhash.xxh3_128) -> _Place:
    place = _Place(path.open("rb"))
    offset = 0
    for number, line in enumerate(place.file, start=1):
        digest.update(line)
        if not line.isspace():
            _check_row(_decode(line, f"{path}:{number}"), check, f"{path}:{number}")
            place.offsets.append(offset)
        offset += len(line)
    return place


def _decode(data: bytes, where: str) -> Any:
    try:
        return json.loads(data)
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{where}: not UTF-8 text: {error.reason} at byte {error.start}") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigurationError(f"{where}: not valid JSON: {error}") from error


def _check_row(row: Any, check: Check, where: str) -> None:
    problem = check(row) if isinstance(row, dict) else f"a row must be an object, found {type(row).__name__}"
    if problem:
        raise ConfigurationError(f"{where}: {problem}")


def _open_spooled(path: Path, check: Check, digest: xxhash.xxh3_128, spool: Path) -> _Place:
    with path.open("rb") as file:
        while data := file.read(1 << 20):
            digest.update(data)
    place = _Place(tempfile.TemporaryFile(dir=spool))  # noqa: SIM115 - open for the life of the table
    rows = _json_rows(path) if path.suffix == ".json" else _parquet_rows(path)
    word = "row" if path.suffix == ".json" else "parquet row"
    for number, row in enumerate(rows):
        _check_row(row, check, f"{path}: {word} {number}")
        place.offsets.append(place.file.tell())
        place.file.write(json.dumps(row, ensure_ascii=False, default=str).encode() + b"\n")
    place.file.flush()
    return place


def _json_rows(path: Path) -> Iterator[Any]:
    rows = _decode(path.read_bytes(), str(path))
    if not isinstance(rows, list):
        raise ConfigurationError(f"{path}: expected a list of rows, found {type(rows).__name__}")
    yield from rows


def _parquet_rows(path: Path) -> Iterator[Any]:
    import pyarrow as pa  # here: importing it takes half a second that most jobs need not spend
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except pa.ArrowException as error:
        raise ConfigurationError(f"{path}: not a readable Parquet file: {error}") from error
