"""A pod of a dead node: who waits for it is told so, and until when."""

from datetime import timedelta

from sluice_operator.plan.facts import clock
from sluice_operator.plan.facts.constants import FORCE_DELETE_AFTER
from sluice_operator.plan.report.conditions import overdue
from tests.unit.operator.world import START, World, make_pod, settled

TRAINER = "demo-trainer-0-1-0"
GRACE = 30


def evicted() -> World:
    """A job whose trainer is being deleted, on a node that does not answer."""
    world = settled()
    end = clock.text(world.now + timedelta(seconds=GRACE))
    world.pods[TRAINER]["metadata"]["deletionTimestamp"] = end
    world.step()
    return world


def message(world: World) -> str:
    condition = world.status.condition("Running")
    assert condition is not None
    return condition.message


def test_within_its_grace_nothing_is_told() -> None:
    world = evicted()
    assert message(world) == "waiting for trainer-0 (attempt 2)"
    plan = world.step()
    assert plan.requeue_after is not None
    assert plan.requeue_after <= GRACE


def test_past_its_grace_the_next_attempt_says_for_which_pod_it_waits_and_until_when() -> None:
    world = evicted()
    until = clock.text(world.now + timedelta(seconds=GRACE + FORCE_DELETE_AFTER))
    world.now += timedelta(seconds=GRACE)
    plan = world.step()
    assert message(world) == (
        f"waiting for trainer-0 (attempt 2); {TRAINER} was deleted but did not end in its "
        f"grace period: its node may be dead; the operator deletes it by force at {until}"
    )
    assert plan.requeue_after is not None
    assert plan.requeue_after <= FORCE_DELETE_AFTER


def test_once_it_is_removed_the_next_attempt_starts() -> None:
    world = evicted()
    world.now += timedelta(seconds=GRACE + FORCE_DELETE_AFTER)
    world.step()
    assert world.events[-1].reason == "PodForceDeleted"
    assert message(world).endswith(f"{TRAINER} is being deleted by force")
    world.step()
    assert "demo-trainer-0-2-0" in world.pods
    assert TRAINER not in message(world)


def test_who_keeps_a_pod_that_force_does_not_remove_is_told() -> None:
    pod = make_pod()
    pod["metadata"] |= {"deletionTimestamp": clock.text(START), "finalizers": ["example.org/keep"]}
    later = START + timedelta(seconds=FORCE_DELETE_AFTER)
    assert overdue([make_pod("buffer"), pod], later) == (
        f"{TRAINER} was deleted by force, but its finalizers keep it (example.org/keep)"
    )


def test_a_pod_that_has_ended_is_not_blamed_on_its_node() -> None:
    """Kueue keeps a trainer's pod that succeeded for a moment while another one failed."""
    pod = make_pod(phase="Succeeded")
    finalizers = ["kueue.x-k8s.io/managed"]
    pod["metadata"] |= {"deletionTimestamp": clock.text(START), "finalizers": finalizers}
    assert overdue([pod], START) == (
        f"{TRAINER} has ended, but its finalizers keep it (kueue.x-k8s.io/managed)"
    )
