"""Submissions: a worker submits a finished group, or returns an unfinished one."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from sluice.samples.sample import PREDICTION, PROMPT_TOO_LONG, SampleError
from sluice.wire.frames import SerializedGroup
from sluice.wire.v1 import common_pb2 as pb
from sluice_buffer.group import TRAINING, Group, GroupKey, GroupState, LeaseName, parse_lease_id
from sluice_buffer.rules.admission import AdmissionPolicy
from sluice_buffer.rules.checks import (
    UNLIMITED,
    AnyGroup,
    GroupFacts,
    Limits,
    check_finished,
    check_partial,
    oldest_version,
    progress,
)
from sluice_buffer.rules.filters import dynamic_filter, worker_filter
from sluice_buffer.rules.staleness import outdated, places_left
from sluice_buffer.rules.voting import votes
from sluice_buffer.state.memory import Memory
from sluice_buffer.state.storage import StorageFullError, footprint
from sluice_buffer.transitions.failures import Drops, Failures
from sluice_buffer.transitions.leases import Leases
from sluice_buffer.transitions.rounds import Rounds

# A group up to this size is parsed at once, which is faster; a larger one sample by sample, which
# takes less memory.
_PARSED_WHOLE_BYTES = 1 << 20


class SubmitOutcome(enum.Enum):
    STORED = "stored"
    DUPLICATE = "duplicate"
    FILTERED = "filtered"
    STALE = "stale"
    REFUSED = "refused"


Bytes = bytes | bytearray


@dataclass(frozen=True, slots=True)
class SubmitAnswer:
    outcome: SubmitOutcome
    message: str = ""


def submit_outcome(group: Group, attempt: int) -> SubmitOutcome | None:
    """Return the answer to a submit that need not be read; None if the group is welcome.

    `attempt` is the number of the submitter's lease. Finished work is not wasted: an older lease
    may still submit its group while no other worker has it.
    """
    match group.state:
        case GroupState.LEASED:
            return None if group.lease_attempt == attempt else SubmitOutcome.STALE
        case GroupState.WAITING:
            return None
    return SubmitOutcome.DUPLICATE if group.lease_attempt == attempt else SubmitOutcome.STALE


@dataclass(slots=True)
class Submits:
    """The transitions of submitted and returned groups on one memory."""

    memory: Memory
    policy: AdmissionPolicy
    leases: Leases
    rounds: Rounds
    failures: Failures
    drops: Drops
    # Groups of an epoch. If so many in a row are left out as too long, no prompt fits.
    epoch_size: int
    # True if a prompt is the one that a group was leased with.
    is_leased: Callable[[GroupKey, pb.Prompt], bool]
    too_long: int = 0

    def submit(self, data: Bytes, free_bytes: int) -> SubmitAnswer:
        """Take a finished group.

        Raises StorageFullError if it is larger than `free_bytes`.
        """
        answer = self._submit(data, free_bytes)
        if answer.outcome in (SubmitOutcome.DUPLICATE, SubmitOutcome.STALE, SubmitOutcome.REFUSED):
            self.memory.count(f"submits_{answer.outcome.value}")
        return answer

    def _submit(self, data: Bytes, free_bytes: int) -> SubmitAnswer:
        message, problem = _parse(data)
        if message is None:
            return SubmitAnswer(SubmitOutcome.REFUSED, problem)
        name = parse_lease_id(message.prompt.lease_id)
        if name is None or name.key.group_id != message.prompt.group_id:
            return SubmitAnswer(
                SubmitOutcome.REFUSED,
                f"prompt.leaseId: {message.prompt.lease_id!r} is not a lease of this group",
            )
        group = self.memory.find(name.key)
        early = self._early(name, group)
        if early is not None or group is None:
            return early or SubmitAnswer(SubmitOutcome.STALE)
        try:
            if not (self._is_local(name.key) or self.is_leased(name.key, message.prompt)):
                raise SampleError("prompt: not the one that was leased")
            limits = self._limits(name.key)
            checked = check_finished(message, self._samples(name.key), group.version, limits)
        except SampleError as error:
            if group.state is GroupState.LEASED:
                self.leases.release(name.key, group, f"refused: {error}")
            return SubmitAnswer(SubmitOutcome.REFUSED, str(error))
        if footprint(len(data)) > free_bytes:
            raise StorageFullError(
                f"no room for group {name.key.group_id} of {len(data)} bytes: {free_bytes} bytes "
                "are left"
            )
        self.memory.discard("partials", name.key, group)
        if name.key.round != TRAINING:
            return self._finish_evaluation(name.key, group, data, message, checked)
        return self._finish_training(name.key, group, data, message, checked)

    def _early(self, name: LeaseName, group: Group | None) -> SubmitAnswer | None:
        """Return the answer if the group need not be read; None if this lease may finish it."""
        if group is not None:
            if (
                name.key.round != TRAINING
                and self.memory.rounds[name.key.round].serial != name.serial
            ):
                return SubmitAnswer(SubmitOutcome.STALE, "the evaluation was started anew")
            outcome = submit_outcome(group, name.attempt)
            return SubmitAnswer(outcome) if outcome else None
        if name.key.round != TRAINING:
            return SubmitAnswer(
                SubmitOutcome.DUPLICATE
                if name.key.round in self.memory.results
                else SubmitOutcome.STALE
            )
        match self.memory.over_state(name.key.group_id):
            case None:
                return SubmitAnswer(
                    SubmitOutcome.REFUSED,
                    f"prompt.groupId: group {name.key.group_id} was never leased",
                )
            case GroupState.TRAINED:
                return SubmitAnswer(SubmitOutcome.DUPLICATE)
            case _:
                return SubmitAnswer(SubmitOutcome.FILTERED, "dropped before")

    def _samples(self, key: GroupKey) -> int:
        return (
            self.policy.samples_per_prompt
            if key.round == TRAINING
            else self.rounds.samples_per_prompt(key)
        )

    def _is_local(self, key: GroupKey) -> bool:
        """True for samples that the buffer makes itself, even from a dump with other prompts."""
        return self.leases.local_samples and key.round == TRAINING

    def _limits(self, key: GroupKey) -> Limits:
        """Bounds of what may be submitted now."""
        progress = self.memory.progress
        vocabulary = progress.vocabulary or UNLIMITED.vocabulary
        images = self.memory.images.known_to(key)
        if self._is_local(key):
            return Limits(UNLIMITED.newest, vocabulary, images)
        # Weights reach engines before their step is committed, but not before its batch is fixed.
        # Batches stay fixed if the trainer is rewound. They are fixed in the order of their steps.
        last_fixed = next(reversed(self.memory.batches), 0)
        return Limits(max(progress.step, last_fixed), vocabulary, images)

    def _finish_training(
        self, key: GroupKey, group: Group, data: Bytes, message: AnyGroup, checked: GroupFacts
    ) -> SubmitAnswer:
        memory = self.memory
        memory.count("groups_submitted")
        reason = worker_filter(message.samples[0].metadata_json)
        if reason == PROMPT_TOO_LONG:
            self._note_too_long(message.prompt.dataset, checked.errors[:1])
        if reason is None and checked.all_failed:
            self.failures.fail(key, group, checked.errors[0])
            return SubmitAnswer(SubmitOutcome.FILTERED, f"failed: {group.note}")
        if not checked.all_failed:
            self.failures.usable()
            self.too_long = 0
        reason = reason or dynamic_filter(
            self.drops.filter_name, checked.rewards, checked.seat_rewards
        )
        if reason is not None:
            self.drops.drop(key, group, reason)
            return SubmitAnswer(SubmitOutcome.FILTERED, f"filtered: {reason}")
        if checked.errors:
            memory.count("samples_failed", len(checked.errors))
        group.version = checked.oldest
        if self._too_old(key, group.version):
            memory.count("groups_outdated")
            group.note = ""
            self.leases.release(key, group, "its weights are too old", blame=False)
            return SubmitAnswer(
                SubmitOutcome.STALE,
                f"version {group.version} is older than rollout.maxStaleness allows; it is "
                "generated again",
            )
        group.summary, group.note = checked.summary, ""
        memory.dropped.clear()
        memory.store("samples", key, group, data)
        memory.move(key, group, GroupState.FINISHED)
        return SubmitAnswer(SubmitOutcome.STORED)

    def _too_old(self, key: GroupKey, version: int) -> bool:
        """True if a group with tokens of `version` cannot be trained in time.

        Such groups come from engines that get older weights again after a rewind of the trainer,
        and from workers that submit after their lease has expired.
        """
        memory = self.memory
        if outdated(self.policy, version=memory.progress.step, start_version=version):
            return True
        return self.policy.strict and not places_left(
            self.policy,
            step=memory.next_batch,
            version=version,
            outstanding=memory.schedule.outstanding(without=key.group_id),
        )

    def _note_too_long(self, dataset: str, errors: list[str]) -> None:
        self.memory.count(f"prompts_too_long:{dataset}")
        self.too_long += 1
        if self.too_long >= self.epoch_size and not self.memory.dead_end:
            self.memory.dead_end = (
                f"no prompt of a whole epoch fits ({self.too_long}); the last: {''.join(errors)}"
            )

    def give_up(self, key: GroupKey, group: Group, why: str) -> None:
        """Fail a group that came back too often, with the reason of the last time."""
        self.memory.discard("partials", key, group)
        self.failures.fail(key, group, why)
        if key.round != TRAINING:
            self.rounds.fail(key, group)

    def _finish_evaluation(
        self, key: GroupKey, group: Group, data: Bytes, message: AnyGroup, checked: GroupFacts
    ) -> SubmitAnswer:
        group.summary, group.note = checked.summary, votes(_answers(message))
        if self.rounds.is_example(key):
            self.memory.store("examples", key, group, data)
        else:
            self.memory.forget_images(key)
        self.memory.move(key, group, GroupState.FINISHED)
        self.memory.count("evaluation_groups")
        self.rounds.finish(key)
        return SubmitAnswer(SubmitOutcome.STORED)

    def refuse(self, prompt: pb.Prompt, why: str) -> None:
        """Take back the lease of a group that could not be read.

        `why` is the reason that its worker is given.
        """
        name = parse_lease_id(prompt.lease_id)
        group = self.memory.find(name.key) if name else None
        if (
            name
            and group
            and group.state is GroupState.LEASED
            and group.lease_attempt == name.attempt
        ):
            self.memory.count("submits_refused")
            self.leases.release(name.key, group, why)

    def give_back(self, data: Bytes, free_bytes: int) -> tuple[bool, str]:
        """Take an unfinished group back, with its samples so far: (accepted, why not)."""
        message, problem = _parse(data)
        if message is None:
            return False, problem
        name = parse_lease_id(message.prompt.lease_id)
        group = self.memory.find(name.key) if name else None
        if (
            name is None
            or group is None
            or group.state is not GroupState.LEASED
            or group.lease_attempt != name.attempt
        ):
            return False, "the lease is not held any more"
        if name.key.round != TRAINING and self.memory.rounds[name.key.round].serial != name.serial:
            return False, "the evaluation was started anew"
        self.memory.count("groups_returned")
        if message.failure:
            self.leases.release(name.key, group, message.failure)
            return True, ""
        try:
            check_partial(message, self._samples(name.key), self._limits(name.key))
        except SampleError as error:
            self.leases.release(name.key, group, f"returned broken: {error}")
            return False, str(error)
        return self._keep_partial(name.key, group, data, message, free_bytes)

    def _keep_partial(
        self, key: GroupKey, group: Group, data: Bytes, message: AnyGroup, free_bytes: int
    ) -> tuple[bool, str]:
        generated = progress(message)
        before = int(group.note or 0)
        if generated <= before:
            self.leases.release(key, group, "returned without progress", blame=False)
            return True, ""
        if footprint(len(data)) > free_bytes:
            self.leases.release(key, group, "no room for its partial response", blame=False)
            return (
                False,
                "the storage is full: the prompt was taken back without the partial response",
            )
        oldest = oldest_version(message)
        version = group.version if oldest is None else oldest
        self.memory.discard("partials", key, group)
        if key.round == TRAINING and self._too_old(key, version):
            group.note = ""
            self.leases.release(key, group, "its weights are too old", blame=False)
            return False, f"version {version} is too old: the prompt was taken back without it"
        self.memory.store("partials", key, group, data)
        group.version = version
        group.note = str(generated)
        self.leases.release(key, group, "returned", blame=False)
        return True, ""


def _answers(message: AnyGroup) -> list[float | None]:
    """Return the answer of each sample, as its reward gave it; None if it has none."""
    return [
        None
        if sample.status == pb.SAMPLE_STATUS_FAILED
        else dict(sample.reward_parts).get(PREDICTION)
        for sample in message.samples
    ]


def _parse(data: Bytes) -> tuple[AnyGroup | None, str]:
    try:
        whole = len(data) <= _PARSED_WHOLE_BYTES
        return pb.SampleGroup.FromString(data) if whole else SerializedGroup(data), ""
    except DecodeError as error:
        return None, f"not a SampleGroup: {error}"
