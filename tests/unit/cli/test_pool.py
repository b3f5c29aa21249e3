"""Jobs with a pool on this machine, and pools that cannot run here."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from safetensors.numpy import save_file

from sluice.api import RLEnginePool, load_job
from sluice_client.resolve import resolve
from sluice_operator.cluster.local import pools, run_state
from tests.unit.cli.conftest import Sluice

POOLED = (
    "--set",
    "rollout.pool=shared",
    "--set",
    "trainer.lora={rank: 8}",
    "--set",
    "weightSync={lora: adapter, pauseMode: versions}",
    "--set",
    "model.init=pretrained",
)
POOL = """\
apiVersion: sluice.dev/v1alpha1
kind: RLEnginePool
metadata: {name: shared}
spec: {model: {path: model}, gpusPerReplica: 0}
"""


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the pools of this machine's user out of the test."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state/sluice/pools"


@pytest.fixture
def job_file(job_file: Path) -> Path:
    weights = job_file.parent / "model/model.safetensors"
    save_file({"model.norm.weight": numpy.zeros(1, numpy.float32)}, weights)
    return job_file


def pool(model: Path, **spec: Any) -> RLEnginePool:
    document = {"model": {"path": str(model)}, "gpusPerReplica": 0, **spec}
    return RLEnginePool.model_validate({"metadata": {"name": "shared"}, "spec": document})


def locked(directory: Path) -> Any:
    """Return an open file that locks the directory of a pool, as its host does."""
    directory.mkdir(parents=True, exist_ok=True)
    file = (directory / run_state.LOCK_FILE).open("w")
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


@pytest.fixture
def running(job_file: Path, state: Path) -> Iterator[RLEnginePool]:
    """A pool of the job's model that seems to run in this process."""
    shared = pool(job_file.parent / "model")
    with locked(state / "shared"):
        pools.write(shared, "ab" * 32, ("127.0.0.1:1",))
        yield shared


def test_a_job_whose_pool_does_not_run_does_not_start(
    sluice: Sluice, job_file: Path, tmp_path: Path
) -> None:
    result = sluice("run", job_file, "--run-dir", tmp_path / "run", *POOLED)
    assert (result.exit_code, (tmp_path / "run").exists()) == (2, False)
    assert (
        "error: rollout.pool: no pool shared runs on this machine: start it with `sluice pool up`"
    )
    assert "start it with `sluice pool up`" in " ".join(result.output.split())


def test_a_pool_whose_host_was_killed_does_not_run(job_file: Path, state: Path) -> None:
    with locked(state / "shared"):
        pools.write(pool(job_file.parent / "model"), "ab" * 32, ("127.0.0.1:1",))
        assert [found.name for found in pools.running()] == ["shared"]
    assert pools.running() == []
    assert pools.read("shared") is None


@pytest.mark.usefixtures("running")
def test_facts_of_a_running_pool(job_file: Path) -> None:
    job = resolve(load_job(job_file, [*POOLED[1::2]]), job_file.parent)
    facts = pools.facts(job)
    assert facts is not None
    assert (facts.problem, facts.replicas, facts.addresses) == ("", 1, ("127.0.0.1:1",))
    assert pools.key(job) == "ab" * 32


@pytest.mark.usefixtures("running")
def test_a_job_that_does_not_fit_its_pool_does_not_start(
    sluice: Sluice, job_file: Path, tmp_path: Path
) -> None:
    words = ("--run-dir", tmp_path / "run", *POOLED, "--set", "trainer.lora.rank=64")
    result = sluice("run", job_file, *words)
    assert result.exit_code == 2
    assert "takes adapters up to rank 32, and trainer.lora.rank is 64" in result.output


@pytest.mark.usefixtures("running")
def test_the_file_of_a_pool_is_for_its_owner_alone(state: Path) -> None:
    file = state / "shared.json"
    assert file.stat().st_mode & 0o777 == 0o600
    assert {"model", "key", "maxRank", "addresses", "pid"} <= json.loads(file.read_text()).keys()


@pytest.mark.usefixtures("running")
def test_two_runs_of_one_name_do_not_share_a_pool(job_file: Path) -> None:
    """They would share one adapter, and each would train with the other's."""
    job = load_job(job_file, [*POOLED[1::2]])
    with (
        pools.membership(job),
        pytest.raises(run_state.RunDirectoryError, match=r"change metadata\.name of this one"),
        pools.membership(job),
    ):
        pass
    with pools.membership(job):
        pass


def test_validate_says_which_pool_a_job_needs(sluice: Sluice, job_file: Path) -> None:
    result = sluice("validate", job_file, *POOLED)
    assert result.exit_code == 0, result.output
    assert "engines of the pool shared" in result.output
    assert "note: spec.rollout.pool: the engines are those of the RLEnginePool shared" in (
        result.output
    )
    assert "sluice run would refuse this job on this machine: rollout.pool: no pool shared" in (
        result.output
    )
    [facts] = json.loads(sluice("validate", job_file, *POOLED, "-o", "json").output)
    assert (facts["job"]["engines"], facts["job"]["pool"]) == (0, "shared")


# -- sluice pool


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        pytest.param(
            ["model.volume={emptyDir: {}}"], "spec.model.volume: this machine has no", id="a volume"
        ),
        pytest.param(["model.path=nowhere"], "there is no directory", id="no model"),
        pytest.param(["replicas=0"], "spec.replicas: 0 starts no engine", id="no engines"),
        pytest.param(
            ["gpusPerReplica=2", "replicas=3"],
            "the engines need 6 GPU(s), and this machine shows 0",
            id="more GPUs than there are",
        ),
    ],
)
def test_a_pool_that_cannot_run_here_does_not_start(
    changes: list[str],
    problem: str,
    sluice: Sluice,
    job_file: Path,
    state: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    manifest = job_file.with_name("pool.yaml")
    manifest.write_text(POOL)
    words = [word for change in changes for word in ("--set", change)]
    result = sluice("pool", "up", manifest, *words)
    assert result.exit_code == 2
    assert problem in result.output
    assert not state.exists()


@pytest.mark.usefixtures("running")
def test_a_pool_that_runs_already_does_not_start_again(sluice: Sluice, job_file: Path) -> None:
    manifest = job_file.with_name("pool.yaml")
    manifest.write_text(POOL)
    result = sluice("pool", "up", manifest)
    assert result.exit_code == 2
    assert "error: pool shared runs already (sluice pool list)" in result.output


@pytest.mark.usefixtures("running")
def test_pools_are_listed_with_the_engines_that_answer(sluice: Sluice, job_file: Path) -> None:
    assert "0 of 1 engine(s) answer (http://127.0.0.1:1)" in sluice("pool", "list").output
    [entry] = json.loads(sluice("pool", "list", "-o", "json").output)
    assert (entry["name"], entry["ready"]) == ("shared", 0)
    assert entry["model"] == str(job_file.parent / "model")


def test_commands_say_that_no_pool_runs(sluice: Sluice) -> None:
    assert (
        sluice("pool", "list").output == "no pool runs on this machine; sluice pool up starts one\n"
    )
    result = sluice("pool", "down", "shared")
    assert result.exit_code == 2
    assert "error: no pool shared runs on this machine" in result.output
