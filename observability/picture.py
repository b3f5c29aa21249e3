r"""Draw a dashboard from its JSON and a Prometheus server, for the documentation.

    python -m observability.picture http://127.0.0.1:9090 job docs/images/dashboard-job.png \
        --job quickstart --minutes 10

The picture shows which panels exist and their data; Grafana draws them better.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import time
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from observability.dashboards import documents

_SAMPLES = 240
_COLUMNS = 24
_INCHES_BY_COLUMN, _INCHES_BY_LINE = 0.62, 0.36
# Height of the labels under an axis.
_AXIS_INCHES = 0.2
_COLORS = {
    "green": "#56a64b",
    "dark-green": "#37872d",
    "orange": "#ff780a",
    "red": "#e02f44",
    "blue": "#3274d9",
    "purple": "#a352cc",
    "text": "#8e8e8e",
}
_UNITS = {"s": " s", "percentunit": " %", "bytes": "B", "binBps": "B/s", "cps": "/s"}
# (legend, minutes relative to the end, values)
Series = tuple[str, list[float], list[float]]


@dataclass(frozen=True, slots=True)
class Source:
    """A Prometheus server, and the jobs or pools and the time range to draw.

    `end` is in seconds since 1970.
    """

    url: str
    namespace: str
    job: str
    pool: str
    end: float
    minutes: float

    def series(self, target: dict[str, Any]) -> list[Series]:
        values = {"namespace": self.namespace, "job": self.job, "pool": self.pool}
        values["__rate_interval"] = "1m"
        expr = re.sub(r"\$(\w+)", lambda match: values[match[1]], target["expr"])
        start = self.end - 60 * self.minutes
        step = max(60 * self.minutes / _SAMPLES, 1)
        query = {"query": expr, "start": start, "end": self.end, "step": step}
        url = f"{self.url}/api/v1/query_range?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=60) as answer:  # noqa: S310 - of the command line
            result = json.load(answer)["data"]["result"]
        return [_series(row, target["legendFormat"], self.end) for row in result]


def _series(result: dict[str, Any], legend: str, end: float) -> Series:
    labels = result["metric"]
    text = re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), legend)
    moments = [(float(at) - end) / 60 for at, _ in result["values"]]
    return text, moments, [float(value) for _, value in result["values"]]


def draw(board: dict[str, Any], source: Source) -> Figure:
    """Draw all panels at their positions in the dashboard's grid."""
    lines = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"])
    height = lines * _INCHES_BY_LINE + 0.6
    figure = Figure(figsize=(_COLUMNS * _INCHES_BY_COLUMN, height), dpi=72, facecolor="#f4f5f5")
    figure.text(0.012, 1 - 0.3 / height, _title(board, source), fontsize=14, va="center")
    for panel in board["panels"]:
        at = panel["gridPos"]
        left, width = at["x"] / _COLUMNS, at["w"] / _COLUMNS
        top = 1 - (0.6 + at["y"] * _INCHES_BY_LINE) / height
        tall = at["h"] * _INCHES_BY_LINE / height
        if panel["type"] == "row":
            figure.text(left + 0.012, top - tall / 2, panel["title"], fontsize=11, va="center")
            continue
        padding = 0.55 * _INCHES_BY_LINE / height
        box = (left + 0.035, top - tall + 1.6 * padding, width - 0.045, tall - 3.4 * padding)
        axes = figure.add_axes(box)
        _panel(axes, panel, source)
    return figure


def _title(board: dict[str, Any], source: Source) -> str:
    return f"{board['title']} (the last {source.minutes:g} minutes)"


def _panel(axes: Axes, panel: dict[str, Any], source: Source) -> None:
    axes.set_title(panel["title"], fontsize=9, loc="left")
    axes.tick_params(labelsize=7)
    courses = [series for target in panel["targets"] for series in source.series(target)]
    if panel["type"] == "stat":
        _number(axes, panel, courses)
    elif panel["type"] == "table":
        _table(axes, panel, source)
    elif not courses:
        _empty(axes)
    elif panel["type"] == "state-timeline":
        _states(axes, panel, courses)
    else:
        _curves(axes, panel, courses)


def _empty(axes: Axes) -> None:
    axes.set_axis_off()
    axes.text(0.5, 0.5, "no data", ha="center", va="center", color="#8e8e8e", fontsize=9)


def _curves(axes: Axes, panel: dict[str, Any], courses: Sequence[Series]) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    unit = defaults["unit"]
    scale = 100 if unit == "percentunit" else 1
    stacked = defaults.get("custom", {}).get("stacking", {}).get("mode") == "normal"
    if stacked:
        moments = sorted({at for _, times, _ in courses for at in times})
        tables = [(name, dict(zip(at, values, strict=True))) for name, at, values in courses]
        rows = [[scale * table.get(at, 0.0) for at in moments] for _, table in tables]
        axes.stackplot(moments, rows, labels=[name for name, _ in tables], alpha=0.7)
    else:
        for name, at, values in courses:
            axes.plot(at, [scale * value for value in values], label=name, linewidth=1)
        bottom, top = axes.get_ylim()
        for step in defaults["thresholds"]["steps"][1:]:
            if bottom <= scale * step["value"] <= top:
                color = _COLORS[step["color"]]
                axes.axhline(scale * step["value"], color=color, linewidth=0.8, linestyle="--")
    axes.set_xlim(-_span(courses), 0)
    axes.grid(color="#e5e5e5", linewidth=0.5)
    axes.yaxis.set_major_formatter(lambda value, _: shown(value / scale, unit))
    _legend_below(axes)


def _legend_below(axes: Axes) -> None:
    """Put the legend below the axes, which shrink by its height, so that it covers no curve."""
    figure, box = axes.figure, axes.get_position()
    below = box.y0 - _AXIS_INCHES * figure.dpi / figure.bbox.height
    legend = axes.legend(
        fontsize=6.5,
        loc="lower left",
        bbox_to_anchor=(box.x0, below),
        bbox_transform=figure.transFigure,
        ncols=3,
        frameon=False,
        borderaxespad=0,
        borderpad=0,
        handlelength=1.2,
        columnspacing=1.2,
    )
    tall = legend.get_window_extent().height / figure.bbox.height
    axes.set_position((box.x0, box.y0 + tall, box.width, box.height - tall))


def _span(courses: Sequence[Series]) -> float:
    return max(-at[0] for _, at, _ in courses) or 1.0


def _number(axes: Axes, panel: dict[str, Any], courses: Sequence[Series]) -> None:
    axes.set_axis_off()
    defaults = panel["fieldConfig"]["defaults"]
    if not courses:
        return _empty(axes)
    value = courses[0][2][-1]
    text = shown(value, defaults["unit"])
    axes.text(0.5, 0.4, text, ha="center", va="center", fontsize=20, color=_color(defaults, value))
    return None


def _color(defaults: dict[str, Any], value: float) -> str:
    steps = defaults["thresholds"]["steps"]
    reached = [step for step in steps if step["value"] is None or step["value"] <= value]
    return _COLORS[reached[-1]["color"]]


def _words(mappings: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {code: word for mapping in mappings for code, word in mapping["options"].items()}


def _states(axes: Axes, panel: dict[str, Any], courses: Sequence[Series]) -> None:
    words = _words(panel["fieldConfig"]["defaults"]["mappings"])
    for row, (_, at, values) in enumerate(courses):
        colors = [_COLORS[words[str(int(value))]["color"]] for value in values]
        width = (at[-1] - at[0]) / max(len(at) - 1, 1) or 0.1
        axes.barh([row] * len(at), [width] * len(at), left=at, color=colors, height=0.7)
    axes.set_yticks(range(len(courses)), [name for name, _, _ in courses])
    axes.set_xlim(-_span(courses), 0)


def _table(axes: Axes, panel: dict[str, Any], source: Source) -> None:
    """Draw one row per job with the latest value of each column."""
    axes.set_axis_off()
    overrides = {
        override["matcher"]["options"]: {
            item["id"]: item["value"] for item in override["properties"]
        }
        for override in panel["fieldConfig"]["overrides"]
    }
    columns = [target["legendFormat"] for target in panel["targets"]]
    rows: dict[str, dict[str, str]] = {}
    for target in panel["targets"]:
        title = target["legendFormat"]
        words = _words(overrides[title].get("mappings", []))
        labelled = target | {"legendFormat": "{{namespace}}/{{job}}"}
        for name, _, values in source.series(labelled):
            word = words.get(str(int(values[-1])), {}).get("text") if words else None
            text = word or shown(values[-1], overrides[title]["unit"])
            rows.setdefault(name, {})[title] = text
    cells = [[name, *(row.get(title, "") for title in columns)] for name, row in rows.items()]
    if cells:
        axes.table(cells, colLabels=["Job", *columns], loc="upper center").scale(1, 1.4)


def shown(value: float, unit: str) -> str:
    """Format a value such as `1.2kB` or `37 %`."""
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    for bound, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= bound:
            return f"{value / bound:.3g}{letter}{_UNITS.get(unit, '').strip()}"
    return f"{value:.3g}{_UNITS.get(unit, '')}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="observability.picture")
    parser.add_argument("url")
    parser.add_argument("dashboard", choices=sorted(documents()))
    parser.add_argument("picture", type=Path)
    parser.add_argument("--namespace", default=".*")
    parser.add_argument("--job", default=".*")
    parser.add_argument("--pool", default=".*")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--end", type=float, default=time.time(), help="seconds since 1970")
    options = parser.parse_args()
    mpl.use("Agg")
    chosen = (options.namespace, options.job, options.pool)
    source = Source(options.url, *chosen, options.end, options.minutes)
    _save(draw(documents()[options.dashboard], source), options.picture)


def _save(figure: Figure, path: Path) -> None:
    """Save with few colours, at a third of the size."""
    buffer = io.BytesIO()
    figure.savefig(buffer)
    Image.open(buffer).convert("RGB").quantize(64).save(path, optimize=True)


if __name__ == "__main__":
    main()
