"""Free space in the storage: how much there is, and whether a checkpoint can make more."""

from __future__ import annotations

from collections.abc import Callable

from sluice_buffer.state.memory import Memory
from sluice_buffer.state.storage import Storage, StorageFullError

# Seconds for which an answer of the storage about its capacity is used again.
_CAPACITY_AGE = 0.5
# Seconds for which the storage counts as full after a write failed for lack of space.
_FULL_SECONDS = 5.0


class StorageCapacity:
    """Space for groups in a job's storage.

    The `clock` counts seconds (monotonic). The buffer replaces `memory` when it reads the storage
    again.
    """

    memory: Memory

    def __init__(self, storage: Storage, batch_size: int, clock: Callable[[], float]) -> None:
        self._storage, self._batch_size, self._clock = storage, batch_size, clock
        # Bytes that groups may take, as of the last question to the storage.
        self.total_bytes = 0
        self._capacity_at = float("-inf")
        self._ceiling, self._ceiling_until = 0, float("-inf")
        # Step during which a group was last refused because it does not fit.
        self._refused_at = -1

    def free_bytes(self) -> int:
        """Return the bytes that may still be stored."""
        now = self._clock()
        if now - self._capacity_at > _CAPACITY_AGE:
            self.total_bytes, self._capacity_at = self._storage.capacity(), now
        limit = self.total_bytes
        if now < self._ceiling_until:
            limit = min(limit, self._ceiling)
        return limit - self.memory.stored_bytes

    def free_leases(self) -> int:
        """Return how many more groups may be leased so that all groups in work can be stored."""
        free = self.free_bytes()
        if free <= 0:
            return 0
        largest = self.memory.largest_group
        return max(0, free // largest - len(self.memory.deadlines)) if largest else 1 << 30

    def note_full(self, error: StorageFullError) -> None:
        """Report no free bytes for a while, because a write met a full map or disk."""
        self._ceiling = self.memory.stored_bytes
        self._ceiling_until = self._clock() + _FULL_SECONDS
        self.memory.count("storage_full")

    def note_refused(self) -> None:
        """Note that a group was refused because it does not fit."""
        self._refused_at = self.memory.progress.step

    def note_checkpoint(self) -> None:
        """Note a checkpoint: a group that was refused before may fit now."""
        self._refused_at = -1

    def checkpoint_wanted(self) -> bool:
        """True if the next batch does not fit, and a checkpoint of the last step would free space.

        An earlier checkpoint would waste time. With a later one, callers that wait for space would
        wait for ever.
        """
        memory = self.memory
        if memory.progress.step <= memory.progress.checkpoint_step:
            return False
        batch = max(
            (sum(memory.groups[i].size for i in ids) for ids in memory.batches.values()), default=0
        )
        return self.free_bytes() < batch or self.free_leases() == 0

    def waiting_for(self) -> str:
        """Describe the wait of a batch for free space."""
        usage = f"{self.memory.stored_bytes} of {self.total_bytes} bytes are used"
        return (
            f"room in the storage ({usage}): the next checkpoint frees some, or make "
            "buffer.storage.size larger"
        )

    def dead_end(self) -> str:
        """Explain why no batch will ever fit; empty if one may."""
        memory = self.memory
        nothing_to_forget = memory.progress.step == memory.progress.checkpoint_step
        no_room = self._refused_at == memory.progress.step or self._nothing_can_be_leased()
        if not (nothing_to_forget and no_room and self._storage.bounded_by_size()):
            return ""
        return (
            f"spec.buffer.storage.size: one batch does not fit. {len(memory.finished)} of "
            f"{self._batch_size} groups take {memory.stored_bytes} of {self.total_bytes} bytes, "
            "and no checkpoint can free any; make it larger (the records of the "
            f"{memory.progress.next_group} groups so far take {self._storage.record_bytes()} bytes "
            "of it)"
        )

    def _nothing_can_be_leased(self) -> bool:
        """True if a batch lacks groups, all leases are over, and there is no space for another."""
        memory = self.memory
        complete = (
            len(memory.finished) >= self._batch_size or memory.progress.step + 1 in memory.batches
        )
        full = self._clock() < self._ceiling_until
        return not (complete or full or memory.deadlines) and self.free_leases() == 0
