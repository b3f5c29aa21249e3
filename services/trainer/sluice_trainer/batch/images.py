"""Images of a batch: samples with expanded placeholders, and the pixels of their images.

Samples come from the buffer with one token for each image, its placeholder. The trainer makes each
placeholder as long as its image before anything else, so all later code sees the tokens that the
model sees. Inserted tokens are not trained: they repeat the mask and the log-prob of their
placeholder, which are 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from sluice.images.image import Image
from sluice.images.processor import ImageProcessor, Pixels
from sluice.runtime.recent import Recent
from sluice.samples.sample import Sample, SampleGroup, SampleStatus, TokenSequence, WeightSpan
from sluice.samples.turns import BRANCH_TURNS, TURNS, TurnSpan, records_of, spans_of
from sluice.wire.v1 import buffer_pb2 as pb
from sluice_trainer.batch.image_work import ImageWork

Int64 = npt.NDArray[np.int64]
# Digests -> images in their order.
FetchImages = Callable[[Sequence[str]], list[Image]]
# (metadata of a batch, samples of this rank) -> metrics of the training step.
Learn = Callable[[Sequence[pb.Sequence], Sequence[SampleGroup]], dict[str, float]]
# Pixels of images that one process keeps between the passes of a step: some 40 images of a
# megapixel. Those that do not fit are decoded again for each pass.
PIXEL_BYTES = 1 << 30


class PixelCache:
    """The pixels of recently used images, up to a number of bytes.

    Parameters
    ----------
    processor
        Image processor of the model.
    limit
        Bytes to keep.

    Attributes
    ----------
    work
        Counts of what is done with the images.

    """

    def __init__(self, processor: ImageProcessor, limit: int = PIXEL_BYTES) -> None:
        self.work = ImageWork()
        self._processor = processor
        self._recent: Recent[Pixels] = Recent(limit)

    def pixels(self, digest: str, image: Image) -> Pixels:
        """Return the pixels of one image."""
        if kept := self._recent.get(digest):
            return kept
        with self.work.decoding():
            pixels = self._processor.pixels([image])
        return self._recent.put(digest, pixels, pixels.values.nbytes)


@dataclass(frozen=True, eq=False)
class BatchImage:
    """An image of a batch, which all sequences with it share.

    Attributes
    ----------
    digest
        Name of the image.
    rows, columns
        Its tokens in height and in width.

    """

    digest: str
    rows: int
    columns: int
    _file: Image = field(repr=False)
    _cache: PixelCache = field(repr=False)

    @cached_property
    def tokens(self) -> int:
        """Tokens of the image."""
        return self.rows * self.columns

    @property
    def work(self) -> ImageWork:
        """Counts of what this process does with the images of its batches."""
        return self._cache.work

    def pixels(self) -> Pixels:
        """Return what the tower gets of the image."""
        return self._cache.pixels(self.digest, self._file)


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image in expanded tokens, of which `start` is its first."""

    start: int
    image: BatchImage


@dataclass(slots=True, kw_only=True)
class ExpandedSample(Sample):
    """A sample whose placeholders are as long as their images.

    `placed` has the images of each of its `sequences`.
    """

    placed: list[tuple[PlacedImage, ...]]


class ImageExpansion:
    """Expands the samples of batches.

    Parameters
    ----------
    processor
        Image processor of the model.
    fetch
        Fetches the images of a batch.

    """

    def __init__(self, processor: ImageProcessor, fetch: FetchImages) -> None:
        self._processor, self._fetch = processor, fetch
        self._cache = PixelCache(processor)

    @property
    def work(self) -> ImageWork:
        """Counts of what this process does with the images of its batches."""
        return self._cache.work

    def expand(self, groups: Sequence[SampleGroup]) -> list[SampleGroup]:
        """Return groups with expanded samples. The groups that are given stay as they are.

        Raises
        ------
        ValueError
            The tokens of a sample do not have a placeholder for each of its images.

        """
        images = self._images(
            digest
            for group in groups
            for sample in group.samples
            if sample.status is not SampleStatus.FAILED
            for sequence in sample.sequences
            for digest in sequence.images
        )
        return [
            replace(group, samples=[self._expanded(group, s, images) for s in group.samples])
            for group in groups
        ]

    def before(self, learn: Learn) -> Learn:
        """Return a step of training that expands its samples first."""
        return lambda batch, groups: learn(batch, self.expand(groups))

    def _images(self, digests: Iterable[str]) -> dict[str, BatchImage]:
        names = list(dict.fromkeys(digests))
        if not names:
            return {}
        images = {}
        for digest, image in zip(names, self._fetch(names), strict=True):
            rows, columns = self._processor.grid_of(image.width, image.height)
            images[digest] = BatchImage(digest, rows, columns, image, self._cache)
        return images

    def _expanded(
        self, group: SampleGroup, sample: Sample, images: Mapping[str, BatchImage]
    ) -> ExpandedSample:
        values = {f.name: getattr(sample, f.name) for f in fields(sample)}
        if sample.status is SampleStatus.FAILED:  # nobody reads its tokens
            return ExpandedSample(**values, placed=[() for _ in sample.sequences])
        sequences, placed, offsets = [], [], []
        turns = spans_of(sample)
        for number, sequence in enumerate(sample.sequences):
            sampled = _sampled(sequence, turns[number], self._processor.placeholder)
            try:
                expansion = _Expansion.of(sequence, sampled, images, self._processor)
            except ValueError as error:
                raise ValueError(
                    f"group {group.group_id} sample {sample.index} sequence {number}: {error}"
                ) from error
            self.work.counts.placed += len(expansion.placed)
            sequences.append(expansion.values(sequence))
            placed.append(expansion.placed)
            offsets.append(expansion.response_offsets(sequence))
        own, *branches = sequences
        values |= own | {
            "metadata": _with_turns(sample.metadata, offsets),
            "branches": [
                replace(branch, **changes)
                for branch, changes in zip(sample.branches, branches, strict=True)
            ],
        }
        return ExpandedSample(**values, placed=placed)


@dataclass(frozen=True, slots=True)
class _Expansion:
    """How the tokens of a sequence expand.

    tokens: the expanded ids. source: [expanded] index of each in the compact tokens. offsets:
    [compact + 1] index of each compact token in the expanded ones, and their number.
    """

    tokens: npt.NDArray[np.int32]
    source: Int64
    offsets: Int64
    placed: tuple[PlacedImage, ...]

    @classmethod
    def of(
        cls,
        sequence: TokenSequence,
        sampled: npt.NDArray[np.uint8],
        images: Mapping[str, BatchImage],
        processor: ImageProcessor,
    ) -> _Expansion:
        chosen = [images[digest] for digest in sequence.images]
        if chosen and sequence.routed_experts is not None:
            raise ValueError("routed experts cannot be replayed for tokens of images")
        tokens, source = processor.expand_by(
            sequence.tokens, [image.tokens for image in chosen], sampled=sampled
        )
        offsets = np.searchsorted(source, np.arange(len(sequence.tokens) + 1))
        places = np.flatnonzero((sequence.tokens == processor.placeholder) & (sampled == 0))
        placed = tuple(
            PlacedImage(int(offsets[place]), image)
            for place, image in zip(places, chosen, strict=True)
        )
        return cls(tokens, source, offsets, placed)

    def values(self, sequence: TokenSequence) -> dict[str, Any]:
        """Return the fields of the sequence that expansion changes."""
        start = sequence.prompt_length
        response = self.source[self.offsets[start] :] - start
        at = self.response_offsets(sequence)
        teacher = sequence.teacher_log_probs
        return {
            "tokens": self.tokens,
            "response_length": len(response),
            "loss_mask": sequence.loss_mask[response],
            "rollout_log_probs": sequence.rollout_log_probs[response],
            "teacher_log_probs": None if teacher is None else teacher[response],
            "weight_versions": [
                WeightSpan(span.version, int(at[span.start]), int(at[span.end]))
                for span in sequence.weight_versions
            ],
            "image_tokens": 0,
        }

    def response_offsets(self, sequence: TokenSequence) -> Int64:
        """Return [response + 1], the expanded place of each response token, and of their end."""
        start = sequence.prompt_length
        offsets: Int64 = self.offsets[start:] - self.offsets[start]
        return offsets


def _sampled(
    sequence: TokenSequence, turns: Sequence[TurnSpan], placeholder: int
) -> npt.NDArray[np.uint8]:
    """Return [tokens], 1 for those that the model sampled: they stand for no image.

    They are the trained tokens. If that leaves more placeholders than images, tokens of the model's
    turns are not trained, and count as well.
    """
    sampled = np.zeros(len(sequence.tokens), np.uint8)
    response = sampled[sequence.prompt_length :]
    response[:] = sequence.loss_mask
    if int(((sequence.tokens == placeholder) & (sampled == 0)).sum()) > len(sequence.images):
        for turn in turns:
            response[turn.start : turn.end] = 1
    return sampled


def _with_turns(metadata: dict[str, Any], offsets: Sequence[Int64]) -> dict[str, Any]:
    """Return metadata whose records of turns count expanded tokens.

    offsets: of each sequence's response.
    """
    if not metadata.get(TURNS):
        return metadata
    own, *branches = (
        _expanded_records(records, at)
        for records, at in zip(records_of(metadata), offsets, strict=False)
    )
    changed = {TURNS: own} | ({BRANCH_TURNS: branches} if BRANCH_TURNS in metadata else {})
    return metadata | changed


def _expanded_records(records: Sequence[Mapping[str, Any]], offsets: Int64) -> list[dict[str, Any]]:
    end, last, expanded = 0, len(offsets) - 1, []
    for record in records:
        start, end = end, end + record["length"]
        length = int(offsets[min(end, last)] - offsets[min(start, last)])
        expanded.append({**record, "length": length})
    return expanded
