"""`sluice run --containers`: checks before a run starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sluice.api import ManifestError
from sluice_cli.run import containers
from tests.tools import tool
from tests.unit.buffer.buffer_tools import make_job


def job(directory: Path, **environment: Any) -> Any:
    return make_job(directory, rollout__environment=environment)


@pytest.mark.parametrize(
    ("environment", "engine", "words"),
    [
        pytest.param({}, "podman", r"environment\.image is not set", id="no image"),
        pytest.param({"image": "b"}, "none-such", "no program 'none-such'", id="no engine"),
    ],
)
def test_a_missing_image_or_engine_is_an_error(
    environment: dict[str, Any], engine: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ManifestError, match=words):
        containers.check(job(tmp_path, command=["a"], **environment), engine)


def test_docker_without_its_daemon_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool("docker")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none")
    with pytest.raises(ManifestError, match=r"`docker info` failed: Cannot connect to the Docker"):
        containers.check(job(tmp_path, command=["a"], image="b"), "docker")


@pytest.mark.parametrize(
    ("options", "fits"),
    [
        pytest.param("  seccomp\n   Profile: default\n", True, id="as root"),
        pytest.param("  seccomp\n   Profile: default\n  rootless\n", False, id="rootless"),
    ],
)
def test_rootless_docker_is_refused(options: str, fits: bool) -> None:
    info = f"Server:\n Cgroup Driver: none\n Security Options:\n{options} Architecture: x86_64\n"
    assert (containers.problem_with(info) == "") is fits


def test_rootless_podman_is_accepted() -> None:
    assert containers.problem_with("host:\n  security:\n    rootless: true\n") == ""


def test_an_openenv_image_needs_a_url_on_this_machine(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"openenv\.url=http://127\.0\.0\.1:8000"):
        containers.check(job(tmp_path, openenv={"image": "me/wordle:1"}), None)


def test_an_unused_image_is_a_note(tmp_path: Path) -> None:
    (note,) = containers.notes(job(tmp_path, command=["a"], image="b"), None)
    assert "--containers podman" in note
    assert containers.notes(job(tmp_path, command=["a"], image="b"), "podman") == []
    assert containers.notes(make_job(tmp_path), None) == []


def test_workers_get_the_engine_as_a_variable() -> None:
    assert containers.variables("docker") == {"SLUICE_CONTAINERS": "docker"}
    assert containers.variables(None) == {}
