"""Random adapters, sent in several buckets, and checkpoints that have them merged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import torch
from prometheus_client.parser import text_string_to_metric_families

from sluice.engines.protocol import ADAPTER_PREFIX, ADAPTER_SCALING, Engine
from sluice.engines.sglang.layout import Layout
from sluice_trainer.lora.merging import merge_adapter
from sluice_trainer.model import safetensors_file
from sluice_trainer.weights.buckets import Bucket, buckets
from sluice_trainer.weights.outcome import UpdateOutcome
from sluice_trainer.weights.sender import WeightSender
from tests.integration.engines import Sglang, call, tensors
from tests.integration.weights.tools import SGLANG, Tensors, begin, serves

RANK, ALPHA = 4, 32
BUCKET = 10_000  # bytes: a layer's part of the adapter
ALL_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ATTENTION = ALL_LAYERS[:4]


def adapter(
    base: Path, seed: int, layers: Collection[str] = ALL_LAYERS, rank: int = RANK
) -> Tensors:
    """Return a random adapter of these layers, by PEFT's names, in the order of a trainer."""
    return adapter_of(tensors(base), seed, layers, rank)


def adapter_of(
    weights: Iterable[tuple[str, torch.Tensor]],
    seed: int,
    layers: Collection[str],
    rank: int = RANK,
) -> Tensors:
    """Return a random adapter for those of a model's weights that are of these layers."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [(ADAPTER_SCALING, torch.tensor([ALPHA / rank]))]
    for name, weight in weights:
        layer = name.removesuffix(".weight")
        if layer.rpartition(".")[2] not in layers:
            continue
        outputs, inputs = weight.shape
        for side, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            tensor = torch.randn(shape, generator=generator) * 0.1
            drawn.append((f"{ADAPTER_PREFIX}{layer}.lora_{side}.weight", tensor.to(weight.dtype)))
    return sorted(drawn, key=lambda named: named[0])


async def publish_adapter(sender: WeightSender, version: int, adapter: Tensors) -> UpdateOutcome:
    """Send an adapter in several buckets."""
    await begin(sender, version, joiners_only=False)
    return await send_adapter(sender, adapter)


async def send_adapter(sender: WeightSender, adapter: Tensors) -> UpdateOutcome:
    sent = buckets_of(adapter)
    assert len(sent) > 1 or len(adapter) == 1
    for bucket in sent:
        await sender.send(bucket)
    return await sender.finish()


def buckets_of(adapter: Tensors) -> list[Bucket]:
    return [*buckets(adapter, BUCKET, Layout())]


def merged(base: Path, adapter: Tensors, directory: Path, rank: int = RANK) -> Path:
    """Write the checkpoint of `base` with the adapter added, as `sluice convert` does."""
    files = directory / "adapter"
    files.mkdir(parents=True)
    tensors = {name: tensor for name, tensor in adapter if name != ADAPTER_SCALING}
    safetensors_file.save(tensors, files / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": ALPHA}
    (files / "adapter_config.json").write_text(json.dumps(config))
    merge_adapter(files, base, directory / "merged")
    shutil.rmtree(files)
    return directory / "merged"


def job_metrics(engine: Sglang, job: str = "") -> dict[str, float]:
    """Return what the engine exports of a job, by name and further labels' values.

    An engine of one job gives its metrics an empty label `job`.
    """
    found = {}
    for family in text_string_to_metric_families(call(engine.url + "/metrics")[1]):
        for sample in family.samples:
            further = [value for label, value in sample.labels.items() if label != "job"]
            if sample.name.startswith("sluice_") and sample.labels["job"] == job:
                found[" ".join([sample.name, *further])] = sample.value
    return found


async def serves_adapters(
    sender: WeightSender,
    url: str,
    base: Path,
    directory: Path,
    updates: Mapping[int, tuple[str, ...]],
    engine: Engine = SGLANG,
) -> tuple[Tensors, Path]:
    """Send the adapters of some versions to `engine-0`, and check that it serves each of them.

    updates: layers of the adapter, by version. Returns the last adapter, and its merged checkpoint.
    """
    for version, layers in updates.items():
        tensors = adapter(base, version, layers)
        outcome = await publish_adapter(sender, version, tensors)
        assert (outcome.engines, outcome.failed) == (("engine-0",), {}), outcome
        model = merged(base, tensors, directory / str(version))
        assert await serves(url, model, version, engine)
    return tensors, model
