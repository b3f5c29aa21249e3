"""Pools, their pods and what a cluster reports of them, for tests of plan/pool.py."""

from __future__ import annotations

from typing import Any

from sluice.api import RLEnginePool
from sluice_operator.plan import Images, KubeObject
from sluice_operator.plan.pool import PoolObserved, PoolPlan, plan_pool
from tests.unit.operator.world import START


def make_pool(**spec: Any) -> RLEnginePool:
    """Return a pool of two engines on CPUs."""
    fields = {"model": {"path": "/models/tiny"}, "gpusPerReplica": 0, "replicas": 2} | spec
    metadata = {"name": "shared", "uid": "1234"}
    return RLEnginePool.model_validate({"metadata": metadata, "spec": fields})


def engine_pod(number: int = 0, *, ready: bool = True, **status: Any) -> KubeObject:
    """Return a pod of the pool's StatefulSet."""
    labels = {"sluice.dev/pool": "shared", "sluice.dev/role": "engine"}
    container = {"name": "engine", "state": {"running": {}}}
    return {
        "kind": "Pod",
        "metadata": {"name": f"shared-engine-{number}", "uid": f"pod-{number}", "labels": labels},
        "spec": {"nodeName": "node"},
        "status": {
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": str(ready)}],
            "containerStatuses": [container],
            **status,
        },
    }


def ended(code: int, message: str = "", **state: Any) -> dict[str, Any]:
    """Return the status of a pod whose engine has ended, and waits for its next start."""
    terminated = {"exitCode": code, "message": message, "finishedAt": "2026-01-31T12:00:00Z"}
    container = {
        "name": "engine",
        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
        "lastState": {"terminated": terminated | state},
    }
    return {"containerStatuses": [container]}


def planned(pool: RLEnginePool, observed: PoolObserved | None = None) -> PoolPlan:
    return plan_pool(pool, observed or PoolObserved(), START, Images())


def after(pool: RLEnginePool, *pods: KubeObject, **fields: Any) -> PoolObserved:
    """Return what is observed once the objects of the pool were created."""
    created = {
        (manifest["kind"], manifest["metadata"]["name"]): manifest
        for manifest in planned(pool).create
    }
    return PoolObserved(pods, created, **fields)


def with_status(pool: RLEnginePool, plan: PoolPlan) -> RLEnginePool:
    """Return the pool with the status of a plan."""
    return pool.model_copy(update={"status": plan.status})


def changed(pool: RLEnginePool, **spec: Any) -> RLEnginePool:
    """Return the pool with a changed spec, of the next generation."""
    other = make_pool(**spec)
    metadata = pool.metadata.model_copy(update={"generation": pool.metadata.generation + 1})
    return pool.model_copy(update={"spec": other.spec, "metadata": metadata})
