"""A member of the rendezvous: joins, sends heartbeats, and joins again when the service is back.

It gives up only if no retry helps: the rendezvous may be killed and replaced at any time, and a
member without it can continue with what it has heard. A member that must stop, such as an engine
that was dropped, reads so from `latest`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import grpc
import grpc.aio

from sluice.wire import protocol, rpc, tls
from sluice.wire.protocol import MixedReleasesError
from sluice.wire.v1 import rendezvous_pb2 as pb
from sluice.wire.v1 import rendezvous_pb2_grpc

# Seconds between two heartbeats, until the rendezvous asks for fewer because it has many members.
HEARTBEAT_SECONDS = 2.0
_REJOIN_SECONDS = (0.2, 5.0)
# A newer attempt has taken the member's place, the token is wrong, or the member is invalid: no
# retry helps.
_FINAL = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.INVALID_ARGUMENT,
)


class Membership:
    """A stream to the rendezvous.

    `latest` is its last message. There is news with every message and with every loss of the
    stream.
    """

    def __init__(
        self,
        address: str,
        hello: Callable[[], pb.Member],
        heartbeat: Callable[[], pb.Heartbeat] = pb.Heartbeat,
    ) -> None:
        """Prepare the stream.

        `hello` and `heartbeat` are called for each message, so that it has the present state.
        """
        self._address = address
        self._secured = tls.from_environment()
        self._hello = hello
        self._heartbeat = heartbeat
        self._beat = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.latest: pb.ServerMessage | None = None
        self.connected = asyncio.Event()
        self.refused: rpc.RefusedError | MixedReleasesError | None = None
        self.news_count = 0
        self._news = asyncio.Event()

    async def __aenter__(self) -> Membership:
        self._task = asyncio.create_task(self._run(), name="membership")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def interval(self) -> float:
        """Seconds between two heartbeats, as the rendezvous asks."""
        return self.latest.heartbeat_seconds if self.latest else HEARTBEAT_SECONDS

    @property
    def version(self) -> int:
        """The weight version that the ledger has for this member; -1 if it has none."""
        return int(self.latest.version) if self.latest else -1

    async def until_refused(self) -> None:
        """Wait until the rendezvous refuses this member for good, and raise `refused`."""
        seen = 0
        while self.refused is None:
            seen = await self.news(seen)
        raise self.refused

    def beat(self) -> None:
        """Send a heartbeat now, because the state has changed."""
        self._beat.set()

    async def news(self, after: int) -> int:
        """Wait for news later than number `after`, and return the number of the newest.

        Any number of tasks may wait.
        """
        while self.news_count == after:
            await self._news.wait()
        return self.news_count

    def _wake(self) -> None:
        """Wake all tasks that wait for news."""
        self.news_count += 1
        self._news.set()
        # Each wait has a separate event, so that a task cannot clear the event of another.
        self._news = asyncio.Event()

    async def _run(self) -> None:
        pause = _REJOIN_SECONDS[0]
        async with rpc.channel(self._address, self._secured) as channel:
            stub = rendezvous_pb2_grpc.RendezvousStub(channel)
            # A call that waits for its channel would never report a certificate of another job.
            patient = not self._secured
            while True:
                try:
                    async for message in stub.Join(
                        self._messages(), metadata=rpc.metadata(), wait_for_ready=patient
                    ):
                        protocol.check_peer("the rendezvous", message.protocol)
                        pause = _REJOIN_SECONDS[0]
                        if message.heartbeat_seconds < self.interval:
                            self.beat()  # the present wait is longer than the new one
                        self.latest = message
                        self.connected.set()
                        self._wake()
                except (grpc.aio.AioRpcError, MixedReleasesError) as error:
                    self.refused = _refusal(error)
                self.connected.clear()
                self._wake()
                if self.refused:
                    return
                await asyncio.sleep(pause)
                pause = min(pause * 2, _REJOIN_SECONDS[1])

    async def _messages(self) -> AsyncIterator[pb.MemberMessage]:
        sources = self.latest.sources if self.latest else {}
        hello = self._hello()
        hello.protocol = protocol.PROTOCOL
        yield pb.MemberMessage(hello=hello, sources=sources)
        while True:
            self._beat.clear()
            yield pb.MemberMessage(heartbeat=self._heartbeat())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.interval):
                    await self._beat.wait()


def _refusal(
    error: grpc.aio.AioRpcError | MixedReleasesError,
) -> rpc.RefusedError | MixedReleasesError | None:
    """Return the refusal if a stream broke for good; None if another stream may succeed."""
    if isinstance(error, MixedReleasesError):
        return error
    foreign = tls.refusal(error.details())
    if not foreign and error.code() not in _FINAL:
        return None
    text = f"refused by the rendezvous: {foreign or error.details()}"
    mixed = protocol.is_refusal(error.trailing_metadata())
    return MixedReleasesError(text) if mixed else rpc.RefusedError(text)


async def find_members(
    address: str, role: str, *, seconds: float, at_least: int = 1
) -> list[pb.Member]:
    """Return the members of a role, once there are at least `at_least`.

    Raises
    ------
    DeadlineError
        If they have not come after `seconds`.
    MixedReleasesError
        If a member or the rendezvous is of a release that speaks another protocol.

    """
    deadline = asyncio.get_running_loop().time() + seconds
    async with rpc.channel(address) as channel:
        stub = rendezvous_pb2_grpc.RendezvousStub(channel)
        while True:
            left = deadline - asyncio.get_running_loop().time()

            async def ask(wait: float = min(max(left, 0.1), 10.0)) -> pb.AddressBookResponse:
                request = pb.AddressBookRequest(role=role, at_least=at_least, wait_seconds=wait)
                book: pb.AddressBookResponse = await stub.AddressBook(
                    request, metadata=rpc.metadata(), timeout=wait + 5
                )
                return book

            book = await rpc.retrying(ask, what=f"rendezvous at {address}", seconds=max(left, 1.0))
            for member in book.members:
                protocol.check_peer(
                    f"{member.name}, or the rendezvous at {address},", member.protocol
                )
            if len(book.members) >= at_least:
                return list(book.members)
            if asyncio.get_running_loop().time() >= deadline:
                raise rpc.DeadlineError(
                    f"waited {seconds:.0f} s for {at_least} member(s) of role {role} at the "
                    f"rendezvous: {len(book.members)} came"
                )
