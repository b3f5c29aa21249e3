"""Contents of `result.json` that are read, and those that are refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from sluice.samples.episode_protocol import RESULT
from sluice_rollout.environments.result import Result, ResultError, read


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param('{"reward": 0.5}', Result(0.5), id="number"),
        pytest.param('{"reward": {"score": 1}}', Result({"score": 1}), id="parts"),
        pytest.param('{"metadata": {"a": 1}}', Result(None, {"a": 1}), id="metadata alone"),
        pytest.param(
            '{"rewards": {"white": 1}, "turn_rewards": {"white": [0, 0.5]}}',
            Result(rewards={"white": 1}, turn_rewards={"white": [0, 0.5]}),
            id="seats",
        ),
        pytest.param('{"turn_rewards": [1]}', Result(turn_rewards={"": [1]}), id="turns"),
        pytest.param("{}", Result(), id="nothing"),
        pytest.param('{"reward": null, "metadata": null}', Result(), id="nulls"),
    ],
)
def test_a_result_is_read(text: str, expected: Result, tmp_path: Path) -> None:
    (tmp_path / RESULT).write_text(text)
    assert read(str(tmp_path)) == expected


def test_a_program_need_not_leave_a_result(tmp_path: Path) -> None:
    assert read(str(tmp_path)) == Result()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(b"0.5", "expected an object with any of reward, metadata", id="bare number"),
        pytest.param(b'{"score": 1}', "expected an object with any of reward", id="another field"),
        pytest.param(b'{"rewards": 1}', "rewards: expected an object", id="rewards without seats"),
        pytest.param(
            b'{"turn_rewards": ["a"]}', "is str 'a', expected a number", id="words of turns"
        ),
        pytest.param(
            b'{"turn_rewards": [true]}', "expected a list of numbers", id="truth of turns"
        ),
        pytest.param(
            b'{"turn_rewards": [0, 1e39]}',
            r"turn_rewards\[1\] is 1e\+39, expected a finite number",
            id="a turn beyond float32",
        ),
        pytest.param(
            b'{"reward": 1, "metadata": {"a": "\\ud83d"}}',
            "result.json.metadata.a: half of a surrogate pair",
            id="half a surrogate pair",
        ),
        pytest.param(
            b'{"reward": {"score": 1, "\\ud83d": 1}}',
            r"result.json.reward: key '\\ud83d': half of a surrogate pair",
            id="half a surrogate pair as the name of a part",
        ),
        pytest.param(b'{"reward": NaN}', "result.json: NaN is not a finite number", id="nan"),
        pytest.param(
            b'{"reward": ' + b"9" * 5000 + b"}", "more than 4300 digits", id="5000 digits"
        ),
        pytest.param(
            b'{"metadata": {"a": ' + b"[" * 900 + b"]" * 900 + b"}}",
            "nested more than 64 deep",
            id="900 deep",
        ),
        pytest.param(b'{"turn_rewards": {"a": 1}}', "expected a list of numbers", id="no list"),
        pytest.param(b"{", "result.json: not valid JSON", id="half"),
        pytest.param(b"\xff", "result.json is not UTF-8", id="bytes"),
        pytest.param(b'{"metadata": [1]}', "metadata: expected an object", id="metadata a list"),
        pytest.param(b'{"metadata": {"turns": []}}', "metadata.turns is reserved", id="turns"),
        pytest.param(b" " * (2**22 + 1), "a plain file of at most", id="huge"),
    ],
)
def test_a_broken_result_names_its_fault(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / RESULT).write_bytes(content)
    with pytest.raises(ResultError, match=message):
        read(str(tmp_path))


def _pipe(file: Path) -> None:
    os.mkfifo(file)


def _link(file: Path) -> None:
    file.symlink_to("/etc/passwd")


@pytest.mark.parametrize("make", [Path.mkdir, _pipe, _link], ids=["directory", "pipe", "link"])
def test_only_a_plain_file_is_read(make: Any, tmp_path: Path) -> None:
    make(tmp_path / RESULT)
    with pytest.raises(ResultError, match="expected a plain file"):
        read(str(tmp_path))
