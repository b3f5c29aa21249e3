"""JobPass: everything that one pass of the planner knows of a job."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Self

from sluice.api import RLJob, RLJobSpec, RLJobStatus
from sluice_operator.plan.facts import podstate
from sluice_operator.plan.facts.model import Images, KubeObject, Observed


@dataclass(frozen=True, slots=True)
class JobPass:
    """The facts of one pass. Stages of a pass hand it on, with the status that they have decided.

    status: the stored status at first, then as far as it is decided. observed: the cluster as it
    is; its own `status` stays the stored one.
    """

    job: RLJob
    status: RLJobStatus
    observed: Observed
    now: datetime
    images: Images = field(default_factory=Images)

    @property
    def spec(self) -> RLJobSpec:
        return self.job.spec

    @property
    def pods(self) -> tuple[KubeObject, ...]:
        return self.observed.pods

    def with_status(self, status: RLJobStatus) -> Self:
        return replace(self, status=status)

    def updated(self, **fields: Any) -> Self:
        """Return the pass with these fields of the status changed."""
        return replace(self, status=self.status.model_copy(update=fields))

    def without_departed_pods(self) -> Self:
        """Return the pass without pods that only a finalizer of Kueue keeps.

        To every decision but those about Kueue's groups, such pods are gone.
        """
        pods = tuple(pod for pod in self.pods if not podstate.has_left(pod))
        return replace(self, observed=replace(self.observed, pods=pods))
