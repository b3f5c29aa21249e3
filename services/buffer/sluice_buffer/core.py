"""The buffer: every transition of its state, one after the other, on one thread.

A method here changes the memory and returns at once; it does no I/O. The caller (committer.py)
answers only once the `flush` of that change is on disk. The rules are in the modules of
`transitions`: leases.py, submits.py, batches.py, rounds.py.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

from sluice.api import RLJob, quantity_value
from sluice.images.image import Image
from sluice.runtime.pod_env import ConfigurationError
from sluice.telemetry import steady
from sluice.wire.v1 import buffer_pb2 as pb
from sluice.wire.v1.common_pb2 import Prompt
from sluice_buffer.capacity import StorageCapacity
from sluice_buffer.group import GroupKey, LeaseName, unpack_facts
from sluice_buffer.rules.admission import AdmissionPolicy, total_steps
from sluice_buffer.rules.balance import BY_TOKENS, CostModel, assign
from sluice_buffer.sources.local_groups import local_source_of
from sluice_buffer.sources.prompts import Prompts, PromptWithImages, prompts_of, stable_hash
from sluice_buffer.state.images import GroupImages
from sluice_buffer.state.loading import load
from sluice_buffer.state.memory import GroupWatcher, Memory
from sluice_buffer.state.storage import (
    FORMAT,
    Storage,
    StorageError,
    StorageFullError,
    WriteBatch,
    check_identity,
)
from sluice_buffer.transitions.batches import Batches
from sluice_buffer.transitions.failures import Drops, Failures
from sluice_buffer.transitions.images import Images
from sluice_buffer.transitions.leases import LeaseCall, Leases, WorkerAttempt
from sluice_buffer.transitions.rounds import NO_EVALUATION, Rounds
from sluice_buffer.transitions.submits import SubmitAnswer, Submits


def admission_policy(job: RLJob, epoch_size: int) -> AdmissionPolicy:
    rollout, trainer = job.spec.rollout, job.spec.trainer
    return AdmissionPolicy(
        batch_size=rollout.batch_size,
        samples_per_prompt=job.spec.samples_per_prompt,
        max_staleness=rollout.max_staleness,
        over_sampling=rollout.over_sampling,
        partial=rollout.partial.enabled,
        sync=rollout.mode == "sync",
        total_steps=total_steps(
            steps=trainer.steps,
            epochs=trainer.epochs,
            epoch_size=epoch_size,
            batch_size=rollout.batch_size,
        ),
        stream_end=None if trainer.epochs is None else trainer.epochs * epoch_size,
    )


class Buffer:
    """The buffer of one job.

    `clock` counts seconds for leases (monotonic), `wall` for evaluation rounds.
    """

    def __init__(
        self,
        job: RLJob,
        prompts: Prompts,
        storage: Storage,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = steady.seconds,
    ) -> None:
        self.job, self.prompts, self.storage = job, prompts, storage
        self.policy = admission_policy(job, prompts.order.epoch_size)
        self.local_source = local_source_of(job.spec, prompts)
        if self.local_source:
            self.policy = self.local_source.limit(self.policy)
        if self.policy.total_steps < 1:
            raise ConfigurationError(
                f"spec.trainer.epochs: {prompts.order.epoch_size} prompts an epoch do not fill one "
                f"batch of {self.policy.batch_size} groups"
            )
        self._clock, self._wall = clock, wall
        self._watcher: GroupWatcher | None = None
        self.capacity = StorageCapacity(storage, self.policy.batch_size, clock)
        self._identify()
        self.use(self.load())
        if not self.memory.progress.serial and self.memory.progress.step == 0:
            self.rounds.committed(0, final=False)

    def _identify(self) -> None:
        """Refuse a database that was made for another job or other prompts; mark a new one."""
        identity: dict[str, Any] = {
            "storage format": FORMAT,
            "job": self.job.key,
            "spec.rollout.batchSize": self.policy.batch_size,
            "spec.rollout.samplesPerPrompt": self.policy.samples_per_prompt,
            **self.prompts.fingerprint(),
        }
        stored = self.storage.get("meta", b"identity")
        if stored is None:
            batch = WriteBatch()
            batch.put("meta", b"identity", json.dumps(identity).encode())
            self.storage.write(batch)
            return
        try:
            check_identity(
                json.loads(stored), json.loads(json.dumps(identity)), self.storage.directory
            )
        except StorageError as error:
            raise ConfigurationError(str(error)) from error

    def load(self) -> Memory:
        """Read the memory from the disk. May run on any thread."""
        return load(self.storage, self._clock() + self.job.spec.buffer.lease_seconds)

    def use(self, memory: Memory) -> None:
        """Replace the memory."""
        memory.watcher = self._watcher
        self.memory = self.capacity.memory = memory
        filter_name = None if self.local_source else self.job.spec.rollout.dynamic_filter
        plan = (
            self.prompts.plan
            if self.local_source is None or self.local_source.evaluates
            else NO_EVALUATION
        )
        self.rounds = Rounds(self.memory, plan, self._wall)
        self.leases = Leases(
            self.memory,
            self.policy,
            self.job.spec.buffer.lease_seconds,
            plan.size,
            give_up=lambda key, group, why: self.submits.give_up(key, group, why),
            local_samples=self.local_source is not None,
        )
        self.images = Images(
            self.memory,
            self.leases,
            give_up=lambda key, group, why: self.submits.give_up(key, group, why),
        )
        self.batches = Batches(self.memory, self.policy, self.leases, self.rounds)
        self.submits = Submits(
            self.memory,
            self.policy,
            self.leases,
            self.rounds,
            Failures(self.memory, self.policy, self._wall),
            Drops(self.memory, self.policy, filter_name),
            self.prompts.order.epoch_size,
            self._is_leased,
        )

    def watch(self, watcher: GroupWatcher) -> None:
        """Call this watcher on each change of a group from now on."""
        self._watcher = self.memory.watcher = watcher

    def close(self) -> None:
        if self.local_source:
            self.local_source.close()
        self.prompts.close()
        self.storage.close()

    # -- transitions

    def flush(self) -> WriteBatch:
        """Return the writes of all transitions since the last flush."""
        self.batches.settle()
        return self.memory.flush()

    def lease(self, call: LeaseCall, limit: int, worker_version: int) -> list[GroupKey]:
        free = 0 if self.memory.dead_end else self.capacity.free_leases()
        return self.leases.lease(call, min(limit, free), worker_version, self._clock())

    def available(self, worker_version: int) -> int:
        """Return how many groups workers that serve `worker_version` could lease now."""
        return (
            0
            if self.memory.dead_end
            else min(self.capacity.free_leases(), self.leases.available(worker_version))
        )

    def heartbeat(
        self, worker: WorkerAttempt, names: list[tuple[str, LeaseName | None]]
    ) -> list[str]:
        return self.leases.heartbeat(worker, names, self._clock())

    def expire(self) -> int:
        return self.leases.expire(self._clock())

    def submit(self, data: bytes | bytearray) -> SubmitAnswer:
        try:
            return self.submits.submit(data, self.capacity.free_bytes())
        except StorageFullError:
            self.capacity.note_refused()
            raise

    def give_back(self, data: bytes | bytearray) -> tuple[bool, str]:
        return self.submits.give_back(data, self.capacity.free_bytes())

    def refuse(self, prompt: Prompt, why: str) -> None:
        self.submits.refuse(prompt, why)

    def _is_leased(self, key: GroupKey, echo: Prompt) -> bool:
        """True if a worker sends a group back with the prompt that it was leased with."""
        record = self.memory.images.groups.get(key)
        if record is None or not self.prompts.have_images:
            return self.prompts.is_leased(key, echo)
        return stable_hash(echo) == record.prompt_hash

    def attach_images(self, key: GroupKey, attempt: int, prompt: PromptWithImages) -> bool:
        """Store the images of a leased prompt; False if it is not sent (`Images.attach`)."""
        digests = tuple(map(bytes.fromhex, prompt.message.images))
        record = GroupImages(prompt.hash, digests)
        free = self.capacity.free_bytes()
        return self.images.attach(key, attempt, record, prompt.images, free, self._clock())

    def refuse_row(self, key: GroupKey, attempt: int, why: str) -> None:
        self.images.refuse(key, attempt, why)

    def postpone_row(self, key: GroupKey, attempt: int, why: str) -> None:
        self.images.postpone(key, attempt, why)

    def put_image(self, lease_id: str, image: Image) -> None:
        self.images.put(lease_id, image, self.capacity.free_bytes())

    def take(self, step: int, attempt: int) -> str | None:
        if self.local_source and step == self.memory.progress.step + 1:
            self.batches.admit(attempt)
            self.local_source.fill(
                step, self.memory, self.leases, self.submits, self.capacity.free_bytes
            )
        return self.batches.take(step, attempt)

    def commit(self, step: int, version: int, attempt: int, metrics: dict[str, float]) -> None:
        self.batches.commit(step, version, attempt, metrics)

    def commit_checkpoint(self, step: int, attempt: int) -> int:
        self.capacity.note_checkpoint()
        return self.batches.commit_checkpoint(step, attempt)

    def rewind(self, step: int, attempt: int, vocabulary: int = 0) -> int:
        return self.batches.rewind(step, attempt, vocabulary)

    def prepare(self, step: int) -> Future[None] | None:
        """Start work that must be done before batch `step` is taken; None if there is no need."""
        if self.local_source is None or step in self.memory.batches:
            return None
        return self.local_source.prepare(self.memory, self.policy)

    # -- queries

    def sequences(self, step: int, ranks: int, cost: CostModel = BY_TOKENS) -> list[pb.Sequence]:
        """Return the fixed batch of a step, with the rank and optimizer step of each sequence.

        Parameters
        ----------
        step
            Step whose batch is fixed.
        ranks
            Data-parallel ranks of the trainer.
        cost
            What training on a sequence costs; ranks share it equally.

        Returns
        -------
        Sequences in batch order: by group id, then index.

        """
        ids = self.memory.batches[step]
        facts = [
            (i, n, f)
            for i in ids
            for n, f in enumerate(unpack_facts(self.memory.groups[i].summary))
        ]
        trainer = self.job.spec.trainer
        places = assign(
            [cost.of(fact.length, fact.image_tokens) for _, _, fact in facts],
            trainer.steps_per_batch,
            ranks,
        )
        return [
            pb.Sequence(
                group_id=group_id,
                index=index,
                length=fact.length,
                response_length=fact.response_length,
                trainable_tokens=fact.trainable_tokens,
                reward=fact.reward,
                rank=rank,
                optimizer_step=optimizer_step,
                min_version=fact.min_version,
                max_version=fact.max_version,
                status=cast(Any, fact.status),
            )
            for (group_id, index, fact), (optimizer_step, rank) in zip(facts, places, strict=True)
        ]

    @property
    def over(self) -> bool:
        return self.batches.over

    def dead_end(self) -> str:
        """Explain why no batch can ever be put together again; empty if one can."""
        return self.memory.dead_end or self.capacity.dead_end()

    def waiting_for(self) -> str:
        """Describe what the trainer waits for; empty if it does not wait."""
        memory, step = self.memory, self.memory.progress.step
        if memory.dead_end:
            return memory.dead_end
        if step >= self.batches.last_step or step + 1 in memory.batches:
            return ""
        if self.capacity.free_leases() == 0:
            return self.capacity.waiting_for()
        waiting = self.rounds.waiting_for(step) if self.policy.sync else None
        return waiting or self.batches.waiting_for(step + 1)


def open_buffer(job: RLJob, directory: Path) -> Buffer:
    """Open a job's buffer from its prompt files and storage directory.

    Raises
    ------
    ConfigurationError
        If prompts, settings or the database do not fit together.
    StorageError
        If the database cannot be used.

    """
    storage = Storage(directory, int(quantity_value(str(job.spec.buffer.storage.size))))
    try:
        return Buffer(job, prompts_of(job, directory), storage)
    except BaseException:
        storage.close()
        raise
