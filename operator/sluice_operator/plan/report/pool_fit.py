"""Why the engines of an RLEnginePool cannot serve a job, in a sentence that says what to do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sluice.api import RLJob
from sluice.api.groups.lora import ALL_LINEAR, Lora
from sluice.api.pool import RLEnginePoolSpec
from sluice.api.schema.paths import MarkedPath
from sluice.uri import local_path
from sluice_operator.plan.facts import names
from sluice_operator.plan.manifests import downloads
from sluice_operator.plan.manifests.volume_paths import relative


def absent(job: RLJob) -> str:
    """Return what to do if a cluster has no such pool."""
    pool, namespace = job.spec.rollout.pool, job.metadata.namespace
    return (
        f"rollout.pool: there is no RLEnginePool {pool} in the namespace {namespace}: create it, "
        "or name another one"
    )


def misfit(job: RLJob, pool: RLEnginePoolSpec) -> str:
    """Return why the engines of a pool cannot serve the job's adapter; empty if they can.

    Paths of a laptop must be resolved: `org/name` is a repository of the hub here.
    """
    model, lora, name = job.spec.model, job.spec.trainer.lora, job.spec.rollout.pool
    assert lora is not None
    start = f"rollout.pool: the RLEnginePool {name}"
    if _place(model.path, model.volume) != _place(pool.model.path, pool.model.volume):
        return (
            f"{start} serves the model {_text(pool.model.path, pool.model.volume)}, and spec.model "
            f"is {_text(model.path, model.volume)}: name a pool of that model"
        )
    if model.fp32_lm_head != pool.model.fp32_lm_head:
        value = str(pool.model.fp32_lm_head).lower()
        return (
            f"{start} computes logits with fp32LmHead: {value}: set spec.model.fp32LmHead: {value}"
        )
    if lora.stored_rank > pool.max_rank:
        twice = ", which initialise: pissa doubles" if lora.pissa else ""
        return (
            f"{start} takes adapters up to rank {pool.max_rank}, and trainer.lora.rank is "
            f"{lora.rank}{twice}: lower it, or raise maxRank of the pool"
        )
    if missing := _missing_layers(lora, pool):
        return (
            f"{start} has no memory for adapters of {', '.join(missing)}: add them to its "
            "targetModules, or leave them out of trainer.lora.targetModules"
        )
    if pool.replicas == 0:
        return f"{start} has no engines: set its replicas"
    return ""


def _missing_layers(lora: Lora, pool: RLEnginePoolSpec) -> list[str]:
    if ALL_LINEAR in pool.target_modules:
        return []
    trained = set(lora.target_modules) - set(lora.exclude_modules)
    return sorted(trained - set(pool.target_modules))


def _place(path: str, volume: dict[str, Any] | None) -> tuple[str, dict[str, Any] | None]:
    """Return a model's path and volume in a form that is equal for equal models."""
    if volume is None:
        return _named(path), None
    # Pods of one owner may only read the volume, those of another may also write.
    source = {
        kind: {key: value for key, value in fields.items() if key != "readOnly"}
        if isinstance(fields, dict)
        else fields
        for kind, fields in volume.items()
    }
    return relative(path, names.MODEL_DIR), source


def _named(path: str) -> str:
    """Return what a path without a volume names: a repository of the hub, a URI, or a path."""
    marked = MarkedPath("spec.model.path", "model", path)
    uri = downloads.uri_in_pod(marked, {})
    if uri is None:
        return local_path(path).rstrip("/")
    # What the hub gives if no revision is named.
    return str(replace(uri, revision=None) if uri.revision == "main" else uri)


def _text(path: str, volume: dict[str, Any] | None) -> str:
    return path if volume is None else f"{path} in the volume {volume}"
