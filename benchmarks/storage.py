"""LMDB beside SQLite for the buffer's load: durable group commits of sample groups, and lease
bookkeeping.

    python benchmarks/storage.py [--directory DIR] [--repeats 5]

Each case writes the same bytes to both, interleaved, every transaction synced (LMDB: sync on;
SQLite: WAL and synchronous=FULL): first while the file grows, then, after everything was deleted,
in the space that was freed. `fsync` is the machine itself: the same bytes appended to a file with
one fdatasync a commit. Medians of the repeats; nothing is saved.
"""

import argparse
import os
import shutil
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sluice_buffer.state.storage import Storage, WriteBatch, number, pieces


@dataclass(frozen=True)
class Case:
    name: str
    group_bytes: int
    groups_per_commit: int
    commits: int


CASES = (
    Case("lease bookkeeping, 100 records a commit", 60, 100, 100),
    Case("8 x 64 tokens, 1 group a commit", 8 * (128 * 9 + 100), 1, 200),
    Case("8 x 64 tokens, 16 groups a commit", 8 * (128 * 9 + 100), 16, 60),
    Case("8 x 1k tokens, 8 groups a commit", 8 * (1100 * 9 + 100), 8, 60),
    Case("8 x 16k tokens, 1 group a commit", 8 * (16400 * 9 + 100), 1, 30),
    Case("8 x 16k tokens, 8 groups a commit", 8 * (16400 * 9 + 100), 8, 10),
)


class Store(Protocol):
    def commit(self, first: int, values: list[bytes]) -> None: ...
    def forget(self, first: int, count: int) -> None: ...
    def close(self) -> None: ...


class Lmdb:
    """The buffer's own storage."""

    def __init__(self, directory: Path) -> None:
        self._storage = Storage(directory, 8 << 30)
        self._sizes: dict[int, int] = {}

    def commit(self, first: int, values: list[bytes]) -> None:
        batch = WriteBatch()
        for offset, value in enumerate(values):
            parts = pieces(value)
            self._sizes[first + offset] = len(parts)
            for position, part in enumerate(parts):
                batch.put("samples", number(first + offset) + position.to_bytes(4, "big"), part)
        self._storage.write(batch)

    def forget(self, first: int, count: int) -> None:
        batch = WriteBatch()
        for key in range(first, first + count):
            for position in range(self._sizes.pop(key)):
                batch.delete("samples", number(key) + position.to_bytes(4, "big"))
        self._storage.write(batch)

    def close(self) -> None:
        self._storage.close()


class Sqlite:
    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self._db = sqlite3.connect(directory / "buffer.sqlite", isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.execute("CREATE TABLE samples (id INTEGER PRIMARY KEY, data BLOB)")

    def commit(self, first: int, values: list[bytes]) -> None:
        self._db.execute("BEGIN IMMEDIATE")
        self._db.executemany(
            "INSERT OR REPLACE INTO samples VALUES (?, ?)", enumerate(values, start=first)
        )
        self._db.execute("COMMIT")

    def forget(self, first: int, count: int) -> None:
        self._db.execute("BEGIN IMMEDIATE")
        self._db.execute("DELETE FROM samples WHERE id >= ? AND id < ?", (first, first + count))
        self._db.execute("COMMIT")

    def close(self) -> None:
        self._db.close()


class Plain:
    """Not a database: what the disk itself gives."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self._file = os.open(directory / "log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def commit(self, first: int, values: list[bytes]) -> None:
        os.write(self._file, b"".join(values))
        os.fdatasync(self._file)

    def forget(self, first: int, count: int) -> None:
        return

    def close(self) -> None:
        os.close(self._file)


STORES: dict[str, Callable[[Path], Store]] = {"lmdb": Lmdb, "sqlite": Sqlite, "fsync": Plain}


def measure(make: Callable[[Path], Store], case: Case, root: Path) -> tuple[float, float, float]:
    """Seconds a commit while the file grows, the same when freed space is used again, seconds to
    forget everything."""
    directory = Path(tempfile.mkdtemp(dir=root)) / "store"
    store, values = (
        make(directory),
        [os.urandom(case.group_bytes) for _ in range(case.groups_per_commit)],
    )
    try:
        written = []
        for _ in range(2):
            start = time.perf_counter()
            for commit in range(case.commits):
                store.commit(commit * case.groups_per_commit, values)
            written.append((time.perf_counter() - start) / case.commits)
            start = time.perf_counter()
            store.forget(0, case.commits * case.groups_per_commit)
        return written[0], written[1], time.perf_counter() - start
    finally:
        store.close()
        shutil.rmtree(directory.parent)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    print(
        "| load | store | growing: ms a commit | MB/s | reusing: ms a commit | MB/s | forget all, "
        "ms |"
    )
    print("|---|---|---:|---:|---:|---:|---:|")
    for case in CASES:
        results: dict[str, list[tuple[float, float, float]]] = {name: [] for name in STORES}
        for _ in range(options.repeats):
            for name, make in STORES.items():
                results[name].append(measure(make, case, options.directory))
        for name, runs in results.items():
            grow, reuse, forget = (statistics.median(column) for column in zip(*runs, strict=True))
            size = case.groups_per_commit * case.group_bytes / 1e6
            print(
                f"| {case.name} | {name} | {grow * 1e3:.2f} | {size / grow:,.0f} "
                f"| {reuse * 1e3:.2f} | {size / reuse:,.0f} | {forget * 1e3:.1f} |"
            )


if __name__ == "__main__":
    main()
