"""Volumes of the roles, and where they are mounted.

Without a volume in the spec checkpoints and metrics live in the pod (on a laptop: in the run directory).
"""

from __future__ import annotations

from typing import Any

from sluice.api import RLJob
from sluice_operator.plan import names

_READ_ONLY = {"model": names.MODEL_DIR, "data": names.DATA_DIR}


def volumes(job: RLJob, role: str) -> list[dict[str, Any]]:
    return [{"name": name, **source} for name, source in _sources(job, role).items()]


def mounts(job: RLJob, role: str) -> list[dict[str, Any]]:
    return [_mount(job, name) for name in _sources(job, role)]


def _sources(job: RLJob, role: str) -> dict[str, dict[str, Any]]:
    """Volume name -> source."""
    found: dict[str, dict[str, Any]] = {"config": {"configMap": {"name": names.config_name(job)}}}
    if role == "rendezvous":
        return found
    if job.spec.model.volume is not None:
        found["model"] = job.spec.model.volume
    if job.spec.data.volume is not None:
        found["data"] = job.spec.data.volume
    if role == "buffer":
        found["storage"] = {"persistentVolumeClaim": {"claimName": names.storage_name(job)}}
        return found
    # NCCL and SGLang share memory between processes; the default of 64 MB is too small for either.
    found["dshm"] = {"emptyDir": {"medium": "Memory"}}
    checkpoint = job.spec.checkpoint.volume or {"emptyDir": {}}
    if role == "trainer":
        found |= {"checkpoint": checkpoint, "run": checkpoint}
    elif job.spec.weight_sync.transport == "disk":
        found["checkpoint"] = checkpoint  # the trainer leaves the weights there, at the same path
    return found


def _mount(job: RLJob, name: str) -> dict[str, Any]:
    if name in _READ_ONLY:
        return {"name": name, "mountPath": _READ_ONLY[name], "readOnly": True}
    if name in ("checkpoint", "run"):
        path = names.CHECKPOINT_DIR if name == "checkpoint" else names.RUN_DIR
        mount: dict[str, Any] = {"name": name, "mountPath": path}
        if job.spec.checkpoint.volume is not None:  # several jobs may share one volume
            mount["subPath"] = job.metadata.name if name == "checkpoint" else f"{job.metadata.name}/run"
        return mount
    paths = {"config": names.CONFIG_DIR, "storage": names.STORAGE_DIR, "dshm": "/dev/shm"}  # noqa: S108
    return {"name": name, "mountPath": paths[name]}
