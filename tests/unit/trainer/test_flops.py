import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from sluice.api import RLJobSpec
from sluice.api.groups.trainer import VISION_PARTS, VisionPart
from sluice.model_parts import vision_part
from sluice.runtime.pod_env import ConfigurationError
from sluice_trainer.clients.buffer_client import Balance
from sluice_trainer.loop.clients import balance
from sluice_trainer.model.flops import (
    ModelFlops,
    image_cost,
    model_flops,
    peak_tflops,
    tower_flops,
    utilisation,
)
from tests.vision_models import TRAINED_FAMILIES, make_model

# Qwen3-0.6B.
DENSE = {
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
}


def test_a_dense_model_has_two_operations_for_each_weight() -> None:
    flops = model_flops(DENSE)
    assert flops is not None
    layers = 28 * (1024 * 128 * (2 * 16 + 2 * 8) + 3 * 1024 * 3072)
    assert flops.per_token == 2 * (layers + 1024 * 151936)
    assert flops.per_token / 2 == pytest.approx(0.596e9, rel=0.01)  # its parameters, tied
    assert flops.per_pair == 4 * 28 * 16 * 128


def test_only_chosen_experts_count() -> None:
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    config = DENSE | experts
    flops, dense = model_flops(config), model_flops(DENSE)
    assert flops is not None
    assert dense is not None
    per_layer = (flops.per_token - dense.per_token) / 2 / 28
    assert per_layer == 3 * 1024 * 768 * 8 + 1024 * 128 - 3 * 1024 * 3072


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({"hidden_size": 8}, id="sizes missing"),
        pytest.param(DENSE | {"kv_lora_rank": 512}, id="latent attention"),
        pytest.param(DENSE | {"layer_types": ["linear_attention"]}, id="linear attention"),
    ],
)
def test_operations_of_unknown_layers_are_not_guessed(config: dict[str, object]) -> None:
    assert model_flops(config) is None


def test_training_costs_three_forwards() -> None:
    assert ModelFlops(10.0, 1.0).training([3, 1]) == 3 * (10 * 4 + 6 + 1)


def test_utilisation_is_the_share_of_a_gpus_peak() -> None:
    flops = ModelFlops(989e9, 0.0)
    shares = utilisation(flops, [100], 0.6, 1, "NVIDIA H200")
    assert shares == pytest.approx({"perf/actor_train_tflops": 494.5, "perf/mfu": 0.5})
    assert set(utilisation(flops, [100], 0.6, 1, "Some GPU")) == {"perf/actor_train_tflops"}
    assert utilisation(flops, [100], 0.6, 0, "") == {}
    assert peak_tflops("NVIDIA A100-SXM4-80GB") == 312


def test_operations_of_towers_count() -> None:
    alone, with_tower = (
        utilisation(ModelFlops(1e12, 0.0), [1], 1.0, 1, "NVIDIA H200", tower=tower)
        for tower in (0.0, 3e12)
    )
    assert with_tower["perf/mfu"] == pytest.approx(2 * alone["perf/mfu"])


@pytest.fixture(scope="module", params=TRAINED_FAMILIES)
def vision_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.parametrize(
    "trained",
    [(), ("projector",), ("vision",), ("vision", "projector")],
    ids=["frozen", "projector", "tower", "both"],
)
def test_operations_of_a_tower_are_those_that_torch_counts(
    vision_model: Path, trained: tuple[VisionPart, ...]
) -> None:
    model = transformers.AutoModelForImageTextToText.from_pretrained(
        vision_model, attn_implementation="eager"
    )
    config = json.loads((vision_model / "config.json").read_text())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("visual" in name and vision_part(name) in trained)
    flops = tower_flops(config)
    assert flops is not None
    # Larger and smaller than a window of Qwen2.5-VL's tower, and no multiple of it.
    for rows, columns in ((2, 2), (5, 3)):
        actual = counted_by_torch(
            model, config["vision_config"], rows, columns, train=bool(trained)
        )
        assert flops.training(rows, columns, trained) == actual
        assert trained or flops.forward(rows, columns) == actual


def counted_by_torch(
    model: Any, config: dict[str, Any], rows: int, columns: int, *, train: bool
) -> int:
    """Return the operations of an image's forward pass, and with `train` of its backward pass."""
    merge = config["spatial_merge_size"]
    grid = torch.tensor([[1, rows * merge, columns * merge]])
    pixels = torch.zeros(int(grid.prod()), 3 * 2 * config["patch_size"] ** 2)
    with FlopCounterMode(display=False) as counter:
        output = model.model.get_image_features(pixels, grid, return_dict=True)
        deep = getattr(output, "deepstack_features", None) or []
        if train:
            sum(part.sum() for part in (*output.pooler_output, *deep)).backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "config", [DENSE, {"vision_config": {"hidden_size": 8}}], ids=["no tower", "another one"]
)
def test_operations_of_other_towers_are_not_guessed(config: dict[str, object]) -> None:
    assert tower_flops(config) is None


def spec(directory: Path, by: str) -> RLJobSpec:
    return RLJobSpec.model_validate(
        {
            "model": {"path": str(directory)},
            "data": {"prompts": [{"path": "p"}]},
            "reward": {"type": "f1"},
            "trainer": {"steps": 1, "balance": by},
        }
    )


def test_at_balance_tokens_attention_costs_as_much_as_all_matrices(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    flops = model_flops(DENSE)
    assert flops is not None
    n0 = balance(spec(tmp_path, "flops")).tokens
    assert flops.per_pair * n0**2 / 2 == pytest.approx(flops.per_token * n0)
    assert balance(spec(tmp_path, "tokens")) == Balance()


# Qwen3-VL-4B.
TOWER = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "in_channels": 3,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": 2560,
    "deepstack_visual_indexes": [5, 11, 17],
}


def test_a_trained_tower_costs_more_than_a_frozen_one_that_samples_share() -> None:
    flops, config = model_flops(DENSE), DENSE | {"vision_config": TOWER}
    assert flops is not None
    alone, shared = (image_cost(config, flops, (), samples) for samples in (1, 8))
    trained = image_cost(config, flops, VISION_PARTS, 8)
    assert shared == pytest.approx(alone / 8)
    assert 2.9 * alone < trained < 3 * alone
    assert image_cost(DENSE, flops, (), 1) == 0


def test_balancing_by_flops_needs_known_operations(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DENSE | {"kv_lora_rank": 512}))
    with pytest.raises(ConfigurationError, match=r"trainer\.balance: flops .*config\.json"):
        balance(spec(tmp_path, "flops"))
