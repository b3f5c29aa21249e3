"""What the operator reads in the log of a container that fetches."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from sluice.stores import Uri
from sluice.stores.progress import LoggedProgress, last_progress

GB = 1_000_000_000


def test_a_line_now_and_then_with_the_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([100.0, 101.0, 110.0])
    monkeypatch.setattr("sluice.stores.progress.time.monotonic", lambda: next(moments))
    show = LoggedProgress(Uri("hf", "org/name"))
    with capture_logs() as lines:
        for done in (0, 1 * GB, 12 * GB):
            show(done, 61 * GB)
    assert [line["arrived"] for line in lines] == ["0.0 of 61.0 GB", "12.0 of 61.0 GB, 1.2 GB/s"]
    assert show.done == 12 * GB


@pytest.mark.parametrize(
    "line",
    [
        "2026-01-31T12:00:00Z info     fetching uri=hf://org/name arrived=1.0 of 2.0 GB",
        '{"uri": "hf://org/name", "arrived": "1.0 of 2.0 GB", "event": "fetching"}',
    ],
    ids=["text", "json"],
)
def test_the_newest_line_is_read(line: str) -> None:
    log = f"{line.replace('1.0', '0.5')}\n{line}\nsomething else\n"
    assert last_progress(log) == "hf://org/name: 1.0 of 2.0 GB"


@pytest.mark.parametrize("line", ["", "{", "[]", "null", '{"event": 1}', "fetching"])
def test_another_line_is_no_progress(line: str) -> None:
    assert last_progress(line) == ""


def test_a_line_that_is_nested_deeply_is_no_progress() -> None:
    assert last_progress('{"a":' + "[" * 100_000) == ""


def test_a_line_of_another_program_is_shortened_and_escaped() -> None:
    text = last_progress(f" fetching uri=a arrived=\x1b[31m{'x' * 9000}")
    assert len(text) < 600
    assert "\x1b" not in text
