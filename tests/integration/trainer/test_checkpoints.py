"""The promises of a checkpoint: a resume is exact, a kill does no harm, a full disk is reported."""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint import filesystem

from sluice_trainer.checkpoint import checkpoint_directory
from sluice_trainer.checkpoint.checkpoint_directory import Author
from sluice_trainer.checkpoint.checkpoint_writer import CheckpointError
from sluice_trainer.megatron.policy import MegatronPolicy
from tests.integration.trainer import tiny, train_steps

pytestmark = pytest.mark.usefixtures("process_group")


def make(model: Path, /, author: Author | None = None, **changes: Any) -> MegatronPolicy:
    timeout = timedelta(seconds=tiny.TIMEOUT)
    return MegatronPolicy(
        tiny.spec(model, **changes), model_dir=model, timeout=timeout, author=author
    )


def train(policy: MegatronPolicy, steps: int = 1) -> list[dict[str, float]]:
    result = []
    for _ in range(steps):
        shard = tiny.batch(8, seed=policy.step)
        result.append(policy.train([shard], [tiny.totals(shard)]))
    return result


# A schedule, momentum and a reference policy: all of them must be restored.
TRAINER: dict[str, Any] = {
    "optimizer": {"lr": 1e-3, "schedule": "cosine", "weightDecay": 0.1},
    "steps": 10,
}
ALGORITHM = {"kl": {"lossCoef": 0.05, "type": "k3"}}


def job(model: Path, **options: Any) -> dict[str, Any]:
    return {"model": str(model), "algorithm": ALGORITHM, "trainer": TRAINER, "share": 30, **options}


def elsewhere(world: int = 1, **options: Any) -> dict[str, Any]:
    """Train in new processes and return the results of rank 0."""
    result: dict[str, Any] = tiny.run("train_steps.py", json.dumps(options), world=world)[0]
    return result


@pytest.fixture(scope="module")
def saved_by_two(qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a checkpoint of step 3 on two ranks."""
    directory = tmp_path_factory.mktemp("saved-by-two")
    elsewhere(2, **job(qwen3, steps=3, save_at=3, checkpoints=str(directory)))
    return directory


def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(qwen3: Path, tmp_path: Path) -> None:
    through = train_steps.train(**job(qwen3, steps=6))
    train_steps.train(**job(qwen3, steps=3, save_at=3, checkpoints=str(tmp_path)))
    resumed = elsewhere(**job(qwen3, steps=6, checkpoints=str(tmp_path)))
    assert resumed == {**through, "history": through["history"][3:], "resumed": 3, "saved": None}


def test_a_resumed_run_on_two_ranks_equals_an_uninterrupted_one(
    qwen3: Path, saved_by_two: Path
) -> None:
    through = elsewhere(2, **job(qwen3, steps=6))
    resumed = elsewhere(2, **job(qwen3, steps=6, checkpoints=str(saved_by_two)))
    assert resumed == {**through, "history": through["history"][3:], "resumed": 3, "saved": None}


def test_a_checkpoint_of_two_ranks_continues_on_one(qwen3: Path, saved_by_two: Path) -> None:
    through = train_steps.train(**job(qwen3, steps=5))
    resumed = train_steps.train(**job(qwen3, steps=5, checkpoints=str(saved_by_two)))
    for ours, expected in zip(resumed["history"], through["history"][3:], strict=True):
        assert ours == pytest.approx(expected, rel=1e-4, abs=1e-6)


TENSOR, INTERLEAVED = {"tensor": 2}, {"pipeline": 2, "virtualPipeline": 2}


@pytest.mark.parametrize(
    ("family", "before", "after"),
    [
        ("qwen3-tied", TENSOR, INTERLEAVED),
        ("qwen3-tied", INTERLEAVED, {"context": 2}),
        pytest.param(
            *("deepseek-v3", {"expert": 2, "tensor": 2}, {"pipeline": 2}), marks=pytest.mark.long
        ),
        ("qwen3-moe-mixed", {"pipeline": 2}, {"expert": 2}),
    ],
    ids=[
        "tensor to interleaved",
        "interleaved to context",
        "experts and tensor to pipeline",
        "pipeline to experts",
    ],
)
def test_training_goes_on_under_another_layout(
    models: dict[str, Path],
    tmp_path: Path,
    family: str,
    before: dict[str, int],
    after: dict[str, int],
) -> None:
    def run(layout: dict[str, int], steps: int, **options: Any) -> dict[str, Any]:
        options |= {"trainer": {**TRAINER, "parallelism": layout, "processesPerNode": 2}}
        return elsewhere(
            2, **{**job(models[family], steps=steps, checkpoints=str(tmp_path)), **options}
        )

    through = train_steps.train(**job(models[family], steps=4))
    run(before, 2, save_at=2)
    resumed = run(after, 4)
    assert (resumed["resumed"], len(resumed["history"])) == (2, 2)
    for ours, expected in zip(resumed["history"], through["history"][2:], strict=True):
        assert ours == pytest.approx(expected, rel=2e-4, abs=2e-6)


def test_the_bf16_optimizer_keeps_its_fp32_weights(qwen3: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"trainer": {"precision": "bf16"}}
    policy = make(qwen3, **options)
    train(policy, 2)
    tiny.save(policy, tmp_path, 2)
    expected = train(policy, 2)
    resumed = make(qwen3, **options)
    assert resumed.load_latest(tmp_path) == 2
    assert train(resumed, 2) == expected


def test_random_weights_keep_their_reference_across_a_resume(qwen3: Path, tmp_path: Path) -> None:
    spec = tiny.spec(qwen3, model={"path": str(qwen3), "init": "random"}, algorithm=ALGORITHM)
    policy = MegatronPolicy(spec, model_dir=qwen3, timeout=timedelta(seconds=tiny.TIMEOUT))
    shard = tiny.batch(4, seed=0)
    expected = policy.reference_log_probs(shard)
    train(policy)
    tiny.save(policy, tmp_path, 1)
    resumed = MegatronPolicy(spec, model_dir=qwen3, timeout=timedelta(seconds=tiny.TIMEOUT))
    resumed.load_latest(tmp_path)
    again = resumed.reference_log_probs(shard)
    assert expected is not None
    assert again is not None
    assert all(torch.equal(a, b) for a, b in zip(expected, again, strict=True))
    assert not torch.equal(resumed.log_probs(shard)[0], again[0])


def test_there_may_be_no_checkpoint_yet(qwen3: Path, tmp_path: Path) -> None:
    assert make(qwen3).load_latest(tmp_path / "absent") is None


def test_only_the_newest_checkpoints_are_kept(qwen3: Path, tmp_path: Path) -> None:
    policy = make(qwen3, checkpoint={"keep": 2})
    for step in (1, 2, 3):
        train(policy)
        tiny.save(policy, tmp_path, step)
    assert checkpoint_directory.steps(tmp_path) == [2, 3]
    assert (tmp_path / checkpoint_directory.TRACKER).read_text() == "3"


def test_a_step_that_is_saved_already_is_left_alone(qwen3: Path, tmp_path: Path) -> None:
    policy = make(qwen3)
    train(policy)
    tiny.save(policy, tmp_path, 1)
    before = (tmp_path / "iter_0000001" / ".metadata").stat().st_mtime_ns
    tiny.save(policy, tmp_path, 1)
    assert (tmp_path / "iter_0000001" / ".metadata").stat().st_mtime_ns == before


@pytest.mark.parametrize("how", ["now", "in the background"])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_kill_at_any_moment_leaves_a_checkpoint_that_loads(
    qwen3: Path, tmp_path: Path, seed: int, how: str
) -> None:
    process = tiny.start("save_forever.py", qwen3, tmp_path, how)
    try:
        assert process.stdout is not None
        said = [process.stdout.readline() for _ in range(2)]
        time.sleep(
            random.Random(seed).uniform(0, 0.6)
        )  # within the next step and save, or the one after
        process.kill()
        said += process.stdout.readlines()
    finally:
        process.kill()
        process.wait()
    resumed = make(qwen3, checkpoint={"keep": 2})
    step = resumed.load_latest(tmp_path)
    assert step is not None
    assert step >= int(said[-1].removeprefix("saved "))
    train(resumed)
    tiny.save(resumed, tmp_path, step + 1)
    resumed._removals._thread.shutdown(wait=True)
    assert not list(tmp_path.glob(".*.tmp"))
    assert checkpoint_directory.steps(tmp_path) == [step, step + 1]


@pytest.mark.parametrize(
    ("continued", "where"),
    [
        ("while its successor writes", "in a file"),
        ("after its successor has published", "at the rename"),
        pytest.param("while its successor writes", "at the rename", marks=pytest.mark.long),
        pytest.param("after its successor has published", "in a file", marks=pytest.mark.long),
    ],
)
def test_an_older_attempt_that_wakes_up_neither_publishes_nor_harms_a_checkpoint(
    qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, continued: str
) -> None:
    older = tiny.start("save_and_freeze.py", qwen3, tmp_path, where)
    try:
        os.waitid(os.P_PID, older.pid, os.WSTOPPED)
        newer = make(qwen3, Author(2))
        assert newer.load_latest(tmp_path) is None
        train(newer)
        if continued == "while its successor writes":
            write = filesystem_async._write_item

            @functools.wraps(write)
            def write_after_the_older(*arguments: Any, **options: Any) -> Any:
                if older.poll() is None:
                    older.send_signal(signal.SIGCONT)
                    older.wait(tiny.TIMEOUT)
                return write(*arguments, **options)

            monkeypatch.setattr(filesystem_async, "_write_item", write_after_the_older)
        tiny.save(newer, tmp_path, 1)
        expected = train(newer)
        older.send_signal(signal.SIGCONT)
        said, _ = older.communicate(timeout=tiny.TIMEOUT)
    finally:
        older.kill()
        older.wait()
    assert older.returncode != 0
    assert "attempt 1 has been replaced" in said
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["iter_0000001"]
    resumed = make(qwen3, Author(3))
    assert resumed.load_latest(tmp_path) == 1
    assert train(resumed) == expected


@pytest.fixture
def held_writer(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Write checkpoint files only once the event is set."""
    released = threading.Event()
    write = filesystem_async._write_item

    @functools.wraps(write)
    def held(*arguments: Any, **options: Any) -> Any:
        assert released.wait(tiny.TIMEOUT)
        return write(*arguments, **options)

    monkeypatch.setattr(filesystem_async, "_write_item", held)
    yield released
    released.set()


def test_training_goes_on_while_a_checkpoint_is_written(
    qwen3: Path, tmp_path: Path, held_writer: threading.Event
) -> None:
    policy = make(qwen3)
    train(policy, 2)
    policy.begin_save(tmp_path, 2, background=True)
    after = train(policy, 2)
    assert policy.finish_save(tmp_path, wait=False) is None
    assert checkpoint_directory.latest_step(tmp_path) is None
    held_writer.set()
    assert policy.finish_save(tmp_path, wait=True) == 2
    assert policy.finish_save(tmp_path, wait=True) is None
    resumed = make(qwen3)
    assert resumed.load_latest(tmp_path) == 2
    assert train(resumed, 2) == after  # training has changed the weights since the save began


def test_the_next_checkpoint_waits_for_the_one_under_way(qwen3: Path, tmp_path: Path) -> None:
    policy = make(qwen3, checkpoint={"keep": 1})
    for step in (1, 2):
        train(policy)
        policy.begin_save(tmp_path, step, background=True)
    assert checkpoint_directory.steps(tmp_path) == [1]
    assert policy.finish_save(tmp_path, wait=True) == 2
    assert checkpoint_directory.steps(tmp_path) == [2]


def test_two_ranks_write_in_the_background(qwen3: Path, tmp_path: Path) -> None:
    through = elsewhere(
        2, **job(qwen3, steps=5, save_at=3, in_background=True, checkpoints=str(tmp_path))
    )
    assert through["saved"] == 3
    assert through["new_memory"] == 0
    resumed = elsewhere(2, **job(qwen3, steps=5, checkpoints=str(tmp_path)))
    assert (resumed["resumed"], resumed["weights"]) == (3, through["weights"])


@pytest.mark.parametrize(
    "trainer",
    [
        {},
        {"cpuOffload": "optimizer"},
        {"optimizer": {"expAvgDtype": "bf16", "expAvgSqDtype": "bf16"}},
    ],
    ids=["plain", "optimizer on the host", "moments in bf16"],
)
def test_memory_that_is_reserved_is_all_that_a_copy_takes_and_changes_no_bit(
    qwen3: Path, tmp_path: Path, trainer: dict[str, Any]
) -> None:
    options = job(qwen3, steps=3) | {"trainer": TRAINER | trainer}
    plain = train_steps.train(**options)
    reserved = train_steps.train(
        **options, save_at=3, in_background=True, checkpoints=str(tmp_path)
    )
    assert reserved["new_memory"] == 0
    assert {**reserved, "saved": None, "new_memory": None} == plain


def test_both_ranks_write_states_of_parameters(saved_by_two: Path) -> None:
    """Each rank writes those that its share of the optimizer begins.

    None is gathered as a whole.
    """
    sizes = [sum(f.stat().st_size for f in saved_by_two.glob(f"*/__{rank}_*")) for rank in (0, 1)]
    assert min(sizes) > sum(sizes) / 10, sizes


@pytest.mark.parametrize(
    "in_background", [False, True], ids=["in the foreground", "in the background"]
)
@pytest.mark.parametrize("where", ["weights", "metadata"])
def test_a_full_disk_is_reported_and_does_no_harm(
    qwen3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, in_background: bool
) -> None:
    policy = make(qwen3)
    train(policy)
    tiny.save(policy, tmp_path, 1)
    train(policy)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    if where == "weights":
        monkeypatch.setattr(
            "megatron.core.dist_checkpointing.strategies.filesystem_async._write_item", full
        )
    else:
        monkeypatch.setattr(filesystem.FileSystemWriter, "finish", full)

    def save() -> None:
        policy.begin_save(tmp_path, 2, background=in_background)
        policy.finish_save(tmp_path, wait=True)

    with pytest.raises(
        CheckpointError, match=r"iter_0000002 could not be written: no space left on the disk of"
    ):
        save()
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == ["iter_0000001"]
    assert make(qwen3).load_latest(tmp_path) == 1
    tiny.save(policy, tmp_path, 2)
    assert make(qwen3).load_latest(tmp_path) == 2


def test_a_damaged_checkpoint_is_named(qwen3: Path, tmp_path: Path) -> None:
    policy = make(qwen3)
    train(policy)
    tiny.save(policy, tmp_path, 1)
    file = tmp_path / "iter_0000001" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(
        CheckpointError, match=r"iter_0000001 could not be read: .*__0_0.distcp has \d+ bytes"
    ):
        make(qwen3).load_latest(tmp_path)


def test_export_is_a_hugging_face_checkpoint_of_the_current_weights(
    qwen3: Path, tmp_path: Path
) -> None:
    policy = make(qwen3)
    train(policy)
    policy.export_hf(tmp_path / "hf")
    policy.export_hf(tmp_path / "hf")  # replaces the older checkpoint
    shard = tiny.batch(2, seed=0)
    exported = tiny.hf_model(tmp_path / "hf").requires_grad_(False)
    assert torch.allclose(
        policy.log_probs(shard)[0], tiny.hf_log_probs(exported, shard[0])[0], atol=1e-5
    )
