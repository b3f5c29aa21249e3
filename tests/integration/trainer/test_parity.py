"""Megatron and transformers compute the same logits, log-probs, gradients and trained weights."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from sluice.api import Parallelism
from sluice.engines.sglang.layout import Layout
from sluice_trainer.algorithms.aggregation import BatchTotals, token_weights
from sluice_trainer.batch.sequences import TrainSequence
from sluice_trainer.megatron.adaptations import megatron_device
from sluice_trainer.megatron.huggingface import mapping
from sluice_trainer.megatron.model.building import build, load_hf, load_random
from sluice_trainer.megatron.model.config import transformer_config
from sluice_trainer.megatron.model.layout import packing
from sluice_trainer.megatron.policy import MegatronPolicy
from sluice_trainer.model.huggingface_config import ModelShape, read_shape
from sluice_trainer.model.huggingface_files import CheckpointFilesError, read_config, save_hf
from sluice_trainer.model.unsupported import UnsupportedModelError
from tests.integration.trainer import tiny

CPU = torch.device("cpu")
LENGTHS = [7, 20, 13, 24, 1, 33, 70, 7]


pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture(params=list(tiny.FAMILIES))
def family(request: pytest.FixtureRequest, models: dict[str, Path]) -> Path:
    return models[request.param]


def megatron_model(directory: Path) -> tuple[list[torch.nn.Module], ModelShape]:
    shape = read_shape(directory)
    model = build(transformer_config(shape, Parallelism(), dtype=torch.float32), shape)
    load_hf(model, shape, directory)
    return model, shape


@torch.no_grad()
def logits(model: list[torch.nn.Module], sequences: list[torch.Tensor]) -> torch.Tensor:
    packed = packing([len(s) for s in sequences], CPU)
    with megatron_device():
        return model[0](
            torch.cat(sequences)[None], packed.positions[None], None, packed_seq_params=packed
        )[0]


def random_tokens(lengths: list[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, tiny.VOCAB, (n,), generator=generator) for n in lengths]


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in tiny.FAMILIES if name not in tiny.REORDERED])
def test_logits_of_one_sequence_are_equal_to_the_bit(models: dict[str, Path], name: str) -> None:
    model, _ = megatron_model(models[name])
    (tokens,) = random_tokens([100])
    assert torch.equal(
        logits(model, [tokens]), tiny.hf_model(models[name])(input_ids=tokens[None]).logits[0]
    )


@pytest.mark.support("megatron", "trains")
@torch.no_grad()
def test_logits_of_packed_sequences_equal_those_of_transformers(family: Path) -> None:
    model, _ = megatron_model(family)
    tokens = random_tokens(LENGTHS)
    reference = tiny.hf_model(family)
    expected = torch.cat([reference(input_ids=t[None]).logits[0] for t in tokens])
    assert (logits(model, tokens) - expected).abs().max() < 1e-5


def test_weights_survive_the_round_trip_to_the_bit(family: Path, tmp_path: Path) -> None:
    model, shape = megatron_model(family)
    save_hf(mapping.hf_tensors(model, shape), tmp_path / "out", family)
    before = safetensors.torch.load_file(family / "model.safetensors")
    after = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize("name", [name for name in tiny.FAMILIES if name not in tiny.MIXTURES])
def test_names_come_in_the_order_of_a_checkpoint(models: dict[str, Path], name: str) -> None:
    model, shape = megatron_model(models[name])
    names = [name for name, _ in tiny.hf_model(models[name]).named_parameters()]
    assert [name for name, _ in mapping.hf_tensors(model, shape)] == names


@pytest.mark.parametrize("name", tiny.MIXTURES)
def test_all_of_an_expert_comes_before_the_next(models: dict[str, Path], name: str) -> None:
    model, shape = megatron_model(models[name])
    names = [
        name for name, _ in mapping.hf_tensors(model, shape) if "layers.1.mlp.experts." in name
    ]
    assert [name.split("experts.")[1] for name in names] == [
        f"{expert}.{kind}_proj.weight"
        for expert in range(len(names) // 3)
        for kind in ("gate", "up", "down")
    ]


@pytest.mark.parametrize("name", tiny.MIXTURES)
def test_stacked_experts_are_the_experts_of_the_checkpoint(
    models: dict[str, Path], name: str
) -> None:
    model, shape = megatron_model(models[name])
    single, stacked = (
        dict(mapping.hf_tensors(model, shape)),
        dict(mapping.hf_tensors(model, shape, Layout().stack_name)),
    )
    mixtures = {name.partition(".experts.")[0] for name in single if ".experts." in name}
    for layer in mixtures:
        for number, up in enumerate(stacked.pop(f"{layer}.experts.w13_weight")):
            parts = [
                single.pop(f"{layer}.experts.{number}.{kind}_proj.weight")
                for kind in ("gate", "up")
            ]
            assert torch.equal(up, torch.cat(parts))
        for number, down in enumerate(stacked.pop(f"{layer}.experts.w2_weight")):
            assert torch.equal(down, single.pop(f"{layer}.experts.{number}.down_proj.weight"))
    assert mixtures
    assert stacked.keys() == single.keys()
    assert all(torch.equal(stacked[name], single[name]) for name in single)


def test_a_checkpoint_in_several_files_is_read_by_transformers_and_megatron(
    qwen3: Path, tmp_path: Path
) -> None:
    model, shape = megatron_model(qwen3)
    save_hf(mapping.hf_tensors(model, shape), tmp_path / "out", qwen3, shard_bytes=100_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    again, _ = megatron_model(tmp_path / "out")
    (tokens,) = random_tokens([20])
    expected = tiny.hf_model(tmp_path / "out")(input_ids=tokens[None]).logits[0]
    assert torch.equal(logits(again, [tokens]), expected)


def test_exported_config_names_the_dtype_of_the_weights(qwen3: Path, tmp_path: Path) -> None:
    model, shape = megatron_model(qwen3)
    rounded = ((n, t.bfloat16()) for n, t in mapping.hf_tensors(model, shape))
    save_hf(rounded, tmp_path / "out", qwen3, config=read_config(qwen3))
    assert tiny.hf_model(tmp_path / "out").dtype == torch.bfloat16


def test_a_tensor_of_the_wrong_shape_is_named(qwen3: Path, tmp_path: Path) -> None:
    model, shape = megatron_model(qwen3)
    wrong = (
        (n, t[:, :3] if n.endswith("k_proj.weight") else t)
        for n, t in mapping.hf_tensors(model, shape)
    )
    save_hf(wrong, tmp_path / "out", qwen3)
    with pytest.raises(
        CheckpointFilesError, match=r"k_proj\.weight has shape .*, but config\.json asks for"
    ):
        load_hf(model, shape, tmp_path / "out")


def test_a_missing_tensor_is_named(qwen3: Path, tmp_path: Path) -> None:
    model, shape = megatron_model(qwen3)
    fewer = ((n, t) for n, t in mapping.hf_tensors(model, shape) if n != "model.norm.weight")
    save_hf(fewer, tmp_path / "out", qwen3)
    with pytest.raises(CheckpointFilesError, match=r"has no tensor model\.norm\.weight"):
        load_hf(model, shape, tmp_path / "out")


def test_random_weights_depend_on_seed_and_name_only(models: dict[str, Path]) -> None:
    model, shape = megatron_model(models["qwen2"])

    def draw(seed: int) -> dict[str, torch.Tensor]:
        load_random(model, shape, seed)
        return {name: tensor.clone() for name, tensor in mapping.hf_tensors(model, shape)}

    first, again, other = draw(1), draw(1), draw(2)
    embedding = "model.embed_tokens.weight"
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first[embedding], other[embedding])
    assert not torch.equal(
        first["model.layers.0.self_attn.q_proj.weight"][:32], first[embedding][:32]
    )
    assert first[embedding].std().item() == pytest.approx(0.02, rel=0.05)
    assert first["model.layers.0.self_attn.q_proj.bias"].abs().max() == 0
    assert first["model.norm.weight"].min() == 1


@pytest.mark.support("megatron", "trains")
def test_log_probs_at_the_sampling_temperature(family: Path) -> None:
    spec = tiny.spec(family, rollout={"sampling": {"temperature": 0.7}})
    policy = MegatronPolicy(spec, model_dir=family, timeout=timedelta(seconds=tiny.TIMEOUT))
    shard = tiny.batch(9, seed=5)
    reference = tiny.hf_model(family).requires_grad_(False)
    for sequence, values in zip(shard, policy.log_probs(shard), strict=True):
        expected, _ = tiny.hf_log_probs(reference, sequence, 0.7)
        assert torch.allclose(values, expected, atol=1e-5)


ALGORITHMS = {
    "default": {},
    "everything": {
        "aggregation": "token_mean",
        "entropyCoef": 0.01,
        "kl": {"lossCoef": 0.1, "type": "low_var_kl"},
        "offPolicy": {"method": "tis", "high": 1.5},
        "loss": {"clip": {"low": 0.2, "high": 0.28, "dual": 3.0}},
    },
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_three_steps_equal_transformers_with_adamw(qwen3: Path, algorithm: str) -> None:
    """The loss is computed again, one sequence at a time, without packing or shared code."""
    options = ALGORITHMS[algorithm]
    spec = tiny.spec(qwen3, algorithm=options)
    policy = MegatronPolicy(spec, model_dir=qwen3, timeout=timedelta(seconds=tiny.TIMEOUT))
    plain, frozen = tiny.hf_model(qwen3), tiny.hf_model(qwen3)
    adam = torch.optim.AdamW(
        plain.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=tiny.EPS, weight_decay=0.0
    )
    for step in range(3):
        shard = tiny.batch(8, seed=step)
        metrics = policy.train([shard], [tiny.totals(shard)])
        loss = tiny.plain_loss(plain, shard, tiny.totals(shard), frozen if options else None)
        adam.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        adam.step()
        assert metrics["train/loss"] == pytest.approx(loss.item(), abs=1e-5)
        assert metrics["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        assert metrics["train/ppo_kl"] == metrics["train/pg_clipfrac"] == 0
    ours = dict(policy.hf_tensors())
    assert max((ours[n] - p).abs().max().item() for n, p in plain.named_parameters()) < 1e-5


def test_micro_batches_do_not_change_the_result(qwen3: Path) -> None:
    shard = tiny.batch(12, seed=0)
    results = []
    for cap in (1, 45, 10_000):
        spec = tiny.spec(qwen3, trainer={"maxTokensPerGpu": cap})
        policy = MegatronPolicy(spec, model_dir=qwen3, timeout=timedelta(seconds=tiny.TIMEOUT))
        metrics = policy.train([shard], [tiny.totals(shard)])
        results.append((metrics, dict(policy.hf_tensors())))
    for metrics, weights in results[1:]:
        assert metrics == pytest.approx(results[0][0], rel=1e-4, abs=1e-6)
        assert max((weights[n] - t).abs().max().item() for n, t in results[0][1].items()) < 1e-5


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        pytest.param("qwen3", [], id="full"),
        pytest.param("qwen3", ["core_attn"], id="attention"),
        pytest.param("qwen3", ["core_attn", "mlp"], id="attention and MLP"),
        pytest.param("glm4-moe", ["moe"], id="experts"),
        pytest.param("glm4-moe", ["shared_experts"], id="shared experts"),
        pytest.param("deepseek-v3", ["mla_up_proj"], id="latent attention"),
    ],
)
def test_recompute_does_not_change_the_result(
    name: str, modules: list[str], models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The images have no ninja.
    monkeypatch.delattr("megatron.core.tensor_parallel.random.load_inline")
    shard = tiny.batch(6, seed=0)
    again: dict[str, Any] = {"recompute": "selective", "recomputeModules": modules}
    results = []
    for trainer in ({}, again if modules else {"recompute": "full"}):
        policy = MegatronPolicy(
            tiny.spec(models[name], trainer=trainer),
            model_dir=models[name],
            timeout=timedelta(seconds=tiny.TIMEOUT),
        )
        steps = [policy.train([shard], [tiny.totals(shard)]) for _ in range(5)]
        results.append((steps[-1], dict(policy.hf_tensors())))
    (kept, weights), (computed_again, others) = results
    assert kept == pytest.approx(computed_again, rel=1e-4, abs=1e-6)
    assert max((others[n] - t).abs().max().item() for n, t in weights.items()) < 1e-6


@pytest.mark.parametrize("part", ["core_attn", "mlp"])
def test_only_the_named_part_is_recomputed(part: str, qwen3: Path) -> None:
    policy = MegatronPolicy(
        tiny.spec(qwen3, trainer={"recompute": "selective", "recomputeModules": [part]}),
        model_dir=qwen3,
        timeout=timedelta(seconds=tiny.TIMEOUT),
    )
    layer = policy._learner.chunks[0].module.decoder.layers[0]
    calls = {"core_attn": 0, "mlp": 0}

    def count(name: str) -> None:
        calls[name] += 1

    modules = {"core_attn": layer.self_attention.core_attention, "mlp": layer.mlp}
    for name, module in modules.items():
        module.register_forward_hook(lambda *_, name=name: count(name))
    shard = tiny.batch(1, seed=0)
    policy.train([shard], [tiny.totals(shard)])
    (other,) = set(calls) - {part}
    assert (calls[part], calls[other]) == (2, 1)


def test_a_part_that_the_model_lacks_is_named(qwen3: Path) -> None:
    trainer = {"recompute": "selective", "recomputeModules": ["mla_up_proj"]}
    with pytest.raises(UnsupportedModelError, match="mla_up_proj: qwen3 has no latent attention"):
        MegatronPolicy(
            tiny.spec(qwen3, trainer=trainer),
            model_dir=qwen3,
            timeout=timedelta(seconds=tiny.TIMEOUT),
        )


def test_chunked_logits_do_not_change_the_result(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = tiny.batch(6, seed=0)

    def train() -> dict[str, float]:
        policy = MegatronPolicy(
            tiny.spec(qwen3, algorithm={"entropyCoef": 0.1}),
            model_dir=qwen3,
            timeout=timedelta(seconds=tiny.TIMEOUT),
        )
        return policy.train([shard], [tiny.totals(shard)])

    whole = train()
    monkeypatch.setattr("sluice_trainer.step.head.CHUNK_ELEMENTS", 5 * tiny.VOCAB)
    assert train() == pytest.approx(whole, rel=1e-5, abs=1e-7)


def test_several_optimizer_steps_leave_the_old_policy_behind(qwen3: Path) -> None:
    spec = tiny.spec(qwen3, trainer={"stepsPerBatch": 2, "optimizer": {"lr": 5e-3}})
    policy = MegatronPolicy(spec, model_dir=qwen3, timeout=timedelta(seconds=tiny.TIMEOUT))
    shard = tiny.batch(8, seed=0)
    halves = list(tiny.chunks(shard, 2))
    metrics = policy.train(halves, [tiny.totals(half) for half in halves])
    assert policy.step == 1
    assert metrics["train/ppo_kl"] != 0


def test_a_rank_may_be_without_sequences(qwen3: Path) -> None:
    policy = MegatronPolicy(
        tiny.spec(qwen3), model_dir=qwen3, timeout=timedelta(seconds=tiny.TIMEOUT)
    )
    before = [tensor.clone() for _, tensor in policy.hf_tensors()]
    metrics = policy.train([[]], [BatchTotals(0, 0)])
    assert metrics["train/loss"] == metrics["train/grad_norm"] == 0
    assert all(torch.equal(a, b) for a, (_, b) in zip(before, policy.hf_tensors(), strict=True))
    assert policy.log_probs([]) == []


def test_a_loss_that_is_not_finite_stops_before_the_weights(qwen3: Path) -> None:
    policy = MegatronPolicy(
        tiny.spec(qwen3), model_dir=qwen3, timeout=timedelta(seconds=tiny.TIMEOUT)
    )
    before = [tensor.clone() for _, tensor in policy.hf_tensors()]
    broken = TrainSequence(
        np.arange(4, dtype=np.int32), 2, np.ones(2, np.uint8), np.zeros(2, np.float32), float("nan")
    )
    with pytest.raises(FloatingPointError, match="the loss is nan"):
        policy.train([[broken]], [BatchTotals(1, 2)])
    assert all(torch.equal(a, b) for a, (_, b) in zip(before, policy.hf_tensors(), strict=True))


def test_a_diverged_mixture_is_reported(models: dict[str, Path]) -> None:
    """The router has no preferences, and tokens still have to go to some experts."""
    path = models["qwen3-moe"]
    policy = MegatronPolicy(
        tiny.spec(path), model_dir=path, timeout=timedelta(seconds=tiny.TIMEOUT)
    )
    for name, parameter in policy._learner.chunks[0].named_parameters():
        if name.endswith("router.weight"):
            parameter.data.fill_(float("nan"))
    shard = tiny.batch(4, seed=0)
    with pytest.raises(FloatingPointError, match="the loss is nan"):
        policy.train([shard], [tiny.totals(shard)])


def test_the_kl_grows_as_the_policy_leaves_its_reference(qwen3: Path) -> None:
    spec = tiny.spec(qwen3, algorithm={"kl": {"coef": 0.5, "type": "k2"}})
    policy = MegatronPolicy(spec, model_dir=qwen3, timeout=timedelta(seconds=tiny.TIMEOUT))
    shard = tiny.batch(4, seed=0)
    _, before = policy.with_kl(shard)
    assert before is not None
    assert all((kl == 0).all() for kl in before)
    policy.train([shard], [tiny.totals(shard)])
    same, after = policy.with_kl(shard)
    assert after is not None
    assert all((kl > 0).all() for kl in after)
    assert [kl.shape[0] for kl in after] == [s.response_length for s in shard]
    assert all(s.old_log_probs is None for s in same), (
        "one optimizer step: the ratio must be exactly 1"
    )


def test_the_kl_over_several_optimizer_steps_uses_the_old_log_probs(qwen3: Path) -> None:
    spec = tiny.spec(qwen3, algorithm={"kl": {"coef": 0.5}}, trainer={"stepsPerBatch": 2})
    policy = MegatronPolicy(spec, model_dir=qwen3, timeout=timedelta(seconds=tiny.TIMEOUT))
    shard, _ = policy.with_kl(tiny.batch(4, seed=0))
    for sequence, expected in zip(shard, policy.log_probs(shard), strict=True):
        assert sequence.old_log_probs is not None
        assert torch.equal(sequence.old_log_probs, expected)


def test_without_a_kl_term_there_is_no_reference(qwen3: Path) -> None:
    policy = MegatronPolicy(
        tiny.spec(qwen3), model_dir=qwen3, timeout=timedelta(seconds=tiny.TIMEOUT)
    )
    assert policy.reference_log_probs(tiny.batch(2, seed=0)) is None
    assert policy.with_kl(tiny.batch(2, seed=0))[1] is None


def test_bf16_trains_close_to_fp32(qwen3: Path) -> None:
    shard = tiny.batch(8, seed=0)
    results = [
        MegatronPolicy(
            tiny.spec(qwen3, trainer={"precision": precision}),
            model_dir=qwen3,
            timeout=timedelta(seconds=tiny.TIMEOUT),
        ).train([shard], [tiny.totals(shard)])
        for precision in ("fp32", "bf16")
    ]
    assert results[1]["train/grad_norm"] == pytest.approx(results[0]["train/grad_norm"], rel=0.05)


def test_weights_of_the_objective_use_the_whole_batch() -> None:
    """A micro-batch does not know how many sequences the step has."""
    weights = token_weights(
        torch.ones(2), torch.tensor([0, 0]), BatchTotals(10, 99), "sequence_mean"
    )
    assert weights.sum().item() == pytest.approx(0.1)
