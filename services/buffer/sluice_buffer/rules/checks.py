"""Check of a submitted group, and its facts. The hot path of Submit: it builds no objects.

`sluice.samples.sample` states the invariants and words the errors. This module checks the same
invariants for a whole group at once on the packed bytes; only a group that does not pass is
decoded, and then refused with the name of the field. tests/unit/buffer/test_buffer_checks.py
compares the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from sluice.input_checks import FLOAT32_MAX, MAX_REWARD, InputError, load_json
from sluice.samples.sample import (
    MAX_IMAGE_TOKENS,
    MAX_LOG_PROB,
    MIN_LOG_PROB,
    Sample,
    SampleError,
    SampleGroup,
    SampleStatus,
    check_own_keys,
)
from sluice.samples.turns import check_turns
from sluice.wire.codec import group_from_message, sample_from_message, sample_to_message
from sluice.wire.frames import SerializedGroup
from sluice.wire.v1 import common_pb2 as pb
from sluice_buffer.group import SampleFacts, pack_fact, pack_facts

# A group, parsed as a whole or sample by sample.
AnyGroup = pb.SampleGroup | SerializedGroup
# Values of so many bytes are checked at a time. One check of many bytes costs less than many
# checks, but needs a copy.
_TOGETHER_BYTES = 1 << 20
_FAILED = pb.SAMPLE_STATUS_FAILED
_JUDGED = (pb.SAMPLE_STATUS_COMPLETED, pb.SAMPLE_STATUS_TRUNCATED)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that the state of the job sets for a submitted group.

    `newest` is the newest weight version that an engine can have, `vocabulary` the number of tokens
    of the model's embedding, `images` the digests of the images that the group may refer to.
    """

    newest: int
    vocabulary: int
    images: frozenset[str] = frozenset()


UNLIMITED = Limits(newest=(1 << 63) - 1, vocabulary=1 << 31)


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """The content of a valid group."""

    # Packed SampleFacts, one for each sample.
    summary: bytes
    rewards: list[float]
    # Rewards of each sample by seat; empty for failed samples and if the job has no seats.
    seat_rewards: list[dict[str, float]]
    # The oldest weights that any token comes from.
    oldest: int
    # Why samples failed; one entry for each failed sample.
    errors: list[str]

    @property
    def all_failed(self) -> bool:
        return len(self.errors) == len(self.rewards)


def check_finished(
    message: AnyGroup, samples_per_prompt: int, version: int, limits: Limits = UNLIMITED
) -> GroupFacts:
    """Check a submitted group: any group that passes can be decoded and trained on.

    Parameters
    ----------
    message
        The group.
    samples_per_prompt
        Samples that it must have.
    version
        Weight version of samples that do not name any.
    limits
        Bounds of token ids and versions.

    Returns
    -------
    The content of the group.

    Raises
    ------
    SampleError
        If the group breaks an invariant; the message names the field.

    """
    try:
        checked = _fast(message, samples_per_prompt, version, limits)
        return checked or _slow(_decoded(message, samples_per_prompt, limits), version)
    except DecodeError as error:  # a large group is parsed sample by sample
        raise SampleError(f"not a SampleGroup: {error}") from error


def _decoded(message: AnyGroup, samples_per_prompt: int, limits: Limits) -> SampleGroup:
    """Decode the group and check it field by field. Raises SampleError."""
    for sample in message.samples:
        _metadata(sample)
    try:
        group = group_from_message(message)
    except (ValueError, RecursionError) as error:  # the prompt's JSON, or bytes that are no array
        raise error if isinstance(error, SampleError) else SampleError(f"prompt: {error}") from None
    group.check_finished(samples_per_prompt)
    for decoded in group.samples:
        _check_limits(decoded, limits)
    return group


def _check_limits(sample: Sample, limits: Limits) -> None:
    sample.check_vocabulary(limits.vocabulary)
    for name, sequence in sample.named_sequences:
        for position, digest in enumerate(sequence.images):
            if digest not in limits.images:
                raise SampleError(
                    f"{name}.images[{position}]: {digest} is not an image of this group: its row "
                    "does not have it, and PutImages has not stored it for the group's lease"
                )
    newest = max(sample.versions, default=0)
    if newest > limits.newest:
        raise SampleError(
            f"samples[{sample.index}].weightVersions: {newest}, expected at most {limits.newest}: "
            "no newer weights can be at an engine yet"
        )


def _metadata(sample: pb.Sample) -> dict[str, Any]:
    """Return the metadata of a sample, if other processes can read it. Raises SampleError."""
    if not sample.metadata_json:
        return {}
    name = f"samples[{sample.index}].metadataJson"
    try:
        metadata = load_json(sample.metadata_json, name)
        if not isinstance(metadata, dict):
            raise InputError(f"{name}: expected a JSON object")
        check_own_keys(metadata, name)
        check_turns(metadata, 1 + len(sample.branches), name)
    except InputError as error:
        raise SampleError(str(error)) from error
    return metadata


def _slow(group: SampleGroup, version: int) -> GroupFacts:
    """Return the facts of a group that the fast check cannot pass.

    Its log-probs may be NaN for tokens that are not trained.
    """
    facts, errors = [], []
    for sample in group.samples:
        failed = sample.status is SampleStatus.FAILED
        if failed:
            errors.append(sample.error or "no reason given")
        versions = sample.versions or {version}
        reward = 0.0 if failed or sample.reward is None else sample.reward
        trainable = 0 if failed else sample.trainable_tokens
        status = int(sample_to_message(sample).status)
        sequences = sample.sequences[:1] if failed else sample.sequences
        length = sum(sequence.length for sequence in sequences)
        lengths = length, sample.response_length, trainable
        added = sum(sequence.image_tokens for sequence in sequences)
        facts.append(SampleFacts(*lengths, status, reward, min(versions), max(versions), added))
    summary, oldest = pack_facts(facts), min(fact.min_version for fact in facts)
    by_seat = [
        {} if sample.status is SampleStatus.FAILED else sample.seat_rewards
        for sample in group.samples
    ]
    return GroupFacts(summary, [fact.reward for fact in facts], by_seat, oldest, errors)


def _routed(sequence: pb.Sample | pb.Branch) -> bool:
    """True if the experts are a table of fewer rows than the sequence has tokens."""
    experts = sequence.routed_experts
    cells = experts.rows * experts.bytes_per_id
    within = 0 < 4 * experts.rows < len(sequence.tokens)
    return within and experts.bytes_per_id in (1, 2) and not len(experts.ids) % cells


def _fast(
    message: AnyGroup, samples_per_prompt: int, version: int, limits: Limits
) -> GroupFacts | None:
    """Return the facts of a group that is valid beyond doubt; None otherwise."""
    samples = message.samples
    if len(samples) != samples_per_prompt:
        return None
    summary, rewards, by_seat, oldest, errors = [], [], [], [], []
    values = _Values(limits.vocabulary, limits.images)
    numbers: list[float] = []
    for position, sample in enumerate(samples):
        status, reward, seats = sample.status, sample.reward, dict(sample.seat_rewards)
        parts = [values.add(sequence, version) for sequence in (sample, *sample.branches)]
        if None in parts or sample.index != position or not _metadata_is_sound(sample):
            return None
        numbers += (reward, *seats.values())
        lengths, trained, oldest_of, newest_of = zip(*filter(None, parts), strict=True)
        length, trainable = sum(lengths), sum(trained)
        added = sum(sequence.image_tokens for sequence in (sample, *sample.branches))
        if status == _FAILED:  # kept for the batch's identity, and never trained on (`as_trained`)
            errors.append(sample.error or "no reason given")
            length, trainable, reward, seats = lengths[0], 0, 0.0, {}
            added = sample.image_tokens
        elif (
            status not in _JUDGED
            or (reward == 0.0 and not sample.HasField("reward"))
            or any(part.seat and part.seat not in seats for part in (sample, *sample.branches))
        ):
            return None
        versions = min(oldest_of), max(newest_of)
        if versions[0] < 0 or versions[1] > limits.newest:
            return None
        facts = length, sample.response_length, trainable, status, reward
        summary.append(pack_fact(*facts, *versions, added))
        rewards.append(reward)
        by_seat.append(seats)
        if sample.reward_parts and not _within(sample.reward_parts.values(), FLOAT32_MAX):
            return None
        oldest.append(versions[0])
    sound = _within(numbers, MAX_REWARD) and values.are_sound()
    return GroupFacts(b"".join(summary), rewards, by_seat, min(oldest), errors) if sound else None


@dataclass(slots=True)
class _Values:
    """Values of a group's tokens, collected to be checked together."""

    vocabulary: int
    images: frozenset[str]
    tokens: list[bytes] = field(default_factory=list)
    # Masks that are not all ones.
    masks: list[bytes] = field(default_factory=list)
    log_probs: list[bytes] = field(default_factory=list)
    size: int = 0
    sound: bool = True

    def add(
        self, sequence: pb.Sample | pb.Branch, version: int
    ) -> tuple[int, int, int, int] | None:
        """Return (tokens, trained tokens, oldest and newest version) of a sequence.

        None if its fields do not fit together.
        """
        tokens, mask, probs = sequence.tokens, sequence.loss_mask, sequence.rollout_log_probs
        n, size, taught = sequence.response_length, len(tokens), sequence.teacher_log_probs
        misshapen = size & 3 or (n and 4 * n >= size) or len(mask) != n or len(probs) != 4 * n
        misshapen = misshapen or (sequence.HasField("routed_experts") and not _routed(sequence))
        misshapen = misshapen or not self._has_known_images(sequence)
        spans = _spans(sequence.weight_versions, n, version)
        if misshapen or (taught and len(taught) != 4 * n) or spans is None:
            return None
        trainable = n
        if mask != b"\x01" * n:  # most masks are all ones, and comparing is faster than counting
            self.masks.append(mask)
            trainable = int(np.count_nonzero(np.frombuffer(mask, dtype=np.bool_)))
        self.tokens.append(tokens)
        self.log_probs += (probs, taught)
        self.size += 3 * size
        if self.size > _TOGETHER_BYTES:
            self.are_sound()
        return (size >> 2) + sequence.image_tokens, trainable, *spans

    def _has_known_images(self, sequence: pb.Sample | pb.Branch) -> bool:
        """True if the group may refer to the images, and they add a possible number of tokens."""
        count = len(sequence.images)
        if not count:
            return not sequence.image_tokens
        possible = 0 <= sequence.image_tokens <= count * MAX_IMAGE_TOKENS
        fits = 4 * count <= len(sequence.tokens)
        return possible and fits and self.images.issuperset(sequence.images)

    def are_sound(self) -> bool:
        """True if all added token ids, masks and log-probs are in their ranges."""
        self.sound = self.sound and _are_sound(
            self.tokens, self.masks, self.log_probs, self.vocabulary
        )
        self.tokens, self.masks, self.log_probs, self.size = [], [], [], 0
        return self.sound


def _spans(spans: Any, n: int, version: int) -> tuple[int, int] | None:
    """Return the (oldest, newest) version of spans; None if they leave a gap in the response."""
    if not spans:
        return version, version
    at, versions = 0, []
    for span in spans:
        start, end = span.start, span.end
        if start != at or end <= at:
            return None
        at = end
        versions.append(span.version)
    if at != n:
        return None
    return (versions[0], versions[0]) if len(versions) == 1 else (min(versions), max(versions))


def _metadata_is_sound(sample: pb.Sample) -> bool:
    try:
        _metadata(sample)
    except SampleError:
        return False
    return True


def _within(numbers: Iterable[float], largest: float) -> bool:
    """True if no magnitude is larger, or NaN."""
    return all(-largest <= number <= largest for number in numbers)


def _are_sound(
    tokens: list[bytes], masks: list[bytes], log_probs: list[bytes], vocabulary: int
) -> bool:
    ids = np.frombuffer(b"".join(tokens), dtype="<u4")  # a negative id is beyond any vocabulary
    if len(ids) and int(ids.max()) >= vocabulary:
        return False
    if masks and int(np.frombuffer(b"".join(masks), dtype=np.uint8).max(initial=0)) > 1:
        return False
    # NaN is neither. Tokens that are not trained may have it: the slow check decides.
    probs = np.frombuffer(b"".join(log_probs), dtype="<f4")
    return not len(probs) or bool(probs.min() >= MIN_LOG_PROB and probs.max() <= MAX_LOG_PROB)


def check_partial(message: AnyGroup, samples_per_prompt: int, limits: Limits = UNLIMITED) -> None:
    """Raise SampleError if returned samples could not be continued.

    Samples may be missing.
    """
    seen: set[int] = set()
    try:
        for encoded in message.samples:
            _metadata(encoded)
            sample = sample_from_message(encoded)
            if sample.index in seen or not 0 <= sample.index < samples_per_prompt:
                raise SampleError(
                    f"samples[{sample.index}].index: twice, or not below {samples_per_prompt}"
                )
            seen.add(sample.index)
            if not sample.status.finished or sample.status is SampleStatus.FAILED:
                _unjudged(sample).check()
            else:
                sample.check()
            _check_limits(sample, limits)
    except DecodeError as error:
        raise SampleError(f"not a SampleGroup: {error}") from error


def _unjudged(sample: Sample) -> Sample:
    sample.status = (
        SampleStatus.ABORTED if sample.status is not SampleStatus.FAILED else sample.status
    )
    return sample


def oldest_version(message: AnyGroup) -> int | None:
    """Return the oldest weights that any token comes from; None if there is no token yet."""
    spans = (
        span
        for sample in message.samples
        for sequence in (sample, *sample.branches)
        for span in sequence.weight_versions
    )
    return min((span.version for span in spans), default=None)


def progress(message: AnyGroup) -> int:
    """Return the number of response tokens of all samples."""
    return sum(
        sequence.response_length
        for sample in message.samples
        for sequence in (sample, *sample.branches)
    )


def as_trained(sample: pb.Sample, prompt: pb.Sample) -> pb.Sample:
    """Return a sample as it goes into a batch: a failed one with reward 0 and no trained token.

    A failed sample keeps at least the tokens of the `prompt`, and its images. It stays in the batch
    so that a batch always has batchSize x samplesPerPrompt sequences.
    """
    if sample.status != _FAILED:
        return sample
    result = sample_from_message(sample)
    if not len(result.tokens):
        result.tokens = np.frombuffer(prompt.tokens, dtype="<i4")
        result.images, result.image_tokens = list(prompt.images), prompt.image_tokens
    result.reward, result.branches, result.seat_rewards = 0.0, [], {}
    result.teacher_log_probs = result.routed_experts = None
    result.loss_mask = np.zeros(result.response_length, dtype=np.uint8)
    result.rollout_log_probs = np.nan_to_num(
        result.rollout_log_probs, nan=0.0, posinf=0.0, neginf=0.0
    )
    return sample_to_message(result)


def prompt_of(samples: Iterable[pb.Sample], images: Sequence[str]) -> pb.Sample:
    """Return a sample with the prompt's token ids alone, from the first that has any.

    A sample without images in its response is preferred, because only of such a one it is known
    how many tokens the prompt's `images` add.
    """
    found = pb.Sample()
    for sample in samples:
        prompt = sample.tokens[: len(sample.tokens) - 4 * sample.response_length]
        if prompt and len(sample.images) == len(images):
            return pb.Sample(tokens=prompt, images=images, image_tokens=sample.image_tokens)
        if prompt and not found.tokens:
            found = pb.Sample(tokens=prompt, images=sample.images[: len(images)])
    return found
