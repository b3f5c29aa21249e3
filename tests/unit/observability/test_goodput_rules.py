"""Recording rules count devices and goodput like sluice/telemetry/goodput.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from observability.recording import CATEGORIES, GOODPUT
from sluice.telemetry.goodput import CATEGORIES as NAMES
from sluice.telemetry.goodput import Goodput
from tests.boards import RULES
from tests.prometheus import promtool

JOB = 'namespace="team",job="demo"'
COUNTERS = {
    "steps_redone": 5,
    "groups_filtered": 10,
    "groups_failed": 6,
    "groups_outdated": 4,
    "groups_trained": 60,
}
STEP = 45
# Seconds a minute by role and state.
APART = {
    "trainer/training": 12,
    "trainer/waiting": 18,
    "trainer/evaluating": 3,
    "trainer/publishing": 6,
    "trainer/saving": 2,
    "rollout/generating": 22,
    "rollout/tail": 8,
    "rollout/idle": 9,
    "rollout/synchronising": 6,
    "rollout/starting": 4,
    "rollout/restarting": 5,
}
COLOCATED = {key: value for key, value in APART.items() if key.startswith("trainer")}


def series(device_seconds: dict[str, int]) -> dict[str, str]:
    values = {f"sluice_buffer_{name}_total{{{JOB}}}": f"{n}x30" for name, n in COUNTERS.items()}
    values[f"sluice_buffer_step{{{JOB}}}"] = f"{STEP}x30"
    for key, rate in device_seconds.items():
        role, _, state = key.partition("/")
        labels = f'{JOB},member_role="{role}",state="{state}"'
        values[f"sluice_rendezvous_device_seconds_total{{{labels}}}"] = f"0+{rate}x30"
    return values


@pytest.mark.parametrize(
    ("device_seconds", "colocated"),
    [
        pytest.param(APART, False, id="devices of their own"),
        pytest.param(COLOCATED, True, id="shared devices"),
    ],
)
def test_the_rules_agree_with_the_code(
    device_seconds: dict[str, int], colocated: bool, tmp_path: Path
) -> None:
    goodput = Goodput.from_counters(device_seconds, COUNTERS, STEP, colocated=colocated)
    expected = {f'round(1e6 * {GOODPUT}{{job="demo"}})': 1e6 * goodput.ratio}
    for name in NAMES:
        seconds = goodput.seconds[name]
        expr = f'round(1e6 * (sum({CATEGORIES}{{category="{name}"}}) or vector(0)))'
        expected[expr] = 1e6 * seconds / 60
    tests = [
        {
            "expr": f"sum({expr})",
            "eval_time": "30m",
            "exp_samples": [{"labels": "{}", "value": round(value)}],
        }
        for expr, value in expected.items()
    ]
    values = [{"series": name, "values": text} for name, text in series(device_seconds).items()]
    case = {"interval": "1m", "input_series": values, "promql_expr_test": tests}
    document = {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [case]}
    (tmp_path / "test.yaml").write_text(json.dumps(document))
    tested = promtool("test", "rules", tmp_path / "test.yaml")
    assert tested.returncode == 0, tested.stdout + tested.stderr
