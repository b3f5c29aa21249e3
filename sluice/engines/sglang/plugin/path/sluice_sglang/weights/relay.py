"""Passes weights on from engine to engine, over links: communicators between two engines.

The trainer sends to the first engine of a chain. Each engine passes every piece of a bucket on to
the next one as soon as it has it, while it receives the next piece and loads the bucket.

An engine must survive the death, or the hanging, of the engine before and of the engine after it.
So everything in a link that can block runs in a separate thread, on a separate stream, and the
scheduler polls. The store of a link is the trainer's, which closes it to give the link up. Both
ends see that within `LOOK_SECONDS`, and a rank that waits for a bucket then reports that it is not
whole.
"""

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from .transfer import release, take, without_watchdog

# Prefix of the names of links. Communicators with a trainer have other names.
LINK_PREFIX = "sluice-link-"
# Time between two checks whether the trainer still wants a link.
LOOK_SECONDS = 0.1
POLL_SECONDS = 0.0001
CONNECT = timedelta(seconds=60)
ABORT_SECONDS = 30.0
# Buckets that may be on their way to the next engine when memory is allocated for another one.
_ON_THEIR_WAY = 1
log = logging.getLogger(__name__)


class Route(NamedTuple):
    """The way of a bucket through this engine.

    A trainer's request has it in place of a communicator's name, as `source|onward|piece` or
    `source|onward|piece|ahead`.
    """

    # Communicator or link that the bucket comes over.
    source: str
    # Link to the next engine; empty if this is the last one.
    onward: str = ""
    # Bytes of a piece; 0: the bucket comes in one.
    piece: int = 0
    # Buckets of a link that may still be coming when the engine answers, including this one.
    ahead: int = 0


def route(name: str) -> Route:
    """Read the route of a request. The name of a communicator alone passes no weights on."""
    source, *rest = name.split("|")
    return Route(source, rest[0], *map(int, rest[1:])) if rest else Route(source)


class Link:
    """An end of a link, from an engine (rank 0) to all ranks of the next engine."""

    def __init__(self, name: str, host: str, port: int, rank: int, size: int, backend: str) -> None:
        """Begin to make the link. Both ends meet at the trainer's store (host, port)."""
        self.name = name
        # Why the link cannot be used any more; empty while it can, or is being made.
        self.failure = ""
        self._device = torch.cuda.current_device() if backend == "nccl" else None
        self._group: Any = None
        self._stream: Any = None
        self._store: Any = None
        self._looked = time.monotonic()
        self._seconds = CONNECT.total_seconds()
        self._deadline = self._looked + self._seconds
        self._arrived: Any = None
        self._on_their_way: deque[None] = deque()
        self._ending = threading.Lock()
        self._aborting: threading.Thread | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._jobs.put(partial(self._join, host, port, rank, size, backend))
        threading.Thread(target=self._work, name="link", daemon=True).start()

    # --- the end that receives

    def receive(self, data: torch.Tensor, piece: int, onward: "Link | None") -> Any:
        """Begin to fill `data`, and to pass it on.

        Returns when loading may be queued: on a GPU behind the transfer, on a CPU after it. Returns
        the event behind the transfer; None on a CPU. `arrived` tells whether it succeeded.
        """
        issued = threading.Event()
        self._deadline = time.monotonic() + self._seconds
        # The memory may have another use until here.
        self._jobs.put(partial(self._receive, data, piece, onward, self._now(), issued))
        self._wait(issued.is_set)
        if self._arrived is not None:
            torch.cuda.current_stream().wait_event(self._arrived)
        return self._arrived

    def arrived(self, event: Any) -> bool:
        """Wait until a bucket that `receive` began has come; return False if it never will.

        After that no transfer writes to its memory. `event` is what `receive` returned.
        """
        self._wait(lambda: event is None or event.query())
        if self._aborting:
            self._aborting.join(ABORT_SECONDS)
        return not self.failure

    # --- the end that sends

    def start(self) -> None:
        """Note that a bucket is to be passed on."""
        self._on_their_way.append(None)

    def send(self, piece: torch.Tensor) -> None:
        """Pass on a piece once the current stream has it, concurrently with later work there."""
        if not self.dead():
            self._jobs.put(partial(self._send, piece, self._now()))

    def finish(self, data: torch.Tensor) -> None:
        """Note that all of a bucket has been given to `send`."""
        if not self.failure:
            self._jobs.put(partial(self._gone, data))

    def make_room(self) -> None:
        """Wait until few enough buckets are on their way to have memory for another one."""
        while len(self._on_their_way) > _ON_THEIR_WAY and not self.dead():
            time.sleep(POLL_SECONDS)

    # --- its life

    def dead(self) -> bool:
        """Return True if the link cannot be used any more. Checks the trainer now and then."""
        now = time.monotonic()
        if not self.failure and self._store is not None and now > self._looked + LOOK_SECONDS:
            self._looked = now
            try:
                self._store.check(["seconds"])
            except RuntimeError:
                self.give_up("the trainer has given it up, or is gone")
        return bool(self.failure)

    def give_up(self, reason: str) -> None:
        """End the link, without waiting for either end."""
        with self._ending:
            if self.failure:
                return
            self.failure = reason
            log.info("%s is given up: %s", self.name, reason)
            self._jobs.put(lambda: None)  # the thread sees that it is to end
            if self._group is not None:
                self._aborting = release(self._group)

    def _wait(self, condition: Callable[[], bool]) -> None:
        while not condition() and not self.dead():
            if time.monotonic() > self._deadline:
                self.give_up(f"nothing came for {self._seconds:g} s")
            time.sleep(POLL_SECONDS)

    def _now(self) -> Any:
        """Return an event behind all work of the current stream; None on a CPU."""
        if self._device is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    # --- in the link's thread

    def _work(self) -> None:
        try:
            if self._device is not None:
                torch.cuda.set_device(self._device)
                self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            while not self.failure:
                self._jobs.get()()
        except Exception as error:  # the other end or the trainer has died
            self.give_up(f"{type(error).__name__}: {error}")
        with contextlib.suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()  # jobs hold buckets

    def _join(self, host: str, port: int, rank: int, size: int, backend: str) -> None:
        """Meet the other end, and try the link.

        NCCL makes its communicator in the first broadcast, which takes a second, while the engine
        generates.
        """
        store = TCPStore(host, port, size, False, CONNECT, False)
        self._seconds = float(store.get("seconds"))
        self._deadline = time.monotonic() + self._seconds
        self._store = store  # torch uses another connection, which may block
        try:
            self._meet(host, port, rank, size, backend)
        except Exception as error:
            with contextlib.suppress(RuntimeError):  # the trainer has closed the store
                store.set(f"joined/{rank}", f"{type(error).__name__}: {error}")
            raise
        if not self.failure:
            store.set(f"joined/{rank}", "joined")

    def _meet(self, host: str, port: int, rank: int, size: int, backend: str) -> None:
        timeout = timedelta(seconds=self._seconds)
        meeting = PrefixStore(self.name, TCPStore(host, port, size, False, timeout, False))
        c10d: Any = dist.distributed_c10d
        with without_watchdog():
            group, _ = c10d._new_process_group_helper(
                size, rank, [], dist.Backend(backend), meeting, self.name, timeout=timeout
            )
        c10d._world.pg_group_ranks[group] = {r: r for r in range(size)}
        with self._ending:
            self._group = group
            if self.failure:
                release(group)
        with self._own_stream():
            device = "cpu" if self._device is None else "cuda"
            take(torch.zeros(1, dtype=torch.uint8, device=device), group)
            tried = self._now()
        self._wait(lambda: tried is None or tried.query())

    def _own_stream(self, after: Any = None) -> Any:
        """Queue work on this link's stream, behind `after`."""
        if self._stream is None:
            return contextlib.nullcontext()
        if after is not None:
            self._stream.wait_event(after)
        return torch.cuda.stream(self._stream)

    def _receive(
        self,
        data: torch.Tensor,
        piece: int,
        onward: "Link | None",
        free: Any,
        issued: threading.Event,
    ) -> None:
        with self._own_stream(after=free):
            take(data, self._group, piece, onward)
            self._arrived = self._now()
        issued.set()

    def _send(self, piece: torch.Tensor, come: Any) -> None:
        with self._own_stream(after=come):
            take(piece, self._group)

    def _gone(self, data: torch.Tensor) -> None:
        """Keep the bucket's memory until it has been sent."""
        with self._own_stream():
            sent = self._now()
        while sent is not None and not sent.query() and not self.dead():
            time.sleep(POLL_SECONDS)
        self._on_their_way.popleft()


class Links:
    """The links of one rank of an engine: one that brings weights, and one that passes them on."""

    def __init__(self) -> None:
        self.onward: Link | None = None
        # True if the bucket that was begun last comes over a link.
        self.comes_over_link = False
        # Buckets that may not have come yet: the link, and the event behind the transfer.
        self._coming: deque[tuple[Link, Any]] = deque()
        self._ahead = 0

    def begin(self, source: Any, data: torch.Tensor, way: Route) -> None:
        """Begin to receive a bucket over a communicator with the trainer, or over a link."""
        onward = self.onward if self.onward and self.onward.name == way.onward else None
        self._forget_all_but(source)
        self._ahead, self.comes_over_link = way.ahead, isinstance(source, Link)
        if isinstance(source, Link):
            self._coming.append((source, source.receive(data, way.piece, onward)))
        else:
            take(data, source, way.piece, onward)

    def failure(self) -> str:
        """Wait until all buckets have come, except those that may still be coming.

        Returns why one has not come; empty if they have.
        """
        while len(self._coming) > self._ahead:
            link, event = self._coming.popleft()
            if not link.arrived(event):
                return f"{link.name}: {link.failure}"
        return ""

    def _forget_all_but(self, source: Any) -> None:
        """Drop buckets of links that were given up, which the trainer sends again.

        First wait until no transfer writes to their memory.
        """
        while self._coming and self._coming[0][0] is not source:
            link, event = self._coming.popleft()
            link.arrived(event)

    def make_room(self) -> None:
        """Wait until there is memory for a bucket."""
        if self.onward:
            self.onward.make_room()
