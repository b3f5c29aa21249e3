"""Two installations for one namespace.

The second one says why it does not start, and takes over when the first is gone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sluice_operator.cluster.kube import namespace_lock
from sluice_operator.cluster.kube.namespace_lock import HeldError, NamespaceLocks
from sluice_operator.cluster.kube.paths import path
from tests.cluster.conftest import StartOperator
from tests.cluster.control_plane import ControlPlane
from tests.cluster.operators import Operator
from tests.cluster.world import World


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def territory_of(
    world: World, installation: str, clock: Callable[[], float] = time.monotonic
) -> NamespaceLocks:
    return NamespaceLocks(world.api, installation, lambda: {world.namespace}, clock)


async def test_a_second_installation_says_why_it_does_not_start(
    plane: ControlPlane, start: StartOperator, world: World, tmp_path: Path
) -> None:
    await start()
    await world.until(lambda: holder_is(world, f"{world.namespace}/sluice-operator"))
    await world.create()
    await world.until_pods(5)
    second = Operator(
        plane.kubeconfig, world.namespace, tmp_path / "second.log", SLUICE_LEASE_NAME="other"
    )
    try:
        await world.until(lambda: says(second, "another operator"))
        code, text = second.get("/readyz")
        assert code == 503
        assert f"namespace {world.namespace} belongs to another operator of RLJobs" in text
        assert f"{world.namespace}/sluice-operator" in text
        assert "watchNamespaces" in text
        assert text.strip() in second.log.read_text()
        assert len(await world.names()) == 5
    finally:
        second.kill()


async def says(operator: Operator, words: str) -> bool:
    return words in operator.get("/readyz")[1]


async def holder_is(world: World, holder: str) -> bool:
    leases = await world.api.get(
        f"/apis/coordination.k8s.io/v1/namespaces/{world.namespace}/leases"
    )
    return [
        item["spec"]["holderIdentity"]
        for item in leases["items"]
        if item["metadata"]["name"] == namespace_lock.NAME
    ] == [holder]


async def test_replicas_are_one_installation(start: StartOperator, world: World) -> None:
    first, second = await start(SLUICE_IDENTITY="one"), await start(SLUICE_IDENTITY="two")
    await world.until(lambda: holder_is(world, f"{world.namespace}/sluice-operator"))
    assert [item.get("/readyz")[0] for item in (first, second)] == [200, 200]
    first.end()
    await world.create()
    await world.until_pods(5)


async def test_the_lease_of_one_that_is_gone_runs_out(world: World) -> None:
    clock = Clock()
    first, second = territory_of(world, "a/sluice", clock), territory_of(world, "b/sluice", clock)
    assert await first.may_work_in(world.namespace)
    assert not await second.may_work_in(world.namespace)
    clock.now += namespace_lock.SECONDS - 1
    assert not await second.may_work_in(world.namespace)
    clock.now += 2
    assert await second.may_work_in(world.namespace)
    with pytest.raises(HeldError, match="belongs to another operator of RLJobs, b/sluice"):
        await first._take(world.namespace)


async def test_one_that_renews_is_never_followed(world: World) -> None:
    clock = Clock()
    first, second = territory_of(world, "a/sluice", clock), territory_of(world, "b/sluice", clock)
    for _ in range(3):
        await first._take(world.namespace)
        assert not await second.may_work_in(world.namespace)
        clock.now += namespace_lock.SECONDS - 1


async def test_an_operator_of_all_namespaces_leaves_one_alone_that_is_anothers(
    start: StartOperator, plane: ControlPlane, world: World, tmp_path: Path
) -> None:
    await territory_of(world, "elsewhere/mine").settle([world.namespace])
    everywhere = {"SLUICE_WATCH_NAMESPACES": "", "SLUICE_LEASE_NAME": f"all-{world.namespace}"}
    operator = Operator(plane.kubeconfig, world.namespace, tmp_path / "all.log", **everywhere)
    try:
        await operator.ready()
        await world.create()
        await world.until(lambda: logs(operator, "ignoring a namespace"), 90)
        assert await world.names() == []
    finally:
        operator.kill()
        await world.api.delete(path("Lease", namespace_lock.ALWAYS, namespace_lock.NAME), {})


async def logs(operator: Operator, words: str) -> bool:
    return words in operator.log.read_text()


# -- helm test's program
# ----------------------------------------------------------------------------------------------


def selftest(
    plane: ControlPlane, world: World, *urls: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    settings = {
        "KUBECONFIG": plane.kubeconfig,
        "SLUICE_NAMESPACE": world.namespace,
        "SLUICE_WATCH_NAMESPACES": world.namespace,
        "SLUICE_LEASE_SECONDS": "3",
    }
    command = [sys.executable, "-m", "sluice_operator.selftest", *urls]
    environment = os.environ | settings | variables
    return subprocess.run(command, env=environment, text=True, capture_output=True, timeout=120)


async def test_the_selftest_sees_the_crd_the_leader_and_the_answer(
    plane: ControlPlane, operator: Operator, world: World
) -> None:
    done = selftest(plane, world, f"http://127.0.0.1:{operator.port}/readyz")
    assert done.returncode == 0, done.stderr
    served, led, answers = done.stdout.splitlines()
    assert served == f"RLJobs are served in {world.namespace}"
    assert led == "one leads"
    assert answers.endswith("/readyz answers 200")


async def test_the_selftest_says_what_is_missing(
    plane: ControlPlane, operator: Operator, world: World
) -> None:
    wrong = selftest(plane, world, "http://127.0.0.1:9/readyz")
    assert (wrong.returncode, "does not answer" in wrong.stderr) == (1, True)
    operator.kill()
    dead = selftest(plane, world)
    assert dead.returncode == 1
    assert f"no operator renews the lease {world.namespace}/sluice-operator" in dead.stderr
