"""A job of a pool on a laptop: the cluster signs its credential with the pool's key."""

from __future__ import annotations

import fcntl
import time
from pathlib import Path

import pytest

from sluice.api import RLEnginePool, RLJob
from sluice.engines.plugin_common.pool_credential import created_of, job_of, verified_tag
from sluice_operator.cluster import LocalCluster
from sluice_operator.cluster.local import pools, run_state
from sluice_operator.plan.facts import names
from sluice_operator.plan.manifests.objects import supporting_objects
from tests.integration.local_cluster.local_jobs import make_job

FIRST, SECOND = "5a" * 32, "a5" * 32


def pooled() -> RLJob:
    return make_job(
        model={"path": "/nowhere/model"},
        rollout={"pool": "shared", "template": {}},
        trainer_spec={"lora": {"rank": 8}},
        weightSync={"lora": "adapter", "pauseMode": "versions"},
    )


async def credential_of(job: RLJob, run_dir: Path) -> str:
    """Start the job's objects as the planner does, and return the job's credential."""
    async with LocalCluster(run_dir) as cluster:
        present = (await cluster.observe(job)).objects
        missing = [
            item
            for item in supporting_objects(job)
            if (item["kind"], item["metadata"]["name"]) not in present
        ]
        await cluster.apply(job, missing)
        secret = (await cluster.observe(job)).objects["Secret", names.pool_credential_name(job)]
        return str(secret["stringData"][names.TOKEN_KEY])


async def test_a_run_that_goes_on_has_a_credential_of_the_pools_present_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    pool = RLEnginePool.model_validate(
        {
            "metadata": {"name": "shared"},
            "spec": {"model": {"path": "/nowhere/model"}, "gpusPerReplica": 0},
        }
    )
    directory, job = pools.directory("shared"), pooled()
    directory.mkdir(parents=True)
    before = int(time.time())
    with (directory / run_state.LOCK_FILE).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for key in (FIRST, SECOND):
            pools.write(pool, key, ("127.0.0.1:1",))
            credential = await credential_of(job, tmp_path / "run")
            tag = verified_tag(key, credential)
            assert job_of(tag) == "default/demo"
            assert before <= created_of(tag) <= time.time()
