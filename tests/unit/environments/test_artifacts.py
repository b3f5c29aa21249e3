"""Artifacts of a program are handed on unchanged, or refused."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sluice.samples.episode_protocol import (
    ARTIFACTS,
    MOST_ARTIFACT_BYTES,
    MOST_ARTIFACTS,
    MOST_DEPTH,
)
from sluice_rollout.environments.artifacts import (
    Artifact,
    ArtifactsError,
    collect,
    from_json,
    prepare,
    to_json,
)


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """Make the directory in which a program leaves its artifacts."""
    prepare(str(tmp_path))
    return tmp_path / ARTIFACTS


def test_files_reach_another_directory_as_they_were(left: Path, tmp_path: Path) -> None:
    (left / "a/b").mkdir(parents=True)
    (left / "empty").mkdir()
    (left / "a/b/run.sh").write_bytes(b"\x00\xff")
    (left / "a/b/run.sh").chmod(0o700)
    (left / os.fsdecode(b"not-\xff-utf8")).write_text("x")
    other = tmp_path / "other"
    other.mkdir()
    prepare(str(other), from_json(to_json(collect(str(tmp_path)))))
    files = {str(f.relative_to(other)): f for f in other.rglob("*") if f.is_file()}
    run, odd = sorted(files)
    assert (run, files[run].read_bytes()) == ("artifacts/a/b/run.sh", b"\x00\xff")
    assert os.access(files[run], os.X_OK)
    assert os.fsencode(odd).endswith(b"not-\xff-utf8")
    assert not files[odd].stat().st_mode & 0o111


def test_a_program_need_not_leave_artifacts(tmp_path: Path) -> None:
    assert collect(str(tmp_path)) == []


def _huge(left: Path) -> None:
    with (left / "huge").open("wb") as file:
        file.truncate(10 * 2**30)


def _all_too_large(left: Path) -> None:
    for name in "ab":
        (left / name).write_bytes(b"x" * (MOST_ARTIFACT_BYTES // 2 + 1))


def _deep(left: Path) -> None:
    (left / "/".join("d" * MOST_DEPTH)).mkdir(parents=True)


def _many(left: Path) -> None:
    for number in range(MOST_ARTIFACTS + 1):
        (left / str(number)).touch()


def _socket(left: Path) -> None:
    before = os.getcwd()
    os.chdir(left)  # the name of a socket may have 107 characters
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind("s")
    finally:
        os.chdir(before)


def _in_place_of_it(left: Path) -> None:
    left.rmdir()
    left.symlink_to("/etc")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(
            lambda left: (left / "x").symlink_to("/etc/passwd"),
            "artifacts/x: expected a plain file or a directory",
            id="link to a file",
        ),
        pytest.param(
            lambda left: (left / "x").symlink_to("/"), "artifacts/x: expected", id="to a directory"
        ),
        pytest.param(
            lambda left: (left / "x").symlink_to("/dev/zero"), "artifacts/x: ", id="to a device"
        ),
        pytest.param(lambda left: os.mkfifo(left / "x"), "artifacts/x: expected", id="pipe"),
        pytest.param(_socket, "artifacts/s: expected a plain file", id="socket"),
        pytest.param(_in_place_of_it, "artifacts: expected a directory", id="link in its place"),
        pytest.param(_huge, "expected at most 16777216 bytes", id="10 GiB"),
        pytest.param(_all_too_large, "expected at most 16777216 bytes", id="all together"),
        pytest.param(_deep, "expected at most 16 levels of directories", id="deep"),
        pytest.param(_many, "expected at most 1000 files and directories", id="many"),
    ],
)
def test_unsafe_or_too_large_artifacts_are_refused_and_named(
    make: Callable[[Path], Any], message: str, left: Path, tmp_path: Path
) -> None:
    make(left)
    with pytest.raises(ArtifactsError, match=message):
        collect(str(tmp_path))


@pytest.mark.parametrize(
    "files",
    [
        pytest.param([Artifact("../x", b"")], id="above"),
        pytest.param([Artifact("/etc/x", b"")], id="absolute"),
        pytest.param([Artifact("a/./x", b"")], id="dot"),
        pytest.param([Artifact("a\0b", b"")], id="null character"),
        pytest.param([Artifact("x", b""), Artifact("x/y", b"")], id="a file and a directory"),
        pytest.param([Artifact("x", b""), Artifact("x", b"")], id="twice"),
    ],
)
def test_invalid_paths_are_refused(files: list[Artifact], tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    with pytest.raises(ArtifactsError):
        prepare(str(inside), files)
    assert os.listdir(tmp_path) == ["inside"]
