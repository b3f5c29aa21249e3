"""Prompt, Sample, SampleGroup: the data that flows from prompts to training."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from sluice import input_checks
from sluice.input_checks import InputError, without_surrogates

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
UInt8 = npt.NDArray[np.uint8]
# [rows, layers x experts of a token]: numbers of experts.
Experts = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]
# A chat: `[{"role": ..., "content": ...}, ...]` as in the OpenAI and Hugging Face conventions.
Messages = list[dict[str, Any]]
# Name of the reward part that identifies the answer (verl's name): a number, equal for equal
# answers.
PREDICTION = "pred"
# Key of a sample's metadata for the reward of the greedy response to its prompt, which only the
# estimator remax uses.
BASELINE_REWARD = "baseline_reward"

# Key of the metadata of a group's first sample: the worker that submitted it, and so the engine
# that finished it.
WORKER = "rollout_worker"
# Key of the metadata of a group's first sample: the share of the group's time in which its worker's
# main thread, which all groups, functions and the gateway share, was computing.
WORKER_BUSY = "worker_busy"
# Key of the metadata of a group's first sample: seconds for which its worker had been in the tail
# of the batch when it submitted the group.
WORKER_TAIL = "worker_tail"
# Key of the metadata of a group's first sample: seconds that its engine took for a token of one of
# its responses.
ENGINE_LATENCY = "engine_latency"
# Keys of the metadata of a group's first sample, with speculative decoding: tokens of responses,
# and the passes of the model that have made them.
SPECULATED_TOKENS, SPECULATIVE_PASSES = "speculated_tokens", "speculative_passes"
# Why a worker filtered a group (metadata `filtered` of its first sample): its prompt does not fit.
PROMPT_TOO_LONG = "prompt_too_long"


# Above 0 because engines compute log-probs of bfloat16 logits, with rounding.
MAX_LOG_PROB = 0.1
# Far below any sampled token: its probability is 0 in float64 too.
MIN_LOG_PROB = -1e4
# Most tokens that one image adds: far above those of any processor.
MAX_IMAGE_TOKENS = 1 << 16
_DIGEST = re.compile(r"[0-9a-f]{64}")


def compact(experts: npt.NDArray[Any]) -> Experts:
    """Store numbers in one byte each, or in two.

    `experts` is [rows, n] integers. Raises ValueError if two bytes are not enough.
    """
    low, high = (int(experts.min()), int(experts.max())) if experts.size else (0, 0)
    if low < 0 or high > np.iinfo(np.uint16).max:
        raise ValueError(f"numbers of experts from {low} to {high}")
    small = high <= np.iinfo(np.uint8).max
    return experts.astype(np.uint8) if small else experts.astype(np.uint16)


class SampleStatus(enum.StrEnum):
    """Progress of a sample (slime's words)."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"

    @property
    def finished(self) -> bool:
        """True if no more tokens will be generated."""
        return self in (SampleStatus.COMPLETED, SampleStatus.TRUNCATED, SampleStatus.FAILED)


class Purpose(enum.StrEnum):
    TRAIN = "train"
    EVALUATE = "evaluate"


class SampleError(ValueError):
    """The sample breaks an invariant. The message names the field."""


@dataclass(frozen=True, slots=True)
class WeightSpan:
    """Response tokens [start, end) were generated under weight version `version`."""

    version: int
    start: int
    end: int


@dataclass(slots=True)
class Prompt:
    """A row of a prompt file, under a lease."""

    group_id: int
    prompt: str | Messages
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)
    tools: list[dict[str, Any]] | None = None
    dataset: str = ""
    row: int = 0
    epoch: int = 0
    purpose: Purpose = Purpose.TRAIN
    # Weight version that is evaluated; only for purpose `evaluate`.
    version: int = 0
    lease_id: str = ""
    lease_attempt: int = 0
    # Digests of the images that the messages refer to, in their order.
    images: list[str] = field(default_factory=list)


def _empty(dtype: type[np.generic]) -> Any:
    return lambda: np.empty(0, dtype=dtype)


@dataclass(slots=True, kw_only=True)
class TokenSequence:
    """The tokens of a prompt and a response, and the values of each response token.

    Parameters
    ----------
    tokens
        [prompt + response] int32.
    loss_mask
        [response] 0 or 1.
    rollout_log_probs
        [response] float32: log-probabilities under the temperature-scaled distribution that the
        token was drawn from.
    teacher_log_probs
        [response] float32, of a teacher that a worker has asked
        (`algorithm.distillation.teacher.url`); 0 for masked tokens.
    routed_experts
        Experts of the first tokens, at most all but the last (`trainer.routingReplay`).
    seat
        Seat of `rollout.seats` that these tokens were played from; empty if the job has no seats.
    images
        Digests of the images, in the order of their placeholders in `tokens`, one token each.
    image_tokens
        Tokens that the images add once each placeholder is as long as its image.

    """

    tokens: Int32 = field(default_factory=_empty(np.int32))
    response_length: int = 0
    loss_mask: UInt8 = field(default_factory=_empty(np.uint8))
    rollout_log_probs: Float32 = field(default_factory=_empty(np.float32))
    weight_versions: list[WeightSpan] = field(default_factory=list)
    teacher_log_probs: Float32 | None = None
    routed_experts: Experts | None = None
    seat: str = ""
    images: list[str] = field(default_factory=list)
    image_tokens: int = 0

    @property
    def prompt_length(self) -> int:
        return len(self.tokens) - self.response_length

    @property
    def length(self) -> int:
        """Number of tokens that the trainer sees: each placeholder is as long as its image."""
        return len(self.tokens) + self.image_tokens

    def append(
        self,
        tokens: list[int],
        log_probs: list[float],
        spans: list[WeightSpan],
        *,
        trainable: bool = True,
    ) -> None:
        """Add response tokens.

        Tokens that are not `trainable` (tool output) get mask 0 and log-prob 0. `spans` count
        positions from the first of the new tokens.
        """
        if trainable and len(log_probs) != len(tokens):
            raise SampleError(
                f"rolloutLogProbs: {len(log_probs)} log-probs for {len(tokens)} new tokens"
            )
        start = self.response_length
        self.tokens = np.concatenate([self.tokens, np.asarray(tokens, dtype=np.int32)])
        mask = np.full(len(tokens), 1 if trainable else 0, dtype=np.uint8)
        new = np.asarray(log_probs if trainable else [0.0] * len(tokens), dtype=np.float32)
        self.loss_mask = np.concatenate([self.loss_mask, mask])
        self.rollout_log_probs = np.concatenate([self.rollout_log_probs, new])
        self.response_length += len(tokens)
        for span in spans:
            self._append_span(WeightSpan(span.version, start + span.start, start + span.end))

    def _append_span(self, span: WeightSpan) -> None:
        last = self.weight_versions[-1] if self.weight_versions else None
        if last and last.version == span.version and last.end == span.start:
            self.weight_versions[-1] = WeightSpan(last.version, last.start, span.end)
        else:
            self.weight_versions.append(span)

    def cut(self, response_length: int) -> None:
        """Drop all response tokens after the first `response_length`."""
        self.tokens = self.tokens[: self.prompt_length + response_length]
        self.loss_mask = self.loss_mask[:response_length]
        self.rollout_log_probs = self.rollout_log_probs[:response_length]
        if self.teacher_log_probs is not None:
            self.teacher_log_probs = self.teacher_log_probs[:response_length]
        if self.routed_experts is not None:
            self.routed_experts = self.routed_experts[: max(len(self.tokens) - 1, 0)]
        kept = [span for span in self.weight_versions if span.start < response_length]
        self.weight_versions = [
            WeightSpan(s.version, s.start, min(s.end, response_length)) for s in kept
        ]
        self.response_length = response_length

    def sampled_by(self, version: int) -> UInt8:
        """Return a [response] mask, 1 for tokens that the weights of this version sampled."""
        mask = np.zeros(self.response_length, np.uint8)
        for span in self.weight_versions:
            mask[span.start : span.end] = span.version == version
        return mask

    def check_sequence(self, name: str) -> None:
        """Raise SampleError if an invariant of the tokens is broken.

        `name` names this sequence in the message.
        """
        n = self.response_length
        if not 0 <= n <= len(self.tokens):
            raise SampleError(f"{name}.responseLength: {n} with {len(self.tokens)} tokens in all")
        if n and n == len(self.tokens):
            raise SampleError(f"{name}.responseLength: {n}, without a prompt token before them")
        per_token: dict[str, Any] = {
            "lossMask": self.loss_mask,
            "rolloutLogProbs": self.rollout_log_probs,
            "teacherLogProbs": self.teacher_log_probs,
        }
        for key, values in per_token.items():
            if values is not None and len(values) != n:
                raise SampleError(f"{name}.{key}: {len(values)} entries for {n} response tokens")
        if n and int(self.loss_mask.max()) > 1:
            raise SampleError(f"{name}.lossMask: entries must be 0 or 1")
        if len(self.tokens) and int(self.tokens.min()) < 0:
            raise SampleError(f"{name}.tokens: a token id is negative")
        self._check_log_probs(name)
        experts = self.routed_experts
        if experts is not None and len(experts) > max(len(self.tokens) - 1, 0):
            raise SampleError(
                f"{name}.routedExperts: {len(experts)} rows for {len(self.tokens)} tokens, of "
                "which the last has none"
            )
        self._check_spans(name)
        self._check_images(name)

    def _check_images(self, name: str) -> None:
        count = len(self.images)
        for position, digest in enumerate(self.images):
            if not _DIGEST.fullmatch(digest):
                raise SampleError(
                    f"{name}.images[{position}]: expected a digest of 64 hexadecimal digits, found "
                    f"{digest[:80]!r}"
                )
        if count > len(self.tokens):
            raise SampleError(
                f"{name}.images: {count} images for {len(self.tokens)} tokens; each has one "
                "placeholder"
            )
        if not 0 <= self.image_tokens <= count * MAX_IMAGE_TOKENS:
            raise SampleError(
                f"{name}.imageTokens: {self.image_tokens} for {count} images, expected 0 to "
                f"{count * MAX_IMAGE_TOKENS}"
            )

    def _check_log_probs(self, name: str) -> None:
        trained = self.loss_mask.astype(bool)
        log_probs = {
            "rolloutLogProbs": self.rollout_log_probs,
            "teacherLogProbs": self.teacher_log_probs,
        }
        for key, values in log_probs.items():
            if values is None or not trained.any():
                continue
            low, high = float(values[trained].min()), float(values[trained].max())
            if not (np.isfinite(low) and np.isfinite(high)):
                raise SampleError(f"{name}.{key}: a trainable token has no finite log-prob")
            if low < MIN_LOG_PROB or high > MAX_LOG_PROB:
                raise SampleError(
                    f"{name}.{key}: log-probs from {low:g} to {high:g}, expected {MIN_LOG_PROB:g} "
                    f"to {MAX_LOG_PROB:g}"
                )

    def _check_spans(self, name: str) -> None:
        at = 0
        for span in self.weight_versions:
            if span.start != at or span.end <= span.start:
                raise SampleError(
                    f"{name}.weightVersions: span [{span.start}, {span.end}) does not start at {at}"
                )
            if span.version < 0:
                raise SampleError(f"{name}.weightVersions: {span.version} is not a version")
            at = span.end
        if self.weight_versions and at != self.response_length:
            raise SampleError(
                f"{name}.weightVersions: cover {at} of {self.response_length} response tokens"
            )


_TOKENS = tuple(item.name for item in fields(TokenSequence))


@dataclass(slots=True)
class Sample(TokenSequence):
    """A response to a prompt.

    Parameters
    ----------
    branches
        Further sequences of the same response if it is a tree: an agent's conversation that was
        rendered anew, or was continued twice from one place. They share prefixes with the sample's
        own tokens and with one another; each sampled token is unmasked in exactly one sequence.
    seat_rewards
        Reward of each seat (`rollout.seats`) that has sequences here; `reward` is then the reward
        of the whole episode.

    """

    index: int
    response: str = ""
    reward: float | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)
    status: SampleStatus = SampleStatus.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    branches: list[TokenSequence] = field(default_factory=list)
    seat_rewards: dict[str, float] = field(default_factory=dict)

    @property
    def sequences(self) -> list[TokenSequence]:
        """The sample's own tokens, and its branches."""
        return [self, *self.branches]

    @property
    def named_sequences(self) -> list[tuple[str, TokenSequence]]:
        """The sequences, each with its name in messages."""
        name = f"samples[{self.index}]"
        branches = [(f"{name}.branches[{i}]", branch) for i, branch in enumerate(self.branches)]
        return [(name, self), *branches]

    @property
    def trainable_tokens(self) -> int:
        """Number of trained tokens of all sequences."""
        return sum(int(sequence.loss_mask.sum()) for sequence in self.sequences)

    @property
    def versions(self) -> set[int]:
        """Weight versions of all its tokens."""
        return {span.version for sequence in self.sequences for span in sequence.weight_versions}

    def append_prompt(self, tokens: list[int]) -> None:
        """Set the prompt of a sample that has no tokens yet."""
        if len(self.tokens):
            raise SampleError(f"samples[{self.index}].tokens: the prompt is set already")
        self.tokens = np.asarray(tokens, dtype=np.int32)

    def take(self, other: Sample) -> None:
        """Take another sample's tokens with their values, and its metadata."""
        for name in (*_TOKENS, "branches"):
            setattr(self, name, getattr(other, name))
        self.metadata |= other.metadata

    def fail(self, error: str) -> None:
        """Mark the sample as failed: it counts as reward 0, and none of its tokens is trained."""
        self.status, self.reward = SampleStatus.FAILED, 0.0
        self.error = without_surrogates(error)
        self.teacher_log_probs = self.routed_experts = None
        self.loss_mask = np.zeros(self.response_length, dtype=np.uint8)
        self.branches, self.seat_rewards = [], {}

    def check(self) -> None:
        """Raise SampleError if an invariant is broken (DESIGN: data plane, Sample)."""
        self.check_tokens()
        self.check_values()
        judged = self.status in (SampleStatus.COMPLETED, SampleStatus.TRUNCATED)
        if judged and self.reward is None:
            raise SampleError(f"samples[{self.index}].reward: None on a {self.status} sample")
        seats = {sequence.seat for sequence in self.sequences if sequence.seat}
        for seat in seats - self.seat_rewards.keys() if judged else ():
            raise SampleError(f"samples[{self.index}].seatRewards[{seat}]: None")

    def check_values(self) -> None:
        """Raise SampleError if a text, a number or the metadata could not be sent or read again.

        `check_tokens` checks the tokens.
        """
        name = f"samples[{self.index}]"
        try:
            input_checks.check_text(self.response, f"{name}.response")
            input_checks.check_text(self.error, f"{name}.error")
            if not isinstance(self.metadata, dict):
                raise InputError(f"{name}.metadata: expected an object")
            input_checks.check_value(self.metadata, f"{name}.metadata")
            check_own_keys(self.metadata, f"{name}.metadata")
            if self.reward is not None:
                input_checks.reward(self.reward, f"{name}.reward")
            for part, value in self.reward_parts.items():
                input_checks.check_text(part, f"{name}.rewardParts")
                input_checks.float32(value, f"{name}.rewardParts[{part}]")
            for seat, value in self.seat_rewards.items():
                input_checks.reward(value, f"{name}.seatRewards[{seat}]")
        except InputError as error:
            raise SampleError(str(error)) from error

    def check_vocabulary(self, size: int | None) -> None:
        """Raise SampleError if a token id is not below `size`; None: the size is not known."""
        for name, sequence in self.named_sequences if size else ():
            if len(sequence.tokens) and (largest := int(sequence.tokens.max())) >= (size or 0):
                raise SampleError(
                    f"{name}.tokens: token id {largest}, expected ids below {size}, the model's "
                    "vocab_size"
                )

    def check_tokens(self) -> None:
        """Raise SampleError if an invariant of the tokens or of their values is broken."""
        for name, sequence in self.named_sequences:
            sequence.check_sequence(name)


_WORKER_NAME = re.compile(r"[^\x00-\x1f/]{0,190}-\d{1,9}")


def check_own_keys(metadata: dict[str, Any], name: str) -> None:
    """Raise InputError if a key that sluice writes has a value that a trainer cannot read."""
    worker = metadata.get(WORKER)
    if WORKER in metadata and not (isinstance(worker, str) and _WORKER_NAME.fullmatch(worker)):
        raise InputError(f"{name}.{WORKER}: expected the name of a worker, such as rollout-0")
    numbers = (WORKER_BUSY, WORKER_TAIL, ENGINE_LATENCY, SPECULATED_TOKENS, SPECULATIVE_PASSES)
    for key in (BASELINE_REWARD, *numbers):
        if key in metadata:
            input_checks.reward(metadata[key], f"{name}.{key}")


@dataclass(slots=True)
class SampleGroup:
    """All samples that answer one prompt."""

    prompt: Prompt
    samples: list[Sample] = field(default_factory=list)
    # Error of the group if it goes back unfinished because of it. It counts against the group.
    failure: str = ""

    @property
    def group_id(self) -> int:
        return self.prompt.group_id

    def check_finished(self, samples_per_prompt: int) -> None:
        """Raise SampleError unless all samples are present, finished and valid."""
        if len(self.samples) != samples_per_prompt:
            raise SampleError(
                f"samples: {len(self.samples)} samples, expected {samples_per_prompt}"
            )
        for position, sample in enumerate(self.samples):
            if sample.index != position:
                raise SampleError(f"samples[{position}].index: {sample.index}, expected {position}")
            if not sample.status.finished:
                raise SampleError(f"samples[{position}].status: {sample.status} is not finished")
            sample.check()
