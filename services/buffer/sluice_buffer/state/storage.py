"""The buffer's database: LMDB, one file in SLUICE_STORAGE.

The promise: **when `write` has returned, all of its changes are on disk, and they survive the
process being killed and the machine losing power; when it has raised, or was cut off, none of them
ever happened.** A write is one LMDB transaction, with fdatasync before the meta page is switched
over. LMDB's write map is not used: it could lose or tear pages when a sparse file meets a full
disk. One thread writes, any thread reads, and readers see whole transactions only. A full disk or
map raises StorageFullError and changes no data. test_buffer_crash.py tests the promise by killing
the process. Why LMDB: docs/results/buffer-storage.md.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import lmdb

from sluice.runtime.pod_env import ConfigurationError
from sluice_buffer.group import TRAINING, GroupKey

# Number of the layout below. A database of another format is refused.
FORMAT = 1
# meta: name -> JSON. groups: id -> Group. samples: id, piece -> bytes. partials: key, piece ->
# bytes. batches: step -> group ids. rounds: version -> JSON. round_groups: version, id -> Group.
# examples: version, id, piece -> bytes. results: version, data set -> Result. failures: serial ->
# JSON. images: digest -> ImageHead. image_pieces: digest, piece -> bytes. group_images: key ->
# GroupImages. All numbers in keys are big-endian, so that order is numeric order.
TABLES = (
    "meta",
    "groups",
    "samples",
    "partials",
    "batches",
    "rounds",
    "round_groups",
    "examples",
    "results",
    "failures",
    "images",
    "image_pieces",
    "group_images",
)
# Tables of samples and images, whose values are counted one by one (`footprint`).
SAMPLE_TABLES = frozenset({"samples", "partials", "examples", "image_pieces"})
# Values are stored in pieces that fill whole pages (16: the page's header). Runs of one length can
# be used again without fragmenting the file, whatever the lengths of the groups.
PIECE_BYTES = 31 * 4096 - 16
# Mode of the files: they hold rows, labels and responses.
_PRIVATE = 0o600
# Longest time that reading a value takes.
_READER_SECONDS = 60.0
_PAGE = 4096
_FULL_ERRNOS = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}


class StorageError(Exception):
    """The database cannot be used. The message is for people."""


class StorageFullError(StorageError):
    """There is no free space. No data was changed."""


@dataclass(slots=True)
class WriteBatch:
    """Changes that become durable together. The last change of a key counts; None deletes."""

    changes: dict[tuple[str, bytes], bytes | memoryview | None] = field(default_factory=dict)
    # Bytes of the values that are put.
    size: int = 0

    def put(self, table: str, key: bytes, value: bytes | memoryview) -> None:
        self.changes[table, key] = value
        self.size += len(value)

    def delete(self, table: str, key: bytes) -> None:
        self.changes[table, key] = None

    def __len__(self) -> int:
        return len(self.changes)


def number(*values: int) -> bytes:
    """Return the key of one or more numbers from 0."""
    return b"".join(value.to_bytes(8, "big") for value in values)


def numbers(key: bytes) -> tuple[int, ...]:
    return tuple(int.from_bytes(key[i : i + 8], "big") for i in range(0, len(key), 8))


def value_key(key: GroupKey) -> bytes:
    """Return the prefix of the keys of a group's samples."""
    return number(key.group_id) if key.round == TRAINING else b"e" + number(*key)


def pieces(value: bytes | bytearray) -> Sequence[bytes | memoryview]:
    """Cut a value into pieces, without a copy."""
    if isinstance(value, bytes) and len(value) <= PIECE_BYTES:
        return (value,)
    view = memoryview(value)
    return [view[start : start + PIECE_BYTES] for start in range(0, len(value), PIECE_BYTES)]


def footprint(size: int) -> int:
    """Return the bytes of whole pages that a value of `size` takes, with its share of the tree."""
    full, rest = divmod(size, PIECE_BYTES)
    pages = full * (PIECE_BYTES + 16) // _PAGE + (
        -(-(rest + 16) // _PAGE) if rest or not full else 0
    )
    return pages * _PAGE + 256


def capacity(map_size: int, file_size: int, disk_free: int, records: int) -> int:
    """Return the bytes that samples may take.

    That is what the map and the disk hold, less the records and a reserve for copies of pages.
    Without the reserve the transaction that frees space (a checkpoint) could itself find no page to
    write to: LMDB writes each changed page to a new place, and reuses the old one only two
    transactions later.

    Parameters
    ----------
    map_size
        Largest size of the file, in bytes.
    file_size
        Present size of the file.
    disk_free
        Free bytes of the disk.
    records
        Bytes of the tables with the state of each group. They grow with every group that is leased.

    """
    whole = min(map_size, file_size + disk_free)
    return max(0, whole - records - max(whole // 8, 64 * _PAGE, 2 * records))


class Storage:
    """Tables of bytes. The module's text says what it promises."""

    def __init__(self, directory: Path, map_size: int) -> None:
        self.directory = directory
        self.map_size = max(map_size // _PAGE, 256) * _PAGE
        # Writes since the start of the process.
        self.commits = 0
        self._lock = _lock(directory)
        self._gate = threading.Condition()
        self._readers = 0
        self._reopening = False
        self._create()
        self._open()
        _sync_names(directory)

    def _create(self) -> None:
        """Rename a new database into place once it is whole on the disk.

        LMDB begins a file with pages that it does not sync. If the power fails then, those pages
        are lost, and the file is refused ever after.
        """
        path, unborn = self.directory / "buffer.lmdb", self.directory / "buffer.lmdb.new"
        if path.exists():
            _close_to_others(path)
            return
        unborn.unlink(missing_ok=True)
        try:
            with self._environment(unborn) as environment:
                for name in TABLES:
                    environment.open_db(name.encode())
                environment.sync(True)
        except lmdb.Error as error:
            raise _translate(error, str(unborn)) from error
        unborn.rename(path)
        unborn.with_name("buffer.lmdb.new-lock").unlink(missing_ok=True)

    def _environment(self, path: Path) -> lmdb.Environment:
        return lmdb.open(
            str(path),
            map_size=self.map_size,
            subdir=False,
            max_dbs=len(TABLES),
            sync=True,
            metasync=True,
            writemap=False,
            readahead=False,
            lock=True,
            max_readers=64,
            mode=_PRIVATE,
        )

    def _open(self) -> None:
        path = self.directory / "buffer.lmdb"
        try:
            self._env = self._environment(path)
            self._tables = {name: self._env.open_db(name.encode()) for name in TABLES}
        except lmdb.Error as error:
            raise _translate(error, str(path)) from error

    def reopen(self) -> None:
        """Open the database again, after a failed write.

        LMDB gives up an environment that met an I/O error. Waits for readers on other threads:
        closing the environment under them would end the process.
        """
        with self._gate:
            self._reopening = True
            try:
                if not self._gate.wait_for(lambda: self._readers == 0, _READER_SECONDS):
                    raise StorageError(
                        f"{self.directory}: a reader has not finished for {_READER_SECONDS:.0f} s"
                    )
                self._env.close()
                self._open()
            finally:
                self._reopening = False
                self._gate.notify_all()

    @contextmanager
    def _reading(self, table: str) -> Iterator[Any]:
        with self._gate:
            self._gate.wait_for(lambda: not self._reopening)
            self._readers += 1
        try:
            with self._env.begin(db=self._tables[table]) as transaction:
                yield transaction
        finally:
            with self._gate:
                self._readers -= 1
                self._gate.notify_all()

    def close(self) -> None:
        self._env.close()
        self._lock.close()

    def write(self, batch: WriteBatch, staged: threading.Event | None = None) -> None:
        """Make the changes durable, or raise and leave everything as it was.

        `staged` is set once only the disk remains to be waited for. py-lmdb releases the
        interpreter lock in each put; another thread then gets it for a whole pass of its event
        loop, and a commit of 50 puts would wait 50 passes. So the event loop waits for `staged`,
        which takes microseconds.
        """
        try:
            with self._env.begin(write=True) as transaction:
                self._stage(transaction, batch)
                if staged:
                    staged.set()
        except lmdb.Error as error:
            raise _translate(error, f"{self.directory}/buffer.lmdb") from error
        finally:
            if staged:
                staged.set()
        self.commits += 1

    def _stage(self, transaction: lmdb.Transaction, batch: WriteBatch) -> None:
        tables = self._tables
        for (table, key), value in batch.changes.items():
            if value is None:
                transaction.delete(key, db=tables[table])
            else:
                transaction.put(key, value, db=tables[table])

    def get(self, table: str, key: bytes) -> bytes | None:
        with self._reading(table) as transaction:
            value: bytes | None = transaction.get(key)
            return value

    def scan(self, table: str, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Return all (key, value) whose key starts with `prefix`, in order."""
        with self._reading(table) as transaction, transaction.cursor() as cursor:
            if not (cursor.set_range(prefix) if prefix else cursor.first()):
                return
            for key, value in cursor:
                if not key.startswith(prefix):
                    return
                yield key, value

    def numbered(self, table: str, first: int) -> Iterator[tuple[int, bytes]]:
        """Return (number, value) of a table whose keys are single numbers, from `first` on."""
        with self._reading(table) as transaction, transaction.cursor() as cursor:
            if cursor.set_range(number(first)):
                for key, value in cursor:
                    yield numbers(key)[0], value

    def value(self, table: str, prefix: bytes) -> bytes | None:
        """Return a value that was stored in pieces."""
        pieces = [data for _, data in self.scan(table, prefix)]
        return b"".join(pieces) if pieces else None

    def bounded_by_size(self) -> bool:
        """True if the database's own size is the limit, not other files on the disk."""
        file_size = (self.directory / "buffer.lmdb").stat().st_blocks * 512
        disk = os.statvfs(self.directory)
        return file_size + disk.f_bavail * disk.f_frsize >= self.map_size

    def capacity(self) -> int:
        """Return the bytes that samples may take at present; see `capacity`."""
        file_size = (self.directory / "buffer.lmdb").stat().st_blocks * 512
        disk = os.statvfs(self.directory)
        return capacity(
            self.map_size, file_size, disk.f_bavail * disk.f_frsize, self.record_bytes()
        )

    def record_bytes(self) -> int:
        """Return the bytes of the pages of all tables without samples."""
        with self._reading("meta") as transaction:
            tables = [
                transaction.stat(table)
                for name, table in self._tables.items()
                if name not in SAMPLE_TABLES
            ]
        return _PAGE * sum(
            int(table["leaf_pages"] + table["branch_pages"] + table["overflow_pages"])
            for table in tables
        )


def _lock(directory: Path) -> IO[bytes]:
    """Lock the directory: a second process would contradict the first one's memory."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handle = (directory / "buffer.lock").open("ab")
    except OSError as error:
        raise ConfigurationError(
            f"{directory}: cannot be written: {error.strerror or error}"
        ) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        handle.close()
        raise StorageError(f"{directory}: another buffer process uses this directory") from error
    return handle


def _close_to_others(path: Path) -> None:
    """Remove the rights of others from a database that an older release made.

    Its group keeps its rights, which may come from a volume's `fsGroup`.
    """
    status = path.stat()
    if status.st_mode & 0o007 and status.st_uid == os.geteuid():
        path.chmod(status.st_mode & 0o770)


def _sync_names(directory: Path) -> None:
    """Make the name of a new database durable.

    LMDB syncs the file, but POSIX does not promise that its name is on disk.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise StorageError(f"{directory}: cannot be synced: {error.strerror or error}") from error
    finally:
        os.close(descriptor)


def _translate(error: lmdb.Error, path: str) -> StorageError:
    if isinstance(error, lmdb.MapFullError):
        return StorageFullError(f"{path}: the database has reached buffer.storage.size")
    text = str(error)
    if isinstance(error, lmdb.DiskError) or any(
        os.strerror(number) in text for number in _FULL_ERRNOS
    ):
        return StorageFullError(f"{path}: the disk is full ({text})")
    return StorageError(f"{path}: {text}")


def check_identity(
    stored: Mapping[str, object], expected: Mapping[str, object], path: Path
) -> None:
    """Raise StorageError if the database is of another job or of other data settings."""
    for name, value in expected.items():
        if name in stored and stored[name] != value:
            raise StorageError(
                f"{path}: the database was made with another {name}: {stored[name]!r}, now "
                f"{value!r}. Restore the old setting, or start anew with an empty storage directory"
            )
