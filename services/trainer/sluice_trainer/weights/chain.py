"""Transport over a chain: the trainer sends to the first engine, each engine relays to the next.

An engine answers for a bucket once the previous one has arrived, so that it gets the request for
the next bucket in time; it answers for the last bucket once all have arrived. The trainer keeps a
bucket until all engines have it. If an engine of the chain dies or hangs, the engines downstream
miss at most three buckets, which the trainer still holds: it drops their links and sends them the
missing buckets and the rest of the update directly. The next update closes the chain again.

An engine ignores a link that has been dropped, and a link that a communicator with the trainer has
replaced: a late bucket over an old route changes no weights.

With a chain, N engines cost one transfer and N - 1 pieces instead of N transfers over the same
link. In a tree of two branches each engine sends everything twice, so it costs two transfers and
about 2 log2(N) pieces: a tree is faster with many hundreds of engines. But a job with 1,000 engines
has dozens of trainer ranks, each with a separate chain, so only chains are implemented.
`benchmarks/fan_out.py` computes the times of all of them.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

from torch._C._distributed_c10d import TCPStore

from sluice.telemetry import logs
from sluice_trainer.distributed import store
from sluice_trainer.weights.buckets import Bucket
from sluice_trainer.weights.collective import Collective
from sluice_trainer.weights.transport import FAILURES, Peer, TransferError, Transport
from sluice_trainer.weights.waiting import succeeded

_POLL_SECONDS = 0.01
# A link is made in less than a second. Two engines that cannot reach each other cost no more than
# this, and are rerouted before they count as late.
_LINK_SECONDS = 15.0
# Report of an engine's rank that has joined a link; another text is the reason why it has not.
_JOINED = "joined"
LARGEST_PIECE = 256 << 20


def chain_order(order: Sequence[str], engines: Collection[str]) -> list[str]:
    """Return all engines in the order of their chain: the present ones, then the new ones.

    So an engine that joins or leaves costs one or two new links.
    """
    return [*order, *sorted(set(engines) - set(order))]


def upstream_of(order: Sequence[str], passes_on: Collection[str]) -> dict[str, str]:
    """Return each engine's upstream engine; engines without one get weights from the trainer.

    order: all engines in the order of the chain. passes_on: engines of this update that can relay.
    """
    chain = [name for name in order if name in passes_on]
    return dict(zip(chain[1:], chain, strict=False))


def downstream_of(name: str, upstream: dict[str, str]) -> list[str]:
    """Return the engines downstream of this one, nearest first."""
    downstream = {before: engine for engine, before in upstream.items()}
    engines = []
    while name := downstream.get(name, ""):
        engines.append(name)
    return engines


def piece_bytes(engines: int) -> int:
    """Return the size of the pieces in which a chain of so many engines relays a bucket, in bytes.

    Each engine after the first costs the time of one piece, and each piece costs 0.13 ms of an
    engine's Python (three engines: 60, 63 and 72 ms with pieces of 256, 128 and 64 MiB). So the
    best size falls with the square root of the number of engines.
    """
    return int(LARGEST_PIECE * min(1.0, 2 / math.sqrt(max(engines, 1))))


@dataclass(frozen=True, slots=True, eq=False)
class EngineLink:
    """A communicator between two engines; both drop it within a second after `store` is gone.

    ends: names and generations of both engines.
    """

    name: str
    ends: tuple[str, int, str, int]
    store: TCPStore


class BucketRoute(NamedTuple):
    """The route of a bucket to an engine.

    link: name of the link that it arrives over; empty if it comes from the trainer. onward: name of
    the link over which the engine relays it; empty if it does not.
    """

    link: str
    onward: str


Pending = list[tuple[Bucket, asyncio.Task[None]]]


class Chain(Transport):
    """Engines that can relay weights form a chain; all others get them from the trainer."""

    in_session = True
    in_turn = True

    def __init__(self, direct: Collective, piece_bytes: Callable[[int], int] = piece_bytes) -> None:
        """Create a chain over the trainer's own communicators.

        direct: the trainer's communicators. piece_bytes: size of a piece by the number of engines.
        """
        self._direct = direct
        self._piece_bytes = piece_bytes
        self._piece = piece_bytes(1)
        # Seconds for a transfer over other engines, which leaves as much time for a direct one.
        self._link_timeout = direct.timeout / 2
        self._order: list[str] = []
        self._peers: dict[str, Peer] = {}
        self._upstream: dict[str, str] = {}
        self._links: dict[str, EngineLink] = {}
        self._routes: dict[str, BucketRoute] = {}
        # Buckets that have been announced to an engine over its link and may not have arrived.
        self._pending: dict[str, Pending] = {}
        # Engines whose link has delivered a bucket.
        self._proven: set[str] = set()
        self._complete: set[str] = set()
        self._numbers = itertools.count()
        self._logged_plain_engines = False
        self.relayed: list[str] = []
        self.rerouted: dict[str, str] = {}

    def plan_routes(self, peers: Sequence[Peer]) -> None:
        self._peers = {peer.name: peer for peer in peers}
        self._order = chain_order(self._order, self._peers)
        able = [name for name, peer in self._peers.items() if peer.control.passes_on]
        self._upstream = upstream_of(self._order, able)
        self._piece = self._piece_bytes(1 + len(self._upstream))
        self.relayed, self.rerouted = [], {}
        self._complete, self._routes = set(), {}
        for name in [*self._pending]:
            self._take_undelivered(name)
        if len(able) < len(peers) and not self._logged_plain_engines:
            self._logged_plain_engines = True
            logs.get().info(
                "engines without sluice's SGLang plugin cannot relay weights: the trainer sends to "
                "each of them directly",
                engines=sorted(self._peers.keys() - set(able)),
            )

    async def prepare(self, peer: Peer) -> None:
        before = self._upstream.get(peer.name)
        if before is None:
            self._drop_link(peer.name)
            await self._direct.prepare(peer)
            return
        try:
            async with asyncio.timeout(min(self._link_timeout, _LINK_SECONDS)):
                await self._link(self._peers[before], peer)
        except FAILURES as error:
            self._reroute([peer.name], str(error) or f"no link to {before} in time")
            await self._direct.prepare(peer)

    def announce(self, peer: Peer, bucket: Bucket, version: int, *, flush: bool) -> None:
        """Announce a bucket to an engine that gets it from the trainer.

        Over links one request is always ahead.
        """
        if peer.name not in self._upstream:
            onward = self._onward().get(peer.name, "")
            self._direct.announce(
                peer, bucket, version, flush=flush, onward=onward, piece=self._piece
            )

    async def stage(self, bucket: Bucket, version: int) -> None:
        """Fix the routes to all engines at once: both ends of a link must agree on a bucket."""
        links = {name: self._links[name].name for name in self._upstream}
        onward = self._onward()
        self._routes = {
            name: BucketRoute(links.get(name, ""), onward.get(name, "")) for name in self._peers
        }

    def _onward(self) -> dict[str, str]:
        """Return the link over which each engine relays the current bucket."""
        return {before: self._links[name].name for name, before in self._upstream.items()}

    async def send(self, peer: Peer, bucket: Bucket, version: int, *, flush: bool) -> None:
        route = self._routes[peer.name]
        if not route.link:
            buckets = [*self._take_undelivered(peer.name), bucket]
            await self._send_directly(peer, buckets, route.onward, version, flush=flush)
        else:
            try:
                async with asyncio.timeout(self._link_timeout):
                    await self._send_over_link(peer, bucket, route, version, flush=flush)
            except FAILURES as error:
                # Half of the phase's deadline is left to send the rest directly.
                self._reroute_from(
                    peer.name, str(error) or f"no bucket arrived for {self._link_timeout:g} s"
                )
                buckets = self._take_undelivered(peer.name)
                await self._send_directly(peer, buckets, "", version, flush=flush)
        if bucket.last:
            self._complete.add(peer.name)
            self.relayed += [peer.name] if peer.name in self._upstream else []

    def downstream(self, name: str) -> list[str]:
        return downstream_of(name, self._upstream)

    def is_connecting(self, name: str) -> bool:
        if name not in self._upstream:
            return self._direct.is_connecting(name)
        return name not in self._proven

    def abandon(self, name: str) -> None:
        self._direct.abandon(name)
        self._take_undelivered(name)
        self._drop_link(name)
        behind = downstream_of(name, self._upstream)
        self._upstream.pop(name, None)
        if name in self._order:
            self._order.remove(name)
        if behind and self._routes:
            self._reroute_from(behind[0], f"{name} has left the update")
        elif behind:  # no bucket is on its way yet
            self._reroute(behind[:1], f"{name} has left the update")

    # --- one engine

    async def _send_over_link(
        self, peer: Peer, bucket: Bucket, route: BucketRoute, version: int, *, flush: bool
    ) -> None:
        """Announce a bucket that arrives over a link, and await the answers for earlier buckets.

        For the last bucket its own answer is awaited too.
        """
        ahead = 0 if bucket.last else 1
        announced = peer.control.receive(
            f"{route.link}|{route.onward}|{self._piece}|{ahead}",
            bucket.names,
            bucket.dtypes,
            bucket.shapes,
            version=version if bucket.last else None,
            flush=flush and bucket.last,
        )
        announcing = asyncio.create_task(announced)
        # Retrieves the exception: asyncio logs one that is never retrieved.
        announcing.add_done_callback(succeeded)
        pending = self._pending.setdefault(peer.name, [])
        pending.append((bucket, announcing))
        for _, answer in pending[: len(pending) - ahead]:
            await answer
            if peer.name in self._links:
                self._proven.add(peer.name)
        # An answer confirms the previous bucket; the answer to the last bucket confirms all.
        del pending[: -2 if ahead else None]

    def _take_undelivered(self, name: str) -> list[Bucket]:
        """Stop waiting for buckets over an engine's link, and return those that it may not have."""
        pending = self._pending.pop(name, [])
        while len(pending) > 1 and succeeded(pending[1][1]):
            del pending[0]
        for _, announced in pending:
            announced.cancel()
        return [bucket for bucket, _ in pending]

    async def _send_directly(
        self, peer: Peer, buckets: Sequence[Bucket], onward: str, version: int, *, flush: bool
    ) -> None:
        await self._direct.prepare(peer)
        piece = self._piece if onward else 0
        for bucket in buckets:
            await self._direct.broadcast(
                peer, bucket, version, flush=flush, onward=onward, piece=piece
            )

    # --- links

    async def _link(self, before: Peer, peer: Peer) -> None:
        """Have two engines make their link, unless they have it."""
        ends = (before.name, before.generation, peer.name, peer.generation)
        if (existing := self._links.get(peer.name)) and existing.ends == ends:
            return
        self._drop_link(peer.name)
        self._direct.abandon(peer.name)  # an engine has one sender, and drops any other
        host, size = self._direct.host, 1 + peer.world_size
        number = next(self._numbers)
        name = f"sluice-link-{'-'.join(map(str, ends))}-{self._direct.source}-{number}"
        listening = store.listener(host)
        port = listening.getsockname()[1]
        timeout = timedelta(seconds=self._direct.timeout)
        served = store.serve(host, listening, size, timeout, wait_for_workers=False)
        served.set("seconds", str(self._direct.timeout))
        link = self._links[peer.name] = EngineLink(name, ends, served)
        backend = self._direct.backend
        await asyncio.gather(
            before.control.init_group(name, host, port, size, backend, first_rank=0),
            peer.control.init_group(name, host, port, size, backend, first_rank=1),
        )
        waited = {f"joined/{rank}" for rank in range(size)}
        while waited:
            if self._links.get(peer.name) is not link:
                raise TransferError("its link was dropped")
            for key in [key for key in waited if served.check([key])]:
                if failure := served.get(key).decode().removeprefix(_JOINED):
                    raise TransferError(f"no link from {before.name}: {failure}")
                waited.remove(key)
            await asyncio.sleep(_POLL_SECONDS)

    def _drop_link(self, name: str) -> None:
        """Drop the link to an engine, which ends with its store."""
        self._links.pop(name, None)
        self._proven.discard(name)

    def _reroute(self, names: Sequence[str], reason: str) -> None:
        """Let these engines get the weights from the trainer until the next update."""
        for name in names:
            self._upstream.pop(name, None)
            self._drop_link(name)
            self.rerouted.setdefault(name, reason)
        logs.get().warning(
            "engines get the weights from the trainer, not from another engine",
            engines=list(names),
            reason=reason,
        )

    def _reroute_from(self, name: str, reason: str) -> None:
        """Reroute an engine and all engines downstream of it in the middle of an update.

        A bucket stops half-way through their links.
        """
        engines = [name, *downstream_of(name, self._upstream)]
        cut = [e for e in engines if e in self._upstream and e not in self._complete]
        if cut:
            self._reroute(cut, reason)
