"""Supervised fine-tuning on Megatron has the loss of transformers, which falls."""

from __future__ import annotations

import math
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch

from sluice_trainer.batch.preparation import prepare
from sluice_trainer.megatron.policy import MegatronPolicy
from tests.integration.trainer import estimate_steps, tiny

pytestmark = pytest.mark.usefixtures("process_group")


def test_the_loss_is_that_of_transformers_at_temperature_1_and_falls(qwen3: Path) -> None:
    spec = tiny.spec(
        qwen3,
        algorithm={"loss": {"type": "sft"}},
        rollout={"batchSize": 20, "sampling": {"temperature": 0.5}},
        trainer={"stepsPerBatch": 1, "maxTokensPerGpu": 64},
    )
    policy = MegatronPolicy(spec, model_dir=qwen3, timeout=timedelta(seconds=tiny.TIMEOUT))
    sequences, groups = estimate_steps.batch(0, ranks=1, steps=1, branches="bare")
    model, total, count = tiny.hf_model(qwen3), 0.0, 0
    for sample in (sample for group in groups for sample in group.samples):
        labels = np.full(len(sample.tokens), -100)
        labels[len(sample.tokens) - sample.response_length :] = np.where(
            sample.loss_mask == 1,
            sample.tokens[len(sample.tokens) - sample.response_length :],
            -100,
        )
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(sample.tokens.astype(np.int64))[None]).logits[
                0, :-1
            ]
        targets = torch.from_numpy(labels.astype(np.int64))[1:]
        total += torch.nn.functional.cross_entropy(
            logits, targets, reduction="sum", ignore_index=-100
        ).item()
        count += int((targets >= 0).sum())
    losses = []
    for _ in range(8):
        prepared = prepare(policy, sequences, groups)
        assert prepared.metrics == {}
        metrics = policy.train(prepared.shard, prepared.totals)
        losses.append(metrics["train/loss"])
        assert metrics["train/ppl"] == pytest.approx(math.exp(losses[-1]))
    assert losses[0] == pytest.approx(total / count, rel=1e-5)
    assert losses[-1] < losses[0] - 0.2
    rewarded = {
        "train/ppo_kl",
        "train/pg_loss",
        "train/train_rollout_logprob_abs_diff",
        "train/pg_clipfrac",
    }
    assert not rewarded & metrics.keys(), "there is no policy gradient"
