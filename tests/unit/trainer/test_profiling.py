"""Profiles of selected steps are files that tools can read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from sluice_trainer.telemetry.profiling import Profiles, region


def fail() -> None:
    multiply()
    raise MemoryError("too large")


@region("train")
def multiply() -> float:
    weight = torch.ones(8, 8, requires_grad=True)
    (weight @ weight).sum().backward()
    return float(weight.grad.sum()) if weight.grad is not None else 0.0


def events(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path) as file:
        return list(json.load(file)["traceEvents"])


def test_a_selected_step_leaves_a_trace_of_regions_and_operations(tmp_path: Path) -> None:
    profiles = Profiles([2], tmp_path / "profiles", rank=3)
    with profiles.profile_step(2):
        assert multiply() == 2 * 8**3
    (path,) = (tmp_path / "profiles").glob("*.trace.json.gz")
    assert path.name == "step_0000002_rank_3.trace.json.gz"
    bars = {event["name"]: event for event in events(path) if event["ph"] == "X"}
    assert {"sluice: train", "aten::mm", "autograd::engine::evaluate_function: MmBackward0"} <= (
        bars.keys()
    )
    train, product = bars["sluice: train"], bars["aten::mm"]
    assert train["ts"] <= product["ts"] <= train["ts"] + train["dur"]
    assert product["args"]["Input Dims"][0] == [8, 8]


def test_other_steps_are_not_profiled(tmp_path: Path) -> None:
    with Profiles([2], tmp_path / "profiles").profile_step(1):
        assert multiply() == 2 * 8**3
        assert not torch.autograd.profiler._is_profiler_enabled
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_fails_leaves_its_trace_and_its_error(tmp_path: Path) -> None:
    with pytest.raises(MemoryError, match="too large"), Profiles([1], tmp_path).profile_step(1):
        fail()
    (path,) = tmp_path.glob("*.trace.json.gz")
    assert "aten::mm" in {event["name"] for event in events(path)}


def test_a_repeated_step_replaces_its_trace(tmp_path: Path) -> None:
    profiles = Profiles([1], tmp_path)
    for function in (multiply, lambda: torch.zeros(3).cos()):
        with profiles.profile_step(1):
            function()
    (path,) = tmp_path.glob("*.trace.json.gz")
    names = {event["name"] for event in events(path)}
    assert "aten::cos" in names
    assert "aten::mm" not in names


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_kernels_and_the_history_of_memory_are_kept(tmp_path: Path) -> None:
    import pickle

    with Profiles([1], tmp_path).profile_step(1):
        block = torch.ones(1 << 20, device="cuda")
        torch.cuda.synchronize()
    (trace,) = tmp_path.glob("*.trace.json.gz")
    assert "kernel" in {event.get("cat") for event in events(trace)}
    (memory,) = tmp_path.glob("*.memory.pickle")
    history = pickle.loads(memory.read_bytes())["device_traces"][0]
    allocations = [event for event in history if event["action"] == "alloc"]
    assert block.nbytes in {event["size"] for event in allocations}
    assert any("test_profiling" in frame["filename"] for frame in allocations[0]["frames"])
