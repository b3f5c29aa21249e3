"""Dashboards and rules as the chart installs them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.boards import DASHBOARDS, RULES
from tests.helm import CHART, find_object, helm, objects
from tests.prometheus import rule_groups

PATH = "metrics.prometheusRule"


def installed(*settings: str) -> list[dict[str, Any]]:
    """Rules of the PrometheusRule, with additional values."""
    chosen = [
        part for setting in (f"{PATH}.enabled=true", *settings) for part in ("--set", setting)
    ]
    rule = find_object(objects("defaults", *chosen), "PrometheusRule")
    return [recorded for group in rule["spec"]["groups"] for recorded in group["rules"]]


def alert(name: str, *settings: str) -> dict[str, Any]:
    (match,) = [candidate for candidate in installed(*settings) if candidate.get("alert") == name]
    return match


def test_nothing_of_it_is_made_unless_it_is_asked_for() -> None:
    kinds = {manifest["kind"] for manifest in objects()}
    assert not kinds & {"PrometheusRule", "GrafanaDashboard"}
    assert not [manifest for manifest in objects() if manifest["kind"] == "ConfigMap"]


def test_each_dashboard_is_a_config_map_that_grafanas_sidecar_finds() -> None:
    maps = [
        manifest
        for manifest in objects("defaults", "--set", "metrics.dashboards.enabled=true")
        if manifest["kind"] == "ConfigMap"
    ]
    assert len(maps) == len(DASHBOARDS) == 5
    for config_map, path in zip(maps, DASHBOARDS, strict=True):
        metadata = config_map["metadata"]
        assert metadata["labels"]["grafana_dashboard"] == "1"
        assert metadata["annotations"]["grafana_folder"] == "Sluice"
        assert json.loads(config_map["data"][f"sluice-{path.name}"]) == json.loads(path.read_text())


def test_the_grafana_operator_is_told_of_the_same_config_maps() -> None:
    manifests = objects("everything")
    boards = [manifest for manifest in manifests if manifest["kind"] == "GrafanaDashboard"]
    assert len(boards) == len(DASHBOARDS)
    for board in boards:
        reference = board["spec"]["configMapRef"]
        config_map = find_object(manifests, "ConfigMap", reference["name"])
        assert reference["key"] in config_map["data"]
        assert config_map["metadata"]["annotations"]["grafana_folder"] == board["spec"]["folder"]


def test_the_rules_are_those_of_the_file() -> None:
    assert installed() == [
        rule for group in rule_groups(RULES.read_text()) for rule in group["rules"]
    ]


def test_recording_rules_stay_without_the_alerts() -> None:
    kept = installed(f"{PATH}.alerts=false")
    assert kept
    assert all("record" in rule for rule in kept)


def test_a_single_alert_is_switched_off() -> None:
    names = {
        rule.get("alert") for rule in installed(f"{PATH}.overrides.SluiceRestarts.enabled=false")
    }
    assert "SluiceRestarts" not in names
    assert "SluiceNoProgress" in names


def test_a_single_alert_is_changed() -> None:
    before = alert("SluiceNoProgress")
    after = alert(
        "SluiceNoProgress",
        f"{PATH}.overrides.SluiceNoProgress.for=1h",
        f"{PATH}.overrides.SluiceNoProgress.labels.severity=page",
        f"{PATH}.alertLabels.team=research",
    )
    assert (before["for"], after["for"]) == ("5m", "1h")
    assert after["labels"] == {"severity": "page", "team": "research"}
    assert after["expr"] == before["expr"]


def test_runbooks_may_be_ones_own() -> None:
    changed = alert("SluiceNoEngine", f"{PATH}.runbookUrl=https://runbooks.example/sluice")
    url = changed["annotations"]["runbook_url"]
    assert url == "https://runbooks.example/sluice#sluicenoengine"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        pytest.param(
            "overrides.SluiceNoProgres.for=1h",
            "metrics.prometheusRule.overrides.SluiceNoProgres: no such alert; expected one of "
            "SluiceNoProgress, ",
            id="unknown alert",
        ),
        pytest.param("overrides.SluiceNoProgress.for=long", "Does not match pattern", id="no time"),
        pytest.param(
            "overrides.SluiceNoProgress.severity=page",
            "Additional property severity is not allowed",
            id="unknown field",
        ),
    ],
)
def test_a_wrong_change_is_refused_in_words(setting: str, message: str) -> None:
    done = helm(
        "template", "x", CHART, "--set", f"{PATH}.enabled=true", "--set", f"{PATH}.{setting}"
    )
    assert message in done.stderr
