"""The image processor: the same tokens and pixels as transformers' processor of the model."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow

from sluice.images.processor import BACKEND, ImageProcessor
from sluice.runtime.pod_env import ConfigurationError
from tests.vision_models import TRAINED_FAMILIES, make_model, picture

SIZES = [
    [(64, 64)],
    [(100, 37), (31, 200)],
    [(5, 5), (640, 480), (448, 448)],
    [(1000, 8), (33, 65), (300, 300), (64, 64)],
]


@pytest.fixture(scope="module", params=TRAINED_FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def processor(model: Path) -> ImageProcessor:
    return ImageProcessor(model)


def transformers_inputs(model: Path, sizes: list[tuple[int, int]]) -> tuple[Any, dict[str, Any]]:
    """Return compact ids of a chat, and what transformers' processor makes of its text."""
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(model)
    parts = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    answered = [{"role": "user", "content": parts[: 1 + i % 2]} for i, _ in enumerate(sizes)]
    text = processor.apply_chat_template(answered, add_generation_prompt=True, tokenize=False)
    images = [picture(*size, seed=i) for i, size in enumerate(sizes)]
    opened = [Pillow.open(io.BytesIO(image.data)) for image in images]
    compact = np.array(processor.tokenizer(text)["input_ids"], np.int32)
    return compact, processor(text=[text], images=opened, return_tensors="np")


@pytest.mark.parametrize("sizes", SIZES, ids=len)
def test_expanded_ids_are_those_of_transformers(
    model: Path, processor: ImageProcessor, sizes: list[tuple[int, int]]
) -> None:
    compact, expected = transformers_inputs(model, sizes)
    tokens, source = processor.expand(compact, sizes)
    assert tokens.tolist() == expected["input_ids"][0].tolist()
    assert compact[source].tolist() == tokens.tolist()
    assert sorted(set(source.tolist())) == list(range(len(compact)))
    assert processor.added(sizes) == len(tokens) - len(compact)


@pytest.mark.parametrize("sizes", SIZES, ids=len)
def test_pixels_and_grids_are_those_of_transformers(
    model: Path, processor: ImageProcessor, sizes: list[tuple[int, int]]
) -> None:
    from transformers import AutoImageProcessor

    images = [picture(*size, seed=i) for i, size in enumerate(sizes)]
    opened = [Pillow.open(io.BytesIO(image.data)) for image in images]
    own = AutoImageProcessor.from_pretrained(model, backend=BACKEND)
    expected = own(images=opened, return_tensors="np")
    pixels = processor.pixels(images)
    assert np.array_equal(pixels.values, expected["pixel_values"])
    assert np.array_equal(pixels.grids, expected["image_grid_thw"])
    counts = [int(grid.prod()) // processor.merge**2 for grid in pixels.grids]
    assert counts == [processor.tokens_of(*size) for size in sizes]


def test_expansion_without_images_changes_nothing(processor: ImageProcessor) -> None:
    tokens = np.array([1, 2, 3], np.int32)
    expanded, source = processor.expand(tokens, [])
    assert expanded.tolist() == [1, 2, 3]
    assert source.tolist() == [0, 1, 2]


def test_placeholders_and_images_must_be_as_many(processor: ImageProcessor) -> None:
    tokens = np.array([1, processor.placeholder, 3], np.int32)
    with pytest.raises(ValueError, match="1 placeholders of images in the tokens, 2 images"):
        processor.expand(tokens, [(64, 64), (64, 64)])


def test_a_sampled_placeholder_stands_for_no_image(processor: ImageProcessor) -> None:
    pad = processor.placeholder
    tokens = np.array([pad, 5, pad, pad], np.int32)
    sampled = np.array([0, 1, 1, 0], np.uint8)
    expanded, source = processor.expand(tokens, [(64, 64), (64, 128)], sampled=sampled)
    first, last = processor.tokens_of(64, 64), processor.tokens_of(64, 128)
    assert expanded.tolist() == [pad] * first + [5, pad] + [pad] * last
    assert source.tolist() == [0] * first + [1, 2] + [3] * last


def test_a_shape_that_the_model_refuses_is_named(processor: ImageProcessor) -> None:
    with pytest.raises(ValueError, match=r"an image of 4000x10 pixels: .*ratio"):
        processor.tokens_of(4000, 10)


def test_another_family_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigurationError, match="'llama' cannot be trained with images"):
        ImageProcessor(tmp_path)


def test_a_checkpoint_without_settings_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl", "image_token_id": 3}')
    with pytest.raises(ConfigurationError, match=r"has no preprocessor_config\.json"):
        ImageProcessor(tmp_path)


def test_counting_needs_no_torch(model: Path) -> None:
    # The buffer and the worker leave torch out of their processes.
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from pathlib import Path\n"
        "from sluice.images.processor import ImageProcessor\n"
        "print(ImageProcessor(Path(sys.argv[1])).tokens_of(100, 37))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(model)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) == ImageProcessor(model).tokens_of(100, 37)


def test_the_example_model_is_the_same_every_time(model: Path, tmp_path: Path) -> None:
    family = json.loads((model / "config.json").read_text())["model_type"]
    again = make_model(tmp_path, family)
    for file in sorted(model.iterdir()):
        assert (again / file.name).read_bytes() == file.read_bytes(), file.name
