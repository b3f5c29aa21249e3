"""The result that a program leaves behind: `result.json`."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sluice.episodes import MOST_RESULT_BYTES, RESULT
from sluice.rewards.types import RewardValue, shown
from sluice_rollout.turns import BRANCH_TURNS, TURNS

_FIELDS = ("reward", "metadata")


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
    """The file's text; None where there is none. Nothing but a plain file is read, and no link is
    followed, whatever the program does meanwhile. Raises ResultError.
    """
    try:
        with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as opened:
            plain = stat.S_ISREG(os.fstat(opened.fileno()).st_mode)
            content = opened.read(MOST_RESULT_BYTES + 1) if plain else b""
    except FileNotFoundError:
        return None
    except OSError as error:  # ELOOP: a link; ENXIO: a socket
        raise ResultError(f"{RESULT}: expected a plain file: {error.strerror}") from error
    if not plain or len(content) > MOST_RESULT_BYTES:
        raise ResultError(f"{RESULT}: expected a plain file of at most {MOST_RESULT_BYTES} bytes")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ResultError(f"{RESULT} is no UTF-8: {error}") from error
