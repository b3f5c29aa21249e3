"""What is read back from the storage and sent: prompts under a lease, shards of a batch, evaluations."""

from __future__ import annotations

from sluice.wire.v1 import buffer_pb2 as pb
from sluice.wire.v1 import common_pb2
from sluice_buffer.checks import as_trained, prompt_tokens
from sluice_buffer.core import Buffer
from sluice_buffer.memory import value_key
from sluice_buffer.state import TRAINING, Key
from sluice_buffer.storage import Storage, StorageError


def leased_group(buffer: Buffer, key: Key) -> pb.LeasedGroup:
    """A prompt as its worker gets it, with what an earlier worker had generated."""
    prompt = buffer.prompts.message(key)
    group = buffer.memory.find(key)
    prompt.lease_id = buffer.lease_id(key)
    prompt.lease_attempt = group.lease_attempt if group else 0
    partial = common_pb2.SampleGroup()
    if group and group.size:
        partial.ParseFromString(buffer.storage.value("partials", value_key(key)) or b"")
    return pb.LeasedGroup(prompt=prompt, lease_seconds=buffer.job.spec.buffer.lease_seconds, partial=partial.samples)


def shard_group(storage: Storage, group_id: int, indices: list[int]) -> bytes:
    """The serialized SampleGroup that holds these samples of a group alone."""
    data = storage.value("samples", value_key(Key(TRAINING, group_id)))
    if data is None:
        raise StorageError(f"group {group_id} has no samples in the database")
    whole = common_pb2.SampleGroup.FromString(data)
    head = prompt_tokens(whole)
    part = common_pb2.SampleGroup(prompt=whole.prompt, samples=[as_trained(whole.samples[i], head) for i in indices])
    result: bytes = part.SerializeToString()
    return result


def evaluations(buffer: Buffer, after_version: int) -> list[pb.Evaluation]:
    """Complete evaluations of later versions, oldest first, with the examples that are kept."""
    found = []
    for version, results in sorted(buffer.memory.results.items()):
        if version <= after_version:
            continue
        for result in results:
            values = (buffer.storage.value("examples", value_key(Key(version, i))) for i, _ in result.examples)
            found.append(
                pb.Evaluation(
                    version=version,
                    dataset=result.dataset,
                    metrics=result.metrics,
                    seconds=result.seconds,
                    examples=[common_pb2.SampleGroup.FromString(value) for value in values if value],
                )
            )
    return found
