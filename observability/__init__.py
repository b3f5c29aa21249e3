"""Dashboards, recording rules and alerts as code; `make observability` writes the chart's files."""
