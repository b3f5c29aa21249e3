"""The directory of checkpoints: its owner, its complete checkpoints, and their removal.

It handles files only and needs no torch. The promise:

- A directory with the name of a checkpoint is complete.
- Files that differ from their manifest are never loaded.
- Once `commit` has returned, the checkpoint survives the death of all processes and, as far as the
  file system honours fsync, a loss of power.

A checkpoint is written into `.iter_0000020.attempt3.tmp`. The manifest is written last; then all
files are synced, the directory is renamed to `iter_0000020`, and
`latest_checkpointed_iteration.txt` (Megatron's name) is replaced.

An older attempt of the trainer may still run on a node that is cut off, or wake up at any
instruction. So each attempt first adds its claim, removes older claims, renames all unfinished
directories, and only then looks for the checkpoint to start from. An older attempt that checks its
claim after that is refused. One that checked before either finds no directory to rename any more,
or has published a complete checkpoint in time for its successor to see.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import xxhash

TRACKER = "latest_checkpointed_iteration.txt"
MANIFEST = "files.json"
_NAME = re.compile(r"iter_(\d{7,})")
_CLAIM = re.compile(r"\.trainer-(\w*)-(\d+)\.claim")
_CHUNK_BYTES = 8 << 20
# Seconds until the size of a file that another node has written must be visible here: longer than
# network file systems cache it.
_VISIBLE_SECONDS = 60.0
# Checksum of a file's content, as `xxhsum -H3` prints it. Older manifests have CRC-32, which takes
# five times as long.
CHECKSUM = "xxh3_64"
# Size of a file in bytes, and its checksum in hexadecimal.
Record = tuple[int, str]


class SupersededError(Exception):
    """A newer attempt of the trainer owns the directory."""


class DamagedError(Exception):
    """A file of a checkpoint differs from its manifest."""


@dataclass(frozen=True, slots=True)
class Author:
    """An attempt of the trainer that writes checkpoints.

    Attributes
    ----------
    attempt
        Number of the attempt in its run.
    run
        Name of the run. A job that is created again under its old name counts attempts from 1
        again, and may use the directory of the old job.

    """

    attempt: int = 0
    run: str = ""


def path_of(directory: Path, step: int) -> Path:
    return directory / f"iter_{step:07d}"


def temporary_of(final: Path, author: Author) -> Path:
    return final.with_name(f".{final.name}.attempt{author.attempt}.tmp")


def steps(directory: Path) -> list[int]:
    """Return the steps of the checkpoints, oldest first."""
    if not directory.is_dir():
        return []
    names = (_NAME.fullmatch(entry.name) for entry in directory.iterdir())
    return sorted(int(match[1]) for match in names if match)


def latest_step(directory: Path) -> int | None:
    """Return the step of the newest checkpoint, or None if there is no checkpoint.

    A crash between the rename and the tracker leaves the tracker one step behind, so the newest
    directory counts. The tracker is for Megatron's tools and for people.
    """
    return max(steps(directory), default=None)


def latest_checkpoint(path: Path) -> Path:
    """Return the newest checkpoint of a directory, or the path itself if it holds none."""
    step = latest_step(path)
    return path if step is None else path_of(path, step)


# --- ownership


def claim(directory: Path, author: Author) -> None:
    """Make this attempt the owner of the directory, and remove what older attempts have left.

    Parameters
    ----------
    directory
        Directory of checkpoints; created if it does not exist.
    author
        The claiming attempt.

    Raises
    ------
    SupersededError
        If a newer attempt has claimed the directory.

    """
    directory.mkdir(parents=True, exist_ok=True)
    # The claim is durable before older claims are removed: the directory always has an owner.
    claim_file = _claim_of(directory, author)
    claim_file.touch()
    _fsync(claim_file)
    _fsync(directory)
    for entry in directory.glob(".trainer-*.claim"):
        match = _CLAIM.fullmatch(entry.name)
        if match is None or entry == claim_file:
            continue
        if match[1] == author.run and int(match[2]) > author.attempt:
            claim_file.unlink()
            raise SupersededError(
                f"{directory}: attempt {author.attempt} was replaced by attempt {match[2]}"
            )
        entry.unlink(missing_ok=True)
    _fsync(directory)
    for entry in directory.glob(".*.tmp"):
        if entry.is_dir():
            _remove(entry)
        else:
            entry.unlink(missing_ok=True)


def check_claim(directory: Path, author: Author) -> None:
    """Raise SupersededError if another attempt has claimed the directory since this one did."""
    try:
        with _claim_of(directory, author).open("rb"):  # NFS asks its server when a file is opened
            return
    except OSError as error:
        raise SupersededError(
            f"{directory}: attempt {author.attempt} has been replaced and must not write here"
        ) from error


def _claim_of(directory: Path, author: Author) -> Path:
    return directory / f".trainer-{author.run}-{author.attempt}.claim"


# --- a checkpoint


def record_of(file: Path) -> Record:
    """Return size and checksum of a file's content."""
    size, digest = 0, xxhash.xxh3_64()
    for chunk in _chunks(file):
        size += len(chunk)
        digest.update(chunk)
    return size, digest.hexdigest()


def _record_with_crc(file: Path) -> Record:
    size = checksum = 0
    for chunk in _chunks(file):
        checksum, size = zlib.crc32(chunk, checksum), size + len(chunk)
    return size, _crc_text(checksum)


def _crc_text(checksum: int) -> str:
    return f"{checksum:08x}"


def _chunks(file: Path) -> Iterator[bytes]:
    with file.open("rb") as opened:
        while chunk := opened.read(_CHUNK_BYTES):
            yield chunk


def commit(
    temporary: Path, final: Path, author: Author, records: Mapping[str, Record] | None = None
) -> None:
    """Make a checkpoint durable, then visible, then the latest.

    Parameters
    ----------
    temporary
        Directory that holds the written files.
    final
        Name of the checkpoint.
    author
        The attempt that writes.
    records
        Records of files that other processes have written, by path in the checkpoint. Other files
        are read and recorded here.

    Raises
    ------
    SupersededError
        If another attempt owns the directory.
    DamagedError
        If a file does not reach its recorded size.

    """
    records = records or {}
    for name, (size, _) in records.items():
        _await_size(temporary / name, size)
    files = [file for file in sorted(temporary.rglob("*")) if file.is_file()]
    names = [file.relative_to(temporary).as_posix() for file in files]
    manifest = {
        name: records.get(name) or record_of(file) for name, file in zip(names, files, strict=True)
    }
    # The manifest is the last file, and every file reaches the disk before the name does.
    content = {"checksum": CHECKSUM, "files": manifest}
    (temporary / MANIFEST).write_text(json.dumps(content, indent=1) + "\n")
    for entry in [*temporary.rglob("*"), temporary]:
        _fsync(entry)
    check_claim(final.parent, author)
    temporary.rename(final)
    _fsync(final.parent)
    # A successor may have claimed the directory since; then the tracker belongs to it.
    check_claim(final.parent, author)
    _replace(final.parent / TRACKER, str(int(final.name.removeprefix("iter_"))), author)


def verify(final: Path, names: Iterable[str]) -> None:
    """Check files of a checkpoint against its manifest.

    Parameters
    ----------
    final
        Directory of the checkpoint.
    names
        Files to check, as in the manifest.

    Raises
    ------
    DamagedError
        If a file is missing or differs from the manifest.

    """
    manifest, record_of = _manifest(final)
    for name in names:
        expected = manifest[name]
        try:
            actual = record_of(final / name)
        except FileNotFoundError:
            raise DamagedError(f"{final / name} is missing") from None
        if actual[0] != expected[0]:
            raise DamagedError(f"{final / name} has {actual[0]} bytes, expected {expected[0]}")
        if actual != expected:
            raise DamagedError(f"{final / name} does not have the content that was written")


def manifest_files(final: Path) -> list[str]:
    """Return the names of the checkpoint's files, in an order that all processes agree on."""
    return sorted(_manifest(final)[0])


def delete_directory(directory: Path) -> None:
    """Delete a directory, even if another process deletes it at the same time.

    That may be an attempt that was replaced and has not ended.
    """
    while directory.exists():
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(directory)


def prune(
    directory: Path, keep: int, author: Author, delete: Callable[[Path], object] = delete_directory
) -> list[int]:
    """Delete all but the newest `keep` checkpoints. Call it on one rank.

    Parameters
    ----------
    directory
        Directory of checkpoints.
    keep
        Number of checkpoints to keep; 0 keeps all.
    author
        The attempt that owns the directory.
    delete
        Deletes a directory that is no longer a checkpoint. It may do so later: `claim` removes what
        a process leaves behind.

    Returns
    -------
    The deleted steps.

    """
    check_claim(directory, author)
    doomed = steps(directory)[:-keep] if keep > 0 else []
    for step in doomed:
        _remove(path_of(directory, step), delete)
    return doomed


def _manifest(final: Path) -> tuple[dict[str, Record], Callable[[Path], Record]]:
    """Return the records of a manifest, and the function that makes such a record of a file.

    A manifest that names no checksum has CRC-32.
    """
    try:
        content = json.loads((final / MANIFEST).read_text())
        listed = content["files"].items()
        if content.get("checksum") == CHECKSUM:
            return {name: (int(size), str(text)) for name, (size, text) in listed}, record_of
        crcs = {name: (int(size), _crc_text(number)) for name, (size, number) in listed}
        return crcs, _record_with_crc
    except FileNotFoundError:
        raise DamagedError(
            f"{final} has no {MANIFEST}: it was copied in part, or not written by this trainer. "
            "Without this directory, training goes on from the one before it"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{final / MANIFEST} cannot be read: {error!r}") from error


def _await_size(file: Path, size: int) -> None:
    """Wait until a file that another node has written has its full size here."""
    end = time.monotonic() + _VISIBLE_SECONDS
    while (seen := file.stat().st_size if file.exists() else -1) != size:
        if time.monotonic() > end:
            raise DamagedError(
                f"{file} has {seen} bytes here, its writer says {size}: do all nodes share the "
                "directory?"
            )
        time.sleep(0.5)


def _replace(file: Path, text: str, author: Author) -> None:
    temporary = file.with_name(f".{file.name}.attempt{author.attempt}.tmp")
    temporary.write_text(text)
    _fsync(temporary)
    temporary.replace(file)
    _fsync(file.parent)


def _remove(directory: Path, delete: Callable[[Path], object] = delete_directory) -> None:
    """Delete a directory after renaming it.

    After the rename no process finds it half deleted, and a process that still knows the old name
    cannot publish it. The rename is synced before files are deleted, because a loss of power must
    not restore the name of an incomplete checkpoint.
    """
    renamed = directory.with_name(f".{secrets.token_hex(8)}.removed.tmp")
    try:
        directory.rename(renamed)
    except FileNotFoundError:  # its author has published it under its final name
        return
    _fsync(renamed.parent)
    delete(renamed)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
