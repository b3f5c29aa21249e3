"""Read directories of Harbor tasks, as terminal-bench 2 has them: each task is a row.

A task is a folder with `task.toml`, `instruction.md` and `tests/test.sh`. Its row has what an agent
and a verifier need; the names of files and keys are those of the package `harbor` (0.26).
"""

from __future__ import annotations

import base64
import math
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sluice.runtime.pod_env import ConfigurationError

CONFIGURATION, INSTRUCTION, SCRIPT = "task.toml", "instruction.md", "test.sh"
# Most bytes of task.toml, and of instruction.md.
MOST_TEXT_BYTES = 1 << 20
# Most files of `tests/`, and most bytes of all of them. Every sample of the row carries them.
MOST_TEST_FILES, MOST_TEST_BYTES = 1000, 1 << 20
# Harbor's default of verifier.timeout_sec. An agent has no default.
VERIFIER_SECONDS = 600.0
# First letters of folders that are no tasks, such as `.git` and `__pycache__`.
_HIDDEN = (".", "_")
# Harbor removes these lines, which mark data that nobody should train on, before an agent sees
# the instruction.
_CANARY = re.compile(r"<!--.*canary.*-->|#.*canary.*", re.IGNORECASE)
_TOML_PLACE = re.compile(r" \(at line (\d+), column (\d+)\)$")


def is_task(path: Path) -> bool:
    """Return True if a directory is a task itself."""
    return (path / CONFIGURATION).is_file()


def holds_tasks(path: Path) -> bool:
    """Return True if a directory is a task, or has a folder that is one."""
    return is_task(path) or any(map(is_task, _folders(path)))


def task_folders(path: Path) -> list[Path]:
    """Return the task itself, or all tasks of a directory in order of their names.

    Raises ConfigurationError if a folder is no task.
    """
    if is_task(path):
        return [path]
    folders = _folders(path)
    for folder in folders:
        if not is_task(folder):
            raise ConfigurationError(
                f"{folder}: no {CONFIGURATION} in this folder, which is beside Harbor tasks; add "
                "it, or move the folder elsewhere (names that begin with . or _ are left out)"
            )
    return folders


def read_task(folder: Path) -> dict[str, Any]:
    """Return the row of a task. Raises ConfigurationError."""
    file = folder / CONFIGURATION
    config = _Table(_toml(file), file)
    _refuse_other_kinds(folder, config)
    environment, verifier = config.table("environment"), config.table("verifier")
    found = {
        "instance_id": folder.resolve().name,
        "task_name": config.table("task").text("name"),
        "image": environment.text("docker_image"),
        "workdir": environment.text("workdir"),
        "env": environment.texts("env"),
        "agent_timeout_sec": config.table("agent").seconds("timeout_sec"),
        "verifier_timeout_sec": verifier.seconds("timeout_sec") or VERIFIER_SECONDS,
        "verifier_env": verifier.texts("env"),
        "test_files": _tests(folder),
    }
    metadata = {key: value for key, value in found.items() if value is not None}
    return {"prompt": _instruction(folder), "metadata": metadata}


def _folders(path: Path) -> list[Path]:
    return sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith(_HIDDEN))


class _Table:
    """A table of task.toml; its readers raise ConfigurationError with the name of the key."""

    def __init__(self, values: Mapping[str, Any], file: Path, prefix: str = "") -> None:
        self._values, self._file, self._prefix = values, file, prefix

    def __contains__(self, key: str) -> bool:
        return bool(self._values.get(key))

    def table(self, key: str) -> _Table:
        value = self._values.get(key, {})
        if not isinstance(value, dict):
            raise self._wrong(key, f"a table, [{self._prefix}{key}]")
        return _Table(value, self._file, f"{self._prefix}{key}.")

    def text(self, key: str) -> str | None:
        value = self._values.get(key)
        if value is not None and not isinstance(value, str):
            raise self._wrong(key, "a text")
        return value or None

    def texts(self, key: str) -> dict[str, str] | None:
        value = self._values.get(key, {})
        if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
            raise self._wrong(key, "a table of texts")
        return value or None

    def seconds(self, key: str) -> float | None:
        value = self._values.get(key)
        if value is None:
            return None
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 < value < math.inf:
            raise self._wrong(key, "a number of seconds above 0")
        return float(value)

    def _wrong(self, key: str, expected: str) -> ConfigurationError:
        shown = f"{self._values[key]!r:.100}"
        return ConfigurationError(
            f"{self._file}: {self._prefix}{key}: expected {expected}, found {shown}"
        )


def _toml(file: Path) -> dict[str, Any]:
    text = _text(file, MOST_TEXT_BYTES)
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ConfigurationError(f"{file}: not valid TOML: nested too deeply") from error
    except ValueError as error:  # also a number with more digits than Python parses
        place = _TOML_PLACE.search(str(error))
        where = f"{file}:{place[1]}:{place[2]}" if place else str(file)
        reason = _TOML_PLACE.sub("", str(error))
        raise ConfigurationError(f"{where}: not valid TOML: {reason}") from error


def _refuse_other_kinds(folder: Path, config: _Table) -> None:
    """Raise ConfigurationError for a task that one container and one instruction cannot play."""
    environment, verifier = config.table("environment"), config.table("verifier")
    separate = verifier.text("environment_mode") == "separate"
    reasons = {
        "[[steps]]: an episode has one instruction and one verdict": "steps" in config,
        "environment.mcp_servers: episodes get no MCP servers": "mcp_servers" in environment,
        "environment.os: tests are run by a shell of Linux": (
            (environment.text("os") or "linux").lower() != "linux"
        ),
        "environment/docker-compose.yaml: an episode has one container": (
            folder / "environment/docker-compose.yaml"
        ).exists(),
        "verifier.environment or tests/Dockerfile: tests run in the image of the task": (
            "environment" in verifier or (separate and (folder / "tests/Dockerfile").exists())
        ),
        "verifier.collect: its commands are for services of docker-compose": "collect" in verifier,
        "trajectory.json: an episode begins with the instruction": (
            folder / "trajectory.json"
        ).exists(),
    }
    for reason, applies in reasons.items():
        if applies:
            raise ConfigurationError(
                f"{folder}: this kind of task cannot be played ({reason}); move the folder "
                "elsewhere"
            )


def _instruction(folder: Path) -> str:
    file = folder / INSTRUCTION
    lines = _text(file, MOST_TEXT_BYTES).split("\n")
    start = 0
    while start < len(lines) and _CANARY.fullmatch(lines[start].strip()):
        start += 1
    text = "\n".join(lines[start:]).lstrip("\n")
    if not text.strip():
        raise ConfigurationError(f"{file}: the instruction is empty")
    return text


def _text(file: Path, most: int) -> str:
    try:
        return _read(file, file.parent, most).decode()
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"{file}: not UTF-8 text: {error.reason} at byte {error.start}"
        ) from error


def _read(file: Path, root: Path, most: int, after: str = "") -> bytes:
    """Read a plain file inside `root`, of at most `most` bytes. `after` explains the limit."""
    try:
        if not os.path.lexists(file):
            raise ConfigurationError(f"{file}: no such file; a Harbor task needs it")
        if not _resolved(file).is_relative_to(root.resolve()):
            raise ConfigurationError(
                f"{file}: a link that leaves the folder of the task; put the file there instead"
            )
        if not file.is_file():
            raise ConfigurationError(f"{file}: expected a plain file")
        with file.open("rb") as opened:
            data = opened.read(most + 1)
    except OSError as error:
        raise ConfigurationError(f"{file}: {error.strerror or error}") from error
    if len(data) > most:
        raise ConfigurationError(
            f"{file}: {file.stat().st_size} bytes; expected at most {most}{after}: put large files "
            "into the image"
        )
    return data


def _resolved(file: Path) -> Path:
    try:
        return file.resolve()
    except RuntimeError as error:  # Python 3.11 and 3.12: a link to itself
        raise ConfigurationError(f"{file}: a link to itself") from error


def _tests(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the files of `tests/`, by their paths in it."""
    tests = folder / "tests"
    script = tests / SCRIPT
    found = {SCRIPT: _encoded(_read(script, folder, MOST_TEST_BYTES), script)}
    left = MOST_TEST_BYTES - script.stat().st_size
    for file in _walk(tests):
        if file == script:
            continue
        if len(found) == MOST_TEST_FILES:
            raise ConfigurationError(
                f"{tests}: more than {MOST_TEST_FILES} files; put them into the image"
            )
        data = _read(file, folder, left, f" after the other files of {tests}")
        left -= len(data)
        found[file.relative_to(tests).as_posix()] = _encoded(data, file)
    return found


def _walk(directory: Path) -> Iterator[Path]:
    for at, folders, names in os.walk(directory):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in folders:
            if (Path(at) / name).is_symlink():
                raise ConfigurationError(
                    f"{Path(at) / name}: a link to a directory; put a copy there instead"
                )
        yield from (Path(at) / name for name in sorted(names) if name != ".harborignore")


def _encoded(data: bytes, file: Path) -> dict[str, Any]:
    executable = bool(file.stat().st_mode & 0o100)
    try:
        content = {"text": data.decode()}
    except UnicodeDecodeError:
        content = {"base64": base64.b64encode(data).decode()}
    return content | ({"executable": True} if executable else {})
