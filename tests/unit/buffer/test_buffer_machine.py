"""No group is lost or trained twice, and no batch changes, in any order of events.

Hypothesis drives a real buffer on a real database through leases, submits, returns, expiries,
commits, checkpoints, rewinds, restarts, and crashes that lose what was not written. After every
step the memory must equal what a new process would read from the disk.
"""

import contextlib
import copy
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sluice.images.image import Image
from sluice.wire.v1 import buffer_pb2 as bpb
from sluice.wire.v1 import common_pb2 as pb
from sluice_buffer.errors import CallError
from sluice_buffer.group import Group, GroupKey, GroupState, parse_lease_id
from sluice_buffer.sources.prompts import PromptWithImages
from sluice_buffer.state.loading import load
from sluice_buffer.state.memory import Memory
from sluice_buffer.transitions.submits import SubmitOutcome
from tests.unit.buffer.buffer_tools import (
    LocalBuffer,
    make_group,
    make_job,
    make_sample,
    shard_group,
)

# Images of several pieces, and small ones.
IMAGES = [Image("image/png", 1, 1, bytes([i]) * size) for i, size in enumerate((300_000, 1, 5000))]
# In no row.
FURTHER = Image("image/png", 2, 2, b"further")
FILES = {image.digest: image.data for image in (*IMAGES, FURTHER)}
WORKERS = st.sampled_from(["rollout-0", "rollout-1"])
KINDS = [
    {},
    {"rollout__mode": "async", "rollout__maxStaleness": 2},
    {"rollout__mode": "async", "rollout__maxStaleness": 1, "rollout__overSampling": 1.5},
    {"rollout__overSampling": 2.0, "rollout__dynamicFilter": "nonzero_std"},
    {"rollout__mode": "async", "rollout__maxStaleness": 1, "rollout__partial": {"enabled": True}},
    {"evaluation": {"everySteps": 2, "samplesPerPrompt": 2}, "trainer": {"epochs": 1}},
]


class BufferMachine(RuleBasedStateMachine):
    @initialize(kind=st.sampled_from(KINDS))
    def start(self, kind: dict[str, Any]) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="machine-"))
        job = make_job(self.root, rollout__batchSize=2, **{"trainer__steps": 6, **kind})
        self.buffer = LocalBuffer(job, self.root / "storage")
        self.leased: list[bpb.LeasedGroup] = []
        self.attempts: Counter[str] = Counter({"rollout-0": 1, "rollout-1": 1})
        self.trainer = 1
        # Group -> the tokens of its first sample, as acknowledged.
        self.stored: dict[int, bytes] = {}
        self.batches: dict[int, list[bpb.Sequence]] = {}
        self.lag = 0

    def teardown(self) -> None:
        if hasattr(self, "buffer"):
            self.buffer.close()
            shutil.rmtree(self.root)

    @property
    def version(self) -> int:
        return self.buffer.core.memory.progress.step

    # -- workers

    @rule(worker=WORKERS, count=st.integers(1, 5), behind=st.integers(0, 1))
    def lease(self, worker: str, count: int, behind: int) -> None:
        version = max(0, self.version - behind)
        leases = self.buffer.lease(worker, count, version, self.attempts[worker])
        for lease in leases:
            self.attach(lease.prompt)
        self.buffer.sync()
        self.leased += leases

    def attach(self, prompt: pb.Prompt) -> None:
        """Store the images of a prompt, as the service does before it sends the lease."""
        name = parse_lease_id(prompt.lease_id)
        assert name
        images = [IMAGES[(prompt.group_id + i) % len(IMAGES)] for i in range(prompt.group_id % 3)]
        message = pb.Prompt(images=[image.digest for image in images])
        by_digest = {bytes.fromhex(image.digest): image for image in images}
        read = PromptWithImages(message, by_digest)
        assert self.buffer.core.attach_images(name.key, name.attempt, read)

    @precondition(lambda self: self.leased)
    @rule(data=st.data(), image=st.sampled_from([*IMAGES, FURTHER]))
    def put_image(self, data: st.DataObject, image: Image) -> None:
        lease = data.draw(st.sampled_from(self.leased))
        with contextlib.suppress(CallError):  # the lease may be over
            self.buffer.core.put_image(lease.prompt.lease_id, image)
        self.buffer.sync()

    @precondition(lambda self: self.leased)
    @rule(
        data=st.data(),
        reward=st.booleans(),
        status=st.sampled_from([2, 2, 2, 3, 5]),
        size=st.sampled_from([6, 200]),
    )
    def submit(self, data: st.DataObject, reward: bool, status: int, size: int) -> None:
        lease = data.draw(st.sampled_from(self.leased))
        kwargs: dict[str, Any] = {"reward": 1.0} if reward else {}
        group = make_group(
            lease.prompt, response=size, status=status, version=self.version, **kwargs
        )
        if name := parse_lease_id(lease.prompt.lease_id):
            known = sorted(self.buffer.core.memory.images.known_to(name.key))
            group.samples[0].images.extend(known)
        answer = self.buffer.submit_group(group)
        if answer.outcome is SubmitOutcome.STORED and lease.prompt.purpose == pb.PURPOSE_TRAIN:
            self.stored[lease.prompt.group_id] = group.samples[0].tokens

    @precondition(lambda self: self.leased)
    @rule(data=st.data(), tokens=st.integers(0, 30))
    def give_back(self, data: st.DataObject, tokens: int) -> None:
        lease = data.draw(st.sampled_from(self.leased))
        samples = (
            [make_sample(0, response=tokens, status=pb.SAMPLE_STATUS_ABORTED, reward=None)]
            if tokens
            else []
        )
        self.buffer.give_back(lease, samples)

    @rule(worker=WORKERS)
    def a_worker_is_replaced(self, worker: str) -> None:
        self.attempts[worker] += 1

    @rule(seconds=st.sampled_from([20, 70]))
    def time_passes(self, seconds: int) -> None:
        self.buffer.clock.now += seconds
        self.buffer.core.expire()
        self.buffer.sync()

    # -- trainer

    @rule(commit=st.booleans())
    def train(self, commit: bool) -> None:
        step = self.version + 1
        if (
            step > self.buffer.core.policy.total_steps
            or self.buffer.core.take(step, self.trainer) is not None
        ):
            self.buffer.sync()
            return
        self.buffer.sync()
        batch = self.buffer.core.sequences(step, 2)
        assert self.batches.setdefault(step, batch) == batch, "a fixed batch has changed"
        for group_id in {s.group_id for s in batch}:
            group = shard_group(self.buffer.core, group_id, [0, 1])
            assert group.samples[0].tokens == self.stored[group_id], (
                "not the samples that were acknowledged"
            )
            for digest in group.samples[0].images:
                stored = self.buffer.core.storage.value("image_pieces", bytes.fromhex(digest))
                assert stored == FILES[digest]
        if commit:
            self.buffer.core.commit(step, step, self.trainer, {})
            self.buffer.sync()

    @rule(back=st.integers(0, 2))
    def checkpoint(self, back: int) -> None:
        self.buffer.core.commit_checkpoint(max(0, self.version - back), self.trainer)
        self.buffer.sync()

    @rule(back=st.integers(0, 3))
    def rewind(self, back: int) -> None:
        self.trainer += 1
        try:
            self.buffer.core.rewind(max(0, self.version - back), self.trainer)
        except CallError:
            assert self.version - back < self.buffer.core.memory.progress.checkpoint_step
        self.buffer.sync()

    # -- the machine

    @rule()
    def restart(self) -> None:
        self.buffer.restart()

    @rule(worker=WORKERS, data=st.data())
    def crash_before_the_write(self, worker: str, data: st.DataObject) -> None:
        """Some transitions run, and the process dies before they are written or answered."""
        before = view(self.buffer.core.memory)
        self.buffer.core.lease(self.buffer.call(worker, self.attempts[worker]), 3, self.version)
        if self.leased:
            group = make_group(data.draw(st.sampled_from(self.leased)).prompt, version=self.version)
            self.buffer.core.submit(group.SerializeToString())
        self.buffer.restart(flushed=False)
        assert view(self.buffer.core.memory) == before

    # -- what must hold

    @invariant()
    def the_disk_says_the_same_as_the_memory(self) -> None:
        if hasattr(self, "buffer"):
            memory = self.buffer.core.memory
            assert view(load(self.buffer.core.storage, 0.0)) == view(memory)

    @invariant()
    def images_last_as_long_as_the_groups_that_refer_to_them(self) -> None:
        if not hasattr(self, "buffer"):
            return
        memory = self.buffer.core.memory
        examples = {
            GroupKey(version, group_id)
            for version, results in memory.results.items()
            for result in results
            for group_id, _ in result.examples
        }
        for key in memory.images.groups:
            assert memory.find(key) is not None or key in examples
        records = memory.images.groups.values()
        users = Counter(digest for record in records for digest in record.all)
        assert users == memory.images.users
        assert users.keys() == memory.images.heads.keys()

    @invariant()
    def nothing_is_lost_or_trained_twice(self) -> None:
        if not hasattr(self, "buffer"):
            return
        self.buffer.check()
        memory = self.buffer.core.memory
        assert memory.trained == 2 * self.version
        in_batches = [s.group_id for batch in self.batches.values() for s in batch if s.index == 0]
        assert len(in_batches) == len(set(in_batches))
        for group_id in self.stored:
            group = memory.groups.get(group_id)
            state = group.state if group else memory.over_state(group_id)
            again = memory.progress.counters["groups_outdated"] > 0 and state is not None
            assert state in (GroupState.FINISHED, GroupState.BATCHED, GroupState.TRAINED) or again

    @invariant()
    def the_budget_holds(self) -> None:
        if hasattr(self, "buffer"):
            policy, memory = self.buffer.core.policy, self.buffer.core.memory
            newest = max([memory.progress.step, *memory.batches])
            allowed = (newest + policy.max_staleness + 1) * policy.batch_size + policy.batch_size
            assert memory.kept <= min(allowed, policy.total_steps * policy.batch_size)


def packed(groups: dict[int, Group]) -> dict[int, bytes]:
    return {group_id: group.pack() for group_id, group in groups.items()}


def view(memory: Memory) -> dict[str, object]:
    """The state that a restart must preserve."""
    return copy.deepcopy(
        {
            "groups": packed(memory.groups),
            "over": bytes(memory.over).rstrip(b"\0"),
            "counts": memory.counts,
            "in_work": memory.in_work,
            "finished": memory.finished,
            "schedule": {
                state: {version: set(ids) for version, ids in memory.schedule[state].items()}
                for state in (GroupState.LEASED, GroupState.WAITING, GroupState.FINISHED)
            },
            "leases": set(memory.deadlines),
            "batches": memory.batches,
            "forgotten": memory.forgotten,
            "rounds": {
                v: (packed(r.groups), r.unfinished, r.serial) for v, r in memory.rounds.items()
            },
            "results": memory.results,
            "stored": memory.stored_bytes,
            "images": (memory.images.heads, memory.images.groups, memory.images.users),
            "waiting": {
                i
                for _, i in memory.waiting
                if i in memory.groups and memory.groups[i].state == GroupState.WAITING
            },
            "progress": memory.progress,
        }
    )


TestBufferMachine = BufferMachine.TestCase
TestBufferMachine.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
