"""The result that a program leaves behind: `result.json`."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sluice import input_checks
from sluice.input_checks import InputError, load_json
from sluice.rewards.types import RewardValue, shown
from sluice.samples.episode_protocol import MOST_RESULT_BYTES, RESULT
from sluice.samples.turns import BRANCH_TURNS, TURNS

_FIELDS = ("reward", "metadata", "rewards", "turn_rewards")


class ResultError(Exception):
    """A result that cannot be read. The message names the file, and what was expected."""


@dataclass(frozen=True, slots=True)
class Result:
    """reward: None where the program gives none. metadata: for the sample's. rewards: of seats.
    turn_rewards: of each seat's turns, "" where the job has none.
    """

    reward: RewardValue | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    rewards: dict[str, RewardValue] = field(default_factory=dict)
    turn_rewards: dict[str, list[float]] = field(default_factory=dict)


def read(directory: str) -> Result:
    """The result of the program that ran in this directory. Raises ResultError."""
    return parse_text(read_text(Path(directory) / RESULT))


def parse_text(text: str | None) -> Result:
    """The result in a file's text; None: there is no file. Raises ResultError."""
    if text is None:
        return Result()
    try:
        return parse(load_json(text, RESULT))
    except InputError as error:
        raise ResultError(str(error)) from error


def parse(document: Any) -> Result:
    """The result in a document. Raises ResultError or InputError; the reward is checked when it is
    set.
    """
    if not isinstance(document, dict) or document.keys() - set(_FIELDS):
        raise ResultError(
            f"{RESULT}: expected an object with {', '.join(_FIELDS)} or some of them, found "
            f"{shown(document)}"
        )
    metadata = _object(document, "metadata")
    if ours := metadata.keys() & {TURNS, BRANCH_TURNS}:
        raise ResultError(f"{RESULT}: metadata.{min(ours)} is sluice's own: take another name")
    of_turns = document.get("turn_rewards") or {}
    by_seat = {"": of_turns} if isinstance(of_turns, list) else _object(document, "turn_rewards")
    for rewards in by_seat.values():
        if not isinstance(rewards, list) or any(isinstance(reward, bool) for reward in rewards):
            raise ResultError(
                f"{RESULT}: turn_rewards: expected a list of numbers, or one for each seat, found "
                f"{shown(rewards)}"
            )
        for position, reward in enumerate(rewards):
            input_checks.reward(reward, f"{RESULT}: turn_rewards[{position}]")
    return Result(document.get("reward"), metadata, _object(document, "rewards"), by_seat)


def _object(document: dict[str, Any], name: str) -> dict[str, Any]:
    value = document.get(name) or {}
    if not isinstance(value, dict):
        raise ResultError(f"{RESULT}: {name}: expected an object, found {shown(value)}")
    return value


def read_text(file: Path) -> str | None:
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
