"""Images that agents send to the gateway: checked like those of rows, and stored in the buffer.

A client repeats its whole history in each request, so an episode remembers the digest of each image
that it has read, and reads none twice. The files themselves are kept by `ImageClient`, whose memory
is bounded; one that it has dropped is read again from the request or fetched from the buffer. An
image is stored before the engine sees it, because samples may only refer to stored images.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from sluice.api import RLJobSpec
from sluice.api.groups.data import ImageLimits
from sluice.images.image import Image, referred, with_digests
from sluice.images.processor import ImageProcessor
from sluice.images.reading import ImageError, RawImage, read_image
from sluice.wire.image_client import ImageClient
from sluice_rollout.gateway.interfaces.errors import invalid, too_long
from sluice_rollout.gateway.interfaces.exchange import RawImages, TurnRequest
from sluice_rollout.generate import REQUESTS, GroupRequests
from sluice_rollout.prompts import PromptEncoder

# Most different images of an episode whose digests are remembered.
MOST_IMAGES = 4096
# One thread bounds the memory: an image of a few kilobytes may take a gigabyte while it is decoded.
_POOL = ThreadPoolExecutor(1, "gateway-images")


@dataclass(frozen=True, slots=True)
class ImageGate:
    """What all episodes of a job with images need to read and store an agent's images."""

    limits: ImageLimits
    processor: ImageProcessor
    client: ImageClient
    # Tokens by which an engine finds images and videos in a prompt.
    media_tokens: frozenset[int]

    @classmethod
    def for_job(
        cls, spec: RLJobSpec, encoder: PromptEncoder, client: ImageClient | None
    ) -> ImageGate | None:
        """Return the gate of a job; None if its model gets no images."""
        limits, processor = spec.data.images, encoder.image_processor
        if limits is None or processor is None or client is None:
            return None
        return cls(limits, processor, client, encoder.media_tokens)

    async def read(self, raw: RawImage) -> Image:
        """Return an image, which is no path, as sluice stores it. Raises ImageError."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(_POOL, read_image, raw, Path(), self.limits)

    async def read_sent(self, raw: RawImage) -> tuple[Image, int]:
        """Return a client's image, and its number of tokens. Raises GatewayError."""
        try:
            image = await self.read(raw)
        except ImageError as error:
            raise invalid(str(error), raw.name) from error
        return image, self.tokens_of(image, raw.name)

    def tokens_added(self, images: Iterable[Image]) -> int:
        """Return the tokens that images add once each placeholder is as long as its image.

        Raises ValueError if the model's processor refuses one.
        """
        return self.processor.added([(image.width, image.height) for image in images])

    async def store(self, lease_id: str, images: Iterable[Image]) -> None:
        """Store images for a leased group, each once. Raises RefusedError or DeadlineError."""
        group = REQUESTS.get()
        async with group.storing:
            for image in images:
                if image.digest not in group.images and image.digest not in group.stored:
                    await self.client.put(lease_id, [image])
                    group.stored.add(image.digest)

    def tokens_of(self, image: Image, name: str) -> int:
        """Return the tokens of an image. Raises GatewayError if the model's processor refuses it.

        `name` is the image's place in the request.
        """
        try:
            return self.processor.tokens_of(image.width, image.height)
        except ValueError as error:
            raise invalid(f"{name}: {error}", name) from error


@dataclass(slots=True)
class SessionImages:
    """The images of one agent's conversation.

    Parameters
    ----------
    gate
        Reads and stores images; None if the job's model gets none.
    group
        The group of the episode. It has the images of the prompt.
    lease_id
        The group's lease.
    context_tokens
        Tokens of the model's context. Each image takes at least one.

    """

    gate: ImageGate | None
    group: GroupRequests
    lease_id: str
    context_tokens: int
    # Digests of images by the digests of the texts that they were sent as.
    _digests: dict[str, str] = field(default_factory=dict)
    # Tokens of images, by digest.
    _tokens: dict[str, int] = field(default_factory=dict)

    async def admit(self, request: TurnRequest) -> TurnRequest:
        """Return a request whose messages refer to images as sluice stores them.

        Raises GatewayError, which names the first image that cannot be used.
        """
        names = referred(request.messages)
        if not names:
            return request
        gate = self._gate(request.raw_images)
        if len(names) > self.context_tokens:
            raise too_long(
                f"{len(names)} images; the model's context has {self.context_tokens} tokens"
            )
        read: dict[str, Image] = {}
        for name in dict.fromkeys(names):
            if name in request.raw_images and name not in self._digests:
                image, tokens = await gate.read_sent(request.raw_images[name])
                read[image.digest] = image
                self._remember(name, image.digest, tokens)
            elif name not in self._digests and name not in self._tokens:
                self._know_image_of_prompt(gate, name)
        digests = [self._digests.get(name, name) for name in names]
        messages = with_digests(request.messages, digests)
        assert isinstance(messages, list)
        raw_images = {self._digests[name]: raw for name, raw in request.raw_images.items()}
        return replace(request, messages=messages, raw_images=raw_images, images=read)

    def _gate(self, raw_images: RawImages) -> ImageGate:
        if self.gate is None:
            place = next((raw.name for raw in raw_images.values()), "messages")
            raise invalid(
                f"{place}: the job's model gets no images; set data.images: {{}} in its manifest",
                place,
            )
        return self.gate

    def _remember(self, name: str, digest: str, tokens: int) -> None:
        if len(self._digests) >= MOST_IMAGES:
            raise too_long(f"the episode has sent {MOST_IMAGES} different images, the most of one")
        self._digests[name], self._tokens[digest] = digest, tokens

    def _know_image_of_prompt(self, gate: ImageGate, digest: str) -> None:
        image = self.group.images.get(digest)
        if image is None:
            raise invalid(
                f"messages: sha256:{digest[:64]} is not an image of the episode's prompt: expected "
                "a data URL",
                "messages",
            )
        self._tokens[digest] = gate.tokens_of(image, "messages")

    def tokens_added(self, digests: Iterable[str]) -> int:
        """Return the tokens that images add once each placeholder is as long as its image."""
        return sum(self._tokens[digest] - 1 for digest in digests)

    def has_media_token(self, tokens: Iterable[int]) -> bool:
        """True if the tokens have one by which an engine would look for an image or a video."""
        return self.gate is not None and not self.gate.media_tokens.isdisjoint(tokens)

    async def stored(self, request: TurnRequest, digests: Iterable[str]) -> Mapping[str, Image]:
        """Return images of a request's history by digest, all of which the buffer has.

        Raises RefusedError or DeadlineError if the buffer does not store or return them.
        """
        if self.gate is None:
            return {}
        client, names = self.gate.client, list(dict.fromkeys(digests))
        group = self.group
        files = {name: group.images[name] for name in names if name in group.images}
        async with group.storing:
            for digest in names:
                if digest in files:
                    continue
                raw = request.raw_images.get(digest)
                if digest in group.stored or raw is None:
                    [files[digest]] = await client.get([digest])
                else:
                    image = request.images.get(digest) or await self.gate.read(raw)
                    await client.put(self.lease_id, [image])
                    group.stored.add(digest)
                    files[digest] = image
        return files
