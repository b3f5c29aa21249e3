"""Defaults that an administrator sets for all jobs of a cluster.

A default applies to fields that a job does not set. It does not become part of the job's spec: pods
and claims are made as if the spec had it, but the recorded manifest stays what the user wrote. Like
a new image, a changed default takes effect with the next attempt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from sluice.api import RLEnginePool, RLJob
from sluice.api.groups.lifecycle import PodTemplateOverride
from sluice.api.groups.resources import Resources
from sluice.api.groups.storage import Downloads, KernelCache
from sluice.api.job import RLJobSpec
from sluice.api.schema.base import FreeForm, Model
from sluice.api.schema.mutability import differences
from sluice_operator.plan.facts.merge import merge

Tolerations = Annotated[list[FreeForm], Field(max_length=32)]


class PodDefaults(Model):
    """Placement of pods, for all roles or for one.

    Those of a role are merged over those of all roles: node labels by name, tolerations are added,
    and the priority class is replaced.
    """

    node_selector: dict[str, str] = Field(default_factory=dict)
    tolerations: Tolerations = Field(default_factory=list)
    priority_class_name: str = ""


class TrainerDefaults(PodDefaults):
    resources: Resources = Field(default_factory=Resources)


class RolloutDefaults(TrainerDefaults):
    worker_resources: Resources = Field(default_factory=Resources)


class JobDefaults(PodDefaults):
    """All defaults of a cluster; the inherited fields are those of all roles.

    storage_class_name: for the claims of buffer and checkpoints. otlp_endpoint: the receiver of
    traces. kernel_cache: for jobs on GPUs that do not set one. downloads: for jobs and pools, each
    field for itself.
    """

    storage_class_name: str = ""
    otlp_endpoint: str = ""
    kernel_cache: KernelCache | None = None
    downloads: Downloads | None = None
    image_pull_secrets: Annotated[list[FreeForm], Field(max_length=16)] = Field(
        default_factory=list
    )
    trainer: TrainerDefaults = Field(default_factory=TrainerDefaults)
    rollout: RolloutDefaults = Field(default_factory=RolloutDefaults)
    buffer: PodDefaults = Field(default_factory=PodDefaults)
    rendezvous: PodDefaults = Field(default_factory=PodDefaults)


NO_DEFAULTS = JobDefaults()


def with_job_defaults(job: RLJob, defaults: JobDefaults) -> RLJob:
    """Return the job as if its spec set the defaults that it leaves open."""
    if defaults == NO_DEFAULTS:
        return job
    spec = job.spec
    trainer: dict[str, Any] = {
        "template": merge(_template(defaults, defaults.trainer, "trainer"), spec.trainer.template),
        "resources": with_default_amounts(defaults.trainer.resources, spec.trainer.resources),
    }
    rollout: dict[str, Any] = {
        "template": merge(_template(defaults, defaults.rollout, "worker"), spec.rollout.template),
        "resources": with_default_amounts(defaults.rollout.resources, spec.rollout.resources),
        "worker_resources": with_default_amounts(
            defaults.rollout.worker_resources, spec.rollout.worker_resources
        ),
    }
    buffer: dict[str, Any] = {
        "template": merge(_template(defaults, defaults.buffer, "buffer"), spec.buffer.template)
    }
    groups: dict[str, Any] = {
        "trainer": _with(spec.trainer, trainer),
        "rollout": _with(spec.rollout, rollout),
        "buffer": _with(spec.buffer, buffer | _storage(defaults, spec)),
        "checkpoint": _with(spec.checkpoint, _checkpoint(defaults, spec)),
        "pod_template_overrides": _rendezvous(defaults) + spec.pod_template_overrides,
    }
    groups["downloads"] = _downloads(defaults, spec.downloads)
    if spec.on_gpu and spec.kernel_cache is None:
        groups["kernel_cache"] = defaults.kernel_cache
    return job.model_copy(update={"spec": spec.model_copy(update=groups)})


def with_pool_defaults(pool: RLEnginePool, defaults: JobDefaults) -> RLEnginePool:
    """Return the pool as if its spec set the downloads that it leaves open."""
    downloads = _downloads(defaults, pool.spec.downloads)
    return pool.model_copy(update={"spec": _with(pool.spec, {"downloads": downloads})})


def _downloads(defaults: JobDefaults, explicit: Downloads | None) -> Downloads | None:
    if explicit is None or defaults.downloads is None:
        return explicit or defaults.downloads
    return Downloads(
        volume=explicit.volume or defaults.downloads.volume,
        secret_ref=explicit.secret_ref or defaults.downloads.secret_ref,
    )


def defaulted_fields(job: RLJob, defaults: JobDefaults) -> list[str]:
    """Return the fields that the defaults fill in for this job.

    For example `spec.buffer.storage.storageClassName: 'fast'`.
    """
    before, after = _plain(job), _plain(with_job_defaults(job, defaults))
    return [_new_value(difference) for difference in differences(before, after)]


def _plain(job: RLJob) -> dict[str, Any]:
    return job.spec.model_dump(mode="json", by_alias=True)


def _new_value(difference: str) -> str:
    """Turn `spec.x: None -> 'fast'` into `spec.x: 'fast'`."""
    field, _, values = difference.partition(": ")
    return f"{field}: {values.partition(' -> ')[2]}"


def _template(defaults: JobDefaults, role: PodDefaults, container: str) -> dict[str, Any]:
    """Return the defaults as a pod template, over which the job's template is merged.

    container: name of the container that runs sluice's code.
    """
    placement = pod_defaults(defaults, role)
    if not defaults.otlp_endpoint:
        return placement
    tracing = {"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": defaults.otlp_endpoint}
    spec = placement.get("spec", {}) | {"containers": [{"name": container, "env": [tracing]}]}
    return {"spec": spec}


def pod_defaults(defaults: JobDefaults, role: PodDefaults) -> dict[str, Any]:
    """Return the defaults for the placement of a role's pods as a pod template."""
    spec = {
        "nodeSelector": {**defaults.node_selector, **role.node_selector},
        "tolerations": [*defaults.tolerations, *role.tolerations],
        "priorityClassName": role.priority_class_name or defaults.priority_class_name,
        "imagePullSecrets": defaults.image_pull_secrets,
    }
    fields = {name: value for name, value in spec.items() if value}
    return {"spec": fields} if fields else {}


def with_default_amounts(default: Resources, explicit: Resources) -> Resources:
    """Merge resources over the defaults.

    A resource that is named as a request or a limit gets no default at all: a default request may
    be above the limit.
    """
    named = explicit.requests.keys() | explicit.limits.keys()

    def merged(defaults: Mapping[str, Any], amounts: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **{name: amount for name, amount in defaults.items() if name not in named},
            **amounts,
        }

    return Resources(
        requests=merged(default.requests, explicit.requests),
        limits=merged(default.limits, explicit.limits),
    )


def _rendezvous(defaults: JobDefaults) -> list[PodTemplateOverride]:
    """Return the defaults of the rendezvous as a pod template override.

    A spec has no template for the rendezvous. Put first, this override is merged under all others.
    """
    template = _template(defaults, defaults.rendezvous, "rendezvous")
    return [PodTemplateOverride(roles=["rendezvous"], template=template)] if template else []


def _storage(defaults: JobDefaults, spec: RLJobSpec) -> dict[str, Any]:
    if not defaults.storage_class_name or spec.buffer.storage.storage_class_name is not None:
        return {}
    return {
        "storage": _with(spec.buffer.storage, {"storage_class_name": defaults.storage_class_name})
    }


def _checkpoint(defaults: JobDefaults, spec: RLJobSpec) -> dict[str, Any]:
    claim = spec.checkpoint.claim
    if not defaults.storage_class_name or claim is None or claim.storage_class_name is not None:
        return {}
    return {"storage": _with(claim, {"storage_class_name": defaults.storage_class_name})}


def _with(group: Any, update: dict[str, Any]) -> Any:
    """Return the group with the values that differ, so that other fields stay unset."""
    return group.model_copy(
        update={name: value for name, value in update.items() if value != getattr(group, name)}
    )
