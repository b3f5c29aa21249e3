"""Child process: save one checkpoint after another until it is killed. Prints "saved N" after each."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import tiny

from sluice_trainer.megatron.policy import Policy

model, checkpoints = Path(sys.argv[1]), Path(sys.argv[2])
policy = Policy(tiny.spec(model, checkpoint={"keep": 2}), model_dir=model, timeout=timedelta(seconds=tiny.TIMEOUT))
policy.load_latest(checkpoints)
while True:
    shard = tiny.batch(4, seed=policy.step)
    policy.train([shard], [tiny.totals(shard)])
    policy.save(checkpoints, policy.step)
    print(f"saved {policy.step}", flush=True)
