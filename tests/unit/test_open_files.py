"""A process takes as many files as it may, and no fewer than it had."""

from __future__ import annotations

import resource
import subprocess
import sys
from functools import partial

import pytest

from sluice.runtime import open_files

SHOW = """
from sluice.runtime import open_files
import resource
print(open_files.raise_limit(int({requested})), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


ROLE = """
from resource import RLIMIT_NOFILE, getrlimit
from sluice.telemetry import logs
logs.run_blocking("rendezvous", lambda: print(*getrlimit(RLIMIT_NOFILE)))
"""


def with_limits(text: str, soft: int, hard: int) -> list[int]:
    """The numbers that a program prints that begins with these limits."""
    done = subprocess.run(
        [sys.executable, "-c", text],
        preexec_fn=partial(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard)),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return [int(word) for word in done.stdout.split()]


def test_a_role_takes_what_it_may() -> None:
    assert with_limits(ROLE, 500, 900) == [900, 900]


@pytest.mark.parametrize(
    ("soft", "hard", "requested", "expected"),
    [(100, 1000, 500, 500), (100, 300, 500, 300), (400, 1000, 200, 400), (300, 300, 500, 300)],
    ids=["raised", "as far as may be", "never lowered", "already all"],
)
def test_the_limit_is_raised(soft: int, hard: int, requested: int, expected: int) -> None:
    shown = with_limits(SHOW.format(requested=requested), soft, hard)
    assert shown == [expected, expected, hard]


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
    assert open_files.DEFAULT_LIMIT > 20 * 1000
