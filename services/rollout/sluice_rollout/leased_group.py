"""A group that a worker has leased: its identity, its requests and its progress."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from sluice.samples.sample import Prompt, Sample, SampleGroup
from sluice.wire import codec
from sluice.wire.v1 import buffer_pb2 as pb
from sluice_rollout.generate import GroupRequests
from sluice_rollout.load import GroupLoad


@dataclass(slots=True)
class LeasedGroup:
    """A lease of the buffer, with the task that works on its group."""

    message: pb.LeasedGroup
    # Identifiers only: user code gets another object, so it cannot change these.
    prompt: Prompt
    requests: GroupRequests
    load: GroupLoad
    # Why the engine was lost, if a request of this group may have caused it.
    failure: str = ""
    # True once the buffer has the group back, finished or not.
    settled: bool = False
    # True once the buffer has the finished group.
    submitted: bool = False
    task: asyncio.Task[None] | None = None
    started_at: float = field(default_factory=time.monotonic)
    cpu_started_at: float = field(default_factory=time.thread_time)

    @classmethod
    def from_message(cls, message: pb.LeasedGroup, load: GroupLoad) -> LeasedGroup:
        names = message.prompt
        prompt = Prompt(
            names.group_id, "", lease_id=names.lease_id, lease_attempt=names.lease_attempt
        )
        return cls(message, prompt, GroupRequests(names.group_id), load)

    @property
    def name(self) -> str:
        """Name of the group, which is the same in all of its leases."""
        return self.prompt.lease_id.rpartition(".")[0]

    @property
    def seconds(self) -> float:
        """Time since the lease."""
        return time.monotonic() - self.started_at

    @property
    def busy_fraction(self) -> float:
        """Fraction in [0, 1] of `seconds` in which the worker's thread computed.

        One thread serves all groups of the worker: near 1, the groups wait for each other.
        """
        cpu_seconds = time.thread_time() - self.cpu_started_at
        return min(cpu_seconds / max(self.seconds, 1e-6), 1.0)

    def decode(self) -> tuple[Prompt, list[Sample]]:
        """Return the prompt, and the samples that an earlier lease has left unfinished."""
        partial = [codec.sample_from_message(sample) for sample in self.message.partial.samples]
        return codec.prompt_from_message(self.message.prompt), partial

    def without_samples(self, failure: str) -> SampleGroup:
        """Return the group as it goes back if its samples may be broken."""
        return SampleGroup(self.prompt, failure=failure)
