"""A teacher that the trainer scores with: what transformers computes, whatever its shape and however it is spread."""

from __future__ import annotations

import shutil
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import estimate_steps
import pytest
import tiny
import torch
from test_estimators import elsewhere, same
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sluice.environment import ConfigurationError
from sluice_trainer.megatron.packing import TrainSequence
from sluice_trainer.megatron.policy import Policy

pytestmark = pytest.mark.usefixtures("process_group")
TEMPERATURE = 0.9
Plain = Any
"""A model of transformers."""


def checkpoint(source: Path, directory: Path, words: int = tiny.VOCAB) -> Path:
    """The checkpoint with a tokenizer of so many words, the last of which are its own."""
    shutil.copytree(source, directory)
    vocabulary = {f"w{i}" if i < tiny.VOCAB - 5 else f"{words}w{i}": i for i in range(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def student(qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(qwen3, tmp_path_factory.mktemp("student") / "model")


@pytest.fixture(scope="module")
def teacher(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another family: four layers where the student has two, tied embeddings, another rope."""
    return checkpoint(models["qwen3-tied"], tmp_path_factory.mktemp("teacher") / "model")


def make(student: Path, teacher: dict[str, Any], coef: float = 1.0) -> Policy:
    algorithm = {"distillation": {"coef": coef, "teacher": teacher}}
    temperature = TEMPERATURE if "path" in teacher else 1.0
    spec = tiny.spec(student, algorithm=algorithm, reward=None, rollout={"sampling": {"temperature": temperature}})
    return Policy(spec, model_dir=student, timeout=timedelta(seconds=tiny.TIMEOUT))


def scores(model: Plain, shard: list[TrainSequence], temperature: float) -> list[torch.Tensor]:
    with torch.no_grad():
        return [tiny.hf_log_probs(model, sequence, temperature)[0] for sequence in shard]


def plain_steps(
    student: Path, teacher: Path, batches: list[list[TrainSequence]], temperature: float, coef: float
) -> list[float]:
    """The same in transformers with AdamW, over one sequence at a time; the reverse KL before each step."""
    model, taught = tiny.hf_model(student), tiny.hf_model(teacher)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=tiny.EPS, weight_decay=0.0)
    found = []
    for shard in batches:
        loss, divergence = torch.zeros(()), 0.0
        for sequence, theirs in zip(shard, scores(taught, shard, temperature), strict=True):
            ours, _ = tiny.hf_log_probs(model, sequence, temperature)
            mask = torch.from_numpy(sequence.loss_mask).float()
            gap = ours.detach() - theirs
            terms = -(ours - ours.detach()).exp() * (sequence.advantage - coef * gap)
            loss = loss + (terms * mask).sum() / mask.sum().clamp(min=1) / len(shard)
            divergence += float((gap * mask).sum() / mask.sum().clamp(min=1) / len(shard))
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        found.append(divergence)
    return found


def test_three_steps_equal_transformers_with_adamw(student: Path, teacher: Path) -> None:
    policy = make(student, {"path": str(teacher)}, coef=0.5)
    batches = [tiny.batch(8, seed=step) for step in range(3)]
    expected = plain_steps(student, teacher, batches, TEMPERATURE, 0.5)
    for shard, divergence in zip(batches, expected, strict=True):
        metrics = policy.train([shard], [tiny.totals(shard)])
        assert metrics["train/opd_reverse_kl"] == pytest.approx(divergence, abs=2e-5)
    assert abs(expected[0] - expected[-1]) > 1e-3


def test_a_teacher_behind_a_url_gives_the_same(student: Path, teacher: Path) -> None:
    """Its log-probs come with the sequences, those of masked tokens without a meaning."""
    policy = make(student, {"url": "http://teacher"})
    plain, batches = tiny.hf_model(teacher), [tiny.batch(8, seed=step) for step in range(2)]
    expected = plain_steps(student, teacher, batches, 1.0, 1.0)
    for shard, divergence in zip(batches, expected, strict=True):
        given = [
            replace(s, teacher_log_probs=torch.where(torch.from_numpy(s.loss_mask) > 0, v, torch.nan))
            for s, v in zip(shard, scores(plain, shard, 1.0), strict=True)
        ]
        metrics = policy.train([given], [tiny.totals(given)])
        assert metrics["train/opd_reverse_kl"] == pytest.approx(divergence, abs=2e-5)


def test_the_teacher_stays_as_it_is(student: Path, teacher: Path) -> None:
    policy, plain, shard = make(student, {"path": str(teacher)}), tiny.hf_model(teacher), tiny.batch(6, seed=9)
    policy.train([shard], [tiny.totals(shard)])
    assert policy._teacher is not None
    for ours, theirs in zip(policy._teacher.log_probs(shard), scores(plain, shard, TEMPERATURE), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize(
    ("layout", "world"),
    [
        ({}, 2),
        ({"tensor": 2}, 2),
        pytest.param({"tensor": 2, "pipeline": 2}, 4, marks=pytest.mark.slow),
        pytest.param({"context": 2}, 2, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_teacher_spread_like_the_policy_equals_one_rank(
    student: Path, teacher: Path, layout: dict[str, int], world: int
) -> None:
    distillation = {"coef": 0.5, "teacher": {"path": str(teacher)}}
    algorithm = {"estimator": "rloo", "distillation": distillation}
    job = {"model": str(student), "algorithm": algorithm}
    steps = {"stepsPerBatch": 2}
    (spread,) = elsewhere(world, {**job, "trainer": {**steps, "parallelism": layout, "processesPerNode": world}})
    alone = estimate_steps.train(**job, trainer=steps)
    same(spread, alone)
    assert abs(alone["history"][0]["train/opd_reverse_kl"]) > 0.1


def test_another_tokenizer_is_refused(student: Path, models: dict[str, Path], tmp_path: Path) -> None:
    other = checkpoint(models["qwen2"], tmp_path / "other", words=tiny.VOCAB + 1)
    with pytest.raises(
        ConfigurationError,
        match=r"spec.algorithm.distillation.teacher.path: the tokenizer of .*/other is not that of the student, "
        r".*: 5 of 131 tokens differ, such as '131w126' is 126 here and unknown there",
    ):
        make(student, {"path": str(other)})


def test_so_is_a_teacher_with_fewer_tokens(student: Path, teacher: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    shutil.copytree(teacher, small)
    config = (small / "config.json").read_text().replace(f'"vocab_size": {tiny.VOCAB}', '"vocab_size": 100')
    (small / "config.json").write_text(config)
    with pytest.raises(ConfigurationError, match="has a vocab_size of 100, the student's is 131"):
        make(student, {"path": str(small)})
