"""Tools of the buffer's tests and benchmarks: jobs, prompt files, groups, and buffers.

A buffer runs in this process or in another.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np

from sluice.api import RLJob
from sluice.wire import codec, rpc
from sluice.wire.v1 import buffer_pb2 as pb
from sluice.wire.v1 import buffer_pb2_grpc
from sluice.wire.v1 import common_pb2 as common
from sluice_buffer.core import Buffer
from sluice_buffer.group import GroupKey, unpack_facts
from sluice_buffer.serving.metrics import counters, stats
from sluice_buffer.serving.readback import granted_lease, lease_chunks, shard_chunks
from sluice_buffer.sources.prompts import prompts_of
from sluice_buffer.state.storage import Storage
from sluice_buffer.transitions.leases import LeaseCall, WorkerAttempt
from sluice_buffer.transitions.submits import SubmitAnswer


def write_prompts(path: Path, rows: int) -> Path:
    path.write_text(
        "".join(
            json.dumps({"prompt": f"{i} + 1 = ", "label": str(i + 1)}) + "\n" for i in range(rows)
        )
    )
    return path


def deep(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with `changes` like {"rollout.batchSize": 4} made in it."""
    for path, value in changes.items():
        *parents, last = path.split(".")
        target = base
        for parent in parents:
            target = target.setdefault(parent, {})
        target[last] = value
    return base


def make_job(directory: Path, rows: int = 20, **changes: Any) -> RLJob:
    """A small job; changes as `rollout__batchSize=4`."""
    spec: dict[str, Any] = {
        "model": {"path": "/model"},
        "data": {"prompts": [{"path": str(write_prompts(directory / "prompts.jsonl", rows))}]},
        "rollout": {"batchSize": 4, "samplesPerPrompt": 2},
        "reward": {"type": "exact_match"},
        "trainer": {"steps": 5},
        "buffer": {"storage": {"size": "64Mi"}},
    }
    deep(spec, copy.deepcopy({key.replace("__", "."): value for key, value in changes.items()}))
    if "images" in spec["data"]:  # only this backend trains with images
        spec["trainer"].setdefault("backend", "fsdp")
    if isinstance(spec.get("evaluation"), dict) and not {"datasets", "heldOut"} & {
        *spec["evaluation"]
    }:
        spec["evaluation"]["datasets"] = [
            {"path": str(write_prompts(directory / "held-out.jsonl", 3))}
        ]
    return RLJob.model_validate({"metadata": {"name": "job"}, "spec": spec})


def make_sample(
    index: int,
    *,
    prompt: int = 4,
    response: int = 6,
    version: int = 0,
    reward: float | None = 1.0,
    status: common.SampleStatus = common.SAMPLE_STATUS_COMPLETED,
    error: str = "reward raised ValueError",
) -> common.Sample:
    seed = np.arange(prompt + response, dtype="<i4") + index
    sample = common.Sample(
        index=index,
        tokens=seed.tobytes(),
        response_length=response,
        response="x" * response,
        status=status,
        loss_mask=bytes([1]) * response,
        rollout_log_probs=np.full(response, -0.5, dtype="<f4").tobytes(),
    )
    if response:
        sample.weight_versions.append(common.WeightSpan(version=version, start=0, end=response))
    if reward is not None:
        sample.reward = reward
    if status == common.SAMPLE_STATUS_FAILED:
        sample.error = error
    return sample


def make_group(prompt: common.Prompt, samples: int = 2, **kwargs: Any) -> common.SampleGroup:
    """A finished group whose rewards alternate, with the prompt's id in its tokens."""
    members = [make_sample(i, **{"reward": float(i % 2), **kwargs}) for i in range(samples)]
    for sample in members:
        if len(sample.tokens) >= 4:
            sample.tokens = np.array([prompt.group_id], dtype="<i4").tobytes() + sample.tokens[4:]
    return common.SampleGroup(prompt=prompt, samples=members)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class LocalBuffer:
    """A buffer in this process on a real database, whose clock moves only if a test moves it."""

    job: RLJob
    directory: Path
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.core = self._open()

    def _open(self) -> Buffer:
        from sluice.api import quantity_value

        self.directory.mkdir(exist_ok=True)
        storage = Storage(
            self.directory, int(quantity_value(str(self.job.spec.buffer.storage.size)))
        )
        try:
            buffer = Buffer(
                self.job, prompts_of(self.job, self.directory), storage,
                clock=self.clock, wall=self.clock,
            )  # fmt: skip
        except BaseException:
            storage.close()
            raise
        storage.write(buffer.flush())
        return buffer

    def close(self) -> None:
        self.core.close()

    def restart(self, *, flushed: bool = True) -> None:
        """Open the database again, as after a crash.

        Without `flushed`, changes that were not written are lost.
        """
        if flushed:
            self.sync()
        self.close()
        self.core = self._open()

    def sync(self) -> None:
        self.core.storage.write(self.core.flush())

    def lease(
        self, worker: str = "rollout-0", count: int = 1, version: int = 0, attempt: int = 1
    ) -> list[pb.LeasedGroup]:
        keys = self.core.lease(self.call(worker, attempt), count, version)
        self.sync()
        return [self.arrived(key) for key in keys]

    def call(self, worker: str, attempt: int = 1) -> LeaseCall:
        """The call of a worker that knows all of its leases."""
        keys = self.core.memory.leases_of[worker]
        return LeaseCall(
            WorkerAttempt(worker, attempt),
            held=frozenset(self.core.leases.lease_id(key) for key in keys),
        )

    def arrived(self, key: GroupKey) -> pb.LeasedGroup:
        return pb.LeasedGroup.FromString(
            assembled(lease_chunks(self.core, granted_lease(self.core, key), 0))
        )

    def submit(self, leased: pb.LeasedGroup, **kwargs: Any) -> SubmitAnswer:
        return self.submit_group(make_group(leased.prompt, **kwargs))

    def submit_group(self, group: common.SampleGroup) -> SubmitAnswer:
        answer = self.core.submit(group.SerializeToString())
        self.sync()
        return answer

    def give_back(
        self, leased: pb.LeasedGroup, samples: Iterable[common.Sample] = (), failure: str = ""
    ) -> tuple[bool, str]:
        group = common.SampleGroup(prompt=leased.prompt, samples=list(samples), failure=failure)
        answer = self.core.give_back(group.SerializeToString())
        self.sync()
        return answer

    def fill(self, count: int, version: int = 0, **kwargs: Any) -> list[int]:
        """Lease and finish `count` groups."""
        leased = self.lease(count=count, version=version)
        for lease in leased:
            self.submit(lease, **{"version": version, **kwargs})
        return [lease.prompt.group_id for lease in leased]

    def step(self, step: int) -> list[int]:
        """Take and commit a step; the ids of its groups."""
        waiting = self.core.take(step, 1)
        assert waiting is None, waiting
        ids = list(self.core.memory.batches[step])
        self.core.commit(step, step, 1, {})
        self.sync()
        return ids

    @property
    def stats(self) -> pb.BufferStats:
        return stats(self.core)

    @property
    def counters(self) -> dict[str, int]:
        return counters(self.core)

    def check(self) -> None:
        """The invariants that hold at any time."""
        assert self.counters["groups_lost"] == 0
        assert self.counters["groups_trained_twice"] == 0


def assembled(chunks: Iterable[common.Chunk]) -> bytes:
    """Put a message together from its pieces."""
    assembler = codec.Assembler()
    pieces = [assembler.add(chunk) for chunk in chunks]
    assert pieces[-1] is not None
    return bytes(pieces[-1])


def shard_group(buffer: Buffer, group_id: int, indices: Iterable[int]) -> common.SampleGroup:
    """Samples of a group as a trainer's rank gets them."""
    facts = unpack_facts(buffer.memory.groups[group_id].summary)
    samples = [(index, facts[index].status == common.SAMPLE_STATUS_FAILED) for index in indices]
    return common.SampleGroup.FromString(
        assembled(shard_chunks(buffer.storage, group_id, samples, 0))
    )


class BufferProcess:
    """`python -m sluice_buffer` in its own process."""

    def __init__(self, job: RLJob, directory: Path, **environment: str) -> None:
        self.job, self.directory, self.environment = job, directory, environment
        self.lines: list[str] = []
        self.process: subprocess.Popen[str] | None = None
        self.address = "127.0.0.1:1"

    def start(self, seconds: float = 60.0) -> str:
        """Start, wait until it serves and return its address.

        If it ends instead, the error has its exit code and log.
        """
        job_file = self.directory / "job.json"
        job_file.write_text(
            self.job.model_dump_json(by_alias=True, exclude_unset=True, exclude_none=True)
        )
        environment = {
            **os.environ,
            "SLUICE_JOB_FILE": str(job_file),
            "SLUICE_STORAGE": str(self.directory / "storage"),
            "SLUICE_BIND": "127.0.0.1",
            **self.environment,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sluice_buffer"],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        ready = threading.Event()
        self.lines, self._serving = [], False
        self._reader = threading.Thread(target=self._read, args=(self.process, ready), daemon=True)
        self._reader.start()
        if not ready.wait(seconds) or not self._serving:
            raise RuntimeError(
                f"no buffer after {seconds} s (exit {self.process.poll()}):\n" + "".join(self.lines)
            )
        return self.address

    def _read(self, process: subprocess.Popen[str], ready: threading.Event) -> None:
        assert process.stderr
        for line in process.stderr:
            self.lines.append(line)
            match = re.search(r"serving.* address=(\S+)", line)
            if match:
                self.address, self._serving = match[1], True
                ready.set()
        ready.set()

    def end(self, number: int = signal.SIGTERM, seconds: float = 60.0) -> int:
        """Signal the process and wait for its end; its exit code."""
        assert self.process
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(seconds)
        self._reader.join(seconds)
        return code


@dataclass
class Leases:
    """The answer of LeasePrompts, put together."""

    groups: list[pb.LeasedGroup]
    exhausted: bool


class Client:
    """Calls with deadlines, one short method for each."""

    def __init__(self, address: str, token: str = "") -> None:
        self.held: dict[tuple[str, int], dict[str, int]] = {}
        self._calls = itertools.count(1)
        self.channel = rpc.channel(address)
        self.stub = buffer_pb2_grpc.BufferStub(self.channel)
        self.metadata = rpc.metadata(token)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()

    async def _call(self, name: str, request: Any, wait: float = 0.0) -> Any:
        return await getattr(self.stub, name)(request, timeout=wait + 10.0, metadata=self.metadata)

    async def lease(
        self,
        worker: str = "rollout-0",
        count: int = 1,
        version: int = 0,
        attempt: int = 1,
        wait: float = 0.0,
    ) -> Leases:
        """Lease as a worker that holds all leases of this client, finished or not."""
        held = self.held.setdefault((worker, attempt), {})
        request = pb.LeasePromptsRequest(
            worker=pb.Caller(name=worker, attempt=attempt),
            max_groups=count,
            version=version,
            wait_seconds=wait,
            request=next(self._calls),
            held=[pb.Lease(lease_id=name, lease_attempt=n) for name, n in held.items()],
        )
        assembler, leases = codec.Assembler(), Leases([], exhausted=False)
        async for answer in self.stub.LeasePrompts(
            request, timeout=wait + 30.0, metadata=self.metadata
        ):
            leases.exhausted = answer.exhausted
            data = assembler.add(answer.group) if answer.HasField("group") else None
            if data is not None:
                leases.groups.append(pb.LeasedGroup.FromString(data))
        held.update({g.prompt.lease_id: g.prompt.lease_attempt for g in leases.groups})
        return leases

    async def heartbeat(
        self, leases: Iterable[common.Prompt], worker: str = "rollout-0", attempt: int = 1
    ) -> list[str]:
        names = [pb.Lease(lease_id=p.lease_id, lease_attempt=p.lease_attempt) for p in leases]
        request = pb.HeartbeatRequest(worker=pb.Caller(name=worker, attempt=attempt), leases=names)
        return [lease.lease_id for lease in (await self._call("Heartbeat", request)).drop]

    async def submit(self, groups: Iterable[common.SampleGroup]) -> dict[int, pb.SubmitResponse]:
        """The answer of each group, by its position."""
        return {
            a.key: a
            async for a in self.stub.Submit(_chunks(groups), timeout=120.0, metadata=self.metadata)
        }

    async def give_back(self, groups: Iterable[common.SampleGroup]) -> dict[int, pb.ReturnResponse]:
        return {
            a.key: a
            async for a in self.stub.Return(_chunks(groups), timeout=120.0, metadata=self.metadata)
        }

    async def take(
        self, step: int, ranks: int = 1, attempt: int = 1, wait: float = 0.0
    ) -> pb.TakeBatchResponse:
        request = pb.TakeBatchRequest(
            trainer=pb.Caller(name="trainer-0", attempt=attempt),
            step=step,
            data_parallel_size=ranks,
            wait_seconds=wait,
        )
        return await self._call("TakeBatch", request, wait)

    async def shard(
        self, step: int, rank: int = 0, ranks: int = 1, attempt: int = 1
    ) -> list[common.SampleGroup]:
        request = pb.GetShardRequest(
            trainer=pb.Caller(name="trainer-0", attempt=attempt),
            step=step,
            rank=rank,
            data_parallel_size=ranks,
        )
        return await _groups(self.stub.GetShard(request, timeout=60.0, metadata=self.metadata))

    async def examples(self, version: int, dataset: str) -> list[common.SampleGroup]:
        request = pb.GetExamplesRequest(version=version, dataset=dataset)
        return await _groups(self.stub.GetExamples(request, timeout=60.0, metadata=self.metadata))

    async def held_out(self, dataset: int, first: int) -> list[common.SampleGroup]:
        request = pb.GetHeldOutRequest(dataset=dataset, first=first)
        return await _groups(self.stub.GetHeldOut(request, timeout=60.0, metadata=self.metadata))

    async def images(self, digests: list[str]) -> list[common.Image]:
        request = pb.GetImagesRequest(digests=digests)
        assembler, call = (
            codec.Assembler(),
            self.stub.GetImages(request, timeout=60.0, metadata=self.metadata),
        )
        whole = [assembler.add(chunk) async for chunk in call]
        return [common.Image.FromString(data) for data in whole if data is not None]

    async def failures(self, after: int = 0) -> list[pb.Failure]:
        return list((await self._call("GetFailures", pb.GetFailuresRequest(after=after))).failures)

    async def commit(self, step: int, attempt: int = 1, **metrics: float) -> None:
        trainer = pb.Caller(name="trainer-0", attempt=attempt)
        await self._call(
            "CommitStep",
            pb.CommitStepRequest(trainer=trainer, step=step, version=step, metrics=metrics),
        )

    async def checkpoint(self, step: int, attempt: int = 1) -> int:
        trainer = pb.Caller(name="trainer-0", attempt=attempt)
        request = pb.CommitCheckpointRequest(trainer=trainer, step=step)
        return int((await self._call("CommitCheckpoint", request)).forgotten_groups)

    async def rewind(self, step: int, attempt: int = 1) -> int:
        request = pb.RewindRequest(trainer=pb.Caller(name="trainer-0", attempt=attempt), step=step)
        return int((await self._call("Rewind", request)).replay_steps)

    async def evaluations(
        self, after: int = -1, wait_for: int | None = None, wait: float = 0.0
    ) -> pb.GetEvaluationsResponse:
        request = pb.GetEvaluationsRequest(
            after_version=after, wait_for_version=wait_for, wait_seconds=wait
        )
        return await self._call("GetEvaluations", request, wait)

    async def stats(self) -> pb.BufferStats:
        return await self._call("Stats", pb.StatsRequest())


async def _chunks(groups: Iterable[common.SampleGroup]) -> AsyncIterator[common.Chunk]:
    for key, group in enumerate(groups):
        for chunk in codec.to_chunks(key, group.SerializeToString()):
            yield chunk


async def _groups(chunks: AsyncIterable[common.Chunk]) -> list[common.SampleGroup]:
    assembler = codec.Assembler()
    whole = [assembler.add(chunk) async for chunk in chunks]
    return [common.SampleGroup.FromString(data) for data in whole if data is not None]


async def error_of(call: Any) -> tuple[grpc.StatusCode, str]:
    """(status, details) of a call that must fail."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code(), str(error.details())
    raise AssertionError("the call was answered")
