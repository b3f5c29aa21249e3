"""Checkpoints that survive a kill at any moment.

The promise: `latest` names a complete checkpoint or none; once `save` has returned, that checkpoint outlives the
machine's processes and (as far as the file system keeps its word on fsync) its power. A checkpoint is written into
`.iter_0000020.tmp`, synced, renamed to `iter_0000020`, and only then `latest_checkpointed_iteration.txt` (Megatron's
name) is replaced. Whatever a crash leaves under a temporary name is ignored, and removed by the next `save`.

The format is Megatron's torch_dist with fully reshardable optimizer state: it loads under any parallel layout.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException: `except Exception` misses it

from sluice_trainer.megatron.adaptations import DEVICE, checkpoint_writer_in_process, megatron_device

TRACKER = "latest_checkpointed_iteration.txt"
_NAME = re.compile(r"iter_(\d{7,})")
_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read. The message is for people."""


def path_of(directory: Path, step: int) -> Path:
    return directory / f"iter_{step:07d}"


def steps(directory: Path) -> list[int]:
    """Complete checkpoints, oldest first."""
    if not directory.is_dir():
        return []
    return sorted(int(match[1]) for entry in directory.iterdir() if (match := _NAME.fullmatch(entry.name)))


def latest(directory: Path) -> int | None:
    """Step of the newest complete checkpoint; None: there is none.

    A crash between the rename and the tracker leaves the tracker one behind: the newest directory counts, because a
    directory has its final name only when it is complete. The tracker is for Megatron's own tools, and people.
    """
    return max(steps(directory), default=None)


@megatron_device()
def save(directory: Path, step: int, model: Any, optimizer: Any, user_state: dict[str, Any]) -> None:
    """Write checkpoint `step`: weights, optimizer state, RNG states, `user_state` (picklable, equal on all ranks).

    Collective over all ranks; `directory` must be shared by all nodes. A step that is saved already is left as it is:
    version n is version n. Raises CheckpointError where it could not be written, for instance because the disk is full;
    older checkpoints stay intact.
    """
    final = path_of(directory, step)
    temporary = directory / f".{final.name}.tmp"
    if agreed(final.exists()):
        return
    with checkpoint_writer_in_process() as messages:
        try:
            if dist.get_rank() == 0:
                directory.mkdir(parents=True, exist_ok=True)
                _clean(directory)
                temporary.mkdir()
            dist.barrier()
            dist_checkpointing.save(_state(model, optimizer, user_state), temporary, content_metadata=dict(_METADATA))
            if dist.get_rank() == 0:
                _commit(temporary, final)
            dist.barrier()
        except (Exception, CheckpointException) as error:
            if dist.get_rank() == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            reason = _reason([repr(error), *messages], directory)
            raise CheckpointError(f"checkpoint {final} could not be written: {reason}") from error


def agreed(value: Any) -> Any:
    """Rank 0's value on every rank: file systems may show other ranks a directory as it was a moment ago."""
    box = [value]
    dist.broadcast_object_list(box, src=0, device=DEVICE)
    return box[0]


def _commit(temporary: Path, final: Path) -> None:
    """Make the checkpoint durable, then visible, then the latest."""
    for file in temporary.iterdir():
        _sync(file)
    _sync(temporary)
    temporary.rename(final)
    _sync(final.parent)
    tracker = final.parent / f".{TRACKER}.tmp"
    tracker.write_text(str(int(final.name.removeprefix("iter_"))))
    _sync(tracker)
    tracker.replace(final.parent / TRACKER)
    _sync(final.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _clean(directory: Path) -> None:
    """Remove what crashes have left under temporary names."""
    for entry in directory.glob(".*.tmp"):
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _reason(messages: list[str], directory: Path) -> str:
    """What to tell a person about an error that has passed through several layers."""
    free = shutil.disk_usage(directory).free / 2**20 if directory.is_dir() else 0
    if any("No space left on device" in message or "Errno 28" in message for message in messages):
        return f"no space left on the disk of {directory} ({free:.0f} MiB free)"
    return f"{messages[-1]} ({free:.0f} MiB free)"


def prune(directory: Path, keep: int) -> list[int]:
    """Delete all but the newest `keep` checkpoints; returns the deleted steps. Call it on one rank.

    A checkpoint first loses its name, so that a kill in the middle leaves none that is half deleted.
    """
    doomed = steps(directory)[:-keep] if keep > 0 else []
    for step in doomed:
        final = path_of(directory, step)
        leaving = final.with_name(f".{final.name}.pruned.tmp")
        final.rename(leaving)
        shutil.rmtree(leaving)
    return doomed


@megatron_device()
def load(directory: Path, step: int, model: Any, optimizer: Any) -> dict[str, Any]:
    """Restore checkpoint `step` into model and optimizer, and the RNG states; returns the user state. Collective."""
    final = path_of(directory, step)
    if not final.is_dir():
        raise CheckpointError(f"there is no checkpoint {final}")
    _allocate_optimizer_state(optimizer)
    wanted = _state(model, optimizer, {}, loading=True)
    try:
        state = dist_checkpointing.load(wanted, str(final))
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"checkpoint {final} could not be read: {error}") from error
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    _separate_steps(optimizer)
    _restore_rng(state["rng"])
    user_state: dict[str, Any] = state["user"]
    return user_state


def _state(model: Any, optimizer: Any, user_state: dict[str, Any], *, loading: bool = False) -> dict[str, Any]:
    metadata = ensure_metadata_has_dp_cp_group(dict(_METADATA))
    weights = model.module.sharded_state_dict(metadata=metadata)
    return {
        "model": weights,
        "optimizer": optimizer.sharded_state_dict(weights, is_loading=loading, metadata=metadata),
        "rng": _rng(),
        "user": user_state,
    }


def _rng() -> ShardedObject:
    """Generator states of this rank's position in the model; data-parallel ranks share one, for nothing is drawn there.

    A resume under another parallel layout starts from freshly seeded generators of the new layout where ranks are new.
    """
    position = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    size = (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    states = {"cpu": torch.get_rng_state()}
    if DEVICE.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state()
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return ShardedObject("rng", states, size, position, replica_id=replica)


def _restore_rng(states: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and DEVICE.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"])


def _parts(optimizer: Any) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _allocate_optimizer_state(optimizer: Any) -> None:
    """Give a fresh Adam its state tensors: Megatron's loader asserts that they are there, and overwrites them."""
    for part in _parts(optimizer):
        if not part.optimizer.state:
            part._init_optimizer_states_with_dummy_values()


def _separate_steps(optimizer: Any) -> None:
    """Megatron's loader gives all parameters one step tensor, which torch's Adam would then count up once for each."""
    for part in _parts(optimizer):
        for state in part.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()
