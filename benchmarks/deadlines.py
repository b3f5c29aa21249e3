"""The cost in waiting of a `maxStaleness` that holds for every sample: simulated, no engine runs.

    python benchmarks/deadlines.py [--steps 400] [--batch 32] [--seeds 3]

Engines have places for so many batches of groups at a time, and every response gets a token each
`TOKEN_SECONDS`, however many there are. A group takes as long as the longest of its eight
responses. The trainer takes a batch, trains it for as long as the engines need for one on average,
and asks for the next; running responses go on under the new weights. The batch and the order in
which groups are started come from the buffer's own rules; *before* is the rule that it had before
it knew due steps: wait for groups that would be too old for the next batch, take the lowest ids.

  step    seconds of a step
  waits   share of the time that the trainer waits for a batch
  late    share of the time that a batch's worth has finished and the batch waits all the same
  stale   groups that were trained although they were older than the bound, of all trained
  oldest  the most steps that a group was behind
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from sluice_buffer.rules.admission import AdmissionPolicy, may_start
from sluice_buffer.rules.staleness import earliest, stale, stragglers

SAMPLES = 8
TOKEN_SECONDS = 0.01
Draw = Callable[[random.Random], float]
# Tokens of a response. even: 400. tail: half below 150. long tail: half below 90, 1 % of 4,096.
LENGTHS: dict[str, Draw] = {
    "even": lambda r: max(r.gauss(400, 40), 1),
    "tail": lambda r: r.lognormvariate(5.0, 0.9),
    "long tail": lambda r: 4096 if r.random() < 0.01 else r.lognormvariate(4.5, 0.9),
}
# maxStaleness, and the batches that the engines have places for.
SETTINGS = [(1, 2), (2, 2), (2, 3), (4, 3), (4, 5), (8, 5), (8, 9)]


@dataclass
class Groups:
    """Groups that are generated or finished: the version of each."""

    in_work: dict[int, int] = field(default_factory=dict)
    finished: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rule:
    """How a batch is made."""

    waits: Callable[[AdmissionPolicy, int, Groups], bool]
    choose: Callable[[Mapping[int, int], int], list[int]]


def waits_for_the_next(policy: AdmissionPolicy, step: int, groups: Groups) -> bool:
    return any(step - version > policy.max_staleness for version in groups.in_work.values())


def waits_by_due_step(policy: AdmissionPolicy, step: int, groups: Groups) -> bool:
    in_work, finished = Counter(groups.in_work.values()), Counter(groups.finished.values())
    return stragglers(policy, step=step, in_work=in_work, finished=finished) is not None


def lowest(finished: Mapping[int, int], count: int) -> list[int]:
    return heapq.nsmallest(count, finished)


def due_first(finished: Mapping[int, int], count: int) -> list[int]:
    by_version = defaultdict[int, list[int]](list)
    for group_id, version in finished.items():
        by_version[version].append(group_id)
    return earliest(by_version, count)


BEFORE = Rule(waits_for_the_next, lowest)
NOW = Rule(waits_by_due_step, due_first)


@dataclass(slots=True)
class Outcome:
    """Seconds of a run, and what was trained too old."""

    total: float = 0.0
    waited: float = 0.0
    late: float = 0.0
    stale: int = 0
    oldest: int = 0


class Run:
    """A job of `steps` steps whose engines have `places` for groups."""

    def __init__(
        self, policy: AdmissionPolicy, rule: Rule, places: int, draw: Draw, seed: int
    ) -> None:
        self.policy, self.rule, self.places = policy, rule, places
        # by group, so that both rules meet the same responses
        self._draw, self._seed = draw, seed
        mean = statistics.fmean(self.seconds(group_id) for group_id in range(2000))
        self.train_seconds = mean * policy.batch_size / places
        self.groups, self.ends = Groups(), list[tuple[float, int]]()
        self.now, self.version, self.next_group = 0.0, 0, 0

    def seconds(self, group_id: int) -> float:
        chance = random.Random(f"{self._seed}.{group_id}")
        return TOKEN_SECONDS * max(self._draw(chance) for _ in range(SAMPLES))

    def start(self) -> None:
        """Fill the places, as far as groups may be started."""
        room = may_start(
            self.policy,
            version=self.version,
            worker_version=self.version,
            kept=self.next_group,
            next_group=self.next_group,
        )
        for _ in range(min(room, self.places - len(self.groups.in_work))):
            heapq.heappush(self.ends, (self.now + self.seconds(self.next_group), self.next_group))
            self.groups.in_work[self.next_group] = self.version
            self.next_group += 1

    def finish(self) -> None:
        """Go on to the end of the next group."""
        self.now, group_id = heapq.heappop(self.ends)
        self.groups.finished[group_id] = self.groups.in_work.pop(group_id)
        self.start()

    def run(self) -> Outcome:
        outcome, size = Outcome(), self.policy.batch_size
        self.start()
        for step in range(1, self.policy.total_steps + 1):
            begun = self.now
            while len(self.groups.finished) < size:
                self.finish()
            whole = self.now
            while self.rule.waits(self.policy, step, self.groups):
                self.finish()
            outcome.waited += self.now - begun
            outcome.late += self.now - whole
            for group_id in self.rule.choose(self.groups.finished, size):
                version = self.groups.finished.pop(group_id)
                outcome.stale += stale(self.policy, step=step, min_version=version)
                outcome.oldest = max(outcome.oldest, step - 1 - version)
            end = self.now + self.train_seconds
            while self.ends and self.ends[0][0] <= end:
                self.finish()
            self.now, self.version = end, step
            self.start()
        outcome.total = self.now
        return outcome


def row(outcomes: list[Outcome], steps: int, batch: int) -> str:
    total = sum(outcome.total for outcome in outcomes)
    trained = len(outcomes) * steps * batch
    too_old = sum(outcome.stale for outcome in outcomes)
    return (
        f"{total / len(outcomes) / steps:.1f} | {sum(o.waited for o in outcomes) / total:.0%} | "
        f"{sum(o.late for o in outcomes) / total:.1%} | {too_old} of {trained:,} | "
        f"{max(o.oldest for o in outcomes)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    names = ("step", "waits", "late", "stale", "oldest")
    columns = [*(f"before: {names[0]}", *names[1:]), *(f"now: {names[0]}", *names[1:])]
    print(f"| lengths | maxStaleness | places | {' | '.join(columns)} |")
    print("|---" * (3 + len(columns)) + "|")
    for name, draw in LENGTHS.items():
        for staleness, batches in SETTINGS:
            policy = AdmissionPolicy(
                batch_size=options.batch,
                samples_per_prompt=SAMPLES,
                max_staleness=staleness,
                over_sampling=1.0,
                partial=False,
                sync=False,
                total_steps=options.steps,
                stream_end=None,
            )
            cells = [
                row(
                    [
                        Run(policy, rule, batches * options.batch, draw, seed).run()
                        for seed in range(options.seeds)
                    ],
                    options.steps,
                    options.batch,
                )
                for rule in (BEFORE, NOW)
            ]
            print(f"| {name} | {staleness} | {batches} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
