"""Groups that failed for good or that the dynamic filter dropped, counted by reason.

A job whose reward raises for every sample, or whose filter keeps no group, would burn prompts for
ever. After `barren_limit` failed groups in a row without one usable sample, or `filter_limit`
dropped ones without one that was kept, it is given up (`Memory.dead_end`). Those groups then wait
again, so that a user who mends the reward or the filter and starts again does not lose them.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from sluice.samples.sample import PROMPT_TOO_LONG
from sluice_buffer.group import TRAINING, Group, GroupKey, GroupState
from sluice_buffer.rules.admission import AdmissionPolicy, barren_limit, filter_limit
from sluice_buffer.rules.filters import NONZERO_STD, counter_name
from sluice_buffer.state.memory import Memory
from sluice_buffer.state.storage import number

# Failures that are kept on the disk; older ones are only counted.
KEPT = 10_000
# Reasons that are counted separately: each is a time series.
_NAMED = 50
_REASON_CHARACTERS = 500


def first_line(text: str) -> str:
    """Return the first line that is not empty, as the reason that people read."""
    lines = (line.strip() for line in text.splitlines())
    return next((line for line in lines if line), "no reason given")[:_REASON_CHARACTERS]


def reason_name(reason: str) -> str:
    """Return a reason as a label: few short words that do not differ from prompt to prompt."""
    text = re.sub(r"\S*/\S*", "", re.sub(r"^\S+ row \d+: ", "", reason))
    words = re.findall(r"[A-Za-z]+", text)
    return "_".join(words[:8])[:60] or "unnamed"


@dataclass(slots=True)
class Failures:
    """The transitions of failed groups on one memory.

    `clock` returns seconds since 1970.
    """

    memory: Memory
    policy: AdmissionPolicy
    clock: Callable[[], float]
    # Training groups that failed since the last usable sample.
    barren: list[tuple[int, Group]] = field(default_factory=list)

    def fail(self, key: GroupKey, group: Group, reason: str) -> None:
        """Count a failed group and record why it failed.

        A training group will not be trained; an evaluation group counts as wrong.
        """
        memory, progress = self.memory, self.memory.progress
        group.note = reason = first_line(reason)
        name = reason_name(reason)
        progress.failed[
            name if name in progress.failed or len(progress.failed) < _NAMED else "other"
        ] += 1
        progress.failures += 1
        record = {"key": key, "leases": group.lease_attempt, "reason": reason, "time": self.clock()}
        memory.batch.put("failures", number(progress.failures), json.dumps(record).encode())
        if progress.failures > KEPT:
            memory.batch.delete("failures", number(progress.failures - KEPT))
        memory.changed = True
        if key.round == TRAINING:
            memory.move(key, group, GroupState.FAILED)
            self.barren.append((key.group_id, group))
            self._judge()

    def usable(self) -> None:
        """Note a group that has a sample that can be trained."""
        self.barren.clear()

    def _judge(self) -> None:
        if self.memory.dead_end or len(self.barren) < barren_limit(self.policy.batch_size):
            return
        reasons = Counter(reason_name(group.note) for _, group in self.barren)
        examples = {reason_name(group.note): group.note for _, group in self.barren}
        causes = "; ".join(
            f"{count} times: {examples[name]}" for name, count in reasons.most_common(3)
        )
        self.memory.dead_end = (
            f"{len(self.barren)} groups in a row failed, and not one of their samples can be "
            f"trained. {causes}"
        )
        for group_id, group in self.barren:
            self.memory.revive(group_id, group)
        self.barren.clear()


@dataclass(slots=True)
class Drops:
    """The transitions of groups that are not worth training."""

    memory: Memory
    policy: AdmissionPolicy
    # `rollout.dynamicFilter`.
    filter_name: str | None

    def drop(self, key: GroupKey, group: Group, reason: str) -> None:
        """Drop a group, which frees its place in the batch."""
        memory = self.memory
        group.note = reason
        memory.count(f"filtered_{counter_name(reason)}")
        memory.move(key, group, GroupState.FILTERED)
        if self.filter_name and reason != PROMPT_TOO_LONG:  # a length is not the filter's decision
            memory.dropped.append((key.group_id, group))
            self._judge(self.filter_name)

    def _judge(self, name: str) -> None:
        memory = self.memory
        if memory.dead_end or len(memory.dropped) < filter_limit(self.policy.batch_size):
            return
        reasons = Counter(group.note for _, group in memory.dropped)
        counts = ", ".join(f"{count} times {reason}" for reason, count in reasons.most_common(3))
        advice = (
            "It keeps a prompt only if the rewards of its responses differ: check the reward and "
            "the labels, use easier or harder prompts, more rollout.samplesPerPrompt or a higher "
            "rollout.sampling.temperature, or leave the filter out"
            if name == NONZERO_STD
            else "Look at what it expects of a group, or leave it out"
        )
        memory.dead_end = (
            f"the dynamic filter (rollout.dynamicFilter: {name}) dropped the last "
            f"{len(memory.dropped)} groups and kept none: {counts}. {advice}"
        )
        for group_id, group in memory.dropped:
            memory.revive(group_id, group)
        memory.dropped.clear()
