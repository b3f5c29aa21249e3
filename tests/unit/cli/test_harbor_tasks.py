"""`sluice data inspect` and `sluice validate` over a directory of Harbor tasks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.cli.conftest import JOB, Sluice

ENVIRONMENT = """\
  rollout:
    gpusPerReplica: 0
    environment:
      command: [python3, agent.py, --in-image]
      image: "{metadata.image}"
      allowedImages: [ghcr.io/me/]
      verifier:
        command: [python3, verify.py, --in-image]
        hiddenMetadata: [test_files, verifier_env]
"""


def write_task(directory: Path, name: str, configuration: str, script: str = "true\n") -> Path:
    folder = directory / name
    (folder / "tests").mkdir(parents=True)
    (folder / "task.toml").write_text(configuration)
    (folder / "instruction.md").write_text(f"Do {name}.\n")
    (folder / "tests/test.sh").write_text(script)
    return folder


@pytest.fixture
def tasks(job_file: Path) -> Path:
    """Directory of two tasks beside a job, which the job plays in their images."""
    job_file.write_text(
        JOB.replace('"rows.jsonl@[0:2]"', "tasks").replace(
            "  rollout: {gpusPerReplica: 0}\n", ENVIRONMENT
        )
    )
    directory = job_file.parent / "tasks"
    for name in ("a", "b"):
        image = f"[environment]\ndocker_image = 'ghcr.io/me/{name}:1'\n"
        write_task(directory, name, image + "[verifier]\ntimeout_sec = 60\n")
    return directory


def test_inspect_shows_tasks(tasks: Path, sluice: Sluice) -> None:
    result = sluice("data", "inspect", tasks, "--json")
    assert result.exit_code == 0, result.output
    stats = json.loads(result.stdout)
    assert (stats["rows"], stats["shapes"], stats["example"]) == (2, {"harbor": 2}, "Do a.\n")


def test_convert_writes_the_rows_of_tasks(tasks: Path, sluice: Sluice, tmp_path: Path) -> None:
    assert sluice("data", "convert", tasks, tmp_path / "made.jsonl").exit_code == 0
    first = json.loads((tmp_path / "made.jsonl").read_text().splitlines()[0])
    assert first["metadata"]["test_files"] == {"test.sh": {"text": "true\n"}}


def test_tasks_that_a_job_can_judge_have_no_notes(tasks: Path, sluice: Sluice) -> None:
    result = sluice("validate", tasks.parent / "job.yaml")
    assert result.exit_code == 0, result.output
    assert "spec.data.prompts" not in result.output


def test_one_task_is_a_source(tasks: Path, sluice: Sluice) -> None:
    words = ("validate", tasks.parent / "job.yaml", "--set", "data.prompts[0].path=tasks/a")
    result = sluice(*words)
    assert result.exit_code == 0, result.output


def test_a_wrong_task_is_a_problem(tasks: Path, sluice: Sluice) -> None:
    (tasks / "b/task.toml").write_text("[agent\n")
    result = sluice("validate", tasks.parent / "job.yaml")
    assert result.exit_code == 2, result.output
    assert f"spec.data.prompts[0].path: {tasks}/b/task.toml:1:7: not valid TOML: " in result.output
    assert result.output.count("not valid TOML") == 1


@pytest.mark.parametrize(
    ("configuration", "script", "change", "note"),
    [
        pytest.param(
            "",
            "true",
            "",
            "1 of 3 tasks have no image that {{metadata.image}} allows, such as {tasks}/c "
            "(metadata.image: expected the name of an image, found no such key",
            id="no image",
        ),
        pytest.param(
            "[environment]\ndocker_image = 'docker.io/x/y'",
            "true",
            "",
            "is not on the list rollout.environment.allowedImages (ghcr.io/me/)); build it (docker "
            "build -t IMAGE {tasks}/c/environment) and set environment.docker_image of task.toml",
            id="an image that is not allowed",
        ),
        pytest.param(
            "environment.docker_image = 'ghcr.io/me/c'\nverifier.timeout_sec = 900",
            "true",
            "",
            "1 of 3 tasks, such as {tasks}/c, have a verifier.timeout_sec above "
            "verifier.timeoutSeconds (300), after which the sample fails",
            id="time",
        ),
        pytest.param(
            "environment.docker_image = 'ghcr.io/me/c'\nverifier.timeout_sec = 9",
            "apt-get update\ncurl -LsSf https://astral.sh/uv/install.sh | sh\n",
            "",
            "1 of 3 tasks, such as {tasks}/c, have a tests/test.sh that seems to download packages",
            id="network",
        ),
        pytest.param(
            "environment.docker_image = 'ghcr.io/me/c'\nverifier.timeout_sec = 9",
            "true",
            "rollout.environment.verifier.hiddenMetadata=[verifier_env]",
            "the agent sees test_files: name them in verifier.hiddenMetadata",
            id="tests that the agent sees",
        ),
        pytest.param(
            "",
            "true",
            "rollout.environment.verifier=null",
            "nothing runs the tests of the tasks: set rollout.environment with a verifier",
            id="no verifier",
        ),
    ],
)
def test_what_a_job_does_not_do_for_its_tasks_is_a_note(
    configuration: str, script: str, change: str, note: str, tasks: Path, sluice: Sluice
) -> None:
    write_task(tasks, "c", configuration, script)
    words = ("--set", change) if change else ()
    result = sluice("validate", tasks.parent / "job.yaml", *words)
    assert result.exit_code == 0, result.output
    assert "note: spec.data.prompts[0].path: " in result.output
    assert note.format(tasks=tasks) in result.output
