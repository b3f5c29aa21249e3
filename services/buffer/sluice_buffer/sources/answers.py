"""Batches of given answers (`algorithm.loss.type: sft`, or a loss of preferences).

An answer is a sample; the two of a preference are the sequences of one sample, so they stay
together in an optimizer step and on a rank. They pass through the same transitions as groups of
workers. Rows are encoded on a separate thread, those of the next batch while the present one is
trained. Their images are read there, too, and stored with the samples.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from sluice.api import RLJobSpec
from sluice.api.groups.data import PromptSource
from sluice.data import answers, chat
from sluice.data.answers import Encoded
from sluice.data.chat import PromptError
from sluice.data.preferences import JudgedRow, named_answers, preference_of
from sluice.data.rows import PromptRow, RowError
from sluice.data.vocabulary import check_ids, embedding_size, surplus, tokenizer_size
from sluice.images.image import Image
from sluice.images.processor import ImageProcessor
from sluice.runtime.pod_env import ConfigurationError
from sluice.samples.sample import PROMPT_TOO_LONG, Sample, SampleStatus, TokenSequence
from sluice.telemetry import logs
from sluice.wire import codec
from sluice.wire.v1 import common_pb2 as pb
from sluice_buffer.group import TRAINING, GroupKey, lease_id
from sluice_buffer.rules.admission import AdmissionPolicy
from sluice_buffer.sources.prompts import Prompts, PromptWithImages, RowUnavailableError
from sluice_buffer.state.images import GroupImages
from sluice_buffer.state.memory import Memory
from sluice_buffer.state.storage import StorageFullError
from sluice_buffer.transitions.leases import Leases
from sluice_buffer.transitions.submits import SubmitOutcome, Submits

# Why a row is left out if all of its answers are masked (counted as `filtered_nothing_trained`).
NOTHING_TRAINED = "nothing_trained"
# First rows of a source that are encoded at the start. The job is refused at once if all of them
# fail.
TRIED_ROWS = 8
# Rows left out that the log names for each source. All are counted.
SHOWN = 10
# Bytes of images that are in memory: of rows that are prepared, and of those that a transition
# stores. Further rows are prepared when they are needed, and stored by further transitions.
AHEAD_BYTES = 256 << 20
# How often, and after which pauses in seconds, images are read whose storage fails.
TRIES, PAUSE_SECONDS = 5, 2.0


@dataclass(frozen=True, slots=True)
class Prepared:
    """A row as a group of one sample.

    `prompt` has the images that are stored with it.
    """

    group: pb.SampleGroup
    prompt: PromptWithImages

    @property
    def image_bytes(self) -> int:
        return sum(len(image.data) for image in self.prompt.images.values())


@dataclass(slots=True)
class Answers:
    """The job's rows as samples. A LocalSource (local_groups.py).

    Parameters
    ----------
    longest
        Tokens that a row may have.
    truncation
        End of a longer row that is cut off; None: such a row is left out.
    embedding
        Tokens of the model's embedding; None if not known.
    stops
        Texts of the tokens at which an engine ends a turn.
    processor
        Image processor of the model; None if rows have no images.
    left_out
        Rows left out since one was trained.

    """

    prompts: Prompts
    tokenizer: Any
    longest: int
    truncation: Literal["left", "right"] | None = None
    embedding: int | None = None
    stops: Sequence[str] = ()
    processor: ImageProcessor | None = None
    evaluates = True
    refused: Counter[str] = field(default_factory=Counter)
    left_out: int = 0
    _thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="encode")
    )
    # None: not prepared ahead, because others have enough images already.
    _soon: dict[int, Future[Prepared | None]] = field(default_factory=dict)
    _closing: threading.Event = field(default_factory=threading.Event)

    @classmethod
    def load(cls, spec: RLJobSpec, prompts: Prompts) -> Answers:
        """Load the tokenizer and try the first rows. Raises ConfigurationError.

        User code does not run in the buffer, so a tokenizer that comes with code is refused.
        """
        directory = Path(spec.model.path)
        try:
            tokenizer = chat.load_tokenizer(directory)
        except ConfigurationError as error:
            hint = (
                "; code that comes with a tokenizer does not run in the buffer"
                if spec.model.trust_remote_code
                else ""
            )
            raise ConfigurationError(f"spec.model.path: {error}{hint}") from error
        context = chat.context_length(directory)
        longest = min(spec.data.max_prompt_tokens or context, context)
        embedding = embedding_size(directory)
        if warning := surplus(tokenizer_size(tokenizer), embedding):
            logs.get().warning(f"spec.model.path: {directory}: {warning}")
        answers = cls(
            prompts,
            tokenizer,
            longest,
            spec.data.truncation,
            embedding,
            chat.stop_tokens(tokenizer, directory),
            ImageProcessor(directory) if spec.data.images else None,
        )
        answers.check()
        return answers

    def check(self) -> None:
        """Raise ConfigurationError if none of a source's first rows can be encoded.

        The message says what is wrong with the first of them.
        """
        for position, source in enumerate(self.prompts.sources):
            problems = []
            for number, row in self.prompts.first(position, TRIED_ROWS):
                try:
                    self._encode(row, source)
                    break
                except PromptError as error:
                    problems.append(f"{_where(source, number)}: {error}")
            else:
                raise ConfigurationError(f"spec.data.prompts[{position}]: {problems[0]}")
        for position in range(len(self.prompts.held_out)):
            count = min(self.prompts.held_out_size(position), TRIED_ROWS)
            errors = [self._held_out(position, at).samples[0].error for at in range(count)]
            if all(errors):
                raise ConfigurationError(f"spec.evaluation.heldOut[{position}]: {errors[0]}")

    def limit(self, policy: AdmissionPolicy) -> AdmissionPolicy:
        return policy

    def prepare(self, memory: Memory, policy: AdmissionPolicy) -> Future[None] | None:
        begin, count = memory.progress.next_group, policy.batch_size - len(memory.finished)
        end = begin + count if policy.stream_end is None else min(begin + count, policy.stream_end)
        for group_id in range(begin, end):
            self._begin(group_id)
        waited = self._soon.get(end - 1)
        return (
            cast("Future[None]", waited) if waited else None
        )  # the thread encodes one row after the other

    def fill(
        self,
        step: int,
        memory: Memory,
        leases: Leases,
        submits: Submits,
        free_bytes: Callable[[], int],
    ) -> None:
        """Submit the groups that batch `step` lacks.

        A row that cannot be trained makes room for the next one. Raises ConfigurationError if a
        whole epoch has no row that can be trained.
        """
        while (lacking := leases.policy.batch_size - len(memory.finished)) > 0:
            keys = leases.fill(lacking, step - 1)
            if not keys:
                return
            stored = 0
            for position, key in enumerate(keys):
                try:
                    if stored > AHEAD_BYTES:
                        raise StorageFullError("the next transition stores it")
                    stored += self._hand_in(key, memory, submits, free_bytes())
                except StorageFullError:
                    for later in keys[position:]:
                        leases.release(
                            later, memory.groups[later.group_id], "no room for it", blame=False
                        )
                    return
        self.prepare(memory, leases.policy)

    def _hand_in(self, key: GroupKey, memory: Memory, submits: Submits, free_bytes: int) -> int:
        """Submit a row with its images, whose bytes are returned. Raises StorageFullError."""
        self._begin(key.group_id)
        prepared = self._soon[key.group_id].result()
        if prepared is None:
            self._soon[key.group_id] = self._thread.submit(self._prepared, key.group_id)
            prepared = self._soon[key.group_id].result()
        assert prepared
        message = prepared.group
        free_bytes -= _attach(key, prepared, memory, free_bytes)
        message.prompt.lease_id = lease_id(key, 0, memory.groups[key.group_id].lease_attempt)
        answer = submits.submit(message.SerializeToString(), free_bytes)
        del self._soon[key.group_id]
        self._count(answer.outcome, message)
        return prepared.image_bytes

    def _count(self, outcome: SubmitOutcome, message: pb.SampleGroup) -> None:
        if outcome is SubmitOutcome.STORED:
            self.left_out = 0
            return
        self.left_out += 1
        why = message.samples[0].error
        self.refused[message.prompt.dataset] += 1
        if self.refused[message.prompt.dataset] <= SHOWN:
            logs.get().warning("row left out", error=why)
        if self.left_out >= self.prompts.order.epoch_size:
            raise ConfigurationError(
                f"spec.data.prompts: no row of a whole epoch can be trained; the last: {why}"
            )

    def held_out(self, dataset: int, at: int) -> Future[bytes]:
        """Encode a row of `evaluation.heldOut` as a serialized group of one sample."""
        return self._thread.submit(lambda: self._held_out(dataset, at).SerializeToString())

    def close(self) -> None:
        self._closing.set()
        self._thread.shutdown(cancel_futures=True)

    # -- on the encoding thread, the only one that reads files of training rows

    def _begin(self, group_id: int) -> None:
        if group_id not in self._soon:
            self._soon[group_id] = self._thread.submit(self._ahead, group_id)

    def _ahead(self, group_id: int) -> Prepared | None:
        """Prepare a row, unless those that are prepared already have enough images."""
        done = [future.result() for future in list(self._soon.values()) if future.done()]
        if sum(prepared.image_bytes for prepared in done if prepared) > AHEAD_BYTES:
            return None
        return self._prepared(group_id)

    def _prepared(self, group_id: int) -> Prepared:
        try:
            prompt, row, source = self._read(group_id)
        except RowError as error:  # an image of it
            message = self.prompts.message(GroupKey(TRAINING, group_id))
            prompt, sample = PromptWithImages(message, {}), _refused(str(error))
        else:
            images = [prompt.images[bytes.fromhex(name)] for name in prompt.message.images]
            sample = self._sample(row, source, prompt.message.row, images)
            if isinstance(row, JudgedRow) and sample.status is SampleStatus.COMPLETED:
                # That of the row before, so that it is the same after a restart.
                before, row, source = self._read(group_id - 1 if group_id else 1)
                other = self._sample(row, source, before.message.row, [])
                sample.branches = self._mismatched(sample, other)
        return Prepared(
            pb.SampleGroup(prompt=prompt.message, samples=[codec.sample_to_message(sample)]), prompt
        )

    def _read(self, group_id: int) -> tuple[PromptWithImages, Any, PromptSource]:
        """Read a row with its images, again after a while if their storage fails."""
        for _ in range(TRIES - 1):
            try:
                return self.prompts.training(group_id)
            except RowUnavailableError as error:
                logs.get().warning("images cannot be read", error=str(error))
                if self._closing.wait(PAUSE_SECONDS):
                    break
        return self.prompts.training(group_id)

    def _held_out(self, dataset: int, at: int) -> pb.SampleGroup:
        """Return a held-out row as a group of one sample, which has failed if it is no use."""
        message, row, source = self.prompts.held_out_row(dataset, at)
        sample = self._sample(row, source, message.row, [])
        rows = self.prompts.held_out_size(dataset)
        if isinstance(row, JudgedRow) and sample.status is SampleStatus.COMPLETED and rows > 1:
            prompt, row, source = self.prompts.held_out_row(dataset, at - 1 if at else 1)
            other = self._sample(row, source, prompt.row, [])
            sample.branches = self._mismatched(sample, other)
        return pb.SampleGroup(prompt=message, samples=[codec.sample_to_message(sample)])

    def _mismatched(self, sample: Sample, other: Sample) -> list[TokenSequence]:
        """Return the prompt with the answer to another one, with which kto estimates a KL.

        There is none if that row cannot be trained, or if it is too long.
        """
        own = sample.tokens[: sample.prompt_length]
        if other.status is not SampleStatus.COMPLETED:
            return []
        if len(own) + other.response_length > self.longest:
            return []
        answer = other.tokens[other.prompt_length :]
        return [
            TokenSequence(
                tokens=np.concatenate([own, answer]),
                response_length=other.response_length,
                loss_mask=other.loss_mask,
                rollout_log_probs=other.rollout_log_probs,
            )
        ]

    def _sample(
        self, row: Any, source: PromptSource, number: int, images: Sequence[Image]
    ) -> Sample:
        """Return the row as a sample, or a failed sample with the reason if it is not trained."""
        where = _where(source, number)
        try:
            encoded = self._encode(row, source)
            added = self._added(images)
        except PromptError as error:
            return _refused(f"{where}: {error}")
        # A cut might leave a part of an image.
        if self.truncation and not images:
            encoded = [answers.cut(answer, self.longest, self.truncation) for answer in encoded]
        size = max(len(answer.tokens) for answer in encoded) + added
        if size > self.longest:
            why = (
                f"{size} tokens, at most {self.longest} fit (data.maxPromptTokens, or the model's "
                "context)"
            )
            return _refused(f"{where}: {why}", PROMPT_TOO_LONG)
        if not all(any(answer.mask) for answer in encoded):
            return _refused(f"{where}: no token of it is trained", NOTHING_TRAINED)
        sample = sample_of(*encoded, preference=preference_of(row))
        sample.images, sample.image_tokens = [image.digest for image in images], added
        return sample

    def _encode(self, row: PromptRow, source: PromptSource) -> list[Encoded]:
        """Encode the answers of a row; a preference has two. Raises PromptError."""
        result = []
        for name, answer in named_answers(row):
            try:
                encoded = answers.encode(
                    self.tokenizer,
                    answer,
                    chat_text=source.apply_chat_template,
                    arguments=source.chat_template_args,
                    stops=self.stops,
                )
                check_ids(self.tokenizer, encoded.tokens, self.embedding)
                if self.processor:
                    placeholder = self.processor.placeholder
                    answers.check_places(self.tokenizer, encoded, placeholder, len(row.images))
            except PromptError as error:
                raise PromptError(f"{name}: {error}" if name else str(error)) from error
            result.append(encoded)
        return result

    def _added(self, images: Sequence[Image]) -> int:
        """Return the tokens that images add. Raises PromptError if the model refuses one."""
        if self.processor is None or not images:
            return 0
        try:
            return self.processor.added([(image.width, image.height) for image in images])
        except ValueError as error:
            raise PromptError(str(error)) from error


def _attach(key: GroupKey, prepared: Prepared, memory: Memory, free_bytes: int) -> int:
    """Store the images of a row that is trained, and return the bytes that they take.

    Raises StorageFullError.
    """
    prompt = prepared.prompt
    if not prompt.images or prepared.group.samples[0].status == pb.SAMPLE_STATUS_FAILED:
        return 0
    space = memory.images.space(prompt.images)
    if space > free_bytes:
        raise StorageFullError(f"no room for the images of group {key.group_id}")
    digests = tuple(map(bytes.fromhex, prompt.message.images))
    memory.images.attach(memory.batch, key, GroupImages(prompt.hash, digests), prompt.images)
    memory.changed = True
    return space


def sample_of(encoded: Encoded, *others: Encoded, preference: float = 0.0) -> Sample:
    """Make a sample of answers; the others are its branches.

    preference: what the row says about them (`preference_of`), which is the sample's reward.
    """
    return Sample(
        index=0,
        response=encoded.answer,
        reward=preference,
        status=SampleStatus.COMPLETED,
        branches=[TokenSequence(**_sequence(other)) for other in others],
        **_sequence(encoded),
    )


def _sequence(encoded: Encoded) -> dict[str, Any]:
    """Return the tokens of an answer, whose response begins with the first trained token.

    It was not sampled, so its log-probs are 0.
    """
    start = encoded.mask.index(1)
    length = len(encoded.tokens) - start
    return {
        "tokens": np.asarray(encoded.tokens, dtype=np.int32),
        "response_length": length,
        "loss_mask": np.asarray(encoded.mask[start:], dtype=np.uint8),
        "rollout_log_probs": np.zeros(length, dtype=np.float32),
    }


def _refused(why: str, filtered: str = "") -> Sample:
    sample = Sample(index=0, metadata={"filtered": filtered} if filtered else {})
    sample.fail(why)
    return sample


def _where(source: PromptSource, number: int) -> str:
    return f"{source.path or source.source_name}: row {number}"
