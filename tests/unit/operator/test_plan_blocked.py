"""Reasons why a pod does not start, with what to do, and the places that show them."""

from typing import Any

import pytest

from sluice_operator.plan import KubeObject
from sluice_operator.plan.facts.model import KubeletWarning, Progress
from sluice_operator.plan.report.blocked import blocked
from tests.unit.operator.world import World, make_job, make_pod


def waiting(reason: str, message: str, **pod: Any) -> KubeObject:
    state = {"name": "trainer", "state": {"waiting": {"reason": reason, "message": message}}}
    return make_pod(phase="Pending", containerStatuses=[state], **pod)


def unscheduled(message: str) -> KubeObject:
    condition = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": message,
    }
    return make_pod(phase="Pending", conditions=[condition], containerStatuses=[])


@pytest.mark.parametrize(
    ("pod", "reason", "words"),
    [
        (
            waiting("ImagePullBackOff", 'Back-off pulling image "x:y"'),
            "ImagePullBackOff",
            ['Back-off pulling image "x:y"', "check the image's name, and imagePullSecrets"],
        ),
        (
            waiting("CreateContainerConfigError", 'secret "hf" not found'),
            "CreateContainerConfigError",
            ['secret "hf" not found', "create the missing object in the job's namespace"],
        ),
        (
            unscheduled("0/3 nodes are available: 3 Insufficient nvidia.com/gpu."),
            "Unschedulable",
            ["no node has enough free nvidia.com/gpu: wait, add nodes, or request less"],
        ),
        (
            unscheduled("0/3 nodes are available: 1 Insufficient cpu, 2 Insufficient rdma/hca."),
            "Unschedulable",
            ["no node has enough free cpu"],
        ),
        (
            unscheduled('persistentvolumeclaim "models" not found'),
            "Unschedulable",
            ["create the PersistentVolumeClaim models"],
        ),
        (
            unscheduled(
                "0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims."
            ),
            "Unschedulable",
            ["check its storage class"],
        ),
        (
            unscheduled(
                "0/1 nodes are available: 1 node(s) had untolerated taint {nvidia.com/gpu: }."
            ),
            "Unschedulable",
            ["add tolerations to the role's template"],
        ),
        (
            unscheduled(
                "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector."
            ),
            "Unschedulable",
            ["nodeSelector or affinity"],
        ),
        (waiting("SomethingNew", "who knows"), "SomethingNew", ["who knows"]),
    ],
    ids=[
        "image",
        "secret",
        "no free gpu",
        "no free cpu",
        "missing claim",
        "unbound claim",
        "taint",
        "affinity",
        "unknown reason",
    ],
)
def test_words(pod: KubeObject, reason: str, words: list[str]) -> None:
    block = blocked([make_pod("buffer"), pod], {})
    assert block is not None
    assert (block.reason, block.pod) == (reason, "demo-trainer-0-1-0")
    for word in words:
        assert word in block.message


@pytest.mark.parametrize("reason", ["ContainerCreating", "PodInitializing"])
def test_an_ordinary_start_is_nothing_to_tell(reason: str) -> None:
    assert blocked([waiting(reason, "")], {}) is None


def test_a_gated_pod_is_in_a_queue_and_not_blocked() -> None:
    pod = unscheduled("Scheduling is blocked due to non-empty scheduling gates")
    pod["spec"]["schedulingGates"] = [{"name": "kueue.x-k8s.io/admission"}]
    assert blocked([pod], {}) is None


def test_a_refused_container_comes_before_a_pod_without_a_place() -> None:
    block = blocked([unscheduled("no room"), waiting("ErrImagePull", "no such image", index=1)], {})
    assert block is not None
    assert block.reason == "ErrImagePull"


def start(world: World, pod: KubeObject) -> None:
    world.step()
    world.step()
    for name in world.names():
        if not name.startswith("demo-trainer"):
            world.replace(name, phase="Running")
    world.pods["demo-trainer-0-1-0"] = pod


def test_a_refused_container_is_shown_at_once_and_noted_once() -> None:
    world = World(make_job())
    start(world, waiting("ErrImagePull", "no such image"))
    world.step()
    failure = world.status.last_failure
    assert failure is not None
    assert (failure.pod, failure.container, failure.reason) == (
        "demo-trainer-0-1-0",
        "trainer",
        "ErrImagePull",
    )
    running = world.status.condition("Running")
    assert running is not None
    assert (
        "demo-trainer-0-1-0 (trainer): ErrImagePull: no such image; check the image's name"
        in running.message
    )
    world.advance(30)
    world.pods["demo-trainer-0-1-0"] = waiting("ImagePullBackOff", "Back-off")
    world.step()
    assert world.status.last_failure == failure


def test_at_the_start_up_deadline_the_job_fails_with_what_it_waited_for() -> None:
    world = World(make_job(startupDeadlineSeconds=60))
    start(world, unscheduled("0/3 nodes are available: 3 Insufficient nvidia.com/gpu."))
    world.step()
    assert world.status.last_failure is None, "waiting for a place is no failure: machines may come"
    world.advance(60)
    world.step()
    failed = world.status.condition("Failed")
    assert failed is not None
    assert failed.reason == "StartupDeadlineExceeded"
    assert "no node has enough free nvidia.com/gpu" in failed.message
    assert world.status.last_failure is not None
    assert world.status.last_failure.reason == "Unschedulable"


def test_a_gang_that_fails_again_and_again_says_of_what() -> None:
    world = World(make_job())
    world.settle()
    world.end("demo-rollout-0-1-0", 1, container="engine", message="error: CUDA out of memory")
    world.settle()
    running = world.status.condition("Running")
    assert running is not None
    assert running.reason == "Restarting"
    assert (
        running.message
        == "waiting for rollout-0 (attempt 2); demo-rollout-0-1-0: engine: CUDA out of memory"
    )


def placed() -> KubeObject:
    """A pod with a node, and without any word from there."""
    pod = make_pod("trainer", phase="Pending", containerStatuses=[], conditions=[])
    return {**pod, "spec": {"nodeName": "n1"}}


@pytest.mark.parametrize(
    ("warning", "words"),
    [
        (
            KubeletWarning(
                "FailedMount", 'MountVolume.SetUp failed for volume "x" : secret "hf" not found'
            ),
            "create the secret hf",
        ),
        (
            KubeletWarning(
                "FailedAttachVolume",
                "Multi-Attach error for volume pvc-1 Volume is already used by pod(s) a",
            ),
            "the volume is attached to another node",
        ),
        (
            KubeletWarning("FailedCreatePodSandBox", "Failed to create pod sandbox: rpc error"),
            "container runtime or network",
        ),
        (KubeletWarning("SomethingNew", "who knows"), "SomethingNew: who knows"),
    ],
)
def test_what_a_kubelet_warns_of_is_why_a_pod_does_not_start(
    warning: KubeletWarning, words: str
) -> None:
    block = blocked([placed()], {"demo-trainer-0-1-0": warning})
    assert block is not None
    assert (block.pod, block.container) == ("demo-trainer-0-1-0", "")
    assert f"{warning.reason}: {warning.message}" in block.text()
    assert words in block.text()


def test_a_warning_about_a_pod_that_runs_is_nothing_to_tell() -> None:
    assert (
        blocked(
            [make_pod("trainer")],
            {"demo-trainer-0-1-0": KubeletWarning("FailedMount", "it was late")},
        )
        is None
    )


def test_a_warning_that_lasts_is_a_failure_once_and_a_first_one_is_none() -> None:
    world = World(make_job())
    start(world, placed())
    world.warned = {"demo-trainer-0-1-0": KubeletWarning("FailedMount", "no such device")}
    world.step()
    running = world.status.condition("Running")
    assert running is not None
    assert "demo-trainer-0-1-0: FailedMount: no such device" in running.message
    assert world.status.last_failure is None
    world.warned = {"demo-trainer-0-1-0": KubeletWarning("FailedMount", "no such device", 3)}
    world.step()
    failure = world.status.last_failure
    assert failure is not None
    assert (failure.pod, failure.container, failure.reason) == (
        "demo-trainer-0-1-0",
        "",
        "FailedMount",
    )
    world.advance(30)
    world.warned = {"demo-trainer-0-1-0": KubeletWarning("FailedMount", "no such device", 9)}
    world.step()
    assert world.status.last_failure == failure


def failing(world: World, message: str) -> tuple[int, str]:
    """End and restart an engine. Return its number of equal failures and Running's message."""
    world.advance(600)
    world.settle()
    [name] = world.names("rollout")
    world.end(name, 1, container="engine", message=message)
    world.settle()
    running, failure = world.status.condition("Running"), world.status.last_failure
    assert running is not None
    assert failure is not None
    return failure.times, running.message


def test_a_start_that_fails_in_the_same_way_again_and_again_is_called_hopeless() -> None:
    world = World(make_job())
    world.settle()
    assert failing(world, "error: port 30001 is taken")[0] == 1
    times, message = failing(world, "error: port 30002 is taken")
    assert (times, "further attempts" in message) == (2, False)
    times, message = failing(world, "error: port 30003 is taken")
    assert times == 3
    assert (
        "port 30003 is taken; failed 3 times in a row in the same way, before the first step: "
        "further attempts will not help until the cause is fixed" in message
    )
    messages = [event.message for event in world.events if event.reason == "GangRestarting"]
    assert ["further attempts will not help" in text for text in messages] == [False, False, True]
    times, message = failing(world, "error: no such model")
    assert (times, "further attempts" in message) == (1, False)


def test_after_a_step_was_trained_no_failure_is_called_hopeless() -> None:
    world = World(make_job())
    world.settle()
    world.progress = Progress(step=1)
    for _ in range(3):
        times, message = failing(world, "error: port is taken")
    assert times == 3
    assert "further attempts" not in message
