"""The roles' work over time, and what the devices' time went into."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from sluice.telemetry import run_directory
from sluice.telemetry.goodput import IN_TAILS, Goodput
from sluice.telemetry.report.drawing import legend_above

STATES = {
    "starting": "#fff176",
    "restarting": "#ffb300",
    "waiting": "#cfd8dc",
    "idle": "#eceff1",
    "generating": "#42a5f5",
    "tail": "#90caf9",
    "training": "#ef6c00",
    "publishing": "#8e24aa",
    "synchronising": "#ce93d8",
    "taking_turn": "#5c6bc0",
    "saving": "#6d4c41",
    "exporting": "#a1887f",
    "evaluating": "#26a69a",
    "unresponsive": "#e53935",
    "draining": "#f06292",
    "serving": "#c5e1a5",
}
CATEGORIES = {
    "trained": "#ef6c00",
    "generated": "#42a5f5",
    IN_TAILS: "#90caf9",
    "thrown_away": "#e53935",
    "waited": "#cfd8dc",
    "synchronised": "#8e24aa",
    "saved": "#6d4c41",
    "started": "#fff176",
    "restarted": "#ffb300",
}
_OTHER = "#9e9e9e"


def draw_timeline(axes: Any, directory: Path) -> None:
    """A bar for each role, coloured by what it did."""
    samples = list(run_directory.records(directory / run_directory.TIMELINE))
    names = sorted({name for sample in samples for name in sample["states"]}, reverse=True)
    start = samples[0]["time"] if samples else 0.0
    used: dict[str, Any] = {}
    for row, name in enumerate(names):
        for state, begin, end in spans(samples, name):
            color = STATES.get(state, _OTHER)
            bar = axes.barh(row, end - begin, left=begin - start, height=0.7, color=color)
            used.setdefault(state, bar)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("seconds")
    for state, bar in used.items():
        bar.set_label(state.replace("_", " "))
    legend_above(axes, list(used.values()), columns=8)


def draw_goodput(axes: Any, goodput: Goodput) -> None:
    """One bar: the shares of all device time."""
    total, left = goodput.total, 0.0
    parts = goodput.parts()
    for category in (name for name in CATEGORIES if name in parts):
        value = parts[category]
        if not total or value / total < 0.005:
            continue
        share, name = value / total, category.replace("_", " ")
        color = CATEGORIES[category]
        axes.barh(0, share, left=left, height=0.6, color=color, label=f"{name} {share:.0%}")
        left += share
    axes.set_yticks([])
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:.0%}")
    axes.set_xlabel("of all device seconds")
    legend_above(axes, columns=8)


def spans(samples: list[dict[str, Any]], name: str) -> list[tuple[str, float, float]]:
    """(state, begin, end) of one member, from samples of all members' states."""
    stretches: list[tuple[str, float, float]] = []
    for earlier, later in itertools.pairwise(samples):
        state = earlier["states"].get(name)
        if state is None:
            continue
        if stretches and stretches[-1][0] == state and stretches[-1][2] == earlier["time"]:
            stretches[-1] = (state, stretches[-1][1], later["time"])
        else:
            stretches.append((state, earlier["time"], later["time"]))
    return stretches
