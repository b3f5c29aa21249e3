"""Random access to the rows of a source.

Only the offset of each row is kept in memory (8 bytes a row). JSON Lines are read in place; JSON
and Parquet, which cannot be read row by row in any order, are written once as JSON Lines to an
unnamed temporary file in the directory of the database.
"""

from __future__ import annotations

import json
import tempfile
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import xxhash

from sluice.api.groups.data import parse_path
from sluice.data.checking import slice_of
from sluice.data.files import LocatedRow, Row, files_of, read_file
from sluice.data.writers import json_bytes
from sluice.runtime.pod_env import ConfigurationError

# Returns what is wrong with a row; None if it is valid.
RowCheck = Callable[[Row], str | None]


@dataclass(slots=True)
class _IndexedFile:
    """A file, and the offset of each of its rows."""

    file: IO[bytes]
    offsets: array[int] = field(default_factory=lambda: array("Q"))


class Table:
    """The rows of one source.

    Row numbers count from 0 over all files of the source, before the slice.
    """

    def __init__(self, places: list[_IndexedFile], rows: range, fingerprint: str) -> None:
        self._places = places
        self._rows = rows
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        return len(self._rows)

    def number(self, position: int) -> int:
        """Return the row number in the file of a position in the slice."""
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


def open_table(text: str, check: RowCheck, spool: Path) -> Table:
    """Open a source and check every row of it.

    The fingerprint covers the bytes of all files, so that a changed file is noticed whatever its
    dates are. Raises ConfigurationError `file:line: reason` for the first row that is not valid.
    """
    path, part = parse_path(text)
    digest = xxhash.xxh3_128()
    places: list[_IndexedFile] = []
    total = 0
    for file in files_of(path):
        try:
            places.append(_open(file, check, digest, spool))
        except OSError as error:
            raise ConfigurationError(f"{file}: {error.strerror or error}") from error
        total += len(places[-1].offsets)
    return Table(places, slice_of(text, total, part), digest.hexdigest())


def _open(path: Path, check: RowCheck, digest: xxhash.xxh3_128, spool: Path) -> _IndexedFile:
    if path.suffix == ".jsonl":
        place = _IndexedFile(path.open("rb"))
        for located in read_file(path, digest.update):
            _check(located, check)
            place.offsets.append(located.offset)
        return place
    with path.open("rb") as file:
        while data := file.read(1 << 20):
            digest.update(data)
    place = _IndexedFile(tempfile.TemporaryFile(dir=spool))  # noqa: SIM115 - open for the life of the table
    for located in read_file(path):
        _check(located, check)
        place.offsets.append(place.file.tell())
        try:
            place.file.write(json_bytes(located.row) + b"\n")
        except (ValueError, RecursionError) as error:  # perhaps of a column that is not used
            raise ConfigurationError(f"{located.where}: not writable as JSON: {error}") from error
    place.file.flush()
    return place


def _check(located: LocatedRow, check: RowCheck) -> None:
    if wrong := check(located.row):
        raise ConfigurationError(f"{located.where}: {wrong}")
