"""`sluice status` and `sluice logs` on a real API server, as a user calls them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sluice.runtime.extras import install_command
from sluice_operator.cluster.kube.api import Api
from tests.cluster.conftest import CRDS
from tests.cluster.control_plane import ControlPlane
from tests.cluster.operators import Operator
from tests.cluster.world import World

Answer = tuple[int, str, str]


async def sluice(*arguments: str, cwd: Path, **variables: str) -> Answer:
    """Exit code, stdout, stderr."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "sluice_cli",
        *arguments,
        cwd=cwd,
        env=os.environ | {"COLUMNS": "200"} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode or 0, out.decode(), err.decode()


async def test_status_shows_what_the_operator_and_the_kubelets_say(
    operator: Operator, world: World, tmp_path: Path
) -> None:
    await world.running(5, activeDeadlineSeconds=3600, failurePolicy={"maxRestarts": 5})
    await world.bind("demo-rollout-0-1-0")
    await world.finish("demo-trainer-0-1-0", 1, "step 3\nerror: loss is not finite")

    async def has_restarted() -> bool:
        return "demo-trainer-0-2-0" in await world.names()

    await world.until(has_restarted)
    code, out, err = await sluice("status", "demo", "-n", world.namespace, cwd=tmp_path)
    assert (code, err) == (0, "")
    words = [line.split() for line in out.splitlines()]
    assert words[0][:3] == ["RLJob", "demo", "Restarting"]
    assert f"namespace {world.namespace}" in out
    assert ["trainer", "0/1", "2", "1"] in words
    assert ["demo-rollout-0-1-0", "Running", "nowhere"] in [line[:3] for line in words]
    assert "the job fails if it still runs (activeDeadlineSeconds)" in out
    assert "demo-trainer-0-1-0, container trainer: Error, exit code 1" in out
    assert "error: loss is not finite" in out
    assert (
        f"what to do: see the whole log with: sluice logs demo trainer -n {world.namespace}" in out
    )
    assert "GangRestarting" in out


async def test_jobs_are_listed_for_people_and_programs(
    operator: Operator, world: World, tmp_path: Path
) -> None:
    await world.running(5)
    list_jobs = ("list", "-n", world.namespace)
    code, out, err = await sluice(*list_jobs, cwd=tmp_path)
    assert (code, err) == (0, "")
    head, line = [line.split() for line in out.splitlines()]
    assert head[:3] == ["name", "where", "state"]
    assert line[:3] == ["demo", f"{world.namespace}/demo", "Starting"]
    code, out, _ = await sluice(*list_jobs, "-o", "json", cwd=tmp_path)
    [listed] = json.loads(out)
    assert (code, listed["name"], listed["where"]) == (0, "demo", f"{world.namespace}/demo")
    code, out, _ = await sluice("list", "-A", "-o", "json", cwd=tmp_path)
    assert f"{world.namespace}/demo" in [job["where"] for job in json.loads(out)]
    code, out, _ = await sluice("status", "demo", "-n", world.namespace, "-o", "json", cwd=tmp_path)
    status = json.loads(out)
    assert (code, status["job"]["metadata"]["name"]) == (0, "demo")
    assert "demo-trainer-0-1-0" in [pod["name"] for pod in status["pods"]]


async def test_watch_ends_with_the_job(operator: Operator, world: World, tmp_path: Path) -> None:
    await world.running(5)
    watching = asyncio.create_task(
        sluice("status", "demo", "-n", world.namespace, "--watch", cwd=tmp_path)
    )
    await asyncio.sleep(8)  # the command starts in a second; on a busy machine in several
    await world.finish("demo-trainer-0-1-0", 0)
    code, out, _ = await watching
    assert code == 0
    assert out.index("RLJob demo  Starting") < out.index("RLJob demo  Succeeded")


async def test_a_job_that_is_not_there_is_named_with_its_namespace(
    world: World, tmp_path: Path
) -> None:
    for command in ("status", "logs"):
        code, _, err = await sluice(command, "nobody", "-n", world.namespace, cwd=tmp_path)
        assert code == 1
        assert err.startswith(
            f"error: there is no RLJob nobody in namespace {world.namespace}; look with: kubectl "
            "get"
        )


async def test_a_job_that_is_not_there_is_told_with_those_that_are(
    world: World, tmp_path: Path
) -> None:
    await world.create()
    _, _, err = await sluice("status", "nobody", "-n", world.namespace, cwd=tmp_path)
    assert f"there is no RLJob nobody in namespace {world.namespace}, which has demo" in err


async def test_the_namespace_is_that_of_the_context(
    plane: ControlPlane, world: World, tmp_path: Path
) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    write_context(Path(plane.kubeconfig), kubeconfig, namespace=world.namespace)
    _, _, err = await sluice("status", "nobody", cwd=tmp_path, KUBECONFIG=str(kubeconfig))
    assert f"in namespace {world.namespace}" in err


async def test_without_rights_the_verb_and_the_resource_are_named(
    plane: ControlPlane, world: World, tmp_path: Path
) -> None:
    await world.create()
    kubeconfig = tmp_path / "kubeconfig"
    write_context(Path(plane.kubeconfig), kubeconfig, token=await token_of_eve(world))
    code, _, err = await sluice(
        "status", "demo", "-n", world.namespace, cwd=tmp_path, KUBECONFIG=str(kubeconfig)
    )
    assert code == 1
    assert f"error: you have no right to get rljobs in namespace {world.namespace}" in err
    assert 'eve" cannot get resource "rljobs"' in err


async def test_who_is_not_known_is_told(plane: ControlPlane, world: World, tmp_path: Path) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    write_context(Path(plane.kubeconfig), kubeconfig, token="wrong")
    code, _, err = await sluice(
        "status", "demo", "-n", world.namespace, cwd=tmp_path, KUBECONFIG=str(kubeconfig)
    )
    assert code == 1
    assert "the API server does not know you" in err


async def test_without_a_kubeconfig_that_is_said(tmp_path: Path) -> None:
    nowhere = {"KUBECONFIG": str(tmp_path / "none"), "HOME": str(tmp_path)}
    code, _, err = await sluice("status", "demo", cwd=tmp_path, **nowhere)
    assert code == 1
    assert "no API server is known" in err
    assert "or give --run-dir DIR" in err


async def test_an_api_server_that_is_away_is_told(plane: ControlPlane, tmp_path: Path) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    write_context(Path(plane.kubeconfig), kubeconfig, server="https://127.0.0.1:9")
    code, _, err = await sluice(
        "status", "demo", "-n", "x", cwd=tmp_path, KUBECONFIG=str(kubeconfig)
    )
    assert code == 1
    assert "no answer from the API server" in err


async def test_a_cluster_without_the_crd_is_told(api: Api, world: World, tmp_path: Path) -> None:
    """Served no more, but kept with its objects: other tests need it."""
    crd = f"{CRDS}/rljobs.sluice.dev"
    versions = (await api.get(crd))["spec"]["versions"]
    other = {**versions[0], "name": "v9", "storage": False}
    await api.merge(crd, {"spec": {"versions": [{**versions[0], "served": False}, other]}})
    try:

        async def is_away() -> bool:
            return (
                "is not installed"
                in (await sluice("status", "demo", "-n", world.namespace, cwd=tmp_path))[2]
            )

        await world.until(is_away)
    finally:
        await api.merge(crd, {"spec": {"versions": versions}})
        await world.until(lambda: _serves(world))


async def test_logs_that_no_kubelet_serves_are_named_one_by_one(
    operator: Operator, world: World, tmp_path: Path
) -> None:
    await world.running(5)
    await world.bind(*await world.names())
    code, out, err = await sluice("logs", "demo", "-n", world.namespace, cwd=tmp_path)
    assert (code, out) == (1, "")
    names = ["buffer-0-1-0", "rendezvous-0-1-0", "trainer-0-1-0"]
    names += [
        f"rollout-{replica}-1-0/{container}"
        for replica in (0, 1)
        for container in ("engine", "worker")
    ]
    lines = err.removeprefix("error: ").splitlines()
    why = 'its node is not there to give it (pods "nowhere" not found)'
    assert sorted(lines) == sorted(f"no log of {name}: {why}" for name in names)


async def test_following_a_job_that_has_ended_ends(
    operator: Operator, world: World, tmp_path: Path
) -> None:
    await world.running(5)
    await world.bind("demo-trainer-0-1-0")
    await world.finish("demo-trainer-0-1-0", 0)
    await world.until_state("Succeeded")
    code, _, err = await sluice(
        "logs", "demo", "trainer", "-f", "-n", world.namespace, cwd=tmp_path
    )
    assert code == 0
    assert err.startswith("no log of trainer-0-1-0: ")


async def test_logs_of_pods_that_wait_say_for_what(
    operator: Operator, world: World, tmp_path: Path
) -> None:
    await world.create()
    await world.until_pods(5)
    code, _, err = await sluice("logs", "demo", "trainer", "-n", world.namespace, cwd=tmp_path)
    assert code == 1
    assert err == "error: trainer-0-1-0 has no log yet: the pod waits for a node\n"


async def test_a_role_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    code, _, err = await sluice("logs", "demo", "driver", cwd=tmp_path)
    assert (code, err) == (
        2,
        "error: there is no role driver; expected one of rendezvous, buffer, rollout, trainer\n",
    )


@pytest.mark.parametrize("module", ["kubernetes", "aiohttp", "cryptography"])
async def test_without_the_kubernetes_client_the_extra_is_named(
    tmp_path: Path, module: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.modules[{module!r}] = None\n")
    code, _, err = await sluice("status", "demo", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert code == 1
    assert install_command("operator") in err


async def test_a_stranger_is_told_which_right_a_list_needs(
    plane: ControlPlane, world: World, tmp_path: Path
) -> None:
    config = tmp_path / "kubeconfig"
    write_context(Path(plane.kubeconfig), config, token=await token_of_eve(world))
    code, _, err = await sluice("list", "-n", world.namespace, cwd=tmp_path, KUBECONFIG=str(config))
    assert code == 1
    assert f"you have no right to list rljobs in namespace {world.namespace}" in err


async def token_of_eve(world: World) -> str:
    """Return the token of a service account without any rights."""
    accounts = f"/api/v1/namespaces/{world.namespace}/serviceaccounts"
    await world.api.create(
        accounts, {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "eve"}}
    )
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    return str((await world.api.create(f"{accounts}/eve/token", request))["status"]["token"])


def write_context(
    administrator: Path, target: Path, *, namespace: str = "", token: str = "", server: str = ""
) -> None:
    """Write the administrator's kubeconfig with another namespace, token or server, as JSON."""
    from ruamel.yaml import YAML

    config = YAML(typ="safe").load(administrator.read_text())
    current = next(
        entry for entry in config["contexts"] if entry["name"] == config["current-context"]
    )
    user = next(
        entry["user"] for entry in config["users"] if entry["name"] == current["context"]["user"]
    )
    cluster = next(
        entry["cluster"]
        for entry in config["clusters"]
        if entry["name"] == current["context"]["cluster"]
    )
    current["context"] |= {"namespace": namespace} if namespace else {}
    user |= {"token": token} if token else {}
    cluster |= {"server": server} if server else {}
    target.write_text(json.dumps(config))


async def _serves(world: World) -> bool:
    try:
        await world.objects("RLJob")
    except Exception:
        return False
    return True
