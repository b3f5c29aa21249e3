"""Evaluation rounds: when one is opened, what it still needs, and its result.

A round evaluates one weight version: every held-out prompt once, as a separate group that is leased
before any training prompt and never gets into a batch. Groups of a round are numbered through all
data sets in the order of the manifest.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from sluice_buffer.group import Group, GroupKey, GroupState, pack_facts, unpack_facts
from sluice_buffer.rules.evaluation import failed_facts, metrics
from sluice_buffer.rules.voting import majority
from sluice_buffer.state.memory import Memory, Result, Round
from sluice_buffer.state.storage import number

# Groups of each data set whose samples are kept for people to look at.
EXAMPLES = 4
# Newest rounds whose examples are kept.
EXAMPLE_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class EvalSet:
    """A data set of the manifest: its name, its number of rows, samples for each row."""

    name: str
    rows: int
    samples_per_prompt: int


@dataclass(frozen=True, slots=True)
class EvalPlan:
    """The data sets of every round, and the versions that have one."""

    sets: Sequence[EvalSet]
    every_steps: int
    before_train: bool
    ks: Sequence[int]

    @property
    def size(self) -> int:
        return sum(dataset.rows for dataset in self.sets)

    def locate(self, group_id: int) -> tuple[int, int]:
        """Return (data set, row) of a group of a round."""
        row = group_id
        for position, dataset in enumerate(self.sets):
            if row < dataset.rows:
                return position, row
            row -= dataset.rows
        raise IndexError(f"evaluation group {group_id} of {self.size}")

    def due(self, version: int, *, final: bool) -> bool:
        if not self.size:
            return False
        return final or (self.before_train if version == 0 else version % self.every_steps == 0)


NO_EVALUATION = EvalPlan((), 1, before_train=False, ks=())


@dataclass(slots=True)
class Rounds:
    """The transitions of evaluation rounds on one memory."""

    memory: Memory
    plan: EvalPlan
    # Seconds since 1970: a round may outlive the process.
    clock: Callable[[], float]

    def committed(self, version: int, *, final: bool) -> None:
        """Open the round of a version that was just made, if it is due."""
        memory = self.memory
        if (
            not self.plan.due(version, final=final)
            or version in memory.rounds
            or version in memory.results
        ):
            return
        now = self.clock()
        memory.progress.serial += 1
        memory.rounds[version] = Round(
            version, memory.progress.serial, now, unfinished=self.plan.size
        )
        facts = {"serial": memory.progress.serial, "opened": now, "groups": self.plan.size}
        memory.batch.put("rounds", number(version), json.dumps(facts).encode())
        memory.changed = True

    def waiting_for(self, version: int) -> str | None:
        """Describe what the evaluation of a version still lacks; None if it is complete."""
        round_ = self.memory.rounds.get(version)
        if round_ is None:
            return None
        holders = sorted({g.worker for g in round_.groups.values() if g.state is GroupState.LEASED})
        leased = (
            f", leased by {', '.join(holders)}" if holders else ", no worker has asked for them"
        )
        finished = self.plan.size - round_.unfinished
        return (
            f"evaluation of version {version}: {finished} of {self.plan.size} groups "
            f"finished{leased}"
        )

    def samples_per_prompt(self, key: GroupKey) -> int:
        return self.plan.sets[self.plan.locate(key.group_id)[0]].samples_per_prompt

    def is_example(self, key: GroupKey) -> bool:
        return self.plan.locate(key.group_id)[1] < EXAMPLES

    def fail(self, key: GroupKey, group: Group) -> None:
        """Count a group that cannot be finished as wrong, so that the round can end."""
        group.summary = pack_facts(failed_facts(self.samples_per_prompt(key), key.round))
        self.memory.move(key, group, GroupState.FAILED)
        self.finish(key)

    def finish(self, key: GroupKey) -> None:
        """Count a finished group of a round, and finish the round with the last one."""
        round_ = self.memory.rounds[key.round]
        round_.unfinished -= 1
        if round_.unfinished:
            return
        by_set: list[list[Group]] = [[] for _ in self.plan.sets]
        examples: list[list[list[int]]] = [[] for _ in self.plan.sets]
        for group_id in sorted(round_.groups):
            position, _ = self.plan.locate(group_id)
            by_set[position].append(round_.groups[group_id])
            if round_.groups[group_id].size:
                examples[position].append([group_id, round_.groups[group_id].size])
        results = []
        for position, dataset in enumerate(self.plan.sets):
            facts = [unpack_facts(g.summary) for g in by_set[position]]
            ballots = [g.note if g.state is GroupState.FINISHED else "" for g in by_set[position]]
            values = metrics(facts, self.plan.ks)
            values |= majority(list(zip(facts, ballots, strict=True)), self.plan.ks)
            result = Result(
                round_.version,
                dataset.name,
                values,
                max(0.0, self.clock() - round_.opened),
                examples[position],
            )
            self.memory.batch.put(
                "results", number(round_.version, position), json.dumps(asdict(result)).encode()
            )
            results.append(result)
        self._close(round_)
        self.memory.results[round_.version] = results
        self._forget_examples()

    def _close(self, round_: Round) -> None:
        """Remove a round's working state; the samples of examples stay."""
        self.memory.batch.delete("rounds", number(round_.version))
        for group_id in round_.groups:
            self.memory.batch.delete("round_groups", number(round_.version, group_id))
            self.memory.unlease(GroupKey(round_.version, group_id), round_.groups[group_id])
        del self.memory.rounds[round_.version]
        self.memory.changed = True

    def _forget_examples(self) -> None:
        for version in sorted(self.memory.results)[:-EXAMPLE_ROUNDS]:
            self._delete_examples(version)

    def _delete_examples(self, version: int) -> None:
        kept = []
        for position, result in enumerate(self.memory.results[version]):
            for group_id, size in result.examples:
                self.memory.remove("examples", GroupKey(version, group_id), size)
                self.memory.forget_images(GroupKey(version, group_id))
            kept.append(Result(version, result.dataset, result.metrics, result.seconds, []))
            if result.examples:
                self.memory.batch.put(
                    "results", number(version, position), json.dumps(asdict(kept[-1])).encode()
                )
        self.memory.results[version] = kept

    def rewound(self, step: int) -> None:
        """Discard the evaluations of versions after `step`.

        They are made again when training gets there.
        """
        for version in [v for v in self.memory.rounds if v > step]:
            round_ = self.memory.rounds[version]
            for group_id, group in round_.groups.items():
                self.memory.discard(
                    "partials" if group.state.in_work else "examples",
                    GroupKey(version, group_id),
                    group,
                )
                self.memory.forget_images(GroupKey(version, group_id))
            self._close(round_)
        for version in [v for v in self.memory.results if v > step]:
            self._delete_examples(version)
            for position in range(len(self.memory.results.pop(version))):
                self.memory.batch.delete("results", number(version, position))
