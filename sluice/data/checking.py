"""Checks of a job's prompts before anything is started: the sources' names, and the rows of their
files. The buffer refuses the same at its start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path

from sluice.api import RLJobSpec
from sluice.api.groups.data import PromptSource, parse_path
from sluice.data import chat
from sluice.data.answers import AnsweredRow, parse_answer
from sluice.data.files import Row, files_of, read_file
from sluice.data.rows import PromptRow, RowError, RowReader, parse_row, problem
from sluice.data.vocabulary import embedding_size
from sluice.runtime.pod_env import ConfigurationError


def reader_of(spec: RLJobSpec) -> RowReader:
    """How the job's training rows are read; with `sft` they have their answers in them.

    Rows of token ids are held against the model's embedding if the model is on this machine.
    """
    if not spec.algorithm.sft:
        return parse_row
    return partial(parse_answer, vocabulary=embedding_size(Path(spec.model.path)))


def without_template(read: RowReader) -> RowReader:
    """The same way to read rows, for a model that has no chat template: rows that need one are
    refused.
    """

    def checked(row: Row, source: PromptSource) -> PromptRow:
        parsed = read(row, source)
        encoded = isinstance(parsed, AnsweredRow) and parsed.tokens
        if not encoded and (source.apply_chat_template or not isinstance(parsed.prompt, str)):
            raise RowError(chat.NO_TEMPLATE)
        return parsed

    return checked


def check_sources(sources: Sequence[PromptSource], datasets: Sequence[PromptSource]) -> None:
    """Raise ConfigurationError where the names of training and evaluation sources clash."""
    _check_names(sources, "spec.data.prompts")
    _check_names(datasets, "spec.evaluation.datasets")
    _check_templates(sources, datasets)


def _check_names(sources: Sequence[PromptSource], where: str) -> None:
    name, times = (
        Counter(source.source_name for source in sources).most_common(1)[0] if sources else ("", 1)
    )
    if times > 1:
        raise ConfigurationError(
            f"{where}: {times} sources are called {name!r}; give each a `name` of its own"
        )


def _check_templates(sources: Sequence[PromptSource], datasets: Sequence[PromptSource]) -> None:
    """A worker knows a prompt's source by its name,
    so one name can mean one way of rendering only.
    """
    rendered = {source.source_name: source for source in sources}
    for one in datasets:
        other = rendered.get(one.source_name, one)
        for key, field in (
            ("apply_chat_template", "applyChatTemplate"),
            ("chat_template_args", "chatTemplateArgs"),
        ):
            if getattr(other, key) != getattr(one, key):
                raise ConfigurationError(
                    f"{one.source_name!r} is a source of prompts and of evaluation with different "
                    f"{field}; give one of them another `name`"
                )


def check_rows(source: PromptSource, text: str, read: RowReader, limit: int | None = None) -> None:
    """Raise ConfigurationError `file:line: what` for the first row that cannot be used; also where
    there is no row at all.

    text: the source's `path@[a:b]`. limit: rows of each file that are looked at; None: all.
    """
    path, part = parse_path(text)
    total = 0
    for file in files_of(path):
        for located in islice(read_file(file), limit):
            if wrong := problem(located.row, source, read):
                raise ConfigurationError(f"{located.where}: {wrong}")
            total += 1
    if limit is None or total < limit:
        slice_of(text, total, part)


def slice_of(text: str, total: int, part: slice) -> range:
    """The rows of a source that count, of all that its files have.

    Raises ConfigurationError where that is none.
    """
    rows = range(total)[part]
    if not rows:
        raise ConfigurationError(
            f"{text}: no rows" + (f" in this slice of {total}" if total else "")
        )
    return rows
