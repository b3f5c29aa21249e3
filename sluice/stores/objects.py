"""Fetch the files of a URI of an object store or a web server into a directory.

Large files are read in parallel pieces. What has arrived is on record, so that an interrupted fetch
goes on where it was.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from sluice.stores.errors import StoreError, store_errors
from sluice.stores.filesystem import filesystem, objects_below
from sluice.stores.retrying import retried
from sluice.uri import Uri, is_pattern

# Gets the bytes that have arrived, and the bytes of all files.
Progress = Callable[[int, int], None]

# Bytes of a piece: a request of a few seconds. All pieces in flight are in memory.
_PIECE = 32 << 20
_THREADS = 8
# Seconds between the attempts to read a piece.
_PAUSES = (1.0, 2.0, 4.0)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a URI. size: None if a web server does not say; etag and md5: empty likewise."""

    # Path below the URI; the last part of the URI if that is the file.
    name: str
    path: str
    size: int | None
    etag: str = ""
    md5: str = ""


def listing(uri: Uri) -> list[RemoteFile]:
    """Return the files of a URI: itself, those below it, or those that match its wildcards.

    Raises StoreError if there are none.
    """
    with store_errors(uri):
        entries = _entries(uri)
    files = [
        _remote_file(uri, path, entry)
        for path, entry in sorted(entries.items())
        if entry.get("type") != "directory" and not path.endswith("/")
    ]
    if not files:
        raise StoreError(f"{uri}: there are no files of this name", "missing")
    if len({file.name for file in files}) < len(files):
        raise StoreError(f"{uri}: several of the files have the same name; name one directory")
    return files


def version_of(files: Sequence[RemoteFile]) -> str:
    """Return a digest of names, sizes and etags: other contents have another."""
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(files, key=lambda file: file.name):
        digest.update(repr((file.name, file.size, file.etag)).encode())
    return digest.hexdigest()


def download(uri: Uri, files: Sequence[RemoteFile], directory: Path, progress: Progress) -> None:
    """Fetch files into a directory. Those that an earlier call has fetched are not read again.

    Raises
    ------
    StoreError
        A file cannot be read, or is not as its checksum says.
    OSError
        The directory cannot be written.

    """
    counter = _Counter(sum(file.size or 0 for file in files), progress)
    with ThreadPoolExecutor(_THREADS) as threads:
        jobs = []
        for file in files:
            target = directory / file.name
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.exists():
                counter.add(file.size or 0)
            elif file.size is None or uri.scheme in ("http", "https"):
                jobs.append((file, target, [threads.submit(_whole, uri, file, target, counter)]))
            else:
                pieces = _Pieces.of(target, file.size, counter)
                futures = [
                    threads.submit(_piece, uri, file, pieces, number, counter)
                    for number in pieces.missing()
                ]
                jobs.append((file, target, futures))
        try:
            for file, target, futures in jobs:
                for future in futures:
                    future.result()
                _finish(uri, file, target)
        except BaseException:
            threads.shutdown(wait=True, cancel_futures=True)
            raise


# -- listing


def _entries(uri: Uri) -> Mapping[str, Mapping[str, Any]]:
    fs = filesystem(uri)
    if uri.scheme in ("http", "https"):
        if is_pattern(uri):
            raise StoreError(f"{uri}: a web server lists no files: name each of them", "missing")
        return {uri.path: fs.info(uri.path)}
    if is_pattern(uri):
        return fs.glob(uri.path, detail=True)  # type: ignore[no-any-return]
    # A listing of a bucket that does not exist is empty with some stores.
    found = objects_below(uri)
    if not found:
        fs.info(uri.path)
    return found


def _remote_file(uri: Uri, path: str, entry: Mapping[str, Any]) -> RemoteFile:
    base = uri.path
    inside = path[len(base) :].strip("/") if not is_pattern(uri) else ""
    name = inside or PurePosixPath(path).name
    if any(part in ("", ".", "..") for part in name.split("/")) or "\x00" in name:
        raise StoreError(f"{uri}: the name of the file {name!r} is no path below it")
    etag = next((str(entry[key]) for key in ("ETag", "etag", "generation") if entry.get(key)), "")
    return RemoteFile(name, path, entry.get("size"), etag.strip('"'), _md5(entry))


def _md5(entry: Mapping[str, Any]) -> str:
    """Return the MD5 of a file in hex if the store gives it: Google and Azure do."""
    settings = entry.get("content_settings")
    value = entry.get("md5Hash") or (settings.get("content_md5") if settings else None)
    if isinstance(value, str):
        value = base64.b64decode(value)
    return bytes(value).hex() if value else ""


# -- reading


class _Counter:
    """Adds up the bytes that have arrived."""

    def __init__(self, total: int, progress: Progress) -> None:
        self._done, self._total, self._progress = 0, total, progress

    def add(self, size: int) -> None:
        # Additions by several threads may be lost for the display, never for the data.
        self._done += size
        self._progress(self._done, max(self._total, self._done))


@dataclass(frozen=True, slots=True)
class _Pieces:
    """A file that arrives in pieces; their numbers are in a second file once they are on disk."""

    file: Path
    record: Path
    size: int

    @classmethod
    def of(cls, target: Path, size: int, counter: _Counter) -> _Pieces:
        pieces = cls(
            target.with_name(f"{target.name}.incomplete"),
            target.with_name(f"{target.name}.pieces"),
            size,
        )
        if not (pieces.file.exists() and pieces.file.stat().st_size == size):
            pieces.record.unlink(missing_ok=True)
            with pieces.file.open("wb") as file:
                file.truncate(size)
        counter.add(sum(pieces.range(number)[1] for number in pieces.arrived()))
        return pieces

    def count(self) -> int:
        return -(-self.size // _PIECE)

    def range(self, number: int) -> tuple[int, int]:
        """Return position and length of a piece."""
        return number * _PIECE, min(_PIECE, self.size - number * _PIECE)

    def arrived(self) -> set[int]:
        text = self.record.read_text() if self.record.exists() else ""
        # The last line is whole only if it ends; a number of another run may have been cut.
        numbers = {int(line) for line in text.split("\n")[:-1] if line.isdigit()}
        return numbers & set(range(self.count()))

    def missing(self) -> Iterator[int]:
        done = self.arrived()
        return (number for number in range(self.count()) if number not in done)

    def write(self, number: int, content: bytes) -> None:
        descriptor = os.open(self.file, os.O_WRONLY)
        try:
            position = self.range(number)[0]
            view = memoryview(content)
            while view:
                written = os.pwrite(descriptor, view, position)
                position, view = position + written, view[written:]
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
        descriptor = os.open(self.record, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, f"{number}\n".encode())
        finally:
            os.close(descriptor)


def _piece(uri: Uri, file: RemoteFile, pieces: _Pieces, number: int, counter: _Counter) -> None:
    position, length = pieces.range(number)

    def read() -> bytes:
        with store_errors(uri):
            content: bytes = filesystem(uri).cat_file(
                file.path, start=position, end=position + length
            )
        if len(content) != length:
            raise StoreError(f"{uri}: {file.name} is shorter than its listing says", "cut")
        return content

    # The store's client has tried several times, too.
    pieces.write(number, retried(read, _PAUSES))
    counter.add(length)


def _whole(uri: Uri, file: RemoteFile, target: Path, counter: _Counter) -> None:
    incomplete = target.with_name(f"{target.name}.incomplete")

    def read() -> None:
        with store_errors(uri):
            filesystem(uri).get_file(file.path, str(incomplete))
        if file.size is not None and incomplete.stat().st_size != file.size:
            raise StoreError(f"{uri}: the connection was cut before the end of the file", "cut")

    retried(read, _PAUSES)
    counter.add(incomplete.stat().st_size)


def _finish(uri: Uri, file: RemoteFile, target: Path) -> None:
    """Give a file its name once all of it has arrived and its checksum is right."""
    incomplete = target.with_name(f"{target.name}.incomplete")
    record = target.with_name(f"{target.name}.pieces")
    if file.md5:
        with incomplete.open("rb") as opened:
            found = hashlib.file_digest(opened, lambda: hashlib.md5(usedforsecurity=False))
        if found.hexdigest() != file.md5:
            incomplete.unlink()
            record.unlink(missing_ok=True)
            raise StoreError(
                f"{uri}: {file.name} arrived damaged: its MD5 is not the store's", "cut"
            )
    incomplete.rename(target)
    record.unlink(missing_ok=True)
