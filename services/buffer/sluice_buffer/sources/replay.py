"""Batches from an earlier run's dumped rollouts (`debug.replay`).

They pass through the same transitions as groups of workers. The n-th dumped step becomes the n-th
batch. Its groups get the next numbers of the stream, and the weight versions that they would have
had as step n, so that lags come out as they were. A step is read when its batch is requested.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

from sluice.runtime.pod_env import ConfigurationError
from sluice.samples.sample import SampleGroup, WeightSpan
from sluice.telemetry import rollouts
from sluice.wire import codec
from sluice_buffer.errors import PreconditionError
from sluice_buffer.group import TRAINING, GroupKey, lease_id
from sluice_buffer.rules.admission import AdmissionPolicy
from sluice_buffer.state.memory import Memory
from sluice_buffer.transitions.leases import Leases
from sluice_buffer.transitions.submits import SubmitOutcome, Submits


@dataclass(frozen=True, slots=True)
class Replay:
    """The dumped steps of a directory, in their order. A LocalSource (local_groups.py)."""

    steps: tuple[tuple[int, Path], ...]
    evaluates = False

    @classmethod
    def load(cls, directory: Path) -> Replay:
        dumps = rollouts.steps(directory)
        if not dumps:
            raise ConfigurationError(
                f"spec.debug.replay: {directory} has no step_<n>.parquet; expected the directory "
                "`rollouts` of a run with debug.dumpRollouts"
            )
        return cls(tuple(dumps.items()))

    def limit(self, policy: AdmissionPolicy) -> AdmissionPolicy:
        """Return the policy of a job whose prompts end with the dump.

        Samples keep their age and are never generated again (`partial`).
        """
        return replace(
            policy,
            sync=False,
            partial=True,
            total_steps=min(policy.total_steps, len(self.steps)),
            stream_end=len(self.steps) * policy.batch_size,
        )

    def prepare(self, memory: Memory, policy: AdmissionPolicy) -> Future[None] | None:
        return None

    def fill(
        self,
        step: int,
        memory: Memory,
        leases: Leases,
        submits: Submits,
        free_bytes: Callable[[], int],
    ) -> None:
        """Submit the groups of batch `step`, unless they were submitted before.

        It reads a file on the thread that answers all calls; in a replay only the trainer calls.
        Raises PreconditionError if the groups do not fit.
        """
        policy = leases.policy
        if memory.progress.next_group >= step * policy.batch_size or not 1 <= step <= len(
            self.steps
        ):
            return
        dumped, path = self.steps[step - 1]
        groups = self._read(path, policy)
        keys = leases.fill(len(groups), _NEWEST)
        for key, group in zip(keys, groups, strict=True):
            prompt = replace(
                group.prompt,
                group_id=key.group_id,
                lease_id=lease_id(GroupKey(TRAINING, key.group_id), 0, 1),
            )
            message = codec.group_to_message(
                SampleGroup(prompt, _moved(group, step - dumped).samples)
            )
            answer = submits.submit(message.SerializeToString(), free_bytes())
            if answer.outcome is not SubmitOutcome.STORED:
                raise PreconditionError(
                    f"{path}: group {group.group_id} is {answer.outcome.value}: {answer.message}"
                )

    def close(self) -> None:
        return

    def _read(self, path: Path, policy: AdmissionPolicy) -> list[SampleGroup]:
        try:
            groups = rollouts.read(path)
        except rollouts.DumpError as error:
            raise PreconditionError(str(error)) from error
        for what, counts, expected in (
            ("groups, rollout.batchSize", {len(groups)}, policy.batch_size),
            (
                "samples a group, rollout.samplesPerPrompt",
                {len(g.samples) for g in groups},
                policy.samples_per_prompt,
            ),
        ):
            if counts != {expected}:
                raise PreconditionError(
                    f"{path} has {', '.join(map(str, sorted(counts)))} {what} is {expected}"
                )
        return groups


# Version of a worker that never waits for newer weights.
_NEWEST = 1 << 62


def _moved(group: SampleGroup, by: int) -> SampleGroup:
    """Shift the weight versions of a group by some steps."""
    for sequence in (sequence for sample in group.samples for sequence in sample.sequences):
        sequence.weight_versions = [
            WeightSpan(max(0, s.version + by), s.start, s.end) for s in sequence.weight_versions
        ]
    return group
