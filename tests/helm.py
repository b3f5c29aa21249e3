"""The chart as helm renders it."""

from __future__ import annotations

import copy
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from tests.tools import ROOT, tool

CHART = ROOT / "charts" / "sluice"
VALUES = ROOT / "tests" / "unit" / "chart" / "values"
Object = dict[str, Any]


def load(text: str) -> Any:
    return YAML(typ="safe").load(text)


def helm(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([tool("helm"), *arguments], capture_output=True, text=True)


def template(values: str = "defaults", *arguments: str, release: str = "sluice") -> str:
    """Manifests that an installation into the namespace sluice-system would apply."""
    file = VALUES / f"{values}.yaml"
    done = helm(
        "template", release, CHART, "--namespace", "sluice-system", "--values", file, *arguments
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def objects(values: str = "defaults", *arguments: str) -> list[Object]:
    return copy.deepcopy(_objects(values, *arguments))


@cache  # a second of CRDs
def _objects(values: str, *arguments: str) -> list[Object]:
    documents = YAML(typ="safe").load_all(template(values, *arguments))
    return [document for document in documents if document]


def find_object(documents: list[Object], kind: str, name: str = "") -> Object:
    (match,) = [
        document
        for document in documents
        if document["kind"] == kind and name in ("", document["metadata"]["name"])
    ]
    return match


def environment(documents: list[Object]) -> dict[str, str]:
    """Variables of the operator's container, without those that only a running pod knows."""
    (container,) = find_object(documents, "Deployment")["spec"]["template"]["spec"]["containers"]
    return {
        variable["name"]: variable["value"] for variable in container["env"] if "value" in variable
    }
