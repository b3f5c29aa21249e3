"""The reward of grpo.yaml: what the reward model of reward.yaml says of an answer.

The model is read from the run of reward.yaml, or from the directory in the environment variable
REWARD_MODEL. A model of billions of weights is served by SGLang instead (`reward.model`).
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

from sluice.rewards import RewardInput

ROOT = Path(__file__).resolve().parents[2]
# Reward of an answer without an end, which the reward model has never seen. It is below any that
# the model gives: if it were 0, the policy would learn never to end an answer that the model
# dislikes.
UNFINISHED = -10.0
DIRECTORY = ROOT / "runs/preference/reward/checkpoints/hf"


@cache
def reward_model() -> tuple[Any, Any]:
    """Return the reward model and its tokenizer. They are read once in each process."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.set_num_threads(1)  # engine and trainer need the cores, too
    directory = os.environ.get("REWARD_MODEL", str(DIRECTORY))
    model = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    return model, AutoTokenizer.from_pretrained(directory)


def score(sample: RewardInput) -> float:
    """Return the reward of the prompt with the response, or UNFINISHED."""
    import torch

    if sample.truncated:
        return UNFINISHED
    model, tokenizer = reward_model()
    messages = [*sample.prompt, {"role": "assistant", "content": sample.response}]
    tokens = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)
    with torch.inference_mode():
        return float(model(**tokens).logits[0, 0])
