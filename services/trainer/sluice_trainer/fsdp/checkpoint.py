"""A learner's part of a checkpoint, in torch's distributed format.

Any number of ranks can load it. All ranks plan together, but each rank writes alone, so writing can
continue in a thread. Tensors have transformers' names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Hashable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load as read
from torch.distributed.checkpoint.storage import WriteResult

from sluice_trainer.checkpoint.checkpoint_reader import CheckpointPlanner, CheckpointReader, reason
from sluice_trainer.checkpoint.checkpoint_store import ShardUpload, retried
from sluice_trainer.checkpoint.checkpoint_writer import CheckpointError
from sluice_trainer.distributed.device import DEVICE
from sluice_trainer.distributed.ranks import Ranks
from sluice_trainer.fsdp.learner import ShardedLearner
from sluice_trainer.fsdp.lora import initial_parameters, trained_parameters
from sluice_trainer.fsdp.sharding import gathered, named_tensors, set_share
from sluice_trainer.lora.checkpoint import AdapterState
from sluice_trainer.memory.staging import Staging, finish_copies
from sluice_trainer.step.rates import set_learning_rate

_MOMENTS = ("exp_avg", "exp_avg_sq")


class ShardedPart:
    """A part of a checkpoint on this rank: what it writes, and how all ranks complete it."""

    def __init__(
        self, state: dict[str, Any], directory: Path, ranks: Ranks, staging: Staging
    ) -> None:
        """Plan the part. Collective.

        Parameters
        ----------
        state
            State of the learner.
        directory
            Existing directory to write to.
        ranks
            All ranks of the trainer.
        staging
            Host memory for copies.

        """
        self._ranks, self._directory, self._staging = ranks, directory, staging
        first = ranks.rank == 0
        planner = _Planner()
        planner.set_up_planner(state, is_coordinator=first)
        self._writer = FileSystemWriter(directory, sync_files=True)
        self._writer.set_up_storage_writer(first)
        local = self._writer.prepare_local_plan(planner.create_local_plan())
        # Every rank derives the same global plan from all local plans in their order.
        plans, self._metadata = planner.create_global_plan(ranks.gather(local))
        plans = self._writer.prepare_global_plan(plans)
        self._plan: SavePlan = planner.finish_plan(plans[ranks.rank])
        self._planner = planner
        self._outcome: list[WriteResult] | str = "its files were not written"
        self._device = torch.cuda.current_device() if DEVICE.type == "cuda" else None

    def reserve(self) -> None:
        self._staging.reserve(self._planner.tensors(self._plan))

    def copy(self) -> None:
        self._planner.copy(self._plan, self._staging)

    def write(self, upload: ShardUpload | None = None) -> None:
        if self._device is not None:
            torch.cuda.set_device(self._device)  # a new thread starts on the first GPU
        if upload is not None:
            self._outcome = retried(partial(self._sent, upload))
            return
        try:
            self._outcome = self._writer.write_data(self._plan, self._planner).wait()
        except (Exception, CheckpointException) as error:  # raised by `complete` on all ranks
            self._outcome = repr(error)

    def _sent(self, upload: ShardUpload) -> list[WriteResult]:
        """Send this rank's file to a store."""
        writer = FileSystemWriter(self._directory, sync_files=False)
        writer.fs = _Uploads(upload)
        return writer.write_data(self._plan, self._planner).wait()

    def files(self) -> list[Path]:
        prefix = self._plan.storage_data.prefix
        return sorted(self._directory.glob(f"{prefix}*"))

    def complete(self) -> None:
        outcomes = self._ranks.gather(self._outcome)
        problem = next((outcome for outcome in outcomes if isinstance(outcome, str)), "")
        if problem:
            raise CheckpointError(problem)
        results = [outcome for outcome in outcomes if not isinstance(outcome, str)]
        if self._ranks.rank == 0:
            try:
                self._writer.finish(self._metadata, results)
            except OSError as error:
                problem = repr(error)
        if problem := self._ranks.broadcast(problem):
            raise CheckpointError(problem)


class _Uploads(FileSystem):
    """torch's file system, whose files are sent to a store."""

    def __init__(self, upload: ShardUpload) -> None:
        self._upload = upload

    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Any:
        return self._upload.writing(Path(path))


class _Planner(DefaultSavePlanner):
    """torch's planner, with the option to copy what this rank writes."""

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[Any, Any] = {}

    def tensors(self, plan: SavePlan) -> dict[Hashable, Tensor]:
        """Return the tensors that this rank writes, by their index in the plan."""
        contents = ((item.index, self.resolve_data(item)) for item in plan.items)
        return {index: data for index, data in contents if isinstance(data, Tensor)}

    def copy(self, plan: SavePlan, staging: Staging) -> None:
        for item in plan.items:
            data = self.resolve_data(item)
            is_tensor = isinstance(data, Tensor)
            self._copies[item.index] = staging.copy(item.index, data) if is_tensor else data
        finish_copies()
        self.state_dict = {}

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.index in self._copies:
            return self._copies[write_item.index]
        return super().resolve_data(write_item)


def state_of(learner: ShardedLearner, user_state: dict[str, Any]) -> dict[str, Any]:
    """Return weights, moments and Adam's step; before the first step the moments are created."""
    _allocate(learner)
    states = {
        name: learner.optimizer.state[parameter]
        for name, parameter in learner.net.model.named_parameters()
        if parameter.requires_grad
    }
    steps = {int(state["step"]) for state in states.values()}
    return {
        "model": named_tensors(learner.net.model),
        "optimizer": {n: {m: state[m] for m in _MOMENTS} for n, state in states.items()},
        "adam_step": max(steps, default=0),
        "user": json.dumps(user_state),  # torch would flatten a dictionary
    }


def load(directory: Path, learner: ShardedLearner) -> dict[str, Any]:
    """Restore one part into a learner and return the user state. Collective.

    Raises
    ------
    CheckpointError
        If it cannot be read or was written by another backend.

    """
    state = state_of(learner, {})
    reader, failed = CheckpointReader(directory), f"checkpoint {directory} could not be read: "
    try:
        names = reader.read_metadata().state_dict_metadata
        by_fsdp = any(name.startswith("model.") for name in names)
        if by_fsdp:
            read(state, storage_reader=reader, planner=CheckpointPlanner())
    except (Exception, CheckpointException) as error:
        raise CheckpointError(failed + reason(error)) from error
    if not by_fsdp:
        raise CheckpointError(failed + "it was not written with trainer.backend: fsdp")
    for moments in learner.optimizer.state.values():
        moments["step"].fill_(state["adam_step"])
    user_state: dict[str, Any] = json.loads(state["user"])
    return user_state


def adapter_state(learner: ShardedLearner) -> AdapterState:
    """Gather what is trained, and Adam's moments of it. Collective."""
    _allocate(learner)
    parameters = trained_parameters(learner.net.model)
    states = {name: learner.optimizer.state[p] for name, p in parameters.items()}
    return AdapterState(
        {name: gathered(parameter) for name, parameter in parameters.items()},
        {m: {name: gathered(state[m]) for name, state in states.items()} for m in _MOMENTS},
        max((int(state["step"]) for state in states.values()), default=0),
        {n: gathered(parameter) for n, parameter in initial_parameters(learner.net.model).items()},
    )


@torch.no_grad()
def set_adapter_state(learner: ShardedLearner, state: AdapterState) -> None:
    """Restore what is trained, and Adam's moments of it, each rank its share."""
    _allocate(learner)
    for name, parameter in trained_parameters(learner.net.model).items():
        moments = learner.optimizer.state[parameter]
        set_share(parameter, state.tensors[name])
        for key in _MOMENTS:
            set_share(moments[key], state.moments[key][name])
        moments["step"].fill_(state.adam_step)
    for name, parameter in initial_parameters(learner.net.model).items():
        set_share(parameter, state.initial[name])


def _allocate(learner: ShardedLearner) -> None:
    """Create the state of an Adam that has taken no step: zero moments, as its first step would."""
    optimizer = learner.optimizer
    if optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in learner.net.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    set_learning_rate(optimizer, 0.0)  # then weight decay changes no weights either
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for state in optimizer.state.values():
        state["step"].zero_()
