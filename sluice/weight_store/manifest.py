"""What a version of the weights consists of in a store, and which objects bring an engine there.

A version is a set of files: a Hugging Face checkpoint, or an adapter. Each version has the
differences of its files to the version before, and every few versions is a **snapshot** that has
the files whole too. `manifest.json` is written last: a version without it does not exist.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

MANIFEST = "manifest.json"
FORMAT = 1
MAX_MANIFEST_BYTES = 64 << 20
_DIRECTORY = re.compile(r"version_(\d{1,18})\.attempt(\d{1,9})")
_Count = Annotated[int, Field(ge=0, lt=1 << 62)]
_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
# A name in one directory: nothing that a store publishes may be written anywhere else.
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,250}$")]


class VersionError(ValueError):
    """A manifest that is damaged, or of another release."""


class VersionId(NamedTuple):
    """A weight version, and the attempt of the trainer that has written it.

    A trainer that continues from a checkpoint writes versions again, with other weights.
    """

    version: int
    attempt: int

    @property
    def directory(self) -> str:
        return f"version_{self.version:07d}.attempt{self.attempt}"


class Step(NamedTuple):
    """One part of the way to a version: its files whole, or differences to the version before."""

    of: VersionId
    whole: bool


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class StoredObject(_Part):
    """An object of the store, next to the manifest."""

    name: _Name
    bytes: _Count
    digest: _Digest


class StoredFile(_Part):
    """A file of a version: its bytes, and the objects that bring them.

    Attributes
    ----------
    same
        It is as in the version before, so that no delta is needed.
    delta, whole
        The difference to the version before, and the file; None: it goes the other way.

    """

    name: _Name
    bytes: _Count
    digest: _Digest
    same: bool = False
    delta: StoredObject | None = None
    whole: StoredObject | None = None


class VersionEntry(_Part):
    """A version in the history of another one. Sizes are those of objects; None: it has none."""

    version: _Count
    attempt: _Count
    delta_bytes: _Count | None = None
    whole_bytes: _Count | None = None

    @property
    def id(self) -> VersionId:
        return VersionId(self.version, self.attempt)


class Manifest(_Part):
    """A version.

    Attributes
    ----------
    files
        All files of the version.
    load
        File that the engine loads; empty: the directory.
    base
        Digest of the model that an adapter belongs to; empty: none.
    earlier
        Versions before it, newest first, each the base of the next one's deltas.

    """

    format: Literal[1] = 1
    version: _Count
    attempt: _Count
    files: tuple[StoredFile, ...]
    load: str = ""
    base: str = ""
    earlier: tuple[VersionEntry, ...] = ()

    @property
    def id(self) -> VersionId:
        return VersionId(self.version, self.attempt)

    @property
    def entry(self) -> VersionEntry:
        """The version as later versions list it.

        A file without a delta goes whole, so it counts in both sizes.
        """
        deltas = [file.delta or file.whole for file in self.files if not file.same]
        return VersionEntry(
            version=self.version,
            attempt=self.attempt,
            delta_bytes=_total(deltas) if self.earlier else None,
            whole_bytes=_total([file.whole for file in self.files]),
        )

    @property
    def entries(self) -> tuple[VersionEntry, ...]:
        return (self.entry, *self.earlier)

    def objects(self, step: Step) -> list[tuple[StoredFile, StoredObject, bool]]:
        """Return the objects of a step to this version, and whether each is a whole file.

        Raises VersionError if the version has no such step.
        """
        objects = []
        for file in self.files:
            if file.same and not step.whole:
                continue
            chosen = file.whole if step.whole or file.delta is None else file.delta
            if chosen is None:
                raise VersionError(f"{self.id.directory}: {file.name} is not there whole")
            objects.append((file, chosen, chosen is file.whole))
        return objects


def _total(objects: Sequence[StoredObject | None]) -> int | None:
    present = [stored.bytes for stored in objects if stored is not None]
    return sum(present) if len(present) == len(objects) else None


def parse(text: bytes, expected: VersionId) -> Manifest:
    """Read a manifest. Raises VersionError."""
    try:
        manifest = Manifest.model_validate_json(text)
    except (ValidationError, RecursionError) as error:
        first = str(error).replace("\n", " ")[:300]
        raise VersionError(f"{expected.directory}/{MANIFEST}: {first}") from error
    if manifest.id != expected:
        raise VersionError(
            f"{expected.directory}/{MANIFEST} describes {manifest.id.directory}: another process "
            "has written it"
        )
    return manifest


def id_of(directory: str) -> VersionId | None:
    """Return the version that a directory of the store belongs to; None if to no version."""
    match = _DIRECTORY.fullmatch(directory)
    return VersionId(int(match[1]), int(match[2])) if match else None


def plan(
    entries: Sequence[VersionEntry], held: VersionId | None, damaged: Collection[Step] = ()
) -> list[Step]:
    """Return the steps with the fewest bytes to the newest version that can be reached.

    Parameters
    ----------
    entries
        The newest version and those before it, newest first.
    held
        Version whose files are on the disk; None: none.
    damaged
        Steps whose objects were refused or are gone.

    Returns
    -------
    The steps, in order; empty if no version newer than `held` can be reached.

    """
    for start, goal in enumerate(entries):
        if goal.id == held:
            break
        if ways := list(_ways(entries[start:], held, damaged)):
            return min(ways, key=lambda way: way[0])[1]
    return []


def _ways(
    entries: Sequence[VersionEntry], held: VersionId | None, damaged: Collection[Step]
) -> Iterable[tuple[int, list[Step]]]:
    """Yield bytes and steps of each way to the first entry."""
    size, deltas = 0, list[Step]()
    for entry in entries:
        if entry.id == held:
            yield size, deltas[::-1]
            return
        whole, delta = Step(entry.id, whole=True), Step(entry.id, whole=False)
        if entry.whole_bytes is not None and whole not in damaged:
            yield size + entry.whole_bytes, [whole, *deltas[::-1]]
        if entry.delta_bytes is None or delta in damaged:
            return
        size += entry.delta_bytes
        deltas.append(delta)


def kept(entries: Sequence[VersionEntry], snapshots: int) -> tuple[VersionEntry, ...]:
    """Return the newest versions, back to the last of so many snapshots."""
    for count, entry in enumerate(entries, 1):
        if entry.whole_bytes is not None:
            snapshots -= 1
        if snapshots == 0:
            return tuple(entries[:count])
    return tuple(entries)


def removable(
    present: Iterable[VersionId],
    kept_ids: Collection[VersionId],
    read: Collection[VersionId],
    attempt: int,
) -> list[VersionId]:
    """Return the versions in the store that no engine can need any more.

    Parameters
    ----------
    present
        Versions in the store.
    kept_ids
        Versions that stay in any case.
    read
        The oldest version that each engine is reading now; newer ones of that attempt stay too.
    attempt
        The trainer's own. What a newer attempt has written is not this one's to remove.

    """
    oldest: dict[int, int] = {}
    for version, of_attempt in read:
        oldest[of_attempt] = min(version, oldest.get(of_attempt, version))
    return [
        id_
        for id_ in present
        if id_ not in kept_ids
        and id_.attempt <= attempt
        and not (id_.attempt in oldest and id_.version >= oldest[id_.attempt])
    ]
