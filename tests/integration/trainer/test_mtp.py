"""The layer that predicts a further token learns beside the policy, and changes nothing else."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from sluice_trainer.batch.sequences import TrainSequence
from sluice_trainer.fsdp.conversion import dist_to_hf
from sluice_trainer.fsdp.policy import ShardedPolicy
from sluice_trainer.model.unsupported import UnsupportedModelError
from tests.cases import quick
from tests.integration.trainer import tiny
from tests.integration.trainer.multimodal import rewrite

pytestmark = pytest.mark.usefixtures("process_group")
# Both forms of names, with attention of two kinds, with and without experts.
FAMILIES = ("qwen3.5", "glm4-moe", "qwen3-next", "deepseek-v3")
# Where the tensors that a layer has besides a decoder layer are, in the forms of Qwen and DeepSeek.
QWEN = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
DEEPSEEK = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
SPECULATION = {"speculative": {"algorithm": "mtp"}}


def save(family: str, directory: Path) -> Path:
    """Save a model whose layer for a further token has the weights of its last layer."""
    tiny.save_kind(*(tiny.OTHERS | tiny.FAMILIES)[family], directory)
    tensors = load_file(directory / "model.safetensors")
    count = json.loads((directory / "config.json").read_text())["num_hidden_layers"]
    last, hidden = f"model.layers.{count - 1}.", len(tensors["model.norm.weight"])
    by_number = family in ("glm4-moe", "deepseek-v3")
    prefix = f"model.layers.{count}" if by_number else "mtp"
    layer = f"{prefix}." if by_number else "mtp.layers.0."
    more = {n.replace(last, layer): t.clone() for n, t in tensors.items() if n.startswith(last)}
    torch.manual_seed(5)
    projection, *norms = DEEPSEEK if by_number else QWEN
    more |= {f"{prefix}.{name}.weight": torch.rand(hidden) + 0.5 for name in norms}
    more[f"{prefix}.{projection}.weight"] = torch.randn(hidden, 2 * hidden) * 0.08
    if by_number:  # copies, as released
        words = tensors["lm_head.weight"], tensors["model.embed_tokens.weight"]
        names = (f"{layer}shared_head.head.weight", f"{layer}embed_tokens.weight")
        more |= {name: tensor.clone() for name, tensor in zip(names, words, strict=True)}
    rewrite(directory, str, more)
    return directory


def layer_names(model: Path) -> set[str]:
    """Return the names of what learns in the layer: not its copies of others."""
    count = json.loads((model / "config.json").read_text())["num_hidden_layers"]
    kept = ("shared_head.head.", "embed_tokens.", "e_score_correction_bias")
    return {
        name
        for name in load_file(model / "model.safetensors")
        if name.startswith(("mtp.", f"model.layers.{count}.")) and not any(k in name for k in kept)
    }


def policy_of(model: Path, /, *, mtp: bool = True, lr: float = 1e-3, **changes: Any) -> Any:
    trainer = {"backend": "fsdp", "optimizer": {"lr": lr, "eps": 1e-8}}
    if mtp:
        trainer["mtp"] = {"lr": 1e-2}
    spec = tiny.spec(model, trainer=trainer, **changes)
    return ShardedPolicy(spec, model_dir=model, timeout=timedelta(seconds=tiny.TIMEOUT))


def train(policy: ShardedPolicy, steps: int = 3) -> list[dict[str, float]]:
    shard = tiny.batch(12, seed=1)
    return [policy.train([shard], [tiny.totals(shard)]) for _ in range(steps)]


@pytest.fixture(scope="module", params=quick(FAMILIES, "qwen3.5", "glm4-moe"))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(request.param, tmp_path_factory.mktemp("model") / request.param)


@pytest.fixture(scope="module")
def learned(model: Path) -> tuple[ShardedPolicy, list[dict[str, float]]]:
    policy = policy_of(model, rollout=SPECULATION)
    return policy, train(policy)


def plain_log_probs(directory: Path, sequence: TrainSequence) -> Tensor:
    """Return the layer's log-probs of the response tokens, by transformers' last layer."""
    reference = tiny.hf_model(directory)
    tensors = load_file(directory / "model.safetensors")
    names = QWEN if "mtp.fc.weight" in tensors else DEEPSEEK
    prefix = "mtp" if names is QWEN else f"model.layers.{len(reference.model.layers)}"
    weights = [tensors[f"{prefix}.{name}.weight"] for name in names]

    def norm(weight: Tensor) -> Callable[[Tensor], Tensor]:
        module = copy.deepcopy(reference.model.norm)
        module.weight.data = weight
        return module

    tokens = torch.from_numpy(sequence.tokens.astype(np.int64))
    with torch.no_grad():
        states = reference.model(input_ids=tokens[None]).last_hidden_state[:, :-2]
        embeddings = reference.get_input_embeddings()(tokens[None, 1:-1])
        parts = (norm(weights[1])(embeddings), norm(weights[2])(states))
        joined = torch.nn.functional.linear(torch.cat(parts, -1), weights[0])
        positions = torch.arange(joined.shape[1])[None]
        further = reference.model.layers[-1](
            joined,
            position_embeddings=reference.model.rotary_emb(joined, positions),
            position_ids=positions,
            attention_mask=None,
        )
        logits = reference.lm_head(norm(weights[3])(further))[0]
        log_p = torch.log_softmax(logits.float(), -1)
    return log_p.gather(-1, tokens[2:, None]).squeeze(-1)[-sequence.response_length :]


def test_its_loss_is_that_of_transformers_layer(model: Path) -> None:
    shard = tiny.batch(6, seed=3)
    totals = tiny.totals(shard)
    metrics = policy_of(model).train([shard], [totals])
    expected = 0.0
    for sequence in shard:
        log_probs, mask = plain_log_probs(model, sequence), torch.from_numpy(sequence.loss_mask)
        known = float((log_probs * mask[-len(log_probs) :]).sum())
        expected -= known / max(int(mask.sum()), 1) / totals.sequences
    assert metrics["train/mtp_loss"] == pytest.approx(expected, rel=1e-4)


def test_the_policy_learns_as_without_it(
    model: Path, learned: tuple[ShardedPolicy, list[dict[str, float]]], tmp_path: Path
) -> None:
    policy, history = learned
    losses = [metrics["train/mtp_loss"] for metrics in history]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.1
    assert history[-1]["train/mtp_accuracy"] >= history[0]["train/mtp_accuracy"]
    alone = policy_of(model, mtp=False)
    for with_layer, without in zip(history, train(alone), strict=True):
        assert with_layer.keys() - without.keys() == {"train/mtp_loss", "train/mtp_accuracy"}
        assert with_layer["train/loss"] == without["train/loss"]
        assert with_layer["train/grad_norm"] == without["train/grad_norm"]
    shard = tiny.batch(6, seed=2)
    assert policy.measure(shard, tiny.totals(shard)) == alone.measure(shard, tiny.totals(shard))
    policy.export_hf(tmp_path / "hf")
    alone.export_hf(tmp_path / "alone")
    source, exported, plain = (
        load_file(directory / "model.safetensors")
        for directory in (model, tmp_path / "hf", tmp_path / "alone")
    )
    assert exported.keys() == source.keys() == plain.keys()
    learns = layer_names(model)
    for name, tensor in exported.items():
        assert tensor.shape == source[name].shape
        assert torch.equal(tensor, plain[name]) == (name not in learns), name
        assert torch.equal(plain[name], source[name]) or name not in learns, name


def test_engines_that_propose_with_it_get_it(
    model: Path, learned: tuple[ShardedPolicy, list[dict[str, float]]]
) -> None:
    sent, without = dict(learned[0].hf_tensors()), dict(policy_of(model).hf_tensors())
    assert layer_names(model) <= sent.keys()
    assert not layer_names(model) & without.keys()
    assert without.keys() < sent.keys()


def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(model: Path, tmp_path: Path) -> None:
    policy = policy_of(model)
    train(policy, 2)
    tiny.save(policy, tmp_path / "checkpoints", 2)
    after = train(policy, 2)
    resumed = policy_of(model)
    assert resumed.load_latest(tmp_path / "checkpoints") == 2
    assert train(resumed, 2) == after
    tiny.save(policy, tmp_path / "last", 4)
    policy.export_hf(tmp_path / "hf")
    dist_to_hf(tmp_path / "last", model, tmp_path / "converted")
    exported, converted = (
        load_file(tmp_path / name / "model.safetensors") for name in ("hf", "converted")
    )
    assert exported.keys() == converted.keys()
    assert all(torch.equal(converted[name], tensor) for name, tensor in exported.items())


def test_two_ranks_learn_the_same_as_one(tmp_path: Path) -> None:
    model = save("glm4-moe", tmp_path / "model")
    trainer = {"backend": "fsdp", "mtp": {"lr": 1e-2}}
    options = {"model": str(model), "steps": 3, "algorithm": {}, "trainer": trainer}
    one, *_ = tiny.run("train_steps.py", json.dumps(options))
    first, second = tiny.run("train_steps.py", json.dumps(options), world=2)
    assert first["history"] == second["history"]
    for alone, shared in zip(one["history"], first["history"], strict=True):
        assert shared["train/mtp_loss"] == pytest.approx(alone["train/mtp_loss"], rel=1e-3)


def test_a_checkpoint_without_such_a_layer_is_refused(tmp_path: Path) -> None:
    model = tiny.save_model("qwen3", tmp_path / "model")
    with pytest.raises(UnsupportedModelError, match="has no layers that predict further tokens"):
        policy_of(model)


def test_a_layer_without_one_of_its_tensors_is_refused(tmp_path: Path) -> None:
    model = save("qwen3.5", tmp_path / "model")
    rewrite(model, lambda name: name.replace("mtp.layers.0.mlp.up_proj", "mtp.layers.0.mlp.other"))
    with pytest.raises(UnsupportedModelError, match=r"has no tensor mtp\.layers\.0\.mlp\.up_proj"):
        policy_of(model)
