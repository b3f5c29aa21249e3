"""Plots as SVG or PNG, from functions that draw on matplotlib axes.

A plot shows its values on hover without a script: transparent areas (`hover`) become elements with
a `<title>`.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

# Draws on matplotlib axes. A plot without data is left out.
Draw = Callable[[Any], None]
_SVG = "http://www.w3.org/2000/svg"
# matplotlib writes an artist's gid as the id of its element, which cannot contain line ends.
_HOVER, _NEWLINE = "hover: ", " | "
_MOST_AREAS = 200


def svg(draw: Draw, size: tuple[float, float] = (5.6, 3.2)) -> str:
    """Return an `<svg>` element, empty if there is no data. `size` is in inches."""
    figure, text = _figure(draw, size), io.StringIO()
    if not figure.axes[0].has_data():
        return ""
    figure.savefig(
        text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
    )
    return _titled(text.getvalue())


def hover(axes: Any, courses: Mapping[str, Mapping[int, float]]) -> None:
    """Show the values of each step under the pointer.

    `courses` maps a name to values by step. A long run gets areas for a subset of its steps.
    """
    steps = sorted({step for course in courses.values() for step in course})
    steps = steps[:: -(-len(steps) // _MOST_AREAS) or 1]
    edges = [(before + after) / 2 for before, after in pairwise(steps)]
    lefts, rights = [steps[0], *edges] if steps else [], [*edges, steps[-1]] if steps else []
    for step, left, right in zip(steps, lefts, rights, strict=True):
        values = [f"{name} {c[step]:.4g}" for name, c in courses.items() if step in c]
        axes.axvspan(
            left - 0.5 * (left == right),
            right + 0.5 * (left == right),
            facecolor="none",
            edgecolor="none",
            gid=_HOVER + _NEWLINE.join([f"step {step}", *values]),
        )


def _titled(picture: str) -> str:
    """Return the bare `<svg>` element, with a `<title>` in each hover area."""
    for prefix, name in (("", _SVG), ("xlink", "http://www.w3.org/1999/xlink")):
        ElementTree.register_namespace(prefix, name)
    root = ElementTree.fromstring(picture)  # noqa: S314 - matplotlib wrote it
    for element in root.iter(f"{{{_SVG}}}g"):
        if element.get("id", "").startswith(_HOVER):
            title = ElementTree.Element(f"{{{_SVG}}}title")
            title.text = element.attrib.pop("id").removeprefix(_HOVER).replace(_NEWLINE, "\n")
            element.set("class", "hover")
            element.insert(0, title)
    return ElementTree.tostring(root, encoding="unicode")


def png(draw: Draw, path: Path) -> None:
    _figure(draw, (6.4, 3.6)).savefig(path, dpi=120)


def legend_above(axes: Any, handles: Any = None, columns: int = 3) -> None:
    """Draw the legend above the axes, so that it covers no curve."""
    handles = axes.get_legend_handles_labels()[0] if handles is None else handles
    axes.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        borderaxespad=0,
        ncols=max(1, min(len(handles), columns)),
        frameon=False,
        fontsize="small",
        handlelength=1.2,
        columnspacing=1.2,
    )


def _figure(draw: Draw, size: tuple[float, float]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    draw(axes)
    return figure
