"""The names under which a sample's metadata hold its turns."""

from __future__ import annotations

TURNS, BRANCH_TURNS = "turns", "branch_turns"
"""[{"by": "model" | "environment", "length": tokens, "finish": ..., "stop": ...}, ...]; and a list
of such lists, one for each of the sample's branches. Turns of a tree have a number, `turn`, which
is the same in all branches that share one."""
MODEL, ENVIRONMENT = "model", "environment"
