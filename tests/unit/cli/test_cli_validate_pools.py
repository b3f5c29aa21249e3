"""`sluice validate` of manifests of pools, alone and beside a job."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Sluice

POOL = """\
apiVersion: sluice.dev/v1alpha1
kind: RLEnginePool
metadata: {name: shared}
spec:
  model: {path: model}
  replicas: 2
"""


@pytest.fixture
def pool_file(job_file: Path) -> Path:
    """Manifest of a pool, beside that of a job and the model of both."""
    path = job_file.with_name("pool.yaml")
    path.write_text(POOL)
    (job_file.parent / "model" / "model.safetensors").touch()
    return path


def test_a_valid_pool_is_summarized(sluice: Sluice, pool_file: Path) -> None:
    done = sluice("validate", pool_file)
    assert done.exit_code == 0, done.output
    assert done.output == (
        f"{pool_file}: RLEnginePool default/shared is valid: 2 engine(s) of 1 GPU(s), 16 adapters "
        "up to rank 32\n"
    )


def test_facts_of_a_pool(sluice: Sluice, pool_file: Path) -> None:
    (facts,) = json.loads(sluice("validate", pool_file, "-o", "json").stdout)
    assert (facts["valid"], facts["job"]) == (True, None)
    assert facts["enginePool"] == {
        "name": "shared",
        "namespace": "default",
        "engines": 2,
        "gpusPerReplica": 1,
        "maxAdapters": 16,
        "maxRank": 32,
    }


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (
            "replicas: 2",
            "replicsa: 2",
            ":6: spec.replicsa: unknown field; did you mean replicas?",
        ),
        (
            "path: model",
            "path: none",
            ": spec.model.path: there is no directory {directory}/none; expected a Hugging Face "
            "checkpoint",
        ),
    ],
    ids=["unknown field", "no model"],
)
def test_an_invalid_pool_is_refused(
    sluice: Sluice, pool_file: Path, old: str, new: str, problem: str
) -> None:
    pool_file.write_text(POOL.replace(old, new))
    done = sluice("validate", pool_file, pool_file)
    assert done.exit_code != 0
    text = problem.format(directory=pool_file.parent)
    assert f"error: {pool_file}{text}" in done.output


def test_a_model_in_a_volume_is_not_looked_for(sluice: Sluice, pool_file: Path) -> None:
    volume = "path: m, volume: {persistentVolumeClaim: {claimName: models}}"
    pool_file.write_text(POOL.replace("path: model", volume))
    done = sluice("validate", pool_file)
    assert "note: files in volumes of a cluster were not checked" in done.output
    assert done.exit_code == 0


def test_a_file_with_a_pool_and_a_job_has_both_checked(
    sluice: Sluice, job_file: Path, pool_file: Path
) -> None:
    job_file.write_text(f"{POOL}---\n{job_file.read_text()}")
    done = sluice("validate", job_file, "--set", "trainer.steps=3")
    assert "RLEnginePool default/shared is valid" in done.output
    assert "3 steps" in done.output
    job_file.write_text(job_file.read_text().replace("replicas: 2", "replicas: -2"))
    done = sluice("validate", job_file)
    assert "spec.replicas: expected at least 0, found -2" in done.output
    assert done.exit_code != 0


def test_an_override_without_a_job_is_for_the_pool(sluice: Sluice, pool_file: Path) -> None:
    done = sluice("validate", pool_file, "--set", "replicas=5")
    assert "is valid: 5 engine(s)" in done.output
