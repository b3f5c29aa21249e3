"""A disk that loses its power: what it may hold, from a journal of preload/power.c.

The model is what POSIX promises and no more. fsync and fdatasync of a file make its content and its
size durable; fsync of a directory makes the names in it durable, also those that a rename or an
unlink has changed. Of all else, any part may have reached the disk: each sector of a file by
itself, each change of its size, and of the changes of one directory's names the first few, for file
systems journal these in order. A file whose name was lost is lost.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

# Bytes that a disk writes as a whole.
SECTOR = 512
_ENTRY = struct.Struct("=IIIIQQ")


class Operation(IntEnum):
    """Kinds of operations, numbered as in preload/power.c."""

    CREATE = 0
    WRITE = 1
    WRITE_SYNCED = 2
    TRUNCATE = 3
    SYNC = 4
    RENAME = 5
    UNLINK = 6
    MKDIR = 7
    RMDIR = 8
    UNSEEN = 9


@dataclass(frozen=True, slots=True)
class Entry:
    """An operation of a journal. end: position in the journal behind it."""

    operation: Operation
    path: str
    other: str
    offset: int
    data: bytes
    end: int


def entries(journal: Path) -> Iterator[Entry]:
    """All whole entries: a process that was killed may have left part of one more."""
    content = memoryview(journal.read_bytes()) if journal.exists() else memoryview(b"")
    at = 0
    while at + _ENTRY.size <= len(content):
        operation, path, other, _, offset, data = _ENTRY.unpack_from(content, at)
        start, end = at + _ENTRY.size, at + _ENTRY.size + path + other + data
        if end > len(content):
            return
        names = (
            bytes(content[start : start + path]).decode(),
            bytes(content[start + path : end - data]).decode(),
        )
        yield Entry(Operation(operation), *names, offset, bytes(content[end - data : end]), end)
        at = end


@dataclass(frozen=True, slots=True)
class Change:
    """A write; data None: a new size. synced: durable by itself (O_DSYNC)."""

    offset: int
    data: bytes | None
    synced: bool = False


@dataclass(slots=True)
class File:
    """durable: what was there at the last sync. pending: what came later."""

    durable: bytearray = field(default_factory=bytearray)
    pending: list[Change] = field(default_factory=list)

    def sync(self) -> None:
        for change in self.pending:
            _apply(self.durable, change.offset, change.data)
        self.pending.clear()

    def after(self, draw: random.Random) -> bytearray:
        """A content that the disk may have."""
        content = bytearray(self.durable)
        for change in self.pending:
            offset, data = change.offset, change.data
            if data is None:
                if draw.random() < 0.5:
                    _apply(content, offset, None)
                continue
            for start, end in _sectors(offset, len(data)):
                if change.synced or draw.random() < 0.5:
                    _apply(content, start, data[start - offset : end - offset])
        return content


def _apply(content: bytearray, offset: int, data: bytes | None) -> None:
    if data is None:
        del content[offset:]
        content.extend(bytes(offset - len(content)))
        return
    if len(content) < offset:
        content.extend(bytes(offset - len(content)))
    content[offset : offset + len(data)] = data


def _sectors(offset: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield (start, end) of each part within one sector."""
    start, last = offset, offset + size
    while start < last:
        end = min((start // SECTOR + 1) * SECTOR, last)
        yield start, end
        start = end


@dataclass(slots=True)
class Directory:
    """Names of a directory.

    `names` are those that processes see, `durable` those of the last sync, and `pending` the
    changes since, with None for a removed name.
    """

    names: dict[str, Node] = field(default_factory=dict)
    durable: dict[str, Node] = field(default_factory=dict)
    pending: list[dict[str, Node | None]] = field(default_factory=list)

    def change(self, change: dict[str, Node | None]) -> None:
        self.pending.append(change)
        _rename(self.names, change)

    def sync(self) -> None:
        self.durable = dict(self.names)
        self.pending.clear()

    def after(self, draw: random.Random) -> dict[str, Node]:
        """Names that the disk may have."""
        names = dict(self.durable)
        for change in self.pending[: draw.randint(0, len(self.pending))]:
            _rename(names, change)
        return names


Node = File | Directory


def _rename(names: dict[str, Node], change: dict[str, Node | None]) -> None:
    for name, node in change.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


class Disk:
    """The files under `root`, all durable when the journal begins.

    Entries are fed to it in their order.
    """

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()
        self._top = _read(self._root)

    def feed(self, entry: Entry) -> None:
        if entry.operation is Operation.SYNC:
            self._node(entry.path).sync()
        elif entry.operation in (Operation.WRITE, Operation.WRITE_SYNCED):
            synced = entry.operation is Operation.WRITE_SYNCED
            self._file(entry.path).pending.append(Change(entry.offset, entry.data, synced))
        elif entry.operation is Operation.TRUNCATE:
            self._file(entry.path).pending.append(Change(entry.offset, None))
        elif entry.operation is Operation.UNSEEN:
            # LMDB's table of readers: shared memory, which the first process to open it makes anew
            assert entry.path.endswith("-lock"), (
                f"{entry.path} was mapped for writing: the journal cannot see that"
            )
        elif entry.operation is Operation.RENAME:
            self._move(entry)
        else:
            nodes = {Operation.CREATE: File, Operation.MKDIR: Directory}
            node = nodes[entry.operation]() if entry.operation in nodes else None
            directory, name = self._place(entry.path)
            directory.change({name: node})

    def _move(self, entry: Entry) -> None:
        (source, old), (target, new), node = (
            self._place(entry.path),
            self._place(entry.other),
            self._node(entry.path),
        )
        if source is target:
            source.change({old: None, new: node})
        else:
            target.change({new: node})
            source.change({old: None})

    def _node(self, path: str) -> Node:
        node: Node = self._top
        for name in Path(path).relative_to(self._root).parts:
            assert isinstance(node, Directory)
            node = node.names[name]
        return node

    def _file(self, path: str) -> File:
        node = self._node(path)
        assert isinstance(node, File), f"{path} is a directory"
        return node

    def _place(self, path: str) -> tuple[Directory, str]:
        directory = self._node(str(Path(path).parent))
        assert isinstance(directory, Directory)
        return directory, Path(path).name

    def restore(self, target: Path, draw: random.Random) -> None:
        """Write into the empty `target` what may be on the disk when the power comes back."""
        _write(self._top, target, draw)


def _read(path: Path) -> Directory:
    """The tree under a directory, all of it durable."""
    names: dict[str, Node] = {
        entry.name: _read(entry) if entry.is_dir() else File(bytearray(entry.read_bytes()))
        for entry in path.iterdir()
    }
    return Directory(names, dict(names))


def _write(directory: Directory, target: Path, draw: random.Random) -> None:
    for name, node in sorted(directory.after(draw).items()):
        place = target / name
        if isinstance(node, Directory):
            place.mkdir()
            _write(node, place, draw)
        else:
            content = node.after(draw)
            place.write_bytes(draw.randbytes(len(content)) if name.endswith("-lock") else content)
