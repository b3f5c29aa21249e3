"""One leased group in work: what it is known by, and what has become of it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from sluice.samples.sample import Prompt, Sample, SampleGroup
from sluice.wire import codec
from sluice.wire.v1 import buffer_pb2 as pb
from sluice_rollout.generate import Requests
from sluice_rollout.load import Share


@dataclass(slots=True)
class Work:
    """A lease, and its group's requests and task.

    prompt: its names alone, which no user's code can change. share: of its worker's load. failure:
    the engine's, if it may be this group's. settled: the buffer has the group back, finished or
    not. submitted: finished. began, computed: clocks at its begin, the wall's and that of this
    thread's CPU time.
    """

    leased: pb.LeasedGroup
    prompt: Prompt
    requests: Requests
    share: Share
    failure: str = ""
    settled: bool = False
    submitted: bool = False
    task: asyncio.Task[None] | None = None
    began: float = field(default_factory=time.monotonic)
    computed: float = field(default_factory=time.thread_time)

    @classmethod
    def of(cls, leased: pb.LeasedGroup, share: Share) -> Work:
        names = leased.prompt
        prompt = Prompt(
            names.group_id, "", lease_id=names.lease_id, lease_attempt=names.lease_attempt
        )
        return cls(leased, prompt, Requests(names.group_id), share)

    @property
    def name(self) -> str:
        """The group's name, which is the same in all of its leases."""
        return self.prompt.lease_id.rpartition(".")[0]

    @property
    def seconds(self) -> float:
        """Since its begin."""
        return time.monotonic() - self.began

    @property
    def busy(self) -> float:
        """The share of that time for which this thread computed, 0 to 1. It is the worker's only
        one for all groups: near 1, they wait for each other.
        """
        return min((time.thread_time() - self.computed) / max(self.seconds, 1e-6), 1.0)

    def read(self) -> tuple[Prompt, list[Sample]]:
        """The prompt, and the samples that an earlier lease has left."""
        partial = [codec.sample_from_message(sample) for sample in self.leased.partial.samples]
        return codec.prompt_from_message(self.leased.prompt), partial

    def bare(self, failure: str) -> SampleGroup:
        """The group as it goes back without what was made of it, which may be broken."""
        return SampleGroup(self.prompt, failure=failure)
