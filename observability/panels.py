"""The words that dashboards are written in: panels with their queries, units and limits.

Built with Grafana's own typed builders (grafana-foundation-sdk), so that a field that Grafana does
not know is an error of types.
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
# Selector of all jobs of the chosen namespaces.
JOBS = 'namespace=~"$namespace"'
# Selector of the chosen jobs.
JOB = 'namespace=~"$namespace",job=~"$job"'
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
# (value from which a colour holds, colour), from below; None: from the beginning.
Limits = Sequence[tuple[float | None, str]]
Panel = timeseries.Panel | stat.Panel | table.Panel | statetimeline.Panel


def none() -> Limits:
    """No value of this panel is bad by itself."""
    return ((None, "green"),)


def above(warning: float, critical: float | None = None) -> Limits:
    """More is worse."""
    steps: list[tuple[float | None, str]] = [(None, "green"), (warning, "orange")]
    return steps if critical is None else [*steps, (critical, "red")]


def below(critical: float, warning: float | None = None) -> Limits:
    """Less is worse."""
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
    """Curves over time. highest: the end of the axis, where values have a bound."""
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
    """The newest value, large, with its course behind it."""
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
    """A bar for each series, coloured by its state. names: code -> (word, colour)."""
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
    """One column of a table. names: words and colours for codes. link: where a click leads."""

    title: str
    expr: str
    unit: str
    limits: Limits
    names: Mapping[int, tuple[str, str]] | None = None


def grid(
    title: str, description: str, keys: Mapping[str, str], columns: Sequence[Column], link: str
) -> table.Panel:
    """A table of the newest values: a row for each combination of the labels `keys`.

    keys: label -> heading. link: URL behind the last key, with Grafana's `${__data.fields...}`.
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
