"""Requests for buckets ahead of their broadcasts.

Broadcasts and engine are fakes; tests/integration/weights has real ones.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch

from sluice.engines.protocol import Control, EngineRefusedError
from sluice_trainer.weights import process_group
from sluice_trainer.weights.buckets import Bucket
from sluice_trainer.weights.collective import Collective, Communicator
from sluice_trainer.weights.transport import Peer


@dataclass
class Engine:
    """An engine that notes requests as link and bucket.

    refuses: name of a tensor that it refuses. silent: it never answers.
    """

    in_order: bool = True
    refuses: str = ""
    silent: bool = False
    requested: list[str] = field(default_factory=list)

    async def receive(self, route: str, names: list[str], *_: Any, **__: Any) -> None:
        self.requested.append(f"{route} {names[0]}")
        if names[0] == self.refuses:
            raise EngineRefusedError("no memory")
        if self.silent:
            await asyncio.Event().wait()


class Broadcasts(Communicator):
    """A communicator that notes the piece size of each bucket it sends.

    held: broadcasts never complete.
    """

    def __init__(self) -> None:
        super().__init__(1, "group", None)
        self.sent: list[tuple[str, int]] = []
        self.held = False

    async def broadcast(self, bucket: Bucket, piece: int) -> None:
        self.sent.append((bucket.names[0], piece))
        await asyncio.sleep(3600 if self.held else 0)


def bucket(number: int, *, last: bool = False) -> Bucket:
    data = torch.zeros(1, dtype=torch.uint8)
    return Bucket((f"w{number}",), ("uint8",), ((1,),), data, last, number)


BUCKETS = [bucket(0), bucket(1), bucket(2, last=True)]


def setting(**behaviour: Any) -> tuple[Collective, Broadcasts, Engine, Peer]:
    transport, engine = Collective("gloo", "127.0.0.1", 10.0, "trainer-0-1-0"), Engine(**behaviour)
    peer = Peer("rollout-0", 1, 1, 1, cast(Control, engine))
    broadcasts = transport.communicators[peer.name] = Broadcasts()
    return transport, broadcasts, engine, peer


def announce_all(transport: Collective, peer: Peer) -> None:
    for announced in BUCKETS:
        transport.announce(peer, announced, 1, flush=False)


async def test_all_announced_buckets_are_requested_at_once_and_only_once() -> None:
    transport, broadcasts, engine, peer = setting()
    announce_all(transport, peer)
    await asyncio.sleep(0)
    expected = [f"group w{number}" for number in range(3)]
    assert engine.requested == expected
    assert broadcasts.sent == [("w0", 0), ("w1", 0), ("w2", 0)]
    for announced in BUCKETS:
        await transport.send(peer, announced, 1, flush=False)
    assert (engine.requested, len(broadcasts.sent)) == (expected, 3)
    assert not broadcasts.requests
    transport.announce(peer, bucket(0), 2, flush=False)  # the next update
    await asyncio.sleep(0)
    assert engine.requested == [*expected, "group w0"]


async def test_an_engine_that_takes_requests_in_any_order_gets_one_at_a_time() -> None:
    transport, _, engine, peer = setting(in_order=False)
    announce_all(transport, peer)
    await transport.send(peer, BUCKETS[0], 1, flush=False)
    assert engine.requested == ["group w0"]


async def test_an_announced_bucket_keeps_its_route_though_routes_have_changed_since() -> None:
    transport, broadcasts, engine, peer = setting()
    transport.announce(peer, BUCKETS[0], 1, flush=False, onward="link", piece=64)
    await transport.broadcast(peer, BUCKETS[0], 1, flush=False)
    await transport.broadcast(peer, BUCKETS[1], 1, flush=False, piece=64)
    assert engine.requested == ["group|link|64 w0", "group w1"]
    assert broadcasts.sent == [("w0", 64), ("w1", 0)]


async def test_missing_buckets_of_a_broken_link_are_requested_before_later_ones() -> None:
    transport, _, engine, peer = setting()
    # the communicator was created for bucket 1
    transport.announce(peer, BUCKETS[2], 1, flush=False)
    await transport.broadcast(peer, BUCKETS[1], 1, flush=False)
    transport.announce(peer, BUCKETS[2], 1, flush=False)
    await asyncio.sleep(0)
    assert engine.requested == ["group w1", "group w2"]


async def test_a_refusal_cancels_all_requests() -> None:
    transport, broadcasts, _, peer = setting(refuses="w0", silent=True)
    broadcasts.held = True
    announce_all(transport, peer)
    requests = [*broadcasts.requests]
    with pytest.raises(EngineRefusedError, match="no memory"):
        await transport.send(peer, BUCKETS[1], 1, flush=False)
    await asyncio.sleep(0)
    assert all(request.answer.done() and request.sent.done() for request in requests)
    assert not broadcasts.requests


async def test_an_engine_that_is_given_up_gets_no_more_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_group, "abort_group", lambda *_: None)
    transport, _, engine, peer = setting(silent=True)
    transport.announce(peer, BUCKETS[0], 1, flush=False)
    transport.abandon(peer.name)
    transport.announce(peer, BUCKETS[1], 1, flush=False)
    await asyncio.sleep(0)
    assert engine.requested == []
