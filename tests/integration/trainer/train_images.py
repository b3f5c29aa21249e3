"""Steps of a vision job, on one of several ranks: rank 0 alone has sequences with images."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from sluice_trainer.fsdp.policy import ShardedPolicy
from tests.integration.trainer import image_batch, tiny


def train(model: str, out: str, steps: int, **changes: Any) -> dict[str, Any]:
    """Train on all ranks, export the weights, and return the metrics of each step."""
    spec = image_batch.spec(Path(model), **changes)
    timeout = timedelta(seconds=tiny.TIMEOUT)
    policy = ShardedPolicy(spec, model_dir=Path(model), timeout=timeout)
    history = []
    for step in range(steps):
        shard = image_batch.Batch(Path(model), groups=4, seed=step).sequences()
        own = shard
        if policy.ranks.world_size > 1:
            own = [s for s in shard if bool(s.images) == (policy.ranks.rank == 0)]
        history.append(policy.train([own], [tiny.totals(shard)]))
    policy.export_hf(Path(out))
    return {"history": history}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(train(**json.loads(sys.argv[1]))))
