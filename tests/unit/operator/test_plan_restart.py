from dataclasses import replace
from datetime import timedelta

import pytest

from sluice.api import GangStatus, LastFailure
from sluice.api.groups.lifecycle import FailurePolicy
from sluice_operator.plan.decide.restart import GiveUp, Restart, delay, restart
from sluice_operator.plan.facts import clock
from sluice_operator.plan.facts.model import Gang, GangFacts
from tests.unit.operator.world import START

TRAINER, ROLLOUT, BUFFER = Gang("trainer", 0, 2), Gang("rollout", 1, 1), Gang("buffer", 0, 1)
CRASH = LastFailure(
    role="trainer", pod="p", container="c", exit_code=1, time="2026-01-31T12:00:00Z", message="boom"
)
POLICY = FailurePolicy.model_validate({"maxRestarts": 2, "rolloutBackoffSeconds": 10})
STARTED = START - timedelta(seconds=5)


@pytest.mark.parametrize(
    ("gang", "facts", "restarts", "expected"),
    [
        (TRAINER, GangFacts(), 0, None),
        (TRAINER, GangFacts(failure=CRASH), 0, Restart(1, 1, CRASH)),
        (TRAINER, GangFacts(failure=CRASH), 1, Restart(2, 2, CRASH)),
        (TRAINER, GangFacts(disruption="evicted"), 2, Restart(1, 2, disruption="evicted")),
        (
            TRAINER,
            GangFacts(disruption="evicted", failure=CRASH),
            2,
            Restart(1, 2, disruption="evicted"),
        ),
        (ROLLOUT, GangFacts(failure=CRASH), 0, Restart(10, 1, CRASH)),
        (ROLLOUT, GangFacts(failure=CRASH), 1, Restart(20, 2, CRASH)),
        (ROLLOUT, GangFacts(failure=CRASH), 9, Restart(300, 10, CRASH)),
        (
            ROLLOUT,
            GangFacts(failure=CRASH, started=START - timedelta(seconds=599)),
            9,
            Restart(300, 10, CRASH),
        ),
        (
            ROLLOUT,
            GangFacts(failure=CRASH, started=START - timedelta(seconds=600)),
            9,
            Restart(10, 1, CRASH),
        ),
        (ROLLOUT, GangFacts(disruption="evicted"), 9, Restart(1, 0, disruption="evicted")),
        (BUFFER, GangFacts(disruption="evicted"), 9, Restart(1, 9, disruption="evicted")),
        (BUFFER, GangFacts(failure=CRASH), 99, Restart(60, 100, CRASH)),
        (
            BUFFER,
            GangFacts(failure=CRASH, started=START - timedelta(hours=1)),
            99,
            Restart(1, 1, CRASH),
        ),
    ],
    ids=[
        "trainer runs",
        "trainer, first crash",
        "trainer, second crash",
        "trainer evicted",
        "trainer evicted and crashed",
        "engine, first crash",
        "engine, second crash",
        "engine, tenth crash",
        "engine ran too short",
        "engine ran long enough",
        "engine evicted",
        "buffer evicted",
        "buffer, hundredth crash",
        "buffer ran for an hour",
    ],
)
def test_restart(gang: Gang, facts: GangFacts, restarts: int, expected: Restart | None) -> None:
    facts = facts if facts.started else replace(facts, started=STARTED)
    status = GangStatus(replica=gang.replica, attempt=1, restarts=restarts)
    assert restart(gang, facts, status, POLICY, START) == expected


@pytest.mark.parametrize(
    ("restarts", "ready_for", "pause"),
    [
        pytest.param(1, 19, 20, id="again before it has worked for twice its pause of 10 s"),
        pytest.param(1, 20, 10, id="another failure after it has worked"),
        pytest.param(2, 39, 40, id="longer after the second failure"),
        pytest.param(2, 40, 10, id="another one after the second"),
    ],
)
def test_an_engines_back_off_counts_failures_in_a_row(
    restarts: int, ready_for: int, pause: int
) -> None:
    ready = clock.text(START - timedelta(seconds=ready_for))
    status = GangStatus(replica=1, attempt=2, restarts=restarts, ready_time=ready)
    facts = GangFacts(failure=CRASH, started=START - timedelta(seconds=100))
    decision = restart(ROLLOUT, facts, status, POLICY, START)
    assert isinstance(decision, Restart)
    assert (decision.delay, decision.restarts) == (pause, 1 if pause == 10 else restarts + 1)


@pytest.mark.parametrize(
    ("facts", "reason", "message"),
    [
        (
            GangFacts(failure=CRASH),
            "ReachedMaxRestarts",
            "the trainer failed after 2 restarts (maxRestarts): c: boom",
        ),
        (
            GangFacts(failure=CRASH, started=START - timedelta(days=3)),
            "ReachedMaxRestarts",
            "the trainer failed after",
        ),
        (GangFacts(config_error=CRASH, disruption="evicted"), "InvalidConfiguration", "p: c: boom"),
    ],
)
def test_the_job_gives_up(facts: GangFacts, reason: str, message: str) -> None:
    decision = restart(TRAINER, facts, GangStatus(replica=0, attempt=3, restarts=2), POLICY, START)
    assert isinstance(decision, GiveUp)
    assert decision.reason == reason
    assert decision.message.startswith(message)


def test_a_configuration_error_of_any_role_ends_the_job() -> None:
    decision = restart(
        ROLLOUT, GangFacts(config_error=CRASH), GangStatus(replica=1, attempt=1), POLICY, START
    )
    assert isinstance(decision, GiveUp)


@pytest.mark.parametrize(
    ("failures", "seconds"), [(0, 10), (1, 20), (4, 160), (5, 300), (10_000, 300)]
)
def test_back_off_doubles_up_to_its_limit(failures: int, seconds: float) -> None:
    assert delay(10, 300, failures) == seconds
