"""The planner: pure decisions, without I/O, clock or randomness.

`facts` is what decisions are made from, `decide` has one policy in each file, `manifests` renders
objects, and `report` writes status, conditions and events. `planner.plan` combines them.
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
