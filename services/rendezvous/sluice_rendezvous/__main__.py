"""Run the rendezvous until SIGTERM: `python -m sluice_rendezvous`."""

from __future__ import annotations

import asyncio
import signal

from prometheus_client import REGISTRY

from sluice.runtime import pod_env
from sluice.telemetry import endpoints, logs, tracing
from sluice.wire import rpc
from sluice.wire.v1 import rendezvous_pb2_grpc
from sluice_rendezvous import metrics
from sluice_rendezvous.service import RendezvousService


async def main() -> int:
    env = pod_env.read("rendezvous")
    log = logs.configure(env.role, name=env.name, attempt=env.attempt)
    tracing.configure(env)
    server, service = rpc.server(), RendezvousService()
    REGISTRY.register(metrics.StateCollector(service))
    rendezvous_pb2_grpc.add_RendezvousServicer_to_server(service, server)
    port = rpc.bind(server, f"{env.bind}:{env.port('grpc')}")
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await server.start()
    log.info("serving", address=f"{env.advertise}:{port}")
    expiry = asyncio.create_task(service.expire_forever())
    pulse = endpoints.LoopWatchdog()
    endpoints.serve(env, ready=endpoints.healthy, alive=pulse.check)
    async with pulse.running():
        await stop.wait()
    expiry.cancel()
    await server.stop(grace=1.0)
    return 128 + signal.SIGTERM


if __name__ == "__main__":
    logs.run("rendezvous", main)
