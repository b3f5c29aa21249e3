"""Checks of a job's prompts before the job starts: names of sources, and rows of their files.

The buffer applies the same checks when it starts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path

from sluice.api import RLJobSpec
from sluice.api.groups.data import ImageLimits, PromptSource, parse_path
from sluice.data import chat
from sluice.data.answers import parse_answer
from sluice.data.files import LocatedRow, Row, files_of, read_file
from sluice.data.preferences import named_answers, parse_judged, parse_pair
from sluice.data.rows import PromptRow, RowError, RowReader, prompt_reader
from sluice.data.vocabulary import embedding_size
from sluice.images.reading import ImageError, read_header
from sluice.runtime.pod_env import ConfigurationError


def reader_of(spec: RLJobSpec) -> RowReader:
    """Return the function that reads the job's training rows, which may contain answers.

    Token ids are checked against the model's embedding if the model is on this machine.
    """
    if not spec.algorithm.offline:
        return prompt_reader(spec.data.images)
    vocabulary = embedding_size(Path(spec.model.path))
    if spec.algorithm.paired:
        return partial(parse_pair, vocabulary=vocabulary)
    if spec.algorithm.prefers:
        return partial(parse_judged, vocabulary=vocabulary)
    return partial(parse_answer, vocabulary=vocabulary, images=spec.data.images)


def without_template(read: RowReader) -> RowReader:
    """Return a reader for a model without a chat template: it refuses rows that need one."""

    def checked(row: Row, source: PromptSource) -> PromptRow:
        parsed = read(row, source)
        encoded = any(answer.tokens for _, answer in named_answers(parsed))
        if not encoded and (source.apply_chat_template or not isinstance(parsed.prompt, str)):
            raise RowError(chat.NO_TEMPLATE)
        return parsed

    return checked


def check_sources(
    sources: Sequence[PromptSource],
    datasets: Sequence[PromptSource],
    held_out: Sequence[PromptSource] = (),
) -> None:
    """Raise ConfigurationError if names of training and evaluation sources clash."""
    _check_names(sources, "spec.data.prompts")
    _check_names(datasets, "spec.evaluation.datasets")
    _check_names([*datasets, *held_out], "spec.evaluation (datasets and heldOut)")
    _check_templates(sources, datasets)


def _check_names(sources: Sequence[PromptSource], where: str) -> None:
    name, times = (
        Counter(source.source_name for source in sources).most_common(1)[0] if sources else ("", 1)
    )
    if times > 1:
        raise ConfigurationError(
            f"{where}: {times} sources are called {name!r}; give each a different `name`"
        )


def _check_templates(sources: Sequence[PromptSource], datasets: Sequence[PromptSource]) -> None:
    """Check that sources of the same name are rendered the same way.

    A worker identifies a prompt's source by its name.
    """
    rendered = {source.source_name: source for source in sources}
    for dataset in datasets:
        source = rendered.get(dataset.source_name, dataset)
        for key, field in (
            ("apply_chat_template", "applyChatTemplate"),
            ("chat_template_args", "chatTemplateArgs"),
        ):
            if getattr(source, key) != getattr(dataset, key):
                raise ConfigurationError(
                    f"{dataset.source_name!r} is a source of prompts and of evaluation with "
                    f"different {field}; give one of them another `name`"
                )


def check_rows(
    source: PromptSource,
    text: str,
    read: RowReader,
    limit: int | None = None,
    images: ImageLimits | None = None,
) -> None:
    """Raise ConfigurationError `file:line: what` at the first unusable row, or without rows.

    Parameters
    ----------
    source
        The source.
    text
        Its `path@[a:b]`.
    read
        Reader of the rows.
    limit
        Rows of each file to check; None checks all.
    images
        `data.images`. The headers of the rows' images are checked, and nothing is decoded.

    """
    path, part = parse_path(text)
    total = 0
    for file in files_of(path):
        for located in islice(read_file(file), limit):
            if wrong := _problem(located, source, read, images):
                raise ConfigurationError(f"{located.where}: {wrong}")
            total += 1
    if limit is None or total < limit:
        slice_of(text, total, part)


def _problem(
    located: LocatedRow, source: PromptSource, read: RowReader, images: ImageLimits | None
) -> str | None:
    """Return what is wrong with a row or the header of an image of it, or None."""
    try:
        row = read(located.row, source)
        if images:
            for raw in row.images:
                read_header(raw, located.file.parent, images)
    except (RowError, ImageError) as error:
        return str(error)
    return None


def slice_of(text: str, total: int, part: slice) -> range:
    """Return the row numbers of a source's slice, out of all rows of its files.

    Raises ConfigurationError if the slice is empty.
    """
    rows = range(total)[part]
    if not rows:
        raise ConfigurationError(
            f"{text}: no rows" + (f" in this slice of {total}" if total else "")
        )
    return rows
