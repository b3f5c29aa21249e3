"""Megatron's part of a checkpoint: torch_dist with fully reshardable optimizer state.

It can be loaded in any parallel layout.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.storage import WriteResult

from sluice_trainer.checkpoint.checkpoint_reader import CheckpointReader, reason
from sluice_trainer.checkpoint.checkpoint_store import ShardUpload, retried
from sluice_trainer.checkpoint.checkpoint_writer import CheckpointError, CollectPart, verified
from sluice_trainer.distributed.device import DEVICE
from sluice_trainer.distributed.ranks import Ranks
from sluice_trainer.megatron.adaptations import megatron_device
from sluice_trainer.megatron.checkpoints.optimizer_state import (
    state_to_load,
    state_to_write,
    take_state,
)
from sluice_trainer.megatron.step.optimizer import parts as optimizers
from sluice_trainer.memory.staging import Staging, finish_copies
from sluice_trainer.step.rates import set_learning_rate

# Directory in the checkpoint -> (chunks of the model, optimizer). `.` is the checkpoint itself, and
# comes first.
Parts = Mapping[str, tuple[list[Any], Any]]
METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


class MegatronPart:
    """A part of a checkpoint on this rank: Megatron's request to write."""

    def __init__(self, request: Any, staging: Staging) -> None:
        self._request, self._staging = request, staging
        self._copied: list[Any] | None = None

    def reserve(self) -> None:
        self._staging.reserve(
            {item.index: tensor for _, _, (_, items) in self._buckets for item, tensor in items}
        )

    def copy(self) -> None:
        self._copied = self._staged(self._staging.copy)

    def write(self, upload: ShardUpload | None = None) -> None:
        files = self._staged(self._on_host) if self._copied is None else self._copied
        if self._request.async_fn is None:
            return
        rank, _, results = self._request.async_fn_args
        if upload is None:
            self._request.async_fn(rank, files, results)
        else:
            results.put(self._sent(files, upload))

    def files(self) -> list[Path]:
        return [Path(path) for path, _, _ in self._buckets]

    @megatron_device()
    def complete(self) -> None:
        for completion in self._request.finalize_fns:
            completion()

    @property
    def _buckets(self) -> Sequence[Any]:
        """(path, key, (objects, tensors)) of each file; empty if this rank writes no files."""
        return self._request.async_fn_args[1] if self._request.async_fn else ()

    def _staged(self, staged: Callable[[Hashable, Tensor], Tensor]) -> list[Any]:
        """Return the content of this rank's files, with tensors passed through `staged`."""
        files = [
            (path, key, (objects, [(item, staged(item.index, tensor)) for item, tensor in items]))
            for path, key, (objects, items) in self._buckets
        ]
        finish_copies()
        return files

    def _sent(self, files: list[Any], upload: ShardUpload) -> dict[int, list[WriteResult]]:
        """Send this rank's files to a store, as Megatron's writer writes them to a disk."""
        (transforms, *_) = self._request.async_fn.args

        def send(file: Any) -> list[WriteResult]:
            path, key, (objects, items) = file
            with upload.writing(Path(path)) as stream:
                return [
                    filesystem_async._write_item(
                        *transforms, stream, data, item, key, SerializationFormat.TORCH_SAVE
                    )
                    for item, data in [*objects, *items]
                ]

        with ThreadPoolExecutor(max(len(files), 1)) as pool:
            return dict(enumerate(pool.map(lambda file: retried(partial(send, file)), files)))

    def _on_host(self, key: Hashable, tensor: Tensor) -> Tensor:
        return tensor.detach() if tensor.device.type == "cpu" else self._staging.copy(key, tensor)


def collectors(
    parts: Parts, user_state: dict[str, Any], staging: Mapping[str, Staging]
) -> dict[str, CollectPart]:
    """Return the collectors of weights, optimizer state, RNG states and `user_state`.

    Parameters
    ----------
    parts
        Models and optimizers.
    user_state
        Picklable state, equal on all ranks.
    staging
        Host memory for copies, by part.

    """

    @megatron_device()
    def collect(name: str, directory: Path) -> MegatronPart:
        request = dist_checkpointing.save(
            _state(*parts[name], user_state),
            directory,
            content_metadata=dict(METADATA),
            async_sharded_save=True,
            async_strategy="mcore",
        )
        return MegatronPart(request, staging[name])

    return {name: partial(collect, name) for name in parts}


@megatron_device()
def load(directory: Path, step: int, parts: Parts, ranks: Ranks) -> dict[str, Any]:
    """Restore checkpoint `step` into models, optimizers and random generators. Collective.

    Returns
    -------
    The user state.

    Raises
    ------
    CheckpointError
        On all ranks, if a file is missing or differs from what was written.

    """
    final = verified(directory, step, parts, ranks)
    states = [_load(final / name, *part) for name, part in parts.items()]
    if "rng" in states[0]:
        _restore_rng(states[0]["rng"])
    user_state: dict[str, Any] = states[0]["user"]
    return user_state


def _load(final: Path, chunks: list[Any], optimizer: Any) -> dict[str, Any]:
    if not (final / "metadata.json").is_file():
        raise CheckpointError(
            f"checkpoint {final} could not be read: it was not written with trainer.backend: "
            "megatron"
        )
    try:
        stored = CheckpointReader(final).read_metadata().state_dict_metadata
        template = _state(chunks, optimizer, {}, stored=stored)
        if template["rng"].unique_key not in stored:
            del template["rng"]  # saved in another parallel layout
        state: dict[str, Any] = dist_checkpointing.load(template, str(final))
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"checkpoint {final} could not be read: {reason(error)}") from error
    for number, chunk in enumerate(chunks):
        chunk.module.load_state_dict(state[f"model{number}"])
    _restore_optimizer(optimizer, state.get("optimizer", {}), state["adam_step"])
    return state


def weights_state(chunks: list[Any]) -> dict[str, Any]:
    """Return the `sharded_state_dict` of each chunk."""
    metadata = ensure_metadata_has_dp_cp_group(dict(METADATA))
    return {
        f"model{n}": chunk.sharded_state_dict(metadata=metadata) for n, chunk in enumerate(chunks)
    }


def _state(
    chunks: list[Any],
    optimizer: Any,
    user_state: dict[str, Any],
    *,
    stored: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the sharded state to write, or to load if `stored`, a table of contents, is given."""
    allocate_optimizer_state(optimizer)
    weights = weights_state([chunk.module for chunk in chunks])
    part_state = state_to_write if stored is None else partial(state_to_load, stored=stored)
    return {
        **weights,
        "optimizer": {
            f"part{number}": part_state(part, weights)
            for number, part in enumerate(optimizers_with_state(optimizer))
        },
        "adam_step": adam_step(optimizer),
        "rng": _rng(),
        "user": user_state,
    }


def _rng() -> ShardedObject:
    """Return the generator states of this rank's position in the model.

    Data-parallel ranks share them, because no random numbers are drawn over data. A resume in
    another tensor- or pipeline-parallel layout finds no states for its position and keeps its own.
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


# --- The optimizer: its tensors, and Adam's step. The manifest determines everything else, and the
# grouping of parameters depends on the layout: Megatron's own state of those groups does not load
# in another layout.


def optimizers_with_state(optimizer: Any) -> list[Any]:
    """Return Megatron's optimizers that have a state, which one without parameters has not.

    A pipeline stage without experts has such an optimizer for them.
    """
    return [part for part in optimizers(optimizer) if part.buffers]


def adam_step(optimizer: Any) -> int:
    """Return the steps that Adam has taken."""
    states = [
        state
        for part in optimizers_with_state(optimizer)
        for state in part.optimizer.state.values()
    ]
    steps = {int(state["step"]) for state in states}
    assert len(steps) <= 1, steps
    return max(steps, default=0)


def _restore_optimizer(optimizer: Any, tensors: dict[str, Any], step: int) -> None:
    for number, part in enumerate(optimizers_with_state(optimizer)):
        take_state(part, tensors.get(f"part{number}", {}))  # a rank may hold no share of it
    set_adam_step(optimizer, step)


def set_adam_step(optimizer: Any, step: int) -> None:
    """Set the steps that Adam has taken."""
    for part in optimizers_with_state(optimizer):
        for state in part.optimizer.state.values():
            state["step"].fill_(step)


def allocate_optimizer_state(optimizer: Any) -> None:
    """Create the state of an Adam that has taken no step: zero moments, weights as they are.

    Megatron asserts that it exists. A load overwrites it, and a policy is saved so during its
    critic's warm-up.
    """
    for part in optimizers_with_state(optimizer):
        if part.optimizer.state:
            continue
        # Otherwise weight decay would change the weights. Each step sets its rate.
        set_learning_rate(part.optimizer, 0.0)
        part._init_optimizer_states_with_dummy_values()
        for state in part.optimizer.state.values():
            state["step"] = torch.zeros_like(state["step"])
