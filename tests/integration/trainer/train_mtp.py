"""Steps in which only the layer that predicts a further token learns, from given responses."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sluice_trainer.batch.sequences import TrainSequence
from sluice_trainer.fsdp.policy import ShardedPolicy
from tests.integration.trainer import tiny


def train(
    model: str, prompt: list[int], responses: list[list[int]], steps: int, out: str
) -> dict[str, Any]:
    """Train with a learning rate of 0 for the policy, export, and return the layer's losses."""
    trainer: dict[str, Any] = {"backend": "fsdp", "optimizer": {"lr": 0.0}, "mtp": {"lr": 1e-2}}
    trainer["maxTokensPerGpu"] = 4096
    spec = tiny.spec(Path(model), trainer=trainer)
    timeout = timedelta(seconds=tiny.TIMEOUT)
    policy = ShardedPolicy(spec, model_dir=Path(model), timeout=timeout)
    shard = [
        TrainSequence(
            tokens=np.array(prompt + response, np.int32),
            response_length=len(response),
            loss_mask=np.ones(len(response), np.uint8),
            rollout_log_probs=np.zeros(len(response), np.float32),
            advantage=0.0,
            group_id=number,
            index=0,
        )
        for number, response in enumerate(responses)
    ]
    losses = []
    for _ in range(steps):
        losses.append(policy.train([shard], [tiny.totals(shard)])["train/mtp_loss"])
    policy.export_hf(Path(out))
    return {"losses": losses}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(train(**json.loads(sys.argv[1]))))
