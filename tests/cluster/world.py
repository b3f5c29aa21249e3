"""A namespace of one test, and what a user and a kubelet would do in it through the API."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

from sluice_operator.cluster import errors
from sluice_operator.cluster.kube.api import Api
from sluice_operator.cluster.kube.paths import collection, path
from sluice_operator.cluster.kube.store import owner_uid

Object = dict[str, Any]
WAIT_SECONDS = 60.0
OWNED = ("ConfigMap", "Secret", "Service", "PersistentVolumeClaim", "Pod")
SPEC: Object = {
    "model": {"path": "/models/tiny"},
    "data": {"prompts": [{"path": "/data/train.jsonl"}]},
    "reward": {"type": "exact_match"},
    "rollout": {"gpusPerReplica": 0, "replicas": 2},
    "trainer": {"steps": 10, "gpusPerNode": 0},
}


class World:
    def __init__(self, api: Api, namespace: str) -> None:
        self.api, self.namespace = api, namespace

    # -- a user
    # ----------------------------------------------------------------------------------------------

    async def create(self, name: str = "demo", **spec: Any) -> Object:
        """A job; groups of the spec are merged over a small one."""
        merged = {**SPEC}
        for group, fields in spec.items():
            both = isinstance(merged.get(group), dict) and isinstance(fields, dict)
            merged[group] = merged[group] | fields if both else fields
        body = {
            "apiVersion": "sluice.dev/v1alpha1",
            "kind": "RLJob",
            "metadata": {"name": name},
            "spec": merged,
        }
        return await self.api.create(collection("RLJob", self.namespace), body)

    async def change(self, spec: Object, name: str = "demo") -> Object:
        return await self.api.merge(path("RLJob", self.namespace, name), {"spec": spec})

    async def job(self, name: str = "demo") -> Object:
        return await self.api.get(path("RLJob", self.namespace, name))

    async def status(self, name: str = "demo") -> Object:
        return (await self.job(name)).get("status") or {}

    async def condition(self, kind: str, name: str = "demo") -> Object:
        matches = [
            item for item in (await self.status(name)).get("conditions", []) if item["type"] == kind
        ]
        return matches[0] if matches else {}

    async def gang(self, role: str, replica: int = 0) -> Object:
        """A gang's status."""
        roles = {item["name"]: item for item in (await self.status()).get("roles", [])}
        return next(
            (gang for gang in roles.get(role, {}).get("gangs", []) if gang["replica"] == replica),
            {},
        )

    async def objects(self, kind: str) -> list[Object]:
        """Objects of a kind, but for those that every namespace has."""
        items = (await self.api.get(collection(kind, self.namespace)))["items"] or []
        return [
            item for item in items if "service-account" not in item.get("type", "") and _ours(item)
        ]

    async def owned(self, *kinds: str) -> list[Object]:
        """Objects that go with their job: all of these kinds but claims that are kept."""
        objects = [stored for kind in kinds or OWNED for stored in await self.objects(kind)]
        return [
            stored
            for stored in objects
            if "sluice.dev/job-uid" not in stored["metadata"].get("labels", {})
        ]

    async def delete(self, name: str = "demo", policy: str = "Background") -> None:
        await self.api.delete(path("RLJob", self.namespace, name), {"propagationPolicy": policy})

    async def reasons(self) -> set[str]:
        """Reasons of the events about jobs."""
        events = (await self.api.get(collection("Event", self.namespace)))["items"]
        return {event["reason"] for event in events if event["regarding"]["kind"] == "RLJob"}

    # -- pods and their kubelet
    # -----------------------------------------------------------------------------------

    async def pods(self, role: str = "") -> dict[str, Object]:
        objects = await self.objects("Pod")
        return {
            pod["metadata"]["name"]: pod
            for pod in objects
            if role in ("", pod["metadata"]["labels"]["sluice.dev/role"])
        }

    async def names(self, role: str = "") -> list[str]:
        return sorted(await self.pods(role))

    async def bind(self, *pods: str) -> None:
        """Give pods a node, so that they end with grace and stay until their kubelet agrees."""
        for name in pods:
            target = {"apiVersion": "v1", "kind": "Node", "name": "nowhere"}
            body = {
                "apiVersion": "v1",
                "kind": "Binding",
                "metadata": {"name": name},
                "target": target,
            }
            await self.api.create(path("Pod", self.namespace, name, "binding"), body)

    async def run(self, *pods: str) -> None:
        """Start and make ready the containers of these pods, or of all waiting pods."""
        for name, pod in (await self.pods()).items():
            if name in pods or (not pods and pod["status"].get("phase") == "Pending"):
                await self._set(pod, "Running", {})

    async def finish(self, name: str, code: int, message: str = "", container: str = "") -> None:
        """Containers end; without a name: all of the pod's."""
        await self.end((await self.pods())[name], code, message, container)

    async def end(self, pod: Object, code: int, message: str = "", container: str = "") -> None:
        """`finish` of a pod that is known."""
        names = [item["name"] for item in pod["spec"]["containers"]]
        ended = [container] if container else names
        phase = "Running" if len(ended) < len(names) else "Failed" if code else "Succeeded"
        state = {
            "exitCode": code,
            "reason": "Error" if code else "Completed",
            "finishedAt": now(),
            "message": message,
        }
        await self._set(pod, phase, {item: {"terminated": state} for item in ended})

    async def gone(self, *pods: str) -> None:
        """Report as their kubelet that these pods have ended."""
        for name in pods:
            with contextlib.suppress(errors.NotFoundError):
                await self.api.delete(path("Pod", self.namespace, name), {"gracePeriodSeconds": 0})

    async def running(self, count: int, **spec: Any) -> Object:
        """A job whose pods all run."""
        job = await self.create(**spec)

        async def all_run() -> bool:
            await self.run()  # some pods are made only once others have their places
            return await self._is_ready(count)

        await self.until(all_run)
        return job

    async def until_pods(self, count: int, role: str = "", seconds: float = WAIT_SECONDS) -> None:
        async def enough() -> bool:
            return len(await self.names(role)) == count

        await self.until(enough, seconds)

    async def until_state(
        self, state: str, name: str = "demo", seconds: float = WAIT_SECONDS
    ) -> Object:
        async def reached() -> bool:
            return (await self.status(name)).get("state") == state

        await self.until(reached, seconds)
        return await self.status(name)

    async def until(
        self, holds: Callable[[], Awaitable[bool]], seconds: float = WAIT_SECONDS
    ) -> None:
        """Wait until the condition is true; if it never is, fail with what exists."""
        try:
            async with asyncio.timeout(seconds):
                while not await holds():
                    await asyncio.sleep(0.05)
        except TimeoutError:
            children = {
                kind: [stored["metadata"]["name"] for stored in await self.objects(kind)]
                for kind in OWNED
            }
            jobs = [
                (job["metadata"]["name"], job.get("status")) for job in await self.objects("RLJob")
            ]
            raise AssertionError(f"not within {seconds} s: {children} {jobs}") from None

    async def _is_ready(self, count: int) -> bool:
        return sum(role["ready"] for role in (await self.status()).get("roles", [])) == count

    async def _set(self, pod: Object, phase: str, states: Object) -> None:
        running = {"running": {"startedAt": now()}}
        statuses = [
            {
                "name": container["name"],
                "image": container["image"],
                "imageID": "",
                "restartCount": 0,
                "ready": phase == "Running" and container["name"] not in states,
                "state": states.get(container["name"], running),
            }
            for container in pod["spec"]["containers"]
        ]
        ready = str(phase == "Running" and not states)
        conditions = [
            {"type": "PodScheduled", "status": "True"},
            {"type": "Ready", "status": ready},
        ]
        start = pod["status"].get("startTime") or now()
        status = {
            "phase": phase,
            "startTime": start,
            "conditions": conditions,
            "containerStatuses": statuses,
        }
        await self.set_status(pod, **status)

    async def set_status(self, pod: Object, **status: Any) -> None:
        name = pod["metadata"]["name"]
        await self.api.merge(path("Pod", self.namespace, name, "status"), {"status": status})


@contextlib.asynccontextmanager
async def new_world(api: Api, namespace: str) -> AsyncIterator[World]:
    """Create a namespace. On a foreign cluster it is deleted at the end."""
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
    await api.create("/api/v1/namespaces", body)
    try:
        yield World(api, namespace)
    finally:
        await api.delete(f"/api/v1/namespaces/{namespace}", {})


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _ours(item: Object) -> bool:
    return item["metadata"]["name"] != "kube-root-ca.crt" and (
        bool(owner_uid(item)) or "spec" in item
    )
