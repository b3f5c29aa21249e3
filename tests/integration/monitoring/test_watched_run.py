"""A real run, scraped by the real Prometheus over the targets that it writes itself: alerts fire by
their faults and resolve, and every query of every panel answers.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.boards import RULES, PanelQuery, of_operator, queries
from tests.integration.run.conftest import example  # noqa: F401 - a fixture
from tests.integration.run.laptop import Laptop
from tests.prometheus import Prometheus, hastened

pytestmark = pytest.mark.timeout(400)
BATCH = 16
SETTINGS = (
    "trainer.steps=2000",
    f"rollout.batchSize={BATCH}",
    "checkpoint.everySteps=5",
    "evaluation.everySteps=5",
    "failurePolicy.rolloutBackoffSeconds=1",
    "weightSync.timeoutSeconds=5",
    "reward.function=sick.py:reward",
    "rollout.hooks.beforeReward=sick.py:hook",
    "algorithm.loss.function=sick.py:loss",
    "algorithm.entropyCoef=0",
    "trainer.optimizer.lr=6e-3",
)
# Seconds for which the buffer must have had a whole batch.
SETTLED = 4
WHOLE_BATCH = (
    f"min_over_time(sluice_buffer_depth_groups[{SETTLED}s]) >= {BATCH} "
    f"and max_over_time(sluice_buffer_leases_groups[{SETTLED}s]) == 0"
)
WINDOWS = {"30m": "10s", "15m": "3s", "6h": "10m"}
# Queries without an answer in this run, and why.
EMPTY = {
    "job: Held-out loss: {{dataset}}": "rows with given answers are for sft and preferences",
    "job: Held-out accuracy: {{dataset}}": "rows with given answers are for sft and preferences",
    "engines: Joined and left: {{member_role}} left": "no stream of a member has ended",
    "engines: Agent requests: {{outcome}}": "no agent plays",
    "engines: Turns and branches: {{history}}": "no agent plays",
    "engines: Overridden settings: {{setting}}": "no agent plays",
    "engines: Turn overhead: median": "no agent plays",
    "engines: Turn overhead: 95th percentile": "no agent plays",
    "engines: Refused keys: {{reason}}": "no agent plays",
    "engines: Episodes out of time: {{outcome}}": "no agent plays",
    "engines: Requests to other models: {{model}}": "no agent plays",
    "engines: Episode programs: {{role}} pods, {{state}}": "a laptop has none",
    "engines: Histories shortened: summaries, {{outcome}}": "none was too long",
    "engines: Weights from the store: {{step}}": "weights go over gloo",
    "engines: Adapters: engine {{replica}}": "the quickstart trains no adapter",
    "job: KL divergence: reference": "the quickstart has no reference model",
    "job: Loss: value": "it has no critic",
    "job: GPU utilisation: MFU": "a CPU's peak is not known",
    "job: Time of rewards and tool calls: {{tool}}": "it has no tools",
    "job: Failed groups: {{reason}}": "no group fails",
    "job: Acceptance length: engine {{replica}}": "no tokens are proposed",
    "job: MTP layer: loss": "it trains no such layer",
    "job: MTP layer: accuracy": "it trains no such layer",
    "job: Preferred answers: accuracy": "it has no pairs of answers",
    "job: Reward margin: margin": "it has no pairs of answers",
    "job: Trained images: images": "it has no images",
    "job: Time for images: decoding": "it has no images",
    "job: Time for images: tower": "it has no images",
    "job: Share of the tower: tower": "it has no images",
    "job: Hits of the image cache: hits": "it has no images",
    "job: Stored images: images": "it has no images",
    "operator: Failed groups by reason: {{reason}}": "no group fails",
}
# tests/integration/weights/test_pool.py has an engine of a pool.
QUERIES = [
    query
    for query in queries()
    if query.board != "pools" and not of_operator(query) and query.name not in EMPTY
]


@dataclass
class Watched:
    """task: the directory of the run's manifest, data and code."""

    laptop: Laptop
    prometheus: Prometheus
    task: Path

    def until_at_work(self, *alerts: str) -> None:
        """Before a fault, so that it is the fault that makes the alerts fire."""
        self.laptop.until_step(self.laptop.step() + 2)
        self.prometheus.until_quiet(*alerts)

    def hang_engine(self, hanging: ExitStack) -> bool:
        """Freeze the engine while the trainer has all that its next step needs. False: it could not
        be seen in that moment.
        """
        with self.frozen("trainer"):
            time.sleep(SETTLED + 2)  # two scrapes more
            whole = bool(self.prometheus.query(WHOLE_BATCH))
            if whole:
                hanging.enter_context(self.frozen("engine"))
        return whole

    @contextmanager
    def frozen(self, role: str) -> Iterator[None]:
        self.laptop.kill(role, signal.SIGSTOP)
        try:
            yield
        finally:
            self.laptop.kill(role, signal.SIGCONT)

    @contextmanager
    def sick(self, function: str) -> Iterator[None]:
        """Make a function of sick.py sick inside the `with` block."""
        file = self.task / function
        file.touch()
        try:
            yield
        finally:
            file.unlink()


def configuration(run: Path, rules: Path) -> dict[str, Any]:
    """Prometheus as docs/monitoring.md configures it, with shorter times."""
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
    shutil.copy(Path(__file__).with_name("sick.py"), task)
    rules = directory / "rules.yaml"
    rules.write_text(hastened(RULES.read_text(), waits="0s", windows=WINDOWS))
    laptop = Laptop(task, directory / "run", *SETTINGS)
    with Prometheus(directory, configuration(laptop.directory, rules)) as prometheus:
        try:
            laptop.start()
            laptop.until_step(4)
            yield Watched(laptop, prometheus, task)
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
    """The engine counts as gone, because the trainer cannot give it weights; it comes back."""
    watched.until_at_work("SluiceNoEngine")
    with watched.frozen("worker"):
        labels = watched.prometheus.until_firing("SluiceNoEngine")
    assert (labels["namespace"], labels["job"]) == ("default", "quickstart")
    watched.prometheus.until_quiet("SluiceNoEngine")


def test_a_trainer_that_is_frozen(watched: Watched) -> None:
    watched.until_at_work("SluiceNoProgress")
    trainer = watched.laptop.find("trainer")
    with watched.frozen("trainer"):
        watched.prometheus.until_firing("SluiceNoProgress")
    watched.prometheus.until_quiet("SluiceNoProgress")
    assert watched.laptop.find("trainer") == trainer


def test_an_engine_that_hangs_in_an_update(watched: Watched) -> None:
    """The update leaves it behind, and it gets the weights once it answers again. It hangs while
    it has nothing to generate: else the trainer would wait for its samples, and not for it.
    """
    watched.until_at_work("SluiceEngineBehind")
    with ExitStack() as hanging:
        while not watched.hang_engine(hanging):
            watched.laptop.until_step(watched.laptop.step() + 1)
        labels = watched.prometheus.until_firing("SluiceEngineBehind")
    assert labels["replica"] == "0"
    watched.prometheus.until_quiet("SluiceEngineBehind")


@pytest.mark.parametrize(
    ("function", "alerts"),
    [
        pytest.param("reward", ("SluiceRewardsEqual", "SluiceRewardCollapsed"), id="reward"),
        pytest.param("hook", ("SluiceLogprobMismatch",), id="log-probs"),
        pytest.param("loss", ("SluiceEntropyCollapsed",), id="loss"),
    ],
)
def test_sick_code_fires_its_alerts(
    watched: Watched, function: str, alerts: tuple[str, ...]
) -> None:
    watched.until_at_work(*alerts)
    with watched.sick(function):
        for alert in alerts:
            watched.prometheus.until_firing(alert)
    watched.prometheus.until_quiet(*alerts)


def test_every_query_of_every_panel_answers(watched: Watched) -> None:
    """In one test, since they all ask for the same moment: that the last fault is over."""
    silent = [query.name for query in QUERIES if not answered(watched.prometheus, query)]
    assert silent == []


def answered(prometheus: Prometheus, query: PanelQuery) -> bool:
    expr = query.filled(namespace=".*", job="quickstart", interval="1m")
    return bool(prometheus.query(expr))


def test_left_out_queries_still_exist() -> None:
    assert EMPTY.keys() <= {query.name for query in queries()}
