"""Every object that a job starts with, for `sluice render` and for golden files."""

from __future__ import annotations

from sluice.api import RLJob
from sluice_operator.plan import names, queueing
from sluice_operator.plan.extras import extra_objects
from sluice_operator.plan.gangs import desired_gangs
from sluice_operator.plan.model import Images, KubeObject, Observed
from sluice_operator.plan.objects import supporting_objects
from sluice_operator.plan.pods import gang_pods

OPERATOR_NAMESPACE = "sluice-system"


def render_all(job: RLJob, images: Images | None = None) -> list[KubeObject]:
    """All objects of the first attempt of every gang, for an operator in the namespace `sluice-system`.

    The rendezvous' address is its name in DNS here; the operator waits for the Service and writes its IP.
    """
    address = f"{names.rendezvous_name(job)}.{job.metadata.namespace}.svc:{names.PORTS['rendezvous']}"
    observed = Observed(status=job.status, operator_namespace=OPERATOR_NAMESPACE)
    found = [*supporting_objects(job), *extra_objects(job, observed)]
    for gang in desired_gangs(job, job.status):
        pods = gang_pods(job, gang, 1, range(gang.size), address, images or Images())
        group = queueing.group_object(job, gang, 1, pods)
        found += [group, *pods] if group else pods
    return found
