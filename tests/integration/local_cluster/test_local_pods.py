"""What a pod finds on a laptop: ports, volumes, variables, GPUs."""

import json
from pathlib import Path

from local_jobs import make_job

from sluice_operator.cluster import LocalCluster
from sluice_operator.reconcile import run_job

DUMP = "import json, os; open(os.environ['SLUICE_RUN_DIR'] + '/env.json', 'w').write(json.dumps(dict(os.environ)))"


async def trainer_env(run_dir: Path, **options: object) -> dict[str, str]:
    async with LocalCluster(run_dir, **options) as cluster:  # type: ignore[arg-type]
        status = await run_job(cluster, make_job(DUMP))
    assert status.state == "Succeeded"
    directory = options.get("volumes", {}).get("run", run_dir / "volumes/run")  # type: ignore[attr-defined]
    found: dict[str, str] = json.loads((directory / "env.json").read_text())
    return found


async def test_the_environment_of_a_trainer(tmp_path: Path) -> None:
    env = await trainer_env(tmp_path, env={"EXTRA": "1"})
    assert env["SLUICE_BIND"] == env["SLUICE_ADVERTISE"] == "127.0.0.1"
    assert env["SLUICE_RENDEZVOUS"].startswith("127.0.0.1:")
    assert env["SLUICE_CHECKPOINT_DIR"] == str(tmp_path / "volumes/checkpoint")
    assert len({env["SLUICE_PORT_MASTER"], env["SLUICE_PORT_METRICS"], env["SLUICE_RENDEZVOUS"].split(":")[1]}) == 3
    assert len(env["SLUICE_TOKEN"]) >= 32
    assert (env["EXTRA"], env["CUDA_VISIBLE_DEVICES"], env["OMP_NUM_THREADS"]) == ("1", "", "1")


async def test_a_volume_may_be_put_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    env = await trainer_env(tmp_path / "run", volumes={"run": tmp_path / "results"})
    assert env["SLUICE_RUN_DIR"] == str(tmp_path / "results")


async def test_the_rendezvous_binds_the_port_of_its_service(tmp_path: Path) -> None:
    server = """
        import os, socket, time
        with socket.create_server((os.environ["SLUICE_BIND"], int(os.environ["SLUICE_PORT_GRPC"]))): time.sleep(600)
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
    engine = "import os, sys; sys.exit('error: I listen on ' + os.environ['SLUICE_PORT_HTTP'])"
    worker = "import os, sys, time; time.sleep(0.3); sys.exit('error: I ask ' + os.environ['SLUICE_ENGINE_URL'])"
    async with LocalCluster(tmp_path) as cluster:
        await run_job(cluster, make_job("import time; time.sleep(1)", engine=engine, worker=worker))
        port = (await cluster.logs_tail("demo-rollout-0-1-0", "engine")).split()[-1]
    assert 20000 <= int(port) < 32000


async def test_a_program_that_does_not_exist(tmp_path: Path) -> None:
    job = make_job(failurePolicy={"maxRestarts": 0}, trainer_spec={"template": _command(["/no/such/program"])})
    async with LocalCluster(tmp_path) as cluster:
        status = await run_job(cluster, job)
    assert status.last_failure is not None
    assert status.last_failure.exit_code == 127
    assert status.last_failure.message == "error: cannot start /no/such/program: No such file or directory"


async def test_a_volume_that_is_not_there_fails_the_job_at_once(tmp_path: Path) -> None:
    job = make_job("", model={"path": "x", "volume": {"hostPath": {"path": "/does/not/exist"}}})
    async with LocalCluster(tmp_path) as cluster:
        status = await run_job(cluster, job)
    condition = status.condition("Failed")
    assert condition is not None
    assert condition.reason == "InvalidConfiguration"
    assert condition.message.endswith("volume model: /does/not/exist does not exist on this machine")


async def test_gpus_go_round(tmp_path: Path) -> None:
    """Two rollout replicas and one trainer want a GPU each; there are two, so one pod waits, and says so."""
    program = f"{DUMP}; import time; time.sleep(1.5)"
    job = make_job(program, trainer_spec={"gpusPerNode": 1}, rollout={"gpusPerReplica": 1, "replicas": 2})
    messages = []
    async with LocalCluster(tmp_path, gpus=["4", "7", "8"]) as cluster:
        await run_job(cluster, job, on_plan=lambda plan: messages.append(plan.status.state))
    env = json.loads((tmp_path / "volumes/run/env.json").read_text())
    assert env["CUDA_VISIBLE_DEVICES"] == "8"


async def test_a_pod_without_gpus_says_what_it_waits_for(tmp_path: Path) -> None:
    job = make_job("", trainer_spec={"gpusPerNode": 1}, startupDeadlineSeconds=1)
    async with LocalCluster(tmp_path, gpus=[]) as cluster:
        status = await run_job(cluster, job)
    condition = status.condition("Failed")
    assert condition is not None
    assert condition.reason == "StartupDeadlineExceeded"
    assert condition.message.endswith("demo-trainer-0-1-0: Unschedulable: 1 GPUs wanted, 0 of 0 free")


def _command(command: list[str]) -> dict[str, object]:
    return {"spec": {"containers": [{"name": "trainer", "command": command}]}}
