"""An adapter's part of a checkpoint, which every backend writes and reads in any layout.

It is a PEFT adapter, the moments of Adam, and a state. All tensors are whole: an adapter has
megabytes, and rank 0 writes it alone.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from sluice_trainer.checkpoint.checkpoint_store import ShardUpload
from sluice_trainer.checkpoint.checkpoint_writer import CheckpointError
from sluice_trainer.distributed.ranks import Ranks
from sluice_trainer.lora.files import (
    CONFIG,
    AdapterError,
    Shapes,
    check_config,
    check_tensors,
    read_adapter,
    write_adapter,
)
from sluice_trainer.lora.pissa import joined, joined_shapes, separated
from sluice_trainer.model import safetensors_file

if TYPE_CHECKING:
    from peft import LoraConfig

OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class AdapterState:
    """The trained tensors of a model, whole and in float32.

    tensors: by name in the transformers model; moments: the same names for each of MOMENTS.
    adam_step: optimizer steps that Adam has taken. initial: with `initialise: pissa` the frozen
    tensors that take the first weights off the base, by the same names.
    """

    tensors: Mapping[str, Tensor]
    moments: Mapping[str, Mapping[str, Tensor]]
    adam_step: int
    initial: Mapping[str, Tensor]

    def copied(self) -> AdapterState:
        """Return a copy on the CPU that training does not change."""
        moments = {key: _copied(tensors) for key, tensors in self.moments.items()}
        return AdapterState(_copied(self.tensors), moments, self.adam_step, _copied(self.initial))


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.detach().to("cpu", torch.float32, copy=True) for name, t in tensors.items()}


class AdapterPart:
    """A `CheckpointPart`. `state` is needed on rank 0 only."""

    def __init__(
        self,
        state: AdapterState | None,
        config: LoraConfig,
        user_state: Mapping[str, Any],
        directory: Path,
        ranks: Ranks,
    ) -> None:
        self._state = state.copied() if state and ranks.rank == 0 else None
        self._config, self._user_state = config, user_state
        self._directory, self._ranks = directory, ranks
        self._problem = ""

    def reserve(self) -> None:
        """Do nothing: the copy is made when the part is collected."""

    def copy(self) -> None:
        """Do nothing: the copy is made when the part is collected."""

    def write(self, upload: ShardUpload | None = None) -> None:
        if self._state is None:
            return
        try:
            tensors = joined(self._state.tensors, self._state.initial)
            write_adapter(tensors, self._directory, self._config)
            moments = {
                f"{key}.{name}": tensor.contiguous()
                for key, tensors in self._state.moments.items()
                for name, tensor in tensors.items()
            }
            safetensors_file.save(moments, self._directory / OPTIMIZER)
            content = {"adam_step": self._state.adam_step, "user": dict(self._user_state)}
            (self._directory / STATE).write_text(json.dumps(content))
        except (OSError, SafetensorError) as error:  # `complete` raises it on all ranks
            self._problem = repr(error)

    def files(self) -> list[Path]:
        return sorted(self._directory.glob("*.*")) if self._state else []

    def complete(self) -> None:
        if problem := self._ranks.broadcast(self._problem):
            raise CheckpointError(problem)


def is_adapter(directory: Path) -> bool:
    """Return whether a part of a checkpoint holds an adapter."""
    return (directory / CONFIG).is_file()


def kind_problem(directory: Path, *, adapter: bool) -> str:
    """Say what is wrong if a checkpoint holds an adapter and the job trains none, or vice versa.

    adapter: the job trains an adapter. Empty if checkpoint and job agree.
    """
    failed = f"checkpoint {directory} could not be read: "
    if is_adapter(directory) == adapter:
        return ""
    if adapter:
        return (
            f"{failed}it holds all weights of a model, and trainer.lora trains an adapter; "
            "choose another checkpoint.path, or leave trainer.lora out"
        )
    return f"{failed}it holds an adapter; set trainer.lora, or choose another checkpoint.path"


def read_part(
    directory: Path, config: LoraConfig, trained: Shapes, initial: Collection[str]
) -> tuple[AdapterState, dict[str, Any]]:
    """Read a part: the trained tensors, and the state that is equal on all ranks.

    trained: names and shapes of the job's trained parameters, which the part must have. initial:
    names of those that the part has twice, with `initialise: pissa`.

    Raises
    ------
    CheckpointError
        The part holds an adapter of another shape, or cannot be read.

    """
    failed = f"checkpoint {directory} could not be read: "
    try:
        check_config(directory, config, "checkpoint.path")
        tensors = read_adapter(directory)
        stored = load_file(directory / OPTIMIZER)
        content = json.loads((directory / STATE).read_text())
        check_tensors(directory, tensors, joined_shapes(trained, initial))
        moments = {key: {name: stored[f"{key}.{name}"] for name in tensors} for key in MOMENTS}
    except (AdapterError, OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(failed + str(error)) from error
    tensors, frozen = separated(tensors, initial)
    return AdapterState(tensors, moments, content["adam_step"], frozen), content["user"]
