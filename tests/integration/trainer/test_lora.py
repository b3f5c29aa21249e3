"""Adapters learn what PEFT with AdamW learns; any layout resumes their checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import safetensors.torch
import torch

from sluice_trainer.algorithms.aggregation import BatchTotals
from sluice_trainer.checkpoint.checkpoint_writer import CheckpointError
from sluice_trainer.lora.files import AdapterError
from sluice_trainer.lora.merging import merge_adapter
from sluice_trainer.model.huggingface_files import ConversionError
from sluice_trainer.model.unsupported import UnsupportedModelError
from tests.cases import quick
from tests.integration.trainer import estimate_steps, plain, tiny
from tests.integration.trainer.lora_jobs import FSDP_JOBS, JOBS, KL, LORA, TRAINER, make, options
from tests.integration.trainer.test_fsdp_checkpoints import close, on_two
from tests.integration.trainer.test_fsdp_steps import apart, train, weights

pytestmark = pytest.mark.usefixtures("process_group")

Trained = tuple[dict[str, Any], Path]
NAMES = [*JOBS, *FSDP_JOBS]


@pytest.fixture(params=["fsdp", "megatron"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def on_two_ranks(qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    """Five steps of a job on two ranks: its history, and the file of its merged weights."""
    root = tmp_path_factory.mktemp("lora")

    @cache
    def train_all() -> dict[str, Trained]:
        files = {name: root / str(number) for number, name in enumerate(NAMES)}
        jobs = [options(name, qwen3, dump=str(file)) for name, file in files.items()]
        first, second = tiny.run("estimate_steps.py", json.dumps(jobs), world=2)
        assert first == second
        return {n: (told, files[n]) for n, told in zip(NAMES, first, strict=True)}

    return lambda name: train_all()[name]


@pytest.mark.parametrize("name", NAMES)
def test_five_steps_on_two_ranks_equal_peft_with_adamw(
    qwen3: Path, tmp_path: Path, name: str, on_two_ranks: Callable[[str], Trained]
) -> None:
    dump = str(tmp_path / "plain")
    expected = estimate_steps.train(**options(name, qwen3, dump=dump), backend=plain.Plain)
    result, file = on_two_ranks(name)
    before = safetensors.torch.load_file(qwen3 / "model.safetensors")
    after = safetensors.torch.load_file(dump)
    assert apart(after, before) > 1e-3
    assert apart(safetensors.torch.load_file(file), after) < 1e-6
    for ours, theirs in zip(result["history"], expected["history"], strict=True):
        assert ours == pytest.approx(theirs, rel=2e-5, abs=5e-6)


@pytest.mark.parametrize(
    ("lora", "rounding"),
    [
        pytest.param({}, 0, id="default"),
        pytest.param({"initialise": "pissa"}, 1e-6, id="pissa"),
        pytest.param({"initialise": "pissa_niter_4", "rank": 80}, 1e-6, id="more than full rank"),
    ],
)
def test_an_adapter_that_has_not_learned_changes_nothing(
    qwen3: Path, backend: str, lora: dict[str, Any], rounding: float
) -> None:
    policy = make(qwen3, backend, trainer={**TRAINER, "lora": {**LORA, **lora}}, algorithm=KL)
    base = safetensors.torch.load_file(qwen3 / "model.safetensors")
    assert apart(weights(policy), base) <= rounding
    shard = tiny.batch(8, seed=0)
    reference = policy.reference_log_probs(shard)
    assert reference is not None
    for ours, theirs in zip(policy.log_probs(shard), reference, strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=10 * rounding)


@pytest.mark.parametrize("initialise", ["default", "pissa"])
def test_the_reference_stays_the_base_model(qwen3: Path, backend: str, initialise: str) -> None:
    lora = {**LORA, "initialise": initialise}
    policy = make(qwen3, backend, trainer={**TRAINER, "lora": lora}, algorithm=KL)
    shard = tiny.batch(8, seed=0)
    before = policy.reference_log_probs(shard)
    for seed in range(3):
        train(policy, seed=seed)
    after = policy.reference_log_probs(shard)
    assert before is not None
    assert after is not None
    for first, second in zip(before, after, strict=True):
        assert torch.equal(first, second)
    pairs = zip(policy.log_probs(shard), after, strict=True)
    assert max((a - b).abs().max().item() for a, b in pairs) > 0.01


@pytest.mark.parametrize(
    "lora",
    [
        pytest.param({}, id="default"),
        pytest.param({"initialise": "pissa"}, id="pissa"),
        pytest.param({"initialise": "pissa_niter_4", "rankStabilized": True}, id="stabilised"),
    ],
)
def test_peft_loads_what_is_exported(
    qwen3: Path, backend: str, tmp_path: Path, lora: dict[str, Any]
) -> None:
    policy = make(qwen3, backend, trainer={**TRAINER, "lora": {**LORA, **lora}})
    for seed in range(2):
        train(policy, seed=seed)
    policy.export_hf(tmp_path / "merged")
    policy.export_adapter(tmp_path / "adapter")
    model = peft.PeftModel.from_pretrained(tiny.hf_model(qwen3), str(tmp_path / "adapter"))
    model = model.merge_and_unload()
    merged = tiny.hf_model(tmp_path / "merged")
    shard = tiny.batch(6, seed=7)
    ours = policy.log_probs(shard)
    for sequence, expected in zip(shard, ours, strict=True):
        for loaded in (model, merged):
            log_probs, _ = tiny.hf_log_probs(loaded, sequence)
            assert torch.allclose(log_probs, expected, atol=2e-5)


def test_training_continues_from_an_adapter_of_peft(
    qwen3: Path, backend: str, tmp_path: Path
) -> None:
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False
    )
    torch.manual_seed(3)
    model = peft.get_peft_model(tiny.hf_model(qwen3), config)
    model.save_pretrained(str(tmp_path))
    policy = make(qwen3, backend, trainer={**TRAINER, "lora": {**LORA, "from": str(tmp_path)}})
    merged = dict(model.merge_and_unload().named_parameters())
    assert apart(weights(policy), {name: p.detach() for name, p in merged.items()}) < 1e-6


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        pytest.param({"rank": 8}, "has r 4, but the job trains 8", id="rank"),
        pytest.param({"alpha": 16}, "has lora_alpha 8, but the job trains 16", id="alpha"),
        pytest.param({"targetModules": ["q_proj"]}, "set trainer.lora.targetModules", id="targets"),
        pytest.param({"rank": 2}, "initialise: pissa have twice its rank", id="pissa"),
    ],
)
def test_an_adapter_of_another_shape_is_refused(
    qwen3: Path, backend: str, tmp_path: Path, lora: dict[str, Any], message: str
) -> None:
    make(qwen3, backend, trainer=TRAINER).export_adapter(tmp_path / "adapter")
    changed = {**LORA, "from": str(tmp_path / "adapter"), **lora}
    with pytest.raises(AdapterError, match=message):
        make(qwen3, backend, trainer={**TRAINER, "lora": changed})


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        pytest.param({"targetModules": ["query"]}, "query is no linear layer", id="unknown"),
        pytest.param({"targetModules": ["lm_head"]}, "lm_head is no linear layer", id="head"),
        pytest.param(
            {"targetModules": ["q_proj"], "excludeModules": ["q_proj"]},
            "leaves no layer",
            id="none",
        ),
    ],
)
def test_targets_that_a_model_lacks_are_refused(
    qwen3: Path, backend: str, lora: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        make(qwen3, backend, trainer={**TRAINER, "lora": lora})


def test_dropout_is_in_training_passes_only(qwen3: Path, backend: str) -> None:
    policy = make(qwen3, backend, trainer={**TRAINER, "lora": {**LORA, "dropout": 0.5}})
    train(policy)
    shard = tiny.batch(8, seed=0)
    first, second = policy.log_probs(shard), policy.log_probs(shard)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    same = make(qwen3, backend, trainer=TRAINER)
    for seed in range(2):
        with_dropout, without = train(policy, seed=seed), train(same, seed=seed)
    assert with_dropout["train/grad_norm"] != without["train/grad_norm"]


def test_an_adapter_of_a_quantized_base_learns(qwen3: Path, tmp_path: Path) -> None:
    lora = {**LORA, "quantizeBase": "nf4"}
    sft = {"loss": {"type": "sft"}}
    policy = make(qwen3, "fsdp", trainer={**TRAINER, "lora": lora}, algorithm=sft)
    first, *_, last = (train(policy)["train/loss"] for _ in range(12))
    assert last < first - 0.1
    # An export of merged weights is the policy: it holds the base as the trainer computes with it.
    policy.export_hf(tmp_path)
    shard, merged = tiny.batch(4, seed=1), tiny.hf_model(tmp_path)
    for sequence, ours in zip(shard, policy.log_probs(shard), strict=True):
        assert torch.allclose(tiny.hf_log_probs(merged, sequence)[0], ours, atol=2e-5)


def test_a_quantized_base_of_experts_is_refused(models: dict[str, Path]) -> None:
    lora = {**LORA, "quantizeBase": "nf4"}
    with pytest.raises(UnsupportedModelError, match="'qwen3_moe' are experts"):
        make(models["qwen3-moe"], "fsdp", trainer={**TRAINER, "lora": lora})


def test_adapters_of_experts_equal_those_of_peft(models: dict[str, Path], tmp_path: Path) -> None:
    """Five steps on two ranks; then one rank continues from a checkpoint of the third."""
    name, model, saved = "experts and attention", models["qwen3-moe"], tmp_path / "saved"
    dump = str(tmp_path / "plain")
    expected = estimate_steps.train(**options(name, model, dump=dump), backend=plain.Plain)
    changes = {"dump": str(tmp_path / "ours"), "checkpoints": str(saved), "save_at": 3}
    job = {**options(name, model), **changes}
    result = on_two("estimate_steps.py", [job])[0]
    before, after = (safetensors.torch.load_file(f) for f in (model / "model.safetensors", dump))
    changed = {key for key in after if not torch.equal(after[key], before[key])}
    assert sum(".experts." in key for key in changed) == 2 * 4 * 3, "layers, experts, matrices"
    assert apart(safetensors.torch.load_file(tmp_path / "ours"), after) < 1e-6
    for ours, theirs in zip(result["history"], expected["history"], strict=True):
        assert ours == pytest.approx(theirs, rel=2e-5, abs=5e-6)
    alone = estimate_steps.train(**options(name, model, checkpoints=str(saved)))
    assert alone["resumed"] == 3
    close(alone["history"], result["history"][3:])


def test_peft_loads_adapters_of_experts(models: dict[str, Path], tmp_path: Path) -> None:
    model, lora = models["qwen3-moe"], {**LORA, "targetModules": ["experts"]}
    policy = make(model, "fsdp", trainer={**TRAINER, "lora": lora, "recompute": "full"})
    train(policy)
    policy.export_adapter(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(tiny.hf_model(model), str(tmp_path / "adapter"))
    shard = tiny.batch(4, seed=7)
    for sequence, ours in zip(shard, policy.log_probs(shard), strict=True):
        assert torch.allclose(tiny.hf_log_probs(loaded, sequence)[0], ours, atol=2e-5)
    with pytest.raises(ConversionError, match="adapts experts"):
        merge_adapter(tmp_path / "adapter", model, tmp_path / "merged")


def test_experts_of_a_dense_model_are_refused(qwen3: Path) -> None:
    lora = {**LORA, "targetModules": ["experts"]}
    with pytest.raises(UnsupportedModelError, match="experts is no linear layer"):
        make(qwen3, "fsdp", trainer={**TRAINER, "lora": lora})


def test_a_rank_may_be_without_sequences(qwen3: Path, backend: str) -> None:
    policy = make(qwen3, backend, trainer=TRAINER)
    metrics = policy.train([[]], [BatchTotals(0, 0)])
    assert metrics["train/loss"] == metrics["train/grad_norm"] == 0
    assert apart(weights(policy), safetensors.torch.load_file(qwen3 / "model.safetensors")) == 0


@pytest.mark.parametrize(
    "name",
    quick(
        ("grpo with a KL loss", "ppo", "pissa with a KL loss", "nf4 with a KL loss"),
        *("ppo", "nf4 with a KL loss"),
    ),
)
def test_any_number_of_ranks_resumes_a_checkpoint(qwen3: Path, tmp_path: Path, name: str) -> None:
    job = options(name, qwen3, checkpoints=str(tmp_path))
    through = on_two("estimate_steps.py", [{**job, "save_at": 3}])[0]
    for path in (tmp_path / "iter_0000003").rglob("*.safetensors"):
        assert path.stat().st_size < 2**18
    alone = estimate_steps.train(**job)
    assert alone["resumed"] == 3
    close(alone["history"], through["history"][3:])


def test_a_checkpoint_of_all_weights_is_refused(qwen3: Path, backend: str, tmp_path: Path) -> None:
    full = {key: value for key, value in TRAINER.items() if key != "lora"}
    tiny.save(make(qwen3, backend, trainer=full), tmp_path, 1)
    with pytest.raises(CheckpointError, match="holds all weights of a model"):
        make(qwen3, backend, trainer=TRAINER).load_latest(tmp_path)


def test_a_checkpoint_of_an_adapter_is_refused_without_one(
    qwen3: Path, tmp_path: Path, backend: str
) -> None:
    tiny.save(make(qwen3, "fsdp", trainer=TRAINER), tmp_path, 1)
    full = {key: value for key, value in TRAINER.items() if key != "lora"}
    with pytest.raises(CheckpointError, match="it holds an adapter"):
        make(qwen3, backend, trainer=full).load_latest(tmp_path)


def test_convert_merges_and_extracts(qwen3: Path, tmp_path: Path) -> None:
    policy = make(qwen3, "fsdp", trainer=TRAINER)
    train(policy)
    tiny.save(policy, tmp_path / "checkpoints", 1)
    policy.export_adapter(tmp_path / "adapter")
    done = tiny.convert("extract-adapter", tmp_path / "checkpoints", tmp_path / "extracted")
    assert done.returncode == 0, done.stderr
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        exported = (tmp_path / "adapter" / name).read_bytes()
        assert (tmp_path / "extracted" / name).read_bytes() == exported
    done = tiny.convert("merge-adapter", tmp_path / "adapter", qwen3, tmp_path / "merged")
    assert done.returncode == 0, done.stderr
    merged = safetensors.torch.load_file(tmp_path / "merged" / "model.safetensors")
    assert apart(merged, weights(policy)) < 1e-7
    done = tiny.convert("dist-to-hf", tmp_path / "checkpoints", qwen3, tmp_path / "hf")
    assert done.returncode == 2
    assert "holds an adapter: sluice convert merge-adapter" in done.stderr


def test_an_adapter_of_another_model_is_not_merged(
    qwen3: Path, models: dict[str, Path], tmp_path: Path
) -> None:
    make(models["qwen3-tied"], "fsdp", trainer=TRAINER).export_adapter(tmp_path / "adapter")
    done = tiny.convert("merge-adapter", tmp_path / "adapter", qwen3, tmp_path / "merged")
    assert done.returncode == 2
    assert "another model's adapter" in done.stderr
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"use_dora": True}, "has use_dora, which sluice does not support", id="dora"),
        pytest.param({"rank_pattern": {"q_proj": 8}}, "has rank_pattern", id="ranks"),
        pytest.param({"r": 0}, "has r 0 and lora_alpha 8, expected numbers above 0", id="rank 0"),
        pytest.param({"peft_type": "LOHA"}, "is an adapter of type LOHA", id="another kind"),
    ],
)
def test_an_adapter_that_would_be_merged_wrong_is_refused(
    qwen3: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    make(qwen3, "fsdp", trainer=TRAINER).export_adapter(tmp_path / "adapter")
    path = tmp_path / "adapter/adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(AdapterError, match=message):
        merge_adapter(tmp_path / "adapter", qwen3, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_checkpoint_of_another_model_is_refused(
    qwen3: Path, backend: str, models: dict[str, Path], tmp_path: Path
) -> None:
    """The layers have the same names, but the other model has more of them."""
    tiny.save(make(models["qwen3-tied"], backend, trainer=TRAINER), tmp_path, 1)
    with pytest.raises(CheckpointError, match="it is of another model"):
        make(qwen3, backend, trainer=TRAINER).load_latest(tmp_path)
