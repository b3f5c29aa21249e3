"""Random access to the rows of a source.

Only the offset of each row is kept in memory (8 bytes a row). JSON Lines are read in place; JSON,
Parquet and Harbor tasks, which cannot be read row by row in any order, are written once as JSON
Lines to an unnamed temporary file in the directory of the database.
"""

from __future__ import annotations

import io
import json
import tempfile
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import xxhash

from sluice.api.groups.data import parse_path
from sluice.data import harbor
from sluice.data.checking import slice_of
from sluice.data.files import LocatedRow, Row, files_of, read_file
from sluice.data.writers import json_bytes
from sluice.runtime.pod_env import ConfigurationError

_BLOCK = 1 << 20
# Returns what is wrong with a row; None if it is valid.
RowCheck = Callable[[Row], str | None]


@dataclass(slots=True)
class _IndexedFile:
    """A file, and the offset of each of its rows.

    `file` may be a copy of the file at `path`, as JSON Lines.
    """

    path: Path
    file: IO[bytes]
    offsets: array[int] = field(default_factory=lambda: array("Q"))
    lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self, position: int) -> bytes:
        with self.lock:
            self.file.seek(self.offsets[position])
            return self.file.readline()

    def size(self, position: int) -> int:
        """Return the bytes of a row, with its neighbours' white space."""
        if position + 1 < len(self.offsets):
            return self.offsets[position + 1] - self.offsets[position]
        with self.lock:
            return self.file.seek(0, io.SEEK_END) - self.offsets[position]

    def where(self, position: int) -> str:
        """Return `file:line` of a row, the folder of a task, or the file and the row's number."""
        if self.path.is_dir():
            return str(harbor.task_folders(self.path)[position])
        if self.path.suffix != ".jsonl":
            return f"{self.path}: row {position}"
        with self.path.open("rb") as file:
            left, line = self.offsets[position], 1
            while left > 0 and (data := file.read(min(left, _BLOCK))):
                line += data.count(b"\n")
                left -= len(data)
        return f"{self.path}:{line}"


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
        """Return a row. May be called from any thread."""
        place, at = self._find(position)
        row: Row = json.loads(place.read(at))
        return row

    def size(self, position: int) -> int:
        """Return the bytes of a row as JSON."""
        place, at = self._find(position)
        return place.size(at)

    def where(self, position: int) -> str:
        """Return the place of a row, for people; may read its file."""
        place, at = self._find(position)
        return place.where(at)

    def directory(self, position: int) -> Path:
        """Return the directory of the file that a row is from."""
        return self._find(position)[0].path.parent

    def _find(self, position: int) -> tuple[_IndexedFile, int]:
        """Return the file of a row, and its number in the file."""
        at = self._rows[position]
        for place in self._places:
            if at < len(place.offsets):
                return place, at
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
    if path.suffix == ".jsonl" and not path.is_dir():
        place = _IndexedFile(path, path.open("rb"))
        for located in read_file(path, digest.update):
            _check(located, check)
            place.offsets.append(located.offset)
        return place
    if not path.is_dir():
        with path.open("rb") as file:
            while data := file.read(1 << 20):
                digest.update(data)
    place = _IndexedFile(path, tempfile.TemporaryFile(dir=spool))  # noqa: SIM115 - open for the life of the table
    for located in read_file(path):
        _check(located, check)
        place.offsets.append(place.file.tell())
        try:
            line = json_bytes(located.row) + b"\n"
        except (ValueError, RecursionError) as error:  # perhaps of a column that is not used
            raise ConfigurationError(f"{located.where}: not writable as JSON: {error}") from error
        if path.is_dir():  # tasks: their rows have all that is read of their files
            digest.update(line)
        with _copying(path, spool):
            place.file.write(line)
    with _copying(path, spool):
        place.file.flush()
    return place


@contextmanager
def _copying(path: Path, spool: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigurationError(
            f"{path}: its copy as JSON Lines cannot be written to {spool}, the buffer's storage: "
            f"{error.strerror or error}. Make buffer.storage.size larger, or give JSON Lines, "
            "which are read in place, with paths of images"
        ) from error


def _check(located: LocatedRow, check: RowCheck) -> None:
    if wrong := check(located.row):
        raise ConfigurationError(f"{located.where}: {wrong}")
