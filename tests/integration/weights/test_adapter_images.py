"""Engines that see images serve adapters of the language model, like merged weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sluice.engines.sglang import launch
from tests.integration.engines import distance
from tests.integration.vision_judge import Judge
from tests.integration.weights import tools
from tests.integration.weights.adapters import ALL_LAYERS, RANK, adapter_of, merged, publish_adapter
from tests.integration.weights.test_images import LARGE, SMALL, TOLERANCE, answer
from tests.integration.weights.test_sender import JoinEngine, MakeSender
from tests.vision_models import make_model

# Layers of gated delta nets: three of four layers of Qwen3.5.
RECURRENT = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj")
WITH_VERSIONS = ("out_proj",)
ADDED, SEVERAL = 0, 2  # versions that an engine holds


@pytest.mark.parametrize(
    ("family", "versions", "layers"),
    [
        pytest.param(
            "qwen2_5_vl", ADDED, ALL_LAYERS, id="qwen2_5_vl added", marks=pytest.mark.long
        ),
        pytest.param("qwen3_vl", ADDED, ALL_LAYERS, id="qwen3_vl added", marks=pytest.mark.long),
        pytest.param(
            *("qwen3_5", ADDED, ALL_LAYERS + RECURRENT), id="qwen3_5 added", marks=pytest.mark.long
        ),
        pytest.param(
            "qwen2_5_vl", SEVERAL, ALL_LAYERS, id="qwen2_5_vl versions", marks=pytest.mark.long
        ),
        pytest.param("qwen3_vl", SEVERAL, ALL_LAYERS, id="qwen3_vl versions"),
        pytest.param(
            "qwen3_5",
            SEVERAL,
            ALL_LAYERS + WITH_VERSIONS,
            id="qwen3_5 versions",
            marks=pytest.mark.long,
        ),
    ],
)
async def test_an_engine_sees_images_with_an_adapter_as_with_merged_weights(
    family: str,
    versions: int,
    layers: tuple[str, ...],
    tmp_path: Path,
    join_engine: JoinEngine,
    make_sender: MakeSender,
) -> None:
    model = make_model(tmp_path / "model", family)
    judge = Judge(model)
    settings = {"rank": RANK, "versions": versions, "layers": ["all-linear"]}
    arguments = launch.image_args(on_cpu=True)
    if versions:
        arguments |= launch.lora_args(RANK, ["all-linear"], versions, on_cpu=True)
    # By transformers' names, as the trainer has them: a checkpoint may have others.
    weights = [
        (name, parameter.detach())
        for name, parameter in judge.model.named_parameters()
        if ".visual." not in name
    ]
    environment = {**launch.IMAGE_ENV, "SLUICE_LORA": json.dumps(settings)}
    with tools.serving(
        model, tmp_path / "log", *launch.render_args(arguments), **environment
    ) as server:
        await join_engine("engine-0", server.address)
        sender = make_sender(lora="adapter", pauseMode="versions" if versions else "in_place")
        async with server.engine.client(server.url) as client:
            await client.wait_ready(30.0)
            for version in (1, 2):
                tensors = adapter_of(weights, version, layers)
                outcome = await publish_adapter(sender, version, tensors)
                assert (outcome.engines, outcome.failed) == (("engine-0",), {}), outcome
                trained = Judge(merged(model, tensors, tmp_path / str(version)))
                for images in ([SMALL], [LARGE, SMALL], []):
                    after = await answer(client, judge, *images, after=[])
                    assert [span.version for span in after.spans] == [version]
                    ids = judge.ids(len(images))
                    expected = trained.log_probs(ids, images, after.tokens)
                    assert distance(after.log_probs, expected) < TOLERANCE
                    without = judge.log_probs(ids, images, after.tokens)
                    assert distance(after.log_probs, without) > 10 * TOLERANCE
