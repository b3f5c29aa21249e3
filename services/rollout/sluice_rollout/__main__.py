"""`python -m sluice_rollout`: the worker beside an SGLang server, until SIGTERM."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from urllib.parse import urlsplit

from sluice import environment
from sluice.rewards import RewardError
from sluice.rewards.judge import Judge
from sluice.telemetry import logs
from sluice.wire.membership import Membership
from sluice.wire.v1 import buffer_pb2 as pb
from sluice.wire.v1 import rendezvous_pb2
from sluice_rollout import filters
from sluice_rollout.buffer import BufferClient, Outbox
from sluice_rollout.engine import UNKNOWN_VERSION, Engine
from sluice_rollout.generate import Generator
from sluice_rollout.prompts import PromptEncoder
from sluice_rollout.worker import Worker, engine_lost

ENGINE_START_SECONDS = 1800.0


async def main() -> int:
    env = environment.read("rollout")
    log = logs.configure(env.role, name=env.name, attempt=env.attempt)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    spec = env.job().spec
    url = env.variables.get("SLUICE_ENGINE_URL", "")
    judge = Judge(spec.reward)
    async with Engine(url) as engine:
        started = asyncio.create_task(engine.wait_ready(ENGINE_START_SECONDS))
        encoder = await asyncio.to_thread(PromptEncoder, spec, Path(spec.model.path))
        try:
            await judge.check()
        except RewardError as error:
            raise environment.ConfigurationError(f"spec.reward.function: {error}") from error
        keep = filters.load(spec.rollout.dynamic_filter)
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait([started, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not started.done():
            return 0
        started.result()
        log.info("engine ready", url=url, spans=engine.has_spans)
        member = rendezvous_pb2.Member(
            role="rollout",
            name=env.name,
            attempt=env.attempt,
            index=env.index,
            address=f"{env.advertise}:{urlsplit(url).port}",
            world_size=int(engine.info.get("tp_size", 1)),
            version=UNKNOWN_VERSION,
        )
        worker: Worker | None = None

        def hello() -> rendezvous_pb2.Member:
            latest = membership.latest
            member.version = latest.version if latest and latest.admitted else UNKNOWN_VERSION
            return member

        def heartbeat() -> rendezvous_pb2.Heartbeat:
            if worker is None:
                return rendezvous_pb2.Heartbeat(state="starting")
            state = "draining" if stop.is_set() else "generating" if worker.work else "idle"
            gauges = {
                "leases": len(worker.work),
                "finished_samples": worker.finished_samples,
                "generated_tokens": worker.generated_tokens,
            }
            return rendezvous_pb2.Heartbeat(state=state, gauges=gauges)

        async with Membership(env.rendezvous, hello, heartbeat) as membership:
            buffer = BufferClient(env.rendezvous, pb.Caller(name=env.name, attempt=env.attempt))
            worker = Worker(
                spec=spec,
                engine=engine,
                encoder=encoder,
                generator=Generator(engine, encoder.decode, asyncio.Semaphore(spec.rollout.concurrency)),
                judge=judge,
                keep=keep,
                buffer=buffer,
                membership=membership,
                submits=Outbox(buffer.submit_stream),
                returns=Outbox(buffer.return_stream),
            )
            try:
                await worker.run(stop)
            except* Exception as error:
                reason = engine_lost(error)
                if reason is None:
                    raise
                logs.fail(reason, 1)
            finally:
                await buffer.close()
                await judge.close()
    return 0


if __name__ == "__main__":
    logs.run("rollout", main)
