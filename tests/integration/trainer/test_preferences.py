"""Losses of preferences learn what TRL's trainers learn, on both backends and on several ranks.

The numbers of TRL are in trl_preferences.json. The long test runs TRL (make trl) and compares them;
SLUICE_UPDATE_GOLDEN=1 writes them anew.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import peft
import pytest
import safetensors.torch
import torch
from transformers import AutoModelForSequenceClassification

from sluice.api import RLJobSpec
from sluice_trainer.backend_registry import backend_class
from sluice_trainer.batch.sequences import TrainSequence
from sluice_trainer.policy.learning_policy import LearningPolicy
from tests.integration.trainer import plain, preference_steps, tiny
from tests.integration.trainer.test_fsdp_steps import apart

pytestmark = pytest.mark.usefixtures("process_group")

History = list[dict[str, float]]
Trained = tuple[History, Path]
# With an odd number of held-out pairs, so that ranks have different numbers of them.
SHORT: dict[str, Any] = {"loss": {"type": "dpo"}, "steps": 3, "held_out": 5}
RECORDED = Path(__file__).with_name("trl_preferences.json")
PYTHON = tiny.ROOT / ".venv-trl/bin/python"
# The optimizer of `preference_steps`, as arguments of TRL.
OPTIMIZER = {
    "learning_rate": 1e-3,
    "adam_epsilon": tiny.EPS,
    "adam_beta2": 0.95,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "per_device_train_batch_size": preference_steps.PAIRS,
    "max_steps": preference_steps.STEPS,
    "max_length": None,
}


@dataclass(frozen=True)
class Job:
    """A loss of sluice, and TRL's trainer with its arguments.

    scores: it trains a reward model.
    """

    loss: dict[str, Any]
    trainer: str
    settings: dict[str, Any]
    scores: bool = False


JOBS = {
    "dpo": Job({"type": "dpo"}, "dpo", {}),
    "dpo of means": Job(
        {"type": "dpo", "preference": {"beta": 0.5, "lengthNormalized": True}},
        "dpo",
        {"loss_type": "sigmoid_norm", "beta": 0.5},
    ),
    "ipo": Job(
        {"type": "ipo", "preference": {"beta": 0.5}}, "dpo", {"loss_type": "ipo", "beta": 0.5}
    ),
    "simpo": Job(
        {"type": "simpo", "preference": {"margin": 0.8}},
        "cpo",
        {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.8, "cpo_alpha": 0.0},
    ),
    "reward model": Job(
        {"type": "reward_model", "preference": {"centering": 0.05}},
        "reward",
        {"center_rewards_coefficient": 0.05},
        scores=True,
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return preference_steps.save_model(tmp_path_factory.mktemp("preferences"))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return preference_steps.save_rows(tmp_path_factory.mktemp("rows") / "pairs.jsonl")


@pytest.fixture(scope="module")
def reward_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("rewards")
    return preference_steps.save_reward_model(root / "model", model)


@pytest.fixture(scope="module")
def train(model: Path, reward_model: Path, rows: Path) -> Callable[..., History]:
    def train(loss: dict[str, Any], **options: Any) -> History:
        start = reward_model if loss["type"] == "reward_model" else model
        return preference_steps.train(str(start), str(rows), loss, **options)

    return train


def same(ours: History, theirs: History, tolerance: float = 1e-5) -> None:
    """Check that TRL's metrics are ours, relative to 1 or to themselves."""
    assert len(ours) == len(theirs)
    for step, (own, other) in enumerate(zip(ours, theirs, strict=True)):
        assert {"loss", "grad_norm", "rewards/margins", "rewards/accuracies"} <= other.keys()
        # Rewards before the first step are roundings of 0, and so are their differences.
        for name, value in other.items() if step else without_accuracies(other):
            # Rewards are differences of log-probs near -100, whose roundings are larger.
            least = 3 * tolerance if name.startswith("rewards/") else tolerance
            expected = pytest.approx(value, rel=tolerance, abs=least)
            assert own[f"train/{name}"] == expected, f"step {step + 1}: {name}"


def without_accuracies(metrics: dict[str, float]) -> list[tuple[str, float]]:
    return [item for item in metrics.items() if item[0] != "rewards/accuracies"]


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
@pytest.mark.parametrize("name", JOBS)
def test_ten_steps_equal_those_of_trl(
    train: Callable[..., History], name: str, backend: str
) -> None:
    recorded = json.loads(RECORDED.read_text())[name]
    ours = train(JOBS[name].loss, backend=backend)
    same(ours, recorded)
    # The batches of a reward model's first steps differ more than what it has learned.
    if not JOBS[name].scores:
        assert ours[-1]["train/rewards/margins"] > ours[0]["train/rewards/margins"] + 0.1


@pytest.mark.long
@pytest.mark.parametrize("name", JOBS)
def test_the_recorded_numbers_are_those_of_trl(
    name: str, model: Path, reward_model: Path, rows: Path, tmp_path: Path
) -> None:
    assert PYTHON.exists(), "make trl sets TRL's environment up"
    job = JOBS[name]
    history = trl(job, reward_model if job.scores else model, rows, tmp_path)
    if os.environ.get("SLUICE_UPDATE_GOLDEN"):
        recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
        RECORDED.write_text(json.dumps({**recorded, name: history}, indent=1) + "\n")
    recorded = json.loads(RECORDED.read_text())[name]
    for new, old in zip(history, recorded, strict=True):
        assert new == pytest.approx(old, rel=1e-5, abs=1e-5)


def trl(job: Job, model: Path, rows: Path, directory: Path) -> History:
    """Train with TRL, and return the metrics of each step."""
    task = directory / "task.json"
    answer = directory / "history.json"
    task.write_text(
        json.dumps(
            {
                "trainer": job.trainer,
                "model": str(model),
                "rows": str(rows),
                "settings": OPTIMIZER | job.settings,
                "directory": str(directory / "run"),
                "out": str(answer),
            }
        )
    )
    process = subprocess.run(
        [PYTHON, Path(__file__).with_name("trl_preferences.py"), task],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stdout[-4000:]
    history: History = json.loads(answer.read_text())
    return history


LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp": {"backend": "fsdp"},
    "fsdp, shared rows": {"backend": "fsdp", "parallelism": {"context": 2}},
    "megatron": {"backend": "megatron"},
    "megatron, tensor": {"backend": "megatron", "parallelism": {"tensor": 2}},
    "megatron, pipeline": {"backend": "megatron", "parallelism": {"pipeline": 2}},
}


@pytest.fixture(scope="module")
def alone(train: Callable[..., History], tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Three steps on one rank with a micro-batch for all pairs: history and weights."""
    file = tmp_path_factory.mktemp("alone") / "weights"
    history = train(**SHORT, backend="fsdp", maxTokensPerGpu=4096, dump=str(file))
    return history, file


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_two_ranks_learn_what_one_does(
    model: Path, rows: Path, alone: Trained, tmp_path: Path, layout: dict[str, Any]
) -> None:
    file = tmp_path / "weights"
    job = {**SHORT, "model": str(model), "rows": str(rows), "dump": str(file)}
    ranks = {"processesPerNode": 2, "maxTokensPerGpu": 128}
    first, second = tiny.run("preference_steps.py", json.dumps({**job, **ranks, **layout}), world=2)
    assert first == second
    for ours, theirs in zip(first, alone[0], strict=True):
        assert ours == pytest.approx(theirs, rel=2e-5, abs=5e-6)
    expected = safetensors.torch.load_file(alone[1])
    assert apart(safetensors.torch.load_file(file), expected) < 2e-6


def test_a_model_that_computes_a_sequence_at_a_time_learns_from_pairs(
    rows: Path, tmp_path: Path
) -> None:
    """It learns what plain transformers with AdamW does."""
    kind, shape = tiny.OTHERS["qwen3.5"]
    model = str(preference_steps.save_model(tmp_path / "model", kind, **shape))
    loss = {"type": "dpo"}
    expected = preference_steps.train(model, str(rows), loss, steps=3, kind=plain.Plain)
    ours = preference_steps.train(model, str(rows), loss, steps=3, backend="fsdp")
    for own, other in zip(ours, expected, strict=True):
        assert own == pytest.approx(other, rel=2e-5, abs=1e-5)


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8, "export": "both"}], ids=str)
def test_a_reward_model_is_exported_as_transformers_reads_it(
    model: Path, rows: Path, tmp_path: Path, backend: str, lora: dict[str, Any] | None
) -> None:
    loss = {"type": "reward_model"}
    spec = preference_steps.spec_of(str(model), loss, backend=backend, lora=lora)
    policy = backend_class(spec)(spec, model_dir=model, timeout=timedelta(seconds=tiny.TIMEOUT))
    assert isinstance(policy, LearningPolicy)
    samples = preference_steps.samples_of(spec, rows)
    first = preference_steps.step(policy, samples[:4])
    margins = [sample.reward or 0.0 for sample in samples[:4]]
    expected = sum(math.log1p(math.exp(margin)) for margin in margins) / 4
    assert first["train/loss"] == pytest.approx(expected), "the head starts at 0"
    for _ in range(10):
        last = preference_steps.step(policy, samples[:4])
    assert last["train/loss"] < expected - 0.1
    policy.export_hf(tmp_path / "hf")
    scored = [
        sequence.at_end()
        for sample in samples[:4]
        for sequence in TrainSequence.from_sample(0, sample, 0.0)
    ]
    ours = torch.cat(policy._learner.score(scored, policy._forward_values))
    exported = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf").eval()
    assert exported.config.architectures == ["Qwen3ForSequenceClassification"]
    assert exported.config.num_labels == 1
    for sequence, value in zip(scored, ours, strict=True):
        tokens = torch.from_numpy(sequence.tokens[:-1].astype("int64"))[None]
        assert exported(input_ids=tokens).logits[0, 0].item() == pytest.approx(
            value.item(), abs=2e-5
        )
    if lora:
        policy.export_adapter(tmp_path / "adapter")
        adapted = peft.PeftModel.from_pretrained(
            AutoModelForSequenceClassification.from_pretrained(model, num_labels=1),
            str(tmp_path / "adapter"),
        ).eval()
        tokens = torch.from_numpy(scored[0].tokens[:-1].astype("int64"))[None]
        assert adapted(input_ids=tokens).logits[0, 0].item() == pytest.approx(
            ours[0].item(), abs=2e-5
        )


def save_judged(rows: Path, path: Path) -> Path:
    """Write each pair as two answers with their labels."""
    judged = [
        {"prompt": pair["prompt"], "completion": pair[name], "label": name == "chosen"}
        for pair in map(json.loads, rows.read_text().splitlines())
        for name in ("chosen", "rejected")
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in judged))
    return path


def test_kto_learns_the_same_with_both_backends(model: Path, rows: Path, tmp_path: Path) -> None:
    """They learn what plain transformers with AdamW does."""
    judged = save_judged(rows, tmp_path / "judged.jsonl")
    loss = {"type": "kto", "preference": {"desirableWeight": 1.3}}
    kinds: list[dict[str, Any]] = [
        {"kind": plain.Plain},
        {"backend": "fsdp"},
        {"backend": "megatron"},
    ]
    expected, *others = [
        preference_steps.train(str(model), str(judged), loss, steps=4, **kind) for kind in kinds
    ]
    assert expected[0]["train/kl"] == 0
    for history in others:
        for own, other in zip(history, expected, strict=True):
            assert own == pytest.approx(other, rel=5e-5, abs=3e-5)


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_an_adapter_has_its_base_as_the_reference(
    train: Callable[..., History], backend: str
) -> None:
    lora = {"rank": 4, "alpha": 8}
    history = train({"type": "dpo"}, backend=backend, lora=lora, optimizer={"lr": 5e-3})
    first, last = history[0], history[-1]
    assert first["train/loss"] == pytest.approx(math.log(2))
    assert first["train/rewards/chosen"] == 0
    assert last["train/loss"] < math.log(2) - 0.1
    assert last["train/rewards/margins"] > 0.2


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
@pytest.mark.parametrize("kind", ["dpo", "kto", "reward_model"])
def test_held_out_rows_have_the_metrics_that_a_step_would_have(
    kind: str,
    backend: str,
    model: Path,
    reward_model: Path,
    rows: Path,
    tmp_path: Path,
) -> None:
    """They are measured in several pages, and nothing is trained."""
    start = reward_model if kind == "reward_model" else model
    file = save_judged(rows, tmp_path / "judged.jsonl") if kind == "kto" else rows
    spec = preference_steps.spec_of(str(start), {"type": kind}, backend=backend)
    policy = backend_class(spec)(spec, model_dir=start, timeout=timedelta(seconds=tiny.TIMEOUT))
    assert isinstance(policy, LearningPolicy)
    samples = preference_steps.samples_of(spec, file)[: preference_steps.PAIRS]
    measured = preference_steps.HeldOutRows(policy, samples, page=3)
    before = measured.metrics()
    assert before == measured.metrics()
    trained = preference_steps.step(policy, samples)
    if kind == "kto":  # a step divides by the tokens of the mismatched answers, too
        del before["entropy_loss"]
    for name, value in before.items():
        assert trained[f"train/{name}"] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    assert measured.metrics()["loss"] < before["loss"]


@pytest.mark.parametrize("aggregation", ["token_mean", "prompt_mean", "token_sum_norm"])
def test_held_out_rows_have_the_aggregation_of_a_step(
    aggregation: str, model: Path, rows: Path
) -> None:
    pairs = preference_steps.spec_of(str(model), {"type": "dpo"}, backend="fsdp")
    samples = [
        replace(sample, branches=[])
        for sample in preference_steps.samples_of(pairs, rows)[: preference_steps.PAIRS]
    ]
    manifest = pairs.model_dump(mode="json", by_alias=True, exclude_unset=True)
    manifest["algorithm"] = {"loss": {"type": "sft"}, "aggregation": aggregation}
    spec = RLJobSpec.model_validate(manifest)
    policy = backend_class(spec)(spec, model_dir=model, timeout=timedelta(seconds=tiny.TIMEOUT))
    assert isinstance(policy, LearningPolicy)
    measured = preference_steps.HeldOutRows(policy, samples).metrics()
    trained = preference_steps.step(policy, samples)
    for name, value in measured.items():
        assert trained[f"train/{name}"] == pytest.approx(value, rel=1e-5, abs=1e-6), name
