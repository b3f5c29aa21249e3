"""Stand-ins for Kueue and Volcano, with the one node on which what they admit runs.

They do what the real ones do with pods like ours, and no more: whole groups are admitted, first
come first served, as long as the quota lasts. A group that does not fit is passed over, as both do
by default. Quota is counted in pods.

Kueue: a Workload reserves the quota of its whole group until the group has ended. A finalizer keeps
a pod that has ended until another of its role takes its place; a pod too many is deleted. A group
has ended when all of its pods have succeeded; or have ended, and one of them is annotated
retriable-in-group: "false"; or when its Workload is deleted. Pods of one group name one queue. If
the namespace has a LocalQueue `default` (or with manageJobsWithoutQueueName) a pod of no group is a
Workload of its own, which ends with it; else such a pod does not queue.
(pkg/controller/jobs/pod/pod_controller.go and pod_webhook.go.)

A StatefulSet with the label of a queue: a webhook makes its pods one group, and refuses a change of
the number of pods other than to and from 0, as Kueue did in August 2026.
(pkg/controller/jobs/statefulset/statefulset_webhook.go.)

Volcano: nothing is reserved. Pods that run use quota; those of a group that wait get theirs all at
once, or not at all, and only where the group has minMember.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import ssl
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from sluice.runtime.pod_env import free_port
from sluice_operator.cluster import errors
from sluice_operator.cluster.keys import JobKeys
from sluice_operator.cluster.kube.paths import path
from sluice_operator.plan.facts import names
from tests.cluster.world import Object, World, now

KUEUE, VOLCANO = "kueue.x-k8s.io", "scheduling.volcano.sh"
WORKLOADS, POD_GROUPS = f"{KUEUE}/v1beta1", f"{VOLCANO}/v1beta1"
GATE, FINALIZER = f"{KUEUE}/admission", f"{KUEUE}/managed"
QUEUE = f"{KUEUE}/queue-name"
_MANAGED = {
    "metadata": {"finalizers": [FINALIZER]},
    "spec": {"schedulingGates": [{"name": GATE}]},
}
# Additions of Kueue's webhook to pods that name a queue, as podTemplateOverrides.
BY_WEBHOOK = {"roles": ["trainer", "rollout", "buffer", "rendezvous"], "template": _MANAGED}
# The same for pods without a queue name, in a namespace with a LocalQueue `default`.
BY_DEFAULT_QUEUE = {
    "roles": ["buffer", "rendezvous"],
    "template": _MANAGED | {"metadata": {"finalizers": [FINALIZER], "labels": {QUEUE: "default"}}},
}
ENDED_BY_SIGTERM = 143


WEBHOOKS = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"


@asynccontextmanager
async def stateful_set_webhook(world: World, directory: Path) -> AsyncIterator[None]:
    """Let the API server ask about the StatefulSets of the namespace as Kueue's webhooks answer."""
    files = JobKeys(b"k" * 32).certificates("webhook", "localhost")
    for name, content in files.items():
        (directory / name).write_text(content)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(directory / names.TLS_CERTIFICATE, directory / names.TLS_KEY)
    app, port = web.Application(), free_port()
    app.router.add_post("/", _review)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "localhost", port, ssl_context=context).start()
    name = f"kueue-{world.namespace}"
    rule = {"apiGroups": ["apps"], "apiVersions": ["v1"], "resources": ["statefulsets"]}
    webhook = {
        "name": "mstatefulset.kb.io",
        "clientConfig": {
            "url": f"https://localhost:{port}/",
            "caBundle": base64.b64encode(files[names.TLS_CA].encode()).decode(),
        },
        "rules": [rule | {"operations": ["CREATE", "UPDATE"]}],
        "namespaceSelector": {"matchLabels": {"webhook": name}},
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
    }
    await world.api.merge(
        f"/api/v1/namespaces/{world.namespace}", {"metadata": {"labels": {"webhook": name}}}
    )
    body = {"metadata": {"name": name}, "webhooks": [webhook]}
    await world.api.create(WEBHOOKS, body | {"kind": "MutatingWebhookConfiguration"})
    try:
        yield
    finally:
        await world.api.delete(f"{WEBHOOKS}/{name}", {})
        await runner.cleanup()


async def _review(request: web.Request) -> web.Response:
    review = await request.json()
    asked = review["request"]
    new, old = asked["object"], asked.get("oldObject")
    answer: Object = {"uid": asked["uid"], "allowed": True}
    counts = {stored["spec"]["replicas"] for stored in (new, old) if stored}
    if QUEUE in new["metadata"]["labels"]:
        if len(counts) == 2 and 0 not in counts:
            message = f"spec.replicas: Invalid value: {max(counts)}: field is immutable"
            answer |= {"allowed": False, "status": {"message": message}}
        else:
            patch = json.dumps(_patch(new)).encode()
            answer |= {"patchType": "JSONPatch", "patch": base64.b64encode(patch).decode()}
    return web.json_response(
        {"apiVersion": review["apiVersion"], "kind": review["kind"], "response": answer}
    )


def _patch(stateful_set: Object) -> list[Object]:
    metadata, template = stateful_set["metadata"], stateful_set["spec"]["template"]
    labels = template["metadata"]["labels"] | {
        QUEUE: metadata["labels"][QUEUE],
        f"{KUEUE}/pod-group-name": f"statefulset-{metadata['name']}",
    }
    annotations = (template["metadata"].get("annotations") or {}) | {
        f"{KUEUE}/pod-group-total-count": str(stateful_set["spec"]["replicas"]),
        f"{KUEUE}/pod-group-serving": "true",
    }
    values = {
        "metadata/labels": labels,
        "metadata/annotations": annotations,
        "spec/schedulingGates": [{"name": GATE}],
    }
    return [
        {"op": "add", "path": f"/spec/template/{at}", "value": value}
        for at, value in values.items()
    ]


def ended(pod: Object) -> bool:
    return pod["status"].get("phase") in ("Succeeded", "Failed")


def bound(pod: Object) -> bool:
    return bool(pod["spec"].get("nodeName"))


def deleted(pod: Object) -> bool:
    return bool(pod["metadata"].get("deletionTimestamp"))


class Queue:
    """quota: pods that may be admitted at a time."""

    def __init__(self, world: World, quota: int) -> None:
        self.world, self.quota = world, quota
        self._order: list[str] = []

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._work())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _work(self) -> None:
        while True:
            pods = await self.world.pods()
            groups: dict[str, list[Object]] = defaultdict(list)
            for pod in sorted(
                pods.values(), key=lambda pod: int(pod["metadata"]["resourceVersion"])
            ):
                groups[self.group(pod)].append(pod)
            services = groups.pop("", [])
            self._order += [name for name in groups if name not in self._order]
            with contextlib.suppress(
                errors.NotFoundError, errors.ConflictError
            ):  # the world has moved on
                await self.serve({name: groups.get(name, []) for name in self._order})
                for pod in services:
                    await self.start(pod)
                for pod in pods.values():
                    await self._kubelet(pod)
            await asyncio.sleep(0.05)

    def group(self, pod: Object) -> str:
        """Name of the pod's group; empty: it does not queue."""
        raise NotImplementedError

    async def serve(self, groups: dict[str, list[Object]]) -> None:
        """Admit what may be admitted. groups: in the order in which they came."""
        raise NotImplementedError

    async def start(self, pod: Object) -> None:
        """Give the pod a node unless it has one."""
        if bound(pod) or deleted(pod):
            return
        if pod["spec"].get("schedulingGates"):
            await self.patch(pod, {"spec": {"schedulingGates": None}})
        await self.world.bind(pod["metadata"]["name"])

    async def patch(self, pod: Object, body: Object) -> None:
        await self.world.api.merge(path("Pod", self.world.namespace, pod["metadata"]["name"]), body)

    async def _kubelet(self, pod: Object) -> None:
        name = pod["metadata"]["name"]
        if deleted(pod):
            if bound(pod) and not ended(pod):
                await self.world.finish(name, ENDED_BY_SIGTERM)
            if not (ended(pod) and pod["metadata"].get("finalizers")):
                await self.world.gone(name)
        elif bound(pod) and pod["status"].get("phase") == "Pending":
            await self.world.run(name)


class Kueue(Queue):
    """has_default: the namespace has a LocalQueue `default`."""

    def __init__(self, world: World, quota: int, *, has_default: bool = False) -> None:
        super().__init__(world, quota)
        self.has_default = has_default
        self.admitted: dict[str, int] = {}
        self._known: set[str] = set()

    def group(self, pod: Object) -> str:
        """Name of the pod's Workload."""
        alone = f"pod-{pod['metadata']['name']}" if self.has_default else ""
        return str(pod["metadata"]["labels"].get(f"{KUEUE}/pod-group-name", alone))

    async def serve(self, groups: dict[str, list[Object]]) -> None:
        for name, pods in groups.items():
            workload = await self._workload(name)
            if workload is None and name in self._known:
                await self._end(name, pods)
            elif workload is None and pods and self._is_whole(pods):
                await self._create(name, pods)
            elif workload is not None and (not pods or self._is_over(pods)):
                await self._end(name, pods)
            elif workload is not None:
                await self._keep(name, pods)

    async def _keep(self, name: str, pods: Sequence[Object]) -> None:
        """A group with a Workload."""
        size = self._size(pods)
        runnable = [pod for pod in pods if self._is_runnable(pod)]
        gone = [pod for pod in pods if not self._is_runnable(pod)]
        for pod in runnable[size:]:
            print(now(), "excess", pod["metadata"]["name"])
            await self._release(pod)
            await self.world.gone(pod["metadata"]["name"])
        for pod in gone[: max(len(pods) - size, 0)]:
            await self._release(pod)
        if name not in self.admitted:
            if len(runnable) < size:
                return  # it waits for replacements
            free = self.quota - sum(self.admitted.values())
            if size > free:
                await self._say(
                    name, "False", f"insufficient unused quota for pods, {size - free} more needed"
                )
                return
            print(now(), "admitted", name)
            self.admitted[name] = size
            await self._say(name, "True", "Quota reserved")
        for pod in runnable[:size]:
            await self.start(pod)

    async def evict(self, name: str) -> None:
        """Preempt a group, as Kueue does for one of higher priority.

        All pods get the condition of a victim and are deleted.
        """
        self.admitted.pop(name)
        for pod in (await self.world.pods()).values():
            if self.group(pod) == name:
                condition = {
                    "type": "TerminationTarget",
                    "status": "True",
                    "reason": "WorkloadEvictedDueToPreempted",
                }
                at = path("Pod", self.world.namespace, pod["metadata"]["name"])
                await self.world.api.merge(f"{at}/status", {"status": {"conditions": [condition]}})
                await self.world.api.delete(at, {})

    async def _end(self, name: str, pods: Sequence[Object]) -> None:
        print(now(), "ended", name)
        self.admitted.pop(name, None)
        self._known.discard(name)
        for pod in pods:
            await self._release(pod)
        with contextlib.suppress(errors.NotFoundError):
            await self.world.api.delete(self._at(name), {})

    async def _release(self, pod: Object) -> None:
        if pod["metadata"].get("finalizers"):
            await self.patch(pod, {"metadata": {"finalizers": None}})

    def _is_runnable(self, pod: Object) -> bool:
        return pod["status"].get("phase") != "Failed" and (bound(pod) or not deleted(pod))

    def _is_whole(self, pods: Sequence[Object]) -> bool:
        queues = {pod["metadata"]["labels"].get(QUEUE) for pod in pods}
        return len(queues) == 1 and sum(map(self._is_runnable, pods)) >= self._size(pods)

    def _is_over(self, pods: Sequence[Object]) -> bool:
        if not self._is_group(pods):
            return any(ended(pod) or deleted(pod) for pod in pods)
        if sum(pod["status"].get("phase") == "Succeeded" for pod in pods) == self._size(pods):
            return True
        marks = {
            (pod["metadata"].get("annotations") or {}).get(f"{KUEUE}/retriable-in-group")
            for pod in pods
        }
        return "false" in marks and all(map(ended, pods))

    def _is_group(self, pods: Sequence[Object]) -> bool:
        return f"{KUEUE}/pod-group-name" in pods[0]["metadata"]["labels"]

    def _size(self, pods: Sequence[Object]) -> int:
        if not self._is_group(pods):
            return 1
        (count,) = {
            pod["metadata"]["annotations"][f"{KUEUE}/pod-group-total-count"] for pod in pods
        }
        return int(count)

    def _at(self, name: str = "") -> str:
        return f"/apis/{WORKLOADS}/namespaces/{self.world.namespace}/workloads/{name}".rstrip("/")

    async def _workload(self, name: str) -> Object | None:
        try:
            return await self.world.api.get(self._at(name))
        except errors.NotFoundError:
            return None

    async def _create(self, name: str, pods: Sequence[Object]) -> None:
        owners = [
            {"apiVersion": "v1", "kind": "Pod", "name": meta["name"], "uid": meta["uid"]}
            for meta in (pod["metadata"] for pod in pods)
        ]
        metadata = {"name": name, "ownerReferences": owners}
        body = {"apiVersion": WORKLOADS, "kind": "Workload", "metadata": metadata}
        await self.world.api.create(self._at(), body)
        self._known.add(name)

    async def _say(self, name: str, status: str, message: str) -> None:
        condition = {
            "type": "QuotaReserved",
            "status": status,
            "reason": "Pending",
            "message": message,
        }
        body = {"status": {"conditions": [condition | {"lastTransitionTime": now()}]}}
        await self.world.api.merge(self._at(name), body)


class Volcano(Queue):
    def group(self, pod: Object) -> str:
        return str(
            (pod["metadata"].get("annotations") or {}).get("scheduling.k8s.io/group-name", "")
        )

    async def serve(self, groups: dict[str, list[Object]]) -> None:
        used = sum(bound(pod) and not ended(pod) for pods in groups.values() for pod in pods)
        for name, pods in groups.items():
            living = [pod for pod in pods if not ended(pod) and not deleted(pod)]
            waiting = [pod for pod in living if not bound(pod)]
            if not waiting:
                continue
            at = path("PodGroup", self.world.namespace, name, group_version=POD_GROUPS)
            fits = len(living) >= (await self.world.api.get(at))["spec"]["minMember"]
            if fits and len(waiting) <= self.quota - used:
                print(now(), "admitted", [pod["metadata"]["name"] for pod in waiting])
                used += len(waiting)
                for pod in waiting:
                    await self.start(pod)
            else:
                await self._say(
                    waiting, f"{len(waiting)}/{len(living)} tasks in gang unschedulable"
                )

    async def _say(self, pods: Sequence[Object], message: str) -> None:
        for pod in pods:
            condition = {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": message,
            }
            if message not in str(pod["status"].get("conditions")):
                at = path("Pod", self.world.namespace, pod["metadata"]["name"], "status")
                await self.world.api.merge(at, {"status": {"conditions": [condition]}})
