"""RLJob.status: conditions in Kubernetes' sense, and what people want to see at a glance."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sluice.api.base import Model

ConditionType = Literal["Admitted", "Running", "WeightsInSync", "Suspended", "Succeeded", "Failed"]
ROLES = ("rendezvous", "buffer", "rollout", "trainer")
RoleName = Literal["rendezvous", "buffer", "rollout", "trainer"]
Time = Annotated[str, Field(json_schema_extra={"format": "date-time"})]
"""RFC 3339 in UTC, with seconds: 2026-01-31T12:00:00Z."""


class Condition(Model):
    type: ConditionType
    status: Literal["True", "False", "Unknown"]
    reason: Annotated[str, Field(pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$", max_length=1024)]
    message: Annotated[str, Field(max_length=32768)] = ""
    last_transition_time: Time
    observed_generation: int = 0


class GangStatus(Model):
    """One gang: pods that start and die together."""

    replica: int
    attempt: int = Field(
        description="Number of the present attempt, from 1. Older attempts' pods are refused everywhere."
    )
    restarts: int = Field(0, description="Failures of its own: what counts for back-off and maxRestarts.")
    last_restart_time: Time | None = None
    retry_time: Time | None = Field(None, description="The next attempt starts no earlier.")


class RoleStatus(Model):
    name: RoleName
    desired: int = 0
    ready: int = 0
    attempt: int = Field(0, description="Highest attempt of the role's gangs.")
    restarts: int = 0
    gangs: Annotated[list[GangStatus], Field(max_length=4096)] = Field(default_factory=list)


class LastFailure(Model):
    role: RoleName
    pod: str
    container: str = ""
    reason: str = ""
    exit_code: int | None = None
    message: Annotated[str, Field(max_length=32768)] = Field("", description="Last log lines of what died.")
    time: Time


class RLJobStatus(Model):
    observed_generation: int | None = None
    conditions: Annotated[list[Condition], Field(max_length=16)] = Field(default_factory=list)
    state: str = Field("", description="One word for people, derived from the conditions.")
    step: int | None = None
    total_steps: int | None = None
    reward: str | None = Field(None, description="Mean reward of the last step's samples.")
    loss: str | None = Field(None, description="Loss of the last step, where its samples have no rewards.")
    weight_version: int | None = None
    policy_lag: str | None = Field(None, description="Mean number of steps that the samples' weights were behind.")
    restarts: int = 0
    roles: Annotated[list[RoleStatus], Field(max_length=8)] = Field(default_factory=list)
    last_failure: LastFailure | None = None
    rollout_replicas: int | None = None
    rollout_selector: str | None = None
    start_time: Time | None = None
    completion_time: Time | None = None
    last_progress_time: Time | None = Field(None, description="When the step last changed.")

    def condition(self, type_: ConditionType) -> Condition | None:
        return next((c for c in self.conditions if c.type == type_), None)

    def is_true(self, type_: ConditionType) -> bool:
        condition = self.condition(type_)
        return condition is not None and condition.status == "True"
