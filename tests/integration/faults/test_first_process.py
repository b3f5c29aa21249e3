"""Roles that are told to end while they start, each the first process of a container."""

from __future__ import annotations

import signal

import pytest

from tests.first_process import started_first

WAITS = """
import time
from sluice.telemetry import logs
logs.run_blocking("x", lambda: time.sleep(600))
"""


@pytest.mark.parametrize(
    "words",
    [["-c", WAITS], ["-m", "sluice_trainer.torchrun", "--nnodes", "2", "-m", "sluice_trainer"]],
    ids=["any role", "torchrun"],
)
def test_it_ends_at_once(words: list[str]) -> None:
    with started_first(words) as (outer, first):
        first.terminate()
        assert outer.wait(30) == 128 + signal.SIGTERM
