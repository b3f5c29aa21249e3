"""Reading a checkpoint from elsewhere never runs code from it."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from sluice_trainer.checkpoint.checkpoint_reader import (
    CheckpointPlanner,
    CheckpointReader,
    UnsafeCheckpointError,
)


class Call:
    """An object whose unpickling calls a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


STATE: dict[str, Any] = {
    "weights": torch.arange(6.0).view(2, 3),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "lists": {"steps": 7, "names": ["a", "b"], "rate": 0.5},
    "text": "user",
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save(STATE, storage_writer=FileSystemWriter(tmp_path / "own"), no_dist=True)
    return tmp_path / "own"


def loaded(checkpoint: Path) -> dict[str, Any]:
    state: dict[str, Any] = {
        "weights": torch.zeros(2, 3),
        "half": torch.zeros(3, dtype=torch.bfloat16),
        "lists": {"steps": 0, "names": ["", ""], "rate": 0.0},
        "text": "",
    }
    reader = CheckpointReader(checkpoint)
    load(state, storage_reader=reader, planner=CheckpointPlanner(), no_dist=True)
    return state


def test_a_checkpoint_of_tensors_numbers_and_texts_is_read(checkpoint: Path) -> None:
    state = loaded(checkpoint)
    assert torch.equal(state["weights"], STATE["weights"])
    assert torch.equal(state["half"], STATE["half"])
    assert (state["lists"], state["text"]) == (STATE["lists"], "user")


def calls(mark: Path) -> dict[str, tuple[Call, str]]:
    """Return objects that would create the file `mark`, and the name in the refusal of each."""
    return {
        "a call of the system": (Call(os.mkdir, str(mark)), "posix.mkdir"),
        "a builtin": (Call(eval, f"open({str(mark)!r}, 'w')"), "builtins.eval"),
        "a function of torch": (Call(torch.save, 1, str(mark)), "torch.serialization.save"),
        "a function of Python": (Call(shutil.copy, "/etc/hostname", str(mark)), "shutil.copy"),
    }


@pytest.mark.parametrize("kind", calls(Path("mark")))
def test_a_table_of_contents_that_calls_something_is_refused(
    checkpoint: Path, tmp_path: Path, kind: str
) -> None:
    mark = tmp_path / "mark"
    call, name = calls(mark)[kind]
    table = Metadata({}, planner_data=call)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(table))
    with pytest.raises(UnsafeCheckpointError, match=rf"\.metadata: it names {name}, which may run"):
        CheckpointReader(checkpoint).read_metadata()
    assert not mark.exists()


def test_a_file_that_is_not_a_table_of_contents_is_refused(checkpoint: Path) -> None:
    (checkpoint / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": {}}))
    with pytest.raises(UnsafeCheckpointError, match="it holds no table of contents"):
        CheckpointReader(checkpoint).read_metadata()


@pytest.mark.parametrize("name", ["../other/__0_0.distcp", "/etc/passwd", ".."])
def test_a_table_that_names_files_outside_of_the_checkpoint_is_refused(
    checkpoint: Path, name: str
) -> None:
    places = {MetadataIndex("weights"): _StorageInfo(name, 0, 1)}
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Metadata({}, storage_data=places)))
    with pytest.raises(UnsafeCheckpointError, match="it names the file"):
        CheckpointReader(checkpoint).read_metadata()


def test_an_object_that_calls_something_is_refused(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    state = STATE | {"text": Call(os.mkdir, str(mark))}
    save(state, storage_writer=FileSystemWriter(tmp_path / "foreign"), no_dist=True)
    with pytest.raises(CheckpointException, match="the object text holds more than tensors"):
        loaded(tmp_path / "foreign")
    assert not mark.exists()
