"""Train some steps and tell what came out; in this process, or as a child process on one rank of
several."""

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
    """The weights, to the bit."""
    state = hashlib.sha256()
    for name, tensor in tensors.items():
        state.update(name.encode() + tensor.float().numpy().tobytes())
    return state.hexdigest()


class Gpu:
    """A GPU of which steps take a hundredth, and after some of them all.

    It stands in for one in tests of what is done about it; what it tells is nowhere measured.
    """

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
    save_at: int = 0,
    share: int = 50,
    dump: str | None = None,
    beside: bool = False,
    first_tokens: int = 0,
    full_after: Sequence[int] = (),
) -> dict[str, Any]:
    """Train up to step `steps`, from the latest checkpoint if there is one.

    share: per cent of the sequences that data-parallel rank 0 trains; the others share the rest.
    dump: a file for rank 0's weights. beside: go on with training while the checkpoint is written;
    the memory of its copy is got before the first step, and `new_memory` counts what more it took.
    first_tokens: of a micro-batch where the job says nothing, for a trainer that takes this machine
    for one with GPUs; full_after: of each rank, measured steps after which its GPU has no more
    room.
    """
    if first_tokens:
        _on_gpus(first_tokens, full_after[int(os.environ.get("RANK", 0))])
    spec = tiny.spec(Path(model), algorithm=algorithm, trainer=trainer)
    timeout = timedelta(seconds=tiny.TIMEOUT)
    policy = backend_class(spec)(spec, model_dir=Path(model), timeout=timeout)
    resumed = policy.load_latest(Path(checkpoints)) if checkpoints else None
    history, new_memory = [], None
    if beside:
        policy.reserve_copies()
    while policy.step < steps:
        batch = tiny.batch(16, seed=policy.step)
        if spec.trainer.routing_replay == "rollout":
            batch = tiny.with_experts(batch, Path(model))
        parts = list(tiny.chunks(batch, spec.trainer.steps_per_batch))
        rank, size = policy.ranks.data_parallel_rank, policy.ranks.data_parallel_size
        cuts = [len(part) * share // 100 if size > 1 else len(part) for part in parts]
        shares = zip(parts, cuts, strict=True)
        mine = [
            part[:cut] if rank == 0 else part[cut:][rank - 1 :: size - 1] for part, cut in shares
        ]
        history.append(policy.train(mine, [tiny.totals(part) for part in parts]))
        if checkpoints and policy.step == save_at:
            staging.finish_reservations()
            with patch.object(staging, "host_memory", wraps=staging.host_memory) as got:
                policy.begin_save(Path(checkpoints), policy.step, background=beside)
            new_memory = got.call_count
    saved = policy.finish_save(Path(checkpoints), wait=True) if checkpoints else None
    tensors = dict(policy.hf_tensors())
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
    """Ranks that are to have all tensors get them, to the bit, whichever they are."""
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
