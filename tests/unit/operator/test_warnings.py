"""Events of a namespace that say why a pod does not start."""

from __future__ import annotations

from typing import Any

import pytest

from sluice_operator.cluster.kube.events import newest
from sluice_operator.plan.facts.model import KubeletWarning

PODS = {"u1": "demo-trainer-0-1-0"}


def event(reason: str, uid: str = "u1", **fields: Any) -> dict[str, Any]:
    return {
        "regarding": {"kind": "Pod", "uid": uid},
        "reason": reason,
        "note": f"of {reason}",
        **fields,
    }


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([], None),
        (
            [
                event(
                    "FailedMount", deprecatedLastTimestamp="2026-01-31T12:00:00Z", deprecatedCount=4
                )
            ],
            ("FailedMount", 4),
        ),
        (
            [
                event(
                    "FailedMount",
                    series={"count": 7, "lastObservedTime": "2026-01-31T12:00:00.000000Z"},
                )
            ],
            ("FailedMount", 7),
        ),
        (
            [
                event("FailedCreatePodSandBox", eventTime="2026-01-31T12:00:09.000000Z"),
                event("FailedMount", deprecatedLastTimestamp="2026-01-31T12:00:00Z"),
            ],
            ("FailedCreatePodSandBox", 1),
        ),
        ([event("FailedMount", uid="u0")], None),
        ([event("FailedScheduling"), event("BackOff"), event("Failed"), event("Unhealthy")], None),
    ],
    ids=["none", "old style", "series", "the newest", "of an earlier pod", "told otherwise"],
)
def test_newest(events: list[dict[str, Any]], expected: tuple[str, int] | None) -> None:
    by_pod = (
        {"demo-trainer-0-1-0": KubeletWarning(expected[0], f"of {expected[0]}", expected[1])}
        if expected
        else {}
    )
    assert newest(events, PODS) == by_pod
