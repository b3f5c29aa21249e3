"""The lines of `sluice run` where nobody sits at a terminal."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from sluice.api import RLJobStatus
from sluice_cli.run.monitor import Snapshot
from sluice_cli.run.run_files import RunFiles
from sluice_cli.run.view import PlainView


def waits(state: str, message: str) -> RLJobStatus:
    running = {
        "type": "Running",
        "status": "False",
        "reason": state,
        "message": message,
        "lastTransitionTime": "2026-01-31T12:00:00Z",
    }
    return RLJobStatus.model_validate({"state": state, "conditions": [running]})


def test_a_job_that_starts_tells_each_thing_it_waits_for_once(tmp_path: Path) -> None:
    text = io.StringIO()
    view = PlainView(Console(file=text, width=120, color_system=None))
    for state, message in (
        ("Pending", "0 of 900 pods are running"),
        ("Pending", "1 of 900 pods are running"),  # not a line for each pod
        ("Starting", "pods are running; waiting for trainer-0"),
        ("Starting", "pods are running; waiting for trainer-0"),
        ("Starting", "pods are running; no engine has started yet"),
        ("Running", "training, with 900 of 900 pods running"),
        ("Running", "training, with 899 of 900 pods running"),
    ):
        view.show(waits(state, message), Snapshot(), RunFiles(tmp_path), [])
    assert [line.split(" ", 1)[1] for line in text.getvalue().splitlines()] == [
        "state Pending: 0 of 900 pods are running",
        "state Starting: pods are running; waiting for trainer-0",
        "state Starting: pods are running; no engine has started yet",
        "state Running",
    ]
