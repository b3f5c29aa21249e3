"""The workflows run what contributors run, and a release publishes all that there is."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.tools import ROOT

RELEASE = [sys.executable, str(ROOT / "tools" / "release.py")]


def workflow(name: str) -> dict[str, Any]:
    loaded = YAML(typ="safe").load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())
    assert isinstance(loaded, dict)
    return loaded


def test_hosted_ci_runs_the_script_that_contributors_run() -> None:
    steps = workflow("ci")["jobs"]["ci"]["steps"]
    assert steps[-1] == {"run": ".ci/run"}
    assert workflow("release")["jobs"]["test"]["uses"] == "./.github/workflows/ci.yml"


def test_a_release_publishes_every_image() -> None:
    images = workflow("release")["jobs"]["images"]["strategy"]["matrix"]["image"]
    makefile = re.search(r"for image in ([a-z ]+);", (ROOT / "Makefile").read_text())
    assert makefile is not None
    assert images == makefile[1].split()


def test_nothing_is_published_before_the_tests_have_passed() -> None:
    jobs = workflow("release")["jobs"]

    def waits_for(job: str) -> set[str]:
        needs = jobs[job].get("needs", [])
        direct = {needs} if isinstance(needs, str) else set(needs)
        return direct.union(*(waits_for(name) for name in direct))

    assert all("test" in waits_for(job) for job in jobs if job != "test")


def test_every_place_states_the_same_version() -> None:
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    subprocess.run([*RELEASE, "check", f"v{version[1]}"], check=True)


def test_another_tag_is_refused_with_the_places() -> None:
    done = subprocess.run([*RELEASE, "check", "v99.0.0"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "pyproject.toml 0." in done.stderr


def test_notes_are_the_section_of_the_version() -> None:
    done = subprocess.run([*RELEASE, "notes", "v0.1.0"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("First release.")
    assert "## [" not in done.stdout


@pytest.mark.parametrize("name", ["ci", "release"])
def test_actions_are_pinned_by_commit(name: str) -> None:
    text = (ROOT / ".github" / "workflows" / f"{name}.yml").read_text()
    actions = re.findall(r"uses: ([^.\s]\S*)", text)
    assert actions
    assert all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action) for action in actions)
