"""Whatever happens to pods and operator, plans converge and never break their promises."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from sluice_operator.plan import is_finished
from sluice_operator.plan.facts import podstate
from tests.unit.operator.world import World, make_job

MAX_RESTARTS = 2
SMALL = (
    "start",
    "remove",
    "fail",
    "end",
    "vanish",
    "disrupt",
    "pass",
    "pass",
    "crash",
    "cut",
    "cut",
    "time",
)
LARGE = ("rest", "crash-loop", "finish", "suspend", "resume", "scale")
EVENTS = st.lists(
    st.tuples(st.sampled_from(SMALL + LARGE), st.integers(0, 99)), min_size=1, max_size=60
)


class Watched:
    """A world whose promises are checked after every event."""

    def __init__(self) -> None:
        self.world = World(make_job(**SPEC))
        self.attempts: dict[tuple[str, int], int] = defaultdict(int)
        self.replicas, self.suspended = 2, False

    def act(self, action: str, number: int) -> None:
        world = self.world
        names = world.names()
        chosen = names[number % len(names)] if names else ""
        running = [name for name in names if world.pods[name]["status"]["phase"] == "Running"]
        if action == "start":
            world.start_pods()
        elif action == "remove":
            world.remove_terminating()
        elif action in ("fail", "end") and running:
            world.end(running[number % len(running)], 1 if action == "fail" else 0)
        elif action in ("vanish", "disrupt") and chosen:
            getattr(world, action)(chosen)
        elif action == "time":
            world.advance(number)
        elif action == "rest":
            world.settle()
        elif action in ("crash-loop", "finish"):
            self.end_trainer(1 if action == "crash-loop" else 0)
        elif action in ("suspend", "resume", "scale"):
            self.change(action, number)
        elif action in ("pass", "crash", "cut"):
            world.step(delete=action == "crash", create=number % 6 if action == "cut" else None)

    def end_trainer(self, code: int) -> None:
        """All trainer pods end, and what follows from it has time to happen."""
        for name in self.world.names("trainer"):
            self.world.end(name, code)
        self.world.settle()
        self.world.advance(60)

    def change(self, action: str, number: int) -> None:
        if action == "scale":
            self.replicas = number % 4
        else:
            self.suspended = action == "suspend"
        rollout = SPEC["rollout"] | {"replicas": self.replicas}
        self.world.job = make_job(**SPEC | {"rollout": rollout, "suspend": self.suspended})

    def check(self) -> None:
        alive = defaultdict(set)
        for pod in self.world.pods.values():
            alive[podstate.role(pod), podstate.replica(pod)].add(podstate.attempt(pod))
        assert all(len(attempts) == 1 for attempts in alive.values()), (
            f"two attempts at once: {alive}"
        )
        for role in self.world.status.roles:
            for gang in role.gangs:
                key = role.name, gang.replica
                assert gang.attempt >= self.attempts[key], f"the attempt of {key} fell"
                assert gang.attempt >= max(alive[key], default=0)
                self.attempts[key] = gang.attempt
                assert role.name != "trainer" or gang.restarts <= MAX_RESTARTS


SPEC: dict[str, Any] = {
    "trainer": {"steps": 10, "nodes": 2, "gpusPerNode": 0},
    "rollout": {"replicas": 2, "gpusPerReplica": 0},
    "failurePolicy": {
        "maxRestarts": MAX_RESTARTS,
        "rolloutBackoffSeconds": 5,
    },
}


@settings(max_examples=120, deadline=None)
@given(EVENTS)
@example([("pass", 0), ("cut", 5), ("pass", 0), ("vanish", 64)])
@example(
    [
        ("pass", 0),
        ("cut", 5),
        ("pass", 0),
        ("vanish", 64),
        ("suspend", 0),
        ("rest", 0),
        ("resume", 0),
    ]
)
def test_promises_hold_and_plans_converge(events: list[tuple[str, int]]) -> None:
    watched = Watched()
    for action, number in events:
        watched.act(action, number)
        watched.check()
    world = watched.world
    for _ in range(3):  # a failure that is still to be seen, its back-off, the new attempt
        world.settle()
        world.advance(120)
        watched.check()
    decision = world.plan()
    assert (decision.create, decision.delete, decision.events) == ((), (), ())
    assert decision.status == world.status
    if is_finished(world.status):
        assert all(podstate.is_finished(pod) for pod in world.pods.values())
    else:
        expected = 0 if watched.suspended else 4 + watched.replicas
        assert len(world.pods) == expected
