"""Estimate advantages of batches with rewards and train some steps, on one rank or several.

As a program it makes one run for each set of options in its argument.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from sluice.samples.sample import (
    BASELINE_REWARD,
    Prompt,
    Sample,
    SampleGroup,
    SampleStatus,
    TokenSequence,
)
from sluice.samples.turns import BRANCH_TURNS, TURNS
from sluice.wire.v1 import buffer_pb2 as pb
from sluice.wire.v1 import common_pb2 as common
from sluice_trainer.backend import BackendClass
from sluice_trainer.backend_registry import backend_class
from sluice_trainer.batch.preparation import prepare
from sluice_trainer.megatron import parallel
from tests.integration.trainer import tiny
from tests.integration.trainer.train_steps import digest

# Group and index of a sample that failed.
FAILED = (2, 1)
# (sample, seed) -> branches of the sample.
Grow = Callable[[Sample, int], list[TokenSequence]]


def bare(sample: Sample, seed: int) -> list[TokenSequence]:
    """Return no branches."""
    return []


def grown(sample: Sample, seed: int) -> list[TokenSequence]:
    """Return zero to two branches with other tokens."""
    return [
        TokenSequence(
            tokens=drawn.tokens,
            response_length=drawn.response_length,
            loss_mask=drawn.loss_mask,
            rollout_log_probs=drawn.rollout_log_probs,
        )
        for drawn in tiny.batch(seed % 3, 100 + seed)
    ]


def halved(sample: Sample, seed: int) -> list[TokenSequence]:
    """Return a branch that trains every second token of the sample, which trains the others."""
    odd = (np.arange(sample.response_length) % 2).astype(np.uint8)
    whole = sample.loss_mask
    sample.loss_mask = whole * odd
    return [
        TokenSequence(
            tokens=sample.tokens,
            response_length=sample.response_length,
            loss_mask=whole * (1 - odd),
            rollout_log_probs=sample.rollout_log_probs,
        )
    ]


def seated(sample: Sample, seed: int) -> list[TokenSequence]:
    """Give the sample to white, with two turns and one reward, and its branches to black."""
    branches = grown(sample, seed)
    n, number = sample.response_length, 2
    sample.seat, sample.seat_rewards = "white", {"white": float(seed % 3)}
    sample.metadata[TURNS] = [
        {"by": "model", "length": n // 2, "turn": 0, "reward": 0.5},
        {"by": "model", "length": n - n // 2, "turn": 1},
    ]
    sample.metadata[BRANCH_TURNS] = []
    for branch in branches:
        branch.seat, sample.seat_rewards["black"] = "black", -float(seed % 2)
        record = {"by": "model", "length": branch.response_length, "turn": number}
        sample.metadata[BRANCH_TURNS].append([record])
        number += 1
    return branches


GROW: dict[str, Grow] = {"bare": bare, "grown": grown, "halved": halved, "seated": seated}
SEATS = {"function": "play.py:play", "seats": [{"name": "white"}, {"name": "black"}]}


def batch(
    seed: int, *, ranks: int, steps: int, branches: str = "grown"
) -> tuple[list[pb.Sequence], list[SampleGroup]]:
    """Return five groups of four samples with rewards, split over ranks as by the buffer.

    The samples of a group are on several ranks. The first rank has the most, and of four ranks the
    last has none. `branches` is a name of GROW.
    """
    random = np.random.default_rng(seed)
    sequences, groups = [], []
    for place, drawn in enumerate(tiny.batch(20, seed)):
        group, index = divmod(place, 4)
        failed = (group, index) == FAILED
        sample = Sample(
            index,
            tokens=drawn.tokens,
            response_length=drawn.response_length,
            reward=0.0 if failed else float(random.integers(0, 3)),
            loss_mask=drawn.loss_mask * (not failed),
            rollout_log_probs=drawn.rollout_log_probs,
            status=SampleStatus.FAILED if failed else SampleStatus.COMPLETED,
            reward_parts={"right": float(place % 2), "format": float(place % 3)},
            metadata={BASELINE_REWARD: float(group % 2)},
        )
        sample.branches = [] if failed else GROW[branches](sample, 20 * seed + place)
        if index == 0:
            groups.append(SampleGroup(Prompt(group, "p")))
        groups[-1].samples.append(sample)
        sequences.append(
            pb.Sequence(
                group_id=group,
                index=index,
                length=sum(len(s.tokens) for s in sample.sequences),
                response_length=drawn.response_length,
                trainable_tokens=sample.trainable_tokens,
                reward=sample.reward,
                status=common.SAMPLE_STATUS_FAILED if failed else common.SAMPLE_STATUS_COMPLETED,
                rank=place % 7 % max(ranks - (ranks > 2), 1),
                optimizer_step=place * steps // 20,
            )
        )
    return sequences, groups


def share(sequences: list[pb.Sequence], groups: list[SampleGroup], rank: int) -> list[SampleGroup]:
    """Return the groups of one data-parallel rank, with only its samples."""
    mine = {(s.group_id, s.index) for s in sequences if s.rank == rank}
    parts = [
        SampleGroup(g.prompt, [s for s in g.samples if (g.group_id, s.index) in mine])
        for g in groups
    ]
    return [group for group in parts if group.samples]


def train(
    model: str,
    *,
    algorithm: dict[str, Any],
    steps: int = 2,
    trainer: dict[str, Any] | None = None,
    checkpoints: str | None = None,
    save_at: int = 0,
    init: str = "pretrained",
    dump: str | None = None,
    backend: BackendClass | None = None,
    branches: str = "grown",
) -> dict[str, Any]:
    """Train and return the results.

    `dump` is a file for rank 0's weights; `backend` is by default the one that `trainer` names.
    """
    spec = tiny.spec(
        Path(model),
        model={"path": model, "init": init},
        algorithm=algorithm,
        trainer=trainer or {},
        rollout={
            "sampling": {"temperature": 0.9, "maxResponseTokens": 40},
            **(SEATS if branches == "seated" else {}),
        },
    )
    make, timeout = backend or backend_class(spec), timedelta(seconds=tiny.TIMEOUT)
    policy = make(spec, model_dir=Path(model), timeout=timeout)
    resumed = policy.load_latest(Path(checkpoints)) if checkpoints else None
    rank, size = policy.ranks.data_parallel_rank, policy.ranks.data_parallel_size
    history, advantages = [], []
    while policy.step < steps:
        sequences, groups = batch(
            policy.step, ranks=size, steps=spec.trainer.steps_per_batch, branches=branches
        )
        prepared = prepare(policy, sequences, share(sequences, groups, rank))
        own = {
            f"{s.group_id}/{s.index}/{s.branch}": np.asarray(s.advantage).tolist()
            for part in prepared.shard
            for s in part
        }
        advantages.append(
            {key: value for part in policy.ranks.gather(own) for key, value in part.items()}
        )
        history.append(prepared.metrics | policy.train(prepared.shard, prepared.totals))
        if checkpoints and policy.step == save_at:
            tiny.save(policy, Path(checkpoints), policy.step)
    tensors = dict(policy.engine_tensors())
    if dump and policy.ranks.rank == 0:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, dump)
    return {
        "history": history,
        "advantages": advantages,
        "weights": digest(tensors),
        "resumed": resumed,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps([train(**options) for options in json.loads(sys.argv[1])]))
    parallel.shutdown()
