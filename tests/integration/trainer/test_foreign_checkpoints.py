"""A checkpoint from elsewhere runs no code in the trainer or in `sluice convert`."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo

from sluice_trainer.checkpoint import checkpoint_directory
from sluice_trainer.checkpoint.checkpoint_directory import Author
from sluice_trainer.checkpoint.checkpoint_reader import CheckpointReader
from sluice_trainer.checkpoint.checkpoint_writer import CheckpointError
from sluice_trainer.fsdp.conversion import dist_to_hf as fsdp_to_hf
from sluice_trainer.megatron.checkpoints.conversion import dist_to_hf as megatron_to_hf
from sluice_trainer.model.huggingface_files import ConversionError
from tests.integration.trainer import train_steps
from tests.unit.trainer.test_checkpoint_reader import Call

pytestmark = pytest.mark.usefixtures("process_group")

Change = Callable[[Path, Path], None]


def call_from_the_table(checkpoint: Path, mark: Path) -> None:
    table = CheckpointReader(checkpoint).read_metadata()
    table.planner_data = Call(os.mkdir, str(mark))
    (checkpoint / ".metadata").write_bytes(pickle.dumps(table))


def call_from_an_object(checkpoint: Path, mark: Path) -> None:
    """Replace an object that every resume reads by another one."""
    table, content = CheckpointReader(checkpoint).read_metadata(), io.BytesIO()
    torch.save([Call(os.mkdir, str(mark))], content)
    for index, place in list(table.storage_data.items()):
        if index.fqn.partition("/")[0] in ("user", "rng"):
            file = checkpoint / place.relative_path
            table.storage_data[index] = _StorageInfo(
                place.relative_path, file.stat().st_size, len(content.getvalue())
            )
            file.write_bytes(file.read_bytes() + content.getvalue())
    (checkpoint / ".metadata").write_bytes(pickle.dumps(table))


def change(directory: Path, step: int, mark: Path, change: Change) -> None:
    """Change a checkpoint and write a matching manifest."""
    checkpoint_directory.claim(directory, Author())
    final = checkpoint_directory.path_of(directory, step)
    temporary = checkpoint_directory.temporary_of(final, Author())
    final.rename(temporary)
    (temporary / checkpoint_directory.MANIFEST).unlink()
    change(temporary, mark)
    checkpoint_directory.commit(temporary, final, Author())


def job(model: Path, backend: str, checkpoints: Path, **options: Any) -> dict[str, Any]:
    trainer = {"backend": backend, "optimizer": {"lr": 1e-3}, "steps": 4}
    common = {"model": str(model), "algorithm": {}, "trainer": trainer}
    return {**common, "checkpoints": str(checkpoints), **options}


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (call_from_the_table, r"\.metadata: it names posix\.mkdir, which may run code"),
        (call_from_an_object, r"the object (user|rng\S*) holds more than tensors"),
    ],
    ids=["table of contents", "object"],
)
def test_a_foreign_checkpoint_is_refused(
    qwen3: Path, tmp_path: Path, backend: str, harm: Change, words: str
) -> None:
    checkpoints, mark = tmp_path / "checkpoints", tmp_path / "mark"
    train_steps.train(**job(qwen3, backend, checkpoints, steps=1, save_at=1))
    change(checkpoints, 1, mark, harm)
    with pytest.raises(CheckpointError, match=rf"iter_0000001 could not be read: .*{words}"):
        train_steps.train(**job(qwen3, backend, checkpoints, steps=2))
    if harm is call_from_the_table:
        convert = megatron_to_hf if backend == "megatron" else fsdp_to_hf
        with pytest.raises(ConversionError, match=words):
            convert(checkpoints, qwen3, tmp_path / "hf")
    assert not mark.exists()
