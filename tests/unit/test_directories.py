"""Directories that a role writes in are looked at when it starts."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sluice.runtime import pod_env
from sluice.runtime.pod_env import ConfigurationError

ASK = """
import os
from sluice.runtime import pod_env as environment
os.setgroups([])
os.setgid(65532)
os.setuid(65532)
environment.read("trainer").directory("checkpoint_dir")
"""


def test_one_that_is_not_there_is_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLUICE_STORAGE", str(tmp_path / "a/b"))
    assert pod_env.read("buffer").directory("storage").is_dir()


def test_a_file_in_its_place_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SLUICE_STORAGE", str(tmp_path / "file/storage"))
    with pytest.raises(ConfigurationError, match="file/storage: cannot make this directory"):
        pod_env.read("buffer").directory("storage")


@pytest.mark.skipif(os.getuid() != 0, reason="root alone may become another user")
@pytest.mark.parametrize(("rights", "refused"), [(0o755, True), (0o777, False)])
def test_a_directory_of_another_user_is_refused(rights: int, refused: bool) -> None:
    with tempfile.TemporaryDirectory() as directory:  # pytest's own let no other user pass
        place = Path(directory)
        place.chmod(rights)
        check(place, refused)


def check(place: Path, refused: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        env=os.environ | {"SLUICE_CHECKPOINT_DIR": str(place)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    message = f"{place}: user 65532 cannot write here"
    assert (message in done.stderr, done.returncode != 0) == (refused, refused), done.stderr
