"""report.html: a run on one page that needs no server, with plots as inline SVG.

Each sampled episode of an agent has a page next to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sluice.telemetry import health, run_directory
from sluice.telemetry.goodput import Goodput, tail_of
from sluice.telemetry.headline import headline
from sluice.telemetry.report import answers, episodes, facts
from sluice.telemetry.report.drawing import png, svg
from sluice.telemetry.report.episodes import EpisodePage
from sluice.telemetry.report.figures import StepRecords, draw_headline, figures
from sluice.telemetry.report.timeline import WIDTH, shares, timeline
from sluice.telemetry.run_warnings import ordered
from sluice.telemetry.summary import evaluation_means, held_out_rows


def write_report(directory: Path, title: str) -> Path:
    """Write report.html, and the headline plot as a PNG to share, such as reward.png."""
    import jinja2
    import matplotlib as mpl

    mpl.use("Agg")
    steps = run_directory.by_step(directory / run_directory.METRICS)
    evaluations = evaluation_means(directory)
    name, _ = headline(steps.values())
    draw = partial(draw_headline, steps=steps, evaluations=evaluations)
    png(draw, directory / f"{name.lower().replace(' ', '_')}.png")
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("sluice.telemetry.report", ""),
        autoescape=True,
        trim_blocks=True,
    )
    page = environment.get_template("page.html.j2")
    path = directory / "report.html"
    pages = episodes.pages(directory)
    contents = _contents(directory, steps, evaluations)
    path.write_text(page.render(title=title, episodes=pages, **contents))
    _write_episodes(directory / episodes.DIRECTORY, pages, environment)
    return path


def _write_episodes(directory: Path, pages: Sequence[EpisodePage], environment: Any) -> None:
    """Write the pages of episodes, and remove those of an earlier report."""
    for old in directory.glob("*.html"):
        old.unlink()
    if not pages:
        return
    directory.mkdir(exist_ok=True)
    template = environment.get_template("episode.html.j2")
    for page in pages:
        (directory / f"{page.name}.html").write_text(template.render(page=page))


def _contents(
    directory: Path, steps: StepRecords, evaluations: list[tuple[int, float]]
) -> dict[str, Any]:
    """Return the template's variables. The template escapes text; the SVG is trusted."""
    summary = facts.summary_of(directory)
    held_out = held_out_rows(directory)
    drawn = [(figure, svg(figure.draw)) for figure in figures(steps, evaluations, held_out)]
    seconds, states = (summary.get(name) or {} for name in ("goodput_seconds", "device_seconds"))
    goodput = Goodput(seconds, tail_of(states))
    columns, rows = answers.newest(directory)
    warnings = ordered([*facts.warnings(summary), *health.warnings(steps.values())])
    return {
        "outcome": facts.outcome(summary),
        "books": facts.group_facts(summary),
        "settings": facts.settings(directory),
        "places": facts.run_facts(directory, steps),
        "troubles": facts.operator_warnings(directory),
        "warnings": [warning for warning in warnings if warning.active],
        "past_warnings": [warning for warning in warnings if not warning.active],
        "figures": [
            {"title": figure.title, "text": figure.text, "svg": picture}
            for figure, picture in drawn
            if picture
        ],
        "goodput": shares(goodput),
        "timeline": timeline(directory),
        "chart_width": WIDTH,
        "histories": answers.histories(directory),
        "columns": columns,
        "rows": rows,
    }
