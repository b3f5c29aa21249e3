"""Metrics that dashboards, rules and pages name are those that the code exports."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest

from sluice.engines.sglang.plugin.__main__ import PATH
from sluice.rewards.judging import judge
from sluice_buffer.serving.metrics import registry as buffer_registry
from sluice_operator.metrics import OperatorMetrics
from sluice_rendezvous.device_time import DeviceTime
from sluice_rendezvous.metrics import StateCollector
from sluice_rendezvous.registry import Registry
from sluice_rollout import metrics as rollout
from sluice_trainer.telemetry import metrics as trainer
from tests.boards import RULES, metrics, queries
from tests.prometheus import rule_groups
from tests.tools import ROOT
from tests.unit.buffer.buffer_tools import LocalBuffer, make_job

# Prefixes of what engines export; tests/integration/monitoring asks real ones.
ENGINES = ("sglang:", "vllm:")
PLUGINS = {"sluice_sglang", "sluice_vllm"}
PAGES = [
    ROOT / "docs" / name
    for name in ("metrics.md", "monitoring.md", "runbooks.md", "troubleshooting.md")
]
EXPRESSIONS = {query.name: query.expr for query in queries()}
RULES_BY_NAME = {
    rule.get("alert", rule.get("record")): rule["expr"]
    for group in rule_groups(RULES.read_text())
    for rule in group["rules"]
}


@dataclass
class Books:
    registry: Registry = field(default_factory=Registry)
    device_time: DeviceTime = field(default_factory=DeviceTime)


def names(registry: CollectorRegistry) -> set[str]:
    """Names of all series of a registry, including metrics that have no series yet."""
    families = re.findall(r"^# TYPE (\S+) (\S+)$", generate_latest(registry).decode(), re.MULTILINE)
    parts = {"histogram": ("_bucket", "_sum", "_count")}
    return {name + part for name, kind in families for part in parts.get(kind, ("",))}


def adapter_metrics() -> CollectorRegistry:
    """Return what sluice's plugin adds to the metrics of an engine of a pool."""
    registry = CollectorRegistry()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PATH))
        importlib.import_module("sluice_sglang.adapter_metrics").AdapterMetrics(
            pool=True, registry=registry
        )
    return registry


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Metrics of all roles: the real registries, the trainer's after a step that has all."""
    assert all((judge.REWARDS, rollout.REQUESTS)), "their metrics are in the common registry"
    directory = tmp_path_factory.mktemp("buffer")
    buffer = LocalBuffer(make_job(directory), directory / "storage")
    services = CollectorRegistry()
    services.register(StateCollector(Books()))
    trainer.LAST_STEP.record = dict.fromkeys(trainer.GAUGES, 0.0)
    registries = (
        REGISTRY,
        services,
        buffer_registry(lambda: buffer.stats),
        OperatorMetrics().registry,
        adapter_metrics(),
    )
    try:
        return {"ALERTS"}.union(*(names(registry) for registry in registries))
    finally:
        buffer.close()
        trainer.LAST_STEP.record = {}


def unknown(expr: str, exported: set[str]) -> set[str]:
    named = {name for name in metrics(expr) if not name.startswith(ENGINES)}
    return named - exported - RULES_BY_NAME.keys()


def test_a_query_of_a_panel_names_what_is_exported_or_recorded(exported: set[str]) -> None:
    wrong = {name: unknown(expr, exported) for name, expr in EXPRESSIONS.items()}
    assert {name: names for name, names in wrong.items() if names} == {}


def test_a_rule_names_what_is_exported_or_recorded(exported: set[str]) -> None:
    wrong = {name: unknown(expr, exported) for name, expr in RULES_BY_NAME.items()}
    assert {name: names for name, names in wrong.items() if names} == {}


def test_every_recorded_series_is_used() -> None:
    """Metrics that a panel, an alert or another rule reads."""
    used = set().union(*map(metrics, [*EXPRESSIONS.values(), *RULES_BY_NAME.values()]))
    recorded = {name for name in RULES_BY_NAME if name.startswith("namespace_job")}
    assert recorded - used == set()


def documented(text: str) -> Iterator[str]:
    """Full names of the metrics of a page. In a table `_reward` goes on from the name before it,
    by its role: `sluice_trainer_step`, `_reward`. One that ends in `...` is a prefix.
    """
    for line in text.splitlines():
        head = ""
        for name in re.findall(r"`((?:sluice_|rljob_|_)\w*)[^`]*`", line):
            if not name.startswith("_"):
                head = re.match(r"sluice_[a-z]+|[a-z]+", name)[0]  # type: ignore[index]
            if head:
                yield name if not name.startswith("_") else head + name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_what_is_exported(page: Path, exported: set[str]) -> None:
    families = {re.sub("_(bucket|sum|count)$", "", name) for name in exported} | exported
    named = set(documented(page.read_text())) - PLUGINS
    assert {name for name in named - families if not name.endswith("_")} == set()


def test_numbers_of_groups_that_also_fall_are_no_counters(exported: set[str]) -> None:
    assert {"sluice_buffer_groups_in_work", "sluice_buffer_groups_stored"} <= exported
