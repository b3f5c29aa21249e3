"""Write rows that a job's own code makes to files: `python -m sluice.data.make`.

It runs in a separate container of the buffer's pod (the worker's image, without the job's token),
because the buffer does not run user code. Existing files are kept, whatever the code would yield
today: position n is the same row after every restart, and no prompt is lost or trained twice.
"""

from __future__ import annotations

import inspect
import json
import signal
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

from sluice.api import RLJobSpec
from sluice.data.files import Row
from sluice.data.writers import Writer
from sluice.runtime import pod_env
from sluice.runtime.pod_env import ConfigurationError
from sluice.runtime.user_code import LoadError, load
from sluice.telemetry import logs

# Limit for all files of a job: the trainer and the engines wait 600 s for the buffer.
SECONDS = 540


def made_rows(function: str, args: Mapping[str, Any], rows: int | None) -> Iterator[Row]:
    """Yield at most `rows` rows of a user's function.

    Raises ConfigurationError if it cannot be called or yields something else. Errors of the
    function itself pass through.
    """
    return islice(_objects(_call(function, args), function), rows)


def _call(dotted: str, args: Mapping[str, Any]) -> Iterable[Any]:
    try:
        function = load(dotted)
        inspect.signature(function).bind(**args)
    except LoadError as error:
        raise ConfigurationError(str(error)) from error
    except TypeError as error:
        raise ConfigurationError(
            f"{dotted}: {error}; arguments are given by name (args, --arg name=value)"
        ) from error
    produced = function(**args)
    if isinstance(produced, Iterable):
        return produced
    if hasattr(produced, "__getitem__") and hasattr(
        produced, "__len__"
    ):  # a map-style data set in PyTorch's terms
        return (produced[position] for position in range(len(produced)))
    raise ConfigurationError(
        f"{dotted}: expected an iterable of rows, found {type(produced).__name__}"
    )


def _objects(rows: Iterable[Any], dotted: str) -> Iterator[Row]:
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ConfigurationError(
                f"{dotted}: row {number}: a row must be a dict, found {type(row).__name__}"
            )
        try:
            json.dumps(row)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigurationError(f"{dotted}: row {number}: {error}") from error
        yield row


def make(spec: RLJobSpec, directory: Path) -> None:
    """Write the missing files, each completely or not at all.

    Raises ConfigurationError if the code does not yield rows.
    """
    for field, source in spec.row_sources:
        path = directory / source.file_name
        if path.exists():
            continue
        for left in directory.glob(f".{source.file_name}.*"):  # left by an attempt that was killed
            left.unlink()
        try:
            with Writer(path) as writer:
                for row in made_rows(source.function, source.args, source.rows):
                    writer.write(row)
        except ConfigurationError as error:
            raise ConfigurationError(f"{field}: {error}") from error
        logs.get().info(
            "rows made", field=field, function=source.function, rows=writer.rows, file=str(path)
        )


class _TimeIsUpError(BaseException):
    """Time limit.

    A BaseException, so that a function that retries after any Exception cannot catch it.
    """


def _time_is_up(_number: int, _frame: FrameType | None) -> None:
    raise _TimeIsUpError


def main() -> int:
    env = pod_env.read("buffer")
    logs.configure(env.role, name=env.name, attempt=env.attempt)
    directory, spec = env.directory("rows"), env.job().spec
    signal.signal(signal.SIGALRM, _time_is_up)
    signal.alarm(SECONDS)
    try:
        make(spec, directory)
    except _TimeIsUpError as error:
        fields = ", ".join(field for field, _ in spec.row_sources)
        raise ConfigurationError(
            f"{fields}: making the rows took more than {SECONDS} s; "
            "write the file beforehand with `sluice data materialise`, and set it as path"
        ) from error
    return 0


if __name__ == "__main__":
    logs.run_blocking("buffer", main)
