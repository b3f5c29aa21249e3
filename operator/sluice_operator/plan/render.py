"""Every object that a job starts with, for `sluice render` and for golden files."""

from __future__ import annotations

from sluice.api import RLJob
from sluice_operator.plan import names
from sluice_operator.plan.gangs import desired_gangs
from sluice_operator.plan.model import Images, KubeObject
from sluice_operator.plan.objects import supporting_objects
from sluice_operator.plan.pods import gang_pods


def render_all(job: RLJob, images: Images | None = None) -> list[KubeObject]:
    """All objects of the first attempt of every gang.

    The rendezvous' address is its name in DNS here; the operator waits for the Service and writes its IP.
    """
    address = f"{names.rendezvous_name(job)}.{job.metadata.namespace}.svc:{names.PORTS['rendezvous']}"
    found = list(supporting_objects(job))
    for gang in desired_gangs(job, job.status):
        found += gang_pods(job, gang, 1, range(gang.size), address, images or Images())
    return found
