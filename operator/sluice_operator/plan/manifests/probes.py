"""Probes of the containers: what a kubelet asks to know whether one has started, does its work, or
should be killed.

Ready means at work, and status.roles[].ready counts it: a service serves, a trainer has joined the
rendezvous, an engine holds weights that may be used. For the last the worker beside it answers, who
hears it from the rendezvous; it stays true while an update goes on. Everything is asked over HTTP,
which every Kubernetes can (gRPC probes: from 1.24).

A pod whose container fails its liveness probe has failed, and its gang restarts. So where silence
may be work, nothing is killed: a trainer has no liveness probe, because its first step may compile
for long, and spec.progressDeadlineSeconds is the judge of hangs; an engine gets longer than any
pause for an update.
"""

from __future__ import annotations

import math
from typing import Any

from sluice.api import RLJob
from sluice.engines import engine_of

Probe = dict[str, Any]
START_SECONDS = 1800
ENGINE_START_SECONDS = 3600
ENGINE_PERIOD = 30


def probes(job: RLJob, container: str) -> dict[str, Probe]:
    """The probes of one of our containers."""
    if container == "engine":
        return _engine(job)
    ready = {"readinessProbe": _http("metrics", "/readyz", period=5, timeout=5, failures=3)}
    if container == "trainer":
        return ready
    return {
        "startupProbe": _http(
            "metrics", "/healthz", period=2, timeout=5, failures=START_SECONDS // 2
        ),
        **ready,
        "livenessProbe": _http("metrics", "/healthz", period=20, timeout=10, failures=6),
    }


def _engine(job: RLJob) -> dict[str, Probe]:
    health, silence = engine_of(job.spec).launch.health, job.spec.weight_sync.pause_seconds
    return {
        "startupProbe": _http(
            "http", health, period=5, timeout=5, failures=ENGINE_START_SECONDS // 5
        ),
        "readinessProbe": _http("http", health, period=10, timeout=10, failures=3),
        "livenessProbe": _http(
            "http",
            health,
            period=ENGINE_PERIOD,
            timeout=ENGINE_PERIOD,
            failures=math.ceil(silence / ENGINE_PERIOD),
        ),
    }


def _http(port: str, path: str, *, period: int, timeout: int, failures: int) -> Probe:
    return {
        "httpGet": {"port": port, "path": path},
        "periodSeconds": period,
        "timeoutSeconds": timeout,
        "failureThreshold": failures,
    }
