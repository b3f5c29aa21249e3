"""Checkpoints that survive a kill at any moment, written in training's way or beside it.

The promise is that of `checkpoint_directory`. A `Writing` keeps it in three parts: what is to be
written is collected (all ranks together; with `beside` it is also copied, so that training may
change the original), then each rank writes its files (with `beside` in a thread), then all ranks
together complete and commit it. Until then nobody sees it. The memory of the copies can be there
before the first one (`reserve`).

A critic's is a second one inside, in `critic/`: both are there or none is.
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

from sluice_trainer.checkpoint.checkpoint_directory import (
    Author,
    DamagedError,
    Record,
    SupersededError,
    check,
    commit,
    files,
    path_of,
    record,
    temporary_of,
    verify,
)
from sluice_trainer.distributed.ranks import Ranks


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read. The message is for people."""


class Part(Protocol):
    """One directory of a checkpoint, collected on this rank."""

    def reserve(self) -> None:
        """Begin to get the memory that `copy` takes, in a thread."""

    def copy(self) -> None:
        """Copy the content, so that training may change the original."""

    def write(self) -> None:
        """Write this rank's files. No collectives: it may run in a thread."""

    def files(self) -> list[Path]:
        """The files that this rank was to write."""

    def complete(self) -> None:
        """Write what is known once all ranks have written. Collective."""


Collect = Callable[[Path], Part]
"""The part that is to be written to a directory, which is there. Collective."""


def reserve(parts: Mapping[str, Collect]) -> None:
    """Collect the parts of a checkpoint that is not written, and begin to get the memory of their
    copies.

    To lock host memory for a GPU takes longer than to copy to it, 23 s for the 48 GB of a model of
    4B: it has time for that while the engines start. Collective.
    """
    with tempfile.TemporaryDirectory() as directory:
        for number, collect in enumerate(parts.values()):
            place = Path(directory) / str(number)
            place.mkdir()
            collect(place).reserve()


class Writing:
    """Checkpoint `step` on its way to the disk.

    Made and completed by all ranks together; one at a time.
    """

    def __init__(
        self,
        directory: Path,
        step: int,
        parts: Mapping[str, Collect],
        *,
        ranks: Ranks,
        author: Author,
        beside: bool = False,
        messages: AbstractContextManager[list[str]] | None = None,
    ) -> None:
        """Collect the parts, by their directories in the checkpoint.

        `.` is the checkpoint itself, and comes first. beside: copy all of it, and write it in a
        thread from now on; else write it here. `directory` must be shared by all nodes, and claimed
        by `author`. A step that is saved already is left as it is: version n is version n.
        messages: held until all is written, it yields what went wrong in a library that says it
        nowhere else.
        """
        self.step = step
        self._ranks, self._author = ranks, author
        self._final = path_of(directory, step)
        self._temporary = temporary_of(self._final, author)
        self._records: dict[str, Record] = {}
        self._parts: list[Part] = []
        self._thread: threading.Thread | None = None
        self._cleanup = ExitStack()
        self.needed = not ranks.broadcast(self._final.exists())
        if not self.needed:
            return
        self._messages = self._cleanup.enter_context(messages or nullcontext([]))
        with self._failing():
            self._begin(parts, beside)

    def _begin(self, parts: Mapping[str, Collect], beside: bool) -> None:
        if self._ranks.rank == 0:
            shutil.rmtree(self._temporary, ignore_errors=True)
            for name in parts:
                (self._temporary / name).mkdir()
        self._ranks.gather(None)
        for name, collect in parts.items():
            part = collect(self._temporary / name)
            if beside:
                part.copy()
            self._parts.append(part)
        if beside:
            name = f"checkpoint-{self.step}"
            self._thread = threading.Thread(target=self._write, name=name)
            self._thread.start()
        else:
            self._write()

    def _write(self) -> None:
        """Write the files, and note what they hold while they are in memory.

        One that could not be written fails later.
        """
        for part in self._parts:
            part.write()
            paths = [path for path in part.files() if path.exists()]
            with ThreadPoolExecutor(max(len(paths), 1)) as pool:
                records = pool.map(record, paths)
            names = [path.relative_to(self._temporary).as_posix() for path in paths]
            self._records |= dict(zip(names, records, strict=True))

    def ready(self) -> bool:
        """True once all ranks have written their files. Collective."""
        writing = self._thread is not None and self._thread.is_alive()
        return not any(self._ranks.gather(writing))

    def complete(self) -> None:
        """Wait for the files and make them a checkpoint. Collective.

        Raises CheckpointError where it could not be written, for instance because the disk is full;
        older checkpoints stay intact.
        """
        if not self.needed:
            return
        if self._thread is not None:
            self._thread.join()
        with self._failing(), self._cleanup:
            for part in self._parts:
                part.complete()
            records: dict[str, Record] = {}
            for of_rank in self._ranks.gather(self._records):
                records |= of_rank
            if self._ranks.rank == 0:
                commit(self._temporary, self._final, self._author, records)
            self._ranks.gather(None)

    def _superseded(self) -> str:
        """That a newer attempt has the directory, which explains whatever else went wrong."""
        try:
            check(self._final.parent, self._author)
        except SupersededError as error:
            return str(error)
        return ""

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Turn what goes wrong into one message, and leave nothing behind."""
        try:
            yield
        except (Exception, CheckpointException) as error:
            self._cleanup.close()
            if self._ranks.rank == 0:
                shutil.rmtree(self._temporary, ignore_errors=True)
            messages = [repr(error), *self._messages]
            reason = self._superseded() or _reason(messages, self._final.parent)
            text = f"checkpoint {self._final} could not be written: {reason}"
            raise CheckpointError(text) from error


def _reason(messages: list[str], directory: Path) -> str:
    """Words about an error that has passed through several layers."""
    free = shutil.disk_usage(directory).free / 2**20 if directory.is_dir() else 0
    full = ("No space left on device", "Errno 28")
    if any(sign in message for message in messages for sign in full):
        return f"no space left on the disk of {directory} ({free:.0f} MiB free)"
    return f"{messages[-1]} ({free:.0f} MiB free)"


def verified(directory: Path, step: int, parts: Mapping[str, object], ranks: Ranks) -> Path:
    """The directory of checkpoint `step`, whose files are as their manifest says.

    Collective: every rank takes its share of the files. Raises CheckpointError, on all ranks.
    """
    final, problem = path_of(directory, step), ""
    try:
        verify(final, files(final)[ranks.rank :: ranks.world_size])
    except DamagedError as error:
        problem = str(error)
    if problem := next(filter(None, ranks.gather(problem)), ""):
        raise CheckpointError(f"checkpoint {final} could not be read: {problem}")
    for name in parts:
        if not (final / name).is_dir():
            raise CheckpointError(f"there is no checkpoint {final / name}")
    return final
