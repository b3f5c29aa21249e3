"""A stand-in for kubernetes-sigs' agent-sandbox: its API, and what its controller does.

The real controller is a Go program that the tests do not start. The stand-in makes a pod of the
Sandbox's name from the template, owned by the Sandbox. It creates a deleted pod again, leaves a pod
that has ended, and reports in a condition what it did (controllers/sandbox_controller.go of release
0.5). It does not copy labels of the Sandbox API group from the template.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from sluice_operator.cluster import errors
from sluice_operator.cluster.kube.api import Api
from sluice_operator.cluster.kube.paths import collection, path
from tests.cluster.world import Object, World, now

GROUP = "agents.x-k8s.io"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
NAME_HASH = f"{GROUP}/sandbox-name-hash"
TEXT: Object = {"type": "string"}
TEXTS: Object = {"type": "object", "additionalProperties": TEXT}
# Fields of a Sandbox's spec that one version alone has.
MODES: dict[str, Object] = {
    "v1beta1": {"operatingMode": {**TEXT, "enum": ["Running", "Suspended"], "default": "Running"}},
    "v1alpha1": {"replicas": {"type": "integer", "minimum": 0, "maximum": 1, "default": 1}},
}


def _fields(*required: str, **properties: Any) -> Object:
    needed = {"required": [*required]} if required else {}
    return {"type": "object", "properties": properties, **needed}


def _version(name: str, *, storage: bool) -> Object:
    template = _fields(
        "spec",
        metadata=_fields(labels=TEXTS, annotations=TEXTS),
        spec=_fields("containers", containers={"type": "array", "items": _any()}) | _any(),
    )
    spec = _fields(
        "podTemplate",
        podTemplate=template,
        service={"type": "boolean"},
        shutdownTime={**TEXT, "format": "date-time"},
        shutdownPolicy={**TEXT, "enum": ["Delete", "Retain"], "default": "Retain"},
        **MODES[name],
    )
    return {
        "name": name,
        "served": True,
        "storage": storage,
        "subresources": {"status": {}},
        "schema": {"openAPIV3Schema": _fields("spec", spec=spec, status=_any())},
    }


def _any() -> Object:
    return {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


@asynccontextmanager
async def agent_sandbox(api: Api, *versions: str) -> AsyncIterator[None]:
    """An API server with these versions of its API, the first stored; without it at the end."""
    names = {
        "kind": "Sandbox",
        "listKind": "SandboxList",
        "plural": "sandboxes",
        "singular": "sandbox",
    }
    crd = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"sandboxes.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": names,
            "versions": [_version(version, storage=version == versions[0]) for version in versions],
        },
    }
    at = collection("Sandbox", "default", f"{GROUP}/{versions[0]}")
    await api.create(CRDS, crd)
    await _until(api, at, served=True)
    try:
        yield
    finally:
        await api.delete(f"{CRDS}/sandboxes.{GROUP}", {})
        await _until(api, f"/apis/{GROUP}", served=False)


async def _until(api: Api, at: str, *, served: bool) -> None:
    async with asyncio.timeout(60):
        while await _is_served(api, at) != served:
            await asyncio.sleep(0.1)


async def _is_served(api: Api, at: str) -> bool:
    try:
        await api.get(at)
    except errors.NotFoundError:
        return False
    return True


class SandboxController:
    """The controller of a namespace, for one version of the API."""

    def __init__(self, world: World, version: str) -> None:
        self.world, self.group_version = world, f"{GROUP}/{version}"

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._work())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def sandboxes(self) -> dict[str, Object]:
        at = collection("Sandbox", self.world.namespace, self.group_version)
        items = (await self.world.api.get(at))["items"] or []
        return {item["metadata"]["name"]: item for item in items}

    async def _work(self) -> None:
        while True:
            pods = await self.world.pods()
            for name, sandbox in (await self.sandboxes()).items():
                with contextlib.suppress(errors.NotFoundError, errors.AlreadyExistsError):
                    if name not in pods and not sandbox["metadata"].get("deletionTimestamp"):
                        await self._make(name, sandbox)
            await asyncio.sleep(0.1)

    async def _make(self, name: str, sandbox: Object) -> None:
        template, namespace = sandbox["spec"]["podTemplate"], self.world.namespace
        template_metadata = template.get("metadata") or {}
        own = {
            key: value
            for key, value in (template_metadata.get("labels") or {}).items()
            if not key.startswith(f"{GROUP}/")
        }
        owner = {
            "apiVersion": self.group_version,
            "kind": "Sandbox",
            "name": name,
            "uid": sandbox["metadata"]["uid"],
            "controller": True,
            "blockOwnerDeletion": True,
        }
        metadata = {
            "name": name,
            "labels": own | {NAME_HASH: f"{hash(name) & 0xFFFFFFFF:08x}"},
            "annotations": template_metadata.get("annotations") or {},
            "ownerReferences": [owner],
        }
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
        reason, message = "DependenciesNotReady", "Pod exists with phase: Pending"
        try:
            await self.world.api.create(collection("Pod", namespace), pod)
        except (errors.ForbiddenError, errors.InvalidError) as error:
            reason, message = "ReconcilerError", f"Error seen: {error}"
        ready = {
            "type": "Ready",
            "status": "False",
            "reason": reason,
            "message": message,
            "lastTransitionTime": now(),
        }
        at = path("Sandbox", namespace, name, "status", group_version=self.group_version)
        await self.world.api.merge(at, {"status": {"conditions": [ready]}})
