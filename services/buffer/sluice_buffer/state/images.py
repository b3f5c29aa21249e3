"""Images in the storage: each once, by its digest, for as long as a group refers to it.

An image is written in the transaction that notes which group refers to it: the group that was
leased with it, or, for an image of PutImages, the group whose lease was named. It is deleted in the
transaction in which the last of these groups gives up its samples. So every kept group finds its
images, whatever happens to the files that they came from, and no image outlives its groups. How
many groups refer to an image is not stored: it is counted at the start, from the groups' records.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sluice.images.image import Image
from sluice_buffer.group import TRAINING, GroupKey
from sluice_buffer.state.storage import (
    PIECE_BYTES,
    WriteBatch,
    footprint,
    numbers,
    pieces,
    value_key,
)

DIGEST_BYTES = 32
_MEDIA_TYPES = ("image/png", "image/jpeg", "image/webp")
_HEAD = struct.Struct("<BIIQ")
_GROUP = struct.Struct("<16sH")


@dataclass(frozen=True, slots=True)
class ImageHead:
    """What is known of a stored image without its bytes."""

    media_type: str
    width: int
    height: int
    size: int

    @classmethod
    def of(cls, image: Image) -> ImageHead:
        return cls(image.media_type, image.width, image.height, len(image.data))

    def pack(self) -> bytes:
        kind = _MEDIA_TYPES.index(self.media_type)
        return _HEAD.pack(kind, self.width, self.height, self.size)

    @classmethod
    def unpack(cls, data: bytes) -> ImageHead:
        kind, width, height, size = _HEAD.unpack(data)
        return cls(_MEDIA_TYPES[kind], width, height, size)


@dataclass(frozen=True, slots=True)
class GroupImages:
    """Digests of the images that a group may refer to.

    `of_row` are those of its prompt, in their order; `put` are those of PutImages.
    `prompt_hash` identifies the prompt that the group was leased with, so that it need not be read
    and decoded again to be compared.
    """

    prompt_hash: bytes
    of_row: tuple[bytes, ...]
    put: tuple[bytes, ...] = ()

    @property
    def all(self) -> frozenset[bytes]:
        return frozenset((*self.of_row, *self.put))

    def pack(self) -> bytes:
        return _GROUP.pack(self.prompt_hash, len(self.of_row)) + b"".join(self.of_row + self.put)

    @classmethod
    def unpack(cls, data: bytes) -> GroupImages:
        prompt_hash, count = _GROUP.unpack_from(data)
        digests = tuple(
            data[start : start + DIGEST_BYTES]
            for start in range(_GROUP.size, len(data), DIGEST_BYTES)
        )
        return cls(prompt_hash, digests[:count], digests[count:])


@dataclass(slots=True)
class ImageIndex:
    """Which images are stored, and which groups refer to them."""

    heads: dict[bytes, ImageHead] = field(default_factory=dict)
    groups: dict[GroupKey, GroupImages] = field(default_factory=dict)
    # Number of groups that refer to each image.
    users: dict[bytes, int] = field(default_factory=dict)
    # Bytes of the images' files.
    total: int = 0
    # Bytes on the disk, in whole pages.
    stored: int = 0
    # Most bytes on the disk that the images of one prompt take.
    largest: int = 0

    @classmethod
    def load(
        cls, heads: Iterable[tuple[bytes, bytes]], groups: Iterable[tuple[bytes, bytes]]
    ) -> ImageIndex:
        """Return the index of the tables `images` and `group_images`."""
        index = cls()
        for digest, data in heads:
            index._add(digest, ImageHead.unpack(data))
        for raw, data in groups:
            index._refer(_group_key(raw), GroupImages.unpack(data))
        return index

    def space(self, images: Mapping[bytes, Image]) -> int:
        """Return the bytes on the disk that those of the images take which are not stored yet."""
        return sum(
            footprint(len(image.data))
            for digest, image in images.items()
            if digest not in self.heads
        )

    def attach(
        self,
        batch: WriteBatch,
        key: GroupKey,
        record: GroupImages,
        images: Mapping[bytes, Image],
    ) -> None:
        """Store images and the record of the group that refers to them.

        `images` has at least those of the record that are not stored yet.
        """
        for digest in record.all:
            if digest not in self.heads:
                self._store(batch, digest, images[digest])
        previous = self.groups.get(key)
        self._refer(key, record)
        if previous:
            self._give_up(batch, previous)
        batch.put("group_images", value_key(key), record.pack())

    def forget(self, batch: WriteBatch, key: GroupKey) -> None:
        """Forget which images a group refers to, and delete those that no other refers to."""
        record = self.groups.pop(key, None)
        if record is not None:
            batch.delete("group_images", value_key(key))
            self._give_up(batch, record)

    def of_row(self, key: GroupKey) -> list[str]:
        """Return the digests of a group's prompt, in their order."""
        record = self.groups.get(key)
        return [digest.hex() for digest in record.of_row] if record else []

    def known_to(self, key: GroupKey) -> frozenset[str]:
        """Return the digests that samples of a group may refer to."""
        record = self.groups.get(key)
        return frozenset(digest.hex() for digest in record.all) if record else frozenset()

    def _store(self, batch: WriteBatch, digest: bytes, image: Image) -> None:
        head = ImageHead.of(image)
        batch.put("images", digest, head.pack())
        for position, piece in enumerate(pieces(image.data)):
            batch.put("image_pieces", _piece_key(digest, position), piece)
        self._add(digest, head)

    def _add(self, digest: bytes, head: ImageHead) -> None:
        self.heads[digest] = head
        self.total += head.size
        self.stored += footprint(head.size)

    def _refer(self, key: GroupKey, record: GroupImages) -> None:
        self.groups[key] = record
        for digest in record.all:
            self.users[digest] = self.users.get(digest, 0) + 1
        space = sum(footprint(self.heads[digest].size) for digest in record.all)
        self.largest = max(self.largest, space)

    def _give_up(self, batch: WriteBatch, record: GroupImages) -> None:
        for digest in record.all:
            self.users[digest] -= 1
            if not self.users[digest]:
                self._delete(batch, digest)

    def _delete(self, batch: WriteBatch, digest: bytes) -> None:
        del self.users[digest]
        head = self.heads.pop(digest)
        self.total -= head.size
        self.stored -= footprint(head.size)
        batch.delete("images", digest)
        for position in range(max(1, -(-head.size // PIECE_BYTES))):
            batch.delete("image_pieces", _piece_key(digest, position))


def parse_digest(text: str) -> bytes | None:
    """Return the bytes of a digest of 64 hexadecimal digits; None if it is none."""
    try:
        digest = bytes.fromhex(text)
    except ValueError:
        return None
    return digest if digest.hex() == text and len(digest) == DIGEST_BYTES else None


def _piece_key(digest: bytes, position: int) -> bytes:
    return digest + position.to_bytes(4, "big")


def _group_key(raw: bytes) -> GroupKey:
    """Return the group behind a key that `value_key` made."""
    if len(raw) == len(value_key(GroupKey(TRAINING, 0))):
        return GroupKey(TRAINING, *numbers(raw))
    return GroupKey(*numbers(raw[1:]))
