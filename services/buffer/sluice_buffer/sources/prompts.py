"""The job's prompts: their rows, their order, and the message of each for a worker."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sluice.api import RLJob
from sluice.api.groups.data import MADE_ROWS, Data, Evaluation, PromptSource
from sluice.data.checking import check_sources, reader_of
from sluice.data.rows import PromptRow, RowReader, parse_row, problem
from sluice.wire.v1 import common_pb2 as pb
from sluice_buffer.group import TRAINING, GroupKey
from sluice_buffer.rules.order import Order
from sluice_buffer.sources.readers import Table, open_table
from sluice_buffer.transitions.rounds import NO_EVALUATION, EvalPlan, EvalSet


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
        check_sources(self.sources, self.datasets)
        self._read = read
        self._tables = [_open(source, spool, read) for source in self.sources]
        self._eval_tables = [_open(source, spool) for source in self.datasets]
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

    def message(self, key: GroupKey) -> pb.Prompt:
        """Return the prompt of a group, without its lease."""
        if key.round == TRAINING:
            return self.training(key.group_id)[0]
        position, at = self.plan.locate(key.group_id)
        source, table = self.datasets[position], self._eval_tables[position]
        message = _message(source, parse_row(table.row(at), source), table.number(at))
        message.purpose, message.version = pb.PURPOSE_EVALUATE, key.round
        message.group_id = key.group_id
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

    def training(self, group_id: int) -> tuple[pb.Prompt, PromptRow, PromptSource]:
        """Return a training prompt as its message, its row and its source."""
        place = self.order.place(group_id)
        source, table = self.sources[place.source], self._tables[place.source]
        row = self._read(table.row(place.row), source)
        message = _message(source, row, table.number(place.row))
        message.purpose, message.epoch, message.group_id = pb.PURPOSE_TRAIN, place.epoch, group_id
        return message, row, source

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

    def close(self) -> None:
        for table in (*self._tables, *self._eval_tables):
            table.close()


def prompts_of(job: RLJob, directory: Path) -> Prompts:
    """Open the prompts of a job, whose answers are given with `sft`.

    `directory` is the directory of the database.
    """
    return Prompts(job.spec.data, job.spec.evaluation, directory, reader_of(job.spec))


def _open(source: PromptSource, spool: Path, read: RowReader = parse_row) -> Table:
    return open_table(source.file(spool / MADE_ROWS), lambda row: problem(row, source, read), spool)


def _plan(evaluation: Evaluation | None, rows: list[int]) -> EvalPlan:
    if evaluation is None:
        return NO_EVALUATION
    sets = [
        EvalSet(data.source_name, count, data.samples_per_prompt or evaluation.samples_per_prompt)
        for data, count in zip(evaluation.datasets, rows, strict=True)
    ]
    return EvalPlan(sets, evaluation.every_steps, evaluation.before_train, evaluation.pass_at_k)


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
