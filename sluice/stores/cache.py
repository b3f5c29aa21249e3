"""The cache of this machine for files of the hub, of object stores and of web servers.

Every version of a URI has a directory, which is whole from the moment it has its name,
and never changes after:

    ROOT/s3/QWEN-<digest of the URI>/<version>/QWEN/...    and .sluice.json beside QWEN

A repository of the hub is a link there, into the hub's own cache. ROOT is SLUICE_CACHE, or
~/.cache/sluice. With SLUICE_CACHE_SIZE, versions that were not used for longest are removed to make
room, but none that a process holds (`hold`).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from sluice.api.schema.base import quantity_value
from sluice.stores import hub, objects
from sluice.stores.amounts import size_text
from sluice.stores.errors import StoreError
from sluice.stores.objects import Progress
from sluice.uri import Uri, digest, is_pattern, local_name

_RECORD = ".sluice.json"
_LOCK = ".lock"
_PARTIAL = ".partial"
# Seconds without progress after which the process that holds the lock is taken for hung.
_STALLED_SECONDS = 600.0
_DIGITS = 12


@dataclass(frozen=True, slots=True)
class Fetched:
    """Files of a URI on this machine. version: the commit, or a digest of names and etags."""

    uri: str
    version: str
    path: Path
    size: int

    @property
    def record(self) -> Path:
        return self.path.parent / _RECORD


def root() -> Path:
    """Return the directory of the cache."""
    set_to = os.environ.get("SLUICE_CACHE")
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(set_to).expanduser() if set_to else Path(home).expanduser() / "sluice"


def fetch(uri: Uri, *, version: str | None = None, progress: Progress | None = None) -> Fetched:
    """Fetch the files of a URI unless they are there, and return where they are.

    Parameters
    ----------
    uri
        A directory, a file, or files by wildcards; of the hub: a repository, or files of it.
    version
        The version that an earlier call returned. If it is in the cache, no store is asked.
    progress
        Called with the bytes that have arrived. On a terminal the hub's client shows its own.

    Raises
    ------
    StoreError
        The files cannot be had, or are no longer those of the version.
    OSError
        The cache cannot be written.

    """
    if version is not None and (kept := _cached(uri, version)):
        return kept
    if uri.scheme == "hf":
        return _fetch_from_hub(uri, version, progress)
    directory = _directory(uri)
    directory.mkdir(parents=True, exist_ok=True)
    with _locked(uri, directory):
        files = objects.listing(uri)
        found = objects.version_of(files)
        if version is not None and found != version:
            raise StoreError(
                f"{uri}: the files have changed, and their earlier version is not in the cache; "
                "put them back, or start over"
            )
        return _cached(uri, found) or _fetch_objects(uri, files, found, progress or _silent)


@contextlib.contextmanager
def hold(*fetched: Fetched) -> Iterator[None]:
    """Keep versions from being removed while the block runs."""
    with contextlib.ExitStack() as stack:
        for entry in fetched:
            file = stack.enter_context(entry.record.open("rb"))
            fcntl.flock(file, fcntl.LOCK_SH)
        yield


def entries() -> list[Fetched]:
    """Return what is in the cache, the version used last first."""
    records = sorted(root().glob(f"*/*/*/{_RECORD}"), key=_used, reverse=True)
    return [entry for record in records if (entry := _read(record))]


def newest(uri: Uri) -> Fetched | None:
    """Return the version of a URI that was used last, without asking a store; None if none is."""
    return next(
        (entry for entry in entries() if entry.uri == str(uri) and entry.path.exists()), None
    )


def remove(entry: Fetched) -> bool:
    """Remove a version; False if a process holds it. Files of the hub stay in the hub's cache."""
    with entry.record.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        version = entry.record.parent
        removed = version.with_name(f".removed-{version.name}-{os.getpid()}")
        version.rename(removed)
    shutil.rmtree(removed)
    return True


# -- the hub


def _fetch_from_hub(uri: Uri, version: str | None, progress: Progress | None) -> Fetched:
    path, commit = hub.fetch_repository(uri, version, progress)
    directory = _directory(uri)
    version_directory = directory / commit[:_DIGITS]
    version_directory.mkdir(parents=True, exist_ok=True)
    with _locked(uri, directory):
        link = version_directory / local_name(uri)
        # A link is replaced at once: others may be using it.
        temporary = version_directory / f".link-{os.getpid()}"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(path.absolute())
        temporary.rename(link)
        return _recorded(uri, commit, link, 0)


# -- stores


def _fetch_objects(
    uri: Uri, files: list[objects.RemoteFile], version: str, progress: Progress
) -> Fetched:
    directory, size = _directory(uri), sum(file.size or 0 for file in files)
    partial = directory / f"{_PARTIAL}-{version}"
    # Of an older version that was never finished.
    for other in directory.glob(f"{_PARTIAL}-*"):
        if other != partial:
            shutil.rmtree(other)
    target = partial / local_name(uri)
    is_file = len(files) == 1 and not is_pattern(uri) and files[0].path == uri.path
    arrived = sum(file.stat().st_blocks * 512 for file in partial.rglob("*") if file.is_file())
    _make_room(uri, size, size - arrived, directory)
    holder = partial if is_file else target
    holder.mkdir(parents=True, exist_ok=True)
    objects.download(uri, files, holder, progress)
    if objects.version_of(objects.listing(uri)) != version:
        raise StoreError(f"{uri}: the files changed while they were fetched; try again", "busy")
    complete = directory / version
    if complete.exists():  # without its record: a removal was cut
        shutil.rmtree(complete)
    _write_record(partial, uri, version, local_name(uri), size)
    partial.rename(complete)
    return Fetched(str(uri), version, complete / local_name(uri), size)


def _make_room(uri: Uri, size: int, missing: int, directory: Path) -> None:
    """Remove versions beyond SLUICE_CACHE_SIZE; raise StoreError if the files do not fit."""
    limit = _limit()
    if limit is not None:
        if size > limit:
            raise StoreError(
                f"{uri}: {size_text(size)} is more than SLUICE_CACHE_SIZE "
                f"({size_text(limit)}); set it higher",
                "full",
            )
        used = entries()
        total = sum(entry.size for entry in used) + size
        for entry in reversed([entry for entry in used if entry.size]):
            if total <= limit:
                break
            if remove(entry):
                total -= entry.size
    free = shutil.disk_usage(directory).free
    if missing > free:
        raise StoreError(
            f"{uri}: {size_text(missing)} are to be fetched, and the disk of {root()} has "
            f"{size_text(free)} left; remove files (sluice models rm), or set SLUICE_CACHE to a "
            "directory of another disk",
            "full",
        )


def _limit() -> int | None:
    text = os.environ.get("SLUICE_CACHE_SIZE")
    if not text:
        return None
    try:
        return int(quantity_value(text))
    except ValueError as error:
        raise StoreError(f"SLUICE_CACHE_SIZE: expected a size as 200Gi, found {text!r}") from error


# -- records


def _directory(uri: Uri) -> Path:
    return root() / uri.scheme / f"{local_name(uri)}-{digest(uri)}"


def _cached(uri: Uri, version: str) -> Fetched | None:
    name = version[:_DIGITS] if uri.scheme == "hf" else version
    entry = _read(_directory(uri) / name / _RECORD)
    if entry is None or entry.version != version or not entry.path.exists():
        return None
    with contextlib.suppress(OSError):  # a cache that is mounted read-only
        os.utime(entry.record)
    return entry


def _recorded(uri: Uri, version: str, path: Path, size: int) -> Fetched:
    _write_record(path.parent, uri, version, path.name, size)
    return Fetched(str(uri), version, path, size)


def _write_record(directory: Path, uri: Uri, version: str, name: str, size: int) -> None:
    record = directory / _RECORD
    temporary = directory / f"{_RECORD}.{os.getpid()}"
    fields = {"uri": str(uri), "version": version, "name": name, "size": size}
    temporary.write_text(json.dumps(fields))
    temporary.rename(record)


def _read(record: Path) -> Fetched | None:
    """Return the version that a record describes; None if there is none, or it is damaged."""
    try:
        fields: dict[str, Any] = json.loads(record.read_text())
        path = record.parent / str(fields["name"])
        return Fetched(str(fields["uri"]), str(fields["version"]), path, int(fields["size"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _used(record: Path) -> float:
    try:
        return record.stat().st_mtime
    except OSError:
        return 0.0


# -- locks


@contextlib.contextmanager
def _locked(uri: Uri, directory: Path) -> Iterator[None]:
    """Hold the lock of a URI. Another process that fetches it is waited for while it gets on."""
    lock = filelock.FileLock(directory / _LOCK)
    newest, since = 0.0, time.monotonic()
    while True:
        try:
            lock.acquire(timeout=2)
            break
        except filelock.Timeout as error:
            if (written := _newest(directory)) != newest:
                newest, since = written, time.monotonic()
            if time.monotonic() - since > _STALLED_SECONDS:
                raise StoreError(
                    f"{uri}: another process has the lock {directory / _LOCK} and has written "
                    f"nothing for {_STALLED_SECONDS / 60:.0f} minutes; end it, and try again",
                    "busy",
                ) from error
    try:
        yield
    finally:
        lock.release()


def _newest(directory: Path) -> float:
    times = [0.0]
    for path in directory.glob(f"{_PARTIAL}-*/**/*"):
        with contextlib.suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times)


def _silent(done: int, total: int) -> None:
    """Show nothing."""
