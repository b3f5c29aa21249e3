"""A pod's surroundings on a laptop: ports, volumes, variables, GPUs."""

import asyncio
import json
from pathlib import Path
from typing import Any

from sluice_operator.cluster import LocalCluster
from sluice_operator.reconcile import run_job
from tests.integration.local_cluster.local_jobs import SLEEP, alive, log, make_job, wait_for_logs

DUMP = (
    "import json, os; open(os.environ['SLUICE_RUN_DIR'] + '/env.json', "
    "'w').write(json.dumps(dict(os.environ)))"
)


async def trainer_env(run_dir: Path, **options: object) -> dict[str, str]:
    async with LocalCluster(run_dir, **options) as cluster:  # type: ignore[arg-type]
        status = await run_job(cluster, make_job(DUMP))
    assert status.state == "Succeeded"
    directory = options.get("volumes", {}).get("run", run_dir / "volumes/run")  # type: ignore[attr-defined]
    environment: dict[str, str] = json.loads((directory / "env.json").read_text())
    return environment


async def test_the_environment_of_a_trainer(tmp_path: Path) -> None:
    env = await trainer_env(tmp_path, env={"EXTRA": "1"})
    assert env["SLUICE_BIND"] == env["SLUICE_ADVERTISE"] == "127.0.0.1"
    assert env["SLUICE_RENDEZVOUS"].startswith("127.0.0.1:")
    assert env["SLUICE_CHECKPOINT_DIR"] == str(tmp_path / "volumes/run/checkpoints")
    assert (
        len(
            {
                env["SLUICE_PORT_MASTER"],
                env["SLUICE_PORT_METRICS"],
                env["SLUICE_RENDEZVOUS"].split(":")[1],
            }
        )
        == 3
    )
    assert len(env["SLUICE_TOKEN"]) >= 32
    assert (env["EXTRA"], env["CUDA_VISIBLE_DEVICES"], env["OMP_NUM_THREADS"]) == ("1", "", "1")


async def test_a_volume_may_be_put_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    env = await trainer_env(tmp_path / "run", volumes={"run": tmp_path / "results"})
    assert env["SLUICE_RUN_DIR"] == str(tmp_path / "results")


async def test_the_rendezvous_binds_the_port_of_its_service(tmp_path: Path) -> None:
    server = """
        import os, socket, time
        address = os.environ["SLUICE_BIND"], int(os.environ["SLUICE_PORT_GRPC"])
        with socket.create_server(address): time.sleep(600)
    """
    client = """
        import os, socket, time
        host, port = os.environ["SLUICE_RENDEZVOUS"].split(":")
        for _ in range(100):
            try: socket.create_connection((host, int(port))); break
            except OSError: time.sleep(0.05)
        else: raise SystemExit(2)
    """
    async with LocalCluster(tmp_path) as cluster:
        status = await run_job(cluster, make_job(client, rendezvous=server))
    assert status.state == "Succeeded"


async def test_the_worker_finds_its_engine(tmp_path: Path) -> None:
    engine = (
        "import os, time; print('port', os.environ['SLUICE_PORT_HTTP'], flush=True); "
        "time.sleep(600)"
    )
    worker = (
        "import os, time; print('port', os.environ['SLUICE_ENGINE_URL'], flush=True); "
        "time.sleep(600)"
    )
    pod = "demo-rollout-0-1-0"
    trainer = wait_for_logs(tmp_path, "port", f"{pod}.engine", f"{pod}.worker")
    async with LocalCluster(tmp_path) as cluster:
        status = await run_job(cluster, make_job(trainer, engine=engine, worker=worker))
    assert status.is_true("Succeeded")
    port = log(tmp_path, f"{pod}.engine").removeprefix("port ")
    assert log(tmp_path, f"{pod}.worker") == f"port http://127.0.0.1:{port}"
    assert 20000 <= int(port) < 32000


async def test_a_program_that_does_not_exist(tmp_path: Path) -> None:
    job = make_job(
        failurePolicy={"maxRestarts": 0}, trainer_spec={"template": _command(["/no/such/program"])}
    )
    async with LocalCluster(tmp_path) as cluster:
        status = await run_job(cluster, job)
    assert status.last_failure is not None
    assert status.last_failure.exit_code == 127
    assert (
        status.last_failure.message
        == "error: cannot start /no/such/program: No such file or directory"
    )


async def test_a_volume_that_is_not_there_fails_the_job_at_once(tmp_path: Path) -> None:
    job = make_job("", model={"path": "x", "volume": {"hostPath": {"path": "/does/not/exist"}}})
    async with LocalCluster(tmp_path) as cluster:
        status = await run_job(cluster, job)
    condition = status.condition("Failed")
    assert condition is not None
    assert condition.reason == "InvalidConfiguration"
    assert condition.message.endswith(
        "volume model: /does/not/exist does not exist on this machine"
    )


async def test_gpus_go_round(tmp_path: Path) -> None:
    """Two rollout replicas and one trainer request a GPU each.

    There are two GPUs, so one pod waits and says so.
    """
    program = f"{DUMP}; import time; time.sleep(1.5)"
    job = make_job(
        program, trainer_spec={"gpusPerNode": 1}, rollout={"gpusPerReplica": 1, "replicas": 2}
    )
    messages = []
    async with LocalCluster(tmp_path, gpus=["4", "7", "8"]) as cluster:
        await run_job(cluster, job, on_plan=lambda plan: messages.append(plan.status.state))
    env = json.loads((tmp_path / "volumes/run/env.json").read_text())
    assert env["CUDA_VISIBLE_DEVICES"] == "8"


async def test_trainer_and_engines_share_the_gpus_that_they_claim_together(tmp_path: Path) -> None:
    """The trainer sees all of them, each engine its own; and so do those that come later."""
    engine = (
        "import os, time; print('GPUs', os.environ['CUDA_VISIBLE_DEVICES'], flush=True); "
        "time.sleep(600)"
    )
    engines = [f"demo-rollout-{replica}-1-0.engine" for replica in (0, 1)]
    seen = wait_for_logs(tmp_path, "GPUs", *engines)
    program = f"{DUMP}\n{seen}\nraise SystemExit(1 if os.environ['SLUICE_ATTEMPT'] == '1' else 0)"
    job = make_job(
        program,
        engine=engine,
        trainer_spec={"gpusPerNode": 4, "colocate": True},
        rollout={"gpusPerReplica": 2},
    )
    async with LocalCluster(tmp_path, gpus=["2", "3", "5", "7", "8"]) as cluster:
        status = await run_job(cluster, job)
    assert status.is_true("Succeeded")
    assert [log(tmp_path, engine) for engine in engines] == ["GPUs 2,3", "GPUs 5,7"]
    env = json.loads((tmp_path / "volumes/run/env.json").read_text())
    assert (env["SLUICE_ATTEMPT"], env["CUDA_VISIBLE_DEVICES"]) == ("2", "2,3,5,7")


async def test_a_claim_that_cannot_be_met_says_what_it_waits_for(tmp_path: Path) -> None:
    job = make_job("", trainer_spec={"gpusPerNode": 2, "colocate": True}, startupDeadlineSeconds=3,
                   rollout={"gpusPerReplica": 1})  # fmt: skip
    async with LocalCluster(tmp_path, gpus=["0"]) as cluster:
        status = await run_job(cluster, job)
    condition = status.condition("Failed")
    assert condition is not None
    assert "Unschedulable: 2 GPUs requested, 1 of 1 free" in condition.message


async def test_a_pod_without_gpus_says_what_it_waits_for(tmp_path: Path) -> None:
    job = make_job("", trainer_spec={"gpusPerNode": 1}, startupDeadlineSeconds=3)
    async with LocalCluster(tmp_path, gpus=[]) as cluster:
        status = await run_job(cluster, job)
    condition = status.condition("Failed")
    assert condition is not None
    assert condition.reason == "StartupDeadlineExceeded"
    assert condition.message.endswith(
        "demo-trainer-0-1-0: Unschedulable: 1 GPUs requested, 0 of 0 free"
    )


def _command(command: list[str]) -> dict[str, object]:
    return {"spec": {"containers": [{"name": "trainer", "command": command}]}}


def _with_inits(*programs: str, **fields: Any) -> dict[str, Any]:
    """A trainer whose pod has these init containers."""
    inits = [{"name": f"init-{i}", **_program(code)} for i, code in enumerate(programs)]
    return {"template": {"spec": {"initContainers": inits}}, **fields}


def _program(code: str) -> dict[str, object]:
    mounts = [{"name": "run", "mountPath": "/sluice/run"}]
    return {"image": "mine", "command": ["python", "-S", "-c", code], "volumeMounts": mounts}


async def test_init_containers_run_one_after_the_other_before_the_others(tmp_path: Path) -> None:
    say = "import time; time.sleep(0.2); open('/sluice/run/said', 'a').write({!r})"
    program = "import os; open(os.environ['SLUICE_RUN_DIR'] + '/said', 'a').write('trainer')"
    spec = _with_inits(say.format("first "), say.format("second "))
    spec["template"]["spec"]["containers"] = [
        {"name": "trainer", "command": ["python", "-S", "-c", program]}
    ]
    phases: set[str] = set()
    async with LocalCluster(tmp_path) as cluster:
        job = make_job(trainer_spec=spec)

        async def look() -> None:
            for pod in (await cluster.observe(job)).pods:
                if pod["metadata"]["name"] == "demo-trainer-0-1-0":
                    phases.add(pod["status"]["phase"])

        looks = []
        status = await run_job(
            cluster, job, on_plan=lambda _: looks.append(asyncio.create_task(look()))
        )
        await asyncio.gather(*looks)
    assert status.state == "Succeeded"
    assert (tmp_path / "volumes/run/said").read_text() == "first second trainer"
    assert "Pending" in phases


async def test_an_init_container_that_fails_keeps_its_pod_from_starting(tmp_path: Path) -> None:
    bad = "import sys; sys.exit(2 * (print('error: no such rows', file=sys.stderr) is None))"
    async with LocalCluster(tmp_path) as cluster:
        status = await run_job(
            cluster,
            make_job(
                trainer_spec=_with_inits(bad, "raise SystemExit(0)"),
                failurePolicy={"maxRestarts": 0},
            ),
        )
    condition = status.condition("Failed")
    assert condition is not None
    assert condition.reason == "ReachedMaxRestarts", "a user's container: its codes are its own"
    assert condition.message.endswith("init-0: no such rows")
    assert not (tmp_path / "logs/demo-trainer-0-1-0.trainer.log").exists()


async def test_a_pod_that_is_deleted_in_its_init_container_ends(tmp_path: Path) -> None:
    job = make_job(trainer_spec=_with_inits(SLEEP), startupDeadlineSeconds=1)
    async with LocalCluster(tmp_path) as cluster:
        status = await run_job(cluster, job)
    condition = status.condition("Failed")
    assert condition is not None
    assert condition.reason == "StartupDeadlineExceeded"
    assert alive(tmp_path) == []
