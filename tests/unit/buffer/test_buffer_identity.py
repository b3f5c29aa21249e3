"""A database is of one job and its prompts."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sluice.api import RLJob
from sluice.runtime.pod_env import ConfigurationError
from sluice_buffer.state.storage import Storage, StorageError
from tests.unit.buffer.buffer_tools import LocalBuffer, make_job, write_prompts

MakeBuffer = Callable[..., LocalBuffer]


def reopened(buffer: LocalBuffer, job: RLJob) -> None:
    buffer.close()
    LocalBuffer(job, buffer.directory).close()


def test_more_steps_are_no_other_job(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer()
    reopened(buffer, make_job(buffer.directory.parent, trainer__steps=50))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout__batchSize": 2}, "made with another spec.rollout.batchSize: 4, now 2"),
        ({"data__seed": 1}, "made with another order of prompts"),
        ({"rows": 21}, r"made with another prompt files \(spec.data.prompts\)"),
    ],
)
def test_other_data_settings_are_refused(
    make_buffer: MakeBuffer, changes: dict[str, int], message: str
) -> None:
    buffer = make_buffer()
    with pytest.raises(ConfigurationError, match=message):
        reopened(buffer, make_job(buffer.directory.parent, **changes))


def test_a_changed_row_is_refused(make_buffer: MakeBuffer) -> None:
    buffer = make_buffer()
    path = write_prompts(buffer.directory.parent / "prompts.jsonl", 20)
    path.write_text(path.read_text().replace("19 + 1", "19 + 2"))
    with pytest.raises(ConfigurationError, match="Restore the old setting, or start anew"):
        reopened(buffer, buffer.job)


def test_prompts_that_do_not_fill_a_batch_are_refused(make_buffer: MakeBuffer) -> None:
    with pytest.raises(
        ConfigurationError, match="3 prompts an epoch do not fill one batch of 4 groups"
    ):
        make_buffer(rows=3, trainer={"epochs": 1})


def test_one_process_has_a_database(tmp_path: Path) -> None:
    first = Storage(tmp_path, 1 << 20)
    with pytest.raises(StorageError, match="another buffer process uses this directory"):
        Storage(tmp_path, 1 << 20)
    first.close()
    Storage(tmp_path, 1 << 20).close()


def modes(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mode & 0o777 for path in directory.iterdir()}


def test_the_files_are_their_owners_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        Storage(tmp_path, 1 << 20).close()
    finally:
        os.umask(before)
    databases = {name: mode for name, mode in modes(tmp_path).items() if "lmdb" in name}
    assert databases == {"buffer.lmdb": 0o600, "buffer.lmdb-lock": 0o600}


def test_a_database_of_an_older_release_is_closed_to_others(tmp_path: Path) -> None:
    """The rights of its group may be a volume's (fsGroup), and stay."""
    Storage(tmp_path, 1 << 20).close()
    (tmp_path / "buffer.lmdb").chmod(0o664)
    Storage(tmp_path, 1 << 20).close()
    assert modes(tmp_path)["buffer.lmdb"] == 0o660
