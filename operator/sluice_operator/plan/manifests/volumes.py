"""Volumes of the roles and their mounts.

The run directory holds metrics and samples, and the checkpoints in a subdirectory. It is on a claim
that the operator makes (on a laptop: in the directory of `sluice run`), or in the pod with
`checkpoint.ephemeral`. A volume that the spec names may be shared by jobs, so each job has its
directories there. With `checkpoint.to` checkpoints are in an object store: the pods of the trainer
share no volume, and only the first one, which writes the run directory, has the claim.
"""

from __future__ import annotations

from typing import Any

from sluice.api import RLJob
from sluice.api.groups.data import MADE_ROWS
from sluice.engines import engine_of
from sluice.engines.protocol import Plugin
from sluice_operator.plan.facts import names
from sluice_operator.plan.manifests import downloads
from sluice_operator.plan.manifests.volume_paths import DIRECTORIES

SHARED_MEMORY: dict[str, Any] = {"emptyDir": {"medium": "Memory"}}
_SERVERS = ("buffer", "rendezvous")


def volumes(job: RLJob, role: str, index: int = 0) -> list[dict[str, Any]]:
    """Return the volumes of a role's pod. index: its number in its gang."""
    entries = entries_of(_sources(job, role, index))
    if _has_engine(job, role) and (plugin := engine_of(job.spec).launch.plugin(job.spec)):
        entries.append({"name": plugin.name, "emptyDir": {}})
    return [*entries, _tls(job, role)] if job.spec.tls.enabled else entries


def mounts(job: RLJob, role: str, index: int = 0) -> list[dict[str, Any]]:
    """Return the mounts of a role's container. index: the number of its pod in its gang."""
    sources = _sources(job, role, index)
    return [
        {"name": holder(sources, name)} | mount
        for name in sources
        for mount in _mounts(job, role, name)
    ]


def downloads_holder(job: RLJob, role: str) -> str | None:
    """Return the name of the pod's volume for what is fetched; None if it fetches nothing."""
    sources = _sources(job, role)
    return holder(sources, downloads.VOLUME) if downloads.VOLUME in sources else None


def rows_mount() -> dict[str, Any]:
    """Mount the directory of the buffer's storage for prompt files that the job's code makes."""
    return {"name": "storage", "mountPath": names.ROWS_DIR, "subPath": MADE_ROWS}


def plugin_mount(plugin: Plugin) -> dict[str, Any]:
    """Mount the directory with sluice's plugin, which is on the engine's Python path."""
    return {"name": plugin.name, "mountPath": plugin.directory}


def tls_mount(job: RLJob) -> list[dict[str, Any]]:
    """Mount the TLS files, for containers that use gRPC."""
    return (
        [{"name": "tls", "mountPath": names.TLS_DIR, "readOnly": True}]
        if job.spec.tls.enabled
        else []
    )


def _tls(job: RLJob, role: str) -> dict[str, Any]:
    # Only servers get their key, because rollout and trainer pods run the user's code.
    keys = (
        (names.TLS_CA, names.TLS_CERTIFICATE, names.TLS_KEY)
        if role in _SERVERS
        else (names.TLS_CA,)
    )
    items = [{"key": key, "path": key} for key in keys]
    return {"name": "tls", "secret": {"secretName": names.tls_name(job), "items": items}}


def _sources(job: RLJob, role: str, index: int = 0) -> dict[str, dict[str, Any]]:
    """Return the source of each volume, by name."""
    sources: dict[str, dict[str, Any]] = {"config": {"configMap": {"name": names.config_name(job)}}}
    if role == "rendezvous":
        return sources
    named = {"model": job.spec.model.volume, "data": job.spec.data.volume}
    sources |= {name: source for name, source in named.items() if source is not None}
    if downloads.sources(job, role):
        sources[downloads.VOLUME] = downloads.volume(job)
    if role == "buffer":
        sources["storage"] = {"persistentVolumeClaim": {"claimName": names.storage_name(job)}}
        return sources
    if role == "rollout" and not _has_engine(job, role):
        return sources
    if job.spec.kernel_cache is not None:
        sources["cache"] = job.spec.kernel_cache.volume
    # NCCL and engines share memory between processes; the default of 64 MB is too small for either.
    sources["dshm"] = SHARED_MEMORY
    # The trainer's last version, for differences to it; the version that the worker has fetched.
    if job.spec.weight_sync.store is not None:
        sources["weights"] = {"emptyDir": {}}
    # If weights travel over the disk, the trainer writes them to the run directory, and engines
    # read them at the same path.
    if role == "trainer" or job.spec.transport(one_machine=False) == "disk":
        sources |= _run_sources(job, role, index)
    return sources


def _has_engine(job: RLJob, role: str) -> bool:
    return role == "rollout" and not job.spec.uses_pool


def _run_sources(job: RLJob, role: str, index: int) -> dict[str, dict[str, Any]]:
    volume = job.spec.checkpoint.volume
    if job.spec.separate_checkpoints:
        claim = {"persistentVolumeClaim": {"claimName": names.checkpoint_name(job)}}
        kept = volume or ({"emptyDir": {}} if job.spec.checkpoint.ephemeral else claim)
        return {"run": kept if index == 0 else {"emptyDir": {}}, "checkpoint": {"emptyDir": {}}}
    if volume is not None:
        return {"checkpoint": volume} | ({"run": volume} if role == "trainer" else {})
    if job.spec.checkpoint.ephemeral:
        return {"run": {"emptyDir": {}}}
    return {"run": {"persistentVolumeClaim": {"claimName": names.checkpoint_name(job)}}}


def entries_of(sources: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the volumes of a pod with these sources, each claim once."""
    return [
        {"name": name, **_shared(sources, name)}
        for name in sources
        if holder(sources, name) == name
    ]


def holder(sources: dict[str, dict[str, Any]], name: str) -> str:
    """Return the first volume with the same claim.

    It is used for all of them, because a kubelet waits for ever for a pod that names a claim twice.
    """
    claim = _claim(sources[name])
    return (
        name
        if claim is None
        else next(other for other in sources if _claim(sources[other]) == claim)
    )


def _shared(sources: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    """Return the volume's source, which is writable if one of the volumes with its claim is."""
    same = [
        source for source in sources.values() if _claim(source) == _claim(sources[name]) is not None
    ]
    return next(
        (source for source in same if not source["persistentVolumeClaim"].get("readOnly")),
        sources[name],
    )


def _claim(source: dict[str, Any]) -> str | None:
    claim: str | None = source.get("persistentVolumeClaim", {}).get("claimName")
    return claim


def _mounts(job: RLJob, role: str, name: str) -> list[dict[str, Any]]:
    if name in DIRECTORIES:
        return [{"mountPath": DIRECTORIES[name], "readOnly": True}]
    if name in ("checkpoint", "run"):
        return _run_mounts(job, role, name)
    if name == "cache":
        return [{"mountPath": names.CACHE_DIR, "subPath": role}]
    if name == downloads.VOLUME:
        return [{"mountPath": names.DOWNLOADS_DIR, "readOnly": True}]
    paths = {
        "config": names.CONFIG_DIR,
        "storage": names.STORAGE_DIR,
        "dshm": "/dev/shm",  # noqa: S108
        "weights": names.WEIGHTS_DIR,
    }
    return [{"mountPath": paths[name]}]


def _run_mounts(job: RLJob, role: str, name: str) -> list[dict[str, Any]]:
    job_name = job.metadata.name
    if job.spec.separate_checkpoints:
        if name == "checkpoint":
            return [{"mountPath": names.CHECKPOINT_DIR}]
        place = {"subPath": f"{job_name}/run"} if job.spec.checkpoint.volume else {}
        return [{"mountPath": names.RUN_DIR} | place]
    if job.spec.checkpoint.volume is not None:
        checkpoint = {"mountPath": names.CHECKPOINT_DIR, "subPath": job_name}
        return [
            checkpoint
            if name == "checkpoint"
            else {"mountPath": names.RUN_DIR, "subPath": f"{job_name}/run"}
        ]
    checkpoint = {"mountPath": names.CHECKPOINT_DIR, "subPath": names.CHECKPOINTS}
    return [{"mountPath": names.RUN_DIR}, checkpoint] if role == "trainer" else [checkpoint]
