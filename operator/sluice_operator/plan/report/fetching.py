"""The condition ModelFetched: what pods fetch by URIs (spec.downloads), and how far they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sluice.api.status import ROLES
from sluice_operator.plan.facts import names, podstate
from sluice_operator.plan.facts.constants import FETCH_FAILED, FETCHED, FETCHING
from sluice_operator.plan.facts.job_pass import JobPass
from sluice_operator.plan.facts.model import KubeObject
from sluice_operator.plan.manifests import downloads
from sluice_operator.plan.report.conditions import ConditionUpdate


def model_fetched(current: JobPass) -> list[ConditionUpdate]:
    """Return the condition ModelFetched; none if the job fetches nothing, or has no such pods."""
    roles = [role for role in ROLES if downloads.sources(current.job, role)]
    pods = [pod for pod in current.pods if podstate.role(pod) in roles]
    if not pods:
        return []
    failures = (
        failure
        for pod in pods
        for failure in podstate.failures(pod, current.now)
        if failure.container == names.FETCH
    )
    if (failure := next(failures, None)) is not None:
        text = FETCH_FAILED.text(pod=failure.pod, cause=podstate.headline(failure))
        return [ConditionUpdate("ModelFetched", "False", FETCH_FAILED.name, text)]
    left = [pod for pod in pods if not podstate.init_succeeded(pod, names.FETCH)]
    if left:
        text = FETCHING.text(
            done=len(pods) - len(left),
            pods=len(pods),
            detail=_detail(in_words(left, current.observed.fetching)),
        )
        return [ConditionUpdate("ModelFetched", "False", FETCHING.name, text)]
    return [ConditionUpdate("ModelFetched", "True", FETCHED.name, FETCHED.text(pods=len(pods)))]


def in_words(pods: Sequence[KubeObject], progress: Mapping[str, str]) -> str:
    """Return which of these pods fetch, and how far one of them is; empty if none does.

    Pods that wait for another one to fill their volume log nothing.
    """
    fetching = [podstate.name(pod) for pod in pods if podstate.runs_init(pod, names.FETCH)]
    if not fetching:
        return ""
    pod = next((name for name in fetching if name in progress), fetching[0])
    more = f" and {len(fetching) - 1} more" if len(fetching) > 1 else ""
    if pod in progress:
        return f"{pod}{more}: fetching {progress[pod]}"
    return f"{pod}{more}: fetching files; kubectl logs {pod} -c {names.FETCH} tells how far"


def _detail(text: str) -> str:
    return f"; {text}" if text else ""
