"""Warnings of an API server reach the job's user once, over real HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio.client.configuration import Configuration

from sluice.api import RLJob, RLJobStatus, manifest
from sluice_operator.cluster.keys import JobKeys
from sluice_operator.cluster.kube.api import Api
from sluice_operator.cluster.kube.cluster import KubeCluster
from sluice_operator.cluster.kube.store import compact
from tests.unit.operator.world import make_job

UNKNOWN = '299 - "unknown field \\"status.mood\\""'
OLD = '299 - "spec.nodeSelector[beta.kubernetes.io/os]: deprecated since v1.14"'


class Server:
    """Warns of every pod and status; refuses pods of the names in `refused`."""

    def __init__(self) -> None:
        self.refused: set[str] = set()
        self.events: list[dict[str, Any]] = []

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.json()
        if request.method == "PATCH":
            return web.json_response(
                stored_job() | {"status": body["status"]}, headers={"Warning": UNKNOWN}
            )
        if body["kind"] == "Event":
            self.events.append(body)
            return web.json_response(body)
        if body["metadata"]["name"] in self.refused:
            return web.json_response({"message": "exceeded quota"}, status=403)
        body["metadata"] |= {
            "namespace": "default",
            "uid": body["metadata"]["name"],
            "resourceVersion": "2",
        }
        return web.json_response(body, headers={"Warning": OLD})


def stored_job() -> dict[str, Any]:
    document = manifest(make_job())
    document["metadata"] |= {
        "namespace": "default",
        "uid": "1234",
        "generation": 1,
        "resourceVersion": "1",
    }
    return compact(document)


def pods(*names: str) -> list[dict[str, Any]]:
    return [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {}}, "spec": {}}
        for name in names
    ]


@asynccontextmanager
async def cluster_of(server: Server) -> AsyncIterator[KubeCluster]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    async with TestServer(app) as running:
        configuration = Configuration()
        configuration.host = str(running.make_url("")).rstrip("/")
        async with Api(configuration) as api:
            cluster = KubeCluster(api, "one", JobKeys(bytes(32)), "default")
            cluster.jobs.put(stored_job())
            yield cluster


async def test_a_warning_becomes_one_event_whatever_becomes_of_other_pods() -> None:
    server, job = Server(), RLJob.model_validate(stored_job())
    async with cluster_of(server) as cluster:
        server.refused = {"b"}
        with pytest.raises(Exception, match="exceeded quota"):
            await cluster.apply(job, pods("a", "b"))
        await cluster.apply(job, pods("c"))
    ((reason, note),) = [(event["reason"], event["note"]) for event in server.events]
    assert reason == "ServerWarning"
    assert note == "Pod a: spec.nodeSelector[beta.kubernetes.io/os]: deprecated since v1.14"


async def test_so_does_one_of_a_status_whose_crd_is_older() -> None:
    server = Server()
    async with cluster_of(server) as cluster:
        for step in (1, 2):
            await cluster.store_status(stored_job(), RLJobStatus(step=step))
    assert [event["note"] for event in server.events] == ['RLJob demo: unknown field "status.mood"']
