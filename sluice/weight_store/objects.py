"""Objects under one prefix of a store: a bucket, or a directory."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from sluice.api import RLJob
from sluice.stores import StoreError, Uri, filesystem, parse_uri, store_errors
from sluice.uri import local_path
from sluice.wire import rpc

T = TypeVar("T")


class MissingObjectError(StoreError):
    """There is no such object, or not any more."""


class ObjectStore(Protocol):
    """Objects by their names, which have one directory at most. Methods raise StoreError."""

    def put(self, name: str, data: bytes) -> None:
        """Write an object; it is there whole, or not at all."""

    def put_file(self, name: str, source: Path) -> None:
        """Write a file as an object, which is there whole, or not at all."""

    def get(self, name: str) -> bytes:
        """Return an object. Raises MissingObjectError."""

    def get_file(self, name: str, target: Path) -> None:
        """Write an object into a file. Raises MissingObjectError."""

    def directories(self) -> list[str]:
        """Return the names of all directories."""

    def remove(self, directory: str) -> None:
        """Remove a directory with all its objects, if it is there."""


class BucketStore:
    """Objects under a URI of an object store."""

    def __init__(self, uri: Uri) -> None:
        """Open the store. Raises StoreError."""
        self._uri, self._files = uri, filesystem(uri)

    def put(self, name: str, data: bytes) -> None:
        with store_errors(self._uri / name):
            self._files.pipe_file(self._path(name), data)

    def put_file(self, name: str, source: Path) -> None:
        with store_errors(self._uri / name):
            self._files.put_file(str(source), self._path(name))

    def get(self, name: str) -> bytes:
        with self._reading(name):
            data: bytes = self._files.cat_file(self._path(name))
        return data

    def get_file(self, name: str, target: Path) -> None:
        with self._reading(name):
            self._files.get_file(self._path(name), str(target))

    def directories(self) -> list[str]:
        try:
            with store_errors(self._uri):
                entries: list[dict[str, Any]] = self._files.ls(self._uri.path, detail=True)
        except StoreError as error:
            if error.kind == "missing":
                return []
            raise
        return [
            entry["name"].rstrip("/").rpartition("/")[2]
            for entry in entries
            if entry["type"] == "directory"
        ]

    def remove(self, directory: str) -> None:
        with contextlib.suppress(MissingObjectError), self._reading(directory):
            self._files.rm(self._path(directory), recursive=True)

    def _path(self, name: str) -> str:
        return (self._uri / name).path

    @contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        try:
            with store_errors(self._uri / name):
                yield
        except StoreError as error:
            if error.kind == "missing":
                raise MissingObjectError(str(error), "missing") from error
            raise


class DirectoryStore:
    """Objects as files of a directory that trainer and workers share."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def put(self, name: str, data: bytes) -> None:
        self._write(name, lambda path: path.write_bytes(data))

    def put_file(self, name: str, source: Path) -> None:
        self._write(name, lambda path: shutil.copyfile(source, path))

    def _write(self, name: str, write: Callable[[Path], object]) -> None:
        path = self._root / name
        unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(unfinished)
            os.replace(unfinished, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise StoreError(f"cannot write {path}: {error.strerror}") from error

    def get(self, name: str) -> bytes:
        return self._read(name, lambda path: path.read_bytes())

    def get_file(self, name: str, target: Path) -> None:
        self._read(name, lambda path: shutil.copyfile(path, target))

    def _read(self, name: str, read: Callable[[Path], T]) -> T:
        path = self._root / name
        try:
            return read(path)
        except FileNotFoundError as error:
            raise MissingObjectError(f"{path}: there is no such file", "missing") from error
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror}") from error

    def directories(self) -> list[str]:
        try:
            return [entry.name for entry in self._root.iterdir() if entry.is_dir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StoreError(f"cannot list {self._root}: {error.strerror}") from error

    def remove(self, directory: str) -> None:
        shutil.rmtree(self._root / directory, ignore_errors=True)


def job_prefix(job: RLJob) -> str:
    """Return the prefix of a job's objects. Another job of the same name has another one."""
    return f"{job.metadata.namespace}/{job.metadata.name}/{rpc.run_name()}"


def open_store(uri: str, prefix: str) -> ObjectStore:
    """Return the objects under a prefix of `weightSync.store.uri`. Raises StoreError, UriError."""
    place = parse_uri(uri)
    if place is None:
        return DirectoryStore(Path(local_path(uri)) / prefix)
    return BucketStore(place / prefix)
