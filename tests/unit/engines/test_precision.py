"""Engines in few bits: which models fit, and updates of layers that SGLang has rearranged."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sluice.api import RLJobSpec
from sluice.engines import engine_of
from sluice.engines.plugin_common.precision import (
    VARIABLE,
    kept_modules,
    quantization_config,
    sglang_config,
    unfit,
)
from sluice.engines.protocol import ServerPlacement
from tests.algorithm_cases import manifest
from tests.unit.engines.conftest import Plugin

SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
PLACE = ServerPlacement(model="/m", bind="0.0.0.0", port="1", index="0")


@pytest.mark.parametrize(
    ("changes", "ranks", "problem"),
    [
        ({}, 8, ""),
        ({"head_dim": 64}, 1, ""),
        ({"text_config": SHAPE | {"hidden_size": 1000}}, 1, "hidden_size (1000) is none"),
        ({"intermediate_size": 2880}, 1, "intermediate_size (2880) is none"),
        ({}, 16, "intermediate_size (3072) / 16 GPUs is none"),
        ({"head_dim": 64}, 8, "num_key_value_heads x head_dim (512) / 8 GPUs is none"),
        ({"moe_intermediate_size": 768}, 8, "moe_intermediate_size (768) / 8 GPUs is none"),
        (
            {"hidden_size": 1, "intermediate_size": 1},
            1,
            "hidden_size (1), intermediate_size (1) are none: set rollout.precision: fp8",
        ),
        ({"kv_lora_rank": 512, "num_attention_heads": 1, "head_dim": 1}, 1, ""),
    ],
    ids=[
        "whole",
        "small heads",
        "a part for images",
        "width",
        "width of a rank",
        "keys of a rank",
        "experts of a rank",
        "several",
        "latent attention",
    ],
)
def test_blocks_need_multiples_of_128_on_each_gpu(
    changes: dict[str, Any], ranks: int, problem: str
) -> None:
    reason = unfit("fp8_block", SHAPE | changes, [], ranks, ranks)
    assert problem in reason
    assert bool(problem) == bool(reason)
    assert not unfit("fp8", SHAPE | changes, [], ranks, ranks)


@pytest.mark.parametrize("precision", ["fp8", "fp8_block", "int8"])
def test_experts_in_one_tensor_are_refused(precision: str) -> None:
    names = ["model.layers.0.mlp.experts.gate_up_proj"]
    assert "all experts of a layer in one tensor" in unfit(precision, SHAPE, names, 1, 1)


def test_modules_that_keep_their_precision_are_named() -> None:
    names = [
        "model.embed_tokens.weight",
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.mlp.experts.0.up_proj.weight",
        "model.layers.0.input_layernorm.weight",
        "lm_head.weight",
    ]
    kept = ["lm_head", "model.embed_tokens", "model.layers.0.mlp.gate"]
    assert kept_modules(names) == kept
    assert quantization_config("fp8_block", kept)["modules_to_not_convert"] == kept
    assert quantization_config("int8", kept)["ignore"] == kept
    assert sglang_config("int8", kept)["ignore"] == ["model.layers.0.mlp.gate"]


def spec(**rollout: Any) -> RLJobSpec:
    return RLJobSpec.model_validate(manifest({}, {"rollout": rollout}))


def test_the_engine_is_told_its_precision() -> None:
    for precision in ("fp8", "fp8_block", "int8"):
        job = spec(precision=precision)
        assert engine_of(job).launch.env(job)[VARIABLE] == precision
        assert not engine_of(job).layout.takes_stacks(job)
    assert VARIABLE not in engine_of(spec()).launch.env(spec())


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_the_engine_is_told_the_precision_of_its_cache(engine: str) -> None:
    job = spec(engine=engine, kvCacheDtype="fp8_e4m3")
    args = engine_of(job).launch.args(job, PLACE)
    assert args[args.index("--kv-cache-dtype") + 1] == "fp8_e4m3"


@pytest.mark.parametrize(
    ("algorithm", "rollout", "method"),
    [
        ({}, {}, "none"),
        ({}, {"precision": "fp8_block"}, "tis"),
        ({}, {"kvCacheDtype": "fp8_e4m3"}, "tis"),
        ({"offPolicy": {"method": "none"}}, {"precision": "fp8"}, "none"),
        ({"offPolicy": {"method": "icepop"}}, {"precision": "fp8"}, "icepop"),
        ({"offPolicy": {"oldLogProbs": "rollout"}}, {"precision": "fp8"}, "none"),
    ],
    ids=["bf16", "weights", "cache", "none", "icepop", "the engine's log-probs"],
)
def test_the_loss_corrects_for_engines_in_few_bits_unless_told_otherwise(
    algorithm: dict[str, Any], rollout: dict[str, Any], method: str
) -> None:
    job = RLJobSpec.model_validate(manifest(algorithm, {"rollout": rollout}))
    assert job.with_correction().algorithm.off_policy.method == method


class Transposing(nn.Module):
    """A layer that SGLang rearranges after it has loaded it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 3, dtype=torch.int8), requires_grad=False)

    def process(self) -> None:
        self.weight = nn.Parameter(self.weight.t(), requires_grad=False)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Transposing()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for _, tensor in weights:
            self.layer.weight.data.copy_(tensor)


def test_a_rearranged_layer_can_be_loaded_again_and_again(plugin: Plugin) -> None:
    quantized = plugin("weights.quantized")
    model = Model()
    quantized.remember(model)
    for number in range(3):
        tensor = torch.arange(6, dtype=torch.int8).reshape(2, 3) + number
        if number == 2:  # a release without sessions does not process again
            model.load_weights([("w", tensor)])
        else:
            model.load_weights([("w", tensor)])
            quantized.before_processing(model)
            model.layer.process()
        assert torch.equal(model.layer.weight, tensor.t())
    quantized.check(None, SimpleNamespace(model=model))


def test_an_engine_whose_weights_no_update_can_reach_does_not_start(
    plugin: Plugin, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized = plugin("weights.quantized")
    monkeypatch.setenv(VARIABLE, "fp8_block")
    model = Model()
    quantized.remember(model)
    model.layer.weight = nn.Parameter(model.layer.weight.clone(), requires_grad=False)
    with pytest.raises(RuntimeError, match="SGLang keeps weight of Transposing in another form"):
        quantized.check(None, SimpleNamespace(model=model))
