"""Cost of the rendezvous with 10, 100 and 1,000 engines: CPU seconds of its own process.

    python benchmarks/thousand_rendezvous.py [--sizes 10 100 1000] [--idle 20] [--out FILE]

The service is `python -m sluice_rendezvous`. Its members are workers' own memberships over
loopback, each with a connection of its own, in two processes. Printed for each size:
  join    until all have joined, with their connections, and know it
  update  begin, one report that all have passed `prepare`, one that all serve the new version,
          until every member has heard that; the second of two, so that nothing is new
  idle    share of one core while members send heartbeats, a waiting trainer looks for joiners
          every second and an operator reads the whole ledger every ten
"""

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice.runtime.pod_env import free_port
from sluice.wire import rpc
from sluice.wire.membership import Membership
from sluice.wire.v1 import rendezvous_pb2 as pb
from sluice.wire.v1 import rendezvous_pb2_grpc

PATIENCE_SECONDS = 300.0
CLIENTS = 2
# Seconds, longer than the longest heartbeat interval: all members have heard of a change by then.
SETTLE_SECONDS = 18.0
OPERATOR_SECONDS = 10


@dataclass
class Row:
    members: int
    join: float
    update: float
    idle: float


# --- members, in processes of their own


async def be_members(address: str, first: int, count: int) -> None:
    """Join with `count` members; print a line when all have, and one for each version all hold."""
    rpc._OPTIONS.append(("grpc.use_local_subchannel_pool", 1))  # or they share one connection
    members = [Membership(address, hello_of(first + n)) for n in range(count)]
    for member in members:
        await member.__aenter__()
    await asyncio.gather(*(member.connected.wait() for member in members))
    print("joined", flush=True)
    version = 0
    while True:
        version += 1
        await asyncio.gather(*(reaches(member, version) for member in members))
        print(version, flush=True)


def hello_of(number: int) -> Callable[[], pb.Member]:
    member = pb.Member(
        role="rollout",
        name=f"rollout-{number}",
        attempt=1,
        address="127.0.0.1:1",
        world_size=1,
        version=-1,
    )
    return lambda: member


async def reaches(member: Membership, version: int) -> None:
    while not (member.latest and member.latest.version >= version):
        await member.news(member.news_count)


# --- the measurement


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def update(stub: rendezvous_pb2_grpc.RendezvousStub, version: int) -> None:
    """A trainer's side of the bookkeeping."""
    source: dict[str, Any] = {"source": "trainer-0", "attempt": 1, "version": version}
    metadata = rpc.metadata()
    plan = await stub.BeginUpdate(
        pb.BeginUpdateRequest(**source), metadata=metadata, timeout=PATIENCE_SECONDS
    )
    engines = [
        pb.EngineReport(
            engine=e.member.name, attempt=e.member.attempt, generation=e.generation, error=""
        )
        for e in plan.engines
    ]
    for phase in (pb.UPDATE_PHASE_PREPARE, pb.UPDATE_PHASE_RESUME):
        report = pb.PhaseReport(**source, phase=phase, engines=engines)
        ack = await stub.ReportPhase(report, metadata=metadata, timeout=PATIENCE_SECONDS)
        assert not ack.gone


async def ledger(stub: rendezvous_pb2_grpc.RendezvousStub, request: pb.GetLedgerRequest) -> None:
    await stub.GetLedger(
        request, metadata=rpc.metadata(), wait_for_ready=True, timeout=PATIENCE_SECONDS
    )


async def idle(stub: rendezvous_pb2_grpc.RendezvousStub, seconds: int) -> None:
    for second in range(seconds):
        await ledger(stub, pb.GetLedgerRequest(joiners_to=2))
        if second % OPERATOR_SECONDS == 0:
            await ledger(stub, pb.GetLedgerRequest())
        await asyncio.sleep(1)


async def hear(clients: list[asyncio.subprocess.Process], line: str) -> None:
    for client in clients:
        assert client.stdout
        said = await asyncio.wait_for(client.stdout.readline(), PATIENCE_SECONDS)
        assert said.decode().strip() == line, said


async def measure(count: int, idle_seconds: int) -> Row:
    port = free_port()
    variables = os.environ | {"SLUICE_PORT_GRPC": str(port), "SLUICE_RENDEZVOUS": ""}
    service = subprocess.Popen(
        [sys.executable, "-m", "sluice_rendezvous"],
        env=variables,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    clients: list[asyncio.subprocess.Process] = []
    try:
        address = f"127.0.0.1:{port}"
        async with rpc.channel(address) as channel:
            stub = rendezvous_pb2_grpc.RendezvousStub(channel)
            await ledger(stub, pb.GetLedgerRequest())
            before = cpu_seconds(service.pid)
            for n in range(CLIENTS):
                share = [count * n // CLIENTS, count * (n + 1) // CLIENTS]
                arguments = ["--members", address, str(share[0]), str(share[1] - share[0])]
                clients.append(
                    await asyncio.create_subprocess_exec(
                        sys.executable, __file__, *arguments, stdout=asyncio.subprocess.PIPE
                    )
                )
            await hear(clients, "joined")
            joined = cpu_seconds(service.pid)
            await update(stub, 1)
            await hear(clients, "1")
            await asyncio.sleep(SETTLE_SECONDS)
            settled = cpu_seconds(service.pid)
            await update(stub, 2)
            await hear(clients, "2")
            updated = cpu_seconds(service.pid)
            started = time.monotonic()
            await idle(stub, idle_seconds)
            share_of_core = (cpu_seconds(service.pid) - updated) / (time.monotonic() - started)
            return Row(count, joined - before, updated - settled, share_of_core)
    finally:
        for client in clients:
            client.kill()
            await client.wait()
        service.kill()
        service.wait()


def table(rows: list[Row]) -> str:
    lines = ["| members | join (CPU s) | update (CPU s) | idle (of a core) |", "|---|---|---|---|"]
    lines += [
        f"| {row.members:,} | {row.join:.2f} | {row.update:.2f} | {row.idle:.1%} |" for row in rows
    ]
    return "\n".join(lines)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--idle", type=int, default=20, help="seconds")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--members", nargs=3, metavar=("ADDRESS", "FIRST", "COUNT"))
    options = parser.parse_args()
    if options.members:
        address, first, count = options.members
        await be_members(address, int(first), int(count))
        return
    text = table([await measure(size, options.idle) for size in options.sizes])
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    asyncio.run(main())
