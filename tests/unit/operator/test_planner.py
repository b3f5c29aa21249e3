"""Whole passes: a job's life in a simulated world."""

from typing import Any

import pytest

from sluice.api import RLJobStatus, manifest
from sluice_operator.plan import KubeObject, Progress, plan
from sluice_operator.plan.decide.reopen import reopened
from sluice_operator.plan.facts import clock
from sluice_operator.plan.facts.constants import EXIT_PEER_LOST, PEER_GRACE
from tests.unit.operator.world import START, World, make_job, settled

ALL = ["demo-buffer-0-1-0", "demo-rendezvous-0-1-0", "demo-rollout-0-1-0", "demo-trainer-0-1-0"]


def test_pods_wait_for_the_address_of_the_rendezvous() -> None:
    world = World(make_job())
    first = world.step()
    assert {item["kind"] for item in first.create} == {
        "ConfigMap",
        "Secret",
        "Service",
        "PersistentVolumeClaim",
        "NetworkPolicy",
    }
    second = world.step()
    assert [item["metadata"]["name"] for item in second.create] == [
        "demo-rendezvous-0-1-0",
        "demo-buffer-0-1-0",
        "demo-rollout-0-1-0",
        "demo-trainer-0-1-0",
    ]
    trainer = second.create[-1]["spec"]["containers"][0]["env"]
    assert {"name": "SLUICE_RENDEZVOUS", "value": "10.0.0.1:7700"} in trainer


def test_an_unchanged_world_needs_nothing() -> None:
    world = settled()
    decision = world.plan()
    assert (decision.create, decision.delete, decision.events) == ((), (), ())
    assert decision.status == world.status
    assert world.names() == ALL


@pytest.mark.parametrize(
    ("checkpoint", "claim"),
    [
        ({}, "demo-checkpoint-1234"),
        ({"ephemeral": True}, None),
        ({"volume": {"hostPath": {"path": "/c"}}}, None),
    ],
    ids=str,
)
def test_the_status_names_the_claim_of_the_checkpoints(
    checkpoint: dict[str, Any], claim: str | None
) -> None:
    world = settled(checkpoint=checkpoint)
    assert world.status.checkpoint_claim == claim
    world.end("demo-trainer-0-1-0", 0)
    world.settle()
    assert (world.status.state, world.status.checkpoint_claim) == ("Succeeded", claim), (
        "that is where the model is"
    )


@pytest.mark.parametrize(
    ("progress", "state"),
    [
        (None, "Starting"),
        (Progress(0), "Starting"),
        (Progress(0, engines=1, engines_in_sync=1), "Running"),
        (Progress(3, engines=1), "Running"),
    ],
    ids=["unknown", "no engines", "engine in sync", "trained"],
)
def test_a_job_runs_once_an_engine_holds_the_weights(progress: Progress | None, state: str) -> None:
    world = settled()
    world.progress = progress
    world.settle()
    assert world.status.state == state


def test_progress_is_shown() -> None:
    world = settled()
    world.progress = Progress(3, 10, 0.51234, 3, 0.5, 2, 2)
    world.settle()
    status = world.status
    assert (status.step, status.total_steps, status.weight_version) == (3, 10, 3)
    assert (status.reward, status.policy_lag) == ("0.5123", "0.50")
    assert status.is_true("WeightsInSync")


def test_a_job_without_rewards_shows_its_loss() -> None:
    world = settled()
    world.progress = Progress(3, 10, None, 3, 0.0, 0, 0, loss=1.23456)
    world.settle()
    assert (world.status.reward, world.status.loss) == (None, "1.235")
    world.progress = Progress(4, 10, 0.5, 4, 0.0, 0, 0, loss=0.01)
    world.settle()
    assert world.status.reward == "0.5"


def test_a_buffer_that_restarts_hides_nothing() -> None:
    world = settled()
    world.progress = Progress(3, 10, 0.5, 3, 0.5, 1, 1)
    world.settle()
    world.progress = None
    world.settle()
    assert (world.status.step, world.status.reward) == (3, "0.5")
    assert world.status.condition("WeightsInSync").status == "Unknown"  # type: ignore[union-attr]


def test_the_attempt_is_written_before_anything_is_destroyed() -> None:
    world = settled()
    world.end("demo-trainer-0-1-0", 1, message="error: out of memory")
    first = world.step(delete=True)  # the operator dies right after the status write
    assert [deletion.name for deletion in first.delete] == ["demo-trainer-0-1-0"]
    assert world.status.roles[-1].gangs[0].attempt == 2
    assert world.names("trainer") == ["demo-trainer-0-1-0"]
    again = world.step()
    assert [deletion.name for deletion in again.delete] == ["demo-trainer-0-1-0"]
    assert world.status.restarts == 1


def test_a_failed_trainer_gang_restarts_alone() -> None:
    world = settled(trainer={"nodes": 2})
    world.end("demo-trainer-0-1-1", 1, message="error: out of memory")
    world.settle()
    assert world.names("trainer") == []  # back-off
    assert world.status.state == "Restarting"
    world.advance(1)
    world.settle()
    assert world.names("trainer") == ["demo-trainer-0-2-0", "demo-trainer-0-2-1"]
    assert world.names("rollout") == ["demo-rollout-0-1-0"]
    failure = world.status.last_failure
    assert failure is not None
    assert (failure.role, failure.pod, failure.container, failure.exit_code) == (
        "trainer",
        "demo-trainer-0-1-1",
        "trainer",
        1,
    )
    assert failure.message == "error: out of memory"
    assert [event.reason for event in world.events] == ["GangRestarting"]


def test_the_new_attempt_waits_until_the_old_pods_are_gone() -> None:
    world = settled()
    world.end("demo-trainer-0-1-0", 1)
    world.step()
    world.advance(60)
    for _ in range(3):
        assert world.step().create == ()
    world.remove_terminating()
    assert [item["metadata"]["name"] for item in world.step().create] == ["demo-trainer-0-2-0"]


def test_the_trainer_has_a_budget() -> None:
    world = settled(failurePolicy={"maxRestarts": 1})
    for attempt in (1, 2):
        world.end(f"demo-trainer-0-{attempt}-0", 1, message="error: boom")
        world.settle()
        world.advance(60)
        world.settle()
    assert world.status.state == "Failed"
    condition = world.status.condition("Failed")
    assert condition is not None
    assert condition.reason == "ReachedMaxRestarts"
    assert condition.message == "the trainer failed after 1 restarts (maxRestarts): trainer: boom"
    assert world.names() == ["demo-trainer-0-2-0"]


@pytest.mark.parametrize("role", ["trainer", "rollout", "buffer", "rendezvous"])
def test_a_configuration_error_fails_the_job_at_once(role: str) -> None:
    world = settled()
    world.end(f"demo-{role}-0-1-0", 2, message="error: no tokenizer in /models/tiny")
    world.settle()
    condition = world.status.condition("Failed")
    assert condition is not None
    assert condition.reason == "InvalidConfiguration"
    assert condition.message.endswith("no tokenizer in /models/tiny")
    assert world.status.last_failure is not None
    assert world.names() == [f"demo-{role}-0-1-0"]  # kept for its logs


def test_trainer_success_drains_the_rest() -> None:
    world = settled(trainer={"nodes": 2})
    world.end("demo-trainer-0-1-0", 0)
    world.settle()
    assert world.status.state == "Starting"
    world.end("demo-trainer-0-1-1", 0)
    world.settle()
    assert world.status.state == "Succeeded"
    assert world.status.completion_time == clock.text(START)
    assert world.names() == ["demo-trainer-0-1-0", "demo-trainer-0-1-1"]


@pytest.mark.parametrize("role", ["rollout", "buffer", "rendezvous"])
def test_exit_code_0_of_a_service_is_an_unexpected_end(role: str) -> None:
    world = settled()
    world.end(f"demo-{role}-0-1-0", 0)
    world.settle()
    world.advance(11)
    world.settle()
    assert world.names(role) == [f"demo-{role}-0-2-0"]
    assert world.status.restarts == 1


def test_a_dead_worker_beside_a_living_engine_is_a_failure() -> None:
    world = settled()
    world.end("demo-rollout-0-1-0", 1, container="worker")
    world.step()
    assert world.status.last_failure is not None
    assert world.status.last_failure.container == "worker"


@pytest.mark.parametrize("how", ["vanish", "disrupt"])
def test_disruptions_do_not_count(how: str) -> None:
    world = settled(failurePolicy={"maxRestarts": 0})
    getattr(world, how)("demo-trainer-0-1-0")
    world.settle()
    world.advance(1)
    world.settle()
    assert world.names("trainer") == ["demo-trainer-0-2-0"]
    assert (world.status.restarts, world.status.last_failure) == (0, None)
    assert [event.reason for event in world.events] == ["GangDisrupted"]


def two_pods_of_which_one_lost_the_other() -> World:
    world = settled(trainer={"nodes": 2})
    world.end(
        "demo-trainer-0-1-0", EXIT_PEER_LOST, message="error: another rank of the trainer is gone"
    )
    return world


def trainer_attempt(world: World) -> int:
    gang = world.status.gang("trainer", 0)
    assert gang is not None
    return gang.attempt


def test_a_pod_that_lost_its_peer_waits_for_the_peers_own_word() -> None:
    """Rank 0's connection breaks before the kubelet has told that the other pod was killed."""
    world = two_pods_of_which_one_lost_the_other()
    world.settle()
    assert trainer_attempt(world) == 1
    world.advance(2)
    world.end("demo-trainer-0-1-1", 137)
    world.settle()
    failure = world.status.last_failure
    assert failure is not None
    assert (failure.pod, failure.exit_code) == ("demo-trainer-0-1-1", 137)
    assert (trainer_attempt(world), world.status.restarts) == (2, 1)


def test_a_pod_that_lost_a_disrupted_peer_costs_no_restart() -> None:
    world = two_pods_of_which_one_lost_the_other()
    world.settle()
    world.advance(2)
    world.disrupt("demo-trainer-0-1-1")
    world.settle()
    assert (trainer_attempt(world), world.status.restarts, world.status.last_failure) == (
        2,
        0,
        None,
    )


def test_a_peer_that_never_says_a_word_is_not_waited_for_long() -> None:
    world = two_pods_of_which_one_lost_the_other()
    world.settle()
    again = world.plan().requeue_after
    assert again is not None
    assert again <= PEER_GRACE
    world.advance(PEER_GRACE)
    world.settle()
    assert (trainer_attempt(world), world.status.restarts) == (2, 1)


def test_one_rollout_down_does_not_stop_the_job() -> None:
    world = settled(rollout={"replicas": 2})
    world.progress = Progress(1, engines=2, engines_in_sync=2)
    world.settle()
    world.end("demo-rollout-1-1-0", 1)
    world.settle()
    assert world.status.state == "Running"


def test_a_note_stands_once_at_the_end_of_what_running_says() -> None:
    """However often the plan is made; and it goes with its cause."""
    world = settled()
    world.progress = Progress(1, engines=1, engines_in_sync=1)
    world.settle()
    plain = running_message(world.status)
    for note, expected in [("a change is refused", f"{plain}; a change is refused"), ("", plain)]:
        for _ in range(2):
            world.note = note
            world.settle()
            assert running_message(world.status) == expected


def running_message(status: RLJobStatus) -> str:
    condition = status.condition("Running")
    assert condition is not None
    return condition.message


def test_scaling() -> None:
    world = settled(rollout={"replicas": 3})
    world.job = make_job(rollout={"replicas": 1})
    world.settle()
    assert world.names("rollout") == ["demo-rollout-0-1-0"]
    assert world.status.rollout_replicas == 1
    world.job = make_job(rollout={"replicas": 2})
    world.settle()
    assert world.names("rollout") == [
        "demo-rollout-0-1-0",
        "demo-rollout-1-2-0",
    ]  # the number did not fall
    assert world.status.restarts == 0
    assert [event.reason for event in world.events] == ["Scaled", "Scaled"]


def test_suspend_and_resume() -> None:
    world = settled()
    world.job = make_job(suspend=True)
    world.settle()
    assert world.names() == []
    assert world.status.state == "Suspended"
    assert world.status.start_time is None
    world.advance(1000)
    world.job = make_job()
    world.settle()
    assert world.names() == [name.replace("-0-1-0", "-0-2-0") for name in ALL]
    assert (world.status.restarts, world.status.state) == (0, "Starting")
    assert [event.reason for event in world.events] == ["Suspended", "Resumed"]


def test_a_job_that_is_created_suspended_makes_nothing() -> None:
    world = World(make_job(suspend=True))
    world.settle()
    assert (world.names(), world.objects) == ([], {})
    assert world.status.state == "Suspended"


def test_the_status_says_that_a_job_has_started_before_anything_is_made() -> None:
    """The rules of what may change look at the attempts (sluice.api.schema.mutability)."""
    held = World(make_job(suspend=True))
    held.settle()
    assert {role.attempt for role in held.status.roles} == {0}
    assert {role.attempt for role in World(make_job()).step().status.roles} == {1}


def test_a_trainer_that_hangs_is_restarted_and_counted() -> None:
    world = settled(progressDeadlineSeconds=60)
    world.progress = Progress(5)
    world.settle()
    world.advance(59)
    assert world.step().delete == ()
    world.advance(1)
    decision = world.step()
    assert [(deletion.name, deletion.grace) for deletion in decision.delete] == [
        ("demo-trainer-0-1-0", 30)
    ]
    assert world.status.restarts == 1
    assert world.status.last_failure is not None
    assert world.status.last_failure.reason == "ProgressDeadlineExceeded"
    assert decision.events[0].reason == "ProgressDeadlineExceeded"


def test_the_plan_is_asked_again_when_a_deadline_comes() -> None:
    world = settled(activeDeadlineSeconds=100, progressDeadlineSeconds=60)
    world.progress = Progress(5)
    world.settle()
    world.advance(20)
    assert world.plan().requeue_after == 40


def test_silence_of_the_buffer_is_not_a_hang() -> None:
    world = settled(progressDeadlineSeconds=60)
    world.advance(1000)
    assert world.step().delete == ()


def test_the_deadline_of_the_start_says_what_it_waited_for() -> None:
    world = settled(startupDeadlineSeconds=60)
    world.advance(60)
    world.settle()
    condition = world.status.condition("Failed")
    assert condition is not None
    assert condition.message.startswith(
        "no step within 60 s (startupDeadlineSeconds): pods are running; the buffer"
    )


def test_a_finished_job_is_deleted_after_its_time() -> None:
    world = settled(ttlSecondsAfterFinished=60)
    world.end("demo-trainer-0-1-0", 0)
    world.settle()
    assert world.plan().requeue_after == 60
    world.advance(60)
    world.step()
    assert world.job_deleted


def test_terminal_states_are_for_ever() -> None:
    world = settled()
    world.end("demo-trainer-0-1-0", 0)
    world.settle()
    world.vanish("demo-trainer-0-1-0")
    world.advance(10**6)
    world.settle()
    assert (world.status.state, world.names()) == ("Succeeded", [])


def test_somebody_elses_job_is_left_alone() -> None:
    world = World(make_job(managedBy="kueue.x-k8s.io/multikueue"))
    decision = plan(world.job, world.observed(), START)
    assert (decision.status, decision.create) == (RLJobStatus(), ())


def test_a_changed_spec_reaches_the_config_map() -> None:
    world = settled()
    before = world.objects["ConfigMap", "demo-config"]["data"]["rljob.json"]
    world.job = make_job(trainer={"steps": 20})
    world.settle()
    assert world.objects["ConfigMap", "demo-config"]["data"]["rljob.json"] == before.replace(
        "10", "20"
    )


def test_a_failed_job_can_be_tried_again() -> None:
    world = settled(failurePolicy={"maxRestarts": 0})
    world.end("demo-trainer-0-1-0", 1)
    world.settle()
    assert world.status.state == "Failed"
    world.stored = manifest(reopened(world.status, world.now))
    world.settle()
    assert world.names("trainer") == ["demo-trainer-0-2-0"]
    assert world.status.state == "Starting"
    world.end("demo-trainer-0-2-0", 1)
    world.settle()
    assert world.status.state == "Failed"


def test_a_rewind_to_step_0_is_no_new_start() -> None:
    world = settled(startupDeadlineSeconds=60)
    world.progress = Progress(5, engines=1, engines_in_sync=1)
    world.settle()
    world.advance(100)
    world.progress = Progress(0)
    world.settle()
    assert (world.status.state, world.status.step) == ("Running", 0)


def test_autoscalers_see_one_pod_of_each_engine() -> None:
    """Autoscalers divide the usage of all selected pods by the number of engines.

    So the followers of an engine must not be selected.
    """
    world = World(make_job(rollout={"gpusPerReplica": 0, "replicas": 2, "nodesPerReplica": 3}))
    world.settle()
    assert world.status.rollout_selector is not None
    selector = dict(item.split("=") for item in world.status.rollout_selector.split(","))
    selected = [
        pod["metadata"]["name"]
        for pod in world.pods.values()
        if selector.items() <= labels(pod).items()
    ]
    assert selected == ["demo-rollout-0-1-0", "demo-rollout-1-1-0"]


def labels(pod: KubeObject) -> dict[str, str]:
    return dict(pod["metadata"]["labels"])
