"""The directory of checkpoints: whose it is, which are complete, which go. Files only, no torch.

The promise: what has a checkpoint's name is complete, and what is not as its manifest says is never
loaded; once `commit` has returned, the checkpoint outlives the machine's processes and (as far as
the file system keeps its word on fsync) its power. A checkpoint is written into
`.iter_0000020.attempt3.tmp`, gets its manifest last, is synced and renamed to `iter_0000020`; then
`latest_checkpointed_iteration.txt` (Megatron's name) is replaced.

An older attempt of the trainer may still run, on a node that is cut off, or wake up at any
instruction. So each attempt first adds a claim of its own, removes those of older ones, then takes
away the names of all that is unfinished, and only then looks where it starts from. An older one
that looks for its claim afterwards is refused; one that has looked before finds nothing left to
rename, or has published a complete checkpoint in time for its successor to see.
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
_VISIBLE_SECONDS = 60.0
"""Until a file that another node has written shows its size here: longer than network file systems
cache it."""
CHECKSUM = "xxh3_64"
"""Of a file's content, as `xxhsum -H3` prints it. CRC-32, which older manifests have, takes five
times as long."""
Record = tuple[int, str]
"""A file's bytes and their checksum, hexadecimal."""


class SupersededError(Exception):
    """A newer attempt of the trainer owns the directory."""


class DamagedError(Exception):
    """A file of a checkpoint is not what its manifest says."""


@dataclass(frozen=True, slots=True)
class Author:
    """A writer of checkpoints: an attempt of the trainer.

    run: name of the run that its attempts are counted in. A job that is made anew under its old
    name counts from 1 again, and may have the directory of the old one.
    """

    attempt: int = 0
    run: str = ""


def path_of(directory: Path, step: int) -> Path:
    return directory / f"iter_{step:07d}"


def temporary_of(final: Path, author: Author) -> Path:
    return final.with_name(f".{final.name}.attempt{author.attempt}.tmp")


def steps(directory: Path) -> list[int]:
    """Steps of the checkpoints, oldest first."""
    if not directory.is_dir():
        return []
    names = (_NAME.fullmatch(entry.name) for entry in directory.iterdir())
    return sorted(int(match[1]) for match in names if match)


def latest_step(directory: Path) -> int | None:
    """Step of the newest checkpoint; None: there is none.

    A crash between the rename and the tracker leaves the tracker one behind: the newest directory
    counts. The tracker is for Megatron's own tools, and people.
    """
    return max(steps(directory), default=None)


def latest_checkpoint(path: Path) -> Path:
    """The newest checkpoint of a directory; the path itself where it holds none."""
    step = latest_step(path)
    return path if step is None else path_of(path, step)


# --- whose it is


def claim(directory: Path, author: Author) -> None:
    """Make the directory this attempt's, and remove what crashes and older attempts have left.

    Raises SupersededError where a newer attempt was here first.
    """
    directory.mkdir(parents=True, exist_ok=True)
    mine = _claim_of(directory, author)
    mine.touch()
    _fsync(mine)
    _fsync(directory)
    for entry in directory.glob(".trainer-*.claim"):
        match = _CLAIM.fullmatch(entry.name)
        if match is None or entry == mine:
            continue
        if match[1] == author.run and int(match[2]) > author.attempt:
            mine.unlink()
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
    """Raise SupersededError where another has claimed the directory since this attempt did."""
    try:
        with _claim_of(directory, author).open("rb"):  # NFS asks its server when a file is opened
            return
    except OSError as error:
        raise SupersededError(
            f"{directory}: attempt {author.attempt} has been replaced, and must not write here any "
            "more"
        ) from error


def _claim_of(directory: Path, author: Author) -> Path:
    return directory / f".trainer-{author.run}-{author.attempt}.claim"


# --- a checkpoint


def record_of(file: Path) -> Record:
    """Size and checksum of a file's content."""
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
    """Make the checkpoint durable, then visible, then the latest.

    records: by path in the checkpoint, of files that this process has not written: their writers'
    word on what they should hold. Raises SupersededError where the directory is not ours any more.
    """
    records = records or {}
    for name, (size, _) in records.items():
        _await_size(temporary / name, size)
    files = [file for file in sorted(temporary.rglob("*")) if file.is_file()]
    names = [file.relative_to(temporary).as_posix() for file in files]
    manifest = {
        name: records.get(name) or record_of(file) for name, file in zip(names, files, strict=True)
    }
    content = {"checksum": CHECKSUM, "files": manifest}
    (temporary / MANIFEST).write_text(json.dumps(content, indent=1) + "\n")
    for entry in [*temporary.rglob("*"), temporary]:
        _fsync(entry)
    check_claim(final.parent, author)
    temporary.rename(final)
    _fsync(final.parent)
    check_claim(final.parent, author)
    _replace(final.parent / TRACKER, str(int(final.name.removeprefix("iter_"))), author)


def verify(final: Path, names: Iterable[str]) -> None:
    """Raise DamagedError where one of these files is not what the manifest says."""
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
    """Names of the checkpoint's files, in an order that all processes agree on."""
    return sorted(_manifest(final)[0])


def delete_directory(directory: Path) -> None:
    """Delete a directory that another process may be deleting, too: an attempt that was replaced
    and has not ended.
    """
    while directory.exists():
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(directory)


def prune(
    directory: Path, keep: int, author: Author, delete: Callable[[Path], object] = delete_directory
) -> list[int]:
    """Delete all but the newest `keep` checkpoints; returns the deleted steps. Call it on one
    rank.

    delete: called with each one's directory once that has lost its name. It may take its time: who
    claims the checkpoints next deletes what is left of it.
    """
    check_claim(directory, author)
    doomed = steps(directory)[:-keep] if keep > 0 else []
    for step in doomed:
        _remove(path_of(directory, step), delete)
    return doomed


def _manifest(final: Path) -> tuple[dict[str, Record], Callable[[Path], Record]]:
    """Its records, and how one is made of a file. One that names no checksum has CRC-32."""
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
    """Wait until a file that another node has written is seen here as it was written."""
    end = time.monotonic() + _VISIBLE_SECONDS
    while (seen := file.stat().st_size if file.exists() else -1) != size:
        if time.monotonic() > end:
            raise DamagedError(
                f"{file} has {seen} bytes here, its writer says {size}: is the directory one that "
                "all nodes share?"
            )
        time.sleep(0.5)


def _replace(file: Path, text: str, author: Author) -> None:
    temporary = file.with_name(f".{file.name}.attempt{author.attempt}.tmp")
    temporary.write_text(text)
    _fsync(temporary)
    temporary.replace(file)
    _fsync(file.parent)


def _remove(directory: Path, delete: Callable[[Path], object] = delete_directory) -> None:
    """Delete a directory that first loses its name.

    So nobody finds it half deleted, and nobody who still has its old name can publish it. The name
    is gone from the disk before its files are: a loss of power must not bring it back without them.
    """
    leaving = directory.with_name(f".{secrets.token_hex(8)}.removed.tmp")
    try:
        directory.rename(leaving)
    except FileNotFoundError:  # its writer was quicker
        return
    _fsync(leaving.parent)
    delete(leaving)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
