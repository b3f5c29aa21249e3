"""The failure log shows the first failure of a kind in full, then every hundredth."""

from __future__ import annotations

from structlog.testing import capture_logs

from sluice.telemetry import failure_log
from sluice.telemetry.failure_log import FailureLog


def test_a_kind_is_logged_in_full_once_and_then_every_hundredth() -> None:
    log = FailureLog()
    with capture_logs() as lines:
        for row in range(250):
            log.note(
                "a reward failed", f"KeyError: 'x' (mine.py:3)\nrow {row}", "Traceback ...", row=row
            )
    assert [line["row"] for line in lines] == [0, 100, 200]
    assert [line["of_this_kind"] for line in lines] == [1, 101, 201]
    assert lines[0]["error"] == "KeyError: 'x' (mine.py:3)"
    assert lines[0]["exception"] == "row 0\nTraceback ..."


def test_an_exception_brings_its_traceback() -> None:
    with capture_logs() as lines:
        try:
            raise ValueError("no")
        except ValueError as error:
            FailureLog().note("a group failed", error)
    assert lines[0]["error"].startswith("ValueError: no (test_failure_log.py:")
    assert lines[0]["exception"].startswith("Traceback")


def test_ever_new_messages_do_not_fill_the_memory() -> None:
    log = FailureLog()
    with capture_logs() as lines:
        for number in range(failure_log.MOST_KINDS + 500):
            log.note("a reward failed", f"ValueError: {number}")
    assert len(log.counts) == failure_log.MOST_KINDS + 1
    assert len(lines) == failure_log.MOST_KINDS + 5
