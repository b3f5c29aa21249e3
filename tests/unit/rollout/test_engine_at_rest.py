"""An engine that need not make tokens now is healthy; one that should and does not is lost."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any, cast

import pytest

from sluice.api.groups.rollout import EngineHealthPolicy
from sluice_rollout import health as room
from sluice_rollout.health import EngineHealth, EngineLostError

POLICY = EngineHealthPolicy(period_seconds=0.01)


class Engine:
    """An engine that is alive and does not generate."""

    url = "http://engine"

    def __init__(self, *, resting: bool = False, paused: float = 0.0, answers: bool = True) -> None:
        self._resting, self._paused, self._answers = resting, paused, answers
        self.probes: set[bool] = set()

    async def rests(self) -> bool:
        return self._resting

    async def paused_seconds(self) -> float:
        return self._paused

    async def answers(self) -> bool:
        return self._answers

    async def health(self, timeout: float, *, generate: bool = False) -> tuple[bool, str]:
        self.probes.add(generate)
        return not generate, "/health_generate answered 503"


def stalled(engine: Engine) -> EngineHealth:
    last = time.monotonic() - POLICY.stall_seconds - 1
    return EngineHealth(cast("Any", engine), 600.0, POLICY, last_progress=last)


@pytest.mark.parametrize(
    ("engine", "lost"),
    [
        pytest.param(Engine(resting=True), "", id="rests"),
        pytest.param(Engine(paused=599.0), "", id="paused"),
        pytest.param(
            Engine(paused=600.0), "paused for 600 s, and no trainer has resumed", id="for ever"
        ),
        pytest.param(
            Engine(), "engine http://engine: 3 health .*: /health_generate answered 503", id="hangs"
        ),
    ],
)
async def test_only_a_stalled_engine_has_to_generate_a_token(engine: Engine, lost: str) -> None:
    health = stalled(engine)
    with pytest.raises(EngineLostError, match=lost) if lost else contextlib.suppress(TimeoutError):
        await asyncio.wait_for(health.watch(lambda: True), 0.5)
    assert (True in engine.probes) == ("503" in lost)
    assert bool(health.unhealthy) == bool(lost)


async def test_an_idle_engine_need_not_generate_a_token() -> None:
    engine = Engine()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stalled(engine).watch(lambda: False), 0.2)
    assert engine.probes == {False}


@pytest.mark.parametrize(
    ("answers", "reason"), [(True, ""), (False, "it is paused, and its scheduler hangs")]
)
async def test_an_engine_that_was_dropped_in_a_pause_must_answer(
    monkeypatch: pytest.MonkeyPatch, answers: bool, reason: str
) -> None:
    monkeypatch.setattr(room, "AGAIN_SECONDS", 0.0)
    health = stalled(Engine(paused=3.0, answers=answers))
    assert await health.judge(dropped=True) == reason
    assert health.unhealthy == reason, "its worker says at once that it does not generate"
