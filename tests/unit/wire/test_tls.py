"""TLS between real gRPC servers and clients."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from sluice.runtime.pod_env import ConfigurationError
from sluice.wire import membership, rpc, tls
from sluice.wire.tls import PLAIN, Tls
from sluice.wire.v1 import rendezvous_pb2 as pb
from sluice.wire.v1 import rendezvous_pb2_grpc
from sluice_operator.cluster.keys import JobKeys

TOKEN, NAME = "secret", "demo.default.sluice"
KEYS = JobKeys(bytes(32))


def tls_of(job: str, name: str = NAME) -> Tls:
    files = {key: text.encode() for key, text in KEYS.certificates(job, name).items()}
    return Tls(files["ca.crt"], name, files["tls.crt"], files["tls.key"])


def write(directory: Path, secured: Tls) -> None:
    for name, text in (
        ("ca.crt", secured.ca),
        ("tls.crt", secured.certificate),
        ("tls.key", secured.key),
    ):
        if text:
            (directory / name).write_bytes(text)


class Service(rendezvous_pb2_grpc.RendezvousServicer):
    async def GetLedger(self, request: Any, context: Any) -> pb.Ledger:
        return pb.Ledger(version=7)


async def serve(secured: Tls) -> tuple[grpc.aio.Server, str]:
    server = rpc.server(TOKEN)
    rendezvous_pb2_grpc.add_RendezvousServicer_to_server(Service(), server)
    address = f"127.0.0.1:{rpc.bind(server, '127.0.0.1:0', secured)}"
    await server.start()
    return server, address


@pytest.fixture
async def address() -> AsyncIterator[str]:
    """Address of a server of job one."""
    server, server_address = await serve(tls_of("one"))
    yield server_address
    await server.stop(None)


async def ask(address: str, secured: Tls, token: str = TOKEN, seconds: float = 30.0) -> int:
    async with rpc.channel(address, secured) as channel:
        stub = rendezvous_pb2_grpc.RendezvousStub(channel)

        async def call() -> pb.Ledger:
            ledger: pb.Ledger = await stub.GetLedger(
                pb.GetLedgerRequest(), metadata=rpc.metadata(token), timeout=5
            )
            return ledger

        return int(
            (await rpc.retrying(call, what="GetLedger at the rendezvous", seconds=seconds)).version
        )


async def test_a_client_of_the_same_job_is_answered(address: str) -> None:
    assert await ask(address, Tls(tls_of("one").ca, NAME)) == 7


@pytest.mark.parametrize(
    "secured", [tls_of("two"), tls_of("one", "two.default.sluice")], ids=["authority", "name"]
)
async def test_a_server_of_another_job_is_refused_at_once(address: str, secured: Tls) -> None:
    with pytest.raises(
        rpc.RefusedError,
        match=r"^GetLedger at the rendezvous: the peer's certificate is not from this",
    ):
        await ask(address, secured, seconds=60)


async def test_a_client_without_the_authority_is_told_what_it_lacks(address: str) -> None:
    with pytest.raises(
        rpc.DeadlineError, match="it may require TLS, for which this process has no certificate"
    ):
        await ask(address, PLAIN, seconds=0.5)


async def test_the_token_is_asked_for_over_tls_too(address: str) -> None:
    with pytest.raises(
        rpc.RefusedError, match="UNAUTHENTICATED: the call does not carry this job's token"
    ):
        await ask(address, tls_of("one"), token="wrong")


async def test_a_server_in_plain_text_is_refused_by_a_client_that_asks_for_tls() -> None:
    server, address = await serve(PLAIN)
    with pytest.raises(
        rpc.RefusedError, match="the peer does not speak TLS, which this job asks for"
    ):
        await ask(address, tls_of("one"), seconds=60)
    await server.stop(None)


async def test_a_refused_handshake_leaves_no_line_of_grpcs_own_on_stderr(address: str) -> None:
    program = f"""
import asyncio
from sluice.wire import rpc
from sluice.wire.tls import Tls
from tests.unit.wire.test_tls import ask, tls_of
try:
    asyncio.run(ask({address!r}, tls_of("two")))
except rpc.RefusedError:
    print("refused")
"""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, cwd=Path(__file__).parents[3],
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert await process.communicate() == (b"refused\n", b"")


async def test_a_server_that_is_not_there_is_waited_for(address: str) -> None:
    with pytest.raises(rpc.DeadlineError, match="no answer for"):
        await ask("127.0.0.1:9", tls_of("one"), seconds=0.5)


async def test_a_member_that_meets_another_jobs_rendezvous_is_told(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, tls_of("two"))
    monkeypatch.setenv("SLUICE_TLS_DIR", str(tmp_path))
    monkeypatch.setenv("SLUICE_TLS_NAME", NAME)
    async with membership.Membership(address, pb.Member) as member:
        await member.news(0)
        assert member.refused is not None
        assert str(member.refused).endswith("it belongs to another job")


async def test_servers_and_clients_follow_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, tls_of("one"))
    monkeypatch.setenv("SLUICE_TLS_DIR", str(tmp_path))
    monkeypatch.setenv("SLUICE_TLS_NAME", NAME)
    monkeypatch.setenv("SLUICE_TOKEN", TOKEN)
    server = rpc.server()
    rendezvous_pb2_grpc.add_RendezvousServicer_to_server(Service(), server)
    address = f"127.0.0.1:{rpc.bind(server, '127.0.0.1:0')}"
    await server.start()
    async with rpc.channel(address) as channel:
        stub = rendezvous_pb2_grpc.RendezvousStub(channel)
        assert (
            await stub.GetLedger(pb.GetLedgerRequest(), metadata=rpc.metadata(), timeout=60)
        ).version == 7
    with pytest.raises(rpc.DeadlineError):
        await ask(address, PLAIN, seconds=0.5)
    await server.stop(None)


def test_without_a_directory_calls_are_in_plain_text() -> None:
    assert not tls.from_environment({})


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"SLUICE_TLS_DIR": "/nowhere", "SLUICE_TLS_NAME": "x"},
            r"/nowhere/ca\.crt: expected the certificate of the job",
        ),
        ({"SLUICE_TLS_DIR": "/nowhere"}, "SLUICE_TLS_NAME is not set"),
    ],
)
def test_a_directory_that_lacks_something_is_no_reason_for_plain_text(
    variables: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        tls.from_environment(variables)


def test_a_server_needs_a_certificate_of_its_own() -> None:
    with pytest.raises(ConfigurationError, match=r"has no tls\.crt and tls\.key"):
        Tls(b"ca", NAME).server_credentials()
