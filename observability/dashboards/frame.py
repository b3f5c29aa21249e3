"""Common parts of all dashboards: variables, links, time range."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Literal

from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    VariableRefresh,
    VariableSort,
)

from observability.panels import SOURCE, Panel

DOCS = "https://github.com/sluice-dev/sluice/blob/main/docs"
TITLES = {
    "fleet": "Sluice / Fleet",
    "job": "Sluice / Job",
    "engines": "Sluice / Weights and engines",
    "pools": "Sluice / Pools",
    "operator": "Sluice / Operator and buffer",
}
TAG = "sluice"
# Series that each job, and each pool, has.
_SERIES = {
    "job": 'sluice_buffer_step{namespace=~"$namespace"}',
    "pool": 'up{namespace=~"$namespace",pool!=""}',
}


def frame(
    name: str,
    description: str,
    rows: Mapping[str, Sequence[Panel]],
    *,
    one: Literal["", "job", "pool"] = "",
    page: str = "monitoring.md",
) -> build.Dashboard:
    """Build a dashboard from its panels.

    Parameters
    ----------
    name
        Key of TITLES.
    description
        One sentence.
    rows
        Panels by heading, from left to right, 24 columns wide.
    one
        What the dashboard shows one of at a time.
    page
        Page of the documentation that explains it.

    """
    board = (
        build.Dashboard(TITLES[name])
        .uid(f"sluice-{name}")
        .description(description)
        .tags([TAG])
        .time("now-1h", "now")
        .refresh("30s")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(build.DatasourceVariable("datasource").label("Source").type("prometheus"))
        .with_variable(_variable("namespace", "Namespace", "sluice_buffer_step|rljob_info"))
    )
    if one:
        board.with_variable(_one(one))
    for link in _links(name, page):
        board.link(link)
    numbers = itertools.count(1)
    for heading, panels in rows.items():
        board.with_row(build.Row(heading).id(next(numbers)))
        for panel in panels:
            board.with_panel(panel.id(next(numbers)))
    return board


def _variable(name: str, label: str, metrics: str) -> build.QueryVariable:
    return (
        build.QueryVariable(name)
        .label(label)
        .datasource(SOURCE)
        .query(f'label_values({{__name__=~"{metrics}"}}, {name})')
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
    )


def _one(name: str) -> build.QueryVariable:
    return (
        build.QueryVariable(name)
        .label(name.capitalize())
        .datasource(SOURCE)
        .query(f"label_values({_SERIES[name]}, {name})")
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
    )


def _links(name: str, page: str) -> list[build.DashboardLink]:
    """Return links to the documentation, and to the dashboards, with variables and time."""
    others = [
        build.DashboardLink(title.removeprefix("Sluice / "))
        .type(DashboardLinkType.LINK)
        .url(f"/d/sluice-{other}")
        .icon("dashboard")
        .include_vars(True)
        .keep_time(True)
        for other, title in TITLES.items()
        if other != name
    ]
    docs = build.DashboardLink("Docs").type(DashboardLinkType.LINK).url(f"{DOCS}/{page}")
    runbooks = build.DashboardLink("Runbooks").type(DashboardLinkType.LINK)
    return [
        *others,
        docs.icon("doc").target_blank(True),
        runbooks.url(f"{DOCS}/runbooks.md").icon("doc").target_blank(True),
    ]
