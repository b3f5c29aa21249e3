"""A model that cannot fit into this machine is refused before a run starts."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForImageTextToText

from sluice.api import RLJobSpec
from sluice_cli.validate import footprint
from sluice_cli.validate.footprint import (
    MachineMemory,
    MemoryNeeds,
    needs,
    parameters,
    shortage_on,
    vision_parameters,
)
from tests.algorithm_cases import POOLED, manifest
from tests.unit.cli.conftest import Sluice
from tests.vision_models import make_model

QWEN3_8B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
QWEN3_30B_A3B = QWEN3_8B | {
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "moe_intermediate_size": 768,
}
GIB = 1 << 30


def spec(**groups: Any) -> RLJobSpec:
    cpu = {"trainer": {"steps": 1, "gpusPerNode": 0}, "rollout": {"gpusPerReplica": 0}}
    return RLJobSpec.model_validate(manifest({}, cpu | groups))


@pytest.mark.parametrize(
    ("config", "billions"),
    [(QWEN3_8B, 8.19), (QWEN3_30B_A3B, 30.5), ({"text_config": QWEN3_8B}, 8.19)],
    ids=["dense", "mixture of experts", "with a part for pictures"],
)
def test_parameters_by_the_configuration(
    config: dict[str, Any], billions: float, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    count = parameters(tmp_path)
    assert count is not None
    assert count / 1e9 == pytest.approx(billions, rel=0.01)


def test_safetensors_take_precedence_over_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    for number, shape in enumerate([[1000, 300], [7], []]):
        tensor = {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]}
        header = json.dumps({"__metadata__": {"format": "pt"}, "weight": tensor}).encode()
        file = tmp_path / f"model-{number}.safetensors"
        file.write_bytes(struct.pack("<Q", len(header)) + header)
    assert parameters(tmp_path) == 300_008


@pytest.mark.parametrize("config", ["{", "{}", '{"hidden_size": 8}', '{"kv_lora_rank": 4}'])
def test_an_unknown_configuration_has_no_count(config: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    assert parameters(tmp_path) is None


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ({}, MemoryNeeds(memory=14 + 4)),
        (
            {"rollout": {"gpusPerReplica": 0, "replicas": 3}},
            MemoryNeeds(memory=14 + 12),
        ),
        (
            POOLED | {"trainer": {"steps": 1, "gpusPerNode": 0, "lora": {}}},
            MemoryNeeds(memory=4),
        ),
        (
            {
                "rollout": {"gpusPerReplica": 1},
                "trainer": {"steps": 1, "gpusPerNode": 2, "lora": {}},
            },
            MemoryNeeds(trainer_gpu=1, engine_gpu=2),
        ),
        (
            {
                "rollout": {"gpusPerReplica": 1},
                "trainer": {
                    "steps": 1,
                    "gpusPerNode": 4,
                    "backend": "fsdp",
                    "lora": {"quantizeBase": "nf4"},
                },
            },
            MemoryNeeds(trainer_gpu=0, engine_gpu=2),
        ),
        (
            {
                "trainer": {
                    "steps": 1,
                    "gpusPerNode": 0,
                    "processesPerNode": 16,
                    "backend": "fsdp",
                    "lora": {"quantizeBase": "nf4"},
                },
            },
            MemoryNeeds(memory=9 + 4),
        ),
        (
            {
                "rollout": {"gpusPerReplica": 2},
                "trainer": {"steps": 1, "nodes": 2, "gpusPerNode": 2},
            },
            MemoryNeeds(trainer_gpu=14 // 4, engine_gpu=1),
        ),
        (
            {
                "rollout": {"gpusPerReplica": 1, "precision": "fp8_block"},
                "trainer": {"steps": 1, "gpusPerNode": 1, "backend": "fsdp", "cpuOffload": "all"},
            },
            MemoryNeeds(memory=12, engine_gpu=1),
        ),
        (
            {
                "rollout": {"gpusPerReplica": 1},
                "trainer": {"steps": 1, "gpusPerNode": 1, "backend": "fsdp", "cpuOffload": "all"},
            },
            MemoryNeeds(memory=12, engine_gpu=2),
        ),
        (
            {
                "rollout": {"gpusPerReplica": 1},
                "trainer": {"steps": 1, "gpusPerNode": 1, "cpuOffload": "optimizer"},
            },
            MemoryNeeds(memory=12, trainer_gpu=2, engine_gpu=2),
        ),
        ({"debug": {"rolloutOnly": True}}, MemoryNeeds(memory=4)),
    ],
    ids=[
        "CPU",
        "three engines",
        "a pool",
        "adapters on GPUs",
        "adapters of a quantized base",
        "a quantized base in each process",
        "GPUs",
        "engines in 8 bits",
        "all in the host",
        "optimizer in the host",
        "no trainer",
    ],
)
def test_lower_bounds_of_memory(groups: dict[str, Any], expected: MemoryNeeds) -> None:
    million = 10**6
    least = needs(spec(**groups), million)
    assert (least.memory, least.engine_gpu) == (
        expected.memory * million,
        expected.engine_gpu * million,
    )
    assert least.trainer_gpu // million == expected.trainer_gpu


IMAGES = {"prompts": [{"path": "p"}], "images": {}}
FSDP = {"steps": 1, "backend": "fsdp"}


@pytest.mark.parametrize(
    ("groups", "memory", "gpu"),
    [
        pytest.param({"data": {"prompts": [{"path": "p"}]}}, 14 * 70 + 400, 0, id="text alone"),
        pytest.param({"data": IMAGES}, 14 * 70 + 4 * 30 + 400, 0, id="frozen on a CPU"),
        pytest.param(
            {"data": IMAGES, "trainer": {"gpusPerNode": 1}}, 0, 16 * 70 - 140 + 60, id="one GPU"
        ),
        pytest.param(
            {"data": IMAGES, "trainer": {"gpusPerNode": 2}},
            0,
            (14 * 70 + 60) // 2 + 60,
            id="whole in each of two",
        ),
        pytest.param(
            {"data": IMAGES, "trainer": {"gpusPerNode": 2, "freeze": ["vision"]}},
            0,
            (14 * 80 + 40) // 2 + 60,
            id="a trained projector",
        ),
        pytest.param(
            {"data": IMAGES, "trainer": {"gpusPerNode": 2, "lora": {}}},
            0,
            2 * 100 // 2 + 60,
            id="adapters",
        ),
        pytest.param(
            {"data": IMAGES, "trainer": {"gpusPerNode": 1, "cpuOffload": "all"}},
            12 * 70 + 60,
            60,
            id="in the host, and whole for a pass",
        ),
    ],
)
def test_a_tower_counts_as_it_is_used(groups: dict[str, Any], memory: int, gpu: int) -> None:
    """The tower has 20 of 100 parameters, and the projector 10."""
    trainer = FSDP | {"gpusPerNode": 0} | groups.get("trainer", {})
    on_gpu = {"gpusPerReplica": 1 if trainer["gpusPerNode"] else 0}
    job = spec(**groups | {"trainer": trainer, "rollout": on_gpu})
    least = needs(job, 100, {"vision": 20, "projector": 10})
    assert (least.memory, least.trainer_gpu) == (memory, gpu)


def test_the_parameters_of_tower_and_projector(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen3_vl")
    counts = vision_parameters(model)
    whole = AutoModelForImageTextToText.from_pretrained(model)
    assert sum(counts.values()) == sum(p.numel() for p in whole.model.visual.parameters())
    mergers = (whole.model.visual.merger, whole.model.visual.deepstack_merger_list)
    assert counts["projector"] == sum(p.numel() for part in mergers for p in part.parameters())
    assert vision_parameters(tmp_path) == {}


@pytest.mark.parametrize(
    ("groups", "machine", "sentence"),
    [
        (
            {},
            MachineMemory(64 * GIB),
            "spec.model.path: a model of 8.0B parameters takes at least 134.1 GiB of memory, "
            "and this machine has 64.0 GiB: use a smaller model, or a machine with more memory",
        ),
        ({}, MachineMemory(140 * GIB), ""),
        (
            {"rollout": {"gpusPerReplica": 1}, "trainer": {"steps": 1, "gpusPerNode": 1}},
            MachineMemory(64 * GIB, 80 * GIB),
            "spec.model.path: a model of 8.0B parameters takes at least 104.3 GiB of each GPU of "
            "the trainer, and a GPU has 80.0 GiB: use a smaller model or larger GPUs, raise "
            "trainer.gpusPerNode, or set trainer.cpuOffload",
        ),
        (
            {"rollout": {"gpusPerReplica": 1}, "trainer": {"steps": 1, "gpusPerNode": 1}},
            MachineMemory(64 * GIB),
            "",
        ),
    ],
    ids=["too large", "may fit", "too large for a GPU", "nothing tells the GPU's memory"],
)
def test_a_shortage_is_one_sentence(
    groups: dict[str, Any], machine: MachineMemory, sentence: str
) -> None:
    assert shortage_on(spec(**groups), 8 * 10**9, machine) == sentence


def test_run_refuses_a_model_that_is_far_too_large(task: Path, sluice: Sluice) -> None:
    file = task / "model/config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"num_hidden_layers": 10**9}))
    result = sluice("run", task / "job.yaml", "--run-dir", task / "run")
    assert (result.exit_code, (task / "run").exists()) == (2, False), result.output
    assert "takes at least" in result.output
    result = sluice("validate", task / "job.yaml")
    assert result.exit_code == 0, result.output
    note = "note: sluice run would refuse this job on this machine: spec.model.path: a model of"
    assert note in result.output


def test_this_machine_has_memory() -> None:
    assert footprint.this_machine().memory > 1 << 28
