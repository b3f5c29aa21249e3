"""The threads of a rank depend on the model and the processors of the container."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from sluice.runtime import cpu_threads
from sluice.runtime.cpu_threads import threads, usable_processors
from sluice_trainer.__main__ import _set_threads
from sluice_trainer.distributed import device


@pytest.mark.parametrize(
    ("quota", "expected"),
    [
        pytest.param("max 100000", 8, id="no limit"),
        pytest.param("350000 100000", 3, id="a limit of 3.5"),
        pytest.param("50000 100000", 1, id="a limit of half a processor"),
        pytest.param("6400000 100000", 8, id="a limit above what there is"),
        pytest.param(None, 8, id="no cgroup"),
    ],
)
def test_a_container_has_as_many_processors_as_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str | None, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    file = tmp_path / "cpu.max"
    if quota:
        file.write_text(f"{quota}\n")
    assert usable_processors(file) == expected


@pytest.mark.parametrize(
    ("config", "present", "processes", "expected"),
    [
        pytest.param({"hidden_size": 576}, 1, 1, 8, id="a model of real size"),
        pytest.param({"hidden_size": 576}, 1, 3, 2, id="one of three ranks"),
        pytest.param({"hidden_size": 576}, 1, 99, 1, id="more ranks than processors"),
        pytest.param({"hidden_size": 576}, 4, 1, 4, id="the user's number"),
        pytest.param({"text_config": {"hidden_size": 576}}, 1, 1, 8, id="of text and images"),
        pytest.param({"hidden_size": 128}, 1, 1, 1, id="a tiny one"),
        pytest.param({}, 1, 1, 1, id="unknown"),
    ],
)
def test_a_model_of_real_size_has_all_processors(
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, Any],
    present: int,
    processes: int,
    expected: int,
) -> None:
    monkeypatch.setattr(cpu_threads, "usable_processors", lambda: 8)
    assert threads(config, present, processes) == expected


@pytest.mark.parametrize(
    ("width", "ranks", "expected"),
    [(576, "2", 3), (128, "1", 1)],
    ids=["two ranks", "a small model"],
)
def test_a_rank_on_cpus_computes_with_its_threads(
    monkeypatch: pytest.MonkeyPatch, width: int, ranks: str, expected: int
) -> None:
    monkeypatch.setattr(cpu_threads, "usable_processors", lambda: 6)
    monkeypatch.setattr(device, "DEVICE", torch.device("cpu"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _set_threads({"hidden_size": width})
        assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)
