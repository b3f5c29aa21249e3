"""An engine that has given its memory to the trainer answers nothing, and its worker does not take it for hung."""

from __future__ import annotations

import asyncio
import contextlib
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sluice_rollout import worker as room
from sluice_rollout.worker import STALL_SECONDS, Worker, WorkerError


class Engine:
    """Lives, and generates nothing."""

    url = "http://engine"

    def __init__(self, resting: bool) -> None:
        self._resting = resting
        self.asked: list[bool] = []

    async def rests(self) -> bool:
        return self._resting

    async def health(self, timeout: float, *, generate: bool = False) -> tuple[bool, str]:
        self.asked.append(generate)
        return not generate, "/health_generate answered 503"


@pytest.mark.parametrize("resting", [True, False])
async def test_only_an_engine_that_works_must_prove_that_it_makes_tokens(
    monkeypatch: pytest.MonkeyPatch, resting: bool
) -> None:
    monkeypatch.setattr(room, "HEALTH_SECONDS", 0.01)
    engine, nothing = Engine(resting), cast("Any", None)
    make = cast("Any", SimpleNamespace(last_progress=time.monotonic() - STALL_SECONDS - 1))
    worker = Worker(nothing, cast("Any", engine), make, nothing, nothing, nothing, nothing, nothing)
    worker.work = {"lease": nothing}
    with contextlib.suppress(TimeoutError) if resting else pytest.raises(WorkerError, match="failed 3 health checks"):
        await asyncio.wait_for(worker._watch_engine(), 0.5)
    assert set(engine.asked) == {not resting}
