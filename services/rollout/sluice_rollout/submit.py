"""Sends groups to the buffer: finished ones to be trained, unfinished ones to be leased again."""

from __future__ import annotations

from dataclasses import dataclass, field

from sluice.api import RLJobSpec
from sluice.samples.sample import (
    ENGINE_LATENCY,
    SPECULATED_TOKENS,
    SPECULATIVE_PASSES,
    WORKER,
    WORKER_BUSY,
    WORKER_TAIL,
    Purpose,
    Sample,
    SampleGroup,
    SampleStatus,
)
from sluice.telemetry import logs, tracing
from sluice.wire import codec
from sluice.wire.v1 import buffer_pb2 as pb
from sluice_rollout import metrics
from sluice_rollout.buffer import BufferClient, Outbox
from sluice_rollout.leased_group import LeasedGroup
from sluice_rollout.user_functions.filters import Filter


@dataclass(slots=True)
class Submitter:
    """The way of groups from a worker to the buffer."""

    spec: RLJobSpec
    buffer: BufferClient
    dynamic_filter: Filter
    submits: Outbox = field(init=False)
    returns: Outbox = field(init=False)

    def __post_init__(self) -> None:
        self.submits = Outbox(self.buffer.submit_stream)
        self.returns = Outbox(self.buffer.return_stream)

    async def submit(self, group: SampleGroup, leased: LeasedGroup, *, tail_seconds: float) -> None:
        """Filter a finished group and submit it. Raises FilterError."""
        if self.spec.rollout.partial.mask_off_policy:
            for sample in group.samples:
                mask_off_policy(sample)
        failed = all(sample.status is SampleStatus.FAILED for sample in group.samples)
        # Dynamic filters judge rewards of training groups, which a failed group does not have.
        if group.prompt.purpose is Purpose.TRAIN and not failed:
            reason = await self.dynamic_filter(group)
            if reason is not None:
                group.samples[0].metadata["filtered"] = reason
        group.samples[0].metadata |= {
            WORKER: self.buffer.worker,
            WORKER_BUSY: round(leased.busy_fraction, 3),
            WORKER_TAIL: round(tail_seconds, 3),
        }
        if (latency := leased.requests.latency) is not None:
            group.samples[0].metadata[ENGINE_LATENCY] = round(latency, 6)
        if passes := leased.requests.speculative_passes:
            group.samples[0].metadata |= {
                SPECULATED_TOKENS: leased.requests.tokens,
                SPECULATIVE_PASSES: passes,
            }
        # User code may have changed the prompt; the buffer gets it as it was leased.
        group.prompt = codec.prompt_from_message(leased.message.prompt)
        with tracing.span("submit"):
            answer = await self.submits.send(group)
        if (
            isinstance(answer, pb.SubmitResponse)
            and answer.outcome == pb.SubmitResponse.OUTCOME_REFUSED
        ):
            logs.get().error(
                "the buffer refused a group", group=group.group_id, reason=answer.message
            )
        leased.settled = leased.submitted = True
        metrics.GROUPS.labels("submitted").inc()

    async def give_back(self, group: SampleGroup, leased: LeasedGroup) -> None:
        """Return an unfinished or failed group, so that it is leased again."""
        await self.returns.send(group)
        leased.settled = True
        metrics.GROUPS.labels("returned").inc()


def mask_off_policy(sample: Sample) -> None:
    """Train only on tokens of the newest weights that a sample has seen.

    slime calls this mask_offpolicy_in_partial_rollout.
    """
    newest = max(sample.versions, default=0)
    for sequence in sample.sequences:
        mask = sequence.loss_mask.copy()
        for span in sequence.weight_versions:
            if span.version < newest:
                mask[span.start : span.end] = 0
        sequence.loss_mask = mask
