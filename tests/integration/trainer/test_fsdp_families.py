"""Families without a Megatron mapping: packed log-probs are those of transformers' own logits."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import peft
import pytest
import safetensors.torch
import torch
from torch import Tensor

from sluice.engines.sglang.layout import Layout
from sluice_trainer.batch.sequences import TrainSequence
from sluice_trainer.fsdp import families
from sluice_trainer.fsdp.policy import ShardedPolicy
from sluice_trainer.model.unsupported import UnsupportedModelError
from tests.cases import quick, slow
from tests.integration.trainer import tiny

pytestmark = pytest.mark.usefixtures("process_group")

MEGATRONS = (
    "llama",
    "qwen2",
    "qwen3",
    "qwen3-tied",
    "qwen3-moe",
    "glm4",
    "glm4-moe",
    "deepseek-v3",
)
NAMES = (*tiny.OTHERS, *MEGATRONS)
# Minutes of steps, and with the layers of qwen3-next.
PARTS_OF_NEXT = ("qwen3.5", "qwen3.5-moe")
UNPACKED = ("qwen3-next", "qwen3.5", "qwen3.5-moe", "gpt-oss", "glm-moe-dsa", "deepseek-v3.2")


@pytest.fixture(scope="module")
def all_models(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("others")
    others = {name: tiny.save_kind(*how, root / name) for name, how in tiny.OTHERS.items()}
    return others | {name: models[name] for name in MEGATRONS}


def make(model: Path, **changes: Any) -> ShardedPolicy:
    changes["trainer"] = {"backend": "fsdp", **changes.get("trainer", {})}
    timeout = timedelta(seconds=tiny.TIMEOUT)
    return ShardedPolicy(tiny.spec(model, **changes), model_dir=model, timeout=timeout)


@pytest.mark.support("fsdp", "trains")
@pytest.mark.parametrize("name", NAMES)
def test_log_probs_and_tensors_are_those_of_transformers(
    all_models: dict[str, Path], name: str
) -> None:
    policy, directory = make(all_models[name]), all_models[name]
    assert policy._learner.net.packs == (name not in UNPACKED)
    plain, shard = tiny.hf_model(directory, "eager"), tiny.batch(6, seed=0)
    for sequence, values in zip(shard, policy.log_probs(shard), strict=True):
        with torch.no_grad():
            expected, _ = tiny.hf_log_probs(plain, sequence)
        assert torch.allclose(values, expected, atol=1e-5)
    tensors = dict(policy.hf_tensors())
    stored = safetensors.torch.load_file(directory / "model.safetensors")
    assert tensors.keys() == stored.keys()
    assert all(torch.equal(tensors[key], value) for key, value in stored.items())


@pytest.mark.support("fsdp", "trains")
@pytest.mark.parametrize("name", slow(NAMES, *PARTS_OF_NEXT))
def test_a_step_equals_one_of_transformers_with_adamw(
    all_models: dict[str, Path], name: str
) -> None:
    """Take one step in plain transformers with AdamW, and the same one in this backend."""
    directory = all_models[name]
    policy, plain = make(directory), tiny.hf_model(directory, "eager")
    adam = torch.optim.AdamW(
        plain.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=tiny.EPS, weight_decay=0.0
    )
    shard = tiny.batch(6, seed=1)
    metrics = policy.train([shard], [tiny.totals(shard)])
    loss = tiny.plain_loss(plain, shard, tiny.totals(shard))
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    adam.step()
    assert metrics["train/loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert metrics["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    for sequence, values in zip(shard, policy.log_probs(shard), strict=True):
        with torch.no_grad():
            expected, _ = tiny.hf_log_probs(plain, sequence)
        assert torch.allclose(values, expected, atol=1e-4)


def test_experts_come_in_stacks_for_an_engine_that_takes_them(models: dict[str, Path]) -> None:
    policy = make(models["qwen3-moe"])
    single, stacked = (
        dict(policy.hf_tensors()),
        dict(policy.hf_tensors(Layout().stack_name)),
    )
    layers = {name.partition(".experts.")[0] for name in single if ".experts." in name}
    assert layers
    for layer in layers:
        for number, up in enumerate(stacked.pop(f"{layer}.experts.w13_weight")):
            parts = [
                single.pop(f"{layer}.experts.{number}.{k}_proj.weight") for k in ("gate", "up")
            ]
            assert torch.equal(up, torch.cat(parts))
        for number, down in enumerate(stacked.pop(f"{layer}.experts.w2_weight")):
            assert torch.equal(down, single.pop(f"{layer}.experts.{number}.down_proj.weight"))
    assert stacked.keys() == single.keys()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_family_whose_sequences_would_mix_is_refused(
    all_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    monkeypatch.setattr(families, "_ALONE", set())
    with pytest.raises(
        UnsupportedModelError,
        match=r"model_type 'gpt_oss' is not supported by trainer.backend: fsdp: its log-probs "
        r"differ by 0\.\d+ from those of transformers' own logits",
    ):
        make(all_models["gpt-oss"], trainer={"precision": precision})


@pytest.mark.support("fsdp", "trains")
@pytest.mark.parametrize("name", tiny.WRONG)
def test_a_family_whose_log_probs_depend_on_later_tokens_is_refused(
    tmp_path: Path, record_property: Callable[[str, object], None], name: str
) -> None:
    model = tiny.save_kind(*tiny.WRONG[name], tmp_path / name)
    with pytest.raises(
        UnsupportedModelError,
        match=r"computes log-probs that differ by 0\.\d+ if more tokens follow, .* the first "
        r"chunk of 4 tokens: use a trainer image with the family's kernels",
    ):
        make(model)
    record_property(
        "fails",
        "without the packages mamba-ssm and causal-conv1d transformers 5.12 computes state spaces "
        "wrong beyond the first chunk",
    )


@pytest.mark.parametrize("name", NAMES)
def test_no_supported_family_is_refused_for_rounding_in_bf16(
    all_models: dict[str, Path], name: str
) -> None:
    make(all_models[name], trainer={"precision": "bf16"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param(
            {"model_type": "perceiver-of-tomorrow"},
            "is not a language model of transformers",
            id="unknown to transformers",
        ),
        pytest.param({"model_type": "vit"}, "has no AutoModelForCausalLM", id="no language model"),
        pytest.param(
            {"quantization_config": {"quant_method": "fp8"}},
            "its weights are quantized (fp8), and quantized weights cannot be trained: run `sluice "
            "convert dequantize ",
            id="quantized",
        ),
        pytest.param(
            {"model_type": "glm4_moe", "tie_word_embeddings": True},
            "tie_word_embeddings with model_type 'glm4_moe' is not supported: sglang",
            id="tied here and not in the engine",
        ),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_in_a_sentence(
    qwen3: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    config = json.loads((qwen3 / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=re.escape(message)):
        make(tmp_path)


@pytest.mark.parametrize("name", ["qwen3-next", "gpt-oss", "mistral"])
def test_bf16_rounds_as_much_as_in_transformers(all_models: dict[str, Path], name: str) -> None:
    policy, shard = make(all_models[name], trainer={"precision": "bf16"}), tiny.batch(6, seed=0)
    assert_near_eager_attention(policy, all_models[name], shard, "bf16")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu_log_probs_are_those_of_eager_attention_on_the_cpu(
    all_models: dict[str, Path], name: str, precision: str
) -> None:
    """Sequences are longer than the windows; the layers are also compiled, as in training."""
    policy = make(all_models[name], trainer={"precision": precision, "gpusPerNode": 1})
    plain, shard = tiny.hf_model(all_models[name], "eager"), tiny.batch(12, seed=1)
    allowed = assert_near_eager_attention(policy, all_models[name], shard, precision)
    totals = tiny.totals(shard)
    loss = tiny.plain_loss(plain, shard, totals).item()
    assert policy.train([shard], [totals])["train/loss"] == pytest.approx(loss, abs=allowed)


def assert_near_eager_attention(
    policy: ShardedPolicy, model: Path, shard: list[TrainSequence], precision: str
) -> float:
    """Assert that log-probs are close to eager attention, and return the allowed difference.

    In bf16 it is as large as that of transformers itself: a gated delta net with random weights
    loses far more by rounding than attention does.
    """
    plain = _eager_log_probs(model, shard, torch.float32)
    allowed = 1e-3
    if precision == "bf16":
        rounded = _eager_log_probs(model, shard, torch.bfloat16)
        allowed = max(0.02, 1.5 * (rounded - plain).abs().mean().item())
    values = torch.cat(policy.log_probs(shard))
    assert (values - plain).abs().mean() < allowed
    return allowed


def _eager_log_probs(model: Path, shard: list[TrainSequence], dtype: torch.dtype) -> Tensor:
    plain = tiny.hf_model(model, "eager").to(dtype)
    with torch.no_grad():
        return torch.cat([tiny.hf_log_probs(plain, sequence)[0].float() for sequence in shard])


# One family for each kind of layer that an adapter may be in.
ADAPTED = ("qwen3-next", "gpt-oss", "deepseek-v3.2", "gemma4-moe", "phi4", "mixtral", "qwen3-tied")


@pytest.mark.support("fsdp", "lora")
@pytest.mark.parametrize("name", quick(NAMES, *ADAPTED))
def test_an_adapter_of_all_linear_layers_learns(
    all_models: dict[str, Path], tmp_path: Path, name: str
) -> None:
    """The adapter that is exported, merged by PEFT, gives the log-probs of the trainer."""
    lora = {"rank": 4, "targetModules": ["all-linear"]}
    policy, shard = make(all_models[name], trainer={"lora": lora}), tiny.batch(6, seed=0)
    before = policy.log_probs(shard)
    policy.train([shard], [tiny.totals(shard)])
    after = policy.log_probs(shard)
    assert any((new - old).abs().max() > 1e-5 for new, old in zip(after, before, strict=True))
    policy.export_adapter(tmp_path / "adapter")
    base = tiny.hf_model(all_models[name], "eager")
    plain = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    for sequence, values in zip(shard, after, strict=True):
        with torch.no_grad():
            expected, _ = tiny.hf_log_probs(plain, sequence)
        assert torch.allclose(values, expected, atol=2e-5)
