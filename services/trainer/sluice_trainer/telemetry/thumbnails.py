"""Thumbnails of the images of sampled prompts and agents."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sluice.images import thumbnail
from sluice.samples.sample import SampleGroup
from sluice.telemetry import logs
from sluice.wire import rpc
from sluice_trainer.batch.images import FetchImages


class Thumbnails:
    """Writes a thumbnail of each image of sampled prompts and agents next to the samples.

    Parameters
    ----------
    samples
        Directory of the samples.
    fetch
        Fetches images by their digests.

    """

    def __init__(self, samples: Path, fetch: FetchImages) -> None:
        self._samples, self._fetch = samples, fetch

    def write(self, groups: Sequence[SampleGroup]) -> None:
        """Write those that are not there yet, of the first images of each prompt's first sample.

        Those of a prompt come before those that an agent has sent. An image that the buffer has
        forgotten has none.
        """
        digests = dict.fromkeys(
            digest
            for group in groups
            for images in (group.prompt.images, *(sample.images for sample in group.samples[:1]))
            for digest in images[: thumbnail.PER_PROMPT]
        )
        for digest in digests:
            if thumbnail.path_of(self._samples, digest).exists():
                continue
            try:
                [image] = self._fetch([digest])
            except rpc.RefusedError as error:
                logs.get().info("no thumbnail of an image", reason=str(error))
                continue
            thumbnail.write(self._samples, image)
