"""Images: a leased group gets those of its row, a worker adds others for its samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from sluice.images.image import Image
from sluice_buffer.errors import PreconditionError
from sluice_buffer.group import Group, GroupKey, GroupState, parse_lease_id
from sluice_buffer.state.images import GroupImages
from sluice_buffer.state.memory import Memory
from sluice_buffer.state.storage import StorageFullError
from sluice_buffer.transitions.leases import Leases, OnGivenUp


@dataclass(slots=True)
class Images:
    """The transitions of images on one memory."""

    memory: Memory
    leases: Leases
    give_up: OnGivenUp

    def attach(
        self,
        key: GroupKey,
        attempt: int,
        record: GroupImages,
        images: Mapping[bytes, Image],
        free_bytes: int,
        now: float,
    ) -> bool:
        """Store the images of a leased group's row.

        Returns False if the group is not sent: the lease is over, or there is no room for the
        images, and the group waits again.
        """
        group = self._leased(key, attempt)
        if group is None:
            return False
        index = self.memory.images
        space = index.space(images)
        if space > free_bytes:
            # Nothing is leased from now on until there is room for this group.
            index.largest = max(index.largest, space)
            self.leases.release(key, group, "no room for its images", blame=False)
            return False
        previous = index.groups.get(key)
        if previous and group.size:  # samples that are continued refer to images of PutImages
            record = replace(record, put=previous.put)
        index.attach(self.memory.batch, key, record, images)
        self.memory.changed = True
        self.leases.extend(group, now)
        return True

    def refuse(self, key: GroupKey, attempt: int, why: str) -> None:
        """Fail a group whose row cannot be read: another worker could not read it either."""
        group = self._leased(key, attempt)
        if group is not None:
            self.give_up(key, group, why)

    def postpone(self, key: GroupKey, attempt: int, why: str) -> None:
        """Take back the lease of a group whose images cannot be read now."""
        group = self._leased(key, attempt)
        if group is not None:
            self.leases.release(key, group, why)

    def put(self, lease_id: str, image: Image, free_bytes: int) -> None:
        """Store an image that samples of a leased group will refer to.

        Raises PreconditionError if the lease is over, StorageFullError if the image does not fit.
        """
        name = parse_lease_id(lease_id)
        group = self._leased(name.key, name.attempt) if name else None
        if name is None or group is None:
            raise PreconditionError(
                f"image.leaseId: {lease_id[:80]!r} is not a lease that is held: its images are "
                "not needed any more"
            )
        index, digest = self.memory.images, bytes.fromhex(image.digest)
        record = index.groups.get(name.key) or GroupImages(bytes(16), ())
        if digest in record.all:
            return
        space = index.space({digest: image})
        if space > free_bytes:
            raise StorageFullError(
                f"no room for an image of {len(image.data)} bytes: {free_bytes} bytes are left"
            )
        record = GroupImages(record.prompt_hash, record.of_row, (*record.put, digest))
        index.attach(self.memory.batch, name.key, record, {digest: image})
        self.memory.changed = True

    def _leased(self, key: GroupKey, attempt: int) -> Group | None:
        group = self.memory.find(key)
        held = group is not None and group.state is GroupState.LEASED
        return group if group is not None and held and group.lease_attempt == attempt else None
