"""Expanded samples: each placeholder is as long as its image, and all values keep their tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from sluice.images.image import Image
from sluice.images.processor import ImageProcessor
from sluice.samples.sample import (
    Prompt,
    Sample,
    SampleGroup,
    SampleStatus,
    TokenSequence,
    WeightSpan,
)
from sluice.samples.turns import TURNS, spans_of
from sluice_trainer.batch.images import ExpandedSample, ImageExpansion, PixelCache
from sluice_trainer.batch.sequences import TrainSequence
from sluice_trainer.fsdp.row_images import rope_positions
from tests.vision_models import make_model, picture

# Four tokens, six, and twelve in the tiny Qwen3-VL.
SMALL, WIDE, TALL = picture(64, 64, 1), picture(96, 64, 2), picture(96, 128, 3)
IMAGES = {image.digest: image for image in (SMALL, WIDE, TALL)}


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> ImageProcessor:
    return ImageProcessor(make_model(tmp_path_factory.mktemp("model"), "qwen3_vl"))


def fetch(digests: Sequence[str]) -> list[Image]:
    return [IMAGES[digest] for digest in digests]


def expanded(processor: ImageProcessor, sample: Sample) -> ExpandedSample:
    group = SampleGroup(Prompt(7, ""), [sample])
    (result,) = ImageExpansion(processor, fetch).expand([group])
    assert result.group_id == 7
    (changed,) = result.samples
    assert isinstance(changed, ExpandedSample)
    return changed


def two_turns(pad: int) -> Sample:
    """Return an image in the prompt, an answer, a tool's answer with an image, another answer."""
    return Sample(
        index=3,
        tokens=np.array([1, pad, 2, 10, 11, 20, pad, 21, 12, 13, pad], np.int32),
        response_length=8,
        loss_mask=np.array([1, 1, 0, 0, 0, 1, 1, 0], np.uint8),
        rollout_log_probs=np.array([-1, -2, 0, 0, 0, -3, -4, -5], np.float32),
        teacher_log_probs=np.array([-6, -7, 0, 0, 0, -8, -9, -10], np.float32),
        weight_versions=[WeightSpan(4, 0, 5), WeightSpan(5, 5, 8)],
        reward=1.0,
        status=SampleStatus.COMPLETED,
        metadata={
            TURNS: [
                {"by": "model", "length": 2},
                {"by": "environment", "length": 3},
                {"by": "model", "length": 3},
            ]
        },
        images=[SMALL.digest, WIDE.digest],
        image_tokens=8,
    )


def test_all_values_of_a_token_stay_with_it(processor: ImageProcessor) -> None:
    pad = processor.placeholder
    before = two_turns(pad)
    sample = expanded(processor, before)
    # The last token is in a turn of the model, so it stands for no image although it is masked.
    assert sample.tokens.tolist() == [1, *[pad] * 4, 2, 10, 11, 20, *[pad] * 6, 21, 12, 13, pad]
    assert len(sample.tokens) == len(before.tokens) + before.image_tokens
    assert sample.image_tokens == 0
    assert sample.response_length == 13
    assert sample.loss_mask.tolist() == [1, 1, *[0] * 8, 1, 1, 0]
    assert sample.rollout_log_probs.tolist() == [-1, -2, *[0] * 8, -3, -4, -5]
    assert sample.teacher_log_probs is not None
    assert sample.teacher_log_probs.tolist() == [-6, -7, *[0] * 8, -8, -9, -10]
    assert sample.weight_versions == [WeightSpan(4, 0, 10), WeightSpan(5, 10, 13)]
    spans = [(span.start, span.end) for span in spans_of(sample)[0]]
    assert spans == [(0, 2), (10, 13)]
    sample.check()


def test_images_are_placed_at_their_first_token(processor: ImageProcessor) -> None:
    sample = expanded(processor, two_turns(processor.placeholder))
    (placed,) = sample.placed
    assert [(p.start, p.image.rows, p.image.columns) for p in placed] == [(1, 2, 2), (9, 2, 3)]
    (sequence,) = TrainSequence.from_sample(7, sample, 0.5, version=5)
    assert sequence.images == placed
    assert sequence.on_policy_mask is not None
    assert sequence.on_policy_mask.tolist() == [0] * 10 + [1] * 3


def test_branches_have_images_of_their_own(processor: ImageProcessor) -> None:
    pad = processor.placeholder
    sample = two_turns(pad)
    sample.tokens[-1], sample.metadata = 14, {}
    sample.branches = [
        TokenSequence(
            tokens=np.array([1, pad, 5], np.int32),
            response_length=1,
            loss_mask=np.ones(1, np.uint8),
            rollout_log_probs=np.zeros(1, np.float32),
            images=[TALL.digest],
            image_tokens=11,
        )
    ]
    result = expanded(processor, sample)
    assert result.branches[0].tokens.tolist() == [1, *[pad] * 12, 5]
    assert [[p.image.digest for p in placed] for placed in result.placed] == [
        [SMALL.digest, WIDE.digest],
        [TALL.digest],
    ]


def test_the_compact_sample_is_not_changed(processor: ImageProcessor) -> None:
    before, again = two_turns(processor.placeholder), two_turns(processor.placeholder)
    expanded(processor, before)
    assert before.tokens.tolist() == again.tokens.tolist()
    assert before.metadata == again.metadata
    assert before.weight_versions == again.weight_versions


def test_a_sample_without_images_keeps_its_tokens(processor: ImageProcessor) -> None:
    sample = two_turns(5)
    sample.images, sample.image_tokens = [], 0
    result = expanded(processor, sample)
    assert result.tokens.tolist() == sample.tokens.tolist()
    assert result.placed == [()]


def test_a_failed_sample_needs_no_images(processor: ImageProcessor) -> None:
    sample = two_turns(processor.placeholder)
    sample.images = ["0" * 64]
    sample.fail("the engine was lost")
    assert expanded(processor, sample).placed == [()]


def test_a_sample_that_lacks_an_image_is_named(processor: ImageProcessor) -> None:
    sample = two_turns(processor.placeholder)
    sample.images = sample.images[:1]
    sample.metadata = {TURNS: [{"by": "environment", "length": 8}]}
    with pytest.raises(ValueError, match="group 7 sample 3 sequence 0: 3 placeholders"):
        expanded(processor, sample)


def test_routed_experts_are_refused(processor: ImageProcessor) -> None:
    sample = two_turns(processor.placeholder)
    sample.routed_experts = np.zeros((10, 2), np.uint8)
    with pytest.raises(ValueError, match="routed experts cannot be replayed for tokens of images"):
        expanded(processor, sample)


def test_pixels_beyond_the_limit_are_computed_again(processor: ImageProcessor) -> None:
    one = processor.pixels([TALL]).values.nbytes
    cache = PixelCache(processor, limit=one)
    first = cache.pixels("tall", TALL)
    assert cache.pixels("tall", TALL) is first
    small = cache.pixels("small", SMALL)
    assert cache.pixels("small", SMALL) is small
    again = cache.pixels("tall", TALL)
    assert again is not first
    assert np.array_equal(again.values, first.values)


def test_text_after_an_image_goes_on_from_its_longer_side(processor: ImageProcessor) -> None:
    sample = expanded(processor, two_turns(processor.placeholder))
    grids = [(p.start, p.image.rows, p.image.columns) for p in sample.placed[0]]
    time, height, width = rope_positions(15, grids).tolist()
    assert time == [0, 1, 1, 1, 1, 3, 4, 5, 6, 7, 7, 7, 7, 7, 7]
    assert height == [0, 1, 1, 2, 2, 3, 4, 5, 6, 7, 7, 7, 8, 8, 8]
    assert width == [0, 1, 2, 1, 2, 3, 4, 5, 6, 7, 8, 9, 7, 8, 9]
    assert rope_positions(17, grids)[:, 15:].tolist() == [[10, 11]] * 3
