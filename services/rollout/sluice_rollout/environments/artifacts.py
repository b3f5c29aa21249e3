"""Artifacts: the files that a program hands to its verifier.

The program is not trusted. Only plain files and directories are handed on, within limits. The
program may still change them while they are read, so no link is followed, no open blocks, and the
verifier's copies are written below one directory only.
"""

from __future__ import annotations

import base64
import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sluice.samples.episode_protocol import (
    ARTIFACTS,
    MOST_ARTIFACT_BYTES,
    MOST_ARTIFACTS,
    MOST_DEPTH,
)

_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class ArtifactsError(Exception):
    """Artifacts cannot be handed on. The message names the file and what was expected."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """A file that a program leaves to its verifier."""

    path: str  # relative to the directory of artifacts
    content: bytes
    executable: bool = False


@dataclass(slots=True)
class _Collection:
    files: list[Artifact] = field(default_factory=list)
    entries: int = 0
    remaining_bytes: int = MOST_ARTIFACT_BYTES

    def add_directory(self, descriptor: int, path: str, depth: int) -> None:
        if depth > MOST_DEPTH:
            raise ArtifactsError(f"{path}: expected at most {MOST_DEPTH} levels of directories")
        with os.scandir(descriptor) as items:
            for item in items:
                self.entries += 1
                if self.entries > MOST_ARTIFACTS:
                    raise ArtifactsError(
                        f"{ARTIFACTS}: expected at most {MOST_ARTIFACTS} files and directories"
                    )
                self._add(descriptor, item.name, f"{path}/{item.name}", depth)

    def _add(self, parent: int, name: str, path: str, depth: int) -> None:
        try:
            descriptor = os.open(name, _OPEN, dir_fd=parent)
        except OSError as error:  # ELOOP: a link; ENXIO: a socket
            raise ArtifactsError(
                f"{path}: expected a plain file or a directory: {error.strerror}"
            ) from error
        try:
            status = os.fstat(descriptor)
            if stat.S_ISDIR(status.st_mode):
                self.add_directory(descriptor, path, depth + 1)
            elif stat.S_ISREG(status.st_mode):
                executable = bool(status.st_mode & stat.S_IXUSR)
                inside = path.removeprefix(f"{ARTIFACTS}/")
                self.files.append(Artifact(inside, self._content(descriptor), executable))
            else:
                raise ArtifactsError(f"{path}: expected a plain file or a directory")
        finally:
            os.close(descriptor)

    def _content(self, descriptor: int) -> bytes:
        with os.fdopen(os.dup(descriptor), "rb") as file:
            content = file.read(self.remaining_bytes + 1)
        self.remaining_bytes -= len(content)
        if self.remaining_bytes < 0:
            raise ArtifactsError(f"{ARTIFACTS}: expected at most {MOST_ARTIFACT_BYTES} bytes")
        return content


def collect(episode: str) -> list[Artifact]:
    """Read the artifacts in an episode's directory. Raises ArtifactsError.

    Returns an empty list if there is no directory of artifacts.
    """
    collection = _Collection()
    try:
        top = os.open(Path(episode, ARTIFACTS), _OPEN | os.O_DIRECTORY)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ArtifactsError(f"{ARTIFACTS}: expected a directory: {error.strerror}") from error
    try:
        collection.add_directory(top, ARTIFACTS, 1)
    except OSError as error:
        raise ArtifactsError(f"{ARTIFACTS} cannot be read: {error.strerror}") from error
    finally:
        os.close(top)
    return sorted(collection.files, key=lambda file: file.path)


def prepare(episode: str, files: Iterable[Artifact] = ()) -> None:
    """Make the directory of artifacts in an episode's directory, and write files into it.

    Every user may change the files, because the program may run as any user. Raises ArtifactsError.
    """
    top = Path(episode, ARTIFACTS)
    try:
        _make_directory(top)
        for file in files:
            _write(top, file)
    except (OSError, ValueError) as error:  # ValueError: not a valid file name
        raise ArtifactsError(f"{ARTIFACTS} cannot be written: {error}") from error


def _write(top: Path, file: Artifact) -> None:
    parts = file.path.split("/")
    if not all(parts) or {".", ".."} & {*parts}:
        raise ArtifactsError(f"{file.path!r}: expected a path below {ARTIFACTS}")
    for depth in range(1, len(parts)):
        _make_directory(top.joinpath(*parts[:depth]))
    target = top.joinpath(*parts)
    with target.open("xb") as opened:
        opened.write(file.content)
    target.chmod(0o777 if file.executable else 0o666)


def _make_directory(directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    directory.chmod(0o777)


def to_json(files: Sequence[Artifact]) -> list[list[Any]]:
    """Encode files for a message."""
    return [[f.path, f.executable, base64.b64encode(f.content).decode()] for f in files]


def from_json(files: Sequence[Sequence[Any]]) -> list[Artifact]:
    """Decode the files of a message."""
    return [Artifact(path, base64.b64decode(text), bool(run)) for path, run, text in files]
