"""Reads from the storage what is sent: leased prompts, shards, evaluations, failures.

Groups are sent as they are stored, cut between samples if only some are requested: a group of a
million tokens is never parsed here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sluice.wire import codec
from sluice.wire.frames import SerializedGroup, length_field, sample_field
from sluice.wire.v1 import buffer_pb2 as pb
from sluice.wire.v1 import common_pb2
from sluice_buffer.core import Buffer
from sluice_buffer.group import TRAINING, GroupKey
from sluice_buffer.rules.checks import as_trained, prompt_of
from sluice_buffer.sources.prompts import Prompts
from sluice_buffer.state.storage import Storage, StorageError, value_key

# Evaluations in one answer.
EVALUATIONS = 64
# Failures in one answer.
PAGE = 256
# Field number of LeasedGroup.partial.
_PARTIAL = 3


@dataclass(frozen=True, slots=True)
class GrantedLease:
    """A lease as it was granted; the group may have changed by the time it is sent.

    `size` is the number of bytes of the partial samples.
    """

    key: GroupKey
    attempt: int
    size: int
    # The serialized LeasedGroup without its partial samples.
    head: bytes


def granted_lease(
    buffer: Buffer, key: GroupKey, prompt: common_pb2.Prompt | None = None
) -> GrantedLease:
    """Return a lease that was just granted; `prompt` is that of the group if it was read."""
    prompt = prompt or buffer.prompts.leased(key)
    group = buffer.memory.find(key)
    attempt, size = (group.lease_attempt, group.size) if group else (0, 0)
    prompt.lease_id, prompt.lease_attempt = buffer.leases.lease_id(key), attempt
    head = pb.LeasedGroup(prompt=prompt, lease_seconds=buffer.job.spec.buffer.lease_seconds)
    return GrantedLease(key, attempt, size, head.SerializeToString())


def lease_chunks(buffer: Buffer, lease: GrantedLease, number: int) -> Iterator[common_pb2.Chunk]:
    """Return a leased prompt with the samples that an earlier worker began.

    It is empty if the lease is gone.
    """
    partial = buffer.storage.value("partials", value_key(lease.key)) if lease.size else None
    group = buffer.memory.find(lease.key)
    if group is None or group.lease_attempt != lease.attempt or len(partial or b"") != lease.size:
        return iter(())
    if partial is None:
        return codec.to_chunks(number, lease.head)
    return codec.to_chunks(number, lease.head, length_field(_PARTIAL, len(partial)), partial)


def shard_chunks(
    storage: Storage, group_id: int, requests: Iterable[tuple[int, bool]], number: int
) -> Iterator[common_pb2.Chunk]:
    """Return the SampleGroup that holds only some samples of a group.

    `requests` has (position, whether the sample failed) of each sample.
    """
    data = storage.value("samples", value_key(GroupKey(TRAINING, group_id)))
    if data is None:
        raise StorageError(f"group {group_id} has no samples in the database")
    group = SerializedGroup(data)
    parts: list[bytes | memoryview] = list(group.head())
    for position, failed in requests:
        if failed:
            prompt = prompt_of(group.samples, group.prompt.images)
            parts.append(sample_field(as_trained(group.samples[position], prompt)))
        else:
            parts.append(group.raw_sample(position))
    return codec.to_chunks(number, *parts)


def evaluations(buffer: Buffer, after_version: int) -> list[pb.Evaluation]:
    """Return complete evaluations of later versions, oldest first.

    The answer has whole versions, until there are EVALUATIONS of them.
    """
    answer: list[pb.Evaluation] = []
    for version in sorted(v for v in buffer.memory.results if v > after_version):
        if len(answer) >= EVALUATIONS:
            break
        answer += [
            pb.Evaluation(
                version=version,
                dataset=result.dataset,
                metrics=result.metrics,
                seconds=result.seconds,
                examples=len(result.examples),
            )
            for result in buffer.memory.results[version]
        ]
    return answer


def example_sizes(buffer: Buffer, version: int, dataset: str) -> list[tuple[GroupKey, int]]:
    """Return the groups of an evaluation whose samples are kept, with their bytes."""
    results = [
        result for result in buffer.memory.results.get(version, []) if result.dataset == dataset
    ]
    return [
        (GroupKey(version, group_id), size)
        for result in results
        for group_id, size in result.examples
    ]


def failures(storage: Storage, prompts: Prompts, after: int) -> Iterator[pb.Failure]:
    """Return failures with a serial number above `after`, at most PAGE of them."""
    for position, (serial, data) in enumerate(storage.numbered("failures", after + 1)):
        if position == PAGE:
            return
        record = json.loads(data)
        key = GroupKey(*record["key"])
        dataset, row = prompts.place(key)
        yield pb.Failure(
            serial=serial,
            group_id=key.group_id,
            version=key.round,
            dataset=dataset,
            row=row,
            leases=record["leases"],
            reason=record["reason"],
            time=record["time"],
        )
