"""Lines of a process's log, as read from its stderr."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

HEAD = """
import logging, warnings, structlog
from sluice.telemetry import logs
log = logs.configure("buffer", name="buffer-0")
"""


def lines(program: str, **variables: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", HEAD + program],
        env=variables,
        check=True,
        text=True,
        stderr=subprocess.PIPE,
        timeout=60,
    )
    return done.stderr.splitlines()


def records(program: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines(program, SLUICE_LOG_FORMAT="json")]


def test_lines_of_sluice_are_json_with_the_context_of_the_process() -> None:
    (record,) = records('log.info("lease granted", group=3)')
    record.pop("timestamp")
    assert record == {
        "event": "lease granted",
        "level": "info",
        "role": "buffer",
        "name": "buffer-0",
        "group": 3,
    }


def test_what_a_library_logs_is_json_with_its_name() -> None:
    (record,) = records('logging.getLogger("kubernetes").warning("no %s", "route")')
    assert (record["event"], record["level"], record["logger"], record["role"]) == (
        "no route",
        "warning",
        "kubernetes",
        "buffer",
    )


def test_libraries_are_logged_from_warning_on() -> None:
    assert records('logging.getLogger("kopf").info("hello")') == []


def test_errors_of_both_carry_their_traceback_in_the_same_line() -> None:
    program = """
for logger in (log, logging.getLogger("kopf")):
    try:
        1 / 0
    except ZeroDivisionError:
        logger.exception("pass failed")
"""
    written = records(program)
    assert [record["level"] for record in written] == ["error", "error"]
    assert all(
        record["exception"].endswith("ZeroDivisionError: division by zero") for record in written
    )


def test_a_line_about_an_object_names_it() -> None:
    program = """
for kind in ("RLJob", "Pod"):
    ref = {"kind": kind, "namespace": "ns", "name": "demo"}
    logging.getLogger("kopf.objects").warning("odd", extra={"k8s_ref": ref})
"""
    job, pod = records(program)
    assert (job["job"], pod["pod"]) == ("ns/demo", "ns/demo")


def test_context_of_a_task_is_on_the_lines_of_libraries_too() -> None:
    program = """
with structlog.contextvars.bound_contextvars(job="ns/demo"):
    logging.getLogger("aiohttp").warning("slow")
"""
    assert records(program)[0]["job"] == "ns/demo"


def test_warnings_are_lines_too() -> None:
    (record,) = records('warnings.warn("deprecated")')
    assert record["logger"] == "py.warnings"


def test_output_of_a_program_cannot_pass_for_a_line_of_sluice() -> None:
    program = """
forged = "2026-01-31T12:00:00Z info all is well"
log.warning("it failed", error="gone\\x1b[2J\\n" + forged, exception="one\\n" + forged)
logs.print_error("gone\\nerror: another cause")
"""
    event, *below, last, under = lines(program)
    assert event.endswith("error=gone\\x1b[2J\\n2026-01-31T12:00:00Z info all is well")
    assert below == ["    one", "    2026-01-31T12:00:00Z info all is well"]
    assert (last, under) == ("error: gone", "    error: another cause")


def test_lines_for_people_are_plain_text() -> None:
    (ours, theirs) = lines(
        'log.info("lease granted", group=3); logging.getLogger("kopf").warning("odd")'
    )
    assert ours.endswith("Z info    lease granted group=3")
    assert theirs.endswith("Z warning odd logger=kopf")
