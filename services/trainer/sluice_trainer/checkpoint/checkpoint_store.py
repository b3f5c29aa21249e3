"""Checkpoints in an object store (`checkpoint.to`).

It needs no torch. The promise:

- A checkpoint whose manifest exists, and whose files have the sizes in it, is complete. Any other
  is never loaded.
- Once `publish` has returned, the checkpoint survives the death of all processes.
- No attempt of the trainer changes an object of another attempt.

Objects cannot be renamed, so the manifest takes the place of the rename of `checkpoint_directory`:

    iter_0000020/attempt3-RUN/__0_0.distcp, .metadata, ...   written by the ranks of attempt 3
    iter_0000020/files.json                                   the manifest, written last, once

An older attempt may still run on a node that is cut off. Each attempt first adds its claim and
removes older ones, then aborts unfinished uploads and deletes what they left. An older attempt that
checks its claim after that is refused. The manifest of one that checked before names deleted files,
so its checkpoint is not complete.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from sluice.stores import StoreError, Uri, filesystem, parse_uri, retrying, store_errors
from sluice.stores.filesystem import objects_below
from sluice.telemetry import logs
from sluice_trainer.checkpoint.checkpoint_directory import (
    CHECKSUM,
    MANIFEST,
    Author,
    DamagedError,
    Record,
    SupersededError,
    path_of,
    record_of,
)

# A shard is sent in parts of this size. S3 takes 10,000 of them, so a shard may have 640 GB.
PART_BYTES = 64 << 20
# Seconds for which an operation is repeated while a store is busy, slow or cut off.
RETRY_SECONDS = 300.0
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0
# Files of tensors. They are read in ranges; all others are small and are fetched whole.
SHARD_SUFFIX = ".distcp"
# Marks a local directory of a fetched checkpoint, whose shards are in the store.
SOURCE = "source.json"
T = TypeVar("T")
_NAME = re.compile(r"iter_(\d{7,})")
_CLAIM = re.compile(r"\.trainer-(\w*)-(\d+)\.claim")


class ShardStream:
    """A file that is sent to the store while it is written, with the record of its content."""

    def __init__(self, uri: Uri, file: Any) -> None:
        self._uri, self._file = uri, file
        self._size, self._digest = 0, xxhash.xxh3_64()
        self.error: StoreError | None = None

    def write(self, content: bytes | memoryview) -> int:
        """Send content. At most one part of it is held in memory."""
        view = memoryview(content).cast("B")
        for start in range(0, len(view), PART_BYTES):
            part = view[start : start + PART_BYTES]
            try:
                with store_errors(self._uri):
                    self._file.write(part)
            except StoreError as error:
                self.error = error
                raise
            self._digest.update(part)
        self._size += len(view)
        return len(view)

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        """Do nothing: parts are sent when they are full."""

    def close(self) -> None:
        """Do nothing: the store closes the file."""

    @property
    def record(self) -> Record:
        return self._size, self._digest.hexdigest()


@dataclass
class CheckpointStore:
    """A prefix of a bucket that holds checkpoints.

    Attributes
    ----------
    uri
        The prefix.
    author
        The attempt that writes.

    """

    uri: Uri
    author: Author = field(default_factory=Author)

    @classmethod
    def of(cls, text: str | None, author: Author | None = None) -> CheckpointStore | None:
        """Return the store of `checkpoint.to`, or None if checkpoints are in a directory."""
        uri = parse_uri(text) if text else None
        return cls(uri, author or Author()) if uri else None

    def uri_of(self, step: int) -> Uri:
        return self.uri / f"iter_{step:07d}"

    def _attempt_of(self, step: int) -> Uri:
        return self.uri_of(step) / f"attempt{self.author.attempt}-{self.author.run}"

    # --- ownership

    def claim(self) -> None:
        """Make this attempt the owner, and remove what older attempts have left.

        Raises
        ------
        SupersededError
            A newer attempt has claimed the prefix.
        StoreError
            The store cannot be used.

        """
        retried(partial(self._put, self._claim, b"claimed"))
        for name in retried(self._claims):
            match = _CLAIM.fullmatch(name)
            if match is None or name == self._claim.key.rpartition("/")[2]:
                continue
            if match[1] == self.author.run and int(match[2]) > self.author.attempt:
                retried(partial(self._delete, self._claim))
                raise SupersededError(
                    f"{self.uri}: attempt {self.author.attempt} was replaced by attempt {match[2]}"
                )
            retried(partial(self._delete, self.uri / name))
        retried(self._abort_uploads)
        files = retried(self._files)
        for step in sorted(_begun(files) - set(_published(files))):
            retried(partial(self._delete, self.uri_of(step)))

    def check_claim(self) -> None:
        """Raise SupersededError if another attempt has claimed the prefix since this one did."""
        try:
            retried(partial(self._read, self._claim))
        except StoreError as error:
            if error.kind != "missing":
                raise
            raise SupersededError(
                f"{self.uri}: attempt {self.author.attempt} has been replaced and must not write "
                "here"
            ) from error

    @property
    def _claim(self) -> Uri:
        return self.uri / f".trainer-{self.author.run}-{self.author.attempt}.claim"

    def _claims(self) -> list[str]:
        fs = filesystem(self.uri)
        with store_errors(self.uri):
            paths = fs.ls(self.uri.path, detail=False)
        return [path.rpartition("/")[2] for path in paths]

    def _abort_uploads(self) -> None:
        """Abort multipart uploads of killed writers, which take space without being listed.

        Google's and Azure's stores forget theirs after a week.
        """
        if self.uri.scheme != "s3":
            return
        fs = filesystem(self.uri)
        try:
            uploads = list(self._uploads(fs))
        except StoreError as error:
            if error.kind == "missing":  # how some servers answer if there are none
                return
            raise
        for upload in uploads:
            self._abort(fs, upload)

    def _uploads(self, fs: Any) -> Iterator[Mapping[str, Any]]:
        """Yield the unfinished uploads of checkpoints. S3 lists 1,000 at a time."""
        query = {"Bucket": self.uri.bucket, "Prefix": f"{self.uri.key}/iter_".lstrip("/")}
        position: dict[str, str] = {}
        while True:
            with store_errors(self.uri):
                listed = fs.call_s3("list_multipart_uploads", **query, **position)
            yield from listed.get("Uploads", [])
            following = {
                "KeyMarker": listed.get("NextKeyMarker"),
                "UploadIdMarker": listed.get("NextUploadIdMarker"),
            }
            if not listed.get("IsTruncated") or following == position:
                return
            position = {name: marker for name, marker in following.items() if marker}

    def _abort(self, fs: Any, upload: Mapping[str, Any]) -> None:
        names = {"Key": upload["Key"], "UploadId": upload["UploadId"]}
        with _logged(f"{self.uri}: an unfinished upload was not aborted"), store_errors(self.uri):
            fs.call_s3("abort_multipart_upload", Bucket=self.uri.bucket, **names)

    # --- writing

    @contextmanager
    def writing(self, step: int, name: str) -> Iterator[ShardStream]:
        """Open a file of checkpoint `step` that is sent while it is written.

        If the body fails, the upload is aborted.
        """
        uri = self._attempt_of(step) / name
        fs = filesystem(uri)
        with store_errors(uri):
            file = fs.open(uri.path, "wb", block_size=PART_BYTES)
        stream = ShardStream(uri, file)
        try:
            yield stream
            with store_errors(uri):
                file.close()
        except BaseException as error:
            # Closing it would complete the half file.
            file.closed = True
            with _logged(f"{uri}: an unfinished upload was not aborted"), store_errors(uri):
                file.discard()
            if stream.error is not None:  # torch replaces it
                raise stream.error from error
            raise

    def upload(self, step: int, name: str, path: Path) -> Record:
        """Send a local file as a file of checkpoint `step`."""
        record = record_of(path)
        self._send(path, self._attempt_of(step) / name)
        return record

    def publish(self, step: int, records: Mapping[str, Record]) -> None:
        """Make checkpoint `step` valid, whose files are all in the store.

        Raises
        ------
        SupersededError
            Another attempt owns the prefix, or has published the step.

        """
        self.check_claim()
        directory = self._attempt_of(step).key.rpartition("/")[2]
        content = {"checksum": CHECKSUM, "directory": directory, "files": dict(records)}
        manifest = self.uri_of(step) / MANIFEST
        try:
            retried(partial(self._put, manifest, json.dumps(content, indent=1).encode(), new=True))
        except StoreError as error:
            # The answer to an attempt that succeeded may have been lost.
            if error.kind != "exists" or self._manifest(step)["directory"] != directory:
                raise

    def put_model(self, directory: Path, name: str) -> None:
        """Send a model's directory, if it exists, as `name`. Its config is sent last."""
        files = [path for path in directory.rglob("*") if path.is_file()]
        for path in sorted(files, key=lambda path: (path.name.endswith("config.json"), path)):
            uri = self.uri / name / path.relative_to(directory).as_posix()
            retried(partial(self._send, path, uri))

    # --- reading

    def steps(self) -> list[int]:
        """Return the steps with a manifest, oldest first."""
        return _published(retried(self._files))

    def latest(self) -> int | None:
        """Return the step of the newest complete checkpoint, or None. Log those passed over."""
        files = retried(self._files)
        published = _published(files)
        for step in sorted(_begun(files), reverse=True):
            problem = self._problem(step, files) if step in published else "it has no manifest"
            if not problem:
                return step
            logs.get().warning(f"checkpoint {self.uri_of(step)} is not complete: {problem}")
        return None

    def fetch(self, step: int, directory: Path) -> Path:
        """Fetch the small files of a checkpoint, and empty files for its shards.

        The result is read as other checkpoints are: `CheckpointReader` gets the shards' content
        from the store, each rank what it needs.

        Raises
        ------
        DamagedError
            A file differs from the manifest.

        """
        final = path_of(directory, step)
        content = self._manifest(step)
        source = self.uri_of(step) / content["directory"]
        small: dict[str, Record] = {}
        for name, record in content["files"].items():
            target = final / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if name.endswith(SHARD_SUFFIX):
                target.touch()
                place = source.key + f"/{name}".rpartition("/")[0]
                uri = str(Uri(source.scheme, source.bucket, place))
                (target.parent / SOURCE).write_text(json.dumps({"uri": uri}))
                continue
            target.write_bytes(retried(partial(self._read, source / name)))
            if record_of(target) != record:
                raise DamagedError(f"{source / name} does not have the content that was written")
            small[name] = record
        manifest = {"checksum": CHECKSUM, "files": small}
        (final / MANIFEST).write_text(json.dumps(manifest))
        return final

    def and_step(self) -> tuple[CheckpointStore, int | None]:
        """Return the prefix, and the step if the URI is that of one checkpoint."""
        key, _, name = self.uri.key.rpartition("/")
        match = _NAME.fullmatch(name)
        return (
            (replace(self, uri=replace(self.uri, key=key)), int(match[1]))
            if match
            else (self, None)
        )

    def size(self, step: int) -> int:
        """Return the bytes of a checkpoint."""
        return sum(size for size, _ in self._manifest(step)["files"].values())

    # --- removal

    def prune(self, keep: int) -> list[int]:
        """Return the steps of all but the newest `keep` checkpoints, after deleting manifests.

        From then on they are no checkpoints; `delete` removes their files.
        """
        self.check_claim()
        doomed = self.steps()[:-keep]
        for step in doomed:
            retried(partial(self._delete, self.uri_of(step) / MANIFEST))
        return doomed

    def delete(self, step: int) -> None:
        """Delete the files of a checkpoint that has no manifest any more."""
        retried(partial(self._delete, self.uri_of(step)))

    # --- objects

    def _files(self) -> dict[str, int]:
        """Return the sizes of all objects of checkpoints, by name below the prefix."""
        start = self.uri.path.rstrip("/") + "/"
        with store_errors(self.uri):
            found = objects_below(self.uri)
        names = {path.removeprefix(start): int(info["size"]) for path, info in found.items()}
        return {name: size for name, size in names.items() if _step(name) is not None}

    def _problem(self, step: int, files: Mapping[str, int]) -> str:
        """Say what is wrong with a checkpoint that has a manifest; empty if it is complete."""
        try:
            content = self._manifest(step)
        except DamagedError as error:
            return str(error)
        start = f"iter_{step:07d}/{content['directory']}/"
        for name, (size, _) in content["files"].items():
            actual = files.get(start + name)
            if actual is None:
                return f"{name} is missing"
            if actual != size:
                return f"{name} has {actual} bytes, expected {size}"
        return ""

    def _manifest(self, step: int) -> dict[str, Any]:
        uri = self.uri_of(step) / MANIFEST
        text = retried(partial(self._read, uri))
        try:
            content = json.loads(text)
            files = {
                _safe(name): (int(size), str(digest))
                for name, (size, digest) in content["files"].items()
            }
            return {"directory": _safe(content["directory"]), "files": files}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedError(f"{uri} cannot be read: {error!r}") from error

    def _read(self, uri: Uri) -> bytes:
        fs = filesystem(uri)
        with store_errors(uri):
            content: bytes = fs.cat_file(uri.path)
        return content

    def _send(self, path: Path, uri: Uri) -> None:
        fs = filesystem(uri)
        # Azure's client names its options differently.
        options = {"overwrite": True} if uri.scheme == "az" else {"chunksize": PART_BYTES}
        with store_errors(uri):
            fs.put_file(str(path), uri.path, **options)

    def _put(self, uri: Uri, content: bytes, *, new: bool = False) -> None:
        """Write an object. new: fail if it exists, if the store has conditional writes."""
        fs = filesystem(uri)
        mode = "create" if new else "overwrite"
        options = {"overwrite": not new} if uri.scheme == "az" else {"mode": mode}
        with store_errors(uri):
            fs.pipe_file(uri.path, content, **options)

    def _delete(self, uri: Uri) -> None:
        """Delete an object, or all that begin with `uri/`. It may be gone already."""
        fs = filesystem(uri)
        try:
            with store_errors(uri):
                fs.rm(uri.path, recursive=True)
        except StoreError as error:
            if error.kind != "missing":
                raise


class ShardUpload:
    """Sends the files that one rank writes of a checkpoint.

    Attributes
    ----------
    records
        Record of each file that is in the store, by its name in the checkpoint.

    """

    def __init__(self, store: CheckpointStore, step: int, directory: Path) -> None:
        """directory: the local directory that the names of the files are relative to."""
        self._store, self._step, self._directory = store, step, directory
        self.records: dict[str, Record] = {}

    @contextmanager
    def writing(self, path: Path) -> Iterator[ShardStream]:
        """Open a file, given by the path that it would have in the directory."""
        name = self._name(path)
        with self._store.writing(self._step, name) as stream:
            yield stream
        self.records[name] = stream.record

    def upload(self, path: Path) -> None:
        """Send a file of the directory."""
        name = self._name(path)
        self.records[name] = retried(partial(self._store.upload, self._step, name, path))

    def _name(self, path: Path) -> str:
        return path.relative_to(self._directory).as_posix()


def retried(operation: Callable[[], T]) -> T:
    """Repeat an operation while the store is busy, slow or cut off, for `RETRY_SECONDS`."""
    pauses = retrying.until(time.monotonic() + RETRY_SECONDS, _FIRST_PAUSE, _LONGEST_PAUSE)

    def report(error: StoreError, pause: float) -> None:
        logs.get().warning(f"{error}; trying again in {pause:.0f} s")

    try:
        return retrying.retried(operation, pauses, report=report)
    except StoreError as error:
        if not error.transient:
            raise
        raise StoreError(f"{error}; given up after {RETRY_SECONDS:.0f} s", error.kind) from error


def shard_source(directory: Path) -> Uri | None:
    """Return where the shards of a fetched checkpoint are; None if they are in the directory."""
    try:
        content = json.loads((directory / SOURCE).read_text())
    except FileNotFoundError:
        return None
    return parse_uri(content["uri"])


def read_range(uri: Uri, offset: int, length: int) -> bytes:
    """Read a part of an object."""

    def read() -> bytes:
        fs = filesystem(uri)
        with store_errors(uri):
            content: bytes = fs.cat_file(uri.path, start=offset, end=offset + length)
        if len(content) != length:
            raise StoreError(f"{uri}: {len(content)} bytes were read, expected {length}", "cut")
        return content

    return retried(read)


@contextmanager
def _logged(message: str) -> Iterator[None]:
    try:
        yield
    except StoreError as error:
        logs.get().warning(f"{message}: {error}")


def _step(name: str) -> int | None:
    """Return the step of the checkpoint that an object belongs to; None: to no checkpoint."""
    first, _, rest = name.partition("/")
    match = _NAME.fullmatch(first)
    return int(match[1]) if match and rest else None


def _begun(files: Mapping[str, int]) -> set[int]:
    """Return the steps of which there is any object."""
    return {step for name in files if (step := _step(name)) is not None}


def _published(files: Mapping[str, int]) -> list[int]:
    """Return the steps with a manifest, oldest first."""
    return sorted(_begun({name: 0 for name in files if name.partition("/")[2] == MANIFEST}))


def _safe(name: str) -> str:
    """Return a name of a manifest, which must not lead out of its directory."""
    if not isinstance(name, str) or any(part in ("", ".", "..") for part in name.split("/")):
        raise ValueError(f"not a file name: {name!r}")
    return name
