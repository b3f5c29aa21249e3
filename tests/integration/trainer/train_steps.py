"""Training of some steps, in this process or as a child process on one of several ranks."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file

import sluice.api.groups.trainer
from sluice_trainer.backend_registry import backend_class
from sluice_trainer.megatron import parallel
from sluice_trainer.memory import headroom, staging
from sluice_trainer.memory.headroom import StepMemory
from tests.integration.trainer import tiny


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """Return a digest of the weights' bits."""
    state = hashlib.sha256()
    for name, tensor in tensors.items():
        state.update(name.encode() + tensor.float().numpy().tobytes())
    return state.hexdigest()


class Gpu:
    """A fake GPU of which each step takes a hundredth, until some step takes all of it."""

    def __init__(self, full_after: int) -> None:
        self._left = full_after

    def begin(self) -> None: ...

    def end(self) -> StepMemory:
        self._left -= 1
        return StepMemory(static=0, peak=1, usable=1 if self._left < 0 else 100)

    def release(self) -> None: ...


def _on_gpus(first_tokens: int, full_after: int) -> None:
    headroom.PROBE = Gpu(full_after)
    sluice.api.groups.trainer.FIRST_TOKENS = first_tokens


def train(
    model: str,
    *,
    steps: int,
    algorithm: dict[str, Any],
    trainer: dict[str, Any],
    checkpoints: str | None = None,
    checkpoint: dict[str, Any] | None = None,
    save_at: int = 0,
    share: int = 50,
    dump: str | None = None,
    in_background: bool = False,
    first_tokens: int = 0,
    full_after: Sequence[int] = (),
) -> dict[str, Any]:
    """Train up to step `steps`, from the latest checkpoint if there is one, and return the results.

    Parameters
    ----------
    model
        Directory of the model.
    steps
        Last step.
    algorithm, trainer, checkpoint
        Groups of the spec.
    checkpoints
        Directory of checkpoints.
    save_at
        Step at which a checkpoint is saved.
    share
        Percentage of the sequences that data-parallel rank 0 trains; the others share the rest.
    dump
        File for rank 0's weights.
    in_background
        Continue training while the checkpoint is written. The memory of its copy is allocated
        before the first step; `new_memory` counts later allocations.
    first_tokens
        Default size of a micro-batch, for a trainer that takes this machine for one with GPUs.
    full_after
        For each rank, the number of measured steps after which its GPU is full.

    """
    if first_tokens:
        _on_gpus(first_tokens, full_after[int(os.environ.get("RANK", 0))])
    spec = tiny.spec(Path(model), algorithm=algorithm, trainer=trainer, checkpoint=checkpoint or {})
    timeout = timedelta(seconds=tiny.TIMEOUT)
    policy = backend_class(spec)(spec, model_dir=Path(model), timeout=timeout)
    resumed = policy.load_latest(Path(checkpoints)) if checkpoints else None
    history, new_memory = [], None
    if in_background:
        policy.reserve_copies()
    while policy.step < steps:
        batch = tiny.batch(16, seed=policy.step)
        if spec.trainer.routing_replay == "rollout":
            batch = tiny.with_experts(batch, Path(model))
        parts = list(tiny.chunks(batch, spec.trainer.steps_per_batch))
        rank, size = policy.ranks.data_parallel_rank, policy.ranks.data_parallel_size
        cuts = [len(part) * share // 100 if size > 1 else len(part) for part in parts]
        shares = zip(parts, cuts, strict=True)
        own_share = [
            part[:cut] if rank == 0 else part[cut:][rank - 1 :: size - 1] for part, cut in shares
        ]
        history.append(policy.train(own_share, [tiny.totals(part) for part in parts]))
        if checkpoints and policy.step == save_at:
            staging.finish_reservations()
            with patch.object(staging, "host_memory", wraps=staging.host_memory) as allocate:
                policy.begin_save(Path(checkpoints), policy.step, background=in_background)
            new_memory = allocate.call_count
    saved = policy.finish_save(Path(checkpoints), wait=True) if checkpoints else None
    tensors = dict(policy.engine_tensors())
    check_receivers(policy, tensors)
    if dump and policy.ranks.rank == 0:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, dump)
    return {
        "history": history,
        "resumed": resumed,
        "saved": saved,
        "new_memory": new_memory,
        "weights": digest(tensors),
        "rng": torch.rand(1).item(),
    }


def check_receivers(policy: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Check that the ranks that need all tensors get them exactly, whichever ranks these are."""
    last = policy.ranks.world_size - 1
    for receivers in ({0}, {last}, {last}, {0, last}):
        gathered = dict(policy.hf_tensors(receivers=frozenset(receivers)))
        if policy.ranks.rank in receivers:
            assert list(gathered) == list(tensors)
            assert all(torch.equal(gathered[name], tensor) for name, tensor in tensors.items())


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(train(**json.loads(sys.argv[1]))))
    parallel.shutdown()
