"""Batches and steps: fix, commit, forget, rewind.

A batch is fixed once and never changes. A group is trained when the step of its batch is committed,
so a commit and a rewind change one number, and a batch can never be half trained.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from sluice_buffer.errors import InvalidCallError, PreconditionError, StaleAttemptError
from sluice_buffer.group import TRAINING, GroupKey, GroupState, unpack_facts
from sluice_buffer.rules.admission import AdmissionPolicy, filter_limit
from sluice_buffer.rules.staleness import Stragglers, due, earliest, outdated, stale, stragglers
from sluice_buffer.state.memory import Memory, pack_ids
from sluice_buffer.state.schedule import ids_of
from sluice_buffer.state.storage import number
from sluice_buffer.transitions.leases import Leases
from sluice_buffer.transitions.rounds import Rounds

# Late groups are named, with their workers, if there are at most so many: the text is made anew at
# each change of the buffer.
_LISTED = 100
# Workers that a text names.
_WORKERS = 8


@dataclass(slots=True)
class Batches:
    """The transitions of batches on one memory."""

    memory: Memory
    policy: AdmissionPolicy
    leases: Leases
    rounds: Rounds

    def admit(self, attempt: int) -> None:
        """Refuse a trainer of an older attempt."""
        newest = self.memory.progress.trainer_attempt
        if attempt < newest:
            raise StaleAttemptError(f"trainer attempt {attempt} was replaced by attempt {newest}")
        if attempt > newest:
            self.memory.progress.trainer_attempt = attempt
            self.memory.changed = True

    def take(self, step: int, attempt: int) -> str | None:
        """Fix the batch of a step, if it is not fixed yet.

        Returns None once it is fixed, else a description of what it waits for.
        """
        self.admit(attempt)
        progress = self.memory.progress
        if step in self.memory.batches and step <= progress.step:
            return None
        if step < 1:
            raise InvalidCallError(f"step {step}: steps count from 1")
        if step <= progress.checkpoint_step:
            raise PreconditionError(
                f"step {step}: its samples were forgotten when checkpoint "
                f"{progress.checkpoint_step} was made"
            )
        if step != progress.step + 1:
            raise PreconditionError(
                f"step {step} cannot be taken: the last committed step is {progress.step}"
            )
        waiting = self.rounds.waiting_for(progress.step) if self.policy.sync else None
        if waiting is None and step not in self.memory.batches:
            waiting = self._fix(step)
        return waiting

    def _fix(self, step: int) -> str | None:
        if waiting := self.waiting_for(step):
            return waiting
        memory, size = self.memory, self.policy.batch_size
        finished = memory.schedule[GroupState.FINISHED]
        ids = (
            earliest(finished, size)
            if self.policy.strict
            else heapq.nsmallest(size, memory.finished)
        )
        lags = []
        for group_id in ids:
            group = memory.groups[group_id]
            group.step = step
            memory.move(GroupKey(TRAINING, group_id), group, GroupState.BATCHED)
            oldest = [fact.min_version for fact in unpack_facts(group.summary)]
            lags += [step - 1 - version for version in oldest]
            memory.count(
                "stale_groups", int(stale(self.policy, step=step, min_version=min(oldest)))
            )
        memory.batches[step] = ids
        memory.batch.put("batches", number(step), pack_ids(ids))
        memory.progress.lag = sum(lags) / len(lags)
        memory.changed = True
        return None

    def waiting_for(self, step: int) -> str:
        """Describe what the batch of a step waits for; empty if it can be fixed."""
        finished, size = len(self.memory.finished), self.policy.batch_size
        if finished < size:
            return self._missing(finished, size)
        late = self._stragglers(step)
        return self._too_old(step, late) if late else ""

    def late(self, step: int) -> bool:
        """True if enough groups have finished, but others would become too old without a place."""
        return self._stragglers(step) is not None

    def _stragglers(self, step: int) -> Stragglers | None:
        memory = self.memory
        if not self.policy.strict or len(memory.finished) < self.policy.batch_size:
            return None
        return stragglers(
            self.policy,
            step=step,
            in_work=memory.schedule.counts(GroupState.LEASED, GroupState.WAITING),
            finished=memory.schedule.counts(GroupState.FINISHED),
        )

    def _too_old(self, step: int, late: Stragglers) -> str:
        """Describe late groups.

        `2 of 5 groups that would be too old after batch 7: 3, 9, ..., 5 leased by rollout-0`.
        """
        versions = [
            ids
            for state in (GroupState.LEASED, GroupState.WAITING)
            for version, ids in self.memory.schedule[state].items()
            if due(self.policy, version) <= late.due
        ]
        total = sum(map(len, versions))
        text = (
            f"{total} groups that would be too old for the next batch"
            if late.number == total
            else f"{late.number} of {total} groups that would be too old after batch {late.due}"
        )
        if total > _LISTED:
            return text
        ids = ids_of(versions)
        return f"{text}: {_some(ids)}{self._holders(ids)}"

    def _missing(self, finished: int, size: int) -> str:
        """Describe missing groups: `12 of 16 groups finished, 4 leased by rollout-0`."""
        counts = self.memory.counts
        text = f"{finished} of {size} groups finished"
        if counts[GroupState.LEASED]:
            text += self._leases()
        if waiting := counts[GroupState.WAITING]:
            text += f", {waiting} came back and wait for a worker"
        if not counts[GroupState.LEASED]:
            text += ", no worker has asked for more"
        if (dropped := len(self.memory.dropped)) >= size:
            text += (
                f"; the dynamic filter dropped the last {dropped} groups "
                f"(the job is given up at {filter_limit(size)})"
            )
        return text

    def _leases(self) -> str:
        """Describe leases of training groups: `, 3 leased by rollout-0, 2 leased by rollout-1`."""
        leases_of = self.memory.leases_of
        counts = (
            (name, sum(key.round == TRAINING for key in leases_of[name]))
            for name in sorted(leases_of)
        )
        texts = (f", {count} leased by {name}" for name, count in counts if count)
        return "".join(islice(texts, _WORKERS))

    def _holders(self, group_ids: Sequence[int]) -> str:
        """Describe the leases of some groups, as `_leases` does."""
        groups = (self.memory.groups[i] for i in group_ids)
        holders = Counter(group.worker for group in groups if group.state is GroupState.LEASED)
        return "".join(
            f", {count} leased by {name}" for name, count in sorted(holders.items())[:_WORKERS]
        )

    @property
    def exhausted(self) -> bool:
        """True if no further batch can be fixed, because the prompts have ended."""
        memory, end = self.memory, self.policy.stream_end
        return (
            end is not None
            and memory.progress.next_group >= end
            and not memory.in_work
            and len(memory.finished) < self.policy.batch_size
        )

    @property
    def last_step(self) -> int:
        """The last step of the job, as far as it is clear now."""
        last = max(self.memory.batches, default=self.memory.progress.step)
        return (
            min(self.policy.total_steps, max(last, self.memory.progress.step))
            if self.exhausted
            else self.policy.total_steps
        )

    def commit(self, step: int, version: int, attempt: int, metrics: dict[str, float]) -> None:
        self.admit(attempt)
        memory, progress = self.memory, self.memory.progress
        if version != step:
            raise InvalidCallError(f"step {step} makes weight version {step}, not {version}")
        if step <= progress.step:
            return  # a repeated commit
        if step != progress.step + 1 or step not in memory.batches:
            taken = "is fixed" if step in memory.batches else "was never taken"
            raise PreconditionError(
                f"step {step} cannot be committed: step {progress.step} is the last, batch {step} "
                f"{taken}"
            )
        progress.step, progress.metrics, memory.changed = step, metrics, True
        memory.twice += sum(self._trained_elsewhere(i, step) for i in memory.batches[step])
        self._regenerate_outdated(step)
        self.rounds.committed(step, final=step == self.last_step)

    def settle(self) -> None:
        """Open the last evaluation once the prompts have ended and no further step will come."""
        if self.exhausted and self.memory.progress.step == self.last_step > 0:
            self.rounds.committed(self.last_step, final=True)

    @property
    def over(self) -> bool:
        """True if every step is trained, evaluated and checkpointed, so workers may end."""
        progress = self.memory.progress
        return (
            progress.step >= self.last_step
            and progress.checkpoint_step >= self.last_step
            and not self.memory.rounds
        )

    def _trained_elsewhere(self, group_id: int, step: int) -> bool:
        group = self.memory.groups.get(group_id)
        return group is None or group.state is not GroupState.BATCHED or group.step != step

    def _regenerate_outdated(self, version: int) -> None:
        """Send surplus groups back if their samples must be of newer weights."""
        memory = self.memory
        for group_id in [*memory.finished, *memory.in_work]:
            key, group = GroupKey(TRAINING, group_id), memory.groups[group_id]
            if not outdated(self.policy, version=version, start_version=group.version):
                continue
            if group.state is GroupState.WAITING and not group.size:
                continue
            memory.discard(
                "samples" if group.state is GroupState.FINISHED else "partials", key, group
            )
            group.summary, group.note = b"", ""
            self.leases.release(key, group, "its weights are too old", blame=False)
            memory.count("groups_outdated")

    def commit_checkpoint(self, step: int, attempt: int) -> int:
        """Forget the samples of all steps up to `step`, and return the number of their groups."""
        self.admit(attempt)
        memory, progress = self.memory, self.memory.progress
        if step > progress.step:
            raise PreconditionError(
                f"checkpoint {step}: the last committed step is {progress.step}"
            )
        forgotten = 0
        for old in sorted(s for s in memory.batches if s <= step):
            for group_id in memory.batches.pop(old):
                key, group = GroupKey(TRAINING, group_id), memory.groups[group_id]
                memory.discard("samples", key, group)
                memory.move(key, group, GroupState.TRAINED)
                forgotten += 1
        memory.forgotten += forgotten
        progress.checkpoint_step = max(progress.checkpoint_step, step)
        memory.changed = True
        return forgotten

    def rewind(self, step: int, attempt: int, vocabulary: int = 0) -> int:
        """Undo the commits after `step`.

        Parameters
        ----------
        step
            Step of the checkpoint that the trainer has loaded.
        attempt
            Attempt of the trainer.
        vocabulary
            Tokens of the trainer's embedding; 0 if not known.

        Returns
        -------
        Number of later batches that are fixed already and will be served again.

        """
        self.admit(attempt)
        memory, progress = self.memory, self.memory.progress
        if step < progress.checkpoint_step:
            raise PreconditionError(
                f"cannot rewind to step {step}: the samples of steps up to "
                f"{progress.checkpoint_step} were forgotten "
                f"when checkpoint {progress.checkpoint_step} was made"
            )
        if step > progress.step:
            raise PreconditionError(
                f"cannot rewind to step {step}: the last committed step is {progress.step}"
            )
        if step < progress.step:
            memory.count("rewinds")
            memory.count("steps_redone", progress.step - step)
            progress.step = step
            self.rounds.rewound(step)
        progress.vocabulary = vocabulary or progress.vocabulary
        memory.changed = True
        return sum(1 for fixed in memory.batches if fixed > step)


def _some(group_ids: list[int], limit: int = 5) -> str:
    return ", ".join(str(i) for i in group_ids[:limit]) + (
        ", ..." if len(group_ids) > limit else ""
    )
