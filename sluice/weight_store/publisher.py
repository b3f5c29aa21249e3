"""Publishes versions of the weights: objects first, the manifest last.

A version counts once its manifest is there, so a publisher that is killed or cut off leaves none
that is incomplete. The differences are those to the last version that was published; its files stay
on this machine's disk.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from sluice.stores import StoreError
from sluice.stores.retrying import retried, until
from sluice.telemetry import logs
from sluice.weight_store import delta
from sluice.weight_store.delta import contents
from sluice.weight_store.manifest import (
    MANIFEST,
    Manifest,
    StoredFile,
    StoredObject,
    VersionEntry,
    VersionId,
    id_of,
    kept,
    removable,
)
from sluice.weight_store.objects import ObjectStore

AGAIN_SECONDS = 1.0
# Failures that only a change of the job or of its store cures.
PERMANENT = ("package", "credential", "missing")
MAX_THREADS = 4
# The base of the next deltas, next to the directories of versions.
BASE = "base"


@dataclass(frozen=True, slots=True)
class Published:
    """What publishing a version took.

    Attributes
    ----------
    bytes
        Bytes of all objects that were written.
    delta_bytes
        Bytes that an engine with the previous version has to fetch; None if it needs a snapshot.
    full_bytes
        Bytes of the version's files.

    """

    bytes: int
    delta_bytes: int | None
    full_bytes: int


class Publisher:
    """Publishes the versions of one attempt of a trainer."""

    def __init__(
        self,
        store: ObjectStore,
        attempt: int,
        base: Path,
        *,
        snapshot_every: int,
        keep: int,
        load: str = "",
    ) -> None:
        """Begin without a version: the first one is a snapshot.

        Parameters
        ----------
        store
            Store of the versions.
        attempt
            Attempt of the trainer.
        base
            Directory that the files of the last version are moved to.
        snapshot_every
            Versions from one snapshot to the next.
        keep
            Snapshots that stay in the store, with the versions since.
        load
            File that engines load; empty: the directory.

        """
        self._store, self._attempt, self._base = store, attempt, base
        self._snapshot_every, self._keep, self._load = snapshot_every, keep, load
        self._entries: tuple[VersionEntry, ...] = ()
        self._files: dict[str, StoredFile] = {}
        shutil.rmtree(base, ignore_errors=True)

    @property
    def newest(self) -> VersionId | None:
        """The last version that was published."""
        return self._entries[0].id if self._entries else None

    def publish(
        self,
        files: Path,
        version: int,
        *,
        base_digest: str = "",
        read: Collection[VersionId] = (),
        damaged: Collection[VersionId] = (),
        seconds: float = 300.0,
    ) -> Published:
        """Publish a directory of files, and move it to the base of the next version.

        Parameters
        ----------
        files
            The version's files. The directory is gone afterwards.
        version
            Its number.
        base_digest
            Digest of the model that an adapter belongs to.
        read
            Oldest version that each engine is reading now.
        damaged
            Versions whose deltas an engine has refused: the next version after them is whole.
        seconds
            Time after which a store that fails is given up.

        Raises
        ------
        StoreError
            The store did not take the version. It does not exist, `files` is unchanged, and later
            versions do not depend on it.

        """
        id_ = VersionId(version, self._attempt)
        deadline = time.monotonic() + seconds
        whole = self._is_snapshot(damaged)
        names = sorted(path.name for path in files.iterdir() if path.is_file())
        workers = min(len(names), os.cpu_count() or 1, MAX_THREADS) or 1
        with ThreadPoolExecutor(workers) as pool:
            stored = tuple(
                pool.map(lambda name: self._put_file(files / name, id_, whole, deadline), names)
            )
        manifest = Manifest(
            version=version,
            attempt=self._attempt,
            files=stored,
            load=self._load,
            base=base_digest,
            earlier=self._entries,
        )
        text = manifest.model_dump_json().encode()
        _retried(lambda: self._store.put(f"{id_.directory}/{MANIFEST}", text), deadline)
        self._entries = kept(manifest.entries, self._keep)
        self._files = {file.name: file for file in stored}
        shutil.rmtree(self._base, ignore_errors=True)
        os.replace(files, self._base)
        if whole:
            self._remove_old(read)
        return Published(
            sum(o.bytes for f in stored for o in (f.delta, f.whole) if o),
            manifest.entry.delta_bytes,
            sum(file.bytes for file in stored),
        )

    def _is_snapshot(self, damaged: Collection[VersionId]) -> bool:
        since = self._entries
        for count, entry in enumerate(since):
            if entry.whole_bytes is not None:
                return count + 1 >= self._snapshot_every
            if entry.id in damaged:
                return True
        return True

    def _put_file(self, path: Path, id_: VersionId, whole: bool, deadline: float) -> StoredFile:
        new = contents(path)
        digest = delta.digest(new)
        before = self._files.get(path.name)
        same = before is not None and (before.bytes, before.digest) == (len(new), digest)
        difference: StoredObject | None = None
        if before is not None and before.bytes == len(new) and not same:
            encoded = delta.encode(contents(self._base / path.name), new)
            if len(encoded) < len(new):
                name = f"{path.name}.delta"
                _retried(lambda: self._store.put(f"{id_.directory}/{name}", encoded), deadline)
                difference = StoredObject(
                    name=name, bytes=len(encoded), digest=delta.digest(encoded)
                )
        entire: StoredObject | None = None
        if whole or not (same or difference):
            entire = self._put_whole(path, id_, deadline)
        return StoredFile(
            name=path.name,
            bytes=len(new),
            digest=digest,
            same=same,
            delta=difference,
            whole=entire,
        )

    def _put_whole(self, path: Path, id_: VersionId, deadline: float) -> StoredObject:
        name = f"{path.name}.whole"
        compressed = self._base.with_name(name)
        try:
            delta.compress_file(path, compressed)
            _retried(lambda: self._store.put_file(f"{id_.directory}/{name}", compressed), deadline)
            data = contents(compressed)
            return StoredObject(name=name, bytes=len(data), digest=delta.digest(data))
        finally:
            compressed.unlink(missing_ok=True)

    def _remove_old(self, read: Collection[VersionId]) -> None:
        """Remove versions that are not needed. After a failure the next snapshot tries again."""
        try:
            present = [id_ for name in self._store.directories() if (id_ := id_of(name))]
            ids = {entry.id for entry in self._entries}
            for old in removable(present, ids, read, self._attempt):
                self._store.remove(old.directory)
        except StoreError as error:
            logs.get().warning("cannot remove old weights from the store", reason=str(error))


def _retried(put: Callable[[], None], deadline: float) -> None:
    """Repeat until it succeeds. Raises the last StoreError after the deadline."""
    pauses = until(deadline, AGAIN_SECONDS, AGAIN_SECONDS)
    retried(put, pauses, is_final=lambda error: error.kind in PERMANENT)
