"""Builders for dashboard panels.

They use Grafana's typed builders (grafana-foundation-sdk), so that mypy finds fields that Grafana
does not have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grafana_foundation_sdk.builders import common as build
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import prometheus, stat, statetimeline, table, timeseries
from grafana_foundation_sdk.models import common, units
from grafana_foundation_sdk.models.dashboard import (
    DataSourceRef,
    DataTransformerConfig,
    DynamicConfigValue,
    Threshold,
    ThresholdsMode,
    ValueMap,
    ValueMapping,
    ValueMappingResult,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
# Selects all jobs of the chosen namespaces.
JOBS = 'namespace=~"$namespace"'
# Selects the chosen jobs.
JOB = 'namespace=~"$namespace",job=~"$job"'
# Selects the chosen pool.
POOL = 'namespace=~"$namespace",pool=~"$pool"'
RATE = "$__rate_interval"
SECONDS, BYTES, BYTES_PER_SECOND, COUNT, SHARE, NUMBER, PER_SECOND = (
    units.Seconds,
    units.BytesIEC,
    units.BytesPerSecondIEC,
    units.Short,
    units.PercentUnit,
    units.NoUnit,
    "cps",
)
# (value, colour) in ascending order; a colour applies from its value on, the first one from None.
Limits = Sequence[tuple[float | None, str]]
Panel = timeseries.Panel | stat.Panel | table.Panel | statetimeline.Panel


def none() -> Limits:
    """Return limits for a panel without bad values."""
    return ((None, "green"),)


def above(warning: float, critical: float | None = None) -> Limits:
    """Return limits for a panel in which high values are bad."""
    steps: list[tuple[float | None, str]] = [(None, "green"), (warning, "orange")]
    return steps if critical is None else [*steps, (critical, "red")]


def below(critical: float, warning: float | None = None) -> Limits:
    """Return limits for a panel in which low values are bad."""
    if warning is None:
        return ((None, "red"), (critical, "green"))
    return ((None, "red"), (critical, "orange"), (warning, "green"))


def lines(
    title: str,
    unit: str,
    limits: Limits,
    description: str,
    series: Mapping[str, str],
    *,
    width: int = 8,
    stacked: bool = False,
    highest: float | None = None,
) -> timeseries.Panel:
    """Draw series as lines over time.

    Parameters
    ----------
    title, unit, limits, description
        Head of the panel.
    series
        PromQL by legend. A legend may contain labels, such as `{{phase}}`.
    width
        Columns, of 24.
    stacked
        Stack the series.
    highest
        Upper end of the axis, if values are bounded.

    """
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .datasource(SOURCE)
        .unit(unit)
        .thresholds(_steps(limits))
        .span(width)
        .height(8)
        .line_width(1)
        .fill_opacity(60 if stacked else 8)
        .show_points(common.VisibilityMode.NEVER)
        .legend(_legend())
        .tooltip(build.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI))
    )
    if stacked:
        panel.stacking(build.StackingConfig().mode(common.StackingMode.NORMAL))
    if highest is not None:
        panel.min(0).max(highest)
    if len(limits) > 1:
        style = common.GraphTresholdsStyleMode.DASHED
        panel.thresholds_style(build.GraphThresholdsStyleConfig().mode(style))
    for position, (legend, expr) in enumerate(series.items()):
        panel.with_target(_target(expr, legend, position))
    return panel


def number(
    title: str,
    unit: str,
    limits: Limits,
    description: str,
    series: Mapping[str, str],
    *,
    width: int = 4,
    height: int = 4,
) -> stat.Panel:
    """Show the latest value of a single series, with its history in the background."""
    [(legend, expr)] = series.items()
    return (
        stat.Panel()
        .title(title)
        .description(description)
        .datasource(SOURCE)
        .unit(unit)
        .thresholds(_steps(limits))
        .span(width)
        .height(height)
        .reduce_options(build.ReduceDataOptions().calcs(["lastNotNull"]))
        .graph_mode(common.BigValueGraphMode.AREA)
        .color_mode(common.BigValueColorMode.VALUE)
        .with_target(_target(expr, legend))
    )


def states(
    title: str,
    description: str,
    names: Mapping[int, tuple[str, str]],
    series: Mapping[str, str],
    *,
    width: int = 24,
) -> statetimeline.Panel:
    """Show a bar per series, coloured by state. `names` maps a code to (word, colour)."""
    [(legend, expr)] = series.items()
    panel = statetimeline.Panel().title(title).description(description).datasource(SOURCE)
    return (
        panel.unit(NUMBER)
        .mappings([_mapping(names)])
        .thresholds(_steps([(None if code == 0 else code, names[code][1]) for code in names]))
        .span(width)
        .height(8)
        .merge_values(True)
        .show_value(common.VisibilityMode.NEVER)
        .fill_opacity(80)
        .legend(_legend())
        .with_target(_target(expr, legend))
    )


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table. `names` maps a code to (word, colour)."""

    title: str
    expr: str
    unit: str
    limits: Limits
    names: Mapping[int, tuple[str, str]] | None = None


def grid(
    title: str, description: str, keys: Mapping[str, str], columns: Sequence[Column], link: str
) -> table.Panel:
    """Show the latest values in a table, one row per combination of the labels in `keys`.

    Parameters
    ----------
    title, description
        Head of the panel.
    keys
        Heading by label.
    columns
        Further columns.
    link
        URL of the last key, with Grafana's `${__data.fields...}`.

    """
    panel = table.Panel().title(title).description(description).datasource(SOURCE)
    panel.unit(NUMBER).thresholds(_steps(none())).span(24).height(9)
    for at, column in enumerate(columns):
        target = _target(column.expr, column.title, at)
        panel.with_target(target.instant().format(PromQueryFormat.TABLE))
        panel.override_by_name(column.title, _column(column))
    last = list(keys.values())[-1]
    url = [{"title": "Open the job", "url": link}]
    panel.override_by_name(last, [DynamicConfigValue(id_val="links", value=url)])
    values = {f"Value #{_letter(at)}": column.title for at, column in enumerate(columns)}
    order = [*keys, *values]
    panel.with_transformation(DataTransformerConfig(id_val="merge", options={}))
    return panel.with_transformation(
        DataTransformerConfig(
            id_val="organize",
            options={
                "excludeByName": {"Time": True},
                "indexByName": {name: at for at, name in enumerate(order)},
                "renameByName": dict(keys) | values,
            },
        )
    )


def _column(column: Column) -> list[DynamicConfigValue]:
    properties: list[tuple[str, object]] = [
        ("unit", column.unit),
        ("thresholds", _steps(column.limits).build()),
        ("custom.cellOptions", {"type": "color-text"}),
    ]
    if column.names:
        properties.append(("mappings", [_mapping(column.names)]))
    return [DynamicConfigValue(id_val=name, value=value) for name, value in properties]


def _mapping(names: Mapping[int, tuple[str, str]]) -> ValueMapping:
    words = {
        str(code): ValueMappingResult(text=word, color=color, index=code)
        for code, (word, color) in names.items()
    }
    return ValueMap(options=words)


def _steps(limits: Limits) -> builders.ThresholdsConfig:
    steps = [Threshold(value=value, color=color) for value, color in limits]
    return builders.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)


def _legend() -> build.VizLegendOptions:
    return (
        build.VizLegendOptions()
        .display_mode(common.LegendDisplayMode.LIST)
        .placement(common.LegendPlacement.BOTTOM)
        .show_legend(True)
    )


def _target(expr: str, legend: str, position: int = 0) -> prometheus.Dataquery:
    return (
        prometheus.Dataquery()
        .expr(expr)
        .legend_format(legend)
        .ref_id(_letter(position))
        .datasource(SOURCE)
    )


def _letter(at: int) -> str:
    return "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[at]
