from datetime import timedelta

import pytest

from sluice_operator.plan.decide.gangs import gang_facts
from sluice_operator.plan.facts import podstate
from sluice_operator.plan.facts.model import Gang, KubeObject
from tests.unit.operator.world import START, make_pod

STOPPED_BY_KUEUE = {"type": "TerminationTarget", "status": "True", "reason": "WorkloadEvicted"}
EVICTED = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}


@pytest.mark.parametrize(
    ("pod", "expected"),
    [
        (make_pod(), ""),
        (make_pod(conditions=[EVICTED]), "demo-trainer-0-1-0: EvictionByEvictionAPI"),
        (make_pod(phase="Failed", reason="Evicted"), "demo-trainer-0-1-0: Evicted"),
        (make_pod(conditions=[STOPPED_BY_KUEUE]), "demo-trainer-0-1-0: WorkloadEvicted"),
        (
            make_pod(phase="Failed", reason="OutOfnvidia.com/gpu"),
            "demo-trainer-0-1-0: OutOfnvidia.com/gpu",
        ),
        (make_pod(phase="Failed", ends={"trainer": 137}), ""),
        (make_pod(phase="Failed", reason="DeadlineExceeded"), ""),
    ],
    ids=[
        "runs",
        "eviction condition",
        "evicted",
        "stopped by kueue",
        "out of gpus",
        "killed",
        "deadline",
    ],
)
def test_disruption(pod: KubeObject, expected: str) -> None:
    assert podstate.disruption(pod) == expected


def test_a_pod_that_others_delete_is_disrupted() -> None:
    pod = make_pod()
    pod["metadata"]["deletionTimestamp"] = "2026-01-31T12:00:00Z"
    assert podstate.disruption(pod) == "demo-trainer-0-1-0 was deleted"


@pytest.mark.parametrize(
    ("pod", "expected"),
    [
        (make_pod(), False),
        (make_pod(phase="Succeeded"), True),
        (make_pod(ends={"trainer": 0}), True),  # a sidecar of the user's still runs
        (make_pod(phase="Failed", ends={"trainer": 1}), False),
    ],
    ids=["runs", "succeeded", "all containers ended", "failed"],
)
def test_succeeded(pod: KubeObject, expected: bool) -> None:
    assert podstate.succeeded(pod) is expected


@pytest.mark.parametrize(
    ("pod", "expected"),
    [
        (make_pod("rollout"), []),
        (make_pod("rollout", ends={"worker": 1}), [("worker", "Error", 1)]),
        (make_pod("rollout", ends={"engine": 0}), [("engine", "UnexpectedEnd", 0)]),
        (
            make_pod("buffer", phase="Succeeded", ends={"buffer": 0}),
            [("buffer", "UnexpectedEnd", 0)],
        ),
        (make_pod("trainer", phase="Succeeded", ends={"trainer": 0}), []),
        (
            make_pod("rollout", ends={"engine": 137, "worker": 1}),
            [("worker", "Error", 1), ("engine", "Error", 137)],
        ),
        (
            make_pod("trainer", phase="Failed", reason="Unknown", containerStatuses=[]),
            [("", "Unknown", None)],
        ),
    ],
    ids=[
        "runs",
        "worker failed",
        "engine ended",
        "buffer ended",
        "trainer ended",
        "both failed",
        "no containers",
    ],
)
def test_failures_root_cause_first(
    pod: KubeObject, expected: list[tuple[str, str, int | None]]
) -> None:
    failures = podstate.failures(pod, START)
    assert [
        (failure.container, failure.reason, failure.exit_code) for failure in failures
    ] == expected


def test_what_died_first_is_the_root_cause() -> None:
    early = make_pod("trainer", index=1, phase="Failed", ends={"trainer": 137}, at=START)
    late = make_pod(
        "trainer", index=0, phase="Failed", ends={"trainer": 1}, at=START + timedelta(seconds=2)
    )
    failures = [podstate.failures(pod, START)[0] for pod in (late, early)]
    assert min(failures, key=podstate.root_cause_order).pod == "demo-trainer-0-1-1"


@pytest.mark.parametrize(
    ("code", "message", "expected"),
    [
        (1, "a\nerror: no such model\nb", "trainer: no such model"),
        (1, "a\nb\n\n", "trainer: b"),
        (1, "", "trainer: Error, exit code 1"),
        (137, "step 3 done", "trainer: killed by SIGKILL"),
        (139, "", "trainer: killed by SIGSEGV"),
        (255, "error: a shard is missing", "trainer: a shard is missing"),
        (255, "a shard is missing", "trainer: a shard is missing"),
    ],
)
def test_headline(code: int, message: str, expected: str) -> None:
    pod = make_pod("trainer", phase="Failed", ends={"trainer": code}, message=message)
    assert podstate.headline(podstate.failures(pod, START)[0]) == expected


SCHEDULER = """\
[2026-01-31 12:00:00] max_total_num_tokens=0
[2026-01-31 12:00:00] Scheduler hit an exception: Traceback (most recent call last):
  File "/sgl/scheduler.py", line 3076, in run_scheduler_process
    scheduler = Scheduler(server_args)
                ^^^^^^^^^^^^^^^^^^^^^^
  File "/sgl/model_runner.py", line 12, in init_memory_pool
    raise RuntimeError(
RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.

[2026-01-31 12:00:01] Received sigquit from a child process. It usually means the child failed.
"""


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            SCHEDULER,
            "engine: killed by SIGKILL after RuntimeError: Not enough memory. "
            "Please try to increase --mem-fraction-static.",
        ),
        (
            SCHEDULER.partition("scheduler = ")[2],
            "engine: killed by SIGKILL after RuntimeError: Not enough memory. Please try to "
            "increase --mem-fraction-static.",
        ),
        (
            '  File "a.py", line 1, in f\n    f()\ntorch.OutOfMemoryError: CUDA out of memory\n[x] '
            "bye",
            "engine: killed by SIGKILL after torch.OutOfMemoryError: CUDA out of memory",
        ),
        (
            '  File "a.py", line 1, in f\n    f()\nKeyboardInterrupt\n',
            "engine: killed by SIGKILL after KeyboardInterrupt",
        ),
        ("    an indented line\n[2026-01-31] INFO: one of a log\n", "engine: killed by SIGKILL"),
        ("RuntimeError: without a traceback\n", "engine: killed by SIGKILL"),
        ("", "engine: killed by SIGKILL"),
    ],
    ids=[
        "scheduler",
        "cut off above",
        "torch's",
        "without message",
        "a log",
        "no traceback",
        "nothing",
    ],
)
def test_a_process_that_was_killed_died_of_the_last_exception_in_its_log(
    message: str, expected: str
) -> None:
    pod = make_pod("rollout", ends={"engine": 137}, message=message)
    assert podstate.headline(podstate.failures(pod, START)[0]) == expected


def test_so_did_one_that_ended_by_itself() -> None:
    pod = make_pod("rollout", ends={"engine": 1}, message=SCHEDULER)
    assert podstate.headline(podstate.failures(pod, START)[0]) == (
        "engine: RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."
    )


@pytest.mark.parametrize(
    ("reason", "why"),
    [
        (
            "OOMKilled",
            "it used more memory than its limit: raise spec.trainer.resources.limits.memory",
        ),
        (
            "SystemOOM",
            "the kernel's out-of-memory killer ended it, since the machine had no memory left: "
            "lower spec.trainer.maxTokensPerGpu, or set spec.trainer.recompute: full",
        ),
    ],
    ids=["of the container", "of the machine"],
)
def test_headline_of_a_process_that_used_too_much_memory(reason: str, why: str) -> None:
    end = {
        "exitCode": 137,
        "reason": reason,
        "finishedAt": "2026-01-31T12:00:00Z",
        "message": "step 3",
    }
    pod = make_pod(
        phase="Failed", containerStatuses=[{"name": "trainer", "state": {"terminated": end}}]
    )
    assert podstate.headline(podstate.failures(pod, START)[0]) == (
        f"trainer: {reason}, killed by SIGKILL; {why}"
    )


def test_exit_code_2_of_a_pod_that_somebody_ends_is_no_configuration_error() -> None:
    pod = make_pod(phase="Failed", ends={"trainer": 2}, conditions=[EVICTED])
    facts = gang_facts(Gang("trainer", 0, 1), [pod], START)
    assert facts.config_error is None
    assert facts.disruption


@pytest.mark.parametrize(
    ("container", "ours"),
    [("engine", True), ("worker", True), ("openenv", False), ("sidecar-of-mine", False)],
)
def test_exit_codes_of_the_contract_are_those_of_our_containers(container: str, ours: bool) -> None:
    def ended(code: int) -> KubeObject:
        end = {"exitCode": code, "finishedAt": "2026-01-31T12:00:00Z"}
        status = {"name": container, "state": {"terminated": end}}
        return make_pod(role="rollout", containerStatuses=[status])

    assert (podstate.config_error(ended(2), START) is not None) is ours
    (failure,) = podstate.failures(ended(3), START)
    assert podstate.lost_peer(failure) is (ours and container != "engine")


def test_a_terminal_acts_on_nothing_that_a_container_ended_with() -> None:
    words = "\x1b]52;c;aGk=\x07\nerror: \x1b[2J\u009bdone"
    pod = make_pod(phase="Failed", ends={"trainer": 1}, message=words)
    [failure] = podstate.failures(pod, START)
    assert failure.message == "\\x1b]52;c;aGk=\\x07\nerror: \\x1b[2J\\x9bdone"
