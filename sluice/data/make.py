"""`python -m sluice.data.make`: the rows of a job's own code, as files, before the buffer starts.

It runs in a container of its own in the buffer's pod (the worker's image, without the job's token),
because no code of a user's runs in the buffer. A file that is there already stays as it is,
whatever the code would yield today: so position n is the same row again, whoever restarts, and no
prompt is lost or trained twice.
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

# For all files of a job. The trainer and the engines wait 600 s for the buffer.
SECONDS = 540


def made_rows(function: str, args: Mapping[str, Any], rows: int | None) -> Iterator[Row]:
    """Rows that a user's function yields, at most `rows`. Raises ConfigurationError where it is no
    row, or nothing to call.

    What the function itself raises passes through.
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
            f"{dotted}: {error}; its arguments are given by name (args, --arg name=value)"
        ) from error
    produced = function(**args)
    if isinstance(produced, Iterable):
        return produced
    if hasattr(produced, "__getitem__") and hasattr(
        produced, "__len__"
    ):  # a map-style data set, as PyTorch calls it
        return (produced[position] for position in range(len(produced)))
    raise ConfigurationError(
        f"{dotted}: expected rows one can iterate over, found {type(produced).__name__}"
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
    """Write the files that are not there yet, each whole or not at all.

    Raises ConfigurationError where what the code gives are no rows.
    """
    for field, source in spec.row_sources:
        path = directory / source.file_name
        if path.exists():
            continue
        for left in directory.glob(f".{source.file_name}.*"):  # of an attempt that was killed
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
    """No Exception: a function that tries again after whatever went wrong must not catch it."""


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
            "write the file beforehand with `sluice data materialise`, and name it as path"
        ) from error
    return 0


if __name__ == "__main__":
    logs.run_blocking("buffer", main)
