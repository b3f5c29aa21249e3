"""RLJob.status: conditions in Kubernetes' sense, and what people want to see at a glance."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sluice.api.schema.base import Model, Unique

ConditionType = Literal["Admitted", "Running", "WeightsInSync", "Suspended", "Succeeded", "Failed"]
FINISHED = ("Succeeded", "Failed")
"""States of a job that trains no more, unless it is made longer."""
ROLES = ("rendezvous", "buffer", "rollout", "trainer")
RoleName = Literal["rendezvous", "buffer", "rollout", "trainer"]
Time = Annotated[str, Field(json_schema_extra={"format": "date-time"})]
"""RFC 3339 in UTC, with seconds: 2026-01-31T12:00:00Z."""


class Condition(Model):
    """As Kubernetes' metav1.Condition."""

    type: ConditionType = Field(description="What is or is not the case.")
    status: Literal["True", "False", "Unknown"] = Field(description="Whether it is.")
    reason: Annotated[
        str, Field(pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$", max_length=1024)
    ] = Field(description="One word, for machines.")
    message: Annotated[str, Field(max_length=32768)] = Field("", description="For people.")
    last_transition_time: Time = Field(description="When `status` last changed.")
    observed_generation: int = Field(
        0, description="Generation of the object that this says something about."
    )


class GangStatus(Model):
    """One gang: pods that start and die together."""

    replica: int = Field(description="Number of the engine; 0 for other roles.")
    attempt: int = Field(
        description="Number of the present attempt, from 1. Older attempts' pods are refused "
        "everywhere."
    )
    restarts: int = Field(
        0,
        description="Failures of its own: what counts for maxRestarts, and for back-off. An "
        "engine's begins again from 0 once it has worked, or was disrupted by the cluster.",
    )
    last_restart_time: Time | None = Field(
        None, description="When its present attempt was started after a failure."
    )
    ready_time: Time | None = Field(
        None,
        description="An engine that failed before: since when the present attempt has been ready.",
    )
    retry_time: Time | None = Field(None, description="The next attempt starts no earlier.")
    seen: Annotated[list[int], Field(max_length=4096)] = Field(
        default_factory=list,
        description="While an attempt's pods are being created: indices of those that were there.",
    )


class RoleStatus(Model):
    """The pods of one role."""

    name: RoleName = Field(description="The role.")
    desired: int = Field(0, description="Pods that there should be.")
    ready: int = Field(0, description="Pods that are ready.")
    attempt: int = Field(0, description="Highest attempt of the role's gangs.")
    restarts: int = Field(
        0, description="Restarts after failures, of all of its gangs since the start."
    )
    gangs: Annotated[list[GangStatus], Field(max_length=4096), Unique("replica")] = Field(
        default_factory=list, description="Its gangs, by replica."
    )


class LastFailure(Model):
    """The pod that failed last, and what it said."""

    role: RoleName = Field(description="Its role.")
    pod: str = Field(description="Its name.")
    container: str = Field("", description="The container that failed.")
    reason: str = Field("", description="Such as OOMKilled, Error, Evicted.")
    exit_code: int | None = Field(None, description="Of that container.")
    message: Annotated[str, Field(max_length=32768)] = Field(
        "", description="Last log lines of what died."
    )
    time: Time = Field(description="When it was seen.")
    times: int = Field(
        1, description="How often in a row such a container has ended of the same cause."
    )


class PodGroupStatus(Model):
    """The pods that a queue admits together: the trainer's, those of the first engines and, with
    Kueue, the buffer and the rendezvous.
    """

    number: int = Field(
        1,
        description="Number of the group, from 1. A job that was suspended comes back in another.",
    )
    replicas: int = Field(
        0, description="Engines in it: those with the lowest numbers. Each other is on its own."
    )
    services: bool = Field(
        False, description="Whether the buffer and the rendezvous are in it, as with Kueue."
    )


class GoodputStatus(Model):
    """The use of the job's GPU time; on CPUs a pod counts as one device."""

    ratio: str = Field(description="Share that trained or generated samples that were trained on.")
    seconds: dict[str, int] = Field(
        default_factory=dict,
        description="Device seconds: trained, generated, thrown_away, waited, synchronised, saved, "
        "started, restarted.",
    )
    states: dict[str, int] = Field(
        default_factory=dict,
        description="The same seconds by what pods were doing, as `role/state`.",
    )
    earlier: dict[str, int] = Field(
        default_factory=dict,
        description="Those of them that were counted before the rendezvous service last restarted.",
    )


class RLJobStatus(Model):
    """The job as the operator has seen it. Nobody else writes it."""

    observed_generation: int | None = Field(
        None, description="Newest generation of the object that this status takes account of."
    )
    conditions: Annotated[list[Condition], Field(max_length=16), Unique("type")] = Field(
        default_factory=list,
        description="Admitted, Running, WeightsInSync, Suspended, Succeeded, Failed.",
    )
    state: str = Field("", description="One word for people, derived from the conditions.")
    reason: str = Field("", description="Reason of the condition that `state` is derived from.")
    step: int | None = Field(None, description="Steps that are trained.")
    total_steps: int | None = Field(
        None, description="Steps that there will be. With epochs: once the prompts are counted."
    )
    reward: str | None = Field(None, description="Mean reward of the last step's samples.")
    loss: str | None = Field(
        None, description="Loss of the last step, where its samples have no rewards."
    )
    weight_version: int | None = Field(None, description="Newest version that the engines serve.")
    policy_lag: str | None = Field(
        None, description="Mean number of steps that the samples' weights were behind."
    )
    restarts: int = Field(0, description="Restarts after failures, of all roles.")
    goodput: GoodputStatus | None = Field(
        None, description="The use of the job's GPU time, brought up to date with each step."
    )
    roles: Annotated[list[RoleStatus], Field(max_length=8), Unique("name")] = Field(
        default_factory=list, description="The pods, by role."
    )
    last_failure: LastFailure | None = Field(
        None, description="The last failure of a pod, kept when the pod is gone."
    )
    rollout_replicas: int | None = Field(
        None, description="Engines that there should be: what /scale shows."
    )
    rollout_selector: str | None = Field(
        None,
        description="Label selector of the first pod of each engine: what autoscalers look at.",
    )
    checkpoint_claim: str | None = Field(
        None,
        description="The PersistentVolumeClaim with the job's checkpoints, where the operator has "
        "made it.",
    )
    pod_group: PodGroupStatus | None = Field(
        None, description="What a queue admits as one, where the job has a podGroupPolicy."
    )
    queued_time: Time | None = Field(None, description="Since when a queue holds the job.")
    start_time: Time | None = Field(None, description="When the job was admitted.")
    completion_time: Time | None = Field(None, description="When it succeeded or failed.")
    last_progress_time: Time | None = Field(None, description="When the step last changed.")

    def condition(self, type_: ConditionType) -> Condition | None:
        return next((c for c in self.conditions if c.type == type_), None)

    def gang(self, role: RoleName, replica: int) -> GangStatus | None:
        """None: none of that number was started yet."""
        gangs = (gang for each in self.roles if each.name == role for gang in each.gangs)
        return next((gang for gang in gangs if gang.replica == replica), None)

    def is_true(self, type_: ConditionType) -> bool:
        condition = self.condition(type_)
        return condition is not None and condition.status == "True"
