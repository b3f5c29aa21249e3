"""The directory of a run: which manifests go on with it, and what deletes it."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from sluice.api import ManifestError, load_job
from sluice.api.schema.mutability import differences
from sluice_client.resume_changes import change_notes
from sluice_operator.cluster.local import run_state
from tests.unit.cli.conftest import Sluice, prepare


def test_a_run_refuses_another_manifest_unless_fresh(job_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    prepare(run, load_job(job_file), fresh=False)
    prepare(
        run, load_job(job_file, ["rollout.replicas=2", "failurePolicy.maxRestarts=9"]), fresh=False
    )
    with pytest.raises(ManifestError, match=r"spec\.data\.seed: None -> 4: a run that goes on"):
        prepare(run, load_job(job_file, ["data.seed=4"]), fresh=False)
    prepare(run, load_job(job_file, ["data.seed=4"]), fresh=True)
    assert json.loads((run / "job.json").read_text())["spec"]["data"]["seed"] == 4


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param(
            ["trainer.steps=9"],
            ["changed from the last checkpoint on: spec.trainer.steps: 3 -> 9"],
            id="longer",
        ),
        pytest.param(
            ["trainer.steps=9", "trainer.optimizer={lr: 1e-4, schedule: cosine}"],
            [
                "changed from the last checkpoint on: spec.trainer.optimizer.lr: None -> 0.0001",
                "changed from the last checkpoint on: spec.trainer.optimizer.schedule: "
                "None -> 'cosine'",
                "changed from the last checkpoint on: spec.trainer.steps: 3 -> 9",
                "the learning rate now reaches minLr at the new end of the run; to keep the old "
                "schedule, set trainer.optimizer.decaySteps to the old number of steps",
            ],
            id="longer, with a schedule",
        ),
        pytest.param(["rollout.replicas=2"], [], id="what may change at any time"),
    ],
)
def test_safe_changes_are_accepted_and_described(
    job_file: Path, tmp_path: Path, changes: list[str], expected: list[str]
) -> None:
    run = tmp_path / "run"
    prepare(run, load_job(job_file), fresh=False)
    (run / "metrics.jsonl").write_text('{"step": 5}\n')
    changed = load_job(job_file, changes)
    assert [*change_notes(prepare(run, changed, fresh=False).changed, changed)] == expected
    assert prepare(run, changed, fresh=False).changed == [], "what is accepted is the run's own"


def test_a_run_of_an_earlier_version_resumes_with_the_present_names(
    job_file: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    job = load_job(job_file, ["algorithm.loss.clip.low=0.1"])
    prepare(run, job, fresh=False)
    stored = json.loads((run / "job.json").read_text())
    stored["spec"]["algorithm"] = {"clip": {"low": 0.1}}
    (run / "job.json").write_text(json.dumps(stored))
    assert prepare(run, job, fresh=False).changed == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param(
            "trainer.steps=4",
            "spec.trainer.steps: 3 -> 4: 5 steps are trained already; expected at least as many",
            id="shorter than it is",
        ),
        pytest.param(
            "rollout.samplesPerPrompt=4",
            "spec.rollout.samplesPerPrompt: None -> 4: a run that goes on cannot change it, "
            "because its stored samples were generated with it",
            id="stored samples",
        ),
        pytest.param(
            "trainer.optimizer.weightDecay=0.5",
            "spec.trainer.optimizer.weightDecay: None -> 0.5: a run that goes on cannot "
            "change it, because the optimizer state in its checkpoints depends on it",
            id="optimizer's state",
        ),
        pytest.param(
            "tls.enabled=true",
            "spec.tls.enabled: None -> True: a run that goes on cannot change it, because it "
            "was started with it",
            id="anything else",
        ),
    ],
)
def test_unsafe_changes_are_refused_with_a_reason(
    job_file: Path, tmp_path: Path, change: str, expected: str
) -> None:
    run = tmp_path / "run"
    prepare(run, load_job(job_file), fresh=False)
    (run / "metrics.jsonl").write_text('{"step": 5}\n')
    with pytest.raises(ManifestError) as raised:
        prepare(run, load_job(job_file, [change]), fresh=False)
    assert f"  {expected}\nuse another --run-dir" in str(raised.value)
    assert json.loads((run / "job.json").read_text())["spec"]["trainer"]["steps"] == 3


def test_differences_name_the_path() -> None:
    old = {"a": {"b": 1, "c": [1]}, "suspend": False}
    assert differences(old, {"a": {"b": 2, "c": [1]}, "suspend": True}) == ["spec.a.b: 1 -> 2"]
    assert differences(old, {"a": {"c": [1]}}) == ["spec.a.b: 1 -> None"]


@pytest.mark.parametrize("state", ["Succeeded", "Restarting"])
def test_the_state_of_a_run_counts_not_an_old_summary(
    job_file: Path, tmp_path: Path, state: str
) -> None:
    run = tmp_path / "run"
    prepare(run, load_job(job_file), fresh=False)
    (run / "summary.json").write_text('{"state": "Succeeded"}')
    run_state.StateFile(run).save(run_state.State(status={"state": state}))
    assert prepare(run, load_job(job_file), fresh=False).succeeded == (state == "Succeeded")


def test_an_unreadable_state_keeps_the_recorded_manifest(job_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    prepare(run, load_job(job_file), fresh=False)
    (run / "state.json").write_text("{")
    with pytest.raises(run_state.RunDirectoryError, match="not a state file"):
        prepare(run, load_job(job_file, ["trainer.steps=9"]), fresh=False)
    assert json.loads((run / "job.json").read_text())["spec"]["trainer"]["steps"] == 3


def test_a_broken_recorded_manifest_is_a_one_line_error(
    sluice: Sluice, job_file: Path, tmp_path: Path
) -> None:
    prepare(tmp_path / "run", load_job(job_file), fresh=False)
    (tmp_path / "run/job.json").write_text("{")
    for command in (["run", job_file], ["status"]):
        result = sluice(*command, "--run-dir", tmp_path / "run")
        assert result.exit_code in (1, 2), result.output
        assert "job.json: not valid JSON" in result.output


async def test_fresh_does_not_delete_an_active_run(
    job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice_client.run_dir.LOCK_SECONDS", 0.1)
    directory = tmp_path / "run"
    await asyncio.to_thread(prepare, directory, load_job(job_file), fresh=False)
    held = await run_state.lock(directory, 0)
    try:
        with pytest.raises(
            run_state.RunDirectoryError, match=f"{directory} is in use by process {os.getpid()}"
        ):
            await asyncio.to_thread(prepare, directory, load_job(job_file), fresh=True)
    finally:
        os.close(held)
    assert (directory / "job.json").exists()
    await asyncio.to_thread(prepare, directory, load_job(job_file), fresh=True)
    assert sorted(path.name for path in directory.iterdir()) == ["job.json", "run.lock"]


def test_fresh_does_not_delete_other_files(job_file: Path, tmp_path: Path) -> None:
    mine = tmp_path / "thesis"
    mine.mkdir()
    (mine / "chapter1.tex").write_text("...")
    with pytest.raises(ManifestError, match="is not empty and holds no run"):
        prepare(mine, load_job(job_file), fresh=True)
    assert (mine / "chapter1.tex").exists()
