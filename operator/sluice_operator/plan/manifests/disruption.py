"""The budget for what a drain of nodes may take at once.

Only the engines have a budget: one of them stays until another is ready, so that training goes
on while machines are upgraded one after the other. All other gangs are needed whole: a budget
for them would either allow everything or block the node until the job ends. A trainer that is
evicted checkpoints between two steps, within its grace, and goes on elsewhere; a buffer goes on
from its storage.
"""

from __future__ import annotations

from sluice.api import RLJob
from sluice_operator.plan.facts import names
from sluice_operator.plan.facts.model import KubeObject

KIND = "PodDisruptionBudget"


def disruption_budget(job: RLJob, replicas: int) -> KubeObject | None:
    """None: a job with a single engine has nothing to keep. replicas: engines that are wanted.

    A number of pods, not `maxUnavailable`: that is counted against /scale,
    which knows only the engines. An engine that is not ready, such as one that loads its model or
    fails again and again, holds up no drain: nobody would miss it.
    """
    if not job.spec.pod_disruption_budget.enabled or replicas < 2:
        return None
    return {
        "apiVersion": "policy/v1",
        "kind": KIND,
        "metadata": names.metadata(job, names.rollout_budget_name(job)),
        "spec": {
            "minAvailable": job.spec.rollout.nodes_per_replica,
            "selector": {"matchLabels": names.selector(job, "rollout")},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
