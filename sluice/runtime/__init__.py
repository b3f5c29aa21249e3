"""Helpers of a process: its environment, limits, user code, errors in one line."""
