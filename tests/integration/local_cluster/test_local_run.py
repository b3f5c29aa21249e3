"""Jobs from start to end, on real processes."""

import asyncio
import itertools
from pathlib import Path

import pytest

from sluice.api import RLJob, RLJobStatus
from sluice_operator.cluster import LocalCluster
from sluice_operator.plan import Plan, Progress
from sluice_operator.plan.facts.constants import GRACE
from sluice_operator.reconcile import run_job
from tests.integration.local_cluster.local_jobs import alive, log, make_job, until, write


async def run(run_dir: Path, job: RLJob) -> RLJobStatus:
    async with LocalCluster(run_dir) as cluster:
        status = await run_job(cluster, job)
    assert alive(run_dir) == []
    return status


def attempts(status: RLJobStatus) -> dict[str, int]:
    return {role.name: role.attempt for role in status.roles}


def written(run_dir: Path, name: str) -> list[str]:
    return (run_dir / "volumes/run" / name).read_text().split()


async def test_a_trainer_that_ends_well_ends_the_job(tmp_path: Path) -> None:
    plans: list[Plan] = []
    async with LocalCluster(tmp_path) as cluster:
        job = make_job("print('trained')")
        status = await run_job(cluster, job, on_plan=plans.append)
        assert log(tmp_path, "demo-trainer-0-1-0.trainer") == "trained"
    assert status.state == "Succeeded"
    assert [event.reason for plan in plans for event in plan.events] == ["TrainerSucceeded"]
    assert alive(tmp_path) == []


async def test_a_failed_trainer_restarts_and_its_last_words_are_kept(tmp_path: Path) -> None:
    program = """
        import os, sys
        if os.environ["SLUICE_ATTEMPT"] == "1":
            print("step 1")
            sys.exit("error: out of memory")
    """
    status = await run(tmp_path, make_job(program))
    assert (status.state, status.restarts) == ("Succeeded", 1)
    failure = status.last_failure
    assert failure is not None
    assert (failure.pod, failure.container, failure.exit_code) == (
        "demo-trainer-0-1-0",
        "trainer",
        1,
    )
    assert failure.message == "step 1\nerror: out of memory"
    assert attempts(status) == {"rendezvous": 1, "buffer": 1, "rollout": 1, "trainer": 2}


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("sys.exit(7)", 7),
        ("os.kill(os.getpid(), 9)", 137),
        ("os.abort()", 134),
        ("os.execv('/nowhere', ['x'])", 1),
    ],
)
async def test_exit_codes(tmp_path: Path, ending: str, code: int) -> None:
    job = make_job(f"import os, sys; {ending}", failurePolicy={"maxRestarts": 0})
    status = await run(tmp_path, job)
    assert status.state == "Failed"
    assert status.condition("Failed").reason == "ReachedMaxRestarts"  # type: ignore[union-attr]
    assert status.last_failure is not None
    assert status.last_failure.exit_code == code


async def test_a_configuration_error_is_not_tried_again(tmp_path: Path) -> None:
    program = "import sys; print('error: no such dataset', file=sys.stderr); sys.exit(2)"
    status = await run(tmp_path, make_job(buffer=program))
    condition = status.condition("Failed")
    assert condition is not None
    assert (condition.reason, condition.message) == (
        "InvalidConfiguration",
        "demo-buffer-0-1-0: buffer: no such dataset",
    )


async def test_a_trainer_gang_restarts_as_one(tmp_path: Path) -> None:
    program = f"""
        import os, sys, time
        {write("started", "os.environ['SLUICE_ATTEMPT'] + '-' + os.environ['SLUICE_INDEX']")}
        if os.environ["SLUICE_ATTEMPT"] == "1":
            time.sleep(0.3 if os.environ["SLUICE_INDEX"] == "1" else 600)
            sys.exit(1)
    """
    status = await run(tmp_path, make_job(program, trainer_spec={"nodes": 2}))
    assert status.state == "Succeeded"
    started = written(tmp_path, "started")
    assert (sorted(started[:2]), sorted(started[2:])) == (["1-0", "1-1"], ["2-0", "2-1"])


async def test_a_rollout_restarts_with_growing_delay_while_the_trainer_goes_on(
    tmp_path: Path,
) -> None:
    worker = f"""
        import os, sys, time
        os.environ["SLUICE_RUN_DIR"] = {str(tmp_path)!r}
        {write("workers", "str(time.time())")}
        sys.exit(1)
    """
    (tmp_path / "workers").touch()
    trainer = (
        f"import os, time\nwhile len(open({str(tmp_path / 'workers')!r}).read().split()) < 3: "
        "time.sleep(0.05)"
    )
    status = await run(
        tmp_path, make_job(f"import time; time.sleep(0.5)\n{trainer}", worker=worker)
    )
    assert (status.state, attempts(status)["trainer"]) == ("Succeeded", 1)
    times = [float(moment) for moment in (tmp_path / "workers").read_text().split()]
    delays = [after - before for before, after in itertools.pairwise(times)]
    assert delays[0] > 1
    assert delays[1] > 2
    assert status.last_failure is not None
    assert status.last_failure.container == "worker"


TRAIN_UNTIL_TOLD = f"""
    import os, signal, sys, time
    def stop(*_):
        {write("log", "'stopped' + os.environ['SLUICE_ATTEMPT']")}
        sys.exit(143)
    signal.signal(signal.SIGTERM, stop)
    {write("log", "'started' + os.environ['SLUICE_ATTEMPT']")}
    if os.environ["SLUICE_ATTEMPT"] == "1":
        time.sleep(600)
"""


async def test_a_cancelled_run_ends_cleanly_and_goes_on_later(tmp_path: Path) -> None:
    log = tmp_path / "volumes/run/log"
    job = make_job(TRAIN_UNTIL_TOLD)
    async with LocalCluster(tmp_path) as cluster:
        task = asyncio.create_task(run_job(cluster, job))
        await until(log.exists, "the trainer started")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        status = (await cluster.observe(job)).status
        assert status is not None
        assert status.state == "Suspended"
        assert alive(tmp_path) == []
    status = await run(tmp_path, job)
    assert (status.state, status.restarts) == ("Succeeded", 0)
    assert log.read_text().split() == ["started1", "stopped1", "started2"]


async def test_a_second_cancel_kills(tmp_path: Path) -> None:
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', "
        "flush=True); time.sleep(600)"
    )
    job = make_job(deaf)
    async with LocalCluster(tmp_path) as cluster:
        task = asyncio.create_task(run_job(cluster, job))
        await until(
            lambda: any("deaf" in log.read_text() for log in tmp_path.glob("logs/*trainer.log")),
            "it is deaf",
        )
        task.cancel()
        await asyncio.sleep(0.3)
        assert not task.done()
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=GRACE["trainer"] / 2)
        assert done, "it was not killed, but waited for"
        assert task.cancelled()
    assert alive(tmp_path) == []


async def test_a_hung_trainer_is_restarted(tmp_path: Path) -> None:
    program = "import os, time; time.sleep(600 if os.environ['SLUICE_ATTEMPT'] == '1' else 0)"

    async def probe() -> Progress:
        return Progress(step=4, engines=1, engines_in_sync=1)

    async with LocalCluster(tmp_path) as cluster:
        status = await run_job(cluster, make_job(program, progressDeadlineSeconds=2), probe=probe)
    assert (status.state, status.step, status.restarts) == ("Succeeded", 4, 1)
    assert status.last_failure is not None
    assert status.last_failure.reason == "ProgressDeadlineExceeded"


async def test_a_trainer_that_has_ended_is_asked_for_its_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However fast its steps are, and however seldom it is asked."""
    monkeypatch.setattr("sluice_operator.reconcile.PROBE_SECONDS", 600)
    trained = tmp_path / "trained"

    async def probe() -> Progress:
        return Progress(step=9 if trained.exists() else 4)

    async with LocalCluster(tmp_path / "run") as cluster:
        program = f"import pathlib, time; time.sleep(0.3); pathlib.Path({str(trained)!r}).touch()"
        status = await run_job(cluster, make_job(program), probe=probe)
    assert (status.state, status.step) == ("Succeeded", 9)


async def test_a_probe_that_fails_or_hangs_stops_nothing(tmp_path: Path) -> None:
    async def probe() -> Progress:
        await asyncio.sleep(0.1)
        raise ConnectionError("no buffer")

    async with LocalCluster(tmp_path) as cluster:
        status = await run_job(cluster, make_job("import time; time.sleep(0.5)"), probe=probe)
    assert status.state == "Succeeded"


async def test_a_failed_job_is_tried_again_when_asked(tmp_path: Path) -> None:
    program = "import os, sys; sys.exit(1 if os.environ['SLUICE_ATTEMPT'] == '1' else 0)"
    job = make_job(program, failurePolicy={"maxRestarts": 0})
    assert (await run(tmp_path, job)).state == "Failed"
    assert (await run(tmp_path, job)).state == "Failed"
    async with LocalCluster(tmp_path) as cluster:
        status = await run_job(cluster, job, reopen=("Failed",))
    assert status.state == "Succeeded"


async def test_a_suspended_job_starts_nothing(tmp_path: Path) -> None:
    status = await run(tmp_path, make_job(suspend=True))
    assert status.state == "Suspended"
    assert list(tmp_path.glob("logs/*")) == []


async def test_rows_of_own_code_are_made_before_the_buffer_starts_and_once(tmp_path: Path) -> None:
    """Each attempt of the buffer finds the same rows, though the code yields others every time."""
    (tmp_path / "tasks.py").write_text(
        "import time\n\ndef now():\n    yield {'prompt': str(time.time())}\n"
    )
    buffer = f"""
        import glob, os, sys, time
        (file,) = glob.glob(os.environ["SLUICE_STORAGE"] + "/rows/*.jsonl")
        open({str(tmp_path / "seen")!r}, "a").write(open(file).read())
        time.sleep(600) if os.environ["SLUICE_ATTEMPT"] == "2" else sys.exit(1)
    """
    (tmp_path / "seen").touch()
    trainer = (
        f"import time\nwhile len(open({str(tmp_path / 'seen')!r}).readlines()) < 2: "
        "time.sleep(0.05)"
    )
    source = {"source": {"function": f"{tmp_path}/tasks.py:now"}}
    status = await run(
        tmp_path / "run", make_job(trainer, buffer=buffer, data={"prompts": [source]})
    )
    assert status.state == "Succeeded"
    first, second = (tmp_path / "seen").read_text().splitlines()
    assert first == second
