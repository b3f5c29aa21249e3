"""`python -m sluice_rollout`: the worker of one engine, until SIGTERM."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Coroutine
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from sluice.api import RLJobSpec
from sluice.data import chat
from sluice.engines import engine_of
from sluice.engines.plugin_common import pool_credential
from sluice.engines.protocol import UNKNOWN_VERSION, Client, EngineError
from sluice.runtime import open_files, pod_env, user_code
from sluice.runtime.pod_env import ConfigurationError, Environment
from sluice.stores import StoreError, UriError
from sluice.telemetry import endpoints, logs, tracing
from sluice.weight_store.local_copy import LocalCopy
from sluice.weight_store.objects import job_prefix, open_store
from sluice.wire.image_client import ImageClient
from sluice.wire.membership import Membership
from sluice.wire.v1 import buffer_pb2 as pb
from sluice.wire.v1 import rendezvous_pb2
from sluice_rollout import metrics
from sluice_rollout.buffer import BufferClient
from sluice_rollout.environments.pods import EpisodePods, RowImages
from sluice_rollout.environments.verifying import VerifierRules
from sluice_rollout.gateway.registry import EpisodeRegistry, PodAddress
from sluice_rollout.generate import Generator
from sluice_rollout.group import group_maker
from sluice_rollout.health import EngineHealth
from sluice_rollout.load import Load
from sluice_rollout.prompts import PromptEncoder
from sluice_rollout.scoring.teacher import TeacherError, Teachers, teacher_of
from sluice_rollout.stored_weights import StoredWeights
from sluice_rollout.submit import Submitter
from sluice_rollout.user_functions.loading import UserCode
from sluice_rollout.worker import Worker, WorkerError

# Time for the engine's or the teacher's start.
START_SECONDS = 1800.0
# How long an episode waits for a pod. A worker leases no more episodes than it has pods, so an
# episode waits only for the start of a pod, or for the end of the episode before.
POD_SECONDS = 1200.0
# Files that a worker has open in addition to the connections of its requests.
OTHER_FILES = 100


class Readiness:
    """The answer of /readyz: what the start waits for, then what the worker says."""

    def __init__(self) -> None:
        self.worker: Worker | None = None
        self.waits_for = "the engine has not started yet"

    def check(self) -> str:
        return self.worker.unready() if self.worker else self.waits_for


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts of a rollout pod that the worker is built from, once the engine has started."""

    env: Environment
    spec: RLJobSpec
    engine: Client
    encoder: PromptEncoder
    code: UserCode
    teacher: Teachers | None
    pods: EpisodePods | None
    buffer: BufferClient


async def serve() -> None:
    """Work until SIGTERM. Raises WorkerError, EngineError, TeacherError or ConfigurationError."""
    env = pod_env.read("rollout")
    log = logs.configure(env.role, name=env.name, attempt=env.attempt)
    tracing.configure(env)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    readiness, pulse = Readiness(), endpoints.LoopWatchdog()
    url = env.variables.get("SLUICE_ENGINE_URL", "")
    endpoints.serve(
        env,
        ready=readiness.check,
        alive=pulse.check,
        pages={"/engine/metrics": partial(metrics.of_engine, url)},
    )
    spec = env.job().spec
    if spec.uses_pool:
        readiness.waits_for = f"the engine {url} of pool {spec.rollout.pool} does not answer yet"
    pods = _episode_pods(env, spec)
    code = UserCode.load(spec, pods)
    buffer = BufferClient(env.rendezvous, pb.Caller(name=env.name, attempt=env.attempt))
    teacher: Teachers | None = None
    try:
        async with pulse.running(), engine_of(spec).client(url) as engine:
            # The first heartbeat of an attempt frees the leases of a killed one. Other workers
            # take them over while this engine starts, which takes minutes.
            if env.attempt > 1 and not await _completed(buffer.heartbeat([]), stop):
                return
            if not (user_code.is_loaded() or spec.model.trust_remote_code):
                await asyncio.to_thread(chat.leave_torch_out)
            encoder = await asyncio.to_thread(PromptEncoder, spec, Path(spec.model.path))
            teacher = teacher_of(spec, encoder.tokenizer)
            await code.check()
            if not await _completed(engine.wait_ready(START_SECONDS), stop):
                return
            encoder.fit(engine.info.context_tokens)
            if teacher:
                readiness.waits_for = f"the teacher {teacher.url} does not answer yet"
                if not await _completed(teacher.wait_ready(START_SECONDS), stop):
                    return
                log.info("teacher ready", url=teacher.url)
            # Without this the garbage collector looks through all imported modules, again and
            # again, and no response goes on for 0.2 s.
            gc.freeze()
            parts = Parts(env, spec, engine, encoder, code, teacher, pods, buffer)
            await _work(parts, readiness, stop)
    finally:
        await buffer.close()
        await code.close()
        if teacher:
            await teacher.close()


def _episode_pods(env: Environment, spec: RLJobSpec) -> EpisodePods | None:
    """Return the pods of episodes that join this worker; None if episodes run elsewhere."""
    if not spec.rollout.has_episode_pods or env.variables.get("SLUICE_EPISODES") != "pods":
        return None
    job, environment = env.job().metadata, spec.rollout.environment
    command = f"kubectl describe pods -n {job.namespace} -l sluice.dev/job-name={job.name}"
    verifier = environment.verifier if environment else None
    rules = VerifierRules.for_job(verifier, spec) if verifier else None
    images = RowImages.for_job(environment) if environment else None
    token = env.variables["SLUICE_EPISODE_TOKEN"]
    return EpisodePods.create(token, POD_SECONDS, command, rules, images)


async def _completed(work: Coroutine[Any, Any, object], stop: asyncio.Event) -> bool:
    """Wait for a coroutine. Return False if SIGTERM came first."""
    working = asyncio.create_task(work)
    stopping = asyncio.create_task(stop.wait())
    done, waiting = await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()
    if working in done:
        working.result()
    return working in done


async def _work(parts: Parts, readiness: Readiness, stop: asyncio.Event) -> None:
    """Join the rendezvous and run the worker."""
    env, spec, engine, encoder = parts.env, parts.spec, parts.engine, parts.encoder
    server, in_pool = urlsplit(engine.url), pool_credential.VARIABLE in env.variables
    member = rendezvous_pb2.Member(
        role="rollout",
        name=env.name,
        attempt=env.attempt,
        index=env.index,
        # An engine of a pool runs in another pod.
        address=server.netloc if in_pool else f"{env.advertise}:{server.port}",
        world_size=engine.info.ranks,
        version=UNKNOWN_VERSION,
        # The trainer counts the devices that it shares with its engines; those of a pool are no
        # job's.
        devices=0 if spec.trainer.colocate or in_pool else max(spec.rollout.gpus_per_replica, 1),
        starting_seconds=metrics.PHASES.seconds()["starting"],
    )

    def hello() -> rendezvous_pb2.Member:
        latest = membership.latest
        member.version = latest.version if latest and latest.admitted else UNKNOWN_VERSION
        return member

    def heartbeat() -> rendezvous_pb2.Heartbeat:
        state = "draining" if stop.is_set() else worker.state
        metrics.PHASES.enter(state)
        metrics.VERSION.set(hello().version)
        gauges = {
            "leases": len(worker.leased_groups),
            "finished_samples": maker.finished_samples,
            "generated_tokens": maker.generated_tokens,
        }
        demand = pods.demand() if pods else None
        beat = rendezvous_pb2.Heartbeat(state=state, gauges=gauges, episode_pods=demand)
        if stored:
            stored.report(beat)
        return beat

    membership = Membership(env.rendezvous, hello, heartbeat)
    control_session = engine_of(spec).session()
    stored = _stored_weights(env, spec, server.netloc, control_session, membership)
    slots = asyncio.Semaphore(request_slots(spec.rollout.concurrency))
    health = EngineHealth(engine, spec.weight_sync.pause_seconds, spec.rollout.health)
    pods = parts.pods
    pod_address = PodAddress(env.bind, env.port("gateway"), pods.join) if pods else None
    processor = encoder.image_processor
    image_client = ImageClient(parts.buffer.locator) if processor else None
    registry = EpisodeRegistry.for_job(spec, encoder, pod_address, image_client)
    placeholder = processor.placeholder if processor else None
    generator = Generator(
        engine, encoder.decode, slots, lambda: membership.version, health, placeholder,
        encoder.media_tokens,
    )  # fmt: skip
    maker = group_maker(
        spec, encoder, generator, membership, parts.code, parts.teacher, registry.open_gateway,
        image_client,
    )  # fmt: skip
    submitter = Submitter(spec, parts.buffer, parts.code.dynamic_filter)
    load = Load(synchronous=spec.rollout.mode == "sync")
    readiness.worker = worker = Worker(
        spec, engine, maker, submitter, parts.buffer, membership, load=load, stored_weights=stored,
        episode_pods=pods,
    )  # fmt: skip
    try:
        async with registry, membership:
            await worker.run(stop)
    finally:
        await control_session.close()
    if in_pool:
        await engine.leave()


def _stored_weights(
    env: Environment,
    spec: RLJobSpec,
    engine: str,
    session: aiohttp.ClientSession,
    membership: Membership,
) -> StoredWeights | None:
    """Return what brings weights from the store to the engine; None if the trainer sends them."""
    store = spec.weight_sync.store
    if store is None:
        return None
    sync = spec.weight_sync
    source = f"{env.name}/{env.attempt}"
    control = engine_of(spec).control(engine, session, sync.timeout_seconds, source)
    try:
        objects = open_store(store.uri, job_prefix(env.job()))
    except (StoreError, UriError) as error:
        raise ConfigurationError(f"weightSync.store: {error}") from error
    # On a laptop pods share this directory.
    directory = env.directory("weights_dir") / env.name
    directory.mkdir(exist_ok=True)
    return StoredWeights(sync, control, LocalCopy(objects, directory), membership)


def request_slots(concurrency: int) -> int:
    """Return how many requests may be at the engine at a time.

    This is `rollout.concurrency`, or fewer if the process may not open as many connections.
    """
    limit = open_files.raise_limit()
    most = max(limit - OTHER_FILES, 1)
    if most < concurrency:
        logs.get().warning(
            "fewer requests than rollout.concurrency: this process may not open more files; raise "
            "the limit of its starter (ulimit -Hn, or LimitNOFILE of the container runtime)",
            concurrency=concurrency,
            requests=most,
            open_files=limit,
        )
    return min(concurrency, most)


def main() -> int:
    try:
        asyncio.run(serve())
    except (WorkerError, EngineError, TeacherError) as error:
        logs.fail(str(error), 1)
    return 128 + signal.SIGTERM


if __name__ == "__main__":
    logs.run_blocking("rollout", main)
