"""The last evaluation is awaited while it makes progress, and given up when it stalls."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sluice_trainer.clients.background import Stopped
from sluice_trainer.loop import evaluations
from sluice_trainer.loop.evaluations import STALL_SECONDS, Evaluations, LastEvaluation, Stall
from sluice_trainer.loop.gpu_sharing import GpuSharing
from sluice_trainer.loop.rollout_only import ALONE

VERSION = 7


class Services:
    """Buffer, engines and rendezvous during an evaluation.

    `progress` holds the counters at each look; the last ones stay.
    """

    def __init__(self, progress: list[tuple[int, float]], *, ends: bool) -> None:
        self.progress, self.ends, self.looks = progress, ends, 0

    def evaluations(self, after: int, wait_for: int | None = None) -> Any:
        over = self.ends and self.looks >= len(self.progress)
        return SimpleNamespace(pending_versions=[] if over else [VERSION], evaluations=[])

    def counters(self) -> dict[str, int]:
        self.looks += 1
        return {"evaluation_groups": self._now[0]}

    def generated_tokens(self) -> float:
        return self._now[1]

    @property
    def _now(self) -> tuple[int, float]:
        return self.progress[min(self.looks, len(self.progress)) - 1]

    def joiners(self) -> bool:
        return False

    def set_state(self, state: str) -> None:
        return


def last_evaluation(service: Services) -> LastEvaluation:
    unused = cast("Any", None)
    clients = cast("Any", SimpleNamespace(buffer=service, engines=service, member=service))
    results = Evaluations(cast("Any", service), None, enabled=True)
    gpus = GpuSharing(unused, clients, ALONE, {}, colocated=False)
    return LastEvaluation(results, clients, ALONE, gpus, unused, threading.Event())


@pytest.fixture(autouse=True)
def each_look_takes_ten_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    def clock() -> Iterator[float]:
        now = 0.0
        while True:
            yield now
            now += 600.0

    monkeypatch.setattr(evaluations, "time", SimpleNamespace(monotonic=clock().__next__))


def test_an_evaluation_that_makes_progress_is_awaited() -> None:
    service = Services([(groups, 0.0) for groups in range(100)], ends=True)
    last_evaluation(service).wait(VERSION)
    assert service.looks == 100


def test_long_responses_are_progress_before_their_group_is_finished() -> None:
    service = Services([(3, 1000.0 * look) for look in range(100)], ends=True)
    last_evaluation(service).wait(VERSION)
    assert service.looks == 100


def test_an_evaluation_that_stalls_is_given_up_and_the_job_succeeds() -> None:
    service = Services([(1, 0.0), (2, 0.0), (2, 0.0)], ends=False)
    last_evaluation(service).wait(VERSION)
    assert service.looks == 2 + STALL_SECONDS // 600 + 1


def test_a_trainer_that_is_told_to_stop_stops_waiting() -> None:
    last = last_evaluation(Services([(1, 0.0)], ends=False))
    last.stop.set()
    with pytest.raises(Stopped):
        last.wait(VERSION)


def test_patience_counts_from_the_last_progress() -> None:
    stall = Stall(patience=10.0)
    seen = [
        stall.over(progress, now)
        for progress, now in (("a", 0), ("a", 10), ("b", 11), ("b", 21), ("b", 22))
    ]
    assert seen == [False, False, False, False, True]
