"""Why a pod that was deleted is still there, in words that say until when."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sluice_operator.plan.decide.gangs import force_time, grace_end
from sluice_operator.plan.facts import clock, podstate
from sluice_operator.plan.facts.model import KubeObject


def overdue(pods: Sequence[KubeObject], now: datetime) -> str:
    """The first pod that has outlived its grace, and what becomes of it; empty: there is none.

    The gang's next attempt waits for it, since two attempts never overlap.
    """
    late = (pod for pod in pods if podstate.is_terminating(pod) and now >= grace_end(pod))
    pod = next(late, None)
    if pod is None:
        return ""
    name, moment = podstate.name(pod), force_time(pod)
    if podstate.is_finished(pod):
        kept = ", ".join(pod["metadata"].get("finalizers") or ["none is named"])
        return f"{name} has ended, and its finalizers keep it ({kept})"
    if now < moment:
        return (
            f"{name} was deleted and has not ended in its grace: its node may be dead; "
            f"the operator removes it at {clock.text(moment)}"
        )
    if finalizers := pod["metadata"].get("finalizers"):
        return f"{name} was removed by force, and its finalizers keep it ({', '.join(finalizers)})"
    return f"{name} is being removed by force"
