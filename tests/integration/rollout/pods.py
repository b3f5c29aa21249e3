"""A worker as its pod runs it: in this process or in its own, with a real buffer and a real
engine.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from sluice.api import RLJob
from sluice.engines.protocol import Client as EngineClient
from sluice.rewards.builtin.contains import contains
from sluice.rewards.types import RewardInput
from sluice.samples.sample import Prompt, Sample, SampleGroup
from sluice.wire.image_client import ImageClient
from sluice.wire.membership import Membership
from sluice.wire.v1 import buffer_pb2 as pb
from sluice.wire.v1 import common_pb2 as common
from sluice_rollout.buffer import BufferClient
from sluice_rollout.gateway.registry import EpisodeRegistry
from sluice_rollout.generate import Generator
from sluice_rollout.group import group_maker
from sluice_rollout.health import EngineHealth
from sluice_rollout.prompts import PromptEncoder
from sluice_rollout.scoring.teacher import teacher_of
from sluice_rollout.submit import Submitter
from sluice_rollout.user_functions.loading import UserCode
from sluice_rollout.worker import Worker
from tests.integration.engines import with_us
from tests.integration.rendezvous_server import DEADLINE, Rendezvous, engine_member
from tests.unit.buffer.buffer_tools import BufferProcess, Client, make_group, make_job


def job(directory: Path, model: Path, **changes: Any) -> RLJob:
    """Short responses, four groups of two a step."""
    base = {
        "model__path": str(model),
        "rollout__sampling__maxResponseTokens": 12,
        "rollout__concurrency": 8,
        "reward__type": "contains",
    }
    return make_job(directory, **{**base, **changes})


def contained(prompt: Prompt, sample: Sample) -> float:
    """The reward that such a job gives to a sample."""
    return contains(RewardInput(prompt.prompt, sample.response, prompt.label))


class Services:
    """The services of a job that a worker needs: a buffer process and a rendezvous."""

    def __init__(self, job: RLJob, directory: Path, rendezvous: Rendezvous) -> None:
        self.job, self.directory, self.rendezvous = job, directory, rendezvous
        self.buffer = BufferProcess(job, directory, SLUICE_RENDEZVOUS=rendezvous.address)

    async def start_buffer(self) -> Client:
        return Client(await asyncio.to_thread(self.buffer.start))

    async def start_buffer_with_batch(self) -> Client:
        """Start the buffer, and fix batch 1 with samples that the client makes up.

        The buffer refuses samples of weights 1 until the batch that they are trained on is fixed.
        """
        client = await self.start_buffer()
        rollout = self.job.spec.rollout
        groups, held_out = list[common.SampleGroup](), list[common.SampleGroup]()
        while len(groups) < rollout.batch_size:
            [lease] = (await client.lease("by-hand")).groups
            if lease.prompt.purpose == common.PURPOSE_TRAIN:
                groups.append(make_group(lease.prompt, rollout.samples_per_prompt or 1))
            else:  # leased before any prompt for training
                held_out.append(common.SampleGroup(prompt=lease.prompt))
        await client.submit(groups)
        await client.give_back(held_out)
        assert (await client.take(1)).state == pb.TakeBatchResponse.STATE_READY
        return client

    @asynccontextmanager
    async def worker(
        self, engine: EngineClient, **changes: Any
    ) -> AsyncIterator[tuple[Worker, Membership]]:
        """A worker that is joined; who asks for it runs it. `changes` as the Worker's fields."""
        spec = self.job.spec
        encoder = PromptEncoder(spec, Path(spec.model.path))
        membership = Membership(
            self.rendezvous.address, lambda: engine_member(address=engine.url[7:])
        )
        buffer = BufferClient(self.rendezvous.address, pb.Caller(name="rollout-0", attempt=1))
        slots = asyncio.Semaphore(spec.rollout.concurrency)
        health = EngineHealth(engine, spec.weight_sync.pause_seconds, spec.rollout.health)
        processor = encoder.image_processor
        placeholder = processor.placeholder if processor else None
        generator = Generator(
            engine, encoder.decode, slots, lambda: membership.version, health, placeholder,
            encoder.media_tokens,
        )  # fmt: skip
        images = ImageClient(buffer.locator) if processor else None
        code = UserCode.load(spec)
        teacher = teacher_of(spec, encoder.tokenizer)
        registry = EpisodeRegistry.for_job(spec, encoder, image_client=images)
        open_gateway = registry.open_gateway
        make = group_maker(
            spec, encoder, generator, membership, code, teacher, open_gateway, images
        )
        fields = {
            "spec": spec, "engine": engine, "group_maker": make, "buffer": buffer,
            "submitter": Submitter(spec, buffer, code.dynamic_filter), "membership": membership,
        }  # fmt: skip
        async with registry, membership:
            yield Worker(**{**fields, **changes}), membership
        await buffer.close()
        await code.close()
        if teacher:
            await teacher.close()

    @asynccontextmanager
    async def working(
        self, engine: EngineClient, **changes: Any
    ) -> AsyncIterator[tuple[Worker, Callable[[], Any]]]:
        """A worker at work on version 0, and what ends it (answers once it has given everything
        back)."""
        async with self.worker(engine, **changes) as (worker, membership):
            stop = asyncio.Event()
            running = asyncio.create_task(worker.run(stop))

            async def end() -> None:
                stop.set()
                await asyncio.wait_for(running, 30)

            async with asyncio.timeout(10):
                await membership.connected.wait()
            await self.rendezvous.serve(0)
            try:
                yield worker, end
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)


class Pod:
    """`python -m sluice_rollout`."""

    def __init__(self, services: Services, engine_url: str, **environment: str) -> None:
        job_file = services.directory / "rollout.json"
        job_file.write_text(
            services.job.model_dump_json(by_alias=True, exclude_unset=True, exclude_none=True)
        )
        variables = {
            **os.environ,
            "SLUICE_JOB_FILE": str(job_file),
            "SLUICE_RENDEZVOUS": services.rendezvous.address,
            "SLUICE_ENGINE_URL": engine_url,
            "OMP_NUM_THREADS": "1",
            **environment,
        }
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            with_us(sys.executable, "-m", "sluice_rollout"),
            env=variables,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr
        self.lines.extend(self.process.stderr)

    async def end(self, seconds: float, number: int = 0) -> int:
        """Return the exit code, after a signal if one is given. The pod must end in time."""
        if number:
            self.process.send_signal(number)
        code = await asyncio.to_thread(self.process.wait, seconds)
        await asyncio.to_thread(self._reader.join, 10.0)
        return code

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)


async def leases(worker: Worker, count: int) -> None:
    async with asyncio.timeout(DEADLINE):
        while len(worker.leased_groups) < count:
            await asyncio.sleep(0.01)


def submitted(worker: Worker) -> list[SampleGroup]:
    """Groups that the worker submits from now on; the list grows as it does."""
    groups: list[SampleGroup] = []
    send = worker.submitter.submits.send

    async def note(group: SampleGroup) -> Any:
        groups.append(group)
        return await send(group)

    worker.submitter.submits.send = note  # type: ignore[method-assign]
    return groups
