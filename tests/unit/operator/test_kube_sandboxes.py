"""Sandboxes at an API server, if an answer or the operator's memory was lost."""

from __future__ import annotations

from typing import Any, cast

import pytest

from sluice_operator.cluster import errors
from sluice_operator.cluster.kube import sandboxes
from sluice_operator.cluster.kube.api import Api
from sluice_operator.plan import KubeObject
from tests.unit.operator.test_plan_sandboxes import agent_job, episode, of_pod

GROUP = {"versions": [{"version": "v1beta1"}, {"version": "v1alpha1"}]}
HERE = "/apis/agents.x-k8s.io/v1beta1/namespaces/default/sandboxes"
NAME = "demo-episode-0-1-0-4"
JOB = agent_job()


class Server:
    """An API server that has one Sandbox at most. refusal: its answer to all that is asked."""

    def __init__(self, stored: KubeObject | None = None) -> None:
        self.stored, self.refusal = stored, cast(errors.ApiError | None, None)
        self.deleted: list[tuple[str, Any]] = []
        self.requests: list[str] = []

    async def get(self, path: str) -> KubeObject:
        self.requests.append(path)
        if self.refusal is not None:
            raise self.refusal
        if path == "/apis/agents.x-k8s.io":
            return GROUP
        if self.stored is None:
            raise errors.NotFoundError("no such Sandbox", 404)
        return self.stored

    async def pages(self, path: str, selector: str) -> Any:
        self.requests.append(f"{path}?{selector}")
        yield {"items": [self.stored] if self.stored else None}

    async def create(self, path: str, body: KubeObject, warned: Any) -> KubeObject:
        if self.refusal is not None:
            raise self.refusal
        if self.stored is not None:
            raise errors.AlreadyExistsError("it is there", 409)
        self.stored = body | {"metadata": body["metadata"] | {"uid": "s-1"}}
        return self.stored

    async def delete(self, path: str, options: KubeObject) -> KubeObject:
        self.deleted.append((path, options["preconditions"]["uid"]))
        self.stored = None
        return {"kind": "Status"}


def a_sandbox(owner: str = "1234") -> KubeObject:
    _, body = of_pod()
    owners = [{**body["metadata"]["ownerReferences"][0], "uid": owner}]
    return body | {"metadata": body["metadata"] | {"uid": "s-1", "ownerReferences": owners}}


def sandboxes_at(server: Server) -> sandboxes.Sandboxes:
    return sandboxes.Sandboxes(cast(Api, server))


def unheard(text: str) -> None:
    raise AssertionError(text)


async def names(memory: sandboxes.Sandboxes, *pods: KubeObject) -> list[str]:
    return [item["metadata"]["name"] for item in (await memory.of_job(JOB, pods))[1]]


async def test_a_creation_whose_answer_was_lost_is_done() -> None:
    memory = sandboxes_at(Server(a_sandbox()))
    await memory.create(JOB, a_sandbox(), unheard)
    assert await names(memory) == [NAME]


async def test_a_sandbox_of_somebody_else_is_not_taken() -> None:
    memory = sandboxes_at(Server(a_sandbox(owner="4321")))
    with pytest.raises(errors.ForeignObjectError, match=f"Sandbox {NAME} is needed by RLJob"):
        await memory.create(JOB, a_sandbox(), unheard)
    assert await names(memory) == []


async def test_an_operator_that_has_just_started_knows_a_sandbox_by_its_pod() -> None:
    server = Server(a_sandbox())
    await sandboxes_at(server).delete(JOB, NAME, [episode(0, 4)])
    assert server.deleted == [(f"{HERE}/{NAME}", "s")]


async def test_a_sandbox_is_deleted_once() -> None:
    server = Server(a_sandbox())
    memory = sandboxes_at(server)
    assert await names(memory) == [NAME]
    for _ in range(2):
        await memory.delete(JOB, NAME, [])
    assert server.deleted == [(f"{HERE}/{NAME}", "s-1")]
    assert await names(memory) == []


@pytest.mark.parametrize(
    ("pods", "expected"),
    [
        pytest.param([], [], id="without a pod it is looked for, and gone"),
        pytest.param([episode(0, 4)], [NAME], id="its pod speaks for it"),
    ],
)
async def test_who_has_no_pod_is_read_again(
    pods: list[KubeObject], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandboxes, "REREAD_SECONDS", 0.0)
    server = Server(a_sandbox())
    memory = sandboxes_at(server)
    assert await names(memory, episode(0, 4)) == [NAME]
    server.stored = None
    assert await names(memory, *pods) == expected


async def test_an_api_that_was_there_is_asked_for_anew() -> None:
    server = Server()
    memory = sandboxes_at(server)
    assert await memory.of_job(JOB, []) == ("v1beta1", ())
    server.refusal = errors.MissingApiError("no such API", 404)
    with pytest.raises(errors.MissingApiError):
        await memory.create(JOB, a_sandbox(), unheard)
    assert await memory.of_job(JOB, []) == ("", ())
    server.refusal = None
    assert (await memory.of_job(JOB, []))[0] == "v1beta1"


async def test_a_job_of_plain_pods_asks_for_no_sandboxes() -> None:
    server = Server()
    assert await sandboxes_at(server).of_job(agent_job({"sandbox": None}), []) == ("", ())
    assert server.requests == []
