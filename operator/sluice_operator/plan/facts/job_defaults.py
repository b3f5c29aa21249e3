"""Defaults that an administrator gives to all jobs of a cluster, where a job says nothing itself.

They are no part of a job's spec: a job's pods and claims are made as if its spec said them, and
what it was started with stays what its user wrote. Like images, they hold from the next attempt on
where they change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from sluice.api import RLJob
from sluice.api.groups.lifecycle import PodTemplateOverride
from sluice.api.groups.resources import Resources
from sluice.api.groups.storage import KernelCache
from sluice.api.job import RLJobSpec
from sluice.api.schema.base import FreeForm, Model
from sluice.api.schema.mutability import differences
from sluice_operator.plan.facts.merge import merge

Tolerations = Annotated[list[FreeForm], Field(max_length=32)]


class PodDefaults(Model):
    """Where pods run. Of a role, over that of all roles: labels by name, tolerations besides, the
    class instead.
    """

    node_selector: dict[str, str] = Field(default_factory=dict)
    tolerations: Tolerations = Field(default_factory=list)
    priority_class_name: str = ""


class TrainerDefaults(PodDefaults):
    resources: Resources = Field(default_factory=Resources)


class RolloutDefaults(TrainerDefaults):
    worker_resources: Resources = Field(default_factory=Resources)


class JobDefaults(PodDefaults):
    """storage_class_name: of the buffer's and the checkpoints' claim. otlp_endpoint: of traces.
    kernel_cache: for jobs on GPUs that name none. The pods' fields are for all roles.
    """

    storage_class_name: str = ""
    otlp_endpoint: str = ""
    kernel_cache: KernelCache | None = None
    image_pull_secrets: Annotated[list[FreeForm], Field(max_length=16)] = Field(
        default_factory=list
    )
    trainer: TrainerDefaults = Field(default_factory=TrainerDefaults)
    rollout: RolloutDefaults = Field(default_factory=RolloutDefaults)
    buffer: PodDefaults = Field(default_factory=PodDefaults)
    rendezvous: PodDefaults = Field(default_factory=PodDefaults)


NO_DEFAULTS = JobDefaults()


def with_job_defaults(job: RLJob, defaults: JobDefaults) -> RLJob:
    """The job as if its spec said what the defaults say and it does not."""
    if defaults == NO_DEFAULTS:
        return job
    spec, mine = job.spec, defaults
    trainer: dict[str, Any] = {
        "template": merge(_template(mine, mine.trainer, "trainer"), spec.trainer.template),
        "resources": _resources(mine.trainer.resources, spec.trainer.resources),
    }
    rollout: dict[str, Any] = {
        "template": merge(_template(mine, mine.rollout, "worker"), spec.rollout.template),
        "resources": _resources(mine.rollout.resources, spec.rollout.resources),
        "worker_resources": _resources(
            mine.rollout.worker_resources, spec.rollout.worker_resources
        ),
    }
    buffer: dict[str, Any] = {
        "template": merge(_template(mine, mine.buffer, "buffer"), spec.buffer.template)
    }
    groups: dict[str, Any] = {
        "trainer": _with(spec.trainer, trainer),
        "rollout": _with(spec.rollout, rollout),
        "buffer": _with(spec.buffer, buffer | _storage(mine, spec)),
        "checkpoint": _with(spec.checkpoint, _checkpoint(mine, spec)),
        "pod_template_overrides": _rendezvous(mine) + spec.pod_template_overrides,
    }
    if spec.on_gpu and spec.kernel_cache is None:
        groups["kernel_cache"] = mine.kernel_cache
    return job.model_copy(update={"spec": spec.model_copy(update=groups)})


def defaulted_fields(job: RLJob, defaults: JobDefaults) -> list[str]:
    """The fields that the defaults fill in for this job:
    `spec.buffer.storage.storageClassName: fast`.
    """
    before, after = (_plain(each) for each in (job, with_job_defaults(job, defaults)))
    return [_new(each) for each in differences(before, after)]


def _plain(job: RLJob) -> dict[str, Any]:
    return job.spec.model_dump(mode="json", by_alias=True)


def _new(difference: str) -> str:
    """`spec.x: None -> 'fast'` as `spec.x: 'fast'`."""
    field, _, values = difference.partition(": ")
    return f"{field}: {values.partition(' -> ')[2]}"


def _template(defaults: JobDefaults, role: PodDefaults, container: str) -> dict[str, Any]:
    """A pod template, to go under that of the job. container: that in which our code runs."""
    tracing = {"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": defaults.otlp_endpoint}
    spec = {
        "nodeSelector": {**defaults.node_selector, **role.node_selector},
        "tolerations": [*defaults.tolerations, *role.tolerations],
        "priorityClassName": role.priority_class_name or defaults.priority_class_name,
        "imagePullSecrets": defaults.image_pull_secrets,
        "containers": [{"name": container, "env": [tracing]}] if defaults.otlp_endpoint else [],
    }
    fields = {name: value for name, value in spec.items() if value}
    return {"spec": fields} if fields else {}


def _rendezvous(defaults: JobDefaults) -> list[PodTemplateOverride]:
    """It has no template of its own in a spec; the first of the overrides gives way to
    all others.
    """
    template = _template(defaults, defaults.rendezvous, "rendezvous")
    return [PodTemplateOverride(roles=["rendezvous"], template=template)] if template else []


def _resources(default: Resources, explicit: Resources) -> Resources:
    """Default resources, without those that the job names as a request or a limit: a default
    request may be above its limit.
    """
    named = explicit.requests.keys() | explicit.limits.keys()

    def under(of_default: Mapping[str, Any], of_job: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **{name: amount for name, amount in of_default.items() if name not in named},
            **of_job,
        }

    return Resources(
        requests=under(default.requests, explicit.requests),
        limits=under(default.limits, explicit.limits),
    )


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
    """The group, changed only in what differs: what was not set stays unset."""
    return group.model_copy(
        update={name: value for name, value in update.items() if value != getattr(group, name)}
    )
