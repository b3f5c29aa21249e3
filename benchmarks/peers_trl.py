"""The half of benchmarks/peers.py that runs in TRL's environment: one run of GRPOTrainer.

    PYTHONPATH=. .venv-trl/bin/python benchmarks/peers_trl.py TASK.json

The task names a model's directory, rows in the order of training, a reward function as sluice loads
it, arguments of GRPOConfig, the learning rate of each step, and the file that gets a line a step.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from sluice.rewards import RewardInput
from sluice.runtime.user_code import load_reward


class Trainer(GRPOTrainer):
    """GRPOTrainer with a learning rate of its own for each step."""

    def __init__(self, *arguments: Any, rates: list[float], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._rates = rates

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        base, rates = self.args.learning_rate, self._rates
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer or self.optimizer, lambda step: rates[min(step, len(rates) - 1)] / base
        )
        return self.lr_scheduler


class Lines(TrainerCallback):
    """A line for each step, when it is done."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_others: Any
    ) -> None:
        if "reward" not in logs:
            return
        record = {
            "step": state.global_step,
            "time": time.time(),
            "reward": logs["reward"],
            "entropy": logs["entropy"],
            "tokens": logs["completions/mean_length"],
        }
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")


def reward_of(dotted: str, tokenizer: Any, longest: int) -> Callable[..., list[float]]:
    """A reward of sluice as one of TRL's. longest: tokens that a response may have."""
    function = load_reward(dotted)

    def reward(completion_ids: list[list[int]], row: list[str], **_others: Any) -> list[float]:
        return [
            float(function(sample(ids, json.loads(text))))
            for ids, text in zip(completion_ids, row, strict=True)
        ]

    def sample(ids: list[int], row: dict[str, Any]) -> RewardInput:
        return RewardInput(
            response=tokenizer.decode(ids, skip_special_tokens=True),
            tokens=ids,
            response_length=len(ids),
            truncated=len(ids) == longest and ids[-1] != tokenizer.eos_token_id,
            **row,
        )

    return reward


def main(task: dict[str, Any]) -> None:
    settings = GRPOConfig(
        output_dir=str(Path(task["out"]).parent / "trl"),
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **task["settings"],
    )
    tokenizer = AutoTokenizer.from_pretrained(task["model"], padding_side="left")
    rows = [json.loads(line) for line in Path(task["rows"]).read_text().splitlines()]
    trainer = Trainer(
        model=task["model"],
        reward_funcs=reward_of(task["reward"], tokenizer, settings.max_completion_length),
        args=settings,
        # The row travels as text: a table has one type for a column, and metadata may have many.
        train_dataset=Dataset.from_list(
            [{"prompt": row["prompt"], "row": json.dumps(row)} for row in rows]
        ),
        processing_class=tokenizer,
        callbacks=[Lines(Path(task["out"]))],
        rates=task["rates"],
    )
    trainer.train()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
