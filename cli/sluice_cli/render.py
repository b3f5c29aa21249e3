"""`sluice render`: the objects that a job starts with, as YAML."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from sluice.api import load_job


def render_file(path: Path, overrides: list[str]) -> str:
    from sluice_operator.plan.manifests.render import render_all

    return to_yaml(render_all(load_job(path, overrides)))


def to_yaml(documents: list[dict[str, Any]]) -> str:
    yaml = YAML()
    yaml.default_flow_style = False
    yaml.width = 120
    yaml.representer.ignore_aliases = lambda _: True
    text = io.StringIO()
    yaml.dump_all(documents, text)
    return text.getvalue()
