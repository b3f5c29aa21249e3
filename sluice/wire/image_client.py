"""Fetches images from the buffer by their digests, and stores those that no row has.

Workers and trainers use it. An image never changes, so a copy that was fetched once stays valid;
the least recently used copies are dropped once they take more than a number of bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

import grpc.aio

from sluice.images.image import Image
from sluice.runtime.recent import Recent
from sluice.wire import codec, rpc
from sluice.wire.buffer_locator import BufferLocator
from sluice.wire.v1 import buffer_pb2 as pb
from sluice.wire.v1 import buffer_pb2_grpc
from sluice.wire.v1 import common_pb2 as common

T = TypeVar("T")
# Most digests of one call of GetImages (buffer.proto).
MAX_DIGESTS = 1024
KEPT_BYTES = 256 << 20
PATIENCE_SECONDS = 600.0
_PIECE_SECONDS = 60.0


class ImageClient:
    """Fetches and stores images; belongs to one event loop.

    Parameters
    ----------
    buffer
        Finds the buffer.
    kept_bytes
        Bytes of the images that are kept for further requests.

    """

    def __init__(self, buffer: BufferLocator, kept_bytes: int = KEPT_BYTES) -> None:
        self._buffer = buffer
        self._kept: Recent[Image] = Recent(kept_bytes)

    async def get(self, digests: Sequence[str]) -> list[Image]:
        """Return images in the order of their digests.

        An image is fetched once even if it is named several times.

        Raises
        ------
        RefusedError
            If the buffer does not have an image; the message names it.
        DeadlineError
            If the buffer has not answered in time.

        """
        found = {digest: image for digest in digests if (image := self._kept.get(digest))}
        missing = [digest for digest in dict.fromkeys(digests) if digest not in found]
        for start in range(0, len(missing), MAX_DIGESTS):
            part = missing[start : start + MAX_DIGESTS]
            for digest, image in (await self._fetch(part)).items():
                found[digest] = image
                self._kept.put(digest, image, len(image.data))
        return [found[digest] for digest in digests]

    async def put(self, lease_id: str, images: Sequence[Image]) -> None:
        """Store images that samples of a leased group will refer to. Copies are kept for `get`.

        They last as long as the group is in work or its samples are kept.

        Raises
        ------
        RefusedError
            If the buffer refuses one: the lease is over, or the image is larger than data.images
            allows.
        DeadlineError
            If the buffer has not answered in time.

        """
        messages = [codec.image_to_message(image, lease_id) for image in images]

        async def send(stub: buffer_pb2_grpc.BufferStub) -> None:
            await stub.PutImages(
                _chunks(messages), metadata=rpc.metadata(), timeout=PATIENCE_SECONDS
            )

        await self._call("PutImages", send)
        for image in images:
            self._kept.put(image.digest, image, len(image.data))

    async def _fetch(self, digests: list[str]) -> dict[str, Image]:
        request = pb.GetImagesRequest(digests=digests)

        async def read(stub: buffer_pb2_grpc.BufferStub) -> dict[str, Image]:
            call = stub.GetImages(request, metadata=rpc.metadata(), timeout=PATIENCE_SECONDS)
            return await _images(call)

        return await self._call("GetImages", read)

    async def _call(
        self, method: str, request: Callable[[buffer_pb2_grpc.BufferStub], Awaitable[T]]
    ) -> T:
        async def attempt() -> T:
            stub = await self._buffer.stub(PATIENCE_SECONDS)
            try:
                return await request(stub)
            except grpc.aio.AioRpcError:
                self._buffer.lost(stub)
                raise

        return await rpc.retrying(attempt, what=f"{method} at the buffer", seconds=PATIENCE_SECONDS)


async def _chunks(messages: Iterable[common.Image]) -> AsyncIterator[common.Chunk]:
    for key, message in enumerate(messages):
        for chunk in codec.to_chunks(key, message.SerializeToString()):
            yield chunk


async def _images(call: grpc.aio.UnaryStreamCall) -> dict[str, Image]:
    """Return the images of an answer by digest. Each piece has to come within a time."""
    assembler = codec.Assembler()
    images: dict[str, Image] = {}
    while True:
        try:
            async with asyncio.timeout(_PIECE_SECONDS):
                chunk = await call.read()
        except TimeoutError:
            call.cancel()
            raise rpc.SilentPeerError(
                f"no piece of the answer came for {_PIECE_SECONDS:.0f} s"
            ) from None
        if chunk is grpc.aio.EOF:
            return images
        data = assembler.add(chunk)
        if data is not None:
            message = common.Image.FromString(data)
            images[message.digest] = await asyncio.to_thread(codec.image_from_message, message)
