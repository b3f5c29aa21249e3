"""Images in the buffer's process: stored, fetched and kept as long as a group refers to them."""

import base64
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sluice.images.image import Image, image_part, referred
from sluice.wire import rpc
from sluice.wire.buffer_locator import BufferLocator
from sluice.wire.image_client import ImageClient
from sluice.wire.v1 import buffer_pb2 as pb
from sluice.wire.v1 import buffer_pb2_grpc
from sluice.wire.v1 import common_pb2 as common
from tests.images import drawn, encoded, png
from tests.unit.buffer.buffer_tools import BufferProcess, Client, make_group, make_sample

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


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as Hugging Face's datasets do to Parquet, or as JSON Lines."""
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def chat_row(images: list[Any], label: str = "2") -> dict[str, Any]:
    """A row with a placeholder for each image."""
    text = "<image>" * len(images) + "What is it?"
    return {"prompt": [{"role": "user", "content": text}], "label": label, "images": images}


def with_rows(
    make_server: Make, path: Path, rows: list[dict[str, Any]], **changes: Any
) -> BufferProcess:
    """A buffer of a job whose prompts are these rows, in their order."""
    prompts = [{"path": str(path)}]
    settings = {"data__images": {}, "data__shuffle": False, "data__prompts": prompts}
    write_rows(path, rows)
    return make_server(**{**settings, **changes})


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet"])
async def test_rows_are_leased_with_their_images(
    make_server: Make, tmp_path: Path, name: str
) -> None:
    first, second, large = png(seed=1), png(seed=2), png(200, 100, seed=3)
    if name == "rows.parquet":
        rows = [
            chat_row(
                [{"bytes": first.data, "path": None}, {"bytes": second.data, "path": "b.png"}]
            ),
            chat_row([{"bytes": large.data, "path": "c.png"}]),
        ]
    else:
        (tmp_path / "pictures").mkdir()
        (tmp_path / "pictures/a.png").write_bytes(first.data)
        url = "data:image/png;base64," + base64.b64encode(second.data).decode()
        text = base64.b64encode(large.data).decode()
        rows = [chat_row(["pictures/a.png", url]), chat_row([text])]
    server = with_rows(make_server, tmp_path / name, rows)
    async with serving(server) as (client, images):
        one, two = (await client.lease(count=2)).groups
        assert list(one.prompt.images) == [first.digest, second.digest]
        assert list(two.prompt.images) == [large.digest]
        assert referred(json.loads(one.prompt.prompt_json)) == [first.digest, second.digest]
        [message] = json.loads(two.prompt.prompt_json)
        assert message["content"] == [
            image_part(large.digest),
            {"type": "text", "text": "What is it?"},
        ]
        assert await images.get([*one.prompt.images, *two.prompt.images]) == [first, second, large]


async def test_an_image_that_many_rows_share_is_stored_once(
    make_server: Make, tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(LARGE.data)
    rows = [chat_row(["a.png", "a.png"])] * 4
    async with serving(with_rows(make_server, tmp_path / "rows.jsonl", rows)) as (client, _):
        groups = (await client.lease(count=4)).groups
        assert (await client.stats()).images == 1
        finished = [with_images(g.prompt, [LARGE, LARGE]) for g in groups]
        await client.submit(finished)
        batch = await client.take(1)
        assert {s.length for s in batch.sequences} == {16}
        await client.commit(1)
        assert (await client.stats()).image_bytes == len(LARGE.data)
        await client.checkpoint(1)
        assert (await client.stats()).images == 0


async def test_leases_are_continued_after_a_kill_without_their_files(
    make_server: Make, tmp_path: Path
) -> None:
    picture = tmp_path / "a.png"
    picture.write_bytes(LARGE.data)
    rows = [chat_row(["a.png"]), chat_row([]), chat_row(["a.png"]), chat_row([])]
    server = with_rows(make_server, tmp_path / "rows.jsonl", rows)
    async with serving(server) as (client, _):
        leases = (await client.lease(count=4)).groups
    assert server.end(9) == -9
    picture.write_bytes(b"gone")
    async with serving(server) as (client, images):
        assert await images.get([LARGE.digest]) == [LARGE]
        client.held["rollout-0", 1] = {g.prompt.lease_id: g.prompt.lease_attempt for g in leases}
        first = await client.give_back(
            [common.SampleGroup(prompt=leases[0].prompt, samples=[partial_of(LARGE)])]
        )
        assert [a.accepted for a in first.values()] == [True]
        [again] = (await client.lease()).groups
        assert list(again.prompt.images) == list(again.partial.samples[0].images) == [LARGE.digest]
        groups = [
            with_images(again.prompt, [LARGE]),
            make_group(leases[1].prompt),
            with_images(leases[2].prompt, [LARGE]),
            make_group(leases[3].prompt),
        ]
        answers = await client.submit(groups)
        assert {a.outcome for a in answers.values()} == {STORED}, answers


def partial_of(image: Image) -> common.Sample:
    """A sample that is not finished."""
    sample = make_sample(0, reward=None, status=common.SAMPLE_STATUS_ABORTED)
    sample.images.append(image.digest)
    return sample


async def test_a_broken_image_costs_its_own_row(make_server: Make, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(LARGE.data)
    (tmp_path / "cut.png").write_bytes(LARGE.data[:-500])
    rows = [chat_row([name]) for name in ("a.png", "cut.png", "none.png", "../a.png", "a.png")]
    async with serving(with_rows(make_server, tmp_path / "rows.jsonl", rows)) as (client, images):
        leased = (await client.lease(count=4)).groups
        assert [g.prompt.row for g in leased] == [0]
        failures = sorted(await client.failures(), key=lambda failure: failure.row)
        path = tmp_path / "rows.jsonl"
        assert [(f.row, f.leases) for f in failures] == [(1, 1), (2, 1), (3, 1)]
        reasons = [f.reason for f in failures]
        assert reasons[0].startswith(f"{path}:2: images[0]: the image is broken or cut off")
        assert reasons[1] == f"{path}:3: images[0]: {tmp_path}/none.png: no such file"
        assert reasons[2].startswith(f"{path}:4: images[0]: the path '../a.png' leads out of")
        stats = await client.stats()
        assert stats.counters["groups_failed"] == 3
        assert sum(stats.failed.values()) == 3
        [more] = (await client.lease()).groups
        assert more.prompt.row == 4
        assert await images.get(list(more.prompt.images)) == [LARGE]


async def test_evaluations_keep_the_images_of_their_examples(
    make_server: Make, tmp_path: Path
) -> None:
    held_out = [png(seed=i) for i in range(5)]
    for number, image in enumerate(held_out):
        (tmp_path / f"{number}.png").write_bytes(image.data)
    write_rows(tmp_path / "eval.jsonl", [chat_row([f"{number}.png"]) for number in range(5)])
    datasets = [{"path": str(tmp_path / "eval.jsonl"), "name": "held-out"}]
    server = with_rows(
        make_server,
        tmp_path / "rows.jsonl",
        [chat_row([])],
        evaluation={"everySteps": 1, "samplesPerPrompt": 2, "datasets": datasets},
    )
    async with serving(server) as (client, _):
        leased = (await client.lease(count=5)).groups
        assert {g.prompt.purpose for g in leased} == {common.PURPOSE_EVALUATE}
        assert (await client.stats()).images == 5
        await client.submit(with_images(g.prompt, [held_out[g.prompt.row]]) for g in leased)
        assert (await client.stats()).images == 4
        examples = await client.examples(0, "held-out")
        assert [list(g.samples[0].images) for g in examples] == [[i.digest] for i in held_out[:4]]


def test_a_job_whose_first_images_are_all_missing_does_not_start(
    make_server: Make, tmp_path: Path
) -> None:
    server = with_rows(make_server, tmp_path / "rows.jsonl", [chat_row(["none.png"])] * 20)
    with pytest.raises(RuntimeError, match=r"rows\.jsonl:1: images\[0\]: .*none.png: no such file"):
        server.start()
    assert server.end() == 2


def test_rows_with_images_need_the_setting(make_server: Make, tmp_path: Path) -> None:
    server = with_rows(
        make_server, tmp_path / "rows.jsonl", [chat_row(["none.png"])], data__images=None
    )
    with pytest.raises(RuntimeError, match=r"rows\.jsonl:1: images: .* set data\.images: \{\}"):
        server.start()
    assert server.end() == 2


def test_a_copy_of_images_that_does_not_fit_says_what_to_do(
    make_server: Make, tmp_path: Path, small_disk: Path
) -> None:
    rows = [chat_row([{"bytes": png(900, 900, seed=i).data, "path": None}]) for i in range(4)]
    server = with_rows(make_server, tmp_path / "rows.parquet", rows)
    said = r"rows\.parquet: its copy as JSON Lines cannot be written to .*: No space left on device"
    with pytest.raises(RuntimeError, match=said):
        server.start()
    assert server.end() == 2


async def test_images_that_were_trained_make_room_for_others(
    make_server: Make, tmp_path: Path, small_disk: Path
) -> None:
    """Eight images of 1 MB pass through a disk of 6 MiB: each goes with its checkpoint."""
    rows = []
    for number in range(8):
        (tmp_path / f"{number}.png").write_bytes(png(600, 600, seed=number).data)
        rows.append(chat_row([f"{number}.png"]))
    server = with_rows(
        make_server, tmp_path / "rows.jsonl", rows, rollout__batchSize=1, trainer__steps=8
    )
    async with serving(server) as (client, _):
        seen = set()
        for step in range(1, 9):
            [leased] = (await client.lease(version=step - 1, wait=5.0)).groups
            seen.add(leased.prompt.row)
            group = make_group(leased.prompt, version=step - 1)
            for sample in group.samples:
                sample.images.extend(leased.prompt.images)
            assert (await client.submit([group]))[0].outcome == STORED
            assert (await client.take(step)).state == pb.TakeBatchResponse.STATE_READY
            await client.commit(step)
            await client.checkpoint(step)
        assert seen == set(range(8))
        stats = await client.stats()
        assert (stats.images, stats.counters["groups_failed"]) == (0, 0)
