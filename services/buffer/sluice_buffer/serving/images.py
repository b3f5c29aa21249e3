"""The calls for images: sent piece by piece as they are stored, and checked before they are.

An image is in memory only while it is sent or written, and counts in the budget of messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from functools import partial
from typing import Any

import grpc.aio
from google.protobuf.message import DecodeError

from sluice.api.groups.data import ImageLimits
from sluice.data.rows import RowError
from sluice.images.image import Image
from sluice.images.reading import BYTES_PER_PIXEL, ImageError, check_stored, max_bytes
from sluice.samples.sample import SampleError
from sluice.telemetry import logs
from sluice.wire import codec
from sluice.wire.frames import length_field
from sluice.wire.image_client import MAX_DIGESTS
from sluice.wire.v1 import common_pb2
from sluice_buffer.core import Buffer
from sluice_buffer.errors import InvalidCallError, PreconditionError, SilentSenderError
from sluice_buffer.group import GroupKey
from sluice_buffer.serving.budget import Budget
from sluice_buffer.serving.committer import Committer
from sluice_buffer.serving.ingest import PIECE_SECONDS
from sluice_buffer.serving.readback import GrantedLease, granted_lease
from sluice_buffer.sources.prompts import RowUnavailableError
from sluice_buffer.state.images import ImageHead, parse_digest
from sluice_buffer.state.storage import Storage

# Rows whose images are read at the same time.
ROWS_AT_ONCE = 4
# Pause after an image could not be read because of its storage.
UNAVAILABLE_SECONDS = 10.0
# Memory of a row that is being parsed, per byte of it.
_PARSED = 4
# Bytes of an Image message beside its data.
_HEAD_BYTES = 1 << 10
_DATA = 5  # field number of Image.data
# Digests that an error names.
_SHOWN = 5


class UnknownImagesError(Exception):
    """Some images are not stored. The message names them."""


class LeaseImages:
    """Reads the images of prompts that were leased, and stores them before the prompts are sent.

    A lease is durable before its images are. If this process ends in between, the worker has not
    heard of the lease, and its next call gets it with the images.
    """

    def __init__(self, committer: Committer, budget: Budget) -> None:
        self._committer, self._budget = committer, budget
        self._reading = asyncio.Semaphore(ROWS_AT_ONCE)

    async def read(self, key: GroupKey, attempt: int) -> GrantedLease | None:
        """Return a lease with its prompt; None if it is over or its row cannot be read.

        A row that cannot be read fails its group, with the place in the file as the reason. If the
        storage of its images is at fault, the group waits again, and fails at the fifth time.
        """
        buffer = self._committer.buffer
        record = buffer.memory.images.groups.get(key)
        stored = None if record is None else [digest.hex() for digest in record.of_row]
        async with self._reading:
            try:
                message = await self._stored(key, attempt, stored)
            except RowUnavailableError as error:
                logs.get().warning("images cannot be read", error=str(error))
                await asyncio.sleep(UNAVAILABLE_SECONDS)
                await self._committer.run(partial(buffer.postpone_row, key, attempt, str(error)))
                return None
            except RowError as error:
                await self._committer.run(partial(buffer.refuse_row, key, attempt, str(error)))
                return None
        lease = granted_lease(buffer, key, message) if message else None
        return lease if lease and lease.attempt == attempt else None

    async def _stored(
        self, key: GroupKey, attempt: int, stored: list[str] | None
    ) -> common_pb2.Prompt | None:
        """Return the prompt once its images are durable; None if the group is not sent."""
        buffer = self._committer.buffer
        memory = _PARSED * buffer.prompts.size(key)
        if stored is None:
            memory += await asyncio.to_thread(buffer.prompts.memory_of_images, key)
        async with self._budget.reserved(memory):
            prompt = await asyncio.to_thread(buffer.prompts.read, key, stored)
            await self._committer.wait_for_space()
            attach = partial(buffer.attach_images, key, attempt, prompt)
            return prompt.message if await self._committer.run(attach) else None


def heads_of(buffer: Buffer, digests: Iterable[str]) -> list[tuple[bytes, ImageHead]]:
    """Return the stored images that a call asks for.

    Raises InvalidCallError if a digest is malformed or there are too many, UnknownImagesError if
    some are not stored.
    """
    names = list(digests)
    if len(names) > MAX_DIGESTS:
        raise InvalidCallError(f"digests: {len(names)}, expected at most {MAX_DIGESTS} in a call")
    parsed = [(name, parse_digest(name)) for name in names]
    if malformed := next((name for name, digest in parsed if digest is None), None):
        raise InvalidCallError(
            f"digests: {malformed[:80]!r}, expected 64 hexadecimal digits in lower case"
        )
    heads = buffer.memory.images.heads
    unknown = [name for name, digest in parsed if digest not in heads]
    if unknown:
        more = f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
        raise UnknownImagesError(
            "no leased prompt and no kept sample has the images "
            f"{', '.join(unknown[:_SHOWN])}{more}"
        )
    return [(digest, heads[digest]) for _, digest in parsed if digest is not None]


async def sent_images(
    storage: Storage, budget: Budget, heads: Iterable[tuple[bytes, ImageHead]]
) -> AsyncIterator[common_pb2.Chunk]:
    """Yield the pieces of images. Raises UnknownImagesError if one was deleted meanwhile."""
    for number, (digest, head) in enumerate(heads):
        async with budget.reserved(head.size):
            for chunk in await asyncio.to_thread(_chunks, storage, digest, head, number):
                yield chunk


def _chunks(
    storage: Storage, digest: bytes, head: ImageHead, number: int
) -> Iterator[common_pb2.Chunk]:
    data = storage.value("image_pieces", digest)
    if data is None:
        raise UnknownImagesError(
            f"no leased prompt and no kept sample has the image {digest.hex()} any more"
        )
    message = common_pb2.Image(
        digest=digest.hex(), media_type=head.media_type, width=head.width, height=head.height
    )
    return codec.to_chunks(
        number, message.SerializeToString(), length_field(_DATA, len(data)), data
    )


async def received_images(
    context: grpc.aio.ServicerContext, committer: Committer, budget: Budget
) -> None:
    """Store the images of a stream, each once it is checked; return once all are durable.

    Raises CallError or StorageError at the first that is refused.
    """
    limits = committer.buffer.job.spec.data.images
    if limits is None:
        raise PreconditionError(
            "spec.data.images is not set, so no sample of this job may have images; set it to {}"
        )
    most = max_bytes(limits)
    assembler = codec.Assembler(most + _HEAD_BYTES)
    while (chunk := await _next_piece(context)) is not grpc.aio.EOF:
        async with budget.reserved(2 * min(chunk.size, most) + BYTES_PER_PIXEL * limits.max_pixels):
            message = await _whole(context, assembler, chunk)
            image = await asyncio.to_thread(_checked, message, limits)
            await committer.wait_for_space()
            put = partial(committer.buffer.put_image, message.lease_id, image)
            await committer.run(put)


async def _next_piece(context: grpc.aio.ServicerContext) -> Any:
    try:
        async with asyncio.timeout(PIECE_SECONDS):
            return await context.read()
    except TimeoutError:
        raise SilentSenderError(
            f"no further piece of an image came for {PIECE_SECONDS:.0f} s"
        ) from None


async def _whole(
    context: grpc.aio.ServicerContext, assembler: codec.Assembler, chunk: common_pb2.Chunk
) -> common_pb2.Image:
    """Read the rest of an image whose first piece has come."""
    key = chunk.key
    try:
        while (data := assembler.add(chunk)) is None:
            chunk = await _next_piece(context)
            if chunk is grpc.aio.EOF or chunk.key != key:
                raise InvalidCallError("the pieces of an image must follow each other to the last")
        message: common_pb2.Image = common_pb2.Image.FromString(data)
        return message
    except SampleError as error:
        raise InvalidCallError(f"image: {error}; see data.images.maxBytes") from error
    except DecodeError as error:
        raise InvalidCallError(f"not an Image: {error}") from error


def _checked(message: common_pb2.Image, limits: ImageLimits) -> Image:
    """Return an image that readers can rely on. Raises InvalidCallError."""
    try:
        image = codec.image_from_message(message)
        check_stored(image, limits)
    except (SampleError, ImageError) as error:
        raise InvalidCallError(f"image: {error}") from error
    return image
