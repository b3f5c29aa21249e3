"""`sluice data inspect` of rows with images."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sluice.api import API_VERSION
from sluice.images.processor import ImageProcessor
from sluice_cli.main import app
from tests.images import drawn, encoded
from tests.vision_models import make_model


def inspect(path: Path, *words: Any) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(app, ["data", "inspect", str(path), *map(str, words), "--json"])
    return result.exit_code, json.loads(result.stdout)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Five rows: an image, the same question about another, two images, one cut off, none."""
    (tmp_path / "a.png").write_bytes(encoded(drawn(56, 28)))
    (tmp_path / "b.jpg").write_bytes(encoded(drawn(2000, 1000), "JPEG"))
    (tmp_path / "cut.png").write_bytes(encoded(drawn(56, 28))[:-300])
    rows = [
        {
            "prompt": [{"role": "user", "content": "<image>" * len(images) + "What?"}],
            "images": images,
        }
        for images in (["a.png"], ["b.jpg"], ["a.png", "b.jpg"], ["cut.png"], ["none.png"])
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_inspect_counts_images_and_names_bad_ones(rows: Path) -> None:
    code, facts = inspect(rows)
    assert code == 1
    assert facts["problems"] == [f"{rows}:5: images[0]: {rows.parent}/none.png: no such file"]
    assert facts["duplicates"] == 0
    images = facts["images"]
    assert (images["rows"], images["images"], images["mostOfARow"]) == (4, 5, 2)
    assert images["formats"] == {"PNG": 3, "JPEG": 2}
    assert images["scaledDown"] == 2
    assert images["pixels"]["max"] == 2_000_000


def test_decoding_finds_images_that_are_cut_off(rows: Path) -> None:
    _, facts = inspect(rows, "--decode")
    assert [problem.partition(" ")[0] for problem in facts["problems"]] == [
        f"{rows}:4:",
        f"{rows}:5:",
    ]
    assert "the image is broken or cut off" in facts["problems"][0]


def test_inspect_as_text_says_what_images_there_are(rows: Path) -> None:
    result = CliRunner().invoke(app, ["data", "inspect", str(rows)])
    assert "5 in 4 rows, up to 2 in a row; PNG (3), JPEG (2)" in result.stdout.replace("\n", " ")
    assert "2 are scaled down" in " ".join(result.stdout.split())


def test_tokens_of_images_count(rows: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    make_model(model, "qwen2_5_vl")
    path = tmp_path / "one.jsonl"
    path.write_text("".join(rows.read_text().splitlines(keepends=True)[:1]))
    plain = tmp_path / "plain.jsonl"
    plain.write_text(json.dumps({"prompt": [{"role": "user", "content": "What?"}]}) + "\n")
    [with_image, without] = (inspect(file, "--model", model)[1] for file in (path, plain))
    assert with_image["unit"] == "tokens"
    tokens = ImageProcessor(model).tokens_of(56, 28)
    assert tokens > 1
    # <|vision_start|> and <|vision_end|> are around them.
    assert with_image["lengths"]["max"] == without["lengths"]["max"] + tokens + 2


def test_validate_looks_at_images_as_the_run_does(rows: Path, tmp_path: Path) -> None:
    make_model(tmp_path / "model", "qwen2_5_vl")
    lines = rows.read_text().splitlines(keepends=True)
    labelled = [json.dumps(json.loads(line) | {"label": "3"}) + "\n" for line in lines]
    rows.write_text("".join(labelled[:3]))
    spec = {
        "model": {"path": str(tmp_path / "model")},
        "data": {"prompts": [{"path": str(rows)}], "images": {"maxPixels": 100_000}},
        "rollout": {"batchSize": 2, "samplesPerPrompt": 2},
        "reward": {"type": "exact_match"},
        "trainer": {"steps": 1, "backend": "fsdp"},
    }
    job = tmp_path / "job.yaml"
    job.write_text(
        json.dumps(
            {"apiVersion": API_VERSION, "kind": "RLJob", "metadata": {"name": "job"}, "spec": spec}
        )
    )
    words = ["validate", str(job), "--deep", "-o", "json"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    [answer] = json.loads(result.stdout)
    prompts = answer["trial"]["prompts"]
    assert [prompt["images"] for prompt in prompts] == [
        [[56, 28]],
        [[447, 223]],
        [[56, 28], [447, 223]],
    ]
    rows.write_text("".join(labelled))
    result = CliRunner().invoke(app, ["validate", str(job)])
    assert result.exit_code == 2
    assert f"{rows}:5: images[0]: {rows.parent}/none.png: no such file" in result.output
    rows.write_text(labelled[3])
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert "rows.jsonl:1: images[0]: the image is broken or cut off" in result.output
