"""report.html: a run on one page that needs no server. Plots are inline SVG."""

from sluice.telemetry.report.page import write_report

__all__ = ["write_report"]
