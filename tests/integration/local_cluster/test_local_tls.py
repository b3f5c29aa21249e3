"""A job with spec.tls on a laptop: real buffer and rendezvous, and a trainer that calls them."""

from __future__ import annotations

import asyncio
import json
import stat
import sys
import textwrap
from pathlib import Path

from sluice.api import RLJob
from sluice_cli.run.command import tls_of
from sluice_operator.cluster import LocalCluster
from sluice_operator.plan import Progress
from sluice_operator.plan.facts import names
from sluice_operator.plan.manifests.objects import rendezvous_address
from sluice_operator.progress import ProbeTarget, ask
from sluice_operator.reconcile import run_job
from tests.integration.local_cluster.local_jobs import SLEEP, container, template

TRAINER = """
    import asyncio, json, os
    from sluice.wire import membership, rpc, tls
    from sluice.wire.v1 import buffer_pb2, buffer_pb2_grpc

    async def stats(address, secured, token=None, seconds=60):
        async with rpc.channel(address, secured) as channel:
            stub = buffer_pb2_grpc.BufferStub(channel)
            metadata = rpc.metadata(token)
            call = lambda: stub.Stats(buffer_pb2.StatsRequest(), metadata=metadata, timeout=60)
            try:
                return (await rpc.retrying(call, what="Stats", seconds=seconds)).total_steps
            except (rpc.RefusedError, rpc.DeadlineError) as error:
                return str(error)

    async def main():
        rendezvous = os.environ["SLUICE_RENDEZVOUS"]
        [buffer] = await membership.find_members(rendezvous, "buffer", seconds=60)
        own = tls.from_environment()
        return {
            "files": sorted(os.listdir(os.environ["SLUICE_TLS_DIR"])),
            "name": own.name,
            "tls": await stats(buffer.address, own),
            "plain": await stats(buffer.address, tls.PLAIN, seconds=1),
            "no token": await stats(buffer.address, own, token=""),
            "other job": await stats(buffer.address, tls.Tls(own.ca, "other.default.sluice")),
        }

    result = asyncio.run(main())
    json.dump(result, open(os.environ["SLUICE_RUN_DIR"] + "/result.json", "w"))
    import time
    while not os.path.exists(os.environ["SLUICE_RUN_DIR"] + "/seen"): time.sleep(0.1)
"""


def make_job(directory: Path) -> RLJob:
    prompts = directory / "prompts.jsonl"
    prompts.write_text('{"prompt": "max 3 7 =", "label": "7"}\n' * 8)
    trainer = {
        "name": "trainer",
        "command": [sys.executable, "-c", textwrap.dedent(TRAINER)],
        "args": [],
    }
    spec = {
        "model": {"path": "/nowhere/model", "init": "random"},
        "data": {"prompts": [{"path": str(prompts)}]},
        "reward": {"type": "exact_match"},
        "rollout": {
            "gpusPerReplica": 0, "batchSize": 4, "samplesPerPrompt": 2,
            "template": template(container("engine", SLEEP), container("worker", SLEEP)),
        },
        "trainer": {"gpusPerNode": 0, "steps": 2, "template": template(trainer)},
        "tls": {"enabled": True},
    }  # fmt: skip
    return RLJob.model_validate({"metadata": {"name": "demo"}, "spec": spec})


async def test_a_job_with_tls_is_served_with_tls_only(tmp_path: Path) -> None:
    job, run_dir = make_job(tmp_path), tmp_path / "run"
    run_dir.mkdir()
    result, answers = run_dir / "volumes/run/result.json", list[Progress]()
    async with LocalCluster(run_dir) as cluster:

        async def probe() -> Progress | None:
            observed = await cluster.observe(job)
            address, secret = (
                rendezvous_address(job, observed),
                observed.objects[("Secret", names.token_name(job))],
            )
            assert address is not None
            answer = await ask(
                ProbeTarget(address, secret["stringData"]["token"], tls_of(job, observed))
            )
            if answer is not None and result.exists():
                answers.append(answer)
                result.with_name("seen").touch()
            return answer

        status = await asyncio.wait_for(run_job(cluster, job, probe=probe), 120)
    assert status.state == "Succeeded", status.last_failure
    assert answers[0].total_steps == 2
    report = json.loads(result.read_text())
    assert (report["files"], report["name"], report["tls"]) == (
        ["ca.crt"],
        "demo.default.sluice",
        2,
    )
    assert report["plain"].startswith("Stats: no answer for 1 s (UNAVAILABLE: ")
    assert report["no token"] == "Stats: UNAUTHENTICATED: the call does not carry this job's token"
    assert report["other job"].startswith(
        "Stats: the peer's certificate is not from this job's CA, or not for its name"
    )


async def test_a_runs_key_is_kept_and_only_its_owners(tmp_path: Path) -> None:
    async with LocalCluster(tmp_path):
        key = (tmp_path / "run.key").read_text()
    assert stat.S_IMODE((tmp_path / "run.key").stat().st_mode) == 0o600
    async with LocalCluster(tmp_path):
        assert (tmp_path / "run.key").read_text() == key
