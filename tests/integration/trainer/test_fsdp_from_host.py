"""FSDP2 with weights, gradients and optimizer in host memory computes the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sluice_trainer.distributed.device import DEVICE
from sluice_trainer.fsdp.policy import ShardedPolicy
from tests.integration.trainer import train_steps
from tests.integration.trainer.test_fsdp_checkpoints import (
    KL,
    PPO,
    TRAINER,
    close,
    job,
    on_two,
    train,
)
from tests.integration.trainer.test_fsdp_checkpoints import make as make_policy
from tests.integration.trainer.test_fsdp_steps import apart, weights

pytestmark = pytest.mark.usefixtures("process_group")

HOST = {"cpuOffload": "all"}


def make(model: Path, *, algorithm: dict[str, Any], **trainer: Any) -> ShardedPolicy:
    return make_policy(model, algorithm=algorithm, trainer=trainer)


@pytest.mark.parametrize("algorithm", [KL, PPO], ids=["reference", "critic"])
def test_steps_equal_those_with_weights_on_the_device(
    models: dict[str, Path], algorithm: dict[str, Any]
) -> None:
    usual, host = (make(models["qwen3-tied"], algorithm=algorithm, **way) for way in ({}, HOST))
    close(train(host, 4), train(usual, 4))
    assert apart(weights(host), weights(usual)) < 1e-6


def test_two_ranks_equal_one_and_resume_from_its_checkpoint(qwen3: Path, tmp_path: Path) -> None:
    through = train_steps.train(**job(qwen3, steps=5))
    host = {"trainer": {**TRAINER, **HOST}}
    saved = {"steps": 3, "save_at": 3, "checkpoints": str(tmp_path)}
    train_steps.train(**{**job(qwen3, **saved), **host})
    resumed = on_two("train_steps.py", {**job(qwen3, steps=5, checkpoints=str(tmp_path)), **host})
    close(resumed["history"], through["history"][3:])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_no_memory_stays_on_a_gpu_between_steps(qwen3: Path) -> None:
    way = {"gpusPerNode": 1, "precision": "fp32"}
    usual, host = (make(qwen3, algorithm=PPO, **way, **more) for more in ({}, HOST))
    close(train(host, 4), train(usual, 4))
    assert apart(weights(host), weights(usual)) < 1e-4
    parameters = list(host._learner.net.parameters())
    states = list(host._learner.optimizer.state.values())
    assert {parameter.device.type for parameter in parameters} == {"cpu"}
    assert {state["exp_avg"].device.type for state in states} == {"cpu"}
    assert {tensor.device.type for tensor in weights(host).values()} == {DEVICE.type}
