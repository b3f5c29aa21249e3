"""Pure decisions: plan(job, observed, now) -> Plan.

One file per policy; no I/O, no clock, no randomness.
"""

from sluice_operator.plan.facts.model import (
    Deletion,
    Event,
    Images,
    KubeObject,
    Observed,
    Plan,
    Progress,
)
from sluice_operator.plan.manifests.render import render_all
from sluice_operator.plan.planner import is_finished, plan

__all__ = [
    "Deletion",
    "Event",
    "Images",
    "KubeObject",
    "Observed",
    "Plan",
    "Progress",
    "is_finished",
    "plan",
    "render_all",
]
