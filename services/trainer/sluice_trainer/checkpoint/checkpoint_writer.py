"""Checkpoints that survive a kill at any moment, written in the foreground or in a thread.

`checkpoint_directory` states the promise. A `CheckpointWriter` keeps it in three stages:

1. All ranks collect together what is to be written. In the background mode they also copy it, so
   that training may change the original. `reserve` gets the memory of the copies in advance.
2. Each rank writes its files, in a thread in the background mode.
3. All ranks complete and commit the checkpoint together. Until then it is not visible.

With a `CheckpointStore` each rank sends its shards to the store while it writes them. Other files
are small. They are written to a temporary directory of the rank first.

A critic's checkpoint is a second one in the subdirectory `critic/`; a commit covers both.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Protocol

from torch.distributed.checkpoint.api import CheckpointException  # a BaseException

from sluice.stores import StoreError, Uri
from sluice_trainer.checkpoint.checkpoint_directory import (
    Author,
    DamagedError,
    Record,
    SupersededError,
    check_claim,
    commit,
    manifest_files,
    path_of,
    record_of,
    temporary_of,
    verify,
)
from sluice_trainer.checkpoint.checkpoint_store import CheckpointStore, ShardUpload
from sluice_trainer.distributed.ranks import Ranks


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; users see the message."""


class CheckpointPart(Protocol):
    """A directory of a checkpoint, collected on this rank."""

    def reserve(self) -> None:
        """Begin to allocate the memory that `copy` needs, in a thread."""

    def copy(self) -> None:
        """Copy the content, so that training may change the original."""

    def write(self, upload: ShardUpload | None = None) -> None:
        """Write this rank's files. It makes no collective calls, so it may run in a thread.

        upload: sends shards to a store; None: they are written to the directory.
        """

    def files(self) -> list[Path]:
        """Return the files that this rank writes to the directory."""

    def complete(self) -> None:
        """Write metadata that is known once all ranks have written. Collective."""


# Collects the part that is written to an existing directory. Collective.
CollectPart = Callable[[Path], CheckpointPart]


def reserve(parts: Mapping[str, CollectPart]) -> None:
    """Begin to allocate the memory for copies of a checkpoint, without writing one. Collective.

    Page-locking host memory for a GPU takes longer than copying to it: 23 s for the 48 GB of a 4B
    model. Called early, it finishes while the engines start.
    """
    with tempfile.TemporaryDirectory() as directory:
        for number, collect in enumerate(parts.values()):
            part_directory = Path(directory) / str(number)
            part_directory.mkdir()
            collect(part_directory).reserve()


class CheckpointWriter:
    """Writes checkpoint `step`.

    All ranks create and complete it together, one at a time.
    """

    def __init__(
        self,
        directory: Path,
        step: int,
        parts: Mapping[str, CollectPart],
        *,
        ranks: Ranks,
        author: Author,
        store: CheckpointStore | None = None,
        in_background: bool = False,
        messages: AbstractContextManager[list[str]] | None = None,
    ) -> None:
        """Collect the parts and begin to write them. Collective.

        Parameters
        ----------
        directory
            Directory of checkpoints, shared by all nodes and claimed by `author`. With a `store` it
            holds temporary files, and need not be shared.
        step
            Number of the checkpoint. A step that is saved already is left as it is.
        parts
            Collectors by subdirectory of the checkpoint; `.` is the checkpoint itself and comes
            first.
        ranks
            All ranks of the trainer.
        author
            The attempt that writes.
        store
            Store that gets the checkpoint, claimed by `author`; None: the directory gets it.
        in_background
            Copy all content now and write it in a thread; otherwise write it before returning.
        messages
            Context that is held until all is written. It yields errors that a library only logs.

        """
        self.step = step
        self._ranks, self._author = ranks, author
        self._final = path_of(directory, step)
        self._temporary = temporary_of(self._final, author)
        self._store, self._upload = store, None
        if store is not None:
            self._temporary = self._temporary.with_suffix(f".rank{ranks.rank}.tmp")
            self._upload = ShardUpload(store, step, self._temporary)
        # A private directory belongs to its rank, a shared one to rank 0.
        self._owns_temporary = store is not None or ranks.rank == 0
        self._problem = ""
        self._messages: list[str] = []
        self._records: dict[str, Record] = {}
        self._parts: list[CheckpointPart] = []
        self._thread: threading.Thread | None = None
        self._cleanup = ExitStack()
        with self._failing():
            self.needed = not self._is_saved()
        if not self.needed:
            return
        self._messages = self._cleanup.enter_context(messages or nullcontext([]))
        with self._failing():
            self._begin(parts, in_background)

    def _is_saved(self) -> bool:
        """Return whether rank 0 finds the checkpoint. Collective."""
        saved, problem = False, ""
        try:
            if self._ranks.rank == 0:
                saved = self.step in self._store.steps() if self._store else self._final.exists()
        except StoreError as error:
            problem = str(error)
        saved, problem = self._ranks.broadcast((saved, problem))
        if problem:
            raise CheckpointError(problem)
        return saved

    def _begin(self, parts: Mapping[str, CollectPart], in_background: bool) -> None:
        if self._owns_temporary:
            shutil.rmtree(self._temporary, ignore_errors=True)
            for name in parts:
                (self._temporary / name).mkdir(parents=True)
        self._ranks.gather(None)  # wait until rank 0 has created the directories
        for name, collect in parts.items():
            part = collect(self._temporary / name)
            if in_background:
                part.copy()
            self._parts.append(part)
        if in_background:
            name = f"checkpoint-{self.step}"
            self._thread = threading.Thread(target=self._write, name=name)
            self._thread.start()
        else:
            self._write()

    def _write(self) -> None:
        """Write the files, and record their content while it is in the page cache.

        A file that could not be written fails later, in `complete`.
        """
        if self._upload is not None:
            try:
                self._send(self._upload)
            except (StoreError, OSError) as error:
                self._problem = str(error)
            return
        for part in self._parts:
            part.write()
            paths = [path for path in part.files() if path.exists()]
            with ThreadPoolExecutor(max(len(paths), 1)) as pool:
                records = pool.map(record_of, paths)
            names = [path.relative_to(self._temporary).as_posix() for path in paths]
            self._records |= dict(zip(names, records, strict=True))

    def _send(self, upload: ShardUpload) -> None:
        for part in self._parts:
            part.write(upload)
            for path in part.files():
                if path.exists():
                    upload.upload(path)
                    path.unlink()

    def ready(self) -> bool:
        """Return True once all ranks have written their files. Collective."""
        writing = self._thread is not None and self._thread.is_alive()
        return not any(self._ranks.gather(writing))

    def complete(self) -> None:
        """Wait for the files and commit the checkpoint. Collective.

        Raises
        ------
        CheckpointError
            If it could not be written, for example because the disk is full. Older checkpoints stay
            intact.

        """
        if not self.needed:
            return
        if self._thread is not None:
            self._thread.join()
        with self._failing(), self._cleanup:
            self._raise_any(self._problem)
            for part in self._parts:
                part.complete()
            records: dict[str, Record] = {}
            own = self._upload.records if self._upload else self._records
            for of_rank in self._ranks.gather(own):
                records |= of_rank
            problem = ""
            if self._ranks.rank == 0 and self._store and self._upload:
                problem = self._publish(self._store, self._upload, records)
            elif self._ranks.rank == 0:
                commit(self._temporary, self._final, self._author, records)
            self._raise_any(problem)  # waits until the checkpoint is committed
            if self._store:
                shutil.rmtree(self._temporary, ignore_errors=True)

    def _publish(
        self, store: CheckpointStore, upload: ShardUpload, records: Mapping[str, Record]
    ) -> str:
        """Send what completing has written, then the manifest. Return what went wrong."""
        try:
            for path in sorted(self._temporary.rglob("*")):
                if path.is_file():
                    upload.upload(path)
            store.publish(self.step, {**records, **upload.records})
        except (StoreError, DamagedError, SupersededError, OSError) as error:
            return str(error)
        return ""

    def _raise_any(self, problem: str) -> None:
        """Raise the first problem of any rank on all ranks. Collective."""
        if problem := next(filter(None, self._ranks.gather(problem)), ""):
            raise CheckpointError(problem)

    @property
    def _name(self) -> Path | Uri:
        return self._store.uri_of(self.step) if self._store else self._final

    def _superseded(self) -> str:
        """Return a message if a newer attempt owns the directory: it explains any other error."""
        try:
            if self._store:
                self._store.check_claim()
            else:
                check_claim(self._final.parent, self._author)
        except (SupersededError, StoreError) as error:
            return str(error)
        return ""

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Turn any error into one CheckpointError and remove the temporary files."""
        try:
            yield
        except (Exception, CheckpointException) as error:
            self._cleanup.close()
            if self._owns_temporary:
                shutil.rmtree(self._temporary, ignore_errors=True)
            if isinstance(error, CheckpointError) and self._store:
                reason = str(error)
            else:
                messages = [repr(error), *self._messages]
                reason = self._superseded() or _reason(messages, self._final.parent)
            text = f"checkpoint {self._name} could not be written: {reason}"
            raise CheckpointError(text) from error


def _reason(messages: list[str], directory: Path) -> str:
    """Return a readable reason for an error that has passed through several layers."""
    free = shutil.disk_usage(directory).free / 2**20 if directory.is_dir() else 0
    full = ("No space left on device", "Errno 28")
    if any(sign in message for message in messages for sign in full):
        return f"no space left on the disk of {directory} ({free:.0f} MiB free)"
    return f"{messages[-1]} ({free:.0f} MiB free)"


def verified(directory: Path, step: int, parts: Mapping[str, object], ranks: Ranks) -> Path:
    """Verify the files of checkpoint `step` and return its directory. Collective.

    Every rank verifies its share of the files.

    Parameters
    ----------
    directory
        Directory of checkpoints.
    step
        Step of the checkpoint.
    parts
        Subdirectories that the checkpoint must have, as keys.
    ranks
        All ranks of the trainer.

    Raises
    ------
    CheckpointError
        On all ranks, if a file is missing or damaged.

    """
    final, problem = path_of(directory, step), ""
    try:
        verify(final, manifest_files(final)[ranks.rank :: ranks.world_size])
    except DamagedError as error:
        problem = str(error)
    if problem := next(filter(None, ranks.gather(problem)), ""):
        raise CheckpointError(f"checkpoint {final} could not be read: {problem}")
    for name in parts:
        if not (final / name).is_dir():
            raise CheckpointError(f"there is no checkpoint {final / name}")
    return final
