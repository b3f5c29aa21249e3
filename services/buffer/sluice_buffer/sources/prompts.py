"""The job's prompts: their rows, their order, and the message of each for a worker."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from sluice.api import RLJob
from sluice.api.groups.data import MADE_ROWS, Data, Evaluation, ImageLimits, PromptSource
from sluice.data.checking import check_sources, reader_of
from sluice.data.rows import PromptRow, RowError, RowReader, parse_row, problem, prompt_reader
from sluice.images.image import Image, with_digests
from sluice.images.reading import (
    BYTES_PER_PIXEL,
    ImageError,
    ImageUnavailableError,
    RawImage,
    read_header,
    read_image,
)
from sluice.runtime.pod_env import ConfigurationError
from sluice.wire.v1 import common_pb2 as pb
from sluice_buffer.group import TRAINING, GroupKey
from sluice_buffer.rules.order import Order
from sluice_buffer.sources.readers import Table, open_table
from sluice_buffer.transitions.rounds import NO_EVALUATION, EvalPlan, EvalSet

T = TypeVar("T")


# First rows of a source whose images are read at the start. The job is refused at once if all of
# them fail.
TRIED_ROWS = 8


class RowUnavailableError(RowError):
    """A row cannot be read now, because of the storage of its images."""


@dataclass(frozen=True, slots=True)
class PromptWithImages:
    """A prompt and the images of it that were read, by digest."""

    message: pb.Prompt
    images: dict[bytes, Image]

    @property
    def hash(self) -> bytes:
        """A hash of the prompt without its lease, the same in every process."""
        return stable_hash(self.message)


@dataclass(frozen=True, slots=True)
class _LocatedRow:
    """A row of a source that was opened."""

    source: PromptSource
    table: Table
    at: int
    read: RowReader
    epoch: int = 0

    def parsed(self) -> PromptRow:
        return self.read(self.table.row(self.at), self.source)

    def each_image(self, row: PromptRow, use: Callable[[RawImage, Path], T]) -> list[T]:
        """Apply a function to each image of the row and the directory of its file.

        Raises RowError with the place of the row in the file.
        """
        directory = self.table.directory(self.at)
        try:
            return [use(raw, directory) for raw in row.images]
        except ImageError as error:
            unavailable = isinstance(error, ImageUnavailableError)
            raise (RowUnavailableError if unavailable else RowError)(
                f"{self.table.where(self.at)}: {error}"
            ) from error


class Prompts:
    """All sources of a job, opened and checked."""

    def __init__(
        self, data: Data, evaluation: Evaluation | None, spool: Path, read: RowReader = parse_row
    ) -> None:
        """Open all sources.

        `read` reads rows for training; rows of an evaluation are prompts in any job.
        """
        self.sources: Sequence[PromptSource] = data.prompts
        self.datasets: Sequence[PromptSource] = evaluation.datasets if evaluation else []
        self.held_out: Sequence[PromptSource] = evaluation.held_out if evaluation else []
        check_sources(self.sources, self.datasets, self.held_out)
        self._images = data.images
        self._read, self._read_prompt = read, prompt_reader(data.images)
        self._tables = [_open(source, spool, read) for source in self.sources]
        self._eval_tables = [_open(source, spool, self._read_prompt) for source in self.datasets]
        self._held_out_tables = [_open(source, spool, read) for source in self.held_out]
        if data.images:
            self._try_images()
        sizes = [len(table) for table in self._tables]
        self.order = Order(
            sizes, [source.weight for source in self.sources], data.shuffle, data.seed
        )
        self.plan = _plan(evaluation, [len(table) for table in self._eval_tables])
        # Hashes of the prompts in work, so that a prompt need not be read again to be compared.
        self._leased: dict[GroupKey, int] = {}

    def fingerprint(self) -> dict[str, Any]:
        """Return the facts that fix the meaning of a group id.

        A database that was made with other facts cannot be used.
        """
        parts = zip(self.sources, self._tables, strict=True)
        return {
            "prompt files (spec.data.prompts)": [
                [s.source_name, len(t), t.fingerprint] for s, t in parts
            ],
            "order of prompts (spec.data: seed, shuffle, weights, slices)": [
                self.order.seed,
                self.order.shuffle,
                *[[s.weight, (s.path or "").partition("@")[2]] for s in self.sources],
            ],
            "evaluation data (spec.evaluation.datasets)": [
                [s.name, s.rows, s.samples_per_prompt, t.fingerprint]
                for s, t in zip(self.plan.sets, self._eval_tables, strict=True)
            ],
        }

    @property
    def have_images(self) -> bool:
        """True if rows may have images, so that `read` must be used in place of `leased`."""
        return self._images is not None

    def message(self, key: GroupKey) -> pb.Prompt:
        """Return the prompt of a group, without its lease."""
        located = self._locate(key)
        return self._message(key, located, located.parsed())

    def size(self, key: GroupKey) -> int:
        """Return the bytes of a group's row as JSON, with images that it contains."""
        located = self._locate(key)
        return located.table.size(located.at)

    def memory_of_images(self, key: GroupKey) -> int:
        """Return the bytes that are in memory while the images of a group's row are read.

        Only headers are read for it. Runs on any thread. Raises RowError if the row or an image of
        it cannot be used; the message begins with its place in the file.
        """
        located, limits = self._locate(key), self._limits
        headers = located.each_image(located.parsed(), lambda raw, at: read_header(raw, at, limits))
        most = max((header.pixels for header in headers), default=0)
        written = sum(3 * min(header.pixels, limits.max_pixels) for header in headers)
        files = sum(header.size for header in headers)
        return 2 * files + written + BYTES_PER_PIXEL * most

    def read(self, key: GroupKey, digests: Sequence[str] | None = None) -> PromptWithImages:
        """Return a group's prompt with its images, without its lease.

        Runs on any thread. Raises RowError as `memory_of_images` does.

        Parameters
        ----------
        key
            The group.
        digests
            Digests of the images if they are stored already: they are not read again.

        """
        located = self._locate(key)
        return self._with_images(key, located, located.parsed(), digests)

    def _with_images(
        self,
        key: GroupKey,
        located: _LocatedRow,
        row: PromptRow,
        digests: Sequence[str] | None = None,
    ) -> PromptWithImages:
        limits, images = self._limits, list[Image]()
        if digests is None:
            images = located.each_image(row, lambda raw, at: read_image(raw, at, limits))
            digests = [image.digest for image in images]
        message = self._message(
            key, located, replace(row, prompt=with_digests(row.prompt, digests))
        )
        message.images.extend(digests)
        by_digest = zip(map(bytes.fromhex, digests), images, strict=False)
        return PromptWithImages(message, dict(by_digest))

    @property
    def _limits(self) -> ImageLimits:
        assert self._images is not None
        return self._images

    def _try_images(self) -> None:
        """Raise ConfigurationError if not one of a source's first rows has images that can be read.

        The message says what is wrong with the first of them.
        """
        training = zip(self.sources, self._tables, repeat(self._read))
        held_out = zip(self.datasets, self._eval_tables, repeat(self._read_prompt))
        named = chain(training, held_out)
        for source, table, read in named:
            problems = []
            for at in range(min(len(table), TRIED_ROWS)):
                try:
                    located = _LocatedRow(source, table, at, read)
                    row = located.parsed()
                    located.each_image(row, lambda raw, where: read_image(raw, where, self._limits))
                    break
                except RowError as error:
                    problems.append(str(error))
            else:
                raise ConfigurationError(problems[0])

    def _locate(self, key: GroupKey) -> _LocatedRow:
        if key.round == TRAINING:
            place = self.order.place(key.group_id)
            table = self._tables[place.source]
            return _LocatedRow(
                self.sources[place.source], table, place.row, self._read, place.epoch
            )
        position, at = self.plan.locate(key.group_id)
        table = self._eval_tables[position]
        return _LocatedRow(self.datasets[position], table, at, self._read_prompt)

    def _message(self, key: GroupKey, located: _LocatedRow, row: PromptRow) -> pb.Prompt:
        message = _message(located.source, row, located.table.number(located.at))
        message.group_id = key.group_id
        if key.round == TRAINING:
            message.purpose, message.epoch = pb.PURPOSE_TRAIN, located.epoch
        else:
            message.purpose, message.version = pb.PURPOSE_EVALUATE, key.round
        return message

    def leased(self, key: GroupKey) -> pb.Prompt:
        """Return the prompt of a group that is being leased, without its lease."""
        message = self.message(key)
        self._leased[key] = _hash(message)
        return message

    def is_leased(self, key: GroupKey, echo: pb.Prompt) -> bool:
        """True if a worker sends a group back with the prompt that it was leased with.

        Can be asked once for each lease: the prompt is forgotten then.
        """
        leased = self._leased.pop(key, None)
        # After a restart of the buffer it is read again.
        return _hash(echo) == (_hash(self.message(key)) if leased is None else leased)

    def training(self, group_id: int) -> tuple[PromptWithImages, PromptRow, PromptSource]:
        """Return a training prompt with its images, its row and its source.

        Raises RowError if an image cannot be used.
        """
        key = GroupKey(TRAINING, group_id)
        located = self._locate(key)
        row = located.parsed()
        if row.images:
            return self._with_images(key, located, row), row, located.source
        return PromptWithImages(self._message(key, located, row), {}), row, located.source

    def place(self, key: GroupKey) -> tuple[str, int]:
        """Return (source, row) of a group's prompt."""
        if key.round != TRAINING:
            position, at = self.plan.locate(key.group_id)
            return self.datasets[position].source_name, self._eval_tables[position].number(at)
        place = self.order.place(key.group_id)
        return self.sources[place.source].source_name, self._tables[place.source].number(place.row)

    def first(self, source: int, count: int) -> Iterator[tuple[int, PromptRow]]:
        """Return number and row of a source's first rows."""
        table = self._tables[source]
        for at in range(min(count, len(table))):
            yield table.number(at), self._read(table.row(at), self.sources[source])

    def held_out_row(self, dataset: int, at: int) -> tuple[pb.Prompt, PromptRow, PromptSource]:
        """Return a row of `evaluation.heldOut` as `training` does; its group id is `at`."""
        table, source = self._held_out_tables[dataset], self.held_out[dataset]
        row = self._read(table.row(at), source)
        message = _message(source, row, table.number(at))
        message.group_id, message.purpose = at, pb.PURPOSE_EVALUATE
        return message, row, source

    def held_out_size(self, dataset: int) -> int:
        """Return the number of rows of a data set of `evaluation.heldOut`."""
        return len(self._held_out_tables[dataset])

    def close(self) -> None:
        for table in (*self._tables, *self._eval_tables, *self._held_out_tables):
            table.close()


def prompts_of(job: RLJob, directory: Path) -> Prompts:
    """Open the prompts of a job, whose answers are given with `sft`.

    `directory` is the directory of the database.
    """
    return Prompts(job.spec.data, job.spec.evaluation, directory, reader_of(job.spec))


def _open(source: PromptSource, spool: Path, read: RowReader) -> Table:
    return open_table(source.file(spool / MADE_ROWS), lambda row: problem(row, source, read), spool)


def _plan(evaluation: Evaluation | None, rows: list[int]) -> EvalPlan:
    if evaluation is None or not evaluation.datasets:
        return NO_EVALUATION
    sets = [
        EvalSet(data.source_name, count, data.samples_per_prompt or evaluation.samples_per_prompt)
        for data, count in zip(evaluation.datasets, rows, strict=True)
    ]
    return EvalPlan(sets, evaluation.every_steps, evaluation.before_train, evaluation.pass_at_k)


def stable_hash(prompt: pb.Prompt) -> bytes:
    """Hash all fields of a prompt except those of the lease, the same in every process."""
    copy = pb.Prompt()
    copy.CopyFrom(prompt)
    copy.ClearField("lease_id")
    copy.ClearField("lease_attempt")
    return xxhash.xxh3_128(copy.SerializeToString(deterministic=True)).digest()


def _hash(prompt: pb.Prompt) -> int:
    """Hash all fields except those of the lease.

    Python's hashes of texts are keyed by the process.
    """
    texts = prompt.prompt_json, prompt.label_json, prompt.metadata_json, prompt.tools_json
    place = prompt.dataset, prompt.row, prompt.epoch, prompt.group_id
    return hash((texts, place, prompt.purpose, prompt.version))


def _message(source: PromptSource, row: PromptRow, number: int) -> pb.Prompt:
    return pb.Prompt(
        dataset=source.source_name,
        row=number,
        prompt_json=_json(row.prompt),
        label_json="" if row.label is None else _json(row.label),
        metadata_json=_json(row.metadata) if row.metadata else "",
        tools_json=_json(row.tools) if row.tools else "",
    )


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
