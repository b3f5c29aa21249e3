"""The view of `sluice status`, compared with golden files.

`SLUICE_UPDATE_GOLDEN=1 pytest` writes them again.
"""

from __future__ import annotations

import io
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sluice.api import LastFailure
from sluice_client.advice import advice
from sluice_client.status_view import duration, pod_state, render_status
from sluice_operator.cluster.view import JobEvent, JobSnapshot

GOLDEN = Path(__file__).with_name("golden")
NOW = datetime(2026, 1, 31, 12, 0, 0, tzinfo=UTC)
SPEC: dict[str, Any] = {
    "model": {"path": "/models/tiny"},
    "data": {"prompts": [{"path": "/data/train.jsonl"}]},
    "reward": {"type": "exact_match"},
    "trainer": {"steps": 10},
}


def job(status: dict[str, Any], **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "sluice.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "demo", "namespace": "team", "uid": "1234", "generation": 1},
        "spec": SPEC | spec,
        "status": status,
    }


def condition(type_: str, status: str, reason: str, message: str) -> dict[str, Any]:
    time = "2026-01-31T11:50:00Z"
    return {
        "type": type_,
        "status": status,
        "reason": reason,
        "message": message,
        "lastTransitionTime": time,
    }


def pod(role: str, phase: str, state: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    labels = {
        f"sluice.dev/{key}": value
        for key, value in (("role", role), ("replica", "0"), ("attempt", "1"))
    }
    ready = "True" if phase == "Running" else "False"
    return {
        "metadata": {
            "name": f"demo-{role}-0-1-0",
            "labels": labels | {"sluice.dev/index": "0"},
            "creationTimestamp": "2026-01-31T11:45:00Z",
        },
        "spec": {"nodeName": "gpu-7", "containers": [{"name": role}], **more},
        "status": {
            "phase": phase,
            "startTime": "2026-01-31T11:45:10Z",
            "conditions": [
                {"type": "Ready", "status": ready},
                {"type": "PodScheduled", "status": "True"},
            ],
            "containerStatuses": [{"name": role, "state": state or {"running": {}}}],
        },
    }


ROLES = [
    {
        "name": "rollout",
        "desired": 2,
        "ready": 1,
        "attempt": 2,
        "restarts": 1,
        "gangs": [{"replica": 0, "attempt": 2, "retryTime": "2026-01-31T12:00:30Z"}],
    },
    {
        "name": "trainer",
        "desired": 1,
        "ready": 1,
        "attempt": 1,
        "gangs": [{"replica": 0, "attempt": 1}],
    },
]
RUNNING = JobSnapshot(
    "namespace team",
    job(
        {
            "state": "Running",
            "step": 3,
            "totalSteps": 10,
            "reward": "0.5123",
            "policyLag": "0.50",
            "weightVersion": 3,
            "restarts": 1,
            "goodput": {
                "ratio": "0.61",
                "seconds": {"trained": 300, "generated": 310, "waited": 300, "started": 90},
                "states": {
                    "rollout/generating": 310,
                    "rollout/idle": 290,
                    "trainer/training": 300,
                    "trainer/waiting": 10,
                },
            },
            "startTime": "2026-01-31T11:44:00Z",
            "roles": ROLES,
            "lastProgressTime": "2026-01-31T11:59:00Z",
            "conditions": [
                condition("Running", "True", "Running", "training, with 2 of 3 pods running"),
                condition(
                    "WeightsInSync",
                    "False",
                    "EnginesBehind",
                    "not every engine holds the newest weights yet",
                ),
            ],
            "lastFailure": {
                "role": "rollout",
                "pod": "demo-rollout-0-1-0",
                "container": "engine",
                "reason": "Error",
                "exitCode": 1,
                "message": "loading weights\ntorch.OutOfMemoryError: CUDA out of memory",
                "time": "2026-01-31T11:59:50Z",
            },
        },
        activeDeadlineSeconds=3600,
        progressDeadlineSeconds=600,
        startupDeadlineSeconds=300,
    ),
    (
        pod("trainer", "Running"),
        pod(
            "rollout",
            "Pending",
            {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}},
        ),
    ),
    (
        JobEvent(
            datetime(2026, 1, 31, 11, 59, 51, tzinfo=UTC),
            "Warning",
            "GangRestarting",
            "rollout-0 failed",
        ),
        JobEvent(
            datetime(2026, 1, 31, 11, 59, 58, tzinfo=UTC),
            "Warning",
            "Failed",
            "pull",
            "demo-rollout-0-1-0",
            3,
        ),
    ),
    ("you have no right to read something",),
)
FINISHED = JobSnapshot(
    "run directory runs/demo",
    job(
        {
            "state": "Succeeded",
            "step": 10,
            "totalSteps": 10,
            "startTime": "2026-01-31T10:00:00Z",
            "completionTime": "2026-01-31T11:50:00Z",
            "conditions": [
                condition(
                    "Succeeded", "True", "TrainerSucceeded", "all trainer pods have completed"
                )
            ],
        },
        ttlSecondsAfterFinished=3600,
    ),
)
PICTURES = {"running": RUNNING, "finished": FINISHED, "new": JobSnapshot("namespace team", job({}))}


def text(snapshot: JobSnapshot) -> str:
    console = Console(width=110, file=io.StringIO(), color_system=None)
    console.print(render_status(snapshot, NOW))
    printed: str = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in printed.splitlines()) + "\n"


@pytest.mark.parametrize("name", PICTURES)
def test_a_job_is_shown_as_in_its_golden_file(name: str) -> None:
    file = GOLDEN / f"status-{name}.txt"
    if os.environ.get("SLUICE_UPDATE_GOLDEN"):
        file.write_text(text(PICTURES[name]))
    assert text(PICTURES[name]) == file.read_text()


def test_status_suggests_a_faster_split_of_the_gpus() -> None:
    states = {
        "rollout/generating": 60,
        "rollout/idle": 340,
        "trainer/training": 190,
        "trainer/waiting": 10,
    }
    status = {"step": 10, "goodput": {"ratio": "0.4", "states": states}}
    rollout = {"replicas": 3, "mode": "async", "maxStaleness": 1}
    assert (
        "plan engines wait 85%, the trainer 5%: 2 engine GPUs fewer, 2 trainer GPUs more gives "
        "about 3.0x" in " ".join(text(JobSnapshot("here", job(status, rollout=rollout))).split())
    )
    assert "plan" not in text(JobSnapshot("here", job({"step": 10})))


def test_status_shows_the_cost_of_a_batchs_last_responses() -> None:
    states = {
        "rollout/generating": 15,
        "rollout/tail": 50,
        "rollout/idle": 8,
        "trainer/training": 8,
        "trainer/waiting": 65,
    }
    seconds = {"trained": 8, "generated": 65, "waited": 73}
    status = {"step": 10, "goodput": {"ratio": "0.5", "seconds": seconds, "states": states}}
    shown = " ".join(
        text(
            JobSnapshot(
                "here",
                job(status, trainer={"gpusPerNode": 1, "steps": 20}, rollout={"replicas": 1}),
            )
        ).split()
    )
    assert "34% generated in tails" in shown
    assert (
        "plan engines wait 11%, the trainer 89%; engines spend 68% on the last few responses of a "
        "batch: rollout.mode: async with maxStaleness: 2 gives about 2.4x" in shown
    )


def test_an_invalid_spec_does_not_hide_why_it_failed() -> None:
    status = {
        "state": "Failed",
        "conditions": [condition("Failed", "True", "InvalidSpec", "spec.trainer.steps: no")],
    }
    document = job(status)
    document["spec"] = {"trainer": {"steps": "many"}}
    assert "Failed=True" in text(JobSnapshot("namespace team", document))
    assert "spec.trainer.steps: no" in text(JobSnapshot("namespace team", document))


def test_a_status_of_another_version_is_shown_as_far_as_it_can_be_read() -> None:
    assert "RLJob demo  Odd" in text(
        JobSnapshot("namespace team", job({"state": "Odd", "roles": "new form"}))
    )


def test_brackets_are_not_markup() -> None:
    assert "[/red] [bold]" in text(
        JobSnapshot("x", job({"conditions": [condition("Running", "True", "A", "[/red] [bold]")]}))
    )


def failure(**more: Any) -> LastFailure:
    return LastFailure(
        role="trainer", pod="demo-trainer-0-1-0", time="2026-01-31T11:00:00Z", **more
    )


@pytest.mark.parametrize(
    ("last_failure", "expected"),
    [
        (
            failure(reason="OOMKilled", exit_code=137, container="trainer"),
            "raise spec.trainer.resources.limits.memory",
        ),
        (
            failure(reason="OOMKilled", exit_code=137, container="tb"),
            "memory of tb in the template of trainer",
        ),
        (
            failure(reason="SystemOOM", exit_code=137, container="trainer"),
            "the kernel killed the process; lower spec.trainer.maxTokensPerGpu",
        ),
        (failure(reason="Error", exit_code=2), "a restart cannot fix a configuration error"),
        (failure(reason="Error", exit_code=139), "native code crashed"),
        (failure(reason="Error", exit_code=137), "kubectl describe pod demo-trainer-0-1-0"),
        (
            failure(reason="ProgressDeadlineExceeded"),
            "the process hung; see what it did last with: sluice logs demo trainer",
        ),
        (failure(reason="Error", exit_code=1), "sluice logs demo trainer -n team"),
    ],
    ids=[
        "memory limit",
        "memory limit of a sidecar",
        "machine out of memory",
        "configuration error",
        "segmentation fault",
        "killed",
        "hung",
        "any other failure",
    ],
)
def test_advice_on_a_failure_in_a_cluster(last_failure: LastFailure, expected: str) -> None:
    assert expected in advice(last_failure, RUNNING.job, None)


@pytest.mark.parametrize("code", [1, 2, 137, 139, 143])
@pytest.mark.parametrize("reason", ["Error", "OOMKilled", "SystemOOM", "ProgressDeadlineExceeded"])
def test_advice_on_a_local_run_does_not_mention_kubectl(code: int, reason: str) -> None:
    last = failure(reason=reason, exit_code=code, container="trainer")
    assert "kubectl" not in advice(last, RUNNING.job, Path("/elsewhere/run"))


@pytest.mark.parametrize(
    ("last_failure", "directory", "expected"),
    [
        (
            failure(reason="Error", exit_code=137, container="trainer"),
            "runs/demo",
            "look with: sudo dmesg | grep 'Killed process'; and lower spec.trainer.maxTokensPerGpu",
        ),
        (failure(reason="Error", exit_code=143), "runs/demo", "sluice logs demo trainer"),
        (failure(reason="Error", exit_code=1), "/a/run", "sluice logs trainer --run-dir /a/run"),
    ],
    ids=["killed", "ended", "in another directory"],
)
def test_advice_on_a_local_run(last_failure: LastFailure, directory: str, expected: str) -> None:
    assert expected in advice(last_failure, RUNNING.job, Path(directory))


def test_an_attempt_that_never_ran_is_not_shown() -> None:
    """A run that was stopped, or a gang that waits for its next attempt, has its number already."""
    role = {"name": "trainer", "desired": 1, "attempt": 2}
    waiting = {"replica": 0, "attempt": 2, "retryTime": "2026-01-31T12:00:30Z"}
    partly = waiting | {"seen": [0]}
    shown = [
        line.split()
        for gang in (waiting, partly, {"replica": 0, "attempt": 2})
        for line in text(JobSnapshot("x", job({"roles": [role | {"gangs": [gang]}]}))).splitlines()
        if line.startswith("trainer ")
    ]
    assert [line[2] for line in shown] == ["1", "2", "2"]


@pytest.mark.parametrize(
    ("body", "state"),
    [
        (pod("trainer", "Running"), ("Running", "")),
        (
            pod("trainer", "Pending", schedulingGates=[{"name": "kueue"}]),
            ("Queued", "waits for its queue to admit it"),
        ),
        (
            pod("trainer", "Failed", {"terminated": {"exitCode": 3}}),
            ("Failed", "trainer: exit code 3"),
        ),
    ],
    ids=["runs", "waits in a queue", "failed"],
)
def test_pod_states_and_their_reasons(body: dict[str, Any], state: tuple[str, str]) -> None:
    assert pod_state(body) == state


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(5, "0:05"), (65, "1:05"), (3700, "1:01:40")],
    ids=["seconds", "minutes", "hours"],
)
def test_a_duration_has_hours_only_from_one_hour_on(seconds: float, text: str) -> None:
    assert duration(seconds) == text
