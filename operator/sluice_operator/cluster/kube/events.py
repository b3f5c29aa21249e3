"""Events as objects of events.k8s.io/v1."""

from __future__ import annotations

import itertools
import time
from datetime import UTC, datetime

from sluice.api import API_VERSION, KIND
from sluice_operator.plan.facts import clock
from sluice_operator.plan.facts.model import Event, KubeObject, uid

NOTE_LIMIT = 1024
REPORTER = "sluice.dev/operator"
_number = itertools.count()


def event_object(stored: KubeObject, event: Event, identity: str) -> KubeObject:
    """An event about a job. identity: this replica of the operator."""
    metadata = stored["metadata"]
    namespace, name = metadata["namespace"], metadata["name"]
    regarding = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "namespace": namespace,
        "name": name,
        "uid": uid(stored),
    }
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": f"{name}.{time.time_ns() + next(_number):x}", "namespace": namespace},
        "eventTime": clock.micro_text(datetime.now(UTC)),
        "reportingController": REPORTER,
        "reportingInstance": identity,
        "action": "Reconcile",
        "type": event.type,
        "reason": event.reason,
        "note": event.message[:NOTE_LIMIT],
        "regarding": regarding,
    }
