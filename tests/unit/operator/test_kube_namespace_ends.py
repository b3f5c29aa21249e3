"""A namespace that is deleted takes its jobs along, whose pods Kueue would keep."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio.client.configuration import Configuration

from sluice.api import RLJob
from sluice_operator.cluster import errors
from sluice_operator.cluster.keys import JobKeys
from sluice_operator.cluster.kube.api import Api
from sluice_operator.cluster.kube.cluster import KubeCluster
from tests.unit.operator.test_server_warnings import pods, stored_job
from tests.unit.operator.world import make_pod

KEY = ("default", "demo")
OWNER = {
    "apiVersion": "sluice.dev/v1alpha1",
    "kind": "RLJob",
    "name": "demo",
    "uid": "1234",
    "controller": True,
}


class Server:
    """Refuses pods while the namespace ends; notes which pods were released."""

    def __init__(self) -> None:
        self.ends = True
        self.released: list[str] = []

    async def handle(self, request: web.Request) -> web.Response:
        body: dict[str, Any] = await request.json()
        if request.method == "PATCH":
            self.released.append(request.path.rpartition("/")[2])
        elif self.ends:
            causes = [{"reason": "NamespaceTerminating"}]
            answer = {"reason": "Forbidden", "details": {"causes": causes}}
            return web.json_response(answer, status=403)
        metadata = {"namespace": "default", "uid": "1", "resourceVersion": "2"}
        return web.json_response({**body, "metadata": metadata | body["metadata"]})


def kept_by_kueue() -> dict[str, Any]:
    pod = make_pod(phase="Failed")
    pod["metadata"] |= {
        "namespace": "default",
        "uid": "9",
        "resourceVersion": "1",
        "finalizers": ["kueue.x-k8s.io/managed"],
        "ownerReferences": [OWNER],
    }
    pod["metadata"]["labels"]["sluice.dev/pod-group"] = "demo-group-1234-1"
    return pod


async def test_pods_are_released_only_while_their_namespace_ends() -> None:
    server = Server()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    async with TestServer(app) as running:
        configuration = Configuration()
        configuration.host = str(running.make_url("")).rstrip("/")
        async with Api(configuration) as api:
            cluster = KubeCluster(api, "one", JobKeys(bytes(32)), "default")
            cluster.jobs.put(stored_job())
            cluster.pods.put(kept_by_kueue())
            job = RLJob.model_validate(stored_job())
            await cluster.release(KEY)
            assert server.released == [], "the job lives, and its pods are replaced"
            with pytest.raises(errors.NamespaceEndingError):
                await cluster.apply(job, pods("a"))
            await cluster.release(KEY)
            assert server.released == ["demo-trainer-0-1-0"]
            server.ends = False
            await cluster.apply(job, pods("b"))
            await cluster.release(KEY)
            assert len(server.released) == 1, "a namespace of that name was made again"
