"""Compiled kernels on a volume of the user's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sluice_operator.plan.manifests.containers import ACCOUNT
from tests.node.checks import START_SECONDS
from tests.node.jobs import Quickstart
from tests.node.node import Node, Object

pytestmark = pytest.mark.timeout(1200)

WARNING = f"user {ACCOUNT} cannot write them to its volume"
CLAIM = "kernels"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory of this machine that root owns, like a `hostPath` of DirectoryOrCreate."""
    path = tmp_path / CLAIM
    path.mkdir()
    path.chmod(0o755)
    return path


@pytest.fixture
def claim(quickstart: Quickstart, node: Node, directory: Path) -> Iterator[Object]:
    """A claim on that directory, as a volume of pods."""
    volume_claim = quickstart._claim()
    volume_claim["metadata"]["name"] = CLAIM
    node.apply(quickstart._persistent_volume(CLAIM, directory), volume_claim)
    yield {"persistentVolumeClaim": {"claimName": CLAIM}}
    quickstart.delete()
    quickstart.kubectl("delete", "persistentvolumeclaim", CLAIM, "--wait=false")
    volume = f"{quickstart.namespace}-{CLAIM}"
    node.kubectl("delete", "persistentvolume", volume, "--wait=false")


def trained(quickstart: Quickstart, volume: dict[str, Any]) -> dict[str, str]:
    """The logs of engine and trainer after two steps with this volume."""
    quickstart.start(trainer={"steps": 40}, kernelCache={"volume": volume})
    quickstart.until_step(2, START_SECONDS)
    return {
        container: quickstart.kubectl(
            "logs", quickstart.pod(role)["metadata"]["name"], "--container", container
        )
        for role, container in (("rollout", "engine"), ("trainer", "trainer"))
    }


def test_a_volume_that_refuses_costs_the_cache_alone(
    quickstart: Quickstart, directory: Path
) -> None:
    logs = trained(quickstart, {"hostPath": {"path": str(directory), "type": "Directory"}})
    assert {name: log.count(WARNING) for name, log in logs.items()} == {"engine": 1, "trainer": 1}
    assert quickstart.status()["restarts"] == 0


def test_a_claim_is_the_pods_own(quickstart: Quickstart, claim: Object, directory: Path) -> None:
    logs = trained(quickstart, claim)
    assert {name: log.count("kernelCache") for name, log in logs.items()} == {
        "engine": 0,
        "trainer": 0,
    }
    places = {f"{path.parent.name}/{path.name}" for path in directory.glob("*/*")}
    assert {f"{role}/triton" for role in ("rollout", "trainer")} <= places
    assert {path.stat().st_uid for path in directory.glob("*/*")} == {ACCOUNT}
