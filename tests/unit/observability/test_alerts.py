"""Rules checked by promtool: they are valid, and each alert fires and resolves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.boards import RULES, metrics
from tests.prometheus import promtool, rule_groups
from tests.tools import ROOT
from tests.unit.docs.test_docs import anchors
from tests.unit.observability.alert_cases import CASES, Case

RECORDED, ALERTS = (group["rules"] for group in rule_groups(RULES.read_text()))
BY_NAME = {rule["alert"]: rule for rule in ALERTS}


def document(case: Case) -> dict[str, Any]:
    """Return a file for `promtool test rules`."""
    labels = {
        "alertname": case.alert,
        "alertstate": "firing",
        "severity": BY_NAME[case.alert]["labels"]["severity"],
        **case.labels,
    }
    text = ", ".join(f'{name}="{value}"' for name, value in labels.items())
    expected = {case.quiet: [], case.firing: [{"labels": f"ALERTS{{{text}}}", "value": 1}]}
    expr = f'ALERTS{{alertname="{case.alert}",alertstate="firing"}}'
    return {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {"series": name, "values": values} for name, values in case.series.items()
                ],
                "promql_expr_test": [
                    {"expr": expr, "eval_time": f"{minute}m", "exp_samples": samples}
                    for minute, samples in {**expected, case.resolved: []}.items()
                ],
            }
        ],
    }


def test_the_rules_are_valid() -> None:
    checked = promtool("check", "rules", RULES)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.alert)
def test_an_alert_fires_by_its_fault_and_resolves(case: Case, tmp_path: Path) -> None:
    (tmp_path / "test.yaml").write_text(json.dumps(document(case)))
    tested = promtool("test", "rules", tmp_path / "test.yaml")
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_every_alert_has_a_case() -> None:
    assert {case.alert for case in CASES} == BY_NAME.keys()


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    page = ROOT / "docs" / "runbooks.md"
    urls = [rule["annotations"]["runbook_url"].partition("#") for rule in ALERTS]
    assert {url for url, _, _ in urls} == {
        "https://github.com/sluice-dev/sluice/blob/main/docs/runbooks.md"
    }
    assert {fragment for _, _, fragment in urls} <= anchors(page)
    assert {name for name in anchors(page) if name.startswith("sluice")} == {
        name.lower() for name in BY_NAME
    }


def test_a_rule_uses_only_what_is_recorded_before_it() -> None:
    recorded: set[str] = set()
    for rule in [*RECORDED, *ALERTS]:
        uses = {name for name in metrics(rule["expr"]) if name.startswith("namespace_job")}
        assert uses <= recorded | {rule.get("record")}, rule
        recorded.add(rule.get("record", ""))
