"""No process outlives its pod, whatever dies and however."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import psutil
import pytest

from sluice_operator.cluster import LocalCluster
from sluice_operator.plan import Deletion
from sluice_operator.reconcile import run_job
from tests.integration.local_cluster.local_jobs import alive, make_job, spawn_host, until

# Leaves behind: a deaf child in another session, a daemon (double fork), and a daemon that
# starts a child later.
BROOD = """
    import os, signal, subprocess, sys, time
    def deaf(seconds=600):
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        code += f" time.sleep({seconds})"
        return [sys.executable, "-S", "-c", code]
    subprocess.Popen(deaf(), start_new_session=True)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            subprocess.Popen(deaf())
            time.sleep(600)
        os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(0.3)
    open(os.environ["SLUICE_RUN_DIR"] + "/ready", "w").close()
"""
FOREVER = BROOD + "    time.sleep(600)\n"


def ready(run_dir: Path) -> bool:
    return (run_dir / "volumes/run/ready").exists() and len(alive(run_dir)) >= 5


async def gone(run_dir: Path) -> None:
    await until(lambda: alive(run_dir) == [], "all processes of the run are gone", 8)


async def test_a_container_that_ends_takes_its_brood_along(tmp_path: Path) -> None:
    async with LocalCluster(tmp_path) as cluster:
        status = await run_job(cluster, make_job(BROOD))
        assert status.state == "Succeeded"
        assert alive(tmp_path) == []


async def test_host_killed(tmp_path: Path) -> None:
    host = await spawn_host(tmp_path, make_job(FOREVER))
    await until(lambda: ready(tmp_path), "the job runs")
    host.kill()
    await host.wait()
    await gone(tmp_path)


async def test_host_killed_again_and_again_while_it_starts(tmp_path: Path) -> None:
    for milliseconds in (150, 250, 350, 450):
        host = await spawn_host(tmp_path, make_job(FOREVER))
        await asyncio.sleep(milliseconds / 1000)
        host.kill()
        await host.wait()
    await gone(tmp_path)


async def test_host_terminated(tmp_path: Path) -> None:
    job = make_job("import time; open('/dev/null'); time.sleep(600)")
    host = await spawn_host(tmp_path, job)
    await until(lambda: list(tmp_path.glob("logs/*trainer.log")), "the trainer started")
    host.terminate()
    output, _ = await host.communicate()
    assert (host.returncode, output) == (130, b"suspended\n")
    assert alive(tmp_path) == []


def supervisor_of(run_dir: Path, container: str) -> psutil.Process:
    for pid in alive(run_dir):
        with contextlib.suppress(psutil.Error):  # one that has just ended
            process = psutil.Process(pid)
            name = process.environ().get("SLUICE_POD_ID", "")
            if name.endswith(f"/{container}/") and "supervisor.py" in " ".join(process.cmdline()):
                return process
    raise AssertionError(f"no supervisor of {container}")


async def test_supervisor_killed(tmp_path: Path) -> None:
    job = make_job(FOREVER, failurePolicy={"maxRestarts": 0})
    async with LocalCluster(tmp_path) as cluster:
        task = asyncio.create_task(run_job(cluster, job))
        await until(lambda: ready(tmp_path), "the job runs")
        supervisor_of(tmp_path, "trainer").kill()
        status = await asyncio.wait_for(task, 10)
    assert status.last_failure is not None
    assert (status.state, status.last_failure.exit_code) == ("Failed", 137)
    assert alive(tmp_path) == []


async def test_host_and_supervisor_killed_together(tmp_path: Path) -> None:
    """The container itself needs no sweep of the next run; only its descendants do."""
    host = await spawn_host(tmp_path, make_job(FOREVER))
    await until(lambda: ready(tmp_path), "the job runs")
    supervisor = supervisor_of(tmp_path, "trainer")
    os.kill(supervisor.pid, signal.SIGSTOP)
    host.kill()
    supervisor.kill()
    await host.wait()
    async with LocalCluster(tmp_path):
        assert alive(tmp_path) == []


async def test_a_deaf_pod_is_killed_after_its_grace(tmp_path: Path) -> None:
    async with LocalCluster(tmp_path) as cluster:
        job = make_job(FOREVER)
        task = asyncio.create_task(run_job(cluster, job))
        await until(lambda: ready(tmp_path), "the job runs")
        task.cancel()
        await asyncio.sleep(0.5)
        assert ready(tmp_path)  # SIGTERM was ignored, its grace of 120 s runs
        await cluster.delete(job, [Deletion("Pod", "demo-trainer-0-1-0", 1)])
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 10)
        assert alive(tmp_path) == []


async def test_the_host_adopts_no_zombies(tmp_path: Path) -> None:
    async with LocalCluster(tmp_path) as cluster:
        task = asyncio.create_task(
            run_job(cluster, make_job(FOREVER, failurePolicy={"maxRestarts": 0}))
        )
        await until(lambda: ready(tmp_path), "the job runs")
        supervisor_of(tmp_path, "trainer").kill()
        await asyncio.wait_for(task, 10)
    zombies = [
        child for child in psutil.Process().children() if child.status() == psutil.STATUS_ZOMBIE
    ]
    assert zombies == []
