"""Bar charts of the report: what each role did over time, and where device time went."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice.telemetry import run_directory
from sluice.telemetry.goodput import IN_TAILS, Goodput

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


_TRAINER = "trainer-0"
# Order of the trainer's phases within a step.
_PHASES = (
    "starting",
    "publishing",
    "saving",
    "evaluating",
    "exporting",
    "waiting",
    "taking_turn",
    "training",
)
_MOST_STEPS = 200
# Seconds between two samples, with a margin.
_SAMPLING = 1.5
# Width of a chart, in the units of `Bar`.
WIDTH = 1000

# (state, begin, end); times in seconds since 1970
Span = tuple[str, float, float]


@dataclass(frozen=True, slots=True)
class Bar:
    """Part of a row, with `left` and `width` in chart units and a text that is shown on hover."""

    color: str
    left: float
    width: float
    text: str


@dataclass(frozen=True, slots=True)
class Chart:
    """Rows of bars with a legend.

    Attributes
    ----------
    rows
        Bars by name of the row.
    legend
        Color by label.
    ticks
        Labels of the axis, evenly spaced.

    """

    rows: dict[str, list[Bar]]
    legend: dict[str, str]
    ticks: list[str]


def timeline(directory: Path) -> Chart | None:
    """Return one row per role, coloured by what it did; None if the run recorded no states."""
    samples = list(run_directory.records(directory / run_directory.TIMELINE))
    names = {name for sample in samples for name in sample["states"]}
    rows = {name: spans(samples, name) for name in sorted(names)}
    if exact := trainer_spans(_trainer_records(directory)):
        rows[_TRAINER] = completed(exact, rows.get(_TRAINER, []))
    moments = [at for row in rows.values() for _, begin, end in row for at in (begin, end)]
    if not moments:
        return None
    start, total = min(moments), max(max(moments) - min(moments), 1e-9)
    scale = WIDTH / total
    states = {state for row in rows.values() for state, *_ in row}
    return Chart(
        {
            name: [
                Bar(
                    STATES.get(state, _OTHER),
                    (begin - start) * scale,
                    (end - begin) * scale,
                    f"{_label(state)}: {end - begin:.3g} s, from {_clock(begin - start)} on",
                )
                for state, begin, end in row
            ]
            for name, row in sorted(rows.items())
        },
        {_label(state): color for state, color in STATES.items() if state in states},
        [_clock(total * quarter / 4) for quarter in range(5)],
    )


def shares(goodput: Goodput) -> Chart | None:
    """Return one row with the shares of all device time; None if no device has worked."""
    total, parts, left = goodput.total, goodput.parts(), 0.0
    bars, legend = list[Bar](), dict[str, str]()
    for category, color in CATEGORIES.items():
        share = parts.get(category, 0.0) / total if total else 0.0
        if share < 0.005:
            continue
        name = f"{_label(category)} {share:.0%}"
        text = f"{name}: {parts[category]:.3g} device seconds"
        bars.append(Bar(color, left * WIDTH, share * WIDTH, text))
        legend[name] = color
        left += share
    return Chart({"": bars}, legend, ["0%", "25%", "50%", "75%", "100%"]) if bars else None


def trainer_spans(records: Sequence[dict[str, Any]]) -> list[Span]:
    """Return what the trainer did, from the seconds by phase that it records itself.

    The records cover all of its time. The samples, one a second, miss short phases and both ends.
    Phases within a step are drawn in their usual order. Steps of a long run are joined.
    """
    together = -(-len(records) // _MOST_STEPS) or 1
    row: list[Span] = []
    for _, of_attempt in itertools.groupby(records, lambda record: record.get("attempt")):
        attempt = list(of_attempt)
        for first in range(0, len(attempt), together):
            part = attempt[first : first + together]
            seconds = Counter[str]()
            for record in part:
                seconds.update(record["phases"])
            at = part[-1]["time"] - seconds.total()
            for state in (*_PHASES, *sorted(seconds.keys() - set(_PHASES))):
                begin = (
                    max(at, row[-1][2]) if row else at
                )  # the records' clocks are read moments apart
                at += seconds[state]
                if at > begin:
                    row.append((state, begin, at))
    return row


def completed(exact: Sequence[Span], sampled: Iterable[Span]) -> list[Span]:
    """Fill gaps between the exact spans with samples, as for steps that a crash interrupted."""
    ends = [float("-inf"), *(end for _, _, end in exact)]
    begins = [*(begin for _, begin, _ in exact), float("inf")]
    gaps = [gap for gap in zip(ends, begins, strict=True) if gap[1] - gap[0] > _SAMPLING]
    filling = [
        (state, max(begin, left), min(end, right))
        for state, begin, end in sampled
        for left, right in gaps
    ]
    return sorted(
        [*exact, *(span for span in filling if span[2] > span[1])], key=lambda span: span[1]
    )


def _trainer_records(directory: Path) -> list[dict[str, Any]]:
    """Return records of seconds by phase, of all steps and the time around them, in order."""
    return sorted(_with_phases(directory), key=lambda record: float(record["time"]))


def _with_phases(directory: Path) -> Iterator[dict[str, Any]]:
    for record in run_directory.records(directory / run_directory.SECONDS):
        yield record | {"phases": record["seconds"]}
    prefix = "perf/seconds/"
    for record in run_directory.records(directory / run_directory.METRICS):
        phases = {n.removeprefix(prefix): v for n, v in record.items() if n.startswith(prefix)}
        if phases and "time" in record:
            yield record | {"phases": phases}


def _label(name: str) -> str:
    return name.replace("_", " ")


def _clock(seconds: float) -> str:
    """Format a duration as `28 s`, `12:05` or `3:10:00`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def spans(samples: list[dict[str, Any]], name: str) -> list[Span]:
    """Return the spans of one member from samples of all members' states."""
    stretches: list[Span] = []
    for earlier, later in itertools.pairwise(samples):
        state = earlier["states"].get(name)
        if state is None:
            continue
        if stretches and stretches[-1][0] == state and stretches[-1][2] == earlier["time"]:
            stretches[-1] = (state, stretches[-1][1], later["time"])
        else:
            stretches.append((state, earlier["time"], later["time"]))
    return stretches
