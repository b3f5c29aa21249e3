"""The drawn dashboards of the documentation."""

from __future__ import annotations

import math
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure

from observability import picture
from observability.dashboards import documents

PANELS = [
    panel
    for board in documents().values()
    for panel in board["panels"]
    if panel["type"] == "timeseries"
]


def courses(panel: dict[str, Any]) -> list[picture.Series]:
    """Draw as many curves as a panel has queries, and more of them than fit next to each other."""
    moments = [-7 + i / 10 for i in range(70)]
    names = [target["legendFormat"] or "name" for target in panel["targets"]] * 3
    return [(name, moments, [math.sin(at) for at in moments]) for name in names]


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: str(panel["title"]))
def test_a_legend_covers_no_curve_and_stays_in_its_figure(panel: dict[str, Any]) -> None:
    figure = Figure(figsize=(5, 3), dpi=72)
    axes = figure.add_axes((0.1, 0.2, 0.85, 0.7))
    picture._curves(axes, panel, courses(panel))
    legend = axes.get_legend()
    assert legend is not None
    extent = legend.get_window_extent()
    assert not extent.overlaps(axes.get_window_extent())
    assert extent.y0 >= 0
    assert axes.get_position().height > 0.2
