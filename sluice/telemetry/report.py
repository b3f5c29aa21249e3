"""report.html: a run on one page that needs no server. Plots are inline SVG."""

from __future__ import annotations

import html
import io
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sluice.telemetry import run_directory
from sluice.telemetry.headline import headline
from sluice.telemetry.health import findings
from sluice.telemetry.summary import evaluation_means

COLORS = {
    "waiting": "#cfd8dc",
    "idle": "#cfd8dc",
    "starting": "#fff59d",
    "generating": "#42a5f5",
    "training": "#ef6c00",
    "publishing": "#8e24aa",
    "saving": "#6d4c41",
    "evaluating": "#26a69a",
    "draining": "#f06292",
    "exporting": "#6d4c41",
    "serving": "#a5d6a7",
}
Records = dict[int, dict[str, Any]]


def write_report(directory: Path, title: str) -> Path:
    """Make report.html, and a picture for people who want to show it: reward.png, or what is
    learned instead.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    steps = run_directory.by_step(directory / run_directory.METRICS)
    evaluations = evaluation_means(directory)
    name, _ = headline(steps.values())
    plots = {
        name.capitalize(): lambda axes: _headline(axes, steps, evaluations),
        "KL and clipping": lambda axes: _lines(
            axes,
            steps,
            {
                "train/ppo_kl": "ppo_kl",
                "train/pg_clipfrac": "pg_clipfrac",
                "train/kl_loss": "kl_loss",
            },
        ),
        "Reverse KL to the teacher": lambda axes: _lines(
            axes, steps, {"train/opd_reverse_kl": "reverse KL"}
        ),
        "Entropy and gradient norm": lambda axes: _lines(
            axes, steps, {"train/entropy_loss": "entropy", "train/grad_norm": "grad_norm"}
        ),
        "Response length (tokens)": lambda axes: _lines(
            axes, steps, {"rollout/response_len/mean": "mean", "rollout/response_len/max": "max"}
        ),
        "Truncated, failed and useless (shares)": lambda axes: _lines(
            axes,
            steps,
            {
                "rollout/truncated_ratio": "truncated",
                "rollout/failed_ratio": "failed",
                "rollout/zero_std/ratio": "prompts with equal rewards",
            },
        ),
        "Policy lag (steps)": lambda axes: _lines(axes, steps, {"rollout/policy_lag": "lag"}),
        "Train against rollout log-probs (difference)": lambda axes: _lines(
            axes,
            steps,
            {
                "train/train_rollout_logprob_abs_diff_max": "largest",
                "train/train_rollout_logprob_abs_diff": "mean",
                "train/train_rollout_logprob_abs_diff_on_policy": "mean, sampled by the same "
                "weights",
            },
            log=True,
        ),
        "Where a step's time goes (s)": lambda axes: _times(axes, steps),
        "Tokens per second": lambda axes: _lines(
            axes, steps, {"perf/tokens_per_second": "tokens/s"}
        ),
    }
    drawn = {title: _svg(draw) for title, draw in plots.items()}
    figures = "".join(
        f"<figure>{svg}<figcaption>{html.escape(title)}</figcaption></figure>"
        for title, svg in drawn.items()
        if svg
    )
    timeline = _svg(lambda axes: _timeline(axes, directory), size=(11.5, 2.6))
    _png(
        lambda axes: _headline(axes, steps, evaluations),
        directory / f"{name.lower().replace(' ', '_')}.png",
    )
    path = directory / "report.html"
    summary = _summary(directory) + _warnings(steps)
    path.write_text(_page(title, summary, figures, timeline, _samples(directory)))
    return path


def _headline(axes: Any, steps: Records, evaluations: list[tuple[int, float]]) -> None:
    """The run's number. Rewards of an evaluation share its axis, if it is a reward too."""
    name, course = headline(steps.values())
    judged = name == "reward"
    axes.plot(
        list(steps)[-len(course) :],
        course,
        color="#90a4ae",
        label="training samples" if judged else name,
    )
    axes.set_xlabel("step")
    axes.set_ylabel(name)
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    lines = axes.get_lines()
    if evaluations:
        evaluation_axes = axes if judged else axes.twinx()
        lines += evaluation_axes.plot(
            *zip(*evaluations, strict=True),
            color="#2e7d32",
            marker="o",
            label="evaluation (held out)",
        )
        evaluation_axes.set_ylim(bottom=min(0.0, evaluation_axes.get_ylim()[0]))
        if not judged:
            evaluation_axes.set_ylabel("reward")
    axes.legend(handles=lines, frameon=False, loc="best" if judged else "center right")


def _lines(axes: Any, steps: Records, names: dict[str, str], *, log: bool = False) -> None:
    for name, label in names.items():
        points = [(step, record[name]) for step, record in steps.items() if name in record]
        if points:
            axes.plot(*zip(*points, strict=True), label=label)
    if log:
        axes.set_yscale("log")
    axes.set_xlabel("step")
    if axes.has_data():
        axes.legend(frameon=False)


def _times(axes: Any, steps: Records) -> None:
    parts = {
        "perf/train_wait_time": "waiting for samples",
        "perf/actor_train_time": "training",
        "perf/update_weights_time": "weights to engines",
        "perf/data_preprocess_time": "reading the batch",
    }
    rows = [[record.get(name, 0.0) for record in steps.values()] for name in parts]
    axes.stackplot(list(steps), *rows, labels=list(parts.values()))
    totals = sorted(sum(column) for column in zip(*rows, strict=True))
    if any(
        totals
    ):  # the first step waits for the engines to start: do not let it flatten the others
        axes.set_ylim(0, 1.5 * totals[int(0.95 * (len(totals) - 1))] or None)
    axes.set_xlabel("step")
    axes.set_ylabel("seconds")
    axes.legend(frameon=False, fontsize="small")


def _timeline(axes: Any, directory: Path) -> None:
    """A bar for each role, coloured by what it did."""
    samples = list(run_directory.records(directory / run_directory.TIMELINE))
    names = sorted({name for sample in samples for name in sample["states"]}, reverse=True)
    start = samples[0]["time"] if samples else 0.0
    used: dict[str, Any] = {}
    for row, name in enumerate(names):
        for state, begin, end in spans(samples, name):
            bar = axes.barh(
                row, end - begin, left=begin - start, height=0.7, color=COLORS.get(state, "#e0e0e0")
            )
            used.setdefault(state, bar)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("seconds")
    if used:
        place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0}
        slim: dict[str, Any] = {"fontsize": "small", "handlelength": 1.2, "columnspacing": 1.2}
        axes.legend(used.values(), used.keys(), frameon=False, ncols=len(used), **place, **slim)


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


def _figure(draw: Callable[[Any], None], size: tuple[float, float]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    draw(axes)
    return figure


def _svg(draw: Callable[[Any], None], size: tuple[float, float] = (5.6, 3.0)) -> str:
    """Empty: there is nothing to draw."""
    figure, text = _figure(draw, size), io.StringIO()
    if not figure.axes[0].has_data():
        return ""
    figure.savefig(text, format="svg")
    return text.getvalue()[text.getvalue().index("<svg") :]


def _png(draw: Callable[[Any], None], path: Path) -> None:
    _figure(draw, (6.4, 3.6)).savefig(path, dpi=120)


def _summary(directory: Path) -> str:
    path = directory / run_directory.SUMMARY
    values = json.loads(path.read_text()) if path.exists() else {}
    cells = "".join(
        f"<div><dt>{html.escape(k)}</dt><dd>{html.escape(_shown(v))}</dd></div>"
        for k, v in values.items()
    )
    return f"<dl>{cells}</dl>"


def _warnings(steps: Records) -> str:
    """Signs of sickness, each kind once."""
    entries = [
        f"<li>step {each.step}: {html.escape(each.text)}</li>" for each in findings(steps.values())
    ]
    return f"<h2>Warnings</h2><ul>{''.join(entries)}</ul>" if entries else ""


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _samples(directory: Path, rows: int = 12) -> str:
    """Responses of the newest evaluation, else of the last step."""
    files = sorted((directory / "samples").glob("eval_*.jsonl")) or sorted(
        (directory / "samples").glob("*.jsonl")
    )
    chosen = list(run_directory.records(files[-1]))[:rows] if files else []
    columns = [
        c
        for c in ("prompt", "response", "label", "reward")
        if any(r.get(c) is not None for r in chosen)
    ]
    head = "".join(f"<th>{column}</th>" for column in columns)
    cells = "".join(
        "<tr>" + "".join(f"<td>{html.escape(_shown(r.get(c)))}</td>" for c in columns) + "</tr>"
        for r in chosen
    )
    return f"<table><tr>{head}</tr>{cells}</table>"


def _page(title: str, summary: str, figures: str, timeline: str, samples: str) -> str:
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; color: #263238; max-width: 1180px;
  margin: 2rem auto; padding: 0 1rem }}
figure {{ display: inline-block; margin: 0 0 1rem; width: 49%; vertical-align: top }}
figure svg, .wide svg {{ width: 100%; height: auto }}
figcaption {{ text-align: center; font-weight: 600 }}
dl {{ display: grid; grid-template-columns: repeat(6, 1fr); gap: .6rem 1rem; margin: 0 0 1.5rem }}
dt {{ color: #607d8b; font-size: .85em }}
dd {{ margin: 0; font: 600 1.05em ui-monospace, monospace }}
table {{ border-collapse: collapse; margin-bottom: 1rem }}
th, td {{ text-align: left; padding: .15rem .8rem .15rem 0;
  border-bottom: 1px solid #eceff1; font-weight: normal }}
th {{ color: #607d8b }} td {{ font-family: ui-monospace, monospace }}
</style></head><body>
<h1>{html.escape(title)}</h1>
{summary}
<div>{figures}</div>
<h2>What each role did</h2><div class="wide">{timeline}</div>
<h2>Responses</h2>{samples}
</body></html>
"""
