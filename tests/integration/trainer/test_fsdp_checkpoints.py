"""Checkpoints of FSDP2: an exact resume on any number of ranks, and no harm by failures."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import filesystem

from sluice_trainer.checkpoint import checkpoint_directory
from sluice_trainer.checkpoint.checkpoint_writer import CheckpointError
from sluice_trainer.fsdp.policy import ShardedPolicy
from tests.cases import quick
from tests.integration.trainer import estimate_steps, tiny, train_steps
from tests.integration.trainer.test_conversion import same as equal_files
from tests.integration.trainer.test_estimators import same

pytestmark = pytest.mark.usefixtures("process_group")

TRAINER: dict[str, Any] = {
    "backend": "fsdp",
    "optimizer": {"lr": 1e-3, "schedule": "cosine", "weightDecay": 0.1},
    "steps": 10,
}
KL = {"kl": {"lossCoef": 0.05, "type": "k3"}}
PPO = {"estimator": "ppo", "critic": {"lr": 1e-3, "warmupSteps": 2}, **KL}


def make(model: Path, /, **changes: Any) -> ShardedPolicy:
    changes["trainer"] = {**TRAINER, **changes.get("trainer", {})}
    timeout = timedelta(seconds=tiny.TIMEOUT)
    return ShardedPolicy(tiny.spec(model, **changes), model_dir=model, timeout=timeout)


def train(policy: ShardedPolicy, steps: int = 1) -> list[dict[str, float]]:
    result = []
    for _ in range(steps):
        shard = tiny.batch(8, seed=policy.step)
        if policy.critic:
            pairs = zip(shard, policy.critic.values(shard), strict=True)
            shard = [replace(s, values=v, returns=torch.ones(len(v))) for s, v in pairs]
        result.append(policy.train([shard], [tiny.totals(shard)]))
    return result


def job(model: Path, **options: Any) -> dict[str, Any]:
    return {"model": str(model), "algorithm": KL, "trainer": TRAINER, "share": 30, **options}


def on_two(script: str, options: Any) -> Any:
    return tiny.run(script, json.dumps(options), world=2)[0]


def close(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> None:
    for metrics, other in zip(ours, theirs, strict=True):
        assert metrics == pytest.approx(other, rel=1e-4, abs=1e-6)


@pytest.fixture(scope="module")
def through(qwen3: Path) -> dict[str, Any]:
    """Train five steps without a stop, on one rank."""
    return train_steps.train(**job(qwen3, steps=5))


def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(
    qwen3: Path, tmp_path: Path, through: dict[str, Any]
) -> None:
    train_steps.train(**job(qwen3, steps=3, save_at=3, checkpoints=str(tmp_path)))
    resumed = train_steps.train(**job(qwen3, steps=5, checkpoints=str(tmp_path)))
    later = {"history": through["history"][3:], "resumed": 3, "saved": None}
    assert {**resumed, "rng": 0} == {**through, **later, "rng": 0}


def test_two_ranks_write_in_the_background_and_any_number_of_ranks_resumes(
    qwen3: Path, tmp_path: Path, through: dict[str, Any]
) -> None:
    place = {"checkpoints": str(tmp_path)}
    both = on_two("train_steps.py", job(qwen3, steps=5, save_at=3, in_background=True, **place))
    assert both["saved"] == 3
    assert both["new_memory"] == 0
    close(both["history"], through["history"])
    again = on_two("train_steps.py", job(qwen3, steps=5, **place))
    assert (again["resumed"], again["weights"]) == (3, both["weights"])
    alone = train_steps.train(**job(qwen3, steps=5, **place))
    assert alone["resumed"] == 3
    close(alone["history"], through["history"][3:])


def test_a_checkpoint_of_one_rank_and_its_critic_continue_on_two(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """Embeddings are tied, and the policy has taken no step, as in the critic's warm-up."""
    options: dict[str, Any] = {
        "model": str(models["qwen3-tied"]),
        "algorithm": PPO,
        "trainer": TRAINER,
    }
    whole = estimate_steps.train(**options, steps=4)
    estimate_steps.train(**options, steps=2, save_at=2, checkpoints=str(tmp_path))
    (resumed,) = on_two(
        "estimate_steps.py", [{**options, "steps": 4, "checkpoints": str(tmp_path)}]
    )
    assert resumed["resumed"] == 2
    same(resumed, {name: whole[name][2:] for name in ("history", "advantages")})


@pytest.mark.parametrize(
    ("what", "precision"),
    [
        ("optimizer", "fp32"),
        ("all", "bf16"),
        pytest.param("optimizer", "bf16", marks=pytest.mark.long),
        pytest.param("all", "fp32", marks=pytest.mark.long),
    ],
)
def test_memory_that_leaves_and_comes_back_changes_no_bit(
    qwen3: Path, tmp_path: Path, what: str, precision: str
) -> None:
    options: dict[str, Any] = {"algorithm": PPO, "rollout": {"gpusPerReplica": 0}}
    colocated = {"precision": precision, "colocate": True, "offload": what}
    still = make(qwen3, **options, trainer={"precision": precision})
    shared = make(qwen3, **options, trainer=colocated)
    for turn in range(4):
        assert train(shared) == train(still)
        shared.offload(weights=False)
        sent = {name: tensor.clone() for name, tensor in shared.hf_tensors()}
        shared.offload(weights=True)
        assert bytes_held(shared, weights=what == "all") == 0
        if turn == 1:
            shared.restore(weights_only=True)  # an engine has joined
            shared.offload(weights=True)
        shared.restore()
        assert all(torch.equal(sent[name], tensor) for name, tensor in still.hf_tensors())
    tiny.save(shared, tmp_path, 4)
    resumed = make(qwen3, **options, trainer=colocated)
    resumed.offload(weights=True)
    resumed.restore()
    assert resumed.load_latest(tmp_path) == 4
    assert train(resumed) == train(still)


def bytes_held(policy: ShardedPolicy, *, weights: bool) -> int:
    """Return the bytes of moments and, with `weights`, of all parameters that the policy holds."""
    assert policy.critic is not None
    tensors = []
    for learner in policy._parts.values():
        states = learner.optimizer.state.values()
        tensors += [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]
        if weights:
            tensors += list(learner.net.parameters())
    if weights:
        tensors += list(policy._reference.net.parameters())  # type: ignore[union-attr]
    return sum(tensor.to_local().untyped_storage().nbytes() for tensor in tensors)


@pytest.fixture
def held_writer(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Write checkpoint files only once the event is set."""
    released = threading.Event()
    write = filesystem.FileSystemWriter.write_data

    def held(*arguments: Any, **options: Any) -> Any:
        assert released.wait(tiny.TIMEOUT)
        return write(*arguments, **options)

    monkeypatch.setattr(filesystem.FileSystemWriter, "write_data", held)
    yield released
    released.set()


def test_training_goes_on_while_a_checkpoint_is_written(
    qwen3: Path, tmp_path: Path, held_writer: threading.Event
) -> None:
    policy = make(qwen3)
    train(policy, 2)
    policy.begin_save(tmp_path, 2, background=True)
    after = train(policy, 2)
    assert policy.finish_save(tmp_path, wait=False) is None
    assert checkpoint_directory.latest_step(tmp_path) is None
    held_writer.set()
    assert policy.finish_save(tmp_path, wait=True) == 2
    resumed = make(qwen3)
    assert resumed.load_latest(tmp_path) == 2
    assert train(resumed, 2) == after  # training has changed the weights since the save began


@pytest.mark.parametrize(
    ("where", "in_background"),
    [
        pytest.param("write_data", True, id="weights, in the background"),
        pytest.param("finish", False, id="metadata, in the foreground"),
        pytest.param("write_data", False, id="weights, in the foreground", marks=pytest.mark.long),
        pytest.param("finish", True, id="metadata, in the background", marks=pytest.mark.long),
    ],
)
def test_a_full_disk_is_reported_and_does_no_harm(
    qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, in_background: bool
) -> None:
    policy = make(qwen3)
    train(policy)
    tiny.save(policy, tmp_path, 1)
    train(policy)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(filesystem.FileSystemWriter, where, full)

    def save() -> None:
        policy.begin_save(tmp_path, 2, background=in_background)
        policy.finish_save(tmp_path, wait=True)

    with pytest.raises(CheckpointError, match=r"iter_0000002 could not be written: no space left"):
        save()
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == ["iter_0000001"]
    tiny.save(policy, tmp_path, 2)
    assert make(qwen3).load_latest(tmp_path) == 2


def test_a_damaged_checkpoint_is_named(qwen3: Path, tmp_path: Path) -> None:
    policy = make(qwen3)
    train(policy)
    tiny.save(policy, tmp_path, 1)
    file = tmp_path / "iter_0000001" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"could not be read: .*__0_0.distcp has \d+ bytes"):
        make(qwen3).load_latest(tmp_path)


def test_a_checkpoint_of_megatron_is_not_read(qwen3: Path, tmp_path: Path) -> None:
    train_steps.train(
        **job(qwen3, steps=1, save_at=1, checkpoints=str(tmp_path))
        | {"trainer": {**TRAINER, "backend": "megatron"}}
    )
    with pytest.raises(CheckpointError, match=r"iter_0000001 could not be read: .*trainer.backend"):
        make(qwen3).load_latest(tmp_path)


def test_a_checkpoint_of_fsdp_is_not_read_by_megatron(qwen3: Path, tmp_path: Path) -> None:
    train_steps.train(**job(qwen3, steps=1, save_at=1, checkpoints=str(tmp_path)))
    with pytest.raises(CheckpointError, match=r"iter_0000001 could not be read: .*trainer.backend"):
        train_steps.train(
            **job(qwen3, steps=2, checkpoints=str(tmp_path))
            | {"trainer": {**TRAINER, "backend": "megatron"}}
        )


def test_export_is_a_checkpoint_that_transformers_and_megatron_read(
    models: dict[str, Path], tmp_path: Path
) -> None:
    for name in ("qwen3", "qwen3-moe", "qwen3-tied"):
        policy = make(models[name])
        train(policy)
        policy.export_hf(tmp_path / name)
        policy.export_hf(tmp_path / name)  # replaces the older checkpoint
        shard = tiny.batch(2, seed=0)
        exported = tiny.hf_model(tmp_path / name).requires_grad_(False)
        expected = tiny.hf_log_probs(exported, shard[0])[0]
        assert torch.allclose(policy.log_probs(shard)[0], expected, atol=1e-5)
        assert (tmp_path / name / "tokenizer.json").read_text() == "{}"
        megatron = estimate_steps.train(str(tmp_path / name), algorithm={}, steps=1)
        ours = estimate_steps.train(str(tmp_path / name), algorithm={}, trainer=TRAINER, steps=1)
        close(ours["history"], megatron["history"])


@pytest.mark.parametrize("name", quick(("qwen3", "qwen3-moe", "qwen3-tied"), "qwen3-moe"))
def test_a_converted_checkpoint_equals_the_export(
    models: dict[str, Path], tmp_path: Path, name: str
) -> None:
    policy = make(models[name])
    train(policy)
    tiny.save(policy, tmp_path / "checkpoints", 1)
    policy.export_hf(tmp_path / "exported")
    done = tiny.convert("dist-to-hf", tmp_path / "checkpoints", models[name], tmp_path / "hf")
    assert (done.returncode, done.stderr) == (0, "")
    assert equal_files(tmp_path / "exported", tmp_path / "hf")


def test_a_checkpoint_of_another_model_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    policy = make(models["qwen3"])
    tiny.save(policy, tmp_path, 0)
    done = tiny.convert("dist-to-hf", tmp_path, models["qwen3-moe"], tmp_path / "hf")
    assert done.returncode == 2
    assert "does not hold the model that" in done.stderr
    assert not (tmp_path / "hf").exists()
