"""Weights are passed on from engine to engine: a link is a communicator between two of them.

The trainer sends to the first engine of a chain. Each engine passes every piece of a bucket on to
the next one as soon as it has it, while it receives the next piece and loads the bucket.

An engine must survive the death, or the hanging, of the one before it and of the one after it. So
whatever can block in a link happens in a thread of the link's own, on a stream of its own; the
scheduler polls. A link's store is the trainer's, which closes it to give the link up: both ends see
that within `LOOK_SECONDS`, and who waits for a bucket then says that it is not whole.
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

LINK_PREFIX = "sluice-link-"
"""Of the names of links. Those of communicators with a trainer begin otherwise."""
LOOK_SECONDS = 0.1
"""Time between two looks whether the trainer still wants a link."""
POLL_SECONDS = 0.0001
CONNECT = timedelta(seconds=60)
ABORT_SECONDS = 30.0
_ON_THEIR_WAY = 1
"""Buckets that may be on their way to the next engine when memory is taken for another one."""
log = logging.getLogger(__name__)


class Route(NamedTuple):
    """The way of a bucket through this engine. A trainer's request says it in place of the name of
    a communicator, as `source|onward|piece` or `source|onward|piece|ahead`.

    source: the communicator or link that the bucket comes over. onward: the link to the next
    engine; empty: this is the last one. piece: bytes; 0: a bucket comes in one. ahead: buckets of a
    link that may still be coming when the engine answers, this one included.
    """

    source: str
    onward: str = ""
    piece: int = 0
    ahead: int = 0


def route(name: str) -> Route:
    """The route in a request. The name of a communicator alone: nothing is passed on."""
    source, *rest = name.split("|")
    return Route(source, rest[0], *map(int, rest[1:])) if rest else Route(source)


class Link:
    """One end of a communicator from an engine, which is its rank 0, to all ranks of the next one.

    failure: why it cannot be used any more; empty: it can, or is being made.
    """

    def __init__(self, name: str, host: str, port: int, rank: int, size: int, backend: str) -> None:
        """host, port: of the trainer's store, in which both ends meet."""
        self.name, self.failure = name, ""
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
        """Begin to fill `data`, and to pass it on. `arrived` says what became of it.

        Returns when loading may be queued: on a GPU behind what comes, on a CPU after it. Answers
        the event behind what comes; None on a CPU.
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
        """Wait until a bucket that `receive` began has come. False: it never will, wholly.

        Then nothing writes to its memory any more. event: what `receive` answered.
        """
        self._wait(lambda: event is None or event.query())
        if self._aborting:
            self._aborting.join(ABORT_SECONDS)
        return not self.failure

    # --- the end that sends

    def start(self) -> None:
        """A bucket is to be passed on."""
        self._on_their_way.append(None)

    def send(self, piece: torch.Tensor) -> None:
        """Pass on a piece once the current stream has it, beside what that stream does next."""
        if not self.dead():
            self._jobs.put(partial(self._send, piece, self._now()))

    def finish(self, data: torch.Tensor) -> None:
        """All of a bucket has been given to `send`."""
        if not self.failure:
            self._jobs.put(partial(self._gone, data))

    def make_room(self) -> None:
        """Wait until no more is on its way than an engine has memory for beside a new bucket."""
        while len(self._on_their_way) > _ON_THEIR_WAY and not self.dead():
            time.sleep(POLL_SECONDS)

    # --- its life

    def dead(self) -> bool:
        """True where it cannot be used any more. Looks after the trainer now and then."""
        now = time.monotonic()
        if not self.failure and self._store is not None and now > self._looked + LOOK_SECONDS:
            self._looked = now
            try:
                self._store.check(["seconds"])
            except RuntimeError:
                self.give_up("the trainer has given it up, or is gone")
        return bool(self.failure)

    def give_up(self, reason: str) -> None:
        """End it. Waits for nobody."""
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
        """An event behind all that the current stream has been told. None on a CPU: it is done."""
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
        except Exception as error:  # the peer's end, or the trainer's: whoever waits hears of it
            self.give_up(f"{type(error).__name__}: {error}")
        with contextlib.suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()  # they hold buckets

    def _join(self, host: str, port: int, rank: int, size: int, backend: str) -> None:
        """Meet the others, and try the way: NCCL makes its communicator in the first broadcast,
        which takes a second, while the engine generates.
        """
        store = TCPStore(host, port, size, False, CONNECT, False)
        self._seconds = float(store.get("seconds"))
        self._deadline = time.monotonic() + self._seconds
        self._store = store  # another connection than torch's own, which may wait in it
        try:
            self._meet(host, port, rank, size, backend)
        except Exception as error:
            with contextlib.suppress(RuntimeError):  # the store has gone: the trainer knows
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
        """Where this link's work is queued, behind `after`."""
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
        """Keep the bucket's memory until it has gone."""
        with self._own_stream():
            sent = self._now()
        while sent is not None and not sent.query() and not self.dead():
            time.sleep(POLL_SECONDS)
        self._on_their_way.popleft()


class Links:
    """The links of one rank of an engine: one that brings, and one that passes on."""

    def __init__(self) -> None:
        self.onward: Link | None = None
        self.comes_over_link = False
        """True where the bucket that was begun last comes over a link."""
        self._coming: deque[tuple[Link, Any]] = deque()
        """Buckets of which it is not known that they have come: link, and the event behind it."""
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
        """Wait until all buckets but those that may be ahead have come. Why one has not; empty:
        they have.
        """
        while len(self._coming) > self._ahead:
            link, event = self._coming.popleft()
            if not link.arrived(event):
                return f"{link.name}: {link.failure}"
        return ""

    def _forget_all_but(self, source: Any) -> None:
        """Buckets of a link that has been given up will be sent again. First nothing of them may
        come any more.
        """
        while self._coming and self._coming[0][0] is not source:
            link, event = self._coming.popleft()
            link.arrived(event)

    def make_room(self) -> None:
        """Wait until there is memory for a bucket."""
        if self.onward:
            self.onward.make_room()
