"""Values: what is refused and with which words, and that every one is described."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.helm import CHART, helm, load
from tests.tools import ROOT

START, END = "<!-- values -->\n", "<!-- end of values -->\n"

UPGRADE = "helm upgrade sluice charts/sluice --namespace sluice-system --reset-then-reuse-values"
# Last part of a path in the schema -> what the schema knows that the chart's own values do not say.
MORE = {
    "secretRef": {"name"},
    "": {"global", "enabled"},
    "resources": {"requests", "limits"},
    "workerResources": {"requests", "limits"},
}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("wachNamespaces={a}", "Additional property wachNamespaces is not allowed"),
        ("watchNamespaces=a", "watchNamespaces: Invalid type. Expected: array, given: string"),
        ("watchNamespaces={Team_A}", "watchNamespaces.0: Does not match pattern"),
        ("watchNamespaces={a,a}", "watchNamespaces: array items[0,1] must be unique"),
        ("replicas=two", "replicas: Invalid type. Expected: integer, given: string"),
        ("workers=0", "workers: Must be greater than or equal to 1"),
        ("lease.seconds=1", "lease.seconds: Must be greater than or equal to 3"),
        ("logFormat=xml", "logFormat: logFormat must be one of the following"),
        ("images.operator.digest=123abc", "images.operator.digest: Does not match pattern"),
        ("images.trainer.version=1", "images.trainer: Additional property version is not allowed"),
        ("images.operator.repository=a/b:1", "images.operator.repository: Does not match pattern"),
        ("extraArgs={workers}", "extraArgs.0: Does not match pattern"),
        (
            "jobDefaults.trainer.gpus=8",
            "jobDefaults.trainer: Additional property gpus is not allowed",
        ),
        (
            "admissionPolicy.allow.hostPaths={mnt}",
            "admissionPolicy.allow.hostPaths.0: Does not match pattern",
        ),
        (
            "metrics.podMonitor.interval=often",
            "metrics.podMonitor.interval: Does not match pattern",
        ),
        (
            "networkPolicy.egress.apiServerCIDRs={10.0.0.1}",
            "apiServerCIDRs.0: Does not match pattern",
        ),
        (
            "podDisruptionBudget.maxUnavailable=half",
            "podDisruptionBudget.maxUnavailable: Must validate",
        ),
    ],
)
def test_wrong_values_are_refused_with_their_name(settings: str, message: str) -> None:
    done = helm("template", "sluice", CHART, "--set", settings)
    assert done.returncode != 0
    assert message in done.stderr.replace("'", "")


def test_the_chart_may_be_part_of_another() -> None:
    """Helm hands `global` to subcharts, and conditions of dependencies are among their values."""
    done = helm("template", "sluice", CHART, "--set", "global.storageClass=x,enabled=true")
    assert done.returncode == 0, done.stderr


def test_every_object_of_the_schema_is_strict_and_knows_the_same_values_as_the_chart() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = load((CHART / "values.yaml").read_text())
    assert schema["properties"].keys() - values.keys() == {"global", "enabled"}
    for path, node, value in walk(schema, values, schema["definitions"], ""):
        assert node["additionalProperties"] is False, path
        expected = MORE.get(path.rpartition(".")[2], set())
        expected = {"claims"} if path == ".resources" else expected
        assert node["properties"].keys() - value.keys() == expected, path
        assert value.keys() <= node["properties"].keys(), path


def walk(node: Any, value: Any, definitions: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """Objects of the schema with fixed properties, each with its default value."""
    if "$ref" in node:
        node = definitions[node["$ref"].rpartition("/")[2]]
    if "properties" in node and isinstance(value, dict):
        yield path, node, value
        for name, inner in node["properties"].items():
            if name in value:
                yield from walk(inner, value[name], definitions, f"{path}.{name}")


def test_the_readme_describes_every_value() -> None:
    readme = CHART / "README.md"
    before, _, rest = readme.read_text().partition(START)
    _, _, after = rest.partition(END)
    rows = [f"| `{row.name}` | {row.default} | {row.text} |\n" for row in described()]
    table = "".join(["\n| value | default | meaning |\n|---|---|---|\n", *rows, "\n"])
    expected = f"{before}{START}{table}{END}{after}"
    if os.environ.get("SLUICE_UPDATE_GOLDEN"):
        readme.write_text(expected)
    assert readme.read_text() == expected, "SLUICE_UPDATE_GOLDEN=1 writes the table anew"


def test_every_value_has_a_description() -> None:
    names = [row.name for row in described()]
    leaves = list(leaves_of(load((CHART / "values.yaml").read_text()), ""))
    assert [
        leaf for leaf in leaves if not any(f"{leaf}.".startswith(f"{name}.") for name in names)
    ] == []


def leaves_of(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from leaves_of(inner, f"{path}.{name}" if path else name)
    else:
        yield path


@dataclass
class Row:
    name: str
    default: str
    text: str


def described() -> Iterator[Row]:
    """Values below a comment `# -- ...`, which may go on over several lines, as helm-docs reads
    them."""
    text = (CHART / "values.yaml").read_text()
    values = load(text)
    parents: list[str] = []
    comment = ""
    for line in text.splitlines():
        if remark := re.match(r" *# (-- )?(.*)", line):
            comment = remark[2] if remark[1] else f"{comment} {remark[2]}" if comment else ""
        elif key := re.match(r"( *)([A-Za-z]+):", line):
            parents = [*parents[: len(key[1]) // 2], key[2]]
            if comment:
                yield Row(".".join(parents), default(values, parents), comment)
            comment = ""
        else:
            comment = ""


def default(values: Any, path: list[str]) -> str:
    for name in path:
        values = values[name]
    return f"`{json.dumps(values)}`".replace("|", "\\|")


def test_every_page_upgrades_by_the_same_command() -> None:
    """Other flags keep old defaults, or forget values that somebody has set."""
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", CHART / "README.md"]
    commands = [
        line.strip()
        for page in pages
        for line in page.read_text().splitlines()
        if line.strip().startswith("helm upgrade ")
    ]
    assert commands
    assert [line for line in commands if not line.startswith(UPGRADE)] == []
