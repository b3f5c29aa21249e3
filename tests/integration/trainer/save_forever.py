"""Child process that saves checkpoints until it is killed; prints "saved N" when one is durable."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

from sluice_trainer.megatron.policy import MegatronPolicy
from tests.integration.trainer import tiny

model, checkpoints, in_background = (
    Path(sys.argv[1]),
    Path(sys.argv[2]),
    sys.argv[3:] == ["in the background"],
)
policy = MegatronPolicy(
    tiny.spec(model, checkpoint={"keep": 2}),
    model_dir=model,
    timeout=timedelta(seconds=tiny.TIMEOUT),
)
policy.load_latest(checkpoints)
while True:
    shard = tiny.batch(4, seed=policy.step)
    policy.train([shard], [tiny.totals(shard)])
    saved = policy.finish_save(checkpoints, wait=True)
    policy.begin_save(checkpoints, policy.step, background=in_background)
    if not in_background:
        saved = policy.finish_save(checkpoints, wait=True)
    if saved is not None:
        print(f"saved {saved}", flush=True)
