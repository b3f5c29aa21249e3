"""A trainer that comes back tells the buffer from which checkpoint: the buffer then forgets what it
covers."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sluice_trainer.clients.background import Stopped
from sluice_trainer.loop.loop import Loop
from sluice_trainer.loop.rollout_only import ALONE


class Peer:
    """Writes down what it is told; the trainer is stopped when it asks for a batch."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []
        self.stop = threading.Event()

    def rewind(self, step: int, vocabulary: int | None = None) -> int:
        self.told.append(("rewind", step))
        return 0

    def commit_checkpoint(self, step: int) -> None:
        self.told.append(("checkpoint", step))
        self.stop.set()

    def joiners(self) -> bool:
        self.stop.set()
        return False

    def state(self, word: str) -> None:
        return


@pytest.mark.parametrize(
    ("step", "told"),
    [(0, [("rewind", 0)]), (4, [("rewind", 4), ("checkpoint", 4)])],
    ids=["new", "from a checkpoint"],
)
def test_the_buffer_is_told_which_checkpoint_was_loaded(
    monkeypatch: pytest.MonkeyPatch, step: int, told: list[tuple[str, int]]
) -> None:
    peer = Peer()
    trainer = SimpleNamespace(colocate=False)
    spec = cast(
        "Any",
        SimpleNamespace(
            model=SimpleNamespace(path="/no/model"),
            evaluation=None,
            trainer=trainer,
            checkpoint=SimpleNamespace(async_=False),
            weight_sync=None,
        ),
    )
    policy = cast("Any", SimpleNamespace(step=step, finish_save=lambda directory, wait: None))
    monkeypatch.setattr(Loop, "_publish", lambda *_, **__: peer.stop.set())
    learn = cast("Any", None)
    peers = cast("Any", SimpleNamespace(buffer=peer, engines=peer, member=peer))
    loop = Loop(spec, policy, learn, peers, ALONE, Path(), 9, None, peer.stop)
    with pytest.raises(Stopped):
        loop.run()
    assert peer.told == told
