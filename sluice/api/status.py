"""RLJob.status: conditions as Kubernetes has them, and a summary for people."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sluice.api.schema.base import Model, Unique

ConditionType = Literal[
    "Admitted", "ModelFetched", "Running", "WeightsInSync", "Suspended", "Succeeded", "Failed"
]
# States of a job that does not train any more, unless it is made longer.
FINISHED = ("Succeeded", "Failed")
ROLES = ("rendezvous", "buffer", "rollout", "trainer")
RoleName = Literal["rendezvous", "buffer", "rollout", "trainer"]
# RFC 3339 in UTC, with seconds: 2026-01-31T12:00:00Z.
Time = Annotated[str, Field(json_schema_extra={"format": "date-time"})]


class AnyCondition(Model):
    """Condition, as Kubernetes' metav1.Condition."""

    type: str = Field(description="Name of the condition.")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether the condition holds.")
    reason: Annotated[
        str, Field(pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$", max_length=1024)
    ] = Field(description="One word, for programs.")
    message: Annotated[str, Field(max_length=32768)] = Field(
        "", description="Sentence, for people."
    )
    last_transition_time: Time = Field(description="When `status` last changed.")
    observed_generation: int = Field(
        0, description="Generation of the object that the condition is about."
    )


class Condition(AnyCondition):
    """Condition of an RLJob."""

    type: ConditionType = Field(description="Name of the condition.")


class GangStatus(Model):
    """Gang: pods that start and end together."""

    replica: int = Field(description="Number of the engine. 0 for other roles.")
    attempt: int = Field(
        description="Number of the current attempt, from 1. Pods of older attempts are "
        "refused everywhere."
    )
    restarts: int = Field(
        0,
        description="Number of failures of its own, which count for maxRestarts and "
        "back-off. For an engine it is 0 again once the engine has worked, or the cluster "
        "has disrupted it.",
    )
    last_restart_time: Time | None = Field(
        None, description="When the current attempt was started after a failure."
    )
    ready_time: Time | None = Field(
        None,
        description="Since when the current attempt of an engine that failed before has been "
        "ready.",
    )
    retry_time: Time | None = Field(None, description="Earliest time of the next attempt.")
    seen: Annotated[list[int], Field(max_length=4096)] = Field(
        default_factory=list,
        description="Indices of pods that existed, while the pods of an attempt are being created.",
    )


class RoleStatus(Model):
    """Pods of one role."""

    name: RoleName = Field(description="Name of the role.")
    desired: int = Field(0, description="Number of pods that there should be.")
    ready: int = Field(0, description="Number of pods that are ready.")
    attempt: int = Field(0, description="Highest attempt of the role's gangs.")
    restarts: int = Field(
        0,
        description="Number of restarts after failures, of all gangs of the role since the start.",
    )
    gangs: Annotated[list[GangStatus], Field(max_length=4096), Unique("replica")] = Field(
        default_factory=list, description="Gangs of the role, by replica."
    )


class LastFailure(Model):
    """Pod that failed last, and its last log lines."""

    role: RoleName = Field(description="Role of the pod.")
    pod: str = Field(description="Name of the pod.")
    container: str = Field("", description="Container that failed.")
    reason: str = Field("", description="Reason, such as OOMKilled, Error, Evicted.")
    exit_code: int | None = Field(None, description="Exit code of the container.")
    message: Annotated[str, Field(max_length=32768)] = Field(
        "", description="Last log lines of the container."
    )
    time: Time = Field(description="When the operator saw the failure.")
    times: int = Field(
        1, description="Number of failures in a row of such a container with the same cause."
    )


class PodGroupStatus(Model):
    """Pods that a queue admits together.

    They are those of the trainer and the first engines and, with Kueue, of the buffer and the
    rendezvous.
    """

    number: int = Field(
        1,
        description="Number of the group, from 1. A job that was suspended gets another group.",
    )
    replicas: int = Field(
        0,
        description="Number of engines in the group, those with the lowest numbers. Each "
        "other engine is admitted separately.",
    )
    services: bool = Field(
        False, description="Whether the buffer and the rendezvous are in the group, as with Kueue."
    )


class GoodputStatus(Model):
    """Use of the job's GPU time. On CPUs a pod counts as one device."""

    ratio: str = Field(
        description="Fraction of device time that trained, or generated samples that were "
        "trained on."
    )
    seconds: dict[str, int] = Field(
        default_factory=dict,
        description="Device seconds: trained, generated, thrown_away, waited, synchronised, saved, "
        "started, restarted.",
    )
    states: dict[str, int] = Field(
        default_factory=dict,
        description="The same seconds by what pods did, as `role/state`.",
    )
    earlier: dict[str, int] = Field(
        default_factory=dict,
        description="Seconds of them that were counted before the rendezvous service last "
        "restarted.",
    )


class RLJobStatus(Model):
    """Job as the operator has observed it. Only the operator writes it."""

    observed_generation: int | None = Field(
        None, description="Newest generation of the object that this status reflects."
    )
    conditions: Annotated[list[Condition], Field(max_length=16), Unique("type")] = Field(
        default_factory=list,
        description="Admitted, ModelFetched, Running, WeightsInSync, Suspended, Succeeded, Failed.",
    )
    state: str = Field("", description="One word for people, derived from the conditions.")
    reason: str = Field("", description="Reason of the condition that `state` is derived from.")
    step: int | None = Field(None, description="Number of trained steps.")
    total_steps: int | None = Field(
        None,
        description="Number of steps of the whole job. With epochs: known after the prompts "
        "are counted.",
    )
    reward: str | None = Field(None, description="Mean reward of the samples of the last step.")
    loss: str | None = Field(
        None, description="Loss of the last step, if its samples have no rewards."
    )
    weight_version: int | None = Field(
        None, description="Newest version of the weights that the engines serve."
    )
    policy_lag: str | None = Field(
        None, description="Mean number of steps that the weights of the samples were behind."
    )
    restarts: int = Field(0, description="Number of restarts after failures, of all roles.")
    goodput: GoodputStatus | None = Field(
        None, description="Use of the job's GPU time, updated with each step."
    )
    roles: Annotated[list[RoleStatus], Field(max_length=8), Unique("name")] = Field(
        default_factory=list, description="Pods, by role."
    )
    last_failure: LastFailure | None = Field(
        None, description="Last failure of a pod, kept after the pod is gone."
    )
    rollout_replicas: int | None = Field(
        None, description="Number of engines that there should be, which /scale shows."
    )
    rollout_selector: str | None = Field(
        None,
        description="Label selector of the first pod of each engine, for autoscalers.",
    )
    checkpoint_claim: str | None = Field(
        None,
        description="Name of the PersistentVolumeClaim with the job's checkpoints, if the "
        "operator created it.",
    )
    pod_group: PodGroupStatus | None = Field(
        None, description="Pods that a queue admits together, if the job has a podGroupPolicy."
    )
    queued_time: Time | None = Field(None, description="Since when a queue has held the job.")
    start_time: Time | None = Field(None, description="When the job was admitted.")
    completion_time: Time | None = Field(None, description="When it succeeded or failed.")
    last_progress_time: Time | None = Field(None, description="When the step last changed.")

    def condition(self, type_: ConditionType) -> Condition | None:
        return next((c for c in self.conditions if c.type == type_), None)

    def gang(self, role: RoleName, replica: int) -> GangStatus | None:
        """Return the gang of a role with this number, or None before it was started."""
        status = next((entry for entry in self.roles if entry.name == role), None)
        gangs = status.gangs if status else ()
        return next((gang for gang in gangs if gang.replica == replica), None)

    def is_true(self, type_: ConditionType) -> bool:
        condition = self.condition(type_)
        return condition is not None and condition.status == "True"
