"""A checkpoint that is loaded, trained and exported keeps all of its tensors and files."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from sluice.model_parts import kept_parts_of
from sluice_trainer.fsdp import conversion as fsdp
from sluice_trainer.fsdp.policy import ShardedPolicy
from sluice_trainer.lora.merging import merge_adapter
from sluice_trainer.megatron.checkpoints import conversion as megatron
from sluice_trainer.megatron.policy import MegatronPolicy
from sluice_trainer.model.unsupported import UnsupportedModelError
from sluice_trainer.policy.learning_policy import LearningPolicy
from tests.integration.trainer import tiny
from tests.integration.trainer.multimodal import (
    MULTIMODAL,
    add_next_token_layers,
    rewrite,
    save_multimodal,
)

pytestmark = pytest.mark.usefixtures("process_group")

NEXT_TOKEN = ("qwen3.5-pictures", "qwen3-next", "glm4-moe", "deepseek-v3")
# Parts of the names of tensors that no job trains.
KEPT = ("visual", "mtp.", "vision_tower", "multi_modal_projector", "eh_proj", "shared_head")
# Nor are the bias for the choice of experts, the indexer of sparse attention, whose choice of keys
# has no gradient, and Gemma 4's factor of a layer, a buffer in transformers.
STILL = (*KEPT, "e_score_correction_bias", "indexer", "layer_scalar")


def save(name: str, directory: Path) -> Path:
    """Save a checkpoint of a family in the precision in which it is released."""
    if name in MULTIMODAL:
        save_multimodal(name, directory)
    else:
        tiny.save_kind(*(tiny.OTHERS | tiny.FAMILIES)[name], directory, dtype=torch.bfloat16)
    if name in NEXT_TOKEN:
        add_next_token_layers(directory)
    return directory


def stored(directory: Path) -> dict[str, Tensor]:
    files = sorted(directory.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def others(directory: Path) -> dict[str, str]:
    """Return the files that hold no weights."""
    files = (file for file in directory.iterdir() if "safetensors" not in file.name)
    return {file.name: file.read_text() for file in files}


def trained(
    model: Path, backend: str, /, *, lora: dict[str, Any] | None = None, **changes: Any
) -> LearningPolicy:
    kind: type[ShardedPolicy | MegatronPolicy]
    kind = ShardedPolicy if backend == "fsdp" else MegatronPolicy
    trainer = {"backend": backend, "optimizer": {"lr": 2e-2, "eps": 1e-8}, "lora": lora}
    spec = tiny.spec(model, trainer=trainer, **changes)
    policy = kind(spec, model_dir=model, timeout=timedelta(seconds=tiny.TIMEOUT))
    for seed in (1, 2):
        shard = tiny.batch(12, seed=seed)
        policy.train([shard], [tiny.totals(shard)])
    return policy


def assert_complete(source: Path, exported: Path) -> None:
    before, after = stored(source), stored(exported)
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert (after[name].shape, after[name].dtype) == (tensor.shape, tensor.dtype), name
        assert torch.equal(after[name], tensor) == any(part in name for part in STILL), name
    assert others(exported) == others(source)


def assert_same(first: Path, second: Path) -> None:
    ours, theirs = stored(first), stored(second)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


# Those with pictures have the same language model.
SLOW = ("qwen3.5", "qwen3.5-moe")
OTHERS = [name for name in tiny.OTHERS if name not in SLOW]
FSDP = [*OTHERS, *MULTIMODAL, "qwen3-tied", "qwen3-moe", "glm4", "glm4-moe", "deepseek-v3"]


def case(name: str, backend: str, *marks: pytest.MarkDecorator) -> Any:
    shows = pytest.mark.support(backend, "trains")
    return pytest.param(name, backend, id=f"{name}-{backend}", marks=[shows, *marks])


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *(case(name, "fsdp") for name in FSDP),
        *(case(name, "fsdp", pytest.mark.long) for name in SLOW),
        *(case(name, "megatron") for name in tiny.FAMILIES),
    ],
)
def test_an_export_has_all_tensors_of_the_checkpoint(
    tmp_path: Path, name: str, backend: str
) -> None:
    source = save(name, tmp_path / "source")
    policy = trained(source, backend)
    policy.export_hf(tmp_path / "hf")
    assert_complete(source, tmp_path / "hf")
    again = trained(tmp_path / "hf", backend)
    again.export_hf(tmp_path / "again")
    assert_complete(tmp_path / "hf", tmp_path / "again")
    tiny.save(policy, tmp_path / "checkpoints", 1)
    (fsdp if backend == "fsdp" else megatron).dist_to_hf(
        tmp_path / "checkpoints", source, tmp_path / "to", shard_bytes=100_000
    )
    assert_same(tmp_path / "to", tmp_path / "hf")


def test_a_source_in_several_files_keeps_its_dtypes_and_buffers(tmp_path: Path) -> None:
    source = save("qwen3.5-pictures", tmp_path / "source")
    tensors = stored(source)
    tensors["mtp.inv_freq"] = torch.arange(4.0)
    tensors["model.visual.scale"] = torch.tensor(3, dtype=torch.int32)
    (source / "model.safetensors").unlink()
    halves: dict[str, dict[str, Tensor]] = {"model-1.safetensors": {}, "model-2.safetensors": {}}
    for number, (name, tensor) in enumerate(tensors.items()):
        halves[f"model-{number % 2 + 1}.safetensors"][name] = tensor
    for file, half in halves.items():
        save_file(half, source / file)
    weight_map = {name: file for file, half in halves.items() for name in half}
    index = source / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    trained(source, "fsdp").export_hf(tmp_path / "hf")
    assert_complete(source, tmp_path / "hf")


def test_a_source_of_bin_files_keeps_its_tensors(tmp_path: Path) -> None:
    source = save("qwen3.5-pictures", tmp_path / "source")
    torch.save(stored(source), source / "pytorch_model.bin")
    as_safetensors = tmp_path / "expected"
    as_safetensors.mkdir()
    (source / "model.safetensors").rename(as_safetensors / "model.safetensors")
    trained(source, "fsdp").export_hf(tmp_path / "hf")
    before, after = stored(as_safetensors), stored(tmp_path / "hf")
    assert after.keys() == before.keys()
    assert not (tmp_path / "hf" / "pytorch_model.bin").exists()
    visual = [name for name in before if "visual" in name]
    assert all(torch.equal(after[name], before[name]) for name in visual)


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_a_tied_output_layer_that_is_stored_is_the_trained_embedding(
    tmp_path: Path, backend: str
) -> None:
    source = save("qwen3-tied", tmp_path / "source")
    embedding = stored(source)["model.embed_tokens.weight"]
    rewrite(source, str, {"lm_head.weight": embedding.clone()})
    trained(source, backend).export_hf(tmp_path / "hf")
    exported = stored(tmp_path / "hf")
    assert exported.keys() == stored(source).keys()
    assert not torch.equal(exported["lm_head.weight"], embedding)
    assert torch.equal(exported["lm_head.weight"], exported["model.embed_tokens.weight"])


@pytest.mark.parametrize("name", ["qwen3.5-pictures", "gemma3-pictures", "deepseek-v3"])
def test_drawn_weights_are_exported_with_a_config_that_describes_them(
    tmp_path: Path, name: str
) -> None:
    source = save(name, tmp_path / "source")
    policy = trained(source, "fsdp", model={"path": str(source), "init": "random"})
    policy.export_hf(tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert not config.get("num_nextn_predict_layers")
    assert not config.get("mtp_num_hidden_layers")
    kind = getattr(transformers, config["architectures"][0])
    model, report = kind.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    shard = tiny.batch(1, seed=3)
    expected, _ = tiny.hf_log_probs(model.eval().requires_grad_(False), shard[0])
    assert torch.allclose(policy.log_probs(shard)[0], expected, atol=1e-4)


def test_engines_get_the_names_of_a_released_checkpoint(tmp_path: Path) -> None:
    for name in MULTIMODAL:
        source = save_multimodal(name, tmp_path / name)
        names = {n for n in stored(source) if not any(part in n for part in KEPT)}
        assert sum(kept_parts_of(source).values()) == len(stored(source)) - len(names)
        for init in ("pretrained", "random"):
            policy = trained(source, "fsdp", model={"path": str(source), "init": init})
            assert dict(policy.hf_tensors()).keys() == names


@pytest.mark.parametrize("name", MULTIMODAL)
def test_an_adapter_is_added_to_the_language_model_alone(tmp_path: Path, name: str) -> None:
    source = save(name, tmp_path / "source")
    policy = trained(source, "fsdp", lora={"rank": 4, "alpha": 8})
    policy.export_adapter(tmp_path / "adapter")
    names = load_file(tmp_path / "adapter" / "adapter_model.safetensors").keys()
    assert names
    assert not any(part in name for name in names for part in KEPT)
    policy.export_hf(tmp_path / "hf")
    merge_adapter(tmp_path / "adapter", source, tmp_path / "merged")
    assert_same(tmp_path / "merged", tmp_path / "hf")
    before, after = stored(source), stored(tmp_path / "hf")
    assert after.keys() == before.keys()
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(changed) == len(names) / 2
    assert all("language_model" in name for name in changed)


def test_experts_in_one_tensor_stay_in_one(tmp_path: Path) -> None:
    """Released Qwen3.5 mixtures hold a layer's experts in one tensor.

    Separate experts of a layer that predicts further tokens change nothing about them.
    """
    source = save_multimodal("qwen3.5-moe-pictures", tmp_path / "source")
    tensors = stored(source)
    for prefix in {name.partition(".experts.")[0] for name in tensors if ".experts." in name}:
        parts = [
            [tensors.pop(f"{prefix}.experts.{number}.{kind}_proj.weight") for number in range(4)]
            for kind in ("gate", "up", "down")
        ]
        gate, up, down = map(torch.stack, parts)
        tensors[f"{prefix}.experts.gate_up_proj"] = torch.cat([gate, up], 1)
        tensors[f"{prefix}.experts.down_proj"] = down
    expert = "mtp.layers.0.mlp.experts.0"
    tensors |= {f"{expert}.{kind}_proj.weight": torch.ones(4, 4) for kind in ("gate", "up", "down")}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    trained(source, "fsdp").export_hf(tmp_path / "hf")
    assert_complete(source, tmp_path / "hf")


def test_a_checkpoint_without_a_tensor_of_the_model_is_refused(tmp_path: Path) -> None:
    source = save("qwen3-tied", tmp_path / "source")
    rewrite(source, lambda name: name.removeprefix("model."))
    with pytest.raises(UnsupportedModelError, match=r"has no tensor model\.\S+, which the model"):
        trained(source, "fsdp")
