"""A cache that cannot be written is left, and the process goes on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sluice.engines.protocol import Launch
from sluice.engines.sglang.launch import Launch as SglangLaunch
from sluice.engines.vllm.launch import Launch as VllmLaunch
from sluice.runtime import kernel_cache

OTHERS = {"HOME": "/root", "OTHER": "/sluice/cached", "PATH": "/bin"}


@pytest.mark.parametrize("launch", [SglangLaunch(), VllmLaunch()], ids=["sglang", "vllm"])
def test_every_cache_of_an_engine_is_below_the_one_that_is_looked_at(launch: Launch) -> None:
    variables = launch.caches("/sluice/cache")
    assert variables[kernel_cache.VARIABLE] == "/sluice/cache"
    assert all(f"{place}/".startswith("/sluice/cache/") for place in variables.values())


def test_directories_are_made_where_they_can_be_written(tmp_path: Path) -> None:
    variables = kernel_cache.caches(str(tmp_path)) | {"FLASHINFER_WORKSPACE_BASE": str(tmp_path)}
    environ = variables | OTHERS
    assert kernel_cache.leave_unwritable(environ) == ""
    assert environ == variables | OTHERS
    assert sorted(os.listdir(tmp_path)) == ["cuda", "flash-attention", "inductor", "triton"]
    assert not any(os.scandir(tmp_path / "triton"))


def test_variables_of_a_volume_that_refuses_are_taken_back_with_a_word(tmp_path: Path) -> None:
    file = tmp_path / "file"  # root may write into any directory
    file.write_text("")
    environ = kernel_cache.caches(str(file)) | OTHERS
    warning = kernel_cache.leave_unwritable(environ)
    assert environ == OTHERS | {kernel_cache.VARIABLE: str(file)}
    assert f"user {os.getuid()} cannot write" in warning
    assert "chmod 1777" in warning


def test_the_others_are_kept_where_one_is_somebody_elses(tmp_path: Path) -> None:
    (tmp_path / "triton").write_text("")
    environ = kernel_cache.caches(str(tmp_path)) | OTHERS
    assert "triton" in kernel_cache.leave_unwritable(environ)
    everything = kernel_cache.caches(str(tmp_path)) | OTHERS
    assert everything.items() - environ.items() == {("TRITON_CACHE_DIR", f"{tmp_path}/triton")}


def test_without_a_cache_nothing_is_looked_at() -> None:
    environ = {"TRITON_CACHE_DIR": "/proc/nowhere"}
    assert kernel_cache.leave_unwritable(environ) == ""
    assert environ == {"TRITON_CACHE_DIR": "/proc/nowhere"}
