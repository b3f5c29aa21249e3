"""The table of docs/concepts.md that says how long each silence may last has the code's limits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from sluice_operator.plan.manifests.containers import probes
from sluice_rendezvous.service import MEMBER_TIMEOUT_SECONDS
from sluice_trainer.weights.lateness import CONNECTING, FACTOR
from tests.unit.operator.world import make_job

PAGE = Path(__file__).parents[3] / "docs/concepts.md"
AFTER = re.compile(r"(?:(?P<seconds>\d+) s|never)(?P<parts>.*)")


class Row(NamedTuple):
    """seconds: None: never. parts: the limit's parts, in words. field: of the spec."""

    seconds: int | None
    parts: str
    field: str


def rows() -> dict[str, Row]:
    """The rows by who is silent."""
    text = PAGE.read_text().partition("### Silence\n")[2].partition("\n### ")[0]
    _, _, *lines = [line for line in text.splitlines() if line.startswith("|")]
    by_name = {}
    for line in lines:
        silent, _, after, _, field = (cell.strip(" `") for cell in line.strip("|").split("|"))
        limit = AFTER.fullmatch(after)
        assert limit, line
        seconds = limit["seconds"]
        by_name[silent] = Row(int(seconds) if seconds else None, limit["parts"], field)
    return by_name


def killed_after(container: str) -> int:
    probe: dict[str, Any] = probes(make_job(), container)["livenessProbe"]
    return int(probe["periodSeconds"] * probe["failureThreshold"])


def test_the_page_has_the_limits_of_the_code() -> None:
    spec = make_job().spec
    sync, health = spec.weight_sync, spec.rollout.health
    limits = {name: row.seconds for name, row in rows().items()}
    assert limits == {
        "a member of any role": MEMBER_TIMEOUT_SECONDS,
        "an engine in a weight update, and the others are not": sync.late_seconds,
        "the only engine of an update": sync.timeout_seconds,
        "an engine that does not answer": health.silence_seconds,
        "an engine that answers, and makes no tokens": health.hang_seconds,
        "a paused engine whose trainer is gone": sync.pause_seconds,
        "an engine whose worker hangs too": killed_after("engine"),
        "worker, buffer or rendezvous": killed_after("worker"),
        "a trainer that makes no step": spec.progress_deadline_seconds,
        "a job without its first step": spec.startup_deadline_seconds,
    }


def test_the_page_has_the_parts_of_the_limits() -> None:
    health, texts = make_job().spec.rollout.health, {n: row.parts for n, row in rows().items()}
    checks, apart = health.failure_threshold, f"{health.period_seconds:g} s apart"
    late = texts["an engine in a weight update, and the others are not"]
    assert (FACTOR, CONNECTING) == (2, 10)
    assert "twice the time of the slowest other; ten times 2 s while" in late
    assert texts["an engine that does not answer"] == (
        f": {checks} checks of {health.timeout_seconds:g} s, {apart}"
    )
    assert texts["an engine that answers, and makes no tokens"] == (
        f": {health.stall_seconds:g} s without an answer, {checks} checks of "
        f"{health.generate_seconds:g} s, {apart}"
    )


def test_the_fields_that_the_page_names_exist() -> None:
    spec = make_job().spec.model_dump(by_alias=True)
    for row in rows().values():
        value: Any = spec
        for part in row.field.split(".") if row.field else []:
            value = value[part]
