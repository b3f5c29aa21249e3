"""Routes of weights to engines in a chain, and around engines that fail.

Engines and the trainer's own communicators are fakes; tests/integration/weights/test_chain.py has
real ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from sluice.engines.protocol import Control, EngineRefusedError
from sluice.runtime.pod_env import read
from sluice_trainer.weights.buckets import Bucket
from sluice_trainer.weights.chain import BucketRoute, Chain, piece_bytes
from sluice_trainer.weights.collective import Collective
from sluice_trainer.weights.transport import Peer
from sluice_trainer.weights.update_session import UpdateSession
from tests.unit.operator.world import make_job

SECOND = timedelta(seconds=5)


def bucket(number: int, *, last: bool = False) -> Bucket:
    return Bucket((f"w{number}",), ("uint8",), ((1,),), torch.zeros(1, dtype=torch.uint8), last)


@dataclass
class Engine:
    """An engine that answers for buckets over links.

    refuses: it never joins a link. answers: futures of buckets that it does not answer at once.
    """

    name: str
    passes_on: bool = True
    refuses: bool = False
    answers: dict[str, asyncio.Future[None]] = field(default_factory=dict)

    async def init_group(
        self, group: str, host: str, port: int, size: int, backend: str, *, first_rank: int
    ) -> None:
        store = TCPStore(host, port, size, False, SECOND, False)
        word = "no network" if self.refuses else "joined"
        store.set(f"joined/{first_rank}", word)

    async def receive(self, route: str, names: list[str], *_: Any, **__: Any) -> None:
        if answer := self.answers.get(names[0]):
            await answer


@dataclass
class Direct:
    """A fake of the trainer's own communicators.

    brought: engine, tensor, and True if the engine relays it.
    """

    host = "127.0.0.1"
    backend = "gloo"
    timeout = 10.0
    source = "trainer-0-1-0"
    prepared: set[str] = field(default_factory=set)
    brought: list[tuple[str, str, bool]] = field(default_factory=list)

    async def prepare(self, peer: Peer) -> None:
        self.prepared.add(peer.name)

    async def broadcast(
        self, peer: Peer, bucket: Bucket, version: int, *, flush: bool, onward: str, piece: int
    ) -> None:
        assert peer.name in self.prepared
        self.brought.append((peer.name, bucket.names[0], bool(onward)))

    def abandon(self, name: str) -> None:
        self.prepared.discard(name)


class Update:
    """A running update of some engines."""

    def __init__(self, *engines: Engine) -> None:
        self.direct = Direct()
        self.chain = Chain(cast(Collective, self.direct))
        self.engines = {engine.name: engine for engine in engines}
        self.peers = [Peer(e.name, 1, 1, 1, cast(Control, e)) for e in engines]

    async def prepare(self) -> None:
        self.chain.plan_routes(self.peers)
        await asyncio.gather(*map(self.chain.prepare, self.peers))

    async def send(self, *buckets: Bucket, without: Iterable[str] = ()) -> None:
        for bucket in buckets:
            await self.chain.stage(bucket, 1)
            peers = [peer for peer in self.peers if peer.name not in without]
            await asyncio.gather(*(self.chain.send(p, bucket, 1, flush=False) for p in peers))

    def brought_to(self, names: str) -> list[tuple[str, str, bool]]:
        return [sent for sent in self.direct.brought if sent[0] in names]

    def pending(self, engine: str, *numbers: int) -> list[asyncio.Future[None]]:
        """Let an engine not answer for these buckets, and return the futures of its answers."""
        futures = [asyncio.get_running_loop().create_future() for _ in numbers]
        self.engines[engine].answers |= {
            f"w{number}": future for number, future in zip(numbers, futures, strict=True)
        }
        return futures


def links(chain: Chain) -> dict[str, tuple[bool, bool]]:
    """Return for each engine whether the bucket comes over a link, and whether it is relayed."""
    return {name: (bool(route.link), bool(route.onward)) for name, route in chain._routes.items()}


async def test_only_the_first_engine_gets_the_weights_from_the_trainer() -> None:
    update = Update(Engine("a"), Engine("b"), Engine("c"))
    await update.prepare()
    await update.send(bucket(0), bucket(1, last=True))
    assert update.direct.prepared == {"a"}
    assert update.direct.brought == [("a", "w0", True), ("a", "w1", True)]
    assert (update.chain.relayed, update.chain.rerouted) == (["b", "c"], {})
    assert update.chain._routes["b"] == BucketRoute(
        *(update.chain._links[n].name for n in ("b", "c"))
    )


def test_the_size_of_pieces_follows_from_the_length_of_the_chain() -> None:
    update = Update(Engine("alone", passes_on=False), *map(Engine, "abcdefgh"))
    update.chain.plan_routes(update.peers)
    assert update.chain._piece == piece_bytes(8)
    update.chain.plan_routes(update.peers[:6])
    assert update.chain._piece == piece_bytes(5) > piece_bytes(8)


async def test_an_engine_that_cannot_relay_gets_the_weights_from_the_trainer() -> None:
    update = Update(Engine("a"), Engine("b", passes_on=False), Engine("c"))
    await update.prepare()
    await update.send(bucket(0, last=True))
    assert links(update.chain) == {"a": (False, True), "b": (False, False), "c": (True, False)}
    assert update.direct.brought == [("a", "w0", True), ("b", "w0", False)]
    assert update.chain.rerouted == {}


async def test_an_engine_without_a_link_relays_what_it_gets_from_the_trainer() -> None:
    update = Update(Engine("a"), Engine("b", refuses=True), Engine("c"), Engine("d"))
    await update.prepare()
    assert "no network" in update.chain.rerouted["b"]
    await update.send(bucket(0, last=True))
    assert links(update.chain)["d"] == (True, False)
    assert [*update.chain.rerouted] == ["b", "c"]  # both ends of b's links refuse
    assert [name for name, *_ in update.direct.brought] == ["a", "b", "c"]


async def test_an_engine_that_leaves_before_the_transfer_breaks_only_the_next_link() -> None:
    update = Update(*map(Engine, "abcd"))
    await update.prepare()
    update.chain.abandon("b")
    await update.send(bucket(0, last=True), without="b")
    assert update.direct.brought == [("a", "w0", False), ("c", "w0", True)]
    assert (list(update.chain.rerouted), update.chain.relayed) == (["c"], ["d"])


async def test_engines_downstream_of_a_failure_get_missing_buckets_from_the_trainer() -> None:
    update = Update(*map(Engine, "abcd"))
    await update.prepare()
    [first, second] = update.pending("c", 0, 1)
    update.pending("d", 0, 1)
    await update.send(bucket(0))
    sending = asyncio.create_task(update.send(bucket(1)))
    await asyncio.sleep(0)
    first.set_exception(EngineRefusedError("the link has ended"))
    for late in update.engines["d"].answers.values():
        late.set_exception(EngineRefusedError("the link has ended"))
    await sending
    assert update.brought_to("cd") == [
        ("c", "w0", False), ("c", "w1", False), ("d", "w0", False), ("d", "w1", False),
    ]  # fmt: skip
    assert second.cancelled()
    await update.send(bucket(2, last=True))
    assert links(update.chain) == {
        "a": (False, True),
        "b": (True, False),
        "c": (False, False),
        "d": (False, False),
    }
    assert (update.chain.relayed, sorted(update.chain.rerouted)) == (["b"], ["c", "d"])


async def test_a_bucket_that_has_certainly_arrived_is_not_sent_again() -> None:
    """An engine's answer for a bucket confirms the previous one."""
    update = Update(*map(Engine, "ab"))
    await update.prepare()
    [late] = update.pending("b", 2)
    await update.send(bucket(0), bucket(1))
    late.set_exception(EngineRefusedError("the link has ended"))
    await update.send(bucket(2), bucket(3, last=True))
    assert update.brought_to("b") == [
        ("b", "w1", False), ("b", "w2", False), ("b", "w3", False),
    ]  # fmt: skip


async def test_the_trainer_is_at_most_two_buckets_ahead_of_the_last_engine() -> None:
    update = Update(*map(Engine, "abc"))
    await update.prepare()
    [first] = update.pending("c", 0)
    await update.send(bucket(0))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await asyncio.shield(sending := asyncio.create_task(update.send(bucket(1), bucket(2))))
    assert [name for name, *_ in update.chain._pending.items()] == ["b", "c"]
    assert [name for _, name, _ in update.direct.brought] == ["w0", "w1"]
    first.set_result(None)
    await sending
    assert [name for _, name, _ in update.direct.brought] == ["w0", "w1", "w2"]


async def test_links_last_over_updates_and_an_engine_that_joins_costs_one_more() -> None:
    update = Update(*map(Engine, "bc"))
    await update.prepare()
    await update.send(bucket(0, last=True))
    before = dict(update.chain._links)
    update.peers.insert(0, Peer("a", 1, 1, 1, cast(Control, Engine("a"))))
    await update.prepare()
    assert {name: update.chain._links[name] for name in before} == before
    assert update.chain._links["a"].ends == ("c", 1, "a", 1)


@pytest.mark.parametrize(
    ("fan_out", "kind"),
    [
        pytest.param({}, Collective, id="default"),
        pytest.param({"fanOut": "direct"}, Collective, id="direct"),
        pytest.param({"fanOut": "chain"}, Chain, id="chain"),
    ],
)
def test_the_job_determines_how_the_weights_fan_out(fan_out: dict[str, str], kind: type) -> None:
    session = object.__new__(UpdateSession)
    spec = make_job(weightSync={"transport": "gloo", **fan_out}).spec
    session._spec, session._rank = spec, 0
    session._env = read("trainer", {})
    assert type(session._transport()) is kind
