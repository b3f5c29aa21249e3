"""`python -m sluice_trainer.launch`: start one process for each rank of this pod.

A single rank replaces this process. Several ranks start through torchrun. The pods of a gang get
the address of their first pod from the rendezvous, so they do not need DNS.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys

from sluice.runtime import kernel_cache, pod_env
from sluice.runtime.pod_env import Environment
from sluice.telemetry import logs
from sluice.wire import membership
from sluice.wire.v1 import rendezvous_pb2 as pb

MASTER_ROLE = "trainer-master"
WAIT_SECONDS = 1800.0


async def main() -> int:
    """Replace this process by the ranks of this pod."""
    env = pod_env.read("trainer")
    logs.configure(env.role, name=env.name, attempt=env.attempt)
    if warning := kernel_cache.leave_unwritable():
        logs.get().warning(warning)
    trainer = env.job().spec.trainer
    if trainer.world_size == 1:
        os.execv(sys.executable, [sys.executable, "-m", "sluice_trainer"])  # noqa: S606 - a program of sluice
    host, port = await _master(env, trainer.nodes)
    arguments = [
        "--nnodes",
        trainer.nodes,
        "--nproc-per-node",
        trainer.processes,
        "--max-restarts",
        0,
    ]
    arguments += ["--rdzv-backend", "sluice", "--rdzv-endpoint", f"{host}:{port}"]
    arguments += ["--rdzv-conf", f"rank={env.index}", "-m", "sluice_trainer"]
    command = [sys.executable, "-m", "sluice_trainer.distributed.torchrun", *map(str, arguments)]
    os.execv(sys.executable, command)  # noqa: S606 - a program of sluice


async def _master(env: Environment, nodes: int) -> tuple[str, int]:
    """Return the address at which the ranks of this attempt meet, on the first pod."""
    port = env.port("master") or pod_env.free_port(env.advertise)
    if nodes == 1:
        return env.advertise, port

    def hello() -> pb.Member:
        return pb.Member(
            role=MASTER_ROLE,
            name=env.name,
            attempt=env.attempt,
            index=env.index,
            address=f"{env.advertise}:{port}",
        )

    async with membership.Membership(env.rendezvous, hello):
        members = await membership.find_members(
            env.rendezvous, MASTER_ROLE, seconds=WAIT_SECONDS, at_least=nodes
        )
        first = next(m for m in members if m.index == 0)
        # The other pods must read this pod's address before it leaves.
        await asyncio.sleep(2 * membership.HEARTBEAT_SECONDS)
        host, _, number = first.address.rpartition(":")
        return socket.gethostbyname(host), int(number)


if __name__ == "__main__":
    logs.run("trainer", main)
