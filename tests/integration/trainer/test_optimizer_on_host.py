"""Megatron's optimizer in host memory takes the same steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from sluice_trainer.megatron.policy import MegatronPolicy
from sluice_trainer.megatron.step import adamw
from sluice_trainer.megatron.step.host_optimizer import HostOptimizer
from sluice_trainer.megatron.step.learner import MegatronLearner
from tests.integration.trainer import tiny, train_steps
from tests.integration.trainer.test_checkpoints import TRAINER, elsewhere, job
from tests.integration.trainer.test_offload import PPO, make, step, weights

pytestmark = pytest.mark.usefixtures("process_group")

HOST: dict[str, Any] = {"cpuOffload": "optimizer"}
HALF: dict[str, Any] = {**HOST, "cpuOffloadFraction": 0.5}


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use several pieces for most matrices, with a shorter last one."""
    monkeypatch.setattr(adamw, "PIECE", 1000)


def parts(policy: MegatronPolicy) -> list[HostOptimizer]:
    learners = [
        learner for learner in policy._learners.values() if isinstance(learner, MegatronLearner)
    ]
    chained = [part for learner in learners for part in learner.optimizer.chained_optimizers]
    return [part for part in chained if isinstance(part, HostOptimizer)]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("family", "algorithm", "way"),
    [
        ("qwen3", PPO, HOST),
        ("qwen3", PPO, HALF),
        ("qwen3-moe", {}, HOST),
    ],
    ids=["all of it, with a critic", "half of it, with a critic", "a mixture"],
)
def test_five_steps_equal_those_on_the_device(
    models: dict[str, Path],
    family: str,
    algorithm: dict[str, Any],
    way: dict[str, Any],
    precision: str,
) -> None:
    rates = {**TRAINER["optimizer"], "clipGrad": 0.1}
    usual = make(models[family], algorithm, precision=precision, optimizer=rates)
    host = make(models[family], algorithm, precision=precision, optimizer=rates, **way)
    for seed in range(5):
        assert step(host, seed) == step(usual, seed)
    after = weights(usual)
    assert all((after[name] - w).abs().max() < 1e-6 for name, w in weights(host).items())
    assert len(parts(host)) == len(host._learners)


def on_two(model: Path, way: dict[str, Any], checkpoints: Path, **options: Any) -> dict[str, Any]:
    """Train to step 5 in two processes."""
    request = job(model, steps=5, checkpoints=str(checkpoints), **options)
    request["trainer"] = {**TRAINER, "processesPerNode": 2, **way}
    return elsewhere(2, **request)


def test_checkpoints_of_two_ranks_load_with_and_without_host_memory(
    qwen3: Path, tmp_path: Path
) -> None:
    usual = on_two(qwen3, {}, tmp_path / "usual", save_at=3, in_background=True)
    host = on_two(qwen3, HOST, tmp_path / "host", save_at=3, in_background=True)
    assert host == usual
    pipeline = {**HALF, "parallelism": {"pipeline": 2}}
    on_pipeline = on_two(qwen3, pipeline, tmp_path / "usual")
    to_usual = train_steps.train(**job(qwen3, steps=5, checkpoints=str(tmp_path / "host")))
    for resumed in (on_pipeline, to_usual):
        assert resumed["resumed"] == 3
        for ours, expected in zip(resumed["history"], usual["history"][3:], strict=True):
            assert ours == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_offloading_moves_only_memory_on_the_device(qwen3: Path, tmp_path: Path) -> None:
    plain = make(qwen3, PPO, precision="bf16")
    shared = make(qwen3, PPO, precision="bf16", colocate=True, offload="all", **HALF)
    for seed in range(2):
        assert step(shared, seed) == step(plain, seed)
        shared.offload(weights=True)
        hosts: list[torch.Tensor] = []
        devices: list[torch.Tensor] = []
        for part in parts(shared):
            for group in part.optimizer.param_groups:
                for share in group["params"]:
                    state = part.optimizer.state[share]
                    place = hosts if part.on_host(share) else devices
                    place += [share, state["exp_avg"], state["exp_avg_sq"]]
        assert all(tensor.untyped_storage().nbytes() > 0 for tensor in hosts)
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in devices)
        assert len(hosts) > 10
        assert len(devices) > 10
        shared.restore()
    tiny.save(shared, tmp_path, 2)
    resumed = make(qwen3, PPO, precision="bf16", colocate=True, offload="all", **HOST)
    resumed.offload(weights=True)
    resumed.restore()
    assert resumed.load_latest(tmp_path) == 2
    assert step(resumed, 2) == step(plain, 2)


def test_moments_in_bf16_are_saved_as_such_and_load_in_either_type(
    qwen3: Path, tmp_path: Path
) -> None:
    rates = {**TRAINER["optimizer"], "expAvgDtype": "bf16", "expAvgSqDtype": "bf16"}
    through = train_steps.train(**job(qwen3, steps=5))
    on_two(qwen3, {**HALF, "optimizer": rates}, tmp_path, save_at=3)
    stored = FileSystemReader(tmp_path / "iter_0000003").read_metadata().state_dict_metadata
    kinds = {key.split(".")[2]: entry.properties.dtype for key, entry in optimizer_tensors(stored)}
    assert kinds == {
        "param": torch.float32,
        "exp_avg": torch.bfloat16,
        "exp_avg_sq": torch.bfloat16,
    }
    for optimizer in (rates, TRAINER["optimizer"]):
        request = job(qwen3, steps=5, checkpoints=str(tmp_path))
        request["trainer"] = {**TRAINER, "optimizer": optimizer}
        resumed = train_steps.train(**request)
        for ours, expected in zip(resumed["history"], through["history"][3:], strict=True):
            assert ours == pytest.approx(expected, rel=2e-2, abs=1e-3)


def optimizer_tensors(stored: Any) -> list[tuple[str, Any]]:
    return [(key, entry) for key, entry in stored.items() if key.startswith("optimizer.state.")]
