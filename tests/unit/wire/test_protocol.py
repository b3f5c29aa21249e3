"""Processes of different releases: over real gRPC, by each kind of call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from sluice.runtime.pod_env import ConfigurationError
from sluice.wire import membership, protocol, rpc
from sluice.wire.membership import Membership
from sluice.wire.protocol import PROTOCOL, MixedReleasesError
from sluice.wire.v1 import rendezvous_pb2 as pb
from sluice.wire.v1 import rendezvous_pb2_grpc

RELEASE = protocol.release()
ADVICE = "use images of one release for the operator and for all roles of a job"
OTHER = (("sluice-protocol", "1"), ("sluice-release", "0.0.9"))


async def answer_one_request(request: Any, context: Any) -> bytes:
    return b"answer"


async def many(request: Any, context: Any) -> AsyncIterator[bytes]:
    yield b"answer"


async def requests() -> AsyncIterator[bytes]:
    yield b"request"


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    """To a server of one method of each kind."""
    handlers = {
        "unary": grpc.unary_unary_rpc_method_handler(answer_one_request),
        "server_stream": grpc.unary_stream_rpc_method_handler(many),
        "client_stream": grpc.stream_unary_rpc_method_handler(answer_one_request),
        "bidi": grpc.stream_stream_rpc_method_handler(many),
    }
    server = rpc.server("")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    port = rpc.bind(server, "127.0.0.1:0")
    await server.start()
    async with rpc.channel(f"127.0.0.1:{port}") as opened:
        yield opened
    await server.stop(None)


async def call(channel: grpc.aio.Channel, kind: str, metadata: protocol.Metadata) -> bytes:
    """The first answer of a method, which has this name."""
    path = f"/test/{kind}"
    if kind == "unary":
        return bytes(await channel.unary_unary(path)(b"request", metadata=metadata, timeout=20))
    if kind == "client_stream":
        return bytes(await channel.stream_unary(path)(requests(), metadata=metadata, timeout=20))
    if kind == "server_stream":
        answers = channel.unary_stream(path)(b"request", metadata=metadata, timeout=20)
    else:
        answers = channel.stream_stream(path)(requests(), metadata=metadata, timeout=20)
    return bytes(await anext(aiter(answers)))


KINDS = ["unary", "server_stream", "client_stream", "bidi"]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_caller_of_the_same_protocol_is_answered(
    channel: grpc.aio.Channel, kind: str
) -> None:
    assert await call(channel, kind, rpc.metadata()) == b"answer"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("metadata", "theirs"),
    [
        pytest.param(OTHER, "protocol 1 (sluice 0.0.9)", id="another number"),
        pytest.param(
            (("sluice-protocol", "99"),), "protocol 99", id="another number and no release"
        ),
        pytest.param((), "a protocol without a number (an older sluice)", id="no number"),
    ],
)
async def test_any_other_caller_is_refused_in_one_sentence(
    channel: grpc.aio.Channel, kind: str, metadata: protocol.Metadata, theirs: str
) -> None:
    with pytest.raises(MixedReleasesError) as raised:
        await rpc.retrying(
            lambda: call(channel, kind, metadata), what="Submit at the buffer", seconds=20
        )
    assert isinstance(raised.value, ConfigurationError), "the process ends with exit code 2"
    assert str(raised.value) == (
        f"Submit at the buffer: the caller speaks {theirs}, the server protocol {PROTOCOL} (sluice "
        f"{RELEASE}): {ADVICE}"
    )


async def test_who_does_not_have_the_token_learns_nothing_of_protocols() -> None:
    server = rpc.server("secret")
    handler = {"unary": grpc.unary_unary_rpc_method_handler(answer_one_request)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handler),))
    port = rpc.bind(server, "127.0.0.1:0")
    await server.start()
    async with rpc.channel(f"127.0.0.1:{port}") as opened:
        with pytest.raises(
            rpc.RefusedError, match="UNAUTHENTICATED: the call does not carry this job's token"
        ):
            await rpc.retrying(lambda: call(opened, "unary", OTHER), what="Submit", seconds=20)
    await server.stop(None)


class OlderRendezvous(rendezvous_pb2_grpc.RendezvousServicer):
    """A rendezvous of an older release, which neither checks nor reports protocol numbers."""

    async def Join(self, requests: Any, context: Any) -> AsyncIterator[pb.ServerMessage]:
        yield pb.ServerMessage(heartbeat_seconds=2.0)
        await asyncio.sleep(60)

    async def AddressBook(self, request: Any, context: Any) -> pb.AddressBookResponse:
        return pb.AddressBookResponse(
            members=[pb.Member(role="buffer", name="buffer-0", address="127.0.0.1:1")]
        )


@pytest.fixture
async def older() -> AsyncIterator[str]:
    server = grpc.aio.server()
    rendezvous_pb2_grpc.add_RendezvousServicer_to_server(OlderRendezvous(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


async def test_a_member_leaves_a_rendezvous_that_is_older(older: str) -> None:
    async with Membership(
        older, lambda: pb.Member(role="rollout", name="rollout-0", attempt=1)
    ) as member:
        with pytest.raises(MixedReleasesError) as raised:
            await asyncio.wait_for(member.until_refused(), 20)
    assert str(raised.value) == (
        "the rendezvous speaks a protocol without a number (an older sluice), "
        f"this process protocol {PROTOCOL} (sluice {RELEASE}): {ADVICE}"
    )


async def test_a_buffer_that_is_older_is_not_called(older: str) -> None:
    with pytest.raises(
        MixedReleasesError,
        match=f"^buffer-0, or the rendezvous at {older}, speaks a protocol without",
    ):
        await membership.find_members(older, "buffer", seconds=20)
