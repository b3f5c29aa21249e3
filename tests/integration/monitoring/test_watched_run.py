"""A real run, scraped by the real Prometheus over the targets that it writes itself: alerts fire by
their faults and resolve, and every query of every panel answers.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.boards import RULES, PanelQuery, of_operator, queries
from tests.integration.run.conftest import example  # noqa: F401 - a fixture
from tests.integration.run.laptop import Laptop
from tests.prometheus import Prometheus, hastened

pytestmark = pytest.mark.timeout(400)
SETTINGS = (
    "trainer.steps=2000",
    "rollout.batchSize=16",
    "checkpoint.everySteps=2",
    "evaluation.everySteps=2",
    "failurePolicy.rolloutBackoff.baseSeconds=1",
)
WINDOWS = {"30m": "10s", "15m": "3s", "6h": "10m"}
PATIENCE = 120.0
EMPTY = {
    "engines: Joined and left: {{member_role}} left": "no stream of a member has ended",
    "job: KL divergence: reference": "the quickstart has no reference model",
    "job: Loss: value": "it has no critic",
    "job: Use of the GPUs: MFU": "a CPU's peak is not known",
    "job: Time of a reward, and of a tool's call: {{tool}}": "it has no tools",
    "job: Failed groups: {{reason}}": "no group fails",
    "operator: Failed groups by reason: {{reason}}": "no group fails",
}
"""Queries without an answer in this run, and why."""
QUERIES = [query for query in queries() if not of_operator(query) and query.name not in EMPTY]
SICK = """

import os

_healthy = positions


def positions(sample: RewardInput) -> float:
    return 0.0 if os.path.exists({flag!r}) else _healthy(sample)
"""


@dataclass
class Watched:
    """sick: while this file is there, all rewards are 0."""

    laptop: Laptop
    prometheus: Prometheus
    sick: Path

    def until_firing(self, alert: str) -> dict[str, str]:
        def labels() -> dict[str, str] | None:
            return self.prometheus.firing().get(alert)

        found: dict[str, str] = self.prometheus.until(labels, f"firing {alert}", PATIENCE)
        return found

    def until_at_work(self, *alerts: str) -> None:
        """Before a fault, so that it is the fault that makes the alerts fire."""
        self.laptop.until_step(self.laptop.step() + 2)
        self.until_quiet(*alerts)

    def until_quiet(self, *alerts: str) -> None:

        def quiet() -> bool:
            return not self.prometheus.firing().keys() & set(alerts)

        self.prometheus.until(quiet, f"quiet {alerts}", PATIENCE)


def configuration(run: Path, rules: Path) -> dict[str, Any]:
    """As docs/monitoring.md has it, with shorter times."""
    files = {"files": [str(run / "targets.json")], "refresh_interval": "1s"}
    return {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(rules)],
        "scrape_configs": [{"job_name": "sluice", "file_sd_configs": [files]}],
    }


@pytest.fixture(scope="module")
def watched(example: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:  # noqa: F811
    directory = tmp_path_factory.mktemp("watched")
    task = shutil.copytree(example, directory / "task")
    with (task / "reward.py").open("a") as reward:
        reward.write(SICK.format(flag=str(directory / "sick")))
    rules = directory / "rules.yaml"
    rules.write_text(hastened(RULES.read_text(), waits="0s", windows=WINDOWS))
    laptop = Laptop(task, directory / "run", *SETTINGS)
    with Prometheus(directory, configuration(laptop.directory, rules)) as prometheus:
        try:
            laptop.start()
            laptop.until_step(4)
            yield Watched(laptop, prometheus, directory / "sick")
        finally:
            laptop.stop()


def test_every_pod_is_scraped_under_its_labels(watched: Watched) -> None:
    up = {
        (labels["role"], labels.get("metrics_path", "/metrics")): value
        for labels, value in watched.prometheus.query('up{namespace="default",job="quickstart"}')
    }
    roles = ("buffer", "rendezvous", "rollout", "trainer")
    assert up == dict.fromkeys([(role, "/metrics") for role in roles], 1.0) | {
        ("rollout", "/engine/metrics"): 1.0
    }


def test_a_worker_that_is_paused(watched: Watched) -> None:
    """Its engine counts as gone, since nobody can give it weights; it comes back."""
    watched.until_at_work("SluiceNoEngine")
    watched.laptop.kill("worker", signal.SIGSTOP)
    try:
        labels = watched.until_firing("SluiceNoEngine")
    finally:
        watched.laptop.kill("worker", signal.SIGCONT)
    assert (labels["namespace"], labels["job"]) == ("default", "quickstart")
    watched.until_quiet("SluiceNoEngine")


def test_a_trainer_that_is_frozen(watched: Watched) -> None:
    watched.until_at_work("SluiceNoProgress")
    pid = watched.laptop.kill("trainer", signal.SIGSTOP)
    try:
        watched.until_firing("SluiceNoProgress")
    finally:
        watched.laptop.kill("trainer", signal.SIGCONT)
    watched.until_quiet("SluiceNoProgress")
    assert watched.laptop.find("trainer") == pid


def test_a_reward_that_is_sick(watched: Watched) -> None:
    alerts = ("SluiceRewardsEqual", "SluiceRewardCollapsed")
    watched.until_at_work(*alerts)
    watched.sick.touch()
    for alert in alerts:
        watched.until_firing(alert)
    watched.sick.unlink()
    watched.until_quiet(*alerts)


def test_every_query_of_every_panel_answers(watched: Watched) -> None:
    """In one test, since they all ask for the same moment: that the last fault is over."""
    silent = [query.name for query in QUERIES if not answered(watched.prometheus, query)]
    assert silent == []


def answered(prometheus: Prometheus, query: PanelQuery) -> bool:
    expr = query.filled(namespace=".*", job="quickstart", interval="1m")
    return bool(prometheus.query(expr))


def test_what_is_left_out_is_still_there() -> None:
    assert EMPTY.keys() <= {query.name for query in queries()}
