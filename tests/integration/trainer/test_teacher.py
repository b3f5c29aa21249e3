"""A teacher in the trainer gives the results of transformers, under every layout."""

from __future__ import annotations

import shutil
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sluice.runtime.pod_env import ConfigurationError
from sluice_trainer.batch.sequences import TrainSequence
from sluice_trainer.megatron.policy import MegatronPolicy
from sluice_trainer.step import head
from tests.integration.trainer import estimate_steps, tiny
from tests.integration.trainer.test_estimators import run_on_ranks, same

pytestmark = pytest.mark.usefixtures("process_group")
TEMPERATURE = 0.9
# Divergences of probabilities, as they are written.
WRITTEN: dict[str, Any] = {
    "reverse_kl": lambda q, p, beta: (q * (q / p).log()).sum(-1),
    "forward_kl": lambda q, p, beta: (p * (p / q).log()).sum(-1),
    "jsd": lambda q, p, beta: (
        beta * (p * (p / (beta * p + (1 - beta) * q)).log()).sum(-1)
        + (1 - beta) * (q * (q / (beta * p + (1 - beta) * q)).log()).sum(-1)
    ),
}
# A model of transformers.
Plain = Any


def checkpoint(source: Path, directory: Path, words: int = tiny.VOCAB) -> Path:
    """Copy a checkpoint with a tokenizer of `words` words, the last of which are new."""
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
    """A model of another family, with four layers instead of two and tied embeddings."""
    return checkpoint(models["qwen3-tied"], tmp_path_factory.mktemp("teacher") / "model")


@pytest.fixture(scope="module")
def wide_student(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student with four layers, for pipelines, and other weights than the teacher."""
    directory = checkpoint(models["qwen3-tied"], tmp_path_factory.mktemp("wide") / "model")
    torch.manual_seed(8)
    tensors = load_file(directory / "model.safetensors")
    moved = {name: tensor + 0.05 * torch.randn_like(tensor) for name, tensor in tensors.items()}
    save_file(moved, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def larger(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The teacher with 29 words that the student does not have."""
    directory = tmp_path_factory.mktemp("larger") / "model"
    shutil.copytree(teacher, directory)
    tensors = load_file(directory / "model.safetensors")
    name = "model.embed_tokens.weight"
    torch.manual_seed(7)
    tensors[name] = torch.cat([tensors[name], torch.randn(29, tensors[name].shape[1]) * 0.2])
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = (directory / "config.json").read_text()
    (directory / "config.json").write_text(
        config.replace(f'"vocab_size": {tiny.VOCAB}', f'"vocab_size": {tiny.VOCAB + 29}')
    )
    return directory


def make(
    student: Path, teacher: dict[str, Any], coef: float = 1.0, **distillation: Any
) -> MegatronPolicy:
    algorithm = {"distillation": {"coef": coef, "teacher": teacher, **distillation}}
    temperature = TEMPERATURE if "path" in teacher else 1.0
    spec = tiny.spec(
        student,
        algorithm=algorithm,
        reward=None,
        rollout={"sampling": {"temperature": temperature}},
    )
    return MegatronPolicy(spec, model_dir=student, timeout=timedelta(seconds=tiny.TIMEOUT))


def scores(model: Plain, shard: list[TrainSequence], temperature: float) -> list[torch.Tensor]:
    with torch.no_grad():
        return [tiny.hf_log_probs(model, sequence, temperature)[0] for sequence in shard]


def plain_steps(
    student: Path,
    teacher: Path,
    batches: list[list[TrainSequence]],
    temperature: float,
    coef: float,
) -> list[float]:
    """Train with transformers and AdamW, one sequence at a time.

    Returns the reverse KL before each step.
    """
    model, teacher_model = tiny.hf_model(student), tiny.hf_model(teacher)
    adam = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=tiny.EPS, weight_decay=0.0
    )
    divergences = []
    for shard in batches:
        loss, divergence = torch.zeros(()), 0.0
        for sequence, theirs in zip(shard, scores(teacher_model, shard, temperature), strict=True):
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
        divergences.append(divergence)
    return divergences


def test_three_steps_equal_transformers_with_adamw(student: Path, teacher: Path) -> None:
    policy = make(student, {"path": str(teacher)}, coef=0.5)
    batches = [tiny.batch(8, seed=step) for step in range(3)]
    expected = plain_steps(student, teacher, batches, TEMPERATURE, 0.5)
    for shard, divergence in zip(batches, expected, strict=True):
        metrics = policy.train([shard], [tiny.totals(shard)])
        assert metrics["train/opd_reverse_kl"] == pytest.approx(divergence, abs=2e-5)
    assert abs(expected[0] - expected[-1]) > 1e-3


def test_a_teacher_behind_a_url_gives_the_same(student: Path, teacher: Path) -> None:
    """The log-probs come with the sequences; those of masked tokens are nan."""
    policy = make(student, {"url": "http://teacher"})
    plain, batches = tiny.hf_model(teacher), [tiny.batch(8, seed=step) for step in range(2)]
    expected = plain_steps(student, teacher, batches, 1.0, 1.0)
    for shard, divergence in zip(batches, expected, strict=True):
        scored = [
            replace(
                s, teacher_log_probs=torch.where(torch.from_numpy(s.loss_mask) > 0, v, torch.nan)
            )
            for s, v in zip(shard, scores(plain, shard, 1.0), strict=True)
        ]
        metrics = policy.train([scored], [tiny.totals(scored)])
        assert metrics["train/opd_reverse_kl"] == pytest.approx(divergence, abs=2e-5)


def test_the_teacher_stays_as_it_is(student: Path, teacher: Path) -> None:
    policy, plain, shard = (
        make(student, {"path": str(teacher)}),
        tiny.hf_model(teacher),
        tiny.batch(6, seed=9),
    )
    policy.train([shard], [tiny.totals(shard)])
    assert policy._teacher is not None
    for ours, theirs in zip(
        policy._teacher.log_probs(shard), scores(plain, shard, TEMPERATURE), strict=True
    ):
        assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize(
    ("layout", "world"),
    [
        ({}, 2),
        ({"tensor": 2}, 2),
        pytest.param({"tensor": 2, "pipeline": 2}, 4, marks=pytest.mark.long),
        ({"context": 2}, 2),
    ],
    ids=str,
)
def test_a_teacher_spread_like_the_policy_equals_one_rank(
    student: Path, teacher: Path, layout: dict[str, int], world: int
) -> None:
    distillation = {"coef": 0.5, "teacher": {"path": str(teacher)}}
    algorithm = {"estimator": "rloo", "distillation": distillation}
    job: dict[str, Any] = {"model": str(student), "algorithm": algorithm}
    steps = {"stepsPerBatch": 2}
    (spread,) = run_on_ranks(
        world, {**job, "trainer": {**steps, "parallelism": layout, "processesPerNode": world}}
    )
    alone = estimate_steps.train(**job, trainer=steps)
    same(spread, alone)
    assert abs(alone["history"][0]["train/opd_reverse_kl"]) > 1e-3, "the teacher is another model"


KINDS: dict[str, dict[str, Any]] = {
    "reverse_kl": {"divergence": "reverse_kl"},
    "forward_kl": {"divergence": "forward_kl"},
    "jsd": {"divergence": "jsd", "beta": 0.3},
}


def word_log_probs(model: Plain, sequence: TrainSequence, words: int) -> torch.Tensor:
    """Return log-probs of all words at each response token by transformers: [response, words]."""
    tokens = torch.from_numpy(sequence.tokens.astype(np.int64))
    logits = model(input_ids=tokens[None]).logits[0, :-1, :words].float() / TEMPERATURE
    return torch.log_softmax(logits, -1)[-sequence.response_length :]


def plain_divergences(
    student: Path,
    teacher: Path,
    batches: list[list[TrainSequence]],
    kind: dict[str, Any],
    coef: float,
) -> list[float]:
    """Train with GRPO's loss and the divergence over all words, in transformers with AdamW.

    Returns the divergence before each step.
    """
    model, teacher_model = tiny.hf_model(student), tiny.hf_model(teacher)
    adam = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=tiny.EPS, weight_decay=0.0
    )
    divergences = []
    for shard in batches:
        loss, total = torch.zeros(()), torch.zeros(())
        for sequence in shard:
            ours = word_log_probs(model, sequence, tiny.VOCAB)
            with torch.no_grad():
                theirs = word_log_probs(teacher_model, sequence, tiny.VOCAB)
            distance = WRITTEN[kind["divergence"]](ours.exp(), theirs.exp(), kind.get("beta", 0.5))
            chosen = torch.from_numpy(sequence.tokens[-sequence.response_length :].astype(np.int64))
            log_probs = ours.gather(-1, chosen[:, None]).squeeze(-1)
            mask = torch.from_numpy(sequence.loss_mask).float()
            share = mask / mask.sum().clamp(min=1) / len(shard)
            total = total + (distance * share).sum()
            loss = (
                loss - ((log_probs - log_probs.detach()).exp() * sequence.advantage * share).sum()
            )
        loss = loss + coef * total
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        divergences.append(float(total.detach()))
    return divergences


@pytest.mark.parametrize("chunk", [2**27, 20 * tiny.VOCAB], ids=["whole", "chunks"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_divergence_over_all_words_equals_transformers(
    student: Path, teacher: Path, kind: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", chunk)
    policy = make(student, {"path": str(teacher)}, coef=0.5, **KINDS[kind])
    batches = [tiny.batch(8, seed=step) for step in range(3)]
    expected = plain_divergences(student, teacher, batches, KINDS[kind], 0.5)
    for shard, divergence in zip(batches, expected, strict=True):
        metrics = policy.train([shard], [tiny.totals(shard)])
        assert metrics["train/opd_loss"] == pytest.approx(divergence, rel=2e-4)
        if kind == "reverse_kl":
            assert metrics["train/opd_reverse_kl"] == metrics["train/opd_loss"]
    assert abs(expected[0] - expected[-1]) > 1e-3


def test_words_that_only_the_teacher_has_are_left_out(
    student: Path, teacher: Path, larger: Path
) -> None:
    """The larger teacher has the first 131 words of the other one."""
    shard = tiny.batch(8, seed=3)
    first, second = (
        make(student, {"path": str(directory)}, **KINDS["jsd"]).train([shard], [tiny.totals(shard)])
        for directory in (teacher, larger)
    )
    assert first == pytest.approx(second, rel=1e-5)


@pytest.mark.parametrize(
    ("layout", "world", "kind"),
    [
        ({}, 2, "jsd"),
        pytest.param({"tensor": 2}, 2, "forward_kl", marks=pytest.mark.long),
        ({"tensor": 2}, 2, "jsd"),
        ({"context": 2}, 2, "reverse_kl"),
        ({"pipeline": 2}, 2, "jsd"),
        pytest.param({"tensor": 2}, 4, "reverse_kl", marks=pytest.mark.long),
        pytest.param(
            *({"pipeline": 2, "virtualPipeline": 2}, 2, "forward_kl"), marks=pytest.mark.long
        ),
        pytest.param({"tensor": 2, "pipeline": 2}, 4, "jsd", marks=pytest.mark.long),
        pytest.param({"tensor": 2, "context": 2}, 4, "jsd", marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_divergence_over_words_of_several_ranks_equals_one_rank(
    wide_student: Path, larger: Path, layout: dict[str, int], world: int, kind: str
) -> None:
    """131 words do not split evenly, and the teacher's 160 are split at other words."""
    distillation = {"coef": 0.5, "teacher": {"path": str(larger)}, **KINDS[kind]}
    job: dict[str, Any] = {
        "model": str(wide_student),
        "algorithm": {"estimator": "rloo", "distillation": distillation},
    }
    steps = {"stepsPerBatch": 2}
    (spread,) = run_on_ranks(
        world, {**job, "trainer": {**steps, "parallelism": layout, "processesPerNode": world}}
    )
    alone = estimate_steps.train(**job, trainer=steps)
    same(spread, alone)
    assert alone["history"][0]["train/opd_loss"] > 0.05


def test_another_tokenizer_is_refused(
    student: Path, models: dict[str, Path], tmp_path: Path
) -> None:
    other = checkpoint(models["qwen2"], tmp_path / "other", words=tiny.VOCAB + 1)
    with pytest.raises(
        ConfigurationError,
        match=r"spec.algorithm.distillation.teacher.path: the tokenizer of .*/other is not that of "
        r"the student, "
        r".*: 5 of 131 tokens differ, such as '131w126' is 126 here and unknown there",
    ):
        make(student, {"path": str(other)})


def test_so_is_a_teacher_with_fewer_tokens(student: Path, teacher: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    shutil.copytree(teacher, small)
    config = (
        (small / "config.json")
        .read_text()
        .replace(f'"vocab_size": {tiny.VOCAB}', '"vocab_size": 100')
    )
    (small / "config.json").write_text(config)
    with pytest.raises(ConfigurationError, match="has a vocab_size of 100, the student's is 131"):
        make(student, {"path": str(small)})
