"""Metrics, records and profiles of a run."""
