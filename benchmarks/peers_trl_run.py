"""TRL's half of benchmarks/peers.py, seen from outside its environment."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from benchmarks.peers_settings import trl_settings
from sluice.api import RLJob
from sluice_trainer.step.rates import learning_rate

ROOT = Path(__file__).parents[1]


def trl_run(
    job: RLJob, micro_batches: int, directory: Path, python: Path, seconds: float
) -> tuple[int, str]:
    """Exit code and output of TRL's training, which writes steps.jsonl. directory: has rows.jsonl;
    python: of TRL's environment.
    """
    spec = job.spec
    steps, reward = spec.trainer.steps or 0, spec.reward
    settings = trl_settings(spec, micro_batches=micro_batches)
    task = {
        "model": spec.model.path,
        "rows": str(directory / "rows.jsonl"),
        "reward": reward and reward.function,
        "settings": {setting.name: setting.value for setting in settings},
        "rates": [learning_rate(step, spec.trainer.optimizer, steps) for step in range(steps)],
        "out": str(directory / "steps.jsonl"),
    }
    (directory / "task.json").write_text(json.dumps(task))
    process = subprocess.run(
        [python, ROOT / "benchmarks/peers_trl.py", directory / "task.json"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
    )
    return process.returncode, process.stdout
