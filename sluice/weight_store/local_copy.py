"""An engine's copy of the weights on its own disk, brought from version to version.

The objects of a step are fetched and verified before any file is touched, so a store that fails
costs nothing. Deltas are then applied in place, and each file is verified. What is refused counts
as damaged, and another way is taken: usually the newest snapshot.
"""

from __future__ import annotations

import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from sluice.stores import StoreError
from sluice.weight_store import delta
from sluice.weight_store.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    Manifest,
    Step,
    StoredFile,
    StoredObject,
    VersionError,
    VersionId,
    parse,
    plan,
)
from sluice.weight_store.objects import MissingObjectError, ObjectStore

MAX_THREADS = 4
_INCOMING = ".incoming"
# A step with one of these is refused for good; another StoreError may pass.
_DAMAGES = (delta.DeltaError, VersionError, MissingObjectError)


@dataclass(slots=True)
class LocalCopy:
    """Files of one version in a directory, for the engine to load.

    Attributes
    ----------
    store
        Store of the versions.
    directory
        The directory, which belongs to this copy alone.
    held
        Version of the files; None while they are of no version.
    damaged
        Steps that were refused. Other threads may read it at any time.
    reading
        Oldest version whose objects are being read; None if none is.
    fetched_bytes
        Bytes of all objects that were fetched.
    stopped
        Ends `update` before its next object, from another thread.

    """

    store: ObjectStore
    directory: Path
    held: VersionId | None = None
    load: str = ""
    base: str = ""
    damaged: frozenset[Step] = frozenset()
    reading: VersionId | None = None
    fetched_bytes: int = 0
    stopped: threading.Event = field(default_factory=threading.Event)

    @property
    def path(self) -> Path:
        """What the engine loads."""
        return self.directory / self.load if self.load else self.directory

    def update(self, newest: VersionId) -> VersionId | None:
        """Bring the copy to `newest`, or as near to it as undamaged objects go.

        Returns
        -------
        The version that the copy has now.

        Raises
        ------
        StoreError
            The store does not answer; the copy is unchanged, or has no version.
        VersionError
            The manifest of `newest` is damaged.

        """
        try:
            target = self._manifest(newest)
            self.damaged &= {
                Step(entry.id, whole) for entry in target.entries for whole in (True, False)
            }
            while steps := plan(target.entries, self.held, self.damaged):
                self.reading = min(step.of for step in steps)
                for step in steps:
                    manifest = target if step.of == newest else None
                    if not self._take(step, manifest):
                        break
        finally:
            self.reading = None
        return self.held

    def _manifest(self, id_: VersionId) -> Manifest:
        text = self.store.get(f"{id_.directory}/{MANIFEST}")
        if len(text) > MAX_MANIFEST_BYTES:
            raise VersionError(f"{id_.directory}/{MANIFEST} has {len(text)} bytes")
        return parse(text, id_)

    def _take(self, step: Step, manifest: Manifest | None) -> bool:
        """Make a step. Returns False if its objects are damaged or gone."""
        try:
            manifest = manifest or self._manifest(step.of)
            objects = manifest.objects(step)
            incoming = self._fetch(manifest, objects)
            self.held = None
            if step.whole:
                self._remove_others({_INCOMING})
            with ThreadPoolExecutor(_workers(objects)) as pool:
                list(pool.map(lambda part: self._apply(incoming, *part), objects))
        except _DAMAGES:
            self.damaged |= {step}
            return False
        self._remove_others({file.name for file in manifest.files})
        self.held, self.load, self.base = manifest.id, manifest.load, manifest.base
        return True

    def _fetch(
        self, manifest: Manifest, objects: list[tuple[StoredFile, StoredObject, bool]]
    ) -> Path:
        """Fetch and verify all objects of a step; return their directory."""
        incoming = self.directory / _INCOMING
        shutil.rmtree(incoming, ignore_errors=True)
        incoming.mkdir(parents=True)

        def fetch(part: tuple[StoredFile, StoredObject, bool]) -> int:
            _, stored, _ = part
            if self.stopped.is_set():
                raise StoreError("stopped while weights were fetched")
            path = incoming / stored.name
            self.store.get_file(f"{manifest.id.directory}/{stored.name}", path)
            data = delta.contents(path)
            if len(data) != stored.bytes or delta.digest(data) != stored.digest:
                raise delta.DeltaError(
                    f"{manifest.id.directory}/{stored.name} is not what was published: hash or "
                    "length differs"
                )
            return len(data)

        with ThreadPoolExecutor(_workers(objects)) as pool:
            self.fetched_bytes += sum(pool.map(fetch, objects))
        return incoming

    def _apply(self, incoming: Path, file: StoredFile, stored: StoredObject, whole: bool) -> None:
        path, source = self.directory / file.name, incoming / stored.name
        if whole:
            delta.expand_file(source, incoming / file.name, file.bytes)
            os.replace(incoming / file.name, path)
        elif path.stat().st_size != file.bytes:
            raise delta.DeltaError(f"{path} has another length than {file.bytes}")
        elif file.bytes:
            data = np.memmap(path, np.uint8, mode="r+")
            delta.apply(data, source.read_bytes())
            data.flush()
        source.unlink()
        if delta.digest(delta.contents(path)) != file.digest:
            raise delta.DeltaError(f"{path} is not what was published after its delta")

    def _remove_others(self, names: set[str]) -> None:
        for path in self.directory.iterdir():
            if path.name in names:
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()


def _workers(objects: list[tuple[StoredFile, StoredObject, bool]]) -> int:
    return min(len(objects), os.cpu_count() or 1, MAX_THREADS) or 1
