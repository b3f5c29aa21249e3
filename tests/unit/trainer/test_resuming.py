"""A trainer that resumes tells the buffer which checkpoint it has loaded."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sluice_trainer.clients.background import Stopped
from sluice_trainer.loop.loop import Loop
from sluice_trainer.loop.rollout_only import ALONE
from sluice_trainer.loop.run_records import RunRecords


class Services:
    """Services that record the calls; the trainer is stopped when it asks for a batch."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.stop = threading.Event()

    def rewind(self, step: int, vocabulary: int | None = None) -> int:
        self.calls.append(("rewind", step))
        return 0

    def commit_checkpoint(self, step: int) -> None:
        self.calls.append(("checkpoint", step))
        self.stop.set()

    def joiners(self) -> bool:
        self.stop.set()
        return False

    def set_state(self, state: str) -> None:
        return


@pytest.mark.parametrize(
    ("step", "calls"),
    [(0, [("rewind", 0)]), (4, [("rewind", 4), ("checkpoint", 4)])],
    ids=["new", "from a checkpoint"],
)
def test_the_buffer_is_told_which_checkpoint_was_loaded(
    monkeypatch: pytest.MonkeyPatch, step: int, calls: list[tuple[str, int]]
) -> None:
    services = Services()
    trainer = SimpleNamespace(colocate=False)
    spec = cast(
        "Any",
        SimpleNamespace(
            model=SimpleNamespace(path="/no/model"),
            evaluation=None,
            evaluates=False,
            trainer=trainer,
            checkpoint=SimpleNamespace(async_=False),
            weight_sync=None,
        ),
    )
    policy = cast("Any", SimpleNamespace(step=step, finish_save=lambda directory, wait: None))
    monkeypatch.setattr(Loop, "_update_engines", lambda *_, **__: services.stop.set())
    learn = cast("Any", None)
    clients = cast("Any", SimpleNamespace(buffer=services, engines=services, member=services))
    records = RunRecords(spec, ALONE, clients.buffer, None)
    loop = Loop(
        spec,
        policy,
        learn,
        clients,
        ALONE,
        records,
        checkpoints=Path(),
        total_steps=9,
        stop=services.stop,
    )
    with pytest.raises(Stopped):
        loop.run()
    assert services.calls == calls
