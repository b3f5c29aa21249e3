"""Releases of the chart on a real API server."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice_operator.cluster import errors
from sluice_operator.cluster.kube.api import Api
from tests.helm import CHART, helm

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
CRD, POOLS_CRD = f"{CRDS}/rljobs.sluice.dev", f"{CRDS}/rlenginepools.sluice.dev"
Object = dict[str, Any]


@dataclass
class Release:
    """A release of the chart. arguments: those for the age of the API server."""

    api: Api
    name: str
    namespace: str
    arguments: list[str]

    def install(self, *arguments: str, chart: Path = CHART) -> None:
        done = self.helm("install", *arguments, chart=chart)
        assert done.returncode == 0, done.stderr

    def upgrade(self, *arguments: str, chart: Path = CHART) -> None:
        done = self.helm("upgrade", *arguments, chart=chart)
        assert done.returncode == 0, done.stderr

    def uninstall(self) -> None:
        done = helm(
            "uninstall", self.name, "--namespace", self.namespace, "--wait", "--timeout", "60s"
        )
        assert done.returncode == 0, done.stderr

    def helm(self, verb: str, *arguments: str, chart: Path = CHART) -> Any:
        return helm(
            verb, self.name, chart, "--namespace", self.namespace, *self.arguments, *arguments
        )

    async def get(self, group: str, plural: str, name: str) -> Object:
        """An object in the release's namespace."""
        return await self.api.get(f"{group}/namespaces/{self.namespace}/{plural}/{name}")

    async def deployment(self) -> Object:
        return await self.get("/apis/apps/v1", "deployments", f"{self.name}-sluice")


@asynccontextmanager
async def new_release(api: Api) -> AsyncIterator[Release]:
    """Not installed yet; whatever is installed goes at the end."""
    name = f"r-{uuid.uuid4().hex[:8]}"
    await make_namespace(api, name)
    release = Release(api, name, name, await age_arguments(api))
    try:
        yield release
    finally:
        helm("uninstall", name, "--namespace", name, "--ignore-not-found")
        await api.delete(f"/api/v1/namespaces/{name}", {})


async def age_arguments(api: Api) -> list[str]:
    """Return helm's arguments for the age of the API server.

    Before 1.25 the schema of CRDs has no CEL, and helm refuses the unknown field unless its
    validation is off.
    """
    version = await api.get("/version")
    is_old = (int(version["major"]), int(version["minor"].rstrip("+"))) < (1, 25)
    return ["--disable-openapi-validation"] if is_old else []


async def make_namespace(api: Api, name: str) -> None:
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
    try:
        await api.create("/api/v1/namespaces", body)
    except errors.AlreadyExistsError:
        return
