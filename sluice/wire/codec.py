"""Conversion between samples and messages.

Token ids, masks and log-probs are little-endian bytes; values of any form are JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from sluice.images.image import Image
from sluice.samples.sample import (
    Experts,
    Prompt,
    Purpose,
    Sample,
    SampleError,
    SampleGroup,
    SampleStatus,
    TokenSequence,
    WeightSpan,
)
from sluice.wire.frames import SerializedGroup
from sluice.wire.v1 import common_pb2 as pb

# Size of a piece of a large message: far below gRPC's limits, and little memory for each of a
# thousand streams.
CHUNK_BYTES = 512 << 10

_STATUS = {
    SampleStatus.PENDING: pb.SAMPLE_STATUS_PENDING,
    SampleStatus.COMPLETED: pb.SAMPLE_STATUS_COMPLETED,
    SampleStatus.TRUNCATED: pb.SAMPLE_STATUS_TRUNCATED,
    SampleStatus.ABORTED: pb.SAMPLE_STATUS_ABORTED,
    SampleStatus.FAILED: pb.SAMPLE_STATUS_FAILED,
}
_STATUS_BACK = {number: status for status, number in _STATUS.items()}
_PURPOSE = {Purpose.TRAIN: pb.PURPOSE_TRAIN, Purpose.EVALUATE: pb.PURPOSE_EVALUATE}
_PURPOSE_BACK = {number: purpose for purpose, number in _PURPOSE.items()}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def prompt_to_message(prompt: Prompt) -> pb.Prompt:
    return pb.Prompt(
        lease_id=prompt.lease_id,
        lease_attempt=prompt.lease_attempt,
        purpose=_PURPOSE[prompt.purpose],
        group_id=prompt.group_id,
        epoch=prompt.epoch,
        dataset=prompt.dataset,
        row=prompt.row,
        prompt_json=_json(prompt.prompt),
        label_json="" if prompt.label is None else _json(prompt.label),
        metadata_json=_json(prompt.metadata) if prompt.metadata else "",
        tools_json=_json(prompt.tools) if prompt.tools else "",
        version=prompt.version,
        images=prompt.images,
    )


def prompt_from_message(message: pb.Prompt) -> Prompt:
    return Prompt(
        group_id=message.group_id,
        prompt=json.loads(message.prompt_json) if message.prompt_json else "",
        label=json.loads(message.label_json) if message.label_json else None,
        metadata=json.loads(message.metadata_json) if message.metadata_json else {},
        tools=json.loads(message.tools_json) if message.tools_json else None,
        dataset=message.dataset,
        row=message.row,
        epoch=message.epoch,
        purpose=_PURPOSE_BACK.get(message.purpose, Purpose.TRAIN),
        version=message.version,
        lease_id=message.lease_id,
        lease_attempt=message.lease_attempt,
        images=list(message.images),
    )


def sample_to_message(sample: Sample) -> pb.Sample:
    message = pb.Sample(
        index=sample.index,
        response=sample.response,
        reward_parts=sample.reward_parts,
        status=_STATUS[sample.status],
        metadata_json=_json(sample.metadata) if sample.metadata else "",
        error=sample.error,
        branches=[pb.Branch(**_packed(branch)) for branch in sample.branches],
        seat_rewards=sample.seat_rewards,
        **_packed(sample),
    )
    if sample.reward is not None:
        message.reward = sample.reward
    return message


def _packed(sequence: TokenSequence) -> dict[str, Any]:
    """Return the fields that samples and branches have in common."""
    taught, experts = sequence.teacher_log_probs, sequence.routed_experts
    return {
        "tokens": np.ascontiguousarray(sequence.tokens, dtype="<i4").tobytes(),
        "response_length": sequence.response_length,
        "loss_mask": np.ascontiguousarray(sequence.loss_mask, dtype=np.uint8).tobytes(),
        "rollout_log_probs": np.ascontiguousarray(
            sequence.rollout_log_probs, dtype="<f4"
        ).tobytes(),
        "weight_versions": [
            pb.WeightSpan(version=s.version, start=s.start, end=s.end)
            for s in sequence.weight_versions
        ],
        "teacher_log_probs": b""
        if taught is None
        else np.ascontiguousarray(taught, dtype="<f4").tobytes(),
        "routed_experts": None if experts is None else _experts_to_message(experts),
        "seat": sequence.seat,
        "images": sequence.images,
        "image_tokens": sequence.image_tokens,
    }


def _experts_to_message(experts: Experts) -> pb.RoutedExperts:
    width = experts.dtype.itemsize
    ids = np.ascontiguousarray(experts, dtype=f"<u{width}").tobytes()
    return pb.RoutedExperts(ids=ids, rows=len(experts), bytes_per_id=width)


def _experts_from_message(message: pb.RoutedExperts, field: str) -> Experts:
    """Raise SampleError if the bytes are not a table of so many rows."""
    cells = message.rows * message.bytes_per_id
    if message.bytes_per_id not in (1, 2) or not cells or len(message.ids) % cells:
        raise SampleError(
            f"{field}: {len(message.ids)} bytes are not {message.rows} rows of numbers of "
            f"{message.bytes_per_id} bytes"
        )
    ids: Experts = np.frombuffer(message.ids, dtype=f"<u{message.bytes_per_id}")
    return ids.reshape(message.rows, -1)


def sample_from_message(message: pb.Sample) -> Sample:
    name = f"samples[{message.index}]"
    return Sample(
        index=message.index,
        response=message.response,
        reward=message.reward if message.HasField("reward") else None,
        reward_parts=dict(message.reward_parts),
        status=_STATUS_BACK.get(message.status, SampleStatus.PENDING),
        metadata=json.loads(message.metadata_json) if message.metadata_json else {},
        error=message.error,
        branches=[
            TokenSequence(**_unpacked(branch, f"{name}.branches[{number}]"))
            for number, branch in enumerate(message.branches)
        ],
        seat_rewards=dict(message.seat_rewards),
        **_unpacked(message, name),
    )


def _unpacked(message: pb.Sample | pb.Branch, name: str) -> dict[str, Any]:
    """Return the fields of a `TokenSequence`. Raises SampleError."""
    taught = message.teacher_log_probs
    return {
        "tokens": _array(message.tokens, "<i4", f"{name}.tokens"),
        "response_length": message.response_length,
        "loss_mask": _array(message.loss_mask, "u1", f"{name}.lossMask"),
        "rollout_log_probs": _array(message.rollout_log_probs, "<f4", f"{name}.rolloutLogProbs"),
        "weight_versions": [WeightSpan(s.version, s.start, s.end) for s in message.weight_versions],
        "teacher_log_probs": _array(taught, "<f4", f"{name}.teacherLogProbs") if taught else None,
        "routed_experts": _experts_from_message(message.routed_experts, f"{name}.routedExperts")
        if message.HasField("routed_experts")
        else None,
        "seat": message.seat,
        "images": list(message.images),
        "image_tokens": message.image_tokens,
    }


def _array(data: bytes, dtype: str, field: str) -> Any:
    if len(data) % np.dtype(dtype).itemsize:
        raise SampleError(f"{field}: {len(data)} bytes are not a whole number of {dtype} values")
    return np.frombuffer(data, dtype=dtype)


def group_to_message(group: SampleGroup) -> pb.SampleGroup:
    return pb.SampleGroup(
        prompt=prompt_to_message(group.prompt),
        samples=[sample_to_message(s) for s in group.samples],
        failure=group.failure,
    )


def group_from_message(message: pb.SampleGroup | SerializedGroup) -> SampleGroup:
    return SampleGroup(
        prompt=prompt_from_message(message.prompt),
        samples=[sample_from_message(s) for s in message.samples],
        failure=message.failure,
    )


def image_to_message(image: Image, lease_id: str = "") -> pb.Image:
    """Return the message of an image; `lease_id` is that of PutImages."""
    return pb.Image(
        digest=image.digest,
        media_type=image.media_type,
        width=image.width,
        height=image.height,
        data=image.data,
        lease_id=lease_id,
    )


def image_from_message(message: pb.Image) -> Image:
    """Return the image of a message.

    Raises SampleError if its digest is not that of its bytes.
    """
    image = Image(message.media_type, message.width, message.height, message.data)
    if image.digest != message.digest:
        raise SampleError(
            f"image.digest: {message.digest[:80]!r}, and the SHA-256 of its {len(image.data)} "
            f"bytes is {image.digest}"
        )
    return image


def to_chunks(key: int, *parts: bytes | bytearray | memoryview) -> Iterator[pb.Chunk]:
    """Split a serialized message into pieces of at most CHUNK_BYTES.

    `parts` are the message's bytes, which need not be joined first. An empty message has one piece,
    too.
    """
    views = [memoryview(part) for part in parts if len(part)]
    size = sent = sum(map(len, views))
    if not size:
        yield pb.Chunk(key=key, last=True)
    for view in views:
        for start in range(0, len(view), CHUNK_BYTES):
            piece = bytes(view[start : start + CHUNK_BYTES])
            first = sent == size
            sent -= len(piece)
            yield pb.Chunk(key=key, data=piece, last=not sent, size=size if first else 0)


class Assembler:
    """Joins the pieces of messages; pieces of several keys may be interleaved."""

    def __init__(self, max_bytes: int = (2 << 30) - 1) -> None:
        """Limit each message to `max_bytes`; protobuf itself takes at most 2 GiB."""
        self._whole: dict[int, bytearray] = {}
        self._filled: dict[int, int] = {}
        self._max_bytes = max_bytes

    def add(self, chunk: pb.Chunk) -> bytes | bytearray | None:
        """Add a piece, and return the whole message if it was the last one.

        Raises SampleError if the message is larger than the limit, or its pieces do not have the
        announced size.
        """
        key, piece = chunk.key, chunk.data
        if key not in self._whole:
            if chunk.size > self._max_bytes:
                raise SampleError(
                    f"a message of {chunk.size} bytes; the limit is {self._max_bytes}"
                )
            if chunk.last and chunk.size == len(piece):
                return piece
            self._whole[key], self._filled[key] = bytearray(chunk.size), 0
        whole, at = self._whole[key], self._filled[key]
        end = at + len(piece)
        if end > len(whole) or (chunk.last and end < len(whole)):
            self.drop(key)
            raise SampleError(f"got {end} bytes of a message of {len(whole)} bytes")
        whole[at:end] = piece
        self._filled[key] = end
        if not chunk.last:
            return None
        self.drop(key)
        return whole

    def holds(self, key: int) -> bool:
        """True if some pieces of the message have come."""
        return key in self._whole

    def drop(self, key: int) -> None:
        """Forget the pieces of a message that will not be completed."""
        self._whole.pop(key, None)
        self._filled.pop(key, None)
