"""Read rows of prompt files in order: JSON Lines, JSON, Parquet, directories and slices of them.

A directory of Harbor tasks counts as one file. Files are streamed. A row is an object; anything
else raises ConfigurationError `file:line:column: what`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from sluice.api.groups.data import parse_path
from sluice.data import harbor
from sluice.data.json_list import read_json_list
from sluice.runtime.pod_env import ConfigurationError

ENDINGS = (".jsonl", ".json", ".parquet")
Row = dict[str, Any]
# First letters of files that are no rows: macOS `._rows.parquet`, Spark `_metadata`.
# pyarrow skips them too.
_HIDDEN = (".", "_")
# Most rows, and about most bytes, of a Parquet file that are converted at a time.
_BATCH_ROWS = 1024
_BATCH_BYTES = 32 << 20


@dataclass(slots=True)
class LocatedRow:
    """A row and its position.

    Attributes
    ----------
    number
        Position in the file, from 0.
    line, column
        Position in the text, from 1; 0 if the format has no lines.
    offset
        Byte at which the line begins (JSON Lines only).

    """

    row: Row
    file: Path
    number: int
    line: int = 0
    column: int = 0
    # JSON Lines: byte at which the line begins.
    offset: int = 0

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}" if self.line else f"{self.file}: row {self.number}"


def files_of(path: Path) -> list[Path]:
    """Return the file itself, or the prompt files of a directory in order of their names.

    A directory of Harbor tasks is returned as it is.
    """
    if path.is_dir():
        if harbor.is_task(path):
            return [path]
        files = sorted(
            p
            for p in path.iterdir()
            if p.suffix in ENDINGS and p.is_file() and not p.name.startswith(_HIDDEN)
        )
        if not harbor.holds_tasks(path):
            if not files:
                raise ConfigurationError(
                    f"{path}: no {', '.join(ENDINGS)} file in this directory, and no folder with "
                    f"{harbor.CONFIGURATION} (a Harbor task)"
                )
            return files
        if files:
            raise ConfigurationError(
                f"{path}: both prompt files ({files[0].name}) and Harbor tasks in this directory; "
                "move one of them elsewhere"
            )
        return [path]
    if not path.is_file():
        before, separator, after = str(path).rpartition("@")
        if separator and Path(before).exists():
            raise ConfigurationError(
                f"{before}: a slice is written @[a:b] with whole numbers, found @{after}"
            )
        raise ConfigurationError(f"{path}: no such prompt file")
    if path.suffix not in ENDINGS:
        raise ConfigurationError(f"{path}: expected a file that ends with {', '.join(ENDINGS)}")
    return [path]


def read_file(path: Path, seen: Callable[[bytes], object] | None = None) -> Iterator[LocatedRow]:
    """Yield the rows of one file, or of a directory of Harbor tasks.

    `seen` gets every raw line of a JSON Lines file.
    """
    readers = {".jsonl": lambda: _read_lines(path, seen), ".json": lambda: _read_list(path)}
    try:
        if path.is_dir():
            yield from _read_tasks(path)
        else:
            yield from readers.get(path.suffix, lambda: _read_parquet(path))()
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror or error}") from error


def read_source(text: str) -> Iterator[LocatedRow]:
    """Yield the rows of a `path@[a:b]`, each numbered within its file."""
    path, part = parse_path(text)
    files = files_of(path)
    rows = (located for file in files for located in read_file(file))
    if all(number is None or number >= 0 for number in (part.start, part.stop)):
        return islice(rows, part.start, part.stop)
    window = range(sum(count_rows(file) for file in files))[
        part
    ]  # negative numbers need another pass to count the rows
    return islice(rows, window.start, max(window.start, window.stop))


def count_rows(path: Path) -> int:
    if path.suffix != ".parquet":
        return sum(1 for _ in read_file(path))
    with _parquet(path) as file:
        return int(file.metadata.num_rows)


def _read_lines(path: Path, seen: Callable[[bytes], object] | None) -> Iterator[LocatedRow]:
    offset = number = 0
    with path.open("rb") as file:
        for line, data in enumerate(file, start=1):
            if seen is not None:
                seen(data)
            if not data.isspace():
                where = f"{path}:{line}"
                yield LocatedRow(
                    _checked(_decode(data, where), where), path, number, line, 1, offset
                )
                number += 1
            offset += len(data)


def _decode(data: bytes, where: str) -> Any:
    try:
        return json.loads(data)
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"{where}: not UTF-8 text: {error.reason} at byte {error.start}"
        ) from error
    except json.JSONDecodeError as error:
        raise ConfigurationError(f"{where}:{error.colno}: not valid JSON: {error.msg}") from error
    except RecursionError as error:
        raise ConfigurationError(f"{where}: not valid JSON: nested too deeply") from error
    except ValueError as error:  # a number with more digits than Python parses
        raise ConfigurationError(f"{where}: not valid JSON: {error}") from error


def _read_list(path: Path) -> Iterator[LocatedRow]:
    with path.open("rb") as file:
        for number, (row, line, column) in enumerate(read_json_list(file, str(path))):
            yield LocatedRow(_checked(row, f"{path}:{line}:{column}"), path, number, line, column)


def _read_tasks(path: Path) -> Iterator[LocatedRow]:
    for number, folder in enumerate(harbor.task_folders(path)):
        yield LocatedRow(harbor.read_task(folder), folder / harbor.CONFIGURATION, number, 1, 1)


def _checked(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise ConfigurationError(f"{where}: a row must be an object, found {type(row).__name__}")
    return row


def _parquet(path: Path) -> Any:
    import pyarrow as pa  # imported late: it takes half a second, and most jobs do not need it
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path)
    except pa.ArrowException as error:
        raise ConfigurationError(f"{path}: not a readable Parquet file: {error}") from error


def _read_parquet(path: Path) -> Iterator[LocatedRow]:
    import pyarrow as pa

    number = 0
    try:
        with _parquet(path) as file:
            for batch in file.iter_batches(batch_size=_batch_rows(file.metadata)):
                for row in batch.to_pylist():
                    yield LocatedRow(
                        {key: _present(value) for key, value in row.items()}, path, number
                    )
                    number += 1
    except pa.ArrowException as error:
        raise ConfigurationError(f"{path}: not a readable Parquet file: {error}") from error


def _batch_rows(metadata: Any) -> int:
    """Return how many rows of a file are converted at a time: fewer if they hold images."""
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    row_bytes = max((g.total_byte_size // max(g.num_rows, 1) for g in groups), default=0)
    return max(1, min(_BATCH_ROWS, _BATCH_BYTES // max(row_bytes, 1)))


def _present(value: Any) -> Any:
    """Remove empty fields of nested objects.

    In Parquet, every object of a column has the fields of all of them.
    """
    if isinstance(value, dict):
        return {key: _present(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, list):
        return [_present(entry) for entry in value]
    return value
