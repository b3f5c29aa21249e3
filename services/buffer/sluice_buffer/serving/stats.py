"""A buffer in numbers, for whoever watches the job."""

from __future__ import annotations

from sluice.wire.v1 import buffer_pb2 as pb
from sluice_buffer.core import Buffer
from sluice_buffer.group import GroupState
from sluice_buffer.rules.admission import admitted

_ALWAYS = (
    "groups_submitted",
    "groups_returned",
    "groups_outdated",
    "leases_granted",
    "leases_expired",
    "samples_failed",
    "stale_groups",
    "steps_redone",
    "submits_duplicate",
    "submits_stale",
    "submits_refused",
    "rewinds",
    "storage_full",
)


def stats(buffer: Buffer) -> pb.BufferStats:
    """The answer to Stats, but for the bytes under way, which only the service knows."""
    memory, progress = buffer.memory, buffer.memory.progress
    newest = max(memory.results, default=None)
    results = memory.results[newest] if newest is not None else []
    buffer.room.bytes()  # a new look at the capacity
    return pb.BufferStats(
        step=progress.step,
        total_steps=buffer.batches.last_step,
        version=progress.step,
        checkpoint_step=progress.checkpoint_step,
        trainer_attempt=progress.trainer_attempt,
        depth=len(memory.finished),
        leases=len(memory.deadlines),
        returned=memory.counts[GroupState.WAITING],
        started=memory.kept,
        admitted=admitted(buffer.policy, progress.step),
        counters=counters(buffer),
        metrics=progress.metrics,
        evaluation={f"eval/{result.dataset}": result.metrics["reward"] for result in results},
        policy_lag=progress.lag,
        stored_bytes=memory.stored,
        capacity_bytes=buffer.room.capacity,
        epoch=max(0, progress.next_group - 1) // buffer.prompts.order.epoch_size,
        waiting_for=buffer.waiting_for(),
        failed=progress.failed,
    )


def counters(buffer: Buffer) -> dict[str, int]:
    """Totals since the job's start: fates of groups and samples, and rare events."""
    memory = buffer.memory
    return {
        **dict.fromkeys(_ALWAYS, 0),
        **memory.progress.counters,
        "commits": buffer.storage.commits,
        "groups_leased": memory.progress.next_group,
        "groups_trained": memory.trained,
        "samples_trained": memory.trained * buffer.policy.samples_per_prompt,
        "groups_filtered": memory.counts[GroupState.FILTERED],
        "groups_failed": memory.counts[GroupState.FAILED],
        "groups_in_work": memory.counts[GroupState.LEASED] + memory.counts[GroupState.WAITING],
        "groups_stored": memory.stored_groups,
        "groups_lost": memory.lost,
        "groups_trained_twice": memory.twice,
    }
