"""Kueue's Workloads, which Kueue makes for each group of pods.

The operator reads why a Workload waits, and tells Kueue when a group has ended. If all pods of the
group have run, an annotation on any of them ends the group, and Kueue keeps the pods for their
logs. A group with pods that never ran ends when its Workload is deleted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import structlog

from sluice.api import RLJob
from sluice_operator.cluster import errors
from sluice_operator.cluster.kube.api import Api
from sluice_operator.cluster.kube.paths import collection, path
from sluice_operator.plan.decide.episodes import split_episodes
from sluice_operator.plan.decide.pod_groups import all_ended
from sluice_operator.plan.facts import names, podstate
from sluice_operator.plan.facts.model import KubeObject, Observed
from sluice_operator.plan.report import admission

GROUP = "kueue.x-k8s.io"

log = structlog.get_logger(__name__)


class Workloads:
    def __init__(self, api: Api) -> None:
        self._api = api
        self._version = ""

    async def waited_for(
        self, job: RLJob, pods: Sequence[KubeObject]
    ) -> Mapping[tuple[str, str], KubeObject]:
        """Return the Workload for whose admission the job waits, by (kind, name).

        pods: all pods of the job, including those of episodes.
        """
        gangs, episodes = split_episodes(pods)
        observed = Observed(gangs, episodes=episodes)
        waiting = admission.waiting(job, observed, datetime.now(UTC))
        held = next((pod for pod in waiting if podstate.is_gated(pod)), None)
        workload = await self._of(held) if held is not None else None
        return (
            {(names.WORKLOAD, workload["metadata"]["name"]): workload}
            if workload is not None
            else {}
        )

    async def end(self, group: str, pods: Sequence[KubeObject]) -> None:
        """Tell Kueue that a group has ended. pods: all that are left of it."""
        namespace = pods[0]["metadata"]["namespace"]
        if all_ended(pods):
            mark = {"metadata": {"annotations": {names.ENDS_GROUP: "false"}}}
            for pod in pods:
                with contextlib.suppress(errors.NotFoundError):
                    await self._api.merge(path("Pod", namespace, podstate.name(pod)), mark)
            return
        version = await self._served()
        if version:
            with contextlib.suppress(errors.NotFoundError):
                await self._api.delete(
                    path(names.WORKLOAD, namespace, group, group_version=version), {}
                )

    async def give_up(self, pod: KubeObject) -> KubeObject:
        """Mark a pod on a dead node as failed, as Kubernetes' pod garbage collector does.

        Otherwise Kueue counts it as running, and deletes each replacement as one pod too many.
        """
        status = {"phase": "Failed", "reason": "NodeLost", "message": "the node does not answer"}
        at = path("Pod", pod["metadata"]["namespace"], podstate.name(pod), "status")
        return await self._api.merge(at, {"status": status})

    async def _of(self, pod: KubeObject) -> KubeObject | None:
        """Return the Workload of the pod's group, or one of the pod alone, which has any name."""
        namespace, group = pod["metadata"]["namespace"], podstate.group(pod)
        try:
            version = await self._served()
            if not version:
                return None
            if group:
                return await self._api.get(
                    path(names.WORKLOAD, namespace, group, group_version=version)
                )
            async for page in self._api.pages(
                collection(names.WORKLOAD, namespace, group_version=version)
            ):
                workloads = {
                    (names.WORKLOAD, item["metadata"]["name"]): item for item in page["items"] or []
                }
                if (workload := admission.workload_of(pod, workloads)) is not None:
                    return workload
            return None
        except errors.NotFoundError:
            return None
        # A job must not stop because its status says less.
        except errors.ApiError as error:
            log.warning("cannot read why a pod waits", pod=podstate.name(pod), error=str(error))
            return None

    async def _served(self) -> str:
        """Return the API version that this cluster's Kueue prefers; empty if there is no Kueue."""
        if not self._version:
            with contextlib.suppress(errors.NotFoundError):
                self._version = (await self._api.get(f"/apis/{GROUP}"))["preferredVersion"][
                    "groupVersion"
                ]
        return self._version
