"""Ranks, devices and process groups."""
