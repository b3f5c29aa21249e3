"""A process takes as many files as it may, and no fewer than it had."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from sluice import open_files

SHOW = """
from sluice import open_files
import resource
print(open_files.raise_limit(int({wanted})), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "expected"),
    [(100, 1000, 500, 500), (100, 300, 500, 300), (400, 1000, 200, 400), (300, 300, 500, 300)],
    ids=["raised", "as far as may be", "never lowered", "already all"],
)
def test_the_limit_is_raised(soft: int, hard: int, wanted: int, expected: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SHOW.format(wanted=wanted)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert [int(word) for word in done.stdout.split()] == [expected, expected, hard]


@pytest.mark.parametrize("refusal", [PermissionError("no"), ValueError("too many")], ids=repr)
def test_a_kernel_that_refuses_leaves_what_there_is(
    monkeypatch: pytest.MonkeyPatch, refusal: Exception
) -> None:
    def refuse(*_: object) -> None:
        raise refusal

    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 1000))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert open_files.raise_limit(500) == 100


def test_what_is_asked_for_is_enough_for_a_thousand_engines() -> None:
    assert open_files.WANTED > 20 * 1000
