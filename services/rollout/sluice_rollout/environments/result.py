"""The result that a program leaves behind: `result.json`."""

from __future__ import annotations

import json
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sluice.episodes import RESULT
from sluice.rewards.types import RewardValue, shown
from sluice_rollout.turns import BRANCH_TURNS, TURNS

_FIELDS = ("reward", "metadata")
_MOST_BYTES = 4 * 2**20


class ResultError(Exception):
    """A result that cannot be read. The message names the file, and what was expected."""


@dataclass(frozen=True, slots=True)
class Result:
    """reward: None where the program gives none. metadata: for the sample's."""

    reward: RewardValue | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


def read(directory: str) -> Result:
    """The result of the program that ran in this directory. Raises ResultError."""
    return of_text(text_of(Path(directory) / RESULT))


def of_text(text: str | None) -> Result:
    """The result in a file's text; None: there is no file. Raises ResultError."""
    if text is None:
        return Result()
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ResultError(f"{RESULT} is no JSON: {error}") from error
    return parse(document)


def parse(document: Any) -> Result:
    """The result in a document. Raises ResultError; the reward is checked where it is set."""
    if not isinstance(document, dict) or document.keys() - set(_FIELDS):
        raise ResultError(
            f"{RESULT}: expected an object with reward, metadata or both, found {shown(document)}"
        )
    metadata = document.get("metadata") or {}
    if not isinstance(metadata, dict):
        raise ResultError(f"{RESULT}: metadata: expected an object, found {shown(metadata)}")
    if ours := metadata.keys() & {TURNS, BRANCH_TURNS}:
        raise ResultError(f"{RESULT}: metadata.{min(ours)} is sluice's own: take another name")
    return Result(document.get("reward"), metadata)


def text_of(file: Path) -> str | None:
    """The file's text; None where there is none. Nothing but a plain file is read: nobody writes
    to it any more.
    """
    try:
        status = file.lstat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_BYTES:
        raise ResultError(f"{RESULT}: expected a plain file of at most {_MOST_BYTES} bytes")
    try:
        return file.read_bytes().decode()
    except OSError as error:
        raise ResultError(f"{RESULT}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ResultError(f"{RESULT} is no UTF-8: {error}") from error
