"""Reads one gang's present attempt from its pods."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sluice_operator.plan.facts import podstate
from sluice_operator.plan.facts.model import Gang, GangFacts, KubeObject


def gang_facts(gang: Gang, pods: Sequence[KubeObject], now: datetime) -> GangFacts:
    """pods: all pods of the gang's present attempt, and no others."""
    present = {podstate.index(pod) for pod in pods}
    failures = [failure for pod in pods for failure in podstate.failures(pod, now)]
    undisturbed = [pod for pod in pods if not podstate.disruption(pod)]
    config_errors = [error for pod in undisturbed if (error := podstate.config_error(pod, now))]
    starts = [start for pod in pods if (start := podstate.started(pod))]
    return GangFacts(
        seen=len(pods),
        ready=sum(podstate.is_ready(pod) for pod in pods),
        running=sum(podstate.is_running(pod) for pod in pods),
        succeeded=sum(podstate.succeeded(pod) for pod in pods),
        missing=tuple(index for index in range(gang.size) if index not in present),
        failure=min(failures, key=podstate.root_cause_order) if failures else None,
        config_error=config_errors[0] if config_errors else None,
        disruption=next((what for pod in pods if (what := podstate.disruption(pod))), ""),
        started=min(starts) if starts else None,
    )
