"""The names under which a sample's metadata hold its turns."""

from __future__ import annotations

TURNS = "turns"
"""[{"by": "model" | "environment", "length": tokens, "finish": ..., "stop": ...}, ...]"""
MODEL, ENVIRONMENT = "model", "environment"
