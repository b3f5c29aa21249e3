"""Train with TRL's trainers of preferences, in TRL's environment (make trl).

    .venv-trl/bin/python tests/integration/trainer/trl_preferences.py TASK.json

The task names a trainer, a model's directory, rows in the order of training, the trainer's
arguments, and the file that gets the metrics of each step.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.utils.data import SequentialSampler
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer

TRAINERS = {
    "dpo": (DPOTrainer, DPOConfig),
    "cpo": (CPOTrainer, CPOConfig),
    "reward": (RewardTrainer, RewardConfig),
}
# Metrics of TRL's log that are compared, under their names in a record of sluice.
METRICS = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "accuracy": "rewards/accuracies",
    "margin": "rewards/margins",
} | {
    name: name
    for name in (
        "rewards/chosen",
        "rewards/rejected",
        "rewards/margins",
        "rewards/accuracies",
        "logps/chosen",
        "logps/rejected",
    )
}


def run(task: dict[str, Any]) -> list[dict[str, float]]:
    kind, config = TRAINERS[task["trainer"]]

    class InOrder(kind):  # type: ignore[misc, valid-type]
        def _get_train_sampler(self, *arguments: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

    arguments = config(
        output_dir=task["directory"],
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        lr_scheduler_type="constant",
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        gradient_checkpointing=False,
        **task["settings"],
    )
    tokenizer = AutoTokenizer.from_pretrained(task["model"])
    # transformers reads a reward at the last token that is not padding.
    tokenizer.pad_token = "<|im_start|>"
    trainer = InOrder(
        task["model"],
        args=arguments,
        train_dataset=Dataset.from_json(task["rows"], cache_dir=task["directory"]),
        processing_class=tokenizer,
    )
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [{METRICS[name]: entry[name] for name in METRICS if name in entry} for entry in logs]


if __name__ == "__main__":
    torch.set_num_threads(1)
    task = json.loads(Path(sys.argv[1]).read_text())
    Path(task["out"]).write_text(json.dumps(run(task)))
