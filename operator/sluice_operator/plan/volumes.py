"""Volumes of the roles, and where they are mounted.

Without a volume in the spec checkpoints and metrics live in the pod (on a laptop: in the run directory).
"""

from __future__ import annotations

from typing import Any

from sluice.api import RLJob
from sluice.api.data import MADE_ROWS
from sluice_operator.plan import names

_READ_ONLY = {"model": names.MODEL_DIR, "data": names.DATA_DIR}


_SERVERS = ("buffer", "rendezvous")


def volumes(job: RLJob, role: str) -> list[dict[str, Any]]:
    sources = _sources(job, role)
    found = [{"name": name, **_shared(sources, name)} for name in sources if _holder(sources, name) == name]
    if role == "rollout" and job.spec.weight_sync.engine_plugin:
        found.append({"name": "sglang", "emptyDir": {}})
    return [*found, _tls(job, role)] if job.spec.tls.enabled else found


def mounts(job: RLJob, role: str) -> list[dict[str, Any]]:
    sources = _sources(job, role)
    return [_mount(job, name) | {"name": _holder(sources, name)} for name in sources]


def rows_mount() -> dict[str, Any]:
    """Where the buffer's storage has the files that the job's own code makes."""
    return {"name": "storage", "mountPath": names.ROWS_DIR, "subPath": MADE_ROWS}


def sglang_mount() -> dict[str, Any]:
    """Where an init container leaves what the engine adds to its Python path."""
    return {"name": "sglang", "mountPath": names.SGLANG_DIR}


def tls_mount(job: RLJob) -> list[dict[str, Any]]:
    """For the containers that speak gRPC."""
    return [{"name": "tls", "mountPath": names.TLS_DIR, "readOnly": True}] if job.spec.tls.enabled else []


def _tls(job: RLJob, role: str) -> dict[str, Any]:
    """The servers' key only where servers are: rollout and trainer pods run the user's code."""
    keys = (names.TLS_CA, names.TLS_CERTIFICATE, names.TLS_KEY) if role in _SERVERS else (names.TLS_CA,)
    items = [{"key": key, "path": key} for key in keys]
    return {"name": "tls", "secret": {"secretName": names.tls_name(job), "items": items}}


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
    elif job.spec.transport(one_machine=False) == "disk":
        found["checkpoint"] = checkpoint  # the trainer leaves the weights there, at the same path
    return found


def _holder(sources: dict[str, dict[str, Any]], name: str) -> str:
    """The volume that stands for this one: kubelet waits for ever on a pod whose volumes name a claim twice."""
    claim = _claim(sources[name])
    return name if claim is None else next(other for other in sources if _claim(sources[other]) == claim)


def _shared(sources: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    """The volume's source; one that stands for several is as writable as any of them needs it."""
    same = [source for source in sources.values() if _claim(source) == _claim(sources[name]) is not None]
    return next((source for source in same if not source["persistentVolumeClaim"].get("readOnly")), sources[name])


def _claim(source: dict[str, Any]) -> str | None:
    claim: str | None = source.get("persistentVolumeClaim", {}).get("claimName")
    return claim


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
