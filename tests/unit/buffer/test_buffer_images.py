"""Which transitions keep images and which let them go, on a real database."""

from collections.abc import Callable

import pytest

from sluice.images.image import Image
from sluice.wire.v1 import buffer_pb2 as bpb
from sluice.wire.v1 import common_pb2 as pb
from sluice_buffer.errors import CallError
from sluice_buffer.group import TRAINING, GroupKey, GroupState, parse_lease_id
from sluice_buffer.rules.admission import MAX_FAILURES
from sluice_buffer.sources.prompts import PromptWithImages
from sluice_buffer.state.storage import StorageFullError
from sluice_buffer.transitions.submits import SubmitOutcome
from tests.images import png
from tests.unit.buffer.buffer_tools import LocalBuffer, make_group, make_sample, shard_group

MakeBuffer = Callable[..., LocalBuffer]
EVERY_STEP = {"everySteps": 1, "samplesPerPrompt": 2}


def image_of(prompt: pb.Prompt) -> Image:
    """Each group's own image."""
    return png(seed=prompt.group_id + 1000 * prompt.purpose + 10_000 * prompt.version)


def attach(buffer: LocalBuffer, lease: bpb.LeasedGroup, image: Image) -> bool:
    """Store the image of a leased prompt, as the service does before it sends the lease."""
    name = parse_lease_id(lease.prompt.lease_id)
    assert name
    message = pb.Prompt(images=[image.digest])
    read = PromptWithImages(message, {bytes.fromhex(image.digest): image})
    attached = buffer.core.attach_images(name.key, name.attempt, read)
    buffer.sync()
    return attached


def lease(buffer: LocalBuffer, count: int = 1, version: int = 0) -> list[bpb.LeasedGroup]:
    leases = buffer.lease(count=count, version=version)
    for leased in leases:
        assert attach(buffer, leased, image_of(leased.prompt))
    return leases


def finished(leased: bpb.LeasedGroup, version: int = 0) -> pb.SampleGroup:
    """A group whose samples all refer to its image, which adds two tokens."""
    group = make_group(leased.prompt, version=version)
    for sample in group.samples:
        sample.images.append(image_of(leased.prompt).digest)
        sample.image_tokens = 2
    return group


def kept(buffer: LocalBuffer) -> set[str]:
    """Digests of the stored images, the same in memory and on the disk."""
    heads = {digest.hex() for digest in buffer.core.memory.images.heads}
    pieces = {key[:32].hex() for key, _ in buffer.core.storage.scan("image_pieces")}
    assert pieces == heads
    return heads


def digests(*leases: bpb.LeasedGroup) -> set[str]:
    return {image_of(leased.prompt).digest for leased in leases}


def test_images_of_a_batch_go_with_the_checkpoint_not_with_the_step(
    make_buffer: MakeBuffer,
) -> None:
    buffer = make_buffer()
    leases = lease(buffer, 4)
    for leased in leases:
        assert buffer.submit_group(finished(leased)).outcome is SubmitOutcome.STORED
    buffer.step(1)
    buffer.core.rewind(0, 2)
    buffer.restart()
    assert kept(buffer) == digests(*leases)
    assert buffer.core.take(1, 2) is None
    buffer.core.commit(1, 1, 2, {})
    buffer.core.commit_checkpoint(1, 2)
    buffer.sync()
    assert kept(buffer) == set()
    assert buffer.core.memory.images.stored == buffer.core.memory.images.total == 0


def test_an_image_of_two_groups_goes_with_the_last(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer(rollout__dynamicFilter="nonzero_std")
    first, second = buffer.lease(count=2)
    shared = png()
    for leased in (first, second):
        assert attach(buffer, leased, shared)
    assert buffer.stats.images == 1
    buffer.submit(first, reward=1.0)  # filtered
    assert kept(buffer) == {shared.digest}
    buffer.restart()
    buffer.submit(second, reward=1.0)
    assert kept(buffer) == set()


def test_a_group_that_fails_for_good_gives_its_images_up(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer()
    for _ in range(MAX_FAILURES):
        [leased] = lease(buffer)
        assert kept(buffer) == digests(leased)
        buffer.give_back(leased, failure="EngineError: engine answered 500")
    assert kept(buffer) == set()


def test_a_group_whose_storage_is_at_fault_waits_before_it_fails(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer()
    for attempt in range(1, MAX_FAILURES + 1):
        assert buffer.counters["groups_failed"] == 0
        [leased] = buffer.lease()
        assert leased.prompt.group_id == 0
        buffer.core.postpone_row(GroupKey(TRAINING, 0), attempt, "rows.jsonl:1: a.png: I/O error")
        buffer.sync()
    assert buffer.counters["groups_failed"] == 1


def test_a_waiting_group_keeps_its_images(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer()
    [leased] = lease(buffer)
    buffer.clock.now += 1000
    assert buffer.core.expire() == 1
    buffer.restart()
    assert kept(buffer) == digests(leased)
    assert not attach(buffer, leased, png(seed=5)), "the lease is over"
    assert kept(buffer) == digests(leased)


def test_images_of_evaluations_go_with_their_examples(make_buffer: MakeBuffer) -> None:
    """Examples of the three newest rounds are kept; a rewind discards rounds, finished or not."""
    buffer = make_buffer(evaluation=dict(EVERY_STEP), trainer__steps=9)
    rounds = []
    for version in range(5):
        leases = lease(buffer, 3, version)
        assert {leased.prompt.version for leased in leases} == {version}
        for leased in leases:
            buffer.submit_group(finished(leased, version))
        rounds.append(digests(*leases))
        buffer.fill(4, version=version)
        buffer.step(version + 1)
    assert kept(buffer) == rounds[2] | rounds[3] | rounds[4]
    opened = lease(buffer, 2, 5)
    assert digests(*opened) <= kept(buffer)
    buffer.core.rewind(3, 2)
    buffer.sync()
    assert kept(buffer) == rounds[2] | rounds[3]
    buffer.restart()
    assert kept(buffer) == rounds[2] | rounds[3]


def test_images_of_earlier_samples_last_as_long_as_these_are_continued(
    make_buffer: MakeBuffer,
) -> None:
    buffer = make_buffer(rollout__partial={"enabled": True})
    [leased] = lease(buffer)
    shot = png(seed=77)
    buffer.core.put_image(leased.prompt.lease_id, shot)
    sample = make_sample(0, status=pb.SAMPLE_STATUS_ABORTED, reward=None)
    sample.images.append(shot.digest)
    assert buffer.give_back(leased, [sample]) == (True, "")
    [again] = lease(buffer)
    assert kept(buffer) == {*digests(leased), shot.digest}
    with pytest.raises(CallError, match=r"'t0\.1' is not a lease that is held"):
        buffer.core.put_image(leased.prompt.lease_id, png(seed=78))
    group = finished(again)
    group.samples[1].images.append(shot.digest)
    assert buffer.submit_group(group).outcome is SubmitOutcome.STORED


def test_images_of_samples_that_are_lost_are_given_up(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer()
    [leased] = lease(buffer)
    buffer.core.put_image(leased.prompt.lease_id, png(seed=77))
    buffer.give_back(leased)
    lease(buffer)
    assert kept(buffer) == digests(leased)


def test_a_failed_sample_keeps_the_image_of_its_prompt(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer()
    leases = lease(buffer, 4)
    for leased in leases:
        group = finished(leased)
        group.prompt.images.append(image_of(leased.prompt).digest)
        group.samples[1].CopyFrom(pb.Sample(index=1, status=pb.SAMPLE_STATUS_FAILED, error="no"))
        assert buffer.submit_group(group).outcome is SubmitOutcome.STORED
    assert buffer.core.take(1, 1) is None
    buffer.sync()
    lengths = [s.length for s in buffer.core.sequences(1, 1)]
    assert lengths == [12, 0] * 4
    whole, failed = shard_group(buffer.core, 0, [0, 1]).samples
    assert list(failed.images) == list(whole.images) == [image_of(leases[0].prompt).digest]
    assert (failed.tokens, failed.image_tokens) == (whole.tokens[:16], 2)


def test_a_group_without_room_for_its_images_waits(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer(buffer__storage__size="4Mi")
    [leased] = buffer.lease()
    large = Image("image/png", 1, 1, bytes(8 << 20))
    assert not attach(buffer, leased, large)
    group = buffer.core.memory.groups[0]
    assert (group.state, group.failures) == (GroupState.WAITING, 0)
    assert buffer.lease() == [], "nothing is leased until there is room"
    assert "room in the storage" in buffer.core.waiting_for()


def test_an_image_that_does_not_fit_is_refused(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer(buffer__storage__size="4Mi")
    [leased] = lease(buffer)
    with pytest.raises(StorageFullError, match="no room for an image of 8388608 bytes"):
        buffer.core.put_image(leased.prompt.lease_id, Image("image/png", 1, 1, bytes(8 << 20)))
