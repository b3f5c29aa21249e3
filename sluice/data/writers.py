"""Write rows to a file, one at a time: JSON Lines, JSON or Parquet.

A file appears complete, or not at all.
"""

from __future__ import annotations

import base64
import json
import os
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from sluice.data.files import ENDINGS, Row
from sluice.runtime.pod_env import ConfigurationError

_BATCH = 1024
# Columns that other tools read as well, so they cannot become JSON text.
_READ_BY_NAME = ("prompt", "input", "label", "reward_model")


def json_bytes(row: Row) -> bytes:
    """Return the row as JSON in UTF-8.

    Half a surrogate pair stays, as an escape. Bytes, such as an image's file, become a data URL.
    """
    try:
        return json.dumps(row, ensure_ascii=False, default=_as_text).encode()
    except UnicodeEncodeError:
        return json.dumps(row, default=_as_text).encode()


def _as_text(value: Any) -> str:
    if isinstance(value, bytes):
        return f"data:;base64,{base64.b64encode(value).decode()}"
    return str(value)


class Writer:
    """Writes a temporary file and moves it to `path` at the end; a failure leaves no file.

    Raises ConfigurationError for an unknown ending, or if the file exists and `force` is not set.
    """

    def __init__(self, path: Path, *, force: bool = False) -> None:
        if path.suffix not in ENDINGS:
            raise ConfigurationError(f"{path}: expected a name that ends with {', '.join(ENDINGS)}")
        if path.exists() and not force:
            raise ConfigurationError(f"{path}: the file exists already; --force overwrites it")
        if not path.parent.is_dir():
            raise ConfigurationError(f"{path}: there is no directory {path.parent}")
        self._path, self.rows = path, 0
        self._file: IO[bytes] = tempfile.NamedTemporaryFile(  # noqa: SIM115 - closed by __exit__
            dir=path.parent, prefix=f".{path.name}.", delete=False
        )

    def write(self, row: Row) -> None:
        start = b"" if self._path.suffix != ".json" else b",\n" if self.rows else b"[\n"
        end = b"" if self._path.suffix == ".json" else b"\n"
        self._file.write(start + json_bytes(row) + end)
        self.rows += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        temporary = Path(self._file.name)
        try:
            if kind is None:
                self._finish(temporary)
        finally:
            self._file.close()
            temporary.unlink(missing_ok=True)

    def _finish(self, temporary: Path) -> None:
        if self._path.suffix == ".json":
            self._file.write(b"\n]\n" if self.rows else b"[]\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        if self._path.suffix == ".parquet":
            parquet = temporary.with_name(temporary.name + ".parquet")
            try:
                write_parquet(temporary, parquet, self._path)
                parquet.replace(temporary)
            finally:
                parquet.unlink(missing_ok=True)
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)  # a temporary file is created with mode 0600
        temporary.replace(self._path)


def write_parquet(lines: Path, target: Path, name: Path) -> None:
    """Convert JSON Lines to Parquet, in two passes.

    The first pass finds the types of all columns, so that every row fits the file. An object or
    list whose fields do not fit one type becomes JSON text, which readers of prompt files accept
    too.

    Raises ConfigurationError, with `name`, if a column that is read by name cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    types = _types(lines, name)
    schema = pa.schema([(key, kind or pa.string()) for key, kind in types.items()])
    with pq.ParquetWriter(target, schema) as writer:
        for batch in _batches(lines):
            columns = [
                pa.array(
                    [_text(row.get(key)) if kind is None else row.get(key) for row in batch],
                    kind or pa.string(),
                )
                for key, kind in types.items()
            ]
            writer.write_batch(pa.record_batch(columns, schema=schema))


def _types(lines: Path, name: Path) -> dict[str, Any]:
    """Return the type of each column; None means JSON text."""
    import pyarrow as pa

    types: dict[str, Any] = {}
    for batch in _batches(lines):
        for key in dict.fromkeys(key for row in batch for key in row):
            values = [row.get(key) for row in batch]
            try:
                kind = pa.array(values).type
                if types.get(key, kind) is not None:
                    types[key] = _common(types.get(key, kind), kind)
            except (pa.ArrowException, OverflowError) as error:
                if key in _READ_BY_NAME or not all(
                    value is None or isinstance(value, dict | list) for value in values
                ):
                    text = (
                        f"{name}: column {key!r} has values of several types, and Parquet has one "
                        "type per column"
                    )
                    raise ConfigurationError(f"{text} ({error}); write .jsonl or .json") from error
                types[key] = None
    return {key: None if kind is None or _fieldless(kind) else kind for key, kind in types.items()}


def _common(first: Any, second: Any) -> Any:
    import pyarrow as pa

    schemas = [pa.schema([("x", kind)]) for kind in (first, second)]
    return pa.unify_schemas(schemas, promote_options="permissive").field(0).type


def _fieldless(kind: Any) -> bool:
    """Return whether a type is an object without fields, which Parquet cannot write."""
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return kind.num_fields == 0 or any(_fieldless(field.type) for field in kind)
    return pa.types.is_list(kind) and _fieldless(kind.value_type)


def _text(value: Any) -> str | None:
    return None if value is None else json.dumps(value, ensure_ascii=False)


def _batches(lines: Path) -> Iterator[list[Row]]:
    with lines.open("rb") as file:
        rows = (json.loads(line) for line in file)
        while batch := list(islice(rows, _BATCH)):
            yield batch
