"""Batches of given answers (`algorithm.loss.type: sft`, or a loss of preferences).

An answer is a sample; the two of a preference are the sequences of one sample, so they stay
together in an optimizer step and on a rank. They pass through the same transitions as groups of
workers. Rows are encoded on a separate thread, those of the next batch while the present one is
trained.
"""

from __future__ import annotations

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
from sluice.data.preferences import named_answers
from sluice.data.rows import PromptRow
from sluice.data.vocabulary import check_ids, embedding_size, surplus, tokenizer_size
from sluice.runtime.pod_env import ConfigurationError
from sluice.samples.sample import PROMPT_TOO_LONG, Sample, SampleStatus, TokenSequence
from sluice.telemetry import logs
from sluice.wire import codec
from sluice.wire.v1 import common_pb2 as pb
from sluice_buffer.group import GroupKey, lease_id
from sluice_buffer.rules.admission import AdmissionPolicy
from sluice_buffer.sources.prompts import Prompts
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
    left_out
        Rows left out since one was trained.

    """

    prompts: Prompts
    tokenizer: Any
    longest: int
    truncation: Literal["left", "right"] | None = None
    embedding: int | None = None
    stops: Sequence[str] = ()
    evaluates = True
    refused: Counter[str] = field(default_factory=Counter)
    left_out: int = 0
    _thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="encode")
    )
    _soon: dict[int, Future[pb.SampleGroup]] = field(default_factory=dict)

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
        stops = chat.stop_tokens(tokenizer, directory)
        answers = cls(prompts, tokenizer, longest, spec.data.truncation, embedding, stops)
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
            for position, key in enumerate(keys):
                try:
                    self._hand_in(key, memory, submits, free_bytes())
                except StorageFullError:
                    for later in keys[position:]:
                        leases.release(
                            later, memory.groups[later.group_id], "no room for it", blame=False
                        )
                    return
        self.prepare(memory, leases.policy)

    def _hand_in(self, key: GroupKey, memory: Memory, submits: Submits, free_bytes: int) -> None:
        self._begin(key.group_id)
        message = self._soon[key.group_id].result()
        message.prompt.lease_id = lease_id(key, 0, memory.groups[key.group_id].lease_attempt)
        answer = submits.submit(message.SerializeToString(), free_bytes)
        del self._soon[key.group_id]
        if answer.outcome is SubmitOutcome.STORED:
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

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    # -- on the encoding thread, the only one that reads files of training rows

    def _begin(self, group_id: int) -> None:
        if group_id not in self._soon:
            self._soon[group_id] = self._thread.submit(self._group, group_id)

    def _group(self, group_id: int) -> pb.SampleGroup:
        prompt, row, source = self.prompts.training(group_id)
        return pb.SampleGroup(
            prompt=prompt, samples=[codec.sample_to_message(self._sample(row, source, prompt.row))]
        )

    def _sample(self, row: Any, source: PromptSource, number: int) -> Sample:
        """Return the row as a sample, or a failed sample with the reason if it is not trained."""
        where = _where(source, number)
        try:
            encoded = self._encode(row, source)
        except PromptError as error:
            return _refused(f"{where}: {error}")
        if self.truncation:
            encoded = [answers.cut(answer, self.longest, self.truncation) for answer in encoded]
        size = max(len(answer.tokens) for answer in encoded)
        if size > self.longest:
            why = (
                f"{size} tokens, at most {self.longest} fit (data.maxPromptTokens, or the model's "
                "context)"
            )
            return _refused(f"{where}: {why}", PROMPT_TOO_LONG)
        if not all(any(answer.mask) for answer in encoded):
            return _refused(f"{where}: no token of it is trained", NOTHING_TRAINED)
        return sample_of(*encoded)

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
            except PromptError as error:
                raise PromptError(f"{name}: {error}" if name else str(error)) from error
            result.append(encoded)
        return result


def sample_of(encoded: Encoded, *others: Encoded) -> Sample:
    """Make a sample of answers; the others are its branches."""
    return Sample(
        index=0,
        response=encoded.answer,
        reward=0.0,
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
