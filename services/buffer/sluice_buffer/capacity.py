"""Room in the storage: how much there is, when a checkpoint would make some, and when none can."""

from __future__ import annotations

from collections.abc import Callable

from sluice_buffer.state.memory import Memory
from sluice_buffer.state.storage import Storage, StorageFullError

_CAPACITY_AGE = 0.5
_CHOKED_SECONDS = 5.0


class StorageCapacity:
    """Room for groups in a job's storage. clock: seconds (monotonic).

    memory: the present one; it changes where the storage was read again.
    """

    memory: Memory

    def __init__(self, storage: Storage, batch_size: int, clock: Callable[[], float]) -> None:
        self._storage, self._batch_size, self._clock = storage, batch_size, clock
        self.total_bytes = 0
        """Bytes that groups may take, as of the last look at the storage."""
        self._capacity_at = float("-inf")
        self._ceiling, self._ceiling_until = 0, float("-inf")
        self._refused_at = -1
        """The step during which a group last found no room."""

    def free_bytes(self) -> int:
        """Bytes that may still be stored."""
        now = self._clock()
        if now - self._capacity_at > _CAPACITY_AGE:
            self.total_bytes, self._capacity_at = self._storage.capacity(), now
        room = self.total_bytes - self.memory.stored
        return min(room, self._ceiling - self.memory.stored) if now < self._ceiling_until else room

    def free_leases(self) -> int:
        """How many more groups may be handed out so that all that are in work can be stored."""
        room = self.free_bytes()
        if room <= 0:
            return 0
        largest = self.memory.largest
        return max(0, room // largest - len(self.memory.deadlines)) if largest else 1 << 30

    def note_full(self, error: StorageFullError) -> None:
        """A write met a full map or disk although there seemed to be room: believe it
        for a while.
        """
        self._ceiling = self.memory.stored
        self._ceiling_until = self._clock() + _CHOKED_SECONDS
        self.memory.count("storage_full")

    def note_refused(self) -> None:
        """Note that a group has found no room."""
        self._refused_at = self.memory.progress.step

    def note_checkpoint(self) -> None:
        """Note that a checkpoint has made room: what found none may have some now."""
        self._refused_at = -1

    def checkpoint_wanted(self) -> bool:
        """True where the next batch has no room, and a checkpoint of the last step would make some.

        Not before: a checkpoint costs time. Not later: whoever waits for room waits for ever.
        """
        memory = self.memory
        if memory.progress.step <= memory.progress.checkpoint_step:
            return False
        batch = max(
            (sum(memory.groups[i].size for i in ids) for ids in memory.batches.values()), default=0
        )
        return self.free_bytes() < batch or self.free_leases() == 0

    def waiting_for(self) -> str:
        """Words for a batch that waits for room."""
        room = f"{self.memory.stored} of {self.total_bytes} bytes are used"
        return (
            f"room in the storage ({room}): it comes with the next checkpoint, or with a "
            "larger buffer.storage.size"
        )

    def dead_end(self) -> str:
        """Why there will never be room for a batch, in words; empty: there may be."""
        memory = self.memory
        nothing_to_forget = memory.progress.step == memory.progress.checkpoint_step
        no_room = self._refused_at == memory.progress.step or self._nothing_can_be_leased()
        if not (nothing_to_forget and no_room and self._storage.bounded_by_size()):
            return ""
        return (
            f"spec.buffer.storage.size: one batch does not fit. {len(memory.finished)} of "
            f"{self._batch_size} groups take {memory.stored} of {self.total_bytes} bytes, and "
            "no checkpoint can free any; make it larger (the records of the "
            f"{memory.progress.next_group} groups so far take {self._storage.record_bytes()} bytes "
            "of it)"
        )

    def _nothing_can_be_leased(self) -> bool:
        """True where a batch lacks groups, none is out, and there is no room to hand one out."""
        memory = self.memory
        complete = (
            len(memory.finished) >= self._batch_size or memory.progress.step + 1 in memory.batches
        )
        choked = self._clock() < self._ceiling_until
        return not (complete or choked or memory.deadlines) and self.free_leases() == 0
