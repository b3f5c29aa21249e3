"""The run directory: one host at a time, and what survives it."""

import asyncio
import json
import os
import signal
import socket
from datetime import UTC, datetime
from pathlib import Path

import pytest

from sluice_operator.cluster import LocalCluster, RunDirectoryError
from sluice_operator.cluster.local import run_state
from sluice_operator.plan.facts import clock
from sluice_operator.reconcile import reconcile, run_job
from tests.integration.local_cluster.local_jobs import alive, make_job, spawn_host, until, write

SECOND_TIME = f"""
    import os, time
    {write("log", "os.environ['SLUICE_ATTEMPT'] + os.environ['SLUICE_RENDEZVOUS']")}
    time.sleep(600 if os.environ["SLUICE_ATTEMPT"] == "1" else 0)
"""


async def test_who_holds_the_lock_keeps_the_directory_after_the_cluster(tmp_path: Path) -> None:
    lock = await run_state.lock(tmp_path, 0)
    async with LocalCluster(tmp_path, lock=lock):
        assert run_state.is_locked(tmp_path)
    with pytest.raises(RunDirectoryError, match="is in use by process"):
        await run_state.lock(tmp_path, 0.1)
    os.close(lock)
    assert not run_state.is_locked(tmp_path)


async def test_a_second_host_is_told_who_is_there(tmp_path: Path) -> None:
    async with LocalCluster(tmp_path):
        with pytest.raises(RunDirectoryError, match=f"is in use by process {os.getpid()} "):
            async with LocalCluster(tmp_path, lock_seconds=0.2):
                raise AssertionError("two hosts")


async def test_a_job_goes_on_after_its_host_was_killed(tmp_path: Path) -> None:
    job = make_job(SECOND_TIME)
    log = tmp_path / "volumes/run/log"
    host = await spawn_host(tmp_path, job)
    await until(lambda: log.exists() and bool(log.read_text()), "the trainer started")
    host.kill()
    async with LocalCluster(
        tmp_path
    ) as cluster:  # at once: it waits for the supervisors of the killed one
        status = await run_job(cluster, job)
    await host.wait()
    assert (status.state, status.restarts) == ("Succeeded", 0)
    first, second = log.read_text().split()
    assert (first[0], second[0]) == ("1", "2")
    assert first[1:] == second[1:]  # the rendezvous has the same address
    assert {role.attempt for role in status.roles} == {2}


DEAF = f"""
    import os, signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    {write("log", "os.environ['SLUICE_ATTEMPT']")}
    time.sleep(600 if os.environ["SLUICE_ATTEMPT"] == "1" else 0)
"""


@pytest.mark.parametrize(
    "end", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "told twice to stop"]
)
async def test_pods_that_were_being_deleted_are_gone_with_their_host(
    tmp_path: Path, end: signal.Signals
) -> None:
    """A run is killed, or stopped twice, while its pods take long to end.

    The next run does not wait for them: a trainer has 300 s, and a pod of a dead node 300 more.
    """
    log, state = tmp_path / "volumes/run/log", tmp_path / "state.json"
    host = await spawn_host(tmp_path, make_job(DEAF))
    await until(lambda: log.exists() and bool(log.read_text()), "the trainer started")
    host.terminate()
    await until(lambda: "deletionTimestamp" in state.read_text(), "pods are being deleted")
    host.send_signal(end)
    async with LocalCluster(tmp_path) as cluster:
        status = await asyncio.wait_for(run_job(cluster, make_job(DEAF)), 60)
    await host.wait()
    assert (status.state, status.restarts) == ("Succeeded", 0)
    assert log.read_text().split() == ["1", "2"]


async def test_a_port_that_somebody_took_is_replaced_between_runs(tmp_path: Path) -> None:
    job = make_job()
    async with LocalCluster(tmp_path) as cluster:
        await reconcile(cluster, job, datetime.now(UTC))
    port = json.loads((tmp_path / "state.json").read_text())["ports"]["demo-rendezvous"]
    with socket.create_server(("127.0.0.1", port)):
        async with LocalCluster(tmp_path) as cluster:
            observed = await cluster.observe(job)
    service = observed.objects["Service", "demo-rendezvous"]
    assert service["spec"]["ports"][0]["port"] != port


async def test_a_success_that_the_host_did_not_live_to_see_is_kept(tmp_path: Path) -> None:
    job = make_job("")
    async with LocalCluster(tmp_path) as cluster:
        for _ in range(2):
            await reconcile(cluster, job, datetime.now(UTC))
        path = tmp_path / "state.json"
        await until(lambda: _phase(path, "demo-trainer-0-1-0") == "Succeeded", "the trainer ended")
    async with LocalCluster(tmp_path) as cluster:
        status = await run_job(cluster, job)
    assert status.state == "Succeeded"
    assert status.roles[-1].attempt == 1


def _phase(path: Path, pod: str) -> str:
    return str(json.loads(path.read_text())["pods"].get(pod, {}).get("status", {}).get("phase"))


async def test_a_directory_belongs_to_one_job(tmp_path: Path) -> None:
    async with LocalCluster(tmp_path) as cluster:
        await run_job(cluster, make_job(""))
        with pytest.raises(RunDirectoryError, match="belongs to RLJob default/demo"):
            await run_job(cluster, make_job("", name="other"))


async def test_a_broken_state_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(RunDirectoryError, match=r"state\.json: not a state file"):
        async with LocalCluster(tmp_path):
            raise AssertionError("opened")
    async with asyncio.timeout(60):
        (tmp_path / "state.json").unlink()
        # The failed opening does not keep the lock.
        async with LocalCluster(tmp_path, lock_seconds=0.0):
            assert alive(tmp_path) == []


async def test_the_token_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    async with LocalCluster(tmp_path) as cluster:
        await reconcile(cluster, make_job(), datetime.now(UTC))
    state = tmp_path / "state.json"
    assert state.stat().st_mode & 0o077 == 0
    token = json.loads(state.read_text())["objects"]["Secret/demo-token"]["stringData"]["token"]
    assert len(token) >= 32
    assert clock.text(datetime.now(UTC)).endswith("Z")
