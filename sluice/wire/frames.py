"""Reads a serialized SampleGroup sample by sample.

Parsing copies what it reads. A group that is read one sample at a time costs its own bytes and one
sample more; a group of a million tokens is never parsed as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

from google.protobuf.message import DecodeError

from sluice.wire.v1 import common_pb2 as pb

_PROMPT, _SAMPLES, _FAILURE = 1, 2, 3
_LAST_NUMBER = (1 << 29) - 1
# Wire type of a value that follows its length. 0 is a varint, 1 and 5 are 8 and 4 bytes.
_LENGTH = 2


@dataclass(frozen=True, slots=True)
class Frame:
    """A field of a serialized message: data[start:end], its value data[value:end]."""

    number: int
    start: int
    value: int
    end: int


def frames(data: bytes | bytearray | memoryview) -> Iterator[Frame]:
    """Yield the top-level fields of a serialized message, in order. Raises DecodeError."""
    at = 0
    while at < len(data):
        start = at
        tag, at = _varint(data, at)
        if not 0 < tag >> 3 <= _LAST_NUMBER:
            raise DecodeError(f"field number {tag >> 3} at byte {start}")
        match tag & 7:
            case 2:
                size, value = _varint(data, at)
                at = value + size
            case 0:
                value = at
                _, at = _varint(data, at)
            case 1:
                value, at = at, at + 8
            case 5:
                value, at = at, at + 4
            case kind:
                raise DecodeError(f"field of kind {kind} at byte {start}")
        if at > len(data):
            raise DecodeError("the message is cut off")
        yield Frame(tag >> 3, start, value, at)


def length_field(number: int, size: int) -> bytes:
    """Return the bytes before a value of `size` bytes in field `number`."""
    return _packed(number << 3 | _LENGTH) + _packed(size)


def _varint(data: bytes | bytearray | memoryview, at: int) -> tuple[int, int]:
    """Return (value, position after it)."""
    result = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise DecodeError("the message is cut off")
        byte = data[at]
        at += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result, at
        shift += 7


def _packed(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


class Samples(Sequence[pb.Sample]):
    """The samples of a serialized group; each is parsed when it is accessed."""

    def __init__(self, values: Sequence[memoryview]) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    @overload
    def __getitem__(self, index: int) -> pb.Sample: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[pb.Sample]: ...
    def __getitem__(self, index: int | slice) -> pb.Sample | Sequence[pb.Sample]:
        if isinstance(index, slice):
            return Samples(self._values[index])
        sample: pb.Sample = pb.Sample.FromString(self._values[index])
        return sample


class SerializedGroup:
    """A serialized SampleGroup.

    `prompt`, `samples` and `failure` are those of the parsed message.
    """

    def __init__(self, data: bytes | bytearray) -> None:
        """Index the bytes. Raises DecodeError if they are not a SampleGroup."""
        view = memoryview(data)
        self.data = view
        self.fields = list(frames(view))
        self.prompt = pb.Prompt()
        self.failure = ""
        for field in self.fields:
            if field.number == _PROMPT:
                self.prompt.MergeFromString(view[field.value : field.end])
            elif field.number == _FAILURE:
                self.failure = bytes(view[field.value : field.end]).decode(errors="replace")

    @cached_property
    def samples(self) -> Samples:
        return Samples([self.data[f.value : f.end] for f in self._sample_fields])

    @cached_property
    def _sample_fields(self) -> list[Frame]:
        return [field for field in self.fields if field.number == _SAMPLES]

    def head(self) -> list[memoryview]:
        """Return the group's bytes without its samples."""
        return [self.data[f.start : f.end] for f in self.fields if f.number == _PROMPT]

    def raw_sample(self, position: int) -> memoryview:
        """Return a sample's bytes, with the tag that makes them a part of a group."""
        field = self._sample_fields[position]
        return self.data[field.start : field.end]


def sample_field(sample: pb.Sample) -> bytes:
    """Return a sample as a part of a serialized group."""
    value: bytes = sample.SerializeToString()
    return length_field(_SAMPLES, len(value)) + value


def prompt_of_beginning(data: bytes) -> pb.Prompt | None:
    """Return the prompt from a group's first bytes; None if it is not among them."""
    try:
        tag, at = _varint(data, 0)
        size, at = _varint(data, at)
        if tag != _PROMPT << 3 | _LENGTH or at + size > len(data):
            return None
        prompt: pb.Prompt = pb.Prompt.FromString(data[at : at + size])
        return prompt
    except DecodeError:
        return None
