"""Dashboards: the files equal the code's output, and fit Grafana's schema."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from observability.__main__ import files
from tests.boards import DASHBOARDS, panels
from tests.helm import CHART
from tests.tools import ROOT

BOARDS = {path.stem: json.loads(path.read_text()) for path in DASHBOARDS}
PANELS = [(name, panel) for name, board in BOARDS.items() for panel in panels(board)]
DOCS = "https://github.com/sluice-dev/sluice/blob/main/"


def label(value: Any) -> str | None:
    return value["title"] if isinstance(value, dict) else value


def test_the_files_of_the_chart_equal_the_output_of_the_code() -> None:
    for name, text in files().items():
        assert (CHART / "files" / name).read_text() == text, f"{name}: make observability"
    assert {f"dashboards/{path.name}" for path in DASHBOARDS} == files().keys() - {"rules.yaml"}


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS.keys())
def test_a_dashboard_is_whole_by_grafanas_schema(board: dict[str, Any]) -> None:
    parsed = json.loads(json.dumps(Dashboard.from_json(board), cls=JSONEncoder))
    assert parsed == board


@pytest.mark.parametrize(("board", "panel"), PANELS, ids=label)
def test_a_panel_has_all_that_a_reader_needs(board: str, panel: dict[str, Any]) -> None:
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    defaults = panel["fieldConfig"]["defaults"]
    assert defaults["unit"]
    steps = defaults["thresholds"]["steps"]
    assert steps[0]["value"] is None
    values = [step["value"] for step in steps[1:]]
    assert values == sorted(values)
    for target in panel["targets"]:
        assert "$namespace" in target["expr"] or board in ("operator", "fleet")
        assert target["datasource"] == panel["datasource"]


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS.keys())
def test_panels_fill_their_rows_and_have_numbers(board: dict[str, Any]) -> None:
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


@pytest.mark.parametrize(("name", "board"), BOARDS.items(), ids=BOARDS.keys())
def test_variables_are_source_namespace_and_job_or_pool(name: str, board: dict[str, Any]) -> None:
    names = [variable["name"] for variable in board["templating"]["list"]]
    expected = ["datasource", "namespace", "pool" if name == "pools" else "job"]
    assert names == expected[: len(names)]
    used = set(re.findall(r"\$\{?(datasource|namespace|job|pool)\b", json.dumps(board["panels"])))
    assert used <= set(names)


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS.keys())
def test_links_lead_to_the_other_dashboards_and_to_the_docs(board: dict[str, Any]) -> None:
    urls = [link["url"] for link in board["links"]]
    others = {f"/d/{dashboard['uid']}" for dashboard in BOARDS.values()} - {f"/d/{board['uid']}"}
    assert {url for url in urls if url.startswith("/d/")} == others
    pages = [url.removeprefix(DOCS) for url in urls if url.startswith(DOCS)]
    assert len(pages) == 2
    assert [page for page in pages if not Path(ROOT, page).exists()] == []
