"""What an API server warns of while it takes a job's objects reaches the job's user: over real HTTP, once."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio.client.configuration import Configuration
from world import make_job

from sluice.api import RLJob, manifest
from sluice_operator.cluster.keys import JobKeys
from sluice_operator.cluster.kube.api import Api
from sluice_operator.cluster.kube.cluster import KubeCluster
from sluice_operator.cluster.store import compact

OLD = '299 - "spec.nodeSelector[beta.kubernetes.io/os]: deprecated since v1.14"'


class Server:
    """Warns of every pod; refuses those of the names in `refused`."""

    def __init__(self) -> None:
        self.refused: set[str] = set()
        self.events: list[dict[str, Any]] = []

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["kind"] == "Event":
            self.events.append(body)
            return web.json_response(body)
        if body["metadata"]["name"] in self.refused:
            return web.json_response({"message": "exceeded quota"}, status=403)
        body["metadata"] |= {"namespace": "default", "uid": body["metadata"]["name"], "resourceVersion": "2"}
        return web.json_response(body, headers={"Warning": OLD})


def stored_job() -> dict[str, Any]:
    document = manifest(make_job())
    document["metadata"] |= {"namespace": "default", "uid": "1234", "generation": 1, "resourceVersion": "1"}
    return compact(document)


def pods(*names: str) -> list[dict[str, Any]]:
    return [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {}}, "spec": {}} for name in names]


async def test_a_warning_becomes_one_event_whatever_becomes_of_other_pods() -> None:
    server, document = Server(), stored_job()
    job = RLJob.model_validate(document)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    async with TestServer(app) as running:
        configuration = Configuration()
        configuration.host = str(running.make_url("")).rstrip("/")
        async with Api(configuration) as api:
            cluster = KubeCluster(api, "one", JobKeys(bytes(32)), "default")
            cluster.jobs.put(document)
            server.refused = {"b"}
            with pytest.raises(Exception, match="exceeded quota"):
                await cluster.apply(job, pods("a", "b"))
            await cluster.apply(job, pods("c"))
    ((reason, note),) = [(event["reason"], event["note"]) for event in server.events]
    assert reason == "ServerWarning"
    assert note == "Pod a: spec.nodeSelector[beta.kubernetes.io/os]: deprecated since v1.14"
