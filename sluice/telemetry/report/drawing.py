"""From a function that draws on axes to a picture."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

Draw = Callable[[Any], None]
"""Draws on matplotlib axes. One that draws nothing has no picture."""


def svg(draw: Draw, size: tuple[float, float] = (5.6, 3.2)) -> str:
    """An `<svg>` element; empty where there is nothing to draw. size: inches."""
    figure, text = _figure(draw, size), io.StringIO()
    if not figure.axes[0].has_data():
        return ""
    figure.savefig(text, format="svg")
    return text.getvalue()[text.getvalue().index("<svg") :]


def png(draw: Draw, path: Path) -> None:
    _figure(draw, (6.4, 3.6)).savefig(path, dpi=120)


def legend_above(axes: Any, handles: Any = None, columns: int = 3) -> None:
    """A legend outside of the axes, where it lies over no curve."""
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
