"""The manifests for geometry problems fit rows in the form of verl's geo3k, and their models."""

from __future__ import annotations

import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image, ImageDraw

from tests.tools import ROOT
from tests.unit.cli.conftest import Sluice
from tests.vision_models import make_model

EXAMPLES = {
    "geo3k-one-gpu": "qwen2_5_vl",
    "geo3k-two-gpus": "qwen2_5_vl",
    "geo3k-eight-gpus": "qwen3_vl",
}
INSTRUCTION = (
    "You FIRST think about the reasoning process as an internal monologue and then provide the "
    "final answer. The final answer MUST BE put in \\boxed{}."
)


def triangle(base: int, height: int) -> bytes:
    image = Image.new("RGB", (320, 240), "white")
    ImageDraw.Draw(image).polygon(
        [(20, 220), (20 + base, 220), (20, 220 - height)], outline="black"
    )
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def write_rows(path: Path, split: str) -> None:
    """Write rows with the columns and types of verl's examples/data_preprocess/geo3k.py."""
    rows = [
        {
            "data_source": "hiyouga/geometry3k",
            "prompt": [
                {"role": "user", "content": f"<image>Find the area. {INSTRUCTION}"},
            ],
            "images": [{"bytes": triangle(10 * n, 12 * n), "path": None}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(60 * n * n)},
            "extra_info": {"split": split, "index": n, "answer": str(n), "question": "Find it."},
        }
        for n in range(1, 17)
    ]
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_manifest_is_valid_with_rows_of_verls_form(
    name: str, sluice: Sluice, tmp_path: Path
) -> None:
    manifest = tmp_path / f"{name}.yaml"
    manifest.write_text((ROOT / f"examples/vision/{name}.yaml").read_text())
    for split in ("train", "test"):
        write_rows(tmp_path / f"geo3k/{split}.parquet", split)
    model = make_model(tmp_path / "model", EXAMPLES[name])
    result = sluice("validate", "--deep", manifest, "--set", f"model.path={model}")
    assert result.exit_code == 0, result.output
    assert "1 image: 320 x 240" in result.stdout
    assert "reward of the label '60' as the answer to" in result.stdout
