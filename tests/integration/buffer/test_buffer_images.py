"""Images in the buffer's process: stored, fetched and kept as long as a group refers to them."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from sluice.images.image import Image
from sluice.wire import rpc
from sluice.wire.buffer_locator import BufferLocator
from sluice.wire.image_client import ImageClient
from sluice.wire.v1 import buffer_pb2 as pb
from sluice.wire.v1 import buffer_pb2_grpc
from sluice.wire.v1 import common_pb2 as common
from tests.images import drawn, encoded, png
from tests.unit.buffer.buffer_tools import BufferProcess, Client, make_group

Make = Callable[..., BufferProcess]
STORED = pb.SubmitResponse.OUTCOME_STORED
# Many pieces of a message, and many of the storage.
LARGE = png(1000, 900, seed=7)


class Located(BufferLocator):
    """A locator that knows the address."""

    def __init__(self, client: Client) -> None:
        super().__init__("")
        self._client = client

    async def stub(self, seconds: float) -> buffer_pb2_grpc.BufferStub:
        return self._client.stub


@asynccontextmanager
async def serving(server: BufferProcess) -> AsyncIterator[tuple[Client, ImageClient]]:
    async with Client(server.start()) as client:
        yield client, ImageClient(Located(client))


def with_images(prompt: common.Prompt, images: list[Image], tokens: int = 3) -> common.SampleGroup:
    """A finished group whose samples refer to images, which add some tokens each."""
    group = make_group(prompt)
    for sample in group.samples:
        sample.images.extend(image.digest for image in images)
        sample.image_tokens = tokens * len(images)
    return group


async def test_images_of_a_lease_are_fetched_as_they_were_put(make_server: Make) -> None:
    async with serving(make_server(data__images={})) as (client, images):
        [leased] = (await client.lease()).groups
        small = png()
        await images.put(leased.prompt.lease_id, [small, LARGE, small])
        fetched = await ImageClient(images._buffer).get([LARGE.digest, small.digest, LARGE.digest])
        assert fetched == [LARGE, small, LARGE]
        stats = await client.stats()
        assert (stats.images, stats.image_bytes) == (2, len(small.data) + len(LARGE.data))


async def test_images_survive_a_kill_and_end_with_the_checkpoint(make_server: Make) -> None:
    server = make_server(data__images={})
    async with serving(server) as (client, images):
        leases = (await client.lease(count=4)).groups
        await images.put(leases[0].prompt.lease_id, [LARGE])
    assert server.end(9) == -9
    async with serving(server) as (client, images):
        groups = [with_images(leases[0].prompt, [LARGE]), *map(make_group_of, leases[1:])]
        assert {a.outcome for a in (await client.submit(groups)).values()} == {STORED}
        batch = await client.take(1)
        lengths = {s.group_id: s.length for s in batch.sequences}
        assert lengths == {0: 13, 1: 10, 2: 10, 3: 10}
        await client.commit(1)
    assert server.end(9) == -9
    async with serving(server) as (client, images):
        await client.rewind(0, attempt=2)
        shard = await client.shard(1, attempt=2)
        assert list(shard[0].samples[0].images) == [LARGE.digest]
        assert await images.get([LARGE.digest]) == [LARGE]
        await client.commit(1, attempt=2)
        await client.checkpoint(1, attempt=2)
        assert (await client.stats()).images == 0
        with pytest.raises(rpc.RefusedError, match=f"NOT_FOUND.*{LARGE.digest}"):
            await ImageClient(images._buffer).get([LARGE.digest])
        assert await images.get([LARGE.digest]) == [LARGE]  # the client's copy


def make_group_of(leased: pb.LeasedGroup) -> common.SampleGroup:
    return make_group(leased.prompt)


async def test_a_group_with_an_unknown_image_is_refused(make_server: Make) -> None:
    async with serving(make_server(data__images={})) as (client, images):
        first, second = (await client.lease(count=2)).groups
        await images.put(first.prompt.lease_id, [LARGE])
        [answer] = (await client.submit([with_images(second.prompt, [LARGE])])).values()
        assert answer.outcome == pb.SubmitResponse.OUTCOME_REFUSED
        assert answer.message.startswith(f"samples[0].images[0]: {LARGE.digest} is not an image")


TURNED = encoded(
    drawn(), "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0"
)


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        (replace(png(), data=b"GIF89a"), "image: .* begins with|header of the image is broken"),
        (replace(png(), width=9), "said to be image/png of 9 x 6 pixels"),
        (Image("image/jpeg", 8, 6, TURNED), "expected an image as sluice stores it"),
        (png(40, 40), "expected an image as sluice stores it .* at most 1000 pixels"),
        (png(200, 200, 3), r"a message of \d+ bytes; the limit is \d+; see data.images.maxBytes"),
    ],
    ids=["no image", "wrong size", "turned", "too many pixels", "too many bytes"],
)
async def test_a_wrong_image_is_refused(make_server: Make, image: Image, reason: str) -> None:
    limits = {"maxPixels": 1000, "maxBytes": "50Ki"}
    async with serving(make_server(data__images=limits)) as (client, images):
        [leased] = (await client.lease()).groups
        with pytest.raises(rpc.RefusedError, match=f"INVALID_ARGUMENT.*({reason})"):
            await images.put(leased.prompt.lease_id, [image])
        assert (await client.stats()).images == 0


async def test_images_need_a_lease_and_the_setting(make_server: Make, tmp_path: Path) -> None:
    server = make_server(data__images={})
    async with serving(server) as (client, images):
        [leased] = (await client.lease()).groups
        await client.submit([make_group(leased.prompt)])
        with pytest.raises(rpc.RefusedError, match=r"'t0\.1' is not a lease that is held"):
            await images.put(leased.prompt.lease_id, [png()])
        with pytest.raises(rpc.RefusedError, match="expected 64 hexadecimal digits"):
            await images.get(["ab"])
    server.end()
    async with serving(make_server()) as (client, images):
        [leased] = (await client.lease()).groups
        with pytest.raises(rpc.RefusedError, match=r"spec\.data\.images is not set"):
            await images.put(leased.prompt.lease_id, [png()])
