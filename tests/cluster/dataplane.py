"""The real rendezvous and the real buffer of a job, at the addresses of its Services.

The test's control plane hands out loopback addresses as cluster IPs, so a process of this machine
can listen on the address of a job's Service, and the operator, which knows no other, asks it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from sluice.runtime.pod_env import free_port
from sluice.wire import rpc
from sluice.wire.membership import Membership
from sluice.wire.v1 import buffer_pb2, buffer_pb2_grpc, rendezvous_pb2_grpc
from sluice.wire.v1 import rendezvous_pb2 as rendezvous
from sluice_operator.cluster.kube.paths import path
from sluice_operator.plan.facts.names import PORTS
from tests.cluster.world import Object, World


class DataPlane:
    def __init__(self, world: World, job: Object, directory: Path) -> None:
        self.world, self.job, self.directory = world, job, directory
        self.name, self.uid = job["metadata"]["name"], job["metadata"]["uid"]
        self.processes: list[subprocess.Popen[bytes]] = []

    async def start(self) -> None:
        manifest = (await self._get("ConfigMap", f"{self.name}-config"))["data"]["rljob.json"]
        (self.directory / "rljob.json").write_text(manifest)
        secret = await self._get("Secret", f"{self.name}-token-{self.uid[:8]}")
        self.token = base64.b64decode(secret["data"]["token"]).decode()
        self.address = (await self._get("Service", f"{self.name}-rendezvous"))["spec"]["clusterIP"]
        self.buffer = f"127.0.0.1:{free_port()}"
        self._run("rendezvous", self.address, PORTS["rendezvous"])
        self._run("buffer", "127.0.0.1", int(self.buffer.rpartition(":")[2]))

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    @asynccontextmanager
    async def engine(self) -> AsyncIterator[None]:
        """Let an engine join and get the first weights from a trainer."""
        os.environ["SLUICE_TOKEN"] = self.token
        hello = rendezvous.Member(
            role="rollout", name="rollout-0", attempt=1, address="127.0.0.1:1", version=-1
        )
        try:
            async with Membership(self.rendezvous, lambda: hello) as membership:
                await asyncio.wait_for(membership.connected.wait(), 30)
                await self._give_weights()
                yield
        finally:
            del os.environ["SLUICE_TOKEN"]

    async def _give_weights(self) -> None:
        """Tell the rendezvous of an update as a trainer does."""
        source: dict[str, Any] = {"source": "trainer-0", "attempt": 1, "version": 0}
        async with rpc.channel(self.rendezvous) as channel:
            stub, metadata = rendezvous_pb2_grpc.RendezvousStub(channel), rpc.metadata(self.token)
            plan = await stub.BeginUpdate(
                rendezvous.BeginUpdateRequest(**source), metadata=metadata
            )
            engines = [
                rendezvous.EngineReport(
                    engine=engine.member.name,
                    attempt=engine.member.attempt,
                    generation=engine.generation,
                )
                for engine in plan.engines
            ]
            phase = rendezvous.UPDATE_PHASE_RESUME
            report = rendezvous.PhaseReport(**source, phase=phase, engines=engines)
            assert not (await stub.ReportPhase(report, metadata=metadata)).gone

    async def stats(self) -> buffer_pb2.BufferStats:
        async with rpc.channel(self.buffer) as channel:
            stub = buffer_pb2_grpc.BufferStub(channel)
            return await stub.Stats(buffer_pb2.StatsRequest(), metadata=rpc.metadata(self.token))

    @property
    def rendezvous(self) -> str:
        return f"{self.address}:{PORTS['rendezvous']}"

    def _run(self, role: str, address: str, port: int) -> None:
        variables = {
            "SLUICE_ROLE": role,
            "SLUICE_NAME": f"{role}-0",
            "SLUICE_ATTEMPT": "1",
            "SLUICE_BIND": address,
            "SLUICE_ADVERTISE": address,
            "SLUICE_PORT_GRPC": str(port),
            "SLUICE_RENDEZVOUS": self.rendezvous,
            "SLUICE_TOKEN": self.token,
            "SLUICE_JOB_FILE": str(self.directory / "rljob.json"),
            "SLUICE_STORAGE": str(self.directory / "storage"),
        }
        with (self.directory / f"{role}.log").open("ab") as log:
            command: Sequence[str] = [sys.executable, "-m", f"sluice_{role}"]
            self.processes.append(
                subprocess.Popen(command, env=os.environ | variables, stdout=log, stderr=log)
            )

    async def _get(self, kind: str, name: str) -> Object:
        return await self.world.api.get(path(kind, self.world.namespace, name))


def prompts(directory: Path) -> Path:
    """A file with a few prompts."""
    file = directory / "train.jsonl"
    file.write_text(
        "".join(json.dumps({"prompt": f"{i} + 1 =", "label": str(i + 1)}) + "\n" for i in range(64))
    )
    return file
