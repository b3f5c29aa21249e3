"""Reads the result that a program or a verifier writes: `result.json`."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sluice import input_checks
from sluice.input_checks import InputError, load_json
from sluice.rewards.types import RewardValue, shown
from sluice.samples.episode_protocol import IMAGE_KEYS, MOST_RESULT_BYTES, RESULT
from sluice.samples.turns import BRANCH_TURNS, TURNS

_FIELDS = ("reward", "metadata", "rewards", "turn_rewards")


class ResultError(Exception):
    """A result is invalid. The message names the file and what was expected."""


@dataclass(frozen=True, slots=True)
class Result:
    """The contents of a result."""

    reward: RewardValue | None = None
    metadata: dict[str, Any] = field(default_factory=dict)  # added to the sample's
    rewards: dict[str, RewardValue] = field(default_factory=dict)  # by seat
    # Rewards of turns, by seat. Without `rollout.seats`, the only seat is "".
    turn_rewards: dict[str, list[float]] = field(default_factory=dict)


def read(directory: str) -> Result:
    """Read the result of the program that ran in a directory. Raises ResultError."""
    return parse_text(read_text(Path(directory) / RESULT))


def parse_text(text: str | None) -> Result:
    """Parse the text of a result. None (no file) is an empty result. Raises ResultError."""
    if text is None:
        return Result()
    try:
        return parse(load_json(text, RESULT))
    except InputError as error:
        raise ResultError(str(error)) from error


def parse(document: Any) -> Result:
    """Parse a result's JSON document. Raises ResultError or InputError.

    The reward itself is checked when it is applied.
    """
    if not isinstance(document, dict) or document.keys() - set(_FIELDS):
        raise ResultError(
            f"{RESULT}: expected an object with any of {', '.join(_FIELDS)}, found "
            f"{shown(document)}"
        )
    metadata = _object(document, "metadata")
    if reserved := metadata.keys() & {TURNS, BRANCH_TURNS, *IMAGE_KEYS.values()}:
        raise ResultError(f"{RESULT}: metadata.{min(reserved)} is reserved: take another name")
    turn_rewards = document.get("turn_rewards") or {}
    by_seat = (
        {"": turn_rewards} if isinstance(turn_rewards, list) else _object(document, "turn_rewards")
    )
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
    """Return a file's text, or None if it does not exist. Raises ResultError.

    Only plain files are read, and no link is followed, whatever the program does meanwhile.
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
        raise ResultError(f"{RESULT} is not UTF-8: {error}") from error
